"""Bins of the Bin Pack Orderer: each has at most one event of a key, so its events may be stored in any order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Event(NamedTuple):
    """An event to deliver; the fields are in the order in which events are compared."""

    key: str
    """What the order is kept for: the events of other keys may pass each other."""
    at: int
    """Event time in microseconds since 1970."""
    order: tuple[int, ...]
    """Order of events of one time."""
    payload: str
    """What is delivered; it also breaks the last tie."""


def packed(events: Iterable[Event]) -> list[list[Event]]:
    """Return the bins in the order in which they are to be sent: the n-th event of each key is in bin n.

    The events come in any order; equal input gives equal bins.
    """
    bins: list[list[Event]] = []
    key, place = None, 0
    for event in sorted(events):
        place = place + 1 if event.key == key else 0
        key = event.key
        if place == len(bins):
            bins.append([])
        bins[place].append(event)
    return bins
