"""Wrapper: the original record untouched, computed values beside it, in tables and as a JSON envelope."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dbt_common.exceptions import DbtRuntimeError
from pyspark.sql import DataFrame, SparkSession

from python_jobs.data_value.wrapper import Parameters, run, wrap
from python_jobs.shared.core.failures import NotReady, WrongUse
from tests.support.dbt_project import DbtProject
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.snippets import snippets

COMPUTED = {
    "is_connected": "context.user.connected_since is not null",
    "page_referral_key": "concat_ws('-', page, context.referral)",
}
NAMES = list(COMPUTED)
SCHEMA = (
    "visit_id string, page string, context struct<referral: string, user: struct<connected_since: string>>"
)
VISITS: list[Any] = [
    ("v1", "home", ("search", (None,))),
    ("v2", "home", ("search", ("2024-01-01",))),
    ("v3", "home", (None, (None,))),
    ("v4", None, (None, (None,))),
    ("v5", "a-'é\"", None),
]
# Written down by hand, not by the macro.
COMPUTED_BY_VISIT = [
    ("v1", False, "home-search"),
    ("v2", True, "home-search"),
    ("v3", False, "home"),
    ("v4", False, ""),
    ("v5", False, "a-'é\""),
]


@pytest.fixture
def visits(spark: SparkSession) -> str:
    """Return the name of a view of the input visits."""
    spark.createDataFrame(VISITS, SCHEMA).createOrReplaceTempView("input_visits")
    return "input_visits"


def view(spark: SparkSession, name: str, sql: str) -> DataFrame:
    """Run a rendered macro and keep its rows under a name for the next one."""
    rows = spark.sql(sql)
    rows.createOrReplaceTempView(name)
    return rows


def test_computed_values(spark: SparkSession, render: MacroRenderer, visits: str, ansi_modes: str) -> None:
    rows = spark.sql(render("wrapper", relation=visits, computed=COMPUTED))
    assert rows.columns == ["visit_id", "page", "context", "decorated"]
    assert_rows(rows.selectExpr("visit_id", "decorated.*"), COMPUTED_BY_VISIT)


@pytest.mark.parametrize(
    ("layout", "columns"),
    [
        ("computed_struct", ["visit_id", "page", "context", "decorated"]),
        ("raw_struct", ["is_connected", "page_referral_key", "raw"]),
        ("flat", ["visit_id", "page", "context", "computed_is_connected", "computed_page_referral_key"]),
    ],
)
def test_the_record_comes_back_unmodified(
    spark: SparkSession, render: MacroRenderer, visits: str, layout: str, columns: list[str]
) -> None:
    wrapped = view(spark, "wrapped", render("wrapper", relation=visits, computed=COMPUTED, layout=layout))
    assert wrapped.columns == columns
    original = spark.sql(render("unwrap", relation="wrapped", layout=layout, computed=NAMES))
    assert original.schema.simpleString() == spark.table(visits).schema.simpleString()
    assert_rows(original, VISITS)


def test_round_trip_through_all_layouts(
    spark: SparkSession, render: MacroRenderer, visits: str, ansi_modes: str
) -> None:
    """computed_struct -> raw_struct -> flat -> two_tables -> computed_struct."""
    first = view(spark, "first", render("wrapper", relation=visits, computed=COMPUTED))
    view(spark, "second", render(
        "rewrap", relation="first", from_layout="computed_struct", to_layout="raw_struct", computed=NAMES
    ))  # fmt: skip
    view(spark, "third", render(
        "rewrap", relation="second", from_layout="raw_struct", to_layout="flat", computed=NAMES
    ))  # fmt: skip
    halves = {
        part: view(spark, f"fourth_{part}", render(
            "rewrap", relation="third", from_layout="flat", to_layout="two_tables", computed=NAMES,
            key="visit_id", part=part,
        ))
        for part in ("raw", "computed")
    }  # fmt: skip
    assert halves["raw"].columns == ["visit_id", "page", "context"]
    assert halves["computed"].columns == ["visit_id", "is_connected", "page_referral_key"]
    assert_rows(halves["computed"], COMPUTED_BY_VISIT)
    last = spark.sql(render(
        "rewrap", relation="fourth_raw", computed_relation="fourth_computed", from_layout="two_tables",
        to_layout="computed_struct", computed=NAMES, key="visit_id",
    ))  # fmt: skip
    assert last.columns == first.columns
    assert last.count() == 5
    assert_rows(last, first)


def test_two_providers_one_computed_schema(spark: SparkSession, render: MacroRenderer) -> None:
    view(spark, "provider_a", "select 'a1' as visit_id, 'home' as page, 'search' as referral")
    view(spark, "provider_b", "select 7L as id, named_struct('url', 'home', 'from', 'ad') as hit")
    a = spark.sql(render(
        "wrapper", relation="provider_a", layout="raw_struct",
        computed={"visit": "visit_id", "page_referral_key": "concat_ws('-', page, referral)"},
    ))  # fmt: skip
    b = spark.sql(render(
        "wrapper", relation="provider_b", layout="raw_struct",
        computed={"visit": "cast(id as string)", "page_referral_key": "concat_ws('-', hit.url, hit.from)"},
    ))  # fmt: skip
    assert a.drop("raw").schema.simpleString() == b.drop("raw").schema.simpleString()
    assert a.schema["raw"].dataType != b.schema["raw"].dataType
    assert_rows(a.drop("raw").union(b.drop("raw")), [("a1", "home-search"), ("7", "home-ad")])


def test_a_failed_computation_leaves_the_record(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    """Without the condition the same expression ends the query; with it the record survives, flagged."""
    view(
        spark,
        "prices",
        "select * from values ('ok', '12'), ('broken', 'twelve'), ('absent', null) as t (id, price)",
    )
    computed = {"cents": "if(price rlike '^[0-9]+$', int(price) * 100, raise_error('no price'))"}
    with pytest.raises(Exception, match="no price"):
        spark.sql(render("wrapper", relation="prices", computed=computed)).collect()
    safe = spark.sql(render(
        "wrapper", relation="prices", computed=computed, computable_when="price rlike '^[0-9]+$'"
    ))  # fmt: skip
    assert_rows(
        safe.selectExpr("id", "price", "decorated.cents", "decorated.computation_failed"),
        [("ok", "12", 1200, False), ("broken", "twelve", None, True), ("absent", None, None, True)],
    )


def read_schema(rows: DataFrame) -> str:
    """Return what the scan of a plan reads from its files."""
    plan = rows._jdf.queryExecution().executedPlan().toString()
    assert plan.count("ReadSchema") == 1
    return plan.split("ReadSchema: ")[1].split("\n")[0]


@pytest.mark.parametrize("layout", ["computed_struct", "raw_struct", "flat"])
def test_a_query_on_computed_values_does_not_read_the_record(
    spark: SparkSession, render: MacroRenderer, visits: str, layout: str, tmp_path: Path
) -> None:
    path = str(tmp_path / layout)
    sql = render("wrapper", relation=visits, computed=COMPUTED, layout=layout)
    spark.sql(sql).write.format("delta").save(path)
    column = {
        "computed_struct": "decorated.is_connected",
        "raw_struct": "is_connected",
        "flat": "computed_is_connected",
    }[layout]
    expected = (
        "struct<decorated:struct<is_connected:boolean>>"
        if layout == "computed_struct"
        else f"struct<{column}:boolean>"
    )
    assert read_schema(spark.read.format("delta").load(path).selectExpr(column)) == expected
    assert "visit_id" in read_schema(spark.read.format("delta").load(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": "nested"}, "must be one of computed_struct, raw_struct, flat, two_tables"),
        ({"layout": "two_tables", "part": "raw"}, "needs key"),
        ({"layout": "two_tables", "key": "visit_id"}, "must be one of raw, computed, got"),
        ({"layout": "flat", "part": "raw"}, "part is for layout two_tables, got 'raw' with layout flat"),
        ({"layout": "two_tables", "key": "is_connected", "part": "raw"}, "must not have the name of a key"),
        ({"computed": {}}, "must map names to SQL expressions, got {}"),
        ({"computable_when": "true", "computed": {"computation_failed": "true"}}, "the flag that"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(render: MacroRenderer, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DbtRuntimeError, match=message):
        render("wrapper", **({"relation": "x", "computed": COMPUTED} | arguments))


PAGE = "docs/data_value.md"
GOOD_GOLD = "select visit_id, decorated.is_connected from {{ ref('silver_visits_wrapped') }}"
HALF = (
    "{{{{ lakehouse_patterns.wrapper(relation=source('raw', 'visits'), computed={{'pages': '1'}}, "
    "layout='two_tables', key='visit_id', part='{part}') }}}}"
)
PROPERTIES = """
version: 2
sources:
  - name: raw
    schema: "{{ target.schema }}"
    tables: [{name: visits}]
models:
  - name: gold_bad
    data_tests: [lakehouse_patterns.no_wrapped_columns]
  - name: half_raw
    data_tests:
      - lakehouse_patterns.wrapper_one_to_one:
          arguments: {computed_relation: ref('half_computed'), key: visit_id}
"""


@pytest.fixture(scope="module")
def project(make_project: Callable[..., DbtProject]) -> DbtProject:
    """Return a project with the model and the tests that the page shows."""
    model, properties = snippets(PAGE, "tests/patterns/data_value/test_wrapper.py::test_snippets_of_the_page")
    return make_project(
        {
            "models/silver_visits_wrapped.sql": model,
            "models/gold_visits.sql": GOOD_GOLD,
            "models/snippet.yml": properties,
            "models/gold_bad.sql": "select * from {{ ref('silver_visits_wrapped') }}",
            "models/half_raw.sql": HALF.format(part="raw"),
            "models/half_computed.sql": HALF.format(part="computed"),
            "models/properties.yml": PROPERTIES,
        }
    )


def test_snippets_of_the_page(project: DbtProject, spark: SparkSession) -> None:
    """A gold model without the envelope passes the page's test, one that exposes it fails."""
    project.source("visits", spark.createDataFrame(VISITS, SCHEMA))
    message = project.fails("build")
    statuses = project.statuses()
    assert statuses["lakehouse_patterns_no_wrapped_columns_gold_visits_"] == "pass", message
    assert statuses["lakehouse_patterns_no_wrapped_columns_gold_bad_"] == "fail"
    assert_rows(
        project.table("gold_visits"), [(visit, connected) for visit, connected, _ in COMPUTED_BY_VISIT]
    )


def test_two_tables_need_a_unique_key(project: DbtProject, spark: SparkSession) -> None:
    project.source("visits", spark.createDataFrame(VISITS, SCHEMA))
    project.run("build", "--select", "half_raw", "half_computed")
    project.source("visits", spark.createDataFrame([*VISITS, VISITS[0]], SCHEMA))
    assert "Got 1 result" in project.fails("build", "--select", "half_raw", "half_computed")


# The JSON envelope ----

RECORDS = [
    b'{"visit_id":"v1", "unknown": {"b":1,"a":2} }',
    b'{"page":"home","visit_id":"v2"}  ',
    b'\t{"cut": "off',
    b'no json at all \xc3\xa9 "quoted" \\ back',
    b"carriage return\r",
    b"",
]
NOT_UTF8 = b"caf\xe9"


def envelopes(rows: DataFrame) -> list[dict[str, Any]]:
    """Decode the envelopes with Python's own JSON reader."""
    return [json.loads(row["value"]) for row in rows.collect()]


@pytest.fixture
def record_file(tmp_path: Path) -> Path:
    """Return a file of records, one of them not in UTF-8."""
    path = tmp_path / "landing" / "records.json"
    path.parent.mkdir()
    path.write_bytes(b"\n".join([*RECORDS, NOT_UTF8]))
    return path


def test_the_envelope_holds_the_record_byte_for_byte(
    spark: SparkSession, record_file: Path, table_path: str, ansi_modes: str
) -> None:
    report = run(spark, Parameters(str(record_file), table_path, "v2.5.1", "files", batch_version=42))
    assert report["batches"] == 1
    found = envelopes(spark.read.format("delta").load(table_path))
    assert all(e["processing_context"] == {"job_version": "v2.5.1", "batch_version": 42} for e in found)
    raw = [e["raw_data"].encode() for e in found if "raw_data" in e]
    assert sorted(raw) == sorted(RECORDS)
    assert [base64.b64decode(e["raw_data_base64"]) for e in found if "raw_data" not in e] == [NOT_UTF8]


def test_a_batch_that_runs_again_adds_nothing(
    spark: SparkSession, record_file: Path, table_path: str
) -> None:
    first = Parameters(str(record_file), table_path, "v1", "files", batch_version=1)
    assert run(spark, first) == {"batches": 1, "version": 0}
    assert run(spark, first) == {"batches": 0, "version": 0}
    assert run(spark, replace(first, batch_version=2)) == {"batches": 1, "version": 1}
    assert spark.read.format("delta").load(table_path).count() == 2 * len([*RECORDS, NOT_UTF8])
    # A batch from before those that are there is no repeat.
    assert run(spark, replace(first, batch_version=0)) == {"batches": 1, "version": 2}
    assert run(spark, replace(first, batch_version=1)) == {"batches": 0, "version": 2}
    found = [
        e["processing_context"]["batch_version"] for e in envelopes(spark.read.load(table_path, "delta"))
    ]
    assert sorted(found) == [version for version in (0, 1, 2) for _ in (*RECORDS, NOT_UTF8)]


def test_another_job_version_changes_the_processing_context_alone(spark: SparkSession) -> None:
    records = spark.createDataFrame([(r.decode(), n) for n, r in enumerate(RECORDS)], "payload string, n int")
    old, new = (wrap(records, "payload", version, 7) for version in ("v1", "v2"))
    assert old.columns == ["value", "n"]
    for before, after in zip(envelopes(old.orderBy("n")), envelopes(new.orderBy("n")), strict=True):
        assert before["processing_context"] == {"job_version": "v1", "batch_version": 7}
        assert after["processing_context"] == {"job_version": "v2", "batch_version": 7}
        assert before["raw_data"] == after["raw_data"]


def test_a_delta_source_is_streamed_once(spark: SparkSession, tmp_path: Path) -> None:
    source, target, checkpoint = (str(tmp_path / name) for name in ("source", "target", "checkpoint"))
    parameters = Parameters(source, target, "v1", checkpoint=checkpoint)

    def land(*payloads: str) -> None:
        rows = spark.createDataFrame([(p, 1) for p in payloads], "payload string, load_id long")
        rows.write.format("delta").mode("append").save(source)

    land("{broken", '{"a": 1}')
    run(spark, parameters)
    land("later")
    run(spark, parameters)
    assert run(spark, parameters)["batches"] == 0
    wrapped = spark.read.format("delta").load(target)
    assert wrapped.columns == ["value", "load_id"]
    found = [(e["raw_data"], e["processing_context"]["batch_version"]) for e in envelopes(wrapped)]
    assert_rows(found, [("{broken", 0), ('{"a": 1}', 0), ("later", 1)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs checkpoint"),
        ({"checkpoint": "c", "batch_version": 1}, "takes no batch_version"),
        ({"source_format": "files"}, "files need batch_version"),
        (
            {"source_format": "files", "batch_version": 1, "trigger": "1 second"},
            "trigger is for a Delta source",
        ),
        ({"checkpoint": "c", "trigger": "soon"}, "'soon' is no duration"),
    ],
)
def test_wrong_use_of_the_job(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongUse, match=message):
        Parameters("source", "target", "v1", **arguments)


def test_a_missing_source_is_not_ready(spark: SparkSession, tmp_path: Path, table_path: str) -> None:
    absent = str(tmp_path / "absent")
    for parameters in (
        Parameters(absent, table_path, "v1", "files", batch_version=1),
        Parameters(absent, table_path, "v1", checkpoint=str(tmp_path / "c")),
    ):
        with pytest.raises(NotReady, match="there is no"):
            run(spark, parameters)


def test_a_source_without_payload_is_refused(spark: SparkSession, tmp_path: Path, table_path: str) -> None:
    source = str(tmp_path / "source")
    spark.sql("select 'x' as line").write.format("delta").save(source)
    with pytest.raises(WrongUse, match="no column 'payload'; it has line"):
        run(spark, Parameters(source, table_path, "v1", checkpoint=str(tmp_path / "c")))
