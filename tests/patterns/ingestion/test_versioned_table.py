"""Full Loader in SQL: version tables behind one view."""

from __future__ import annotations

from collections.abc import Callable
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


class Loads:
    """What the loads of one model left and said; see `loads`."""

    def __init__(self, project: DbtProject) -> None:
        self.project = project
        self.seen: list[object] = []
        self.rows: dict[str, list[tuple[Any, ...]]] = {}
        self.tables: dict[str, set[str]] = {}
        self.errors: dict[str, str] = {}

    def load(self, name: str, date: str, rows: list[tuple[Any, ...]], *, fails: bool = False) -> None:
        columns = "type string, full_name string, version string"
        self.project.source("landed", self.project.spark.createDataFrame(rows, columns))
        with environment(LOGICAL_DATE=date):
            self._call(name, fails, "run", "--select", "devices")

    def expose(self, name: str, arguments: str, *, fails: bool = False) -> None:
        self._call(name, fails, "run-operation", "expose_version", "--args", arguments)

    def _call(self, name: str, fails: bool, *arguments: str) -> None:
        if fails:
            self.errors[name] = self.project.fails(*arguments)
        else:
            self.project.run(*arguments)
        self.rows[name] = [tuple(row) for row in self.project.table("devices").collect()]
        tables = (
            self.project.spark.sql(f"show tables in {self.project.schema}").where("not isTemporary").collect()
        )
        self.tables[name] = {row.tableName for row in tables} - {"devices", "landed"}


@pytest.fixture(scope="module")
def loads(spark: SparkSession, make_project: Callable[..., DbtProject]) -> Loads:
    model = snippet("docs/ingestion.md", f"{THIS}test_the_view_shows_the_newest_version")
    loads = Loads(make_project({"models/devices.sql": model, "models/sources.yml": SOURCES}))
    loads.load("day 1", "2024-01-01", DAY_1)
    with polled(lambda: spark.table(f"{loads.project.schema}.devices").count()) as loads.seen:
        loads.load("day 2", "2024-01-02", DAY_2)
    loads.load("day 2 again", "2024-01-02", DAY_2)
    loads.load("backfill", "2023-12-31", DAY_1[:1])
    loads.load("repeated", "2024-01-02", [*DAY_2, DAY_2[0], ("lg", None, "1")], fails=True)
    loads.expose("back", "{model_name: devices, version: 2024-01-01}")
    loads.load("empty", "2024-01-03", [], fails=True)
    loads.load("day 3", "2024-01-03", DAY_2)
    loads.expose("dropped", "{model_name: devices, version: 2023-12-31}", fails=True)
    return loads


def test_the_view_shows_the_newest_version(loads: Loads) -> None:
    assert_rows(loads.rows["day 1"], DAY_1)
    assert_rows(loads.rows["day 2"], DAY_2)
    assert loads.tables["day 2"] == {"devices_20240101", "devices_20240102"}


def test_the_same_load_again_leaves_the_same_rows_and_tables(loads: Loads) -> None:
    assert_rows(loads.rows["day 2 again"], DAY_2)
    assert loads.tables["day 2 again"] == loads.tables["day 2"]


def test_readers_of_the_view_see_one_version_or_the_other(loads: Loads) -> None:
    assert set(loads.seen) <= {2, 3}


def test_a_backfill_names_its_table_after_the_logical_date_and_the_view_stays(loads: Loads) -> None:
    assert "devices_20231231" in loads.tables["backfill"]
    assert_rows(loads.rows["backfill"], DAY_2)


def test_a_refused_load_of_the_exposed_version_changes_nothing_for_readers(loads: Loads) -> None:
    assert (
        "version 20240102 has 1 rows with NULL in full_name and 1 keys more than once"
        in loads.errors["repeated"]
    )
    assert_rows(loads.rows["repeated"], DAY_2)


def test_exposing_an_older_version_is_the_way_back(loads: Loads) -> None:
    assert_rows(loads.rows["back"], DAY_1)


def test_an_empty_dataset_is_refused(loads: Loads) -> None:
    assert "0 rows, allowed are 1 or more (min_rows)" in loads.errors["empty"]
    assert_rows(loads.rows["empty"], DAY_1)
    assert_rows(loads.rows["day 3"], DAY_2)


def test_old_versions_are_dropped(loads: Loads) -> None:
    assert loads.tables["day 3"] == {"devices_20240101", "devices_20240102", "devices_20240103"}
    assert "version 20231231 of " in loads.errors["dropped"]
    assert "kept are 20240101, 20240102, 20240103" in loads.errors["dropped"]


def test_a_table_that_something_else_made_is_neither_replaced_nor_counted(loads: Loads) -> None:
    schema = loads.project.schema
    loads.project.spark.sql(f"create table {schema}.devices_20240104 using delta as select 'by hand' as note")
    loads.load("foreign", "2024-01-04", DAY_1, fails=True)
    assert "devices_20240104 exists and was not created by versioned_table" in loads.errors["foreign"]
    loads.expose("foreign version", "{model_name: devices, version: 2024-01-04}", fails=True)
    assert "kept are 20240101, 20240102, 20240103" in loads.errors["foreign version"]
    assert_rows(loads.project.table("devices_20240104"), [("by hand",)])


def test_what_only_reads_the_sql_needs_no_date_and_a_run_is_refused_without(loads: Loads) -> None:
    with environment(LOGICAL_DATE=""):
        loads.project.run("compile")
        assert "the logical date must be a day such as 2024-01-01" in loads.project.fails("run")


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
