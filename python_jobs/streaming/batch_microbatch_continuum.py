"""Batch-Microbatch Continuum: one definition of a gold table, run at the cadence that latency and cost justify.

Problem: a live dashboard needs the numbers of the last minutes, and finance needs those of each day. Two code bases
give two results. A stream that never stops costs more than twice a daily batch.

The job has one definition: a condition, a key, and either the columns of a row for each record or the counts and sums
of a window of event time. ``--cadence`` is configuration:

* ``batch`` recomputes the dates from ``--from`` up to ``--to`` and replaces them: the daily end, backfill and repair;
* ``available_now`` processes what has arrived since the last run, and stops;
* ``micro_batch`` does the same every ``--trigger``, without end;
* ``continuous`` passes each record of a topic on to another topic as it arrives, without windows.

``--latency "5 minutes"`` runs nothing: it reports the cheapest cadence that keeps this latency, with its costs.

Guarantee: the first three leave the same rows in ``--target``, in any order, repeated, interrupted and mixed. A stream
merges by key, and a window's row is only replaced by one with more events. A batch replaces its dates in one commit;
if a stream has committed while the batch was reading, the batch reads again. ``micro_batch`` and ``available_now``
share a checkpoint: after a switch the query goes on where the other one stopped.

Not guaranteed: that a stream counts an event whose window has ended more than ``--delay`` before the newest event. It
is reported as ``late``; a batch over its date counts it. ``continuous`` may send a record twice after a crash.

Records without a time or without a part of the key are in no row. The report counts them.

Cost: a stream keeps one row of state for each open window and key. A merge reads the target's files of the dates in the
batch. A batch reads the source's files of its dates: if ``--event_time`` is a column, Delta skips the others.

    spark-submit python_jobs/streaming/batch_microbatch_continuum.py --config visits_by_page.yml \\
        --cadence micro_batch --trigger "30 seconds"
    spark-submit python_jobs/streaming/batch_microbatch_continuum.py --config visits_by_page.yml \\
        --cadence batch --from 2024-03-01 --to 2024-03-02

Source: the guide's pattern Batch-Microbatch Continuum.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.shared.core.dates import parse_date
from python_jobs.shared.core.failures import DataRefused, WrongUse, given, require_at_least
from python_jobs.shared.core.intervals import parse_duration
from python_jobs.shared.delta.commits import latest_version, until_committed
from python_jobs.shared.delta.keyed_tables import DeltaSink
from python_jobs.shared.delta.overwrite import overwrite
from python_jobs.shared.delta.progress import run_counted
from python_jobs.shared.delta.streams import (
    BatchFunction,
    await_signal,
    empty_source,
    evaluated_once,
)
from python_jobs.shared.delta.table_streams import TableStream
from python_jobs.shared.delta.tables import delta_table, read_table, table_id
from python_jobs.shared.kafka.bronze_records import record_columns
from python_jobs.shared.kafka.settings import consumer_settings, refuse_secrets
from python_jobs.shared.kafka.topic_streams import TopicStream
from python_jobs.shared.kafka.topics import producer_settings, publishing_failure, source_failure
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.session import settings
from python_jobs.streaming.cadences import Cadence, choose, require_cadence
from python_jobs.streaming.gold_rows import EVENT_DATE, Definition, as_message, on_date

JOB = "batch_microbatch_continuum"
DEFINITION = "lakehouse_patterns.definition"
"""Table property with the source's id and the definition of the rows."""
_INPUT = "input"
_TRIES = 10
# Spark would leave out the stage that counts the records when no row is left, and its counts with it.
_KEEP_COUNTS = {
    "spark.sql.adaptive.optimizer.excludedRules": (
        "org.apache.spark.sql.execution.adaptive.AQEPropagateEmptyRelation"
    )
}


@dataclass(frozen=True, kw_only=True)
class Parameters(Definition):
    """Keep a gold table by one definition, as a batch or as a stream."""

    cadence: Cadence | None = None
    """How to run: batch, available_now, micro_batch or continuous."""
    latency: str | None = None
    """Instead of a cadence: report the cheapest one that publishes a result within this time, and run nothing."""
    source: str | None = None
    """Delta table (name or path) of the records, which only grows; not for continuous."""
    target: str | None = None
    """Delta table (name or path) of the rows; created when absent; not for continuous."""
    from_: str | None = None
    """batch: first date to replace (2024-03-01)."""
    to: str | None = None
    """batch: the date after the last one; with the same date as --from there is nothing to do."""
    checkpoint: str | None = None
    """Folder of a stream's progress and state: one for each target, kept as long as the target."""
    trigger: str | None = None
    """micro_batch: time between two batches, such as "30 seconds"; continuous: between two checkpoints (1 second)."""
    delay: str = "10 minutes"
    """Time by which a stream's watermark stays behind the newest event."""
    max_files_per_trigger: int | None = None
    """Maximum number of source files in one micro-batch; Delta's default is 1000."""
    max_left_out: int | None = None
    """Largest number of records in no row (without key or time, or late); more end the run with code 3; default: any.
    """
    topic: str | None = None
    """continuous: topic to read; expressions see payload, key, topic, partition, offset, timestamp and headers."""
    target_topic: str | None = None
    """continuous: topic to write, which must exist; key and value are JSON."""
    bootstrap_servers: str | None = None
    """continuous: Kafka brokers, host:port,host:port."""
    consumer: dict[str, str] = field(default_factory=dict)
    """continuous: further settings of the consumer, such as security.protocol; secrets as ${env:NAME} only."""
    producer: dict[str, str] = field(default_factory=dict)
    """continuous: further settings of the producer; secrets as ${env:NAME} only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for duration in (self.delay, self.trigger, self.latency):
            if duration is not None:
                parse_duration(duration)
        require_at_least(1, max_files_per_trigger=self.max_files_per_trigger)
        require_at_least(0, max_left_out=self.max_left_out)
        refuse_secrets({**self.consumer, **self.producer})
        if (self.cadence is None) == (self.latency is None):
            raise WrongUse("pass either cadence, to run, or latency, to see which cadence keeps it")
        if self.latency is not None:
            return
        require_cadence(self.cadence)
        absent = [name.rstrip("_") for name in _NEEDED[str(self.cadence)] if getattr(self, name) is None]
        if absent:
            raise WrongUse(f"the cadence {self.cadence} needs {' and '.join(absent)}")
        if self.cadence != "batch" and (self.from_ or self.to):
            raise WrongUse(
                f"from and to belong to the cadence batch: {self.cadence} reads what its checkpoint has not"
            )
        if self.cadence == "continuous" and self.window is not None:
            raise WrongUse(
                "continuous can't aggregate by window, because Spark's continuous mode only maps and filters rows; use "
                "micro_batch with a short trigger"
            )
        if self.cadence == "batch" and self.dates[0] > self.dates[1]:
            raise WrongUse(f"from must not be after to, got {self.from_} and {self.to}")
        if self.source is not None and self.source == self.target:
            raise WrongUse("source and target must be two tables")

    @property
    def dates(self) -> tuple[dt.date, dt.date]:
        """Return the first date of a batch and the date after the last one."""
        try:
            return parse_date(given(self.from_, "from")), parse_date(given(self.to, "to"))
        except ValueError as failure:
            raise WrongUse(f"from and to: {failure}") from None


# All other parameters may stay in the configuration: between two cadences nothing else changes.
_NEEDED: dict[str, list[str]] = {
    "batch": ["source", "target", "from_", "to"],
    "available_now": ["source", "target", "checkpoint"],
    "micro_batch": ["source", "target", "checkpoint", "trigger"],
    "continuous": ["topic", "target_topic", "bootstrap_servers", "checkpoint"],
}


class GoldTable:
    """The Delta table of a definition's rows, created if absent.

    Raises:
        NotReady: the source doesn't exist.
        WrongUse: the definition can't be used, or the table was made by another one.
    """

    def __init__(self, spark: SparkSession, params: Parameters) -> None:
        self.spark, self.params = spark, params
        self.source, self.target = given(params.source, "source"), given(params.target, "target")
        empty = params.require_usable(empty_source(spark, self.source, ()))
        made_of = f"{table_id(spark, self.source)} {params.text}"
        self.sink = DeltaSink(
            spark,
            self.target,
            empty,
            params.identity,
            EVENT_DATE,
            params.version,
            properties={DEFINITION: made_of},
        )
        properties = delta_table(spark, self.target).detail().select("properties").collect()[0][0]
        if properties.get(DEFINITION) != made_of:
            raise WrongUse(
                f"the table '{self.target}' was made of another source or by another definition, and would have rows "
                "of both; write into another table"
            )

    def merge(self, rows: DataFrame, run: int) -> None:
        """Merge the rows of a micro-batch, again if another writer commits first."""

        def merged() -> bool:
            self.sink.write(rows, run)
            return True

        until_committed(
            merged, _TRIES, f"{self.target} was changed by {_TRIES} other runs in a row; run again"
        )

    def replace(self, dates: tuple[dt.date, dt.date]) -> dict[str, Any]:
        """Replace the rows of the dates; return the numbers of records, and of rows in the dates.

        The rows of a stream that commits between our read of the source and our write would be lost, so then all is
        done again.
        """
        params = self.params

        def replaced() -> dict[str, Any] | None:
            before = latest_version(self.spark, self.target)
            counts, written = Observation(), Observation()
            records = params.usable(read_table(self.spark, self.source), dates, counts)
            rows = params.newest(params.rows(records)).observe(written, F.count(F.lit(1)).alias("rows"))
            with settings(self.spark, _KEEP_COUNTS):
                commit = overwrite(self.spark, rows, self.target, on_date(dates))
            if commit is not None and commit["readVersion"] != before:
                return None
            return {**counts.get, **written.get}

        others = f"{self.target} was changed by {_TRIES} other runs in a row; run again"
        return until_committed(replaced, _TRIES, others)


class MicroBatch(BatchFunction):
    """The ``foreachBatch`` function of both streams over a table."""

    def __init__(self, table: GoldTable) -> None:
        self._table = table

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Merge one batch of new rows and of windows that have changed."""
        # Kept and read: a merge may read its source twice, and the state changes while the rows are read.
        with evaluated_once(self._table.params.newest(rows)) as kept:
            self._table.merge(kept, batch_id)


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the job at its cadence to its end, and return the report.

    Raises:
        NotReady: the source or a topic doesn't exist.
        WrongUse: the definition can't be used, or the target or the checkpoint belongs to another one.
        JobFailed: other runs committed first each time, or a topic can't be read or written any more.
        DataRefused: more records than ``max_left_out`` are in no row; the rows are written.
    """
    if params.latency is not None:
        return choose(parse_duration(params.latency), windows=params.window is not None).as_dict()
    if params.cadence == "continuous":
        return run_continuous(spark, params)
    report = run_batch(spark, params) if params.cadence == "batch" else run_stream(spark, params)
    left_out = report["without_key"] + report["without_time"] + report.get("late", 0)
    if params.max_left_out is not None and left_out > params.max_left_out:
        raise DataRefused(
            f"alert: {left_out} records are in no row (without key or time, or late), {params.max_left_out} allowed; "
            "the rows are written without them"
        )
    version = latest_version(spark, given(params.target, "target"))
    return {"cadence": params.cadence, **report, "target": {"table": params.target, "version": version}}


def run_batch(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Replace the rows of the dates."""
    table, dates = GoldTable(spark, params), params.dates
    if dates[0] == dates[1]:
        return {"read": 0, "without_key": 0, "without_time": 0, "rows": 0}
    return table.replace(dates)


def run_stream(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Merge what has arrived since the last run, and with ``micro_batch`` go on."""
    table = GoldTable(spark, params)
    stream = TableStream(
        job=JOB,
        source=table.source,
        writes={"target": table.target},
        appends_to=[],
        meaning={"definition": params.text},
        checkpoint=given(params.checkpoint, "checkpoint"),
        trigger=params.trigger if params.cadence == "micro_batch" else None,
        max_files_per_trigger=params.max_files_per_trigger,
        transform=lambda records: params.rows(params.usable(records, observation=_INPUT), params.delay),
        output_mode="append" if params.window is None else "update",
    )
    stream.claim(spark)
    function = MicroBatch(table)
    _, totals = run_counted(spark, lambda: (stream.start(spark, function), function), table.source)
    counts = {name: totals.observed(_INPUT, name) for name in ("read", "without_key", "without_time")}
    batches = [batch.as_dict() for batch in totals.batches]
    return {**counts, "late": totals.late_rows, "batches": batches}


def run_continuous(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Pass records on until a signal ends the query."""
    query = start_continuous(spark, params)
    try:
        await_signal(query)
    except StreamingQueryException as failure:
        topic, target = given(params.topic, "topic"), given(params.target_topic, "target_topic")
        known = source_failure(failure, topic) or publishing_failure(
            failure, target, given(params.bootstrap_servers, "bootstrap_servers")
        )
        raise known or failure from None
    return {"cadence": params.cadence, "topic": params.topic, "target_topic": params.target_topic}


def start_continuous(spark: SparkSession, params: Parameters) -> StreamingQuery:
    """Start a query that passes the records of a topic on, each as it arrives.

    Raises:
        NotReady: a topic doesn't exist.
        WrongUse: the definition can't be used, or the checkpoint belongs to another query.
        DataRefused: a topic was deleted and recreated since the checkpoint was claimed.
    """
    topic, target = given(params.topic, "topic"), given(params.target_topic, "target_topic")
    servers, checkpoint = (
        given(params.bootstrap_servers, "bootstrap_servers"),
        given(params.checkpoint, "checkpoint"),
    )
    stream = TopicStream(
        job=JOB,
        topics=[topic],
        target_topics=[target],
        settings=consumer_settings(servers, params.consumer),
        way_out="start again with another checkpoint",
        appends_to=[],
        meaning={"definition": params.text, "target": target},
        checkpoint=checkpoint,
    )
    topics = stream.describe(spark)
    records = record_columns(stream.read(spark, topics))
    params.require_usable(records)
    stream.claim(spark, topics)
    rows = params.rows(params.usable(records))
    producer = producer_settings(servers, params.producer)
    return (
        as_message(rows, list(params.key))
        .writeStream.format("kafka")
        .options(**{f"kafka.{name}": value for name, value in producer.items()})
        .option("topic", target)
        .option("checkpointLocation", checkpoint)
        .trigger(continuous=params.trigger or "1 second")
        .start()
    )


if __name__ == "__main__":
    run_job(Parameters, run)
