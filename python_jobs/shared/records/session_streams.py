"""Sessions of a Delta table's records as a stream: what Keyed Idempotency and the stateful jobs of sessions share.

The rules are in :mod:`python_jobs.shared.core.sessions`; here is Spark's side: the records with their owner and times,
and the state of the open sessions. The state is a list of events for each owner, in RocksDB. A timer on event time
wakes an owner when the watermark closes the next session. New events of an owner are split by the gap as well, because
Spark hands them over before it looks at timers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.intervals import parse_duration
from python_jobs.shared.core.sessions import Emits, Event, Identity, Session, advance, closes_at, sessions_of
from python_jobs.shared.delta.keyed_tables import KeyedSink
from python_jobs.shared.delta.progress import run_counted
from python_jobs.shared.delta.state_stores import loading_state
from python_jobs.shared.delta.streams import BatchFunction, append, batch_options, evaluated_once
from python_jobs.shared.records.dead_letters import DeadLetterStream
from python_jobs.shared.records.event_timers import move_timer, watermark_micros
from python_jobs.shared.records.json_records import ERROR_CLASS, ERROR_MESSAGE
from python_jobs.shared.records.session_rows import (
    CHANGES,
    DEAD,
    EVENT_TIME,
    MICROS,
    ORDER,
    VALUE,
    SessionRecords,
)
from python_jobs.shared.spark.sql_text import identifier, named_column
from python_jobs.shared.spark.times import stamped

_STATE = "at bigint, event_order array<bigint>, value string"


@dataclass(frozen=True, kw_only=True)
class SessionStream(SessionRecords, DeadLetterStream):
    """Parameters of a stream that groups the records of a Delta table into sessions."""

    watermark: str = "10 minutes"
    """Delay of the watermark behind the latest event time."""
    target: str
    """Delta table (name or path) of the sessions; created when absent."""
    checkpoint: str
    """Folder of the stream's progress and state: one for each source and target, kept as long as these tables."""

    def __post_init__(self) -> None:
        DeadLetterStream.__post_init__(self)
        SessionRecords.__post_init__(self)
        if len({self.source, self.target, self.dead_letter}) < 3:
            raise WrongUse("source, target and dead_letter must be three tables")
        parse_duration(self.watermark)

    def changes_schema(self, rows: DataFrame, names: Sequence[str] | None = None) -> str:
        """Return the columns of the state's changes; the key's are those of ``rows``, with other ``names`` if given."""
        owner = [
            f"{identifier(name)} {rows.schema[column].dataType.simpleString()}"
            for column, name in zip(self.key, names or self.key, strict=True)
        ]
        return ", ".join([*owner, CHANGES])

    def changes(
        self, records: DataFrame, identity: Callable[[Session], Identity], emits: Emits, shown: ShownAs
    ) -> DataFrame:
        """Return the stream's changed sessions as ``shown`` makes them, and its unusable records as column ``DEAD``."""
        # PySpark looks up the columns of a state's key as if their names were SQL: `a.b` would be a field of `a`.
        owner = [f"__owner_{place}" for place, _ in enumerate(self.key)]
        state = SessionState(owner, self.gap_micros, identity, emits)
        rows = self.judged(records)
        changed = (
            rows.where(F.col(ERROR_CLASS).isNull())
            .select(
                *(named_column(name).alias(short) for name, short in zip(self.key, owner, strict=True)),
                EVENT_TIME,
                F.unix_micros(EVENT_TIME).alias(MICROS),
                ORDER,
                VALUE,
            )
            .withWatermark(EVENT_TIME, self.watermark)
            .groupBy(*owner)
            .transformWithState(state, self.changes_schema(rows, owner), "update", "eventTime")
            .withColumnsRenamed(dict(zip(owner, self.key, strict=True)))
        )
        return with_dead_records(shown(changed), rows)


ShownAs = Callable[[DataFrame], DataFrame]
"""From the state's changes (the key's columns and ``CHANGES``) to the rows of a job's target."""


def with_dead_records(sessions: DataFrame, judged: DataFrame) -> DataFrame:
    """Return the rows of a job's target, and beside them the unusable records as column ``DEAD`` with their errors."""
    dead = judged.where(F.col(ERROR_CLASS).isNotNull()).select(DEAD, ERROR_CLASS, ERROR_MESSAGE)
    return sessions.unionByName(dead, allowMissingColumns=True)


def unusable(rows: DataFrame) -> DataFrame:
    """Return the source's records that can't belong to a session, with their errors."""
    dead = rows.where(F.col(ERROR_CLASS).isNotNull())
    return dead.select(f"{DEAD}.*", ERROR_CLASS, ERROR_MESSAGE)


class SessionWriter(BatchFunction):
    """The ``foreachBatch`` function: it writes the dead letters first, then the sessions."""

    def __init__(self, params: SessionStream, sink: KeyedSink, writer_id: str, written_at: str) -> None:
        """Take the sink of the sessions, and the name of the column with the time at which they are written."""
        self._params, self._sink, self._writer_id = params, sink, writer_id
        self._written_at = written_at
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
            changed = kept.where(F.col(ERROR_CLASS).isNull()).drop(DEAD, ERROR_CLASS, ERROR_MESSAGE)
            self._sink.write(stamped(changed, self._written_at, now.isoformat()), batch_id)
        self.sessions += counts.get(True, 0)
        self.dead += counts.get(False, 0)


def run_sessions(
    spark: SparkSession,
    params: SessionStream,
    start: Callable[[SparkSession, Any], tuple[StreamingQuery, SessionWriter]],
) -> dict[str, Any]:
    """Run the query that ``start`` starts to its end and return the report.

    Raises:
        JobFailed: Spark ended the query for a reason that the user can fix.
    """
    with loading_state(params.checkpoint):
        writer, totals = run_counted(spark, lambda: start(spark, params), params.source)
    return {
        "sessions_written": writer.sessions,
        "dead": writer.dead,
        "late": totals.late_rows,
        "open_owners": totals.batches[-1].state_rows if totals.batches else 0,
        "target": params.target,
        "batches": [batch.as_dict() for batch in totals.batches],
    }


class SessionState(StatefulProcessor):
    """State of an owner; Spark calls it for new events, and when the watermark closes a session."""

    def __init__(
        self, key: Sequence[str], gap: int, identity: Callable[[Session], Identity], emits: Emits
    ) -> None:
        """Take the key's columns and the rules of :func:`python_jobs.shared.core.sessions.advance`."""
        self._gap, self._identity, self._emits = gap, identity, emits
        self._names = [*key, *(column.split()[0] for column in CHANGES.split(", "))]

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        self._handle = handle
        self._events = handle.getListState("events", _STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Yield the sessions that new events change."""
        new = [Event(row[MICROS], tuple(row[ORDER]), row[VALUE]) for row in rows]
        return self._advance(key, new, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Yield the sessions that the watermark closes."""
        return self._advance(key, [], timerValues, timer_is_gone=True)

    def close(self) -> None:
        """Do nothing: nothing was opened."""

    def _advance(
        self, key: Any, new: list[Event], timer_values: Any, timer_is_gone: bool = False
    ) -> Iterator[Row]:
        known = [Event(at, tuple(order), value) for at, order, value in self._events.get()]
        watermark = watermark_micros(timer_values)
        result = advance(known, new, self._gap, watermark, self._identity, self._emits)
        if result.still_open:
            self._events.put([(event.at, list(event.order), event.value) for event in result.still_open])
        elif known:
            self._events.clear()
        had = min((closes_at(session, self._gap) for session in sessions_of(known, self._gap)), default=None)
        move_timer(self._handle, had, result.next_close, is_gone=timer_is_gone)
        change = Row(*self._names)
        for session, identity, status, version in result.changes:
            yield change(
                *key,
                list(identity),
                session[0].at if session else None,
                session[-1].at if session else None,
                len(session),
                [event.value for event in session],
                status,
                version,
            )
