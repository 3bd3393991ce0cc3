"""How a watermark moves: what has been seen of each partition, and the one time that this makes of it.

A watermark is the earliest event time that still counts as on time: the event time that a source has come to, less
an allowed lateness. Two rules keep it sound:

* within a partition the **latest** event time counts. The earliest would be stuck in the past with the first late
  record, and going back would open again what is closed;
* the watermark never goes back, whatever the partitions say.

Over partitions, and over sources, either may decide: ``min`` follows the slowest (more counts as on time, more is
kept open), ``max`` the fastest (the records of slow partitions are late). Nothing here knows of Spark.

Source: Data Engineering Design Patterns, chapter 3, Late Data Detector.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Combine = Literal["min", "max"]
Partition = tuple[str | None, str | None]
"""Name of the source, and of the partition within it; None where the data names none."""

_COMBINE = {"min": min, "max": max}


@dataclass(frozen=True)
class Progress:
    """How far one partition has come."""

    event_at: dt.datetime
    """Latest event time seen in it."""
    seen_at: dt.datetime
    """Processing time of the last batch with records of it."""


@dataclass(frozen=True)
class Policy:
    """What makes one watermark of the partitions' progress."""

    allowed_lateness: dt.timedelta
    """How long after the event time that a source has come to a record may still come."""
    within: Combine = "min"
    """Which partition of a source decides."""
    across: Combine = "min"
    """Which source decides."""
    idle_after: dt.timedelta | None = None
    """Processing time without records after which a partition decides nothing; None waits for it for ever."""


@dataclass(frozen=True)
class State:
    """What is known after a batch; the next one is judged by its watermark."""

    watermark: dt.datetime | None = None
    """None before the first record: everything is on time."""
    partitions: Mapping[Partition, Progress] = field(default_factory=dict)


def is_late(event_at: Any, watermark: Any) -> Any:
    """Return whether an event is late; on the watermark it is on time. Both are times, or Spark columns."""
    return event_at < watermark


def advance(state: State, latest: Mapping[Partition, dt.datetime], policy: Policy, now: dt.datetime) -> State:
    """Return the state after a batch: no partition and not the watermark goes back.

    Args:
        state: the state before the batch, by whose watermark the batch itself is judged.
        latest: the latest event time of each partition that the batch holds records of.
        policy: which partition decides.
        now: processing time of the batch.
    """
    partitions = dict(state.partitions)
    for partition, event_at in latest.items():
        seen = partitions.get(partition)
        partitions[partition] = Progress(event_at if seen is None else max(seen.event_at, event_at), now)
    reached = reached_time(partitions, policy, now)
    if reached is None:
        return State(state.watermark, partitions)
    candidate = reached - policy.allowed_lateness
    return State(candidate if state.watermark is None else max(state.watermark, candidate), partitions)


def reached_time(
    partitions: Mapping[Partition, Progress], policy: Policy, now: dt.datetime
) -> dt.datetime | None:
    """Return the event time that all partitions together have come to; None if all are idle, or there is none."""
    sources = defaultdict(list)
    for (source, _), progress in partitions.items():
        if policy.idle_after is None or now - progress.seen_at <= policy.idle_after:
            sources[source].append(progress.event_at)
    if not sources:
        return None
    return _COMBINE[policy.across](_COMBINE[policy.within](times) for times in sources.values())
