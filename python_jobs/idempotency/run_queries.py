"""Queries of a job's user over the rows of one logical run."""

from __future__ import annotations

from pyspark.sql import DataFrame

from python_jobs.shared.core.intervals import parse_time
from python_jobs.shared.spark.queries import user_query


def rows_of_run(source: DataFrame, query: str, run: str) -> DataFrame:
    """Return the rows of ``query``, which reads ``source`` as ``{source}``.

    ``{run}`` is the run's time in UTC as a text literal, such as '2024-11-20T00:00:00Z'. Spark's parameter markers are
    not used because Delta's SQL parser doesn't bind them.

    Raises:
        WrongUse: Spark can't analyze the query, or the query has another name in braces.
    """
    return user_query(source.sparkSession, query, source=source, run=f"{parse_time(run):%Y-%m-%dT%H:%M:%SZ}")
