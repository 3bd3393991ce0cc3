"""Names under `meta.lakehouse_patterns`: a misspelt or misplaced one ends the run before anything is built."""

from __future__ import annotations

from typing import Any

import pytest
from dbt_common.exceptions import DbtRuntimeError

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
