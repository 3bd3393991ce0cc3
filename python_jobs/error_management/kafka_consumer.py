"""Checkpointer, plain Kafka consumer: read a topic and commit the position before, after or with the processing.

The order decides the effect of a crash on the records read since the last commit:

* ``at_least_once``: processed, then committed; the records are processed twice;
* ``at_most_once``: committed, then processed; records that weren't processed yet are lost;
* ``exactly_once``: the write of the records commits the position. Each partition's records are one Delta commit whose
  ``txnVersion`` is the next offset to read, under a ``txnAppId`` of group, partition and topic id. A restart continues
  after the table's last record, independent of the group's offsets in Kafka.

A position is the *next* offset of one partition; each partition has its own. Nothing is committed in the background.
Records that expired before they were read end the program (exit code 3) unless ``--fail_on_data_loss false``. A topic
that was deleted and recreated counts its offsets from 0 again: each position is kept with the topic's id, and the id is
compared at the start and before each commit. A recreated topic ends the program in the same way; with
``--fail_on_data_loss false`` the next start reads the new topic from its first record.

Guarantee: after a crash at most ``--commit_every`` records are repeated or lost. One process reads a group at a time:
partitions are assigned, not balanced. In ``exactly_once`` a second process ends when it notices the first process's
commits.

Cost: one commit for each ``--commit_every`` records or ``--commit_seconds``, in ``exactly_once`` one for each
partition; small commits make small files (Compactor). For a stream of any size use Structured Streaming, whose
checkpoint does the same (``checkpointer.py``). Use this program if each record has an effect outside of a table, or if
one small process is enough::

    spark-submit python_jobs/error_management/kafka_consumer.py --bootstrap_servers localhost:9092 --topic visits \\
        --group visits_to_bronze --target lakehouse/bronze/bronze_visits_records --delivery exactly_once

Source: Data Engineering Design Patterns, chapter 3, Checkpointer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import (
    JobFailed,
    WrongUse,
    present,
    require_above_zero,
    require_at_least,
)
from python_jobs.shared.core.intervals import from_micros, to_micros
from python_jobs.shared.core.signals import end_requested
from python_jobs.shared.delta.commits import (
    find_commit,
    latest_version,
    transaction_version,
    transaction_versions,
    write_once,
)
from python_jobs.shared.delta.tables import table_exists
from python_jobs.shared.kafka.bronze_records import bronze_rows
from python_jobs.shared.kafka.clients import (
    WatchedTopic,
    client_settings,
    offset_range,
    partition_count,
    passes,
    patiently,
    positions_of_topic,
    surviving_offset,
)
from python_jobs.shared.kafka.settings import refuse_secrets
from python_jobs.shared.kafka.topic_ids import known_ids, with_topic_ids
from python_jobs.shared.spark.job import run_job

Delivery = Literal["at_least_once", "at_most_once", "exactly_once"]
Process = Callable[[Sequence[Message]], None]
Positions = Callable[[Sequence[int]], Mapping[int, int]]
"""Function from partitions to the next offset of each partition that has one."""
_WAY_OUT = "read the new topic from its first record with --fail_on_data_loss false"

_POLL_SECONDS = 0.2
_RECORD_TYPES = (
    "value binary, key binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key: string, value: binary>>"
)


@dataclass(frozen=True, kw_only=True)
class Subscription:
    """A topic that a group reads, with the frequency of the commits of its position."""

    bootstrap_servers: str
    """Kafka brokers, host:port,host:port."""
    topic: str
    """Topic to read; it must exist."""
    group: str
    """Consumer group whose position is kept: one for each program, kept as long as its output."""
    commit_every: int = 1000
    """Largest number of records between two commits: records processed twice or lost after a crash."""
    commit_seconds: float = 5
    """Largest time in seconds that records wait for more records before they are processed."""
    until_end: bool = False
    """Stop at the topic's end as of the start; by default run until SIGTERM or SIGINT."""
    fail_on_data_loss: bool = True
    """Whether records that are gone before they were read end the program; false continues without them."""
    settings: dict[str, str] = field(default_factory=dict)
    """Further settings of Kafka's client (librdkafka's names); a secret as ${env:NAME}."""

    def __post_init__(self) -> None:
        refuse_secrets(self.settings)
        require_at_least(1, commit_every=self.commit_every)
        require_above_zero(commit_seconds=self.commit_seconds)


@dataclass(frozen=True, kw_only=True)
class Parameters(Subscription, ProcessingTimeParameters):
    """Append a topic's records to a Delta table; the position is committed before, after or with them."""

    target: str
    """Delta table (name or path) of the records; made if absent."""
    delivery: Delivery = "exactly_once"
    """Effect of a crash: records are repeated (at_least_once), lost (at_most_once), or neither (exactly_once)."""
    generation: int = 0
    """Number for exactly_once; raise it by one after a rewind to ignore the table's position of the last generation."""

    def __post_init__(self) -> None:
        Subscription.__post_init__(self)
        ProcessingTimeParameters.__post_init__(self)
        require_at_least(0, generation=self.generation)


class CheckpointedConsumer:
    """One run of the consumer, with the position of each partition.

    Args:
        source: Topic and group to read.
        delivery: Order of processing and commit. With ``exactly_once`` the caller commits in ``process`` and returns
            its positions by ``positions``; the group's offsets in Kafka only follow.
        process: Function that is called with the records of one or more partitions, each partition's in order.
        positions: Function that returns positions with precedence over the group's offsets.

    Raises:
        NotReady: no broker answers, or the topic doesn't exist.
        DataRefused: the next records have expired, or the topic was recreated.
    """

    def __init__(
        self, source: Subscription, delivery: Delivery, process: Process, positions: Positions | None = None
    ) -> None:
        if delivery not in get_args(Delivery):
            raise WrongUse(f"delivery must be one of {', '.join(get_args(Delivery))}, got '{delivery}'")
        if (delivery == "exactly_once") != (positions is not None):
            raise WrongUse("exactly_once, and no other delivery, needs positions that are kept with the data")
        self.source, self._delivery, self._process = source, delivery, process
        client = client_settings(source.bootstrap_servers, source.settings)
        partitions = list(range(partition_count(client, source.topic)))
        with _one_sentence(source):
            self._topic = WatchedTopic(client, source.topic, _WAY_OUT)
        self._consumer = Consumer(
            client
            | {
                "group.id": source.group,
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
            }
        )
        self.records = self.commits = 0
        self.next_offsets: dict[int, int] = {}
        self._ends: dict[int, int | None] = {}
        with _one_sentence(source):
            known = positions_of_topic(
                self._consumer, source.topic, partitions, self._topic, source.fail_on_data_loss
            )
            known |= positions(partitions) if positions is not None else {}
            for partition in partitions:
                self._begin(partition, known.get(partition))

    def _begin(self, partition: int, position: int | None) -> None:
        """Set a partition's position and end; a partition without a position begins with its first record."""
        at = TopicPartition(self.source.topic, partition)
        low, high = offset_range(self._consumer, at)
        at.offset = low if position is None else position
        self.next_offsets[partition] = surviving_offset(self._consumer, at, self.source.fail_on_data_loss)
        if not self.source.until_end:
            self._ends[partition] = None
        elif self.next_offsets[partition] < high:
            self._ends[partition] = high

    def run(self, stopped: threading.Event) -> dict[str, Any]:
        """Read until ``stopped`` is set, or until the end; return the numbers."""
        topic = self.source.topic
        with _one_sentence(self.source):
            self._consumer.assign(
                [TopicPartition(topic, p, offset) for p, offset in self.next_offsets.items()]
            )
            while self._ends and not stopped.is_set():
                records = self._take(stopped)
                if not records:
                    continue
                self._topic.require_unchanged()
                reached = positions_behind(records)
                if self._delivery == "at_most_once":
                    self._commit(reached)
                self._process(records)
                if self._delivery != "at_most_once":
                    self._commit(reached)
                self.records += len(records)
                self.commits += 1
        return {"records": self.records, "commits": self.commits, "next_offsets": self.next_offsets}

    def close(self) -> None:
        """Leave the cluster; nothing is committed."""
        self._consumer.close()

    def _take(self, stopped: threading.Event) -> list[Message]:
        """Return the next records, at most ``commit_every`` or those that arrive within ``commit_seconds``."""
        records: list[Message] = []
        until = time.monotonic() + self.source.commit_seconds
        while (
            self._ends
            and len(records) < self.source.commit_every
            and time.monotonic() < until
            and not stopped.is_set()
        ):
            for message in self._consumer.consume(self.source.commit_every - len(records), _POLL_SECONDS):
                partition = present(message.partition(), "the partition of a Kafka record")
                error = message.error()
                if error is None:
                    records.append(message)
                    self.next_offsets[partition] = _after(message)
                at_end = error is not None and self._is_end(error, partition)
                end = self._ends.get(partition)
                if end is not None and (at_end or self.next_offsets[partition] >= end):
                    del self._ends[partition]
        return records

    def _is_end(self, error: KafkaError, partition: int) -> bool:
        """Return whether the error means that the partition's end is reached."""
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            position = TopicPartition(self.source.topic, partition, self.next_offsets[partition])
            position.offset = surviving_offset(self._consumer, position, self.source.fail_on_data_loss)
            self.next_offsets[partition] = position.offset
            self._consumer.seek(position)
        elif error.code() != KafkaError._PARTITION_EOF and not passes(error):
            raise KafkaException(error)
        return error.code() == KafkaError._PARTITION_EOF

    def _commit(self, reached: Mapping[int, int]) -> None:
        offsets = [self._topic.position(self.source.topic, p, offset) for p, offset in reached.items()]
        patiently(lambda: self._consumer.commit(offsets=offsets, asynchronous=False))


class TableSink:
    """A Delta table of the records; in ``exactly_once`` its commits also contain the next offset."""

    def __init__(self, spark: SparkSession, params: Parameters) -> None:
        self._spark, self._params = spark, params
        self._positions: dict[int, int] = {}

    @cached_property
    def _writer(self) -> str:
        """Whose positions these are, but for partition and topic."""
        return f"kafka_consumer/{self._params.group}/{self._params.generation}/"

    @cached_property
    def _topic_id(self) -> str:
        params = self._params
        source = WatchedTopic(
            client_settings(params.bootstrap_servers, params.settings), params.topic, _WAY_OUT
        )
        if params.fail_on_data_loss and table_exists(self._spark, params.target):
            source.require_known(
                known_ids(transaction_versions(self._spark, params.target), params.topic, self._writer)
            )
        return source.id

    def positions(self, partitions: Sequence[int]) -> dict[int, int]:
        """Return the next offset of each partition with records in the table.

        Raises:
            DataRefused: they are records of a topic that was deleted and recreated, and ``fail_on_data_loss`` is set.
        """
        if table_exists(self._spark, self._params.target):
            for partition in partitions:
                position = transaction_version(self._spark, self._params.target, self._app_id(partition))
                if position is not None:
                    self._positions[partition] = position
        return dict(self._positions)

    def append(self, records: Sequence[Message]) -> None:
        """Append the records in one commit."""
        write_once(self._spark, self._rows(records), self._params.target)

    def append_once(self, records: Sequence[Message]) -> None:
        """Append each partition's records in one commit that also contains the next offset.

        Raises:
            JobFailed: another process has written records of the partition, or the topic was recreated meanwhile.
        """
        before = dict(self._positions)
        for partition, position in positions_behind(records).items():
            rows = self._rows([record for record in records if record.partition() == partition])
            if self.positions([partition]).get(partition) != before.get(partition):
                raise JobFailed(
                    f"another process claimed {self._params.topic}/{partition} of group {self._params.group}"
                )
            transaction = (self._app_id(partition), position)
            written = write_once(self._spark, rows, self._params.target, transaction=transaction)
            if find_commit(self._spark, self._params.target, written) is None:
                raise JobFailed(
                    f"{self._params.target} already has records of {self._params.topic}/{partition} up to offset "
                    f"{position} or beyond (another process wrote them, or the topic was recreated); run again"
                )
            self._positions[partition] = position

    def _app_id(self, partition: int) -> str:
        return with_topic_ids(f"{self._writer}{partition}", {self._params.topic: self._topic_id})

    def _rows(self, records: Sequence[Message]) -> DataFrame:
        now = self._params.processing_time()
        rows = [
            (
                record.value(), record.key(), record.topic(), record.partition(), record.offset(),
                from_micros(record.timestamp()[1] * 1_000), list(record.headers() or []) or None,
            )
            for record in records
        ]  # fmt: skip
        # One file per commit: the records are few.
        return bronze_rows(self._spark.createDataFrame(rows, _RECORD_TYPES), to_micros(now), {}).coalesce(1)


def positions_behind(records: Sequence[Message]) -> dict[int, int]:
    """Return the next offset of each partition of ``records``, which are in order."""
    return {partition: _after(record) for record in records if (partition := record.partition()) is not None}


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Read until SIGTERM or SIGINT, or until the end, and report what was read.

    Raises:
        NotReady: no broker answers, or the topic isn't there.
        DataRefused: the next records have expired.
        JobFailed: Kafka ended the reading, or another process writes for the group.
    """
    sink = TableSink(spark, params)
    with_data = params.delivery == "exactly_once"
    process, positions = (sink.append_once, sink.positions) if with_data else (sink.append, None)
    delivering = CheckpointedConsumer(params, params.delivery, process, positions)
    with closing(delivering) as consumer, end_requested() as stopped:
        report = consumer.run(stopped)
    version = latest_version(spark, params.target) if table_exists(spark, params.target) else None
    return report | {"target": params.target, "table_version": version}


def _after(record: Message) -> int:
    return present(record.offset(), "the offset of a Kafka record") + 1


@contextmanager
def _one_sentence(source: Subscription) -> Iterator[None]:
    """Raise one sentence for an error that ends the reading; the position stays at the last commit."""
    try:
        yield
    except KafkaException as failure:
        error = failure.args[0]
        raise JobFailed(
            f"reading {source.topic} as {source.group} ended ({error.name()}: {error.str()}): run again, it continues "
            "at its last commit"
        ) from None


if __name__ == "__main__":
    run_job(Parameters, run)
