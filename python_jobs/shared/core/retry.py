"""Retryable Operations: what can heal is tried again, what can't is raised at once, and neither without bounds.

An error belongs to one of four classes (:class:`Failure`). Transient ones are retried. Ambiguous ones, after which
the effect may or may not have happened, are retried only if the caller says that the operation is idempotent.
Permanent ones and those that nobody has classified are raised at once.

The pause before try n + 1 is drawn at random below ``min(base · 2ⁿ, cap)`` ("full jitter"), so that callers that
failed together don't come back together. Tries, total time and, across callers, retry tokens are bounded; a server's
``Retry-After`` is a lower bound of the pause. The loop itself is tenacity's.

Nothing here needs Spark. A whole batch is retried, never record by record, which would stall its partition.

Sources: the guide's Retryable Operations (chapter 2); M. Brooker, "Exponential Backoff And Jitter" and "Timeouts,
retries and backoff with jitter" (Amazon), for full jitter and the token bucket.
"""

from __future__ import annotations

import enum
import errno
import http.client
import logging
import random
import socket
import ssl
import threading
import time
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Literal, TypeVar

import requests
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt

from python_jobs.shared.core.clock import utc_now
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse, require_at_least

Result = TypeVar("Result")

_LOG = logging.getLogger(__name__)


class Failure(enum.Enum):
    """What a failed call says about the next one."""

    TRANSIENT = "transient"
    """Nothing has happened; the same call may succeed later."""
    AMBIGUOUS = "ambiguous"
    """It may or may not have happened; only an idempotent call may be repeated."""
    PERMANENT = "permanent"
    """The same call will fail again: what was asked for is at fault."""
    UNKNOWN = "unknown"
    """Nobody has said what it means; not repeated, so that a new kind of error is seen."""


class RateLimited(Exception):
    """The other side asks to come back later."""

    def __init__(self, sentence: str, retry_after: float) -> None:
        super().__init__(sentence)
        self.retry_after = retry_after
        """Seconds to wait at least."""


class RetryBudgetExhausted(JobFailed):
    """No time or no retry token is left; the cause is the last error."""


# A plain JobFailed says only that the work could not be done, so that it is none of these.
_PERMANENT_TYPES = (
    PermissionError, FileNotFoundError, IsADirectoryError, NotADirectoryError, WrongUse, DataRefused, NotReady,
    ValueError, TypeError, LookupError,
)  # fmt: skip
_TRANSIENT_ERRNOS = {
    errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH,
}  # fmt: skip
_AMBIGUOUS_ERRNOS = {errno.EIO, errno.ESTALE, errno.EREMOTEIO}
# Answers that say that the request was not carried out.
_TRANSIENT_STATUSES = {425, 429, 503}
_REQUEST_TIMEOUT = 408
# What requests says of the caller's own request, before anything is sent.
_PERMANENT_REQUESTS = (
    requests.exceptions.InvalidURL, requests.exceptions.MissingSchema, requests.exceptions.InvalidSchema,
    requests.exceptions.InvalidHeader, requests.exceptions.InvalidJSONError, requests.exceptions.URLRequired,
    requests.exceptions.UnrewindableBodyError, requests.exceptions.StreamConsumedError,
    requests.exceptions.TooManyRedirects,
)  # fmt: skip
# A handshake that breaks off in the middle is a lost connection, and no certificate that is wrong.
_BROKEN_HANDSHAKES = (
    "EOF occurred",
    "UNEXPECTED_EOF",
    "timed out",
    "Connection reset",
    "ConnectionResetError",
)
# Spark and Delta say by their text what failed below them. The first sign that is found decides.
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
    """Return the class of an error of Python's, requests', Spark's or Delta's; subclasses share their parent's."""
    if isinstance(error, requests.RequestException):
        return _classify_request(error)
    if isinstance(error, urllib.error.HTTPError):
        return classify_status(error.code)
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        return classify(error.reason)
    if isinstance(error, http.client.HTTPException):
        return Failure.PERMANENT if isinstance(error, http.client.InvalidURL) else Failure.AMBIGUOUS
    if isinstance(error, RetryBudgetExhausted):
        return Failure.UNKNOWN  # tried enough; whoever counts failures has to count this one
    if isinstance(error, RateLimited | ConnectionRefusedError | socket.gaierror):
        return Failure.TRANSIENT
    if isinstance(error, ConnectionError | TimeoutError | ssl.SSLEOFError | ssl.SSLZeroReturnError):
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
    """Return the class of an HTTP answer that is no success.

    The server's faults, and numbers that no standard knows (520 to 529 of proxies), are ambiguous: only an answer of
    the range 300 to 499 says that the request itself is at fault.
    """
    if status in _TRANSIENT_STATUSES:
        return Failure.TRANSIENT
    is_the_callers = 300 <= status < 500 and status != _REQUEST_TIMEOUT
    return Failure.PERMANENT if is_the_callers else Failure.AMBIGUOUS


def _classify_request(error: requests.RequestException) -> Failure:
    if isinstance(error, requests.exceptions.JSONDecodeError):
        return Failure.AMBIGUOUS  # an answer that broke off, or a proxy's page in its place
    if isinstance(error, _PERMANENT_REQUESTS):
        return Failure.PERMANENT
    if error.response is not None and error.response.status_code >= 300:
        return classify_status(error.response.status_code)
    if isinstance(error, requests.exceptions.SSLError):
        broke_off = any(sign in str(error) for sign in _BROKEN_HANDSHAKES)
        return Failure.AMBIGUOUS if broke_off else Failure.PERMANENT
    if isinstance(error, requests.ConnectTimeout):
        return Failure.TRANSIENT
    return Failure.AMBIGUOUS


def retry_after(error: BaseException) -> float:
    """Return how many seconds the other side asks to wait (``Retry-After``), 0 when it asks for nothing."""
    if isinstance(error, RateLimited):
        return error.retry_after
    response = getattr(error, "response", None)
    asked = "" if response is None else response.headers.get("Retry-After", "").strip()
    if asked.isascii() and asked.isdigit():
        return float(asked)
    try:
        moment = parsedate_to_datetime(asked)
        # Both times by the server's clock, if it tells: ours may be wrong.
        sent = response.headers.get("Date") if response is not None else None
        return max(0.0, (moment - (parsedate_to_datetime(sent) if sent else utc_now())).total_seconds())
    except (ValueError, TypeError):
        return 0.0


class RetryTokens:
    """A budget of retries that callers share: in a long outage they stop to multiply the load.

    A retry takes ``cost`` tokens, a success gives one back, never above ``capacity``: while most calls succeed,
    retries are free; when none does, ``capacity / cost`` of them happen in all.
    """

    def __init__(self, capacity: int = 100, cost: int = 5) -> None:
        if not 1 <= cost <= capacity:
            raise WrongUse(f"cost is {cost} and capacity {capacity}; 1 <= cost <= capacity is allowed")
        self.left = self._capacity = capacity
        self._cost = cost
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take the tokens of one retry; False, and nothing taken, when there are too few."""
        with self._lock:
            if self.left < self._cost:
                return False
            self.left -= self._cost
            return True

    def give_back(self) -> None:
        """Credit one success."""
        with self._lock:
            self.left = min(self._capacity, self.left + 1)


@dataclass(frozen=True)
class RetryPolicy:
    """How often, how long and at what distance an operation is tried."""

    attempts: int = 5
    """Most tries, the first one included."""
    base_seconds: float = 1
    """Longest pause before the second try; doubled before each further one."""
    cap_seconds: float = 60
    """Longest pause of all; only a Retry-After may be longer."""
    jitter: Literal["full", "tenth"] = "full"
    """full: between 0 and the pause; tenth: the pause ± 10 %, for a single caller that wants its rhythm kept."""
    attempt_seconds: float = 30
    """Timeout of one try, handed to the operation; less when less of the total is left."""
    total_seconds: float = 300
    """Time for all tries and pauses together; math.inf for operations that may take any time."""

    def __post_init__(self) -> None:
        require_at_least(1, attempts=self.attempts)
        # Written so that NaN, for which every comparison is false, is refused.
        if not 0 <= self.base_seconds <= self.cap_seconds:
            raise WrongUse(
                f"base_seconds is {self.base_seconds} and cap_seconds {self.cap_seconds}; "
                "0 <= base_seconds <= cap_seconds is allowed"
            )
        if self.jitter not in ("full", "tenth"):
            raise WrongUse(f"jitter is '{self.jitter}'; it must be full or tenth")
        if not (self.attempt_seconds > 0 and self.total_seconds > 0):
            raise WrongUse("attempt_seconds and total_seconds must be above 0")

    def pauses(self, retry: int) -> tuple[float, float]:
        """Return the shortest and the longest pause before a retry, numbered from 0; never above the cap."""
        # Beyond 2 to the 62nd nothing is below a cap that anyone would set, and the power stays a float.
        pause = min(self.base_seconds * 2.0 ** min(retry, 62), self.cap_seconds)
        return (0.0, pause) if self.jitter == "full" else (0.9 * pause, min(1.1 * pause, self.cap_seconds))


class Retrier:
    """Tries operations under one policy; threads may share it.

    Args:
        policy: bounds and pauses.
        tokens: retry budget shared with other callers; none by default.
        classifier: from an error to its class.
        clock: seconds, monotonic.
        sleep: waits so many seconds.
        draw: returns a random number between two.
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
        """Return what ``operation(timeout in seconds)`` returns, tried again while that can help.

        ``idempotent`` says whether the operation, done twice, leaves what it leaves when done once; there is no
        default, because only the caller can know.

        Raises:
            RetryBudgetExhausted: the next try would begin after the total time, or no retry token is left.
            Exception: the operation's own last error, when it can't heal or the tries are used up.
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
            # The kind of error only: its text may hold what was sent.
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
    assert state.outcome is not None
    error = state.outcome.exception()
    assert error is not None
    return error
