"""Half-open intervals in UTC, and times as texts, microseconds and folders."""

from __future__ import annotations

import datetime as dt
import re
import time

import pytest

from python_jobs.shared.core.failures import DataRefused, WrongUse
from python_jobs.shared.core.intervals import (
    Interval,
    duration,
    from_micros,
    moved,
    parse_duration,
    parse_time,
    partition_folder,
    previous_run_time,
    to_micros,
)


@pytest.mark.parametrize(
    "text",
    ["2024-03-01T11", "2024-03-01 11:00", "20240301T110000", "2024-03-01T13:00:00+02:00", "2024-W09-5T11Z"],
)
def test_a_time_is_read_in_utc_wherever_the_process_is(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("TZ", "Asia/Tokyo")
            time.tzset()
            assert parse_time(text).isoformat() == "2024-03-01T11:00:00+00:00"
    finally:
        time.tzset()


@pytest.mark.parametrize("text", ["yesterday", "2024-10-07'08", "2024-10-07x08", "2024-13-01", ""])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    message = f"^'{text}' is not a time; use 2024-03-01, 2024-03-01T10 or 2024-03-01T10:30:00$"
    with pytest.raises(WrongUse, match=message):
        parse_time(text)


@pytest.mark.parametrize(
    ("moment", "micros"),
    [
        ("1970-01-01T00:00:00.000001+00:00", 1),
        ("1969-12-31T23:59:59.999999+00:00", -1),
        ("9999-12-31T23:59:59.999999+00:00", 253402300799999999),
    ],
)
def test_microseconds_are_exact_both_ways(moment: str, micros: int) -> None:
    assert to_micros(dt.datetime.fromisoformat(moment)) == micros
    assert from_micros(micros).isoformat() == moment


def test_the_run_before_is_before_this_one() -> None:
    assert previous_run_time(None, "2024-10-07") is None
    before = previous_run_time("2024-10-06T23", "2024-10-07")
    assert before == dt.datetime(2024, 10, 6, 23, tzinfo=dt.UTC)


@pytest.mark.parametrize("previous", ["2024-10-07", "2024-10-07T01"])
def test_a_run_before_that_is_not_before_is_refused(previous: str) -> None:
    message = f"^previous_execution_time {previous} is not before 2024-10-07$"
    with pytest.raises(WrongUse, match=message):
        previous_run_time(previous, "2024-10-07")


def test_a_folder_has_its_hour_if_it_is_one_of_an_hour() -> None:
    five = dt.datetime(2024, 3, 1, 5, tzinfo=dt.UTC)
    assert partition_folder(five, "hour") == "date=2024-03-01/hour=05"
    assert partition_folder(five, "day") == "date=2024-03-01"


def test_intervals_are_half_open_and_utc() -> None:
    hour = Interval.parse("2024-03-01T10", "2024-03-01T11:00:00+00:00")
    assert parse_time("2024-03-01T10:00:00") in hour
    assert parse_time("2024-03-01T11:00:00") not in hour
    assert parse_time("2024-03-01T11:59:59+01:00") in hour


@pytest.mark.parametrize(("start", "end"), [("2024-03-01", "2024-03-01"), ("2024-03-02", "2024-03-01")])
def test_an_empty_interval_is_refused(start: str, end: str) -> None:
    with pytest.raises(
        WrongUse, match=rf"^the interval \[{start}T00:00:00, {end}T00:00:00\) is empty: from must be"
    ):
        Interval.parse(start, end)


def test_an_interval_splits_into_the_whole_hours_or_days_that_it_touches() -> None:
    touched = Interval.parse("2024-02-28T22:59:59.999999", "2024-02-29T01:00")
    hours = [(f"{part.start:%d %H:%M:%S.%f}", f"{part.end:%d %H:%M:%S.%f}") for part in touched.split("hour")]
    assert hours == [
        ("28 22:00:00.000000", "28 23:00:00.000000"),
        ("28 23:00:00.000000", "29 00:00:00.000000"),
        ("29 00:00:00.000000", "29 01:00:00.000000"),
    ]
    days = [(f"{part.start:%d %H:%M:%S.%f}", f"{part.end:%d %H}") for part in touched.split("day")]
    assert days == [("28 00:00:00.000000", "29 00"), ("29 00:00:00.000000", "01 00")]
    with pytest.raises(WrongUse, match=r"^an interval splits by hour or day, not by 'week'$"):
        next(touched.split("week"))


@pytest.mark.parametrize("text", ["0001-01-01T00:00+05", "9999-12-31T23:59:59-05:00"])
def test_a_time_outside_of_the_years_is_refused(text: str) -> None:
    assert parse_time(f"{text[:16]}+00").year in (1, 9999)
    with pytest.raises(WrongUse, match=f"^'{re.escape(text)}' is outside of the years 1 to 9999 in UTC$"):
        parse_time(text)


FIRST, LAST = dt.datetime(1, 1, 1, tzinfo=dt.UTC), dt.datetime(9999, 12, 31, 23, tzinfo=dt.UTC)


def test_a_moved_time_or_date_stays_within_the_years_that_python_has() -> None:
    assert moved(LAST, dt.timedelta(minutes=59)) == dt.datetime(9999, 12, 31, 23, 59, tzinfo=dt.UTC)
    assert moved(dt.date(2024, 3, 1), dt.timedelta(days=-1)) == dt.date(2024, 2, 29)
    for moment, by, sentence in (
        (LAST, dt.timedelta(hours=36), "1.5 days after 9999-12-31T23:00:00+00:00"),
        (FIRST, dt.timedelta(days=-1), "1 days before 0001-01-01T00:00:00+00:00"),
        (dt.date(9999, 12, 31), dt.timedelta(days=1), "1 days after 9999-12-31"),
    ):
        message = f"the time {sentence} is outside of the years 1 to 9999; give another time or duration"
        with pytest.raises(WrongUse, match=f"^{re.escape(message)}$"):
            moved(moment, by)


def test_a_duration_is_not_longer_than_python_s() -> None:
    assert duration("milliseconds", 1500) == dt.timedelta(seconds=1.5)
    assert duration("days", 999_999_999).days == 999_999_999
    for count, text in ((1_000_000_000, "1e+09"), (float("inf"), "inf")):
        message = f"{text} days are too long; a duration has at most 999999999 days"
        with pytest.raises(WrongUse, match=f"^{re.escape(message)}$"):
            duration("days", count)


def test_a_duration_is_a_number_of_seconds_minutes_hours_or_days() -> None:
    found = [parse_duration(text) for text in ("1 second", "10 minutes", "2 hours", "1 day")]
    assert found == [dt.timedelta(seconds=seconds) for seconds in (1, 600, 7200, 86_400)]
    for text in ("soon", "0 hours", "1 week", "1.5 hours", "-1 days", "10 minutes or so"):
        message = f"'{text}' is no duration; use a text such as '10 seconds', '10 minutes' or '1 hour'"
        with pytest.raises(WrongUse, match=f"^{re.escape(message)}$"):
            parse_duration(text)


def test_microseconds_outside_of_the_years_are_refused() -> None:
    last = to_micros(LAST) + 3_600_000_000 - 1
    assert from_micros(last) == dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC)
    assert from_micros(to_micros(FIRST)) == FIRST
    for micros in (last + 1, to_micros(FIRST) - 1, 2**62):
        message = (
            f"the time {micros} (microseconds since 1970) is outside of the years 1 to 9999; correct it at "
        )
        message += "its source"
        with pytest.raises(DataRefused, match=f"^{re.escape(message)}$"):
            from_micros(micros)


def test_an_interval_up_to_the_last_hour_splits_and_the_last_one_is_refused() -> None:
    late = Interval(LAST - dt.timedelta(hours=2), LAST)
    assert [part.end for part in late.split("hour")] == [LAST - dt.timedelta(hours=1), LAST]
    with pytest.raises(
        WrongUse, match=r"1 days after 9999-12-31T00:00:00\+00:00 is outside of the years 1 to 9999"
    ):
        list(late.split("day"))
