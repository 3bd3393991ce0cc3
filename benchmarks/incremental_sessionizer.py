"""Incremental Sessionizer: the run of hour 2,400 (after a hundred days) against that of hour 24.

Each hour has the same visits, and so both runs do the same work. Around them are the files of the hours before: of the
visits, of the completed sessions, and of the runs that the pending table keeps. The last hours are real runs of the
job; the files of the earlier ones are written in one commit, so that the tables' logs have as many files as after a
hundred days, but not as many commits.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from functools import partial

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.data_value import incremental_sessionizer as job
from python_jobs.data_value.incremental_sessionizer import Parameters
from python_jobs.shared.delta.commits import write_once

VISITS_AN_HOUR = 20_000
USERS = 6_000
# A user visits in three of six hours, so that sessions end in each hour.
CYCLE, ACTIVE = 6, 3
FIRST = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
KEPT_RUNS = 168


def hour_start(hour: int) -> dt.datetime:
    return FIRST + dt.timedelta(hours=hour)


def in_hours(spark: SparkSession, hours: int, rows: int) -> DataFrame:
    """Return ``rows`` rows for each hour, of which each hour is one task and so one file."""
    ids = spark.range(0, hours * rows, 1, hours)
    number = F.expr(f"id div {rows}").alias("hour")
    at = F.expr(f"timestamp_seconds({int(FIRST.timestamp())} + 3600 * (id div {rows}))").alias("start")
    return ids.select((F.col("id") % rows).alias("position"), number, at)


def land_visits(spark: SparkSession, table: str, hours: int, rows: int) -> None:
    """Write the visits of all hours."""
    visits = in_hours(spark, hours, rows).select(
        (F.col("position") * 7 % USERS).alias("user_id"),
        F.expr("start + make_interval(0, 0, 0, 0, 0, 0, position * 7919 % 3600)").alias("event_time"),
        F.concat(F.lit("page_"), F.col("position") % 97).alias("page"),
        F.to_date("start").alias("visit_date"),
        F.hour("start").alias("visit_hour"),
        F.col("hour"),
    )
    active = visits.where((F.col("user_id") + F.col("hour")) % CYCLE < ACTIVE).drop("hour")
    write_once(spark, active, table, partition_columns=["visit_date", "visit_hour"])


def earlier_runs(spark: SparkSession, params: Parameters, hours: int) -> None:
    """Add the files of earlier runs to the tables that the real runs have made."""
    sessions = in_hours(spark, hours, USERS // CYCLE).select(
        F.sha2(F.concat_ws("-", "hour", "position"), 256).alias("session_id"),
        F.col("position").alias("user_id"),
        F.col("start").alias("started_at"),
        F.expr("start + interval 30 minutes").alias("ended_at"),
        F.lit(1_800_000).cast("bigint").alias("duration_ms"),
        F.lit(2).alias("events"),
        F.array(F.lit("page_1"), F.lit("page_2")).alias("values"),
        F.to_date("start").alias("started_date"),
        F.col("start").alias("run_start"),
    )
    write_once(spark, sessions, params.target)
    kept = sessions.where(F.col("run_start") >= F.lit(hour_start(max(hours - KEPT_RUNS + CYCLE, 0))))
    pending = kept.withColumn("status", F.lit("open")).withColumn("expiration_run", F.col("run_start"))
    write_once(spark, pending.drop("duration_ms", "started_date"), params.pending)


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """The run of the one hour and of the other, each with its past."""
    spark, rows = bench.spark, bench.rows(VISITS_AN_HOUR)

    def variant(hour: int) -> Variant:
        folder = bench.folder / f"hour_{hour}"

        def parameters(run: int) -> Parameters:
            return Parameters(
                source=str(folder / "visits"),
                partition="visit_date = {date} and visit_hour = {hour}",
                key={"user_id": "user_id"},
                event_time="event_time",
                value="page",
                run=hour_start(run).isoformat(),
                first_run=hour_start(hour - CYCLE).isoformat(),
                pending=str(folder / "pending"),
                target=str(folder / "sessions"),
                dead_letter=str(folder / "dead"),
                keep_runs=KEPT_RUNS,
            )

        land_visits(spark, str(folder / "visits"), hour + 1, rows)
        for run in range(hour - CYCLE, hour):
            job.run(spark, parameters(run))
        earlier_runs(spark, parameters(hour), hour - CYCLE)
        return Variant(
            f"hour {hour:,}",
            partial(job.run, spark, parameters(hour)),
            lambda: (
                bench.table(str(folder / "sessions"))
                .where(F.col("run_start") == F.lit(hour_start(hour)))
                .select("user_id", "events", "values")
            ),
        )

    yield Comparison(
        title="A run of the Incremental Sessionizer after a day and after a hundred days",
        rows=rows,
        note=f"{USERS:,} users; the pending table keeps {KEPT_RUNS} runs.",
        variants=[variant(24), variant(2_400)],
        aims=[Aim("hour 2,400", "hour 24", 1.2)],
        repetitions=5,
    )
