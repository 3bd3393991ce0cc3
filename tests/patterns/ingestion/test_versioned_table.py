"""Full Loader in SQL: version tables behind one view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.support.dbt_project import DbtProject
from tests.support.rows import assert_rows
from tests.support.session import environment
from tests.support.snippets import snippet
from tests.support.waiting import polled

THIS = "tests/patterns/ingestion/test_versioned_table.py::"
SOURCES = """
version: 2
sources: [{name: raw, schema: '{{ target.schema }}', tables: [{name: devices, identifier: landed}]}]
"""
DAY_1 = [("lg", "G2x", "Android 14"), ("htc", "One", "Android 12")]
DAY_2 = [("htc", "One", "Android 12"), ("mac", "MacBook Air", "macOS"), ("ipad", "iPad", "1")]


@dataclass(frozen=True)
class After:
    """The model's view and its tables after one call of dbt."""

    rows: list[tuple[Any, ...]]
    tables: set[str]
    error: str
    """All errors of the call, an empty text if it passed."""


class Devices:
    """The page's model, its source and its version tables."""

    def __init__(self, project: DbtProject) -> None:
        self.project = project

    def load(self, date: str, rows: list[tuple[Any, ...]], *, fails: bool = False) -> After:
        columns = "type string, full_name string, version string"
        self.project.source("landed", self.project.spark.createDataFrame(rows, columns))
        with environment(LOGICAL_DATE=date):
            return self._after("run", "--select", "devices", fails=fails)

    def expose(self, version: str, others: str = "", *, fails: bool = False) -> After:
        arguments = f"{{model_name: devices, version: {version}{others}}}"
        return self._after("run-operation", "expose_version", "--args", arguments, fails=fails)

    def _after(self, *arguments: str, fails: bool) -> After:
        error = self.project.fails(*arguments) if fails else ""
        if not fails:
            self.project.run(*arguments)
        rows = [tuple(row) for row in self.project.table("devices").collect()]
        shown = self.project.spark.sql(f"show tables in {self.project.schema}").where("not isTemporary")
        return After(rows, {row.tableName for row in shown.collect()} - {"devices", "landed"}, error)


@pytest.fixture(scope="module")
def devices(make_project: Callable[..., DbtProject]) -> Devices:
    model = snippet("docs/ingestion.md", f"{THIS}test_the_view_shows_the_newest_version")
    return Devices(make_project({"models/devices.sql": model, "models/sources.yml": SOURCES}))


@dataclass(frozen=True)
class TwoDays:
    """The first two days of the dataset; the later tests go on from the second one."""

    first: After
    second: After
    seen: list[object]
    """Numbers of rows that a reader of the view saw during the second load."""


@pytest.fixture(scope="module")
def two_days(devices: Devices, spark: SparkSession) -> TwoDays:
    first = devices.load("2024-01-01", DAY_1)
    with polled(lambda: spark.table(f"{devices.project.schema}.devices").count()) as seen:
        second = devices.load("2024-01-02", DAY_2)
    return TwoDays(first, second, seen)


def test_the_view_shows_the_newest_version(two_days: TwoDays) -> None:
    assert_rows(two_days.first.rows, DAY_1)
    assert_rows(two_days.second.rows, DAY_2)
    assert two_days.second.tables == {"devices_20240101", "devices_20240102"}


def test_readers_of_the_view_see_one_version_or_the_other(two_days: TwoDays) -> None:
    assert set(two_days.seen) <= {2, 3}


def test_the_same_load_again_leaves_the_same_rows_and_tables(devices: Devices, two_days: TwoDays) -> None:
    again = devices.load("2024-01-02", DAY_2)
    assert_rows(again.rows, DAY_2)
    assert again.tables == two_days.second.tables


@pytest.fixture(scope="module")
def backfill(devices: Devices, two_days: TwoDays) -> After:
    return devices.load("2023-12-31", DAY_1[:1])


def test_a_backfill_names_its_table_after_the_logical_date_and_the_view_stays(backfill: After) -> None:
    assert backfill.tables == {"devices_20231231", "devices_20240101", "devices_20240102"}
    assert_rows(backfill.rows, DAY_2)


def test_a_refused_load_of_the_exposed_version_changes_nothing_for_readers(
    devices: Devices, two_days: TwoDays
) -> None:
    repeated = devices.load("2024-01-02", [*DAY_2, DAY_2[0], ("lg", None, "1")], fails=True)
    assert "version 20240102 has 1 rows with NULL in full_name and 1 keys more than once" in repeated.error
    assert_rows(repeated.rows, DAY_2)


@pytest.fixture(scope="module")
def way_back(devices: Devices, backfill: After) -> After:
    return devices.expose("2024-01-01")


def test_exposing_an_older_version_is_the_way_back(way_back: After) -> None:
    assert_rows(way_back.rows, DAY_1)


@pytest.mark.parametrize("percent", [".nan", "1000"])
def test_an_argument_of_a_rollback_is_checked_as_the_option_is(
    devices: Devices, way_back: After, percent: str
) -> None:
    refused = devices.expose("2023-12-31", f", max_shrink_percent: {percent}", fails=True)
    assert "max_shrink_percent must be between 0 and 100, got" in refused.error
    assert_rows(refused.rows, DAY_1)


def test_an_empty_dataset_is_refused(devices: Devices, way_back: After) -> None:
    empty = devices.load("2024-01-03", [], fails=True)
    assert "0 rows, allowed are 1 or more (min_rows)" in empty.error
    assert_rows(empty.rows, DAY_1)


def test_old_versions_are_dropped(devices: Devices, way_back: After) -> None:
    third = devices.load("2024-01-03", DAY_2)
    assert_rows(third.rows, DAY_2)
    assert third.tables == {"devices_20240101", "devices_20240102", "devices_20240103"}
    dropped = devices.expose("2023-12-31", fails=True)
    assert "version 20231231 of " in dropped.error
    assert "kept are 20240101, 20240102, 20240103" in dropped.error


def test_a_table_that_something_else_made_is_neither_replaced_nor_counted(
    devices: Devices, two_days: TwoDays
) -> None:
    schema = devices.project.schema
    devices.project.spark.sql(
        f"create table {schema}.devices_20240104 using delta as select 'by hand' as note"
    )
    foreign = devices.load("2024-01-04", DAY_1, fails=True)
    assert "devices_20240104 exists and was not created by versioned_table" in foreign.error
    refused = devices.expose("2024-01-04", fails=True)
    assert "20240101" in refused.error.partition("kept are ")[2]
    assert "20240104" not in refused.error.partition("kept are ")[2]
    assert_rows(devices.project.table("devices_20240104"), [("by hand",)])


def test_what_only_reads_the_sql_needs_no_date_and_a_run_is_refused_without(devices: Devices) -> None:
    with environment(LOGICAL_DATE=""):
        devices.project.run("compile")
        assert "the logical date must be a day such as 2024-01-01" in devices.project.fails("run")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"keep_versions": 1}, "keep_versions must be at least 2"),
        ({"max_shrink_percent": 120}, "between 0 and 100, got 120"),
        ({"min_rows": -1}, "min_rows must be 0 or more"),
        ({"keys": "id"}, "full_loader has no option 'keys'; allowed: key, not_null"),
    ],
)
def test_wrong_options_are_refused(render: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Exception, match=sentence):
        render("_full_loader_options", given=options)


def test_a_version_is_a_day(render: Any) -> None:
    for wrong in ("", "today", "2024-13-01", "20240101"):
        with pytest.raises(Exception, match="must be a day such as 2024-01-01"):
            render("require_date", text=wrong)
    assert render("require_date", text="2024-01-01") == "2024-01-01"


def test_the_checks_count_alike_in_both_ansi_modes(render: Any, ansi_modes: str, spark: SparkSession) -> None:
    rows = [("a", 1), ("a", 1), (None, 2), ("b", None)]
    spark.createDataFrame(rows, "name string, number int").createOrReplaceTempView("full_loader_rows")
    options = {"key": ["name"], "not_null": ["number"]}
    found = spark.sql(render("_full_loader_findings_sql", options=options, snapshot="full_loader_rows"))
    assert_rows(found, [(4, 1, 1, 1)])
    no_key = {"key": [], "not_null": []}
    found = spark.sql(render("_full_loader_findings_sql", options=no_key, snapshot="full_loader_rows"))
    assert_rows(found, [(4, 0)])
