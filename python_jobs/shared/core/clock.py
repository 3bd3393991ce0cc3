"""Processing time: the clock's, or the one that a run is given to be repeatable."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from python_jobs.shared.core.intervals import parse_time


def utc_now() -> dt.datetime:
    """Return the current time in UTC, for the outermost line of a job only."""
    return dt.datetime.now(dt.UTC)


@dataclass(frozen=True, kw_only=True)
class Clocked:
    """Parameters of a run that stamps its rows, or measures ages, with its time."""

    now: str | None = None
    """Time of the run or batch (ISO 8601), also that of its rows (ingested_at and the like); default: the clock."""

    def __post_init__(self) -> None:
        if self.now is not None:
            parse_time(self.now)

    def processing_time(self) -> dt.datetime:
        """Return ``now``, or the clock's time at this call."""
        return utc_now() if self.now is None else parse_time(self.now)
