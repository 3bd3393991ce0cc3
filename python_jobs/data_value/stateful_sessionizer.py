"""Stateful Sessionizer: sessions within seconds of their end, from a stream of events.

Problem: a batch that builds sessions each hour shows a session hours after its last event. The events are there within
seconds, but a session needs the events before: a state.

The job keeps the events of each owner's open sessions as state and writes a session when it is closed: when the
watermark has reached its last event plus ``--gap``. Events exactly ``--gap`` apart belong to one session. Two variants:

* ``timers`` (default): ``transformWithState`` with a timer on event time for each owner. The job's own code decides, so
  it can be extended to gaps by owner.
* ``session_window``: Spark's own window: the same sessions, faster, for one fixed gap.

Guarantee: a session's id is the hash of its owner and its start and has nothing of the clock: a restart or a lost
checkpoint gives the same ids, and the target has each session once. Time is event time: a slow sink closes no session
earlier. Events behind the watermark are dropped and counted as ``late``; events without owner or time go to
``--dead_letter``. Another gap, key or variant needs a new checkpoint; with the old one the job refuses to start.

The watermark moves with new events alone. The last sessions of an idle stream stay open until another event comes.

Cost: ``timers`` makes one Python call for each owner of a batch. The state has the events of all open sessions.

Submit (available data, then stop; with ``--trigger "10 seconds"`` without end)::

    spark-submit python_jobs/data_value/stateful_sessionizer.py --source lakehouse/bronze/visits_records \\
        --key.visit_id "get_json_object(payload, '$.visit_id')" \\
        --event_time "get_json_object(payload, '$.event_time')" --ties '[partition, offset]' \\
        --value "get_json_object(payload, '$.page')" --gap "10 minutes" --watermark "1 minute" \\
        --target lakehouse/gold/live_sessions --dead_letter lakehouse/silver/visits_without_session \\
        --checkpoint lakehouse/checkpoints/live_sessions

Source: Data Engineering Design Patterns, chapter 5, Stateful Sessionizer; the guide's ``pat-windowed-aggregation``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.shared.core.sessions import first_event, never
from python_jobs.shared.records.json_records import ERROR_CLASS
from python_jobs.shared.records.session_rows import EVENT_TIME
from python_jobs.shared.records.session_streams import SessionWriter, run_sessions, with_dead_records
from python_jobs.shared.records.session_tables import SessionTable, start_sessions
from python_jobs.shared.spark.job import run_job


@dataclass(frozen=True, kw_only=True)
class Parameters(SessionTable):
    """Write the sessions of a Delta table's events when they are closed."""

    variant: Literal["timers", "session_window"] = "timers"
    """``timers``: a state and timers of our own (default); ``session_window``: Spark's window."""
    gap: str = "10 minutes"
    """Maximum event time between two successive events of one session."""
    watermark: str = "1 minute"
    """Delay of the watermark behind the latest event time."""
    job_name: str = "stateful_sessionizer"
    """Name of the job in the dead letters."""


def sessions(records: DataFrame, params: Parameters) -> DataFrame:
    """Return the closed sessions of a stream, and its unusable records as column ``DEAD`` with their errors."""
    if params.variant == "timers":
        return params.changes(records, first_event, never, params.rows)
    rows = params.judged(records)
    complete = rows.where(F.col(ERROR_CLASS).isNull()).withWatermark(EVENT_TIME, params.watermark)
    return with_dead_records(params.rows(params.sessions(complete)), rows)


def start(spark: SparkSession, params: Parameters) -> tuple[StreamingQuery, SessionWriter]:
    """Start the query; see :func:`python_jobs.shared.records.session_tables.start_sessions`."""
    return start_sessions(
        spark,
        params,
        "stateful_sessionizer",
        lambda records: sessions(records, params),
        "update" if params.variant == "timers" else "append",
        {"variant": params.variant},
    )


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the query to its end and return the report.

    Raises:
        JobFailed: Spark ended the query for a reason that the user can fix.
    """
    return run_sessions(spark, params, start)


if __name__ == "__main__":
    run_job(Parameters, run)
