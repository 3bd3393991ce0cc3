"""SQL that a user gives to a job, and whose fault an error of SQL is.

A query is a text or a file; the job replaces names in braces by DataFrames. Conditions and expressions are texts, of
the command line or of a file that a parameter names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pyspark.errors import AnalysisException, ParseException, PySparkException, QueryContextType
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import DataRefused, JobFailed, WrongUse
from python_jobs.shared.spark.expressions import first_line
from python_jobs.shared.spark.jvm import engine_errors

# States of SQL's standard: an error at a value, and one that the query itself raises.
_DATA_EXCEPTION, _RAISED = "22", "P0001"
_RAISES = re.compile(r"\b(?:raise_error|assert_true)\b", re.IGNORECASE)
_TEXT_FILES = (".sql", ".ddl", ".yml", ".yaml", ".json")


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
    except UnicodeDecodeError:
        raise WrongUse(f"can't read the query's file {query} (it is not UTF-8)") from None


def user_query(spark: SparkSession, text: str, **values: Any) -> DataFrame:
    """Return the rows of a user's SQL query, with a DataFrame or a literal for each ``{name}`` in it.

    Raises:
        WrongUse: Spark can't analyze the query, or the query has an unknown name in braces.
    """
    # PySpark drops the view of a DataFrame behind the query, and Spark then drops the cache of the view's plan. The
    # condition gives the view a plan of its own, so that cached rows stay cached; a selection of all columns would not.
    views: dict[str, Any] = {
        name: value.where(F.lit(True)) if isinstance(value, DataFrame) else value
        for name, value in values.items()
    }
    try:
        return spark.sql(text, **views)
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


def failure_of_users_sql(failure: Exception, parameters: object) -> JobFailed | None:
    """Return an error in the user's own SQL as one sentence; None if the error isn't Spark's, or in SQL of ours.

    SQL is the user's if it is in the parameters, or in a file that one of them names. SQL that Spark can't analyze is
    wrong use. A failure at a value, and a refusal by the SQL itself (``raise_error``), is refused data.
    """
    if not dataclasses.is_dataclass(parameters):
        return None
    given = {field.name: getattr(parameters, field.name) for field in dataclasses.fields(parameters)}
    for error in engine_errors(failure):
        state = error.getSqlState() or ""
        if not isinstance(error, AnalysisException) and not state.startswith((_DATA_EXCEPTION, _RAISED)):
            continue
        if state == _RAISED:
            signs = [_RAISES]
        else:
            parts = (re.escape(_squeezed(part)) for part in _failed_sql(error))
            signs = [re.compile(rf"(?<!\w){part}(?!\w)") for part in parts if part]
        texts = _user_texts(given, "")
        name = next((name for name, text in texts if any(sign.search(text) for sign in signs)), None)
        if name is not None and isinstance(error, AnalysisException):
            return WrongUse(f"{name} can't be used ({first_line(error)})")
        if name is not None:
            return DataRefused(f"{name} fails at a value ({first_line(error)})")
    return None


def _failed_sql(error: PySparkException) -> Iterator[str]:
    """Yield the parts of SQL texts at which an error occurred; of a text that can't be parsed, all of it."""
    for context in error.getQueryContext():
        if context.contextType() == QueryContextType.SQL:
            yield context.fragment()
    if isinstance(error, ParseException) and (text := re.search(r"\n== SQL ==\n([\s\S]+)", str(error))):
        yield re.sub(r"(?m)^-*\^\^\^$", "", text[1])


def _user_texts(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each text in the parameters, with single spaces; for a file of texts, its content."""
    if isinstance(value, Mapping):
        for part, inner in value.items():
            yield from _user_texts(inner, f"{name}.{part}".lstrip("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _user_texts(inner, name)
    elif isinstance(value, str):
        is_file = value.endswith(_TEXT_FILES) and Path(value).is_file()
        text = Path(value).read_text(encoding="utf-8", errors="replace") if is_file else value
        yield name, _squeezed(text)


def _squeezed(text: str) -> str:
    return " ".join(text.split())
