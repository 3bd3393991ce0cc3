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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_plus

_PARTITION = re.compile(r"(?:^|/)date=(\d{4}-\d{2}-\d{2})(?:/hour=(\d{1,2}))?/")


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
    """Return the events of an envelope, and what of it can't be read; one bad record leaves the others alone."""
    try:
        envelope = json.loads(body)
    except ValueError as failure:
        return [], [Poison(_digest(body), body, f"the envelope is no JSON: {failure}")]
    if isinstance(envelope, dict) and envelope.get("Event") == "s3:TestEvent":
        return [], []  # sent when a bucket is subscribed to
    records = envelope.get("Records") if isinstance(envelope, dict) else None
    if not isinstance(records, list):
        return [], [Poison(_digest(body), body, "the envelope has no list 'Records'")]
    events, poisons = [], []
    for record in records:
        try:
            events.append(_event(record))
        except (KeyError, TypeError, ValueError) as failure:
            alone = json.dumps({"Records": [record]}, sort_keys=True).encode()
            what = f"no {failure}" if isinstance(failure, KeyError) else str(failure)
            poisons.append(Poison(_digest(alone), alone, f"a record can't be read: {what}"))
    return events, poisons


def _event(record: Mapping[str, Any]) -> Event:
    bucket, described = record["s3"]["bucket"]["name"], record["s3"]["object"]
    type_ = record["eventName"].removeprefix("s3:")
    key = unquote_plus(described["key"])
    if not (isinstance(bucket, str) and key):
        raise ValueError("bucket and key must be texts")
    if ".." in key.split("/") or "\0" in key:
        raise ValueError(f"the key {key!r} leaves its folder")
    time = str(record.get("eventTime", ""))
    # The sequencer and the version tell two writes of one object apart; a redelivery repeats them.
    identity = [type_, bucket, key, time, *(described.get(n) for n in ("sequencer", "versionId", "eTag"))]
    return Event(_digest(json.dumps(identity).encode()), type_, bucket, key, time)


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
    except ValueError:
        return {}
    return {"partition_from": f"{start:%Y-%m-%dT%H}", "partition_to": f"{end:%Y-%m-%dT%H}"}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
