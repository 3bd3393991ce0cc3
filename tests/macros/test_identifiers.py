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
import yaml
from dbt.adapters.spark.relation import SparkRelation
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


SESSION_RUN = {"run": "2026-01-05", "first_run": "2026-01-05", "period": "1 day"}


def session_run(n: Names, **others: Any) -> dict[str, Any]:
    """Return the arguments of the Incremental Sessionizer's macros over events."""
    return {
        "events": "odd",
        # The sessions' own names are refused as names of the owner's columns.
        "owner": {f"{name} of": q(name) for name in n[:2]},
        "event_time": q(n[2]),
        "value": q(n[1]),
        "partition": f"{q(n[2])} = {{date}}",
        "ties": n[0],
        **SESSION_RUN,
    } | others


def session_runs(n: Names) -> str:
    """Return a table of runs, in which one run is computed."""
    return (
        f"(select 'computed' as status, 'id' as session_id, {q(n[0])} as {q(n[0] + ' of')}, "
        f"{q(n[1])} as {q(n[1] + ' of')}, timestamp'2026-01-05' as started_at, timestamp'2026-01-05' as ended_at, "
        "1 as events, array('a') as values, timestamp'2026-01-05' as run_start "
        "from odd)"
    )


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


ODD_VIEW = SparkRelation.create(identifier="odd", type="view")
LOADED = "(select *, 'f' as file_path, 1 as load_id from odd)"
JUDGED = "(select *, cast(null as string) as rejected_by, cast(null as string) as rejected_as from odd)"
READ = "(select *, cast(null as string) as error_class, cast(null as string) as error_message from odd)"
DEAD = "(select *, 'NULL_RESULT' as error_class, 'why' as error_message from odd)"
AT_ONCE = {"run_id": "1", "run_at": "2026-01-05 00:00:00"}


def rewrapped(n: Names, **others: Any) -> dict[str, Any]:
    """Return the arguments of `rewrap` and `unwrap`."""
    relation = f"(select *, named_struct('of them', upper({q(n[1])})) as decorated from odd)"
    return {"relation": relation, "computed": ["of them"]} | others


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
        "static_joiner",
        lambda n: {
            "facts": "odd",
            "reference": "(select distinct * from odd)",
            "keys": [n[0]],
            "columns": {f"{n[1]} too": n[1]},
            "as_of": q(n[2]),
            "history": "(select * from odd where false)",
            "effective_from": n[2],
            "effective_to": n[2],
        },
        "{}",
        (3, 4),
    ),
    (
        "static_joiner",
        lambda n: {
            "facts": "odd",
            "reference": "(select distinct * from odd)",
            "keys": {n[1]: n[1]},
            "columns": {f"{n[0]} too": n[0]},
            "unmatched": {f"{n[0]} too": "0"},
        },
        "{}",
        (3, 4),
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
    (
        "cube_daily",
        lambda n: {"relation": "odd", "day": n[2], "dimensions": n[1], "measures": {"of them": q(n[0])}},
        "{}",
        (3, 9),
    ),
    (
        "cube_weekly",
        lambda n: {
            "daily": f"(select {q(n[2])}, {q(n[1])}, 0 as grouping_id, 1 as row_count from odd)",
            "day": n[2],
            "dimensions": [n[1]],
        },
        "{}",
        (2, 4),
    ),
    (
        "salted_aggregate",
        lambda n: {"relation": "odd", "group_by": n[1], "salt_by": n[0], "measures": {"of them": q(n[0])}},
        "{}",
        (2, 7),
    ),
    (
        "windowed_aggregate",
        lambda n: {"relation": "odd", "event_time": f"timestamp({q(n[2])})", "window": "1 day", "by": n[1]},
        "{}",
        (2, 4),
    ),
    ("incremental_sessions", lambda n: session_run(n, pending="no_run", gap="1 hour"), "{}", (3, 10)),
    ("rejected_session_events", lambda n: session_run(n), "{}", (0, 6)),
    (
        "completed_sessions",
        lambda n: {"pending": session_runs(n), "owner": [f"{n[0]} of", f"{n[1]} of"], **SESSION_RUN},
        "{}",
        (0, 10),
    ),
    (
        "sessions_with_open",
        lambda n: {
            "sessions": f"(select *, 1 as duration_ms, date'2026-01-05' as started_date from {session_runs(n)})",
            "pending": session_runs(n),
            "owner": [f"{n[0]} of", f"{n[1]} of"],
        },
        "{}",
        (0, 11),
    ),
    ("incremental_rejects", lambda n: {"column": q(n[2])}, "select * from odd where {}", (0, 3)),
    (
        "incremental_window",
        lambda n: {"column": q(n[2]), "bootstrap_from": "2024-01-01"},
        "select * from odd where {}",
        (3, 3),
    ),
    ("current_lines", lambda n: {"lines": LOADED, "files": f"(select * from {LOADED})"}, "{}", (3, 5)),
    ("rewrap", lambda n: rewrapped(n, from_layout="computed_struct", to_layout="raw_struct"), "{}", (3, 2)),
    (
        "rewrap",
        lambda n: (
            wrapped(n, from_layout="two_tables", to_layout="flat", key=n[0])
            | {"computed": ["of them"], "computed_relation": f"(select {q(n[0])}, 'A' as `of them` from odd)"}
        ),
        "{}",
        (5, 4),
    ),
    ("unwrap", lambda n: rewrapped(n, layout="computed_struct"), "{}", (3, 3)),
    ("test_no_wrapped_columns", lambda n: {"model": ODD_VIEW, "names": list(n)}, "{}", (0, 1)),
    ("public_view", lambda n: {"relation": "odd", "technical_columns": n[0]}, "{}", (3, 2)),
    ("filter_interceptor_valid_rows", lambda n: {"flagged": JUDGED}, "{}", (3, 3)),
    (
        "filter_interceptor_statistics",
        lambda n: {"conditions": conditions(n)["conditions"], "flagged": JUDGED} | AT_ONCE,
        "{}",
        (1, 8),
    ),
    ("dead_letter_valid_rows", lambda n: {"flagged": READ}, "{}", (3, 3)),
    (
        "dead_letter_rows",
        lambda n: {"flagged": DEAD, "job_name": "it's", "processed_at": "2026-01-05 00:00:00"},
        "{}",
        (3, 8),
    ),
    (
        "dead_letter_share_failures",
        lambda n: {"flagged": DEAD, "max_share": 0, "min_records": 1},
        "{}",
        (1, 3),
    ),
    (
        "transformation_replicator",
        lambda n: {"relation": ODD_VIEW, "contract": [{"name": name} for name in n]},
        "select {} from odd",
        (3, 3),
    ),
    (
        "test_no_sensitive_columns",
        lambda n: {
            "model": ODD_VIEW,
            "replica_of": ODD_VIEW,
            "contract": [{"name": n[0]}, {"name": n[1]}, {"name": n[2].lower(), "tags": ["pii"]}],
        },
        "select 'x' from ({})",  # the column's name
        (1, 1),
    ),
]
# Columns of the result, which a macro can't name otherwise, and columns of what it reads.
RESULTS = {
    "rejected_by", "rejected_as", "error_class", "error_message", "duplicate_as",
    "bucket", "delay_up_to", "row_count", "max_delay_seconds",
    "job_name", "job_version", "processed_at", "file_path", "load_id",
    "grouping_id", "week_start", "window_start", "window_end",
}  # fmt: skip
# Macros without an entry in CALLS, with the reason or the test that has their names.
ODD_TABLES = "test_a_materialization_quotes_names_and_finds_them_in_any_case"
OWN_TABLE = "it reads a table of the pattern, whose columns have fixed names"
NO_COLUMN = "it names no column"
EXCEPTIONS = {
    "materialization_awap_spark": ODD_TABLES,
    "materialization_data_overwrite_spark": ODD_TABLES,
    "materialization_scd2_spark": ODD_TABLES,
    "materialization_unit_tables_spark": ODD_TABLES,
    "materialization_versioned_table_spark": ODD_TABLES,
    "clear_vanished_dates": ODD_TABLES,
    "add_unit_column": ODD_TABLES,
    "snapshot_timestamp_strategy": "test_names_are_quoted_and_found_in_any_case",
    "snapshot_check_strategy": "test_names_are_quoted_and_found_in_any_case",
    "change_data_capture_flags": "test_columns_may_have_the_names_of_the_macros_own_parts",
    "change_data_capture_changes": "test_columns_may_have_the_names_of_the_macros_own_parts",
    "dead_letter_statistics": OWN_TABLE,
    "dead_letter_queue_failures": OWN_TABLE,
    "test_dead_letter_queue": OWN_TABLE,
    "rejected_share_rises": OWN_TABLE,
    "test_rejected_share_steady": OWN_TABLE,
    "test_audit_within": OWN_TABLE,
    "circuits_sql": OWN_TABLE,
    "require_closed_circuits": OWN_TABLE,
    "test_dead_letter_share": "it is dead_letter_share_failures",
    "overwritten": "it returns the condition that the user wrote",
    "compactor_optimize": "it returns the condition that the user wrote",
    "compactor": NO_COLUMN,
    "compactor_inline": NO_COLUMN,
    "compactor_vacuum": NO_COLUMN,
    "lookback_dates": NO_COLUMN,
    "unit_name": NO_COLUMN,
    "starts_unit": NO_COLUMN,
    "create_unit": "the user writes the column definitions",
    "clean_unit": NO_COLUMN,
    "drop_unit": NO_COLUMN,
    "freeze_units": NO_COLUMN,
    "time_travel": NO_COLUMN,
    "incremental_watermark": NO_COLUMN,
    "transformation_replicator_purge": NO_COLUMN,
    "expose_version": NO_COLUMN,
    "final_sessions": NO_COLUMN,
    "current_sessions": NO_COLUMN,
    "test_no_technical_columns": "it returns the names as texts, as test_no_wrapped_columns does",
    "publish_session_run": NO_COLUMN,
    "logical_time": NO_COLUMN,
    "context_id": NO_COLUMN,
    "context_table": NO_COLUMN,
    "record_context": NO_COLUMN,
    "finish_context": NO_COLUMN,
    "withdraw_readiness": NO_COLUMN,
    "publish_readiness": NO_COLUMN,
    "adopt_tables": NO_COLUMN,
    "is_incremental": NO_COLUMN,
    "logical_date": NO_COLUMN,
    "check_pattern_options": NO_COLUMN,
}


def test_every_public_macro_has_its_names_tested_or_a_reason() -> None:
    described: dict[str, bool] = {}
    for file in (REPOSITORY / "macros").rglob("*.yml"):
        for macro in yaml.safe_load(file.read_text(encoding="utf-8")).get("macros") or []:
            described[macro["name"]] = macro.get("docs", {}).get("show", True)
    public = {name for name, is_shown in described.items() if is_shown}
    called = {macro for macro, *_ in CALLS}
    assert called & EXCEPTIONS.keys() == set()
    assert public == (called & public) | EXCEPTIONS.keys()
    assert called <= described.keys() | {f"test_{name}" for name in described}


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


CONDITION = {"conditions": [{"name": "known", "condition": "id is not null"}]}
COPIED = {"transformations": [{"name": "copy", "expression": "id", "inputs": ["id"]}]}
COMPUTED = {"relation": None, "computed": {"twice": "id * 2"}}
LETTERS = {"flagged": None, "job_name": "devices", "processed_at": "2026-01-05 00:00:00"}
HISTORY = {"unique_key": "id", "columns": "plan"}
RENAMED = "rename it in the query, or leave it out with except"
# macro, arguments, the column of the relation, what to do
TAKEN: list[tuple[str, dict[str, Any], str, str]] = [
    ("filter_interceptor_flags", CONDITION, "Rejected_By", RENAMED),
    ("filter_interceptor_flags", CONDITION, "REJECTED_AS", RENAMED),
    ("dead_letter_flags", COPIED, "Error_Class", RENAMED),
    ("dead_letter_flags", COPIED, "error_message", RENAMED),
    ("dead_letter_rows", LETTERS, "Job_Name", RENAMED),
    ("dead_letter_rows", LETTERS, "job_version", RENAMED),
    ("dead_letter_rows", LETTERS, "PROCESSED_AT", RENAMED),
    ("windowed_deduplicator_flags", {"key": "id", "order_by": "plan"}, "Duplicate_As", RENAMED),
    ("scd_type_6", {"versions": None, **HISTORY}, "Plan_Previous", RENAMED),
    ("scd_type_6", {"versions": None, **HISTORY}, "plan_CURRENT", RENAMED),
    ("wrapper", COMPUTED, "Decorated", "pass another name as computed_name"),
    ("wrapper", COMPUTED | {"layout": "flat"}, "Computed_Twice", "pass another prefix"),
]


@pytest.mark.parametrize(("macro", "arguments", "column", "advice"), TAKEN)
def test_a_column_that_a_macro_adds_is_refused_in_any_case(
    spark: SparkSession,
    render: MacroRenderer,
    macro: str,
    arguments: dict[str, Any],
    column: str,
    advice: str,
) -> None:
    relation = SparkRelation.create(identifier="taken", type="view")
    given = {"relation": relation} | arguments
    given = {name: relation if value is None else value for name, value in given.items()}
    if set(given) & {"flagged", "versions"}:
        del given["relation"]
    spark.sql(f"create or replace temporary view taken as select 1 as id, 'free' as plan, 'x' as {column}")
    with pytest.raises(DbtRuntimeError, match=rf"column '{column}' has the name of a column .*: {advice}"):
        render(macro, **given)
    spark.sql("create or replace temporary view taken as select 1 as id, 'free' as plan, 'x' as other")
    render(macro, **given)


def test_names_that_meet_among_the_arguments_are_refused(spark: SparkSession, render: MacroRenderer) -> None:
    relation = SparkRelation.create(identifier="taken", type="view")
    spark.sql("create or replace temporary view taken as select 1 as id, 'free' as plan")
    for name in ("PLAN", "Error_Class"):
        transformations = [{"name": name, "expression": "id", "inputs": ["id"]}]
        with pytest.raises(DbtRuntimeError, match=f"the transformation '{name}' adds a column of its name"):
            render("dead_letter_flags", relation=relation, transformations=transformations)
    twice = [COPIED["transformations"][0], COPIED["transformations"][0] | {"name": "Copy"}]
    with pytest.raises(DbtRuntimeError, match="the transformation 'Copy' adds a column of its name"):
        render("dead_letter_flags", relation="taken", transformations=twice)
    with pytest.raises(DbtRuntimeError, match=r"column 'Raw' has the name .*: pass another name as raw_name"):
        render("wrapper", relation=relation, computed={"Raw": "id"}, layout="raw_struct")
    with pytest.raises(DbtRuntimeError, match="must not have the name of a key column"):
        render("wrapper", relation="taken", computed={"ID": "1"}, layout="two_tables", key="id", part="raw")
    with pytest.raises(DbtRuntimeError, match="'Id' is part of the key or of the validity"):
        render("scd_type_6", versions="taken", unique_key="id", columns="Id")
    with pytest.raises(DbtRuntimeError, match=r"column 'AT' has the name .*: leave it out of by"):
        render("incremental_groups", relation="taken", by=["id", "AT"], column="at")


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
# The columns with helpers' names hold what a model takes as key, order, time or audited value.
DAY, NUMBER, TEXT = "run", "batch", "quarantine"
AUDITED = (
    "{'period': 'RUN', 'audits': [{'name': 'known', 'type': 'null_share', 'column': 'Batch', 'max': 0}, "
    "{'name': 'kept', 'type': 'record', 'valid_when': '`select` is not null and quarantine is not null', "
    "'outcome': 'dispatch', 'max_invalid_share': 0.5}]}"
)
VANISHED = "{{ lakehouse_patterns.clear_vanished_dates(source('raw', 'odd_rows'), 'Run', 3) }}"
MODELS = {
    "odd_awap": f"materialized='awap', meta={{'lakehouse_patterns': {{'awap': {AUDITED}}}}}",
    "odd_overwrite": f"materialized='data_overwrite', {LAID_OUT}, post_hook=\"{VANISHED}\", "
    "meta={'lakehouse_patterns': {'data_overwrite': {'where': '`Order Id` > 0'}}}",
    "odd_versions": "materialized='versioned_table', meta={'lakehouse_patterns': {'versioned_table': "
    "{'key': ['ORDER ID', 'Copies', 'NULL_0'], 'not_null': ['Select', 'Quarantine']}}}",
    "odd_units": "materialized='unit_tables', partition_by=['UPPER', 'Version']",
    "odd_merged": f"materialized='incremental', incremental_strategy='merge', {LAID_OUT}, "
    "unique_key=['order id', 'batch', 'QUARANTINE'], meta={'lakehouse_patterns': {'merger': "
    "{'sequence': ['upper', 'Run', 'Payload'], 'keep_on_null': ['SELECT', 'row_count'], 'on_null_key': 'quarantine'}}}",
    "odd_history": "materialized='scd2', unique_key=['order id', 'Stored', 'BATCH'], "
    "meta={'lakehouse_patterns': {'scd2': {'changed_at': 'run', 'sequence': 'Sequence', 'on_null_key': 'quarantine', "
    "'tracked_columns': ['SELECT', 'quarantine', 'ENTITY']}}}",
}
# Columns that a materialization adds, and refuses in a user's table.
ADDED = {"effective_from", "effective_to", "is_current", "closed_by_delete", "changes", "unit_day"}


def named_like_helpers() -> dict[str, str]:
    """Return SQL of the columns `id`, `text` and `day` by all names that our SQL gives to its own, in mixed case."""
    found = {"null_0", "has_null_0"}  # numbered
    for folder in ("quality", "idempotency", "data_value/scd_type_2", "ingestion/full_loader", "shared"):
        for path in (REPOSITORY / "macros" / folder).rglob("*.sql"):
            text = re.sub(r"{#.*?#}", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
            found |= {
                name.lower() for name in re.findall(r"(?m)[\s)](?:as|with) (\w+)(?=,?$| \(|\)|,)", text)
            }
    found = {name for name in found - ADDED if not name.startswith("lakehouse_patterns_")}
    assert {DAY, NUMBER, TEXT, "copies", "null_0", "stored", "payload", "entity", "row_count"} <= found
    kinds = {DAY: "day", TEXT: "text"}
    return {
        (str.upper, str.title, str)[place % 3](name): kinds.get(name, "id")
        for place, name in enumerate(sorted(found))
    }


def test_a_materialization_quotes_names_and_finds_them_in_any_case(
    make_project: Callable[..., DbtProject],
) -> None:
    files = {
        f"models/{name}.sql": f"{{{{ config({config}, {MAPPED}) }}}}\nselect * from {{{{ source('raw', 'odd_rows') }}}}"
        for name, config in MODELS.items()
    }
    project = make_project(files | {"models/sources.yml": SOURCES})
    helpers = named_like_helpers()
    columns = list(zip(map(q, ODD), ("id", "text", "day"), strict=True))
    columns += [(q(name), kind) for name, kind in helpers.items()]
    project.spark.sql(
        f"create table {project.schema}.odd_rows using delta "
        "tblproperties ('delta.columnMapping.mode' = 'name') as "
        f"select distinct {', '.join(f'{kind} as {name}' for name, kind in columns)} from {ROWS} as (id, text, day)"
    )
    with environment(LOGICAL_DATE="2026-01-05"):
        project.run("run")
        project.run("run", "--exclude", "odd_units")
        project.run(
            "run-operation",
            "add_unit_column",
            "--args",
            "{model_name: odd_units, column: Group By, type: int}",
        )
    taken = [name for name in helpers if name.lower() not in ("run", "sequence")]
    assert_rows(
        project.table("odd_history").selectExpr(
            "`Order Id`", "`select`", "string(effective_from)", *map(q, taken)
        ),
        [(*row, *(value(row, helpers[name]) for name in taken)) for row in WHOLE[:2]],
    )
    for name in MODELS.keys() - {"odd_history"}:
        more = ["Group By"] if name == "odd_units" else []
        assert project.table(name).columns == [*ODD, *helpers, *more]
        assert_rows(
            project.table(name).selectExpr(
                "`Order Id`", "`select`", "string(UPPER)", *(f"string({q(h)})" for h in helpers)
            ),
            [(*row, *(str(value(row, kind)) for kind in helpers.values())) for row in WHOLE[:2]],
        )
    for name in ("odd_overwrite", "odd_merged"):
        detail = project.spark.sql(f"describe detail {project.schema}.{name}").first()
        assert [name.lower() for name in detail.partitionColumns] == ["order id"]
        assert detail.properties.get("it's") == "it's ours"
        assert detail.location.endswith(f"/it's/{name}")


def value(row: tuple[Any, ...], kind: str) -> Any:
    """Return what a column of `odd_rows` holds in a row of WHOLE."""
    return row[("id", "text", "day").index(kind)]
