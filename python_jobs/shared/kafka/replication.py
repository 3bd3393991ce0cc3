"""Replication of a topic record for record: the clients, the loop and the transactions of programs that copy a topic.

The Passthrough Replicator uses this module unchanged; the Transactional Writer changes each record's value, the Local
Aggregator's reorganisation its partition. The docstrings of these programs state their guarantees.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse, present
from python_jobs.shared.core.signals import end_requested
from python_jobs.shared.kafka.clients import (
    ANSWER_SECONDS,
    WatchedTopic,
    client_settings,
    offset_range,
    partition_count,
    passes,
    place_header,
    positions_of_topic,
    seek_surviving,
    surviving_offset,
    topic_setting,
)
from python_jobs.shared.kafka.settings import refuse_secrets

_COMMIT_SECONDS = 30
_POLL_SECONDS = 0.2
_BROKER_AWAY_SECONDS = 60
_BATCH = 1_000
_TOPICS_SECONDS = 30


@dataclass(frozen=True)
class Parameters:
    """Copy a Kafka topic into another one, record for record."""

    source_topic: str
    """Topic to copy."""
    source_bootstrap_servers: str
    """Brokers of the source's cluster, host:port,…."""
    target_topic: str
    """Topic that becomes a replica; it must exist, and no other program may write to it."""
    target_bootstrap_servers: str
    """Brokers of the target's cluster, host:port,…."""
    source_settings: dict[str, str] = field(default_factory=dict)
    """Settings of the source's client (librdkafka's names); a secret as ${env:NAME}."""
    target_settings: dict[str, str] = field(default_factory=dict)
    """Settings of the target's clients."""
    until_end: bool = False
    """Whether to stop at the source's end as of the start; by default the program runs until SIGTERM or SIGINT."""
    position_header: str | None = "replicated_from"
    """Header that holds topic/partition/offset of the source; null leaves the headers unchanged."""
    commit_seconds: float = 1.0
    """Time for which a transaction stays open, in seconds; at most 300."""
    fail_on_data_loss: bool = True
    """Whether to stop when the next records are gone from the source (expired, or the topic was recreated)."""
    start_over: bool = False
    """Whether to copy from the first record if the target holds records but no position is known."""

    def __post_init__(self) -> None:
        refuse_secrets(self.source_settings)
        refuse_secrets(self.target_settings)
        if not 0 < self.commit_seconds <= 300:
            raise WrongUse(f"commit_seconds must be above 0 and at most 300, got {self.commit_seconds}")
        if (self.source_topic, self.source_bootstrap_servers) == (
            self.target_topic,
            self.target_bootstrap_servers,
        ):
            raise WrongUse(
                f"{self.source_topic} can't be its own replica: name another target_topic or cluster"
            )


class Replicator:
    """One run of a replication: the clients of both clusters and the position in each partition."""

    role = "passthrough_replicator"
    """The prefix of the group's and the transactions' names."""

    def __init__(self, parameters: Parameters) -> None:
        """Check both topics and find the position of each partition.

        Raises:
            NotReady: no broker answers, or a topic doesn't exist.
            WrongUse: the target can't be a replica.
            DataRefused: the next records are gone, the source was recreated, or the target holds records but no
                position is known.
        """
        self.parameters = parameters
        name = f"{self.role}.{parameters.source_topic}"
        source = client_settings(parameters.source_bootstrap_servers, parameters.source_settings)
        target = client_settings(parameters.target_bootstrap_servers, parameters.target_settings)
        self._partitions = partition_count(source, parameters.source_topic)
        self._check_target(target, partition_count(target, parameters.target_topic))
        with _one_sentence(parameters):
            self._source = WatchedTopic(
                source,
                parameters.source_topic,
                "copy the new topic behind the old one's records with --fail_on_data_loss false",
            )

        self._consumer = Consumer(
            source
            | {
                "group.id": name,
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
            }
        )
        self._producer = Producer(
            target
            | {
                "transactional.id": f"{name}.{parameters.target_topic}",
                "transaction.timeout.ms": int((parameters.commit_seconds + _BROKER_AWAY_SECONDS) * 1000),
                "linger.ms": 5,
                # The target topic's max.message.bytes decides, not the client.
                "message.max.bytes": 100_000_000,
            }
            | self.producer_settings()
        )
        # This consumer reads the position that is committed with the records.
        self._positions = Consumer(
            target
            | {
                "group.id": name,
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
            }
        )
        self._failure: KafkaError | None = None
        self._open = False
        self._records = 0
        self._bytes = 0
        with _one_sentence(parameters):
            # This call fences off a predecessor and ends its transaction, so that the position read next is final.
            self._producer.init_transactions(ANSWER_SECONDS)
            self._next: dict[int, int] = {}
            self._start()

    def run(self, stopped: threading.Event) -> dict[str, Any]:
        """Copy until ``stopped`` is set, or until the end; return the numbers of records and bytes."""
        topic = self.parameters.source_topic
        with _one_sentence(self.parameters):
            pending = (
                self._ends() if self.parameters.until_end else dict.fromkeys(range(self._partitions), None)
            )
            self._consumer.assign([TopicPartition(topic, p, offset) for p, offset in self._next.items()])
            committed_at = looked_at = time.monotonic()
            while pending and not stopped.is_set():
                messages = self._consumer.consume(_BATCH, _POLL_SECONDS)
                for message in messages:
                    partition = present(message.partition(), "the partition of a Kafka record")
                    error = message.error()
                    if error is None:
                        self._forward(message, partition)
                    at_end = error is not None and self._is_end(error, partition)
                    end = pending.get(partition)
                    if end is not None and (at_end or self._next[partition] >= end):
                        del pending[partition]
                self._producer.poll(0)
                now = time.monotonic()
                if self._open and (not messages or now - committed_at >= self.parameters.commit_seconds):
                    self._commit()
                    committed_at = now
                if now - looked_at >= _TOPICS_SECONDS:
                    self._refuse_more_partitions()
                    looked_at = now
            if self._open:
                self._commit()
        return {"records": self._records, "bytes": self._bytes, "next_offsets": self._next}

    def value(self, message: Message) -> bytes | None:
        """Return the value of a record in the target."""
        return message.value()

    def partition(self, partition: int) -> int:
        """Return the target's partition for a record of the source's ``partition``."""
        return partition

    def producer_settings(self) -> dict[str, Any]:
        """Return further settings of the target's producer."""
        return {}

    def close(self) -> None:
        """Abort an open transaction and close all clients."""
        if self._open:
            with suppress(KafkaException):
                self._producer.abort_transaction(_POLL_SECONDS)
        self._consumer.close()
        self._positions.close()

    def _check_target(self, client: Mapping[str, Any], partitions: int) -> None:
        topic = self.parameters.target_topic
        if partitions < self._partitions:
            raise WrongUse(
                f"target topic {topic} has {partitions} partitions, source topic {self.parameters.source_topic} "
                f"has {self._partitions}: each record keeps its partition, so add the missing ones"
            )
        if (kind := topic_setting(client, topic, "message.timestamp.type")) != "CreateTime":
            raise WrongUse(
                f"target topic {topic} has message.timestamp.type={kind}, which replaces the records' "
                "timestamps: set it to CreateTime"
            )

    def _start(self) -> None:
        """Find the offset at which each partition continues."""
        topic, target = self.parameters.source_topic, self.parameters.target_topic
        committed = positions_of_topic(
            self._positions, target, range(self._partitions), self._source, self.parameters.fail_on_data_loss
        )
        for partition in range(self._partitions):
            position = committed.get(partition)
            if position is None:
                is_new = partition not in committed and not self.parameters.start_over
                if is_new and self._has_records(TopicPartition(target, partition)):
                    raise DataRefused(
                        f"target {target}/{partition} holds records and no position is known (it expired, or "
                        "another program wrote the records): copy all again with start_over, or use an empty topic"
                    )
                self._next[partition], _ = offset_range(self._consumer, TopicPartition(topic, partition))
            else:
                self._next[partition] = position
                self._next[partition] = self._surviving(partition)

    def _has_records(self, partition: TopicPartition) -> bool:
        """Return whether a partition of the target holds a record of a committed transaction."""
        partition.offset = OFFSET_BEGINNING
        self._positions.assign([partition])
        message = self._positions.poll(ANSWER_SECONDS)
        self._positions.unassign()
        if message is None:
            raise NotReady(
                f"{partition.topic}/{partition.partition} could not be read within {ANSWER_SECONDS} s; run again"
            )
        return message.error() is None

    def _ends(self) -> dict[int, int | None]:
        """Return the current end of each partition that hasn't reached its end."""
        ends: dict[int, int | None] = {}
        for partition, position in self._next.items():
            _, high = offset_range(self._consumer, TopicPartition(self.parameters.source_topic, partition))
            if position < high:
                ends[partition] = high
        return ends

    def _is_end(self, error: KafkaError, partition: int) -> bool:
        """Return whether an error in place of a record means that the partition's end is reached."""
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            self._find_position(partition)
        elif error.code() != KafkaError._PARTITION_EOF and not passes(error):
            raise KafkaException(error)
        return error.code() == KafkaError._PARTITION_EOF

    def _find_position(self, partition: int) -> None:
        position = TopicPartition(self.parameters.source_topic, partition, self._next[partition])
        self._next[partition] = seek_surviving(self._consumer, position, self.parameters.fail_on_data_loss)

    def _surviving(self, partition: int) -> int:
        """Return the offset at which a partition continues, after a loss only if a loss is allowed."""
        position = TopicPartition(self.parameters.source_topic, partition, self._next[partition])
        return surviving_offset(self._consumer, position, self.parameters.fail_on_data_loss)

    def _forward(self, message: Message, partition: int) -> None:
        value = self.value(message)
        if not self._open:
            self._producer.begin_transaction()
            self._open = True
        offset = present(message.offset(), "the offset of a Kafka record")
        headers: list[Any] = list(message.headers() or [])
        if self.parameters.position_header is not None:
            headers.append(place_header(self.parameters.position_header, message))
        while True:
            try:
                self._producer.produce(
                    self.parameters.target_topic,
                    value,
                    message.key(),
                    self.partition(partition),
                    self._delivered,
                    timestamp=message.timestamp()[1],
                    headers=headers,
                )
                break
            except BufferError:  # the queue is full: wait for deliveries
                self._producer.poll(_POLL_SECONDS)
        self._next[partition] = offset + 1
        self._records += 1
        self._bytes += len(value or b"") + len(message.key() or b"")

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        self._failure = self._failure or error

    def _commit(self) -> None:
        """Commit the records and the position after them in one transaction.

        Raises:
            DataRefused: the source was recreated; the records of the transaction may be of either topic.
        """
        self._source.require_unchanged()
        with _within(_COMMIT_SECONDS):
            self._producer.send_offsets_to_transaction(
                [
                    self._source.position(self.parameters.target_topic, p, offset)
                    for p, offset in self._next.items()
                ],
                self._positions.consumer_group_metadata(),
                _COMMIT_SECONDS,
            )
            self._producer.commit_transaction(_COMMIT_SECONDS)
        if self._failure is not None:
            raise KafkaException(self._failure)
        self._open = False

    def _refuse_more_partitions(self) -> None:
        topic = self.parameters.source_topic
        with suppress(KafkaException):  # the clients handle a broker that is down
            found = len(self._consumer.list_topics(topic, ANSWER_SECONDS).topics[topic].partitions)
            if found > self._partitions:
                raise JobFailed(
                    f"source topic {topic} has {found} partitions now, and {self._partitions} are replicated: "
                    "add partitions to the target and run again, nothing is lost"
                )


def run_until_stopped(replicator: Replicator) -> dict[str, Any]:
    """Run until SIGTERM or SIGINT, or until the end; return the numbers of records and bytes."""
    with closing(replicator), end_requested() as stopped:
        return replicator.run(stopped)


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """End the process if the block takes longer: librdkafka may wait for ever after a restart of the broker.

    This has the same effect as a kill: the next run continues where the last transaction ended.
    """

    def give_up() -> None:
        print(
            f"JobFailed: the target's cluster didn't answer a transaction for {seconds:.0f} s: run again, "
            "replication continues where its last transaction ended",
            file=sys.stderr,
            flush=True,
        )
        os._exit(JobFailed.exit_code)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _one_sentence(parameters: Parameters) -> Iterator[None]:
    """Turn a Kafka error into one sentence; all records up to the last committed transaction are replicated."""
    try:
        yield
    except KafkaException as failure:
        error = failure.args[0]
        if error.code() in (
            KafkaError._FENCED,
            KafkaError.INVALID_PRODUCER_EPOCH,
            KafkaError.PRODUCER_FENCED,
        ):
            raise JobFailed(
                f"another replicator from {parameters.source_topic} to {parameters.target_topic} claimed the target "
                "topic"
            ) from None
        raise JobFailed(
            f"replication from {parameters.source_topic} to {parameters.target_topic} ended "
            f"({error.name()}: {error.str()}): run again, it continues where its last transaction ended"
        ) from None
