"""Notifications of an object store: pure functions that turn an envelope's bytes into events with an identity.

The envelope has S3's format (MinIO, Ceph and moto send the same): ``{"Records": [{"eventName": "ObjectCreated:Put",
"eventTime": …, "s3": {"bucket": {"name": …}, "object": {"key": …, "sequencer": …}}}, …]}``.
"""

from __future__ import annotations

import datetime as dt
import fnmatch
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_plus

from python_jobs.shared.core import exact_json
from python_jobs.shared.core.json_text import json_text

MAX_DEPTH = 64
"""Maximum number of levels in an envelope's JSON; S3's has five."""

_PARTITION = re.compile(r"(?:^|/)date=([0-9]{4}-[0-9]{2}-[0-9]{2})(?:/hour=([0-9]{1,2}))?/")


@dataclass(frozen=True)
class Event:
    """One record of an envelope: the notification about one object."""

    id: str
    """Identity of the event: the same for every delivery, alone or with other events in an envelope."""
    type: str
    """Type of the event, such as ObjectCreated:Put."""
    bucket: str
    key: str
    """The object's name, decoded."""
    time: str
    """Time of the event, from the sender."""
    alone: str = ""
    """Envelope with only this record, as JSON; if there is no other record, the envelope as delivered."""

    def values(self) -> dict[str, str]:
        """Return the values of the names that a workload's command may use in braces."""
        return {"bucket": self.bucket, "file_to_load": self.key, **_partition(self.key)}


@dataclass(frozen=True)
class Poison:
    """An envelope, or a record of one, that can't be read."""

    id: str
    """Identity of the bytes: the same for every delivery."""
    body: bytes
    """Bytes to handle again after the fault is fixed."""
    error: str


@dataclass(frozen=True)
class Filter:
    """The events that start a workload."""

    type: str = "ObjectCreated:*"
    """Event type, in which ``*`` matches any text."""
    bucket: str | None = None
    """Bucket; any by default."""
    prefix: str = ""
    """Start of the object's name."""
    suffix: str = ""
    """End of the object's name, such as the marker that a complete partition gets last."""

    def accepts(self, event: Event) -> bool:
        """Return whether the event passes the filter."""
        return (
            fnmatch.fnmatchcase(event.type, self.type.removeprefix("s3:"))
            and self.bucket in (None, event.bucket)
            and event.key.startswith(self.prefix)
            and event.key.endswith(self.suffix)
        )


PLACEHOLDERS = frozenset({"bucket", "file_to_load", "partition_from", "partition_to"})
"""Names that :meth:`Event.values` can return; the last two come from date=…/hour=… folders in the object's name."""


def read_envelope(body: bytes) -> tuple[list[Event], list[Poison]]:
    """Return the events of an envelope and its unreadable records; a bad record doesn't affect the others.

    No bytes raise an error: the sender's fault must not stop the handler.
    """
    try:
        text = body.decode("utf-8-sig")
        as_written = exact_json.parse(text)
        envelope = json.loads(text)
        if isinstance(envelope, dict) and envelope.get("Event") == "s3:TestEvent":
            return [], []  # sent when a subscription to a bucket begins
        records = _records(envelope)
    except Exception as failure:
        return [], [Poison(digest(body), body, f"the envelope {_said_of_envelope(failure)}")]
    events, poisons = [], []
    for record, written in zip(records, dict(as_written)["Records"], strict=True):
        alone = exact_json.write(exact_json.Object([("Records", [written])]))
        try:
            events.append(_event(record, text if len(records) == 1 else alone))
        except Exception as failure:
            what = f"no {failure}" if isinstance(failure, KeyError) else str(failure)
            poisons.append(Poison(digest(alone.encode()), alone.encode(), f"a record can't be read: {what}"))
    return events, poisons


class _Malformed(Exception):
    """The envelope is JSON, but has not S3's format."""


def _said_of_envelope(failure: Exception) -> str:
    if isinstance(failure, _Malformed):
        return str(failure)
    if isinstance(failure, RecursionError):
        return f"has more than {MAX_DEPTH} levels"
    return f"is no JSON in UTF-8: {failure}"


def _records(envelope: Any) -> list[Any]:
    """Return the records; levels are counted without recursion, because a sender could exhaust the stack."""
    level = [envelope]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            break
    else:
        raise _Malformed(f"has more than {MAX_DEPTH} levels")
    records = envelope.get("Records") if isinstance(envelope, dict) else None
    if not isinstance(records, list):
        raise _Malformed("has no list 'Records'")
    return records


def _event(record: Any, alone: str) -> Event:
    bucket, described = record["s3"]["bucket"]["name"], record["s3"]["object"]
    texts = {"eventName": record["eventName"], "bucket": bucket, "key": described["key"]}
    texts["eventTime"] = record.get("eventTime", "")
    for name, text in texts.items():
        if not isinstance(text, str) or (not text and name != "eventTime"):
            raise ValueError(f"{name} must be a text, got {json_text(text)[:100]}")
        text.encode()  # raises for half of a surrogate pair
    type_ = texts["eventName"].removeprefix("s3:")
    key = unquote_plus(texts["key"], errors="strict")
    if ".." in key.split("/") or "\0" in key:
        raise ValueError(f"the key {key!r} leaves its folder")
    time = texts["eventTime"]
    # Two writes of one object differ in sequencer or version; a redelivery repeats both.
    identity = [type_, bucket, key, time, *(described.get(n) for n in ("sequencer", "versionId", "eTag"))]
    return Event(digest(json_text(identity).encode()), type_, bucket, key, time, alone)


def _partition(key: str) -> dict[str, str]:
    """Return the bounds of the object's landing partition, or nothing if its folders name none."""
    match = _PARTITION.search(key)
    if match is None:
        return {}
    try:
        start = dt.datetime.fromisoformat(match[1])
        if match[2] is None:
            end = start + dt.timedelta(days=1)
        else:
            start = start.replace(hour=int(match[2]))
            end = start + dt.timedelta(hours=1)
    except (ValueError, OverflowError):
        return {}
    return {"partition_from": f"{start:%Y-%m-%dT%H}", "partition_to": f"{end:%Y-%m-%dT%H}"}


def digest(content: bytes) -> str:
    """Return a name of the bytes that is the same for every delivery."""
    return hashlib.sha256(content).hexdigest()[:32]
