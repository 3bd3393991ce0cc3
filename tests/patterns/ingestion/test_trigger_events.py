"""Envelopes of an object store, without a trigger: identities, filters, and the reason of each unreadable record."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from python_jobs.ingestion.trigger_events import MAX_DEPTH, Event, Filter, Poison, digest, read_envelope


def record(**changes: Any) -> dict[str, Any]:
    described = {"key": changes.pop("key", "a.json"), **changes.pop("described", {})}
    bucket = changes.pop("bucket", "data")
    return {
        "eventName": "ObjectCreated:Put", "eventTime": "10:00",
        "s3": {"bucket": {"name": bucket}, "object": described},
    } | changes  # fmt: skip


def envelope(*records: Any) -> bytes:
    return json.dumps({"Records": list(records)}).encode()


def only(body: bytes) -> Event:
    (event,), poisons = read_envelope(body)
    assert poisons == []
    return event


def error_of(body: bytes) -> str:
    events, (poison,) = read_envelope(body)
    assert events == []
    return poison.error


def test_an_event_holds_its_record_and_the_whole_envelope_if_it_is_alone() -> None:
    body = envelope(record())
    event = only(body)
    identity = '["ObjectCreated:Put", "data", "a.json", "10:00", null, null, null]'
    assert event == Event(
        hashlib.sha256(identity.encode()).hexdigest()[:32],
        "ObjectCreated:Put", "data", "a.json", "10:00", body.decode(),
    )  # fmt: skip
    events, poisons = read_envelope(envelope(record(key="a"), record(key="b")))
    assert poisons == []
    assert [event.alone for event in events] == [envelope(record(key=key)).decode() for key in ("a", "b")]
    assert only(b"\xef\xbb\xbf" + body).id == event.id


@pytest.mark.parametrize("name", ["sequencer", "versionId", "eTag"])
def test_two_writes_of_one_object_differ(name: str) -> None:
    one, two = (only(envelope(record(described={name: value}))).id for value in ("1", "2"))
    assert one != two != only(envelope(record())).id


@pytest.mark.parametrize(
    "changes", [{"bucket": "b"}, {"key": "b"}, {"eventName": "ObjectRemoved:Delete"}, {"eventTime": "11:00"}]
)
def test_each_part_of_an_event_is_part_of_its_identity(changes: dict[str, Any]) -> None:
    assert only(envelope(record(**changes))).id != only(envelope(record())).id


def test_minio_s_names_of_types_are_those_of_s3() -> None:
    assert only(envelope(record(eventName="s3:ObjectCreated:Put"))).type == "ObjectCreated:Put"


def test_an_event_without_a_time_has_none() -> None:
    given = record()
    del given["eventTime"]
    assert only(envelope(given)).time == ""


def test_the_first_notification_of_a_bucket_is_no_event() -> None:
    assert read_envelope(b'{"Event": "s3:TestEvent"}') == ([], [])
    assert error_of(b'{"Event": "s3:Other"}') == "the envelope has no list 'Records'"


def test_a_bad_record_leaves_the_others_alone() -> None:
    bad = {"eventName": 1}
    events, poisons = read_envelope(envelope(record(key="a"), bad, record(key="b")))
    assert [event.key for event in events] == ["a", "b"]
    alone = b'{"Records": [{"eventName": 1}]}'
    assert poisons == [Poison(digest(alone), alone, "a record can't be read: no 's3'")]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"[1]", "the envelope has no list 'Records'"),
        (b'{"Records": {}}', "the envelope has no list 'Records'"),
        (b"[" * 100_000, "the envelope has more than 64 levels"),
        (envelope(record(key="")), 'a record can\'t be read: key must be a text, got ""'),
        (envelope(record(bucket="")), 'a record can\'t be read: bucket must be a text, got ""'),
        (envelope(record(eventTime=7)), "a record can't be read: eventTime must be a text, got 7"),
        (envelope(record(eventTime="\ud800")), "a record can't be read: 'utf-8' codec can't encode character "
         "'\\ud800' in position 0: surrogates not allowed"),
        (envelope(record(key=["b" * 200])), f'a record can\'t be read: key must be a text, got ["{"b" * 98}'),
        (envelope(record(key="a/../b")), "a record can't be read: the key 'a/../b' leaves its folder"),
        (envelope(record(key="a%00b")), "a record can't be read: the key 'a\\x00b' leaves its folder"),
        (envelope(record(key="%FF")), "a record can't be read: 'utf-8' codec can't decode byte 0xff in position 0: "
         "invalid start byte"),
    ],
)  # fmt: skip
def test_an_unreadable_envelope_says_why(body: bytes, error: str) -> None:
    assert error_of(body) == error


def test_an_unreadable_envelope_is_kept_as_it_is() -> None:
    (poison,) = read_envelope(b"{nope")[1]
    assert (poison.id, poison.body) == (digest(b"{nope"), b"{nope")
    assert poison.error.startswith("the envelope is no JSON in UTF-8: Expecting property name")


def test_a_key_may_hold_two_dots_that_leave_no_folder() -> None:
    assert only(envelope(record(key="a..b/c+d%2B"))).key == "a..b/c d+"


@pytest.mark.parametrize(("levels", "readable"), [(MAX_DEPTH - 3, True), (MAX_DEPTH - 2, False)])
def test_an_envelope_may_have_64_levels(levels: int, readable: bool) -> None:
    deep = b"[" * (levels - 1) + b"1" + b"]" * (levels - 1)
    body = envelope(record(extra=0)).replace(b'"extra": 0', b'"extra": ' + deep)
    events, poisons = read_envelope(body)
    assert ([len(events), len(poisons)] == [1, 0]) is readable


def test_values_of_a_workload_s_command() -> None:
    event = Event("1", "ObjectCreated:Put", "data", "visits/date=2024-03-01/hour=9/a.json", "")
    assert event.values() == {
        "bucket": "data", "file_to_load": "visits/date=2024-03-01/hour=9/a.json",
        "partition_from": "2024-03-01T09", "partition_to": "2024-03-01T10",
    }  # fmt: skip
    assert Event("1", "t", "data", "visits/a.json", "").values() == {
        "bucket": "data",
        "file_to_load": "visits/a.json",
    }


@pytest.mark.parametrize(
    ("key", "bounds"),
    [
        ("date=2024-02-29/a", ("2024-02-29T00", "2024-03-01T00")),
        ("x/date=2024-03-01/hour=23/a", ("2024-03-01T23", "2024-03-02T00")),
        ("update=2024-03-01/a", None),
        ("date=2024-03-01", None),
        ("date=2024-13-01/a", None),
        ("date=2024-03-01/hour=24/a", None),
        ("date=9999-12-31/a", None),
        ("date=9999-12-31/hour=23/a", None),
    ],
)
def test_the_folders_of_a_key_name_a_partition(key: str, bounds: tuple[str, str] | None) -> None:
    values = Event("1", "t", "data", key, "").values()
    expected = {} if bounds is None else {"partition_from": bounds[0], "partition_to": bounds[1]}
    assert values == {"bucket": "data", "file_to_load": key} | expected


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({}, True),
        ({"type": "s3:ObjectCreated:Put"}, True),
        ({"type": "objectcreated:*"}, False),
        ({"type": "ObjectRemoved:*"}, False),
        ({"bucket": "data"}, True),
        ({"bucket": "other"}, False),
        ({"prefix": "in/"}, True),
        ({"prefix": "out/"}, False),
        ({"suffix": ".json"}, True),
        ({"suffix": ".csv"}, False),
    ],
)
def test_a_filter_takes_type_bucket_and_both_ends_of_the_name(
    changes: dict[str, Any], accepted: bool
) -> None:
    event = Event("1", "ObjectCreated:Put", "data", "in/a.json", "")
    assert Filter(**changes).accepts(event) is accepted
