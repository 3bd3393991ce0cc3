"""Hybrid Source: one table of a topic's records, filled from the history first and then from the topic itself.

Problem: a new streaming job needs the records of the last years, which only the lakehouse has, and then those of the
topic. Each record must come once, also at the switch, and a session that spans the switch must stay one.

The job appends both into one Delta table, in two phases:

* ``history`` reads a Delta table that has the topic's records with their ``topic``, ``partition`` and ``offset``, in
  chunks, up to ``--boundary``. The boundary is the first live offset of each partition. It closes the history: rows
  that are added meanwhile at or behind it are left out.
* ``live`` reads the topic from the boundary on.

Each phase converts its records into the same columns (``--history_columns``, ``--live_columns``), so that what follows
knows no source. A stateful job that reads the table by one checkpoint keeps its state through the switch.

Guarantee: the target has each (topic, partition, offset) once. A restart continues behind the last chunk; a history
that is complete isn't read again. The job refuses to start when records would be in neither source: when the history
ends before the boundary, or the topic no longer has the boundary's record. The live phase doesn't start before the
history is complete, nor with another boundary, target or topic than the history was completed with: a topic that was
deleted and recreated has other offsets.

Cost: the target is a copy of the history. The check of the history's end reads its positions once.

Submit both phases (``--phase history`` and ``--phase live`` run them with different resources)::

    spark-submit python_jobs/streaming/hybrid_source.py --history lakehouse/bronze/visits_records \\
        --topic visits --bootstrap_servers localhost:9092 --boundary.0 1200 --boundary.1 1187 \\
        --history_columns.event_time "get_json_object(payload, '$.event_timestamp')" \\
        --live_columns.event_time "get_json_object(payload, '$.event_time')" --max_files_per_trigger 100 \\
        --target lakehouse/silver/all_visits --checkpoint lakehouse/checkpoints/all_visits --trigger "10 seconds"

Source: Data Engineering Design Patterns, chapter 11, Hybrid Source.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import JobFailed, NotReady, WrongUse, require_at_least
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.delta.checkpoints import has_progress
from python_jobs.shared.delta.streams import (
    BatchFunction,
    StreamParameters,
    await_end,
    batch_options,
    create_table,
    empty_source,
    nullable,
)
from python_jobs.shared.delta.table_streams import TableStream
from python_jobs.shared.delta.tables import read_table, table_id
from python_jobs.shared.kafka.bronze_records import raw_rows, record_columns
from python_jobs.shared.kafka.settings import consumer_settings, refuse_secrets
from python_jobs.shared.kafka.topic_streams import TopicStream, append_records
from python_jobs.shared.kafka.topics import SOURCE_FAILURES, StreamedTopics, offset_ranges
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import refuse_own_names
from python_jobs.streaming.harmonised_columns import require_same_types
from python_jobs.streaming.positioned_rows import (
    OWN_COLUMNS,
    ingested,
    lies_before,
    positioned_rows,
    require_positions,
)

_DONE = "history_is_complete.json"
_WAY_OUT = "start again with another target and another checkpoint"


@dataclass(frozen=True, kw_only=True)
class Parameters(StreamParameters):
    """Fill a table from the history of a topic's records, then from the topic."""

    history: str
    """Append-only Delta table (name or path) of the topic's records, with columns topic, partition and offset."""
    topic: str
    """Topic to read; it must exist."""
    bootstrap_servers: str
    """Kafka brokers, host:port,host:port."""
    boundary: dict[str, int]
    """First live offset of each partition, --boundary.PARTITION OFFSET; the history ends before it."""
    history_columns: dict[str, str]
    """Columns of the target, each with its SQL expression over the history's columns."""
    live_columns: dict[str, str]
    """The same columns, each with its SQL expression over the record: payload, key, timestamp, headers."""
    target: str
    """Delta table (name or path) to append to; created when absent."""
    checkpoint: str
    """Folder of the progress of both phases: one for each target, kept as long as the target."""
    phase: Literal["both", "history", "live"] = "both"
    """``both`` (default): the history, then the topic; ``history`` or ``live``: one of them."""
    max_records_per_trigger: int | None = None
    """Maximum number of the topic's records in one batch; by default all available records."""
    consumer: dict[str, str] = field(default_factory=dict)
    """Further settings of Kafka's client, such as security.protocol; secrets as ${env:NAME} only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, max_records_per_trigger=self.max_records_per_trigger)
        if self.history == self.target:
            raise WrongUse("history and target must be two tables")
        if not self.boundary or not all(name.isdecimal() for name in self.boundary):
            raise WrongUse(
                f"boundary must name the first live offset of each partition by its number, got {self.boundary}"
            )
        require_at_least(0, **{f"boundary.{name}": offset for name, offset in self.boundary.items()})
        if list(self.history_columns) != list(self.live_columns):
            raise WrongUse(
                "history_columns and live_columns must name the same columns in the same order, got "
                f"{', '.join(self.history_columns)} and {', '.join(self.live_columns)}"
            )
        refuse_own_names("history_columns", self.history_columns, OWN_COLUMNS)
        refuse_secrets(self.consumer)

    @property
    def settings(self) -> dict[str, str]:
        """Settings of Kafka's Java client."""
        return consumer_settings(self.bootstrap_servers, self.consumer)

    @property
    def boundary_text(self) -> str:
        """Return the boundary as the part of a contract: as JSON, by partition."""
        return json_text(self.boundary, sort_keys=True)

    def is_history(self) -> Column:
        """Return the condition for rows of the history: a record of the topic before the boundary of its partition."""
        return lies_before(self.topic, self.boundary)

    def history_rows(self, records: DataFrame) -> DataFrame:
        """Return the target's rows for the history's records before the boundary."""
        return positioned_rows(records.where(self.is_history()), self.history_columns, "historical")

    def live_rows(self, records: DataFrame) -> DataFrame:
        """Return the target's rows for the topic's records."""
        return positioned_rows(record_columns(records), self.live_columns, "real_time")


class Appender(BatchFunction):
    """The ``foreachBatch`` function of both phases: it appends each batch in one commit."""

    def __init__(self, params: Parameters, writer_id: str, topics: StreamedTopics | None) -> None:
        """Take the topics of the live phase, which must not be recreated meanwhile; None in the history's phase."""
        self._params, self._writer_id, self._topics = params, writer_id, topics
        # The report has the last 100 batches only, because a continuous job runs for months.
        self.batches: deque[dict[str, int]] = deque(maxlen=100)
        self.records = 0

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Append one batch, unless the target already has it."""
        if self._topics is not None:
            self._topics.require_unchanged()
        params = self._params
        new = ingested(rows, params.processing_time().isoformat())
        options = batch_options(self._writer_id, batch_id)
        records = append_records(new, params.target, options, params.topic)
        if records is None:
            return
        self.batches.append({"batch_id": batch_id, "records": records})
        self.records += records

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a report."""
        return {"records": self.records, "batches": list(self.batches)}


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the phases to their end and return the report; a phase that didn't run is None.

    Raises:
        NotReady: a source doesn't exist, the history ends before the boundary, or the live phase is to start before the
            history is complete.
        WrongUse: the boundary doesn't name the topic's partitions, an expression can't be resolved, the columns of both
            sources differ, the checkpoint belongs to another query, or the history was completed with another boundary
            or target.
        DataRefused: the topic was deleted and recreated.
        JobFailed: the topic no longer has the boundary's records.
    """
    topics = _live_stream(params).describe(spark)
    _require_partitions(params, topics.described[params.topic].partitions)
    progress = HadoopFolder(spark, params.checkpoint)
    completed = progress.read_text(_DONE)
    if params.phase == "live" and completed is None:
        raise NotReady(f"the history isn't complete in '{params.target}'; run the phase history first")
    history = live = None
    if completed is None:
        topics.require_checkpoint(_history_checkpoint(params))
        _prepare_target(spark, params)
        _require_whole(spark, params)
        history = _run_history(spark, params, topics)
        progress.create_text(_DONE, json_text(_switch(spark, params, topics)))
    else:
        _require_same_switch(json.loads(completed), spark, params, topics)
    if params.phase != "history":
        live = _run_live(spark, params, topics)
    return {"target": params.target, "history": history, "live": live}


def _switch(spark: SparkSession, params: Parameters, topics: StreamedTopics) -> dict[str, str]:
    """Return what both phases must agree on: with another of them, records would be in neither source."""
    return {
        "target": table_id(spark, params.target),
        "boundary": params.boundary_text,
        **topics.contract,
    }


def _require_same_switch(
    completed: dict[str, str], spark: SparkSession, params: Parameters, topics: StreamedTopics
) -> None:
    topics.require_written_by([completed.get("topics", "")])
    today, before = _switch(spark, params, topics), completed.get("boundary")
    if today["boundary"] != before:
        raise WrongUse(
            f"the history was completed up to the boundary {before}, got {today['boundary']}: give that boundary, or "
            f"{_WAY_OUT}"
        )
    different = [name for name in today if today[name] != completed.get(name)]
    if different:
        raise WrongUse(
            f"the history was completed with another {' and '.join(different)} than '{params.target}' and "
            f"{params.topic}: give the same, or {_WAY_OUT}"
        )


def _require_partitions(params: Parameters, partitions: int) -> None:
    wanted = {str(number) for number in range(partitions)}
    if set(params.boundary) != wanted:
        raise WrongUse(
            f"boundary must name each partition of {params.topic}, 0 to {partitions - 1}, got "
            f"{', '.join(sorted(params.boundary))}"
        )


def _prepare_target(spark: SparkSession, params: Parameters) -> None:
    """Create or check the target; refuse sources that don't give the same columns."""
    empty = empty_source(spark, params.history, ())
    require_positions(empty.columns, f"the history '{params.history}'")
    history, live = params.history_rows(empty), params.live_rows(raw_rows(spark, None))
    require_same_types({"the history": history, "the topic": live})
    create_table(spark, params.target, nullable(ingested(history, "1970-01-01").schema))


def _require_whole(spark: SparkSession, params: Parameters) -> None:
    """Refuse a boundary with records in neither source: behind the history's end, or gone from the topic."""
    ends = {
        row.partition: row.end
        for row in read_table(spark, params.history)
        .where(params.is_history())
        .groupBy("partition")
        .agg((F.max("offset") + 1).alias("end"))
        .collect()
    }
    for partition, offset in sorted(params.boundary.items()):
        end = ends.get(int(partition), 0)
        if end < offset:
            raise NotReady(
                f"the history of partition {partition} ends before offset {end}, but the boundary is {offset}: wait "
                f"for the missing records, or lower the boundary to {end} if the topic still has them"
            )
    _require_retained(spark, params)


def _require_retained(spark: SparkSession, params: Parameters) -> None:
    ranges = offset_ranges(spark, params.topic, params.settings)
    for partition, offset in sorted(params.boundary.items()):
        first, end = ranges[params.topic, int(partition)]
        if offset < first:
            raise JobFailed(
                f"the boundary of partition {partition} is {offset}, but {params.topic} has no records before {first} "
                "any more; raise the boundary if the history has them"
            )
        if offset > end:
            raise WrongUse(
                f"the boundary of partition {partition} is {offset}, but {params.topic} ends at {end}"
            )


def _history_checkpoint(params: Parameters) -> str:
    return f"{params.checkpoint}/history"


def _run_history(spark: SparkSession, params: Parameters, topics: StreamedTopics) -> dict[str, Any]:
    declared = TableStream(
        job="hybrid_source, history",
        source=params.history,
        writes={"target": params.target},
        appends_to=[params.target],
        # The boundary is an offset of this very topic, also when the history breaks off and the topic is recreated.
        meaning={"boundary": params.boundary_text, **topics.contract},
        checkpoint=_history_checkpoint(params),
        start_over=params.start_over,
        max_files_per_trigger=params.max_files_per_trigger,
        transform=params.history_rows,
    )
    appender = Appender(params, declared.claim(spark), None)
    await_end(declared.start(spark, appender), appender, params.history)
    return appender.as_dict()


def _live_stream(params: Parameters) -> TopicStream:
    return TopicStream(
        job="hybrid_source, live",
        topics=[params.topic],
        settings=params.settings,
        way_out=_WAY_OUT,
        writes={"target": params.target},
        appends_to=[params.target],
        meaning={"boundary": params.boundary_text},
        checkpoint=f"{params.checkpoint}/live",
        start_over=params.start_over,
        trigger=params.trigger,
        max_records_per_trigger=params.max_records_per_trigger,
        transform=params.live_rows,
    )


def _run_live(spark: SparkSession, params: Parameters, topics: StreamedTopics) -> dict[str, Any]:
    stream = _live_stream(params)
    if not has_progress(spark, stream.checkpoint):
        _require_retained(spark, params)
    appender = Appender(params, stream.claim(spark, topics), topics)
    boundary = {(params.topic, int(partition)): offset for partition, offset in params.boundary.items()}
    query = stream.start(spark, topics, appender, lambda: boundary)
    await_end(query, appender, params.topic, SOURCE_FAILURES)
    return appender.as_dict()


if __name__ == "__main__":
    run_job(Parameters, run)
