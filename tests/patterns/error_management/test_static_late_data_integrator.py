"""Static Late Data Integrator: a fixed lookback in each run, and nothing beyond it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from python_jobs.error_management.static_late_data_integrator import Parameters, order, run
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.spark.job import run_job
from tests.patterns.error_management.late_data import QUERY, VisitsByDate
from tests.support.rows import assert_rows
from tests.support.snippets import snippet


@pytest.fixture(scope="module")
def december(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> VisitsByDate:
    """Return statistics of 12-28 to 12-31, for which the late visits of 12-28 and 12-29 then came."""
    tables = VisitsByDate(spark, tmp_path_factory.mktemp("december"))
    tables.append("2024-12-28", "2024-12-29", "2024-12-30", "2024-12-31")
    integrate(tables, "2024-12-31", lookback_days=3)
    tables.append("2024-12-28", "2024-12-29")
    return tables


def integrate(tables: VisitsByDate, date: str, **others: Any) -> dict[str, Any]:
    return run(tables.spark, Parameters(**tables.parameters(date, **others)))


def processed(report: dict[str, Any]) -> list[str]:
    return [partition["partition"] for partition in report["partitions"]]


def test_only_the_dates_in_the_lookback_change_and_twice_is_once(december: VisitsByDate) -> None:
    report = integrate(december, "2024-12-31", lookback_days=2)
    assert report["started"] == ["2024-12-29", "2024-12-30", "2024-12-31"]
    once = december.counts()
    assert once == {"2024-12-28": 1, "2024-12-29": 2, "2024-12-30": 1, "2024-12-31": 1}
    integrate(december, "2024-12-31", lookback_days=2)
    assert december.counts() == once


def test_the_control_task_leaves_out_dates_without_new_data(december: VisitsByDate) -> None:
    integrate(december, "2024-12-31", lookback_days=3)
    december.append("2024-12-29")
    report = integrate(december, "2024-12-31", lookback_days=3, only_changed=True)
    assert processed(report) == ["2024-12-29", "2024-12-31"]
    assert report["unchanged"] == ["2024-12-28", "2024-12-30"]
    december.append("2024-12-29")
    chain = integrate(december, "2024-12-31", lookback_days=3, only_changed=True, stateful=True)
    assert processed(chain) == ["2024-12-29", "2024-12-30", "2024-12-31"]
    assert december.counts()["2024-12-29"] == 4


def test_a_date_that_lost_its_rows_is_cleared(spark: SparkSession, tmp_path: Path) -> None:
    tables = VisitsByDate(spark, tmp_path)
    tables.append("2024-12-30", "2024-12-31")
    integrate(tables, "2024-12-31", lookback_days=1)
    tables.sql("delete from {} where event_date = '2024-12-30'")
    report = integrate(tables, "2024-12-31", lookback_days=1)
    assert [partition["rows"] for partition in report["partitions"]] == [0, 1]
    assert tables.counts() == {"2024-12-31": 1}


def test_the_manifest_lists_each_replaced_partition_once_a_run(
    december: VisitsByDate, tmp_path: Path
) -> None:
    for _ in range(2):
        report = integrate(
            december,
            "2024-12-31",
            lookback_days=1,
            manifest=str(tmp_path),
            run_id="daily 1",
            strategy="parallel",
        )
    (file,) = tmp_path.glob("*.json")
    assert file.name == report["manifest"] == "2024-12-31_daily 1.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    assert (manifest["run_id"], manifest["target"]) == ("daily 1", december.target)
    partitions = manifest["partitions"]
    assert_rows(
        [(partition["partition"], partition["rows"]) for partition in partitions],
        [("2024-12-30", 1), ("2024-12-31", 1)],
    )
    assert len({partition["target_version"] for partition in partitions}) == 2


def failing_on(date: str) -> dict[str, str]:
    """Return parameters whose query fails for one date."""
    return {"query": QUERY.replace("count(*)", f"if({{date}} = '{date}', raise_error('broken'), count(*))")}


def test_a_failed_late_date_keeps_the_current_one_back_or_not(spark: SparkSession, tmp_path: Path) -> None:
    tables = VisitsByDate(spark, tmp_path)
    tables.append("2024-12-30", "2024-12-31")
    broken = failing_on("2024-12-30") | {"lookback_days": 1}
    with pytest.raises(JobFailed, match=r"2024-12-30 failed: .*broken.*; 0 of 1 dates were replaced"):
        integrate(tables, "2024-12-31", **broken)
    assert tables.counts() == {}
    with pytest.raises(JobFailed, match=r"2024-12-30 failed: .*broken.*; 1 of 2 dates were replaced"):
        integrate(tables, "2024-12-31", strategy="current_first", **broken)
    assert tables.counts() == {"2024-12-31": 1}


def strategy(name: str, **others: Any) -> Parameters:
    return Parameters(
        source="a", target="b", query=QUERY, date="2024-12-31", lookback_days=2, strategy=name, **others
    )


@pytest.mark.parametrize(
    ("name", "failing", "expected"),
    [
        ("late_first", None, ["2024-12-29", "2024-12-30", "2024-12-31"]),
        ("late_first", "2024-12-29", ["2024-12-29"]),
        ("current_first", "2024-12-29", ["2024-12-31", "2024-12-29", "2024-12-30"]),
    ],
)
def test_order_of_the_strategies(name: str, failing: str | None, expected: list[str]) -> None:
    trace: list[str] = []
    order(strategy(name), ["2024-12-29", "2024-12-30"], trace.append, lambda: failing in trace)
    assert trace == expected


def test_parallel_dates_start_without_waiting_for_each_other() -> None:
    both = threading.Barrier(2)
    waits = {"2024-12-29": lambda: both.wait(10), "2024-12-31": lambda: both.wait(10)}
    order(strategy("parallel"), ["2024-12-29"], lambda date: waits[date](), lambda: False)


def test_a_backfill_is_planned_not_run(spark: SparkSession) -> None:
    params = Parameters(
        source="absent",
        target="b",
        query=QUERY,
        date="2024-10-12",
        lookback_days=4,
        backfill_from="2024-10-10",
    )
    days = [f"2024-10-{day:02}" for day in range(8, 13)]
    assert run(spark, params) == {
        "runs": [{"date": "2024-10-12", "covers": days}],
        "not_redone": ["2024-10-06", "2024-10-07"],
    }


@pytest.mark.parametrize("name", ["current_first", "parallel"])
def test_a_stateful_query_has_the_late_dates_first(name: str) -> None:
    with pytest.raises(WrongUse, match=f"a stateful query can't have the strategy {name}"):
        strategy(name, stateful=True)


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"lookback_days": -1}, "a lookback of -1 days is not possible"),
        ({"date": "31.12.2024"}, "'31.12.2024' is not a date"),
        ({"parallel_dates": 1}, "parallel_dates must be 2 or more, got 1"),
        ({"backfill_from": "2025-01-01"}, "is empty; from must not be after to"),
        ({"query": "select 1 from {source}"}, "the query doesn't mention {date}"),
        ({"query": "absent.sql"}, "can't read the query's file absent.sql"),
    ],
)
def test_wrong_use(others: dict[str, Any], sentence: str) -> None:
    parameters = {"source": "a", "target": "b", "query": QUERY, "date": "2024-12-31"}
    with pytest.raises(WrongUse, match=sentence):
        Parameters(**(parameters | others))


def test_job_snippet_of_the_page(december: VisitsByDate, tmp_path: Path) -> None:
    test = "tests/patterns/error_management/test_static_late_data_integrator.py::test_job_snippet_of_the_page"
    text = snippet("docs/error_management.md", test).replace("lakehouse/gold", str(tmp_path))
    config = tmp_path / "statistics.yml"
    config.write_text(
        text.replace("lakehouse/silver/silver_visits", december.source).replace(" page", " visit_id"),
        encoding="utf-8",
    )
    argv = ["--config", str(config), "--date", "2024-12-30", "--lookback_days", "1"]
    with pytest.raises(SystemExit) as end:
        run_job(Parameters, run, argv)
    assert end.value.code == 0
    written = VisitsByDate(december.spark, tmp_path)
    assert len(list((tmp_path / "statistics_rewritten").glob("*.json"))) == 1
    days = written.spark.read.format("delta").load(written.target).select("event_date").distinct()
    assert_rows(days.selectExpr("string(event_date)"), [("2024-12-29",), ("2024-12-30",)])


def test_tables_that_can_not_be_integrated(spark: SparkSession, tmp_path: Path) -> None:
    tables = VisitsByDate(spark, tmp_path)
    with pytest.raises(NotReady, match="there is no Delta table"):
        integrate(tables, "2024-12-31")
    tables.append("2024-12-31")
    with pytest.raises(DataRefused, match="rows of other dates than 2024-12-30"):
        integrate(
            tables, "2024-12-30", lookback_days=0, query="select * from {source} where '1970-01-01' < {date}"
        )
    with pytest.raises(WrongUse, match=r"the query can't be used .*no_such_column"):
        integrate(tables, "2024-12-31", lookback_days=0, query=QUERY.replace("count(*)", "no_such_column"))
    version = len(list(Path(tables.target, "_delta_log").glob("*.json")))
    with pytest.raises(WrongUse, match="is not partitioned by page but by event_date"):
        integrate(tables, "2024-12-31", partition_column="page")
    assert len(list(Path(tables.target, "_delta_log").glob("*.json"))) == version
