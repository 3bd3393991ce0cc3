"""The records of a gateway's request: cut out as they were sent, and checked by schema and rules."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from python_jobs.shared.core.failures import WrongUse
from python_jobs.streaming import rate_limit
from python_jobs.streaming.gateway_records import (
    Message,
    Rule,
    Topic,
    UnreadableBody,
    is_topic_name,
    read_records,
)
from python_jobs.streaming.rate_limit import RateLimit

NOW = dt.datetime(2024, 3, 1, 12, tzinfo=dt.UTC)
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["visit_id", "event_time"],
    "properties": {
        "visit_id": {"type": "string", "minLength": 1},
        "event_time": {"type": "string", "format": "date-time"},
        "duration": {"type": "number", "minimum": 0, "maximum": 9007199254740992},
        "page": {"enum": ["home", "about"]},
    },
}
VISIT = {"visit_id": "v1", "event_time": "2024-03-01T11:59:00Z"}


def topic(folder: Path, *rules: Rule, schema: Any = SCHEMA) -> Topic:
    file = folder / "schema.json"
    file.write_text(json.dumps(schema), encoding="utf-8")
    return Topic("visits", str(file), list(rules))


def reasons(given: Topic, text: str) -> list[str]:
    (record,) = read_records(f"[{text}]".encode())
    return given.checker()(record, NOW)


def test_a_record_keeps_every_character_that_was_sent() -> None:
    texts = [
        '{"a": 1.10, "b" :1E+2,"c":-0.0}',
        '{\n\t"text": "\\u00fc ü \\ud800 \\/"\r\n}',
        '{"n": 12345678901234567890123, "f": 0.1234567890123456789, "e": 1e400}',
        "[1, 2]",
        '"}],["',
        "null",
        "-0",
    ]
    body = f"\ufeff \n[ {' ,'.join(texts)} ]\t".encode()
    assert [record.text for record in read_records(body)] == texts
    assert [record.text for record in read_records(b"[]")] == []
    assert [record.text for record in read_records(b"[ ]")] == []
    long = "7" * 5_000
    assert read_records(f"[{long}]".encode())[0].value == Decimal(long)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "no JSON in UTF-8: Expecting value"),
        (b"{nope", "no JSON in UTF-8"),
        (b"[1 2]", "no JSON in UTF-8: Expecting ',' delimiter: line 1 column 4"),
        (b"[1,]", "no JSON in UTF-8"),
        (b"[1", "no JSON in UTF-8: Expecting ',' delimiter"),
        (b"[1] [2]", "no JSON in UTF-8: Extra data: line 1 column 5"),
        (b"[\xff]", "no JSON in UTF-8"),
        (b"[NaN]", "no JSON in UTF-8: NaN is no JSON"),
        (b"[-Infinity]", "no JSON in UTF-8: -Infinity is no JSON"),
        (
            b"[1e99999999999999999999]",
            "no JSON in UTF-8: the exponent of 1e99999999999999999999 is too large",
        ),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a": 1}', "the body must be a JSON array of records, got an object"),
        (b'"a"', "the body must be a JSON array of records, got a text"),
        (b" 1.5", "the body must be a JSON array of records, got a number"),
        (b"true", "the body must be a JSON array of records, got a boolean"),
        (b"null", "the body must be a JSON array of records, got null"),
    ],
)
def test_a_body_that_is_no_array_has_one_reason(body: bytes, sentence: str) -> None:
    with pytest.raises(UnreadableBody) as failure:
        read_records(body)
    assert str(failure.value).removeprefix("the body is ").startswith(sentence)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (VISIT, []),
        (VISIT | {"unknown": 1.5}, []),
        ({}, ['"visit_id" is a required property', '"event_time" is a required property']),
        (VISIT | {"visit_id": ""}, ['visit_id: "" is shorter than 1 character']),
        (VISIT | {"visit_id": 5}, ['visit_id: 5 is not of type "string"']),
        (VISIT | {"event_time": "10:00"}, ['event_time: "10:00" is not a "date-time"']),
        (VISIT | {"event_time": "2024-03-01"}, ['event_time: "2024-03-01" is not a "date-time"']),
        (VISIT | {"duration": -1}, ["duration: -1 is less than the minimum of 0"]),
        (VISIT | {"page": "x"}, ['page: "x" is not one of "home" or "about"']),
        ([], ["a record must be a JSON object, got an array"]),
        (None, ["a record must be a JSON object, got null"]),
    ],
)
def test_each_breach_of_the_schema_is_a_reason(tmp_path: Path, record: Any, expected: list[str]) -> None:
    assert reasons(topic(tmp_path), json.dumps(record)) == expected


def test_numbers_are_compared_with_all_their_digits(tmp_path: Path) -> None:
    given = topic(tmp_path)
    start = '{"visit_id": "v", "event_time": "2024-03-01T10:00Z", "duration": '
    assert reasons(given, start + "9007199254740992}") == []
    for number in ("9007199254740993", "9007199254740992.00000000000000000001", "1e400"):
        found = reasons(given, start + number + "}")
        assert [reason.split(" is ")[1] for reason in found] == [
            "greater than the maximum of 9007199254740992"
        ]


def test_a_name_that_is_there_twice_is_a_reason_of_its_record_alone(tmp_path: Path) -> None:
    check = topic(tmp_path, schema={}).checker()
    twice, fine = read_records(b'[{"a": {"b": 1, "c": 2, "b": 3}}, {"b": 1}]')
    assert check(twice, NOW) == ['the name "b" is there twice']
    assert check(fine, NOW) == []


def test_a_record_is_never_named_invalid_by_more_than_twenty_short_reasons(tmp_path: Path) -> None:
    given = topic(tmp_path, schema={"additionalProperties": {"type": "integer"}})
    found = reasons(given, json.dumps({f"n{i}": "x" * 5_000 for i in range(50)}))
    assert len(found) == 20
    assert max(map(len, found)) == 300


FUTURE = Rule("event_time", not_after="now", tolerance_seconds=60)
ENDED = Rule("visit.started", not_after="visit.ended")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"event_time": "2024-03-01T12:01:00Z"}, []),
        (
            {"event_time": "2024-03-01T12:01:00.000001Z"},
            ["event_time: 2024-03-01T12:01:00.000001Z is after now, 2024-03-01T12:00:00+00:00"],
        ),
        ({"event_time": "2024-03-01T14:01:00+02:00"}, []),
        ({"event_time": None}, []),
        ({}, []),
        ({"event_time": "soon"}, ['event_time: "soon" is no timestamp with date, hour and minute']),
        ({"event_time": "10:00"}, ['event_time: "10:00" is no timestamp with date, hour and minute']),
        ({"event_time": 1709294400}, ["event_time: 1709294400 is no timestamp with date, hour and minute"]),
        ({"event_time": True}, ["event_time: true is no timestamp with date, hour and minute"]),
        ({"visit": {"started": 1.5, "ended": 1.5}}, []),
        ({"visit": {"started": 1.50001, "ended": 1.5}}, ["visit.started: 1.50001 is after visit.ended, 1.5"]),
        ({"visit": {"started": 5}}, []),
        ({"visit": 5}, []),
        ({"visit": {"started": "2024-03-01 10:00", "ended": "2024-03-01T10:00Z"}}, []),
        (
            {"visit": {"started": "2024-03-01 10:01", "ended": "2024-03-01T10:00Z"}},
            ["visit.started: 2024-03-01 10:01 is after visit.ended, 2024-03-01T10:00:00+00:00"],
        ),
        (
            {"visit": {"started": "2024-03-01 10:00", "ended": 5}},
            ["visit.ended: 5 is no timestamp with date, hour and minute"],
        ),
    ],
)
def test_a_rule_compares_times_with_now_and_with_other_fields(
    tmp_path: Path, record: Any, expected: list[str]
) -> None:
    assert reasons(topic(tmp_path, FUTURE, ENDED, schema={}), json.dumps(record)) == expected


def test_numbers_of_a_rule_keep_their_digits(tmp_path: Path) -> None:
    given = topic(tmp_path, Rule("a", not_after="b"), schema={})
    assert reasons(given, '{"a": 9007199254740992.0, "b": 9007199254740992.1}') == []
    assert len(reasons(given, '{"a": 9007199254740992.1, "b": 9007199254740992.0}')) == 1
    assert len(reasons(given, '{"a": 1e400, "b": 2}')) == 1


def test_wrong_topics_schemas_and_rules_are_refused(tmp_path: Path) -> None:
    for name in ("", ".", "..", "a/b", "a b", "ü", "x" * 250):
        assert not is_topic_name(name)
        with pytest.raises(WrongUse, match="can't be the name of a topic"):
            Topic(name, "schema.json")
    assert is_topic_name("x" * 249)
    with pytest.raises(WrongUse, match=r"^the JSON Schema 'absent\.json' doesn't exist$"):
        Topic("visits", "absent.json").checker()
    for schema, said in [
        ({"type": "objct"}, "is not valid under any of the schemas"),
        ({"$ref": "http://127.0.0.1:1/other.json"}, "Retrieval is disabled"),
        ({"$ref": "#/$defs/absent"}, "does not exist"),
        ({"format": "postcode"}, "Unknown format: 'postcode'"),
        ([1], "is no JSON Schema that can be used"),
    ]:
        with pytest.raises(WrongUse, match=said):
            topic(tmp_path, schema=schema).checker()
    for tolerance in (-1.0, float("nan")):
        with pytest.raises(WrongUse, match="tolerance_seconds of the rule for a must be 0 or more, got"):
            Rule("a", not_after="now", tolerance_seconds=tolerance)
    with pytest.raises(WrongUse, match="tolerance_seconds of the rule for a needs not_after: now, got b"):
        Rule("a", not_after="b", tolerance_seconds=1)


def test_a_message_has_the_same_headers_live_and_replayed_but_for_the_origin() -> None:
    message = Message(
        "visits", "k", "{}", "https://example.org/ü", "r1", 2, "2024-03-01T12:00:00.000000+00:00"
    )
    assert message.headers() == [
        ("origin", b"api"),
        ("referral", "https://example.org/ü".encode()),
        ("event_id", b"r1-2"),
    ]
    assert message.headers("replay")[0] == ("origin", b"replay")


def test_each_client_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    limit = RateLimit(2, lambda: clock[0])
    assert [limit.wait("a") for _ in range(3)] == [0, 0, 0.5]
    assert limit.wait("b") == 0
    clock[0] += 0.25
    assert limit.wait("a") == 0.25
    clock[0] += 0.25
    assert [limit.wait("a"), limit.wait("a")] == [0, 0.5]
    clock[0] += 1000  # a pause allows as many at once as a second does
    assert [limit.wait("a") for _ in range(3)] == [0, 0, 0.5]
    slow = RateLimit(0.1, lambda: clock[0])
    assert [slow.wait("a"), slow.wait("a")] == [0, 10]
    monkeypatch.setattr(rate_limit, "MAX_CLIENTS", 2)
    few = RateLimit(1, lambda: clock[0])
    assert [few.wait(client) for client in ("a", "b", "a", "c")] == [0, 0, 1, 0]
    assert [few.wait("a"), few.wait("b")] == [1, 0]  # b was silent for the longest
