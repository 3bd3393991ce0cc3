"""What a backfill does and what it refuses: plain functions, without Spark, for the job and for orchestrators.

Dates are ISO texts (2024-12-31) in UTC, ranges hold both their ends. An orchestrator that maps a task over chunks::

    from python_jobs.idempotency.backfill_plan import chunks_of

    chunks = [(chunk.first, chunk.last) for chunk in chunks_of("2024-10-01", "2024-12-31", days=7)]

Source: the guide's ``pat-replay-backfill``.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from python_jobs.shared.core.dates import dates_between, days_before, parse_date
from python_jobs.shared.core.numbers import exceeds, is_number

ChunkStatus = Literal["pending", "done", "failed", "abandoned"]
JobStatus = Literal["running", "completed", "completed_with_failures", "abandoned"]


@dataclass(frozen=True, order=True)
class Chunk:
    """Dates that are computed and replaced together."""

    first: str
    last: str

    def __str__(self) -> str:
        return self.first if self.first == self.last else f"{self.first}..{self.last}"

    @property
    def dates(self) -> list[str]:
        """The chunk's dates, in order."""
        return dates_between(self.first, self.last)

    def overlaps(self, other: Chunk) -> bool:
        """Return whether a date is in both."""
        return self.first <= other.last and other.first <= self.last

    def widened(self, days: int) -> Chunk:
        """Return the chunk with so many days more on each side."""
        return Chunk(days_before(self.first, days), days_before(self.last, -days))


def chunks_of(first: str, last: str, days: int = 7) -> list[Chunk]:
    """Return the chunks of ``days`` dates from ``first`` to ``last``; the last one may be shorter.

    >>> [str(chunk) for chunk in chunks_of("2024-02-27", "2024-03-02", days=2)]
    ['2024-02-27..2024-02-28', '2024-02-29..2024-03-01', '2024-03-02']

    Raises:
        ValueError: ``first`` is after ``last``, ``days`` is not positive, or a date is none.
    """
    if parse_date(first) > parse_date(last):
        raise ValueError(f"the backfill from {first} to {last} is empty; from must not be after to")
    if days < 1:
        raise ValueError(f"chunk_days is {days}; it must be 1 or more")
    dates = dates_between(first, last)
    return [Chunk(dates[start], dates[start:][:days][-1]) for start in range(0, len(dates), days)]


def open_dates(first: str, last: str, now: dt.datetime) -> list[str]:
    """Return the dates of the range that aren't over in UTC: the live job still writes them."""
    today = now.astimezone(dt.UTC).date().isoformat()
    return [date for date in dates_between(first, last) if date >= today]


# --- progress -------------------------------------------------------------------------------------------


def job_status(statuses: Collection[ChunkStatus]) -> JobStatus:
    """Return the status of a job from those of its chunks."""
    if "abandoned" in statuses:
        return "abandoned"
    if "pending" in statuses:
        return "running"
    return "completed_with_failures" if "failed" in statuses else "completed"


def percent_done(statuses: Sequence[ChunkStatus]) -> int:
    """Return how many of a hundred chunks are done, rounded down: 100 means all of them."""
    return 100 * statuses.count("done") // len(statuses)


# --- guards ---------------------------------------------------------------------------------------------


def missing_source(
    source_rows: int, target_rows: int, is_complete: bool | None, min_share: float
) -> str | None:
    """Return why the source of one date can't be what the target was made from; None if it can.

    Args:
        source_rows: rows that the source has for the date now.
        target_rows: rows that would be replaced.
        is_complete: what the producer's marker says; None: there are no markers.
        min_share: fewer source rows than this share of the target's are refused.
    """
    if is_complete is not None:
        return None if is_complete else "its source has no marker, so it is not complete"
    if exceeds(target_rows * min_share, source_rows) or (target_rows and not source_rows):
        return f"its source has {source_rows} rows, the target {target_rows}: it may have expired"
    return None


@dataclass(frozen=True)
class Profile:
    """What is compared of one date before and after."""

    rows: int
    content: int = 0
    """Sum over the rows of a number made from each one's content: equal for equal rows in any order."""
    totals: Mapping[str, float | None] = field(default_factory=dict)
    """Sum of each compared column; None if all of it is NULL."""
    nulls: Mapping[str, int] = field(default_factory=dict)
    """Rows with NULL, by column."""

    def has_content_of(self, other: Profile) -> bool:
        """Return whether both have the same rows."""
        return (self.rows, self.content) == (other.rows, other.content)


NO_ROWS = Profile(0)


def deviations(old: Profile, new: Profile, tolerance: float) -> list[str]:
    """Return in what a date's new rows differ from the old ones by more than the tolerance.

    A date without old rows has nothing to be compared with, and an old total that is NaN or infinite neither. A new
    total that is NaN or infinite is always a fault.

    Args:
        old: of the rows that would be replaced.
        new: of the rows that would replace them.
        tolerance: 0.2 lets the number of rows and each total change by a fifth, and the share of NULL in a column grow
            by 0.2.
    """
    faults = [
        f"{name} sums up to {total}, which is no number"
        for name, total in new.totals.items()
        if not _is_comparable(total)
    ]
    if not old.rows:
        return faults
    if exceeds(abs(new.rows - old.rows), tolerance * old.rows):
        faults.append(f"{new.rows} rows in place of {old.rows}")
    for name, before in old.totals.items():
        after = new.totals.get(name)
        if not (_is_comparable(before) and _is_comparable(after)):
            continue
        if (before is None) != (after is None) or exceeds(
            abs((after or 0) - (before or 0)), tolerance * abs(before or 0)
        ):
            faults.append(f"{name} sums up to {after} in place of {before}")
    for name, nulls in new.nulls.items():
        share, share_before = nulls / new.rows, old.nulls.get(name, 0) / old.rows
        if exceeds(share - share_before, tolerance):
            faults.append(f"{name} is NULL in {share:.0%} of the rows in place of {share_before:.0%}")
    return faults


def _is_comparable(total: float | None) -> bool:
    return total is None or is_number(total)
