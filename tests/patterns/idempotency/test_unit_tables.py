"""Units of time: no two share a name, and the macros name them as the orchestrator's branch does."""

from __future__ import annotations

import datetime as dt
from itertools import groupby

import pytest

from python_jobs.idempotency.unit_tables import Unit, route, starts_unit, unit_name
from tests.support.render import MacroRenderer

DAYS = [
    dt.date(2018, 1, 1) + dt.timedelta(days=day)
    for day in range((dt.date(2041, 1, 1) - dt.date(2018, 1, 1)).days)
]
UNITS: list[Unit] = ["day", "week", "month", "year"]


@pytest.mark.parametrize("unit", UNITS)
def test_each_name_belongs_to_one_run_of_days_and_names_sort_by_time(unit: Unit) -> None:
    runs = [name for name, _ in groupby(DAYS, lambda day: unit_name(day, unit))]
    assert len(runs) == len(set(runs))
    assert runs == sorted(runs)


def test_a_week_starts_on_monday_and_on_the_first_of_january() -> None:
    for day in DAYS:
        assert starts_unit(day, "week") is (day.isoweekday() == 1 or (day.month, day.day) == (1, 1)), day


def test_a_year_has_at_most_53_weeks_and_54_when_a_leap_year_begins_on_a_sunday() -> None:
    weeks = {year: {unit_name(day, "week") for day in DAYS if day.year == year} for year in range(2018, 2041)}
    assert {year for year, names in weeks.items() if len(names) > 53} == {2040}
    assert len(weeks[2040]) == 54


def test_iso_weeks_would_collide() -> None:
    """Why neither of the two usual namings is taken."""
    runs = [key for key, _ in groupby(DAYS, lambda day: (day.year, day.isocalendar().week))]
    repeated = {year for year, week in runs if runs.count((year, week)) > 1}
    assert {2018, 2019, 2022, 2023, 2024, 2025} <= repeated
    across = dt.date(2024, 12, 31).isocalendar(), dt.date(2025, 1, 1).isocalendar()
    assert across[0][:2] == across[1][:2]


def test_the_branch_of_a_logical_date() -> None:
    week = {day: route(dt.date(2023, 11, day), "week") for day in range(5, 9)}
    assert week == {5: "load_day", 6: "initialise_unit", 7: "load_day", 8: "load_day"}
    assert route(dt.date(2025, 1, 1), "week") == "initialise_unit"
    assert route(dt.date(2024, 12, 1), "month") == "initialise_unit"
    assert route(dt.date(2024, 12, 2), "month") == "load_day"


@pytest.mark.parametrize("unit", UNITS)
def test_the_macros_name_units_alike(render: MacroRenderer, unit: Unit) -> None:
    for year in (2018, 2023, 2024, 2028, 2040) if unit == "week" else (2024,):
        for day in (dt.date(year, 1, 1) + dt.timedelta(days=days) for days in (-2, -1, 0, 1, 6, 7)):
            assert render("unit_name", date=day.isoformat(), unit=unit) == unit_name(day, unit)
    for day in (dt.date(2023, 12, 31), dt.date(2024, 1, 1), dt.date(2024, 1, 2)):
        assert render("starts_unit", date=day.isoformat(), unit=unit) is starts_unit(day, unit)
