"""Which dates a Late Data Integrator processes: plain functions, without Spark, for jobs and for orchestrators.

Dates are ISO texts (2024-12-31) in ascending order, as an orchestrator maps its tasks over them. In Airflow::

    from python_jobs.error_management.late_dates import lookback_dates

    dates = lookback_dates("{{ ds }}", 15)  # in a @task; then process.expand(late_date=dates)

Source: Data Engineering Design Patterns, chapter 3, Static and Dynamic Late Data Integrator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from python_jobs.shared.core.dates import dates_between, days_before, parse_date


def lookback_dates(date: str, days: int) -> list[str]:
    """Return the ``days`` dates before ``date``.

    >>> lookback_dates("2024-03-01", 2)
    ['2024-02-28', '2024-02-29']

    Raises:
        ValueError: ``days`` is negative, or ``date`` is not a date.
    """
    if days < 0:
        raise ValueError(f"a lookback of {days} days is not possible; it must be 0 or more")
    return dates_between(days_before(date, days), days_before(date, 1))


@dataclass(frozen=True)
class BackfillRun:
    """One run of a backfill: the run's date, and all dates that the run processes."""

    date: str
    covers: tuple[str, ...]


def backfill_runs(first: str, last: str, days: int) -> list[BackfillRun]:
    """Return the fewest runs that process each date from ``first`` to ``last``, with a lookback of ``days``.

    Each run covers its date and its lookback, so the runs are planned from the end; the first run may reach back before
    ``first``. :func:`not_redone` returns the dates that only a run for every single date would have processed.

    >>> [run.date for run in backfill_runs("2024-10-01", "2024-10-12", 4)]
    ['2024-10-02', '2024-10-07', '2024-10-12']

    Raises:
        ValueError: ``first`` is after ``last``, or an argument is wrong.
    """
    if parse_date(first) > parse_date(last):
        raise ValueError(f"the backfill from {first} to {last} is empty; from must not be after to")
    runs: list[BackfillRun] = []
    date = last
    while date >= first:
        runs.append(BackfillRun(date, (*lookback_dates(date, days), date)))
        date = days_before(date, days + 1)
    return runs[::-1]


def not_redone(first: str, last: str, days: int) -> list[str]:
    """Return the dates before ``first`` that a run for each date would process and :func:`backfill_runs` doesn't."""
    covered = {date for run in backfill_runs(first, last, days) for date in run.covers}
    return [date for date in lookback_dates(first, days) if date not in covered]


@dataclass(frozen=True)
class Partition:
    """The planner's state of one date; versions are versions of the source table."""

    changed_version: int | None
    """Last version that changed the date's data; None if the date has no data."""
    read_version: int | None
    """Version from which the date was last processed; None if the date was never processed."""
    claimed: bool = False
    """Whether another run is processing the date."""

    @property
    def is_late(self) -> bool:
        """Return whether data came after the date was last read; a date never processed is late with any data."""
        if self.changed_version is None:
            return False
        return self.read_version is None or self.changed_version > self.read_version


@dataclass(frozen=True)
class LatePlan:
    """A run's plan for the dates before its own date."""

    dates: tuple[str, ...] = ()
    """Dates to process, in this order."""
    ignored: tuple[str, ...] = ()
    """Dates with late data that are older than the accepted lookback."""
    claimed: tuple[str, ...] = ()
    """Dates with late data that another run is processing."""
    postponed: tuple[str, ...] = ()
    """Dates with late data above the limit of one run; the next run takes them."""


def late_plan(
    partitions: Mapping[str, Partition],
    current: str,
    *,
    stateful: bool = False,
    max_lookback_days: int | None = None,
    max_partitions: int | None = None,
) -> LatePlan:
    """Return the plan: the dates before ``current`` to process again.

    With ``stateful`` a date's result depends on the date before, so the plan takes every date from the first late date
    on, dates without data included. It also takes the rest of an interrupted chain: dates that were read at an earlier
    version than a date before them.
    """
    past = {date: partitions[date] for date in sorted(partitions) if date < current}
    late = _outdated(past) if stateful else [date for date, partition in past.items() if partition.is_late]
    horizon = "" if max_lookback_days is None else days_before(current, max_lookback_days)
    ignored = tuple(date for date in late if date < horizon)
    late = [date for date in late if date >= horizon]
    if stateful and late:
        late = dates_between(late[0], days_before(current, 1))
    blocked = [date for date in late if date in past and past[date].claimed]
    if stateful and blocked:
        # A chain with a gap would read a result that the other run is about to change, so the chain waits for that run.
        return LatePlan(ignored=ignored, claimed=tuple(blocked), postponed=_without(late, blocked))
    free = _without(late, blocked)
    taken = free if max_partitions is None else free[:max_partitions]
    return LatePlan(taken, ignored, tuple(blocked), free[len(taken) :])


def _outdated(past: Mapping[str, Partition]) -> list[str]:
    """Return the dates that have late data or were computed on an older state than a date before them."""
    dates, newest = [], -1
    for date, partition in past.items():
        read = -1 if partition.read_version is None else partition.read_version
        if partition.is_late or read < newest:
            dates.append(date)
        newest = max(newest, read)
    return dates


def _without(dates: Iterable[str], left_out: Iterable[str]) -> tuple[str, ...]:
    left_out = set(left_out)
    return tuple(date for date in dates if date not in left_out)
