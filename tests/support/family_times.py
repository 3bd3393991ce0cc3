"""Prints the total time of each family at the end of the run: each has a share of the suite's budget."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePosixPath

import pytest

_seconds: Counter[str] = Counter()


def _family(nodeid: str) -> str:
    parts = PurePosixPath(nodeid.split("::")[0]).parts
    return "/".join(parts[1:3]) if len(parts) > 2 else parts[-1]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the duration of a set-up, call or tear-down to its family."""
    _seconds[_family(report.nodeid)] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write one line a family."""
    terminalreporter.section("seconds per family")
    for family, seconds in _seconds.most_common():
        terminalreporter.write_line(f"{seconds:8.1f}  {family}")
