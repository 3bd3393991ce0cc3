"""Keyed Idempotency, streaming: sessions whose key stays the same through late data, restarts and replays.

Problem: a session is written again when it grows, when a task is retried and when the job starts over. Each write must
replace the session's row. The event time of the first visit can't be the key, because a late visit may become the new
first visit.

A session's id is the hash of its key and of the *append time* of its first visit (``--append_time``, then ``--ties``):
a late visit has a later append time, so the id stays. Two visits belong to one session if no more than ``--gap`` of
event time lies between them; it does not matter in which batches they come. Each batch writes the sessions that it has
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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.idempotency.keyed_sinks import PostgresSink
from python_jobs.shared.core.failures import WrongUse, given
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.core.sessions import each_update, first_append
from python_jobs.shared.delta.keyed_tables import DeltaSink, KeyedSink
from python_jobs.shared.delta.keys import session_key
from python_jobs.shared.delta.state_stores import STATE_STORE
from python_jobs.shared.delta.streams import empty_source
from python_jobs.shared.kafka.clients import client_settings, partition_count, topic_setting
from python_jobs.shared.postgres.snapshots import PostgresParameters
from python_jobs.shared.records.dead_letters import DEAD_LETTER_COLUMNS
from python_jobs.shared.records.session_streams import (
    SessionStream,
    SessionWriter,
    run_sessions,
    unusable,
)
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.session import settings
from python_jobs.shared.spark.sql_text import identifier, named_columns
from python_jobs.shared.spark.times import stamped

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
WRITTEN_AT = "ingested_at"


@dataclass(frozen=True, kw_only=True)
class Parameters(SessionStream, PostgresParameters):
    """Group the visits of a Delta table into sessions and write each session under a stable key."""

    append_time: str
    """SQL expression of the time at which the store appended the visit: a topic's append time, an ingestion time."""
    ties: list[str] = field(default_factory=list)
    """Integer columns that distinguish visits with the same append time, such as partition and offset."""
    target: str
    """Table of the sessions, created if absent: a Delta table (name or path), or with jdbc_url a PostgreSQL table."""
    topic: str | None = None
    """Topic from which the source is loaded; refused if its timestamps are not append times."""
    bootstrap_servers: str | None = None
    """Kafka brokers of the topic, host:port,host:port."""
    job_name: str = "keyed_sessions"
    """Name of the job in the dead letters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        PostgresParameters.__post_init__(self)
        if (self.topic is None) != (self.bootstrap_servers is None):
            raise WrongUse("topic and bootstrap_servers go together")

    @classmethod
    def own_columns(cls) -> Sequence[str]:
        """Return the columns that the job adds to the key in its target."""
        return SESSION_COLUMNS

    def times(self) -> dict[str, str]:
        """Return the expressions of a visit's two times: a session's identity is the least append time and its ties."""
        return {"event_time": self.event_time, "append_time": self.append_time}


def sessions(records: DataFrame, params: Parameters) -> DataFrame:
    """Return the stream's changed sessions, and its unusable records as column ``DEAD`` with their errors."""
    return params.changes(records, first_append, each_update, lambda changed: _with_id(changed, params))


def _with_id(changed: DataFrame, params: Parameters) -> DataFrame:
    """Return the state's sessions with their ids, and with their times as timestamps."""
    first_time, *positions = (f"get(__identity, {number})" for number in range(1 + len(params.ties)))
    first = f"timestamp_micros({first_time})"
    key = [identifier(name) for name in params.key]
    return changed.select(
        session_key(key, first, positions).alias("session_id"),
        *named_columns(params.key),
        F.timestamp_micros("__started_at").alias("started_at"),
        F.timestamp_micros("__ended_at").alias("ended_at"),
        F.col("__events").alias("visits"),
        F.col("__values").alias("pages"),
        F.col("__status").alias("status"),
        # As the id, it stays when a late visit becomes the first one.
        F.to_date(F.expr(first)).alias("first_append_date"),
    )


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
    rows = params.judged(empty)
    params.create_dead_letter_table(spark, unusable(rows), empty.columns)
    meaning = {
        "state": "a list of events",
        "key": json_text([params.key, params.event_time, params.append_time, params.ties, params.gap]),
    }
    writes, of_delta = {}, None
    if params.postgres is None:
        none = spark.createDataFrame([], params.changes_schema(rows))
        written = stamped(_with_id(none, params), WRITTEN_AT, "1970-01-01")
        of_delta = DeltaSink(spark, params.target, written, ["session_id"], "first_append_date")
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
    writer = SessionWriter(params, sink, writer_id, WRITTEN_AT)
    with settings(spark, STATE_STORE):
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
    return run_sessions(spark, params, start)


if __name__ == "__main__":
    run_job(Parameters, run)
