"""Times are those of UTC, whatever the zone of Python, of the session or of a text without offset."""

from __future__ import annotations

import datetime as dt
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from python_jobs.ingestion import compactor
from python_jobs.shared.core.clock import ProcessingTimeParameters, utc_now
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.jvm import jvm
from tests.support.render import MacroRenderer
from tests.support.session import setting

ZONES = ["America/New_York", "Asia/Kolkata", "UTC"]


@pytest.fixture
def new_york(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python and the session are in New York."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    with setting(spark, "spark.sql.session.timeZone", "America/New_York"):
        yield
    monkeypatch.undo()
    os.environ["TZ"] = "UTC"
    time.tzset()
    spark.sparkContext.environment.pop("TZ", None)


def test_a_job_runs_in_utc_on_driver_workers_and_in_the_session(spark: SparkSession, new_york: None) -> None:
    found: dict[str, Any] = {}

    def run(spark: SparkSession, params: ProcessingTimeParameters) -> dict[str, Any]:
        in_worker = F.udf(lambda moment: f"{moment} {time.tzname[0]}")
        found["row"] = (
            spark.sql("select timestamp'2024-07-01 10:00:00' as moment")
            .select(in_worker("moment"), F.unix_seconds("moment"), "moment")
            .collect()[0]
        )
        return {}

    with pytest.raises(SystemExit) as end:
        run_job(ProcessingTimeParameters, run, [])
    assert end.value.code == 0
    in_python, seconds, collected = found["row"]
    assert (in_python, seconds, str(collected)) == (
        "2024-07-01 10:00:00 UTC",
        1719828000,
        "2024-07-01 10:00:00",
    )


def test_the_zone_of_the_jvm_changes_no_value(spark: SparkSession, tmp_path: Path) -> None:
    """A job sets the zones of the session, of Python and of its workers; the JVM's own decides nothing."""
    table = str(tmp_path / "table")
    found: dict[str, Any] = {}

    def run(spark: SparkSession, params: ProcessingTimeParameters) -> dict[str, Any]:
        moment, day = dt.datetime(2024, 7, 1, 1, 30, tzinfo=dt.UTC), dt.date(2024, 7, 1)
        rows = spark.range(1).select(
            F.lit(moment).alias("given"),
            F.expr("timestamp'2024-07-01 01:30:00'").alias("literal"),
            F.to_timestamp(F.lit("2024-07-01 01:30:00")).alias("text"),
            F.to_date(F.lit(moment)).alias("day"),
            (F.lit(moment) >= F.lit(params.processing_time())).alias("is_reached"),
        )
        rows.write.format("delta").partitionBy("day").save(table)
        held = spark.read.format("delta").load(table).where(F.col("day") == F.lit(day))
        times = ("given", "literal", "text")
        found["seconds"] = held.select(*(F.unix_seconds(name) for name in times), "is_reached").collect()
        found["texts"] = held.select(*(F.col(name).cast("string") for name in times), "day").collect()
        found["moments"] = held.select(*times).collect()
        return {}

    zones = jvm(spark).java.util.TimeZone
    before = zones.getDefault()
    zones.setDefault(zones.getTimeZone("America/New_York"))
    try:
        with pytest.raises(SystemExit) as end:
            run_job(ProcessingTimeParameters, run, ["--now", "2024-07-01T01:30:00"])
    finally:
        zones.setDefault(before)
    assert end.value.code == 0
    assert [tuple(row) for row in found["seconds"]] == [(1719797400, 1719797400, 1719797400, True)]
    text = "2024-07-01 01:30:00"
    assert [tuple(row) for row in found["texts"]] == [(text, text, text, dt.date(2024, 7, 1))]
    assert [tuple(map(str, row)) for row in found["moments"]] == [(text, text, text)]
    assert [folder.name for folder in Path(table).glob("day=*")] == ["day=2024-07-01"]


def test_partitions_by_timestamp_are_compacted_with_python_and_session_in_other_zones(
    spark: SparkSession, new_york: None, tmp_path: Path
) -> None:
    """Both partitions are half past one in New York, where the clocks go back between them."""
    table = str(tmp_path / "table")
    hour = F.timestamp_seconds(F.lit(1730611800) + F.spark_partition_id().bitwiseAND(1) * 3600)
    rows = spark.range(8, numPartitions=8).withColumn("hour", hour)
    with setting(spark, "spark.sql.session.timeZone", "UTC"):  # in New York both would be one partition
        rows.write.format("delta").partitionBy("hour").save(table)

    def files() -> int:
        return len(spark.read.format("delta").load(table).inputFiles())

    assert files() == 8
    report = compactor.run(spark, compactor.Parameters(table=table, vacuum=False))
    assert (report["partitions_compacted"], report["files_removed"], report["files_added"]) == (2, 8, 2)
    assert files() == 2


@pytest.mark.parametrize("zone", ZONES)
def test_macros_give_the_same_instants_and_days_in_every_session(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str, zone: str
) -> None:
    """The letter of 23:30 in UTC is one of the next day in Kolkata, that of 00:30 of the day before in New York."""
    letters = "select * from (values {}) as t (at, error_class, error_message, status, attempts)".format(
        ", ".join(
            f"('2024-03-10T{clock}:00Z', 'A', 'a', 'pending', 1)" for clock in ("00:30", "12:00", "23:30")
        )
    )
    now = {"now": "2024-03-10 23:45:00"}
    statements = {
        "statistics": (
            render("dead_letter_statistics", dead_letter="letters", days=1, **now),
            [("2024-03-10", 3)],
            "cast(day as string), letters",
        ),
        "limits": (
            render(
                "dead_letter_queue_failures", dead_letter="letters", max_per_day=2, max_age_hours=24, **now
            ),
            [("max_per_day", 3.0)],
            "limit_name, got",
        ),
        "dead letters": (
            render(
                "dead_letter_rows",
                flagged="flagged_letters",
                job_name="j",
                processed_at="2024-03-10 12:00:00",
            ),
            [(1710072000,)] * 3,
            "unix_seconds(processed_at)",
        ),
        "filter": (
            render(
                "filter_interceptor_statistics",
                flagged="(select cast(null as string) as rejected_by)",
                conditions=[{"name": "a", "condition": "true"}],
                run_id="r",
                run_at="2024-03-10T13:00:00+01:00",
            ),
            [(1710072000,)],
            "unix_seconds(run_at)",
        ),
    }
    with setting(spark, "spark.sql.session.timeZone", zone):
        spark.sql(
            f"select try_to_timestamp(at) as processed_at, * except (at) from ({letters})"
        ).createOrReplaceTempView("letters")
        spark.sql("select * except (processed_at) from letters").createOrReplaceTempView("flagged_letters")
        for name, (sql, expected, columns) in statements.items():
            found = spark.sql(f"select {columns} from ({sql})").collect()
            assert [tuple(row) for row in found] == expected, name


@pytest.mark.parametrize(
    ("given", "literal"),
    [
        ("2024-03-01 10:00:00", "timestamp '2024-03-01 10:00:00+00:00'"),
        ("2024-03-01T11:00:00+01:00", "timestamp '2024-03-01 10:00:00+00:00'"),
    ],
)
def test_time_travel_names_an_instant(render: MacroRenderer, given: str, literal: str) -> None:
    assert render("time_travel", relation="t", timestamp=given) == f"t timestamp as of {literal}"
    with pytest.raises(Exception, match=r"timestamp must be a time such as .*, got '10:00'"):
        render("time_travel", relation="t", timestamp="10:00")


def test_a_time_that_is_not_given_is_the_start_of_the_run_in_utc(render: MacroRenderer) -> None:
    sql = render("dead_letter_rows", flagged="t", job_name="j")
    found = re.search(r"timestamp '(.+\+00:00)' as processed_at", sql)
    assert found is not None, sql
    assert abs(dt.datetime.fromisoformat(found[1]) - utc_now()) < dt.timedelta(days=1)
