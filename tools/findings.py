"""The output of a check: one line for each finding, relative to the repository, and an exit code."""

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_FOLDERS = ("python_jobs", "services", "case_study")


def report(findings: Iterable[str]) -> int:
    """Print each finding on a line; return 1 if there is any, else 0."""
    found = list(findings)
    for line in found:
        print(line.replace(f"{ROOT}/", ""))
    return 1 if found else 0
