"""Checkpointer, Structured Streaming: count unique keys per window of event time, through crashes and restarts.

Problem: a job that counts the unique visitors of each 10-minute window must not begin again after a failure. Both its
position in the topic and its counts must outlive the process.

Guarantee: Spark writes each batch's offsets into the checkpoint before the batch, and its commit file after the batch,
with the counts of the open windows. If a run dies in between, the next run repeats the batch with the same number and
the same records. The target merges a window's count as a whole value, so no record counts twice. Before each start, and
by ``--action check`` before an upgrade, the query is compared with the query for which the checkpoint was created:

* may change: rate, trigger, lateness, the records that are left out because ``key`` is NULL;
* may not change: topic, key, event time, window, target. A change of these needs a new checkpoint, which reads the
  topic from ``--starting_offsets`` on and counts again; a target that already holds windows needs ``--start_over``.

If the topic no longer has the next record, the job ends. It also ends (exit code 3) if the topic was deleted and
recreated, because the checkpoint's offsets are those of the old topic: the topic's id is part of the checkpoint and is
compared at each start and before each batch is written. A checkpoint in a temporary folder is refused.
Unique keys are counted by ``approx_count_distinct`` with a relative standard deviation of ``--max_deviation``, because
Spark refuses exact distinct counts on streams. Records without key or event time are counted in the report only.

Cost: a sketch for each open window in the state, written at each batch; a checkpoint's files and a merge per batch,
which reads only the dates of the batch's windows: the table is partitioned by ``window_date``.

    spark-submit python_jobs/error_management/checkpointer.py --bootstrap_servers localhost:9092 --topic visits \\
        --key "get_json_object(payload, '$.user_id')" \\
        --event_time "get_json_object(payload, '$.event_time')" \\
        --target lakehouse/gold/visitors_by_window --checkpoint lakehouse/checkpoints/visitors_by_window

``--action status`` reports each partition's lag, ``--action check`` compares and stops; neither reads a record. A
rewind also needs a new checkpoint (:mod:`.checkpoint_rewind`).

Source: Data Engineering Design Patterns, chapter 3, Checkpointer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.error_management.checkpoint_files import (
    Change,
    changes,
    lags,
    plan_of,
    read_checkpoint,
    refuse_changes,
    require_durable,
)
from python_jobs.shared.core.failures import NotReady, WrongUse, require_at_least
from python_jobs.shared.core.intervals import parse_duration
from python_jobs.shared.delta.checkpoints import claim, has_progress
from python_jobs.shared.delta.commits import latest_version
from python_jobs.shared.delta.progress import run_counted
from python_jobs.shared.delta.streams import (
    BatchFunction,
    TriggerParameters,
    create_table,
    evaluated_once,
    start_query,
)
from python_jobs.shared.delta.tables import delta_table, read_table, table_exists, table_id
from python_jobs.shared.delta.touched_dates import among, dates_of
from python_jobs.shared.kafka.settings import consumer_settings, java_client_settings, refuse_secrets
from python_jobs.shared.kafka.topics import SOURCE_FAILURES, StreamedTopics, offset_ranges, source_failures
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.times import with_timestamp

_OBSERVED = "records"
_COUNTS = (
    "window_start timestamp, window_end timestamp, window_date date, unique_keys bigint, batch_id bigint"
)


@dataclass(frozen=True)
class Parameters(TriggerParameters):
    """Count the unique keys of each window of event time in a Kafka topic."""

    bootstrap_servers: str
    """Kafka brokers, host:port,host:port."""
    topic: str
    """Topic to read; it must exist."""
    key: str
    """SQL expression of the key to count, over payload, partition, offset and timestamp."""
    event_time: str
    """SQL expression of the record's time: a timestamp, or a text that names date and time; use try_ functions."""
    target: str
    """Delta table (name or path) of the counts, one row per window; created if absent."""
    checkpoint: str
    """Folder of the stream's progress and state, next to the tables and kept as long as these tables."""
    action: Literal["run", "status", "check"] = "run"
    """run: count; status: report the lag; check: report whether the checkpoint can continue with these parameters."""
    window: str = "10 minutes"
    """Length of a window."""
    lateness: str = "10 minutes"
    """Time by which a record may be behind the newest event time and still count; older windows are closed."""
    max_deviation: float = 0.05
    """Relative standard deviation of the counts; 0.01 needs 25 times the state of 0.05."""
    starting_offsets: str = "earliest"
    """Start of a new checkpoint: earliest, latest, or the starting_offsets that checkpoint_rewind reports."""
    start_over: bool = False
    """Whether a new checkpoint may count again into a target that already holds windows."""
    max_records_per_trigger: int | None = None
    """Largest number of records in one batch; by default all available records."""
    fail_on_data_loss: bool = True
    """Whether records that expired before they were read end the job; false continues without them."""
    ephemeral: bool = False
    """Accept a checkpoint in a temporary folder, for a trial."""
    consumer: dict[str, str] = field(default_factory=dict)
    """Further settings of Kafka's client, such as security.protocol; secrets as ${env:NAME} only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ephemeral:
            require_durable(self.checkpoint)
        for duration in (self.window, self.lateness):
            parse_duration(duration)
        if self.starting_offsets not in ("earliest", "latest") and not self.starting_offsets.startswith("{"):
            raise WrongUse(
                f"starting_offsets must be earliest, latest or a JSON object, got '{self.starting_offsets}'"
            )
        if not 0.01 <= self.max_deviation <= 0.4:
            raise WrongUse(f"max_deviation must be between 0.01 and 0.4, got {self.max_deviation}")
        require_at_least(1, max_records_per_trigger=self.max_records_per_trigger)
        refuse_secrets(self.consumer)

    @property
    def source(self) -> str:
        """Return topic and brokers, for messages."""
        return f"{self.topic} at {self.bootstrap_servers}"


def windowed_counts(records: DataFrame, params: Parameters) -> DataFrame:
    """Return the number of unique keys of each window; ``records`` have the columns of Kafka's source."""
    timed = with_timestamp(records, "event_time", params.event_time)
    keyed = timed.select("event_time", F.expr(params.key).alias("key"))
    unusable = F.count_if(F.col("event_time").isNull() | F.col("key").isNull())
    return (
        keyed.observe(_OBSERVED, F.count(F.lit(1)).alias("read"), unusable.alias("unusable"))
        .where("event_time is not null and key is not null")
        .withWatermark("event_time", params.lateness)
        .groupBy(F.window("event_time", params.window))
        .agg(F.approx_count_distinct("key", params.max_deviation).alias("unique_keys"))
        .select(
            F.col("window.start").alias("window_start"),
            F.col("window.end").alias("window_end"),
            F.to_date("window.start").alias("window_date"),
            "unique_keys",
        )
    )


def create_counts(spark: SparkSession, target: str) -> None:
    """Create the table of the windows' counts, or check the existing one."""
    create_table(spark, target, spark.createDataFrame([], _COUNTS).schema, ["window_date"])


class WindowCountMerger(BatchFunction):
    """The ``foreachBatch`` function of the job: each changed window's count replaces the one before."""

    def __init__(
        self, spark: SparkSession, target: str, source: str, before_batch: Callable[[], None] = lambda: None
    ) -> None:
        """Write to the table ``target``; ``source`` names topic and brokers in errors."""
        self._target: DeltaTable = delta_table(spark, target)
        self._source, self._before_batch = source, before_batch
        # Only the batches that the report needs: a continuous job runs for months.
        self.batches: deque[int] = deque(maxlen=100)

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Merge one batch's counts."""
        self._before_batch()
        counts = rows.withColumn("batch_id", F.lit(batch_id).cast("bigint"))
        # Kept and read: a merge may read its source twice, and the state changes while the rows are read.
        with source_failures(self._source), evaluated_once(counts) as kept:
            if dates := dates_of(kept, "window_date"):
                self._merge(kept, dates)
        self.batches.append(batch_id)

    def _merge(self, counts: DataFrame, dates: Sequence[str]) -> None:
        condition = f"{among('window_date', dates)} and t.window_start = s.window_start"
        merge = self._target.alias("t").merge(counts.alias("s"), condition)
        merge.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()


def read_topic(spark: SparkSession, params: Parameters) -> DataFrame:
    """Return the topic as a stream: payload, topic, partition, offset, timestamp."""
    settings = consumer_settings(params.bootstrap_servers, params.consumer)
    reader = (
        spark.readStream.format("kafka")
        .options(**{f"kafka.{name}": value for name, value in settings.items()})
        .option("subscribe", params.topic)
        .option("startingOffsets", params.starting_offsets)
        .option("failOnDataLoss", params.fail_on_data_loss)
    )
    if params.max_records_per_trigger is not None:
        reader = reader.option("maxOffsetsPerTrigger", params.max_records_per_trigger)
    return reader.load().withColumn("payload", F.col("value").cast("string"))


def topics_of(spark: SparkSession, params: Parameters) -> StreamedTopics:
    """Return the query's topic, which is the topic of the checkpoint's offsets.

    Raises:
        NotReady: no broker answers, or the topic doesn't exist.
        DataRefused: the topic was deleted and recreated since the checkpoint was claimed.
    """
    way_out = "read the new topic with a new checkpoint and --start_over true"
    settings = java_client_settings(params.bootstrap_servers, params.consumer)
    topics = StreamedTopics(spark, [params.topic], settings, way_out)
    topics.require_checkpoint(params.checkpoint)
    return topics


def check(spark: SparkSession, params: Parameters, topics: StreamedTopics) -> list[Change]:
    """Compare the query with the checkpoint and return the changes without effect.

    Raises:
        WrongUse: the checkpoint can't continue with the query.
    """
    query = windowed_counts(read_topic(spark, params), params)
    found = changes(read_checkpoint(spark, params.checkpoint), plan_of(query))
    refuse_changes(params.checkpoint, found)
    if has_progress(spark, params.checkpoint):
        _claim(spark, params, topics)
    return found


def status(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Return the newest batch and each partition's lag: from the last completed batch to the topic's end.

    Raises:
        NotReady: the query hasn't begun, or no broker answers.
        DataRefused: the topic was recreated.
    """
    checkpoint = read_checkpoint(spark, params.checkpoint)
    if checkpoint.offsets is None:
        raise NotReady(f"no batch has begun under the checkpoint '{params.checkpoint}'")
    topics_of(spark, params)
    settings = java_client_settings(params.bootstrap_servers, params.consumer)
    done = checkpoint.done
    found = lags(done.topics() if done else {}, offset_ranges(spark, params.topic, settings))
    return {
        "batch_id": checkpoint.offsets.batch_id,
        "committed": done.batch_id if done else None,
        "watermark": checkpoint.offsets.watermark,
        "written_at": checkpoint.offsets.written_at,
        "lag": sum(partition.lag for partition in found),
        "partitions": [asdict(partition) for partition in found],
    }


def start(spark: SparkSession, params: Parameters) -> tuple[StreamingQuery, WindowCountMerger]:
    """Create or check the table, compare query and checkpoint, and start the query.

    Raises:
        NotReady: no broker answers, or the topic doesn't exist.
        WrongUse: the target is another table, or the checkpoint can't continue with the query.
        DataRefused: the topic was recreated.
    """
    topics = topics_of(spark, params)
    create_counts(spark, params.target)
    check(spark, params, topics)
    begins = not has_progress(spark, params.checkpoint)
    if begins and not params.start_over and not read_table(spark, params.target).isEmpty():
        raise WrongUse(
            f"the target '{params.target}' holds windows and the checkpoint '{params.checkpoint}' is new: what the "
            "topic still has would be counted again and replace them; allow that with --start_over true"
        )
    _claim(spark, params, topics)
    merger = WindowCountMerger(spark, params.target, params.source, topics.require_unchanged)
    counts = windowed_counts(read_topic(spark, params), params)
    return start_query(counts, merger, params.checkpoint, params.trigger, output_mode="update"), merger


def _claim(spark: SparkSession, params: Parameters, topics: StreamedTopics) -> None:
    claim(
        spark,
        params.checkpoint,
        {
            "job": "checkpointer",
            "target": table_id(spark, params.target),
            **topics.contract,
            "key": params.key,
            "event_time": params.event_time,
            "window": params.window,
        },
    )


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the action and return its report.

    Raises:
        JobFailed: records have expired, or the broker doesn't answer any more.
        DataRefused: the topic was deleted and recreated.
    """
    if params.action == "status":
        return status(spark, params)
    if params.action == "check":
        if not table_exists(spark, params.target):
            raise NotReady(f"there is no Delta table '{params.target}', so nothing goes on yet")
        without_effect = check(spark, params, topics_of(spark, params))
        return {"compatible": True, "without_effect": [asdict(change) for change in without_effect]}
    merger, totals = run_counted(spark, lambda: start(spark, params), params.source, SOURCE_FAILURES)
    return {
        "batches": list(merger.batches),
        "records": totals.observed(_OBSERVED, "read"),
        "unusable": totals.observed(_OBSERVED, "unusable"),
        "target": params.target,
        "table_version": latest_version(spark, params.target),
    }


if __name__ == "__main__":
    run_job(Parameters, run)
