"""Multiset comparison of rows with a readable difference."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from pyspark.sql import DataFrame, Row

from python_jobs.shared.spark.sql_text import named_column

# The load time of a row, and values computed from it, differ between two runs of the same input; other values must not.
# `changes` of a history holds each source change with its load time.
CLOCK_COLUMNS = {
    "ingested_at",
    "last_ingested_at",
    "processed_at",
    "status_changed_at",
    "dead_letter_id",
    "changes",
    "run_at",
    "run_id",
    "published_at",
    "table_versions",
    "audited_at",
    "dbt_valid_from",
    "dbt_updated_at",
    "dbt_scd_id",
}


def assert_rows(
    actual: DataFrame | Iterable[Any],
    expected: DataFrame | Iterable[Any],
    columns: Sequence[str] | None = None,
) -> None:
    """Assert that both sides hold the same rows, each the same number of times, in any order.

    ``expected`` holds tuples in the order of the actual columns (or of ``columns``, which also selects), or
    dictionaries by column name. A duplicated row is a difference: sets would hide it.
    """
    if isinstance(actual, DataFrame):
        names = list(columns or actual.columns)
        actual = _selected(actual, names)
    else:
        names = list(columns or [])
    got, want = Counter(_frozen(actual, names)), Counter(_frozen(expected, names))
    missing, unexpected = want - got, got - want
    if missing or unexpected:
        lines = [f"rows differ (columns: {', '.join(names)})"]
        lines += [f"  missing    {count} x {row}" for row, count in sorted(missing.items(), key=repr)[:20]]
        lines += [f"  unexpected {count} x {row}" for row, count in sorted(unexpected.items(), key=repr)[:20]]
        raise AssertionError("\n".join(lines))


def _frozen(rows: DataFrame | Iterable[Any], names: Sequence[str]) -> list[Any]:
    if isinstance(rows, DataFrame):
        rows = _selected(rows, names).collect()
    return [_freeze(row, names) for row in rows]


def _selected(rows: DataFrame, names: Sequence[str]) -> DataFrame:
    """Return columns, by their whole names, and fields such as ``struct.field``."""
    return rows.select(*(named_column(name) if name in rows.columns else name for name in names))


def _freeze(value: Any, names: Sequence[str] = ()) -> Any:
    if isinstance(value, Row):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, dict):
        if names:
            return tuple(_freeze(value.get(name)) for name in names)
        return tuple(sorted((k, _freeze(v)) for k, v in value.items()))
    if isinstance(value, list | tuple):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.astimezone(dt.UTC).replace(tzinfo=None)
    return value
