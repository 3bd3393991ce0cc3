"""A Delta table of sessions that a stateful stream writes: its rows' versions, and the stream's run.

The rows are those of :mod:`python_jobs.shared.records.session_rows`. A late event that moves a session's start gives a
new id; if the former id was written, its row becomes final without events.

A row is replaced by a row of a later ``release``, by the final one, or by one of more events, in this order. No partial
row replaces a final one: neither one of a replay that counts an event that was late before, nor one of a later release,
whose final row does. See :mod:`python_jobs.shared.delta.keyed_tables`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.delta.keyed_tables import DeltaSink
from python_jobs.shared.delta.state_stores import STATE_STORE
from python_jobs.shared.delta.streams import OutputMode, empty_source
from python_jobs.shared.records.dead_letters import DEAD_LETTER_COLUMNS
from python_jobs.shared.records.json_records import ERROR_CLASS
from python_jobs.shared.records.session_rows import VERSION, WRITTEN_AT, SessionRows
from python_jobs.shared.records.session_streams import SessionStream, SessionWriter, unusable
from python_jobs.shared.spark.expressions import resolved
from python_jobs.shared.spark.session import settings
from python_jobs.shared.spark.times import stamped


@dataclass(frozen=True, kw_only=True)
class SessionTable(SessionRows, SessionStream):
    """Parameters of a stream that writes sessions into a Delta table."""

    only: str | None = None
    """SQL condition on the target's columns, such as one tenant's name: no other row and no dead letter is written."""


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
    if params.only is not None:
        transform = _only(params.only, transform, params.rows(none))
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
        appends_to=[params.dead_letter] if params.only is None else [],
        meaning={"rules": json_text(rules, sort_keys=True)},
        transform=transform,
        output_mode=output_mode,
    )
    writer = SessionWriter(params, sink, declared.claim(spark), WRITTEN_AT)
    with settings(spark, STATE_STORE):
        query = declared.start(spark, writer)
    return query, writer


def _only(
    condition: str, transform: Callable[[DataFrame], DataFrame], none: DataFrame
) -> Callable[[DataFrame], DataFrame]:
    """Return the transformation with the rows alone that meet the condition; ``none`` has their columns.

    Raises:
        WrongUse: the condition can't be resolved.
    """
    with resolved("only"):
        none.where(condition)
    return lambda records: transform(records).where(F.col(ERROR_CLASS).isNull() & F.expr(condition))
