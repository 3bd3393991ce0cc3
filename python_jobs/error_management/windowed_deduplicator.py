"""Windowed Deduplicator: a stream keeps the first record of each key, and forgets keys after a window has passed.

Problem: producers retry, so records come twice. A stream never ends, so the job must remember its keys, and a state
that only grows ends in a full disk.

The job reads a Delta table as a stream and appends to ``--target`` each record whose key is new; the columns are the
source's. ``--form`` sets which repeats are found (W is ``--watermark``):

* ``within_watermark``: the same key with any event time, for at least W after its first event time;
* ``key_and_time``: the same key with exactly the same event time;
* ``key_and_window``: the same key in the same tumbling ``--window``; repeats on both sides of an edge are kept.

Event time is part of each form: without it Spark never evicts a key.

Records that the state must not hold go to ``--dead_letter``, with the columns of :mod:`.dead_letter`:
``NULL_EVENT_TIME`` (never late and never evicted), ``FUTURE_EVENT_TIME`` (more than ``--max_future`` ahead of the
clock: it would make all other records late) and ``NULL_KEY`` (such records are not repeats of each other).

Guarantee: read = unique + duplicates + late + dead, by Spark's counters. The state (RocksDB) is committed with the
batch, so the job still drops repeats after a restart or a kill. Each batch is one Delta commit per table, first the
dead letters, with the batch's transaction id: a batch that is rerun adds nothing twice. Not guaranteed: which of two
records with one key and different payloads in one batch is kept (the macro of this pattern orders them); a repeat that
comes after the window is kept. A record behind the watermark, new or not, is dropped and counted as late. With a new
checkpoint all records are read again.

Cost: the source is read once for the state and once for dead letters (with a typed event-time column Delta skips files
in the second read); a shuffle by key; each batch is kept until both tables have it.

Submit (available data, then stop)::

    spark-submit python_jobs/error_management/windowed_deduplicator.py \\
        --source lakehouse/bronze/bronze_visits --target lakehouse/silver/silver_visits_unique \\
        --dead_letter lakehouse/silver/silver_visits_undated --checkpoint lakehouse/checkpoints/visits_unique \\
        --key '[visit_id]' --event_time event_time --watermark "10 minutes"

Source: Data Engineering Design Patterns, chapter 3, Windowed Deduplicator.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.intervals import parse_duration
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.delta.commits import latest_version
from python_jobs.shared.delta.progress import ProgressTotals, run_counted
from python_jobs.shared.delta.state_stores import STATE_STORE, loading_state
from python_jobs.shared.delta.streams import (
    BatchFunction,
    append,
    batch_options,
    create_table,
    empty_source,
    evaluated_once,
    nullable,
)
from python_jobs.shared.records.dead_letters import DEAD_LETTER_COLUMNS, DeadLetterStream
from python_jobs.shared.records.event_times import ahead, first_error, latest_time
from python_jobs.shared.records.json_records import ERROR_CLASS, ERROR_MESSAGE
from python_jobs.shared.spark.expressions import resolved
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.session import settings
from python_jobs.shared.spark.sql_text import named_column
from python_jobs.shared.spark.times import with_timestamp

NULL_EVENT_TIME = "NULL_EVENT_TIME"
NULL_KEY = "NULL_KEY"

_TIME, _WINDOW, _KEY = "__event_time", "__window", "__key_"
Form = Literal["within_watermark", "key_and_time", "key_and_window"]


@dataclass(frozen=True, kw_only=True)
class Parameters(DeadLetterStream):
    """Append the first record of each key to a Delta table; remember each key until the watermark passes it."""

    source: str
    """Delta table (name or path) that only grows."""
    target: str
    """Delta table (name or path) for the unique records; created when absent."""
    checkpoint: str
    """Folder of the stream's progress and state: one for each source and target, kept as long as these tables."""
    key: list[str]
    """SQL expressions over the source's columns that identify a record."""
    event_time: str
    """SQL expression of the event's time: a timestamp, or a text that names date and time."""
    form: Form = "within_watermark"
    """Form of the repeats that are dropped (default within_watermark)."""
    watermark: str = "10 minutes"
    """Time by which a record may be behind the latest event time, and for which a key is remembered."""
    window: str | None = None
    """Length of the tumbling windows of the form key_and_window."""
    nullable_key: list[str] = field(default_factory=list)
    """Expressions of the key in which NULL is an ordinary value."""
    max_future: str = "1 hour"
    """Time by which an event time may be ahead of the clock."""
    partition_by: list[str] = field(default_factory=list)
    """Partition columns of the target."""
    job_name: str = "windowed_deduplicator"
    """Name of the job in the dead letters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({self.source, self.target, self.dead_letter}) < 3:
            raise WrongUse("source, target and dead_letter must be three tables")
        if not self.key:
            raise WrongUse("key is empty; name at least one expression that makes a record unique")
        unknown = [part for part in self.nullable_key if part not in self.key]
        if unknown:
            raise WrongUse(f"nullable_key names no part of the key: {', '.join(unknown)}")
        if (self.form == "key_and_window") != (self.window is not None):
            raise WrongUse(f"form is {self.form}; a window belongs to key_and_window, and to no other form")
        for duration in (self.watermark, self.window, self.max_future):
            if duration is not None:
                parse_duration(duration)

    @property
    def parts(self) -> list[str]:
        """Return the names of the columns with the values of the key."""
        return [f"{_KEY}{position}" for position in range(len(self.key))]


def judged(records: DataFrame, params: Parameters) -> DataFrame:
    """Return each record with its key and event time, and with its error if one of them isn't usable.

    Raises:
        WrongUse: an expression can't be resolved, or the event time is neither a time nor a text.
    """
    parts = params.parts
    with resolved("key or event_time"):
        rows = with_timestamp(records, _TIME, params.event_time).select(
            "*",
            *(F.expr(expression).alias(part) for expression, part in zip(params.key, parts, strict=True)),
        )
    errors = [
        (F.col(_TIME).isNull(), NULL_EVENT_TIME, F.lit(f"the event time is NULL: {params.event_time}")),
        ahead(_TIME, latest_time(params.max_future, params.now)),
    ]
    for part, expression in zip(parts, params.key, strict=True):
        if expression not in params.nullable_key:
            errors.append((F.col(part).isNull(), NULL_KEY, F.lit(f"a part of the key is NULL: {expression}")))
    return rows.select("*", *first_error(errors))


def deduplicated(records: DataFrame, params: Parameters) -> DataFrame:
    """Return the stream's unique records, and its unusable ones with their error.

    Columns: the records' columns, ``error_class`` and ``error_message`` (NULL for a unique record). Input records are
    counted as the metric ``records`` of the observations ``usable`` and ``dead``.
    """
    counted = F.count(F.lit(1)).alias("records")
    columns = [named_column(name) for name in (*records.columns, ERROR_CLASS, ERROR_MESSAGE)]
    rows = judged(records, params)
    dead = rows.where(F.col(ERROR_CLASS).isNotNull()).observe("dead", counted)
    usable = rows.where(F.col(ERROR_CLASS).isNull()).observe("usable", counted)

    usable = usable.withWatermark(_TIME, params.watermark)
    key = [f"{_KEY}{position}" for position in range(len(params.key))]
    if params.form == "within_watermark":
        unique = usable.dropDuplicatesWithinWatermark(key)
    elif params.form == "key_and_time":
        unique = usable.dropDuplicates([*key, _TIME])
    else:
        # Spark refuses row_number over a stream. A time window column has the watermark, and the watermark evicts it.
        windows = usable.withColumn(_WINDOW, F.window(_TIME, str(params.window)))
        unique = windows.dropDuplicates([*key, _WINDOW])
    return unique.select(*columns).unionByName(dead.select(*columns))


class UniqueWriter(BatchFunction):
    """The ``foreachBatch`` function of the job: dead letters first, then the unique records."""

    def __init__(self, params: Parameters, writer_id: str) -> None:
        self.params = params
        self.writer_id = writer_id
        self.unique = self.dead = 0
        self.error_classes: Counter[str] = Counter()

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Write the records that the state returned as unique, and the dead letters."""
        # Counted even if there is nothing to write, and kept: the state changes while the rows are read, and Delta
        # skips the write of a batch that the table already holds.
        with evaluated_once(rows) as kept:
            counts = {row[ERROR_CLASS]: row["count"] for row in kept.groupBy(ERROR_CLASS).count().collect()}
            self._publish(kept, batch_id, unique=counts.pop(None, 0), errors=counts)

    def _publish(self, kept: DataFrame, batch_id: int, unique: int, errors: dict[str, int]) -> None:
        params, dead = self.params, sum(errors.values())
        account = {"batch_id": batch_id, "unique": unique, "dead": dead, "error_classes": errors}
        options = batch_options(self.writer_id, batch_id, account)
        record = [name for name in kept.columns if name not in (ERROR_CLASS, ERROR_MESSAGE)]
        if dead:
            rows = params.dead_letters(kept, record, batch_id, params.processing_time())
            append(rows, params.dead_letter, options)
        if unique:
            rows = kept.where(F.col(ERROR_CLASS).isNull()).select(*(named_column(name) for name in record))
            append(rows, params.target, options)
        self.unique += unique
        self.dead += dead
        self.error_classes.update(errors)


def start(spark: SparkSession, params: Parameters) -> tuple[StreamingQuery, UniqueWriter]:
    """Create or check the tables, claim the checkpoint and start the query.

    Raises:
        NotReady: the source doesn't exist.
        WrongUse: an expression is wrong, a table has another schema, or the checkpoint belongs to another query.
    """
    empty = empty_source(spark, params.source, [*DEAD_LETTER_COLUMNS, _TIME, _WINDOW, *params.parts])
    missing = [name for name in params.partition_by if name not in empty.columns]
    if missing:
        raise WrongUse(f"partition_by names no column of the source: {', '.join(missing)}")
    params.create_dead_letter_table(spark, judged(empty, params), empty.columns)
    create_table(spark, params.target, nullable(empty.schema), params.partition_by)

    # Spark compares the types of the state's columns not their meaning.
    meaning = {"key": json_text(params.key), "event_time": params.event_time}
    meaning |= {"form": " ".join(filter(None, (params.form, params.window)))}
    declared = params.stream(
        "windowed_deduplicator",
        params.source,
        params.checkpoint,
        {"target": params.target},
        meaning=meaning,
        transform=lambda records: deduplicated(records, params),
    )
    writer = UniqueWriter(params, declared.claim(spark))
    with settings(spark, STATE_STORE):
        query = declared.start(spark, writer)
    return query, writer


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the query to its end and report the number of records by outcome, and the state.

    Raises:
        JobFailed: Spark ended the query for a reason that a person can fix.
    """
    with loading_state(params.checkpoint):
        writer, totals = run_counted(spark, lambda: start(spark, params), params.source)
    return _report(spark, params, writer, totals)


def _report(
    spark: SparkSession, params: Parameters, writer: UniqueWriter, totals: ProgressTotals
) -> dict[str, Any]:
    last = totals.batches[-1] if totals.batches else None  # None when nothing new came
    return {
        "read": totals.observed("usable", "records") + totals.observed("dead", "records"),
        "unique": writer.unique,
        "duplicates": totals.duplicate_rows,
        "late": totals.late_rows,
        "dead": writer.dead,
        "error_classes": dict(sorted(writer.error_classes.items())),
        "state": None
        if last is None
        else {
            "rows": last.state_rows,
            "peak_rows": totals.peak_state_rows,
            "bytes": last.state_bytes,
            "watermark": last.watermark,
        },
        "batches": [batch.as_dict() for batch in totals.batches],
        "target": {"table": params.target, "version": latest_version(spark, params.target)},
        "dead_letter": {"table": params.dead_letter, "version": latest_version(spark, params.dead_letter)},
    }


if __name__ == "__main__":
    run_job(Parameters, run)
