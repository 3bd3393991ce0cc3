"""Delivery of the API Gateway's messages: a Kafka producer that requests share, and the forwarder of a buffer."""

from __future__ import annotations

import functools
import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from python_jobs.shared.kafka.clients import passes
from python_jobs.streaming.gateway_records import Message
from python_jobs.streaming.gateway_stores import Buffer, Fallback

PURGE_SECONDS = 2
"""Time in which librdkafka says of each purged message that it was purged."""
FORWARDED_AT_ONCE = 1_000
"""Number of messages of the buffer that are on their way at a time."""
_POLL_SECONDS = 0.1
_STORE_AGAIN_SECONDS = 1.0
_PASSING = {
    KafkaError._PURGE_QUEUE,
    KafkaError._PURGE_INFLIGHT,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._QUEUE_FULL,
}

log = logging.getLogger("api_gateway")


class Counts:
    """Numbers of records since the start, by what happened to them; many threads may count."""

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, **numbers: int) -> None:
        """Count records."""
        with self._lock:
            self._numbers.update(numbers)

    def of(self, *names: str) -> dict[str, int]:
        """Return the numbers of these names."""
        with self._lock:
            return {name: self._numbers[name] for name in names}


class Delivery:
    """The outcome of messages on their way; it is complete when the broker or librdkafka has answered for each."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self._errors: dict[int, KafkaError | None] = {}
        self._lock = threading.Lock()
        self._complete = threading.Event()
        if not messages:
            self._complete.set()

    def answer(self, place: int, error: KafkaError | None) -> None:
        """Store the answer for the message at ``place``: None if the broker has it."""
        with self._lock:
            self._errors[place] = error
            if len(self._errors) == len(self.messages):
                self._complete.set()

    def wait(self, seconds: float) -> bool:
        """Wait until the delivery is complete, or until the time is over; return whether it is complete."""
        return self._complete.wait(seconds)

    def undelivered(self) -> dict[int, KafkaError | None]:
        """Return the places of the messages that the broker hasn't acknowledged, each with its error or None."""
        with self._lock:
            places = range(len(self.messages))
            delivered = {p for p, error in self._errors.items() if error is None}
            return {p: self._errors.get(p) for p in places if p not in delivered}


class Sender:
    """A producer for many threads; it is replaced after an error that librdkafka calls fatal."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        self._producer = Producer(self._settings)
        self._is_broken = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="deliveries", daemon=True)
        self._thread.start()

    def start(self, messages: Sequence[Message]) -> Delivery:
        """Give messages to the producer, in their order; the answers come into the returned delivery."""
        delivery = Delivery(messages)
        producer = self._producer
        for place, message in enumerate(messages):
            try:
                producer.produce(
                    message.topic,
                    message.value.encode(),
                    message.key.encode(),
                    headers=message.headers(),
                    on_delivery=functools.partial(self._answered, delivery, place),
                )
            except BufferError:
                delivery.answer(place, KafkaError(KafkaError._QUEUE_FULL))
            except KafkaException as failure:
                self._answered(delivery, place, failure.args[0])
        return delivery

    def purge(self) -> None:
        """Give up all messages that aren't delivered; their deliveries get the answer soon.

        A message whose answer from the broker is on its way may have been stored, and will be there twice if it is
        sent again.
        """
        self._producer.purge(in_queue=True, in_flight=True, blocking=False)

    def close(self) -> None:
        """Give up what is not delivered and end the thread."""
        self.purge()
        self._stopped.set()
        self._thread.join()

    def _answered(self, delivery: Delivery, place: int, error: KafkaError | None, _: object = None) -> None:
        if error is not None and (error.fatal() or error.code() == KafkaError._FATAL):
            self._is_broken.set()
        delivery.answer(place, error)

    def _poll(self) -> None:
        while not self._stopped.is_set():
            self._producer.poll(_POLL_SECONDS)
            if self._is_broken.is_set():
                broken, self._producer = self._producer, Producer(self._settings)
                self._is_broken.clear()
                log.error("Kafka's client can't continue; a new one takes over")
                broken.purge()
                broken.flush(PURGE_SECONDS)


def may_pass(error: KafkaError | None) -> bool:
    """Return whether a message that got this error can be delivered later; None is no answer at all."""
    return error is None or error.code() in _PASSING or error.fatal() or passes(error)


class DirectDelivery:
    """Delivers the messages of a request while it waits.

    After a request that the broker didn't answer in time, one request at a time tries it; the others don't wait.
    """

    def __init__(self, sender: Sender, seconds: float) -> None:
        self._sender = sender
        self._seconds = seconds
        self._is_away = False
        self._only_one = threading.Lock()

    def undelivered(self, messages: Sequence[Message]) -> list[Message]:
        """Send messages and return those that the broker hasn't acknowledged within the time."""
        if not self._is_away:
            return self._try(messages)
        if not self._only_one.acquire(blocking=False):
            return list(messages)
        try:
            return self._try(messages)
        finally:
            self._only_one.release()

    def _try(self, messages: Sequence[Message]) -> list[Message]:
        delivery = self._sender.start(messages)
        if not delivery.wait(self._seconds):
            self._sender.purge()
            delivery.wait(PURGE_SECONDS)
        failed = delivery.undelivered()
        self._is_away = any(may_pass(error) for error in failed.values())
        if failed:
            log.warning("%d of %d records were not delivered: %s", len(failed), len(messages), _said(failed))
        return [messages[place] for place in failed]


class Forwarder:
    """The thread that delivers a buffer's messages in their order and forgets those that are delivered.

    A message that the broker refuses for good goes to the fallback, so that it doesn't hold up the others.
    """

    def __init__(self, buffer: Buffer, sender: Sender, fallback: Fallback, counts: Counts) -> None:
        self._buffer, self._sender, self._fallback, self._counts = buffer, sender, fallback, counts
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forwarder", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Say that the buffer has new messages."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread; what isn't delivered stays in the buffer."""
        self._stopped.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.clear()
            try:
                waiting = self._buffer.oldest(FORWARDED_AT_ONCE)
                if waiting:
                    self._forward(waiting)
                else:
                    self._wake.wait()
            except (OSError, sqlite3.Error) as failure:  # the messages stay where they are
                log.error("the buffer or the fallback can't be used: %s", failure)
                self._stopped.wait(_STORE_AGAIN_SECONDS)

    def _forward(self, waiting: Mapping[int, Message]) -> None:
        messages = list(waiting.values())
        delivery = self._sender.start(messages)
        while not delivery.wait(_POLL_SECONDS):
            if self._stopped.is_set():
                self._sender.purge()
                delivery.wait(PURGE_SECONDS)
                break
        failed = delivery.undelivered()
        stays = {place for place, error in failed.items() if may_pass(error)}
        refused = [messages[place] for place in failed if place not in stays]
        if refused:
            log.warning("%d records go to the fallback: %s", len(refused), _said(failed))
            self._fallback.write(refused)
        self._buffer.remove([p for place, p in enumerate(waiting) if place not in stays])
        self._counts.add(delivered=len(messages) - len(failed), stored=len(refused))


def _said(failed: Mapping[int, KafkaError | None]) -> str:
    error = next((error for error in failed.values() if error is not None), None)
    return "no answer" if error is None else error.str()
