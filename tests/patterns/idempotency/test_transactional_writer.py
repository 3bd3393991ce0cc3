"""Transactional Writer on Delta: all of a run or nothing of it, once, in each of several tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from python_jobs.idempotency import transactional_writer as job
from python_jobs.idempotency.transactional_writer import Parameters
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.delta.commits import latest_version, write_once
from tests.support.failing_write import failing_at
from tests.support.killer import TableState, run_and_kill
from tests.support.rows import assert_rows
from tests.support.session import process_environment, setting
from tests.support.snippets import snippet
from tests.support.waiting import at_once

PAGE = "docs/idempotency.md"
HERE = "tests/patterns/idempotency/test_transactional_writer.py"

SPARK_ERRORS = (PySparkException, Py4JJavaError)
VISITS = [(1, "phone", "2024-11-20"), (2, "laptop", "2024-11-20"), (3, "phone", "2024-11-21")]
CONFIG = snippet(PAGE, f"{HERE}::test_a_run_is_written_once_to_each_table")


class Lake:
    """A table of visits and two tables that runs of the job write."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.append(VISITS)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def append(self, visits: list[tuple[Any, ...]]) -> None:
        rows = self.spark.createDataFrame(visits, "visit_id int, device string, day string")
        write_once(self.spark, rows.repartition(2, "visit_id"), self.path("visits"))

    def config(self) -> dict[str, Any]:
        """Return the page's configuration, on this folder's tables."""
        text: dict[str, Any] = yaml.safe_load(CONFIG.replace("lakehouse/silver/", f"{self.folder}/"))
        return text

    def parameters(self, run: str, **changes: Any) -> Parameters:
        return Parameters(**(self.config() | {"run": run} | changes))

    def run(self, run: str, **changes: Any) -> dict[str, Any]:
        return job.run(self.spark, self.parameters(run, **changes))

    def table(self, name: str) -> DataFrame:
        return self.spark.read.format("delta").load(self.path(name))

    def files(self, name: str) -> set[str]:
        return {file.name for file in Path(self.path(name)).glob("*.parquet")}

    def versions(self) -> list[int]:
        return [latest_version(self.spark, self.path(name)) for name in ("phones", "devices")]

    def is_as_before_and_takes_the_run_again(self, versions: list[int], files: set[str]) -> None:
        """Assert that the run of 2024-11-21 failed after it wrote data, and that its rerun is complete."""
        assert self.versions() == versions
        assert self.files("phones") > files, "data was written, only the commit wasn't"
        assert_rows(self.table("phones"), [(1,)])
        self.run("2024-11-21")
        assert_rows(self.table("phones"), [(1,), (3,)])


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Lake:
    return Lake(spark, tmp_path)


def test_a_run_is_written_once_to_each_table(lake: Lake) -> None:
    report = lake.run("2024-11-20")
    assert [(table["rows"], table["already"]) for table in report["tables"]] == [(1, False), (2, False)]
    assert_rows(lake.table("phones"), [(1,)])
    assert_rows(lake.table("devices"), [("phone", "2024-11-20", 1), ("laptop", "2024-11-20", 1)])
    again = lake.run("2024-11-20")
    assert [(table["rows"], table["already"]) for table in again["tables"]] == [(0, True), (0, True)]
    assert lake.versions() == [0, 0]
    lake.run("2024-11-21")
    assert_rows(lake.table("phones"), [(1,), (3,)])
    for already in (False, True):  # a run without rows is a run
        empty = lake.run("2024-11-22")["tables"]
        assert [(table["rows"], table["already"]) for table in empty] == [(0, already), (0, already)]


def test_a_run_that_dies_between_two_tables_is_completed_from_what_it_has_read(lake: Lake) -> None:
    with failing_at(lake.path("devices"), job, "write_once", KeyboardInterrupt()):
        lake.run("2024-11-20")
    lake.append([(4, "phone", "2024-11-20")])
    report = lake.run("2024-11-20T00:00:00")  # the same run in other words
    assert [table["already"] for table in report["tables"]] == [True, False]
    assert report["source_version"] == 0
    assert_rows(lake.table("phones"), [(1,)])
    assert_rows(lake.table("devices"), [("phone", "2024-11-20", 1), ("laptop", "2024-11-20", 1)])


def test_an_older_run_is_refused_where_delta_skips_it_without_a_word(lake: Lake) -> None:
    lake.run("2024-11-21")
    before = lake.versions()
    with pytest.raises(
        DataRefused, match=r"has a later run than 2024-11-20 .* nothing was written.* --generation 1"
    ):
        lake.run("2024-11-20")
    # A table more changes nothing: all are looked at before the first is written.
    more = {lake.path("more"): "select * from {source}"} | lake.config()["write"]
    with pytest.raises(DataRefused):
        lake.run("2024-11-20", write=more)
    assert not Path(lake.path("more")).exists()
    # Delta alone: no error, no commit, no rows.
    older = lake.parameters("2024-11-20")
    rows = lake.spark.range(1).selectExpr("cast(id as int) as visit_id")
    write_once(lake.spark, rows, lake.path("phones"), transaction=(older.app_id, older.version))
    assert lake.versions() == before


def test_a_backfill_of_an_appending_writer_duplicates(lake: Lake) -> None:
    """As the page says: a backfill is a new transaction. The run's number protects as long as it is the same one."""
    lake.run("2024-11-20")
    lake.run("2024-11-20")
    assert_rows(lake.table("phones"), [(1,)])
    lake.run("2024-11-20", generation=1)
    assert_rows(lake.table("phones"), [(1,), (1,)])


def test_a_failing_task_leaves_files_that_nobody_reads(lake: Lake) -> None:
    lake.run("2024-11-20")
    before, files = lake.versions(), lake.files("phones")
    fails = (
        "select if(id = 1, raise_error('task 2 fails'), cast(id as int)) as visit_id from range(0, 2, 1, 2)"
    )
    with pytest.raises(SPARK_ERRORS, match="task 2 fails"):
        lake.run("2024-11-21", write={lake.path("phones"): fails})
    lake.is_as_before_and_takes_the_run_again(before, files)


def test_plain_files_of_a_failed_append_are_read_by_everybody(lake: Lake) -> None:
    rows = lake.spark.range(0, 2, 1, 2).selectExpr("if(id = 1, raise_error('task 2 fails'), id) as visit_id")
    with pytest.raises(SPARK_ERRORS, match="task 2 fails"):
        rows.write.option("mapreduce.fileoutputcommitter.algorithm.version", "2").json(lake.path("json"))
    assert_rows(lake.spark.read.json(lake.path("json")), [(0,)])


def test_a_commit_that_can_not_be_written_leaves_the_table_as_it_was(lake: Lake) -> None:
    lake.run("2024-11-20")
    before, files = lake.versions(), lake.files("phones")
    in_the_way = Path(lake.path("phones")) / "_delta_log" / f"{before[0] + 1:020}.json"

    def block(visit_id: int) -> int:  # the write has begun; where its log entry has to go is a folder
        Path(in_the_way).mkdir()
        return visit_id

    lake.spark.udf.register("block", block, "int")
    query = "select block(visit_id) as visit_id from {source} where visit_id = 3"
    with pytest.raises(SPARK_ERRORS):
        lake.run("2024-11-21", write={lake.path("phones"): query})
    in_the_way.rmdir()
    lake.is_as_before_and_takes_the_run_again(before, files)


def test_of_two_writers_of_one_run_one_commits(lake: Lake) -> None:
    lake.run("2024-11-20")

    def write() -> object:
        try:
            return lake.run("2024-11-21")["tables"][0]["already"]
        except (JobFailed, *SPARK_ERRORS) as failure:
            return failure

    assert at_once(write, write).count(False) == 1
    lake.run("2024-11-21")
    assert_rows(lake.table("phones"), [(1,), (3,)])
    assert lake.table("devices").count() == 3


@pytest.mark.kill
def test_a_lost_task_is_tried_again_and_a_killed_job_is_completed_by_its_rerun(
    lake: Lake, tmp_path: Path
) -> None:
    """The first table's first task is lost; the process dies before the second table's commit."""
    lake.run("2024-11-20")
    write = lake.config()["write"]
    first, second = write
    flaky = {
        first: write[first].replace(
            "select visit_id", "select cast(fails_once(string(visit_id)) as int) as visit_id"
        )
    }
    assert flaky[first] != write[first]
    config = tmp_path / "config.yml"
    order = lake.config() | {"write": flaky | {second: write[second]}}
    config.write_text(yaml.safe_dump(order, sort_keys=False))
    state = run_and_kill(
        [
            sys.executable, "-m", "tests.patterns.idempotency.flaky_writer", str(tmp_path / "lost"),
            "--config", str(config), "--run", "2024-11-21",
        ],
        second,
        TableState.DATA_WITHOUT_LOG,
        env=process_environment("--master", "local[1,2]"),
    )  # fmt: skip
    assert state is TableState.DATA_WITHOUT_LOG
    assert (tmp_path / "lost").exists()
    assert_rows(lake.table("phones"), [(1,), (3,)])
    assert_rows(lake.table("devices"), [("phone", "2024-11-20", 1), ("laptop", "2024-11-20", 1)])

    orphans = lake.files("devices") - {Path(file).name for file in lake.table("devices").inputFiles()}
    assert orphans
    report = lake.run("2024-11-21")
    assert [table["already"] for table in report["tables"]] == [True, False]
    assert_rows(lake.table("phones"), [(1,), (3,)])
    assert_rows(lake.table("devices").where("day = '2024-11-21'"), [("phone", "2024-11-21", 1)])
    with setting(lake.spark, "spark.databricks.delta.retentionDurationCheck.enabled", "false"):
        lake.spark.sql(f"vacuum delta.`{second}` retain 0 hours")
    assert not orphans & lake.files("devices")
    assert lake.table("devices").count() == 3


def test_wrong_use_is_refused_in_one_sentence(lake: Lake) -> None:
    for changes, sentence in [
        ({"write": {}}, "write names no table"),
        ({"write": {lake.path("visits"): "select 1"}}, "can't be source and target"),
        ({"run": "yesterday"}, "'yesterday' is not a time"),
        ({"generation": -1}, "generation must be 0 or more, got -1"),
        ({"write": {lake.path("phones"): "select {visits}"}}, r"in braces it may have \{source\} and \{run\}"),
    ]:  # fmt: skip
        with pytest.raises(WrongUse, match=sentence):
            lake.run(**({"run": "2024-11-20"} | changes))  # type: ignore[arg-type]
    with pytest.raises(NotReady, match="there is no Delta table"):
        lake.run("2024-11-20", source=lake.path("absent"))
    config = lake.folder / "config.yml"
    config.write_text(yaml.safe_dump(lake.config()))
    parsed, _ = parse_parameters(Parameters, ["--config", str(config), "--run", "2024-11-20"])
    assert parsed == lake.parameters("2024-11-20")
