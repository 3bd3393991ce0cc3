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
        ValueError: ``days`` is negative, or ``date`` is no date.
    """
    if days < 0:
        raise ValueError(f"a lookback of {days} days is not possible; it must be 0 or more")
    return dates_between(days_before(date, days), days_before(date, 1))


@dataclass(frozen=True)
class BackfillRun:
    """One run of a backfill: the date to run, and all dates that this run processes."""

    date: str
    covers: tuple[str, ...]


def backfill_runs(first: str, last: str, days: int) -> list[BackfillRun]:
    """Return the fewest runs that process each date from ``first`` to ``last``, given the lookback of ``days``.

    Each run covers itself and its lookback, so they are laid out from the end; the first may reach back beyond
    ``first``. See :func:`not_redone` for what the replay of every single date would have processed beside that.

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
    """Return the dates before ``first`` that replaying each date would process and :func:`backfill_runs` doesn't."""
    covered = {date for run in backfill_runs(first, last, days) for date in run.covers}
    return [date for date in lookback_dates(first, days) if date not in covered]


@dataclass(frozen=True)
class Partition:
    """What is known of one date: versions are those of the source table."""

    changed_version: int | None
    """Last version that changed the date's data; None if it has none."""
    read_version: int | None
    """Version that was read when the date was processed last; None if it never was."""
    claimed: bool = False
    """Whether another run is processing it."""

    @property
    def is_late(self) -> bool:
        """Whether data came after the date was read last; a date never processed is late with any data."""
        if self.changed_version is None:
            return False
        return self.read_version is None or self.changed_version > self.read_version


@dataclass(frozen=True)
class LatePlan:
    """What a run makes of the dates before its own."""

    dates: tuple[str, ...] = ()
    """To be processed, in this order."""
    ignored: tuple[str, ...] = ()
    """With late data, but beyond the accepted lookback."""
    claimed: tuple[str, ...] = ()
    """With late data that another run is processing."""
    postponed: tuple[str, ...] = ()
    """With late data that the next run takes, above the most that one run may."""


def late_plan(
    partitions: Mapping[str, Partition],
    current: str,
    *,
    stateful: bool = False,
    max_lookback_days: int | None = None,
    max_partitions: int | None = None,
) -> LatePlan:
    """Choose which dates before ``current`` are to be processed again.

    ``stateful``: a date's result depends on the one before, so everything from the first late date on is taken,
    dates without data included. What an interrupted chain left behind is found again: a date that was read
    at an earlier version than a date before it.
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
        # A chain with a gap would compute on a result that is about to change: it waits for the other run.
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
