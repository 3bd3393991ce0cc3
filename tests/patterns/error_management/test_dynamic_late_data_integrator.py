"""Dynamic Late Data Integrator: exactly the dates that changed, each by one run, never forgotten."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from python_jobs.error_management import dynamic_late_data_integrator as integrator
from python_jobs.error_management import late_partitions
from python_jobs.error_management.dynamic_late_data_integrator import Parameters, choose, run
from python_jobs.error_management.late_partitions import DateProcessor
from python_jobs.error_management.late_state import DateState, State, StateTable
from python_jobs.shared.core.failures import JobFailed, NotReady, WrongUse
from python_jobs.shared.core.intervals import parse_time
from python_jobs.shared.spark.job import run_job
from tests.patterns.error_management.late_data import QUERY, VisitsByDate
from tests.support.snippets import snippet

NOW = "2024-12-15T06:00:00"


@dataclass
class Tables(VisitsByDate):
    """The tables with the integrator's state."""

    @property
    def state(self) -> StateTable:
        return StateTable(self.spark, str(self.folder / "state"))

    def parameters(self, date: str, **others: Any) -> dict[str, Any]:
        return super().parameters(date, state=self.state.table, now=NOW, depends_on_past=False) | others

    def integrate(self, date: str, **others: Any) -> dict[str, Any]:
        return run(self.spark, Parameters(**self.parameters(date, **others)))

    def plan(self, date: str, run_id: str, **others: Any) -> list[str]:
        late = self.integrate(date, action="plan", run_id=run_id, **others)["late"]
        assert isinstance(late, list)
        return late


@pytest.fixture(scope="module")
def processed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Return tables whose dates 12-10, 12-11 and 12-12 are processed, in two runs."""
    tables = Tables(spark, tmp_path_factory.mktemp("processed"))
    tables.append("2024-12-10", "2024-12-11")
    tables.append("2024-12-12")
    first = tables.integrate("2024-12-11", run_id="daily_11")
    # 12-10 is before the first run's date and was never processed: registered from the log, and late.
    assert first["late"] == ["2024-12-10"]
    assert tables.integrate("2024-12-12")["started"] == ["2024-12-12"]
    return tables


@pytest.fixture
def tables(processed: Tables, tmp_path: Path) -> Tables:
    """Return a copy of the processed tables for one test."""
    shutil.copytree(processed.folder, tmp_path / "copy")
    return Tables(processed.spark, tmp_path / "copy")


def test_very_late_data_is_found_and_the_next_run_has_nothing_to_do(tables: Tables, tmp_path: Path) -> None:
    tables.append("2024-09-21", "2024-12-11", "2024-12-11")
    report = tables.integrate("2024-12-12", run_id="again", manifest=str(tmp_path / "manifests"))
    assert report["late"] == ["2024-09-21", "2024-12-11"]
    assert tables.counts() == {"2024-09-21": 1, "2024-12-10": 1, "2024-12-11": 3, "2024-12-12": 1}
    manifest = json.loads((tmp_path / "manifests" / report["manifest"]).read_text(encoding="utf-8"))
    assert [partition["partition"] for partition in manifest["partitions"]] == report["started"]
    assert tables.integrate("2024-12-13")["late"] == []
    assert {known.claimed_by for known in tables.state.read().dates.values()} == {None}


def test_compaction_is_no_late_data(tables: Tables) -> None:
    tables.append("2024-12-10")
    tables.integrate("2024-12-12")
    tables.sql("optimize {}")
    assert tables.plan("2024-12-13", "daily") == []
    tables.sql("delete from {} where event_date = '2024-12-10'")
    assert tables.plan("2024-12-13", "daily") == ["2024-12-10"]


def test_what_is_committed_while_a_date_is_processed_is_late_for_the_next_run(tables: Tables) -> None:
    params = Parameters(**tables.parameters("2024-12-12"))
    tables.append("2024-12-11")
    processor = DateProcessor(tables.spark, params)
    tables.append("2024-12-11")
    processor.process("2024-12-11", "slow")
    assert tables.counts()["2024-12-11"] == 2
    assert tables.integrate("2024-12-12")["late"] == ["2024-12-11"]
    assert tables.counts()["2024-12-11"] == 3


def test_a_run_that_died_after_the_data_was_written_is_not_repeated(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data and last processed version are one commit of the target: the state table only repeats it."""
    tables.append("2024-12-11")
    with monkeypatch.context() as dying:
        dying.setattr(integrator, "_settle", lambda *arguments: sys.exit("the process ends"))
        with pytest.raises(SystemExit):
            tables.integrate("2024-12-12", run_id="dead")
    assert tables.state.read().dates["2024-12-11"].claimed_by == "dead"
    # A day later no claim hides it any more.
    assert tables.plan("2024-12-13", "next", now="2024-12-16T06:00:00") == []


def test_a_run_that_died_before_its_commit_is_repeated_once_its_claim_is_released(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables.append("2024-12-11")
    with monkeypatch.context() as dying:
        for module, step in ((late_partitions, "overwrite"), (integrator, "_settle")):
            dying.setattr(module, step, lambda *_, **__: sys.exit("the process ends"))
        with pytest.raises(SystemExit):
            tables.integrate("2024-12-12", run_id="dead")
    assert tables.counts()["2024-12-11"] == 1
    assert tables.plan("2024-12-13", "other") == []
    released = tables.integrate("2024-12-12", action="release", run_id="dead")["released"]
    assert released == ["2024-12-11", "2024-12-12"]
    assert tables.integrate("2024-12-13", run_id="other")["late"] == ["2024-12-11"]
    assert tables.counts()["2024-12-11"] == 2


def test_a_failed_date_stays_late_and_its_claim_ends(tables: Tables) -> None:
    tables.append("2024-12-11")
    tables.append("2024-12-10")
    broken = QUERY.replace("count(*)", "if({date} = '2024-12-10', raise_error('broken'), count(*))")
    before = tables.state.read().dates["2024-12-10"].read_version
    with pytest.raises(JobFailed, match=r"2024-12-10 failed: .*broken.*; 2 of 3 dates were replaced"):
        tables.integrate("2024-12-12", query=broken)
    assert tables.state.read().dates["2024-12-10"].read_version == before
    assert tables.plan("2024-12-12", "fixed") == ["2024-12-10"]


def test_a_stateful_chain_goes_on_where_it_failed(tables: Tables) -> None:
    tables.append("2024-12-10")
    broken = QUERY.replace("count(*)", "if({date} = '2024-12-11', raise_error('broken'), count(*))")
    with pytest.raises(JobFailed, match="1 of 2 dates were replaced"):
        tables.integrate("2024-12-13", query=broken, stateful=True)
    report = tables.integrate("2024-12-13", stateful=True)
    assert report["started"] == ["2024-12-11", "2024-12-12", "2024-12-13"]


def test_of_two_runs_at_a_time_one_takes_the_late_date(tables: Tables) -> None:
    tables.append("2024-12-10")
    with ThreadPoolExecutor(2) as pool:
        plans = list(pool.map(tables.plan, ("2024-12-14", "2024-12-15"), ("run_14", "run_15")))
    assert sorted(plans) == [[], ["2024-12-10"]]
    taker = ("run_14", "run_15")[plans.index(["2024-12-10"])]
    assert tables.state.read().dates["2024-12-10"].claimed_by == taker
    tables.integrate("2024-12-14", action="process", run_id=taker, dates=["2024-12-10"])
    assert tables.state.read().dates["2024-12-10"].claimed_by is None
    assert tables.counts()["2024-12-10"] == 2
    tables.append("2024-12-10")
    assert tables.plan("2024-12-16", "run_16") == ["2024-12-10"]


def test_a_task_processes_only_what_its_run_has_claimed(tables: Tables) -> None:
    tables.append("2024-12-10")
    tables.plan("2024-12-12", "owner")
    with pytest.raises(NotReady, match="the run thief has no valid claim on 2024-12-10; plan it first"):
        tables.integrate("2024-12-12", action="process", run_id="thief", dates=["2024-12-10"])
    with pytest.raises(NotReady, match="2024-12-12 is claimed by the run owner until 2024-12-15T12:00:00"):
        tables.integrate("2024-12-12", run_id="thief")
    assert tables.plan("2024-12-12", "owner") == ["2024-12-10"]


def test_tables_that_exist_already_are_adopted(tables: Tables) -> None:
    shutil.rmtree(tables.state.table)
    shutil.rmtree(tables.target)
    assert len(tables.integrate("2024-12-12", action="adopt")["adopted"]) == 3
    tables.append("2024-12-11")
    assert tables.plan("2024-12-13", "daily") == ["2024-12-11"]


def test_a_log_that_does_not_reach_back_makes_all_dates_late_rather_than_none(tables: Tables) -> None:
    tables.append("2024-12-11")
    tables.append("2024-12-11")
    log = Path(tables.source, "_delta_log")
    tables.spark._jvm.org.apache.spark.sql.delta.DeltaLog.forTable(  # type: ignore[union-attr]
        tables.spark._jsparkSession, tables.source
    ).checkpoint()
    for version in range(3):
        (log / f"{version:020}.json").unlink()
    assert tables.plan("2024-12-13", "daily") == ["2024-12-10", "2024-12-11", "2024-12-12"]


def test_job_snippet_of_the_page(tables: Tables, tmp_path: Path) -> None:
    test = (
        "tests/patterns/error_management/test_dynamic_late_data_integrator.py::test_job_snippet_of_the_page"
    )
    text = snippet("docs/error_management.md", test).replace("lakehouse/gold", str(tmp_path / "gold"))
    config, report = tmp_path / "statistics.yml", tmp_path / "report.json"
    config.write_text(
        text.replace("lakehouse/silver/silver_visits", tables.source).replace(" page", " visit_id"),
        encoding="utf-8",
    )
    argv = ["--config", str(config), "--date", "2024-12-12", "--max_partitions", "1", "--report", str(report)]
    with pytest.raises(SystemExit) as end:
        run_job(Parameters, run, argv)
    assert end.value.code == 0
    found = json.loads(report.read_text(encoding="utf-8"))
    assert (found["late"], found["postponed"]) == (["2024-12-10"], ["2024-12-11"])


# --- Who plans what, without tables ---------------------------------------------------------------------

Planner = Callable[[State, str], tuple[State, list[str]]]
DAYS = ("2024-12-10", "2024-12-11", "2024-12-12", "2024-12-13")
FOUR_LATE = State({day: DateState(changed_version=9, read_version=5) for day in DAYS}, 9)


def planned(state: State, date: str, now: str = NOW, **others: Any) -> tuple[State, list[str]]:
    params = Parameters(
        source="a", target="b", state="c", query=QUERY, date=date, **({"depends_on_past": False} | others)
    )
    state, plan = choose(state, params, f"run_{date}", parse_time(now))
    return state, list(plan.dates)


def test_four_runs_at_a_time_execute_each_date_once() -> None:
    state, executions = FOUR_LATE, []
    for day in DAYS:
        state, late = planned(state, day)
        executions += [*late, day]
    assert sorted(executions) == list(DAYS)


def test_without_claims_the_four_runs_execute_six_dates_more() -> None:
    lists = [planned(FOUR_LATE, day)[1] for day in DAYS]
    assert lists == [list(DAYS[:count]) for count in range(4)]
    extra = [date for late in lists for date in late]
    assert [extra.count(day) for day in DAYS] == [3, 2, 1, 0]


def test_a_run_waits_until_the_run_before_has_planned() -> None:
    state, _ = planned(FOUR_LATE, DAYS[0], depends_on_past=True)
    with pytest.raises(
        NotReady, match="the run of 2024-12-11 has not planned, the last that did is 2024-12-10"
    ):
        planned(state, DAYS[2], depends_on_past=True)
    cleared, _ = planned(state, DAYS[1], depends_on_past=True)
    assert planned(cleared, DAYS[2], depends_on_past=True)[1] == []
    assert planned(state, DAYS[2])[1] == [DAYS[1]]


def test_a_claim_is_void_after_its_time() -> None:
    state, _ = planned(FOUR_LATE, DAYS[1], claim_minutes=30)
    assert planned(state, DAYS[3], "2024-12-15T06:29:00")[1] == [DAYS[2]]
    assert planned(state, DAYS[3], "2024-12-15T06:30:00")[1] == list(DAYS[:3])


def test_known_versions_never_go_back() -> None:
    state = State({"2024-12-10": DateState(7, 7)}, 7).with_versions({"2024-12-10": 5}, {"2024-12-10": 6}, 6)
    assert state == State({"2024-12-10": DateState(7, 7)}, 7)


def test_the_state_table_keeps_times_and_versions(spark: SparkSession, table_path: str) -> None:
    table = StateTable(spark, table_path)
    moment = dt.datetime(2024, 12, 15, 6, 0, 0, 123456, tzinfo=dt.UTC)
    state = State(
        {"2024-12-10": DateState(3, None, None, moment, "run", moment), "2024-12-11": DateState()}, 3
    )
    assert table.change(lambda empty: (state, len(empty.dates))) == 0
    assert table.read() == state


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"action": "process", "run_id": "r"}, "dates belong to the action process, which needs them"),
        ({"dates": ["2024-12-10"]}, "dates belong to the action process"),
        ({"action": "release"}, "action release needs the run_id that has claimed the dates"),
        ({"max_partitions": 0}, "max_partitions must be 1 or more, got 0"),
        ({"date": "yesterday"}, "'yesterday' is not a date"),
        ({"now": "late"}, "'late' is not a time"),
    ],
)
def test_wrong_use(others: dict[str, Any], sentence: str) -> None:
    parameters = {"source": "a", "target": "b", "state": "c", "query": QUERY, "date": "2024-12-10"}
    with pytest.raises(WrongUse, match=sentence):
        Parameters(**(parameters | others))
