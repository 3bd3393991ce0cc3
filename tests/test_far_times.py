"""Times and durations at the ends of what Python holds: each is used, or refused in one sentence."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest

from python_jobs.error_management.circuit_breaker import _iso
from python_jobs.error_management.filter_interceptor import window_of
from python_jobs.error_management.late_dates import lookback_dates
from python_jobs.error_management.watermarks import Policy, State, advance
from python_jobs.idempotency.unit_tables import starts_unit
from python_jobs.ingestion import incremental_loader
from python_jobs.shared.core.failures import JobFailed
from python_jobs.shared.core.intervals import parse_duration
from python_jobs.shared.delta.offsets_files import _moment

DAY = dt.timedelta(days=1)
FIRST, LAST = dt.datetime(1, 1, 1, tzinfo=dt.UTC), dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)
LOAD = {"source": "/landing", "target": "/bronze", "grain": "hour"}


@pytest.mark.parametrize(
    "compute",
    [
        lambda: parse_duration("1000000000 days"),
        lambda: window_of(LAST, dt.timedelta(hours=1)),
        lambda: advance(State(), {("s", "p"): FIRST}, Policy(DAY), LAST),
        lambda: starts_unit(FIRST.date(), "week"),
        lambda: lookback_dates("0001-01-01", 3),
        lambda: incremental_loader.Parameters(**LOAD, execution_time="0001-01-01T00"),
        lambda: _iso(1e12),
        lambda: _moment(10**15),
    ],
)
def test_a_time_that_can_not_be_held_is_one_sentence(compute: Callable[[], Any]) -> None:
    with pytest.raises(JobFailed, match=r"outside of the years 1 to 9999|too long"):
        compute()


def test_the_hour_or_day_just_before_is_used() -> None:
    before = LAST - dt.timedelta(hours=1)
    assert window_of(before, dt.timedelta(hours=1))[1] == dt.datetime(9999, 12, 31, 23, tzinfo=dt.UTC)
    assert advance(State(), {("s", "p"): FIRST + DAY}, Policy(DAY), LAST).watermark == FIRST
    assert starts_unit(dt.date(1, 1, 2), "day")
    window = incremental_loader.Parameters(**LOAD, execution_time="0001-01-01T01").window
    assert window is not None
    assert window.start == FIRST
    assert (_iso(0.25), _moment(250)) == (
        "1970-01-01T00:00:00.250000+00:00",
        dt.datetime(1970, 1, 1, 0, 0, 0, 250_000, tzinfo=dt.UTC),
    )
