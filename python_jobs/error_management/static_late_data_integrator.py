"""Static Late Data Integrator: each run also processes a fixed number of past dates.

Problem: data keeps coming for days after its date. A run for 2024-12-31 with ``--lookback_days 14`` computes this day
and recomputes 12-17 to 12-30; a row for 12-15 is ignored. One run processes all these dates: a separate run for each
date would apply its lookback again.

``--strategy`` sets the order: ``late_first`` (late dates ascending, then the current date; a failure ends the run),
``current_first`` (the current date is published before the late dates start) or ``parallel``. Stateful queries, whose
result depends on the day before, need ``late_first``. ``--only_changed true`` leaves out the dates whose source has not
changed since they were processed.

Guarantee: each date is one commit that replaces its partition of the target, or clears it if no row is left, so a run
may be repeated; other partitions are not touched. The manifest lists the replaced partitions for consumers. With
``--rejects`` a separate table keeps the rows that came for dates before the lookback, each once (:mod:`.late_rejects`).

A backfill of many dates needs few runs, because each run covers its lookback: ``--backfill_from`` prints the runs and
starts none.

Cost: the query runs once per date. ``only_changed`` reads the Delta log entries since the oldest processed date;
``rejects`` reads the log entries since the last run and two versions of each older partition that has changed.

Run::

    spark-submit python_jobs/error_management/static_late_data_integrator.py \
        --source lakehouse/silver/silver_visits --target lakehouse/gold/referral_statistics \
        --query "select event_date, referral, count(*) as visits from {source}
                 where event_date = {date} group by event_date, referral" \
        --date 2024-12-31 --lookback_days 14

Source: Data Engineering Design Patterns, chapter 3, Static Late Data Integrator; the guide's Late Arrival Handling.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from pyspark.sql import SparkSession

from python_jobs.error_management.late_dates import (
    Partition,
    backfill_runs,
    late_plan,
    lookback_dates,
    not_redone,
)
from python_jobs.error_management.late_partitions import DateProcessor, DateQuery, Trace, write_manifest
from python_jobs.error_management.late_rejects import reject_rows
from python_jobs.shared.core.failures import WrongUse, require_at_least
from python_jobs.shared.spark.job import run_job


@dataclass(frozen=True, kw_only=True)
class Parameters(DateQuery):
    """Process a date and a fixed number of dates before it."""

    date: str
    """Date to process, such as 2024-12-31."""
    lookback_days: int = 15
    """Number of dates before the date that are processed too (default 15)."""
    strategy: Literal["late_first", "current_first", "parallel"] = "late_first"
    """Order of the late dates and the current date (default late_first)."""
    stateful: bool = False
    """Whether a date's result depends on the date before it."""
    only_changed: bool = False
    """Whether to leave out late dates whose source has not changed since they were processed."""
    parallel_dates: int = 2
    """Number of dates that the strategy parallel processes at a time (default 2)."""
    manifest: str | None = None
    """Folder for the list of replaced partitions."""
    rejects: str | None = None
    """Delta table (name or path) that keeps rows that came for dates before the lookback; created if absent."""
    run_id: str | None = None
    """Name of the run; by default a new name."""
    backfill_from: str | None = None
    """First date of a backfill up to date; with it the job only reports the runs that the backfill needs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            lookback_dates(self.date, self.lookback_days)
            if self.backfill_from is not None:
                backfill_runs(self.backfill_from, self.date, self.lookback_days)
        except ValueError as wrong:
            raise WrongUse(str(wrong)) from None
        if self.stateful and self.strategy != "late_first":
            raise WrongUse(
                f"a stateful query can't have the strategy {self.strategy}: the current date is computed from the "
                "corrected dates before it; use late_first"
            )
        require_at_least(2, parallel_dates=self.parallel_dates)
        if self.rejects in (self.source, self.target):
            raise WrongUse("rejects must be another table than source and target")


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Process the dates and report the replaced partitions.

    Raises:
        JobFailed: a date failed; other dates are published as far as the strategy allows.
        NotReady: there is no source table.
        WrongUse: a table isn't partitioned by the column, or the query can't be used.
    """
    if params.backfill_from is not None:
        return backfill(params.backfill_from, params.date, params.lookback_days)
    processor = DateProcessor(spark, params)
    run_id = params.run_id or str(uuid.uuid4())
    lookback = lookback_dates(params.date, params.lookback_days)
    late = _changed(processor, lookback, params) if params.only_changed else lookback
    trace = Trace()
    order(params, late, lambda date: trace.process(processor, date, run_id), lambda: bool(trace.failed))
    report = {
        "date": params.date,
        "run_id": run_id,
        "source_version": processor.source_version,
        "late": late,
        "unchanged": [date for date in lookback if date not in late],
        **trace.report(),
    }
    if params.manifest is not None:
        report["manifest"] = write_manifest(
            spark, params.manifest, run_id=run_id, date=params.date, target=params.target, trace=trace
        )
    trace.require_success()
    # Only a run without failures rejects, because a failed date may be before the next run's lookback. A run of a past
    # date doesn't reject, because its lookback begins earlier than the newest run's lookback.
    read_versions = processor.read_versions()
    if params.rejects is not None and max(read_versions) <= params.date:
        report["rejected"] = reject_rows(
            spark,
            params,
            params.rejects,
            horizon=lookback[0] if lookback else params.date,
            source_version=processor.source_version,
            read_versions=read_versions,
            run_id=run_id,
            date=params.date,
        )
    return report


def order(
    params: Parameters, late: Sequence[str], process: Callable[[str], None], failed: Callable[[], bool]
) -> None:
    """Call ``process`` for each date in the strategy's order; ``failed`` returns whether a date has failed so far."""
    if params.strategy == "late_first":
        for date in (*late, params.date):
            process(date)
            if failed():
                break
    elif params.strategy == "current_first":
        for date in (params.date, *late):
            process(date)
    else:
        with ThreadPoolExecutor(params.parallel_dates) as pool:
            # The current date is first in the queue: it and a late date start without waiting for each other.
            list(pool.map(process, (params.date, *late)))


def backfill(first: str, last: str, days: int) -> dict[str, Any]:
    """Return the runs that process each date from ``first`` to ``last``, and the dates that these runs leave out."""
    runs = backfill_runs(first, last, days)
    return {
        "runs": [{"date": planned.date, "covers": list(planned.covers)} for planned in runs],
        "not_redone": not_redone(first, last, days),
    }


def _changed(processor: DateProcessor, lookback: Sequence[str], params: Parameters) -> list[str]:
    """Return the dates with new data; for a stateful query, all dates from the first date with new data on."""
    read = {date: version for date, version in processor.read_versions().items() if date in lookback}
    changed = processor.changes(after=min(read.values())) if read else {}
    # A date that was never processed counts as changed: processing it once shows whether it has data.
    unknown = processor.source_version
    partitions = {date: Partition(changed.get(date, unknown if date not in read else None), read.get(date))
                  for date in lookback}  # fmt: skip
    return list(late_plan(partitions, params.date, stateful=params.stateful).dates)


if __name__ == "__main__":
    run_job(Parameters, run)
