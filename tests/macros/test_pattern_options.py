"""Names under `meta.lakehouse_patterns`: a misspelt or misplaced one ends the run before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dbt_common.exceptions import DbtRuntimeError

from tests.support.dbt_project import DbtProject
from tests.support.render import MacroRenderer


def node(meta: Any, materialized: str = "incremental") -> dict[str, Any]:
    """Return what the hook reads of a node."""
    return {"name": "users", "config": {"materialized": materialized, "meta": meta}}


@pytest.mark.parametrize(
    ("meta", "materialized", "sentence"),
    [
        ({"merge": {}}, "incremental", "has no pattern 'merge'; the nearest is 'merger'"),
        ({"version_table": {}}, "versioned_table", "the nearest is 'versioned_table'"),
        ({"scd_2": {}}, "scd2", "the nearest is 'scd2'"),
        ({"sequence": "seq"}, "incremental", "it is an option of merger and scd2: indent it"),
        ({"immutable": True}, "versioned_table", "it is an option of full_loader: indent it"),
        (
            {"scd2": {}},
            "table",
            "meta.lakehouse_patterns.scd2 of users needs materialized='scd2', got 'table'",
        ),
        ({"merger": {}}, "table", "merger of users needs materialized='incremental', got 'table'"),
        ({"unit_tables": {}}, "view", "unit_tables of users needs materialized='unit_tables', got 'view'"),
        (
            {"merger": {"seqence": "at"}},
            "incremental",
            "merger of users has no option 'seqence'; the nearest is 'sequence'; allowed: deletes, is_deleted,",
        ),
        (
            {"scd2": {"change_at": "at"}},
            "scd2",
            "scd2 of users has no option 'change_at'; the nearest is 'changed_at'",
        ),
        (
            {"unit_tables": {"units": "day"}},
            "unit_tables",
            "unit_tables of users has no option 'units'; the nearest is",
        ),
        (
            {"compactor": {"Mode": "x"}},
            "table",
            "compactor of users has no option 'Mode'; the nearest is 'mode'",
        ),
        ({"scd2": "changed_at"}, "scd2", "scd2 of users must map options to their values, got changed_at"),
        ("merger", "incremental", "must map patterns to their options, got merger"),
    ],
)
def test_a_wrong_name_is_refused(render: MacroRenderer, meta: Any, materialized: str, sentence: str) -> None:
    with pytest.raises(DbtRuntimeError, match=sentence):
        render("check_options_of", node=node({"lakehouse_patterns": meta}, materialized))


@pytest.mark.parametrize("name", ["lakehouse_pattern", "lakehouse-patterns", "Lakehouse_Patterns_"])
def test_the_package_s_own_name_may_not_be_misspelt(render: MacroRenderer, name: str) -> None:
    with pytest.raises(DbtRuntimeError, match=f"meta of users has '{name}': write lakehouse_patterns"):
        render("check_options_of", node=node({name: {"merger": {}}}))


@pytest.mark.parametrize(
    ("meta", "materialized"),
    [
        ({"lakehouse_patterns": {"merger": {}, "compactor": {"mode": "daily"}}}, "incremental"),
        ({"lakehouse_patterns": {"full_loader": {}}}, "versioned_table"),
        ({"lakehouse_patterns": {"versioned_table": {}}}, "versioned_table"),
        ({"owner": "ada", "lakehouse_patterns": None}, "view"),
        ({}, "table"),
    ],
)
def test_right_names_and_those_of_others_pass(render: MacroRenderer, meta: Any, materialized: str) -> None:
    assert not render("check_options_of", node=node(meta, materialized))


def test_a_pattern_s_options_stand_under_either_of_its_names(render: MacroRenderer) -> None:
    for name in ("full_loader", "versioned_table"):
        found = render(
            "options_of", node=node({"lakehouse_patterns": {name: {"min_rows": 2}}}), pattern="full_loader"
        )
        assert found == {"min_rows": 2}
    assert render("options_of", node=node({"lakehouse_patterns": {"scd2": {}}}), pattern="merger") is None


OF_THE_PROJECT = """
{% materialization scd2, adapter='spark' %}
    {% call statement('main') %} select 1 {% endcall %}
    {{ return({'relations': []}) }}
{% endmaterialization %}
"""
HISTORY = "{{ config(materialized='scd2', unique_key='id') }}\nselect 1 as id"


def test_a_run_ends_at_its_start(make_project: Callable[..., DbtProject]) -> None:
    """Nothing is built: neither the model above nor the one with the misspelt option."""
    misspelt = HISTORY.replace(
        "'id') }}", "'id', meta={'lakehouse_patterns': {'scd2': {'seqence': 'n'}}}) }}"
    )
    project = make_project({"models/above.sql": "select 1 as id", "models/history.sql": misspelt})
    for command in ("run", "build"):
        assert "scd2 of history has no option 'seqence'; the nearest is 'sequence'" in project.fails(command)
    assert project.spark.sql(f"show tables in {project.schema}").where("not isTemporary").collect() == []


def test_a_materialization_of_the_project_with_a_name_of_ours_is_refused(
    make_project: Callable[..., DbtProject],
) -> None:
    own = OF_THE_PROJECT.replace("scd2", "shops_own")
    files = {"macros/scd2.sql": OF_THE_PROJECT, "macros/own.sql": own}
    sentence = "the project harness has a materialization 'scd2', which dbt runs in place of that of lakehouse_patterns"
    assert sentence in make_project(files | {"models/history.sql": HISTORY}).fails("run")
    make_project(files | {"models/history.sql": HISTORY.replace("scd2", "shops_own")}).run("run")
