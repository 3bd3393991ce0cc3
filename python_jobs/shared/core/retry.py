"""Retryable Operations: retry errors that may pass, raise all other errors at once, and bound the retries.

An error belongs to one of four classes (:class:`Failure`). Transient errors are retried. After an ambiguous error the
effect may or may not have happened; it is retried only if the caller says that the operation is idempotent. Permanent
and unknown errors are raised at once.

The pause before try n + 1 is drawn at random below ``min(base · 2ⁿ, cap)`` ("full jitter"), so that callers that
failed together don't retry together. Tries and total time are bounded, and callers may share a bounded budget of retry
tokens. A server's ``Retry-After`` is a lower bound of the pause. The loop itself is tenacity's.

This module needs no Spark. Retry a whole batch, never single records: retries of a record would stall its partition.

Sources: the guide's Retryable Operations (chapter 2); M. Brooker, "Exponential Backoff And Jitter" and "Timeouts,
retries and backoff with jitter" (Amazon), for full jitter and the token bucket.
"""

from __future__ import annotations

import enum
import errno
import gzip
import http.client
import json
import logging
import random
import socket
import ssl
import threading
import time
import urllib.error
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Literal, TypeVar

import requests
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt

from python_jobs.shared.core.clock import utc_now
from python_jobs.shared.core.failures import (
    DataRefused,
    JobFailed,
    NotReady,
    WrongUse,
    present,
    require_at_least,
)
from python_jobs.shared.core.numbers import is_number

Result = TypeVar("Result")

_LOG = logging.getLogger(__name__)


class Failure(enum.Enum):
    """The class of an error: whether the next call may succeed and may be made."""

    TRANSIENT = "transient"
    """The call had no effect; the same call may succeed later."""
    AMBIGUOUS = "ambiguous"
    """The call may or may not have had its effect; only an idempotent call may be repeated."""
    PERMANENT = "permanent"
    """The same call will fail again, because the request itself is wrong."""
    UNKNOWN = "unknown"
    """The error is not classified; it is not repeated, so that a new kind of error is noticed."""


class RateLimited(Exception):
    """The server asks the caller to try again later."""

    def __init__(self, sentence: str, retry_after: float) -> None:
        super().__init__(sentence)
        self.retry_after = retry_after
        """Minimum wait, in seconds."""


class RetryBudgetExhausted(JobFailed):
    """No time or no retry token is left; ``__cause__`` is the last error."""


# A plain JobFailed says only that the work could not be done, so it is not in this list.
_PERMANENT_TYPES = (
    PermissionError, FileNotFoundError, IsADirectoryError, NotADirectoryError, WrongUse, DataRefused, NotReady,
    ValueError, TypeError, LookupError,
)  # fmt: skip
# What the standard library says of a body that broke off, or of a proxy's page in place of the answer.
_BROKEN_BODIES = (
    json.JSONDecodeError, UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile, ElementTree.ParseError,
)  # fmt: skip
_TRANSIENT_ERRNOS = {
    errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH,
}  # fmt: skip
_AMBIGUOUS_ERRNOS = {errno.EIO, errno.ESTALE, errno.EREMOTEIO}
# Statuses which say that the request was not carried out.
_TRANSIENT_STATUSES = {425, 429, 503}
# Statuses which say that the request itself is wrong: the registered ones, not those that a proxy or a framework has
# invented (419, 440, 460, 499). After a timeout (408) nobody knows.
_PERMANENT_STATUSES = (
    {status.value for status in http.HTTPStatus if 300 <= status < 500} - _TRANSIENT_STATUSES - {408}
)
# Errors of the caller's own request, which requests raises before it sends anything.
_PERMANENT_REQUESTS = (
    requests.exceptions.InvalidURL, requests.exceptions.MissingSchema, requests.exceptions.InvalidSchema,
    requests.exceptions.InvalidHeader, requests.exceptions.InvalidJSONError, requests.exceptions.URLRequired,
    requests.exceptions.UnrewindableBodyError, requests.exceptions.StreamConsumedError,
    requests.exceptions.TooManyRedirects,
)  # fmt: skip
# A handshake that breaks off in the middle is a lost connection, not a wrong certificate.
_BROKEN_HANDSHAKES = (
    "EOF occurred",
    "UNEXPECTED_EOF",
    "timed out",
    "Connection reset",
    "ConnectionResetError",
)
# Spark and Delta name the underlying failure in their text. The first sign that is found decides.
_SIGNS = {
    "AccessControlException": Failure.PERMANENT,
    "AccessDeniedException": Failure.PERMANENT,
    "FileNotFoundException": Failure.PERMANENT,
    "Permission denied": Failure.PERMANENT,
    "Mkdirs failed to create": Failure.PERMANENT,
    "No space left on device": Failure.PERMANENT,
    "DELTA_CONCURRENT": Failure.TRANSIENT,
    "java.net.ConnectException": Failure.TRANSIENT,
    "java.net.URISyntaxException": Failure.PERMANENT,
    "java.net.MalformedURLException": Failure.PERMANENT,
    "java.net.": Failure.AMBIGUOUS,
    "java.io.IOException": Failure.AMBIGUOUS,
    "java.util.concurrent.TimeoutException": Failure.AMBIGUOUS,
}


def classify(error: BaseException) -> Failure:
    """Return the class of an error of Python, requests, Spark or Delta; a subclass has the class of its parent."""
    if isinstance(error, requests.RequestException):
        return _classify_request(error)
    if isinstance(error, urllib.error.HTTPError):
        return _classify_answer(error.code, "Retry-After" in error.headers)
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        return classify(error.reason)
    if isinstance(error, http.client.HTTPException):
        return Failure.PERMANENT if isinstance(error, http.client.InvalidURL) else Failure.AMBIGUOUS
    if isinstance(error, RetryBudgetExhausted):
        return Failure.UNKNOWN  # tried enough; a caller that counts failures has to count this one
    if isinstance(error, RateLimited | ConnectionRefusedError | socket.gaierror):
        return Failure.TRANSIENT
    if isinstance(error, ConnectionError | TimeoutError | ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return Failure.AMBIGUOUS
    if isinstance(error, _BROKEN_BODIES):
        return Failure.AMBIGUOUS
    if isinstance(error, _PERMANENT_TYPES):
        return Failure.PERMANENT
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return Failure.TRANSIENT
    if isinstance(error, OSError) and error.errno in _AMBIGUOUS_ERRNOS:
        return Failure.AMBIGUOUS
    text = str(error)
    return next((failure for sign, failure in _SIGNS.items() if sign in text), Failure.UNKNOWN)


def classify_status(status: int) -> Failure:
    """Return the class of an HTTP status that is no success.

    Server errors and non-standard statuses (419 of frameworks, 499 and 520 to 529 of proxies) are ambiguous: only a
    registered status from 300 to 499 says that the request itself is wrong.
    """
    if status in _TRANSIENT_STATUSES:
        return Failure.TRANSIENT
    return Failure.PERMANENT if status in _PERMANENT_STATUSES else Failure.AMBIGUOUS


def _classify_answer(status: int, invites_again: bool) -> Failure:
    """Return the class of an answer: a refusal with ``Retry-After`` (403 of a rate limit) invites the same request."""
    if 400 <= status < 500 and invites_again:
        return Failure.TRANSIENT
    return classify_status(status)


def _classify_request(error: requests.RequestException) -> Failure:
    if isinstance(error, requests.exceptions.JSONDecodeError):
        return Failure.AMBIGUOUS  # a truncated answer, or a proxy's page instead of the answer
    if isinstance(error, _PERMANENT_REQUESTS):
        return Failure.PERMANENT
    if error.response is not None and error.response.status_code >= 300:
        return _classify_answer(error.response.status_code, "Retry-After" in error.response.headers)
    if isinstance(error, requests.exceptions.SSLError):
        broke_off = any(sign in str(error) for sign in _BROKEN_HANDSHAKES)
        return Failure.AMBIGUOUS if broke_off else Failure.PERMANENT
    if isinstance(error, requests.ConnectTimeout):
        return Failure.TRANSIENT
    return Failure.AMBIGUOUS


def retry_after(error: BaseException) -> float:
    """Return how many seconds the server asks to wait (``Retry-After``), 0 if it doesn't ask."""
    if isinstance(error, RateLimited):
        return error.retry_after
    # The error of requests has the answer as an attribute; the error of urllib is the answer.
    headers = getattr(getattr(error, "response", error), "headers", None) or {}
    asked = headers.get("Retry-After", "").strip()
    if asked.isascii() and asked.isdigit():
        return float(asked)
    try:
        moment = parsedate_to_datetime(asked)
        # Take both times from the server's clock if it sends its time: our clock may be wrong.
        sent = headers.get("Date")
        return max(0.0, (moment - (parsedate_to_datetime(sent) if sent else utc_now())).total_seconds())
    except (ValueError, TypeError):
        return 0.0


class RetryTokens:
    """A budget of retries that callers share, so that a long outage doesn't multiply the load.

    A retry takes ``cost`` tokens. A success gives one token back, up to ``capacity``. While most calls succeed, retries
    are free; when no call succeeds, there are ``capacity / cost`` retries in all.
    """

    def __init__(self, capacity: int = 100, cost: int = 5) -> None:
        if not 1 <= cost <= capacity:
            raise WrongUse(f"cost is {cost} and capacity {capacity}; 1 <= cost <= capacity is allowed")
        self.left = self._capacity = capacity
        self._cost = cost
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take the tokens of one retry and return True; return False and take nothing if there are too few."""
        with self._lock:
            if self.left < self._cost:
                return False
            self.left -= self._cost
            return True

    def give_back(self) -> None:
        """Give one token back after a success."""
        with self._lock:
            self.left = min(self._capacity, self.left + 1)


@dataclass(frozen=True)
class RetryPolicy:
    """The bounds of an operation's tries: their number, their time and the pauses between them."""

    attempts: int = 5
    """Maximum number of tries, the first one included."""
    base_seconds: float = 1
    """Longest pause before the second try, in seconds; it doubles before each further try."""
    cap_seconds: float = 60
    """Longest pause before any try, in seconds; only a Retry-After may be longer."""
    jitter: Literal["full", "tenth"] = "full"
    """full: between 0 and the pause; tenth: the pause ± 10 %, for a single caller that needs regular tries."""
    attempt_seconds: float = 30
    """Timeout of one try in seconds, passed to the operation; less if less of the total time is left."""
    total_seconds: float = 300
    """Time for all tries and pauses together, in seconds; math.inf for operations that may take any time."""

    def __post_init__(self) -> None:
        require_at_least(1, attempts=self.attempts)
        # Written so that NaN, for which every comparison is false, is refused.
        if not (is_number(self.base_seconds) and 0 <= self.base_seconds <= self.cap_seconds):
            raise WrongUse(
                f"base_seconds is {self.base_seconds} and cap_seconds {self.cap_seconds}; "
                "0 <= base_seconds <= cap_seconds is allowed"
            )
        if self.jitter not in ("full", "tenth"):
            raise WrongUse(f"jitter is '{self.jitter}'; it must be full or tenth")
        if not (self.attempt_seconds > 0 and self.total_seconds > 0):
            raise WrongUse("attempt_seconds and total_seconds must be above 0")

    def pauses(self, retry: int) -> tuple[float, float]:
        """Return the shortest and the longest pause before a retry (from 0), in seconds and at most the cap."""
        # The exponent ends at 62: the pause is above any sensible cap there, and the power stays a float.
        pause = min(self.base_seconds * 2.0 ** min(retry, 62), self.cap_seconds)
        return (0.0, pause) if self.jitter == "full" else (0.9 * pause, min(1.1 * pause, self.cap_seconds))


class Retrier:
    """Calls operations under one retry policy; threads may share a retrier.

    Args:
        policy: bounds and pauses; by default those of ``RetryPolicy()``.
        tokens: retry budget shared with other callers; none by default.
        classifier: function that returns the class of an error.
        clock: function that returns monotonic seconds.
        sleep: function that waits for a number of seconds.
        draw: function that returns a random number between two numbers.
    """

    def __init__(
        self,
        policy: RetryPolicy | None = None,
        *,
        tokens: RetryTokens | None = None,
        classifier: Callable[[BaseException], Failure] = classify,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self.policy = policy or RetryPolicy()
        self._tokens = tokens
        self._classifier = classifier
        self._clock = clock
        self._sleep = sleep
        self._draw = draw

    def call(self, operation: Callable[[float], Result], *, idempotent: bool) -> Result:
        """Return the result of ``operation(timeout in seconds)``, retried while its errors may pass.

        ``idempotent`` says whether two calls of the operation leave the same state as one call. It has no default,
        because only the caller knows this.

        Raises:
            RetryBudgetExhausted: the next try would begin after the total time, or no retry token is left.
            Exception: the operation's own last error, if the error is not retried or the tries are used up.
        """
        policy, started = self.policy, self._clock()

        def left() -> float:
            return policy.total_seconds - (self._clock() - started)

        def may_heal(error: BaseException) -> bool:
            failure = self._classifier(error)
            return failure is Failure.TRANSIENT or (failure is Failure.AMBIGUOUS and idempotent)

        def pause(state: RetryCallState) -> float:
            return max(self._draw(*policy.pauses(state.attempt_number - 1)), retry_after(_error(state)))

        def before_pause(state: RetryCallState) -> None:
            error, seconds = _error(state), state.upcoming_sleep
            if seconds >= left():
                raise RetryBudgetExhausted(
                    f"gave up after {state.attempt_number} tries: a pause of {seconds:.3g} s would pass the total "
                    f"of {policy.total_seconds:g} s"
                ) from error
            if self._tokens is not None and not self._tokens.take():
                raise RetryBudgetExhausted(
                    f"gave up after {state.attempt_number} tries: the callers' retry tokens are used up"
                ) from error
            # Log only the error's class: its text may hold the request.
            _LOG.warning(
                "try %d failed (%s), next in %.3g s", state.attempt_number, type(error).__name__, seconds
            )

        retrying = Retrying(
            retry=retry_if_exception(may_heal),
            stop=stop_after_attempt(policy.attempts),
            wait=pause,
            before_sleep=before_pause,
            sleep=self._sleep,
            reraise=True,
        )
        result = retrying(lambda: operation(max(0.001, min(policy.attempt_seconds, left()))))
        if self._tokens is not None:
            self._tokens.give_back()
        return result


def _error(state: RetryCallState) -> BaseException:
    error = None if state.outcome is None else state.outcome.exception()
    return present(error, "the error of a failed try")
