"""Units of time of Fast Metadata Cleaner: how their tables are named, and what an orchestrator's branch asks.

The macros ``unit_name`` and ``starts_unit`` hold the same two rules for dbt; a test compares them day by day.

Source: Data Engineering Design Patterns, chapter 4, Fast Metadata Cleaner.
"""

from __future__ import annotations

import datetime as dt
from typing import Literal

from python_jobs.shared.core.intervals import moved

Unit = Literal["day", "week", "month", "year"]

# A week belongs to the calendar year and its first one begins on 1 January. ISO week with calendar year names
# 2024-01-01 and 2024-12-30 alike, so that December would clean January; ISO week with ISO year runs across New Year.
_FORMATS: dict[Unit, str] = {"day": "%Y_%m_%d", "week": "%Y_%W", "month": "%Y_%m", "year": "%Y"}


def unit_name(day: dt.date, unit: Unit) -> str:
    """Return the name of the unit that a day belongs to; later units sort after earlier ones.

    >>> unit_name(dt.date(2024, 11, 11), "week")
    '2024_46'
    """
    return day.strftime(_FORMATS[unit])


def starts_unit(day: dt.date, unit: Unit) -> bool:
    """Return whether a day is the first of its unit; a week's first day is a Monday or 1 January."""
    return unit_name(day, unit) != unit_name(moved(day, -dt.timedelta(days=1)), unit)


def route(day: dt.date, unit: Unit) -> Literal["initialise_unit", "load_day"]:
    """Return the branch that an orchestrator takes for a logical date: clean the unit's table first, or only load."""
    return "initialise_unit" if starts_unit(day, unit) else "load_day"
