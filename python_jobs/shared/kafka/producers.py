"""Producers whose caller learns the outcome of each record: acknowledged, or the error with which it was given up."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from python_jobs.shared.kafka.clients import passes

PURGE_SECONDS = 2
"""Time in which librdkafka says of each purged record that it was purged."""
_POLL_SECONDS = 0.1
_BY_KEY = -1  # what librdkafka takes for "none given"
_PASSING = {
    KafkaError._PURGE_QUEUE,
    KafkaError._PURGE_INFLIGHT,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._QUEUE_FULL,
}

log = logging.getLogger("kafka_producer")


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record for a topic."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: list[tuple[str, str | bytes | None]] = field(default_factory=list)
    partition: int | None = None
    """Partition of the topic; None: the producer's partitioner chooses it."""


Answered = Callable[[KafkaError | None], None]
"""Function that takes a record's outcome: None if the broker has it, else the error. It is called once."""


class Delivery:
    """The outcome of records on their way; it is complete when the broker or librdkafka has answered for each."""

    def __init__(self, records: Sequence[object]) -> None:
        self._places = range(len(records))
        self._errors: dict[int, KafkaError | None] = {}
        self._lock = threading.Lock()
        self._complete = threading.Event()
        if not records:
            self._complete.set()

    def answer(self, place: int, error: KafkaError | None) -> None:
        """Store the answer for the record at ``place``: None if the broker has it."""
        with self._lock:
            self._errors[place] = error
            if len(self._errors) == len(self._places):
                self._complete.set()

    def wait(self, seconds: float) -> bool:
        """Wait until the delivery is complete, or until the time is over; return whether it is complete."""
        return self._complete.wait(seconds)

    def undelivered(self) -> dict[int, KafkaError | None]:
        """Return the places of the records that the broker hasn't acknowledged, each with its error or None."""
        with self._lock:
            delivered = {place for place, error in self._errors.items() if error is None}
            return {place: self._errors.get(place) for place in self._places if place not in delivered}


class Sender:
    """A producer for many threads; it is replaced after an error that librdkafka calls fatal."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        self._producer = Producer(self._settings)
        self._fatal: KafkaError | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="deliveries", daemon=True)
        self._thread.start()

    def send(self, record: Outgoing, answered: Answered) -> None:
        """Give a record to the producer and return; a full queue is an answer, too."""
        try:
            self._producer.produce(
                record.topic,
                record.value,
                record.key,
                headers=record.headers,
                on_delivery=functools.partial(self._answered, answered),
                partition=_BY_KEY if record.partition is None else record.partition,
            )
        except BufferError:
            answered(KafkaError(KafkaError._QUEUE_FULL))
        except KafkaException as failure:
            self._answered(answered, failure.args[0])

    def start(self, records: Sequence[Outgoing]) -> Delivery:
        """Give records to the producer, in their order; the answers come into the returned delivery."""
        delivery = Delivery(records)
        for place, record in enumerate(records):
            self.send(record, functools.partial(delivery.answer, place))
        return delivery

    def deliver(self, records: Sequence[Outgoing], seconds: float) -> dict[int, KafkaError | None]:
        """Send records and give up those that aren't acknowledged in time; return their places and errors.

        A record that was given up may have been stored, and will be there twice if it is sent again.
        """
        delivery = self.start(records)
        if not delivery.wait(seconds):
            self.purge()
            delivery.wait(PURGE_SECONDS)
        return delivery.undelivered()

    def flush(self, seconds: float) -> None:
        """Send what lingers at once, and wait for its answers up to this time."""
        with self._fatal_noticed():
            self._producer.flush(seconds)

    def purge(self) -> None:
        """Give up all records that aren't delivered; their answers come soon.

        A record whose answer from the broker is on its way may have been stored, and will be there twice if it is sent
        again.
        """
        self._producer.purge(in_queue=True, in_flight=True, blocking=False)

    def close(self) -> None:
        """Give up what is not delivered and end the thread."""
        self.purge()
        self._stopped.set()
        self._thread.join()

    def _answered(self, answered: Answered, error: KafkaError | None, _: object = None) -> None:
        if error is None:
            answered(None)
            return
        self._notice(error)
        answered(self._fatal or error)  # a purged record failed for the reason of the purge

    def _notice(self, error: KafkaError) -> None:
        if self._fatal is None and (error.fatal() or error.code() == KafkaError._FATAL):
            self._fatal = error

    @contextmanager
    def _fatal_noticed(self) -> Iterator[None]:
        """Notice a fatal error, which Kafka's client raises in whatever call comes next."""
        try:
            yield
        except KafkaException as failure:
            self._notice(failure.args[0])

    def _poll(self) -> None:
        while not self._stopped.is_set():
            with self._fatal_noticed():
                self._producer.poll(_POLL_SECONDS)
            if self._fatal is not None:
                self._replace()

    def _replace(self) -> None:
        """Take a new producer, when every record of the broken one is answered: none overtakes one that failed."""
        with self._fatal_noticed():
            self._producer.purge()
        self.flush(PURGE_SECONDS)
        self._producer, self._fatal = Producer(self._settings), None
        log.error("Kafka's client can't continue; a new one replaces it")


def may_pass(error: KafkaError | None) -> bool:
    """Return whether a record that got this error can be delivered later; None is no answer at all."""
    return error is None or error.code() in _PASSING or error.fatal() or passes(error)
