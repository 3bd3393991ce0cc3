"""FIFO Orderer: forward the records of interest from a Kafka topic to another one, in the order in which they arrive.

Problem: another system needs particular events (logins, orders) at once and in their order. A producer that doesn't
wait for acknowledgements loses a record whose request fails, or sends it again behind the next ones.

    python -m python_jobs.data_value.fifo_orderer_kafka --interest logins.yml \\
        --source_topic visits --source_bootstrap_servers localhost:9092 \\
        --target_topic logins --target_bootstrap_servers localhost:9092

A record is of interest if its value fits the JSON Schema ``--interest``. It is forwarded unchanged, with one more
header that holds its place in the source (``topic/partition/offset``). Variants:

* ``one_request`` (default): a record is sent when the one before is acknowledged and its position is stored.
* ``one_in_flight``: records are collected for ``linger.ms`` (1 s), one request at a time.
* ``idempotent``: up to five requests at a time, whose order the brokers check by sequence numbers; ``linger.ms`` is 2
  s.

The last two trade latency for fewer requests. Settings with which records could change their order are refused.

Guarantee: the records of an ordering scope (a key) arrive in the order in which they were read; event times play no
role. With ``--workers`` above 1, a scope always has the same worker, and a slow worker doesn't delay the others until
1,000 records wait for it. A record that isn't acknowledged after ``--attempts`` tries (``one_request``), or within
``--total_seconds``, ends the program with exit code 1: its scope's next records are not sent, and the next run begins
with it. SIGTERM and SIGINT end the program when all that was read is acknowledged. The source's offsets are the
group's progress, and are committed behind the acknowledgement. Several processes share the partitions of the source.

Delivery is at least once. A crash between a record's acknowledgement and the commit of its position sends it again:
with ``one_request`` and one worker this one record, else all records since the last commit (1 s), and those of other
workers behind the oldest one that was on its way. A consumer that keeps the highest offset of each key, or a table
whose key is the header, drops what comes again.

Not guaranteed: with ``one_in_flight``, a record that the broker refuses for good (too large) may be passed by records
of a request that followed at once, before the program ends; the other variants stop before. The order of records of
one key in several partitions of the source, or across a change of the target's number of partitions.

Source: Data Engineering Design Patterns, chapter 5, FIFO Orderer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from python_jobs.data_value.ordering_scopes import Found, Positions, Variant, lane, lane_of, ordered_settings
from python_jobs.shared.core.command_line import run_program
from python_jobs.shared.core.failures import (
    DataRefused,
    JobFailed,
    WrongUse,
    present,
    require_above_zero,
    require_at_least,
)
from python_jobs.shared.core.json_schemas import schema_validator
from python_jobs.shared.core.json_values import read_value
from python_jobs.shared.core.retry import RetryPolicy
from python_jobs.shared.core.signals import end_requested
from python_jobs.shared.kafka.clients import (
    WatchedTopic,
    client_settings,
    offset_range,
    partition_count,
    passes,
    patiently,
    place_header,
    positions_of_topic,
    seek_surviving,
    surviving_offset,
)
from python_jobs.shared.kafka.partitions import partition_of
from python_jobs.shared.kafka.producers import Outgoing
from python_jobs.shared.kafka.settings import refuse_secrets

ROLE = "fifo_orderer"
_POLL_SECONDS = 0.1
_COMMIT_SECONDS = 1.0
_MAX_REQUEST_BYTES = 100_000_000  # the target topic's max.message.bytes decides, not the client


@dataclass(frozen=True)
class Parameters:
    """Forward the records of interest of a Kafka topic to another topic, in the order in which they arrive."""

    source_topic: str
    """Topic to read."""
    source_bootstrap_servers: str
    """Brokers of the source's cluster, host:port,…."""
    target_topic: str
    """Topic to forward to; it must exist."""
    target_bootstrap_servers: str
    """Brokers of the target's cluster, host:port,…."""
    interest: str
    """File with the JSON Schema (JSON or YAML) that the value of a record of interest fits."""
    unreadable: Literal["refuse", "skip"] = "refuse"
    """What happens to a value that is no JSON: ``refuse`` ends the program (exit code 3), ``skip`` counts it."""
    variant: Variant = "one_request"
    """``one_request`` (default), ``one_in_flight`` or ``idempotent``."""
    workers: int = 1
    """Number of producers; each has its own keys."""
    attempts: int = 5
    """Maximum number of tries of one record, of ``one_request`` alone."""
    wait_seconds: float = 1
    """Longest pause before the second try, in seconds; it doubles before each further try, up to a minute."""
    attempt_seconds: float = 30
    """Time in seconds in which one try must be acknowledged."""
    total_seconds: float = 300
    """Time in seconds in which a record must be acknowledged."""
    source_settings: dict[str, str] = field(default_factory=dict)
    """Settings of the source's client (librdkafka's names); a secret as ${env:NAME}."""
    target_settings: dict[str, str] = field(default_factory=dict)
    """Settings of the target's producers, such as linger.ms."""
    until_end: bool = False
    """Whether to stop at the source's end as of the start; by default the program runs until SIGTERM or SIGINT."""
    position_header: str = "forwarded_from"
    """Header that holds topic/partition/offset of the source."""
    fail_on_data_loss: bool = True
    """Whether to stop when the next records are gone from the source (expired, or the topic was recreated)."""

    def __post_init__(self) -> None:
        refuse_secrets(self.source_settings)
        refuse_secrets(self.target_settings)
        require_at_least(1, workers=self.workers)
        require_above_zero(attempt_seconds=self.attempt_seconds, total_seconds=self.total_seconds)
        source, target = self.source_bootstrap_servers, self.target_bootstrap_servers
        if (self.source_topic, source) == (self.target_topic, target):
            raise WrongUse(f"{self.source_topic} would forward to itself: name another target_topic")
        self.policy()
        ordered_settings(self.variant, self.target_settings)
        self.is_of_interest()

    def policy(self) -> RetryPolicy:
        """Return the bounds of one record's tries."""
        return RetryPolicy(
            attempts=self.attempts,
            base_seconds=self.wait_seconds,
            attempt_seconds=self.attempt_seconds,
            total_seconds=self.total_seconds,
        )

    def is_of_interest(self) -> Callable[[Any], bool]:
        """Return the condition on a record's JSON value.

        Raises:
            WrongUse: the file is no JSON Schema.
        """
        return schema_validator(self.interest).is_valid


class Forwarder:
    """One run of the program: the source's consumer and the lanes to the target."""

    def __init__(self, parameters: Parameters) -> None:
        """Check both topics and start the lanes.

        Raises:
            NotReady: no broker answers, or a topic doesn't exist.
            WrongUse: a setting is wrong.
        """
        self.parameters = parameters
        source = client_settings(parameters.source_bootstrap_servers, parameters.source_settings)
        target = client_settings(parameters.target_bootstrap_servers, parameters.target_settings)
        self._is_of_interest = parameters.is_of_interest()
        partition_count(source, parameters.source_topic)
        self._target_partitions = partition_count(target, parameters.target_topic)
        self._source = WatchedTopic(
            source, parameters.source_topic, "forward the new topic's records with --fail_on_data_loss false"
        )
        self._consumer = Consumer(
            {"session.timeout.ms": 10_000}
            | source
            | {
                "group.id": f"{ROLE}.{parameters.source_topic}.{parameters.target_topic}",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                # A lane that is full may hold up the reading for this long.
                "max.poll.interval.ms": int((parameters.total_seconds + 60) * 1000),
            }
        )
        self._positions = Positions()
        self._counting = threading.Lock()
        self._pending: dict[int, int] | None = None
        self._failed = threading.Event()
        self._failure = ""
        self._read = self._forwarded = self._unreadable = 0
        settings = ordered_settings(parameters.variant, client_settings("", parameters.target_settings))
        settings |= {"bootstrap.servers": target["bootstrap.servers"], "log_level": "0"}
        settings = {
            "message.max.bytes": str(_MAX_REQUEST_BYTES),
            "reconnect.backoff.max.ms": "1000",
        } | settings
        # Commits of another thread may wait for this one during a rebalance, so only this one commits.
        self._commits_each = parameters.variant == "one_request" and parameters.workers == 1
        self._lanes = [
            lane(parameters.variant, settings, parameters.policy(), self._done, self._undelivered)
            for _ in range(parameters.workers)
        ]

    def run(self, stopped: threading.Event) -> dict[str, Any]:
        """Forward until ``stopped`` is set, or until the end; return the numbers of records.

        Raises:
            JobFailed: a record was not acknowledged, or another process claimed a partition.
            DataRefused: a value is no JSON, or the next records are gone.
        """
        try:
            self._forward_until(stopped)
        except KafkaException as failure:
            error = failure.args[0]
            raise JobFailed(
                f"forwarding from {self.parameters.source_topic} to {self.parameters.target_topic} ended "
                f"({error.name()}: {error.str()}): run again, it continues at the first record that isn't acknowledged"
            ) from None
        return {
            "records": self._read,
            "forwarded": self._forwarded,
            "unreadable": self._unreadable,
            "next_offsets": self._positions.next(),
        }

    def close(self) -> None:
        """Give up what isn't acknowledged and leave the group."""
        for each in self._lanes:
            each.close()
        self._failed.set()  # so that leaving the group waits for nothing
        self._consumer.close()

    def _forward_until(self, stopped: threading.Event) -> None:
        self._consumer.subscribe(
            [self.parameters.source_topic],
            on_assign=self._assigned,
            on_revoke=self._revoked,
            on_lost=self._lost,
        )
        looked_at = time.monotonic()
        while not (stopped.is_set() or self._failed.is_set() or self._pending == {}):
            message = self._consumer.poll(_POLL_SECONDS)
            if message is not None:
                self._take(message)
            for each in self._lanes:
                each.check()
            if time.monotonic() - looked_at >= _COMMIT_SECONDS:
                self._source.require_unchanged()
                self._commit()
                looked_at = time.monotonic()
        self._drain()
        if self._failed.is_set():
            with suppress(KafkaException):  # what isn't stored is sent again; the failure counts
                self._commit()
            raise JobFailed(self._failure)
        self._source.require_unchanged()
        self._commit()

    def _take(self, message: Message) -> None:
        partition = present(message.partition(), "the partition of a Kafka record")
        error = message.error()
        if error is not None:
            self._take_error(error, partition)
            return
        offset = present(message.offset(), "the offset of a Kafka record")
        is_of_interest = self._judge(message)
        self._positions.read(partition, offset, is_of_interest)
        self._read += 1
        if is_of_interest:
            self._offer(Found(partition, offset, self._outgoing(message)))
            if self._commits_each:
                self._drain()
                self._commit()
        self._reached(partition, offset + 1)

    def _judge(self, message: Message) -> bool:
        """Return whether a record is of interest; one without a value isn't."""
        value = message.value()
        if value is None:
            return False
        try:
            return self._is_of_interest(read_value(value))
        except (ValueError, RecursionError):
            if self.parameters.unreadable == "refuse":
                self._drain()
                self._commit()
                raise DataRefused(
                    f"{message.topic()}/{message.partition()} offset {message.offset()} is no JSON: the records "
                    "before it were forwarded; go on without such records with --unreadable skip"
                ) from None
            self._unreadable += 1
            return False

    def _outgoing(self, message: Message) -> Outgoing:
        key = message.key()
        headers: list[Any] = [
            *(message.headers() or []),
            place_header(self.parameters.position_header, message),
        ]
        partition = partition_of(key, self._target_partitions)
        return Outgoing(self.parameters.target_topic, message.value(), key, headers, partition)

    def _offer(self, found: Found) -> None:
        of_scope = self._lanes[lane_of(found.record.key, len(self._lanes))]
        while not (self._failed.is_set() or of_scope.offer(found, _POLL_SECONDS)):
            of_scope.check()

    def _take_error(self, error: KafkaError, partition: int) -> None:
        if error.code() == KafkaError._PARTITION_EOF:
            if self._pending is not None:
                self._pending.pop(partition, None)
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            self._source.require_unchanged()
            position = TopicPartition(
                self.parameters.source_topic, partition, self._positions.next()[partition]
            )
            offset = seek_surviving(self._consumer, position, self.parameters.fail_on_data_loss)
            self._positions.start(partition, offset, None)
        elif not passes(error):
            raise KafkaException(error)

    def _reached(self, partition: int, offset: int) -> None:
        if self._pending is not None and offset >= self._pending.get(partition, offset + 1):
            del self._pending[partition]

    # --- the partitions of this process -------------------------------------------------------------------

    def _assigned(self, consumer: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """Begin each partition at the group's position, or at its first record."""
        self._source.require_unchanged()
        topic, loss = self.parameters.source_topic, self.parameters.fail_on_data_loss
        numbers = [found.partition for found in partitions]
        known = positions_of_topic(consumer, topic, numbers, self._source, loss)
        ends = {}
        starts = []
        for number in numbers:
            low, high = offset_range(consumer, TopicPartition(topic, number))
            stored = known.get(number)
            position = TopicPartition(topic, number, low if stored is None else stored)
            offset = patiently(lambda position=position: surviving_offset(consumer, position, loss))  # type: ignore[misc]
            self._positions.start(number, offset, stored)
            starts.append(TopicPartition(topic, number, offset))
            if offset < high:
                ends[number] = high
        consumer.assign(starts)
        if self.parameters.until_end and (numbers or self._pending is None):
            self._pending = ends

    def _revoked(self, consumer: Consumer, partitions: Sequence[TopicPartition]) -> None:
        """Finish what was read before another process gets the partitions."""
        self._drain()
        with suppress(KafkaException):  # what isn't stored is sent again
            self._commit()
        self._positions.clear()
        consumer.unassign()

    def _lost(self, consumer: Consumer, partitions: Sequence[TopicPartition]) -> None:
        raise JobFailed(
            f"another process claimed partitions of {self.parameters.source_topic}, because this one didn't answer "
            "in time: run again"
        )

    # --- progress -----------------------------------------------------------------------------------------

    def _drain(self) -> None:
        for each in self._lanes:
            if not self._failed.is_set():
                each.drain()

    def _done(self, found: Found) -> None:
        self._positions.done(found.partition, found.offset)
        with self._counting:
            self._forwarded += 1

    def _commit(self) -> None:
        moved = self._positions.moved()
        if moved:
            topic = self.parameters.source_topic
            offsets = [self._source.position(topic, number, offset) for number, offset in moved.items()]
            patiently(lambda: _committed(self._consumer, offsets))
            self._positions.stored(moved)

    def _undelivered(self, found: Found, reason: str) -> None:
        if not self._failed.is_set():
            self._failure = (
                f"{self.parameters.source_topic}/{found.partition} offset {found.offset} was not delivered to "
                f"{self.parameters.target_topic} ({reason}); the records behind it wait: run again, forwarding "
                "continues with it"
            )
            self._failed.set()


def _committed(consumer: Consumer, offsets: list[TopicPartition]) -> None:
    for answer in consumer.commit(offsets=offsets, asynchronous=False) or ():
        if answer.error is not None:
            raise KafkaException(answer.error)


def run(parameters: Parameters) -> dict[str, Any]:
    """Forward until SIGTERM or SIGINT, or until the end; return the numbers of records."""
    with closing(Forwarder(parameters)) as forwarder, end_requested() as stopped:
        return forwarder.run(stopped)


if __name__ == "__main__":
    run_program(Parameters, run)
