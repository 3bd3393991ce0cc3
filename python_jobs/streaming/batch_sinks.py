"""Sinks of a batch beside its main table: each gets the result of its own query over the batch's rows.

A Delta table takes each batch of a writer once. Delta skips every batch whose number isn't above the writer's last one,
so the batches of a sink must come in order: a batch that is written behind a later one would be lost silently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.delta.streams import append, batch_options, create_table, nullable
from python_jobs.shared.delta.tables import table_exists
from python_jobs.shared.kafka.topics import describe_topics, publish
from python_jobs.shared.records.json_messages import json_message
from python_jobs.shared.spark.queries import user_query
from python_jobs.shared.spark.sql_text import require_free_names

BATCH_ID, WRITER_ID = "batch_id", "writer_id"


@dataclass(frozen=True)
class SideSink:
    """A sink: a Delta table or a Kafka topic."""

    name: str
    """Name of the sink."""
    query: str
    """Deterministic SQL of the sink's rows over the batch's rows ``{rows}``, such as select * from {rows}."""
    table: str | None = None
    """Delta table (name or path), created when absent."""
    topic: str | None = None
    """Kafka topic; each row is a JSON message."""
    key: str | None = None
    """SQL expression of a message's key over the query's columns; default: no key."""
    required: bool = True
    """Whether the batch fails without this sink (default); an optional sink that fails is repaired later."""

    def __post_init__(self) -> None:
        if (self.table is None) == (self.topic is None):
            raise WrongUse(f"the sink {self.name} must have either a table or a topic")
        if self.key is not None and self.topic is None:
            raise WrongUse(f"the key of the sink {self.name} belongs to a topic")

    @property
    def place(self) -> str:
        """Return where the sink is, for the check that two sinks differ."""
        return f"table {self.table}" if self.topic is None else f"topic {self.topic}"


def with_batch(rows: DataFrame, writer_id: str, batch_id: int) -> DataFrame:
    """Return rows with the number of their batch and the checkpoint that numbers it."""
    return rows.select("*", F.lit(batch_id).cast("bigint").alias(BATCH_ID), F.lit(writer_id).alias(WRITER_ID))


class BatchSink(ABC):
    """A sink that gets the result of its query over each batch's rows, in the order of the batches."""

    def __init__(self, declared: SideSink) -> None:
        self.declared = declared

    @property
    def name(self) -> str:
        """Return the sink's name."""
        return self.declared.name

    def result(self, rows: DataFrame, writer_id: str, batch_id: int) -> DataFrame:
        """Return the sink's rows of a batch.

        Raises:
            WrongUse: the query can't be used, or it gives a column that the job writes itself.
        """
        found = user_query(rows.sparkSession, self.declared.query, rows=rows)
        require_free_names(found.columns, (BATCH_ID, WRITER_ID))
        return with_batch(found, writer_id, batch_id)

    @abstractmethod
    def prepare(self, no_rows: DataFrame) -> None:
        """Create or check the destination; ``no_rows`` is a result of no rows."""

    @abstractmethod
    def write(self, rows: DataFrame, writer_id: str, batch_id: int) -> None:
        """Write the result of the query over the batch's rows; a batch that is written again may change nothing."""


class TableSink(BatchSink):
    """A Delta table, which has each batch once."""

    def prepare(self, no_rows: DataFrame) -> None:
        """Create the table, or check its columns.

        Raises:
            WrongUse: the existing table has other columns.
        """
        create_table(no_rows.sparkSession, str(self.declared.table), nullable(no_rows.schema))

    def write(self, rows: DataFrame, writer_id: str, batch_id: int) -> None:
        """Append the result in one commit; the table ignores a batch that it has."""
        result, table = self.result(rows, writer_id, batch_id), str(self.declared.table)
        if not table_exists(result.sparkSession, table):  # it was out of reach at the start
            self.prepare(result.limit(0))
        append(result, table, batch_options(writer_id, batch_id))


class TopicSink(BatchSink):
    """A Kafka topic, which gets a batch again if the batch is repeated."""

    def __init__(self, declared: SideSink, settings: Mapping[str, str]) -> None:
        super().__init__(declared)
        self._settings = settings

    def prepare(self, no_rows: DataFrame) -> None:
        """Check that the topic is there.

        Raises:
            NotReady: no broker answers, or the topic doesn't exist.
            WrongUse: the key can't be resolved.
        """
        self.messages(no_rows)
        describe_topics(no_rows.sparkSession, [str(self.declared.topic)], self._settings)

    def write(self, rows: DataFrame, writer_id: str, batch_id: int) -> None:
        """Publish one message for each row of the result."""
        messages = self.messages(self.result(rows, writer_id, batch_id))
        publish(messages, self._settings, str(self.declared.topic))

    def messages(self, result: DataFrame) -> DataFrame:
        """Return the records of a result: topic, key and value."""
        key = F.lit(None) if self.declared.key is None else F.expr(self.declared.key)
        return result.select(
            F.lit(self.declared.topic).alias("topic"),
            key.cast("string").alias("key"),
            json_message(result, result.columns).alias("value"),
        )
