"""Watermarks: compute one watermark from the latest event time of each partition.

A watermark is the earliest event time that still counts as on time: a source's high-water mark of event time minus an
allowed lateness. Two rules keep it correct:

* within a partition the **latest** event time counts. The earliest would stay in the past with the first late record;
* the watermark never goes back, because a lower watermark would open closed windows again.

Across partitions, and across sources, ``min`` follows the slowest (more records are on time, more windows stay open),
and ``max`` follows the fastest (the records of slow partitions are late). This module doesn't use Spark.

Source: Data Engineering Design Patterns, chapter 3, Late Data Detector.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from python_jobs.shared.core.intervals import moved

Combine = Literal["min", "max"]
Partition = tuple[str | None, str | None]
"""Name of the source, and of the partition within the source; None if the data has no such name."""

_COMBINE = {"min": min, "max": max}


@dataclass(frozen=True)
class Progress:
    """The high-water mark of one partition."""

    event_at: dt.datetime
    """Latest event time of the partition."""
    seen_at: dt.datetime
    """Processing time of the last batch with records of the partition."""


@dataclass(frozen=True)
class Policy:
    """The rules that compute one watermark from the partitions' progress."""

    allowed_lateness: dt.timedelta
    """Time by which a record may be behind the source's high-water mark and still be on time."""
    within: Combine = "min"
    """Partition of a source that decides: the slowest (min, default) or the fastest (max)."""
    across: Combine = "min"
    """Source that decides: the slowest (min, default) or the fastest (max)."""
    idle_after: dt.timedelta | None = None
    """Processing time without records after which a partition is left out; None (default) waits for it for ever."""


@dataclass(frozen=True)
class State:
    """The state after a batch; its watermark splits the next batch."""

    watermark: dt.datetime | None = None
    """None before the first record: all records are on time."""
    partitions: Mapping[Partition, Progress] = field(default_factory=dict)


def is_late(event_at: Any, watermark: Any) -> Any:
    """Return whether an event is late; an event at the watermark is on time. Both are times, or Spark columns."""
    return event_at < watermark


def advance(state: State, latest: Mapping[Partition, dt.datetime], policy: Policy, now: dt.datetime) -> State:
    """Return the state after a batch; neither a partition nor the watermark goes back.

    Args:
        state: State before the batch, whose watermark splits the batch.
        latest: Latest event time of each partition with records in the batch.
        policy: Rules that compute the watermark.
        now: Processing time of the batch.
    """
    partitions = dict(state.partitions)
    for partition, event_at in latest.items():
        seen = partitions.get(partition)
        partitions[partition] = Progress(event_at if seen is None else max(seen.event_at, event_at), now)
    reached = reached_time(partitions, policy, now)
    if reached is None:
        return State(state.watermark, partitions)
    candidate = moved(reached, -policy.allowed_lateness)
    return State(candidate if state.watermark is None else max(state.watermark, candidate), partitions)


def reached_time(
    partitions: Mapping[Partition, Progress], policy: Policy, now: dt.datetime
) -> dt.datetime | None:
    """Return the high-water mark of all partitions together; None if all are idle, or there is no partition."""
    sources = defaultdict(list)
    for (source, _), progress in partitions.items():
        if policy.idle_after is None or now - progress.seen_at <= policy.idle_after:
            sources[source].append(progress.event_at)
    if not sources:
        return None
    return _COMBINE[policy.across](_COMBINE[policy.within](times) for times in sources.values())
