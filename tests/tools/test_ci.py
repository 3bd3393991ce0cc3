"""CI's order, its rotation, its time limits, and what it does with the commands' exit codes."""

import datetime as dt
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.suite import REST
from tools import ci, durations
from tools.durations import Record, Unit
from tools.findings import ROOT

DAY = dt.date(2026, 11, 29)
EVERY: list[Unit] = [(f"tests/test_{n:02}.py", tier) for n in range(28) for tier in ("test", "rest")]
SHARE = math.ceil(len(EVERY) / ci.RUNS)


def recorded(days: dict[str, str] | None = None) -> Record:
    """Return a record in which a module's number is its seconds, and all ran on one day unless given otherwise."""
    return {unit: (float(unit[0][11:13]), (days or {}).get(unit[0][11:13], "2026-11-20")) for unit in EVERY}


def test_affected_then_due_then_the_longest_of_make_test_then_the_oldest_of_the_rest() -> None:
    record = recorded({"03": "2026-11-01", "04": "2026-11-02", "20": "2026-11-19"})
    found = ci.order(EVERY, record, frozenset({"tests/test_05.py", "tests/test_07.py"}), DAY)
    short = [(module[11:13], tier) for module, tier in found]
    assert short[:8] == [
        ("07", "test"), ("05", "test"), ("07", "rest"), ("05", "rest"),
        ("04", "test"), ("03", "test"), ("04", "rest"), ("03", "rest"),
    ]  # fmt: skip
    assert short[8:12] == [("27", "test"), ("26", "test"), ("25", "test"), ("24", "test")]
    rest = short[8 + 24 :]
    assert {tier for _, tier in rest} == {"rest"}
    assert rest[0] == ("20", "rest")
    assert sorted(found) == sorted(EVERY)


def test_a_unit_without_a_record_is_due() -> None:
    record = recorded()
    del record["tests/test_09.py", "rest"]
    assert ("tests/test_09.py", "rest") in ci.order(EVERY, record, frozenset(), DAY)[:SHARE]


def test_seconds_without_a_day_give_an_order_and_no_turn() -> None:
    record = recorded() | {("tests/test_09.py", "test"): (500.0, ""), ("tests/test_11.py", "rest"): (1.0, "")}
    found = ci.order(EVERY, record, frozenset(), DAY)
    assert found.index(("tests/test_09.py", "test")) == 0, "due, and the longest"
    assert ("tests/test_11.py", "rest") in found[:SHARE], "due, as if it had never run"
    ran = {("tests/test_11.py", "rest"): (1.0, "2026-11-20")}
    assert durations.merged(record, ran)["tests/test_11.py", "rest"] == (1.0, "2026-11-20"), (
        "a day is newer than none"
    )


def test_the_record_knows_nearly_all_modules_of_make_test() -> None:
    record = durations.read(ROOT / durations.RECORD)
    known = [unit in record for unit in ci.units() if unit[1] == "test"]
    assert sum(known) >= 0.8 * len(known)


def test_a_change_that_affects_most_takes_no_turn_of_others() -> None:
    record = recorded({"27": "2026-11-01"})
    most = frozenset(module for module, _ in EVERY[:-2])
    found = ci.order(EVERY, record, most, DAY)
    assert {("tests/test_27.py", "test"), ("tests/test_27.py", "rest")} <= set(found[:SHARE])


@pytest.mark.parametrize("has_cache", [True, False])
def test_in_fourteen_runs_that_have_time_for_little_every_unit_runs(has_cache: bool) -> None:
    record, ran = recorded(), set()
    for number in range(ci.RUNS):
        day = DAY + dt.timedelta(days=number)
        found = ci.order(EVERY, record, frozenset(), day)[:SHARE]
        ran |= set(found)
        if has_cache:
            record |= {unit: (1.0, day.isoformat()) for unit in found}
    assert ran == set(EVERY)


def test_pytest_runs_a_plan_outside_the_repository(tmp_path: Path) -> None:
    unit = ("tests/core/test_paths.py", "test")
    plan, ran = tmp_path / "plan.json", tmp_path / "durations.json"
    plan.write_text(json.dumps({"deadline": time.time() + 600, "units": [[*unit, ""]]}))
    assert ci.run([*ci.tests_of(plan, ran), "-n0"], 300) == 0
    assert list(durations.read(ran)) == [unit]


def test_units_are_found_by_marker_and_folder(tmp_path: Path) -> None:
    for name, text in {
        "test_a.py": "",
        "patterns/test_b.py": "@pytest.mark.kill\ndef test_b(): ...",
        "patterns/test_c.py": "pytestmark = [pytest.mark.kafka, pytest.mark.cluster]",
        "patterns/test_d.py": "@pytest.mark.kafka\ndef test_d(): ...",
        "lakehouse/test_e.py": "",
        "torture/writers.py": "",
    }.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text(text)
    assert sorted(ci.units(tmp_path)) == [
        ("tests/lakehouse/test_e.py", "rest"),
        ("tests/patterns/test_b.py", "rest"),
        ("tests/patterns/test_b.py", "test"),
        ("tests/patterns/test_c.py", "rest"),
        ("tests/patterns/test_d.py", "test"),
        ("tests/test_a.py", "test"),
    ]


def test_every_tier_s_marker_is_declared() -> None:
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert [marker for marker in REST if f'"{marker}: ' not in declared] == []


def test_a_command_that_takes_too_long_is_interrupted_and_failed(capfd: pytest.CaptureFixture[str]) -> None:
    waits = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('closing line')"
    assert ci.run([sys.executable, "-c", waits], 1.5) == 1
    assert "closing line" in capfd.readouterr().out
    assert ci.run([sys.executable, "-c", "raise SystemExit(5)"], 60) == 5


@pytest.mark.parametrize(
    ("codes", "code", "commands"),
    [
        ([0, 0, 0], 0, ["tools.lint", "tests.mutations.runner", "pytest"]),
        ([0, 0, 5], 0, ["tools.lint", "tests.mutations.runner", "pytest"]),
        ([0, 0, 1], 1, ["tools.lint", "tests.mutations.runner", "pytest"]),
        ([0, 1, 0], 1, ["tools.lint", "tests.mutations.runner", "pytest"]),
        ([1], 1, ["tools.lint"]),
    ],
)
def test_any_failure_fails_the_run_and_an_empty_plan_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: list[int], code: int, commands: list[str]
) -> None:
    called: list[Sequence[str]] = []
    # Newer than the repository's own record of the unit.
    unit = ("tests/test_job.py", "test")

    def run(command: Sequence[str], seconds: float) -> int:
        called.append(command)
        if "pytest" in command:
            files = dict(option.split("=") for option in command[3:])
            plan = json.loads(Path(files["--plan"]).read_text())
            assert time.time() < plan["deadline"] <= time.time() + ci.START_NOTHING_AFTER
            assert [*unit, "2098-12-31"] in plan["units"]
            ran = {unit: (3.0, "2099-01-01")}
            durations.write(Path(files["--record"]), ran, ROOT)
        return codes[len(called) - 1]

    state = tmp_path / "ci"
    durations.write(state / "durations.json", {unit: (2.0, "2098-12-31")}, ROOT)
    monkeypatch.setattr(ci, "CACHE", tmp_path)
    monkeypatch.setattr(ci, "change_of", lambda _: ci.Change(frozenset(), "affected: nothing"))
    monkeypatch.setattr(ci, "run", run)
    assert ci.main() == code
    assert [command[2] for command in called] == commands
    was_run = "pytest" in commands
    assert durations.read(state / "durations.json")[unit][1] == ("2099-01-01" if was_run else "2098-12-31")
    assert (state / "commit").is_file() == (code == 0)
