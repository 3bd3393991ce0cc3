"""Late Data Detector: flag a stream's records as on time or late, by a watermark that no restart changes.

Structured Streaming detects late rows only inside a stateful operator, and drops them there. This job splits
a Delta table's stream before a row is dropped:

* ``--target``: every source column, ``event_at`` (the event time as a timestamp), ``is_late``, the ``watermark`` before
  the row's batch and ``processed_at``. It is partitioned by ``is_late``: a query of late rows opens no other files;
* ``--on_time`` and ``--late``: views of the target in the catalog, with ``delay_seconds`` (``processed_at`` −
  ``event_at``). Without a catalog, :func:`outcome` returns the same rows;
* ``--dead_letter``: records without a readable event time, or with an event time in the future, which would move the
  watermark and make all other records late; the columns are those of the Dead-Letter job;
* ``--watermarks``: one row per batch: the watermark before and after the batch, the progress of each source partition,
  the counts, and the processing time.

The watermark is the partitions' high-water mark of event time (:mod:`.watermarks`) minus ``--allowed_lateness``.
A batch is split by the watermark before the batch, never by a watermark that includes its own records. A record at the
watermark is on time.

Guarantee: records read = on time + late + dead-lettered, in every batch. A batch commits to the target, then to the
dead letters if it has any, and last to ``--watermarks``, each time with the batch's transaction id. The target's commit
names the batch, its watermark and its processing time. So a batch that is rerun, after an error or a kill at any point,
is split by the same watermark and the same clock as in its first commit, and adds nothing twice.

Cost: one pass over the batch, which also counts its rows. The event time and the partition are read once more if a new
source partition shows up, or if there are more than 16 of them. Dead letters, if there are any, are selected by another
pass.

Submit (available data, then stop)::

    spark-submit python_jobs/error_management/late_data_detector.py \
        --source lakehouse/bronze/visits --target lakehouse/silver/visits_by_lateness \
        --dead_letter lakehouse/silver/visits_without_time \
        --watermarks lakehouse/observability/visits_watermarks --checkpoint lakehouse/checkpoints/visits_late \
        --event_time "get_json_object(payload, '$.event_time')" --allowed_lateness "30 minutes" \
        --source_column topic --partition_column partition --idle_after "10 minutes"

Source: Data Engineering Design Patterns, chapter 3, Late Data Detector.
"""

from __future__ import annotations

import datetime as dt
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame, Observation, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import IntegralType

from python_jobs.error_management.watermarks import (
    Combine,
    Partition,
    Policy,
    Progress,
    State,
    advance,
    is_late,
)
from python_jobs.shared.core.failures import JobFailed, WrongUse
from python_jobs.shared.core.intervals import from_micros, moved, parse_duration, parse_time, to_micros
from python_jobs.shared.core.paths import is_path
from python_jobs.shared.delta.commits import commit_note, commits, is_committed, latest_version
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
from python_jobs.shared.spark.observations import observed_metrics
from python_jobs.shared.spark.owned_relations import replace_view, require_own
from python_jobs.shared.spark.session import settings
from python_jobs.shared.spark.sql_text import named_column, named_columns, table_name
from python_jobs.shared.spark.times import with_timestamp

MISSING, UNPARSABLE = "MISSING_EVENT_TIME", "UNPARSABLE_EVENT_TIME"
JUDGEMENT_COLUMNS = ("event_at", "is_late", "watermark", "processed_at")
DELAY_SECONDS = "(unix_micros(processed_at) - unix_micros(event_at)) / 1000000"
"""SQL expression of the delay of a row of the target, in seconds."""
WATERMARKS_TYPE = (
    "writer_id string, batch_id bigint, processed_at timestamp, input_watermark timestamp, watermark timestamp, "
    "partitions array<struct<source: string, partition: string, event_at: timestamp, seen_at: timestamp>>, "
    "read bigint, on_time bigint, late bigint, dead bigint"
)
# Position of a usable record's source partition among those that are observed; NULL for a dead letter.
_POSITION, _OTHER = "__position", -1
# Each observed partition costs every row a comparison; more of them cost more than another pass over two columns.
_MOST_OBSERVED = 16
# A task writes its late and its other rows at the same time. Without this setting Spark would sort all rows first.
_BOTH_AT_ONCE = {"spark.sql.maxConcurrentOutputFileWriters": "2"}
_VIEW_OF = "lakehouse_patterns.late_data_detector.target"
# Spark has times before year 1, Python doesn't: a partition with only such records gets this event time.
_EARLIEST = to_micros(dt.datetime(1000, 1, 1, tzinfo=dt.UTC))


@dataclass(frozen=True, kw_only=True)
class Parameters(DeadLetterStream):
    """Split the records of a Delta table into on time, late and without a usable event time."""

    source: str
    """Delta table (name or path) that only grows, such as a bronze table."""
    target: str
    """Delta table (name or path) for the records on time and the late ones, flagged by is_late; created when absent."""
    on_time: str | None = None
    """Name of a view of the target's records on time, with their delay; default: no view."""
    late: str | None = None
    """Name of a view of the target's late records, with their delay; default: no view."""
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
        tables = [self.source, self.target, self.dead_letter, self.watermarks]
        if len(set(tables)) < len(tables):
            raise WrongUse("source, target, dead_letter and watermarks must be four tables")
        for role, view in self.views.items():
            if is_path(view):
                raise WrongUse(f"{role} must be the name of a view in the catalog, got the path '{view}'")
        if self.on_time is not None and self.on_time == self.late:
            raise WrongUse(f"on_time and late must be two views, got '{self.late}' for both")
        for duration in (self.allowed_lateness, self.max_future, self.idle_after):
            if duration is not None:
                parse_duration(duration)

    @property
    def views(self) -> dict[str, str]:
        """Return the names of the wanted views by role, on_time and late."""
        views = {"on_time": self.on_time, "late": self.late}
        return {role: view for role, view in views.items() if view is not None}

    @property
    def partition_key(self) -> list[Column]:
        """Return the columns of a record's source and partition as texts; NULL if the data has no such name."""
        names = {"source_name": self.source_column, "partition_name": self.partition_column}
        return [
            (F.lit(None) if column is None else named_column(column)).cast("string").alias(name)
            for name, column in names.items()
        ]

    @property
    def policy(self) -> Policy:
        """Return the rules that compute one watermark from the partitions' progress."""
        idle_after = None if self.idle_after is None else parse_duration(self.idle_after)
        return Policy(parse_duration(self.allowed_lateness), self.within, self.across, idle_after)


@dataclass(frozen=True)
class Decision:
    """What splits a batch's records: each attempt with the same rows and the same decision gives the same split."""

    input_watermark: dt.datetime | None
    """Watermark before the batch; None before the first record."""
    processed_at: dt.datetime
    """Processing time, which tells what is in the future."""

    def as_note(self) -> dict[str, str | None]:
        """Return the decision as a commit's note holds it."""
        before = self.input_watermark
        return {
            "processed_at": self.processed_at.isoformat(),
            "input_watermark": None if before is None else before.isoformat(),
        }

    @classmethod
    def of_note(cls, note: Mapping[str, Any]) -> Decision:
        """Return the decision that a commit's note holds."""
        before = note["input_watermark"]
        return cls(None if before is None else parse_time(before), parse_time(note["processed_at"]))


@dataclass(frozen=True)
class Counts:
    """The numbers of a batch's records, and what moves the watermark."""

    read: int
    late: int
    dead: int
    latest: Mapping[Partition, dt.datetime]
    """Latest event time of each source partition with usable records."""


@dataclass(frozen=True)
class Batch:
    """A batch that is written: its row in the watermarks table."""

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
        """Return the batch as the report contains it."""
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
        """Return the last batch that a writer recorded, ``up_to`` included; None before the first."""
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
    return (
        with_timestamp(rows, "event_at", event_time)
        .withColumns({ERROR_CLASS: error_class, "is_late": late})
        .withColumns({ERROR_MESSAGE: message, "watermark": _literal(watermark), "processed_at": now})
    )


def counted(judged_rows: DataFrame, partition_key: Sequence[Column]) -> Counts:
    """Return the counts of judged rows from a pass of its own."""
    counts = (
        judged_rows.select(*partition_key, "event_at", "is_late", ERROR_CLASS)
        .groupBy("source_name", "partition_name", F.col(ERROR_CLASS).isNotNull().alias("is_dead"))
        .agg(
            F.count(F.lit(1)).alias("read"),
            F.count_if("is_late").alias("late"),
            F.unix_micros(F.max("event_at")).alias("latest"),
        )
        .collect()
    )
    usable = [count for count in counts if not count["is_dead"]]
    return Counts(
        read=sum(count["read"] for count in counts),
        late=sum(count["late"] for count in usable),
        dead=sum(count["read"] for count in counts if count["is_dead"]),
        latest={
            (count["source_name"], count["partition_name"]): _latest(count["latest"]) for count in usable
        },
    )


def _latest(micros: int) -> dt.datetime:
    return from_micros(max(micros, _EARLIEST))


class Tally:
    """Counts judged rows while they are written.

    Spark's observed metrics can't be grouped: each source partition has a metric of its own, so it must be known.

    Args:
        columns: columns of a record's source and partition, None if it has none.
        known: source partitions whose latest event time is observed.
    """

    def __init__(self, columns: Sequence[str | None], known: Sequence[Partition]) -> None:
        self._columns, self._known = columns, list(known)
        self._observation = Observation()

    def usable(self, judged_rows: DataFrame, record_columns: Sequence[str]) -> DataFrame:
        """Return the rows of the target: those that are no dead letters."""
        position = F.when(F.col(ERROR_CLASS).isNotNull(), F.lit(None).cast("int"))
        for number, partition in enumerate(self._known):
            position = position.when(self._is_of(partition, judged_rows), number)
        rows = judged_rows.select(
            *named_columns(record_columns), *JUDGEMENT_COLUMNS, position.otherwise(_OTHER).alias(_POSITION)
        )
        at, is_usable = F.col(_POSITION), F.col(_POSITION).isNotNull()
        latest = (
            F.unix_micros(F.max(F.when(at == number, F.col("event_at")))).alias(f"latest_{number}")
            for number in range(len(self._known))
        )
        observed = rows.observe(
            self._observation,
            F.count(F.lit(1)).alias("read"),
            F.count_if(is_usable & F.col("is_late")).alias("late"),
            F.count_if(~is_usable).alias("dead"),
            F.count_if(at == _OTHER).alias("other"),
            *latest,
        )
        return observed.where(is_usable).drop(_POSITION)

    def _is_of(self, partition: Partition, rows: DataFrame) -> Column:
        """Return whether a row is of a source partition, whose names are texts."""
        condition = F.lit(True)
        for column, name in zip(self._columns, partition, strict=True):
            if column is None:
                continue
            if name is not None and isinstance(rows.schema[column].dataType, IntegralType):
                # Its text would be made for every row.
                condition = condition & named_column(column).eqNullSafe(F.lit(int(name)))
            else:
                condition = condition & named_column(column).cast("string").eqNullSafe(F.lit(name))
        return condition

    def counts(self) -> Counts | None:
        """Return the counts of the written rows; None if some are of other partitions, or if nothing was written."""
        metrics = observed_metrics(self._observation)
        if not metrics or metrics["other"]:
            return None
        latest = {partition: metrics[f"latest_{number}"] for number, partition in enumerate(self._known)}
        return Counts(
            read=metrics["read"],
            late=metrics["late"],
            dead=metrics["dead"],
            latest={partition: _latest(micros) for partition, micros in latest.items() if micros is not None},
        )


def outcome(target: DataFrame, late: bool) -> DataFrame:
    """Return the late rows or the rows on time of the target, with ``delay_seconds``, as the views have them."""
    return target.where(F.col("is_late") == late).withColumn("delay_seconds", F.expr(DELAY_SECONDS))


class Splitter(BatchFunction):
    """The ``foreachBatch`` function of the job: write the target, the dead letters, then the watermark.

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
        # An earlier process may have begun the first batch of this one.
        committed = None if self.batches else self._resume(batch_id)
        if self._last is None or self._last.batch_id < batch_id:
            self._last = self._split(rows, batch_id, committed)
        batch = self._last
        self.batches.append(batch)
        self.read, self.late, self.dead = (
            self.read + batch.read,
            self.late + batch.late,
            self.dead + batch.dead,
        )

    def _resume(self, batch_id: int) -> Decision | None:
        """Load the last recorded batch; return the decision of a batch that is in the target and not yet recorded.

        Raises:
            JobFailed: the target's log no longer has the commit of such a batch.
        """
        target = self._params.target
        watermarks = read_table(self._spark, self._params.watermarks)
        self._last = Batch.newest(watermarks, self._writer_id, up_to=batch_id)
        is_recorded = self._last is not None and self._last.batch_id == batch_id
        if is_recorded or not is_committed(self._spark, target, self._writer_id, batch_id):
            return None
        for commit in commits(self._spark, target):
            note = commit_note(commit.userMetadata)
            if (note.get("writer_id"), note.get("batch_id")) == (self._writer_id, batch_id):
                return Decision.of_note(note)
        raise JobFailed(
            f"batch {batch_id} is in the table '{target}', but the table's log no longer has its commit, so the "
            "watermark after it is unknown; start with a new checkpoint and new tables"
        )

    def _split(self, rows: DataFrame, batch_id: int, committed: Decision | None) -> Batch:
        """Write a batch, or what is missing of a committed one, and return it."""
        params = self._params
        before = State() if self._last is None else self._last.after
        decision = committed or Decision(before.watermark, params.processing_time())
        now = decision.processed_at
        split = judged(rows, params.event_time, decision.input_watermark, now, self._max_future)
        counts = None
        if committed is None:
            counts = self._append(split, rows.columns, batch_id, decision, list(before.partitions))
        if counts is None:
            counts = counted(split, params.partition_key)
        options = batch_options(self._writer_id, batch_id)
        if counts.dead:
            append(params.dead_letters(split, rows.columns, batch_id, now), params.dead_letter, options)
        after = advance(before, counts.latest, params.policy, now)
        batch = Batch(batch_id, now, decision.input_watermark, after, counts.read, counts.late, counts.dead)
        append(batch.as_row(self._spark, self._writer_id), params.watermarks, options)
        return batch

    def _append(
        self,
        split: DataFrame,
        record_columns: Sequence[str],
        batch_id: int,
        decision: Decision,
        partitions: list[Partition],
    ) -> Counts | None:
        """Append a batch to the target; return its counts, None if they need a pass of their own."""
        params = self._params
        columns = (params.source_column, params.partition_column)
        known = partitions if any(columns) else [(None, None)]
        is_observed = 0 < len(known) <= _MOST_OBSERVED
        tally = Tally(columns, known if is_observed else [])
        note = {"writer_id": self._writer_id, "batch_id": batch_id, **decision.as_note()}
        # In another session than the stream's the setting would have no effect.
        with settings(split.sparkSession, _BOTH_AT_ONCE):
            append(
                tally.usable(split, record_columns),
                params.target,
                batch_options(self._writer_id, batch_id, note),
            )
        return tally.counts() if is_observed else None


def start(spark: SparkSession, params: Parameters) -> tuple[StreamingQuery, Splitter]:
    """Create or check the tables, claim the checkpoint and start the query.

    Raises:
        NotReady: the source doesn't exist.
        WrongUse: a table has another schema, or the checkpoint belongs to another query.
    """
    own = (*DEAD_LETTER_COLUMNS, *JUDGEMENT_COLUMNS, "delay_seconds", _POSITION)
    empty = empty_source(spark, params.source, own)
    named = {"source_column": params.source_column, "partition_column": params.partition_column}
    for role, column in named.items():
        if column is not None and column not in empty.columns:
            raise WrongUse(
                f"{role} names no column of the source: {column}; it has {', '.join(empty.columns)}"
            )
    epoch = from_micros(0)
    split = judged(empty, params.event_time, epoch, epoch, parse_duration(params.max_future))
    params.create_dead_letter_table(spark, split, empty.columns)
    create_table(spark, params.watermarks, spark.createDataFrame([], WATERMARKS_TYPE).schema)
    flagged = split.select(*named_columns(empty.columns), *JUDGEMENT_COLUMNS)
    create_table(spark, params.target, nullable(flagged.schema), ["is_late"])
    _create_views(spark, params)
    tables = {"target": params.target, "watermarks table": params.watermarks}
    # A batch is committed to the target before its other tables, also if it has no row for it.
    declared = params.stream(
        "late_data_detector", params.source, params.checkpoint, tables, appends_to=[params.target]
    )
    splitter = Splitter(spark, params, declared.claim(spark))
    query = declared.start(spark, splitter)
    return query, splitter


def _create_views(spark: SparkSession, params: Parameters) -> None:
    """Create the wanted views, or replace those of this target."""
    target = table_name(params.target)
    for view in params.views.values():
        require_own(spark, view, _VIEW_OF, target)
    for role, view in params.views.items():
        rows = f"select *, {DELAY_SECONDS} as delay_seconds from {target}"
        condition = "is_late" if role == "late" else "not is_late"
        replace_view(spark, view, _VIEW_OF, target, f"{rows} where {condition}")


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the query to its end and report the batches.

    Raises:
        JobFailed: Spark ended the query for a reason that a person can fix.
    """
    query, splitter = start(spark, params)
    await_end(query, splitter, params.source)
    tables = {"target": params.target, "dead_letter": params.dead_letter}
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
        "views": params.views,
    }


if __name__ == "__main__":
    run_job(Parameters, run)
