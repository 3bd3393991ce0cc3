"""Plan of a backfill: chunks, progress and guards, as plain functions without Spark for the job and orchestrators.

Dates are ISO texts (2024-12-31) in UTC; a range includes its first and its last date. An orchestrator maps a task over
chunks like this::

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
        """Return the chunk's dates, in order."""
        return dates_between(self.first, self.last)

    def overlaps(self, other: Chunk) -> bool:
        """Return whether both chunks have a common date."""
        return self.first <= other.last and other.first <= self.last

    def widened(self, days: int) -> Chunk:
        """Return the chunk with ``days`` more days on each side."""
        return Chunk(days_before(self.first, days), days_before(self.last, -days))


def chunks_of(first: str, last: str, days: int = 7) -> list[Chunk]:
    """Return the chunks of ``days`` dates from ``first`` to ``last``; the last one may be shorter.

    >>> [str(chunk) for chunk in chunks_of("2024-02-27", "2024-03-02", days=2)]
    ['2024-02-27..2024-02-28', '2024-02-29..2024-03-01', '2024-03-02']

    Raises:
        ValueError: ``first`` is after ``last``, ``days`` is not positive, or a text is no date.
    """
    if parse_date(first) > parse_date(last):
        raise ValueError(f"the backfill from {first} to {last} is empty; from must not be after to")
    if days < 1:
        raise ValueError(f"chunk_days is {days}; it must be 1 or more")
    dates = dates_between(first, last)
    return [Chunk(dates[start], dates[start:][:days][-1]) for start in range(0, len(dates), days)]


def open_dates(first: str, last: str, now: dt.datetime) -> list[str]:
    """Return the dates of the range that have not ended in UTC: the regular job still writes them."""
    today = now.astimezone(dt.UTC).date().isoformat()
    return [date for date in dates_between(first, last) if date >= today]


# --- progress -------------------------------------------------------------------------------------------


def job_status(statuses: Collection[ChunkStatus]) -> JobStatus:
    """Return the status of a job, given the statuses of its chunks."""
    if "abandoned" in statuses:
        return "abandoned"
    if "pending" in statuses:
        return "running"
    return "completed_with_failures" if "failed" in statuses else "completed"


def percent_done(statuses: Sequence[ChunkStatus]) -> int:
    """Return the percentage of chunks that are done, rounded down: 100 means that all chunks are done."""
    return 100 * statuses.count("done") // len(statuses)


# --- guards ---------------------------------------------------------------------------------------------


def missing_source(
    source_rows: int, target_rows: int, is_complete: bool | None, min_share: float
) -> str | None:
    """Return why the source no longer has all data of one date; None if it may have.

    Args:
        source_rows: number of rows that the source has for the date now.
        target_rows: number of rows that the backfill would replace.
        is_complete: whether the producer's marker exists; None if the source has no markers.
        min_share: minimum of source rows as a share of the target rows; fewer are refused.
    """
    if is_complete is not None:
        return None if is_complete else "its source has no marker, so it is not complete"
    if exceeds(target_rows * min_share, source_rows) or (target_rows and not source_rows):
        return f"its source has {source_rows} rows, the target {target_rows}: it may have expired"
    return None


@dataclass(frozen=True)
class Profile:
    """Profile of one date's rows, by which the old and the new rows are compared."""

    rows: int
    """Number of rows."""
    content: int = 0
    """Sum of the rows' hashes: equal for equal rows in any order."""
    totals: Mapping[str, float | None] = field(default_factory=dict)
    """Sum of each compared column; None if all its values are NULL."""
    nulls: Mapping[str, int] = field(default_factory=dict)
    """Number of rows with NULL, by column."""

    def has_content_of(self, other: Profile) -> bool:
        """Return whether both profiles have the same number of rows and the same content."""
        return (self.rows, self.content) == (other.rows, other.content)


NO_ROWS = Profile(0)


def deviations(old: Profile, new: Profile, tolerance: float) -> list[str]:
    """Return the differences between a date's old and new rows that exceed the tolerance, one sentence each.

    A date without old rows is not compared, and a total whose old value is NaN or infinite is not compared. A new total
    that is NaN or infinite is always a fault.

    Args:
        old: profile of the rows that would be replaced.
        new: profile of the rows that would replace them.
        tolerance: allowed relative change of the number of rows and of each total, and allowed growth of the share of
            NULL in a column. With 0.2 a total may change by a fifth, and 10 % NULL may grow to 30 %.
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
