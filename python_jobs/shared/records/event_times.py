"""Errors of records: the first one of several, and those of records that a stateful stream can't take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from python_jobs.shared.core.intervals import parse_time
from python_jobs.shared.records.json_records import ERROR_CLASS, ERROR_MESSAGE
from python_jobs.shared.spark.sql_text import named_column

NULL_KEY, NULL_TIME, NOT_UTF8 = "NULL_KEY", "NULL_TIME", "NOT_UTF8"
FUTURE_EVENT_TIME = "FUTURE_EVENT_TIME"


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


def not_utf8(rows: DataFrame, texts: Mapping[str, str]) -> tuple[Column, str, Column]:
    """Return the error of a record with a text that isn't UTF-8: Spark holds any bytes as a text, and Python doesn't.

    Such a text would end the stream at each start, or become another one, which it has in common with other bytes.

    Args:
        rows: the records with these columns; those without a text in their type have no error.
        texts: names of columns, each with the name that the message shows.
    """
    of_text = {
        name: shown for name, shown in texts.items() if "string" in rows.schema[name].dataType.simpleString()
    }
    broken = F.concat_ws(
        ", ",
        *(
            F.when(~F.is_valid_utf8(named_column(name).cast("string")), F.lit(shown))
            for name, shown in of_text.items()
        ),
    )
    return broken != "", NOT_UTF8, F.concat(F.lit("the record has bytes that aren't UTF-8 in "), broken)


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
