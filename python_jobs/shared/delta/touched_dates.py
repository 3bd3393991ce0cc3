"""The dates that a MERGE touches, as literals: Delta prunes the partitions of a MERGE's target by literals alone.

A condition such as ``t.window_date = s.window_date`` prunes nothing, because the rows of ``s`` are not known when the
files of ``t`` are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from python_jobs.shared.spark.sql_text import identifier, named_column

MAX_LISTED = 100
"""Number of dates that are listed; of more dates only the first and the last one are."""


def dates_of(rows: DataFrame, column: str) -> list[str]:
    """Return the distinct dates of a date column as texts, the earliest first; NULL is left out."""
    # As texts, because Python has no dates after the year 9999, and one such event would stop a stream for ever.
    date = named_column(column)
    found = rows.where(date.isNotNull()).select(F.unix_date(date), date.cast("string")).distinct().collect()
    return [text for _, text in sorted(found)]


def among(column: str, dates: Sequence[str]) -> str:
    """Return the SQL condition that column ``t.<column>`` of a MERGE's target has one of the dates of :func:`dates_of`.

    >>> among("day", ["2024-03-01", "2024-03-05"])
    "t.`day` in (date'2024-03-01', date'2024-03-05')"
    >>> among("day", [])
    'false'
    """
    if not dates:
        return "false"
    if len(dates) > MAX_LISTED:
        return f"t.{identifier(column)} between date'{dates[0]}' and date'{dates[-1]}'"
    listed = ", ".join(f"date'{date}'" for date in dates)
    return f"t.{identifier(column)} in ({listed})"
