"""Incremental Loader in SQL for models that keep few rows: the table remembers how far the model has looked.

Each story has its own copy of the page's model and its own source, <model>_visits, so that none depends on another.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import pytest

from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.snippets import snippets
from tests.support.stories import FAILS, PASSES, DbtStories, Story

PAGE = "docs/ingestion.md"
PAGE_TEST = (
    "tests/patterns/ingestion/test_incremental_watermark.py::"
    "test_a_run_looks_only_at_what_is_new_although_it_keeps_nothing"
)
SCHEMA = "visit_id string, page string, ingested_at timestamp"
HOOK = "post_hook='{{ lakehouse_patterns.incremental_watermark() }}'"
OTHER_WINDOW = """{{ lakehouse_patterns.incremental_window(
    'ingested_at', source="(select timestamp '2024-03-01 10:00:00Z' as ingested_at)"
) }}"""
MODELS = ("newer", "quiet", "stopped", "emptied", "asked", "raced", "late", "unhooked", "doubled", "checked")
SOURCES = raw_tables(*(f"{name}_visits" for name in MODELS))

stories = DbtStories()


def at(hour: int, minute: int = 0) -> dt.datetime:
    return dt.datetime(2024, 3, 1, hour, minute, tzinfo=dt.UTC)


@pytest.fixture(scope="module")
def project(make_project: Callable[..., DbtProject]) -> DbtProject:
    """Return a project with the copies, and with models that are refused."""
    (page,) = snippets(PAGE, PAGE_TEST)
    models = {name: page.replace("'visits'", f"'{name}_visits'") for name in MODELS}
    models["quiet"] = models["quiet"].replace("page is null\n    and ", "")
    source = "{{ source('raw', 'raced_visits') }}"
    late = f"insert into {source} select 'mid', null, max(ingested_at) + interval 1 hour from {source}"
    models["raced"] = models["raced"].replace(HOOK, f'{HOOK},\n    pre_hook="{late}"')
    models["unhooked"] = models["unhooked"].replace(f",\n    {HOOK}", "")
    models["doubled"] = models["doubled"].replace("page is null", OTHER_WINDOW)
    models["checked"] = models["checked"].replace(
        "source=source('raw', 'checked_visits')", "source=target.schema ~ '.checked_visits'"
    )
    files = {f"models/{name}.sql": text for name, text in models.items()}
    return make_project({"models/sources.yml": SOURCES, **files})


def fill(project: DbtProject, model: str) -> None:
    """Fill a model's source: of two rows the older one has no page."""
    two_rows = [("v0", None, at(9)), ("v1", "home", at(11))]
    project.source(f"{model}_visits", project.spark.createDataFrame(two_rows, SCHEMA))


def add(project: DbtProject, model: str, *rows: tuple[str, str | None, dt.datetime]) -> None:
    added = project.spark.createDataFrame(rows, SCHEMA).coalesce(1)
    added.write.format("delta").mode("append").saveAsTable(f"{project.schema}.{model}_visits")


def ids(project: DbtProject, model: str) -> list[str]:
    return sorted(row[0] for row in project.table(model).select("visit_id").collect())


def watermark(project: DbtProject, model: str) -> str | None:
    detail = project.spark.sql(f"describe detail {project.schema}.{model}").first()
    assert detail is not None
    return detail["properties"].get("lakehouse_patterns.watermark")


@stories.about("newer")
def test_a_run_looks_only_at_what_is_new_although_it_keeps_nothing(project: DbtProject) -> Story:
    fill(project, "newer")
    yield PASSES
    assert (ids(project, "newer"), watermark(project, "newer")) == (["v0"], "2024-03-01 11:00:00+00:00")

    add(project, "newer", ("v2", "home", at(12)))
    yield PASSES
    assert (ids(project, "newer"), watermark(project, "newer")) == (["v0"], "2024-03-01 12:00:00+00:00")

    add(project, "newer", ("v3", None, at(13)))
    yield PASSES
    window = (
        "(ingested_at > timestamp '2024-03-01 12:00:00+00:00' and "
        "ingested_at <= timestamp '2024-03-01 13:00:00+00:00' /* watermark */)"
    )
    assert window in project.compiled("newer")
    assert ids(project, "newer") == ["v0", "v3"]


@stories.about("quiet")
def test_a_run_that_finds_nothing_new_commits_nothing(project: DbtProject) -> Story:
    fill(project, "quiet")
    yield PASSES
    commits = len(project.history("quiet"))

    yield PASSES
    # In parentheses Spark would take it for the name of a column, and `where` for an alias of the table.
    assert project.compiled("quiet").endswith("where\n    false")
    assert len(project.history("quiet")) == commits


@stories.about("stopped")
def test_a_run_that_ends_before_its_watermark_neither_loses_nor_doubles_rows(project: DbtProject) -> Story:
    """A stop between the two commits leaves the rows of the run, and the watermark of the run before or none."""
    fill(project, "stopped")
    yield PASSES
    add(project, "stopped", ("v2", None, at(12)), ("v3", "home", at(13)))
    yield PASSES
    both_rows_once = (["v0", "v2"], "2024-03-01 13:00:00+00:00")

    table, name = f"{project.schema}.stopped", "'lakehouse_patterns.watermark'"
    project.spark.sql(f"alter table {table} set tblproperties ({name} = '2024-03-01 11:00:00+00:00')")
    yield PASSES
    assert (ids(project, "stopped"), watermark(project, "stopped")) == both_rows_once

    project.spark.sql(f"alter table {table} unset tblproperties ({name})")
    yield PASSES
    assert (ids(project, "stopped"), watermark(project, "stopped")) == both_rows_once


@stories.about("emptied")
def test_a_table_whose_old_rows_were_deleted_is_not_loaded_again(project: DbtProject) -> Story:
    fill(project, "emptied")
    yield PASSES
    project.spark.sql(f"delete from {project.schema}.emptied")
    yield PASSES
    assert ids(project, "emptied") == []

    project.run("run", "--select", "emptied", "--full-refresh")
    assert (ids(project, "emptied"), watermark(project, "emptied")) == (["v0"], "2024-03-01 11:00:00+00:00")


@stories.about("asked")
def test_a_window_that_was_asked_for_does_not_move_the_watermark(project: DbtProject) -> Story:
    fill(project, "asked")
    yield PASSES
    add(project, "asked", ("v2", None, at(12)), ("v3", None, at(14)))
    window = (
        '{lakehouse_patterns_window_from: "2024-03-01T13", lakehouse_patterns_window_to: "2024-03-01T15"}'
    )
    project.run("run", "--select", "asked", "--vars", window)
    assert (ids(project, "asked"), watermark(project, "asked")) == (["v0", "v3"], "2024-03-01 11:00:00+00:00")


@stories.about("checked")
def test_a_run_with_empty_does_not_move_the_watermark(project: DbtProject) -> Story:
    """The model names its source by a text, whose rows dbt doesn't leave out."""
    fill(project, "checked")
    yield PASSES
    add(project, "checked", ("v2", None, at(12)), ("v3", "home", at(13)))
    project.run("run", "--select", "checked", "--empty")
    assert (ids(project, "checked"), watermark(project, "checked")) == (["v0"], "2024-03-01 11:00:00+00:00")
    yield PASSES
    assert ids(project, "checked") == ["v0", "v2"]


@stories.about("raced")
def test_a_row_that_comes_while_the_model_runs_is_taken_by_the_next_run(project: DbtProject) -> Story:
    """The pre-hook adds a newest row after the statement was compiled, in each run."""
    fill(project, "raced")
    yield PASSES
    assert (ids(project, "raced"), watermark(project, "raced")) == (["v0"], "2024-03-01 11:00:00+00:00")
    yield PASSES
    assert ids(project, "raced") == ["mid", "v0"]


@stories.about("late")
def test_a_source_without_rows_makes_an_empty_table(project: DbtProject) -> Story:
    project.source("late_visits", project.spark.createDataFrame([], SCHEMA))
    yield PASSES
    assert (ids(project, "late"), watermark(project, "late")) == ([], None)
    add(project, "late", ("v2", None, at(12)))
    yield PASSES
    assert (ids(project, "late"), watermark(project, "late")) == (["v2"], "2024-03-01 12:00:00+00:00")


@stories.about("unhooked", "doubled")
def test_a_model_without_the_hook_or_with_two_watermarks_is_refused(project: DbtProject) -> Story:
    fill(project, "unhooked")
    fill(project, "doubled")
    errors = yield FAILS
    assert "source needs the model's post_hook '{{ lakehouse_patterns.incremental_watermark() }}'" in errors
    assert "a model has one watermark: give source to one window" in errors
