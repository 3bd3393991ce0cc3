"""Change Data Capture, Kafka to bronze: append every record of a topic to a Delta table, verbatim and once.

Problem: a database's log reader (Debezium) publishes each insert, update and deletion to a topic within seconds. The
lake must keep all of them, in a table that outlives the topic's retention. The current state and the history must be
computable again from this table.

Guarantee: the bronze table is append-only and has each (topic, partition, offset) once. A batch is one Delta commit
with the checkpoint's writer id and the batch's number, so a batch that is retried or killed adds no row twice. A new
checkpoint continues after the table's last offsets. Key, value and headers are the record's bytes; a tombstone is a row
whose payload is NULL. ``ingested_at`` has one value for each batch and increases from batch to batch, so that readers
can select the rows that are newer than theirs. Only one query may write to a table at a time.

If records expire before they are read, ``--fail_on_data_loss true`` (the default) ends the job with exit code 1,
because the table would silently have a gap. ``false`` continues with the oldest record that still exists.

A topic that was deleted and recreated counts its offsets from 0 again. The topics' ids are part of the checkpoint and
of the ``txnAppId`` of each commit, and are compared at each start and before each batch is written. A recreated topic
ends the job with exit code 3: its records need another bronze table, where each offset is there once.

Cost: one pass over the new records and one commit for each batch. Many small batches make many small files (Compactor).

    spark-submit python_jobs/ingestion/change_data_capture.py --bootstrap_servers localhost:9092 \\
        --topics '[blog.public.users]' --target lakehouse/bronze/bronze_users_changes \\
        --checkpoint lakehouse/checkpoints/bronze_users_changes --trigger "2 seconds"

The macros in macros/ingestion/change_data_capture compute typed changes from the bronze table. The job reads a topic of
plain events (visits) in the same way.

Source: Data Engineering Design Patterns, chapter 2, Change Data Capture.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.ingestion.replica_identity import require_replica_identities
from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import WrongUse, require_at_least
from python_jobs.shared.core.intervals import to_micros
from python_jobs.shared.delta.commits import latest_version, transaction_versions
from python_jobs.shared.delta.streams import (
    BatchFunction,
    TriggerParameters,
    await_end,
    batch_options,
    create_table,
    nullable,
)
from python_jobs.shared.delta.tables import read_table, table_exists
from python_jobs.shared.kafka.bronze_records import BRONZE_TYPES, bronze_rows
from python_jobs.shared.kafka.settings import consumer_settings, refuse_secrets
from python_jobs.shared.kafka.topic_streams import StartingOffsets, TopicStream, append_records
from python_jobs.shared.kafka.topics import SOURCE_FAILURES, StreamedTopics
from python_jobs.shared.postgres.snapshots import PostgresParameters
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import taken_names

# No statistics of payload and key: they cost time, and they can't represent bytes that are no text.
_PROPERTIES = {
    "delta.appendOnly": "true",
    "delta.dataSkippingStatsColumns": "topic,partition,offset,timestamp,ingested_at",
}
_WAY_OUT = "append the new topic's records to another target with a new checkpoint"


@dataclass(frozen=True)
class Parameters(TriggerParameters, ProcessingTimeParameters, PostgresParameters):
    """Append every record of Kafka topics to a bronze Delta table, verbatim and once.

    With jdbc_url the job checks the replica identities of the topics' tables before it starts.
    """

    bootstrap_servers: str
    """Kafka brokers, host:port,host:port."""
    topics: list[str]
    """Topics to read; they must exist."""
    target: str
    """Bronze table, by path or catalog name; created if absent."""
    checkpoint: str
    """Folder of the stream's progress: one for each target, kept as long as the target."""
    starting_offsets: StartingOffsets = "earliest"
    """Start position in a partition without a record in the target."""
    fail_on_data_loss: bool = True
    """Whether the job ends if records expired before they were read; false continues without them."""
    max_records_per_trigger: int | None = None
    """Maximum number of records in one batch; by default all available records."""
    consumer: dict[str, str] = field(default_factory=dict)
    """Further settings of Kafka's client, such as security.protocol; secrets as ${env:NAME} only."""
    derive: dict[str, str] = field(default_factory=dict)
    """Further columns, --derive.NAME "SQL EXPRESSION" over the record's columns (to_date(timestamp))."""
    partition_by: list[str] = field(default_factory=list)
    """Partition columns of the table."""

    def __post_init__(self) -> None:
        TriggerParameters.__post_init__(self)
        ProcessingTimeParameters.__post_init__(self)
        PostgresParameters.__post_init__(self)
        if not self.topics or len(set(self.topics)) < len(self.topics):
            raise WrongUse(f"topics must name each topic once, got {self.topics}")
        require_at_least(1, max_records_per_trigger=self.max_records_per_trigger)
        taken = taken_names(self.derive, by=BRONZE_TYPES)
        if taken:
            raise WrongUse(f"derive names columns that the record itself has: {', '.join(taken)}")
        refuse_secrets(self.consumer)

    @property
    def source(self) -> str:
        """Return topics and brokers as a text for messages."""
        return f"{','.join(self.topics)} at {self.bootstrap_servers}"


class Appender(BatchFunction):
    """The ``foreachBatch`` function of the job: it appends each batch in one commit.

    Args:
        topics: the topics of the stream.
        writer_id: Delta's ``txnAppId`` of this checkpoint.
        last_ingested_at: newest ``ingested_at`` of the table, in microseconds since 1970.
        after_batch: function that is called after each append; the query waits for it before it reads the next batch.
    """

    def __init__(
        self,
        params: Parameters,
        topics: StreamedTopics,
        writer_id: str,
        last_ingested_at: int,
        after_batch: Callable[[], None],
    ) -> None:
        self._params, self._topics, self._writer_id = params, topics, writer_id
        self._last_ingested_at, self._after_batch = last_ingested_at, after_batch
        # The report has the last 100 batches only, because a continuous job runs for months.
        self.batches: deque[dict[str, int]] = deque(maxlen=100)
        self.records = 0

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Append one batch, unless the table already has it.

        Raises:
            DataRefused: a topic was deleted and recreated.
        """
        self._topics.require_unchanged()
        now = self._params.processing_time()
        # ingested_at increases with every batch even if the clock doesn't.
        ingested_at = max(to_micros(now), self._last_ingested_at + 1)
        bronze = bronze_rows(rows, ingested_at, self._params.derive)
        transaction = batch_options(self._writer_id, batch_id)
        records = append_records(bronze, self._params.target, transaction, self._params.source)
        if records is None:
            return
        self._last_ingested_at = ingested_at
        self.batches.append({"batch_id": batch_id, "records": records})
        self.records += records
        self._after_batch()


def start(
    spark: SparkSession, params: Parameters, after_batch: Callable[[], None] = lambda: None
) -> tuple[StreamingQuery, Appender]:
    """Create or check the table, claim the checkpoint and start the query.

    Args:
        spark: session of the job.
        params: parameters of the job.
        after_batch: function that the query's thread calls after each append; the thread waits for it.

    Raises:
        NotReady: no broker answers, or a topic doesn't exist.
        WrongUse: the target has other columns, the checkpoint belongs to another query, or a table's replica identity
            leaves out values that can't be told from NULL.
        DataRefused: a topic was deleted and recreated since the checkpoint or the target got its records.
    """
    stream = TopicStream(
        job="change_data_capture",
        topics=params.topics,
        settings=consumer_settings(params.bootstrap_servers, params.consumer),
        way_out=_WAY_OUT,
        writes={"target": params.target},
        appends_to=[],
        checkpoint=params.checkpoint,
        starting_offsets=params.starting_offsets,
        trigger=params.trigger,
        max_records_per_trigger=params.max_records_per_trigger,
        fail_on_data_loss=params.fail_on_data_loss,
    )
    topics = stream.describe(spark)
    if params.postgres is not None:
        require_replica_identities(spark, params.postgres, params.topics)
    is_new = _prepare_target(spark, params)
    topics.require_written_by([] if is_new else list(transaction_versions(spark, params.target)))
    writer_id = stream.claim(spark, topics)
    last_ingested_at = 0 if is_new else _last_ingested_at(spark, params.target)
    appender = Appender(params, topics, writer_id, last_ingested_at, after_batch)
    query = stream.start(spark, topics, appender, lambda: {} if is_new else _next_offsets(spark, params))
    return query, appender


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the query to its end and return the report.

    Raises:
        JobFailed: records have expired, or the broker no longer answers.
        DataRefused: a topic was deleted and recreated.
    """
    query, appender = start(spark, params)
    await_end(query, appender, params.source, SOURCE_FAILURES)
    return {
        "topics": params.topics,
        "target": params.target,
        "records": appender.records,
        "batches": list(appender.batches),
        "table_version": latest_version(spark, params.target),
    }


def _prepare_target(spark: SparkSession, params: Parameters) -> bool:
    """Create the bronze table and return True; if the table exists, check its columns and return False."""
    own = ", ".join(f"{name} {type_}" for name, type_ in BRONZE_TYPES.items())
    empty = spark.createDataFrame([], own)
    derived = (F.expr(expression).alias(name) for name, expression in params.derive.items())
    rows = empty.select("*", *derived)
    if not table_exists(spark, params.target):
        create_table(spark, params.target, nullable(rows.schema), params.partition_by, _PROPERTIES)
        return True
    has, wants = dict(read_table(spark, params.target).dtypes), dict(rows.dtypes)
    if has != wants:
        raise WrongUse(
            f"the table '{params.target}' holds no such records: its columns are {', '.join(has)}; "
            f"the job writes {', '.join(wants)}"
        )
    return False


def _last_ingested_at(spark: SparkSession, target: str) -> int:
    newest = read_table(spark, target).agg(F.unix_micros(F.max("ingested_at")).alias("newest")).collect()[0]
    return int(newest["newest"] or 0)


def _next_offsets(spark: SparkSession, params: Parameters) -> dict[tuple[str, int], int]:
    """Return the next offset of each topic and partition of the table, from which a new checkpoint continues."""
    rows = (
        read_table(spark, params.target)
        .where(F.col("topic").isin(params.topics))
        .groupBy("topic", "partition")
        .agg(F.max("offset").alias("offset"))
        .collect()
    )
    return {(row["topic"], row["partition"]): int(row["offset"]) + 1 for row in rows}


if __name__ == "__main__":
    run_job(Parameters, run)
