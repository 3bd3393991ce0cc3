"""Columns of every type: what a macro renders over them runs, or the macro refuses the column in one sentence.

A macro is added by an entry in CALLS, over the view `kinds` with its two rows, or by one in REFUSED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dbt.adapters.spark.relation import SparkRelation
from dbt_common.exceptions import DbtRuntimeError
from pyspark.sql import SparkSession

from tests.support.dbt_project import DbtProject
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.session import environment

KINDS = {
    "a_map": "map('k', 1)",
    "a_list": "array(1, 2)",
    "a_struct": "named_struct('x', 1, 'y', map('k', 1))",
    "bytes": "X'00FF'",
    "a_variant": "parse_json('{\"x\": 1}')",
    "letters": "cast('ab' as char(3))",
    "length": "interval '1' day",
    "months": "interval '1' month",
    "nothing": "null",
    "local_time": "timestamp_ntz'2024-03-01 10:00:00'",
    "amount": "cast(1.10 as decimal(38, 18))",
    "ratio": "double('NaN')",
}
SELECTED = ", ".join(f"{sql} as {name}" for name, sql in KINDS.items())
ROWS = f"select id, timestamp_seconds(1709287200 + id) as at, false as gone, {SELECTED} from range(1, 3)"
UNSORTABLE = ["a_map", "a_struct", "a_variant"]
BY_KEY = {"key": "id", "order_by": "at"}
CONDITIONS = [{"name": "has_map", "condition": "a_map is not null"}]


def merger(types: dict[str, str], **options: Any) -> dict[str, Any]:
    """Return the options of a merge by id, with all columns kept where they are NULL."""
    defaults = {
        "relation": "kinds",
        "types": types,
        "partitions": [],
        "key": ["id"],
        "nullable_key": [],
        "on_null_key": "fail",
        "sequence": ["at"],
        "deletes": "none",
        "is_deleted": None,
        "keep_on_null": list(KINDS),
        "prune_by": [],
    }
    return defaults | options


@pytest.fixture(scope="module")
def types(spark: SparkSession) -> Iterator[dict[str, str]]:
    """Make the view `kinds`; return its columns' types."""
    spark.sql(f"create or replace temporary view kinds as {ROWS}")
    yield dict(spark.table("kinds").dtypes)
    spark.catalog.dropTempView("kinds")


KNOWN = SparkRelation.create(identifier="kinds", type="view")
WRAPPED = {"relation": "kinds", "computed": {"of_them": "element_at(a_map, 'k')"}}

# macro, arguments, where what it renders belongs
CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("windowed_deduplicator", {"relation": "kinds"}, "{}"),
    ("windowed_deduplicator", {"relation": KNOWN}, "{}"),
    ("windowed_deduplicator", {"relation": "kinds", **BY_KEY}, "{}"),
    ("windowed_deduplicator", {"relation": KNOWN, **BY_KEY, "keep": "last"}, "{}"),
    ("windowed_deduplicator_flags", {"relation": "kinds", **BY_KEY}, "{}"),
    ("windowed_deduplicator_flags", {"relation": KNOWN, **BY_KEY}, "{}"),
    ("filter_interceptor_flags", {"relation": "kinds", "conditions": CONDITIONS}, "{}"),
    (
        "dead_letter_flags",
        {
            "relation": "kinds",
            "transformations": [
                {"name": f"{name}_copy", "expression": name, "inputs": [name]} for name in KINDS
            ],
        },
        "{}",
    ),
    ("wrapper", WRAPPED, "{}"),
    ("wrapper", WRAPPED | {"layout": "raw_struct"}, "{}"),
    ("wrapper", WRAPPED | {"layout": "flat"}, "{}"),
    (
        "scd_type_6",
        {
            "versions": "kinds",
            "unique_key": "id",
            "columns": list(KINDS),
            "effective_from": "at",
            "effective_to": "at",
        },
        "{}",
    ),
    ("surrogate_key", {"columns": [name for name in KINDS if name not in ("a_map", "a_struct", "ratio")],
                       "nullable": "nothing"}, "select {} from kinds"),
    ("content_hash", {"columns": ["id", "a_list", "a_variant", "bytes", "length"]}, "select {} from kinds"),
    ("_full_loader_findings_sql", {"options": {"key": ["id"], "not_null": list(KINDS)}, "snapshot": "kinds"}, "{}"),
    ("whole_types_sql", {"relation": "kinds", "names": list(KINDS)}, "{}"),
    ("_merger_first_load", {"merger": None, "batch": "kinds"}, "{}"),
    ("_merger_batch_query", {"merger": None, "batch": "kinds"}, "{}"),
]  # fmt: skip


@pytest.mark.parametrize(("macro", "arguments", "within"), CALLS)
def test_a_macro_takes_columns_of_every_type(
    spark: SparkSession,
    render: MacroRenderer,
    types: dict[str, str],
    ansi_modes: str,
    macro: str,
    arguments: dict[str, Any],
    within: str,
) -> None:
    if "merger" in arguments:
        arguments = arguments | {"merger": merger(types)}
    found = spark.sql(within.format(render(macro, **arguments)))
    # Python has no interval of months.
    rows = found.selectExpr("to_json(struct(*))").collect()
    assert len(rows) == (
        1 if macro in ("_full_loader_findings_sql", "whole_types_sql", "_merger_batch_query") else 2
    )


def test_what_spark_can_sort(render: MacroRenderer) -> None:
    kinds = {
        "map<string,int>": False, "struct<x:int,y:map<string,int>>": False, "array<variant>": False,
        "interval": False, "interval day": True, "array<struct<x:int>>": True, "char(3)": True,
        "struct<a:interval>": False, "array<interval>": False, "struct<a:variant,b:int>": False,
        "struct<variant:string,interval:int,map:int>": True, "struct<invariant:int>": True,
        "array<struct<a:interval hour to second>>": True, "variant": False,
    }  # fmt: skip
    assert {type_: render("is_sortable", type=type_) for type_ in kinds} == kinds


@pytest.mark.parametrize("name", UNSORTABLE)
def test_a_key_or_an_order_that_spark_can_not_sort_is_refused(
    render: MacroRenderer, types: dict[str, str], name: str
) -> None:
    for option, arguments in [
        ("key", {"key": name, "order_by": "at"}),
        ("order_by", {"key": "id", "order_by": name}),
    ]:
        with pytest.raises(
            DbtRuntimeError, match=rf"{option} may not be '{name}' of type .*: use a column with a text"
        ):
            render("windowed_deduplicator", relation=KNOWN, **arguments)
    with pytest.raises(DbtRuntimeError, match=f"sequence may not be '{name}' of type"):
        render("require_sortable", types=types, names=[name], option="sequence")
    render(
        "require_sortable",
        types=types,
        names=["id", "length", "bytes", f"to_json({name})"],
        option="sequence",
    )


@pytest.mark.parametrize("relation", ["visits", SparkRelation.create(identifier="visits", type="view")])
def test_copies_of_a_key_with_other_maps_leave_one_row(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str, relation: Any
) -> None:
    """The visits of a tracker: the attributes of the first differ between its two copies."""
    spark.sql(
        "select * from (values ('v1', timestamp'2024-03-01 10:00:00', map('k', 'a')), "
        "('v1', timestamp'2024-03-01 10:00:00', map('k', 'b')), "
        "('v2', timestamp'2024-03-01 10:01:00', null)) as (visit_id, event_time, attributes)"
    ).createOrReplaceTempView("visits")
    by_key = {"relation": relation, "key": "visit_id", "order_by": "event_time"}
    for keep, kept in [("first", "a"), ("last", "b")]:
        found = spark.sql(render("windowed_deduplicator", **by_key, keep=keep))
        assert_rows(found.selectExpr("visit_id", "attributes.k"), [("v1", kept), ("v2", None)])
    flagged = spark.sql(render("windowed_deduplicator_flags", **by_key))
    assert_rows(
        flagged.selectExpr("attributes.k", "duplicate_as"), [("a", None), ("b", "same_key"), (None, None)]
    )
    spark.sql("select * from visits union all select * from visits").createOrReplaceTempView("twice")
    assert spark.sql(render("windowed_deduplicator", relation="twice")).count() == 3


def test_a_merge_keeps_what_delta_does_with_a_table(
    spark: SparkSession, render: MacroRenderer, tmp_path: Path
) -> None:
    """Deletion vectors, column mapping, a generated and an identity column, which the increment leaves out."""
    table = f"delta.`{tmp_path / 'orders'}`"
    spark.sql(
        f"create table {table} (`order id` bigint, day date, tags map<string, string>, "
        "month int generated always as (month(day)), row_no bigint generated always as identity) using delta "
        "tblproperties ('delta.enableDeletionVectors' = 'true', 'delta.columnMapping.mode' = 'name')"
    )
    spark.sql(f"insert into {table} (`order id`, day, tags) values (1, date'2024-01-01', map('a', 'b'))")
    columns = ["order id", "day", "tags"]
    given = merger(
        {"order id": "bigint", "day": "date", "tags": "map<string,string>"},
        relation=table, key=["order id"], sequence=["day"], keep_on_null=["tags"],
    )  # fmt: skip
    spark.sql(
        "select cast(id as bigint) as `order id`, date'2024-02-01' as day, cast(null as map<string, string>) as tags "
        "from range(1, 3)"
    ).createOrReplaceTempView("increment")
    looked_up = render("_merger_look_up", merger=given, batch="increment", target=table)
    spark.sql(
        render(
            "_merger_merge",
            merger=given,
            batch="increment",
            target=table,
            columns={"inserted": columns, "updated": columns},
            looked_up=looked_up,
            incremental_predicates=[],
        )
    )
    found = spark.sql(f"select `order id`, string(day), tags['a'], month, row_no > 0 from {table}")
    assert_rows(found, [(1, "2024-02-01", "b", 2, True), (2, "2024-02-01", None, 2, True)])


MATERIALIZED = {
    "data_overwrite": {"data_overwrite": {"where": "day = date'{logical_date}'"}},
    "awap": {
        "awap": {
            "period": "day",
            "audits": [{"name": "known", "type": "null_share", "column": "id", "max": 0}],
        }
    },
    "unit_tables": {"unit_tables": {"unit": "month"}},
    "versioned_table": {"versioned_table": {"key": "id"}},
}
# What Delta stores in no table, alone or inside of another type.
UNSTORED = {
    "length": KINDS["length"],
    "months": KINDS["months"],
    "lengths": f"array({KINDS['length']})",
    "nothings": "array(null)",
    "in_struct": "named_struct('x', null)",
}
STORED = {name: sql for name, sql in KINDS.items() if name not in UNSTORED} | {
    "word": "cast('a' as varchar(5))"
}
VALUES = (
    1,
    {"k": 1},
    [1, 2],
    "{'x':1,'y':{'k':1}}",
    b"\x00\xff",
    '{"x":1}',
    "ab",
    "1.100000000000000000",
    "a",
)
DAY_1, DAY_2 = "2026-01-01", "2026-01-02"


def kinds_model(name: str, columns: dict[str, str], **config: Any) -> str:
    """Return a model of the materialization ``name`` with columns of these expressions, one row a day."""
    config = {"materialized": name, "meta": {"lakehouse_patterns": MATERIALIZED[name]}} | config
    selected = ", ".join(f"{sql} as {column}" for column, sql in columns.items())
    day = "date'{{ lakehouse_patterns.logical_date() }}'"
    columns_of = f"cast(1 as bigint) as id, {day} as day{chr(44) * bool(selected)} {selected}"
    return f"{{{{ config(**{config!r}) }}}}\nselect {columns_of}"


@pytest.fixture(scope="module")
def kinds(make_project: Callable[..., DbtProject]) -> DbtProject:
    """Models of each materialization: with every type, with one that Delta lacks, and over a table with features."""
    files = {}
    wide = {"tblproperties": {"delta.enableDeletionVectors": "true", "delta.columnMapping.mode": "name"}}
    for name in MATERIALIZED:
        files[f"models/{name}_kinds.sql"] = kinds_model(name, STORED, **wide)
        for kind, sql in UNSTORED.items():
            files[f"models/refused/{name}_{kind}.sql"] = kinds_model(name, {kind: sql})
    for name in ("data_overwrite", "awap"):
        later = {"on_schema_change": "append_new_columns", "location_root": None}
        files[f"models/{name}_later.sql"] = kinds_model(name, STORED, **later)
    project = make_project(files)
    for name in ("data_overwrite", "awap"):
        project.spark.sql(
            f"create table {project.schema}.{name}_later (id bigint, day date, filled string default 'new', "
            "month int generated always as (month(day)), row_no bigint generated always as identity) using delta "
            "tblproperties ('delta.enableDeletionVectors' = 'true', 'delta.columnMapping.mode' = 'name', "
            "'delta.feature.allowColumnDefaults' = 'supported')"
        )
        project.spark.sql(f"insert into {project.schema}.{name}_later (id, day) values (7, date'{DAY_2}')")
    for day in (DAY_1, DAY_2):
        with environment(LOGICAL_DATE=day):
            project.run("run", "--exclude", "path:models/refused")
    return project


@pytest.mark.parametrize("name", MATERIALIZED)
def test_a_materialization_stores_columns_of_every_type(kinds: DbtProject, name: str) -> None:
    days = [DAY_2] if name == "versioned_table" else [DAY_1, DAY_2]
    rows = kinds.table(f"{name}_kinds").selectExpr(
        "string(day)", "id", "a_map", "a_list", "to_json(a_struct)", "bytes", "to_json(a_variant)", "letters",
        "string(amount)", "word", "string(local_time)", "isnan(ratio)", "nothing",
    )  # fmt: skip
    id_, a_map, a_list, a_struct, a_binary, a_variant, letters, amount, word = VALUES
    expected = (id_, a_map, a_list, a_struct.replace("'", '"'), a_binary, a_variant, letters, amount, word)
    assert_rows(rows, [(day, *expected, "2024-03-01 10:00:00", True, None) for day in days])


def test_a_type_that_delta_does_not_store_is_refused(kinds: DbtProject) -> None:
    with environment(LOGICAL_DATE=DAY_1):
        refused = kinds.fails("run", "--select", "path:models/refused")
    for kind in UNSTORED:
        assert refused.count(f"Delta stores no column '{kind}' of type ") == len(MATERIALIZED)


def test_what_delta_stores(render: MacroRenderer) -> None:
    stored = ["void", "struct<interval:int,void:string>", "struct<a:struct<void:int>>", "map<string,variant>"]
    render("require_storable", types={name: name for name in stored})
    for type_ in ("interval", "interval day", "array<interval month>", "array<void>", "struct<a:int,b:void>"):
        with pytest.raises(DbtRuntimeError, match=f"Delta stores no column 'x' of type {type_}: cast it"):
            render("require_storable", types={"x": type_})


@pytest.mark.parametrize("name", ["data_overwrite", "awap"])
def test_a_table_fills_its_own_columns_and_gets_columns_of_every_type(kinds: DbtProject, name: str) -> None:
    """Deletion vectors, column mapping, a default, a generated and an identity column; DAY_2 is replaced."""
    table = kinds.table(f"{name}_later")
    assert table.columns == ["id", "day", "filled", "month", "row_no", *STORED]
    found = table.selectExpr(
        "id", "string(day)", "filled", "month", "row_no > 0", "a_map['k']", "to_json(a_variant)"
    )
    assert_rows(found, [(1, day, "new", 1, True, 1, '{"x":1}') for day in (DAY_1, DAY_2)])
