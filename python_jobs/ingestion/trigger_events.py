"""Notifications of an object store: from the bytes of an envelope to events with an identity. Pure functions.

The envelope is S3's (MinIO, Ceph and moto send the same): ``{"Records": [{"eventName": "ObjectCreated:Put",
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

MAX_DEPTH = 64
"""Most levels of an envelope's JSON; S3's has five."""

_PARTITION = re.compile(r"(?:^|/)date=([0-9]{4}-[0-9]{2}-[0-9]{2})(?:/hour=([0-9]{1,2}))?/")


@dataclass(frozen=True)
class Event:
    """One record of an envelope: something happened to one object."""

    id: str
    """The same for every delivery of the event, alone or with others in an envelope."""
    type: str
    """Such as ObjectCreated:Put."""
    bucket: str
    key: str
    """The object's name, decoded."""
    time: str
    """When it happened, as the sender says."""
    alone: str = ""
    """The envelope with this record only, JSON; the envelope as it came if there is no other record."""

    def values(self) -> dict[str, str]:
        """Return what a workload's command may name in braces."""
        return {"bucket": self.bucket, "file_to_load": self.key, **_partition(self.key)}


@dataclass(frozen=True)
class Poison:
    """An envelope, or a record of one, that can't be read."""

    id: str
    """The same for every delivery."""
    body: bytes
    """What to handle again once the fault is mended."""
    error: str


@dataclass(frozen=True)
class Filter:
    """Which events a workload wants."""

    type: str = "ObjectCreated:*"
    """Event type, ``*`` standing for anything."""
    bucket: str | None = None
    """Bucket; any by default."""
    prefix: str = ""
    """Start of the object's name."""
    suffix: str = ""
    """End of the object's name, such as the marker that a complete partition gets last."""

    def accepts(self, event: Event) -> bool:
        """Return whether the event is one of these."""
        return (
            fnmatch.fnmatchcase(event.type, self.type.removeprefix("s3:"))
            and self.bucket in (None, event.bucket)
            and event.key.startswith(self.prefix)
            and event.key.endswith(self.suffix)
        )


PLACEHOLDERS = frozenset({"bucket", "file_to_load", "partition_from", "partition_to"})
"""What :meth:`Event.values` can hold; the last two come from date=…/hour=… folders in the object's name."""


def read_envelope(body: bytes) -> tuple[list[Event], list[Poison]]:
    """Return the events of an envelope, and what of it can't be read; one bad record leaves the others alone.

    Whatever the bytes are, nothing is raised: the sender's fault must not stop the handler.
    """
    try:
        text = body.decode("utf-8-sig")
        envelope = json.loads(text)
        if isinstance(envelope, dict) and envelope.get("Event") == "s3:TestEvent":
            return [], []  # sent when a bucket is subscribed to
        records = _records(envelope)
    except Exception as failure:
        return [], [Poison(digest(body), body, f"the envelope {_said_of_envelope(failure)}")]
    events, poisons = [], []
    for record in records:
        alone = json.dumps({"Records": [record]}, sort_keys=True)
        try:
            events.append(_event(record, text if len(records) == 1 else alone))
        except Exception as failure:
            what = f"no {failure}" if isinstance(failure, KeyError) else str(failure)
            poisons.append(Poison(digest(alone.encode()), alone.encode(), f"a record can't be read: {what}"))
    return events, poisons


class _Malformed(Exception):
    """An envelope that is JSON, but not one of S3's."""


def _said_of_envelope(failure: Exception) -> str:
    if isinstance(failure, _Malformed):
        return str(failure)
    if isinstance(failure, RecursionError):
        return f"has more than {MAX_DEPTH} levels"
    return f"is no JSON in UTF-8: {failure}"


def _records(envelope: Any) -> list[Any]:
    """Return the records; levels are counted without recursion, which a sender could exhaust."""
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
            raise ValueError(f"{name} must be a text, got {json.dumps(text)[:100]}")
        text.encode()  # half of a surrogate pair is no text
    type_ = texts["eventName"].removeprefix("s3:")
    key = unquote_plus(texts["key"], errors="strict")
    if ".." in key.split("/") or "\0" in key:
        raise ValueError(f"the key {key!r} leaves its folder")
    time = texts["eventTime"]
    # The sequencer and the version tell two writes of one object apart; a redelivery repeats them.
    identity = [type_, bucket, key, time, *(described.get(n) for n in ("sequencer", "versionId", "eTag"))]
    return Event(digest(json.dumps(identity).encode()), type_, bucket, key, time, alone)


def _partition(key: str) -> dict[str, str]:
    """Return the bounds of the landing partition that the object lies in, if its folders say so."""
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
    """Return a name for some bytes: the same for every delivery of them."""
    return hashlib.sha256(content).hexdigest()[:32]
