"""Incremental Loader in SQL: the predicate of one window, and models that use it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import pytest
from dbt_common.exceptions import DbtRuntimeError
from pyspark.sql import SparkSession

from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.snippets import snippet, snippets
from tests.support.stories import PASSES, DbtStories, Story

PAGE = "docs/ingestion.md"
THIS = "tests/patterns/ingestion/test_incremental_window.py::"

MODELS = ("appended", "bounded", "overlapping", "visits_rejects")
SOURCES = raw_tables(*(f"{name}_visits" for name in MODELS))
APPENDED = """
{{ config(materialized='incremental', incremental_strategy='append') }}
select * from {{ source('raw', 'appended_visits') }} where {{ lakehouse_patterns.incremental_window('ingested_at') }}
"""
BOUNDED = """
{{ config(materialized='incremental', incremental_strategy='append') }}
select * from {{ source('raw', 'bounded_visits') }}
where {{ lakehouse_patterns.incremental_window(
    'ingested_at', bootstrap_from='2024-03-01T10', window_to='2024-03-01T12'
) }}
"""

stories = DbtStories()


def at(hour: int, minute: int = 0) -> dt.datetime:
    return dt.datetime(2024, 3, 1, hour, minute, tzinfo=dt.UTC)


@pytest.fixture(scope="module")
def project(make_project: Callable[..., DbtProject]) -> DbtProject:
    visits, rejects = snippets(PAGE, f"{THIS}test_the_models_of_the_page")
    return make_project(
        {
            "models/sources.yml": SOURCES,
            "models/appended.sql": APPENDED,
            "models/bounded.sql": BOUNDED,
            "models/overlapping.sql": visits.replace("'visits'", "'overlapping_visits'"),
            "models/visits_rejects.sql": rejects.replace("'visits'", "'visits_rejects_visits'"),
        }
    )


def add(project: DbtProject, model: str, *rows: tuple[str, dt.datetime | None]) -> None:
    added = project.spark.createDataFrame(rows, "visit_id string, ingested_at timestamp").coalesce(1)
    added.write.format("delta").mode("append").saveAsTable(f"{project.schema}.{model}_visits")


def ids(project: DbtProject, model: str) -> list[str]:
    return sorted(row[0] for row in project.table(model).select("visit_id").collect())


@stories.about("appended")
def test_a_model_takes_what_is_newer_than_it_holds(project: DbtProject) -> Story:
    """It reads no other file for that; an emptied target is loaded again; variables ask for any window."""
    add(project, "appended", ("v0", at(9)), ("n1", None))
    add(project, "appended", ("v1", at(11)))
    yield PASSES
    assert ids(project, "appended") == ["v0", "v1"]

    add(project, "appended", ("late", at(10)), ("v2", at(11, 1)), ("v3", at(12)))
    yield PASSES
    assert ids(project, "appended") == ["v0", "v1", "v2", "v3"]
    compiled = project.compiled("appended")
    assert "(ingested_at > timestamp '2024-03-01 11:00:00+00:00')" in compiled
    # Delta counts milliseconds, so the file that ends at the boundary is read too.
    assert len(project.spark.sql(compiled).inputFiles()) == 2
    subquery = f"ingested_at > (select max(ingested_at) from {project.schema}.appended)"
    unpruned = f"select * from {project.schema}.appended_visits where {subquery}"
    assert len(project.spark.sql(unpruned).inputFiles()) == 3

    project.spark.sql(f"delete from {project.schema}.appended")
    yield PASSES
    assert ids(project, "appended") == ["late", "v0", "v1", "v2", "v3"]

    window = (
        '{lakehouse_patterns_window_from: "2024-03-01T10", lakehouse_patterns_window_to: "2024-03-01T11"}'
    )
    project.run("compile", "--select", "appended", "--vars", window)
    compiled = project.compiled("appended")
    assert (
        "(ingested_at >= timestamp '2024-03-01 10:00:00+00:00' and ingested_at < timestamp '2024-03-01 11:00:00+00:00')"
    ) in compiled
    assert_rows(project.spark.sql(compiled), [("late", at(10))])


@stories.about("overlapping", "visits_rejects")
def test_the_models_of_the_page(project: DbtProject) -> Story:
    """The overlap finds the row that was committed late; rows without a time are in the rejects, once."""
    for model in ("overlapping", "visits_rejects"):
        add(project, model, ("v0", at(9)), ("v1", at(11)), ("n1", None))
    yield PASSES
    for model in ("overlapping", "visits_rejects"):
        add(project, model, ("late", at(10)), ("v2", at(11, 1)), ("v3", at(12)))
    yield PASSES
    assert ids(project, "overlapping") == ["late", "v0", "v1", "v2", "v3"]
    assert ids(project, "visits_rejects") == ["n1"]


@stories.about("bounded")
def test_the_first_load_starts_where_it_is_told_and_ends_at_its_upper_bound(project: DbtProject) -> Story:
    add(project, "bounded", ("v0", at(9)), ("v1", at(11)), ("n1", None))
    yield PASSES
    assert ids(project, "bounded") == ["v1"]
    add(project, "bounded", ("late", at(10)), ("v2", at(11, 1)), ("v3", at(12)))
    yield PASSES
    assert ids(project, "bounded") == ["v1", "v2"]


def test_windows_are_half_open_in_both_ansi_modes(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    rows = "values ('v1', timestamp '2024-03-01 10:00:00Z'), ('v2', timestamp '2024-03-01 10:30:00Z'), " \
        "('v3', timestamp '2024-03-01 11:00:00Z'), ('n', null) as visits (id, t)"  # fmt: skip
    found = {}
    for hour in (9, 10, 11):
        window = render(
            "incremental_window",
            column="t",
            window_from=f"2024-03-01T{hour:02d}",
            window_to=f"2024-03-01T{hour + 1:02d}",
        )
        found[hour] = sorted(row[0] for row in spark.sql(f"select id from {rows} where {window}").collect())
    assert found == {9: [], 10: ["v1", "v2"], 11: ["v3"]}
    rejects = render("incremental_rejects", column="t")
    assert_rows(spark.sql(f"select id from {rows} where {rejects}"), [("n",)])


def test_text_that_is_no_time_is_a_reject_in_both_ansi_modes(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    rows = "values ('v1', '2024-03-01T10:00:00Z'), ('bad', 'soon'), ('n', null) as visits (id, t)"
    column = "try_to_timestamp(t)"
    window = render("incremental_window", column=column, watermark_column="t", bootstrap_from="2024-01-01")
    assert_rows(spark.sql(f"select id from {rows} where {window}"), [("v1",)])
    rejects = render("incremental_rejects", column=column)
    assert_rows(spark.sql(f"select id from {rows} where {rejects}"), [("bad",), ("n",)])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"column": "t", "window_from": "2024-03-01T11", "window_to": "2024-03-01T10"},
            "must be before window_to",
        ),
        (
            {"column": "t", "window_from": "2024-03-01T11", "window_to": "2024-03-01T11"},
            "must be before window_to",
        ),
        ({"column": "t", "window_from": "2024-03-01T11"}, "window_from needs window_to"),
        ({"column": "t", "window_to": "tomorrow"}, "got 'tomorrow'"),
        ({}, "name the delta column"),
        ({"column": "cast(t as timestamp)"}, "is an expression"),
    ],
)
def test_wrong_arguments_are_refused(render: MacroRenderer, arguments: dict[str, str], sentence: str) -> None:
    with pytest.raises(DbtRuntimeError, match=sentence):
        render("incremental_window", **arguments)


@pytest.mark.parametrize(("offset", "utc"), [("+01:00", "09:30:00"), ("Z", "10:30:00"), ("", "10:30:00")])
def test_a_time_with_an_offset_is_turned_into_utc(render: MacroRenderer, offset: str, utc: str) -> None:
    window = render("incremental_window", column="t", bootstrap_from=f"2024-03-01T10:30:00{offset}")
    assert window == f"(t >= timestamp '2024-03-01 {utc}+00:00')"


def test_a_column_in_quotes_is_no_expression(spark: SparkSession, render: MacroRenderer) -> None:
    rows = "values (1, timestamp '2024-03-01 10:00:00Z'), (2, null) as visits (id, `Landed At`)"
    for column in ("`Landed At`", "visits.`Landed At`"):
        window = render("incremental_window", column=column, bootstrap_from="2024-03-01")
        assert_rows(spark.sql(f"select id from {rows} where {window}"), [(1,)])


def test_groups_that_new_rows_touch(spark: SparkSession, render: MacroRenderer) -> None:
    spark.createDataFrame(
        [("a", 1, at(10)), ("a", 1, at(12)), ("a", 2, at(11)), ("b", None, at(11)), ("c", 1, None)],
        "site string, day int, t timestamp",
    ).createOrReplaceTempView("rows_of_groups")
    groups = render("incremental_groups", relation="rows_of_groups", by=["site", "day"], column="t")
    newest = spark.sql(groups).selectExpr("site", "day", "hour(t)")
    assert_rows(newest, [("a", 1, 12), ("a", 2, 11)])
    with pytest.raises(DbtRuntimeError, match="incremental_groups needs by"):
        render("incremental_groups", relation="rows_of_groups", by=[], column="t")


def test_current_lines_are_those_of_the_highest_load(spark: SparkSession, render: MacroRenderer) -> None:
    """The ledger decides: a file that landed again without lines has none."""
    spark.createDataFrame(
        [("f", 1, "old"), ("f", 2, "new"), ("g", 1, "gone"), ("h", 1, "kept")],
        "file_path string, load_id int, payload string",
    ).createOrReplaceTempView("loaded_lines")
    spark.createDataFrame(
        [("f", 1), ("f", 2), ("g", 1), ("g", 2), ("h", 1)], "file_path string, load_id int"
    ).createOrReplaceTempView("loaded_files")
    current = spark.sql(render("current_lines", lines="loaded_lines", files="loaded_files"))
    assert_rows(current, [("f", 2, "new"), ("h", 1, "kept")])


def test_a_unit_test_says_what_the_window_is(
    make_project: Callable[..., DbtProject], spark: SparkSession
) -> None:
    unit_test = snippet(PAGE, f"{THIS}test_a_unit_test_says_what_the_window_is")
    earlier = unit_test.replace("only_rows", "earlier_rows").replace("-01 10:00:00'\"", "-01 09:00:00'\"")
    project = make_project(
        {
            "models/sources.yml": raw_tables("visits"),
            "models/visits_of_the_window.sql": APPENDED.replace("appended_visits", "visits"),
            "models/unit_test.yml": unit_test,
            "models/earlier.yml": earlier,
        }
    )
    project.source("visits", spark.createDataFrame([], "visit_id string, ingested_at timestamp"))
    project.run("test", "--select", "only_rows_of_the_window")
    differences = project.fails("test", "--select", "earlier_rows_of_the_window")
    assert "differs from" in differences
    assert "before" in differences
