"""SQL that a user gives a job, as text or as a file, over the DataFrames that the job names in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.failures import DataRefused, WrongUse


def query_text(query: str) -> str:
    """Return the SQL of a parameter that holds it, or the name of its .sql file.

    Raises:
        WrongUse: the file can't be read.
    """
    if not query.endswith(".sql"):
        return query
    try:
        return Path(query).read_text(encoding="utf-8")
    except OSError as failure:
        raise WrongUse(f"can't read the query's file {query} ({failure.strerror})") from None


def user_query(spark: SparkSession, text: str, **values: Any) -> DataFrame:
    """Return the rows of a user's SQL, with a DataFrame or a literal for each ``{name}`` in it.

    Raises:
        WrongUse: it can't be analyzed, or has another name in braces.
    """
    try:
        return spark.sql(text, **values)
    except (KeyError, IndexError, ValueError):
        names = " and ".join(f"{{{name}}}" for name in values)
        raise WrongUse(f"the query can't be used: it may have {names} in braces and nothing else") from None
    except (AnalysisException, ParseException) as failure:
        raise WrongUse(f"the query can't be used ({first_line(failure)})") from None


def require_rows(rows: DataFrame, min_rows: int, table: str) -> None:
    """Refuse fewer than ``min_rows`` rows for a table; asking costs an action that reads as many, 0 asks nothing.

    Raises:
        DataRefused: there are fewer.
    """
    if min_rows and (found := rows.limit(min_rows).count()) < min_rows:
        raise DataRefused(
            f"{found} rows for {table}, allowed are {min_rows} or more (min_rows); it stays as it is"
        )


def first_line(failure: Exception) -> str:
    """Return what Spark says first of a statement that it can't analyze."""
    return str(failure).splitlines()[0][:300]
