"""Bin Pack Orderer: deliver events by bulk requests that may be taken in part, and keep the order of each key.

Problem: partners get events from a stream, such as the visits of their pages by minute. Their bulk APIs may take only
a part of a request. If one request holds 10:00, 10:10 and 10:20 of a key and only 10:20 is taken, the others come
behind it when they are sent again. One request for each event keeps the order and is too slow.

The events of a micro-batch are sorted by key and event time, and the n-th event of each key goes to bin n. The bins
are sent one after the other, each as one bulk request, or as few as the API allows (500 records). What is refused is
sent again, alone, until the bin is complete; then the next bin follows.

A record arrives as ``{"id": …, "key": …, "at": …, "data": {…}}``. ``--fields`` name the values in ``data``. With
``--every "1 minute"`` they aggregate the events of a key and minute, and ``at`` is the minute's start.

Guarantee: the events of a key and micro-batch arrive in the order of their times (then ``--ties``, then their content),
each once while the job runs. If a bin isn't complete after ``--attempts`` tries, or a record is refused for good, the
later bins are not sent, and the job ends with exit code 1; with ``--trigger`` it tries that output again after each
interval. An output has its own query, so the other outputs go on. The number of delivered bins is stored in the
checkpoint: the next run begins with the first bin that isn't stored. Events without key or time, with a key of more
than 256 characters, with a text that isn't UTF-8, or of an unknown output go to ``--dead_letter``. An empty batch sends
nothing.

Delivery is at least once. After a crash between a bin's delivery and the storing of its number, and after a lost
answer, its records are sent again with the same ``id``: the partner drops an ``id`` that it has. Not guaranteed: the
order of an event that comes in a later micro-batch than a later event of its key; it is delivered when it comes. A
minute whose events come in two batches is two records.

Cost: each output's query reads the source. The driver holds one micro-batch of an output
(``--max_files_per_trigger``).

    spark-submit python_jobs/data_value/bin_pack_orderer.py --config bin_pack_orderer.yml

Source: Data Engineering Design Patterns, chapter 5, Bin Pack Orderer.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.data_value.bins import Event, packed
from python_jobs.data_value.bulk_sinks import Output, Sent
from python_jobs.data_value.ordered_delivery import Courier, Undelivered
from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.intervals import from_micros, parse_duration
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.core.partial_failures import require_no_failures
from python_jobs.shared.core.retry import RetryPolicy
from python_jobs.shared.core.signals import end_requested
from python_jobs.shared.delta.streams import (
    BatchFunction,
    append,
    await_end,
    batch_options,
    empty_source,
    evaluated_once,
)
from python_jobs.shared.delta.table_streams import TableStream
from python_jobs.shared.records.dead_letters import DEAD_LETTER_COLUMNS, DeadLetterStream
from python_jobs.shared.records.event_times import absence, first_error, not_utf8, order_of
from python_jobs.shared.records.json_records import ERROR_CLASS, ERROR_MESSAGE
from python_jobs.shared.spark.expressions import resolved
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import named_column
from python_jobs.shared.spark.times import EXACT_JSON, with_timestamp

JOB = "bin_pack_orderer"
LONG_KEY, UNKNOWN_OUTPUT = "LONG_KEY", "UNKNOWN_OUTPUT"
MAX_KEY = 256
"""Maximum number of characters of a key; it is that of Kinesis' partition keys."""
_KEY, _AT, _OUTPUT, _RECORD, _VALUE = "__key", "__at", "__output", "__record", "__value_"
_DELIVERED = "delivered"
_LOOK_SECONDS = 0.2

log = logging.getLogger(JOB)


@dataclass(frozen=True, kw_only=True)
class Parameters(DeadLetterStream):
    """Deliver the events of a Delta table to bulk APIs in the order of each key."""

    source: str
    """Append-only Delta table (name or path)."""
    key: str
    """SQL expression of the key whose order is kept, such as a visit or a provider."""
    event_time: str
    """SQL expression of the event's time: a timestamp, or a text that names date and time; use try_ functions."""
    ties: list[str] = field(default_factory=list)
    """Integer columns that order events of one time, such as partition and offset."""
    fields: dict[str, str]
    """Values of the delivered record, each with its SQL expression; an aggregate if ``every`` is given."""
    every: str | None = None
    """Length of the windows by which events are aggregated, such as "1 minute"; default: each event is delivered."""
    outputs: list[Output]
    """Destinations, each with its own bins and progress."""
    output: str | None = None
    """SQL expression of the name of an event's output; needed with several outputs."""
    checkpoint: str
    """Folder of the progress of all outputs."""
    job_name: str = JOB
    """Name of the job in the dead letters."""
    attempts: int = 5
    """Maximum number of tries of one bin."""
    wait_seconds: float = 1
    """Longest pause before the second try, in seconds; it doubles before each further try, up to a minute."""
    attempt_seconds: float = 30
    """Time in seconds that one request waits for an answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [output.name for output in self.outputs]
        if not names or len(set(names)) < len(names):
            raise WrongUse(f"outputs must have one name each, all different, got {names}")
        if len(names) > 1 and self.output is None:
            raise WrongUse("output is missing: with several outputs it names the output of each event")
        if not self.fields:
            raise WrongUse("fields is empty; it takes one field or more, each with its expression")
        if self.every is not None:
            parse_duration(self.every)
            if self.ties:
                raise WrongUse("ties have no meaning with every: a key has one record for each window")
        if self.source == self.dead_letter:
            raise WrongUse("source and dead_letter must be two tables")
        self.policy()

    def policy(self) -> RetryPolicy:
        """Return the bounds of a bin's tries."""
        return RetryPolicy(
            attempts=self.attempts, base_seconds=self.wait_seconds, attempt_seconds=self.attempt_seconds
        )

    def judged(self, records: DataFrame) -> DataFrame:
        """Return each record with its key, time, output and error; the error is NULL if it can be delivered.

        Raises:
            WrongUse: an expression can't be resolved or has another type.
        """
        names = [output.name for output in self.outputs]
        output = F.lit(names[0]) if self.output is None else F.expr(self.output).cast("string")
        with resolved():
            rows = with_timestamp(records, _AT, self.event_time).select(
                "*",
                F.nullif(F.expr(self.key).cast("string"), F.lit("")).alias(_KEY),
                output.alias(_OUTPUT),
                F.struct(*(named_column(name) for name in records.columns)).alias(_RECORD),
            )
            values = self.value_columns()
            rows = rows.withColumns({column: F.expr(self.fields[name]) for column, name in values.items()})
        # An aggregate is one of many records: all their texts count, because nobody knows which ones it takes.
        texts = values if self.every is None else {name: name for name in records.columns}
        is_known = F.coalesce(F.col(_OUTPUT).isin(names), F.lit(False))
        errors: Sequence[tuple[Column, str, Column]] = [
            *absence({_KEY: "key"}, {_AT: "event_time"}),
            not_utf8(rows, {_KEY: "key", _OUTPUT: "output"} | texts),
            (
                F.length(_KEY) > MAX_KEY,
                LONG_KEY,
                F.lit(f"the key has more than {MAX_KEY} characters"),
            ),
            (
                ~is_known,
                UNKNOWN_OUTPUT,
                F.concat(F.lit("there is no output "), F.coalesce(F.col(_OUTPUT), F.lit("NULL"))),
            ),
        ]
        return rows.select("*", *first_error(errors))

    def value_columns(self) -> dict[str, str]:
        """Return the columns of a judged record with its delivered values, each with its field; none of windows."""
        names = self.fields if self.every is None else ()
        return {f"{_VALUE}{place}": name for place, name in enumerate(names)}

    def deliverable(self, judged: DataFrame) -> DataFrame:
        """Return what is delivered of usable records: columns key, at (microseconds), ties and payload."""
        values = [F.expr(expression).alias(name) for name, expression in self.fields.items()]
        if self.every is None:
            ties = order_of(judged, self.ties)
            order = F.array(*ties) if ties else _no_order()
            return judged.select(_KEY, F.unix_micros(_AT), order, F.to_json(F.struct(*values), EXACT_JSON))
        window = F.window(_AT, self.every).alias("__window")
        rows = judged.groupBy(_KEY, window).agg(F.struct(*values).alias("__values"))
        at = F.unix_micros("__window.start")
        return rows.select(_KEY, at, _no_order(), F.to_json("__values", EXACT_JSON))


def _no_order() -> Column:
    return F.expr("cast(array() as array<bigint>)")


class OutputWriter(BatchFunction):
    """The ``foreachBatch`` function of one output."""

    def __init__(self, params: Parameters, output: Output, writer_id: str, folder: HadoopFolder) -> None:
        """Take the folder of the output's checkpoint, which also holds its progress within a batch."""
        self._params, self._output, self._writer_id = params, output, writer_id
        self._folder = folder
        self._courier = Courier(output.sink(params.attempt_seconds), params.policy())
        self._stored: list[str] = []
        self.records = self.bins = self.dead = 0

    @property
    def requests(self) -> int:
        """Number of requests so far, those that failed included."""
        return self._courier.requests

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Deliver the batch's events of this output; a repeated batch goes on with the first bin that isn't stored."""
        params = self._params
        with evaluated_once(self._own(params.judged(rows))) as kept:
            usable, unusable = (kept.where(f"{ERROR_CLASS} is {kind}") for kind in ("null", "not null"))
            # One action reads both: the last row is the number of dead records.
            number = unusable.select(F.lit(None), F.count("*"), _no_order(), F.lit(None))
            *found, (_, dead, _, _) = params.deliverable(usable).union(number).collect()
            self._write_dead(unusable, dead, batch_id)
        events = (Event(key, at, tuple(order), payload) for key, at, order, payload in found)
        self._deliver(packed(events), batch_id)

    def _own(self, judged: DataFrame) -> DataFrame:
        """Return the output's records; those of no output belong to the first one, so that one writer has them."""
        own = F.col(_OUTPUT) == self._output.name
        if self._output == self._params.outputs[0]:
            names = [output.name for output in self._params.outputs]
            own = own | F.col(_OUTPUT).isNull() | ~F.col(_OUTPUT).isin(names)
        return judged.where(own)

    def _write_dead(self, unusable: DataFrame, dead: int, batch_id: int) -> None:
        if dead:
            records = unusable.select(f"{_RECORD}.*", ERROR_CLASS, ERROR_MESSAGE)
            now = self._params.processing_time()
            letters = self._params.dead_letters(records, records.columns[:-2], batch_id, now)
            append(letters, self._params.dead_letter, batch_options(self._writer_id, batch_id))
            self.dead += dead

    def _deliver(self, bins: Sequence[Sequence[Event]], batch_id: int) -> None:
        content = hashlib.sha256(repr(bins).encode()).hexdigest()
        done = self._delivered(batch_id, content)
        for number, events in enumerate(bins[done:], done):
            try:
                self._courier.deliver([self._sent(event, batch_id, number) for event in events])
            except Undelivered as failure:
                raise Undelivered(
                    f"bin {number + 1} of {len(bins)} of batch {batch_id} is not complete: {failure}; the next bins "
                    "were not sent, run again"
                ) from failure
            self._store(batch_id, number + 1, content)
            self.bins += 1
            self.records += len(events)

    def _sent(self, event: Event, batch_id: int, number: int) -> Sent:
        identity = f"{self._writer_id}/{batch_id}/{number}/{event.key}"
        envelope = {
            "id": hashlib.sha256(identity.encode()).hexdigest()[:32],
            "key": event.key,
            "at": from_micros(event.at).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        }
        return Sent(event.key, f'{json_text(envelope)[:-1]}, "data": {event.payload}}}')

    def _delivered(self, batch_id: int, content: str) -> int:
        """Return the number of the batch's bins that are known to be delivered."""
        self._stored = self._folder.names(_DELIVERED)
        for name in self._stored:
            batch, _, bins = name.partition("-")
            if batch == str(batch_id):
                if self._folder.read_text(f"{_DELIVERED}/{name}") == content:
                    return int(bins)
                log.warning(
                    "batch %s of %s has other events than before: all are sent", batch_id, self._output.name
                )
        return 0

    def _store(self, batch_id: int, bins: int, content: str) -> None:
        """Store the number of delivered bins; a new file, because replacing one isn't atomic."""
        name = f"{batch_id}-{bins}"
        self._folder.create_text(f"{_DELIVERED}/{name}", content)
        for before in {*self._stored} - {name}:
            self._folder.delete(f"{_DELIVERED}/{before}")
        self._stored = [name]


class OutputQuery:
    """The query of one output, which is started again after a failed delivery if the job has no end."""

    def __init__(self, spark: SparkSession, params: Parameters, output: Output) -> None:
        """Claim the output's checkpoint.

        Raises:
            WrongUse: the checkpoint belongs to another query.
        """
        self.output = output
        self._spark, self._params = spark, params
        checkpoint = f"{params.checkpoint.rstrip('/')}/{output.name}"
        rules = {
            "key": params.key, "event_time": params.event_time, "ties": params.ties, "fields": params.fields,
            "every": params.every, "output": params.output,
        }  # fmt: skip
        self._stream: TableStream = params.stream(
            JOB,
            params.source,
            checkpoint,
            {},
            meaning={
                "output": f"{output.name} {output.kind} {output.target}",
                "rules": json_text(rules, sort_keys=True),
            },
        )
        self.writer = OutputWriter(params, output, self._stream.claim(spark), HadoopFolder(spark, checkpoint))
        self._query: StreamingQuery | None = None
        self._next_start = 0.0

    def is_running(self) -> bool:
        """Start the query if it is due; return whether it runs or will be started again.

        Raises:
            Exception: that of the query's end, if it isn't started again.
        """
        if self._query is None:
            if time.monotonic() >= self._next_start:
                self._query = self._stream.start(self._spark, self.writer)
            return True
        if self._query.isActive:
            return True
        try:
            await_end(self._query, self.writer, self._params.source)
        except Undelivered as failure:
            if self._params.trigger is None:
                raise
            log.error("output %s: %s; it is tried again", self.output.name, failure)
            self.writer.failure, self._query = None, None
            self._next_start = time.monotonic() + parse_duration(self._params.trigger).total_seconds()
            return True
        return False

    def stop(self) -> None:
        """Stop the query."""
        if self._query is not None:
            self._query.stop()


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the queries of all outputs to their ends; report the records, bins and requests of each output.

    Raises:
        NotReady: the source doesn't exist.
        WrongUse: an expression can't be resolved, or a checkpoint belongs to another query.
        JobFailed: an output didn't take its records; the other outputs have theirs.
    """
    own = [*DEAD_LETTER_COLUMNS, _KEY, _AT, _OUTPUT, _RECORD, *params.value_columns()]
    empty = empty_source(spark, params.source, own)
    judged = params.judged(empty)
    with resolved():
        params.deliverable(judged)
    records = judged.where(F.col(ERROR_CLASS).isNotNull()).select(f"{_RECORD}.*", ERROR_CLASS, ERROR_MESSAGE)
    params.create_dead_letter_table(spark, records, empty.columns)
    queries = [OutputQuery(spark, params, output) for output in params.outputs]
    failures: dict[str, Exception] = {}
    running = list(queries)
    with end_requested() as stopped:
        try:
            while running and not stopped.is_set():
                for query in list(running):
                    try:
                        goes_on = query.is_running()
                    except Undelivered as failure:
                        failures[f"output {query.output.name}"] = failure
                        goes_on = False
                    if not goes_on:
                        running.remove(query)
                stopped.wait(_LOOK_SECONDS)
        finally:
            for query in running:
                query.stop()
    if running and params.trigger is None:
        raise KeyboardInterrupt
    require_no_failures(failures, "the other outputs have all their records")
    return {
        "outputs": {
            query.output.name: {
                "records": query.writer.records,
                "bins": query.writer.bins,
                "requests": query.writer.requests,
            }
            for query in queries
        },
        "dead": sum(query.writer.dead for query in queries),
    }


if __name__ == "__main__":
    run_job(Parameters, run)
