"""Data Overwrite as a dbt model, beside dbt-spark's own insert_overwrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dbt.adapters.spark.column import SparkColumn
from dbt_common.exceptions import DbtRuntimeError
from pyspark.sql import SparkSession

from tests.support.dbt_project import DbtProject
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.session import environment
from tests.support.snippets import snippet

PAGE = "docs/idempotency.md"
THIS = "tests/patterns/idempotency/test_data_overwrite_sql.py::"
SOURCES = """
sources: [{name: raw, schema: '{{ target.schema }}', tables: [{name: devices, identifier: landed}]}]
"""
INSERT_OVERWRITE = """
{{ config(materialized='incremental', incremental_strategy='insert_overwrite', partition_by='execution_date') }}
select id, brand_name, execution_date from {{ source('raw', 'devices') }}
where state = 'valid' and execution_date = date'{{ lakehouse_patterns.logical_date() }}'
"""
# Delta stores an empty text in a partition column as NULL.
BY_BRAND = """
{{ config(materialized='data_overwrite', partition_by='Brand_Name', meta={'lakehouse_patterns': {'data_overwrite': {
    'where': "brand_name = 'lg' or brand_name WHAT"
}}}) }}
select id, brand_name, execution_date from {{ source('raw', 'devices') }}
where state = 'valid' and (brand_name = 'lg' or brand_name = '') -- a comment at the end
"""
UNBRANDED = (3, "", "2024-09-20")
DAY_21, DAY_22 = (1, "lg", "2024-09-21"), (2, "htc", "2024-09-22")


class Runs:
    """Runs of three models and what each left; see `runs`."""

    def __init__(self, project: DbtProject) -> None:
        self.project = project
        self.rows: dict[str, list[tuple[Any, ...]]] = {}
        self.errors: dict[str, str] = {}

    def land(self, *rows: tuple[int, str, str], invalid: tuple[int, str, str] | None = None) -> None:
        """Make the source hold these devices, and one that is not valid."""
        given = [(*row, "valid") for row in (*rows, UNBRANDED)] + ([(*invalid, None)] if invalid else [])
        columns = "id int, brand_name string, execution_date string, state string"
        frame = self.project.spark.createDataFrame(given, columns)
        self.project.source("landed", frame.withColumn("execution_date", frame.execution_date.cast("date")))

    def run(self, step: str, day: str, models: str, *flags: str, fails: bool = False) -> None:
        with environment(LOGICAL_DATE=day):
            if fails:
                self.errors[step] = self.project.fails("run", "--select", models, *flags)
            else:
                self.project.run("run", "--select", models, *flags)
        for model in models.split():
            rows = self.project.table(model).orderBy("id").collect()
            self.rows[f"{step}: {model}"] = [(r.id, r.brand_name, str(r.execution_date)) for r in rows]


@pytest.fixture(scope="module")
def runs(make_project: Callable[..., DbtProject]) -> Runs:
    model = snippet(PAGE, f"{THIS}test_a_day_without_rows_is_cleared")
    files = {
        "models/sources.yml": SOURCES,
        "models/devices.sql": model,
        "models/unfiltered.sql": model.replace("and {{ lakehouse_patterns.overwritten() }}", ""),
        "models/insert_overwrite.sql": INSERT_OVERWRITE,
        "models/without_brand.sql": BY_BRAND.replace("WHAT", "is null"),
        "models/empty_brand.sql": BY_BRAND.replace("WHAT", "= ''"),
    }
    runs = Runs(make_project(files))
    runs.land(DAY_21, DAY_22, invalid=(9, "x", "2024-09-22"))
    runs.run("first", "2024-09-21", "devices insert_overwrite without_brand")
    runs.run("second", "2024-09-22", "devices insert_overwrite without_brand")
    runs.run("outside", "2024-09-21", "unfiltered empty_brand", fails=True)
    runs.land(DAY_21)
    runs.run("empty", "2024-09-22", "devices insert_overwrite")
    runs.run("full refresh", "2024-09-21", "devices", "--full-refresh", fails=True)
    return runs


def test_a_day_without_rows_is_cleared(runs: Runs) -> None:
    assert_rows(runs.rows["first: devices"], [DAY_21])
    assert_rows(runs.rows["second: devices"], [DAY_21, DAY_22])
    assert_rows(runs.rows["empty: devices"], [DAY_21])


def test_insert_overwrite_of_dbt_spark_runs_and_keeps_a_day_that_lost_its_rows(runs: Runs) -> None:
    assert_rows(runs.rows["second: insert_overwrite"], [DAY_21, DAY_22])
    assert_rows(runs.rows["empty: insert_overwrite"], [DAY_21, DAY_22])


def test_a_row_of_another_day_refuses_the_model(runs: Runs) -> None:
    assert "DELTA_REPLACE_WHERE_MISMATCH" in runs.errors["outside"]
    assert runs.rows["outside: unfiltered"] == []


def test_an_empty_text_in_a_partition_column_is_null_as_delta_stores_it(runs: Runs) -> None:
    """A condition on the empty text would not find the row that an earlier run wrote, so that it would be doubled."""
    assert runs.rows["first: without_brand"] == [DAY_21, (3, None, "2024-09-20")]
    assert runs.rows["second: without_brand"] == [DAY_21, (3, None, "2024-09-20")]
    assert runs.errors["outside"].count("DELTA_REPLACE_WHERE_MISMATCH") == 2
    assert runs.rows["outside: empty_brand"] == []


def test_a_full_refresh_would_lose_the_other_days_and_is_refused(runs: Runs) -> None:
    assert "a full refresh would lose all the others" in runs.errors["full refresh"]
    assert_rows(runs.rows["full refresh: devices"], [DAY_21])


def test_other_columns_are_refused(render: MacroRenderer) -> None:
    stored = [SparkColumn("id", "int"), SparkColumn("name", "string")]
    assert not render("require_same_columns", relation="devices", stored=stored, given=stored[::-1])
    given = [SparkColumn("id", "bigint"), SparkColumn("state", "string")]
    message = (
        "rows for devices have id as bigint in place of int, no column name, state, which the table lacks"
    )
    with pytest.raises(DbtRuntimeError, match=message):
        render("require_same_columns", relation="devices", stored=stored, given=given)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "data_overwrite needs where, such as"),
        ({"where": " "}, "data_overwrite needs where"),
        ({"where": "true", "when": 1}, "data_overwrite has no option 'when'; allowed: where"),
    ],
)
def test_wrong_options_are_refused(render: MacroRenderer, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DbtRuntimeError, match=sentence):
        render("_data_overwrite_where", options=options)


def test_the_statement_replaces_alike_in_both_ansi_modes(
    render: MacroRenderer, ansi_modes: str, spark: SparkSession, table_path: str
) -> None:
    rows = "values (1, '2024-09-21'), (2, '2024-09-22') as (id, day)"
    spark.sql(f"create table delta.`{table_path}` using delta as select * from {rows}")
    spark.sql("select '2024-09-22' as day, 7 as id").createOrReplaceTempView("new_devices")
    statement = render(
        "_data_overwrite_sql",
        relation=f"delta.`{table_path}`",
        where="day = '2024-09-22'",
        selected=["id", "day"],
        batch="new_devices",
    )
    for _ in range(2):
        spark.sql(statement)
        assert_rows(spark.read.format("delta").load(table_path), [(1, "2024-09-21"), (7, "2024-09-22")])
