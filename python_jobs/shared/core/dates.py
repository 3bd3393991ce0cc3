"""Dates as ISO texts (2024-12-31), the unit of a daily run."""

from __future__ import annotations

import datetime as dt
import re

from python_jobs.shared.core.intervals import duration, moved

_DAY = dt.timedelta(days=1)
# Python also reads 20241231 and the weeks of 2024-W52-2.
_TEXT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def parse_date(text: str) -> dt.date:
    """Read an ISO date.

    Raises:
        ValueError: the text is no ISO date.
    """
    try:
        if _TEXT.fullmatch(text):
            return dt.date.fromisoformat(text)
    except ValueError:
        pass
    raise ValueError(f"'{text}' is not a date; use 2024-12-31")


def days_before(date: str, days: int) -> str:
    """Return the date that many days earlier.

    Raises:
        WrongUse: it is outside of the years 1 to 9999.
    """
    return moved(parse_date(date), duration("days", -days)).isoformat()


def dates_between(first: str, last: str) -> list[str]:
    """Return all dates from ``first`` to ``last``, both included; none if ``first`` is later."""
    start, end = parse_date(first), parse_date(last)
    return [(start + day * _DAY).isoformat() for day in range((end - start).days + 1)]
