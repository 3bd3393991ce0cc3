"""Chooses the tests of the suite, their order and their deadline: `--tier`, `--plan` and `--record`.

`pytest` runs everything, and `pytest path::test` runs the named tests. `--tier test` is `make test`. It leaves out the
tier `rest`: tests that kill processes, start clusters, replay the case study or sample the torture.
The modules that took longest (`tests/durations.json`) start first, and modules without a record before them.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tools import durations
from tools.catalog import patterns
from tools.durations import Record, Unit

REST = frozenset({"kill", "cluster", "end_to_end", "torture"})
FOLDERS = {"tests/torture/": "torture", "tests/lakehouse/": "end_to_end"}
"""The marker of all tests of a folder."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this module."""
    group = parser.getgroup("suite")
    group.addoption("--tier", choices=durations.TIERS, help="run the tests of this tier only")
    group.addoption(
        "--plan", type=Path, help="run the units of this file in its order (tools/ci.py writes it)"
    )
    group.addoption("--record", type=Path, help="write the seconds of whole modules to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin that chooses and orders the tests."""
    if config.getoption("record") and any("::" in argument for argument in config.args):
        raise pytest.UsageError(
            "--record takes whole modules, got a single test: leave out its name after '::'."
        )
    config.pluginmanager.register(Suite(config), "suite")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute the units of a plan, which may hold a module twice: its tests of each tier."""
    return _UnitScheduling(config, log) if config.getoption("plan") else None


class Suite:
    """Chooses and orders the tests of one process; the controller of several also collects their times."""

    def __init__(self, config: pytest.Config) -> None:
        """Read the plan and the record."""
        self._config = config
        self._is_worker = hasattr(config, "workerinput")
        plan = config.getoption("plan")
        self._plan = json.loads(plan.read_text(encoding="utf-8")) if plan else None
        self._record = config.getoption("record")
        self._factor = durations.machine_factor() if self._record and not self._is_worker else 1.0
        self._seconds: Counter[Unit] = Counter()
        self._not_run: set[Unit] = set()
        self._skipped: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mark the tests of whole folders, leave out those of the other tier, and begin with the longest."""
        for item in items:
            for folder, marker in FOLDERS.items():
                if item.nodeid.startswith(folder):
                    item.add_marker(marker)
            item.user_properties.append(("tier", tier_of(item)))
        if self._plan:
            order = {(module, tier): place for place, (module, tier, _) in enumerate(self._plan["units"])}
            chosen = [item for item in items if unit_of(item) in order]
            chosen.sort(key=lambda item: order[unit_of(item)])
        else:
            tier = self._config.getoption("tier")
            chosen = [item for item in items if tier in (None, tier_of(item))]
            record = durations.read(self._config.rootpath / durations.RECORD)
            chosen.sort(key=longest_first({unit_of(item) for item in chosen}, record))
        kept = set(chosen)
        self._config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Start nothing after the plan's deadline."""
        if self._plan and time.time() > self._plan["deadline"]:
            self._not_run.add(unit_of(item))
            return True
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase's time to its unit; remember what was skipped."""
        tier = dict(report.user_properties).get("tier")
        if isinstance(tier, str):
            self._seconds[report.nodeid.split("::")[0], tier] += report.duration
        if report.skipped:
            self._skipped.add(report.nodeid.split("[")[0])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Collect the tests that a worker has not run."""
        self._not_run |= {tuple(unit) for unit in getattr(node, "workeroutput", {}).get("not_run", [])}

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the record; a skipped test that the catalog names as proof makes the run fail."""
        if self._is_worker:
            self._config.workeroutput["not_run"] = sorted(self._not_run)  # type: ignore[attr-defined]
            return
        if self.missing_proofs() and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._record and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            factor = (self._factor + durations.machine_factor()) / 2
            ran = {
                unit: (seconds / factor, durations.today())
                for unit, seconds in self._seconds.items()
                if unit not in self._not_run
            }
            known = durations.read(self._record)
            durations.write(self._record, durations.merged(known, ran), self._config.rootpath)

    def missing_proofs(self) -> list[str]:
        """Return the skipped tests that a behaviour of the catalog names."""
        if not self._skipped:
            return []
        named = {behaviour.test for pattern in patterns() for behaviour in pattern.behaviours}
        return sorted(self._skipped & {test.split("[")[0] for test in named if test})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the skipped proofs, and the units that were not run with the day of their last run."""
        missing = self.missing_proofs()
        if missing:
            terminalreporter.section("skipped, although the catalog names them as proof")
            for test in missing:
                terminalreporter.write_line(test)
        if self._not_run and self._plan:
            terminalreporter.section("not run, or not to the end, for lack of time")
            for module, tier, last in self._plan["units"]:
                if (module, tier) in self._not_run:
                    terminalreporter.write_line(f"{last or 'unknown':10}  {module} ({tier})")


class _UnitScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a worker the tests of one module or class that follow each other in the plan's order."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._scopes: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        if not self._scopes and self.collection:
            runs, before = 0, ""
            for test in self.collection:
                scope = super()._split_scope(test)
                runs += scope != before
                before = scope
                self._scopes[test] = f"{scope}#{runs}"
        return self._scopes[nodeid]


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a test, by its markers."""
    return "rest" if any(item.get_closest_marker(name) for name in REST) else "test"


def unit_of(item: pytest.Item) -> Unit:
    """Return the module and the tier of a test."""
    return item.nodeid.split("::")[0], tier_of(item)


def longest_first(units: Iterable[Unit], record: Record) -> Callable[[pytest.Item], tuple[float, str]]:
    """Return the sort key of a test: modules without a record first, then those with the most seconds."""
    seconds: Counter[str] = Counter()
    for module, tier in units:
        seconds[module] += record.get((module, tier), (float("inf"), ""))[0]

    def key(item: pytest.Item) -> tuple[float, str]:
        module = item.nodeid.split("::")[0]
        return -seconds[module], module

    return key
