"""Sessions: one rule for what belongs together, for streams, batches and reprocessing. No Spark here.

The rule: two events of an owner that follow each other belong to one session if no more than the gap lies between
them. Exactly the gap still joins them, as in Spark's ``session_window``. The SQL form of the rule is the macro
``_starts_session`` (macros/shared/sessions.sql), and a test holds the two together.

A session is closed when the watermark has reached its last event plus the gap: from then on Spark drops every event
that could still join it.

Times and gaps are microseconds since 1970, so that nothing depends on a time zone or on floats.

Source: Data Engineering Design Patterns, chapter 5 (Incremental and Stateful Sessionizer) and chapter 11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

Status = Literal["open", "closed", "merged"]
OPEN: Status = "open"
CLOSED: Status = "closed"
MERGED: Status = "merged"


class Event(NamedTuple):
    """One event of an owner."""

    at: int
    """Event time."""
    order: tuple[int, ...]
    """What orders and distinguishes events of one event time: an append time and its ties, or positions; may be ()."""
    value: str | None
    """Value that the session lists, such as the page."""


Session = list[Event]
"""Events of one session, in order of event time."""
Identity = tuple[int, ...]
"""What makes a session's id, together with its owner: it must not change while the session grows."""


def is_same_session(earlier: int, later: int, gap: int) -> bool:
    """Return whether two events at these times, with none between them, belong to one session."""
    return later - earlier <= gap


def closing_time(end: int, gap: int) -> int:
    """Return the watermark with which a session is closed whose last event is at ``end``."""
    return end + gap


def closes_at(session: Session, gap: int) -> int:
    """Return the watermark with which the session is closed."""
    return closing_time(session[-1].at, gap)


def sessions_of(events: Iterable[Event], gap: int) -> list[Session]:
    """Return the events by session, in order of event time.

    Neither the order of ``events`` nor repeated events have an influence: events that are equal in time, order and
    value are the same event.
    """
    sessions: list[Session] = []
    for event in sorted(set(events), key=_in_order):
        if sessions and is_same_session(sessions[-1][-1].at, event.at, gap):
            sessions[-1].append(event)
        else:
            sessions.append([event])
    return sessions


def _in_order(event: Event) -> tuple[int, tuple[int, ...], bool, str]:
    return event.at, event.order, event.value is not None, event.value or ""


def first_append(session: Session) -> Identity:
    """Return the least append time of the session with its ties: it stays when a late event becomes the first one."""
    return min(event.order for event in session)


def first_event(session: Session) -> Identity:
    """Return the session's start: the same in a stream and in a batch, but a late event can move it."""
    return (session[0].at,)


Emits = Callable[[Session, Session], bool]
"""Whether a session that is still open is written: its events as they were (none: a new session), and as they are."""


def each_update(before: Session, after: Session) -> bool:
    """Write an open session whenever it has new events."""
    return before != after


def never(before: Session, after: Session) -> bool:
    """Write a session only when it is closed."""
    return False


def each_events(number: int) -> Emits:
    """Write an open session whenever it reaches a further multiple of ``number`` events."""
    return lambda before, after: len(after) // number > len(before) // number


def each_interval(length: int) -> Emits:
    """Write an open session whenever its last event is in a later interval of event time than before."""
    return lambda before, after: not before or after[-1].at // length > before[-1].at // length


class Change(NamedTuple):
    """A session to write."""

    session: Session
    """Its events; none if it was merged."""
    identity: Identity
    status: Status
    version: int
    """It grows with each change of the session that has this identity: the row of a higher version is the newer one."""


class Advance(NamedTuple):
    """What new events and a new watermark change."""

    changes: list[Change]
    """Sessions to write."""
    still_open: list[Event]
    """Events of the sessions that are still open, to keep as state."""
    next_close: int | None
    """Watermark with which the next session is closed; None if no session is open."""


def advance(
    known: Sequence[Event],
    new: Sequence[Event],
    gap: int,
    watermark: int,
    identity: Callable[[Session], Identity] = first_append,
    emits: Emits = each_update,
) -> Advance:
    """Add new events of one owner to the known ones of open sessions.

    A session whose identity vanishes, because it joined an earlier one, is written as ``merged``, unless ``emits`` is
    :func:`never`: then nobody has seen it.
    """
    before = {identity(session): session for session in sessions_of(known, gap)}
    changes: list[Change] = []
    still_open: list[Session] = []
    after = set()
    for session in sessions_of([*known, *new], gap):
        name, closed = identity(session), closes_at(session, gap) <= watermark
        after.add(name)
        if not closed:
            still_open.append(session)
        if closed or emits(before.get(name, []), session):
            changes.append(Change(session, name, CLOSED if closed else OPEN, len(session)))
    if emits is not never:
        gone = sorted(before.keys() - after)
        changes += [Change([], name, MERGED, len(before[name]) + 1) for name in gone]
    return Advance(
        changes,
        [event for session in still_open for event in session],
        min((closes_at(session, gap) for session in still_open), default=None),
    )
