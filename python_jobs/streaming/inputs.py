"""Inputs of a union: Delta tables and Kafka topics, each with its own expressions for the common columns.

Spark knows the sources of a query by their places: a checkpoint with two sources refuses a query with one or three. So
an input that isn't there yet keeps its place by an empty stream without offsets, and starts at its first record later.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from python_jobs.shared.core.failures import NotReady, WrongUse
from python_jobs.shared.core.origins import Origin
from python_jobs.shared.delta.commits import latest_version
from python_jobs.shared.delta.offsets_files import newest_offsets
from python_jobs.shared.delta.streams import empty_source, read_stream
from python_jobs.shared.delta.tables import committed_files, table_exists, table_id, table_size
from python_jobs.shared.kafka.bronze_records import raw_rows, record_columns
from python_jobs.shared.kafka.topics import StreamedTopics, offset_ranges, read_topics
from python_jobs.shared.spark.hadoop_files import HadoopFolder, literal_path
from python_jobs.streaming.harmonised_columns import harmonised, require_same_types

SOURCE = "source"
"""Column with the name of the input."""
_NOTHING = "nothing"
_WAY_OUT = "start again with another target and another checkpoint"


@dataclass(frozen=True)
class Source:
    """An input: a Delta table or a Kafka topic."""

    name: str
    """Name of the input, of letters, digits, '_', '-' and '.'; its rows carry it as ``source``."""
    columns: dict[str, str]
    """Common columns, each with its SQL expression; over a topic's record it reads payload, key, timestamp, headers."""
    table: str | None = None
    """Append-only Delta table (name or path)."""
    topic: str | None = None
    """Kafka topic."""
    origin: Origin = "real_time"
    """Origin of the input's rows; real_time by default."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.name):
            raise WrongUse(f"a source's name must be of letters, digits, '_', '-' and '.', got '{self.name}'")
        if (self.table is None) == (self.topic is None):
            raise WrongUse(f"the source {self.name} must have either a table or a topic")
        if not self.columns:
            raise WrongUse(
                f"the source {self.name} has no columns; it takes one or more, each with its expression"
            )

    @property
    def kind(self) -> str:
        """Return what the input is: a table or a topic."""
        return "table" if self.topic is None else "topic"

    @property
    def place(self) -> str:
        """Return where the input is, for messages."""
        return f"{self.kind} {self.topic or self.table}"

    def rows(self, records: DataFrame) -> DataFrame:
        """Return the input's records as rows of the common columns, with their origin and source."""
        return harmonised(records, self.columns, self.origin).withColumn(SOURCE, F.lit(self.name))


class Input(ABC):
    """A source as it is at the start of a run."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.name = source.name
        """Name of the source."""
        self.id: str | None = None
        """Id of the table or topic, which a recreated one doesn't have; None while it is absent."""
        self.absence = f"there is no {source.place}"
        """Why the source is absent, for messages."""

    @abstractmethod
    def no_rows(self) -> DataFrame:
        """Return no rows of the source, with the common columns."""

    @abstractmethod
    def stream(self) -> DataFrame:
        """Return the stream of the source's rows."""

    @abstractmethod
    def has_news(self, position: Any) -> bool:
        """Return whether there is data behind a position of a checkpoint; None is the begin."""


class TableInput(Input):
    """An append-only Delta table."""

    def __init__(self, spark: SparkSession, source: Source, max_files_per_trigger: int | None) -> None:
        super().__init__(source)
        self._spark, self._table, self._max_files = spark, str(source.table), max_files_per_trigger
        self.id = table_id(spark, self._table) if table_exists(spark, self._table) else None

    def no_rows(self) -> DataFrame:
        """Return no rows of the table, with the common columns."""
        return self.source.rows(empty_source(self._spark, self._table, ()))

    def stream(self) -> DataFrame:
        """Return the stream of the table's rows."""
        return self.source.rows(read_stream(self._spark, self._table, self._max_files))

    def has_news(self, position: Any) -> bool:
        """Return whether the table has rows behind a position; a compaction is no news."""
        if position is None:
            return table_size(self._spark, self._table)[0] > 0
        version, newest = int(position["reservoirVersion"]), latest_version(self._spark, self._table)
        if int(position["index"]) >= 0:  # within a commit, of which files are left
            return True
        if newest < version:
            return False
        files = committed_files(self._spark, self._table, version - 1, newest)
        return not files.where("add.dataChange").isEmpty()


class TopicInput(Input):
    """A Kafka topic, read from its first record on."""

    def __init__(
        self,
        spark: SparkSession,
        source: Source,
        topics: StreamedTopics,
        settings: Mapping[str, str],
        max_records_per_trigger: int | None,
    ) -> None:
        """Take the topics of all inputs, which one client describes."""
        super().__init__(source)
        self._spark, self._topic, self._settings = spark, str(source.topic), settings
        self._max_records = max_records_per_trigger
        self.topics = topics
        if self._topic in topics.described:
            self.id = topics.described[self._topic].id
        else:
            self.absence = topics.absences[self._topic]

    def no_rows(self) -> DataFrame:
        """Return no rows of the topic, with the common columns."""
        return self.source.rows(record_columns(raw_rows(self._spark, None)))

    def stream(self) -> DataFrame:
        """Return the stream of the topic's rows."""
        partitions = self.topics.described[self._topic].partitions
        earliest = {(self._topic, partition): -2 for partition in range(partitions)}
        records = read_topics(self._spark, [self._topic], self._settings, earliest, self._max_records)
        return self.source.rows(record_columns(records))

    def has_news(self, position: Any) -> bool:
        """Return whether a partition has offsets behind a position."""
        reached = (position or {}).get(self._topic, {})
        return any(
            end > int(reached.get(str(partition), first))
            for (_, partition), (first, end) in offset_ranges(
                self._spark, self._topic, self._settings
            ).items()
        )


def opened(
    spark: SparkSession,
    sources: Sequence[Source],
    settings: Mapping[str, str],
    max_files_per_trigger: int | None,
    max_records_per_trigger: int | None,
) -> list[Input]:
    """Return the sources as they are now, in their order.

    Args:
        spark: the session.
        sources: the declared sources.
        settings: settings of Kafka's Java client; without a topic they aren't used.
        max_files_per_trigger: maximum number of a table's files in one batch; None: Delta's default.
        max_records_per_trigger: maximum number of a topic's records in one batch; None: all available records.

    Raises:
        JobFailed: the broker refuses the client.
    """
    names = list(dict.fromkeys(source.topic for source in sources if source.topic is not None))
    topics = StreamedTopics(spark, names, settings, _WAY_OUT, may_be_absent=True) if names else None
    return [
        TableInput(spark, source, max_files_per_trigger)
        if topics is None or source.topic is None
        else TopicInput(spark, source, topics, settings, max_records_per_trigger)
        for source in sources
    ]


def require_unchanged(inputs: Sequence[Input]) -> None:
    """Refuse to go on if a topic was deleted and recreated since the start; a Delta stream notices it itself."""
    topics = next((given.topics for given in inputs if isinstance(given, TopicInput)), None)
    if topics is not None:
        topics.require_unchanged()


def no_rows(inputs: Sequence[Input]) -> DataFrame:
    """Return no rows, with the columns that all inputs have in common.

    Raises:
        NotReady: no input is there.
        WrongUse: an expression can't be resolved, or the inputs' columns have different types.
    """
    there = {f"source {given.name}": given.no_rows() for given in inputs if given.id is not None}
    if not there:
        raise NotReady(f"none of the sources is there: {'; '.join(given.absence for given in inputs)}")
    require_same_types(there)
    return next(iter(there.values()))


def united(spark: SparkSession, inputs: Sequence[Input], schema: StructType, checkpoint: str) -> DataFrame:
    """Return the stream of all inputs' rows, by the names of their columns; duplicates stay.

    Args:
        spark: the session.
        inputs: the inputs, always in the same order; those that are absent give no rows.
        schema: the common columns.
        checkpoint: folder of the query's progress.
    """
    streams = [
        _no_stream(spark, schema, checkpoint) if given.id is None else given.stream() for given in inputs
    ]
    return reduce(DataFrame.unionByName, streams)


def _no_stream(spark: SparkSession, schema: StructType, checkpoint: str) -> DataFrame:
    """Return a stream that never has rows nor offsets: of a folder without files."""
    folder = HadoopFolder(spark, checkpoint)
    folder.create_text(f"{_NOTHING}/_empty", "")  # Spark's file stream leaves out names with _
    return spark.readStream.schema(schema).parquet(literal_path(f"{folder.root}/{_NOTHING}"))


def require_news(spark: SparkSession, inputs: Sequence[Input], checkpoint: str) -> None:
    """Refuse to start before each input has new data; a batch that has begun is completed first.

    Raises:
        NotReady: an input has no new data, or isn't there.
    """
    begun, completed = newest_offsets(HadoopFolder(spark, checkpoint))
    if begun is not None and (completed is None or completed.batch_id < begun.batch_id):
        return
    positions = [None] * len(inputs) if completed is None else completed.sources
    waits = [
        given.name
        for given, position in zip(inputs, positions, strict=True)
        if given.id is None or not given.has_news(position)
    ]
    if waits:
        raise NotReady(
            f"no new data of {', '.join(waits)}; aligned sources wait for each other: run again later"
        )
