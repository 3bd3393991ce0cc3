"""Windowed Aggregation in batch: tumbling and sliding windows of event time, beside Spark's streams and sessions."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dbt_common.exceptions import DbtRuntimeError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.error_management import windowed_counter
from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.session import setting
from tests.support.snippets import snippets

SNIPPETS = "tests/patterns/data_value/test_windowed_aggregation.py::test_the_queries_of_the_page"
EVENTS = "(select explode(sequence(timestamp'2024-03-01 10:00', timestamp'2024-03-01 10:11', interval 1 minute)) as t)"


def at(clock: str) -> dt.datetime:
    return dt.datetime.fromisoformat(f"2024-03-01 {clock}")


def windows(spark: SparkSession, render: MacroRenderer, relation: str = EVENTS, **given: Any) -> DataFrame:
    arguments = {"relation": relation, "event_time": "t", "window": "5 minutes"}
    return spark.sql(render("windowed_aggregate", **(arguments | given)))


def counts(found: DataFrame) -> list[tuple[str, int]]:
    """Return the rows of each window by its start."""
    return sorted((f"{row.window_start:%H:%M}", row.row_count) for row in found.collect())


def test_an_event_is_in_one_tumbling_window_with_its_start_and_without_its_end(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    found = windows(spark, render)
    assert counts(found) == [("10:00", 5), ("10:05", 5), ("10:10", 2)]
    assert_rows(
        found.where("row_count = 2").select("window_start", "window_end"), [(at("10:10"), at("10:15"))]
    )


def test_an_event_is_in_as_many_sliding_windows_as_slides_fit_in(
    spark: SparkSession, render: MacroRenderer
) -> None:
    found = windows(spark, render, window="10 minutes", slide="5 minutes")
    assert counts(found) == [("09:55", 5), ("10:00", 10), ("10:05", 7), ("10:10", 2)]
    assert sum(count for _, count in counts(found)) == 2 * 12


def test_windows_begin_at_multiples_since_1970_in_utc_and_an_offset_moves_them(
    spark: SparkSession, render: MacroRenderer
) -> None:
    """10:00 in UTC is 15:30 in Kolkata; its day begins at 18:30 in UTC."""
    with setting(spark, "spark.sql.session.timeZone", "Asia/Kolkata"):
        local = "(select t at as t from values (timestamp'2024-03-01 23:59:59Z'), (timestamp'2024-03-02 00:00:00Z'))"
        events = local.replace("t at as t", "col1 as t")
        starts = windows(spark, render, events, window="1 day").select(F.unix_seconds("window_start"))
        midnight = int(dt.datetime(2024, 3, 1, tzinfo=dt.UTC).timestamp())
        assert_rows(starts, [(midnight,), (midnight + 86400,)])
        kolkata = windows(spark, render, events, window="1 day", offset="1110 minutes")
        assert_rows(
            kolkata.select("row_count", F.unix_seconds("window_start")), [(2, midnight + 18 * 3600 + 1800)]
        )


def test_measures_and_groups_of_a_window(spark: SparkSession, render: MacroRenderer) -> None:
    rows = [
        (at("10:00"), "a", 1.0),
        (at("10:01"), "a", 2.0),
        (at("10:02"), None, float("nan")),
        (at("10:02"), "a", -7.0),
    ]
    spark.createDataFrame(rows, "t timestamp, page string, n double").createOrReplaceTempView("measured")
    found = windows(
        spark, render, "measured", by=["page"], measures={"n": {"value": "n", "valid_when": "n >= 0"}}
    )
    assert_rows(
        found.select("page", "row_count", "n_count", "n_sum", "n_min", "n_max", "n_avg"),
        [("a", 3, 2, 3.0, 1.0, 2.0, 1.5), (None, 1, 0, None, None, None, None)],
    )


def test_the_order_of_the_events_changes_no_window(spark: SparkSession, render: MacroRenderer) -> None:
    backwards = EVENTS.replace(
        "10:00', timestamp'2024-03-01 10:11', interval 1", "10:11', timestamp'2024-03-01 10:00', interval -1"
    )
    assert backwards != EVENTS
    assert counts(windows(spark, render, backwards)) == counts(windows(spark, render))


@pytest.mark.parametrize(
    ("time", "sentence"),
    [
        ("'10:00'", "event_time 't' must be a timestamp, got string"),
        ("date'2024-03-01'", "event_time 't' must be a timestamp, got date"),
        ("cast(null as timestamp)", "event_time 't' must be a timestamp, a row has NULL"),
    ],
)
def test_an_event_without_a_full_time_is_refused(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str, time: str, sentence: str
) -> None:
    with pytest.raises(PySparkException, match=sentence):
        windows(spark, render, f"(select {time} as t)").collect()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"window": "five minutes"}, "window must be a number of minutes, hours or days"),
        ({"window": "0 minutes"}, "window must be longer than 0, got '0 minutes'"),
        ({"slide": "6 minutes"}, "slide must be longer than 0 and at most the window '5 minutes'"),
        ({"slide": "0 hours"}, "slide must be longer than 0 and at most the window '5 minutes'"),
        ({"offset": "5 minutes"}, "offset must be shorter than the slide '5 minutes', got '5 minutes'"),
        ({"by": "Window_Start"}, "would give two columns the name 'Window_Start'"),
    ],
)
def test_wrong_arguments_are_refused(
    spark: SparkSession, render: MacroRenderer, arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DbtRuntimeError, match=sentence):
        windows(spark, render, **arguments)


def test_batch_has_the_windows_that_a_stream_closes(
    spark: SparkSession, render: MacroRenderer, tmp_path: Path
) -> None:
    source, target = str(tmp_path / "events"), str(tmp_path / "windows")
    later = "select timestamp'2024-03-01 11:00' as t"  # closes the windows
    spark.sql(f"create table delta.`{source}` using delta as select * from {EVENTS} union all {later}")
    params = windowed_counter.Parameters(
        source=source,
        target=target,
        checkpoint=str(tmp_path / "checkpoint"),
        event_time="t",
        window="5 minutes",
    )
    windowed_counter.run(spark, params)
    streamed = (
        spark.read.format("delta").load(target).select("window_start", "window_end", "events").collect()
    )
    assert len(streamed) == 3
    batch = windows(spark, render, f"delta.`{source}`").where("window_start < '2024-03-01 11:00'")
    assert_rows(batch.select("window_start", "window_end", "row_count"), streamed)


# --- facts about Spark that the guide names ----------------------------------------------------------------


def test_spark_refuses_an_exact_distinct_count_on_a_stream_and_takes_an_approximate_one(
    spark: SparkSession,
) -> None:
    stream = spark.readStream.format("rate").load().withWatermark("timestamp", "10 minutes")
    by_window = stream.groupBy(F.window("timestamp", "5 minutes"))

    def start(counted: Any) -> None:
        by_window.agg(counted).writeStream.format("noop").outputMode("append").start().stop()

    with pytest.raises(AnalysisException, match="Distinct aggregations are not supported"):
        start(F.count_distinct("value"))
    start(F.approx_count_distinct("value"))


def test_spark_writes_session_windows_when_they_are_closed_and_never_in_update_mode(
    spark: SparkSession,
) -> None:
    stream = spark.readStream.format("rate").load().withWatermark("timestamp", "1 hour")
    sessions = (
        stream.groupBy(F.session_window("timestamp", "30 minutes"), "value")
        .count()
        .writeStream.format("noop")
    )
    with pytest.raises(AnalysisException, match=r"(?i)session window"):
        sessions.outputMode("update").start()
    sessions.outputMode("append").start().stop()


def test_events_exactly_one_gap_apart_are_one_session_whatever_their_order(spark: SparkSession) -> None:
    def sessions(*clocks: str) -> list[tuple[str, str, int]]:
        events = spark.createDataFrame([(at(clock),) for clock in clocks], "t timestamp")
        rows = events.groupBy(F.session_window("t", "30 minutes").alias("s")).count().collect()
        return sorted((f"{row.s.start:%H:%M:%S}", f"{row.s.end:%H:%M:%S}", row["count"]) for row in rows)

    assert sessions("10:00:00", "10:30:00") == [("10:00:00", "11:00:00", 2)]
    assert sessions("10:00:00", "10:30:01") == [("10:00:00", "10:30:00", 1), ("10:30:01", "11:00:01", 1)]
    assert sessions("10:00:00", "10:40:00", "10:20:00") == [("10:00:00", "11:10:00", 3)]


# --- the page -------------------------------------------------------------------------------------------


def test_the_queries_of_the_page(spark: SparkSession, make_project: Callable[..., DbtProject]) -> None:
    salted, sliding = snippets("docs/data_value.md", SNIPPETS)
    project = make_project(
        {
            "models/sources.yml": raw_tables("sales"),
            "models/by_store.sql": salted,
            "models/by_window.sql": sliding,
        }
    )
    rows = [("s1", 1, at("10:01"), 10.0), ("s1", 2, at("10:06"), 20.0), ("s2", 3, at("10:06"), 5.0)]
    schema = "store string, sale_id int, sold_at timestamp, amount double"
    project.source("sales", spark.createDataFrame(rows, schema))
    project.run("run")
    assert_rows(
        project.table("by_store").select("store", "row_count", "amount_avg"),
        [("s1", 2, 15.0), ("s2", 1, 5.0)],
    )
    assert_rows(
        project.table("by_window").where("store = 's1'").select("window_start", "amount_sum"),
        [(at("09:55"), 10.0), (at("10:00"), 30.0), (at("10:05"), 20.0)],
    )
