"""Kafka records as rows of a bronze table, with their bytes as texts or untouched."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.spark.sql_text import identifier

BRONZE_TYPES = {
    "payload": "string",
    "key": "string",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "headers": "array<struct<key:string,value:binary>>",
    "ingested_at": "timestamp",
}

RAW_TYPES = {
    "value": "binary",
    "key": "binary",
    **{name: BRONZE_TYPES[name] for name in ("topic", "partition", "offset", "timestamp", "headers")},
}
"""Columns of a table of raw records: those of Kafka's record, byte for byte."""


def bronze_rows(records: DataFrame, ingested_at: int, derive: Mapping[str, str]) -> DataFrame:
    """Return the bronze rows of Kafka's records.

    ``ingested_at`` is in microseconds since 1970. A cast to string keeps all bytes, even if they are no UTF-8.
    """
    rows = records.select(
        F.col("value").cast("string").alias("payload"),
        F.col("key").cast("string").alias("key"),
        "topic",
        "partition",
        "offset",
        "timestamp",
        "headers",
        F.timestamp_micros(F.lit(ingested_at)).alias("ingested_at"),
    )
    return rows.select("*", *(F.expr(expression).alias(name) for name, expression in derive.items()))


def raw_rows(spark: SparkSession, records: DataFrame | None) -> DataFrame:
    """Return the rows of a table of raw records; without records an empty DataFrame of its columns."""
    if records is not None:
        return records.select(*RAW_TYPES)
    return spark.createDataFrame(
        [], ", ".join(f"{identifier(name)} {type_}" for name, type_ in RAW_TYPES.items())
    )


def record_columns(records: DataFrame) -> DataFrame:
    """Return what a user's expressions read of Kafka's records: payload, key, position, timestamp and headers."""
    return bronze_rows(records, 0, {}).drop("ingested_at")
