"""Cadences: the chooser and the guide's costs, without Spark."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_jobs.shared.core.failures import WrongUse
from python_jobs.streaming.cadences import CADENCES, EXAMPLE, Choice, choose, require_cadence

SECOND, MINUTE, HOUR, DAY = (dt.timedelta(seconds=seconds) for seconds in (1, 60, 3600, 86400))


@pytest.mark.parametrize(
    ("latency", "windows", "mode", "cadence", "interval"),
    [
        (SECOND, False, "streaming", "continuous", SECOND),  # fraud
        (5 * SECOND, False, "streaming", "continuous", SECOND),  # personalisation
        (5 * SECOND, True, "streaming", "micro_batch", 2 * SECOND),
        (5 * MINUTE, True, "micro-batch", "micro_batch", 150 * SECOND),  # operational dashboard
        (HOUR, True, "mini-batch", "available_now", 30 * MINUTE),  # hourly KPI
        (DAY, True, "batch", "batch", DAY),  # daily report
        # the edges
        (2 * SECOND, True, "streaming", "micro_batch", SECOND),
        (10 * SECOND - SECOND / 2, False, "streaming", "continuous", SECOND),
        (10 * SECOND, False, "micro-batch", "micro_batch", 5 * SECOND),
        (15 * MINUTE - SECOND, True, "micro-batch", "micro_batch", 449 * SECOND),
        (15 * MINUTE, True, "mini-batch", "available_now", 450 * SECOND),
        (DAY - SECOND, True, "mini-batch", "available_now", 43_199 * SECOND),
        (400 * DAY, True, "batch", "batch", DAY),
    ],
)
def test_the_services_of_the_guide_get_their_mode(
    latency: dt.timedelta, windows: bool, mode: str, cadence: str, interval: dt.timedelta
) -> None:
    choice = choose(latency, windows=windows)
    assert (choice.mode, choice.cadence, choice.interval) == (mode, cadence, interval)


@settings(deadline=None)
@given(seconds=st.integers(2, 200_000), windows=st.booleans())
def test_a_result_is_there_within_two_intervals_and_more_time_never_costs_more(
    seconds: int, windows: bool
) -> None:
    choice, slower = (choose(latency * SECOND, windows=windows) for latency in (seconds, seconds + 7))
    assert choice.cadence == "batch" or 2 * choice.interval <= seconds * SECOND
    assert slower.saved >= choice.saved
    assert not (windows and choice.cadence == "continuous")


def test_windows_have_a_least_latency() -> None:
    with pytest.raises(
        WrongUse,
        match=r"^windows can't be published within 1\.5 seconds: allowed are 2 seconds or more for windows, and any "
        r"latency for rows$",
    ):
        choose(1.5 * SECOND, windows=True)


def test_the_costs_of_the_guide_s_example() -> None:
    """A billion events a day."""
    assert {mode: load.core_hours for mode, load in EXAMPLE.items()} == {
        "streaming": 2400,
        "micro-batch": 2400,
        "mini-batch": 1200,
        "batch": 1000,
    }
    hourly, daily = choose(HOUR, windows=True), choose(DAY, windows=True)
    assert hourly.as_dict() == {
        "mode": "mini-batch",
        "cadence": "available_now",
        "interval_seconds": 1800,
        "cluster": "stops between two runs",
        "example_core_hours_a_day": 1200,
        "example_saved_percent": 50,
    }
    assert daily.as_dict()["example_saved_percent"] == 58
    assert choose(MINUTE, windows=True).as_dict()["cluster"] == "always on"
    assert Choice("streaming", "continuous", SECOND).as_dict() == {
        "mode": "streaming",
        "cadence": "continuous",
        "interval_seconds": 1,
        "cluster": "always on",
        "example_core_hours_a_day": 2400,
        "example_saved_percent": 0,
    }
    assert daily.as_dict()["cluster"] == "stops between two runs"


def test_an_unknown_cadence_is_refused_with_the_allowed_ones() -> None:
    for name in CADENCES:
        require_cadence(name)
    with pytest.raises(
        WrongUse,
        match=r"^cadence must be one of batch, available_now, micro_batch, continuous, got 'hourly'$",
    ):
        require_cadence("hourly")
