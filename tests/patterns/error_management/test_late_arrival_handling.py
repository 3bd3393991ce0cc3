"""Late Arrival Handling: one late visit under four strategies, and one that is too late for all of them."""

from __future__ import annotations

import datetime as dt
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.error_management import late_data_detector, windowed_counter
from python_jobs.error_management import static_late_data_integrator as integrator
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import JobFailed, WrongUse
from tests.support.rows import assert_rows
from tests.support.session import setting
from tests.support.snippets import snippet

PAGE = "docs/error_management.md"
HERE = "tests/patterns/error_management/test_late_arrival_handling.py"
DAY, NEXT_DAY = "2024-03-10", "2024-03-11"
LATE, TOO_LATE = (6, f"{DAY} 10:05"), (7, "2024-03-05 09:00")
UPDATE = "test_update_revises_the_window_and_the_day_s_aggregate_picks_it_up"
REPROCESS = "test_reprocess_corrects_the_window_and_again_changes_nothing"
BY_DAY = (
    "select window_date, sum(events) as events from {source} where window_date = {date} group by window_date"
)


@dataclass
class Visits:
    """A table of visits, partitioned by date, and the jobs of the strategies on it, each on tables of its own."""

    spark: SparkSession
    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def table(self, name: str, version: int | None = None) -> DataFrame:
        reader = self.spark.read.format("delta")
        return (reader if version is None else reader.option("versionAsOf", version)).load(self.path(name))

    def append(self, *visits: tuple[int, str]) -> None:
        """Append visits ``(visit_id, time)`` in one commit."""
        rows = self.spark.createDataFrame(list(visits), "visit_id int, event_time string")
        rows = rows.selectExpr(
            "visit_id",
            "cast(event_time as timestamp) as event_time",
            "cast(event_time as date) as event_date",
        )
        writer = rows.coalesce(1).write.format("delta").mode("append").partitionBy("event_date")
        writer.save(self.path("visits"))

    def sql(self, statement: str) -> None:
        """Run a statement on the visits, ``{}`` in it."""
        self.spark.sql(statement.format(f"delta.`{self.path('visits')}`"))

    def of_page(self, parameters: type[Any], test: str, **others: Any) -> Any:
        """Return the parameters of the page's configuration that a test names, with other ones in their place."""
        config = self.folder / f"{test}.yml"
        config.write_text(snippet(PAGE, f"{HERE}::{test}"), encoding="utf-8")
        options = [word for name, value in others.items() for word in (f"--{name}", str(value))]
        return parse_parameters(parameters, ["--config", str(config), *options])[0]

    def count(self, target: str, **others: Any) -> dict[str, Any]:
        """Count by windows of 10 minutes, a file a batch."""
        given = {"source": self.path("visits"), "target": self.path(target), "max_files_per_trigger": 1}
        given |= {"checkpoint": self.path(f"{target}_checkpoint")}
        return windowed_counter.run(
            self.spark, self.of_page(windowed_counter.Parameters, UPDATE, **(given | others))
        )

    def drop(self) -> dict[str, Any]:
        return self.count("dropped", output_mode="append", delay="10 minutes")

    def revise(self, now: str) -> dict[str, Any]:
        return self.count("revised", now=f"{NEXT_DAY}T{now}")

    def split(self) -> dict[str, Any]:
        names = ("target", "dead_letter", "watermarks", "checkpoint")
        given = {"source": self.path("visits"), **{name: self.path(f"split_{name}") for name in names}}
        given |= {"allowed_lateness": "10 minutes", "max_files_per_trigger": 1, "now": f"{NEXT_DAY}T00:00"}
        return late_data_detector.run(self.spark, late_data_detector.Parameters(**given))

    def reprocess(self, date: str = NEXT_DAY, **others: Any) -> dict[str, Any]:
        """Compute the windows of a date and, if they have changed, of the date before it."""
        given = {name: self.path(name) for name in ("target", "rejects")} | {"source": self.path("visits")}
        given |= {"date": date, "lookback_days": 1, "run_id": f"daily {date}"}
        return integrator.run(self.spark, self.of_page(integrator.Parameters, REPROCESS, **(given | others)))

    def sum_days(self) -> dict[str, Any]:
        """Sum up the revised windows by day, those that have changed."""
        given = {"source": self.path("revised"), "target": self.path("days"), "query": BY_DAY}
        given |= {"date": NEXT_DAY, "partition_column": "window_date"}
        return integrator.run(self.spark, integrator.Parameters(**given, lookback_days=1, only_changed=True))

    def windows(self, name: str, version: int | None = None) -> dict[str, Any]:
        """Return the events of each window, with the number of its revision if it has one."""
        rows = self.table(name, version).collect()
        counts = {
            f"{row.window_start:%H:%M}": (row.events, row.revision) if "revision" in row else row.events
            for row in rows
        }
        assert len(counts) == len(rows)
        return counts


@pytest.fixture(scope="module")
def visits(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Visits:
    """Return visits of two windows, counted; then a late one of the first window comes, and all strategies run."""
    visits = Visits(spark, tmp_path_factory.mktemp("visits"))
    visits.append((1, f"{DAY} 10:00"), (2, f"{DAY} 10:03"), (3, f"{DAY} 10:09:59"))
    visits.append((4, f"{DAY} 10:30"))
    visits.append((5, f"{DAY} 10:31"))  # Spark drops by the watermark of the batch before
    visits.revise("01:00")
    visits.sum_days()
    visits.reprocess()
    assert visits.windows("revised") == {"10:00": (3, 1), "10:30": (2, 2)}
    assert visits.windows("target") == {"10:00": 3, "10:30": 2}
    assert_rows(visits.table("days"), [(dt.date(2024, 3, 10), 5)])
    visits.append(LATE)
    return visits


def test_drop_leaves_the_late_visit_out_and_counts_it(visits: Visits) -> None:
    report = visits.drop()
    assert report["dropped"] == 1
    assert visits.windows("dropped") == {"10:00": 3}


def test_side_output_has_the_late_visit_once_and_on_time_and_side_are_the_input(visits: Visits) -> None:
    report = visits.split()
    assert (report["read"], report["on_time"], report["late"], report["dead"]) == (6, 5, 1, 0)
    both = visits.table("split_target")
    assert_rows(
        both, [(1, False), (2, False), (3, False), (4, False), (5, False), (6, True)], ["visit_id", "is_late"]
    )
    assert visits.split()["read"] == 0
    assert visits.table("split_target").where("is_late").count() == 1


def test_update_revises_the_window_and_the_day_s_aggregate_picks_it_up(visits: Visits) -> None:
    assert visits.revise("02:00")["dropped"] == 0
    assert visits.windows("revised") == {"10:00": (4, 2), "10:30": (2, 2)}
    one, two = (dt.datetime(2024, 3, 11, hour, tzinfo=dt.UTC) for hour in (1, 2))
    assert_rows(visits.table("revised"), [(4, two), (2, one)], ["events", "revised_at"])
    assert visits.sum_days()["late"] == [DAY]
    assert_rows(visits.table("days"), [(dt.date(2024, 3, 10), 6)])
    assert visits.sum_days()["late"] == []


def test_reprocess_corrects_the_window_and_again_changes_nothing(visits: Visits) -> None:
    assert visits.reprocess()["late"] == [DAY]
    corrected = {"10:00": 4, "10:30": 2}
    assert visits.windows("target") == corrected
    assert visits.reprocess()["late"] == []
    assert visits.windows("target") == corrected
    again = visits.reprocess(only_changed="false")
    assert [partition["partition"] for partition in again["partitions"]] == [DAY, NEXT_DAY]
    assert visits.windows("target") == corrected


def test_a_visit_later_than_the_reprocess_horizon_is_in_the_reject_table_for_good(visits: Visits) -> None:
    visits.reprocess()
    corrected = visits.windows("target")
    visits.append(TOO_LATE)
    report = visits.reprocess()
    assert report["rejected"] == {"2024-03-05": 1}
    assert visits.windows("target") == corrected
    at, date = dt.datetime(2024, 3, 5, 9, tzinfo=dt.UTC), dt.date(2024, 3, 5)
    rejected = [(7, at, date, f"daily {NEXT_DAY}", NEXT_DAY, report["source_version"])]
    assert_rows(visits.table("rejects"), rejected)
    assert visits.reprocess()["rejected"] == {}
    visits.append((8, f"{NEXT_DAY} 08:00"))
    assert visits.reprocess("2024-03-12")["rejected"] == {}
    assert_rows(visits.table("rejects"), rejected)


def test_a_batch_that_is_run_again_after_its_merge_makes_no_revision(
    visits: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = windowed_counter.WindowReviser.write

    def failing(self: Any, rows: DataFrame, batch_id: int) -> None:
        write(self, rows, batch_id)
        raise OSError("the process ends before the batch is marked as done")

    one_batch = {"max_files_per_trigger": 10}
    with monkeypatch.context() as patched:
        patched.setattr(windowed_counter.WindowReviser, "write", failing)
        with pytest.raises(OSError, match="the process ends"):
            visits.count("again", **one_batch)
    once = visits.windows("again")
    assert once["10:00"] == (4, 1)
    visits.count("again", **one_batch)
    assert visits.windows("again") == once


@pytest.fixture(scope="module")
def march(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Visits:
    """Return visits of three days, of which a run has processed the last two."""
    visits = Visits(spark, tmp_path_factory.mktemp("march"))
    visits.append((1, "2024-03-08 10:00"), (2, f"{DAY} 10:00"), (3, f"{NEXT_DAY} 10:00"))
    assert visits.reprocess()["rejected"] == {}, "what the first run finds isn't late"
    return visits


def rejected(visits: Visits, *visit_ids: int) -> DataFrame:
    """Return those of the visits that are in the reject table."""
    return visits.table("rejects").where(F.col("visit_id").isin(*visit_ids)).select("visit_id")


def test_only_new_rows_are_rejected_whatever_else_rewrites_their_partition(march: Visits) -> None:
    march.append((4, "2024-03-08 11:00"))
    march.sql("optimize {}")
    march.sql("delete from {} where visit_id = 1")
    march.sql("alter table {} add columns (page string)")
    with pytest.raises(WrongUse, match="has another schema"):
        march.reprocess()
    march.spark.sql(f"alter table delta.`{march.path('rejects')}` add columns (page string)")
    assert march.reprocess()["rejected"] == {"2024-03-08": 1}
    assert_rows(rejected(march, 1, 4), [(4,)])


def test_a_failed_run_and_a_run_of_the_past_reject_nothing_and_lose_nothing(march: Visits) -> None:
    march.append((5, f"{DAY} 11:00"), (6, "2024-03-08 12:00"))
    query = march.of_page(integrator.Parameters, REPROCESS, date=DAY).query
    broken = query.replace("count(*)", "count(if(event_date = '2024-03-10', raise_error('broken'), 1))")
    with pytest.raises(JobFailed, match="2024-03-10 failed"):
        march.reprocess(query=broken)
    assert_rows(rejected(march, 5, 6), [])
    assert "rejected" not in march.reprocess("2024-03-09")
    assert march.reprocess("2024-03-13")["rejected"] == {DAY: 1}, "2024-03-08 was processed meanwhile"
    assert_rows(rejected(march, 5, 6), [(5,)])


def test_another_table_under_the_sources_name_is_refused_until_its_versions_are_newer(
    spark: SparkSession, tmp_path: Path
) -> None:
    visits = Visits(spark, tmp_path)
    for number in range(4):
        visits.append((number, f"{NEXT_DAY} 10:00"))
    visits.reprocess()
    shutil.rmtree(visits.path("visits"))
    visits.append((10, f"{NEXT_DAY} 10:00"))
    with pytest.raises(JobFailed, match="was computed from version 3 of the source already; plan again"):
        visits.reprocess()
    for number in range(11, 14):
        visits.append((number, f"{NEXT_DAY} 10:00"))
    assert visits.reprocess()["rejected"] == {}, "what the first run finds isn't late"
    visits.append((14, "2024-03-05 10:00"))
    assert visits.reprocess()["rejected"] == {"2024-03-05": 1}
    assert_rows(visits.table("rejects").select("visit_id"), [(14,)])


def test_a_version_that_is_gone_is_refused(march: Visits) -> None:
    march.append((7, "2024-03-08 13:00"))
    march.sql("delete from {} where event_date = '2024-03-08'")
    with setting(march.spark, "spark.databricks.delta.retentionDurationCheck.enabled", "false"):
        march.sql("vacuum {} retain 0 hours")
    with pytest.raises(JobFailed, match="start again with another table as rejects"):
        march.reprocess("2024-03-14")
    assert march.reprocess("2024-03-14", rejects=march.path("others"))["rejected"] == {}
