"""Corrections: what a table has of a range is made equal to what was computed again, in one commit or none."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from python_jobs.shared.delta.keyed_tables import DeltaSink
from python_jobs.shared.spark.sql_text import named_column, named_columns, taken_names
from python_jobs.shared.spark.times import EXACT_JSON

ADDED, REPLACED, REMOVED, UNCHANGED = "added", "replaced", "removed", "unchanged"
ACTION, NEW, OLD = "__action", "__new", "__old"
_ID, _IS_GONE = "__id", "__is_gone"


def compared(
    rows: DataFrame, stored: DataFrame, key: Sequence[str], written_at: str, stays: Column | None = None
) -> DataFrame:
    """Return each key's computed row (NEW), stored row (OLD) and ACTION; a row that isn't there is NULL.

    Args:
        rows: computed rows, each key once.
        stored: the table's rows of the same range, with the columns of ``rows``; further columns are kept.
        key: columns that make a row unique.
        written_at: the column with the time of writing, which makes no difference.
        stays: condition over OLD for rows that are UNCHANGED whatever was computed; default none.
    """
    columns = named_columns(rows.columns)
    content = [name for name in rows.columns if name != written_at]
    further = [name for name in stored.columns if name not in rows.columns]
    new = rows.select(as_struct(key).alias(_ID), F.struct(*columns).alias(NEW))
    old = stored.select(as_struct(key).alias(_ID), F.struct(*columns).alias(OLD), *named_columns(further))
    types = {field.name: field.dataType.simpleString() for field in rows.schema.fields}
    one, other = (
        F.struct(*(_comparable(named_column(name, of), types[name]) for name in content)) for of in (NEW, OLD)
    )
    action = (
        F.when(F.lit(False) if stays is None else stays, UNCHANGED)
        .when(F.col(OLD).isNull(), ADDED)
        .when(F.col(NEW).isNull(), REMOVED)
        .when(one.eqNullSafe(other), UNCHANGED)
        .otherwise(REPLACED)
    )
    return new.join(old, _ID, "full_outer").withColumn(ACTION, action)


def _comparable(value: Column, type_: str) -> Column:
    """Return a value that Spark compares: of a type with maps or variants, which it doesn't, the JSON text."""
    if re.search(r"(?:^|[:<])(?:map<|variant(?:$|[,>]))", type_):
        return F.to_json(F.struct(value), EXACT_JSON)
    return value


def write_corrections(sink: DeltaSink, changes: DataFrame, within: str = "") -> None:
    """Write the rows of :func:`compared` that make a difference; ``within`` is as in :meth:`.DeltaSink.correct`."""
    changed = changes.where(F.col(ACTION).isin(ADDED, REPLACED, REMOVED))
    is_gone = _IS_GONE
    while taken_names(changes.select(f"{NEW}.*").columns, by=[is_gone]):  # a user's column may have any name
        is_gone += "_"
    rows = changed.select(F.coalesce(NEW, OLD).alias("__row"), (F.col(ACTION) == REMOVED).alias(is_gone))
    sink.correct(rows.select("__row.*", is_gone), is_gone, within)


def as_struct(columns: Sequence[str]) -> Column:
    """Return columns, which may have any names, as one value to join by."""
    return F.struct(*named_columns(columns))
