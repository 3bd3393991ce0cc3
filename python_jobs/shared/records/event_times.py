"""Order and errors of records: the first error of several, and those of records that a stateful stream can't take."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import cast

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DecimalType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.intervals import parse_time
from python_jobs.shared.records.json_records import ERROR_CLASS, ERROR_MESSAGE
from python_jobs.shared.spark.sql_text import named_column, named_columns

NULL_KEY, NULL_TIME, NOT_UTF8 = "NULL_KEY", "NULL_TIME", "NOT_UTF8"
FUTURE_EVENT_TIME = "FUTURE_EVENT_TIME"
_INTEGERS = (ByteType, ShortType, IntegerType, LongType)
_BIGINT_DIGITS = 18


def absence(key: Mapping[str, str], times: Mapping[str, str]) -> list[tuple[Column, str, Column]]:
    """Return the errors of a record without a part of its key or a time, as ``first_error`` takes them.

    Both arguments have the names of columns, each with the name that the message shows.
    """
    parts = {**key, **times}
    absent = F.concat_ws(
        ", ", *(F.when(named_column(name).isNull(), F.lit(shown)) for name, shown in parts.items())
    )
    no_key = F.lit(False)
    for name in key:
        no_key = no_key | named_column(name).isNull()
    message = F.concat(F.lit("the record has NULL in "), absent)
    return [(no_key, NULL_KEY, message), (absent != "", NULL_TIME, message)]


def order_of(rows: DataFrame, ties: Sequence[str], parameter: str = "ties") -> list[Column]:
    """Return the integer columns that order events of one time, each as a bigint.

    Raises:
        AnalysisException: there is no such column.
        WrongUse: a column is no integer. A cast would end the query at a text and cut a time to its seconds, so that
            events that differ were one.
    """
    for field in rows.select(*named_columns(ties)).schema.fields:
        if not _is_integer(field.dataType):
            raise WrongUse(
                f"{parameter} must be integer columns, '{field.name}' is a {field.dataType.simpleString()}: give a "
                "column with an integer for it, such as unix_micros of a time"
            )
    return [named_column(name).cast("bigint") for name in ties]


def _is_integer(type_: DataType) -> bool:
    if isinstance(type_, DecimalType):
        return type_.scale == 0 and type_.precision <= _BIGINT_DIGITS
    return isinstance(type_, _INTEGERS)


def not_utf8(rows: DataFrame, texts: Mapping[str, str]) -> tuple[Column, str, Column]:
    """Return the error of a record with a text that isn't UTF-8: Spark holds any bytes as a text, and Python doesn't.

    Such a text would end the stream at each start, or become another one, which it has in common with other bytes.

    Args:
        rows: the records with these columns; those without a text in their type have no error.
        texts: names of columns, each with the name that the message shows.
    """
    conditions = {
        shown: is_broken
        for name, shown in texts.items()
        if (is_broken := _broken_text(named_column(name), rows.schema[name].dataType)) is not None
    }
    broken = F.concat_ws(", ", *(F.when(is_broken, F.lit(shown)) for shown, is_broken in conditions.items()))
    return broken != "", NOT_UTF8, F.concat(F.lit("the record has bytes that aren't UTF-8 in "), broken)


def _broken_text(value: Column, type_: DataType) -> Column | None:
    """Return whether a value of a type holds a text that isn't UTF-8; None for a type without texts.

    Binary values inside of it, such as those of a record's headers, may hold any bytes.
    """
    if isinstance(type_, StringType):
        return ~F.is_valid_utf8(value)
    if isinstance(type_, ArrayType):
        return _any_broken(value, type_.elementType)
    if isinstance(type_, MapType):
        return _either(
            _any_broken(F.map_keys(value), type_.keyType), _any_broken(F.map_values(value), type_.valueType)
        )
    if isinstance(type_, StructType):
        return _either(*(_broken_text(value[field.name], field.dataType) for field in type_.fields))
    return None


def _any_broken(values: Column, type_: DataType) -> Column | None:
    if _broken_text(F.lit(None), type_) is None:
        return None
    return F.exists(values, lambda value: cast(Column, _broken_text(value, type_)))


def _either(*conditions: Column | None) -> Column | None:
    known = [F.coalesce(condition, F.lit(False)) for condition in conditions if condition is not None]
    return reduce(operator.or_, known) if known else None


def latest_time(max_future: str, now: str | None) -> Column:
    """Return the latest time that an event may have: ``max_future`` ahead of the stream's clock.

    The clock is ``now``, or the batch's time, which stays the same when the batch is rerun.
    """
    clock = F.current_timestamp() if now is None else F.lit(parse_time(now))
    return clock + F.expr(f"interval {max_future}")


def ahead(time: str, latest: Column) -> tuple[Column, str, Column]:
    """Return the error of a record whose time (a column) is after the latest allowed one.

    It would move the watermark, so that all other records would be late.
    """
    at = named_column(time)
    message = F.concat(
        F.lit("the event time "), at.cast("string"), F.lit(" is after "), latest.cast("string"),
        F.lit(", the latest that max_future allows"),
    )  # fmt: skip
    return at > latest, FUTURE_EVENT_TIME, message


def first_error(errors: Sequence[tuple[Column, str, Column]]) -> list[Column]:
    """Return a record's error class and message, NULL if it has no error.

    Args:
        errors: condition, class and message of each error; the first one whose condition holds counts.
    """
    error_class = error_message = F.lit(None).cast("string")
    for condition, name, message in reversed(errors):
        error_class = F.when(condition, F.lit(name)).otherwise(error_class)
        error_message = F.when(condition, message).otherwise(error_message)
    return [error_class.alias(ERROR_CLASS), error_message.alias(ERROR_MESSAGE)]
