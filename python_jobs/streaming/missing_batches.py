"""Batches that an optional sink lacks: a log in a Delta table, which outlives the job and the sink.

Each failed write appends a line ``missing``, each later write of the batch a line ``repaired``. Lines are only added:
a stream and a repair may write at once, and a line that comes twice after a crash changes nothing.
"""

from __future__ import annotations

import datetime as dt

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.delta.streams import append, create_table
from python_jobs.shared.delta.tables import read_table

_TYPE = "sink string, writer_id string, batch_id bigint, event string, error string, at timestamp"
_MISSING, _REPAIRED = "missing", "repaired"


class MissingBatches:
    """The log of one query's batches."""

    def __init__(self, spark: SparkSession, table: str, writer_id: str) -> None:
        """Create the table, or check its columns.

        Raises:
            WrongUse: the existing table has other columns.
        """
        create_table(spark, table, spark.createDataFrame([], _TYPE).schema)
        self._spark, self._table, self._writer_id = spark, table, writer_id

    def missing(self) -> dict[str, list[int]]:
        """Return the batches that are missing now, in order, by sink; a sink that lacks none has no entry."""
        rows = (
            read_table(self._spark, self._table)
            .where(F.col("writer_id") == self._writer_id)
            .groupBy("sink", "batch_id")
            .agg(F.count_if(F.col("event") == _REPAIRED).alias("repaired"))
            .where("repaired = 0")
            .orderBy("sink", "batch_id")
            .collect()
        )
        found: dict[str, list[int]] = {}
        for row in rows:
            found.setdefault(row.sink, []).append(row.batch_id)
        return found

    def record(self, sink: str, batch_id: int, error: str, at: dt.datetime) -> None:
        """Record that a sink lacks a batch, and why."""
        self._append(sink, batch_id, _MISSING, error, at)

    def repaired(self, sink: str, batch_id: int, at: dt.datetime) -> None:
        """Record that a sink has the batch now."""
        self._append(sink, batch_id, _REPAIRED, None, at)

    def _append(self, sink: str, batch_id: int, event: str, error: str | None, at: dt.datetime) -> None:
        line = self._spark.createDataFrame([(sink, self._writer_id, batch_id, event, error, at)], _TYPE)
        append(line.coalesce(1), self._table, {})
