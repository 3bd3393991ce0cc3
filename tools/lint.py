"""Runs every linter and check of `make lint`, all of them even if one fails.

python -m tools.lint                    everything
python -m tools.lint --without-spark    what needs no Spark, in seconds (pre-commit)
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from tools.findings import ROOT

PYTHON = [sys.executable, "-m"]
CHECKS = {
    "ruff check": [*PYTHON, "ruff", "check", "."],
    "ruff format": [*PYTHON, "ruff", "format", "--check", "."],
    "mypy": [*PYTHON, "mypy"],
    "imports": [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
    "yamllint": [*PYTHON, "yamllint", "--strict", "."],
    "documented": [*PYTHON, "tools.check_documented"],
    "architecture": [*PYTHON, "tools.check_project"],
    "pattern table": [*PYTHON, "tools.pattern_table", "--check"],
    "hidden macros": [*PYTHON, "tools.hidden_macros", "--check"],
}
CHECKS_WITH_SPARK = {
    "sqlfluff": [*PYTHON, "sqlfluff", "lint", "models", "snapshots", "tests/dbt"],
    "rendered macros": [*PYTHON, "tools.lint_rendered_macros"],
}


def main() -> int:
    """Run the checks, print a line for each and the whole output of the failed ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--without-spark", action="store_true", help="leave out what starts Spark")
    checks = CHECKS if parser.parse_args().without_spark else CHECKS | CHECKS_WITH_SPARK
    failed = [name for name, command in checks.items() if not passes(name, command)]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def passes(name: str, command: list[str]) -> bool:
    """Run one check from the repository's root and return its result."""
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    verdict = "ok" if done.returncode == 0 else f"FAILED, exit code {done.returncode}"
    print(f"{name:16} {verdict} ({time.monotonic() - start:.1f} s)", flush=True)
    if done.returncode:
        print(done.stdout, flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
