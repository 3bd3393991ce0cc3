"""Keyed Idempotency, streaming: sessions whose key stays the same through late data, restarts and replays.

Problem: a session is written again when it grows, when a task is retried and when the job starts over. Each write must
replace the session's row. The event time of the first visit can't be the key, because a late visit may become the new
first visit.

A session's id is the hash of its key and of the *append time* of its first visit (``--append_time``, then ``--ties``):
a late visit has a later append time, so the id stays. Two visits belong to one session if less than ``--gap`` of event
time lies between them; it does not matter in which batches they come. Each batch writes the sessions that it has
changed, with a status:

* ``open``: more visits may come;
* ``closed``: the watermark is later than the last visit by the gap or more;
* ``merged``: a late visit has joined the session with an earlier one; the earlier session's row now has its visits.

Guarantee: the same visits give the same ids, in any batches and after a restart. After the loss of the checkpoint the
ids are also the same as long as the source still has the visits of the sessions. The sink replaces rows by id. Spark
drops visits behind the watermark, and the report counts them as late. Visits without key, event time or append time go
to ``--dead_letter``.

The store must set the append time. ``--topic`` names the topic that feeds the source: the job refuses a topic with
``message.timestamp.type=CreateTime``, because there producers set the timestamps. The topic's records must be keyed by
the session's key, because append times only increase within a partition.

Cost: one Python call for each key of a batch. The state has the visits of all open sessions.

Submit (available data, then stop)::

    spark-submit python_jobs/idempotency/keyed_sessions.py --source lakehouse/bronze/visits_records \\
        --key.user_id "try_cast(get_json_object(payload, '$.user_id') as bigint)" \\
        --event_time "get_json_object(payload, '$.event_time')" --append_time timestamp \\
        --ties '[partition, offset]' --value "get_json_object(payload, '$.page')" --gap "30 minutes" \\
        --target lakehouse/gold/sessions --dead_letter lakehouse/silver/visits_without_session \\
        --checkpoint lakehouse/checkpoints/sessions

Source: Data Engineering Design Patterns, chapter 4, Keyed Idempotency.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from python_jobs.idempotency.keyed_sinks import DeltaSink, KeyedSink, PostgresSink
from python_jobs.shared.core.failures import WrongUse, given
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.delta.keys import session_key
from python_jobs.shared.delta.progress import listening
from python_jobs.shared.delta.streams import (
    BatchFunction,
    append,
    await_end,
    batch_options,
    empty_source,
    evaluated_once,
    parse_duration,
)
from python_jobs.shared.kafka.clients import client_settings, partition_count, topic_setting
from python_jobs.shared.postgres.snapshots import PostgresParameters
from python_jobs.shared.records.dead_letters import (
    DEAD_LETTER_COLUMNS,
    DeadLetterStream,
    first_error,
)
from python_jobs.shared.records.json_records import ERROR_CLASS, ERROR_MESSAGE
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import identifier, named_column, named_columns, taken_names
from python_jobs.shared.spark.times import with_timestamp

NULL_KEY, NULL_TIME = "NULL_KEY", "NULL_TIME"
OPEN, CLOSED, MERGED = "open", "closed", "merged"
# The key's columns have names that the user chose.
_EVENT, _APPEND, _TIES, _VALUE, _DEAD = "__event_time", "__append_time", "__ties", "__value", "__dead"
_EVENT_MICROS, _APPEND_MICROS = "__event_micros", "__append_micros"
SESSION_COLUMNS = (
    "session_id",
    "started_at",
    "ended_at",
    "visits",
    "pages",
    "status",
    "first_append_date",
    "ingested_at",
)
# Python takes and returns times as microseconds: pandas would read timestamps in the session's time zone.
_SESSION = (
    "started_at bigint, ended_at bigint, __first_append_time bigint, __first_ties array<bigint>, visits int, "
    "pages array<string>, status string"
)


@dataclass(frozen=True, kw_only=True)
class Parameters(DeadLetterStream, PostgresParameters):
    """Group the visits of a Delta table into sessions and write each session under a stable key."""

    source: str
    """Append-only Delta table (name or path)."""
    key: dict[str, str]
    """Columns that identify the session's owner (such as user_id), each with its SQL expression over the source."""
    event_time: str
    """SQL expression of the visit's time: a timestamp, or a text that names date and time; use try_ functions."""
    append_time: str
    """SQL expression of the time at which the store appended the visit: a topic's append time, an ingestion time."""
    ties: list[str] = field(default_factory=list)
    """Integer columns that distinguish visits with the same append time, such as partition and offset."""
    value: str
    """SQL expression of the value that a session lists for each visit, such as the page."""
    gap: str = "30 minutes"
    """Minimum event time between two sessions; visits with less time between them belong to one session."""
    watermark: str = "10 minutes"
    """Delay of the watermark behind the latest event time."""
    target: str
    """Table of the sessions, created if absent: a Delta table (name or path), or with jdbc_url a PostgreSQL table."""
    checkpoint: str
    """Folder of the stream's progress and state: one for each source and target, kept as long as these tables."""
    topic: str | None = None
    """Topic from which the source is loaded; refused if its timestamps are not append times."""
    bootstrap_servers: str | None = None
    """Kafka brokers of the topic, host:port,host:port."""
    job_name: str = "keyed_sessions"
    """Name of the job in the dead letters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        PostgresParameters.__post_init__(self)
        parse_duration(self.gap)
        parse_duration(self.watermark)
        if not self.key:
            raise WrongUse("key is empty; it takes one column or more, each with its expression")
        taken = taken_names(self.key, by=SESSION_COLUMNS)
        if taken:
            raise WrongUse(f"key can't name columns that the job writes itself: {', '.join(taken)}")
        if len({self.source, self.target, self.dead_letter}) < 3:
            raise WrongUse("source, target and dead_letter must be three tables")
        if (self.topic is None) != (self.bootstrap_servers is None):
            raise WrongUse("topic and bootstrap_servers go together")


# --- sessions, without Spark ---------------------------------------------------------------------------------


class Visit(NamedTuple):
    """One visit; times are microseconds since 1970."""

    event: int
    append: tuple[int, ...]
    """Append time and ties."""
    value: str | None


Session = list[Visit]


def sessions_of(visits: Iterable[Visit], gap: int) -> list[Session]:
    """Return the visits by session, in order of event time; the order of ``visits`` has no influence."""
    sessions: list[Session] = []
    for visit in sorted(visits, key=lambda visit: (visit.event, visit.append)):
        if sessions and visit.event - sessions[-1][-1].event < gap:
            sessions[-1].append(visit)
        else:
            sessions.append([visit])
    return sessions


def first_append(session: Session) -> tuple[int, ...]:
    """Return the append time and the ties of the session's first append, which make the session's id."""
    return min(visit.append for visit in session)


class Change(NamedTuple):
    """A session to write."""

    session: Session
    first: tuple[int, ...]
    status: str


def advance(
    known: Sequence[Visit], new: Sequence[Visit], gap: int, watermark: int
) -> tuple[list[Change], list[Visit]]:
    """Add new visits of one owner to the known ones of open sessions.

    ``gap`` and ``watermark`` are in microseconds. Returns the sessions to write, and the visits of the sessions that
    are still open.
    """
    before = {first_append(session) for session in sessions_of(known, gap)}
    fresh = set(new)
    changes, still_open = [], []
    after = set()
    for session in sessions_of([*known, *new], gap):
        first, closed = first_append(session), session[-1].event + gap <= watermark
        after.add(first)
        if not closed:
            still_open += session
        if closed or not fresh.isdisjoint(session):
            changes.append(Change(session, first, CLOSED if closed else OPEN))
    changes += [Change([], first, MERGED) for first in sorted(before - after)]
    return changes, still_open


# --- the stream ----------------------------------------------------------------------------------------------


def judged(records: DataFrame, params: Parameters) -> DataFrame:
    """Return each record with its owner, times, value and error; the error is NULL if the record is complete.

    Raises:
        WrongUse: an expression can't be resolved or has another type.
    """
    ties = [named_column(name).cast("bigint") for name in params.ties]
    try:
        timed = with_timestamp(records, _EVENT, params.event_time)
        timed = with_timestamp(timed, _APPEND, params.append_time, "append_time")
        rows = timed.select(
            *(F.expr(expression).alias(name) for name, expression in params.key.items()),
            _EVENT,
            _APPEND,
            (F.array(*ties) if ties else F.expr("cast(array() as array<bigint>)")).alias(_TIES),
            F.expr(params.value).cast("string").alias(_VALUE),
            F.struct(*(named_column(name) for name in records.columns)).alias(_DEAD),
        )
    except AnalysisException as failure:
        raise WrongUse(f"an expression can't be resolved: {str(failure).splitlines()[0]}") from None
    parts = {name: name for name in params.key} | {_EVENT: "event_time", _APPEND: "append_time"}
    absent = F.concat_ws(
        ", ", *(F.when(named_column(name).isNull(), F.lit(shown)) for name, shown in parts.items())
    )
    no_key = F.lit(False)
    for name in params.key:
        no_key = no_key | named_column(name).isNull()
    message = F.concat(F.lit("the record has NULL in "), absent)
    return rows.select("*", *first_error([(no_key, NULL_KEY, message), (absent != "", NULL_TIME, message)]))


def unusable(rows: DataFrame) -> DataFrame:
    """Return the source's records that can't belong to a session, with their errors."""
    dead = rows.where(F.col(ERROR_CLASS).isNotNull())
    return dead.select(f"{_DEAD}.*", ERROR_CLASS, ERROR_MESSAGE)


def sessions(records: DataFrame, params: Parameters) -> DataFrame:
    """Return the stream's changed sessions, and its unusable records as column ``dead`` with their errors."""
    rows = judged(records, params)
    changed = (
        rows.where(F.col(ERROR_CLASS).isNull())
        .select(
            *named_columns(params.key),
            _EVENT,
            F.unix_micros(_EVENT).alias(_EVENT_MICROS),
            F.unix_micros(_APPEND).alias(_APPEND_MICROS),
            _TIES,
            _VALUE,
        )
        .withWatermark(_EVENT, params.watermark)
        .groupBy(*named_columns(params.key))
        .applyInPandasWithState(
            SessionState(list(params.key), parse_duration(params.gap) // dt.timedelta(microseconds=1)),
            _changed_schema(rows, params),
            "visits string",
            "update",
            GroupStateTimeout.EventTimeTimeout,
        )
    )
    dead = rows.where(F.col(ERROR_CLASS).isNotNull()).select(_DEAD, ERROR_CLASS, ERROR_MESSAGE)
    return _with_id(changed, params).unionByName(dead, allowMissingColumns=True)


def _changed_schema(rows: DataFrame, params: Parameters) -> str:
    owner = [f"{identifier(name)} {rows.schema[name].dataType.simpleString()}" for name in params.key]
    return ", ".join([*owner, _SESSION])


def _with_id(changed: DataFrame, params: Parameters) -> DataFrame:
    """Return the state's sessions with their ids, and with their times as timestamps."""
    in_use = F.col("status") != MERGED
    positions = [f"get(__first_ties, {number})" for number in range(len(params.ties))]
    key = [identifier(name) for name in params.key]
    return changed.select(
        session_key(key, "timestamp_micros(__first_append_time)", positions).alias("session_id"),
        *named_columns(params.key),
        F.when(in_use, F.timestamp_micros("started_at")).alias("started_at"),
        F.when(in_use, F.timestamp_micros("ended_at")).alias("ended_at"),
        "visits",
        "pages",
        "status",
        # As the id, it stays when a late visit becomes the first one.
        F.to_date(F.timestamp_micros("__first_append_time")).alias("first_append_date"),
    )


class SessionState:
    """Update function of one owner's state; Spark calls it for new visits and when the watermark closes a session."""

    def __init__(self, key: list[str], gap: int) -> None:
        self._key, self._gap = key, gap

    def __call__(
        self, owner: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState
    ) -> Iterator[pd.DataFrame]:
        """Yield the changed sessions."""
        known = [Visit(e, tuple(a), v) for e, a, v in json.loads(state.get[0])] if state.exists else []
        new: list[Visit] = []
        if not state.hasTimedOut:
            # One owner's visits may come in several frames, and the first append in any of them.
            for frame in frames:
                columns = (frame[name] for name in (_EVENT_MICROS, _APPEND_MICROS, _TIES, _VALUE))
                new += [
                    Visit(int(event), (int(append), *map(int, ties)), value)
                    for event, append, ties, value in zip(*columns, strict=True)
                ]
        watermark = state.getCurrentWatermarkMs() * 1_000
        changes, still_open = advance(known, new, self._gap, watermark)
        if still_open:
            state.update((json_text(still_open),))
            first_end = min(session[-1].event for session in sessions_of(still_open, self._gap)) + self._gap
            state.setTimeoutTimestamp(-(-first_end // 1_000))
        elif state.exists:
            state.remove()
        if changes:
            yield pd.DataFrame([self._row(owner, change) for change in changes], columns=self._columns())

    def _columns(self) -> list[str]:
        return [*self._key, *(column.split()[0] for column in _SESSION.split(", "))]

    def _row(self, owner: tuple[Any, ...], change: Change) -> tuple[Any, ...]:
        session, (append_time, *ties) = change.session, change.first
        return (
            *owner,
            session[0].event if session else 0,
            session[-1].event if session else 0,
            append_time,
            ties,
            len(session),
            [visit.value for visit in session],
            change.status,
        )


class SessionWriter(BatchFunction):
    """The ``foreachBatch`` function of the job: it writes the dead letters first, then the sessions."""

    def __init__(self, params: Parameters, sink: KeyedSink, writer_id: str) -> None:
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
            changed = kept.where(F.col(ERROR_CLASS).isNull()).drop(_DEAD, ERROR_CLASS, ERROR_MESSAGE)
            self._sink.write(stamped(changed, now.isoformat()), batch_id)
        self.sessions += counts.get(True, 0)
        self.dead += counts.get(False, 0)


def stamped(rows: DataFrame, now: str) -> DataFrame:
    """Return sessions with the time at which they are written, as column ``ingested_at``."""
    return rows.withColumn("ingested_at", F.lit(now).cast("timestamp"))


def start(spark: SparkSession, params: Parameters) -> tuple[StreamingQuery, SessionWriter]:
    """Check the tables, claim the checkpoint and start the query.

    Raises:
        NotReady: the source or the topic doesn't exist.
        WrongUse: an expression can't be resolved, a table has another schema, the topic's producers set its timestamps,
            or the checkpoint belongs to another query.
    """
    if params.topic is not None and params.bootstrap_servers is not None:
        _require_append_time(params.topic, params.bootstrap_servers)
    empty = empty_source(spark, params.source, DEAD_LETTER_COLUMNS)
    params.create_dead_letter_table(spark, unusable(judged(empty, params)), empty.columns)
    meaning = {"key": json_text([params.key, params.event_time, params.append_time, params.ties, params.gap])}
    writes, of_delta = {}, None
    if params.postgres is None:
        none = spark.createDataFrame([], _changed_schema(judged(empty, params), params))
        rows = stamped(_with_id(none, params), "1970-01-01")
        of_delta = DeltaSink(spark, params.target, rows, ["session_id"], "first_append_date")
        writes["target"] = params.target
    else:
        meaning["target"] = f"{params.postgres.place}/{params.target}"
    declared = params.stream(
        "keyed_sessions",
        params.source,
        params.checkpoint,
        writes,
        # A session that is written again replaces its row; a dead letter would be appended twice.
        appends_to=[params.dead_letter],
        meaning=meaning,
        transform=lambda records: sessions(records, params),
        output_mode="update",
    )
    writer_id = declared.claim(spark)
    sink: KeyedSink = of_delta or PostgresSink(
        given(params.postgres, "jdbc_url"), params.target, ["session_id"], writer_id
    )
    writer = SessionWriter(params, sink, writer_id)
    query = declared.start(spark, writer)
    return query, writer


def _require_append_time(topic: str, bootstrap_servers: str) -> None:
    client = client_settings(bootstrap_servers, {})
    partition_count(client, topic)  # raises one sentence if the topic or the broker is absent
    if (kind := topic_setting(client, topic, "message.timestamp.type")) != "LogAppendTime":
        raise WrongUse(
            f"topic {topic} has message.timestamp.type={kind}: producers set its timestamps, and a record that is sent "
            "again has another timestamp; set message.timestamp.type to LogAppendTime"
        )


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the query to its end and return the report.

    Raises:
        JobFailed: Spark ended the query for a reason that the user can fix, or PostgreSQL can't be reached.
    """
    with listening(spark) as listener:
        query, writer = start(spark, params)
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


if __name__ == "__main__":
    run_job(Parameters, run)
