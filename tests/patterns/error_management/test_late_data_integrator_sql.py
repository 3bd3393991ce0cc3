"""Static Late Data Integrator in dbt: microbatch with a lookback, and what it leaves to the package's macros."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import pytest
from dbt_common.exceptions import DbtRuntimeError
from pyspark.sql import SparkSession

from tests.support.dbt_project import DbtProject
from tests.support.render import MacroRenderer
from tests.support.snippets import snippet

PAGE = "docs/error_management.md"
THIS = "tests/patterns/error_management/test_late_data_integrator_sql.py::"


@pytest.fixture(scope="module")
def dates() -> list[str]:
    """Today and the two days before, asked for when they are needed: the end of dbt's last batch is its clock's."""
    today = dt.datetime.now(dt.UTC).date()
    return [(today - dt.timedelta(days=days)).isoformat() for days in range(3)]


def model(hook: bool, begin: str) -> str:
    text = snippet(PAGE, f"{THIS}test_only_the_lookback_is_replaced_and_vanished_dates_are_cleared")
    text = text.replace("2024-01-01", begin).replace("lookback=15", "lookback=1")
    if hook:
        return text
    (line,) = (line for line in text.splitlines(keepends=True) if "post_hook" in line)
    return text.replace(line, "")


@pytest.fixture(scope="module")
def project(make_project: Callable[..., DbtProject], dates: list[str]) -> DbtProject:
    files = {
        "models/visits.yml": "models: [{name: silver_visits, config: {event_time: event_date}}]",
        "models/silver_visits.sql": "{{ config(materialized='view') }}\n"
        "select * from {{ target.schema }}.visits",
        "models/statistics.sql": model(hook=True, begin=dates[-1]),
        "models/statistics_without_hook.sql": model(hook=False, begin=dates[-1]),
    }
    return make_project(files)


def land(project: DbtProject, *dates: str) -> None:
    """Make the source hold one visit for each of the dates, repeated ones included."""
    rows = project.spark.createDataFrame([(date,) for date in dates], "event_date string")
    project.source("visits", rows.selectExpr("uuid() as visit_id", "cast(event_date as date) as event_date"))


def counts(project: DbtProject, name: str) -> dict[str, int]:
    return {str(row.event_date): row.visits for row in project.table(name).collect()}


def test_only_the_lookback_is_replaced_and_vanished_dates_are_cleared(
    project: DbtProject, dates: list[str]
) -> None:
    today, before, two_before = dates
    land(project, two_before, before, today)
    project.run("run")
    land(project, two_before, two_before, before, before, today)
    project.run("run", "--select", "statistics")
    assert counts(project, "statistics") == {two_before: 1, before: 2, today: 1}
    # A backfill that names its start has no lookback.
    land(project, two_before, before, before, before, today, today)
    end = (dt.date.fromisoformat(today) + dt.timedelta(days=1)).isoformat()
    project.run("run", "--select", "statistics", "--event-time-start", today, "--event-time-end", end)
    assert counts(project, "statistics") == {two_before: 1, before: 2, today: 2}
    land(project, two_before, today)
    project.run("run", "--select", "statistics statistics_without_hook")
    assert counts(project, "statistics_without_hook") == {two_before: 1, before: 1, today: 1}
    assert counts(project, "statistics") == {two_before: 1, today: 1}


def test_the_macro_lists_the_dates_that_a_backfill_must_name(
    render: MacroRenderer, spark: SparkSession
) -> None:
    assert render("lookback_dates", date="2024-03-01", days=2) == ["2024-02-28", "2024-02-29"]
    assert render("lookback_dates", date="2024-03-01", days=0) == []
    for arguments in ({"date": "1.3.2024", "days": 2}, {"date": "2024-03-01", "days": -1}):
        with pytest.raises(DbtRuntimeError, match="must be a"):
            render("lookback_dates", **arguments)
