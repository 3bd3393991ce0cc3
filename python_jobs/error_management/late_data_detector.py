"""Late Data Detector: split a stream's records into on time and late, by a watermark that no restart changes.

Structured Streaming detects late rows only inside a stateful operator, and drops them there. This job splits
a Delta table's stream before a row is dropped:

* ``--on_time`` and ``--late``: every source column, ``event_at`` (the event time as a timestamp), ``is_late``, the
  ``watermark`` before the row's batch, ``processed_at`` and ``delay_seconds`` (``processed_at`` − ``event_at``);
* ``--dead_letter``: records without a readable event time, or with an event time in the future, which would move the
  watermark and make all other records late; the columns are those of the Dead-Letter job;
* ``--watermarks``: one row per batch: the watermark before and after the batch, the progress of each source partition,
  the counts, and the processing time.

The watermark is the partitions' high-water mark of event time (:mod:`.watermarks`) minus ``--allowed_lateness``.
A batch is split by the watermark before the batch, never by a watermark that includes its own records. A record at the
watermark is on time.

Guarantee: records read = on time + late + dead-lettered, in every batch. The row in ``--watermarks`` is written
first, then the tables, each with the batch's transaction id: a batch that is rerun, after an error or a kill at any
point, uses the watermark and the processing time of its first attempt, and adds nothing twice.

Cost: the event time and the partition are read once more than the record; late rows and dead letters, if there are any,
are selected by another pass over the batch.

Submit (available data, then stop)::

    spark-submit python_jobs/error_management/late_data_detector.py \
        --source lakehouse/bronze/visits --on_time lakehouse/silver/visits_on_time \
        --late lakehouse/silver/visits_late --dead_letter lakehouse/silver/visits_without_time \
        --watermarks lakehouse/observability/visits_watermarks --checkpoint lakehouse/checkpoints/visits_late \
        --event_time "get_json_object(payload, '$.event_time')" --allowed_lateness "30 minutes" \
        --source_column topic --partition_column partition --idle_after "10 minutes"

Source: Data Engineering Design Patterns, chapter 3, Late Data Detector.
"""

from __future__ import annotations

import datetime as dt
from collections import deque
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.error_management.watermarks import (
    Combine,
    Partition,
    Policy,
    Progress,
    State,
    advance,
    is_late,
)
from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.intervals import from_micros, moved, parse_duration, to_micros
from python_jobs.shared.delta.commits import latest_version
from python_jobs.shared.delta.streams import (
    BatchFunction,
    append,
    await_end,
    batch_options,
    create_table,
    empty_source,
    nullable,
)
from python_jobs.shared.delta.tables import read_table
from python_jobs.shared.records.dead_letters import DEAD_LETTER_COLUMNS, DeadLetterStream
from python_jobs.shared.records.event_times import ahead, first_error
from python_jobs.shared.records.json_records import ERROR_CLASS, ERROR_MESSAGE
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import named_column
from python_jobs.shared.spark.times import with_timestamp

MISSING, UNPARSABLE = "MISSING_EVENT_TIME", "UNPARSABLE_EVENT_TIME"
JUDGEMENT_COLUMNS = ("event_at", "is_late", "watermark", "processed_at", "delay_seconds")
WATERMARKS_TYPE = (
    "writer_id string, batch_id bigint, processed_at timestamp, input_watermark timestamp, watermark timestamp, "
    "partitions array<struct<source: string, partition: string, event_at: timestamp, seen_at: timestamp>>, "
    "read bigint, on_time bigint, late bigint, dead bigint"
)
# Spark has times before year 1, Python doesn't: a partition with only such records gets this event time.
_EARLIEST = to_micros(dt.datetime(1000, 1, 1, tzinfo=dt.UTC))


@dataclass(frozen=True, kw_only=True)
class Parameters(DeadLetterStream):
    """Split the records of a Delta table into on time, late and without a usable event time."""

    source: str
    """Delta table (name or path) that only grows, such as a bronze table."""
    on_time: str
    """Delta table (name or path) for the records on time; created when absent."""
    late: str
    """Delta table (name or path) for the late records; created when absent."""
    watermarks: str
    """Delta table (name or path) with the watermark of each batch; created when absent."""
    checkpoint: str
    """Folder of the stream's progress: one for each set of tables, kept as long as these tables."""
    allowed_lateness: str
    """Largest lateness of a record on time, such as "30 minutes"; measure it with recommended_watermark_delay."""
    event_time: str = "event_time"
    """SQL expression of the event time: a timestamp, a date, or a text in ISO 8601 (without offset: UTC)."""
    source_column: str | None = None
    """Column with the source of a record, such as topic; by default all records have one source."""
    partition_column: str | None = None
    """Column with the partition within the source, such as partition; by default a source has one partition."""
    within: Combine = "min"
    """Partition of a source that decides: the slowest (min) or the fastest (max)."""
    across: Combine = "min"
    """Source that decides: the slowest (min) or the fastest (max)."""
    idle_after: str | None = None
    """Processing time without records after which a partition is left out; by default it is waited for."""
    max_future: str = "1 hour"
    """Time by which an event time may be ahead of the processing time; a later one makes a dead letter."""
    job_name: str = "late_data_detector"
    """Name of the job in the dead letters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        tables = [self.source, self.on_time, self.late, self.dead_letter, self.watermarks]
        if len(set(tables)) < len(tables):
            raise WrongUse("source, on_time, late, dead_letter and watermarks must be five tables")
        for duration in (self.allowed_lateness, self.max_future, self.idle_after):
            if duration is not None:
                parse_duration(duration)

    @property
    def policy(self) -> Policy:
        """Return the rules that compute one watermark from the partitions' progress."""
        idle_after = None if self.idle_after is None else parse_duration(self.idle_after)
        return Policy(parse_duration(self.allowed_lateness), self.within, self.across, idle_after)


@dataclass(frozen=True)
class Batch:
    """The decision on one batch, made before the batch is written: its row in the watermarks table."""

    batch_id: int
    processed_at: dt.datetime
    input_watermark: dt.datetime | None
    after: State
    read: int
    late: int
    dead: int

    @property
    def on_time(self) -> int:
        """Return the number of records that are neither late nor dead."""
        return self.read - self.late - self.dead

    def as_dict(self) -> dict[str, Any]:
        """Return the batch as the report and the commits of the on-time table contain it."""
        watermark, before = self.after.watermark, self.input_watermark
        return {
            "batch_id": self.batch_id,
            "input_watermark": None if before is None else before.isoformat(),
            "watermark": None if watermark is None else watermark.isoformat(),
            "read": self.read,
            "on_time": self.on_time,
            "late": self.late,
            "dead": self.dead,
        }

    def as_row(self, spark: SparkSession, writer_id: str) -> DataFrame:
        """Return the batch as one row of :data:`WATERMARKS_TYPE`."""
        partitions = [
            (*partition, progress.event_at, progress.seen_at)
            for partition, progress in self.after.partitions.items()
        ]
        times = (self.processed_at, self.input_watermark, self.after.watermark)
        counts = (self.read, self.on_time, self.late, self.dead)
        row = (writer_id, self.batch_id, *times, partitions, *counts)
        return spark.createDataFrame([row], WATERMARKS_TYPE).coalesce(1)

    @classmethod
    def newest(cls, watermarks: DataFrame, writer_id: str, up_to: int) -> Batch | None:
        """Return the last batch that a writer decided, ``up_to`` included; None before the first."""
        micros = [
            F.unix_micros(name).alias(name) for name in ("processed_at", "input_watermark", "watermark")
        ]
        partitions = F.transform(
            "partitions",
            lambda p: F.struct(p.source, p.partition, F.unix_micros(p.event_at), F.unix_micros(p.seen_at)),
        )
        rows = (
            watermarks.where((F.col("writer_id") == writer_id) & (F.col("batch_id") <= up_to))
            .orderBy(F.desc("batch_id"))
            .limit(1)
            .select("batch_id", *micros, partitions.alias("partitions"), "read", "late", "dead")
            .collect()
        )
        return cls._of_row(rows[0]) if rows else None

    @classmethod
    def _of_row(cls, row: Row) -> Batch:
        progress = {
            (source, partition): Progress(from_micros(event_at), from_micros(seen_at))
            for source, partition, event_at, seen_at in row["partitions"]
        }
        before, after = (
            None if row[name] is None else from_micros(row[name]) for name in ("input_watermark", "watermark")
        )
        state = State(after, progress)
        processed_at = from_micros(row["processed_at"])
        return cls(row["batch_id"], processed_at, before, state, row["read"], row["late"], row["dead"])


def _literal(moment: dt.datetime | None) -> Column:
    """Return the time as a literal, NULL for None."""
    return F.lit(None).cast("timestamp") if moment is None else F.timestamp_micros(F.lit(to_micros(moment)))


def judged(
    rows: DataFrame,
    event_time: str,
    watermark: dt.datetime | None,
    processed_at: dt.datetime,
    max_future: dt.timedelta,
) -> DataFrame:
    """Return the rows with :data:`JUDGEMENT_COLUMNS`, and with the error of rows without a usable event time.

    Raises:
        WrongUse: the event time is neither a time nor a text.
    """
    value = F.expr(event_time)
    now = _literal(processed_at)
    text = value.cast("string")
    errors = [
        (value.isNull(), MISSING, F.lit("the record has no event time")),
        (
            F.col("event_at").isNull(),
            UNPARSABLE,
            F.concat(F.lit("the event time can't be read: "), F.left(text, F.lit(100))),
        ),
        ahead("event_at", _literal(moved(processed_at, max_future))),
    ]
    error_class, message = first_error(errors)
    late = F.lit(False) if watermark is None else is_late(F.col("event_at"), _literal(watermark))
    delay = (F.unix_micros(now) - F.unix_micros("event_at")) / 1_000_000
    return (
        with_timestamp(rows, "event_at", event_time)
        .withColumns({ERROR_CLASS: error_class, "is_late": late})
        .withColumns(
            {
                ERROR_MESSAGE: message,
                "watermark": _literal(watermark),
                "processed_at": now,
                "delay_seconds": delay,
            }
        )
    )


def outcome(judged_rows: DataFrame, record_columns: list[str], late: bool) -> DataFrame:
    """Return the rows of the late or of the on-time table."""
    record = [named_column(name) for name in record_columns]
    is_chosen = F.col(ERROR_CLASS).isNull() & (F.col("is_late") == late)
    return judged_rows.where(is_chosen).select(*record, *JUDGEMENT_COLUMNS)


class Splitter(BatchFunction):
    """The ``foreachBatch`` function of the job: decide, record the decision, write the three tables.

    Args:
        writer_id: Delta ``txnAppId`` of this checkpoint.
    """

    def __init__(self, spark: SparkSession, params: Parameters, writer_id: str) -> None:
        self._spark, self._params, self._writer_id = spark, params, writer_id
        self._max_future = parse_duration(params.max_future)
        self._last: Batch | None = None
        # Only the batches that a report needs: a continuous job runs for months.
        self.batches: deque[Batch] = deque(maxlen=100)
        self.read = self.late = self.dead = 0

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Split one batch of source records."""
        batch = self._decided(batch_id) or self._decide(rows, batch_id)
        options = batch_options(self._writer_id, batch_id)
        append(batch.as_row(self._spark, self._writer_id), self._params.watermarks, options)
        self._publish(rows, batch, batch_options(self._writer_id, batch_id, batch.as_dict()))
        self._last = batch
        self.batches.append(batch)
        self.read, self.late, self.dead = (
            self.read + batch.read,
            self.late + batch.late,
            self.dead + batch.dead,
        )

    def _decided(self, batch_id: int) -> Batch | None:
        """Return the decision of an earlier attempt of the batch, None without one; also load the state before it."""
        if self._last is None:
            watermarks = read_table(self._spark, self._params.watermarks)
            self._last = Batch.newest(watermarks, self._writer_id, up_to=batch_id)
        return self._last if self._last is not None and self._last.batch_id == batch_id else None

    def _decide(self, rows: DataFrame, batch_id: int) -> Batch:
        params = self._params
        now = params.processing_time()
        before = State() if self._last is None else self._last.after
        partition = [
            _key(params.source_column, "source_name"),
            _key(params.partition_column, "partition_name"),
        ]
        counts = (
            judged(rows, params.event_time, before.watermark, now, self._max_future)
            .select(*partition, "event_at", "is_late", ERROR_CLASS)
            .groupBy("source_name", "partition_name", F.col(ERROR_CLASS).isNotNull().alias("is_dead"))
            .agg(
                F.count(F.lit(1)).alias("read"),
                F.count_if("is_late").alias("late"),
                F.greatest(F.unix_micros(F.max("event_at")), F.lit(_EARLIEST)).alias("latest"),
            )
            .collect()
        )
        usable = [count for count in counts if not count["is_dead"]]
        latest: dict[Partition, dt.datetime] = {
            (count["source_name"], count["partition_name"]): from_micros(count["latest"]) for count in usable
        }
        return Batch(
            batch_id,
            now,
            before.watermark,
            advance(before, latest, params.policy, now),
            read=sum(count["read"] for count in counts),
            late=sum(count["late"] for count in usable),
            dead=sum(count["read"] for count in counts if count["is_dead"]),
        )

    def _publish(self, rows: DataFrame, batch: Batch, options: dict[str, str]) -> None:
        params = self._params
        split = judged(rows, params.event_time, batch.input_watermark, batch.processed_at, self._max_future)
        if batch.dead:
            dead = params.dead_letters(split, rows.columns, batch.batch_id, batch.processed_at)
            append(dead, params.dead_letter, options)
        if batch.late:
            append(outcome(split, rows.columns, late=True), params.late, options)
        append(outcome(split, rows.columns, late=False), params.on_time, options)


def _key(column: str | None, alias: str) -> Column:
    return (F.lit(None) if column is None else named_column(column)).cast("string").alias(alias)


def start(spark: SparkSession, params: Parameters) -> tuple[StreamingQuery, Splitter]:
    """Create or check the tables, claim the checkpoint and start the query.

    Raises:
        NotReady: the source doesn't exist.
        WrongUse: a table has another schema, or the checkpoint belongs to another query.
    """
    empty = empty_source(spark, params.source, (*DEAD_LETTER_COLUMNS, *JUDGEMENT_COLUMNS))
    named = {"source_column": params.source_column, "partition_column": params.partition_column}
    for role, column in named.items():
        if column is not None and column not in empty.columns:
            raise WrongUse(
                f"{role} names no column of the source: {column}; it has {', '.join(empty.columns)}"
            )
    epoch = from_micros(0)
    split = judged(empty, params.event_time, epoch, epoch, parse_duration(params.max_future))
    params.create_dead_letter_table(spark, split, empty.columns)
    schemas = {
        params.watermarks: spark.createDataFrame([], WATERMARKS_TYPE).schema,
        params.late: nullable(outcome(split, empty.columns, late=True).schema),
        params.on_time: nullable(outcome(split, empty.columns, late=False).schema),
    }
    for table, schema in schemas.items():
        create_table(spark, table, schema)
    tables = {
        "on_time table": params.on_time,
        "late table": params.late,
        "watermarks table": params.watermarks,
    }
    # A batch's row is written before its other tables.
    declared = params.stream(
        "late_data_detector", params.source, params.checkpoint, tables, appends_to=[params.watermarks]
    )
    splitter = Splitter(spark, params, declared.claim(spark))
    query = declared.start(spark, splitter)
    return query, splitter


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the query to its end and report the batches.

    Raises:
        JobFailed: Spark ended the query for a reason that a person can fix.
    """
    query, splitter = start(spark, params)
    await_end(query, splitter, params.source)
    tables = {"on_time": params.on_time, "late": params.late, "dead_letter": params.dead_letter}
    return {
        "read": splitter.read,
        "on_time": splitter.read - splitter.late - splitter.dead,
        "late": splitter.late,
        "dead": splitter.dead,
        "late_share": round(splitter.late / splitter.read, 6) if splitter.read else 0.0,
        "batches": [batch.as_dict() for batch in splitter.batches],
        "tables": {
            role: {"table": table, "version": latest_version(spark, table)} for role, table in tables.items()
        },
    }


if __name__ == "__main__":
    run_job(Parameters, run)
