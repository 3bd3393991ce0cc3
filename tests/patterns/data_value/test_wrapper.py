"""Wrapper: the original record untouched, computed values beside it, in four layouts and as a JSON envelope."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dbt_common.exceptions import DbtRuntimeError
from pyspark.sql import DataFrame, SparkSession

from tests.support.dbt_project import DbtProject
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows

COMPUTED = {
    "is_connected": "context.user.connected_since is not null",
    "page_referral_key": "concat_ws('-', page, context.referral)",
}
NAMES = list(COMPUTED)
SCHEMA = "visit_id string, page string, context struct<referral: string, user: struct<connected_since: string>>"
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
    view(spark, "prices", "select * from values ('ok', '12'), ('broken', 'twelve'), ('absent', null) as t (id, price)")
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
        ({"layout": "nested"}, "layout of wrapper must be one of computed_struct, raw_struct, flat, two_tables"),
        ({"layout": "two_tables", "part": "raw"}, "needs key"),
        ({"layout": "two_tables", "key": "visit_id"}, "part of layout two_tables must be one of raw, computed"),
        ({"layout": "flat", "part": "raw"}, "part is for layout two_tables, got 'raw' with layout flat"),
        ({"layout": "two_tables", "key": "is_connected", "part": "raw"}, "must not have the name of a key"),
        ({"computed": {}}, "must map names to SQL expressions, got {}"),
        ({"computable_when": "true", "computed": {"computation_failed": "true"}}, "the flag that computable_when adds"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(render: MacroRenderer, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DbtRuntimeError, match=message):
        render("wrapper", **({"relation": "x", "computed": COMPUTED} | arguments))
