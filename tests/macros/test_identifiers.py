"""Names that a user's columns may have: spaces, reserved words, upper case, and the names of our helper columns.

A macro is added by an entry in CALLS: its arguments are built from the names of three columns, and what it renders must
run. Where an argument is documented as a SQL expression (keys of the Windowed Deduplicator, …), the entry quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dbt_common.exceptions import DbtRuntimeError
from pyspark.sql import Row, SparkSession

from tests.support.dbt_project import REPOSITORY, DbtProject
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.session import environment

Names = tuple[str, str, str]
ODD: Names = ("Order Id", "select", "UPPER")
ROWS = "values (1, 'a', date'2026-01-05'), (2, 'b', date'2026-01-05'), (2, 'b', date'2026-01-05')"
WHOLE = [(1, "a", "2026-01-05"), (2, "b", "2026-01-05"), (2, "b", "2026-01-05")]


def q(name: str) -> str:
    """Quote a name, as a user does in an expression."""
    return f"`{name}`"


def types(n: Names) -> dict[str, str]:
    """Return the columns of the view `odd`."""
    return dict(zip(n, ("int", "string", "date"), strict=True))


def merger(n: Names, **others: Any) -> dict[str, Any]:
    """Return the checked options of a merge."""
    return {
        "relation": "odd",
        "types": types(n),
        "partitions": [],
        "key": [n[0]],
        "nullable_key": [],
        "on_null_key": "fail",
        "sequence": [n[2]],
        "deletes": "none",
        "is_deleted": None,
        "keep_on_null": [n[1]],
        "prune_by": [],
    } | others


def wrapped(n: Names, **others: Any) -> dict[str, Any]:
    """Return the arguments of `wrapper`."""
    return {"relation": "odd", "computed": {"of them": f"upper({q(n[1])})"}} | others


def conditions(n: Names) -> dict[str, Any]:
    """Return the arguments of the Filter Interceptor's macros."""
    return {"relation": "odd", "conditions": [{"name": "not b", "condition": f"{q(n[1])} <> 'b'"}]}


def unique(n: Names) -> dict[str, Any]:
    """Return the arguments of the Windowed Deduplicator's macros."""
    return {"relation": "odd", "key": [q(n[0]), q(n[1])], "order_by": q(n[2])}


def lateness(n: Names, **others: Any) -> dict[str, Any]:
    """Return the arguments of the Late Data Detector's macros."""
    time = f"timestamp({q(n[2])})"
    return {"relation": "odd", "event_time": time, "arrived_at": f"{time} + interval 1 minute"} | others


def audited(n: Names, **others: Any) -> dict[str, Any]:
    """Return what Audit-Write-Audit-Publish's macros look at."""
    scope = {
        "staged": "odd",
        "rows": "(select *, array_compact(array(cast(null as string))) as lakehouse_patterns_rejected_by from odd)",
        "types": types(n),
        "period": q(n[2]),
        "type": "date",
        "interval": None,
        "target": None,
        "results": None,
        "audits": [
            {"name": "it's known", "type": "null_share", "column": n[0].lower()},
            {
                "name": "kept",
                "type": "record",
                "valid_when": f"{q(n[1])} is not null",
                "outcome": "dispatch",
            },
        ],
    }
    return scope | others


def replaced(n: Names) -> dict[str, Any]:
    """Return the same of a run that replaces an interval and compares it with the past."""
    change = {"name": "changed", "type": "change", "expression": f"count({q(n[0])})"}
    return audited(n, target="odd", interval=f"{q(n[2])} >= date'2026-01-05'", audits=[change])


# macro, arguments, where a fragment belongs, how many rows and columns come out
CALLS: list[tuple[str, Callable[[Names], dict[str, Any]], str, tuple[int, int]]] = [
    ("content_hash", lambda n: {"columns": list(n)}, "select {} from odd", (3, 1)),
    ("surrogate_key", lambda n: {"columns": [q(n[0]), q(n[1])]}, "select {} from odd", (3, 1)),
    (
        "first_append_key",
        lambda n: {"group_by": [q(n[1])], "append_time": q(n[2]), "ties": [q(n[0])]},
        "select {} from odd",
        (3, 1),
    ),
    ("no_rows_sql", lambda n: {"types": types(n)}, "{}", (0, 3)),
    ("whole_types_sql", lambda n: {"relation": "odd", "names": list(n)}, "{}", (1, 3)),
    ("_merger_first_load", lambda n: {"merger": merger(n), "batch": "odd"}, "{}", (2, 3)),
    ("_merger_batch_query", lambda n: {"merger": merger(n, prune_by=[n[2]]), "batch": "odd"}, "{}", (1, 6)),
    (
        "_full_loader_findings_sql",
        lambda n: {"options": {"key": [n[0]], "not_null": [n[1]]}, "snapshot": "odd"},
        "{}",
        (1, 4),
    ),
    (
        "_units_union_sql",
        lambda n: {
            "union": {"columns": types(n), "tables": [{"relation": "odd", "types": {n[1]: "string"}}]}
        },
        "{}",
        (3, 3),
    ),
    ("_awap_audit_sql", lambda n: {"options": {"history": 7}, "scope": audited(n)}, "{}", (2, 1)),
    ("_awap_audit_sql", lambda n: {"options": {"history": 7}, "scope": replaced(n)}, "{}", (1, 1)),
    (
        "_awap_judged_rows",
        lambda n: {"scope": audited(n), "findings": {"rejected": {"2026-01-05": ["it's known"]}}},
        "{}",
        (3, 5),
    ),
    (
        "scd_type_6",
        lambda n: {
            "versions": "odd",
            "unique_key": n[0],
            "columns": n[1],
            "effective_from": n[2],
            "effective_to": n[2],
        },
        "{}",
        (3, 5),
    ),
    (
        "as_of",
        lambda n: {
            "timestamp": "date'2026-01-05'",
            "versions": "odd",
            "effective_from": n[2],
            "effective_to": n[2],
        },
        "select * from odd where not {}",
        (3, 3),
    ),
    (
        "test_scd_type_2_invariants",
        lambda n: {
            "model": "odd",
            "unique_key": [n[0], n[1]],
            "effective_from": n[2],
            "effective_to": n[2],
            "gap_allowed_when": "true",
        },
        "{}",
        (4, 5),
    ),
    ("wrapper", lambda n: wrapped(n, computed_name="Computed Of"), "{}", (3, 4)),
    ("wrapper", lambda n: wrapped(n, layout="raw_struct", raw_name="from"), "{}", (3, 2)),
    ("wrapper", lambda n: wrapped(n, layout="flat", prefix="computed "), "{}", (3, 4)),
    ("wrapper", lambda n: wrapped(n, layout="two_tables", key=n[0], part="computed"), "{}", (3, 2)),
    (
        "test_wrapper_one_to_one",
        lambda n: {"model": "odd", "computed_relation": "odd", "key": [n[0], n[1]]},
        "{}",
        (1, 4),
    ),
    ("filter_interceptor_flags", conditions, "{}", (3, 5)),
    ("filter_interceptor_all_failures", conditions, "{}", (1, 5)),
    (
        "dead_letter_flags",
        lambda n: {
            "relation": "odd",
            "transformations": [
                {"name": "of it's", "expression": f"try_cast({q(n[1])} as int)", "inputs": [n[1], n[2]]}
            ],
        },
        "select * except (error_message) from ({})",  # which names the inputs
        (3, 5),
    ),
    ("lateness_report", lambda n: lateness(n, buckets=["0 minutes", "1 hour"], by=[n[1]]), "{}", (8, 5)),
    ("recommended_watermark_delay", lateness, "{}", (1, 3)),
    ("windowed_deduplicator", unique, "{}", (2, 3)),
    (
        "windowed_deduplicator",
        lambda n: unique(n) | {"past": {"relation": "odd", "date_column": n[2], "days": 3}},
        "{}",
        (2, 3),
    ),
    ("windowed_deduplicator_flags", unique, "{}", (3, 4)),
    ("windowed_deduplicator_null_keys", lambda n: {"relation": "odd", "key": q(n[0])}, "{}", (0, 3)),
    (
        "incremental_groups",
        lambda n: {"relation": "odd", "by": [n[0], n[1]], "column": q(n[2])},
        "{}",
        (2, 3),
    ),
    ("incremental_rejects", lambda n: {"column": q(n[2])}, "select * from odd where {}", (0, 3)),
]
# Columns of the result, which a macro can't name otherwise.
RESULTS = {
    "rejected_by", "rejected_as", "error_class", "error_message", "duplicate_as",
    "bucket", "delay_up_to", "row_count", "max_delay_seconds",
}  # fmt: skip


def view(spark: SparkSession, names: Names) -> None:
    """Make the view `odd` with three columns of these names."""
    columns = ", ".join(map(q, names))
    spark.sql(f"create or replace temporary view odd as select * from {ROWS} as ({columns})")


@pytest.fixture
def odd(spark: SparkSession) -> Iterator[None]:
    """Remove the view `odd` in the end."""
    yield
    spark.catalog.dropTempView("odd")


def values(row: Row) -> tuple[Any, ...]:
    """Return the values of a row without their names, those in structs too."""
    return tuple(values(value) if isinstance(value, Row) else value for value in row)


def helpers(macro: str) -> list[Names]:
    """Return all names that the macro's file gives to columns and tables of its own, in threes and in mixed case."""
    declared = re.compile(rf"{{%-? (macro|test) {macro.removeprefix('test_')}\(")
    text = next(
        text
        for path in (REPOSITORY / "macros").rglob("*.sql")
        if declared.search(text := path.read_text(encoding="utf-8"))
    )
    found = {
        name.lower().removeprefix("lakehouse_patterns_")  # the prefix is reserved
        for name in re.findall(r"\b(?:as|with) (\w+)\b", text)
    } - RESULTS
    names = [(str.upper, str.title, str)[place % 3](name) for place, name in enumerate(sorted(found))]
    return [(names[place], *(names + names)[place + 1 : place + 3]) for place in range(0, len(names), 3)]


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize(("macro", "arguments", "within", "shape"), CALLS)
def test_a_macro_quotes_names(
    spark: SparkSession,
    render: MacroRenderer,
    macro: str,
    arguments: Callable[[Names], dict[str, Any]],
    within: str,
    shape: tuple[int, int],
) -> None:
    view(spark, ODD)
    expected = spark.sql(within.format(render(macro, **arguments(ODD))))
    rows = expected.collect()
    assert (len(rows), len(expected.columns)) == shape

    for names in helpers(macro):
        if len({name.lower() for name in names}) < 3:
            continue
        view(spark, names)
        found = spark.sql(within.format(render(macro, **arguments(names))))
        if macro == "content_hash":  # names are a part of what it hashes
            assert found.count() == len(rows)
        else:
            assert sorted(map(values, found.collect()), key=repr) == sorted(map(values, rows), key=repr)


def test_a_group_with_the_name_of_a_column_of_the_report_is_refused(render: MacroRenderer) -> None:
    with pytest.raises(DbtRuntimeError, match="by can't take 'Bucket', which is a column of the report"):
        render("lateness_report", **lateness(ODD, buckets=["1 hour"], by="Bucket"))


def test_a_folder_of_circuits_is_no_pattern(
    spark: SparkSession, render: MacroRenderer, tmp_path: Path
) -> None:
    for name, state in (("it's [1]", "open"), ("it's 1", "closed")):
        circuit = {
            "name": "api",
            "state": state,
            "retry_at": None,
            "reason": None,
            "openings": 1,
            "transitions": 1,
        }
        (tmp_path / name).mkdir()
        (tmp_path / name / "api.json").write_text(json.dumps(circuit | {"pending": []}))
    found = spark.sql(render("circuits_sql", circuits=str(tmp_path / "it's [1]")))
    assert_rows(found.select("name", "state"), [("api", "open")])


SOURCES = "sources: [{name: raw, schema: '{{ target.schema }}', tables: [{name: odd_rows}]}]"
MAPPED = "tblproperties={'delta.columnMapping.mode': 'name', \"it's\": \"it's ours\"}"
LAID_OUT = "partition_by='order id', location_root=env_var('LAKEHOUSE_ROOT') ~ \"/it's\""
AUDITED = (
    "{'period': 'upper', 'audits': [{'name': 'known', 'type': 'null_share', 'column': 'order id', 'max': 0}, "
    "{'name': 'kept', 'type': 'record', 'valid_when': '`select` is not null', 'outcome': 'dispatch', "
    "'max_invalid_share': 0.5}]}"
)
MODELS = {
    "odd_awap": f"materialized='awap', meta={{'lakehouse_patterns': {{'awap': {AUDITED}}}}}",
    "odd_overwrite": f"materialized='data_overwrite', {LAID_OUT}, "
    "meta={'lakehouse_patterns': {'data_overwrite': {'where': '`Order Id` > 0'}}}",
    "odd_versions": "materialized='versioned_table', "
    "meta={'lakehouse_patterns': {'versioned_table': {'key': 'ORDER ID', 'not_null': 'Select'}}}",
    "odd_units": "materialized='unit_tables', partition_by='UPPER'",
    "odd_merged": f"materialized='incremental', incremental_strategy='merge', unique_key='order id', {LAID_OUT}, "
    "meta={'lakehouse_patterns': {'merger': {'sequence': 'upper', 'keep_on_null': 'SELECT'}}}",
    "odd_history": "materialized='scd2', unique_key='order id', "
    "meta={'lakehouse_patterns': {'scd2': {'changed_at': 'upper', 'tracked_columns': 'SELECT'}}}",
}


def test_a_materialization_quotes_names_and_finds_them_in_any_case(
    make_project: Callable[..., DbtProject],
) -> None:
    files = {
        f"models/{name}.sql": f"{{{{ config({config}, {MAPPED}) }}}}\nselect * from {{{{ source('raw', 'odd_rows') }}}}"
        for name, config in MODELS.items()
    }
    project = make_project(files | {"models/sources.yml": SOURCES})
    project.spark.sql(
        f"create table {project.schema}.odd_rows using delta "
        f"tblproperties ('delta.columnMapping.mode' = 'name') as "
        f"select distinct * from {ROWS} as ({', '.join(map(q, ODD))})"
    )
    with environment(LOGICAL_DATE="2026-01-05"):
        project.run("run")
        project.run("run", "--exclude", "odd_units")
    assert_rows(
        project.table("odd_history").selectExpr("`Order Id`", "`select`", "string(effective_from)"), WHOLE[:2]
    )
    for name in MODELS.keys() - {"odd_history"}:
        assert project.table(name).columns == list(ODD)
        assert_rows(project.table(name).selectExpr("`Order Id`", "`select`", "string(UPPER)"), WHOLE[:2])
    for name in ("odd_overwrite", "odd_merged"):
        detail = project.spark.sql(f"describe detail {project.schema}.{name}").first()
        assert [name.lower() for name in detail.partitionColumns] == ["order id"]
        assert detail.properties.get("it's") == "it's ours"
        assert detail.location.endswith(f"/it's/{name}")
