"""Prints the run's time at its end: by family (each has a share of the budget), by phase, and the slowest modules."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePosixPath

import pytest

SLOWEST = 20

_seconds: Counter[tuple[str, str]] = Counter()
"""Seconds by module and phase (setup, call, teardown); the first test's set-up includes the module's fixtures."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the duration of a set-up, call or tear-down."""
    _seconds[report.nodeid.split("::")[0], report.when] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the tables, unless no test was run."""
    families, phases, modules = totals(_seconds)
    for title, found in (
        ("seconds by family", families.most_common()),
        ("seconds by phase", phases.most_common()),
        (f"seconds by module, the slowest {SLOWEST}", modules.most_common(SLOWEST)),
    ):
        if found:
            terminalreporter.section(title)
        for name, seconds in found:
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")


def totals(seconds: Counter[tuple[str, str]]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Return the seconds by family, by phase and by module."""
    families: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for (module, phase), spent in seconds.items():
        families[family_of(module)] += spent
        phases[phase] += spent
        modules[module] += spent
    return families, phases, modules


def family_of(module: str) -> str:
    """Return `patterns/idempotency` of `tests/patterns/idempotency/test_merger.py`, and a top module's name."""
    parts = PurePosixPath(module).parts
    return "/".join(parts[1:-1][:2]) or parts[-1]
