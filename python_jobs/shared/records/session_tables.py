"""A Delta table of sessions that a stateful stream writes: its columns, its rows' versions, and the stream's run.

A session's id is the hash of its owner and its start, so that a stream, a batch job and a reprocessing give one session
one id. A late event that moves the start gives a new id; if the former id was written, its row becomes final without
events.

A row is replaced by a row of a later ``release``, by the final one, or by one of more events, in this order. No partial
row replaces a final one: neither one of a replay that counts an event that was late before, nor one of a later release,
whose final row does. See :mod:`python_jobs.shared.delta.keyed_tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.shared.core.failures import require_at_least
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.core.origins import ORIGIN, Origin
from python_jobs.shared.core.sessions import OPEN
from python_jobs.shared.delta.keyed_tables import DeltaSink
from python_jobs.shared.delta.keys import surrogate_key
from python_jobs.shared.delta.state_stores import STATE_STORE
from python_jobs.shared.delta.streams import OutputMode, empty_source
from python_jobs.shared.records.dead_letters import DEAD_LETTER_COLUMNS
from python_jobs.shared.records.session_streams import SessionStream, SessionWriter, stamped, unusable
from python_jobs.shared.spark.session import settings
from python_jobs.shared.spark.sql_text import identifier, named_columns

WRITTEN_AT = "written_at"
VERSION = ("release", "is_final", "version")
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
    WRITTEN_AT,
)


@dataclass(frozen=True, kw_only=True)
class SessionTable(SessionStream):
    """Parameters of a stream that writes sessions into a Delta table."""

    origin: Origin = "real_time"
    """Origin that the rows carry."""
    release: int = 0
    """Number of the job's release: rows of a higher release replace those of a lower one, whatever these counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(0, release=self.release)

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


def start_sessions(
    spark: SparkSession,
    params: SessionTable,
    job: str,
    transform: Callable[[DataFrame], DataFrame],
    output_mode: OutputMode,
    meaning: dict[str, Any],
) -> tuple[StreamingQuery, SessionWriter]:
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
    written = stamped(params.rows(none), WRITTEN_AT, "1970-01-01")
    sink = DeltaSink(spark, params.target, written, ["session_id"], "started_date", VERSION, "is_final")
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
    writer = SessionWriter(params, sink, declared.claim(spark), WRITTEN_AT)
    with settings(spark, STATE_STORE):
        query = declared.start(spark, writer)
    return query, writer
