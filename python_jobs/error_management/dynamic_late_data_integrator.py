"""Dynamic Late Data Integrator: each run also processes the past dates whose data changed since they were processed.

Problem: late data comes after any fixed lookback, and most dates of a lookback have none. The source's Delta log shows
which dates changed in which version (compaction is not a change). The target's log shows from which version each date
was computed. A date before the run's own date is late if its change is newer than the version it was computed from.

Runs may overlap: a run chooses its dates and claims them in the state table in one step, before it processes them, so
that no other run takes them. A claim ends with the date's success or failure, or after ``--claim_minutes`` if the run
died; ``--action release`` ends a claim at once. With ``depends_on_past`` a run chooses only after the run of the day
before has chosen; otherwise the later run would take the earlier run's dates.

Guarantee: data and last processed version are one commit of the target, so a date is neither forgotten nor integrated
twice. A change of the source during the run is late for the next run. A failed date stays late. For a stateful query
every date from the first late date on is recomputed, in order, and a run continues an interrupted chain.
``max_lookback_days`` and ``max_partitions`` limit the work that one late row can cause.

In an orchestrator that maps tasks, ``--action plan`` claims and reports the ``late`` dates; then call ``--action
process --dates '[2024-12-18]'`` once for each date under the same ``--run_id``. ``--action adopt`` marks every date of
the target as up to date with the source. Use it first on tables that exist already; without it the first run finds
each past date late.

Cost: a run reads the Delta log's entries since the last run, runs the query once per late date, and makes two small
commits of the state table.

Run::

    spark-submit python_jobs/error_management/dynamic_late_data_integrator.py \
        --source lakehouse/silver/silver_visits --target lakehouse/gold/referral_statistics \
        --state lakehouse/gold/referral_statistics_state --query referral_statistics.sql --date 2024-12-31

Source: Data Engineering Design Patterns, chapter 3, Dynamic Late Data Integrator.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pyspark.sql import SparkSession

from python_jobs.error_management.late_dates import LatePlan, late_plan
from python_jobs.error_management.late_partitions import DateProcessor, DateQuery, Trace, write_manifest
from python_jobs.error_management.late_state import DateState, State, StateTable
from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.dates import days_before, parse_date
from python_jobs.shared.core.failures import NotReady, WrongUse, require_at_least
from python_jobs.shared.core.intervals import duration, moved
from python_jobs.shared.spark.job import run_job


@dataclass(frozen=True, kw_only=True)
class Parameters(DateQuery, ProcessingTimeParameters):
    """Process a date and the dates before it that have new data."""

    state: str
    """Delta table of the state of each date, by path or catalog name; one table for each target."""
    date: str
    """Date to process, such as 2024-12-31."""
    action: Literal["run", "plan", "process", "release", "adopt"] = "run"
    """run: plan and process; plan or process: one step; release: end a dead run's claims; adopt: all dates are done."""
    dates: list[str] = dataclasses.field(default_factory=list)
    """Dates that action process processes; the run must have claimed them."""
    run_id: str | None = None
    """Name of the run, the same for a retry; by default a new name."""
    stateful: bool = False
    """Whether a date's result depends on the date before it."""
    max_lookback_days: int | None = None
    """Number of days before the date beyond which late data is only reported; by default no limit."""
    max_partitions: int | None = None
    """Largest number of late dates in one run, oldest first; the next run takes the rest. By default no limit."""
    depends_on_past: bool = True
    """Whether to wait (exit code 4) until the run of the day before has chosen its dates."""
    claim_minutes: int = 360
    """Minutes after which a dead run's claims expire (default 360); must be longer than any run takes."""
    manifest: str | None = None
    """Folder for the list of replaced partitions."""

    def __post_init__(self) -> None:
        DateQuery.__post_init__(self)
        ProcessingTimeParameters.__post_init__(self)
        try:
            for date in (self.date, *self.dates):
                parse_date(date)
        except ValueError as wrong:
            raise WrongUse(str(wrong)) from None
        require_at_least(
            1,
            max_lookback_days=self.max_lookback_days,
            max_partitions=self.max_partitions,
            claim_minutes=self.claim_minutes,
        )
        if self.action in ("process", "release") and self.run_id is None:
            raise WrongUse(f"action {self.action} needs the run_id that has claimed the dates")
        if bool(self.dates) != (self.action == "process"):
            raise WrongUse("dates belong to the action process, which needs them")


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the action and return its report.

    Raises:
        NotReady: the date is claimed by another run, the run before hasn't planned, or there is no source table.
        JobFailed: a date failed; it stays late, and the other dates are published.
        WrongUse: a table isn't partitioned by the column, or the query can't be used.
    """
    now = params.processing_time()
    run_id = params.run_id or str(uuid.uuid4())
    table = StateTable(spark, params.state)
    if params.action == "release":
        return {"run_id": run_id, "released": table.change(lambda state: _release(state, run_id))}
    processor = DateProcessor(spark, params)
    if params.action == "adopt":
        return {"adopted": table.change(lambda state: _adopt(refresh(state, processor)))}
    report: dict[str, Any] = {
        "date": params.date,
        "run_id": run_id,
        "source_version": processor.source_version,
    }
    if params.action == "process":
        dates = _claimed(table.read(), params.dates, run_id, now)
    else:
        plan = table.change(lambda state: choose(refresh(state, processor), params, run_id, now))
        report |= {"late": list(plan.dates), "ignored": list(plan.ignored)}
        report |= {"claimed": list(plan.claimed), "postponed": list(plan.postponed)}
        if params.action == "plan":
            return report
        dates = [*plan.dates, params.date]
    trace = Trace()
    try:
        for date in dates:
            trace.process(processor, date, run_id)
            if params.stateful and trace.failed:
                break
    finally:
        done = {rewritten.partition: rewritten.source_version for rewritten in trace.rewritten}
        table.change(lambda state: _settle(state, dates, done, run_id, now))
    report |= trace.report()
    if params.manifest is not None:
        name = run_id if params.action == "run" else f"{run_id}_{dates[0]}"
        report["manifest"] = write_manifest(
            spark, params.manifest, run_id=name, date=params.date, target=params.target, trace=trace
        )
    trace.require_success()
    return report


def refresh(state: State, processor: DateProcessor) -> State:
    """Return the state updated from the logs of source and target, which also repairs it after a crash."""
    return state.with_versions(
        processor.changes(state.seen_version), processor.read_versions(), processor.source_version
    )


def choose(state: State, params: Parameters, run_id: str, now: dt.datetime) -> tuple[State, LatePlan]:
    """Choose the late dates of a run and claim them with its own date.

    Raises:
        NotReady: the date is claimed by another run, or the run before hasn't planned yet.
    """
    own = state.dates.get(params.date, DateState())
    if own.claimed_from(run_id, now):
        raise NotReady(
            f"{params.date} is claimed by the run {own.claimed_by} until {own.claimed_until:%FT%T}; "
            "wait for it, or release a run that died"
        )
    if params.depends_on_past:
        _require_previous_plan(state.dates, params.date)
    plan = late_plan(
        {date: known.as_seen_by(run_id, now) for date, known in state.dates.items()},
        params.date,
        stateful=params.stateful,
        max_lookback_days=params.max_lookback_days,
        max_partitions=params.max_partitions,
    )
    until = moved(now, duration("minutes", params.claim_minutes))
    claims = {
        date: dataclasses.replace(state.dates.get(date, DateState()), claimed_by=run_id, claimed_until=until)
        for date in (*plan.dates, params.date)
    }
    claims[params.date] = dataclasses.replace(claims[params.date], planned_at=now)
    return state.with_dates(claims), plan


def _require_previous_plan(dates: Mapping[str, DateState], date: str) -> None:
    """Refuse to plan before the run of the day before has planned; the first run of all waits for no run."""
    planned = [earlier for earlier, known in dates.items() if earlier < date and known.planned_at]
    previous = days_before(date, 1)
    if planned and previous not in planned:
        raise NotReady(
            f"the run of {previous} has not planned, the last that did is {max(planned)}; run it first, or continue "
            "without it with depends_on_past false"
        )


def _claimed(state: State, dates: Collection[str], run_id: str, now: dt.datetime) -> list[str]:
    """Check that the run has claimed the dates and return them in order."""
    for date in dates:
        known = state.dates.get(date, DateState())
        if known.claimed_by != run_id or not known.claim_is_valid(now):
            raise NotReady(f"the run {run_id} has no valid claim on {date}; plan it first")
    return sorted(dates)


def _settle(
    state: State, dates: Collection[str], done: Mapping[str, int], run_id: str, now: dt.datetime
) -> tuple[State, None]:
    """Record the processed dates, and end the run's claims on all of the dates: failed dates stay late."""
    settled = {}
    for date in dates:
        known = state.dates[date]
        if known.claimed_by == run_id:
            known = known.released()
        if date in done:
            known = dataclasses.replace(known, read_version=done[date], processed_at=now)
        settled[date] = known
    return state.with_dates(settled), None


def _release(state: State, run_id: str) -> tuple[State, list[str]]:
    released = {date: known.released() for date, known in state.dates.items() if known.claimed_by == run_id}
    return state.with_dates(released), sorted(released)


def _adopt(state: State) -> tuple[State, list[str]]:
    """Mark each date as processed from the version that is known now."""
    adopted = {
        date: dataclasses.replace(known, read_version=state.seen_version)
        for date, known in state.dates.items()
    }
    return state.with_dates(adopted), sorted(adopted)


if __name__ == "__main__":
    run_job(Parameters, run)
