"""Queries of a job's user over the rows of one logical run."""

from __future__ import annotations

from pyspark.sql import DataFrame

from python_jobs.shared.core.intervals import parse_time
from python_jobs.shared.spark.queries import user_query


def rows_of_run(source: DataFrame, query: str, run: str) -> DataFrame:
    """Return what ``query`` makes of ``source``, which it reads as ``{source}``.

    ``{run}`` is the run's time in UTC as a text literal, such as '2024-11-20T00:00:00Z'. It is no parameter marker:
    Delta's SQL parser leaves those unbound.

    Raises:
        WrongUse: it can't be analyzed, or has another name in braces.
    """
    return user_query(source.sparkSession, query, source=source, run=f"{parse_time(run):%Y-%m-%dT%H:%M:%SZ}")
