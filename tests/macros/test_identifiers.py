"""Names of columns that need quotes: a space, a reserved word, upper case.

A macro is added by an entry in CALLS: its arguments name columns of `odd`, and what it renders must run. Arguments that
are documented as SQL expressions (`surrogate_key`, keys of the Windowed Deduplicator, …) are the caller's to quote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.support.dbt_project import DbtProject
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.session import environment

ROWS = "values (1, 'a', date'2026-01-05'), (2, 'b', date'2026-01-05') as (`Order Id`, `select`, `UPPER`)"
TYPES = {"Order Id": "int", "select": "string", "UPPER": "date"}
WHOLE = [(1, "a", "2026-01-05"), (2, "b", "2026-01-05")]
MERGER = {
    "relation": "odd",
    "types": TYPES,
    "partitions": [],
    "key": ["Order Id"],
    "nullable_key": [],
    "on_null_key": "fail",
    "sequence": ["UPPER"],
    "deletes": "none",
    "is_deleted": None,
    "keep_on_null": ["select"],
    "prune_by": [],
}
AWAP_SCOPE = {
    "staged": "odd",
    "rows": "odd",
    "types": TYPES,
    "period": "`UPPER`",
    "type": "date",
    "interval": None,
    "target": None,
    "results": None,
    "audits": [
        {"name": "it's known", "type": "null_share", "column": "order id"},
        {"name": "kept", "type": "record", "valid_when": "`select` is not null", "outcome": "dispatch"},
    ],
}
AWAP_FINDINGS = {"rejected": {"2026-01-05": ["it's known"]}}
WRAPPED = {"relation": "odd", "computed": {"of them": "upper(`select`)"}}

# macro, arguments, where a fragment belongs, how many rows and columns come out
CALLS: list[tuple[str, dict[str, Any], str, tuple[int, int]]] = [
    ("content_hash", {"columns": list(TYPES)}, "select {} from odd", (2, 1)),
    ("no_rows_sql", {"types": TYPES}, "{}", (0, 3)),
    ("whole_types_sql", {"relation": "odd", "names": list(TYPES)}, "{}", (1, 3)),
    ("_merger_first_load", {"merger": MERGER, "batch": "odd"}, "{}", (2, 3)),
    ("_merger_batch_query", {"merger": MERGER | {"prune_by": ["UPPER"]}, "batch": "odd"}, "{}", (1, 6)),
    (
        "_full_loader_findings_sql",
        {"options": {"key": ["Order Id"], "not_null": ["select"]}, "snapshot": "odd"},
        "{}",
        (1, 4),
    ),
    (
        "_units_union_sql",
        {"union": {"columns": TYPES, "tables": [{"relation": "odd", "types": {"select": "string"}}]}},
        "{}",
        (2, 3),
    ),
    ("_awap_audit_sql", {"options": {"history": 7}, "scope": AWAP_SCOPE}, "{}", (2, 1)),
    ("_awap_judged_rows", {"scope": AWAP_SCOPE, "findings": AWAP_FINDINGS}, "{}", (2, 5)),
    (
        "scd_type_6",
        {
            "versions": "odd",
            "unique_key": "Order Id",
            "columns": "select",
            "effective_from": "UPPER",
            "effective_to": "UPPER",
        },
        "{}",
        (2, 5),
    ),
    (
        "as_of",
        {
            "timestamp": "date'2026-01-05'",
            "versions": "odd",
            "effective_from": "UPPER",
            "effective_to": "UPPER",
        },
        "select * from odd where not {}",
        (2, 3),
    ),
    (
        "test_scd_type_2_invariants",
        {
            "model": "odd",
            "unique_key": ["Order Id", "select"],
            "effective_from": "UPPER",
            "effective_to": "UPPER",
            "gap_allowed_when": "true",
        },
        "{}",
        (2, 5),
    ),
    ("wrapper", WRAPPED | {"computed_name": "Computed Of"}, "{}", (2, 4)),
    ("wrapper", WRAPPED | {"layout": "raw_struct", "raw_name": "from"}, "{}", (2, 2)),
    ("wrapper", WRAPPED | {"layout": "flat", "prefix": "computed "}, "{}", (2, 4)),
    ("wrapper", WRAPPED | {"layout": "two_tables", "key": "Order Id", "part": "computed"}, "{}", (2, 2)),
]


@pytest.fixture(scope="module")
def odd(spark: SparkSession) -> Iterator[None]:
    """Make the view `odd`, whose columns need quotes."""
    spark.sql(f"create or replace temporary view odd as select * from {ROWS}")
    yield
    spark.catalog.dropTempView("odd")


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize(("macro", "arguments", "within", "shape"), CALLS)
def test_a_macro_quotes_names(
    spark: SparkSession,
    render: MacroRenderer,
    macro: str,
    arguments: dict[str, Any],
    within: str,
    shape: tuple[int, int],
) -> None:
    found = spark.sql(within.format(render(macro, **arguments)))
    assert (found.count(), len(found.columns)) == shape


SOURCES = "sources: [{name: raw, schema: '{{ target.schema }}', tables: [{name: odd_rows}]}]"
MAPPED = "tblproperties={'delta.columnMapping.mode': 'name'}"
AUDITED = (
    "{'period': 'upper', 'audits': [{'name': 'known', 'type': 'null_share', 'column': 'order id', 'max': 0}, "
    "{'name': 'kept', 'type': 'record', 'valid_when': '`select` is not null', 'outcome': 'dispatch', "
    "'max_invalid_share': 0.5}]}"
)
MODELS = {
    "odd_awap": f"materialized='awap', meta={{'lakehouse_patterns': {{'awap': {AUDITED}}}}}",
    "odd_overwrite": "materialized='data_overwrite', "
    "meta={'lakehouse_patterns': {'data_overwrite': {'where': '`Order Id` > 0'}}}",
    "odd_versions": "materialized='versioned_table', "
    "meta={'lakehouse_patterns': {'versioned_table': {'key': 'ORDER ID', 'not_null': 'Select'}}}",
    "odd_units": "materialized='unit_tables', partition_by='UPPER'",
    "odd_merged": "materialized='incremental', incremental_strategy='merge', unique_key='order id', "
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
        f"tblproperties ('delta.columnMapping.mode' = 'name') as select * from {ROWS}"
    )
    with environment(LOGICAL_DATE="2026-01-05"):
        project.run("run")
        project.run("run", "--exclude", "odd_units")
    assert_rows(
        project.table("odd_history").selectExpr("`Order Id`", "`select`", "string(effective_from)"), WHOLE
    )
    for name in MODELS.keys() - {"odd_history"}:
        assert project.table(name).columns == list(TYPES)
        assert_rows(project.table(name).selectExpr("`Order Id`", "`select`", "string(UPPER)"), WHOLE)
