"""Sidecar: several sources in one table, and further stores from the same batch.

Problem: visits come from two sources with different columns, and they must be in the lakehouse as rows, and as
statistics in other stores. A job for each store would read and compute everything again, and one that fails would
leave the stores apart.

The job unites ``--sources`` (Delta tables and Kafka topics): each one computes the common columns by its own
expressions, and its rows carry their ``source`` and ``origin``. Each micro-batch is evaluated once and written to

* ``--target``: all rows, with ``batch_id`` and ``writer_id`` (the checkpoint that numbers the batches);
* each of ``--sinks``, a Delta table or a Kafka topic: the result of the sink's own query over the batch's rows. A batch
  fails without a required sink. It is complete without an optional one: the table ``--missing`` then has a line with
  the batch and the error.

An optional sink gets its batches in order. While it lacks some, each batch first writes up to 10 of them from the
target's rows, then its own. ``--action repair`` writes all of them, without reading the sources.

With ``--alignment unaligned`` (default) a run takes what there is: a source without rows, or one that doesn't exist
yet, holds up no other. With ``aligned`` it ends with exit code 4 until each source has new data.

Guarantee: duplicates across sources stay. A batch that is repeated after a crash adds nothing to a Delta table. A topic
gets a repeated batch again, with the same ``batch_id`` and ``writer_id``. The stores have the same batches when nothing
is missing: no transaction spans them, so a reader may see a batch in one of them earlier. A source that was read before
must answer: otherwise the run ends, and the next one goes on at its position.

Cost: the batch's rows are cached on disk, and counted by source. Each Delta sink is one more commit for each batch. A
batch without rows writes nothing. With ``--heartbeat true`` an idle job runs a batch at each trigger.

Submit (available data, then stop; with ``--trigger "10 seconds"`` without end)::

    spark-submit python_jobs/streaming/sidecar.py --config sidecar.yml

Source: Data Engineering Design Patterns, chapter 11, Sidecar.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import JobFailed, NotReady, WrongUse, given, require_at_least
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.core.origins import ORIGIN
from python_jobs.shared.core.partial_failures import failure_sentence, require_no_failures
from python_jobs.shared.delta import streams
from python_jobs.shared.delta.checkpoints import claim, contract_of
from python_jobs.shared.delta.streams import (
    BatchFunction,
    StreamParameters,
    append,
    await_end,
    batch_options,
    create_table,
    evaluated_once,
    nullable,
    start_query,
)
from python_jobs.shared.delta.tables import read_table, table_exists, table_id
from python_jobs.shared.kafka import topics
from python_jobs.shared.kafka.settings import consumer_settings, refuse_secrets
from python_jobs.shared.kafka.topics import producer_settings, source_failures
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import refuse_own_names
from python_jobs.streaming.batch_sinks import (
    BATCH_ID,
    WRITER_ID,
    BatchSink,
    SideSink,
    TableSink,
    TopicSink,
    with_batch,
)
from python_jobs.streaming.heartbeats import with_heartbeat
from python_jobs.streaming.inputs import (
    SOURCE,
    Input,
    Source,
    no_rows,
    opened,
    require_news,
    require_unchanged,
    united,
)
from python_jobs.streaming.missing_batches import MissingBatches

JOB = "sidecar"
INGESTED_AT = "ingested_at"
CATCH_UP = 10
"""Number of missing batches that a batch writes first."""
_SINK_FAILURES = (PySparkException, Py4JJavaError, JobFailed)

log = logging.getLogger(JOB)


@dataclass(frozen=True, kw_only=True)
class Parameters(StreamParameters):
    """Unite several sources in a Delta table, and write further sinks from the same batches."""

    sources: list[Source]
    """Inputs, each with the same columns. Their order and places belong to the checkpoint."""
    target: str
    """Delta table (name or path) of all rows; created when absent."""
    sinks: list[SideSink] = field(default_factory=list)
    """Further stores, each with its query over the batch's rows."""
    missing: str | None = None
    """Delta table (name or path) that records the batches that optional sinks lack; created when absent."""
    checkpoint: str
    """Folder of the query's progress."""
    action: Literal["stream", "repair"] = "stream"
    """stream (default): process the sources; repair: write the batches that optional sinks lack."""
    alignment: Literal["unaligned", "aligned"] = "unaligned"
    """unaligned (default): take what there is; aligned: exit code 4 until each source has new data."""
    heartbeat: bool = False
    """Whether an idle job runs a batch at each trigger; needs a trigger."""
    bootstrap_servers: str | None = None
    """Kafka brokers, host:port,host:port; needed with a topic."""
    max_records_per_trigger: int | None = None
    """Maximum number of a topic's records in one batch; by default all available records."""
    consumer: dict[str, str] = field(default_factory=dict)
    """Further settings of Kafka's client that reads, such as security.protocol; secrets as ${env:NAME} only."""
    producer: dict[str, str] = field(default_factory=dict)
    """Further settings of Kafka's client that writes; secrets as ${env:NAME} only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, max_records_per_trigger=self.max_records_per_trigger)
        for what, declared in (("sources", self.sources), ("sinks", self.sinks)):
            names = [one.name for one in declared]
            if len(set(names)) < len(names):
                raise WrongUse(f"{what} must have different names, got {', '.join(names)}")
        self._require_columns()
        places = [f"table {self.target}", f"table {self.missing}", *(sink.place for sink in self.sinks)]
        read = [source.place for source in self.sources]
        if len({*places, *read}) < len(places) + len(set(read)):
            raise WrongUse(
                f"target, missing, sinks and sources must be different, got {', '.join(places + read)}"
            )
        if not all(sink.required for sink in self.sinks):
            given(self.missing, "missing")
        if any(source.topic for source in self.sources) or any(sink.topic for sink in self.sinks):
            given(self.bootstrap_servers, "bootstrap_servers")
        if self.heartbeat and self.trigger is None:
            raise WrongUse(
                "heartbeat needs a trigger: a run that stops behind the available data has no idle time"
            )
        if self.alignment == "aligned" and self.trigger is not None:
            raise WrongUse(
                "aligned takes no trigger: a run starts when each source has new data, so let a scheduler repeat it"
            )
        refuse_secrets(self.consumer)
        refuse_secrets(self.producer)

    def _require_columns(self) -> None:
        if not self.sources:
            raise WrongUse("sources is empty; it takes one source or more")
        first = self.sources[0]
        for source in self.sources:
            if set(source.columns) != set(first.columns):
                raise WrongUse(
                    f"all sources must have the same columns, got {', '.join(first.columns)} of {first.name} and "
                    f"{', '.join(source.columns)} of {source.name}"
                )
        refuse_own_names("columns", first.columns, [ORIGIN, SOURCE, BATCH_ID, WRITER_ID, INGESTED_AT])

    @property
    def places(self) -> str:
        """Return where the sources are, for messages."""
        return ", ".join(source.place for source in self.sources)

    def inputs(self, spark: SparkSession) -> list[Input]:
        """Return the sources as they are now."""
        settings = consumer_settings(str(self.bootstrap_servers), self.consumer)
        limits = (self.max_files_per_trigger, self.max_records_per_trigger)
        return opened(spark, self.sources, settings, *limits)

    def batch_sinks(self) -> list[BatchSink]:
        """Return the sinks, in their order."""
        settings = producer_settings(str(self.bootstrap_servers), self.producer)
        return [TableSink(sink) if sink.topic is None else TopicSink(sink, settings) for sink in self.sinks]


class Repairs:
    """The batches that optional sinks lack, and their way from the target's rows to the sinks."""

    def __init__(self, spark: SparkSession, params: Parameters, writer_id: str) -> None:
        self._spark, self._params, self._writer_id = spark, params, writer_id
        self._log = MissingBatches(spark, given(params.missing, "missing"), writer_id)

    def missing(self) -> dict[str, list[int]]:
        """Return the missing batches, in order, by sink."""
        return self._log.missing()

    def record(self, sink: BatchSink, batch_id: int, error: str) -> None:
        """Record a batch that a sink lacks."""
        log.warning("sink %s lacks batch %s: %s", sink.name, batch_id, error)
        self._log.record(sink.name, batch_id, error, self._params.processing_time())

    def repair(self, sink: BatchSink, batches: Sequence[int]) -> None:
        """Write missing batches to a sink, in their order, and record each."""
        rows = read_table(self._spark, self._params.target).where(F.col(WRITER_ID) == self._writer_id)
        for batch_id in batches:
            of_batch = rows.where(F.col(BATCH_ID) == batch_id).drop(BATCH_ID, WRITER_ID, INGESTED_AT)
            sink.write(of_batch, self._writer_id, batch_id)
            self._log.repaired(sink.name, batch_id, self._params.processing_time())


class BatchWriter(BatchFunction):
    """The ``foreachBatch`` function: target first, then the required sinks, then the optional ones."""

    def __init__(
        self, params: Parameters, inputs: Sequence[Input], sinks: Sequence[BatchSink], writer_id: str,
        repairs: Repairs | None,
    ) -> None:  # fmt: skip
        """Take the sinks, and the repairs if one of them is optional."""
        self._params, self._inputs, self._writer_id, self._repairs = params, inputs, writer_id, repairs
        self._required = [sink for sink in sinks if sink.declared.required]
        self._optional = [sink for sink in sinks if not sink.declared.required]
        self._behind = set(repairs.missing()) if repairs is not None else set()
        # The report has the last 100 batches only, because a continuous job runs for months.
        self.batches: deque[dict[str, Any]] = deque(maxlen=100)
        self.rows = {source.name: 0 for source in params.sources}

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Write one batch; a repeated batch adds nothing to a Delta table.

        Raises:
            JobFailed: a source or a required sink failed.
        """
        require_unchanged(self._inputs)
        with evaluated_once(rows) as kept:
            counts = self._counts(kept)
            if counts:
                self._write_target(kept, batch_id)
                for sink in self._required:
                    sink.write(kept, self._writer_id, batch_id)
            for sink in self._optional:
                self._offer(sink, kept if counts else None, batch_id)
        self.batches.append({"batch_id": batch_id, "rows": counts})
        for name, count in counts.items():
            self.rows[name] += count

    def _counts(self, kept: DataFrame) -> dict[str, int]:
        """Return the number of rows by source; this evaluates the batch."""
        with source_failures(self._params.places):
            return {row[SOURCE]: row["count"] for row in kept.groupBy(SOURCE).count().collect()}

    def _write_target(self, kept: DataFrame, batch_id: int) -> None:
        rows = target_rows(kept, self._writer_id, batch_id, self._params)
        append(rows, self._params.target, batch_options(self._writer_id, batch_id))

    def _offer(self, sink: BatchSink, rows: DataFrame | None, batch_id: int) -> None:
        """Write what an optional sink lacks and the batch's own rows, if any; record the batch if this fails."""
        repairs = given(self._repairs, "missing")
        try:
            left = self._catch_up(sink, repairs, batch_id)
            if rows is not None and not left:
                sink.write(rows, self._writer_id, batch_id)
            error = f"batch {left[0]} comes first" if left else None
        except _SINK_FAILURES as failure:
            self._behind.add(sink.name)
            error = failure_sentence(failure)
        if error is not None and rows is not None:
            repairs.record(sink, batch_id, error)

    def _catch_up(self, sink: BatchSink, repairs: Repairs, batch_id: int) -> list[int]:
        """Write the first missing batches and return those that are left before this batch."""
        if sink.name not in self._behind:
            return []
        # A batch that is repeated may be recorded already; it is written with the others.
        batches = repairs.missing().get(sink.name, [])
        repairs.repair(sink, batches[:CATCH_UP])
        if len(batches) <= CATCH_UP:
            self._behind.discard(sink.name)
        return [left for left in batches[CATCH_UP:] if left < batch_id]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a report."""
        return {
            "rows": self.rows,
            "absent": [source.name for source in self._inputs if source.id is None],
            "batches": list(self.batches),
            "missing": self._repairs.missing() if self._repairs is not None else {},
        }


def target_rows(rows: DataFrame, writer_id: str, batch_id: int, params: Parameters) -> DataFrame:
    """Return the target's rows of a batch."""
    now = F.lit(params.processing_time().isoformat()).cast("timestamp")
    return with_batch(rows, writer_id, batch_id).withColumn(INGESTED_AT, now)


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the action and return its report.

    Raises:
        NotReady: no source is there, a source that was read before is away, or aligned sources have no new data.
        WrongUse: an expression or a query can't be resolved, the sources' columns have different types, a table has
            other columns, or the checkpoint belongs to another query.
        JobFailed: a source or a required sink failed; or a repair, after the sinks that it could write.
    """
    return repair(spark, params) if params.action == "repair" else _stream(spark, params)


def _stream(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    query, writer = start(spark, params)
    await_end(query, writer, params.places, streams.SOURCE_FAILURES | topics.SOURCE_FAILURES)
    return {"target": params.target, **writer.as_dict()}


def start(spark: SparkSession, params: Parameters) -> tuple[Any, BatchWriter]:
    """Check sources and sinks, claim the checkpoint and start the query; raises like :func:`run`."""
    inputs, sinks = params.inputs(spark), params.batch_sinks()
    rows = no_rows(inputs)
    results = [sink.result(rows, "", 0) for sink in sinks]
    create_table(spark, params.target, nullable(target_rows(rows, "", 0, params).schema))
    writer_id = _claim(spark, params, inputs)
    if params.alignment == "aligned":
        require_news(spark, inputs, params.checkpoint)
    repairs = Repairs(spark, params, writer_id) if params.missing is not None else None
    if repairs is not None:
        _require_complete([sink for sink in sinks if sink.declared.required], repairs)
    ready = [sink for sink, result in zip(sinks, results, strict=True) if _is_prepared(sink, result)]
    _require_different_tables(spark, params, [sink.declared.table for sink in ready])
    writer = BatchWriter(params, inputs, sinks, writer_id, repairs)
    stream = united(spark, inputs, rows.schema, params.checkpoint)
    stream = with_heartbeat(stream) if params.heartbeat else stream
    return start_query(stream, writer, params.checkpoint, params.trigger), writer


def _is_prepared(sink: BatchSink, no_rows: DataFrame) -> bool:
    """Create or check a sink's destination; return False if it is away, as an optional one may be."""
    try:
        sink.prepare(no_rows)
    except WrongUse:
        raise
    except _SINK_FAILURES as failure:
        if sink.declared.required:
            raise
        log.warning("sink %s is away: %s", sink.name, failure_sentence(failure))
        return False
    return True


def _require_different_tables(spark: SparkSession, params: Parameters, sinks: Sequence[str | None]) -> None:
    """Refuse two names of one table: Delta would skip the second one's rows of each batch as a repetition."""
    read = [source.table for source in params.sources if source.table and table_exists(spark, source.table)]
    seen = {table_id(spark, table): table for table in read}
    for table in filter(None, [params.target, params.missing, *sinks]):
        if (known := table_id(spark, table)) in seen:
            raise WrongUse(
                f"'{seen[known]}' and '{table}' are one table: target, missing, sinks and sources must be different"
            )
        seen[known] = table


def _claim(spark: SparkSession, params: Parameters, inputs: Sequence[Input]) -> str:
    """Claim the checkpoint, and in it a folder for each source, whose id may come later; return the writer id."""
    contract = {
        "job": JOB,
        "target": table_id(spark, params.target),
        "sources": json_text([f"{source.name}: {source.kind}" for source in params.sources]),
        "heartbeat": str(params.heartbeat),
    }
    tables = [params.target, *(sink.table for sink in params.sinks if sink.required and sink.table)]
    writer_id = claim(spark, params.checkpoint, contract, tables, params.start_over)
    for source in inputs:
        folder = f"{params.checkpoint}/inputs/{source.name}"
        if source.id is not None:
            claim(spark, folder, {"job": JOB, "source": source.id})
        elif contract_of(spark, folder):
            raise NotReady(
                f"the source {source.name} was read before and is away now: {source.absence}; run again when it is back"
            )
    return writer_id


def _require_complete(required: Sequence[BatchSink], repairs: Repairs) -> None:
    """Refuse a required sink that lacks batches of the time when it was optional: Delta would skip them for ever."""
    missing = repairs.missing()
    for sink in required:
        if sink.name in missing:
            raise WrongUse(
                f"the required sink {sink.name} lacks the batches {', '.join(map(str, missing[sink.name]))}: repair it "
                "as an optional one first"
            )


def repair(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Write the batches that optional sinks lack, and report them by sink.

    Raises:
        NotReady: the checkpoint has no progress.
        JobFailed: a sink failed; the others have their batches.
    """
    owner = contract_of(spark, params.checkpoint)
    if "writer_id" not in owner:
        raise NotReady(f"the checkpoint '{params.checkpoint}' has no batches yet")
    repairs = Repairs(spark, params, owner["writer_id"])
    missing, repaired, failures = repairs.missing(), dict[str, list[int]](), dict[str, Exception]()
    for sink in params.batch_sinks():
        if sink.declared.required or sink.name not in missing:
            continue
        try:
            repairs.repair(sink, missing[sink.name])
            repaired[sink.name] = missing[sink.name]
        except _SINK_FAILURES as failure:
            failures[f"sink {sink.name}"] = failure
    require_no_failures(failures, "the other sinks have their batches; run again when it is back")
    return {"repaired": repaired}


if __name__ == "__main__":
    run_job(Parameters, run)
