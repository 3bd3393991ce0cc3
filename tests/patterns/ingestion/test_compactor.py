"""Compactor: fewer files, the same rows, nobody disturbed."""

from __future__ import annotations

import bz2
import datetime as dt
import re
import shlex
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dbt_common.exceptions import DbtRuntimeError
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.ingestion import compactor, incremental_table_loader
from python_jobs.ingestion.compactor import Parameters, after_write, run
from python_jobs.shared.core.failures import JobFailed, WrongUse
from python_jobs.shared.delta.compaction import worth_compacting
from python_jobs.shared.files.pointers import PointedDataset, current_folder, publish
from python_jobs.shared.spark.job import job_outcome, run_job
from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.other_commits import commit
from tests.support.pytest_ids import REPOSITORY
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.session import setting
from tests.support.snippets import snippet
from tests.support.waiting import eventually

PAGE = "docs/ingestion.md"
HERE = "tests/patterns/ingestion/test_compactor.py"
JOB = REPOSITORY / "python_jobs" / "ingestion" / "compactor.py"
NOW = dt.datetime(2024, 3, 2, 12, tzinfo=dt.UTC)


@dataclass
class Table:
    """A Delta table that grows by files of ten rows, as a stream leaves them."""

    spark: SparkSession
    path: str
    next_id: int = 0

    def append(self, day: str = "d1", files: int = 1, user_metadata: str = "") -> None:
        """Append ``files`` files of ten rows in one commit; ids go on from the last one."""
        start, self.next_id = self.next_id, self.next_id + 10 * files
        visits = self.spark.range(start, self.next_id, numPartitions=files)
        visits = visits.withColumn("day", F.lit(day))
        writer = visits.write.format("delta").mode("append").partitionBy("day")
        (writer.option("userMetadata", user_metadata) if user_metadata else writer).save(self.path)

    def rows(self) -> DataFrame:
        return self.spark.read.format("delta").load(self.path)

    def ids(self) -> list[int]:
        return sorted(row.id for row in self.rows().select("id").collect())

    def active(self, day: str = "") -> set[str]:
        """Return the files that the current version is made of."""
        return {file for file in self.rows().inputFiles() if f"day={day}" in file}

    def on_disk(self) -> int:
        return len(list(Path(self.path).rglob("*.parquet")))

    def operations(self) -> list[str]:
        history = self.spark.sql(f"describe history delta.`{self.path}`").orderBy("version")
        return [row.operation for row in history.select("operation").collect()]

    def compact(self, **parameters: Any) -> dict[str, Any]:
        return run(self.spark, Parameters(table=self.path, **{"vacuum": False} | parameters))


@pytest.fixture
def table(spark: SparkSession, table_path: str) -> Table:
    return Table(spark, table_path)


def test_the_report_of_a_vacuum_is_its_own_whoever_commits_meanwhile(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.append(files=4)
    found = compactor.find_commits

    def find_after_others(*args: Any) -> Any:
        commit(table.path, 30)
        return found(*args)

    monkeypatch.setattr(compactor, "find_commits", find_after_others)
    vacuum = table.compact(vacuum=True, retention_hours=0, allow_unsafe_retention=True)["vacuum"]
    assert (vacuum["files_deleted"], table.on_disk()) == (4, 1)


def test_four_files_become_one_and_vacuum_waits_for_the_retention(table: Table) -> None:
    for _ in range(4):
        table.append()
    before = table.rows().collect()
    report = table.compact()
    assert (report["compacted"], report["files_before"], report["files_after"]) == (True, 4, 1)
    assert (len(table.active()), table.on_disk()) == (1, 5)
    assert_rows(table.rows(), before)
    older = table.spark.read.format("delta").option("versionAsOf", 2).load(table.path)
    assert older.count() == 30

    idle = table.compact(vacuum=True)
    assert idle["vacuum"] == {"retention_hours": 168, "files_deleted": 0, "bytes_deleted": 0}
    assert idle["table_version"] == report["table_version"] == len(table.operations()) - 1
    assert table.operations()[-1] == "OPTIMIZE", "a run that has nothing to do commits nothing"
    assert table.on_disk() == 5

    versions = len(table.operations())
    with pytest.raises(
        WrongUse, match=r"retention_hours is 0, below the safe 168 of .* allow_unsafe_retention"
    ):
        table.compact(vacuum=True, retention_hours=0)
    with pytest.raises(WrongUse, match="is 200; Delta ignores every number but 0: set the table's"):
        table.compact(vacuum=True, retention_hours=200)
    assert len(table.operations()) == versions

    cleaned = table.compact(vacuum=True, retention_hours=0, allow_unsafe_retention=True)
    vacuum = cleaned["vacuum"]
    assert cleaned["table_version"] == len(table.operations()) - 1 == report["table_version"] + 2
    assert (vacuum["files_deleted"], table.on_disk()) == (4, 1)
    assert vacuum["bytes_deleted"] == report["bytes_before"]
    assert_rows(table.rows(), before)
    with pytest.raises(Exception, match="FAILED_READ_FILE"):
        older.collect()
    assert table.spark.conf.get("spark.databricks.delta.retentionDurationCheck.enabled") == "true"


def test_a_second_run_and_an_empty_table_are_left_alone(table: Table) -> None:
    table.append(files=4)
    table.compact()
    version, files = len(table.operations()), table.active()
    assert table.compact()["compacted"] is False
    assert (len(table.operations()), table.active()) == (version, files)

    empty = Table(table.spark, f"{table.path}_empty")
    table.rows().where("false").write.format("delta").save(empty.path)
    report = empty.compact(vacuum=True)
    assert (report["compacted"], report["files_after"]) == (False, 0)
    assert empty.rows().count() == 0


def test_the_policy_decides_for_each_partition(spark: SparkSession) -> None:
    mb, old, young = 1024 * 1024, NOW - dt.timedelta(hours=3), NOW - dt.timedelta(minutes=5)
    files = [
        *[("many small", mb, old)] * 4,
        *[("too few", mb, old)] * 3,
        *[("mostly large", mb, old)] * 4, *[("mostly large", 40 * mb, old)] * 5,
        *[("half large", mb, old)] * 4, *[("half large", 40 * mb, old)] * 4,
        *[("at the limit", 32 * mb, old)] * 9,
        *[("still written", mb, old)] * 4, ("still written", mb, young),
        *[(None, mb, old)] * 4,
    ]  # fmt: skip
    active = spark.createDataFrame(files, "day string, __size bigint, __modified_at timestamp")

    def chosen(**changes: Any) -> set[str | None]:
        policy = Parameters(**{"table": "t", "min_age_minutes": 60} | changes)
        return {row.day for row in worth_compacting(active, ["day"], policy, NOW).collect()}

    always = {"many small", "half large", None}
    assert chosen() == always
    assert chosen(min_age_minutes=0) == {*always, "still written"}
    assert chosen(min_small_files=3) == {*always, "too few"}
    assert chosen(min_small_files=5) == set()
    assert chosen(min_small_ratio=0.4) == {*always, "mostly large"}
    assert chosen(min_small_ratio=0.6) == {"many small", None}
    assert chosen(small_file_mb=33) == {*always, "at the limit"}


def test_only_closed_partitions_are_compacted(table: Table) -> None:
    for day in ("2024-03-01", "2024-03-02", "it's \\ odd"):
        table.append(day, files=4)
    before, ids = table.active("2024-03-02"), table.ids()
    report = table.compact(where="day < '2024-03-02'")
    assert (report["partitions_compacted"], len(table.active("2024-03-01"))) == (1, 1)
    assert (table.active("2024-03-02"), len(table.active("it"))) == (before, 4)

    assert table.compact(min_age_minutes=60)["compacted"] is False
    tomorrow = (dt.datetime.now(dt.UTC) + dt.timedelta(days=1)).isoformat()
    assert table.compact(min_age_minutes=60, now=tomorrow)["partitions_compacted"] == 2
    assert (len(table.active()), table.ids()) == (3, ids)
    with pytest.raises(WrongUse, match=r"where 'id < 3' can't be used .*partition columns of .*: day$"):
        table.compact(where="id < 3")


def test_an_ingestion_job_compacts_inline_only_what_it_wrote(table: Table) -> None:
    table.append("d1", files=3, user_metadata="load 1")
    table.append("d2", files=1, user_metadata="load 2")
    table.append("d3", files=3, user_metadata="somebody else's")
    daily = Parameters(table=table.path, mode="daily", min_small_files=3)
    assert after_write(table.spark, daily) is None
    assert "OPTIMIZE" not in table.operations()

    code = snippet(PAGE, f"{HERE}::test_an_ingestion_job_compacts_inline_only_what_it_wrote")
    visits = table.rows().where("day = 'd2'").withColumn("id", F.col("id") + 100).repartition(2)
    meanwhile = code.replace("after_write(", "append_others()\nafter_write(")
    exec(meanwhile, {"spark": table.spark, "table": table.path, "visits": visits, "load_id": "load 3",
                     "append_others": lambda: table.append("d4", files=3)})  # fmt: skip
    assert [len(table.active(day)) for day in ("d1", "d2", "d3", "d4")] == [3, 1, 3, 3]
    assert table.operations()[-1] == "OPTIMIZE"  # and no vacuum

    inline = Parameters(table=table.path, mode="inline", min_small_files=3, user_metadata="load 4")
    with pytest.raises(WrongUse, match=r"no commit of .* has the user_metadata 'load 4'"):
        run(table.spark, inline)
    assert run(table.spark, daily)["partitions_compacted"] == 3
    assert table.ids() == [*range(100), *range(130, 140)]


def test_readers_and_writers_go_on_meanwhile(table: Table) -> None:
    # Many partitions, one after the other: appends have time to come between the compaction's look and its commit.
    rows = table.spark.range(320, numPartitions=2).withColumn("day", F.expr("concat('d', id % 16)"))
    rows.write.format("delta").partitionBy("day").save(table.path)
    table.next_id = 320
    stop, seen, failures = threading.Event(), list[int](), list[Exception]()

    def go_on(work: Callable[[], object]) -> threading.Thread:
        def repeat() -> None:
            try:
                while not stop.is_set():
                    work()
            except Exception as failure:
                failures.append(failure)

        thread = threading.Thread(target=repeat)
        thread.start()
        return thread

    threads = [go_on(table.append), go_on(lambda: seen.append(table.rows().count()))]
    try:
        eventually(lambda: seen)
        with setting(table.spark, "spark.databricks.delta.optimize.maxThreads", "1"):
            before = len(seen)
            report = table.compact(min_small_files=2)
            meanwhile = seen[before:]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert len(meanwhile) > 1, "no read began and ended while the table was compacted"
    assert report["files_removed"] >= 32
    history = table.spark.sql(f"describe history delta.`{table.path}`").where("operation = 'OPTIMIZE'")
    (optimize,) = history.collect()
    assert optimize.version - optimize.readVersion > 1, "no append came meanwhile"
    assert table.ids() == list(range(table.next_id))
    assert seen == sorted(seen)
    assert {count % 10 for count in seen} == {0}


def test_streams_and_incremental_loads_read_no_row_twice(table: Table, tmp_path: Path) -> None:
    copy, loaded = Table(table.spark, str(tmp_path / "copy")), str(tmp_path / "loaded")

    def stream() -> None:
        rows = table.spark.readStream.format("delta").load(table.path).writeStream.format("delta")
        query = rows.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        query.start(copy.path).awaitTermination()

    def load(hour: int) -> int:
        report = incremental_table_loader.run(
            table.spark,
            incremental_table_loader.Parameters(
                source=table.path, target=loaded, delta_column="ingested_at",
                delta_expression="timestamp'2024-03-01 10:00:00'", bootstrap_from="2024-03-01T00",
                key=["id"], overlap_minutes=240, now=f"2024-03-01T{hour}",
            ),
        )  # fmt: skip
        return int(report["rows_loaded"])

    table.append(files=4)
    stream()
    assert load(11) == 40
    assert table.compact()["compacted"] is True
    stream()
    assert (copy.rows().count(), load(12)) == (40, 0)
    table.append()
    stream()
    assert (copy.ids(), load(13)) == (list(range(50)), 10)


def test_the_report_measures_listing_and_reading_before_and_after(table: Table) -> None:
    rows = table.spark.range(50, numPartitions=1).write.option("maxRecordsPerFile", 1)
    rows.format("delta").save(table.path)
    report = table.compact(measure_reads=True)
    assert (report["files_before"], report["files_after"], report["files_removed"]) == (50, 1, 50)
    assert report["bytes_after"] < report["bytes_before"]
    measured = [f"{name}_{when}" for name in ("listing_ms", "read_seconds") for when in ("before", "after")]
    assert all(report[name] > 0 for name in measured)


def test_listing_meets_one_file_in_place_of_500(table: Table) -> None:
    """The report has both times; which is less depends on the machine's other work, so no test compares them."""
    rows = table.spark.range(500, numPartitions=1).write.option("maxRecordsPerFile", 1)
    rows.format("delta").save(table.path)
    report = table.compact()
    assert (report["files_before"], report["files_after"], len(table.rows().inputFiles())) == (500, 1, 1)
    assert report["listing_ms_before"] > 0 < report["listing_ms_after"]


def test_a_writer_of_the_same_files_wins_and_the_next_run_compacts_the_rest(table: Table) -> None:
    """A DELETE commits between the compaction's first data file and its commit."""
    rows = table.spark.range(320, numPartitions=2).withColumn("day", F.expr("concat('d', id % 16)"))
    rows.write.format("delta").partitionBy("day").save(table.path)
    with (
        setting(table.spark, "spark.databricks.delta.optimize.maxThreads", "1"),
        ThreadPoolExecutor(1) as pool,
    ):
        compaction = pool.submit(table.compact, min_small_files=2)
        eventually(lambda: table.on_disk() > 32)
        table.spark.sql(f"delete from delta.`{table.path}` where day = 'd0'").collect()
        with pytest.raises(
            JobFailed, match=r"another writer rewrote files of .*; nothing was compacted, run again"
        ):
            compaction.result()
    assert table.operations() == ["WRITE", "DELETE"]
    assert (len(table.active()), table.on_disk() > 32) == (30, True), (
        "no file of the compaction is in the table"
    )

    report = table.compact(min_small_files=2)
    assert (report["files_before"], report["files_after"]) == (30, 15)
    assert table.ids() == [n for n in range(320) if n % 16]


def test_the_command_of_the_page(table: Table) -> None:
    program, job, *words = shlex.split(
        snippet(PAGE, f"{HERE}::test_the_command_of_the_page").replace("\\\n", " ")
    )
    assert [program, job] == ["spark-submit", str(JOB.relative_to(REPOSITORY))]
    paths = {"$LAKEHOUSE_ROOT/bronze/bronze_visits": table.path}
    days = F.lit("2024-03-01").cast("date") + F.spark_partition_id().bitwiseAND(1)
    rows = table.spark.range(8, numPartitions=8).withColumn("date", days)
    rows.write.format("delta").partitionBy("date").save(table.path)
    with pytest.raises(SystemExit) as end:
        run_job(Parameters, run, [paths.get(word, word) for word in words])
    assert end.value.code == 0
    assert len(table.rows().inputFiles()) == 5
    assert table.operations()[-1] == "OPTIMIZE"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"min_small_files": 1}, "min_small_files is 1; merging takes at least 2 files"),
        ({"min_small_ratio": 1.5}, "min_small_ratio is 1.5; it is a share between 0 and 1"),
        ({"small_file_mb": 200}, "small_file_mb is 200 and target_file_mb 128"),
        ({"min_age_minutes": -1}, "min_age_minutes must be 0 or more, got -1"),
        ({"format": "json", "where": "day = 1"}, "a json dataset is compacted whole"),
        ({"format": "parquet", "mode": "inline"}, "a parquet dataset is compacted whole"),
        ({"mode": "inline"}, "mode inline needs user_metadata, by which it finds the ingestion job's commit"),
    ],
)
def test_wrong_parameters_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WrongUse, match=sentence):
        Parameters(**{"table": "t"} | wrong)


# --- raw files ------------------------------------------------------------------------------------------


@pytest.fixture
def dataset(spark: SparkSession, tmp_path: Path) -> PointedDataset:
    """Five small Parquet files of one column and one of two, published."""
    dataset = PointedDataset(spark, str(tmp_path / "raw"))
    folder = f"{dataset.folder('v1')}/hour=09"
    spark.range(5, numPartitions=5).write.parquet(folder)
    spark.range(5, 6).select("id", F.lit("x").alias("page")).coalesce(1).write.parquet(f"{folder}/_wide")
    # The last by name: Spark takes the columns of the first.
    path = Path(folder.removeprefix("file:"))
    next(path.glob("_wide/part-*")).rename(path / "wide.parquet")
    shutil.rmtree(path / "_wide")
    publish(spark, dataset.dataset, "v1")
    return dataset


RAW_ROWS = [(n, "x" if n == 5 else None) for n in range(6)]


def compact_raw(dataset: PointedDataset, spark: SparkSession, **parameters: Any) -> dict[str, Any]:
    return run(
        spark, Parameters(table=dataset.dataset, **{"format": "parquet", "vacuum": False} | parameters)
    )


def rows_of(spark: SparkSession, folder: str) -> DataFrame:
    return spark.read.option("mergeSchema", "true").parquet(folder).select("id", "page")


def test_raw_files_are_swapped_behind_a_pointer(spark: SparkSession, tmp_path: Path) -> None:
    names = {"spark": spark, "dataset": str(tmp_path / "raw"), "visits": spark.range(8, numPartitions=8)}
    exec(snippet(PAGE, f"{HERE}::test_raw_files_are_swapped_behind_a_pointer"), names)
    assert_rows(names["rows"], [(n,) for n in range(8)])
    assert len(names["rows"].inputFiles()) == 1
    with pytest.raises(Exception, match="UNABLE_TO_INFER_SCHEMA"):
        spark.read.parquet(names["dataset"]).count()  # who ignores the pointer sees no set, never both


def test_a_reader_of_raw_files_sees_one_set(
    spark: SparkSession, dataset: PointedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = rows_of(spark, current_folder(spark, dataset.dataset))
    point_to = PointedDataset.point_to

    def read_meanwhile(pointed: PointedDataset, version: str, replaces: str | None) -> None:
        assert_rows(rows_of(spark, current_folder(spark, dataset.dataset)), RAW_ROWS)
        point_to(pointed, version, replaces)

    monkeypatch.setattr(PointedDataset, "point_to", read_meanwhile)
    report = compact_raw(dataset, spark)
    assert (report["compacted"], report["files_before"], report["files_after"]) == (True, 6, 1)
    after = current_folder(spark, dataset.dataset)
    assert_rows(rows_of(spark, after), RAW_ROWS)
    assert [file.path.split("/")[0] for file in dataset.files(str(dataset.current()))] == ["hour=09"]
    assert_rows(started, RAW_ROWS)  # whoever had begun reads on
    assert compact_raw(dataset, spark)["compacted"] is False
    assert current_folder(spark, dataset.dataset) == after


def test_json_lines_stay_byte_for_byte(spark: SparkSession, tmp_path: Path) -> None:
    lines = [b'{"id": 1}\r', b"", b"\xff\xfe", '{"page": "ü 🦆"}'.encode(), b'{"id": 01}']
    version = tmp_path / "raw" / "_versions" / "v[1]" / "date=2024-03-01"
    version.mkdir(parents=True)
    for number, line in enumerate(lines):
        (version / f"{number}.json").write_bytes(line + b"\n")
    with pytest.raises(WrongUse, match="no name of a version"):
        publish(spark, str(tmp_path / "raw"), "v[1]")
    version.parent.rename(version.parent.with_name("v1"))
    publish(spark, str(tmp_path / "raw"), "v1")
    assert run(spark, Parameters(table=str(tmp_path / "raw"), format="json"))["files_after"] == 1
    (file,) = Path(current_folder(spark, str(tmp_path / "raw")).removeprefix("file:")).rglob("part-*")
    assert sorted(file.read_bytes().removesuffix(b"\n").split(b"\n")) == sorted(lines)


def test_a_packed_raw_file_that_is_not_whole_is_not_compacted(spark: SparkSession, tmp_path: Path) -> None:
    """Spark reads no line of it, and the vacuum would delete the file."""
    version = tmp_path / "raw" / "_versions" / "v1"
    version.mkdir(parents=True)
    for number in range(4):
        (version / f"{number}.json").write_text(f'{{"id": {number}}}\n')
    publish(spark, str(tmp_path / "raw"), "v1")
    for name in ("x.json.bz2", "x.json.lz4"):
        (version / name).write_text('{"id": 4}\n')
        with pytest.raises(JobFailed, match=rf"^cannot read .*/v1/{name}: "):
            run(spark, Parameters(table=str(tmp_path / "raw"), format="json"))
        assert PointedDataset(spark, str(tmp_path / "raw")).versions() == ["v1"]
        (version / name).unlink()
    (version / "x.json.bz2").write_bytes(bz2.compress(b'{"id": 4}\n'))
    run(spark, Parameters(table=str(tmp_path / "raw"), format="json"))
    (file,) = Path(current_folder(spark, str(tmp_path / "raw")).removeprefix("file:")).rglob("part-*")
    assert sorted(file.read_text().splitlines()) == [f'{{"id": {number}}}' for number in range(5)]


def test_raw_files_that_spark_does_not_read_as_one_table_stay_as_they_are(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def outcome(name: str, file_format: str, *files: pa.Table | bytes, names: str = "f{}.parquet") -> str:
        dataset = tmp_path / name
        version = dataset / "_versions" / "v1"
        version.mkdir(parents=True)
        for number, content in enumerate(files * 4):
            path = version / names.format(number)
            path.write_bytes(content) if isinstance(content, bytes) else pq.write_table(content, path)
        publish(spark, str(dataset), "v1")
        code, _ = job_outcome(
            lambda: spark, Parameters, run, ["--table", str(dataset), "--format", file_format]
        )
        assert PointedDataset(spark, str(dataset)).versions() == ["v1"]
        return f"{code} {capsys.readouterr().err.splitlines()[-1]}"

    def one(type_: pa.DataType, value: object) -> pa.Table:
        return pa.table({"a": pa.array([value], type_)})

    refused = "3 DataRefused: the Parquet files hold what Spark doesn't read as one table ("
    unread = {
        "wider": (one(pa.int32(), 1), one(pa.int64(), 1)),
        "scales": (one(pa.decimal128(3, 1), Decimal("1.0")), one(pa.decimal128(3, 2), Decimal("1.00"))),
        "nanoseconds": (one(pa.timestamp("ns"), 1),),
        "time": (one(pa.time64("us"), dt.time(10)),),
        "half": (one(pa.float16(), np.float16(1)),),
    }
    for name, files in unread.items():
        assert outcome(name, "parquet", *files).startswith(refused), name
    twice = pa.table({"a": [1], "A": [2]})
    assert outcome("twice", "parquet", twice).startswith(
        "3 DataRefused: two columns must differ in more than case"
    )
    assert outcome("none", "parquet", b"{}").startswith("1 JobFailed: cannot read file:")
    sentence = outcome("colon", "json", b"{}\n", names="f:{}.json")
    assert re.match(
        "2 WrongUse: .*/f:0.json can't be opened: a local file's name must have no colon", sentence
    )


def test_raw_files_without_a_pointer_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    folder = str(tmp_path / "raw")
    spark.range(8, numPartitions=8).write.parquet(folder)
    with pytest.raises(WrongUse, match=r"has no pointer \(_current\): its readers list the folder itself"):
        run(spark, Parameters(table=folder, format="parquet"))
    assert spark.read.parquet(folder).count() == 8
    # The control: what it is refused for. Spark deletes the files that it has yet to read.
    with pytest.raises(Exception, match=r"FAILED_READ_FILE|UNSUPPORTED_OVERWRITE"):
        spark.read.parquet(folder).coalesce(1).write.mode("overwrite").parquet(folder)
    assert list(Path(folder).glob("*.parquet")) == []


@pytest.mark.parametrize("moment", ["before the swap", "after the swap"])
def test_raw_files_that_come_meanwhile_are_not_lost(
    spark: SparkSession, dataset: PointedDataset, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    late = Path(dataset.folder("v1").removeprefix("file:"), "hour=09", "late.parquet")
    some = next(late.parent.glob("part-*.parquet"))
    step = {"before the swap": "_rewrite", "after the swap": "point_to"}[moment]
    owner: Any = compactor if step == "_rewrite" else PointedDataset
    original = getattr(owner, step)

    def overtaken(*arguments: Any, **keywords: Any) -> None:
        original(*arguments, **keywords)
        if not late.exists():
            shutil.copy(some, late)

    monkeypatch.setattr(owner, step, overtaken)
    with pytest.raises(JobFailed, match=r"files of .* changed while they were compacted; it stays as it is"):
        compact_raw(dataset, spark)
    assert dataset.current() == "v1"
    assert rows_of(spark, current_folder(spark, dataset.dataset)).count() == 7


def test_a_raw_run_that_fails_or_is_overtaken_changes_nothing(
    spark: SparkSession, dataset: PointedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite = compactor._rewrite

    def overtaken(*arguments: Any) -> None:
        rewrite(*arguments)
        spark.range(1).write.parquet(dataset.folder("v2"))
        publish(spark, dataset.dataset, "v2")

    monkeypatch.setattr(compactor, "_rewrite", overtaken)
    with pytest.raises(JobFailed, match="points to v2 by now, not to v1"):
        compact_raw(dataset, spark)
    assert (dataset.current(), dataset.versions()) == ("v2", ["v1", "v2"])


def test_replaced_raw_files_are_deleted_after_the_retention_and_no_others(
    spark: SparkSession, dataset: PointedDataset
) -> None:
    def clean(now: str) -> dict[str, Any]:
        return compact_raw(dataset, spark, vacuum=True, now=now)["vacuum"]

    unfinished = f"{dataset.folder('compacted-20990101T000000Z-dead')}/hour=09"
    spark.range(1).write.parquet(unfinished)
    assert compact_raw(dataset, spark, now="2099-01-01T00")["compacted"] is True
    assert clean("2099-01-07T23") == {
        "retention_hours": 168, "files_deleted": 0, "bytes_deleted": 0, "files_unknown": 0,
    }  # fmt: skip
    late = Path(dataset.folder("v1").removeprefix("file:"), "hour=09", "late.parquet")
    shutil.copy(next(late.parent.glob("part-*.parquet")), late)
    with pytest.raises(WrongUse, match="below the safe 168"):
        compact_raw(dataset, spark, vacuum=True, retention_hours=1, now="2099-01-09")
    cleaned = clean("2099-01-09")
    assert (cleaned["files_deleted"], cleaned["files_unknown"]) == (6, 1)
    assert [file.path for file in dataset.files("v1")] == ["hour=09/late.parquet"]
    assert dataset.versions() == ["compacted-20990101T000000Z" + str(dataset.current())[26:], "v1"]
    assert_rows(rows_of(spark, current_folder(spark, dataset.dataset)), RAW_ROWS)


# --- dbt ------------------------------------------------------------------------------------------------

DAILY = """
{{ config(
    materialized='incremental', file_format='delta', post_hook='{{ lakehouse_patterns.compactor_inline() }}',
    meta={'lakehouse_patterns': {'compactor': {'mode': 'daily', 'min_files': 3}}}
) }}
select * from {{ source('raw', 'visits') }}
"""
OVERRIDE = "{retention_hours: 0, allow_unsafe_retention: true}"


@pytest.fixture(scope="module")
def project(spark: SparkSession, make_project: Callable[..., DbtProject]) -> DbtProject:
    project = make_project(
        {
            "models/sources.yml": raw_tables("visits"),
            "models/daily_visits.sql": DAILY,
            "models/inline_visits.sql": snippet(PAGE, f"{HERE}::test_the_models_of_the_page"),
        }
    )
    project.source("visits", spark.range(3).coalesce(1))
    for _ in range(3):
        project.run("build")
    return project


def operations(project: DbtProject, name: str) -> list[str]:
    return [entry["operation"] for entry in reversed(project.history(name))]


def keep_no_removed_files(project: DbtProject, name: str) -> None:
    project.spark.sql(
        f"alter table {project.schema}.{name} "
        "set tblproperties ('delta.deletedFileRetentionDuration' = 'interval 0 hours')"
    )


def test_the_models_of_the_page(project: DbtProject) -> None:
    assert operations(project, "inline_visits")[-2:] == ["WRITE", "OPTIMIZE"]
    assert operations(project, "inline_visits").count("OPTIMIZE") == 1
    assert len(project.table("inline_visits").inputFiles()) == 1
    assert_rows(project.table("inline_visits"), [(0,), (1,), (2,)] * 3)


def test_run_operation_compacts_the_tables_of_mode_daily(project: DbtProject) -> None:
    assert "OPTIMIZE" not in operations(project, "daily_visits")
    inline = operations(project, "inline_visits")
    refused = project.fails("run-operation", "compactor", "--args", "{retention_hours: 0}")
    assert "retention_hours is 0: slow readers" in refused
    unknown = project.fails("run-operation", "compactor", "--args", "{tables: [inline_visits]}")
    assert "no model 'inline_visits' has mode daily" in unknown
    kept = project.fails("run-operation", "compactor", "--args", OVERRIDE)
    assert (
        f"{project.schema}.daily_visits keeps them: its delta.deletedFileRetentionDuration is interval 1 week"
        in kept
    )
    assert "OPTIMIZE" not in operations(project, "daily_visits")

    keep_no_removed_files(project, "daily_visits")
    project.run("run-operation", "compactor", "--args", OVERRIDE)
    assert "OPTIMIZE" in operations(project, "daily_visits")
    assert_rows(project.table("daily_visits"), [(0,), (1,), (2,)] * 3)
    assert len(list((project.location / "daily_visits").glob("*.parquet"))) == 1
    assert operations(project, "inline_visits") == inline


def test_a_vacuum_that_fails_leaves_the_session_as_it_was(
    project: DbtProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_no_removed_files(project, "daily_visits")
    send, sent = SparkSession.sql, []

    def refuse_vacuum(session: SparkSession, statement: str, *arguments: Any, **others: Any) -> DataFrame:
        sent.append(statement.split("*/")[-1].strip())
        if sent[-1].startswith("vacuum"):
            raise AnalysisException("no vacuum now")
        return send(session, statement, *arguments, **others)

    with monkeypatch.context() as patched:
        patched.setattr(SparkSession, "sql", refuse_vacuum)
        assert "no vacuum now" in project.fails("run-operation", "compactor", "--args", OVERRIDE)
    assert sent[-1].startswith("vacuum")
    assert [statement for statement in sent if re.match(r"reset\b|set\b.*=", statement)] == []


def test_files_are_removed_at_once_only_where_the_user_says_so(
    spark: SparkSession, render: MacroRenderer, table: Table
) -> None:
    table.append()
    relation = f"delta.`{table.path}`"
    arguments = {"relation": relation, "what": "retention_hours 0"}
    with setting(spark, "spark.databricks.delta.retentionDurationCheck.enabled", "false"):
        render("require_no_retention", **arguments)  # his session's setting
    for retention, is_none in {
        "interval 0 hours": True, "0 days": True, "INTERVAL 0 weeks 0 hours": True,
        "interval 10 hours": False, "interval 0 weeks 1 hours": False,
    }.items():  # fmt: skip
        spark.sql(
            f"alter table {relation} set tblproperties ('delta.deletedFileRetentionDuration' = '{retention}')"
        )
        if is_none:
            render("require_no_retention", **arguments)
            continue
        with pytest.raises(
            DbtRuntimeError, match=f"deletedFileRetentionDuration is {retention}; if no reader"
        ):
            render("require_no_retention", **arguments)


def test_the_statements_of_the_macros(render: MacroRenderer) -> None:
    assert render("compactor_optimize", relation="t", where="day < '2024-03-02'") == (
        "optimize t where day < '2024-03-02'"
    )
    assert render("compactor_vacuum", relation="t") == "vacuum t"
    assert render("compactor_vacuum", relation="t", retention_hours=0, allow_unsafe_retention=True) == (
        "vacuum t retain 0 hours"
    )
    for hours in (200, "a week"):
        with pytest.raises(Exception, match=f"retention_hours must be 0, got '{hours}', which Delta ignores"):
            render("compactor_vacuum", relation="t", retention_hours=hours)
    with pytest.raises(Exception, match="mode must be one of daily, inline, got 'hourly'"):
        render("_compactor_require_options", name="m", options={"mode": "hourly"})
