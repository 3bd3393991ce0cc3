"""Retryable Operations: clock, sleep and random numbers are the test's, so nothing waits."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import gzip
import http.client
import json
import logging
import math
import socket
import ssl
import urllib.error
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Callable
from email.message import Message
from email.utils import format_datetime
from typing import Any

import pytest
import requests

from python_jobs.shared.core.failures import DataRefused, JobFailed, WrongUse
from python_jobs.shared.core.retry import (
    Failure,
    RateLimited,
    Retrier,
    RetryBudgetExhausted,
    RetryPolicy,
    RetryTokens,
    classify,
    retry_after,
)
from tests.support.snippets import snippet
from tests.support.waiting import at_once

PAGE = "docs/error_management.md"
HERE = "tests/patterns/error_management/test_retryable.py"


class Time:
    """A clock that only moves when somebody sleeps or works."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


class Operation:
    """Fails with ``errors``, one a call, the last one for ever if ``always``; each call takes its timeout."""

    def __init__(self, time: Time, *errors: BaseException, always: bool = False, takes: float = 0) -> None:
        self.time, self.errors, self.always, self.takes = time, list(errors), always, takes
        self.timeouts: list[float] = []

    def __call__(self, timeout: float) -> str:
        self.timeouts.append(timeout)
        self.time.now += min(self.takes, timeout)
        if self.errors:
            raise self.errors[0] if self.always and len(self.errors) == 1 else self.errors.pop(0)
        return "result"

    @property
    def calls(self) -> int:
        return len(self.timeouts)


@pytest.fixture
def time() -> Time:
    return Time()


def retrier(time: Time, draw: Callable[[float, float], float] = max, **policy: Any) -> Retrier:
    return Retrier(RetryPolicy(**policy), clock=time.clock, sleep=time.sleep, draw=draw)


def test_an_operation_that_heals_is_retried_with_growing_jittered_pauses(time: Time) -> None:
    operation = Operation(time, TimeoutError(), TimeoutError())
    by_chance = Retrier(RetryPolicy(jitter="tenth"), clock=time.clock, sleep=time.sleep)
    assert by_chance.call(operation, idempotent=True) == "result"
    assert operation.calls == 3
    first, second = time.sleeps
    assert 0.9 <= first <= 1.1
    assert 1.8 <= second <= 2.2


def test_pauses_of_many_callers_spread_over_the_whole_interval() -> None:
    firsts = []
    for _ in range(200):
        time = Time()
        caller = Retrier(RetryPolicy(), clock=time.clock, sleep=time.sleep)
        caller.call(Operation(time, TimeoutError()), idempotent=True)
        firsts += time.sleeps
    assert min(firsts) < 0.2
    assert max(firsts) > 0.8
    assert all(0 <= pause <= 1 for pause in firsts)


def test_the_last_try_raises_the_original_error_and_sleeps_no_more(time: Time) -> None:
    error = TimeoutError("the store is slow")
    operation = Operation(time, error, always=True)
    with pytest.raises(TimeoutError) as raised:
        retrier(time, attempts=5).call(operation, idempotent=True)
    assert raised.value is error
    assert operation.calls == 5
    assert time.sleeps == [1, 2, 4, 8]


@pytest.mark.parametrize("error", [PermissionError("login"), ValueError("schema"), DataRefused("rule")])
def test_permanent_errors_are_raised_at_once(time: Time, error: Exception) -> None:
    operation = Operation(time, error, always=True)
    with pytest.raises(type(error)):
        retrier(time).call(operation, idempotent=True)
    assert (operation.calls, time.sleeps) == (1, [])


class Outage(ConnectionResetError):
    """A subclass of what is retried."""


class Novelty(Exception):
    """A class nobody has heard of."""


def outcome(time: Time, error: Exception, *, idempotent: bool) -> tuple[object, int]:
    """Return the result, or the error, of an operation that fails once, and its number of calls."""
    operation = Operation(time, error)
    try:
        result: object = retrier(time).call(operation, idempotent=idempotent)
    except type(error) as raised:
        result = raised
    return result, operation.calls


def test_subclasses_of_retryable_errors_are_retried_and_unknown_errors_are_not(time: Time) -> None:
    assert outcome(time, Outage(), idempotent=True) == ("result", 2)
    unknown = Novelty()
    assert outcome(time, unknown, idempotent=True) == (unknown, 1)


def test_what_may_have_happened_is_not_repeated_unless_it_is_idempotent(time: Time) -> None:
    timeout = TimeoutError()
    assert outcome(time, timeout, idempotent=False) == (timeout, 1)
    assert outcome(time, ConnectionRefusedError(), idempotent=False) == ("result", 2)


@pytest.mark.parametrize("jitter", ["full", "tenth"])
def test_no_pause_passes_the_cap(time: Time, jitter: str) -> None:
    with pytest.raises(TimeoutError):
        retrier(time, attempts=11, jitter=jitter, total_seconds=10_000).call(
            Operation(time, TimeoutError(), always=True), idempotent=True
        )
    assert len(time.sleeps) == 10
    assert time.sleeps[-1] == 60
    assert RetryPolicy().pauses(5000) == (0, 60), "no overflow either"


def test_the_total_time_shrinks_the_last_timeout_and_ends_with_an_error_of_its_own(time: Time) -> None:
    operation = Operation(time, TimeoutError("slow"), always=True, takes=math.inf)
    with pytest.raises(
        RetryBudgetExhausted, match=r"gave up after 3 tries.*would pass the total of 10 s"
    ) as raised:
        retrier(time, base_seconds=0.25, attempt_seconds=4, total_seconds=10).call(operation, idempotent=True)
    assert isinstance(raised.value.__cause__, TimeoutError)
    assert operation.timeouts == [4, 4, 1.25]
    assert time.sleeps == [0.25, 0.5]
    assert time.now == 1010


@pytest.mark.parametrize(("asked", "pause"), [(7, 7), (0.2, 1)])
def test_a_server_s_wish_is_the_shortest_pause(time: Time, asked: float, pause: float) -> None:
    retrier(time).call(Operation(time, RateLimited("slow down", retry_after=asked)), idempotent=False)
    assert time.sleeps == [pause]


def test_a_wish_beyond_the_total_time_is_not_waited_for(time: Time) -> None:
    operation = Operation(time, RateLimited("come back tomorrow", retry_after=86400))
    with pytest.raises(RetryBudgetExhausted):
        retrier(time).call(operation, idempotent=True)
    assert (operation.calls, time.sleeps) == (1, [])


def http_error(status: int, **headers: str) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    response.headers.update({name.replace("_", "-"): value for name, value in headers.items()})
    return requests.HTTPError(response=response)


def urllib_error(status: int, **headers: str) -> urllib.error.HTTPError:
    message = Message()
    for name, value in headers.items():
        message[name.replace("_", "-")] = value
    return urllib.error.HTTPError("http://a", status, "", message, None)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (http_error(429, Retry_After="7"), 7),
        (
            http_error(
                503, Retry_After="Wed, 21 Oct 2015 07:28:30 GMT", Date="Wed, 21 Oct 2015 07:28:00 GMT"
            ),
            30,
        ),
        (http_error(503, Retry_After="Wed, 21 Oct 2015 07:28:30 GMT"), 0),
        (http_error(503, Retry_After="soon"), 0),
        (http_error(503, Retry_After="²"), 0),
        (http_error(503), 0),
        (urllib_error(503, Retry_After="7"), 7),
        (ValueError(), 0),
        (RateLimited("slow down", retry_after=2.5), 2.5),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(error: Exception, seconds: float) -> None:
    assert retry_after(error) == seconds


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ConnectionRefusedError(), Failure.TRANSIENT),
        (ConnectionResetError(), Failure.AMBIGUOUS),
        (TimeoutError(), Failure.AMBIGUOUS),
        (OSError(errno.EHOSTUNREACH, "no route"), Failure.TRANSIENT),
        (OSError(errno.EIO, "input/output error"), Failure.AMBIGUOUS),
        (OSError(errno.ENOSPC, "No space left on device"), Failure.PERMANENT),
        (PermissionError("read-only"), Failure.PERMANENT),
        (FileNotFoundError("x"), Failure.PERMANENT),
        (KeyError("x"), Failure.PERMANENT),
        (WrongUse("x"), Failure.PERMANENT),
        (RuntimeError("x"), Failure.UNKNOWN),
        (RetryBudgetExhausted("x"), Failure.UNKNOWN),
        (RuntimeError("java.io.IOException: Permission denied"), Failure.PERMANENT),
        (RuntimeError("java.io.IOException: connection reset"), Failure.AMBIGUOUS),
        (RuntimeError("java.net.ConnectException: refused"), Failure.TRANSIENT),
        (RuntimeError("[DELTA_CONCURRENT_APPEND] a file was added"), Failure.TRANSIENT),
        (http_error(429), Failure.TRANSIENT),
        (http_error(503), Failure.TRANSIENT),
        (http_error(500), Failure.AMBIGUOUS),
        (http_error(504), Failure.AMBIGUOUS),
        (http_error(401), Failure.PERMANENT),
        (http_error(404), Failure.PERMANENT),
        (requests.ConnectTimeout(), Failure.TRANSIENT),
        (requests.ReadTimeout(), Failure.AMBIGUOUS),
        (requests.ConnectionError(), Failure.AMBIGUOUS),
        (requests.exceptions.SSLError(), Failure.PERMANENT),
        (requests.exceptions.InvalidURL(), Failure.PERMANENT),
        (requests.exceptions.MissingSchema(), Failure.PERMANENT),
        (requests.exceptions.TooManyRedirects(), Failure.PERMANENT),
        (requests.exceptions.InvalidJSONError(), Failure.PERMANENT),
        (requests.exceptions.SSLError("UNEXPECTED_EOF_WHILE_READING"), Failure.AMBIGUOUS),
        (requests.exceptions.ChunkedEncodingError(), Failure.AMBIGUOUS),
        (requests.exceptions.ContentDecodingError(), Failure.AMBIGUOUS),
        (requests.exceptions.JSONDecodeError("broke off", "{", 1), Failure.AMBIGUOUS),
        (requests.exceptions.ProxyError(), Failure.AMBIGUOUS),
        (requests.RequestException("new in a later version"), Failure.AMBIGUOUS),
        (http.client.IncompleteRead(b"{"), Failure.AMBIGUOUS),
        (http.client.BadStatusLine("?"), Failure.AMBIGUOUS),
        (http.client.InvalidURL("a b"), Failure.PERMANENT),
        (urllib_error(522), Failure.AMBIGUOUS),
        (urllib_error(404), Failure.PERMANENT),
        (urllib_error(403, Retry_After="7"), Failure.TRANSIENT),
        (http_error(403, Retry_After="7"), Failure.TRANSIENT),
        (http_error(301, Retry_After="7"), Failure.PERMANENT),
        (json.JSONDecodeError("broke off", "{", 1), Failure.AMBIGUOUS),
        (UnicodeDecodeError("utf-8", b"\xc3", 0, 1, "unexpected end of data"), Failure.AMBIGUOUS),
        (EOFError("Compressed file ended before the end-of-stream marker was reached"), Failure.AMBIGUOUS),
        (zlib.error("incomplete or truncated stream"), Failure.AMBIGUOUS),
        (gzip.BadGzipFile("CRC check failed"), Failure.AMBIGUOUS),
        (ElementTree.ParseError("no element found"), Failure.AMBIGUOUS),
        (ValueError("schema"), Failure.PERMANENT),
        (urllib.error.URLError(ConnectionRefusedError()), Failure.TRANSIENT),
        (socket.gaierror(socket.EAI_AGAIN, "no name server"), Failure.TRANSIENT),
        (ssl.SSLEOFError(), Failure.AMBIGUOUS),
        (ssl.SSLCertVerificationError(), Failure.PERMANENT),
        (RuntimeError("java.net.URISyntaxException: a b"), Failure.PERMANENT),
        (JobFailed("PostgreSQL: the server is away"), Failure.UNKNOWN),
        (DataRefused("a rule"), Failure.PERMANENT),
    ],
    ids=repr,
)
def test_errors_are_classified(error: Exception, failure: Failure) -> None:
    assert classify(error) is failure


def test_only_an_answer_that_blames_the_request_is_permanent() -> None:
    """What is no registered status, such as 499 and the 520 to 529 of proxies, may heal."""
    found = {status: classify(http_error(status)) for status in (*range(300, 600), 999)}
    transient = {status for status, failure in found.items() if failure is Failure.TRANSIENT}
    permanent = {status for status, failure in found.items() if failure is Failure.PERMANENT}
    assert transient == {425, 429, 503}
    redirects, wrong_requests = {300, 301, 302, 303, 304, 305, 307, 308}, {*range(400, 408), *range(409, 419)}
    assert permanent == redirects | wrong_requests | {421, 422, 423, 424, 426, 428, 431, 451}
    assert set(found.values()) == {Failure.TRANSIENT, Failure.PERMANENT, Failure.AMBIGUOUS}


@pytest.mark.parametrize(
    ("status", "failure"),
    [(400, Failure.TRANSIENT), (499, Failure.TRANSIENT), (500, Failure.AMBIGUOUS), (302, Failure.PERMANENT)],
)
def test_a_refusal_with_a_wish_invites_the_same_request(status: int, failure: Failure) -> None:
    assert classify(http_error(status, Retry_After="1")) is failure


@pytest.mark.parametrize(("total", "calls"), [(1.0, 1), (1.001, 2)])
def test_a_pause_that_ends_with_the_total_time_is_not_begun(time: Time, total: float, calls: int) -> None:
    operation = Operation(time, TimeoutError())
    with pytest.raises(RetryBudgetExhausted) if calls == 1 else contextlib.nullcontext():
        retrier(time, base_seconds=1, total_seconds=total).call(operation, idempotent=True)
    assert (operation.calls, len(time.sleeps)) == (calls, calls - 1)


def test_callers_share_a_budget_of_retries_that_successes_refill(time: Time) -> None:
    tokens = RetryTokens(capacity=10, cost=5)

    def caller() -> Retrier:
        return Retrier(RetryPolicy(attempts=9), tokens=tokens, clock=time.clock, sleep=time.sleep)

    dead = Operation(time, TimeoutError("down"), always=True)
    with pytest.raises(RetryBudgetExhausted, match="gave up after 3 tries: the callers' retry tokens"):
        caller().call(dead, idempotent=True)
    with pytest.raises(RetryBudgetExhausted, match="gave up after 1 tries"):
        caller().call(dead, idempotent=True)
    assert (dead.calls, tokens.left) == (4, 0)

    for _ in range(5):
        caller().call(Operation(time), idempotent=True)
    assert caller().call(Operation(time, TimeoutError()), idempotent=True) == "result"
    for _ in range(20):
        caller().call(Operation(time), idempotent=True)
    assert tokens.left == 10, "never more than the capacity"


def test_tokens_are_taken_by_one_thread_at_a_time() -> None:
    tokens = RetryTokens(capacity=1000, cost=1)

    def take_300() -> int:
        return sum(tokens.take() for _ in range(300))

    assert (sum(at_once(*[take_300] * 4)), tokens.left) == (1000, 0)


def test_a_date_without_the_server_s_clock_is_compared_with_ours() -> None:
    in_an_hour = format_datetime(dt.datetime.now(dt.UTC) + dt.timedelta(hours=1), usegmt=True)
    assert 3500 < retry_after(http_error(503, Retry_After=in_an_hour)) <= 3600


def test_a_success_gives_one_token_back_and_a_retry_may_cost_all() -> None:
    tokens = RetryTokens(capacity=5, cost=5)
    assert (tokens.take(), tokens.left, tokens.take()) == (True, 0, False)
    tokens.give_back()
    assert tokens.left == 1
    usual = RetryTokens()
    assert [usual.left, *(usual.take() for _ in range(21))] == [100, *[True] * 20, False]
    assert [RetryTokens(capacity=2, cost=1).take()] == [True]


def test_a_try_has_a_millisecond_at_least_and_a_pause_may_have_one_length(time: Time) -> None:
    operation = Operation(time)
    retrier(time, base_seconds=2, cap_seconds=2, attempt_seconds=0.5, total_seconds=0.0001).call(
        operation, idempotent=True
    )
    assert operation.timeouts == [0.001]
    assert RetryPolicy(base_seconds=2, cap_seconds=2, attempt_seconds=0.5).pauses(3) == (0, 2)
    assert str(RateLimited("slow down", retry_after=1)) == "slow down"


def test_the_log_names_the_kind_of_error_and_not_what_was_sent(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        retrier(time).call(Operation(time, TimeoutError("https://user:secret@host")), idempotent=True)
    assert caplog.messages == ["try 1 failed (TimeoutError), next in 1 s"]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"attempts": 0}, "attempts must be 1 or more, got 0"),
        (
            {"base_seconds": 2, "cap_seconds": 1},
            "^base_seconds is 2 and cap_seconds 1; 0 <= base_seconds <= cap_seconds is allowed$",
        ),
        ({"base_seconds": -1}, "0 <= base_seconds <= cap_seconds is allowed"),
        ({"jitter": "none"}, "jitter is 'none'; it must be full or tenth"),
        ({"total_seconds": 0}, "^attempt_seconds and total_seconds must be above 0$"),
        ({"attempt_seconds": 0}, "^attempt_seconds and total_seconds must be above 0$"),
        ({"total_seconds": math.nan}, "must be above 0"),
        ({"attempt_seconds": math.nan}, "must be above 0"),
        ({"cap_seconds": math.nan}, "0 <= base_seconds <= cap_seconds is allowed"),
    ],
)
def test_wrong_policies_are_refused_in_one_sentence(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongUse, match=message):
        RetryPolicy(**policy)


def test_wrong_tokens_are_refused() -> None:
    with pytest.raises(WrongUse, match="cost is 5 and capacity 1; 1 <= cost <= capacity is allowed"):
        RetryTokens(capacity=1, cost=5)


def test_snippet_of_the_page() -> None:
    answers = [http_error(503, Retry_After="0"), {"id": 7, "title": "Delta"}]

    class Session:
        def get(self, url: str, timeout: float) -> Any:
            answer = answers.pop(0)

            class Answer:
                def raise_for_status(self) -> None:
                    if isinstance(answer, Exception):
                        raise answer

                def json(self) -> Any:
                    return answer

            return Answer()

    scope: dict[str, Any] = {"session": Session(), "url": "https://articles.example/7"}
    text = snippet(PAGE, f"{HERE}::test_snippet_of_the_page")
    exec(text.replace("RetryPolicy(", "RetryPolicy(base_seconds=0, "), scope)
    assert scope["article"] == {"id": 7, "title": "Delta"}
    assert answers == []
