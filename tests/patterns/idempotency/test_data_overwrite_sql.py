"""Data Overwrite as a dbt model, beside dbt-spark's own insert_overwrite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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


Rows = list[tuple[Any, ...]]


@dataclass(frozen=True)
class After:
    """The models' tables after one call of dbt."""

    devices: Rows = field(default_factory=list)
    unfiltered: Rows = field(default_factory=list)
    insert_overwrite: Rows = field(default_factory=list)
    without_brand: Rows = field(default_factory=list)
    empty_brand: Rows = field(default_factory=list)
    error: str = ""
    """All errors of the call, an empty text if it passed."""


class Devices:
    """The source and the models, of which one is the page's."""

    def __init__(self, project: DbtProject) -> None:
        self.project = project

    def land(self, *rows: tuple[int, str, str], invalid: tuple[int, str, str] | None = None) -> None:
        """Make the source hold these devices, and one that is not valid."""
        given = [(*row, "valid") for row in (*rows, UNBRANDED)] + ([(*invalid, None)] if invalid else [])
        columns = "id int, brand_name string, execution_date string, state string"
        frame = self.project.spark.createDataFrame(given, columns)
        self.project.source("landed", frame.withColumn("execution_date", frame.execution_date.cast("date")))

    def run(self, day: str, models: str, *flags: str, fails: bool = False) -> After:
        with environment(LOGICAL_DATE=day):
            call = self.project.fails if fails else self.project.run
            error = call("run", "--select", models, *flags)
        return After(
            **{
                model: [
                    (row.id, row.brand_name, str(row.execution_date))
                    for row in self.project.table(model).orderBy("id").collect()
                ]
                for model in models.split()
            },
            error=str(error) if fails else "",
        )


@pytest.fixture(scope="module")
def devices(make_project: Callable[..., DbtProject]) -> Devices:
    model = snippet(PAGE, f"{THIS}test_a_day_without_rows_is_cleared")
    files = {
        "models/sources.yml": SOURCES,
        "models/devices.sql": model,
        "models/unfiltered.sql": model.replace("and {{ lakehouse_patterns.overwritten() }}", ""),
        "models/insert_overwrite.sql": INSERT_OVERWRITE,
        "models/without_brand.sql": BY_BRAND.replace("WHAT", "is null"),
        "models/empty_brand.sql": BY_BRAND.replace("WHAT", "= ''"),
    }
    return Devices(make_project(files))


@dataclass(frozen=True)
class TwoDays:
    """Two days that lie in one source, loaded one after the other."""

    first: After
    second: After
    outside: After
    """Models whose rows lie outside of the slice that they replace."""


@pytest.fixture(scope="module")
def two_days(devices: Devices) -> TwoDays:
    devices.land(DAY_21, DAY_22, invalid=(9, "x", "2024-09-22"))
    return TwoDays(
        first=devices.run("2024-09-21", "devices insert_overwrite without_brand"),
        second=devices.run("2024-09-22", "devices insert_overwrite without_brand"),
        outside=devices.run("2024-09-21", "unfiltered empty_brand", fails=True),
    )


@pytest.fixture(scope="module")
def without_22(devices: Devices, two_days: TwoDays) -> After:
    """Return the state after a run for the 22nd, which the source has lost."""
    devices.land(DAY_21)
    return devices.run("2024-09-22", "devices insert_overwrite")


def test_a_day_without_rows_is_cleared(two_days: TwoDays, without_22: After) -> None:
    assert_rows(two_days.first.devices, [DAY_21])
    assert_rows(two_days.second.devices, [DAY_21, DAY_22])
    assert_rows(without_22.devices, [DAY_21])


def test_insert_overwrite_of_dbt_spark_runs_and_keeps_a_day_that_lost_its_rows(
    two_days: TwoDays, without_22: After
) -> None:
    assert_rows(two_days.second.insert_overwrite, [DAY_21, DAY_22])
    assert_rows(without_22.insert_overwrite, [DAY_21, DAY_22])


def test_a_row_of_another_day_refuses_the_model(two_days: TwoDays) -> None:
    assert "DELTA_REPLACE_WHERE_MISMATCH" in two_days.outside.error
    assert two_days.outside.unfiltered == []


def test_an_empty_text_in_a_partition_column_is_null_as_delta_stores_it(two_days: TwoDays) -> None:
    """A condition on the empty text would not find the row that an earlier run wrote, so that it would be doubled."""
    assert two_days.first.without_brand == [DAY_21, (3, None, "2024-09-20")]
    assert two_days.second.without_brand == [DAY_21, (3, None, "2024-09-20")]
    assert two_days.outside.error.count("DELTA_REPLACE_WHERE_MISMATCH") == 2
    assert two_days.outside.empty_brand == []


def test_a_full_refresh_would_lose_the_other_days_and_is_refused(devices: Devices, without_22: After) -> None:
    refused = devices.run("2024-09-21", "devices", "--full-refresh", fails=True)
    assert "a full refresh would lose all the others" in refused.error
    assert_rows(refused.devices, [DAY_21])


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
