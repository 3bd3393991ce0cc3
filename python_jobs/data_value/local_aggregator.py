"""Local Aggregator: one row for each key of a keyed Kafka topic, without a shuffle.

Problem: a job groups the records of a topic by their key. The producer's partitioner has already put all records of a
key into one partition, but Spark shuffles them once more.

The job reads each partition of ``--topic`` in one task, groups the records there, and merges the groups into
``--target``: the key, the number of records, their first and last time, and the values of ``--value`` in order of
event time. The plan has no Exchange. Only the groups, which are few, are shuffled in the MERGE.

What must hold: the producers set the record's key, and the topic has ``--partitions`` partitions for good. With another
number a key's records would be in two partitions. So the job refuses to start when the topic has another number, and
ends without writing a batch when a new partition appears or a key comes from two partitions. Then let
``local_aggregator_kafka.py`` copy the topic into one with the new number.

Guarantee: a record counts once, by its offset, whatever breaks off: a row keeps its records, and the MERGE takes the
union. A key whose records are spread over several batches has one row in the end. Records without key or event time
are dead letters.

Cost: one task for each partition; a task holds its partition's part of a batch in memory, see
``--max_records_per_trigger``. The MERGE reads the target's keys. A row grows with its records: use it for groups that
end, such as visits.

Submit (available data, then stop; with ``--trigger "10 seconds"`` without end)::

    spark-submit python_jobs/data_value/local_aggregator.py --bootstrap_servers localhost:9092 --topic visits \\
        --partitions 8 --event_time "get_json_object(payload, '$.event_time')" \\
        --value "get_json_object(payload, '$.page')" --target lakehouse/silver/visits_by_id \\
        --dead_letter lakehouse/silver/visits_by_id_dead --checkpoint lakehouse/checkpoints/visits_by_id

Source: Data Engineering Design Patterns, chapter 5, Local Aggregator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from delta.tables import DeltaTable
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.data_value.partition_groups import (
    AT,
    KEY,
    OFFSET,
    PARTITION,
    RECORDS,
    VALUE,
    groups,
    with_columns,
)
from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, WrongUse, require_at_least
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.delta.commits import latest_version
from python_jobs.shared.delta.streams import (
    BatchFunction,
    TriggerParameters,
    append,
    await_end,
    batch_options,
    create_table,
    evaluated_once,
    nullable,
)
from python_jobs.shared.delta.tables import delta_table
from python_jobs.shared.kafka.bronze_records import BRONZE_TYPES, bronze_rows
from python_jobs.shared.kafka.settings import consumer_settings, refuse_secrets
from python_jobs.shared.kafka.topic_streams import TopicStream
from python_jobs.shared.kafka.topics import SOURCE_FAILURES, StreamedTopics, source_failure
from python_jobs.shared.records.dead_letters import dead_letters
from python_jobs.shared.records.event_times import absence, first_error
from python_jobs.shared.records.json_records import ERROR_CLASS
from python_jobs.shared.spark.expressions import resolved
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.times import with_timestamp

_WAY_OUT = "aggregate the new topic into another target with a new checkpoint"
_TWO_PARTITIONS = "KEY_IN_TWO_PARTITIONS"
# The record's own columns, for dead letters; headers are no value of a key.
_RECORD = ("payload", "key", "topic", "partition", "offset", "timestamp")
_RECORDS_TYPE = "array<struct<at: bigint, offset: bigint, value: string>>"
TARGET_TYPE = (
    "key string, partition int, events bigint, started_at timestamp, ended_at timestamp, values array<string>, "
    f"records {_RECORDS_TYPE}, written_at timestamp"
)


@dataclass(frozen=True, kw_only=True)
class Parameters(TriggerParameters, ProcessingTimeParameters):
    """Aggregate the records of a keyed topic by key, each partition by itself."""

    bootstrap_servers: str
    """Kafka brokers, host:port,host:port."""
    topic: str
    """Topic whose producers set the record's key; it must exist."""
    partitions: int
    """Agreed number of the topic's partitions; with another number the job refuses to run."""
    key: str = "key"
    """SQL expression of the group's key over the record's columns; it must decide the partition."""
    event_time: str = "timestamp"
    """SQL expression of the event's time: a timestamp, or a text that names date and time."""
    value: str = "payload"
    """SQL expression of the value that a group lists for each record."""
    target: str
    """Delta table (name or path) of the groups; created when absent."""
    dead_letter: str
    """Delta table (name or path) for the records without key or time; created when absent."""
    checkpoint: str
    """Folder of the stream's progress."""
    max_records_per_trigger: int | None = None
    """Maximum number of records in one batch; by default all available records."""
    consumer: dict[str, str] = field(default_factory=dict)
    """Further settings of Kafka's client, such as security.protocol; secrets as ${env:NAME} only."""
    job_name: str = "local_aggregator"
    """Name of the job in the dead letters."""
    job_version: str = "1"
    """Version of the expressions in the dead letters; raise it with each fix."""

    def __post_init__(self) -> None:
        TriggerParameters.__post_init__(self)
        ProcessingTimeParameters.__post_init__(self)
        require_at_least(1, partitions=self.partitions, max_records_per_trigger=self.max_records_per_trigger)
        refuse_secrets(self.consumer)
        if self.target == self.dead_letter:
            raise WrongUse("target and dead_letter must be two tables")

    @property
    def source(self) -> str:
        """Return topic and brokers as a text for messages."""
        return f"{self.topic} at {self.bootstrap_servers}"


def aggregated(records: DataFrame, params: Parameters) -> DataFrame:
    """Return the groups of each partition, and beside them the records without key or time, with their errors.

    Raises:
        WrongUse: an expression can't be resolved.
    """
    # Times are microseconds on their way through Python, which would read timestamps in a time zone.
    rows = judged(records, params).withColumn("timestamp", F.unix_micros("timestamp"))
    schema = rows.withColumn(RECORDS, F.lit(None).cast(_RECORDS_TYPE)).schema
    judged_columns, columns = to_arrow_schema(rows.schema), to_arrow_schema(schema)

    def of_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = pa.Table.from_batches(batches, judged_columns)
        is_usable = pc.is_null(found[ERROR_CLASS])
        for part in (groups(found.filter(is_usable)), found.filter(pc.invert(is_usable))):
            yield from with_columns(part, columns).to_batches()

    found = rows.mapInArrow(of_partition, schema)
    return found.withColumn("timestamp", F.timestamp_micros("timestamp"))


def judged(records: DataFrame, params: Parameters) -> DataFrame:
    """Return the records with their key, time, value and error; the error is NULL for a usable record."""
    with resolved():
        rows = with_timestamp(records, "__time", params.event_time).select(
            *_RECORD,
            F.expr(params.key).cast("string").alias(KEY),
            F.col("partition").alias(PARTITION),
            F.unix_micros("__time").alias(AT),
            F.col("offset").alias(OFFSET),
            F.expr(params.value).cast("string").alias(VALUE),
        )
    return rows.select("*", *first_error(absence({KEY: "key"}, {AT: "event_time"})))


class GroupWriter(BatchFunction):
    """The ``foreachBatch`` function: it writes the dead letters first, then merges the groups."""

    def __init__(
        self, spark: SparkSession, params: Parameters, topics: StreamedTopics, writer_id: str
    ) -> None:
        self._params, self._topics, self._writer_id = params, topics, writer_id
        self._target: DeltaTable = delta_table(spark, params.target)
        self.records = self.groups = self.dead = 0

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Merge one batch; a repeated batch leaves the same rows.

        Raises:
            JobFailed: the topic has more partitions than agreed.
            DataRefused: the topic was recreated, or a key has records in two partitions.
        """
        self._topics.require_unchanged()
        params = self._params
        try:
            with evaluated_once(rows) as kept:
                is_dead = F.col(ERROR_CLASS).isNotNull()
                counts = kept.agg(
                    F.max(F.coalesce(PARTITION, "partition")).alias("partition"),
                    F.count_if(is_dead).alias("dead"),
                    F.count_if(~is_dead).alias("groups"),
                    F.coalesce(F.sum(F.when(~is_dead, F.size(RECORDS))), F.lit(0)).alias("records"),
                ).collect()[0]
                require_agreed(params, (counts["partition"] or 0) + 1)
                found = kept.where(~is_dead)
                require_one_partition_a_key(found, params)
                now = params.processing_time()
                if counts["dead"]:
                    dead = dead_letters(
                        kept, _RECORD, batch_id, params.job_name, params.job_version, now.isoformat()
                    )
                    append(dead.coalesce(1), params.dead_letter, batch_options(self._writer_id, batch_id))
                self._merge(found, now.isoformat())
        except (PySparkException, Py4JJavaError) as failure:
            if _TWO_PARTITIONS in str(failure):
                raise _key_in_two_partitions(params) from None
            raise source_failure(failure, params.source) or failure from None
        self.dead += counts["dead"]
        self.groups += counts["groups"]
        self.records += counts["records"]

    def _merge(self, found: DataFrame, now: str) -> None:
        new = found.select(F.col(KEY).alias("key"), F.col(PARTITION).alias("partition"), RECORDS)
        both = f"array_sort(array_union(t.records, s.{RECORDS}))"
        checked = f"if(t.partition = s.partition, t.partition, cast(raise_error('{_TWO_PARTITIONS}') as int))"
        same = {"key": "s.key", "written_at": f"timestamp'{now}'"}
        self._target.alias("t").merge(new.alias("s"), "t.key = s.key").whenMatchedUpdate(
            # A repeated batch has no new record, but a key in a second partition has.
            f"t.partition <> s.partition or size({both}) > t.events",
            {**same, "partition": checked, **_columns(both)},
        ).whenNotMatchedInsert(
            values={**same, "partition": "s.partition", **_columns(f"s.{RECORDS}")}
        ).execute()


def _columns(records: str) -> dict[str, str]:
    """Return the columns of a group, computed from its records (a SQL expression)."""
    return {
        "records": records,
        "events": f"cast(size({records}) as bigint)",
        "started_at": f"timestamp_micros(get({records}, 0).at)",
        "ended_at": f"timestamp_micros(element_at({records}, -1).at)",
        "values": f"transform({records}, record -> record.value)",
    }


def require_agreed(params: Parameters, partitions: int) -> None:
    """Refuse records of a partition that wasn't agreed.

    Raises:
        JobFailed: there is one.
    """
    if partitions > params.partitions:
        raise JobFailed(
            f"the topic {params.source} has records in partition {partitions - 1}, and {params.partitions} partitions "
            "are agreed: a key would have two groups; copy the topic with local_aggregator_kafka into one with the "
            "new number, and aggregate that one"
        )


def require_one_partition_a_key(found: DataFrame, params: Parameters) -> None:
    """Refuse a batch in which a key has groups of two partitions.

    Raises:
        DataRefused: there is one.
    """
    if not found.groupBy(KEY).agg(F.count_distinct(PARTITION).alias("n")).where("n > 1").isEmpty():
        raise _key_in_two_partitions(params)


def _key_in_two_partitions(params: Parameters) -> DataRefused:
    return DataRefused(
        f"the topic {params.source} has records of one key in two partitions: the producers changed the partitioner or "
        "the number of partitions; copy the topic with local_aggregator_kafka into a new one, and aggregate that one"
    )


def start(spark: SparkSession, params: Parameters) -> tuple[StreamingQuery, GroupWriter]:
    """Check the topic and the tables, claim the checkpoint and start the query.

    Raises:
        NotReady: no broker answers, or the topic doesn't exist.
        WrongUse: the topic has another number of partitions than agreed, a table has another schema, or the checkpoint
            belongs to another query.
        DataRefused: the topic was recreated.
    """
    stream = TopicStream(
        job="local_aggregator",
        topics=[params.topic],
        settings=consumer_settings(params.bootstrap_servers, params.consumer),
        way_out=_WAY_OUT,
        writes={"target": params.target, "dead_letter table": params.dead_letter},
        appends_to=[params.dead_letter],
        meaning={"rules": json_text([params.key, params.event_time, params.value, params.partitions])},
        checkpoint=params.checkpoint,
        trigger=params.trigger,
        max_records_per_trigger=params.max_records_per_trigger,
        # A whole partition is one task: a TopicStream sets no minPartitions and the like, which would split it.
        transform=lambda records: aggregated(bronze_rows(records, 0, {}), params),
    )
    topics = stream.describe(spark)
    observed = topics.described[params.topic].partitions
    if observed != params.partitions:
        raise WrongUse(
            f"the topic {params.source} has {observed} partitions, and {params.partitions} are agreed: a key may be in "
            "two of them; copy the topic with local_aggregator_kafka into one with the new number, or correct "
            "--partitions if the number never changed"
        )
    empty = spark.createDataFrame([], ", ".join(f"{name} {type_}" for name, type_ in BRONZE_TYPES.items()))
    none = judged(empty, params)
    create_table(spark, params.target, spark.createDataFrame([], TARGET_TYPE).schema)
    dead = dead_letters(none, _RECORD, 0, params.job_name, params.job_version, "1970-01-01")
    create_table(spark, params.dead_letter, nullable(dead.schema))
    writer = GroupWriter(spark, params, topics, stream.claim(spark, topics))
    return stream.start(spark, topics, writer), writer


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the query to its end and return the report.

    Raises:
        JobFailed: a partition was added, records have expired, or the broker no longer answers.
        DataRefused: a key has records in two partitions, or the topic was recreated.
    """
    query, writer = start(spark, params)
    await_end(query, writer, params.source, SOURCE_FAILURES)
    return {
        "records": writer.records,
        "groups": writer.groups,
        "dead": writer.dead,
        "target": {"table": params.target, "version": latest_version(spark, params.target)},
    }


if __name__ == "__main__":
    run_job(Parameters, run)
