"""Dead-Letter queue: report the depth, age and errors of a dead-letter table, alert on limits, discard dead letters.

The job reads the dead-letter table of :mod:`.dead_letter`. A dead letter is *open* while its status is pending or
parked. Replayed and discarded dead letters are closed and stay in the table, so that records read = main table + open +
discarded.

``--action report`` counts. An exceeded limit is an alert: exit code 3 and one line on standard error. With ``--alerts``
each alert is recorded in a Delta table, once per limit and day, and only a new alert fails the job: a scheduler that
runs the job each hour alerts once a day.

``--action discard`` closes the open dead letters of ``--where`` and ``--older_than`` as ``discarded`` with
``--reason``; no row is deleted.

Guarantee: each action is one commit; a rerun finds nothing new. Cost: one pass over the dead-letter table.

    spark-submit python_jobs/error_management/dead_letter_queue.py \\
        --dead_letter lakehouse/silver/silver_visits_dead_letter --alerts lakehouse/observability/dead_letter_alerts \\
        --max_per_day 1000 --max_age_hours 72

As dbt test on the same table: ``dead_letter_queue`` (macros/error_management/dead_letter_queue.sql).

Source: the guide's Dead-Letter Queue, replay and monitoring (chapter 10.2).
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any, Literal

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import DataRefused, WrongUse, require_at_least
from python_jobs.shared.core.intervals import moved, parse_duration, to_micros
from python_jobs.shared.core.numbers import exceeds
from python_jobs.shared.delta.commits import find_commit, latest_version, noted, numeric_metrics
from python_jobs.shared.delta.streams import create_table, evaluated_once
from python_jobs.shared.delta.tables import delta_table, read_table
from python_jobs.shared.records.dead_letters import DISCARDED, PARKED, PENDING
from python_jobs.shared.records.json_records import ERROR_CLASS
from python_jobs.shared.spark.job import run_job

CLASS_DAYS = 7
TREND_DAYS = 30
_ALERTS = "dead_letter string, day date, limit string, got double, allowed double, alerted_at timestamp"


@dataclass(frozen=True)
class Parameters(ProcessingTimeParameters):
    """Report on a dead-letter table and alert, or discard dead letters."""

    dead_letter: str
    """Delta table (name or path) of dead letters."""
    action: Literal["report", "discard"] = "report"
    """report: count, and alert if a limit is exceeded; discard: close dead letters that nobody will replay."""
    max_open: int | None = None
    """Largest number of pending and parked dead letters; by default no limit."""
    max_age_hours: float | None = None
    """Largest age of an open dead letter in hours; by default no limit."""
    max_per_day: int | None = None
    """Largest number of dead letters of the current day; by default no limit."""
    alerts: str | None = None
    """Delta table (name or path) that records alerts, so that an alert fails the job once a day; created if absent."""
    where: str | None = None
    """discard: SQL condition on the dead letters to close."""
    older_than: str | None = None
    """discard: smallest age of the dead letters to close, such as "90 days"."""
    reason: str | None = None
    """discard: reason that is stored with the dead letters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(0, **self.limits())
        if self.older_than is not None:
            parse_duration(self.older_than)
        if self.action == "discard":
            if not self.reason:
                raise WrongUse("action discard needs a reason")
            if self.where is None and self.older_than is None:
                raise WrongUse("action discard needs where or older_than: which letters are given up")

    def limits(self) -> dict[str, float]:
        """Return the limits that are set."""
        given = {
            "max_open": self.max_open,
            "max_age_hours": self.max_age_hours,
            "max_per_day": self.max_per_day,
        }
        return {name: float(value) for name, value in given.items() if value is not None}


def is_open() -> Column:
    """Return whether a dead letter is open: it waits for a replay or a discard."""
    return F.col("status").isin(PENDING, PARKED)


def by_class(letters: DataFrame, now: dt.datetime) -> DataFrame:
    """Return one row for each error class of the last 7 days: count, open, oldest, newest, mean attempts."""
    recent = F.col("processed_at") >= F.lit(moved(now, -dt.timedelta(days=CLASS_DAYS)))
    return (
        letters.where(recent)
        .groupBy(ERROR_CLASS)
        .agg(
            F.count(F.lit(1)).alias("letters"),
            F.count_if(is_open()).alias("open"),
            F.min("processed_at").alias("oldest"),
            F.max("processed_at").alias("newest"),
            F.avg("attempts").alias("mean_attempts"),
        )
        .orderBy(F.desc("letters"), ERROR_CLASS)
    )


def by_day(letters: DataFrame, now: dt.datetime) -> DataFrame:
    """Return one row for each of the last 30 days with dead letters, oldest first."""
    day = F.to_date("processed_at").alias("day")
    recent = F.col("processed_at") >= F.lit(moved(now, -dt.timedelta(days=TREND_DAYS)))
    return letters.where(recent).groupBy(day).agg(F.count(F.lit(1)).alias("letters")).orderBy("day")


def depth(letters: DataFrame, now: dt.datetime) -> dict[str, Any]:
    """Return the numbers that have limits, and the number of dead letters by status."""
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    today = (F.col("processed_at") >= F.lit(midnight)) & (F.col("processed_at") <= F.lit(now))
    oldest = F.unix_micros(F.min(F.when(is_open(), F.col("processed_at"))))
    row = letters.agg(
        F.count_if(is_open()).alias("open"),
        ((F.lit(to_micros(now)) - oldest) / 3_600_000_000).alias("age_hours"),
        F.count_if(today).alias("per_day"),
    ).collect()[0]
    statuses = letters.groupBy("status").count().orderBy("status").collect()
    return {
        "open": row["open"],
        "age_hours": round(row["age_hours"] or 0.0, 2),
        "per_day": row["per_day"],
        "statuses": {status["status"]: status["count"] for status in statuses},
    }


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the action and return its report.

    Raises:
        NotReady: the table doesn't exist.
        DataRefused: a limit is exceeded, and the alert wasn't recorded today.
    """
    now = params.processing_time()
    if params.action == "discard":
        return _discard(spark, params, now)
    counted = read_table(spark, params.dead_letter).select(ERROR_CLASS, "status", "processed_at", "attempts")
    with evaluated_once(counted) as letters:
        numbers = depth(letters, now)
        tables = {
            "by_class": [row.asDict() for row in by_class(letters, now).collect()],
            "by_day": {str(row["day"]): row["letters"] for row in by_day(letters, now).collect()},
        }
    passed = [
        (params.dead_letter, now.date(), limit, float(numbers[limit.removeprefix("max_")]), allowed, now)
        for limit, allowed in params.limits().items()
        if exceeds(numbers[limit.removeprefix("max_")], allowed)
    ]
    if passed and (params.alerts is None or _note(spark, params.alerts, passed)):
        found = "; ".join(
            f"{limit} is {allowed:g} and {got:g} were found" for _, _, limit, got, allowed, _ in passed
        )
        raise DataRefused(f"alert: dead letters of {params.dead_letter}: {found}")
    return numbers | {"alerts": [limit for _, _, limit, *_ in passed]} | tables


def _note(spark: SparkSession, table: str, passed: list[tuple[Any, ...]]) -> bool:
    """Record alerts and return whether one of them is new."""
    rows = spark.createDataFrame(passed, _ALERTS)
    create_table(spark, table, rows.schema)
    same = "t.dead_letter = s.dead_letter and t.day = s.day and t.limit = s.limit"
    merge = delta_table(spark, table).alias("t").merge(rows.alias("s"), same)
    return bool(merge.whenNotMatchedInsertAll().execute().collect()[0]["num_inserted_rows"])


def _discard(spark: SparkSession, params: Parameters, now: dt.datetime) -> dict[str, Any]:
    chosen = is_open() & F.expr(params.where or "true")
    if params.older_than is not None:
        chosen &= F.col("processed_at") < F.lit(now - parse_duration(params.older_than))
    with noted(spark, params.dead_letter) as update:
        delta_table(spark, params.dead_letter).update(
            chosen,
            {
                "status": F.lit(DISCARDED),
                "status_changed_at": F.lit(now),
                "status_reason": F.lit(params.reason),
            },
        )
    commit = find_commit(spark, params.dead_letter, update)  # none of an update that finds nothing
    version = latest_version(spark, params.dead_letter) if commit is None else commit["version"]
    discarded = 0 if commit is None else numeric_metrics(commit)["numUpdatedRows"]
    return {"discarded": discarded, "dead_letter": {"table": params.dead_letter, "version": version}}


if __name__ == "__main__":
    run_job(Parameters, run)
