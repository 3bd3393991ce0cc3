"""A Delta table of sessions that a stateful stream writes: its columns, its rows' versions, and the stream's run.

A session's id is the hash of its owner and its start, so that a stream, a batch job and a reprocessing give one session
one id. A late event that moves the start gives a new id; if the former id was written, its row becomes final without
events. A row is replaced by a row of a later ``release``, of more events, or by the final one: see
:mod:`python_jobs.shared.delta.keyed_tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.shared.core.failures import WrongUse, require_at_least
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.core.origins import ORIGIN, Origin
from python_jobs.shared.core.sessions import OPEN
from python_jobs.shared.delta.keyed_tables import DeltaSink
from python_jobs.shared.delta.keys import surrogate_key
from python_jobs.shared.delta.progress import listening
from python_jobs.shared.delta.state_stores import STATE_STORE, loading_state
from python_jobs.shared.delta.streams import (
    BatchFunction,
    OutputMode,
    append,
    await_end,
    batch_options,
    empty_source,
    evaluated_once,
)
from python_jobs.shared.records.dead_letters import DEAD_LETTER_COLUMNS
from python_jobs.shared.records.json_records import ERROR_CLASS, ERROR_MESSAGE
from python_jobs.shared.records.session_streams import DEAD, SessionStream, unusable
from python_jobs.shared.spark.session import settings
from python_jobs.shared.spark.sql_text import identifier, named_columns

VERSION = ("release", "version", "is_final")
SESSION_COLUMNS = (
    "session_id",
    "started_at",
    "ended_at",
    "duration_ms",
    "events",
    "values",
    *VERSION,
    ORIGIN,
    "started_date",
    "written_at",
)


@dataclass(frozen=True, kw_only=True)
class SessionTable(SessionStream):
    """Parameters of a stream that writes sessions into a Delta table."""

    target: str
    """Delta table (name or path) of the sessions; created when absent."""
    origin: Origin = "real_time"
    """Origin that the rows carry."""
    release: int = 0
    """Number of the job's release: rows of a higher release replace those of a lower one, whatever these counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(0, release=self.release)
        if len({self.source, self.target, self.dead_letter}) < 3:
            raise WrongUse("source, target and dead_letter must be three tables")

    @classmethod
    def own_columns(cls) -> Sequence[str]:
        """Return the columns that the job adds to the key in its target."""
        return SESSION_COLUMNS

    def rows(self, changed: DataFrame) -> DataFrame:
        """Return the state's changes as rows of the target, but for the time of writing."""
        start, last = F.col("__started_at"), F.col("__ended_at")
        return changed.select(
            surrogate_key(*map(identifier, self.key), "get(__identity, 0)").alias("session_id"),
            *named_columns(self.key),
            F.timestamp_micros(start).alias("started_at"),
            F.timestamp_micros(last).alias("ended_at"),
            F.floor((last - start) / 1000).alias("duration_ms"),
            F.col("__events").alias("events"),
            F.col("__values").alias("values"),
            F.lit(self.release).alias("release"),
            F.col("__version").alias("version"),
            (F.col("__status") != OPEN).alias("is_final"),
            F.lit(self.origin).alias(ORIGIN),
            F.to_date(F.timestamp_micros(F.expr("get(__identity, 0)"))).alias("started_date"),
        )


class SessionTableWriter(BatchFunction):
    """The ``foreachBatch`` function: it writes the dead letters first, then the sessions."""

    def __init__(self, params: SessionTable, sink: DeltaSink, writer_id: str) -> None:
        self._params, self._sink, self._writer_id = params, sink, writer_id
        self.sessions = self.dead = 0

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Write one batch; a repeated batch leaves the same rows."""
        params, now = self._params, self._params.processing_time()
        with evaluated_once(rows) as kept:
            counts = {row[0]: row[1] for row in kept.groupBy(F.col(ERROR_CLASS).isNull()).count().collect()}
            if counts.get(False):
                records = unusable(kept)
                dead_letters = params.dead_letters(records, records.columns[:-2], batch_id, now)
                append(dead_letters, params.dead_letter, batch_options(self._writer_id, batch_id))
            if counts.get(True):
                changed = kept.where(F.col(ERROR_CLASS).isNull()).drop(DEAD, ERROR_CLASS, ERROR_MESSAGE)
                self._sink.write(_stamped(changed, now.isoformat()), batch_id)
        self.sessions += counts.get(True, 0)
        self.dead += counts.get(False, 0)


def _stamped(rows: DataFrame, now: str) -> DataFrame:
    return rows.withColumn("written_at", F.lit(now).cast("timestamp"))


def start_sessions(
    spark: SparkSession,
    params: SessionTable,
    job: str,
    transform: Callable[[DataFrame], DataFrame],
    output_mode: OutputMode,
    meaning: dict[str, Any],
) -> tuple[StreamingQuery, SessionTableWriter]:
    """Check the tables, claim the checkpoint and start the query.

    Args:
        spark: the session.
        params: the job's parameters.
        job: the job's name in the checkpoint's contract.
        transform: from the source's records to ``params.rows``, with the unusable records as column ``DEAD``.
        output_mode: as ``transform`` needs it.
        meaning: further parameters that change the state or the results.

    Raises:
        NotReady: the source doesn't exist.
        WrongUse: an expression can't be resolved, a table has another schema, or the checkpoint belongs to another
            query.
    """
    empty = empty_source(spark, params.source, DEAD_LETTER_COLUMNS)
    judged = params.judged(empty)
    params.create_dead_letter_table(spark, unusable(judged), empty.columns)
    none = spark.createDataFrame([], params.changes_schema(judged))
    written = _stamped(params.rows(none), "1970-01-01")
    sink = DeltaSink(spark, params.target, written, ["session_id"], "started_date", VERSION)
    rules = {
        "key": params.key,
        "event_time": params.event_time,
        "ties": params.ties,
        "gap": params.gap,
        **meaning,
    }
    declared = params.stream(
        job,
        params.source,
        params.checkpoint,
        {"target": params.target},
        # A session that is written again replaces its row; a dead letter would be appended twice.
        appends_to=[params.dead_letter],
        meaning={"rules": json_text(rules, sort_keys=True)},
        transform=transform,
        output_mode=output_mode,
    )
    writer = SessionTableWriter(params, sink, declared.claim(spark))
    with settings(spark, STATE_STORE):
        query = declared.start(spark, writer)
    return query, writer


def run_sessions(
    spark: SparkSession,
    params: SessionTable,
    start: Callable[[SparkSession, Any], tuple[StreamingQuery, SessionTableWriter]],
) -> dict[str, Any]:
    """Run the query that ``start`` starts to its end and return the report.

    Raises:
        JobFailed: Spark ended the query for a reason that the user can fix.
    """
    with listening(spark) as listener:
        query, writer = start(spark, params)
        with loading_state(params.checkpoint):
            await_end(query, writer, params.source)
        totals = listener.totals(query)
    return {
        "sessions_written": writer.sessions,
        "dead": writer.dead,
        "late": totals.late_rows,
        "open_owners": totals.batches[-1].state_rows if totals.batches else 0,
        "target": params.target,
        "batches": [batch.as_dict() for batch in totals.batches],
    }
