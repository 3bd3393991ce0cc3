"""Change Data Capture, lake-native: every insert, update and delete of a Delta table, to Kafka or to a Delta table.

Problem: consumers need each change of a table, with its deletions, within seconds. A comparison of extracts misses the
changes between two extracts, and a delta column never shows a deleted row. Delta's Change Data Feed records the changes
of each commit as rows. This job turns them into one event for each key and commit.

An event has ``event_id``, ``op`` (c created, u updated, d deleted), ``before`` and ``after`` (the row, or NULL if there
is no row), ``commit_version`` and ``commit_timestamp``. The two images of an update are in one event. A changed key
gives a deletion of the old key and a creation of the new key.

- ``--topic``: one JSON message for each event. The message key is the primary key as JSON, so all events of a key are
  in one partition, in the order of their commits.
- ``--target``: the same events as typed columns (``key``, ``before`` and ``after`` are structs), appended.

The job starts with the table's rows at version N, as creations of that version, and continues with the changes from
N + 1: without gap and without overlap. ``--starting_version`` leaves the snapshot out.

Guarantee: no change is lost if the job is killed at any point. The Delta table has each event once. The topic has each
event at least once: a batch that is published again has the same events with the same ``event_id``, so readers keep
the highest ``commit_version`` of a key, or each event_id once. A table without the feed is refused at the start,
because Delta would return an empty stream in some cases and a trace in others. A NULL in a key column and a key that
comes twice in one commit are refused with exit code 3.

Cost: one read of the files that a commit added, or of its change files. Two shuffles of the changed rows, which are
cached on disk while they are published. A commit is never split between batches; ``--max_files_per_trigger`` limits the
number of commits in one batch. The feed makes inserts at the source no more expensive; updates, deletes and merges
write their changed rows a second time. The feed exists as long as the source's history: the source's retentions of the
log and of deleted files must be longer than the longest interruption of this job.

    spark-submit python_jobs/ingestion/change_data_feed.py --source lakehouse/silver/silver_users --key '[user_id]' \\
        --topic lakehouse.users --bootstrap_servers localhost:9092 --checkpoint lakehouse/checkpoints/users_feed

Source: Data Engineering Design Patterns, chapter 2, Change Data Capture.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructField, StructType

from python_jobs.shared.core.failures import (
    DataRefused,
    JobFailed,
    NotReady,
    WrongUse,
    given,
    require_at_least,
)
from python_jobs.shared.delta.commits import is_committed, latest_version
from python_jobs.shared.delta.streams import (
    SOURCE_FAILURES,
    BatchFunction,
    TriggerParameters,
    append,
    await_end,
    batch_options,
    create_table,
    evaluated_once,
)
from python_jobs.shared.delta.table_streams import TableStream
from python_jobs.shared.delta.tables import delta_table, read_table, table_exists, table_id
from python_jobs.shared.kafka.settings import java_client_settings, refuse_secrets
from python_jobs.shared.kafka.topics import describe_topics, publishing_failure
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import named_column
from python_jobs.shared.spark.times import EXACT_JSON

CREATED, UPDATED, DELETED = "c", "u", "d"
_NAMES = {CREATED: "created", UPDATED: "updated", DELETED: "deleted"}
FEED_COLUMNS = ("_change_type", "_commit_version", "_commit_timestamp")
EVENT_COLUMNS = ("event_id", "op", "key", "before", "after", "commit_version", "commit_timestamp")

# All replicas acknowledge each record, a repeated send keeps the order, and a send without a broker fails after 60 s.
_PRODUCER = {"acks": "all", "enable.idempotence": "true", "max.block.ms": "60000"}
# Failures of the stream that its source table causes, by the error class in Spark's text.
_SOURCE_FAILURES = SOURCE_FAILURES | {
    "DELTA_SCHEMA_CHANGED": "has changed its schema; run again, the events then have its new columns",
    "DELTA_MISSING_CHANGE_DATA": "hasn't recorded these changes, its feed was off; start again with a new checkpoint",
    "DELTA_VERSION_NOT_FOUND": "no longer has the versions to read next; start again with a new checkpoint",
    "DELTA_LOG_FILE_NOT_FOUND": "no longer has the versions to read next; start again with a new checkpoint",
}


@dataclass(frozen=True)
class Parameters(TriggerParameters):
    """Publish every change of a Delta table, to a Kafka topic or to a Delta table."""

    source: str
    """Delta table, by path or catalog name, with delta.enableChangeDataFeed = true."""
    key: list[str]
    """Columns of the primary key: never NULL, and unique in each version of the table."""
    checkpoint: str
    """Folder of the stream's progress: one for each source and destination, kept as long as they exist."""
    topic: str | None = None
    """Kafka topic to which the events are published."""
    bootstrap_servers: str | None = None
    """Kafka brokers, host:port,host:port."""
    target: str | None = None
    """Delta table, by path or catalog name, to which the events are appended instead; created if absent."""
    starting_version: int | None = None
    """First version whose changes are published; by default the current rows, then every later change."""
    tombstones: bool = False
    """Whether a message without value follows each deletion; a compacted topic then deletes the key."""
    max_files_per_trigger: int | None = None
    """Maximum number of source files in one batch, but a commit is never split; Delta's default is 1000."""
    producer: dict[str, str] = field(default_factory=dict)
    """Further settings of Kafka's producer, such as security.protocol; secrets as ${env:NAME} only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.topic is None) == (self.target is None):
            raise WrongUse("pass either topic (with bootstrap_servers) or target")
        if (self.topic is None) != (self.bootstrap_servers is None):
            raise WrongUse("topic and bootstrap_servers belong together")
        if self.topic is None and (self.tombstones or self.producer):
            raise WrongUse("tombstones and producer belong to topic")
        if not self.key:
            raise WrongUse("key is empty; name the columns of the primary key")
        if self.target == self.source:
            raise WrongUse("source and target must be two tables")
        require_at_least(0, starting_version=self.starting_version)
        require_at_least(1, max_files_per_trigger=self.max_files_per_trigger)
        refuse_secrets(self.producer)


# --- from DataFrames to DataFrames ----------------------------------------------------------------------


def events(feed: DataFrame, key: Sequence[str], source_id: str) -> DataFrame:
    """Return one event for each key and commit of the feed's rows, which must have whole commits.

    ``source_id`` is part of each event's id. The same event always has the same id, and events of two tables have
    different ids.
    """
    row = F.struct(*(named_column(name) for name in feed.columns if name not in FEED_COLUMNS))
    is_before = F.col("_change_type").isin("update_preimage", "delete")
    images = feed.groupBy(
        F.struct(*(named_column(name) for name in key)).alias("key"),
        F.col("_commit_version").alias("commit_version"),
    ).agg(
        F.first(F.when(is_before, row), ignorenulls=True).alias("before"),
        F.first(F.when(~is_before, row), ignorenulls=True).alias("after"),
        F.count_if(is_before).alias("rows_before"),
        F.count_if(~is_before).alias("rows_after"),
        F.first("_commit_timestamp").alias("commit_timestamp"),
    )
    identity = F.concat_ws("/", F.lit(source_id), "commit_version", F.to_json("key", EXACT_JSON))
    return images.select(
        F.sha2(identity, 256).alias("event_id"), _checked_operation(key).alias("op"), *EVENT_COLUMNS[2:]
    )


def event_schema(row: StructType, key: Sequence[str]) -> StructType:
    """Return the schema of the events of a table; ``row`` is the table's schema."""
    image = StructType([StructField(column.name, column.dataType) for column in row])
    return (
        StructType()
        .add("event_id", "string")
        .add("op", "string")
        .add("key", StructType([image[name] for name in key]))
        .add("before", image)
        .add("after", image)
        .add("commit_version", "long")
        .add("commit_timestamp", "timestamp")
    )


def _checked_operation(key: Sequence[str]) -> Column:
    """Return the event's operation; the query fails at a key that is incomplete or not unique."""
    incomplete = reduce(or_, (named_column(name, of="key").isNull() for name in key))
    where = F.concat(
        F.lit(" in version "), F.col("commit_version"), F.lit(": "), F.to_json("key", EXACT_JSON)
    )
    return (
        F.when(incomplete, F.raise_error(F.concat(F.lit("the key has a NULL"), where)))
        .when(
            (F.col("rows_before") > 1) | (F.col("rows_after") > 1),
            F.raise_error(F.concat(F.lit("several rows have one key"), where)),
        )
        .when(F.col("before").isNull(), CREATED)
        .when(F.col("after").isNull(), DELETED)
        .otherwise(UPDATED)
    )


def messages(changes: DataFrame, tombstones: bool) -> DataFrame:
    """Return the events as messages with ``key`` and ``value``, in the order in which each task must send them."""
    value = F.to_json(F.struct(*(name for name in EVENT_COLUMNS if name != "key")), EXACT_JSON)
    values = F.array(value)
    if tombstones:
        nothing = F.lit(None).cast("string")
        values = F.when(F.col("op") == DELETED, F.array(value, nothing)).otherwise(values)
    in_order = changes.repartition(F.col("key")).sortWithinPartitions("commit_version")
    return in_order.select(F.to_json("key", EXACT_JSON).alias("key"), F.explode(values).alias("value"))


# --- the run --------------------------------------------------------------------------------------------


class Publisher(BatchFunction):
    """The ``foreachBatch`` function of the job: it publishes the events of each batch and counts them."""

    def __init__(self, params: Parameters, source_id: str, writer_id: str) -> None:
        self._params, self._source_id, self._writer_id = params, source_id, writer_id
        self.batches: deque[dict[str, Any]] = deque(maxlen=100)
        self.totals = dict.fromkeys(_NAMES.values(), 0)
        self.last_version: int | None = None

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Publish one batch, unless the target is a Delta table that already has the batch."""
        params = self._params
        spark, target = rows.sparkSession, params.target
        if target is not None and is_committed(spark, target, self._writer_id, batch_id):
            return
        counted = dict.fromkeys(_NAMES.values(), 0)
        try:
            with evaluated_once(events(rows, params.key, self._source_id)) as changes:
                # The count evaluates every event: a batch with an unusable key fails before it publishes an event.
                counted |= {_NAMES[op]: count for op, count in changes.groupBy("op").count().collect()}
                if sum(counted.values()):
                    self._publish(changes, batch_id)
                    self.last_version = changes.agg(F.max("commit_version")).collect()[0][0]
        except (PySparkException, Py4JJavaError) as failure:
            raise _one_sentence(failure, params) or failure from failure
        self.batches.append({"batch_id": batch_id, **counted})
        self.totals = {name: total + counted[name] for name, total in self.totals.items()}

    def _publish(self, changes: DataFrame, batch_id: int) -> None:
        params = self._params
        if params.target is not None:
            options = batch_options(self._writer_id, batch_id) | {"mergeSchema": "true"}
            append(changes, params.target, options)
            return
        settings = _kafka_settings(params)
        writer = messages(changes, params.tombstones).write.format("kafka").option("topic", str(params.topic))
        writer.options(**{f"kafka.{name}": value for name, value in settings.items()}).save()


def _kafka_settings(params: Parameters) -> dict[str, str]:
    return java_client_settings(str(params.bootstrap_servers), _PRODUCER | params.producer)


def start(spark: SparkSession, params: Parameters) -> tuple[StreamingQuery, Publisher]:
    """Check source and destination, claim the checkpoint and start the query.

    Raises:
        NotReady: the source, its starting version, the broker or the topic doesn't exist yet.
        WrongUse: the source has no change data feed or lacks a key column, the target has other columns, or the
            checkpoint belongs to another query.
    """
    detail = delta_table(spark, params.source).detail().collect()[0]
    if str(detail["properties"].get("delta.enableChangeDataFeed", "false")).lower() != "true":
        raise WrongUse(
            f"the change data feed of '{params.source}' is off: set its table property "
            "delta.enableChangeDataFeed = true, which records all changes from then on"
        )
    rows = read_table(spark, params.source)
    unknown = [name for name in params.key if name not in rows.columns]
    if unknown:
        raise WrongUse(
            f"'{params.source}' has no key column {', '.join(unknown)}; it has {', '.join(rows.columns)}"
        )
    newest = latest_version(spark, params.source)
    if params.starting_version is not None and params.starting_version > newest:
        raise NotReady(
            f"'{params.source}' is at version {newest}, there is no version {params.starting_version} yet"
        )

    writes, meaning = {}, {}
    if params.target is not None:
        _prepare_target(spark, params, rows.schema)
        writes["target"] = params.target
    else:
        describe_topics(spark, [str(params.topic)], _kafka_settings(params))
        meaning["topic"] = str(params.topic)
    options = {"readChangeFeed": "true"}
    if params.starting_version is not None:
        options["startingVersion"] = str(params.starting_version)
    declared = TableStream(
        job="change_data_feed",
        source=params.source,
        writes=writes,
        appends_to=[],  # readers recognise an event that is published again by its key and version
        meaning=meaning,
        checkpoint=params.checkpoint,
        trigger=params.trigger,
        max_files_per_trigger=params.max_files_per_trigger,
        options=options,
    )
    publisher = Publisher(params, table_id(spark, params.source), declared.claim(spark))
    query = declared.start(spark, publisher)
    return query, publisher


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the query to its end and return the report.

    Raises:
        DataRefused: a change has no usable key.
        JobFailed: the feed has gaps or no longer exists, or the destination can't be written.
    """
    query, publisher = start(spark, params)
    await_end(query, publisher, params.source, _SOURCE_FAILURES)
    return {
        "source": params.source,
        "destination": params.topic or params.target,
        **publisher.totals,
        "last_version": publisher.last_version,
        "batches": list(publisher.batches),
    }


def _prepare_target(spark: SparkSession, params: Parameters, row: StructType) -> None:
    """Create the table of events, or check its columns; the structs ``before`` and ``after`` may get new fields."""
    target = given(params.target, "target")
    if not table_exists(spark, target):
        create_table(spark, target, event_schema(row, params.key))
        return
    has = read_table(spark, target).columns
    if has != list(EVENT_COLUMNS):
        raise WrongUse(f"the table '{target}' holds no change events: its columns are {', '.join(has)}")


def _one_sentence(failure: Exception, params: Parameters) -> JobFailed | None:
    """Return a failure that the user can fix as one sentence, or None for any other failure."""
    text = str(failure)
    if refused := re.search(r"\[USER_RAISED_EXCEPTION\] (.+?)\.? SQLSTATE", text, re.DOTALL):
        return DataRefused(f"{params.source}: {refused[1]}")
    if "FILE_NOT_EXIST" in text or "FileNotFoundException" in text:
        return JobFailed(
            f"the source '{params.source}' no longer has the files of these changes (vacuum); "
            "start again with a new checkpoint"
        )
    return publishing_failure(failure, str(params.topic), str(params.bootstrap_servers))


if __name__ == "__main__":
    run_job(Parameters, run)
