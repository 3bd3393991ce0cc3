"""Delivery of the API Gateway's messages: while a request waits, or from a buffer."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from confluent_kafka import KafkaError

from python_jobs.shared.kafka.producers import PURGE_SECONDS, Outgoing, Sender, may_pass
from python_jobs.streaming.gateway_records import Message
from python_jobs.streaming.gateway_stores import Buffer, Fallback

FORWARDED_AT_ONCE = 1_000
"""Number of messages of the buffer that are on their way at a time."""
_POLL_SECONDS = 0.1
_STORE_AGAIN_SECONDS = 1.0

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
        failed = self._sender.deliver(_outgoing(messages), self._seconds)
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
        delivery = self._sender.start(_outgoing(messages))
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


def _outgoing(messages: Sequence[Message]) -> list[Outgoing]:
    return [Outgoing(m.topic, m.value.encode(), m.key.encode(), m.headers()) for m in messages]


def _said(failed: Mapping[int, KafkaError | None]) -> str:
    error = next((error for error in failed.values() if error is not None), None)
    return "no answer" if error is None else error.str()
