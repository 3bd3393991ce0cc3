"""Versions of a key and the rows that wait for theirs: the rule of the Dynamic Joiner's as-of join. No Spark here.

The rule: a probe takes the latest version whose time isn't after its own. The probe waits until the watermark has
reached its time, so that versions may come in any order until then. Of the versions that the watermark has reached,
only the latest can still be taken; the others are dropped.

Times are microseconds since 1970, so that nothing depends on a time zone or on floats.

Source: Data Engineering Design Patterns, chapter 5, Dynamic Joiner (the temporal table join).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Version(NamedTuple):
    """A version of a key."""

    at: int
    """Time from which it holds."""
    order: tuple[int, ...]
    """What orders versions of one time, such as partition and offset; may be ()."""
    value: str | None
    """Its columns; None if the key was deleted at this time."""


class Probe(NamedTuple):
    """A row that takes the version of its time."""

    at: int
    value: str
    """Its columns."""


class Answer(NamedTuple):
    """A probe with the version that it takes; None if there is none, or if it is too old."""

    probe: Probe
    version: Version | None


class Advance(NamedTuple):
    """What new rows and a new watermark change."""

    answers: list[Answer]
    """Probes whose time the watermark has reached."""
    versions: list[Version]
    """Versions that probes may still take, in order of time: to keep as state."""
    waiting: list[Probe]
    """Probes whose time the watermark hasn't reached: to keep as state."""


def advance(
    versions: Iterable[Version],
    waiting: Iterable[Probe],
    new: Iterable[Probe],
    watermark: int,
    validity: int | None = None,
) -> Advance:
    """Answer the probes that the watermark has reached, and drop what nothing needs any more.

    Args:
        versions: known and new versions of one key, in any order; repeated ones count once.
        waiting: known probes of the key.
        new: new probes; those behind the watermark are late and have no answer.
        watermark: time up to which all rows are taken for known.
        validity: time for which a version may be taken; None: until the next version.
    """
    ordered = sorted(set(versions), key=_in_order)
    probes = {*waiting, *(probe for probe in new if probe.at > watermark)}
    answers = [
        Answer(probe, version_at(ordered, probe.at, validity))
        for probe in sorted(probes)
        if probe.at <= watermark
    ]
    still_waiting = sorted(probe for probe in probes if probe.at > watermark)
    return Advance(answers, _needed(ordered, watermark, validity), still_waiting)


def version_at(ordered: Sequence[Version], at: int, validity: int | None = None) -> Version | None:
    """Return the latest of ``ordered`` versions that isn't after ``at``; None if there is none or it is too old."""
    place = bisect_right(ordered, at, key=lambda version: version.at)
    if place == 0:
        return None
    version = ordered[place - 1]
    return version if validity is None or at - version.at <= validity else None


def next_change(
    versions: Sequence[Version], waiting: Iterable[Probe], validity: int | None = None
) -> int | None:
    """Return the watermark with which state that :func:`advance` has left changes next; None if it never does."""
    times = [probe.at for probe in waiting]
    times += [version.at for version in versions[1:2]]  # from then on, nothing takes the first version
    if validity is not None:
        times += [version.at + validity for version in versions[:1]]
    return min(times, default=None)


def _needed(ordered: Sequence[Version], watermark: int, validity: int | None) -> list[Version]:
    # A deletion stays like any version: without it, a late older version would hold again.
    reached = bisect_right(ordered, watermark, key=lambda version: version.at)
    kept = ordered[max(reached - 1, 0) :]
    return [version for version in kept if validity is None or version.at + validity > watermark]


def _in_order(version: Version) -> tuple[int, tuple[int, ...], bool, str]:
    return version.at, version.order, version.value is not None, version.value or ""
