"""Rows of a topic's records that are known by their position: topic, partition and offset.

Hybrid Source makes such a table, and the Batch Reprocessor of records corrects it. Offsets repeat across partitions, so
that each partition has bounds of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.origins import ORIGIN, Origin
from python_jobs.shared.spark.times import stamped
from python_jobs.streaming.harmonised_columns import harmonised

POSITION = ("topic", "partition", "offset")
INGESTED_AT = "ingested_at"
OWN_COLUMNS = (*POSITION, ORIGIN, INGESTED_AT)
"""Columns that such a row has beside those of the expressions."""


def positioned_rows(records: DataFrame, columns: Mapping[str, str], origin: Origin) -> DataFrame:
    """Return the position of each record, the columns that the expressions give, and the origin.

    Raises:
        WrongUse: an expression can't be resolved.
    """
    position = [
        F.col("topic").cast("string").alias("topic"),
        F.col("partition").cast("int").alias("partition"),
        F.col("offset").cast("bigint").alias("offset"),
    ]
    return harmonised(records, columns, origin, position)


def ingested(rows: DataFrame, now: str) -> DataFrame:
    """Return rows with the time at which they are written."""
    return stamped(rows, INGESTED_AT, now)


def lies_before(topic: str, ends: Mapping[str, int]) -> Column:
    """Return the condition for records of a topic before an offset of each partition; others have none."""
    before = F.lit(False)
    for partition, offset in ends.items():
        before = before | ((F.col("partition") == int(partition)) & (F.col("offset") < offset))
    return (F.col("topic") == topic) & before


def require_positions(columns: Sequence[str], what: str) -> None:
    """Refuse a table without its records' positions.

    Raises:
        WrongUse: it has none.
    """
    missing = [name for name in POSITION if name not in columns]
    if missing:
        raise WrongUse(
            f"{what} has no column {', '.join(missing)}: its bounds are its records' positions, not a filter on their "
            "values"
        )
