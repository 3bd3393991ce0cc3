"""Dates as ISO texts."""

from __future__ import annotations

import datetime as dt

import pytest

from python_jobs.shared.core.dates import dates_between, days_before, parse_date
from python_jobs.shared.core.failures import WrongUse


def test_a_date_is_read_as_it_is_written() -> None:
    assert parse_date("2024-12-31") == dt.date(2024, 12, 31)


@pytest.mark.parametrize(
    "text", ["2024-12-32", "20241231", "2024-W52-2", "2024-12-3", "2024-12-31T00", "today day."]
)
def test_another_text_is_no_date(text: str) -> None:
    with pytest.raises(ValueError, match=f"^'{text}' is not a date; use 2024-12-31$"):
        parse_date(text)


def test_days_are_counted_over_the_ends_of_months_and_years() -> None:
    assert days_before("2024-03-01", 1) == "2024-02-29"
    assert days_before("2024-03-01", 0) == "2024-03-01"
    assert days_before("2023-12-31", -1) == "2024-01-01"


@pytest.mark.parametrize(("date", "days"), [("0001-01-01", 1), ("9999-12-31", -1), ("2024-03-01", 10**9)])
def test_a_date_outside_of_the_years_is_refused(date: str, days: int) -> None:
    with pytest.raises(WrongUse, match=r"outside of the years 1 to 9999|too long"):
        days_before(date, days)


def test_both_ends_are_among_the_dates_between() -> None:
    assert dates_between("2024-02-28", "2024-03-01") == ["2024-02-28", "2024-02-29", "2024-03-01"]
    assert dates_between("2024-02-28", "2024-02-28") == ["2024-02-28"]
    assert dates_between("2024-02-28", "2024-02-27") == []
