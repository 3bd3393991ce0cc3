"""A batch's MERGE reads the partitions of its own dates alone, however many days the table holds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.error_management import checkpointer, windowed_counter
from python_jobs.shared.delta.keyed_tables import DeltaSink
from python_jobs.shared.delta.streams import create_table, nullable
from python_jobs.shared.delta.touched_dates import MAX_LISTED, among, dates_of
from tests.support.rows import assert_rows

Write = Callable[[DataFrame, int], None]
MakeWriter = Callable[[SparkSession, str], tuple[Write, Callable[..., DataFrame]]]


def test_the_dates_are_those_of_the_rows_in_order_also_after_the_year_9999(spark: SparkSession) -> None:
    days = "date'2024-03-05'), (date'2024-03-01'), (null), (date'+12024-01-01'), (date'2024-03-05'"
    dates = dates_of(spark.sql(f"select * from values ({days}) as v(`the day`)"), "the day")
    assert dates == ["2024-03-01", "2024-03-05", "+12024-01-01"]
    held = spark.sql(f"select col1 as `the day` from values ({days})").alias("t")
    assert held.where(among("the day", dates)).count() == 4
    assert held.where(among("the day", [])).count() == 0


def test_many_dates_are_a_range() -> None:
    dates = [f"{year:04}-01-01" for year in range(1, MAX_LISTED + 2)]
    assert among("day", dates) == "t.`day` between date'0001-01-01' and date'0101-01-01'"
    assert among("day", dates[1:]).startswith("t.`day` in (date'0002-01-01', ")


def windows(spark: SparkSession, *hours: str) -> DataFrame:
    """Return one window for each hour, with one event."""
    starts = spark.createDataFrame([(f"{hour}:00:00",) for hour in hours], "window_start string")
    start = F.col("window_start").cast("timestamp")
    return starts.select(start.alias("window_start"), (start + F.expr("interval 1 hour")).alias("window_end"))


def _counter(spark: SparkSession, target: str) -> tuple[Write, Callable[..., DataFrame]]:
    params = windowed_counter.Parameters(
        source="none", target=target, checkpoint="none", output_mode="update"
    )

    def counts(*hours: str) -> DataFrame:
        return windows(spark, *hours).withColumn("events", F.lit(1).cast("bigint"))

    schema = windowed_counter.first_revisions(counts(), params.processing_time()).schema
    create_table(spark, target, nullable(schema), ["window_date"])
    return windowed_counter.WindowReviser(spark, params).write, counts


def _checkpointer(spark: SparkSession, target: str) -> tuple[Write, Callable[..., DataFrame]]:
    def counts(*hours: str) -> DataFrame:
        date, keys = F.to_date("window_start"), F.lit(1).cast("bigint")
        return windows(spark, *hours).withColumns({"window_date": date, "unique_keys": keys})

    checkpointer.create_counts(spark, target)
    return checkpointer.WindowCountMerger(spark, target, "the topic").write, counts


def _sink(spark: SparkSession, target: str) -> tuple[Write, Callable[..., DataFrame]]:
    def rows(*hours: str) -> DataFrame:
        return windows(spark, *hours).withColumn("day", F.to_date("window_start"))

    return DeltaSink(spark, target, rows(), ["window_start"], "day").write, rows


def reads_the_first(write: Callable[[], object]) -> bool:
    """Return whether a write reads the date whose files are gone."""
    try:
        write()
    except (PySparkException, Py4JJavaError) as failure:
        if "FAILED_READ_FILE" not in str(failure):
            raise
        return True
    return False


@pytest.mark.parametrize("writer", [_counter, _checkpointer, _sink], ids=["counter", "checkpointer", "sink"])
def test_a_batch_reads_no_other_date(spark: SparkSession, table_path: str, writer: MakeWriter) -> None:
    write, rows = writer(spark, table_path)
    write(rows("2024-03-01 10", "2024-03-02 10"), 0)
    (unreadable,) = Path(table_path).glob("*=2024-03-01")
    shutil.rmtree(unreadable)
    batch = rows("2024-03-02 10", "2024-03-02 11", "2024-03-03 10")
    assert not reads_the_first(lambda: write(batch, 1))
    written = spark.read.format("delta").load(table_path).where("window_start >= date'2024-03-02'")
    assert_rows(
        written.select(F.date_format("window_start", "dd HH").alias("hour")),
        [("02 10",), ("02 11",), ("03 10",)],
    )
    assert reads_the_first(lambda: write(rows("2024-03-01 11"), 2))


@pytest.mark.parametrize("writer", [_counter, _checkpointer], ids=["counter", "checkpointer"])
def test_a_batch_without_windows_commits_nothing(
    spark: SparkSession, table_path: str, writer: MakeWriter
) -> None:
    write, rows = writer(spark, table_path)
    write(rows(), 0)
    assert len(list(Path(table_path, "_delta_log").glob("*.json"))) == 1
