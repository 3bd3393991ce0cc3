"""Processing time: the clock's time, or a given time that makes a run repeatable."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from python_jobs.shared.core.intervals import parse_time


def utc_now() -> dt.datetime:
    """Return the current time in UTC, for the outermost line of a job only."""
    return dt.datetime.now(dt.UTC)


@dataclass(frozen=True, kw_only=True)
class ProcessingTimeParameters:
    """Parameters of a run that stamps its rows with its time, or measures ages by it."""

    now: str | None = None
    """Time of the run or batch and of its rows, such as ingested_at (ISO 8601); default: the clock's time."""

    def __post_init__(self) -> None:
        if self.now is not None:
            parse_time(self.now)

    def processing_time(self) -> dt.datetime:
        """Return ``now``, or the clock's time at this call."""
        return utc_now() if self.now is None else parse_time(self.now)
