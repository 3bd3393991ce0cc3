"""SQL queries that a user gives to a job, as text or as a file; the job replaces names in braces by DataFrames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.failures import DataRefused, WrongUse


def query_text(query: str) -> str:
    """Return the SQL of a parameter: the parameter is SQL or the path of a .sql file.

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
    """Return the rows of a user's SQL query, with a DataFrame or a literal for each ``{name}`` in it.

    Raises:
        WrongUse: Spark can't analyze the query, or the query has an unknown name in braces.
    """
    try:
        return spark.sql(text, **values)
    except (KeyError, IndexError, ValueError):
        names = " and ".join(f"{{{name}}}" for name in values)
        raise WrongUse(f"the query can't be used: in braces it may have {names} and no other name") from None
    except (AnalysisException, ParseException) as failure:
        raise WrongUse(f"the query can't be used ({first_line(failure)})") from None


def require_rows(rows: DataFrame, min_rows: int, table: str) -> None:
    """Refuse fewer than ``min_rows`` rows for a table.

    The check is one Spark action that reads up to ``min_rows`` rows; with 0 there is no check.

    Raises:
        DataRefused: there are fewer rows.
    """
    if min_rows and (found := rows.limit(min_rows).count()) < min_rows:
        raise DataRefused(
            f"{found} rows for {table}, allowed are {min_rows} or more (min_rows); the table stays as it is"
        )


def first_line(failure: Exception) -> str:
    """Return the first line of Spark's message, up to 300 characters."""
    return str(failure).splitlines()[0][:300]
