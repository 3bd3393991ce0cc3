"""Audit-Write-Audit-Publish: readers see audited rows or the ones before; the issues are on record."""

from __future__ import annotations

import datetime as dt
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from dbt_common.exceptions import DbtRuntimeError
from pyspark.sql import DataFrame, SparkSession

from python_jobs.quality.audit_files import Parameters, line_facts, run
from python_jobs.shared.core.failures import DataRefused, NotReady, WrongUse
from tests.support.dbt_project import REPOSITORY, DbtProject
from tests.support.killer import TableState, run_and_kill
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.snippets import snippet
from tests.support.stories import FAILS, PASSES, DbtStories, Story

PAGE = "docs/quality.md"
THIS = "tests/patterns/quality/test_audit_write_audit_publish.py::"


def model(options: str, sql: str, config: str = "materialized='awap'") -> str:
    """Return a model with these options under `meta.lakehouse_patterns.awap`."""
    return f"{{{{ config({config}, meta={{'lakehouse_patterns': {{'awap': {options}}}}}) }}}}\n{sql}"


# The spec's rule: 1 to 9,999 rows and at most 25 % invalid, else the whole batch is rejected. The rows come from
# JSON lines: one that can't be parsed has NULL everywhere and is invalid.
BATCHES = model(
    """{'audits': [
        {'name': 'rows', 'type': 'row_count', 'min': 1, 'max': 9999, 'outcome': 'dispatch'},
        {'name': 'required', 'type': 'record', 'outcome': 'dispatch', 'max_invalid_share': 0.25,
         'valid_when': 'user_id is not null and page is not null'}
    ]}""",
    """select payload, record.user_id, record.page
    from (select payload, from_json(payload, 'user_id string, page string') as record
          from {{ source('raw', this.identifier ~ '_input') }})""",
)
STRICT = model(
    """{'audits': [
        {'name': 'user_known', 'type': 'null_share', 'column': 'user_id', 'max': 0},
        {'name': 'page_known', 'type': 'null_share', 'column': 'page', 'max': 0.4},
        {'name': 'pages', 'type': 'measure', 'expression': 'count(distinct page)', 'min': 1}
    ]}""",
    "select user_id, page from {{ source('raw', 'strict_input') }}",
)
DAILY = model(
    """{'period': 'day', 'audits': [
        {'name': 'days', 'type': 'row_count', 'min': 1},
        {'name': 'site_known', 'type': 'record', 'valid_when': 'site is not null',
         'outcome': 'dispatch', 'max_invalid_share': 0.5},
        {'name': 'drop', 'type': 'change', 'expression': 'sum(visitors)', 'min': -0.4},
        {'name': 'surge', 'type': 'change', 'expression': 'sum(visitors)', 'max': 2, 'outcome': 'annotate'}
    ]}""",
    # the partition last, as the in-memory catalog wants it
    "select * from {{ source('raw', this.identifier ~ '_input') }}",
    "materialized='awap', partition_by=['day'], on_schema_change='append_new_columns'",
)
WINDOW = model(
    """{'period': 'day', 'from': "date '2024-07-02'", 'to': "date '2024-07-04'", 'audits': [
        {'name': 'rows', 'type': 'row_count', 'min': 1, 'outcome': 'annotate', 'severity': 'error'}
    ]}""",
    "select day, visitors from {{ source('raw', 'windowed_input') }}",
)
COUNTED = model(
    """{'period': 'day', 'is_deleted': 'is_deleted', 'audits': [
        {'name': 'rows', 'type': 'row_count', 'min': 1},
        {'name': 'drop', 'type': 'change', 'expression': 'sum(visitors)', 'min': -0.5}
    ]}""",
    "select day, visitors, visitors = 0 as is_deleted from {{ source('raw', 'counted_input') }}",
)
INPUT = model(
    """{'input_audits': [
        {'input': 'with_input_audit_input', 'min_rows': 100, 'min_bytes': 1000000,
         'columns': ['user_id', 'ip', 'login']}
    ], 'audits': [{'name': 'rows', 'type': 'row_count', 'min': 1}]}""",
    "select * from {{ source('raw', 'with_input_audit_input') }}",
)
# Each story has a model of its own, which reads the source <model>_input.
MODELS = {
    "by_number": BATCHES,
    "by_share": BATCHES,
    "killed": BATCHES,
    "strict": STRICT,
    "changing": DAILY,
    "rerun": DAILY,
    "rejected_day": DAILY,
    "forgotten": DAILY,
    "windowed": WINDOW,
    "counted": COUNTED,
    "with_input_audit": INPUT,
    "visit_statistics": snippet(PAGE, THIS + "test_snippet_of_the_page"),
}
TABLES = [*(f"{name}_input" for name in MODELS), "visits"]
PROPERTIES = f"""
version: 2
sources:
  - name: raw
    schema: "{{{{ target.schema }}}}"
    tables: [{", ".join(f"{{name: {name}}}" for name in TABLES)}]
models:
  - name: changing
    data_tests:
      - lakehouse_patterns.audit_within:
          name: publisher_bound
          arguments: {{audit: surge, max: 10}}
      - lakehouse_patterns.audit_within:
          name: reader_bound
          arguments: {{audit: surge, max: 1}}
      - lakehouse_patterns.audit_within:
          name: unknown_audit
          arguments: {{audit: nobody_measures_this, max: 1}}
"""
JULY_1, JULY_2, JULY_3, JULY_4, JULY_5 = (dt.date(2024, 7, day) for day in range(1, 6))
STATISTICS = "site string, visitors long, day date"
WINDOWS = "day date, visitors long"
PAGES = "user_id string, page string"

stories = DbtStories()


@pytest.fixture(scope="module")
def project(make_project: Callable[..., DbtProject]) -> DbtProject:
    models = {f"models/{name}.sql": text for name, text in MODELS.items()}
    return make_project({"models/properties.yml": PROPERTIES, **models})


def lines(project: DbtProject, name: str, *, valid: int, invalid: int) -> None:
    """Replace a model's input; every fifth invalid line can't be parsed at all."""
    project.source(
        f"{name}_input",
        project.spark.sql(
            f"""select '{{"user_id":"u' || id || '","page":"null"}}' as payload from range({valid})
            union all
            select if(id % 5 = 0, 'garbage ' || id, '{{"user_id":"u' || id || '"}}') from range({invalid})"""
        ),
    )


def rows(project: DbtProject, name: str, schema: str, *given: tuple[Any, ...]) -> None:
    """Replace a model's input."""
    project.source(f"{name}_input", project.spark.createDataFrame(given, schema))


def counts(project: DbtProject, name: str) -> tuple[int, int]:
    """Return how many rows are published and how many rejected."""
    return project.table(name).count(), project.table(f"{name}__rejects").count()


def issues(project: DbtProject, name: str) -> list[tuple[str, str, str | None]]:
    """Return run, audit and issue of each issue on record."""
    rows = project.table(f"{name}__audit_results").where("issue is not null")
    return sorted((row.run, row.audit, row.issue) for row in rows.collect())


def assert_no_staging_left(project: DbtProject) -> None:
    """Staging has a schema that no reader's table is in, and it is empty after a run."""
    spark = project.spark
    assert spark.sql(f"show schemas like '{project.schema}__staging'").count() == 1
    # Every database also shows the session's temporary views, those of other tests among them.
    for tables in (f"{project.schema}__staging", f"{project.schema} like '*stag*'"):
        assert spark.sql(f"show tables in {tables}").where("not isTemporary").collect() == []


def versions(project: DbtProject, name: str) -> int:
    return len(project.history(name))


# Outcome: dispatch ----


@stories.about("by_number")
def test_dispatch_by_the_number_of_rows(project: DbtProject) -> Story:
    """0 and 10,000 rows are rejected as a batch, 9,999 pass; a first run that is rejected leaves an empty table."""
    lines(project, "by_number", valid=10_000, invalid=0)
    yield PASSES
    assert counts(project, "by_number") == (0, 10_000)

    lines(project, "by_number", valid=9_999, invalid=0)
    yield PASSES
    assert counts(project, "by_number") == (9_999, 0)

    lines(project, "by_number", valid=0, invalid=0)
    yield PASSES
    assert counts(project, "by_number") == (9_999, 0)


@stories.about("by_share")
def test_dispatch_by_the_share_of_invalid_rows(project: DbtProject) -> Story:
    """100 rows with 25 invalid give 75 + 25; with 26 nothing new is published and 100 are rejected."""
    lines(project, "by_share", valid=75, invalid=25)
    yield PASSES
    assert counts(project, "by_share") == (75, 25)
    published = project.table("by_share")
    assert {row.page for row in published.collect()} == {"null"}  # the text is no missing value
    rejects = project.table("by_share__rejects")
    assert {tuple(row.rejected_by) for row in rejects.collect()} == {("required",)}
    assert rejects.where("payload = 'garbage 20' and user_id is null").count() == 1  # the raw line survives

    yield PASSES
    assert counts(project, "by_share") == (75, 25)  # a rerun doubles nothing
    assert project.table("by_share__audit_results").count() == 2
    before = versions(project, "by_share")

    lines(project, "by_share", valid=74, invalid=26)
    yield PASSES
    assert counts(project, "by_share") == (75, 100)
    assert versions(project, "by_share") == before  # readers still have the rows of the run before
    assert project.table("by_share__rejects").where("array_contains(rejected_by, 'required')").count() == 100


# Outcome: fail ----


@stories.about("strict")
def test_failures_are_named_together_and_nothing_is_published(project: DbtProject) -> Story:
    rows(project, "strict", PAGES, ("u1", "home"), ("u2", "about"))
    yield PASSES

    rows(project, "strict", PAGES, ("u1", None), (None, None), ("u3", "home"))
    message = yield FAILS
    assert_no_staging_left(project)
    assert "nothing was published to" in message
    assert "the share of rows with NULL in user_id is 0.3333 (1 of 3), allowed at most 0" in message
    assert "the share of rows with NULL in page is 0.6667 (2 of 3), allowed at most 0.4" in message
    assert "pages" not in re.findall(r"Audit '(\w+)'", message)
    assert_rows(project.table("strict"), [("u1", "home"), ("u2", "about")])
    assert_rows(
        project.table("strict__audit_results").select("audit", "issue"),
        [("user_known", None), ("page_known", None), ("pages", None)],
    )

    rows(project, "strict", PAGES, ("u3", "home"))
    yield PASSES
    assert_rows(project.table("strict"), [("u3", "home")])
    assert_no_staging_left(project)


@stories.about("with_input_audit")
def test_an_input_audit_blames_the_provider(project: DbtProject) -> Story:
    """All problems of the input in one error, before anything is staged."""
    rows(project, "with_input_audit", PAGES, ("u1", "home"))
    message = yield FAILS
    assert "was not built, its input failed 3 audits" in message
    assert "with_input_audit_input has 1 rows, allowed at least 100" in message
    assert re.search(r"with_input_audit_input has \d+ bytes, allowed at least 1000000", message)
    assert "with_input_audit_input lacks the columns ip, login" in message
    assert not project.spark.catalog.tableExists(f"{project.schema}.with_input_audit")


# Periods, change against history, annotation ----


@stories.about("changing")
def test_change_against_history(project: DbtProject) -> Story:
    """-50 % blocks, +300 % is published with one summary row, and a stricter reader refuses it."""
    rows(project, "changing", STATISTICS, ("a", 1000, JULY_1), ("a", 990, JULY_2), ("a", 1010, JULY_3))
    yield PASSES
    assert issues(project, "changing") == []

    rows(project, "changing", STATISTICS, ("a", 500, JULY_4))
    message = yield FAILS
    assert (
        "Audit 'drop' (fail, 2024-07-04): the change of sum(visitors) is -0.5 (500.0 after 1000.0)" in message
    )
    assert project.table("changing").count() == 3
    before = project.history("changing")[0]["version"]

    rows(project, "changing", STATISTICS, ("a", 4000, JULY_4))
    yield PASSES
    assert project.history("changing")[0]["version"] == before + 1
    (summary,) = project.table("changing__audit_results").where("issue is not null").collect()
    assert (summary.dataset, summary.run, summary.audit) == (
        f"{project.schema}.changing",
        "2024-07-04",
        "surge",
    )
    assert (summary.measured, summary.threshold, summary.format_version) == (3.0, "at most 2", 1)

    message = project.fails("test", "--select", "changing")
    assert project.statuses() == {"publisher_bound": "pass", "reader_bound": "fail", "unknown_audit": "fail"}
    assert "reader_bound: fail: Got 1 result" in message


@stories.about("rerun")
def test_a_day_that_runs_again_replaces_itself_alone(project: DbtProject) -> Story:
    """No duplicates in the final table, the rejects and the summary, and other days' files are untouched."""
    rows(project, "rerun", STATISTICS, ("a", 10, JULY_1), ("a", 10, JULY_2), (None, 1, JULY_2))
    yield PASSES
    untouched = files(project, "rerun", JULY_1)

    rows(project, "rerun", STATISTICS, ("a", 10, JULY_2), (None, 1, JULY_2))
    yield PASSES
    assert_rows(project.table("rerun"), [("a", 10, JULY_1), ("a", 10, JULY_2)])
    assert_rows(project.table("rerun__rejects"), [(None, 1, JULY_2, "2024-07-02", ("site_known",))])
    assert project.table("rerun__audit_results").count() == 8  # two days with four audits

    rows(project, "rerun", STATISTICS, ("a", 9, JULY_2), ("b", 2, JULY_2))
    yield PASSES
    assert_rows(project.table("rerun"), [("a", 10, JULY_1), ("a", 9, JULY_2), ("b", 2, JULY_2)])
    assert project.table("rerun__rejects").count() == 0
    assert project.table("rerun__audit_results").count() == 8
    assert files(project, "rerun", JULY_1) == untouched


@stories.about("rejected_day")
def test_a_period_is_rejected_alone_and_keeps_what_was_published(project: DbtProject) -> Story:
    """Then a run that stages nothing commits nothing, and one with a row of no period publishes nothing."""
    rows(project, "rejected_day", STATISTICS, ("a", 10, JULY_1), ("a", 10, JULY_2))
    yield PASSES

    rows(
        project, "rejected_day", STATISTICS,
        ("a", 11, JULY_1), (None, 7, JULY_2), (None, 8, JULY_2), ("a", 9, JULY_2),
    )  # fmt: skip
    yield PASSES
    published = [("a", 11, JULY_1), ("a", 10, JULY_2)]
    assert_rows(project.table("rejected_day"), published)
    assert project.table("rejected_day__rejects").where(f"day = '{JULY_2}'").count() == 3
    before = versions(project, "rejected_day")

    rows(project, "rejected_day", STATISTICS)
    yield PASSES
    assert versions(project, "rejected_day") == before

    rows(project, "rejected_day", STATISTICS, ("a", 1, None), ("a", 12, JULY_3))
    message = yield FAILS
    assert message.count("1 rows have NULL in the period column day") == 1
    assert_rows(project.table("rejected_day"), published)


@stories.about("forgotten")
def test_companion_tables_survive_a_lost_metastore_and_take_new_columns(project: DbtProject) -> Story:
    rows(project, "forgotten", STATISTICS, ("a", 10, JULY_1), (None, 1, JULY_1))
    yield PASSES
    before = versions(project, "forgotten__audit_results")

    for name in ("forgotten__rejects", "forgotten__audit_results"):
        project.spark.sql(f"drop table {project.schema}.{name}")
    wider = "site string, visitors long, day date, extra string"
    rows(project, "forgotten", wider, ("a", 10, JULY_2, "x"), (None, 10, JULY_2, "x"))
    yield PASSES
    assert_rows(project.table("forgotten"), [("a", 10, JULY_1, None), ("a", 10, JULY_2, "x")])
    assert_rows(project.table("forgotten__rejects").select("day", "extra"), [(JULY_1, None), (JULY_2, "x")])
    assert versions(project, "forgotten__audit_results") == before + 1


@stories.about("windowed")
def test_an_interval_removes_emptied_days_and_refuses_strangers(project: DbtProject) -> Story:
    """[2 July, 4 July): a day that is gone from the source is audited as empty; severity error ends the node."""
    rows(project, "windowed", WINDOWS)  # nothing is staged and nothing was published: one period without rows
    assert "Audit 'rows' (annotate, 2024-07-02)" in (yield FAILS)

    rows(project, "windowed", WINDOWS, (JULY_2, 20), (JULY_3, 30))
    yield PASSES
    assert issues(project, "windowed") == []

    rows(project, "windowed", WINDOWS, (JULY_3, 31))
    message = yield FAILS
    assert "what passed was published to" in message
    assert "Audit 'rows' (annotate, 2024-07-02): the number of rows is 0, allowed at least 1" in message
    assert_rows(project.table("windowed"), [(JULY_3, 31)])
    assert [run for run, _, _ in issues(project, "windowed")] == ["2024-07-02"]

    rows(project, "windowed", WINDOWS, (JULY_3, 32), (JULY_4, 40))
    message = yield FAILS
    assert "1 rows have day 2024-07-04, outside" in message
    assert_rows(project.table("windowed"), [(JULY_3, 31)])

    rows(project, "windowed", WINDOWS)
    assert "Audit 'rows' (annotate, 2024-07-03)" in (yield FAILS)
    assert project.table("windowed").count() == 0


@stories.about("counted")
def test_a_day_that_the_model_finds_empty_goes_without_an_audit(project: DbtProject) -> Story:
    rows(project, "counted", WINDOWS, (JULY_1, 10))
    yield PASSES
    rows(project, "counted", WINDOWS, (JULY_2, 20))
    yield PASSES
    rows(project, "counted", WINDOWS, (JULY_2, 0))
    yield PASSES
    assert_rows(project.table("counted"), [(JULY_1, 10, False)])
    results = project.table("counted__audit_results").select("run").distinct()
    assert_rows(results, [("2024-07-01",)])  # of what is published

    rows(project, "counted", WINDOWS, (None, 0))
    assert "1 rows have NULL in the period column day" in (yield FAILS)


@stories.about("visit_statistics")
def test_snippet_of_the_page(project: DbtProject) -> Story:
    visits = "select timestamp '2024-07-01 10:00:00' as event_time, 'u' || id as user_id from range(3)"
    project.source("visits", project.spark.sql(visits))
    yield PASSES
    assert_rows(project.table("visit_statistics"), [(JULY_1, 3, 3)])


# Staging ----


@pytest.mark.kill
def test_a_killed_run_leaves_the_published_version(project: DbtProject, tmp_path: Path) -> None:
    """Killed while it publishes, after rejects and results were written: the next run repairs all three."""
    lines(project, "killed", valid=3, invalid=1)
    project.run("run", "--select", "killed")
    before = versions(project, "killed")
    lines(project, "killed", valid=40, invalid=10)
    model_in_a_process = "tests.patterns.quality.run_dbt"
    state = run_and_kill(
        [sys.executable, "-m", model_in_a_process, str(project.root), project.schema, "killed"],
        project.location / "killed",
        TableState.DATA_WITHOUT_LOG,
        env={"PYTHONPATH": str(REPOSITORY), "LAKEHOUSE_ROOT": str(project.location)},
    )
    assert state is TableState.DATA_WITHOUT_LOG
    assert versions(project, "killed") == before
    assert project.table("killed").count() == 3
    staging = project.location.parent / f"{project.location.name}__staging" / "killed"
    assert staging.is_dir()  # what the dead run left

    project.run("run", "--select", "killed")
    assert not staging.exists()
    assert counts(project, "killed") == (40, 10)
    assert project.table("killed__audit_results").count() == 2


def test_rows_staged_by_another_run_are_not_published(spark: SparkSession, render: MacroRenderer) -> None:
    spark.sql(
        "create or replace table staged_elsewhere using delta "
        "tblproperties ('lakehouse_patterns.staged_by' = 'another invocation') as select 1 as one"
    )
    with pytest.raises(DbtRuntimeError, match="another run of the model staged its rows meanwhile"):
        render("_awap_require_own_staging", staging="staged_elsewhere")


# The audit's SQL, without dbt ----


def options(*audits: dict[str, Any], period: str | None = None) -> dict[str, Any]:
    return {"audits": list(audits), "period": period, "history": 3}


def audited(
    spark: SparkSession, render: MacroRenderer, given: dict[str, Any], rows: DataFrame, **scope: Any
) -> DataFrame:
    """Return the audit query over these staged rows."""
    given = given | {"audits": [render("_awap_audit", given=audit) for audit in given["audits"]]}
    rows.createOrReplaceTempView("awap_staged")
    default = {
        "staging": "awap_staged",
        "rows": "awap_staged",
        "period": given["period"],
        "run": "2024-07-01",
    }
    return spark.sql(
        render(
            "_awap_audit_sql",
            options=given,
            scope=default | {"interval": None, "target": None, "results": {}} | scope,
        )
    )


ALL_TYPES = [
    {"name": "rows", "type": "row_count", "min": 1},
    {"name": "nulls", "type": "null_share", "column": "site", "max": 0.5},
    {"name": "valid", "type": "record", "valid_when": "visitors > 0"},
    {"name": "sites", "type": "measure", "expression": "count(distinct site)", "min": 1},
    {"name": "visitors", "type": "change", "expression": "sum(visitors)", "min": -0.5},
]


def test_every_audit_comes_from_one_scan(
    spark: SparkSession, render: MacroRenderer, tmp_path: Path, ansi_modes: str
) -> None:
    rows = spark.createDataFrame([("a", 3, JULY_1), (None, 0, JULY_1), ("b", None, JULY_2)], STATISTICS)
    rows.write.format("delta").save(str(tmp_path / "staged"))
    staged = spark.read.format("delta").load(str(tmp_path / "staged"))
    found = audited(spark, render, options(*ALL_TYPES, period="day"), staged)
    values = found.selectExpr(
        "get_json_object(measured, '$.run') as run",
        "get_json_object(measured, '$.audit') as audit",
        "get_json_object(measured, '$.value') as value",
    )
    assert_rows(
        values,
        [
            ("2024-07-01", "rows", "2.0"), ("2024-07-02", "rows", "1.0"),
            ("2024-07-01", "nulls", "1.0"), ("2024-07-02", "nulls", "0.0"),
            ("2024-07-01", "valid", "1.0"), ("2024-07-02", "valid", "1.0"),
            ("2024-07-01", "sites", "1.0"), ("2024-07-02", "sites", "1.0"),
            ("2024-07-01", "visitors", "3.0"), ("2024-07-02", "visitors", None),
        ],
    )  # fmt: skip
    assert found._jdf.queryExecution().executedPlan().toString().count("FileScan") == 1


def test_the_baseline_is_the_median_of_earlier_periods(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    """Three periods back, earlier staged ones included; a period that is staged again forgets its old value."""
    spark.createDataFrame(
        [("2024-07-01", "visitors", 10.0), ("2024-07-02", "visitors", 1000.0), ("2024-07-03", "visitors", 14.0),
         ("2024-07-04", "visitors", 1.0), ("2024-07-03", "other audit", 5.0)],
        "run string, audit string, value double",
    ).createOrReplaceTempView("awap_results")  # fmt: skip
    staged = spark.createDataFrame([("a", 20, JULY_1), ("a", 7, JULY_4), ("a", 8, JULY_5)], STATISTICS)
    given = options(ALL_TYPES[-1], period="day")
    results = {"relation": "awap_results", "columns": ["run"]}
    found = audited(spark, render, given, staged, results=results)
    baselines = found.selectExpr(
        "get_json_object(measured, '$.run') as run", "get_json_object(measured, '$.baseline') as baseline"
    )
    # 1 July: nothing before. 4 July: 20, 1000, 14. 5 July: 1000, 14, 7.
    assert_rows(baselines, [("2024-07-01", None), ("2024-07-04", "20.0"), ("2024-07-05", "14.0")])


@pytest.mark.parametrize(
    ("audit", "row", "issue"),
    [
        (ALL_TYPES[0], {"row_count": 1}, None),
        (ALL_TYPES[0], {"row_count": 0}, "the number of rows is 0, allowed at least 1"),
        (ALL_TYPES[1], {"value": 2}, None),
        (ALL_TYPES[1], {"value": 3}, "the share of rows with NULL in site is 0.75 (3 of 4), allowed at most 0.5"),
        (ALL_TYPES[2], {"value": 1},
         "the share of rows that do not hold visitors > 0 is 0.25 (1 of 4), allowed at most 0"),
        (ALL_TYPES[3], {"value": None}, "count(distinct site) is NULL, allowed at least 1"),
        (ALL_TYPES[4], {"value": 5.0}, None),  # no history yet
        (ALL_TYPES[4], {"value": 5.0, "baseline": 10.0}, None),  # bounds are inclusive
        (ALL_TYPES[4], {"value": 4.0, "baseline": 10.0},
         "the change of sum(visitors) is -0.6 (4.0 after 10.0), allowed at least -0.5"),
        (ALL_TYPES[4], {"value": None, "baseline": 10.0},
         "the change of sum(visitors) is NULL (None after 10.0), allowed at least -0.5"),
    ],
)  # fmt: skip
def test_judgement(
    render: MacroRenderer, audit: dict[str, Any], row: dict[str, Any], issue: str | None
) -> None:
    judged = render(
        "_awap_judge", audit=render("_awap_audit", given=audit), row={"run": "r", "row_count": 4} | row
    )
    assert judged["issue"] == issue


@pytest.mark.parametrize(
    ("audit", "message"),
    [
        ({"type": "row_count", "min": 1}, "each audit of awap needs a name"),
        ({"name": "a", "type": "volume"},
         "type of audit 'a' must be one of row_count, null_share, record, measure, change"),
        ({"name": "a", "type": "row_count", "column": "x", "min": 1}, "audit 'a' has no option 'column'"),
        ({"name": "a", "type": "null_share", "max": 1}, "audit 'a' of type null_share needs column"),
        ({"name": "a", "type": "row_count"}, "audit 'a' needs a bound: min, max or both"),
        ({"name": "a", "type": "row_count", "min": 1, "outcome": "drop"}, "must be one of fail, dispatch, annotate"),
        ({"name": "a", "type": "row_count", "min": 1, "severity": "warn"}, "so its severity is error, got warn"),
        ({"name": "a", "type": "record", "valid_when": "x", "outcome": "dispatch"}, "needs max_invalid_share"),
    ],
)  # fmt: skip
def test_wrong_audits_are_refused(render: MacroRenderer, audit: dict[str, Any], message: str) -> None:
    with pytest.raises(DbtRuntimeError, match=re.escape(message)):
        render("_awap_audit", given=audit)


# Audit 1 of files ----


def write(folder: Path, **contents: bytes) -> str:
    folder.mkdir()
    for name, content in contents.items():
        (folder / f"{name}.json").write_bytes(content)
    return str(folder)


def test_all_problems_of_a_file_in_one_error(spark: SparkSession, tmp_path: Path) -> None:
    """10 bytes, one line, no JSON."""
    path = write(tmp_path / "landing", bad=b"not json!!")
    with pytest.raises(DataRefused) as refused:
        run(spark, Parameters(path, min_bytes=100, min_lines=2))
    message = str(refused.value)
    assert message.startswith("1 of 1 files failed the audit: /")
    assert message.endswith(
        "bad.json: 10 bytes, allowed at least 100; 1 lines, allowed at least 2; line 1 is not one JSON object in UTF-8"
    )


def test_a_good_delivery_is_reported(spark: SparkSession, tmp_path: Path) -> None:
    path = write(tmp_path / "landing", a=b'{"a": 1}\n{"a": 2}\n', b=b'{"a": 3}')
    assert run(spark, Parameters(path, min_lines=1)) == {"files": 2, "bytes": 26, "lines": 3}


@pytest.mark.parametrize("line", [b"[1]", b'{"a": 1', b'{"a": 1} {"b": 2}', b"null", b"\x1f\x8b\x08\x00"])
def test_the_first_invalid_line_has_its_number(spark: SparkSession, tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path / "landing", good=b'{"a": 1}', bad=b'{"a": 1}\n{"a": 2}\n' + line + b"\nalso bad")
    with pytest.raises(DataRefused, match=r"1 of 2 files .*bad.json: line 3 is not one JSON object"):
        run(spark, Parameters(path))


def test_line_numbers_across_blocks(spark: SparkSession, tmp_path: Path, blocks: Iterable[None]) -> None:
    """A file that Spark reads in many tasks has its lines counted from its beginning."""
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{number}\n" for number in range(1, 2001)))
    lines = spark.read.text(str(path))
    assert lines.rdd.getNumPartitions() > 3
    (row,) = line_facts(lines, lines["value"].isin("1777", "1999")).collect()
    assert (row.lines, row.header, row.first_invalid_line) == (2000, "1", 1777)


@pytest.fixture
def blocks(spark: SparkSession) -> Iterable[None]:
    """Let Spark cut files into blocks of 1 KB."""
    names = ("spark.sql.files.maxPartitionBytes", "spark.sql.files.openCostInBytes")
    for name in names:
        spark.conf.set(name, "1024")
    yield
    for name in names:
        spark.conf.unset(name)


def test_an_empty_file_and_a_wrong_header(spark: SparkSession, tmp_path: Path) -> None:
    path = write(tmp_path / "landing", empty=b"", header=b'visit_id;"user_id";page\n1;2;3\n')
    parameters = Parameters(path, "csv", min_lines=1, columns=["user_id", "ip", "login"], delimiter=";")
    with pytest.raises(DataRefused) as refused:
        run(spark, parameters)
    message = str(refused.value)
    assert (
        "empty.json: 0 bytes, allowed at least 1; 0 lines, allowed at least 1; the header lacks user_id"
        in message
    )
    assert "header.json: the header lacks ip, login" in message


def test_no_file_is_not_ready(spark: SparkSession, tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(NotReady, match="there is no file at"):
            run(spark, Parameters(str(path)))


def test_wrong_use_of_the_file_audit() -> None:
    with pytest.raises(WrongUse, match="columns are those of a CSV header"):
        Parameters("x", columns=["a"])
    with pytest.raises(WrongUse, match="must not be negative, got -1"):
        Parameters("x", min_bytes=-1)


def files(project: DbtProject, name: str, day: dt.date) -> set[str]:
    """Return the data files that hold a day's published rows."""
    rows = project.table(name).where(f"day = date '{day}'").select("_metadata.file_path").distinct()
    return {row.file_path for row in rows.collect()}
