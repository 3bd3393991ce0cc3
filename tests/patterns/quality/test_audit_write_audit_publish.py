"""Audit-Write-Audit-Publish: readers see audited rows or the ones before; the issues are on record."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import re
import sys
from collections.abc import Callable, Iterable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from dbt_common.exceptions import DbtRuntimeError
from pyspark.errors import AnalysisException
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
# JSON lines: one that can't be parsed has NULL everywhere and is invalid. A model reads INPUT.
RULES = """'audits': [
    {'name': 'rows', 'type': 'row_count', 'min': 1, 'max': 9999, 'outcome': 'dispatch'},
    {'name': 'required', 'type': 'record', 'outcome': 'dispatch', 'max_invalid_share': 0.25,
     'valid_when': 'user_id is not null and page is not null'}
]"""
PARSED = """select batch, payload, record.user_id, record.page
    from (select *, from_json(payload, 'user_id string, page string') as record from INPUT)"""
WHOLE = model(f"{{{RULES}}}", PARSED)
STRICT = model(
    """{'audits': [
        {'name': 'user_known', 'type': 'null_share', 'column': 'user_id', 'max': 0},
        {'name': 'page_known', 'type': 'null_share', 'column': 'page', 'max': 0.4},
        {'name': 'pages', 'type': 'measure', 'expression': 'count(distinct page)', 'min': 1}
    ]}""",
    "select user_id, page from INPUT",
)
DAILY = model(
    """{'period': 'day', 'audits': [
        {'name': 'days', 'type': 'row_count', 'min': 1},
        {'name': 'site_known', 'type': 'record', 'valid_when': 'site is not null',
         'outcome': 'dispatch', 'max_invalid_share': 0.5},
        {'name': 'drop', 'type': 'change', 'expression': 'sum(visitors)', 'min': -0.4},
        {'name': 'surge', 'type': 'change', 'expression': 'sum(visitors)', 'max': 2, 'outcome': 'annotate'}
    ]}""",
    "select * from INPUT",  # the partition last, as the in-memory catalog wants it
    "materialized='awap', partition_by=['day'], on_schema_change='append_new_columns'",
)
WINDOW = model(
    """{'period': 'day', 'from': "date '2024-07-02'", 'to': "date '2024-07-04'", 'audits': [
        {'name': 'rows', 'type': 'row_count', 'min': 1, 'outcome': 'annotate', 'severity': 'error'}
    ]}""",
    "select day, visitors from INPUT",
)
COUNTED = model(
    """{'period': 'day', 'is_deleted': 'is_deleted', 'audits': [
        {'name': 'rows', 'type': 'row_count', 'min': 1},
        {'name': 'drop', 'type': 'change', 'expression': 'sum(visitors)', 'min': -0.5}
    ]}""",
    "select day, visitors, visitors = 0 as is_deleted from INPUT",
)
AUDITED_INPUT = model(
    """{'input_audits': [
        {'input': 'delivered', 'min_rows': 100, 'min_bytes': 1000000, 'columns': ['USER_ID', 'ip', 'login']}
    ], 'audits': [{'name': 'rows', 'type': 'row_count', 'min': 1}]}""",
    "select * from {{ source('raw', 'delivered') }}",
)
# A table that Filter Interceptor flagged, with a column that `__rejects` once had.
FLAGGED = model(
    """{'audits': [
        {'name': 'user_known', 'type': 'record', 'valid_when': 'is_user', 'outcome': 'dispatch',
         'max_invalid_share': 1},
        {'name': 'not_filtered', 'type': 'record', 'valid_when': 'rejected_by is null', 'outcome': 'dispatch',
         'max_invalid_share': 1}
    ]}""",
    """select flagged.*, users.user_id is not null as is_user
    from ({{ lakehouse_patterns.filter_interceptor_flags(
        'INPUT', [{'name': 'page_missing', 'condition': 'page is not null'}]
    ) }}) as flagged
    left join known_users as users on flagged.user_id = users.user_id""",
)
# A condition that is another one at each look, as one on current_timestamp() may be.
DRAWN = model(
    """{'audits': [
        {'name': 'drawn', 'type': 'record', 'valid_when': "uuid() < '8'", 'outcome': 'dispatch',
         'max_invalid_share': 1},
        {'name': 'odd', 'type': 'record', 'valid_when': 'remainder = 1', 'outcome': 'dispatch', 'max_invalid_share': 1}
    ]}""",
    "select id, nullif(id % 2, 0) as remainder from range(64)",
)
DEFERRED = model(
    """{'input_audits': [{'input': 'upstream', 'min_rows': 2}],
        'audits': [{'name': 'rows', 'type': 'row_count', 'min': 1}]}""",
    "select id from {{ ref('upstream') }}",
)
# Each story has a model of its own, which reads the view or the table <model>_input.
MODELS = {
    "batches": model(f"{{'period': 'batch', {RULES}}}", PARSED),
    "whole": WHOLE,
    "killed": WHOLE.replace("INPUT", "{{ source('raw', 'killed_input') }}"),
    "strict": STRICT,
    "changing": DAILY,
    "rerun": DAILY,
    "rejected_day": DAILY,
    "windowed": WINDOW,
    "counted": COUNTED,
    "with_input_audit": AUDITED_INPUT,
    "flagged": FLAGGED,
    "drawn": DRAWN,
    "neighbours": WHOLE,
    "deferred": DEFERRED,
    "upstream": "{{ config(materialized='table') }}\nselect 1 as id",
    "audited/by_default": "select user_id, page from INPUT",
    "audited/by_own_rules": STRICT,
    "visit_statistics": snippet(PAGE, THIS + "test_snippet_of_the_page"),
}
PROPERTIES = """
version: 2
sources:
  - name: raw
    schema: "{{ target.schema }}"
    tables: [{name: killed_input}, {name: delivered}, {name: visits}]
models:
  - name: changing
    data_tests:
      - lakehouse_patterns.audit_within:
          name: publisher_bound
          arguments: {audit: surge, max: 10}
      - lakehouse_patterns.audit_within:
          name: reader_bound
          arguments: {audit: surge, max: 1}
      - lakehouse_patterns.audit_within:
          name: unknown_audit
          arguments: {audit: nobody_measures_this, max: 1}
"""
DEFAULTS = {
    "+materialized": "awap",
    "+meta": {
        "lakehouse_patterns": {
            "awap": {
                "audits": [
                    {"name": "rows", "type": "row_count", "min": 1},
                    {"name": "users", "type": "null_share", "column": "user_id", "max": 0.05},
                ]
            }
        }
    },
}
JULY_1, JULY_2, JULY_3, JULY_4, JULY_5 = (dt.date(2024, 7, day) for day in range(1, 6))
STATISTICS = "site string, visitors long, day date"
WINDOWS = "day date, visitors long"
PAGES = "user_id string, page string"

stories = DbtStories()


@pytest.fixture(scope="module")
def project(make_project: Callable[..., DbtProject]) -> DbtProject:
    models = {
        f"models/{path}.sql": text.replace("INPUT", f"{path.rpartition('/')[2]}_input")
        for path, text in MODELS.items()
    }
    every_model = {"+file_format": "delta", "+location_root": "{{ env_var('LAKEHOUSE_ROOT') }}"}
    return make_project(
        {"models/properties.yml": PROPERTIES, **models},
        settings={"models": {**every_model, "harness": {"audited": DEFAULTS}}},
    )


def lines(spark: SparkSession, batch: str, *, valid: int, invalid: int) -> DataFrame:
    """Return a batch of JSON lines; every fifth invalid line can't be parsed at all."""
    return spark.sql(
        f"""select '{batch}' as batch, '{{"user_id":"u' || id || '","page":"null"}}' as payload from range({valid})
        union all
        select '{batch}', if(id % 5 = 0, 'garbage ' || id, '{{"user_id":"u' || id || '"}}') from range({invalid})"""
    )


def rows(project: DbtProject, name: str, schema: str, *given: tuple[Any, ...]) -> None:
    """Replace a model's input."""
    project.spark.createDataFrame(given, schema).createOrReplaceTempView(f"{name}_input")


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


@stories.about("batches")
def test_a_batch_is_dispatched_by_the_share_and_the_number_of_its_rows(project: DbtProject) -> Story:
    """100 rows with 25 invalid give 75 + 25, with 26 all are rejected; so are 10,000 rows, and 9,999 pass."""
    sizes = {"few invalid": (75, 25), "many invalid": (74, 26), "large": (9_999, 0), "too large": (10_000, 0)}
    batches = [
        lines(project.spark, batch, valid=valid, invalid=invalid) for batch, (valid, invalid) in sizes.items()
    ]
    reduce(DataFrame.union, batches).createOrReplaceTempView("batches_input")
    yield PASSES
    published, rejects = project.table("batches"), project.table("batches__rejects")
    assert_rows(published.groupBy("batch").count(), [("few invalid", 75), ("large", 9_999)])
    assert_rows(
        rejects.groupBy("batch", "lakehouse_patterns_rejected_by").count(),
        [
            ("few invalid", ("required",), 25),
            ("many invalid", ("required",), 100),
            ("too large", ("rows",), 10_000),
        ],
    )
    assert {row.page for row in published.collect()} == {"null"}  # the text is no missing value
    raw = rejects.where("batch = 'few invalid' and payload = 'garbage 20' and user_id is null")
    assert raw.count() == 1  # the raw line survives


@stories.about("whole")
def test_a_batch_without_rows_is_rejected_and_readers_keep_theirs(project: DbtProject) -> Story:
    lines(project.spark, "", valid=75, invalid=25).createOrReplaceTempView("whole_input")
    yield PASSES
    assert counts(project, "whole") == (75, 25)
    before = versions(project, "whole")

    lines(project.spark, "", valid=0, invalid=0).createOrReplaceTempView("whole_input")
    yield PASSES
    assert counts(project, "whole") == (75, 0)
    assert versions(project, "whole") == before
    assert project.table("whole__audit_results").count() == 2  # of what is published


@stories.about("flagged")
def test_a_rejected_row_has_the_names_of_all_rules_that_it_breaks(project: DbtProject) -> Story:
    """And its own `rejected_by` of Filter Interceptor; a user that no table knows is one of the rules."""
    schema = "visit_id string, user_id string, page string, audit_run string"
    rows(
        project, "flagged", schema,
        ("v1", "u1", "home", "a"), ("v2", "u1", None, "b"), ("v3", "ghost", "home", "c"), ("v4", "ghost", None, "d"),
    )  # fmt: skip
    project.spark.createDataFrame([("u1",)], "user_id string").createOrReplaceTempView("known_users")
    yield PASSES
    assert_rows(project.table("flagged"), [("v1", "u1", "home", "a", None, None, True)])
    assert_rows(
        project.table("flagged__rejects").select(
            "visit_id", "audit_run", "rejected_by", "lakehouse_patterns_rejected_by"
        ),
        [
            ("v2", "b", "page_missing", ("not_filtered",)),
            ("v3", "c", None, ("user_known",)),
            ("v4", "d", "page_missing", ("user_known", "not_filtered")),
        ],
    )


@stories.about("drawn")
def test_a_condition_on_a_row_is_judged_once(project: DbtProject) -> Story:
    """What is not published is rejected, and counted, also if the condition would be another one by then."""
    yield PASSES
    published, rejects = project.table("drawn"), project.table("drawn__rejects")
    assert_rows(published.select("id").union(rejects.select("id")), [(number,) for number in range(64)])
    assert published.where("remainder is null").count() == 0  # a condition that is NULL rejects
    drawn = rejects.where("array_contains(lakehouse_patterns_rejected_by, 'drawn')").count()
    found = {row.audit: row.value for row in project.table("drawn__audit_results").collect()}
    assert found == {"drawn": drawn, "odd": 32}


# Outcome: fail ----


@stories.about("strict")
def test_failures_are_named_together_and_nothing_is_published(project: DbtProject) -> Story:
    rows(project, "strict", PAGES, ("u1", "home"), ("u2", "about"))
    yield PASSES
    assert_no_staging_left(project)

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


@stories.about("by_default")
def test_a_model_without_options_has_the_audits_of_its_folder(project: DbtProject) -> Story:
    """6 NULLs in 100 rows are too many for a limit of 5 %, 4 are not."""
    configs = {node.name: node.config for node in project.manifest().nodes.values()}
    audits = {
        name: [audit["name"] for audit in configs[name].meta["lakehouse_patterns"]["awap"]["audits"]]
        for name in ("by_default", "by_own_rules")
    }
    assert audits == {"by_default": ["rows", "users"], "by_own_rules": ["user_known", "page_known", "pages"]}
    assert configs["by_default"].materialized == "awap"

    rows(project, "by_default", PAGES, *[(f"u{n}" if n >= 6 else None, "home") for n in range(100)])
    message = yield FAILS
    assert "the share of rows with NULL in user_id is 0.06 (6 of 100), allowed at most 0.05" in message

    rows(project, "by_default", PAGES, *[(f"u{n}" if n >= 4 else None, "home") for n in range(100)])
    yield PASSES
    assert project.table("by_default").count() == 100


@stories.about("with_input_audit")
def test_an_input_audit_blames_the_provider(project: DbtProject) -> Story:
    """All problems of the input in one error, before anything is staged."""
    project.source("delivered", project.spark.createDataFrame([("u1", "home")], PAGES))
    message = yield FAILS
    assert "was not built, its input failed 3 audits" in message
    assert "delivered has 1 rows, allowed at least 100" in message
    assert re.search(r"delivered has \d+ bytes, allowed at least 1000000", message)
    assert "delivered lacks the columns ip, login" in message
    assert not project.spark.catalog.tableExists(f"{project.schema}.with_input_audit")


def test_an_input_audit_reads_what_defer_puts_in_place(project: DbtProject, tmp_path: Path) -> None:
    """`upstream` was never built here: `--defer` reads production's."""
    assert "upstream does not exist" in project.fails("run", "--select", "deferred")
    production = f"{project.schema}_production"
    project.spark.sql(f"create schema {production} location '{tmp_path}/production'")
    project.spark.sql(f"create table {production}.upstream using delta as select id from range(2)")
    manifest = json.loads((project.root / "target" / "manifest.json").read_text(encoding="utf-8"))
    manifest["nodes"]["model.harness.upstream"] |= {
        "schema": production,
        "relation_name": f"{production}.upstream",
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    project.run("run", "--select", "deferred", "--defer", "--state", str(tmp_path))
    assert_rows(project.table("deferred"), [(0,), (1,)])


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
    """No duplicates in the final table, the rejects and the summary; then new columns and a lost metastore."""
    rows(project, "rerun", STATISTICS, ("a", 10, JULY_1), ("a", 10, JULY_2), (None, 1, JULY_2))
    yield PASSES
    untouched = files(project, "rerun", JULY_1)

    rows(project, "rerun", STATISTICS, ("a", 9, JULY_2), ("b", 2, JULY_2), (None, 1, JULY_2))
    yield PASSES
    assert_rows(project.table("rerun"), [("a", 10, JULY_1), ("a", 9, JULY_2), ("b", 2, JULY_2)])
    assert_rows(project.table("rerun__rejects"), [(None, 1, JULY_2, "2024-07-02", ("site_known",))])
    assert project.table("rerun__audit_results").count() == 8  # two days with four audits
    assert files(project, "rerun", JULY_1) == untouched
    before = versions(project, "rerun__audit_results")

    for name in ("rerun__rejects", "rerun__audit_results"):
        project.spark.sql(f"drop table {project.schema}.{name}")
    wider = "site string, visitors long, day date, extra string"
    rows(project, "rerun", wider, ("a", 10, JULY_3, "x"), (None, 10, JULY_3, "x"))
    yield PASSES
    assert_rows(project.table("rerun").where("day = '2024-07-03'"), [("a", 10, JULY_3, "x")])
    assert_rows(project.table("rerun__rejects").select("day", "extra"), [(JULY_2, None), (JULY_3, "x")])
    assert versions(project, "rerun__audit_results") == before + 1


@stories.about("rejected_day")
def test_a_period_is_rejected_alone_and_keeps_what_was_published(project: DbtProject) -> Story:
    """Then a run that stages nothing commits nothing."""
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


@stories.about("windowed")
def test_an_interval_removes_emptied_days_and_refuses_strangers(project: DbtProject) -> Story:
    """[2 July, 4 July): a day that is gone from the source is audited as empty; severity error ends the node."""
    rows(project, "windowed", WINDOWS)  # nothing is staged and nothing was published: one period without rows
    assert "Audit 'rows' (annotate, 2024-07-02)" in (yield FAILS)
    measured = project.table("windowed__audit_results").select("run", "audit", "measured")
    assert_rows(measured, [("2024-07-02", "rows", 0.0)])  # an empty run is on record, no run is not

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


@stories.about("counted")
def test_a_day_that_the_model_finds_empty_goes_without_an_audit(project: DbtProject) -> Story:
    rows(project, "counted", WINDOWS, (JULY_1, 10), (JULY_2, 20))
    yield PASSES
    rows(project, "counted", WINDOWS, (JULY_2, 0))
    yield PASSES
    assert_rows(project.table("counted"), [(JULY_1, 10, False)])
    results = project.table("counted__audit_results").select("run").distinct()
    assert_rows(results, [("2024-07-01",)])  # of what is published

    rows(project, "counted", WINDOWS, (None, 1), (JULY_3, 10))
    message = yield FAILS
    assert message.count("1 rows have NULL in the period column day") == 1  # not once an audit
    assert_rows(project.table("counted"), [(JULY_1, 10, False)])


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
    project.source("killed_input", lines(project.spark, "", valid=3, invalid=1))
    project.run("run", "--select", "killed")
    before = versions(project, "killed")
    project.source("killed_input", lines(project.spark, "", valid=40, invalid=10))
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
    """They are refused before the first write, and by every statement that reads them."""
    for owner, property in (("mine", render("_awap_mark")), ("another", "staged_by_another_run")):
        spark.sql(
            f"create or replace table staged_by_{owner} using delta "
            f"tblproperties ('lakehouse_patterns.staged_by' = '{owner} invocation') "
            f"as select 1 as one, cast(null as boolean) as {property}"
        )
    with pytest.raises(DbtRuntimeError, match="another run of the model staged its rows meanwhile"):
        render("_awap_require_own_staging", staging="staged_by_another")
    assert_rows(spark.sql("select * from " + render("_awap_staged_rows", staging="staged_by_mine")), [(1,)])
    with pytest.raises(AnalysisException, match="lakehouse_patterns_staged_by"):
        spark.sql("select * from " + render("_awap_staged_rows", staging="staged_by_another"))


@stories.about("neighbours")
def test_a_table_that_awap_did_not_create_is_never_replaced(project: DbtProject) -> Story:
    """The names are derived from the model's: somebody may have had them before."""
    spark = project.spark
    lines(spark, "", valid=4, invalid=1).createOrReplaceTempView("neighbours_input")
    yield PASSES
    assert counts(project, "neighbours") == (4, 1)
    for schema, name in [
        (project.schema, "neighbours__rejects"),
        (project.schema, "neighbours__audit_results"),
        (f"{project.schema}__staging", "neighbours"),
    ]:
        table = f"{schema}.{name}"
        spark.sql(f"drop table if exists {table}")  # ours; its files stay, and the next run finds them
        spark.sql(f"create table {table} using delta as select 'somebody''s' as run, 1 as amount")
        message = yield FAILS
        assert f"{table} exists and was not created by awap: rename or drop it" in message
        assert_rows(spark.table(table), [("somebody's", 1)])
        spark.sql(f"drop table {table}")


# The audit's SQL, without dbt ----


def audited(
    spark: SparkSession,
    render: MacroRenderer,
    audits: list[dict[str, Any]],
    rows: DataFrame,
    period: tuple[str, str],
    results: str | None = None,
) -> DataFrame:
    """Return the audit query over these staged rows; the period is a column and its type."""
    rows.createOrReplaceTempView("awap_staged")
    scope = {
        "staged": "awap_staged",
        "rows": "awap_staged",
        "audits": [render("_awap_audit", given=audit) for audit in audits],
        "types": dict(rows.dtypes),
        "period": period[0],
        "type": period[1],
        "interval": None,
        "target": None,
        "results": results,
    }
    return spark.sql(render("_awap_audit_sql", options={"history": 3}, scope=scope))


def of_json(found: DataFrame, *names: str) -> DataFrame:
    """Return fields of the measured values."""
    return found.selectExpr(*(f"get_json_object(measured, '$.{name}') as {name}" for name in names))


DAY = ("day", "date")
ALL_TYPES: list[dict[str, Any]] = [
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
    found = audited(spark, render, ALL_TYPES, staged, DAY)
    assert_rows(
        of_json(found, "run", "audit", "value"),
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
    found = audited(spark, render, [ALL_TYPES[-1]], staged, DAY, results="awap_results")
    # 1 July: nothing before. 4 July: 20, 1000, 14. 5 July: 1000, 14, 7.
    assert_rows(
        of_json(found, "run", "baseline"),
        [("2024-07-01", None), ("2024-07-04", "20.0"), ("2024-07-05", "14.0")],
    )


@pytest.mark.parametrize("type", ["int", "decimal(4,1)"])
def test_periods_are_in_the_order_of_their_type(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str, type: str
) -> None:
    """As texts, 10 comes before 8 and 9: the newest period would have no history."""
    staged = spark.sql(
        f"select cast(number as {type}) as number, visitors from values (9, 30), (10, 50) as t (number, visitors)"
    )
    eight = "8" if type == "int" else "8.0"
    spark.sql(f"select '{eight}' as run, 'visitors' as audit, 10D as value").createOrReplaceTempView(
        "numbered"
    )
    found = audited(spark, render, [ALL_TYPES[-1]], staged, ("number", type), results="numbered")
    baselines = of_json(found, "run", "baseline").selectExpr("cast(run as double)", "baseline")
    assert_rows(baselines, [(9.0, "10.0"), (10.0, "20.0")])


def test_a_value_that_is_no_number_is_none_of_the_history(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    """Neither one that was published before, nor one that is staged with the others."""
    spark.sql(
        """select run, 'visitors' as audit, value from values
        ('2024-06-28', 10D), ('2024-06-29', double('NaN')), ('2024-06-30', double('Infinity')) as t (run, value)"""
    ).createOrReplaceTempView("unnumbered")
    schema = "site string, visitors double, day date"
    staged = spark.createDataFrame([("a", float("nan"), JULY_1), ("a", 30.0, JULY_2)], schema)
    found = audited(spark, render, [ALL_TYPES[-1]], staged, DAY, results="unnumbered")
    assert_rows(
        of_json(found, "run", "value", "baseline"),
        [("2024-07-01", "NaN", "10.0"), ("2024-07-02", "30.0", "10.0")],
    )


@pytest.mark.parametrize(
    ("lower", "upper", "type", "is_before"),
    [
        (9, 10, "int", True),
        (10, 9, "int", False),
        (9, 9, "int", False),
        ("'9'", "'10'", "string", False),
        ("'9.5'", "'10'", "decimal(4,2)", True),
        ("date '2024-07-02'", "'2024-07-04'", "date", True),
        ("'soon'", "'2024-07-04'", "date", False),
    ],
)
def test_bounds_are_compared_as_their_type(
    spark: SparkSession, render: MacroRenderer, lower: object, upper: object, type: str, is_before: bool
) -> None:
    sql = render("_awap_bounds_sql", options={"from": lower, "to": upper}, type=type)
    assert spark.sql(sql).collect()[0].is_before is is_before


def test_columns_may_have_the_names_of_what_is_measured(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    """The period is `run`, and the audits read `row_count`, `value_1` and `measured`."""
    spark.sql("select '8' as run, 'visitors' as audit, 10D as value").createOrReplaceTempView("named_before")
    staged = spark.sql(
        "select run, row_count, value_1, measured, 'x' as audit, true as is_staged from values "
        "(9, null, 30, 1), (9, 2, 40, 1), (10, 3, 50, 5) as t (run, row_count, value_1, measured)"
    )
    audits: list[dict[str, Any]] = [
        {"name": "visitors", "type": "change", "expression": "sum(value_1)", "min": -0.5},
        {"name": "nulls", "type": "null_share", "column": "ROW_COUNT", "max": 0},
        {"name": "valid", "type": "record", "valid_when": "measured < 5 and is_staged and audit = 'x'"},
    ]
    found = audited(spark, render, audits, staged, ("`run`", "int"), results="named_before")
    assert_rows(
        of_json(found, "run", "audit", "value", "baseline"),
        [
            ("9", "visitors", "70.0", "10.0"), ("10", "visitors", "50.0", "40.0"),
            ("9", "nulls", "1.0", None), ("10", "nulls", "0.0", "1.0"),
            ("9", "valid", "0.0", None), ("10", "valid", "1.0", "0.0"),
        ],
    )  # fmt: skip


FALL = {"name": "fall", "type": "change", "expression": "sum(visitors)", "min": -0.25, "max": 0.25}
NO_NUMBERS: list[object] = [float("nan"), float("inf"), "5", True]


def test_a_reader_refuses_what_is_no_number(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    """NULL is a change without history, unless it is an issue."""
    spark.sql(
        """select run, 'a' as audit, measured, issue, '' as threshold from values
        ('at', 5D, null), ('above', 5.1D, null), ('below', 0.9D, null), ('nan', double('NaN'), null),
        ('infinite', double('Infinity'), null), ('unknown', cast(null as double), null),
        ('broken', cast(null as double), 'sum(x) is NULL') as t (run, measured, issue)"""
    ).createOrReplaceTempView("measured_before")

    def beyond(**bounds: Any) -> set[str]:
        sql = render("_awap_beyond_sql", results="measured_before", audit="a", **bounds)
        return {row.run for row in spark.sql(sql).collect()}

    assert beyond(min=None, max=5) == {"above", "nan", "infinite", "broken"}
    assert beyond(min=1, max=None) == {"below", "nan", "infinite", "broken"}


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
        (ALL_TYPES[3], {"value": "NaN"}, "count(distinct site) is NaN, allowed at least 1"),
        (ALL_TYPES[3], {"value": "Infinity"}, "count(distinct site) is Infinity, allowed at least 1"),
        (ALL_TYPES[4], {"value": "NaN", "baseline": 10.0},
         "the change of sum(visitors) is NaN (NaN after 10.0), allowed at least -0.5"),
        (ALL_TYPES[4], {"value": "Infinity"},
         "the change of sum(visitors) is Infinity (Infinity after None), allowed at least -0.5"),
        (FALL, {"value": -150.0, "baseline": -100.0},
         "the change of sum(visitors) is -0.5 (-150.0 after -100.0), allowed at least -0.25 and at most 0.25"),
        (FALL, {"value": -50.0, "baseline": -100.0},
         "the change of sum(visitors) is 0.5 (-50.0 after -100.0), allowed at least -0.25 and at most 0.25"),
        (FALL, {"value": 100.0, "baseline": -100.0},
         "the change of sum(visitors) is 2 (100.0 after -100.0), allowed at least -0.25 and at most 0.25"),
        (FALL, {"value": -125.0, "baseline": -100.0}, None),
        (FALL, {"value": -75.0, "baseline": -100.0}, None),
        (FALL, {"value": 75.0, "baseline": 100.0}, None),
        (FALL, {"value": 0.0, "baseline": 0.0}, None),
        (FALL, {"value": 5.0, "baseline": 0.0},
         "the change of sum(visitors) is infinite (5.0 after 0.0), allowed at least -0.25 and at most 0.25"),
        (FALL, {"value": -5.0, "baseline": 0.0},
         "the change of sum(visitors) is infinite (-5.0 after 0.0), allowed at least -0.25 and at most 0.25"),
        (FALL, {"value": None, "baseline": 0.0},
         "the change of sum(visitors) is NULL (None after 0.0), allowed at least -0.25 and at most 0.25"),
        (FALL, {"value": None}, None),
        (ALL_TYPES[4], {"value": 1e308, "baseline": 1e-308},
         "the change of sum(visitors) is inf (1e+308 after 1e-308), allowed at least -0.5"),
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
        ({"name": "a", "type": "null_share", "column": "x", "max": 5},
         "max of audit 'a' must be a share between 0 and 1, got 5"),
        *(({"name": "a", "type": "row_count", "max": bound}, f"max of audit 'a' must be a number, got '{bound}'")
          for bound in NO_NUMBERS),
    ],
)  # fmt: skip
def test_wrong_audits_are_refused(render: MacroRenderer, audit: dict[str, Any], message: str) -> None:
    with pytest.raises(DbtRuntimeError, match=re.escape(message)):
        render("_awap_audit", given=audit)


@pytest.mark.parametrize("history", [0, 2.5, float("nan"), "7"])
def test_a_wrong_history_is_refused(render: MacroRenderer, history: object) -> None:
    given = {"audits": [ALL_TYPES[0]]}
    assert render("_awap_options", given=given | {"history": 1})["history"] == 1
    with pytest.raises(DbtRuntimeError, match="history of awap must be a number of periods from 1 on"):
        render("_awap_options", given=given | {"history": history})


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


def test_a_file_that_can_not_be_read_is_a_problem_like_any_other(spark: SparkSession, tmp_path: Path) -> None:
    landing = tmp_path / "landing"
    path = write(landing, good=b'{"a": 1}', short=b"{")
    packed = gzip.compress(b'{"a": 1}\n' * 9)
    for name, content in {
        "cut.gz": packed[:-3],
        "plain.gz": b'{"a": 1}\n',
        "plain.bz2": b'{"a": 1}\n',
    }.items():
        (landing / name).write_bytes(content)
    (landing / "whole.gz").write_bytes(packed)
    with pytest.raises(DataRefused) as refused:
        run(spark, Parameters(path))
    problems = str(refused.value).split(": ", 1)[1].split(" | ")
    assert str(refused.value).startswith("4 of 6 files failed the audit: ")
    assert [re.sub(r"^.*/landing/", "", problem).split(" (")[0] for problem in problems] == [
        "cut.gz: it can't be read",
        "plain.bz2: it can't be read",
        "plain.gz: it can't be read",
        "short.json: line 1 is not one JSON object in UTF-8",
    ]
    assert "(it isn't bzip2 from its first byte to its last" in problems[1]


def test_a_blank_line_is_no_record_as_for_the_loaders(spark: SparkSession, tmp_path: Path) -> None:
    """A line's number counts it."""
    path = write(tmp_path / "landing", a=b'{"a":1}\n\n \t\r\n{"a":2}\n', b=b"\n\n")
    assert run(spark, Parameters(path, min_lines=0)) == {"files": 2, "bytes": 23, "lines": 2}
    with pytest.raises(DataRefused, match=r"^1 of 2 files .*/b\.json: 0 lines, allowed at least 1$"):
        run(spark, Parameters(path))
    (tmp_path / "landing" / "b.json").write_bytes(b"\n\n[]\n")
    with pytest.raises(DataRefused, match=r"b\.json: line 3 is not one JSON object in UTF-8$"):
        run(spark, Parameters(path))
    (tmp_path / "landing" / "a.json").write_bytes(b"\r\n\nid,name\r\n\n")
    (tmp_path / "landing" / "b.json").unlink()
    csv = {"format": "csv", "columns": ["name"]}
    assert run(spark, Parameters(path, **csv)) == {"files": 1, "bytes": 13, "lines": 1}
    with pytest.raises(DataRefused, match=r"1 lines, allowed at least 2$"):
        run(spark, Parameters(path, min_lines=2, **csv))


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


def test_csv_is_audited_as_the_loaders_read_it(spark: SparkSession, tmp_path: Path) -> None:
    path = write(
        tmp_path / "landing",
        good=b'\xef\xbb\xbf"ID"\t"na""me"\r\n1\t"a\tb"\r\n',
        open=b'id\tna"me\n1\t"a\n2\tb"\n',
    )
    parameters = Parameters(path, "csv", columns=["id", 'NA"ME'], delimiter=r"\t")
    with pytest.raises(
        DataRefused, match=r"^1 of 2 files failed the audit: \S+open\.json: line 2 is not one CSV record"
    ):
        run(spark, parameters)
    (tmp_path / "landing" / "open.json").unlink()
    assert run(spark, parameters)["lines"] == 2


def test_no_file_is_not_ready(spark: SparkSession, tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(NotReady, match="there is no file at"):
            run(spark, Parameters(str(path)))


def test_wrong_use_of_the_file_audit(spark: SparkSession) -> None:
    with pytest.raises(WrongUse, match="columns are those of a CSV header"):
        Parameters("x", columns=["a"])
    for path in ("landing/{a", "landing/[0-"):
        with pytest.raises(WrongUse, match=r"is no pattern of files .*; close each '\{' and '\['"):
            run(spark, Parameters(path, pattern=True))
    with pytest.raises(WrongUse, match="must not be negative, got -1"):
        Parameters("x", min_bytes=-1)


def files(project: DbtProject, name: str, day: dt.date) -> set[str]:
    """Return the data files that hold a day's published rows."""
    rows = project.table(name).where(f"day = date '{day}'").select("_metadata.file_path").distinct()
    return {row.file_path for row in rows.collect()}
