"""Errors of records: the first one of several, and those of records without a part of their key, or without a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import Column
from pyspark.sql import functions as F

from python_jobs.shared.records.json_records import ERROR_CLASS, ERROR_MESSAGE
from python_jobs.shared.spark.sql_text import named_column

NULL_KEY, NULL_TIME = "NULL_KEY", "NULL_TIME"


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
