"""Times in jobs: texts as times, by the rule of macros/shared/times.sql, and the time at which rows are written."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DateType, StringType, TimestampNTZType, TimestampType

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.spark.macro_sql import Macros
from python_jobs.shared.spark.sql_text import identifier, named_column, require_free_names

# Options of to_json: by default it leaves out NULLs and cuts times to milliseconds.
EXACT_JSON = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def full_timestamp(text: str) -> Column:
    """Return the timestamp that a text (a SQL expression) names with date and time; NULL for any other text.

    A text without offset is one of UTC, whatever the session's zone.
    """
    return F.expr(str(Macros(SparkSession.active(), ["shared/times.sql"]).call("_full_timestamp", text)))


def with_timestamp(rows: DataFrame, name: str, expression: str, parameter: str = "event_time") -> DataFrame:
    """Return the rows with the time that a user's SQL expression gives; a text is read by :func:`full_timestamp`.

    So nobody needs a function such as try_to_timestamp, which completes `10:00` to a time of today. The expression is
    a column of its own first, because the rule looks at the text several times.

    Raises:
        AnalysisException: the expression can't be resolved.
        WrongUse: the expression gives neither a timestamp nor a date nor a text, or the rows have a column ``name``,
            which would be lost.
    """
    require_free_names(rows.columns, [name])
    given = rows.withColumn(name, F.expr(expression))
    type_ = given.schema[name].dataType
    if isinstance(type_, StringType):
        return given.withColumn(name, full_timestamp(f"trim({identifier(name)})"))
    if isinstance(type_, TimestampType | TimestampNTZType | DateType):
        return given.withColumn(name, named_column(name).cast("timestamp"))
    raise WrongUse(
        f"{parameter} '{expression}' is of type {type_.simpleString()}; it must be a timestamp, a date or a text"
    )


def stamped(rows: DataFrame, column: str, now: str) -> DataFrame:
    """Return rows with the time at which they are written, such as ``2024-01-01T10:00:00+00:00``."""
    return rows.withColumn(column, F.lit(now).cast("timestamp"))
