"""Streams that write each micro-batch into Delta tables; most of them read an append-only Delta table.

A stream's batch function appends with the writer id as ``txnAppId`` (see :mod:`.checkpoints`) and with the batch's
number as ``txnVersion``. So a repeated batch adds nothing to a table that already has its rows.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pyspark import StorageLevel
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import JobFailed, NotReady, WrongUse, require_at_least
from python_jobs.shared.core.intervals import parse_duration
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.core.paths import absolute, is_path
from python_jobs.shared.core.signals import end_requested
from python_jobs.shared.delta.tables import create_if_absent, delta_table, read_table, table_exists
from python_jobs.shared.spark.sql_text import require_free_names

OutputMode = Literal["append", "update"]


@dataclass(frozen=True, kw_only=True)
class TriggerParameters:
    """Trigger parameters of a stream."""

    trigger: str | None = None
    """Interval of the batches of a continuous job, such as "10 seconds"; default: process the available data, stop."""

    def __post_init__(self) -> None:
        if self.trigger is not None:
            parse_duration(self.trigger)


@dataclass(frozen=True, kw_only=True)
class StreamParameters(TriggerParameters, ProcessingTimeParameters):
    """Parameters of a stream that reads a Delta table and appends to other tables."""

    max_files_per_trigger: int | None = None
    """Maximum number of source files in one batch; Delta's default is 1000."""
    start_over: bool = False
    """Whether a new checkpoint may append the whole source again to tables that an earlier checkpoint has filled."""

    def __post_init__(self) -> None:
        TriggerParameters.__post_init__(self)
        ProcessingTimeParameters.__post_init__(self)
        require_at_least(1, max_files_per_trigger=self.max_files_per_trigger)


class BatchFunction(ABC):
    """A ``foreachBatch`` function that keeps the exception with which it failed: Spark only passes on its text."""

    failure: Exception | None = None
    """Exception of the failed batch; None if no batch has failed."""
    trigger: str | None = None
    """Interval of the batches of a query without end; None if the query ends behind the available data."""

    def __call__(self, rows: DataFrame, batch_id: int) -> None:
        """Process one batch."""
        try:
            self.write(rows, batch_id)
        except Exception as error:
            self.failure = error
            raise

    @abstractmethod
    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Process the rows of one batch and write the result; after a crash Spark repeats the call with its number."""


def start_stream(
    spark: SparkSession,
    source: str,
    function: BatchFunction,
    checkpoint: str,
    trigger: str | None = None,
    max_files_per_trigger: int | None = None,
    options: Mapping[str, str] | None = None,
    transform: Callable[[DataFrame], DataFrame] = lambda rows: rows,
    output_mode: OutputMode = "append",
) -> StreamingQuery:
    """Start a query over a Delta table that passes its batches to ``function``; see :func:`start_query`.

    ``options`` are further options of Delta's reader. ``transform`` is applied to the stream before its batches reach
    ``function``: for example a watermark or a stateful operator.
    """
    stream = read_stream(spark, source, max_files_per_trigger, options)
    return start_query(transform(stream), function, checkpoint, trigger, output_mode)


def read_stream(
    spark: SparkSession,
    source: str,
    max_files_per_trigger: int | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return the stream of a Delta table (name or path); ``options`` are further options of Delta's reader."""
    reader = spark.readStream.format("delta").options(**options or {})
    if max_files_per_trigger is not None:
        reader = reader.option("maxFilesPerTrigger", max_files_per_trigger)
    return reader.load(absolute(source)) if is_path(source) else reader.table(source)


def start_query(
    stream: DataFrame,
    function: BatchFunction,
    checkpoint: str,
    trigger: str | None = None,
    output_mode: OutputMode = "append",
) -> StreamingQuery:
    """Start a query that passes the batches of a stream to ``function``.

    ``trigger`` is the interval of the batches of a query without end; None processes the available data and stops.
    With ``output_mode`` ``append`` the query passes on a result when it is final, with ``update`` at each change.
    """
    # An exception of the function reaches the caller through await_end; py4j would print its trace as well.
    logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)
    sink = stream.writeStream.outputMode(output_mode).foreachBatch(function)
    sink = sink.option("checkpointLocation", checkpoint)
    function.trigger = trigger
    if trigger is None:
        return sink.trigger(availableNow=True).start()
    return sink.trigger(processingTime=trigger).start()


# Failures of a stream that its source table causes, by the error class in Spark's text.
SOURCE_FAILURES = {
    "DELTA_DIFFERENT_DELTA_TABLE_READ_BY_STREAMING_SOURCE": "isn't the table that the checkpoint has read",
    "DELTA_SCHEMA_CHANGED": "has changed its schema; start again with a new checkpoint and new tables",
    "DELTA_SOURCE_TABLE_IGNORE_CHANGES": "has rewritten rows; a stream needs a source that only appends",
    "DELTA_SOURCE_IGNORE_DELETE": "has deleted rows; a stream needs a source that only appends",
}

_LOOK_SECONDS = 1  # between two checks for a signal; the end of the query itself is noticed at once


def await_signal(query: StreamingQuery) -> bool:
    """Wait until the query ends, or stop it at SIGTERM or SIGINT (Ctrl-C); return whether a signal stopped it."""
    with end_requested() as stopped:
        while not (query.awaitTermination(_LOOK_SECONDS) or stopped.is_set()):
            pass
    if not query.isActive:
        return False
    query.stop()
    return True


def await_end(
    query: StreamingQuery,
    function: BatchFunction,
    source: str,
    source_failures: Mapping[str, str] = SOURCE_FAILURES,
) -> None:
    """Wait until the query ends; SIGTERM or SIGINT (Ctrl-C) stops it, which is how a query without end ends well.

    Raises:
        KeyboardInterrupt: a signal stopped a query that would have ended by itself: it hasn't read all data.
        Exception: the exception of ``function``, if it failed.
        JobFailed: the source can't be streamed any more; the message is one sentence.
    """
    try:
        if await_signal(query) and function.trigger is None:
            raise KeyboardInterrupt
    except StreamingQueryException as error:
        if function.failure is not None:
            raise function.failure from None
        for sign, sentence in source_failures.items():
            if sign in str(error):
                raise JobFailed(f"the source '{source}' {sentence}") from None
        raise


@contextmanager
def evaluated_once(rows: DataFrame) -> Iterator[DataFrame]:
    """Cache rows that several actions read, until the block ends: Spark computes each row once.

    The rows are cached on disk, not in memory, because a batch has no size limit. With a cache in memory, Spark builds
    a whole partition in memory before it spills to disk: 5 million visits ran out of a heap of 2 GB.
    """
    kept = rows.persist(StorageLevel.DISK_ONLY)
    try:
        yield kept
    finally:
        kept.unpersist()


def batch_options(writer_id: str, batch_id: int, note: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the writer options with which Delta writes a batch once, and stores ``note`` in the table's history."""
    options = {"txnAppId": writer_id, "txnVersion": str(batch_id)}
    return options if note is None else options | {"userMetadata": json_text(note)}


def append(rows: DataFrame, table: str, options: dict[str, str]) -> None:
    """Append ``rows`` to a Delta table in one commit."""
    writer = rows.write.format("delta").mode("append").options(**options)
    if is_path(table):
        writer.save(absolute(table))
    else:
        writer.saveAsTable(table)


def nullable(schema: StructType) -> StructType:
    """Return the schema with all columns nullable: a column made from a literal isn't, but a table's column is."""
    return StructType([column.__class__(column.name, column.dataType) for column in schema.fields])


def empty_source(spark: SparkSession, source: str, own: Sequence[str]) -> DataFrame:
    """Return an empty DataFrame with the columns of a source table.

    ``own`` are the names of the columns that the job adds; the source must not have them.

    Raises:
        NotReady: there is no such table.
        WrongUse: the source has a column of ``own``.
    """
    if not table_exists(spark, source):
        raise NotReady(f"there is no Delta table '{source}' to read from")
    empty = read_table(spark, source).limit(0)
    require_free_names(empty.columns, own)
    return empty


def create_table(
    spark: SparkSession,
    table: str,
    schema: StructType,
    partition_by: Sequence[str] = (),
    properties: Mapping[str, str] | None = None,
) -> None:
    """Create an empty Delta table, or check that the existing table has this schema and these partition columns.

    ``properties`` are table properties of a table that is created.

    Raises:
        WrongUse: the existing table has another schema or other partition columns.
    """
    if not table_exists(spark, table):
        create_if_absent(spark, table, schema, partition_by, properties)
        return
    existing = delta_table(spark, table)
    has = {f"{column.name} {column.dataType.simpleString()}" for column in existing.toDF().schema}
    wants = {f"{column.name} {column.dataType.simpleString()}" for column in schema}
    if has != wants:
        raise WrongUse(
            f"the table '{table}' has another schema: it has {_listed(has - wants)}, but this job writes "
            f"{_listed(wants - has)}"
        )
    partitions = existing.detail().collect()[0]["partitionColumns"]
    if partitions != list(partition_by):
        raise WrongUse(
            f"the table '{table}' is partitioned by {_listed(partitions)}, not by {_listed(partition_by)}"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
