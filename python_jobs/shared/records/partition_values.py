"""Values of partitions that a user or a folder's name gives as texts.

Spark completes a text that it compares with a column: it takes ``2024-09`` for the first of September, and a date for
its midnight. A run for one partition would then empty another one. Here a text is a value only if it is written in
full, as :func:`python_jobs.shared.records.values.exact_value` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StringType, TimestampType

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.records.values import exact_value, require_readable
from python_jobs.shared.spark.sql_text import identifier, named_column, string_literal


def partition_literals(rows: DataFrame, partition: Mapping[str, str]) -> dict[str, str]:
    """Return each value of the partition as a SQL literal of its column's type.

    Raises:
        WrongUse: the rows lack a column, no text is read as a column's type, or a value isn't of its column's type.
    """
    if not partition:
        return {}
    absent = [column for column in partition if column not in rows.columns]
    if absent:
        raise WrongUse(f"the rows have no column {', '.join(absent)}; they have {', '.join(rows.columns)}")
    schema = rows.select(*map(named_column, partition)).schema
    require_readable(schema, nested=False)
    values = [
        _as_text(exact_value(F.lit(partition[field.name]), field.dataType), field.dataType)
        for field in schema
    ]
    (texts,) = rows.sparkSession.sql("select 1").select(F.array(*values)).collect()[0]
    for field, text in zip(schema, texts, strict=True):
        if text is None:
            raise WrongUse(
                f"partition {field.name} is '{partition[field.name]}', which is no value of its type "
                f"{field.dataType.simpleString()}; write it in full, a date as 2024-12-31; nothing was overwritten"
            )
    return {field.name: _literal(text, field.dataType) for field, text in zip(schema, texts, strict=True)}


def _as_text(value: Column, type_: DataType) -> Column:
    return (F.unix_micros(value) if isinstance(type_, TimestampType) else value).cast("string")


def _literal(text: str, type_: DataType) -> str:
    if isinstance(type_, TimestampType):
        return f"timestamp_micros({text})"
    quoted = string_literal(text)
    return quoted if isinstance(type_, StringType) else f"cast({quoted} as {type_.simpleString()})"


def partition_condition(rows: DataFrame, partition: Mapping[str, str]) -> str:
    """Return the SQL condition that selects one partition; a value is of the type that its column has in ``rows``.

    Raises:
        WrongUse: as in :func:`partition_literals`.
    """
    literals = partition_literals(rows, partition)
    return " and ".join(f"{identifier(column)} = {literal}" for column, literal in literals.items())


def same_values(rows: DataFrame, texts: Sequence[str], literal: str, type_: DataType) -> dict[str, bool]:
    """Return the texts that Spark casts to the literal's value, each with whether it is written in full."""
    text = F.col("text")
    given = rows.sparkSession.createDataFrame([(text,) for text in texts], "text string")
    same = given.where(text.try_cast(type_) == F.expr(literal))
    is_exact = exact_value(text, type_).isNotNull().alias("is_exact")
    return {row.text: row.is_exact for row in same.select(text, is_exact).collect()}
