"""Readiness Marker: files, partitions, commits and dbt runs that say when they are complete, and who waits for them."""

from __future__ import annotations

import datetime as dt
import json
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.ingestion import readiness_marker
from python_jobs.ingestion import readiness_marker_sensor as readiness_sensor
from python_jobs.ingestion.readiness_marker import Parameters, run
from python_jobs.ingestion.readiness_marker_sensor import Condition, WrongCondition, is_ready, look, wait
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import NotReady, WrongUse
from python_jobs.shared.files.readiness import newest_data_version, ready_versions, regenerated
from tests.support.dbt_project import DbtProject
from tests.support.pytest_ids import REPOSITORY
from tests.support.rows import assert_rows
from tests.support.session import setting
from tests.support.snippets import snippet

THIS = "tests/patterns/ingestion/test_readiness_marker.py::"
BROWSERS = [("Firefox", "22.0"), ("Chrome", "10.0"), ("Safari", "9.0")]
HOUR_9, HOUR_10, HOUR_11, HOUR_12 = (f"date=2024-03-01/hour={hour}" for hour in ("09", "10", "11", "12"))


@pytest.fixture
def browsers(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(BROWSERS, "browser string, version string").coalesce(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "browsers"


def produce(rows: DataFrame, folder: Path, mode: str = "overwrite") -> None:
    with regenerated(rows.sparkSession, str(folder), published_at="2024-03-01T11:00:00+00:00"):
        rows.write.mode(mode).json(str(folder))


def failing(rows: DataFrame) -> DataFrame:
    """Return rows of which the last one ends the job, after the others were written."""
    return rows.withColumn(
        "version",
        F.when(F.col("browser") == "Safari", F.raise_error(F.lit("broken"))).otherwise(F.col("version")),
    )


def data_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(("_", "."))]


# --- files and their marker -----------------------------------------------------------------------------


def test_the_marker_is_newer_than_the_newest_data_file(browsers: DataFrame, folder: Path) -> None:
    produce(browsers, folder)
    assert_rows(browsers.sparkSession.read.json(str(folder)), BROWSERS)
    newest = max(path.stat().st_mtime_ns for path in data_files(folder))
    assert (folder / "_READY").stat().st_mtime_ns >= newest
    assert json.loads((folder / "_READY").read_text())["published_at"] == "2024-03-01T11:00:00+00:00"


def test_a_failed_run_leaves_no_marker_and_the_consumer_gives_up(
    browsers: DataFrame, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Exception, match="broken"):
        produce(failing(browsers), folder)
    assert not (folder / "_READY").exists()
    arguments = ["--marker", str(folder), "--timeout_seconds", "0.2", "--poll_seconds", "0.05"]
    with pytest.raises(SystemExit) as end:
        readiness_sensor.main(arguments)
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (4, "")
    assert printed.err == f"NotReady: {folder} is not ready after 0.2 s\n"


def test_the_old_marker_is_gone_while_the_data_is_recomputed_and_after_a_failure(
    browsers: DataFrame, folder: Path
) -> None:
    produce(browsers, folder)
    with regenerated(browsers.sparkSession, str(folder)):
        assert not (folder / "_READY").exists()  # before anything is touched
        browsers.write.mode("append").json(str(folder))
        assert not (folder / "_READY").exists()
    assert (folder / "_READY").exists()
    with pytest.raises(Exception, match="broken"):
        produce(failing(browsers), folder, "append")
    assert not is_ready(marker=str(folder))
    produce(browsers, folder)
    assert is_ready(marker=str(folder))


def test_marking_again_leaves_one_marker_and_the_data(browsers: DataFrame, folder: Path) -> None:
    produce(browsers, folder)
    before = {path: path.stat().st_mtime_ns for path in data_files(folder)}
    with regenerated(browsers.sparkSession, str(folder)):
        pass  # the marker's own step, retried
    assert {path: path.stat().st_mtime_ns for path in data_files(folder)} == before
    assert [path.name for path in folder.glob("_READY*")] == ["_READY"]


def test_no_rows_are_complete_too(browsers: DataFrame, folder: Path) -> None:
    produce(browsers.where("false"), folder)
    assert is_ready(marker=str(folder))
    assert browsers.sparkSession.read.schema("browser string").json(str(folder)).isEmpty()


def test_a_consumer_that_skips_the_check_reads_a_part(spark: SparkSession, folder: Path) -> None:
    spark.range(2).write.json(f"{folder}/part=1")  # a producer at work: the second part is yet to come
    assert spark.read.json(str(folder)).count() == 2
    assert not is_ready(marker=str(folder))
    with regenerated(spark, str(folder)):
        spark.range(2).write.json(f"{folder}/part=2")
    assert is_ready(marker=str(folder))
    assert spark.read.json(str(folder)).count() == 4


def test_a_run_that_ends_in_its_write_leaves_no_marker_and_the_next_one_completes(
    visits: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    visits.make("10", "11")
    partition = visits.folder / HOUR_10
    assert is_ready(marker=str(partition))

    def die_after_the_files(rows: DataFrame, parameters: Parameters, folder: str) -> None:
        rows.write.format(parameters.format).mode("overwrite").save(folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(readiness_marker, "_write_files", die_after_the_files)
        with pytest.raises(KeyboardInterrupt):
            visits.make("10", "11")
    assert data_files(partition)
    assert not is_ready(marker=str(partition))
    visits.make("10", "11")
    assert is_ready(marker=str(partition))
    assert visits.rows("visits/" + HOUR_10) == ["on time"]


# --- what Spark's own marker is worth -------------------------------------------------------------------


def test_a_failed_append_leaves_the_success_file_of_the_run_before(browsers: DataFrame, folder: Path) -> None:
    browsers.write.json(str(folder))
    with pytest.raises(Exception, match="broken"):
        failing(browsers).write.mode("append").json(str(folder))
    assert (folder / "_SUCCESS").exists()


def test_a_dynamic_overwrite_writes_no_success_file(browsers: DataFrame, folder: Path) -> None:
    with setting(browsers.sparkSession, "spark.sql.sources.partitionOverwriteMode", "dynamic"):
        browsers.write.mode("overwrite").partitionBy("browser").json(str(folder))
        assert not list(folder.rglob("_SUCCESS"))
        (folder / "_SUCCESS").touch()  # of an earlier run
        with pytest.raises(Exception, match="broken"):
            failing(browsers).write.mode("overwrite").partitionBy("browser").json(str(folder))
    assert (folder / "_SUCCESS").exists()


def test_a_static_partition_write_marks_the_root_only_even_without_partitions(
    browsers: DataFrame, folder: Path
) -> None:
    browsers.write.partitionBy("browser").json(str(folder))
    assert [path.parent for path in folder.rglob("_SUCCESS")] == [folder]
    empty = folder.with_name("empty")
    browsers.where("false").write.partitionBy("browser").json(str(empty))
    assert [path.name for path in empty.iterdir() if path.name != "._SUCCESS.crc"] == ["_SUCCESS"]


def test_a_partition_written_directly_has_one_unless_the_cluster_turns_it_off(
    browsers: DataFrame, folder: Path
) -> None:
    browsers.write.json(f"{folder}/h=10")
    assert (folder / "h=10" / "_SUCCESS").exists()
    off = {"mapreduce.fileoutputcommitter.marksuccessfuljobs": "false"}
    browsers.write.options(**off).json(f"{folder}/h=11")
    assert not (folder / "h=11" / "_SUCCESS").exists()


# --- partitions -----------------------------------------------------------------------------------------


def test_a_partition_is_ready_once_a_later_one_exists(folder: Path) -> None:
    assert not is_ready(next_partition=f"{folder}/{HOUR_10}")
    (folder / HOUR_10).mkdir(parents=True)
    assert not is_ready(next_partition=f"{folder}/{HOUR_10}")
    (folder / HOUR_11).mkdir()
    assert look(Condition(next_partition=f"{folder}/{HOUR_10}")) == {"next_partition": HOUR_11}
    assert not is_ready(next_partition=f"{folder}/{HOUR_11}")


def test_a_skipped_hour_is_closed_by_any_later_partition(folder: Path) -> None:
    (folder / HOUR_10).mkdir(parents=True)
    (folder / HOUR_12).mkdir()
    assert is_ready(next_partition=f"{folder}/{HOUR_10}")
    assert not is_ready(next_partition=f"{folder}/{HOUR_11}")  # was never made: nothing to consume
    (folder / "date=2024-03-02" / "hour=00").mkdir(parents=True)
    assert is_ready(next_partition=f"{folder}/{HOUR_12}")
    (folder / "daily" / "date=2024-03-01").mkdir(parents=True)
    assert not is_ready(next_partition=f"{folder}/daily/date=2024-03-01")
    (folder / "daily" / "date=2024-03-02").mkdir()
    assert is_ready(next_partition=f"{folder}/daily/date=2024-03-01")


def test_partitions_come_in_the_order_of_their_numbers(folder: Path) -> None:
    for hour in (8, 9, 10):
        (folder / "date=2024-03-01" / f"hour={hour}").mkdir(parents=True)
    found = [look(Condition(next_partition=f"{folder}/date=2024-03-01/hour={hour}")) for hour in (8, 9, 10)]
    assert found == [
        {"next_partition": "date=2024-03-01/hour=9"},
        {"next_partition": "date=2024-03-01/hour=10"},
        None,
    ]
    (folder / "date=2024-03-01" / "hour=09").mkdir()
    assert is_ready(next_partition=f"{folder}/date=2024-03-01/hour=09")


class Visits:
    """A table of visits with a row that comes late, and the raw dataset that is made of it hour by hour."""

    ROWS = (
        ("on time", "10:05", "10:06"),
        ("first", "09:05", "09:06"),
        ("late", "09:55", "10:10"),
        ("noon", "12:01", "12:02"),
    )

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark, self.folder, self.source = spark, root / "shared" / "visits", str(root / "silver_visits")
        rows = [(name, self._time(event), self._time(came)) for name, event, came in self.ROWS]
        frame = spark.createDataFrame(rows, "name string, event_time timestamp, ingested_at timestamp")
        frame.coalesce(1).write.format("delta").save(self.source)

    def make(self, start: str, end: str, **parameters: Any) -> dict[str, Any]:
        given = {"source": self.source, "target": str(self.folder), "event_column": "event_time"}
        window = {
            "from_": f"2024-03-01T{start}",
            "to": f"2024-03-01T{end}",
            "ingestion_column": "ingested_at",
        }
        return run(self.spark, Parameters(**given, **window, **{"format": "json", **parameters}))

    def rows(self, folder: str) -> list[str]:
        """Return the names in a folder beside or in the dataset (`visits/…`, `visits_late/…`)."""
        rows = self.spark.read.schema("name string").json(str(self.folder.parent / folder))
        return sorted(row.name for row in rows.collect())

    @staticmethod
    def _time(text: str) -> dt.datetime:
        return dt.datetime.fromisoformat(f"2024-03-01T{text}:00+00:00")


@pytest.fixture
def visits(spark: SparkSession, tmp_path: Path) -> Visits:
    return Visits(spark, tmp_path)


def test_strict_partitions_never_change_and_late_rows_go_beside(visits: Visits) -> None:
    visits.make("09", "10")
    report = visits.make("10", "12")
    assert (report["partitions"], report["late_rows"]) == ([HOUR_10, HOUR_11], 1)
    visits.make("09", "10")  # an old window after newer ones
    assert visits.rows("visits/" + HOUR_9) == ["first"]
    assert visits.rows("visits/" + HOUR_10) == ["on time"]
    assert visits.rows("visits/" + HOUR_11) == []  # a quiet hour is made all the same
    assert visits.rows(f"visits_late/{HOUR_10}") == ["late"]
    assert all(is_ready(marker=f"{visits.folder}/{hour}") for hour in (HOUR_9, HOUR_10, HOUR_11))
    assert is_ready(next_partition=f"{visits.folder}/{HOUR_10}")


def test_a_mutable_partition_is_recomputed_with_a_notice_that_is_handled_once(visits: Visits) -> None:
    visits.make("09", "10", late="mutable")
    assert look(Condition(changes=str(visits.folder))) is None
    report = visits.make("10", "11", late="mutable")
    assert visits.rows("visits/" + HOUR_9) == ["first", "late"]
    assert is_ready(marker=f"{visits.folder}/{HOUR_9}")
    found = look(Condition(changes=str(visits.folder)))
    assert found == {"notices": report["notices"]}
    (name,) = report["notices"]
    assert json.loads((visits.folder / "_changes" / name).read_text())["partition"] == HOUR_9
    visits.make("10", "11", late="mutable")  # the same run again is no second notice
    assert look(Condition(changes=str(visits.folder), handled=(name,))) is None
    assert visits.rows("visits/" + HOUR_9) == ["first", "late"]


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"target": "visits"}, "target must be a folder"),
        ({"from_": "2024-03-01T10:30"}, "inside a partition"),
        ({"to": "2024-03-01T09"}, "from must be before to"),
        ({"grain": "day"}, "a run writes whole partitions; give the start of a day"),
    ],
)
def test_wrong_parameters_are_refused(parameters: dict[str, Any], sentence: str) -> None:
    given = {"source": "silver", "target": "./shared", "event_column": "e", "ingestion_column": "i"}
    window = {"from_": "2024-03-01T10", "to": "2024-03-01T11"}
    with pytest.raises(WrongUse, match=sentence):
        Parameters(**{**given, **window, **parameters})


# --- Delta ----------------------------------------------------------------------------------------------


def test_a_commit_with_data_is_new_once_and_upkeep_never(spark: SparkSession, table_path: str) -> None:
    assert not is_ready(table=table_path)
    for _ in range(2):
        spark.range(1).write.format("delta").mode("append").save(table_path)
    consumed: list[int] = []

    def consume() -> None:
        """Take what is new, as two consumers would: with Spark and without it."""
        after = consumed[-1] if consumed else None
        version = newest_data_version(spark, table_path, after)
        found = look(Condition(table=table_path, after_version=after))
        assert (found or {}).get("version") == version
        if version is not None:
            consumed.append(version)

    consume()
    consume()
    DeltaTable.forPath(spark, table_path).optimize().executeCompaction()
    spark.sql(f"alter table delta.`{table_path}` set tblproperties ('delta.appendOnly' = 'true')")
    consume()
    assert consumed == [1]
    spark.range(1).write.format("delta").mode("append").save(table_path)
    consume()
    assert consumed == [1, 4]


# --- waiting --------------------------------------------------------------------------------------------


def test_waiting_sensors_hold_no_slot(folder: Path) -> None:
    """One worker, five sensors in reschedule mode in front of a task that is ready."""
    folder.mkdir()
    log: list[str] = []
    queue: deque[tuple[str, Callable[[], bool]]] = deque(
        (f"sensor {number}", lambda: is_ready(marker=str(folder))) for number in range(5)
    )

    def task() -> bool:
        (folder / "_READY").touch()
        return True

    queue.append(("task", task))
    while queue:
        name, callable_ = queue.popleft()
        if callable_():
            log.append(name)
        else:
            queue.append((name, callable_))
    assert log == ["task", *(f"sensor {number}" for number in range(5))]


def test_a_blocking_wait_sleeps_in_the_caller_s_thread_until_the_time_is_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[tuple[int, float]] = []
    sleep = time.sleep

    def noted(seconds: float) -> None:
        slept.append((threading.get_ident(), seconds))
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", noted)
    assert wait(Condition(marker=str(folder)), timeout_seconds=0.2, poll_seconds=0.01) is None
    assert (threading.get_ident(), 0.01) in slept


def test_the_sensor_waits_until_the_marker_comes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[None] = []
    file_info = readiness_sensor._is_file

    def third_time_ready(system: Any, path: str) -> bool:
        looks.append(None)
        if len(looks) == 3:
            folder.mkdir()
            (folder / "_READY").touch()
        return file_info(system, path)

    monkeypatch.setattr(readiness_sensor, "_is_file", third_time_ready)
    with pytest.raises(SystemExit) as end:
        readiness_sensor.main(["--marker", str(folder), "--timeout_seconds", "60", "--poll_seconds", "0.01"])
    assert end.value.code == 0
    assert json.loads(capsys.readouterr().out) == {"ready": True, "marker": str(folder)}
    assert len(looks) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "got none"),
        ({"marker": "a", "table": "b"}, "got marker and table"),
        ({"marker": "a", "dataset": "g"}, "belong to"),
    ],
)
def test_a_condition_is_one(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WrongCondition, match=sentence):
        is_ready(**arguments)
    with pytest.raises(SystemExit) as end:
        readiness_sensor.main([part for name, value in arguments.items() for part in (f"--{name}", value)])
    assert end.value.code == 2


def test_an_orchestrator_needs_no_spark_to_look(folder: Path) -> None:
    code = (
        "import sys; from python_jobs.ingestion.readiness_marker_sensor import is_ready; "
        "is_ready(marker='x'); print('pyspark' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


# --- dbt ------------------------------------------------------------------------------------------------

MODELS = {
    "models/orders.sql": (
        "{{ config(materialized='table') }} select if(id = 41, raise_error('above'), id) as id "
        "from {{ source('raw', 'orders') }}"
    ),
    "models/aside.sql": (
        "{{ config(materialized='table') }} select if(id = 31, raise_error('aside'), id) as id from {{ ref('orders') }}"
    ),
    "models/revenue.sql": (
        "{{ config(materialized='table', tags='gold') }} select raise_error('broken') as id from {{ ref('orders') }} "
        "where id = 13 union all select id from {{ ref('orders') }}"
    ),
    "models/customers.sql": (
        "{{ config(materialized='table', tags='gold') }} select 1 as id from {{ ref('revenue') }} "
        "union all select if(id = 21, raise_error('late'), id) as id from {{ source('raw', 'orders') }} "
        "where id in (21, 99)"
    ),
    "models/_models.yml": """
version: 2
sources: [{name: raw, schema: '{{ target.schema }}', tables: [{name: orders, identifier: landed}]}]
models:
  - name: orders
    columns: [{name: id, data_tests: [{accepted_values: {arguments: {values: [1, 2, 13, 21, 31, 99], quote: false}}}]}]
  - name: customers
    columns: [{name: id, data_tests: [{accepted_values: {arguments: {values: [1], quote: false}}}]}]
""",
}  # fmt: skip


@dataclass(frozen=True)
class Built:
    """How the nodes of a build ended, and the ledger after it."""

    statuses: dict[str, str]
    ledger: list[Any]


class Gold:
    """A project whose two models with the tag `gold` are one dataset, by the hooks of the page."""

    def __init__(self, project: DbtProject) -> None:
        self.project = project
        self.ledger = f"{project.schema}.observability_readiness"

    def build(self, ids: list[int], *arguments: str, command: str = "build", fails: bool = False) -> Built:
        """Land orders with these ids and call dbt."""
        self.project.source("landed", self.project.spark.createDataFrame([(i,) for i in ids], "id int"))
        call = self.project.fails if fails else self.project.run
        call(command, *arguments)
        return Built(self.project.statuses(), self.project.table("observability_readiness").collect())


# The builds of one story: each goes on from the one before, and stands above the tests that look at it.


@pytest.fixture(scope="module")
def gold(make_project: Callable[..., DbtProject]) -> Gold:
    hooks = snippet("docs/ingestion.md", f"{THIS}test_dbt_publishes_when_every_node_passed")
    return Gold(make_project(MODELS, settings=yaml.safe_load(hooks)))


@pytest.fixture(scope="module")
def published(gold: Gold) -> Built:
    return gold.build([1])


@pytest.fixture(scope="module")
def partial(gold: Gold, published: Built) -> Built:
    return gold.build([1], "--select", "customers")


def test_a_run_of_some_tables_leaves_no_marker(partial: Built) -> None:
    assert partial.statuses["customers"] == "success"
    assert "revenue" not in partial.statuses
    assert partial.ledger == []


@pytest.fixture(scope="module")
def published_again(gold: Gold, partial: Built) -> Built:
    return gold.build([1, 2])


def test_dbt_publishes_when_every_node_passed(published: Built, published_again: Built) -> None:
    (row,) = published.ledger
    assert (row.dataset, row.format_version) == ("gold", 1)
    assert [tuple(table) for table in row.table_versions] == [("customers", 0), ("revenue", 0)]
    (again,) = published_again.ledger
    assert again.run_id != row.run_id
    assert {table.name: table.version for table in again.table_versions} == {"customers": 2, "revenue": 1}


@pytest.fixture(scope="module")
def failed_above(gold: Gold, published_again: Built) -> list[Built]:
    """Let a model above the dataset fail, then a test above it."""
    return [gold.build([41], fails=True), gold.build([98], fails=True)]


def test_a_failure_above_leaves_the_marker_of_the_untouched_tables(
    published_again: Built, failed_above: list[Built]
) -> None:
    for built in failed_above:
        assert {built.statuses["revenue"], built.statuses["customers"]} == {"skipped"}
        assert len(built.ledger) == 1
        assert built.ledger == published_again.ledger


@pytest.fixture(scope="module")
def failed_model(gold: Gold, failed_above: list[Built]) -> Built:
    return gold.build([13], fails=True)


def test_a_failing_and_a_skipped_node_leave_no_marker(failed_model: Built) -> None:
    assert failed_model.statuses["revenue"] == "error"
    assert failed_model.statuses["customers"] == "skipped"
    assert failed_model.ledger == []


@pytest.fixture(scope="module")
def published_later(gold: Gold, failed_model: Built) -> Built:
    return gold.build([1])


@pytest.fixture(scope="module")
def failed_aside(gold: Gold, published_later: Built) -> Built:
    """Let a model fail that no table of the dataset reads."""
    return gold.build([31], fails=True)


def test_a_failure_aside_does_not_count(published_later: Built, failed_aside: Built) -> None:
    assert failed_aside.statuses["aside"] == "error"
    ((before,), (after,)) = published_later.ledger, failed_aside.ledger
    assert {table.name: table.version for table in before.table_versions} != {
        table.name: table.version for table in after.table_versions
    }


@pytest.fixture(scope="module")
def failed_test(gold: Gold, failed_aside: Built) -> Built:
    return gold.build([99], fails=True)


def test_a_failing_test_leaves_no_marker(failed_aside: Built, failed_test: Built) -> None:
    assert len(failed_aside.ledger) == 1
    assert "fail" in failed_test.statuses.values()
    assert failed_test.statuses["customers"] == "success"
    assert failed_test.ledger == []


@pytest.fixture(scope="module")
def failed_last(gold: Gold, failed_test: Built) -> Built:
    return gold.build([21], fails=True)


@pytest.fixture(scope="module")
def retried(gold: Gold, failed_last: Built) -> Built:
    return gold.build([1], command="retry")


def test_a_retry_builds_a_part_and_leaves_no_marker(failed_last: Built, retried: Built) -> None:
    assert failed_last.statuses["revenue"] == "success"
    assert failed_last.statuses["customers"] == "error"
    assert retried.statuses["customers"] == "success"
    assert "revenue" not in retried.statuses
    assert retried.ledger == []


def test_a_build_without_rows_leaves_no_marker(gold: Gold, retried: Built) -> None:
    empty = gold.build([1], "--empty")
    assert empty.statuses.items() >= {"revenue": "success", "customers": "success"}.items()
    assert empty.ledger == []


def test_a_build_of_a_sample_leaves_no_marker(gold: Gold, retried: Built) -> None:
    sample = gold.build([1], "--sample", "1 day")
    assert sample.statuses.items() >= {"revenue": "success", "customers": "success"}.items()
    assert sample.ledger == []


def test_a_marker_that_an_unfinished_run_withdrew_does_not_come_back(gold: Gold, retried: Built) -> None:
    unfinished = (
        "'gold, withdrawn' as dataset, 'unfinished' as run_id, now() as published_at, "
        "array() as table_versions"
    )
    gold.project.spark.sql(f"insert into {gold.ledger} by name select {unfinished}, 1 as format_version")
    built = gold.build([41], fails=True)
    assert built.statuses["revenue"] == "skipped"
    assert built.ledger == []


def test_consumers_of_a_published_dataset(gold: Gold, retried: Built, spark: SparkSession) -> None:
    path = str(gold.project.location / "observability_readiness")
    with pytest.raises(NotReady, match="gold is not ready"):
        ready_versions(spark, gold.ledger, "gold")
    assert look(Condition(table=path, dataset="gold")) is None
    (published,) = gold.build([1, 2]).ledger
    versions = ready_versions(spark, gold.ledger, "gold")
    assert look(Condition(table=path, dataset="gold")) == {
        "run_id": published.run_id, "table_versions": versions,
    }  # fmt: skip
    assert look(Condition(table=path, dataset="gold", after_run=published.run_id)) is None
    with pytest.raises(NotReady, match="silver is not ready"):
        ready_versions(spark, gold.ledger, "silver")


def test_the_commands_of_the_page(visits: Visits, capsys: pytest.CaptureFixture[str]) -> None:
    producer, consumer = (
        shlex.split(line)
        for line in snippet("docs/ingestion.md", f"{THIS}test_the_commands_of_the_page")
        .replace("\\\n", " ")
        .splitlines()
    )
    parameters, _ = parse_parameters(Parameters, producer[2:])
    assert producer[:2] == ["spark-submit", "python_jobs/ingestion/readiness_marker.py"]
    assert (parameters.target, parameters.window.end.hour) == ("shared/visits", 11)
    visits.make("10", "11")
    assert consumer[:3] == ["python", "-m", "python_jobs.ingestion.readiness_marker_sensor"]
    arguments = [
        str(visits.folder / HOUR_10) if word.startswith("shared/") else word for word in consumer[3:]
    ]
    with pytest.raises(SystemExit) as end:
        readiness_sensor.main(arguments)
    assert end.value.code == 0
