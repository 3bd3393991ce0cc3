"""The rule of sessions: its boundary, what is written when, and versions that only grow."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from python_jobs.shared.core.sessions import (
    CLOSED,
    MERGED,
    OPEN,
    Change,
    Emits,
    Event,
    advance,
    closes_at,
    each_events,
    each_interval,
    each_update,
    first_append,
    first_event,
    is_same_session,
    never,
    sessions_of,
)

MINUTE = 60_000_000
NO_WATERMARK = -(2**62)


def at(minute: float, order: tuple[int, ...] = (), value: str | None = "page") -> Event:
    return Event(round(minute * MINUTE), order, value)


def minutes(sessions: Sequence[Sequence[Event]]) -> list[list[float]]:
    return [[event.at / MINUTE for event in session] for session in sessions]


def test_exactly_the_gap_joins_and_one_microsecond_more_splits() -> None:
    assert is_same_session(0, 20 * MINUTE, 20 * MINUTE)
    assert not is_same_session(0, 20 * MINUTE + 1, 20 * MINUTE)
    # As session_window with 20 minutes: 10:00, 10:20, 10:39:59, 11:00 are two sessions.
    assert minutes(sessions_of([at(0), at(20), at(39.5), at(60)], 20 * MINUTE)) == [[0, 20, 39.5], [60]]


def test_order_and_repeats_have_no_influence() -> None:
    events = [at(5, (2,)), at(0, (1,)), at(5, (1,)), at(5, (1,), None), at(0, (1,))]
    expected = [[at(0, (1,)), at(5, (1,), None), at(5, (1,)), at(5, (2,))]]
    assert sessions_of(events, 10 * MINUTE) == expected
    assert sessions_of([*reversed(events), *events], 10 * MINUTE) == expected
    assert sessions_of([], 10 * MINUTE) == []


def test_equal_events_without_order_count_once_and_an_empty_value_is_not_null() -> None:
    assert sessions_of([at(0, (), ""), at(0, (), None), at(0, (), "")], MINUTE) == [
        [at(0, (), None), at(0, (), "")]
    ]


def test_events_of_one_time_and_order_are_in_the_order_of_their_values() -> None:
    values = ["", "A", "B", "C", "D"]
    events = [at(0, (), value) for value in values]
    assert sessions_of(reversed(events), MINUTE) == [events]


def test_a_session_closes_when_the_watermark_reaches_its_end_and_the_gap() -> None:
    session = [at(0), at(8)]
    assert closes_at(session, 10 * MINUTE) == 18 * MINUTE
    before = advance(session, [], 10 * MINUTE, 18 * MINUTE - 1)
    assert before == ([], session, 18 * MINUTE)
    after = advance(session, [], 10 * MINUTE, 18 * MINUTE, first_event)
    assert after == ([Change(session, (0,), CLOSED, 2)], [], None)


def test_new_events_beyond_the_gap_close_the_old_session_and_open_another_one() -> None:
    """Spark hands over new events before it looks at timers: 10:15 and 10:30 with ten minutes are two sessions."""
    result = advance([at(15)], [at(30)], 10 * MINUTE, 26 * MINUTE, first_event)
    assert result.changes == [
        Change([at(15)], (15 * MINUTE,), CLOSED, 1),
        Change([at(30)], (30 * MINUTE,), OPEN, 1),
    ]
    assert (result.still_open, result.next_close) == ([at(30)], 40 * MINUTE)


def test_the_next_close_is_that_of_the_session_that_ends_first() -> None:
    result = advance([at(0), at(40)], [at(45)], 10 * MINUTE, NO_WATERMARK, first_event)
    assert (result.next_close, minutes([result.still_open])) == (10 * MINUTE, [[0, 40, 45]])


@pytest.mark.parametrize("identity", [first_append, first_event])
def test_a_joined_session_is_taken_back_under_its_own_identity(
    identity: Callable[..., tuple[int, ...]],
) -> None:
    first, last = at(0, (1,)), at(16, (2,))
    middle = at(8, (3,))
    result = advance([first, last], [middle], 10 * MINUTE, NO_WATERMARK, identity)
    assert result.changes == [
        Change([first, middle, last], identity([first]), OPEN, 3),
        Change([], identity([last]), MERGED, 2),
    ]


def test_a_late_event_moves_an_identity_by_start_and_not_one_by_append() -> None:
    late = advance([at(5, (1,))], [at(0, (2,))], 10 * MINUTE, NO_WATERMARK, first_event)
    assert [(change.identity, change.status, change.version) for change in late.changes] == [
        ((0,), OPEN, 2),
        ((5 * MINUTE,), MERGED, 2),
    ]
    late = advance([at(5, (1,))], [at(0, (2,))], 10 * MINUTE, NO_WATERMARK, first_append)
    assert [(change.identity, change.status) for change in late.changes] == [((1,), OPEN)]


def test_the_next_close_is_later_than_the_watermark() -> None:
    """Spark refuses a timer that isn't."""
    drawn = random.Random(5)
    for _ in range(200):
        watermark = drawn.randrange(120) * MINUTE
        events = [at(drawn.randrange(120)) for _ in range(12)]
        closes = advance(events[:6], events[6:], 10 * MINUTE, watermark).next_close
        assert closes is None or closes > watermark


def written(emits: Emits, events: Sequence[Event], size: int = 1) -> list[tuple[int, str]]:
    """Return number of events and status of what is written when the events come ``size`` at a time."""
    changes: list[Change] = []
    known: list[Event] = []
    for start in range(0, len(events), size):
        result = advance(known, events[start : start + size], 10 * MINUTE, NO_WATERMARK, first_event, emits)
        known = result.still_open
        changes += result.changes
    last = advance(known, [], 10 * MINUTE, 10_000 * MINUTE, first_event, emits)
    return [(change.version, change.status) for change in [*changes, *last.changes]]


def test_an_open_session_is_written_as_often_as_it_is_wanted() -> None:
    events = [at(number) for number in range(25)]
    assert written(never, events) == [(25, CLOSED)]
    assert written(each_events(10), events) == [(10, OPEN), (20, OPEN), (25, CLOSED)]
    assert written(each_interval(10 * MINUTE), events) == [(1, OPEN), (11, OPEN), (21, OPEN), (25, CLOSED)]
    assert written(each_update, events) == [*((number, OPEN) for number in range(1, 26)), (25, CLOSED)]
    assert written(each_update, events, size=20) == [(20, OPEN), (25, OPEN), (25, CLOSED)], "once a batch"


def test_what_nobody_has_seen_is_not_taken_back() -> None:
    result = advance([at(0), at(16)], [at(8)], 10 * MINUTE, NO_WATERMARK, first_event, never)
    assert result.changes == []


def test_the_version_of_an_identity_never_falls() -> None:
    drawn = random.Random(7)
    for _ in range(50):
        events = [at(drawn.randrange(200), (number,)) for number in range(30)]
        versions: dict[tuple[int, ...], int] = {}
        known: list[Event] = []
        for start in range(0, 30, 3):
            result = advance(known, events[start : start + 3], 10 * MINUTE, NO_WATERMARK, first_append)
            known = result.still_open
            for change in result.changes:
                assert change.version > versions.get(change.identity, 0)
                versions[change.identity] = change.version
        in_use = {first_append(session): len(session) for session in sessions_of(events, 10 * MINUTE)}
        assert in_use.items() <= versions.items()
