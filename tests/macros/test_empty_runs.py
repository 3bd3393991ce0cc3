"""The case study's materializations of tables and views, in a project of their own: `--empty` takes no rows away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.support.dbt_project import REPOSITORY, DbtProject, raw_tables
from tests.support.rows import assert_rows

RULE = (REPOSITORY / "case_study" / "macros" / "empty_runs.sql").read_text(encoding="utf-8")
SELECTED = "select id from {{ source('raw', 'users') }}"
KINDS = ("table", "view")
MODELS = {
    **{
        f"models/{name}_{kind}.sql": f"{{{{ config(materialized='{kind}') }}}}\n{SELECTED}"
        for kind in KINDS
        for name in ("kept", "fresh")
    },
    "models/appended.sql": f"{{{{ config(materialized='incremental', incremental_strategy='append') }}}}\n{SELECTED}",
    "models/sources.yml": raw_tables("users"),
}


@pytest.fixture(scope="module")
def project(make_project: Callable[..., DbtProject]) -> DbtProject:
    hooks: dict[str, Any] = yaml.safe_load('on-run-start: ["{{ refuse_emptying() }}"]')
    project = make_project(MODELS | {"macros/empty_runs.sql": RULE}, settings=hooks)
    project.source("users", project.spark.sql("select 1 as id"))
    project.run("run", "--exclude", "fresh_table", "fresh_view")
    return project


def test_a_table_and_a_view_keep_their_rows_in_an_empty_run(project: DbtProject) -> None:
    before = project.history("kept_table")
    project.run("run", "--empty")
    for kind in KINDS:
        assert_rows(project.table(f"kept_{kind}"), [(1,)])
        assert_rows(project.table(f"fresh_{kind}"), [])
    assert project.history("kept_table") == before
    assert_rows(project.table("appended"), [(1,)])

    project.run("run", "--select", "fresh_table", "fresh_view")
    for kind in KINDS:
        assert_rows(project.table(f"fresh_{kind}"), [(1,)])


def test_an_empty_run_checks_the_sql_of_what_it_keeps(project: DbtProject) -> None:
    project.source("users", project.spark.sql("select 1 as other_id"))
    error = project.fails("run", "--empty")
    project.source("users", project.spark.sql("select 1 as id"))
    assert [f"kept_{kind}: error" in error for kind in KINDS] == [True, True]


def test_an_empty_full_refresh_is_refused(project: DbtProject) -> None:
    assert "--empty with --full-refresh would replace the rows" in project.fails(
        "run", "--empty", "--full-refresh"
    )
    assert_rows(project.table("appended"), [(1,)])


def test_without_the_rule_dbt_empties_a_table_and_a_view(make_project: Callable[..., DbtProject]) -> None:
    project = make_project(MODELS)
    project.source("users", project.spark.sql("select 1 as id"))
    names = [f"kept_{kind}" for kind in KINDS]
    project.run("run", "--select", *names)
    project.run("run", "--empty", "--select", *names)
    assert [project.table(name).count() for name in names] == [0, 0]
