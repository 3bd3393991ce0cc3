"""Columns that come and go under `append_new_columns`, a struct of 30 fields among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dbt_common.exceptions import DbtRuntimeError

from tests.support.dbt_project import DbtProject
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows

SOURCES = "sources: [{name: raw, schema: '{{ target.schema }}', tables: [{name: growing}]}]"
APPENDED = "on_schema_change='append_new_columns'"
MODELS = {
    "merged": "materialized='incremental', incremental_strategy='merge', unique_key='id', "
    f"merge_exclude_columns=['NOTE'], meta={{'lakehouse_patterns': {{'merger': {{}}}}}}, {APPENDED}",
    "overwritten": "materialized='data_overwrite', "
    f"meta={{'lakehouse_patterns': {{'data_overwrite': {{'where': 'id > 0'}}}}}}, {APPENDED}",
    "strict": "materialized='data_overwrite', "
    "meta={'lakehouse_patterns': {'data_overwrite': {'where': 'id > 0'}}}",
}
WIDE = ", ".join(f"{number} as field_{number}" for number in range(30))


@pytest.fixture(scope="module")
def grown(make_project: Callable[..., DbtProject]) -> DbtProject:
    """Three models of a source that loses a column and gets a struct of 30 fields, run before and twice after it."""
    query = "select * from {{ source('raw', 'growing') }}"
    files = {f"models/{name}.sql": f"{{{{ config({config}) }}}}\n{query}" for name, config in MODELS.items()}
    project = make_project(files | {"models/sources.yml": SOURCES})
    project.source("growing", project.spark.sql("select 1 as id, 'first' as note, 7 as old"))
    project.run("run")
    project.source(
        "growing",
        project.spark.sql(
            f"select id, 'second' as note, struct({WIDE}) as wide from values (1), (2) as (id)"
        ),
    )
    project.run("run", "--exclude", "strict")
    project.run("run", "--exclude", "strict")
    return project


def test_a_merge_keeps_a_column_that_the_model_lost_and_excludes_what_it_says(grown: DbtProject) -> None:
    rows = grown.table("merged").selectExpr("id", "note", "old", "wide.field_29")
    assert_rows(rows, [(1, "first", 7, 29), (2, "second", None, 29)])


def test_an_overwritten_slice_has_null_in_a_column_that_the_model_lost(grown: DbtProject) -> None:
    rows = grown.table("overwritten").selectExpr("id", "note", "old", "wide.field_29")
    assert_rows(rows, [(1, "second", None, 29), (2, "second", None, 29)])


def test_without_the_option_other_columns_are_refused_and_the_table_stays(grown: DbtProject) -> None:
    error = grown.fails("run", "--select", "strict")
    assert "no column old, wide, which the table lacks" in error
    assert_rows(grown.table("strict"), [(1, "first", 7)])


@pytest.mark.parametrize(
    ("given", "all_differences"),
    [
        ({"ID": "int", "note": "string"}, []),
        ({"id": "bigint"}, ["id as bigint in place of int", "no column note"]),
        ({"id": "int", "Note": "string", "more": "int"}, ["more, which the table lacks"]),
    ],
)
def test_names_are_compared_whatever_their_case(
    render: MacroRenderer, given: dict[str, str], all_differences: list[str]
) -> None:
    found = render("schema_differences", stored={"id": "int", "note": "string"}, given=given)
    assert found["all"] == all_differences


def test_a_column_to_update_must_be_in_model_and_table(render: MacroRenderer) -> None:
    with pytest.raises(DbtRuntimeError, match="the model has no column 'x'; it has: id"):
        render("require_columns", types={"id": "int"}, names=["x"])
