"""Delivery of some records, for which the next ones wait: they are sent until the sink has all of them.

An orderer calls :func:`deliver` with one record (FIFO Orderer) or with one record of each key (Bin Pack Orderer). A
sink says of each record whether it has it. The next records wait until it has all, so no record overtakes another of
its key, however a request fails. The records that the sink already has are not sent again.

Guarantee: at least once. A request whose answer is lost is sent again, and so are its records: the sink has to
recognise them. The tries are bounded by a :class:`~python_jobs.shared.core.retry.RetryPolicy`; then the orderer
stops, and what is behind is never sent.

Source: Data Engineering Design Patterns, chapter 5, Bin Pack Orderer and FIFO Orderer.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from python_jobs.shared.core.failures import JobFailed
from python_jobs.shared.core.retry import Failure, Retrier, RetryBudgetExhausted, RetryPolicy, classify

Item = TypeVar("Item")

_MAY_PASS = (Failure.TRANSIENT, Failure.AMBIGUOUS)


class Refusal(NamedTuple):
    """Why a sink doesn't have a record."""

    reason: str
    """The sink's code or sentence."""
    failure: Failure
    """Whether the same record may be taken at another try."""


class Sink(ABC, Generic[Item]):
    """A destination that says of each record of a request whether it has it."""

    records_at_once: int = 1
    """Maximum number of records in one request."""
    bytes_at_once: float = math.inf
    """Maximum size of one request in bytes, by :meth:`size`."""

    @abstractmethod
    def send(self, records: Sequence[Item], seconds: float) -> Mapping[int, Refusal]:
        """Send one request and return the places of the records that the sink doesn't have.

        Any error, such as a lost connection, says that no record is known to be there.
        """

    def size(self, record: Item) -> int:
        """Return the number of bytes that a record adds to a request."""
        return 0

    def failure(self, error: BaseException) -> Failure:
        """Return the class of an error of :meth:`send`."""
        return classify(error)


class Undelivered(JobFailed):
    """A sink doesn't have all records after all tries; what is behind them was not sent."""


class _Refused(Exception):
    """The last try left refused records."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class Courier(Generic[Item]):
    """Delivers to one sink, within the bounds of one retry policy."""

    def __init__(
        self, sink: Sink[Item], policy: RetryPolicy, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Take the sink, the bounds of a delivery's tries, and the function that waits between them."""
        self._sink = sink
        self._retrier = Retrier(policy, classifier=self._failure, sleep=sleep)
        self.requests = 0
        """Number of requests so far, those that failed included."""

    def deliver(self, records: Sequence[Item]) -> None:
        """Send records until the sink has all of them; a retry sends only those that it doesn't have.

        Raises:
            Undelivered: the tries are used up, or the sink refuses a record for good.
        """
        left = list(records)

        def attempt(seconds: float) -> None:
            nonlocal left
            refusals: list[Refusal] = []
            for some in list(self._requests(left)):
                self.requests += 1
                refused = self._sink.send(some, seconds)
                kept = [some[place] for place in sorted(refused)]
                refusals.extend(refused.values())
                # Taken out at once: a later request of this try may fail as a whole.
                left = left[len(some) :] + kept
            if refusals:
                # A record that is refused for good decides: another try can't complete them.
                raise _Refused(min(refusals, key=lambda refusal: refusal.failure in _MAY_PASS))

        if not left:
            return
        try:
            self._retrier.call(attempt, idempotent=True)
        except Exception as failure:
            cause = failure.__cause__ if isinstance(failure, RetryBudgetExhausted) else failure
            if self._failure(cause or failure) is Failure.UNKNOWN and not isinstance(cause, _Refused):
                raise
            reason = cause.refusal.reason if isinstance(cause, _Refused) else type(cause).__name__
            raise Undelivered(f"{len(left)} of {len(records)} records were not taken ({reason})") from failure

    def _requests(self, records: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """Yield the records in their order, split into requests that the sink takes."""
        some: list[Item] = []
        size = 0
        for record in records:
            added = self._sink.size(record)
            if some and (len(some) == self._sink.records_at_once or size + added > self._sink.bytes_at_once):
                yield some
                some, size = [], 0
            some.append(record)
            size += added
        if some:
            yield some

    def _failure(self, error: BaseException) -> Failure:
        return error.refusal.failure if isinstance(error, _Refused) else self._sink.failure(error)
