"""Incremental Loader in SQL for models that keep few rows: the table remembers how far the model has looked.

Each test has its own copy of the page's model, so that none depends on another; all copies read one source.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.support.dbt_project import DbtProject
from tests.support.snippets import snippets

PAGE = "docs/ingestion.md"
PAGE_TEST = (
    "tests/patterns/ingestion/test_incremental_watermark.py::"
    "test_a_run_looks_only_at_what_is_new_although_it_keeps_nothing"
)
SCHEMA = "visit_id string, page string, ingested_at timestamp"
SOURCES = """
version: 2
sources:
  - name: raw
    schema: "{{ target.schema }}"
    tables: [{name: visits}]
"""
HOOK = "post_hook='{{ lakehouse_patterns.incremental_watermark() }}'"
OTHER_WINDOW = """{{ lakehouse_patterns.incremental_window(
    'ingested_at', source="(select timestamp '2024-03-01 10:00:00Z' as ingested_at)"
) }}"""
COPIES = ("newer", "quiet", "ended", "emptied", "asked", "raced", "late")


def at(hour: int, minute: int = 0) -> dt.datetime:
    return dt.datetime(2024, 3, 1, hour, minute, tzinfo=dt.UTC)


@pytest.fixture(scope="module")
def made(make_project: Any) -> DbtProject:
    """Return a project with the copies, and with models that are refused."""
    (page,) = snippets(PAGE, PAGE_TEST)
    visits = "{{ source('raw', 'visits') }}"
    late = f"insert into {visits} select 'mid', null, max(ingested_at) + interval 1 hour from {visits}"
    models = {f"models/{name}.sql": page for name in COPIES}
    models["models/quiet.sql"] = page.replace("page is null\n    and ", "")
    models["models/raced.sql"] = page.replace(HOOK, f'{HOOK},\n    pre_hook="{late}"')
    models["models/unhooked.sql"] = page.replace(f",\n    {HOOK}", "")
    models["models/doubled.sql"] = page.replace("page is null", OTHER_WINDOW)
    return make_project({"models/sources.yml": SOURCES, **models})


@pytest.fixture
def project(made: DbtProject, spark: SparkSession) -> DbtProject:
    """Fill the source: of two rows the older one has no page."""
    made.source("visits", spark.createDataFrame([("v0", None, at(9)), ("v1", "home", at(11))], SCHEMA))
    return made


def add(project: DbtProject, visit_id: str, page: str | None, ingested_at: dt.datetime) -> None:
    rows = project.spark.createDataFrame([(visit_id, page, ingested_at)], SCHEMA)
    rows.coalesce(1).write.format("delta").mode("append").saveAsTable(f"{project.schema}.visits")


def ids(project: DbtProject, model: str) -> list[str]:
    return sorted(row[0] for row in project.table(model).select("visit_id").collect())


def watermark(project: DbtProject, model: str) -> str | None:
    detail = project.spark.sql(f"describe detail {project.schema}.{model}").first()
    assert detail is not None
    return detail["properties"].get("lakehouse_patterns.watermark")


def test_a_run_looks_only_at_what_is_new_although_it_keeps_nothing(project: DbtProject) -> None:
    project.run("run", "--select", "newer")
    assert (ids(project, "newer"), watermark(project, "newer")) == (["v0"], "2024-03-01 11:00:00+00:00")
    add(project, "v2", "home", at(12))
    project.run("run", "--select", "newer")
    assert (ids(project, "newer"), watermark(project, "newer")) == (["v0"], "2024-03-01 12:00:00+00:00")
    add(project, "v3", None, at(13))
    project.run("run", "--select", "newer")
    window = (
        "(ingested_at > timestamp '2024-03-01 12:00:00+00:00' and "
        "ingested_at <= timestamp '2024-03-01 13:00:00+00:00' /* watermark */)"
    )
    assert window in project.compiled("newer")
    assert ids(project, "newer") == ["v0", "v3"]


def test_a_run_that_finds_nothing_new_commits_nothing(project: DbtProject) -> None:
    project.run("run", "--select", "quiet")
    commits = len(project.history("quiet"))
    project.run("run", "--select", "quiet")
    # In parentheses Spark would take it for the name of a column, and `where` for an alias of the table.
    assert project.compiled("quiet").endswith("where\n    false")
    assert len(project.history("quiet")) == commits


def test_a_run_that_ends_before_its_watermark_neither_loses_nor_doubles_rows(project: DbtProject) -> None:
    """Play a process that ends between its two commits: the run's rows are there, the watermark is the last run's."""
    project.run("run", "--select", "ended")
    add(project, "v2", None, at(12))
    add(project, "v3", "home", at(13))
    project.run("run", "--select", "ended")
    project.spark.sql(
        f"alter table {project.schema}.ended "
        "set tblproperties ('lakehouse_patterns.watermark' = '2024-03-01 11:00:00+00:00')"
    )
    project.run("run", "--select", "ended")
    assert (ids(project, "ended"), watermark(project, "ended")) == (
        ["v0", "v2"],
        "2024-03-01 13:00:00+00:00",
    )
    project.spark.sql(
        f"alter table {project.schema}.ended unset tblproperties ('lakehouse_patterns.watermark')"
    )
    project.run("run", "--select", "ended")
    assert (ids(project, "ended"), watermark(project, "ended")) == (
        ["v0", "v2"],
        "2024-03-01 13:00:00+00:00",
    )


def test_a_table_whose_old_rows_were_deleted_is_not_loaded_anew(project: DbtProject) -> None:
    project.run("run", "--select", "emptied")
    project.spark.sql(f"delete from {project.schema}.emptied")
    project.run("run", "--select", "emptied")
    assert ids(project, "emptied") == []
    project.run("run", "--select", "emptied", "--full-refresh")
    assert (ids(project, "emptied"), watermark(project, "emptied")) == (["v0"], "2024-03-01 11:00:00+00:00")


def test_a_window_that_was_asked_for_does_not_move_the_watermark(project: DbtProject) -> None:
    project.run("run", "--select", "asked")
    add(project, "v2", None, at(12))
    add(project, "v3", None, at(14))
    window = '{window_from: "2024-03-01T13", window_to: "2024-03-01T15"}'
    project.run("run", "--select", "asked", "--vars", window)
    assert (ids(project, "asked"), watermark(project, "asked")) == (["v0", "v3"], "2024-03-01 11:00:00+00:00")


def test_a_row_that_comes_while_the_model_runs_is_taken_by_the_next_run(project: DbtProject) -> None:
    """The pre-hook adds a newest row after the statement was compiled, in each run."""
    project.run("run", "--select", "raced")
    assert (ids(project, "raced"), watermark(project, "raced")) == (["v0"], "2024-03-01 11:00:00+00:00")
    project.run("run", "--select", "raced")
    assert ids(project, "raced") == ["mid", "v0"]


def test_a_source_without_rows_makes_an_empty_table(project: DbtProject) -> None:
    project.spark.sql(f"delete from {project.schema}.visits")
    project.run("run", "--select", "late")
    assert (ids(project, "late"), watermark(project, "late")) == ([], None)
    add(project, "v2", None, at(12))
    project.run("run", "--select", "late")
    assert (ids(project, "late"), watermark(project, "late")) == (["v2"], "2024-03-01 12:00:00+00:00")


def test_a_model_without_the_hook_or_with_two_watermarks_is_refused(project: DbtProject) -> None:
    errors = project.fails("run", "--select", "unhooked", "doubled")
    assert "source needs the model's post_hook '{{ lakehouse_patterns.incremental_watermark() }}'" in errors
    assert "a model has one watermark: give source to one of its windows" in errors
