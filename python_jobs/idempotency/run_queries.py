"""Queries of a job's user over the rows of one logical run."""

from __future__ import annotations

from pyspark.sql import DataFrame

from python_jobs.intervals import parse_time
from python_jobs.job import WrongUse


def rows_of_run(source: DataFrame, query: str, run: str) -> DataFrame:
    """Return what ``query`` makes of ``source``, which it reads as ``{source}``.

    ``{run}`` is the run's time in UTC as a text literal, such as '2024-11-20T00:00:00Z'. It is no parameter marker:
    Delta's SQL parser leaves those unbound.

    Raises:
        WrongUse: there is something else in braces.
    """
    moment = f"{parse_time(run):%Y-%m-%dT%H:%M:%SZ}"
    try:
        return source.sparkSession.sql(query, source=source, run=moment)
    except (KeyError, IndexError, ValueError) as failure:
        raise WrongUse(
            f"a query may have {{source}} and {{run}} in braces and nothing else, got {failure}: {query}"
        ) from None
