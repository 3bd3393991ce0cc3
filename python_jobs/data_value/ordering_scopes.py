"""Lanes of the FIFO Orderer: all records of one ordering scope take one lane, and leave it in their order.

A scope is a record's key, such as a user or a product. Each lane has a producer of its own, so a lane that waits for
the broker holds up no other. There are two kinds:

* :class:`OneAtATime`: the next record is sent when the one before is acknowledged.
* :class:`Pipelined`: several records are on their way; Kafka's client keeps their order, by one request at a time or
  by the sequence numbers of an idempotent producer.

A failure ends the lane: it sends no record that is behind.
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from confluent_kafka import KafkaError

from python_jobs.data_value.ordered_delivery import Courier, Refusal, Sink
from python_jobs.shared.core.failures import JobFailed, WrongUse
from python_jobs.shared.core.retry import Failure, RetryPolicy
from python_jobs.shared.kafka.producers import Outgoing, Sender, may_pass

Variant = Literal["one_request", "one_in_flight", "idempotent"]
WAITING_RECORDS = 1_000
"""Maximum number of records that wait in one lane or are on their way; then reading waits."""

IN_FLIGHT, IDEMPOTENCE = "max.in.flight.requests.per.connection", "enable.idempotence"
MAX_IN_FLIGHT = 5
"""Number of batches of one producer and partition whose order Kafka's brokers can check."""
_VARIANTS: dict[Variant, dict[str, str]] = {
    "one_request": {IDEMPOTENCE: "true", IN_FLIGHT: "1", "linger.ms": "0"},
    "one_in_flight": {IDEMPOTENCE: "false", IN_FLIGHT: "1", "linger.ms": "1000"},
    # Without gaps: an error of one record ends the producer instead of letting the next records pass.
    "idempotent": {
        IDEMPOTENCE: "true",
        IN_FLIGHT: "5",
        "linger.ms": "2000",
        "enable.gapless.guarantee": "true",
    },
}
_ALIASES = {
    "max.in.flight": IN_FLIGHT,
    "request.required.acks": "acks",
    "queue.buffering.max.ms": "linger.ms",
}
# A record that expires lets the next one pass; the lanes bound the time themselves.
_OWN = {"delivery.timeout.ms": "0", "acks": "all"}
_REFUSED = {"delivery.timeout.ms", "message.timeout.ms", "partitioner", "transactional.id"}


def ordered_settings(variant: Variant, settings: Mapping[str, str]) -> dict[str, str]:
    """Return a producer's settings that keep the order of its records: the variant's, changed by the user's.

    Raises:
        WrongUse: with these settings records could change their order or get lost.
    """
    given = {_ALIASES.get(name, name): value for name, value in settings.items()}
    if refused := sorted(_REFUSED & given.keys()):
        raise WrongUse(
            f"the setting {refused[0]} can't be given: records could get lost or change their order"
        )
    found = _VARIANTS[variant] | _OWN | given
    in_flight, is_idempotent = found[IN_FLIGHT], found[IDEMPOTENCE].lower() in ("true", "1")
    if not (in_flight.isdigit() and 1 <= int(in_flight) <= MAX_IN_FLIGHT):
        raise WrongUse(
            f"{IN_FLIGHT} must be 1 to {MAX_IN_FLIGHT}, got {in_flight}: Kafka keeps the order of no more requests"
        )
    if int(in_flight) > 1 and not is_idempotent:
        raise WrongUse(
            f"{IN_FLIGHT} is {in_flight} and {IDEMPOTENCE} is off: a request that is sent again would be behind the "
            f"next ones; set {IN_FLIGHT} to 1, or {IDEMPOTENCE} to true"
        )
    if found["acks"] not in ("all", "-1"):
        raise WrongUse(
            f"acks must be all, got {found['acks']}: an acknowledged record could get lost with its broker"
        )
    return found


class Found(NamedTuple):
    """A record of interest, with its place in the source."""

    partition: int
    offset: int
    record: Outgoing


def lane_of(key: bytes | None, lanes: int) -> int:
    """Return the lane of a key, always the same one; records without a key are one scope."""
    return zlib.crc32(key or b"") % lanes


class Positions:
    """The offset in each partition of the source up to which all is done; many threads may report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: dict[int, int] = {}
        self._open: dict[int, OrderedDict[int, None]] = {}
        self._stored: dict[int, int | None] = {}

    def start(self, partition: int, offset: int, stored: int | None) -> None:
        """Begin a partition at this offset; ``stored`` is the position that is already stored, if any."""
        with self._lock:
            self._next[partition], self._stored[partition] = offset, stored
            self._open[partition] = OrderedDict()

    def read(self, partition: int, offset: int, is_open: bool) -> None:
        """Take a record that was read; an open one holds the position until it is done."""
        with self._lock:
            self._next[partition] = offset + 1
            if is_open:
                self._open[partition][offset] = None

    def done(self, partition: int, offset: int) -> None:
        """Take that a record was acknowledged."""
        with self._lock:
            if partition in self._open:
                self._open[partition].pop(offset, None)

    def next(self) -> dict[int, int]:
        """Return the offset of the first record that isn't done in each partition."""
        with self._lock:
            return {p: next(iter(self._open[p]), offset) for p, offset in sorted(self._next.items())}

    def moved(self) -> dict[int, int]:
        """Return the positions that are not stored yet."""
        return {p: offset for p, offset in self.next().items() if self._stored.get(p) != offset}

    def stored(self, positions: Mapping[int, int]) -> None:
        """Take that positions were stored."""
        with self._lock:
            self._stored |= positions

    def clear(self) -> None:
        """Forget all partitions."""
        with self._lock:
            self._next, self._open, self._stored = {}, {}, {}


Done = Callable[[Found], None]
Failed = Callable[[Found, str], None]


class Lane(ABC):
    """Takes records and sends them in this order, until one fails."""

    def __init__(self, sender: Sender, done: Done, failed: Failed) -> None:
        """Take a producer that nobody else uses, and the functions that are called for each record's end."""
        self._sender, self._done, self._failed = sender, done, failed
        self._ended = threading.Event()

    @abstractmethod
    def offer(self, found: Found, seconds: float) -> bool:
        """Take the next record, if there is room within this time; a lane that has ended takes none."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until each record that was taken is acknowledged, or one has failed."""

    def check(self) -> None:  # noqa: B027 - a lane whose tries are bounded needs no check
        """End the lane if the broker doesn't answer any more."""

    def close(self) -> None:
        """Give up what isn't acknowledged and end the threads."""
        self._ended.set()
        self._sender.close()


class _Ended(Exception):
    """The lane was closed in the middle of a record."""


class _Acknowledging(Sink[Outgoing]):
    """A topic that takes one record in a request."""

    def __init__(self, sender: Sender, ended: threading.Event) -> None:
        self._sender, self._is_ended = sender, ended

    def send(self, records: Sequence[Outgoing], seconds: float) -> dict[int, Refusal]:
        if self._is_ended.is_set():
            raise _Ended
        return {
            place: Refusal(_said(error), Failure.TRANSIENT if may_pass(error) else Failure.PERMANENT)
            for place, error in self._sender.deliver(records, seconds).items()
        }


class OneAtATime(Lane):
    """Sends a record when the one before is acknowledged; a failed request is tried again within bounds."""

    def __init__(self, sender: Sender, done: Done, failed: Failed, policy: RetryPolicy) -> None:
        """Start the lane's thread; ``policy`` bounds the tries of one record."""
        super().__init__(sender, done, failed)
        self._courier = Courier(_Acknowledging(sender, self._ended), policy, self._pause)
        self._records: queue.Queue[Found | None] = queue.Queue(WAITING_RECORDS)
        self._thread = threading.Thread(target=self._run, name="lane", daemon=True)
        self._thread.start()

    def offer(self, found: Found, seconds: float) -> bool:
        """Queue the record, if there is room within this time."""
        try:
            self._records.put(found, timeout=seconds)
        except queue.Full:
            return False
        return True

    def drain(self) -> None:
        """Wait until each record that was taken is done, or one has failed."""
        self._records.join()

    def close(self) -> None:
        """Give up the record on its way, and end the lane's thread."""
        self._ended.set()
        self._sender.purge()
        self.drain()
        self._records.put(None)
        self._thread.join()
        super().close()

    def _pause(self, seconds: float) -> None:
        self._ended.wait(seconds)

    def _run(self) -> None:
        while (found := self._records.get()) is not None:
            if not self._ended.is_set():
                self._forward(found)
            self._records.task_done()

    def _forward(self, found: Found) -> None:
        try:
            self._courier.deliver([found.record])
            self._done(found)
        except _Ended:
            pass
        except Exception as failure:
            self._ended.set()
            self._failed(found, str(failure) if isinstance(failure, JobFailed) else repr(failure))


class Pipelined(Lane):
    """Sends records while earlier ones are on their way; Kafka's client sends failed ones again in their order."""

    def __init__(
        self, sender: Sender, done: Done, failed: Failed, patience: float, first_alone: bool
    ) -> None:
        """Take the seconds for which a record may stay unacknowledged, and whether several requests are in flight."""
        super().__init__(sender, done, failed)
        self._patience, self._first_alone = patience, first_alone
        self._waiting: OrderedDict[tuple[int, int], tuple[Found, float]] = OrderedDict()
        self._acknowledged: set[int | None] = set()
        self._first: set[int | None] = set()
        self._changed = threading.Condition()

    def offer(self, found: Found, seconds: float) -> bool:
        """Send the record, if there is room within this time."""
        with self._changed:
            has_room = self._changed.wait_for(lambda: self._has_room(found.record.partition), seconds)
            if not has_room or self._ended.is_set():
                return False
            self._waiting[found.partition, found.offset] = found, time.monotonic()
            self._first.add(found.record.partition)
            # Within the lock: after a failure no record may reach the producer that takes the failed one's place.
            self._sender.send(found.record, partial(self._answered, found))
        return True

    def _has_room(self, partition: int | None) -> bool:
        # A broker takes any sequence number from a producer that is new to a partition: if the first request got lost,
        # the second one would pass. So the first record is sent alone.
        is_new = partition in self._first and partition not in self._acknowledged
        is_open = not (self._first_alone and is_new)
        return self._ended.is_set() or (is_open and len(self._waiting) < WAITING_RECORDS)

    def drain(self) -> None:
        """Send what lingers, and wait until each record is acknowledged, or one has failed."""
        while self._waiting and not self._ended.is_set():
            self._sender.flush(0.1)
            self.check()

    def check(self) -> None:
        """End the lane if its oldest record has waited for too long."""
        with self._changed:
            for found, started in list(self._waiting.values())[:1]:
                if time.monotonic() - started > self._patience:
                    self._end(found, f"no answer within {self._patience:g} s")

    def _answered(self, found: Found, error: KafkaError | None) -> None:
        with self._changed:
            self._waiting.pop((found.partition, found.offset), None)
            if error is None:
                self._acknowledged.add(found.record.partition)
                self._done(found)
            else:
                self._end(found, error.str())
            self._changed.notify_all()

    def _end(self, found: Found, reason: str) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._sender.purge()
            self._failed(found, reason)


def _said(error: KafkaError | None) -> str:
    return "no answer" if error is None else error.str()


def lane(
    variant: Variant, settings: Mapping[str, Any], policy: RetryPolicy, done: Done, failed: Failed
) -> Lane:
    """Return a lane with a producer of its own."""
    sender = Sender(settings)
    if variant == "one_request":
        return OneAtATime(sender, done, failed, policy)
    return Pipelined(sender, done, failed, policy.total_seconds, first_alone=settings[IN_FLIGHT] != "1")
