"""Ordered delivery: bins keep the order of each key whatever a sink refuses, and a retry sends only what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_jobs.data_value.bins import Event, packed
from python_jobs.data_value.ordered_delivery import Courier, Refusal, Sink, Undelivered
from python_jobs.shared.core.retry import Failure, RetryPolicy

BUSY, INVALID = Refusal("Busy", Failure.TRANSIENT), Refusal("Invalid", Failure.PERMANENT)
UNCLEAR = Refusal("Unclear", Failure.AMBIGUOUS)
ALWAYS = 99


class Stub(Sink[Any]):
    """A sink in memory that refuses what a test says; real ones are in test_bin_pack_orderer.py."""

    def __init__(self, answers: Mapping[Any, list[Any]], records_at_once: int = 500) -> None:
        self.answers = {record: list(given) for record, given in answers.items()}
        self.records_at_once = records_at_once
        self.calls: list[list[Any]] = []
        self.seconds: list[float] = []
        self.stored: list[Any] = []

    def send(self, records: Sequence[Any], seconds: float) -> dict[int, Refusal]:
        self.calls.append(list(records))
        self.seconds.append(seconds)
        refused: dict[int, Refusal] = {}
        for place, record in enumerate(records):
            answer = self.answers.get(record, [])
            said = answer.pop(0) if answer else None
            if isinstance(said, Exception):
                raise said
            if said is None:
                self.stored.append(record)
            else:
                refused[place] = said
        return refused


def courier(sink: Stub, attempts: int = 3) -> Courier[Any]:
    return Courier(sink, RetryPolicy(attempts=attempts, base_seconds=0, cap_seconds=0))


def event(key: str, clock: str, order: int = 0, payload: str = "{}") -> Event:
    hours, minutes = map(int, clock.split(":"))
    return Event(key, (hours * 60 + minutes) * 60_000_000, (order,), payload)


A1, A2, A3 = (event("A", clock) for clock in ("10:00", "10:10", "10:20"))
B1 = event("B", "10:05")
C1, C2 = event("C", "10:00"), event("C", "10:30")
MIXED = [C2, A3, B1, A1, C1, A2]


def test_the_nth_event_of_each_key_is_in_bin_n() -> None:
    assert packed(MIXED) == [[A1, B1, C1], [A2, C2], [A3]]
    assert packed([]) == []


def test_keys_of_many_sizes_give_bins_that_only_get_smaller() -> None:
    events = [
        event(provider, f"10:{minute:02d}")
        for provider, minutes in (("x", 10), ("y", 3), ("z", 7))
        for minute in range(minutes)
    ]
    assert [len(events) for events in packed(events)] == [3, 3, 3, 2, 2, 2, 2, 1, 1, 1]


def test_equal_times_are_ordered_by_their_ties_and_then_by_their_content() -> None:
    first, second = event("A", "10:00", 1, "z"), event("A", "10:00", 2, "a")
    third = event("A", "10:00", 2, "b")
    assert packed([third, second, first]) == packed([second, first, third]) == [[first], [second], [third]]


EVENTS = st.lists(
    st.builds(
        Event,
        st.sampled_from("ABCDE"),
        st.integers(0, 5),
        st.tuples(st.integers(0, 2)),
        st.sampled_from(["{}", '{"n": 1}']),
    )
)


@settings(deadline=None)
@given(EVENTS)
def test_bins_hold_all_events_each_key_once_and_in_its_order(events: list[Event]) -> None:
    bins = packed(events)
    assert sorted(event for some in bins for event in some) == sorted(events)
    sizes = [len(some) for some in bins]
    assert sizes == sorted(sizes, reverse=True)
    for some in bins:
        assert len({event.key for event in some}) == len(some)
    for key in "ABCDE":
        assert [event for some in bins for event in some if event.key == key] == sorted(
            event for event in events if event.key == key
        )
    assert len(bins) == max((sum(event.key == key for event in events) for key in "ABCDE"), default=0)


@settings(deadline=None)
@given(EVENTS, st.data())
def test_random_refusals_change_no_order_and_double_nothing(events: list[Event], data: st.DataObject) -> None:
    # Each record has a place, so that equal events are told apart.
    bins = [[(event, number) for event in some] for number, some in enumerate(packed(events))]
    times = {record: data.draw(st.integers(0, 4)) for some in bins for record in some}
    sink = Stub({record: [BUSY] * n for record, n in times.items()}, data.draw(st.integers(1, 3)))
    for some in bins:
        courier(sink, attempts=5).deliver(some)
    assert sorted(sink.stored) == sorted(times)
    for key in "ABCDE":
        delivered = [event for event, _ in sink.stored if event.key == key]
        assert delivered == sorted(event for event in events if event.key == key)


def test_only_the_refused_record_is_sent_again_before_the_next_bin() -> None:
    sink = Stub({A1: [BUSY]})
    for some in packed(MIXED):
        courier(sink).deliver(some)
    assert sink.calls == [[A1, B1, C1], [A1], [A2, C2], [A3]]
    assert [found for found in sink.stored if found.key == "A"] == [A1, A2, A3]


def test_one_bulk_request_for_all_events_breaks_the_order() -> None:
    """The negative control: the same refusal, without bins."""
    sink = Stub({A1: [BUSY]})
    courier(sink).deliver(sorted(MIXED))
    assert [found for found in sink.stored if found.key == "A"] == [A2, A3, A1]


def test_a_record_that_is_refused_at_each_try_ends_the_delivery() -> None:
    sink = Stub({C2: [BUSY] * ALWAYS})
    bins = iter(packed(MIXED))
    courier(sink).deliver(next(bins))
    with pytest.raises(Undelivered, match=r"^1 of 2 records were not taken \(Busy\)$"):
        courier(sink).deliver(next(bins))
    assert sink.calls == [[A1, B1, C1], [A2, C2], [C2], [C2]]


def test_a_record_that_is_refused_for_good_is_not_tried_again() -> None:
    sink = Stub({A1: [UNCLEAR], B1: [INVALID], C1: [BUSY]})
    with pytest.raises(Undelivered, match=r"3 of 3 records were not taken \(Invalid\)"):
        courier(sink).deliver([A1, B1, C1])
    assert len(sink.calls) == 1


def test_a_request_that_fails_leaves_the_earlier_requests_records_where_they_are() -> None:
    sink = Stub({C1: [ConnectionResetError()], A1: [BUSY]}, records_at_once=2)
    deliverer = courier(sink)
    deliverer.deliver([A1, B1, C1, A3])
    assert sink.calls == [[A1, B1], [C1, A3], [C1, A3], [A1]]
    assert sorted(sink.stored) == sorted([A1, B1, C1, A3])
    assert deliverer.requests == 4


def test_an_unknown_error_is_raised_as_it_is() -> None:
    sink = Stub({A1: [ZeroDivisionError()]})
    with pytest.raises(ZeroDivisionError):
        courier(sink).deliver([A1])
    assert len(sink.calls) == 1
    with pytest.raises(Undelivered, match=r"1 of 1 records were not taken \(ConnectionResetError\)"):
        courier(Stub({A1: [ConnectionResetError()] * ALWAYS})).deliver([A1])


def test_the_tries_have_the_policy_s_time_and_pauses() -> None:
    slept: list[float] = []
    policy = RetryPolicy(attempts=2, base_seconds=5, cap_seconds=5, jitter="tenth", attempt_seconds=7)
    sink = Stub({A1: [BUSY]})
    Courier(sink, policy, slept.append).deliver([A1])
    assert sink.seconds == [7, 7]
    assert len(slept) == 1
    assert 4.5 <= slept[0] <= 5


@pytest.mark.parametrize(
    ("error", "reason"), [(BUSY, "Busy"), (ConnectionResetError(), "ConnectionResetError")]
)
def test_a_delivery_whose_time_is_up_says_why_the_records_were_not_taken(
    error: Refusal | Exception, reason: str
) -> None:
    policy = RetryPolicy(attempts=3, base_seconds=10, cap_seconds=10, jitter="tenth", total_seconds=5)
    with pytest.raises(Undelivered, match=rf"^1 of 1 records were not taken \({reason}\)$"):
        Courier(Stub({A1: [error] * ALWAYS}), policy).deliver([A1])


def test_requests_have_no_more_records_and_bytes_than_the_sink_takes() -> None:
    class Small(Stub):
        bytes_at_once = 10

        def size(self, record: Any) -> int:
            return len(record)

    sink = Small({}, records_at_once=3)
    courier(sink).deliver(["aaaa", "bbbb", "cccc", "d", "e", "f", "g", "h" * 20, "i"])
    assert sink.calls == [["aaaa", "bbbb"], ["cccc", "d", "e"], ["f", "g"], ["h" * 20], ["i"]]
    courier(sink).deliver([])
    assert len(sink.calls) == 5
    exactly = Small({})
    courier(exactly).deliver(["aaaaa", "bbbbb", "ccccc", "ddddd"])
    assert exactly.calls == [["aaaaa", "bbbbb"], ["ccccc", "ddddd"]]


def test_records_of_a_sink_without_sizes_are_limited_by_their_number_alone() -> None:
    class Unmeasured(Stub):
        bytes_at_once = 1

    sink = Unmeasured({})
    courier(sink).deliver(["a", "b", "c"])
    assert sink.calls == [["a", "b", "c"]]
