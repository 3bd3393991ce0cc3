"""Partial State Writer: each session as it is now, while it grows, and once more when it is final.

Problem: a session lasts hours. A reader such as fraud detection needs each session at every new event, another one
needs complete sessions alone.

The job keeps the events of each owner's open sessions as state, as the Stateful Sessionizer does, and by the same rule.
It writes a growing session with ``is_final`` false, and the session that the watermark has closed with ``is_final``
true, into one row. When a growing session is written:

* by default at each micro-batch that has new events of it;
* with ``--every_events 10`` when it reaches a further multiple of ten events;
* with ``--every "10 minutes"`` when its last event is in a later interval of ten minutes of event time.

Readers choose by the macros ``final_sessions`` and ``current_sessions``: the target also has rows of sessions that a
late event has moved to another start; these rows are final and have no events.

Guarantee: the target has one row for each session. A row is replaced by one of more events or by the final one, in
whatever order they are written, and a partial row never replaces a final one. A batch that is repeated after a crash
changes no row. A session is final when the watermark has reached its last event plus ``--gap``. Events behind the
watermark are dropped and counted as ``late``; events without owner or time go to ``--dead_letter``. To correct sessions
that are final, run the events again from a new checkpoint with a higher ``--release``.

The watermark moves with new events alone: the last sessions of an idle stream stay partial until another event comes.

Cost: one Python call for each owner of a batch; the state has the events of all open sessions. Each batch is one MERGE,
however many events of a session it has: a longer ``--trigger`` makes fewer MERGEs.

Submit (available data, then stop; with ``--trigger "1 minute"`` without end)::

    spark-submit python_jobs/streaming/partial_state_writer.py --source lakehouse/bronze/visits_records \\
        --key.visit_id "get_json_object(payload, '$.visit_id')" \\
        --event_time "get_json_object(payload, '$.event_time')" --ties '[partition, offset]' \\
        --value "get_json_object(payload, '$.page')" --gap "10 minutes" --watermark "5 minutes" \\
        --target lakehouse/gold/live_sessions --dead_letter lakehouse/silver/visits_without_session \\
        --checkpoint lakehouse/checkpoints/live_sessions

Source: Data Engineering Design Patterns, chapter 11, Partial State Writer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.shared.core.failures import WrongUse, require_at_least
from python_jobs.shared.core.intervals import duration_micros, parse_duration
from python_jobs.shared.core.sessions import Emits, each_events, each_interval, each_update, first_event
from python_jobs.shared.records.session_streams import SessionWriter, run_sessions
from python_jobs.shared.records.session_tables import SessionTable, start_sessions
from python_jobs.shared.spark.job import run_job


@dataclass(frozen=True, kw_only=True)
class Parameters(SessionTable):
    """Write the sessions of a Delta table's events while they grow, and when they are closed."""

    every_events: int | None = None
    """Number of events after which a growing session is written again; default: at each batch with new events of it."""
    every: str | None = None
    """Interval of event time after which a growing session is written again, such as "10 minutes"; default: none."""
    gap: str = "10 minutes"
    """Maximum event time between two successive events of one session."""
    watermark: str = "5 minutes"
    """Delay of the watermark behind the latest event time."""
    job_name: str = "partial_state_writer"
    """Name of the job in the dead letters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, every_events=self.every_events)
        if self.every is not None:
            parse_duration(self.every)
            if self.every_events is not None:
                raise WrongUse(
                    f"every_events and every can't go together, got {self.every_events} and '{self.every}'; "
                    "give one of them, or none to write a session at each batch that changes it"
                )

    @property
    def emits(self) -> Emits:
        """When a session that is still open is written."""
        if self.every_events is not None:
            return each_events(self.every_events)
        if self.every is not None:
            return each_interval(duration_micros(parse_duration(self.every)))
        return each_update


def start(spark: SparkSession, params: Parameters) -> tuple[StreamingQuery, SessionWriter]:
    """Start the query; see :func:`python_jobs.shared.records.session_tables.start_sessions`."""
    return start_sessions(
        spark,
        params,
        "partial_state_writer",
        lambda records: params.changes(records, first_event, params.emits, params.rows),
        "update",
        # Neither parameter of emission changes the state: a query may go on with others.
        meaning={},
    )


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the query to its end and return the report.

    Raises:
        JobFailed: Spark ended the query for a reason that the user can fix.
    """
    return run_sessions(spark, params, start)


if __name__ == "__main__":
    run_job(Parameters, run)
