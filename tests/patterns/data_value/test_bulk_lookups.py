"""Bulk lookups in an HTTP API, on a real server and without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from python_jobs.data_value.bulk_lookups import Api, Lookups
from python_jobs.shared.core.failures import DataRefused, JobFailed, WrongUse
from python_jobs.shared.core.retry import Retrier, RetryPolicy
from tests.support.geo_api import GeoApi, running_geo_api
from tests.support.session import environment


@pytest.fixture(scope="module")
def server() -> Iterator[GeoApi]:
    with running_geo_api() as running:
        yield running


def lookups(server: GeoApi, policy: RetryPolicy | None = None, **api: Any) -> Lookups:
    pauses: list[float] = []
    retrier = Retrier(policy or RetryPolicy(attempts=3, attempt_seconds=5), sleep=pauses.append)
    found = Lookups(
        Api(**({"url": server.url, "keys_parameter": "ips", "answer_field": "mapped"} | api)), retrier
    )
    found.pauses = pauses  # type: ignore[attr-defined]
    return found


def test_a_buffer_of_keys_is_one_request_and_no_key_is_asked_for_twice(server: GeoApi) -> None:
    ips = [f"192.0.2.{number}" for number in range(250)]
    server.reset({ip: f"place of {ip}" for ip in ips})
    found = lookups(server)
    found.look_up(ips[:240] + ips[:50])
    assert [len(some) for some in server.asked] == [100, 100, 40]
    found.look_up(ips)
    assert [len(some) for some in server.asked] == [100, 100, 40, 10]
    assert server.asked_once == sorted(ips)
    assert found.answers == server.places
    found.look_up(ips)
    assert (len(server.asked), found.requests) == (4, 4), "all keys were known"
    found.look_up([])
    assert len(server.asked) == 4
    # 250 rows of 40 keys are one request; a buffer of one asks for each key.
    server.reset(server.places)
    lookups(server).look_up(ips[row % 40] for row in range(250))
    assert [len(some) for some in server.asked] == [40]
    server.reset(server.places)
    lookups(server, buffer=1).look_up(ips[:3])
    assert [len(some) for some in server.asked] == [1, 1, 1]


def test_a_key_that_the_answer_leaves_out_has_no_value_and_others_keep_theirs(server: GeoApi) -> None:
    server.reset({})
    mapped = b'{"a": "x", "b": null, "c": {"lat": 1.10, "n": "\xc3\xa9"}, "d": 1e400, "z": "not asked"}'
    odd = b'{"more": 1, "mapped": %s}' % mapped
    server.reset({}, odd)
    found = lookups(server)
    found.look_up(["a", "b", "c", "d", "e"])
    assert found.answers == {"a": "x", "b": None, "c": '{"lat": 1.10, "n": "é"}', "d": "1e400", "e": None}
    # JSON can escape half a pair, which UTF-8 can't hold, nor a table.
    server.reset({}, b'{"mapped": {"f": "\\ud800", "g": "\\ud83d\\ude00"}}')
    found.look_up(["f", "g"])
    assert (found.answers["f"], found.answers["g"]) == ('"\\ud800"', "\N{GRINNING FACE}")
    # A key is sent as it is.
    server.reset({"a b&c=d#é/": "odd"})
    found.look_up(["a b&c=d#é/"])
    assert (server.asked, found.answers["a b&c=d#é/"]) == ([["a b&c=d#é/"]], "odd")


@pytest.mark.parametrize("failure", [500, 503, 429, 408, b'{"mapped": {"a":', b"<html>busy</html>"])
def test_a_failure_that_may_pass_is_retried(server: GeoApi, failure: int | bytes) -> None:
    server.reset({"a": "x"}, failure, failure)
    found = lookups(server)
    found.look_up(["a"])
    assert found.answers == {"a": "x"}
    assert (len(server.asked), found.requests) == (3, 1)
    assert len(found.pauses) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("failure", "tries", "sentence"),
    [
        (500, 3, r"gave no answer for 1 keys \(status 500\); nothing is written in place of their values"),
        (b"<html>busy</html>", 3, "gave no answer for 1 keys .JSONDecodeError."),
        (404, 1, r"status 404"),
        (301, 1, r"status 301"),
        (401, 1, r"status 401"),
        (b'{"error": "no"}', 1, "has no object 'mapped', which maps keys to values"),
        (b'{"mapped": ["x"]}', 1, "has no object 'mapped'"),
        (b"[]", 1, "has no object 'mapped'"),
        (b'{"mapped": {"a": ' + b"[" * 100_000, 1, "gave no answer for 1 keys .RecursionError."),
        (b'{"mapped": {"a": NaN}}', 1, "gave no answer for 1 keys .ValueError."),
        (b'{"mapped": {"a": "x", "b": "y", "a": "z"}}', 1, "gave no answer for 1 keys .RepeatedName."),
        (b'{"mapped": {"a": "x"}, "mapped": {}}', 1, "gave no answer for 1 keys .RepeatedName."),
        (b'{"mapped": {"a": "\xed\xa0\x80"}}', 3, "gave no answer for 1 keys .UnicodeDecodeError."),
        ('{"mapped": {"a": "x"}}'.encode("utf-16"), 3, "gave no answer for 1 keys .UnicodeDecodeError."),
    ],
)
def test_a_failure_that_stays_ends_within_its_bounds_and_gives_no_values(
    server: GeoApi, failure: int | bytes, tries: int, sentence: str
) -> None:
    server.reset({"k": "x", "a": "y"})
    found = lookups(server, buffer=1)
    found.look_up(["k"])
    server.reset(server.places, *[failure] * 9)
    with pytest.raises(JobFailed, match=sentence) as raised:
        found.look_up(["a", "b"])
    assert len(server.asked) == tries
    assert found.answers == {"k": "x"}, (
        "the answers before the failure are kept, and no key has None in their place"
    )
    assert "ips=" not in str(raised.value)


def test_silence_and_a_closed_port_are_failures(server: GeoApi) -> None:
    server.reset({"a": "x"}, 1.0)
    policy = RetryPolicy(attempts=2, attempt_seconds=0.2)
    found = lookups(server, policy)
    found.look_up(["a"])
    assert found.answers == {"a": "x"}
    server.reset({"b": "x"}, 0.5, 0.5)
    with pytest.raises(JobFailed, match=r"\(ReadTimeout\)"):
        found.look_up(["b"])
    with pytest.raises(JobFailed, match=r"\(ConnectionError\)"):
        lookups(server, policy, url="http://127.0.0.1:9/fetch").look_up(["a"])
    # The next pause would pass the time for all tries.
    server.reset({"b": "x"}, 500, 500)
    with pytest.raises(JobFailed, match=r"\(status 500\)"):
        lookups(server, RetryPolicy(attempts=9, base_seconds=2, total_seconds=1.5, jitter="tenth")).look_up(
            ["b"]
        )
    assert len(server.asked) == 1


def test_a_key_that_is_no_part_of_a_list_is_refused_before_the_request(server: GeoApi) -> None:
    server.reset({})
    for key in ("a,b", ""):
        with pytest.raises(DataRefused, match=rf"the key '{key}' can't be looked up"):
            lookups(server).look_up(["k", key])
    assert server.asked == []


def test_a_token_is_sent_and_settings_are_checked(server: GeoApi) -> None:
    server.reset({})
    with environment(GEO_TOKEN="secret"):
        lookups(server, token_env="GEO_TOKEN").look_up(["a"])
    lookups(server).look_up(["a"])
    assert server.tokens == {"Bearer secret", None}
    for api, sentence in (
        ({"token_env": "GEO_TOKEN"}, "environment variable GEO_TOKEN, which token_env names, is not set"),
        ({"buffer": 0}, "buffer must be 1 or more, got 0"),
        ({"url": "ftp://x"}, "url must begin with http:// or https:// and name a host"),
    ):
        with pytest.raises(WrongUse, match=sentence):
            lookups(server, **api)
