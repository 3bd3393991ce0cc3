"""State table of the Dynamic Late Data Integrator: a Delta table with one row for each date.

The table is small (one row per day), and each change replaces it as a whole. If two changes are
concurrent, the later one is recomputed from the result of the first.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.error_management.late_dates import Partition
from python_jobs.shared.core.intervals import from_micros
from python_jobs.shared.delta.optimistic_writes import change
from python_jobs.shared.delta.tables import read_table, table_exists

Result = TypeVar("Result")

_APP = "late_state"
_SCHEMA = (
    "partition string, changed_version long, read_version long, processed_at timestamp, planned_at timestamp, "
    "claimed_by string, claimed_until timestamp, seen_version long"
)
_TIMES = ("processed_at", "planned_at", "claimed_until")


@dataclass(frozen=True)
class DateState:
    """One date of the source; versions are the source's, times are UTC."""

    changed_version: int | None = None
    """Last known version that changed the date's data."""
    read_version: int | None = None
    """Version from which the date was last processed."""
    processed_at: dt.datetime | None = None
    """Time when the date was last processed."""
    planned_at: dt.datetime | None = None
    """Time when the run of this date chose its late dates."""
    claimed_by: str | None = None
    """Run that is processing the date."""
    claimed_until: dt.datetime | None = None
    """Time when the claim expires if the run died."""

    def claim_is_valid(self, now: dt.datetime) -> bool:
        """Return whether a run is processing the date."""
        return self.claimed_until is not None and self.claimed_until > now

    def claimed_from(self, run_id: str, now: dt.datetime) -> bool:
        """Return whether another run than ``run_id`` has a valid claim."""
        return self.claimed_by not in (None, run_id) and self.claim_is_valid(now)

    def as_seen_by(self, run_id: str, now: dt.datetime) -> Partition:
        """Return the date's state for the planner of ``run_id``."""
        return Partition(self.changed_version, self.read_version, self.claimed_from(run_id, now))

    def released(self) -> DateState:
        """Return the state without a claim."""
        return replace(self, claimed_by=None, claimed_until=None)


@dataclass(frozen=True)
class State:
    """All dates, and the version of the source up to which their changes are known."""

    dates: Mapping[str, DateState]
    seen_version: int | None = None

    def with_dates(self, changed: Mapping[str, DateState]) -> State:
        """Return the state with some dates replaced or added."""
        return replace(self, dates={**self.dates, **changed})

    def with_versions(self, changed: Mapping[str, int], read: Mapping[str, int], seen: int) -> State:
        """Return the state with the versions from the logs of source and target; known versions never go back."""

        def updated(date: str) -> DateState:
            known = self.dates.get(date, DateState())
            return replace(
                known,
                changed_version=_newest(known.changed_version, changed.get(date)),
                read_version=_newest(known.read_version, read.get(date)),
            )

        newest = self.with_dates({date: updated(date) for date in changed.keys() | read.keys()})
        return replace(newest, seen_version=_newest(self.seen_version, seen))


def _newest(*versions: int | None) -> int | None:
    return max((version for version in versions if version is not None), default=None)


class StateTable:
    """The state in a Delta table, by path or catalog name; the first change creates the table."""

    def __init__(self, spark: SparkSession, table: str) -> None:
        self._spark, self.table = spark, table

    def read(self) -> State:
        """Return the current state; an absent table gives an empty state."""
        if not table_exists(self._spark, self.table):
            return State({})
        times = {name: F.unix_micros(name) for name in _TIMES}
        rows = [row.asDict() for row in read_table(self._spark, self.table).withColumns(times).collect()]
        seen = {row.pop("seen_version") for row in rows}
        for row in rows:
            row.update({name: from_micros(row[name]) for name in _TIMES if row[name] is not None})
        return State({row.pop("partition"): DateState(**row) for row in rows}, max(seen, default=None))

    def change(self, step: Callable[[State], tuple[State, Result]]) -> Result:
        """Replace the state by the state that ``step`` returns, and return the step's second result.

        ``step`` is called again if another run has changed the state in the meantime.
        """

        def changed_rows() -> tuple[DataFrame | None, Result]:
            state = self.read()
            changed, result = step(state)
            return None if changed == state else self._rows(changed), result

        return change(self._spark, self.table, _APP, changed_rows, replace_all=True)

    def _rows(self, state: State) -> DataFrame:
        rows = [
            (date, *(getattr(known, name) for name in DateState.__dataclass_fields__), state.seen_version)
            for date, known in sorted(state.dates.items())
        ]
        return self._spark.createDataFrame(rows, _SCHEMA).coalesce(1)
