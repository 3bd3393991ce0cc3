"""Data Overwrite as a job: what is replaced, what is left alone, what is refused, on Delta and on plain files."""

from __future__ import annotations

import datetime as dt
import os
import shlex
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import ParseException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from python_jobs.idempotency import data_overwrite
from python_jobs.idempotency.data_overwrite import Folder, Parameters, new_rows, overwrite_files, run
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.delta.commits import CONFLICTS
from python_jobs.shared.delta.overwrite import overwrite
from python_jobs.shared.records.partition_values import partition_condition
from python_jobs.shared.spark.job import job_outcome
from services.postgres import Database
from tests.support.killer import TableState, run_and_kill
from tests.support.pytest_ids import REPOSITORY
from tests.support.rows import assert_rows
from tests.support.session import setting
from tests.support.snippets import snippet
from tests.support.waiting import polled

JOB = REPOSITORY / "python_jobs" / "idempotency" / "data_overwrite.py"
THIS = "tests/patterns/idempotency/test_data_overwrite.py::"
SCHEMA = "id int, brand_name string, state string"
SPARK_ERRORS = (PySparkException, Py4JJavaError)

# Valid devices by day: 2, 4, 2 and 3 of them.
DAYS = {
    "2024-09-20": [(1, "lg"), (2, "htc")],
    "2024-09-21": [(3, "mac"), (4, "lenovo"), (5, "galaxy"), (6, "ipad")],
    "2024-09-22": [(-1, "broken"), (-2, "broken")],
    "2024-09-23": [(9, "lg"), (10, "mac"), (11, "dell")],
}
CORRECTED = [(7, "nokia"), (8, "sony")]


@dataclass
class Devices:
    """Daily files of devices and the table of all days."""

    spark: SparkSession
    folder: Path

    @property
    def target(self) -> str:
        return str(self.folder / "lakehouse" / "devices")

    def land(self, day: str, rows: list[tuple[int, str]]) -> None:
        """Land a day's file: the given devices are valid ones, and two more are not."""
        folder = self.folder / "landing" / f"date={day}"
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["id;brand_name;state", *(f"{id};{brand};valid" for id, brand in rows), "90;x;lost", "91;x;"]
        (folder / "devices.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def arguments(self, day: str, **others: Any) -> dict[str, Any]:
        return {
            "source": str(self.folder / "landing" / f"date={day}"),
            "format": "csv",
            "delimiter": ";",
            "schema": SCHEMA,
            "query": "select id, brand_name, date'{day}' as execution_date "
            "from {source} where state = 'valid'".replace("{day}", day),
            "target": self.target,
            "partition": {"execution_date": day},
        } | others

    def load(self, day: str, **others: Any) -> dict[str, Any]:
        return run(self.spark, Parameters(**self.arguments(day, **others)))

    def rows(self, version: int | None = None) -> list[tuple[int, str, str]]:
        reader = self.spark.read.format("delta")
        reader = reader if version is None else reader.option("versionAsOf", version)
        return [(r.id, r.brand_name, str(r.execution_date)) for r in reader.load(self.target).collect()]

    def files(self) -> set[str]:
        """Return the data files on disk, whether a version needs them or not."""
        return {str(file.relative_to(self.target)) for file in Path(self.target).rglob("*.parquet")}


def of_days(**changed: list[tuple[int, str]]) -> list[tuple[int, str, str]]:
    """Return the table's rows: those of all days, some changed (``d22=…``)."""
    days = DAYS | {f"2024-09-{name[1:]}": rows for name, rows in changed.items()}
    return [(id, brand, day) for day, rows in days.items() for id, brand in rows]


# --- Delta ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Left:
    """What the last load reported, and the table's rows and files after it."""

    report: dict[str, Any]
    rows: list[tuple[int, str, str]]
    files: set[str]


class Days(Devices):
    """The table of four days, looked at after each of its loads."""

    def load_all(self) -> Left:
        """Land and load the four days."""
        for day, rows in DAYS.items():
            self.land(day, rows)
            report = self.load(day)
        return Left(report, self.rows(), self.files())

    def replace(self, rows: list[tuple[int, str]]) -> Left:
        """Land other rows for 2024-09-22 and load that day."""
        self.land("2024-09-22", rows)
        return Left(self.load("2024-09-22"), self.rows(), self.files())


# The stages of one story: each goes on from the one before, and stands above the tests that look at it.


@pytest.fixture(scope="module")
def days(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Days:
    return Days(spark, tmp_path_factory.mktemp("devices"))


@pytest.fixture(scope="module")
def first(days: Days) -> Left:
    return days.load_all()


def test_rows_that_are_not_valid_or_of_unknown_state_are_not_loaded(first: Left) -> None:
    assert {90, 91}.isdisjoint(id for id, _, _ in first.rows)


@pytest.fixture(scope="module")
def again(days: Days, first: Left) -> Left:
    return days.load_all()


def test_all_days_again_leave_the_same_rows(first: Left, again: Left) -> None:
    assert len(first.rows) == 11
    assert_rows(first.rows, of_days())
    assert_rows(again.rows, of_days())


@pytest.fixture(scope="module")
def corrected(days: Days, again: Left) -> tuple[Left, list[object]]:
    """Correct a day while a reader counts the rows, also right before the write; return what was counted, too."""
    count = lambda: days.spark.read.format("delta").load(days.target).count()  # noqa: E731
    with polled(count, held=(data_overwrite, "overwrite")) as seen:
        left = days.replace([*CORRECTED, (12, "palm")])
    return left, seen


def test_a_corrected_day_replaces_its_rows_and_no_other_file(
    again: Left, corrected: tuple[Left, list[object]]
) -> None:
    left, _ = corrected
    assert_rows(left.rows, of_days(d22=[*CORRECTED, (12, "palm")]))
    assert (left.report["rows"], left.report["files_added"], left.report["files_removed"]) == (3, 1, 1)
    (added,) = left.files - again.files
    assert added.startswith("execution_date=2024-09-22/")


def test_concurrent_readers_see_the_rows_before_or_the_new_ones(corrected: tuple[Left, list[object]]) -> None:
    _, seen = corrected
    assert set(seen) <= {11, 12}
    assert seen[-1] == 12


def test_a_day_with_fewer_rows_or_none_loses_the_others(
    days: Days, corrected: tuple[Left, list[object]]
) -> None:
    assert_rows(days.replace(CORRECTED).rows, of_days(d22=CORRECTED))
    assert_rows(days.replace([]).rows, of_days(d22=[]))


def test_the_version_before_is_readable_until_vacuum_which_alone_frees_the_disk(
    spark: SparkSession, tmp_path: Path
) -> None:
    devices = Devices(spark, tmp_path)
    for rows in (DAYS["2024-09-22"], CORRECTED):
        devices.land("2024-09-22", rows)
        version = devices.load("2024-09-22")["table_version"]
    broken = [(-1, "broken", "2024-09-22"), (-2, "broken", "2024-09-22")]
    assert_rows(devices.rows(version - 1), broken)
    assert len(devices.files()) == 2
    spark.sql(f"vacuum delta.`{devices.target}`")
    assert len(devices.files()) == 2, "they are younger than a week"
    with setting(spark, "spark.databricks.delta.retentionDurationCheck.enabled", "false"):
        spark.sql(f"vacuum delta.`{devices.target}` retain 0 hours")
    assert len(devices.files()) == 1
    with pytest.raises(SPARK_ERRORS):
        devices.rows(version - 1)
    assert_rows(devices.rows(), [(7, "nokia", "2024-09-22"), (8, "sony", "2024-09-22")])


@pytest.fixture
def numbers(spark: SparkSession, table_path: str) -> str:
    """Return a table ``id int, part string`` that isn't partitioned."""
    frame = spark.createDataFrame([(1, "a"), (2, "a"), (3, "b"), (4, None)], "id int, part string")
    frame.coalesce(1).write.format("delta").save(table_path)
    return table_path


def frame(spark: SparkSession, *rows: tuple[Any, ...], schema: str = "id int, part string") -> DataFrame:
    return spark.createDataFrame(list(rows), schema)


def held(spark: SparkSession, table: str) -> DataFrame:
    return spark.read.format("delta").load(table)


def test_a_condition_replaces_what_it_matches_and_a_table_all(spark: SparkSession, numbers: str) -> None:
    overwrite(spark, frame(spark, (2, "c")), numbers, "id between 2 and 3")
    assert_rows(held(spark, numbers), [(1, "a"), (2, "c"), (4, None)])
    overwrite(spark, frame(spark, (5, None)), numbers, "part is null")
    assert overwrite(spark, frame(spark), numbers, "part = 'absent'") is None, "nothing replaced by nothing"
    assert_rows(held(spark, numbers), [(1, "a"), (2, "c"), (5, None)])
    overwrite(spark, frame(spark, (7, 0.5), schema="id int, price double"), numbers, None)
    assert_rows(held(spark, numbers), [(7, 0.5)])


@pytest.mark.parametrize("outside", ["c", None])
def test_a_row_outside_of_the_condition_refuses_the_run(
    spark: SparkSession, numbers: str, outside: str | None
) -> None:
    with pytest.raises(
        DataRefused,
        match=r"outside of the slice that is overwritten \(part = 'a'\); the table stays as it is",
    ):
        overwrite(spark, frame(spark, (1, "a"), (9, outside)), numbers, "part = 'a'")
    assert_rows(held(spark, numbers), [(1, "a"), (2, "a"), (3, "b"), (4, None)])


def test_the_first_run_checks_its_rows_too(spark: SparkSession, table_path: str) -> None:
    with pytest.raises(DataRefused, match="outside of the slice that is overwritten"):
        overwrite(spark, frame(spark, (1, "a"), (2, "b")), table_path, "part = 'a'", partitioned_by=["part"])
    overwrite(spark, frame(spark, (1, "a")), table_path, "part = 'a'")
    assert_rows(held(spark, table_path), [(1, "a")])


def test_a_schema_that_changed_since_the_run_is_refused_in_a_backfill(
    spark: SparkSession, numbers: str
) -> None:
    rows = frame(spark, (1, 2), schema="id bigint, price int")
    message = "have no column part, price, which the table lacks, id as bigint in place of int; select"
    with pytest.raises(DataRefused, match=message):
        overwrite(spark, rows, numbers, "id = 1")
    # Delta alone would take the absent column for NULL.
    frame(spark, (1,), schema="id int").write.format("delta").mode("overwrite").option(
        "replaceWhere", "id = 1"
    ).save(numbers)
    assert_rows(held(spark, numbers), [(1, None), (2, "a"), (3, "b"), (4, None)])


def test_a_partition_that_is_not_written_in_full_empties_nothing(spark: SparkSession, tmp_path: Path) -> None:
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    rows = spark.sql(
        "select * from values (date'2024-09-01', timestamp'2024-09-01 00:00:00Z', 9, 1.5bd), "
        "(date'2024-09-02', timestamp'2024-09-02 00:00:00Z', 10, 2.5bd) as t (d, at, hour, part)"
    )
    rows.write.format("delta").save(source)
    rows.write.format("delta").partitionBy("d").save(target)
    query = "select * from {source} where false"
    for column, value, type_ in (
        ("d", "2024-09", "date"),
        ("d", "2024", "date"),
        ("d", "foo", "date"),
        ("d", "2024-09-01T10", "date"),
        ("at", "2024-09-01", "timestamp"),
        ("hour", "9.5", "int"),
        ("part", "1.55", r"decimal\(2,1\)"),
    ):
        sentence = f"partition {column} is '{value}', which is no value of its type {type_}; write it in full"
        with pytest.raises(WrongUse, match=sentence):
            run(spark, Parameters(source=source, target=target, query=query, partition={column: value}))
    assert_rows(held(spark, target).select("hour"), [(9,), (10,)])
    report = run(spark, Parameters(source=source, target=target, query=query, partition={"d": "2024-09-01"}))
    assert report["replaced"] == "`d` = cast('2024-09-01' as date)"
    assert_rows(held(spark, target).select("hour"), [(10,)])
    run(
        spark,
        Parameters(source=source, target=target, query=query, partition={"hour": "010", "part": "2.50"}),
    )
    assert_rows(held(spark, target), [])


def test_a_partition_of_a_timestamp_is_one_of_utc(spark: SparkSession) -> None:
    rows = spark.sql("select timestamp'2024-09-01 10:30:00Z' as at, 'a' as t")
    with setting(spark, "spark.sql.session.timeZone", "Asia/Tokyo"):
        for text in ("2024-09-01T10:30", "2024-09-01 11:30:00+01:00"):
            assert partition_condition(rows, {"at": text}) == "`at` = timestamp_micros(1725186600000000)"
    assert partition_condition(rows, {"t": "it's"}) == r"`t` = 'it\'s'"


def test_a_condition_that_makes_no_sense_is_wrong_use(spark: SparkSession, numbers: str) -> None:
    for where in ("absent = 1", "id ="):
        with pytest.raises(WrongUse, match="where can't be used on"):
            overwrite(spark, frame(spark, (1, "a")), numbers, where)


def test_a_table_is_read_and_overwritten_at_once(spark: SparkSession, numbers: str) -> None:
    query = "select id + 10 as id, part from {source} where part = 'a'"
    report = run(spark, Parameters(source=numbers, target=numbers, query=query, where="part = 'a'"))
    assert report["rows"] == 2
    assert_rows(held(spark, numbers), [(11, "a"), (12, "a"), (3, "b"), (4, None)])


def at_once(*actions: Callable[[], object]) -> list[BaseException | None]:
    """Start the actions together; return what each raised."""
    start = threading.Barrier(len(actions))

    def run_one(action: Callable[[], object]) -> object:
        start.wait()
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.exception() for future in [pool.submit(run_one, action) for action in actions]]


def test_of_two_runs_for_one_slice_one_fails_and_its_retry_succeeds(
    spark: SparkSession, table_path: str
) -> None:
    frame(spark, (1, "a"), (2, "b")).write.format("delta").partitionBy("part").save(table_path)
    slices = [frame(spark, (10, "a")), frame(spark, (20, "a"))]
    failures: list[BaseException | None] = [None]
    attempt = 0
    while not any(failures):
        attempt += 1
        assert attempt <= 5, "no conflict in five attempts: the test proves nothing"
        failures = at_once(*(partial(overwrite, spark, rows, table_path, "part = 'a'") for rows in slices))
    assert sorted(isinstance(failure, CONFLICTS) for failure in failures) == [False, True]
    first, second = slices if failures[1] else slices[::-1]
    assert_rows(held(spark, table_path), first.union(frame(spark, (2, "b"))))
    overwrite(spark, second, table_path, "part = 'a'")
    assert_rows(held(spark, table_path), second.union(frame(spark, (2, "b"))))


def test_runs_for_two_partitions_do_not_meet(spark: SparkSession, table_path: str) -> None:
    frame(spark, (1, "a"), (2, "b")).write.format("delta").partitionBy("part").save(table_path)
    failures = at_once(
        partial(overwrite, spark, frame(spark, (10, "a")), table_path, "part = 'a'"),
        partial(overwrite, spark, frame(spark, (20, "b")), table_path, "part = 'b'"),
    )
    assert failures == [None, None]
    assert_rows(held(spark, table_path), [(10, "a"), (20, "b")])


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_what_sparks_own_partition_overwrite_does(spark: SparkSession, table_path: str, mode: str) -> None:
    """Why the slice is named: dynamic mode keeps a day without rows, static mode wipes the other days."""
    frame(spark, (1, "a"), (2, "b")).write.format("delta").partitionBy("part").save(table_path)
    frame(spark, (3, "a")).createOrReplaceTempView("new_rows")
    with setting(spark, "spark.sql.sources.partitionOverwriteMode", mode):
        spark.sql(f"insert overwrite table delta.`{table_path}` select * from new_rows")
        after_rows = held(spark, table_path).collect()
        spark.sql(f"insert overwrite table delta.`{table_path}` select * from new_rows where false")
        after_none = held(spark, table_path).collect()
    assert_rows(after_rows, [(3, "a"), (2, "b")] if mode == "dynamic" else [(3, "a")])
    assert_rows(after_none, [(3, "a"), (2, "b")] if mode == "dynamic" else [])


def test_insert_overwrite_into_is_no_syntax(spark: SparkSession, numbers: str) -> None:
    with pytest.raises(ParseException):
        spark.sql(f"insert overwrite into delta.`{numbers}` select 1, 'a'")
    spark.sql(f"insert overwrite delta.`{numbers}` select 1, 'a'")
    assert_rows(held(spark, numbers), [(1, "a")])


def test_delete_and_insert_leave_a_hole_when_the_second_fails(spark: SparkSession, numbers: str) -> None:
    spark.sql(f"delete from delta.`{numbers}` where part = 'a'")
    with pytest.raises(SPARK_ERRORS):
        spark.sql(f"insert into delta.`{numbers}` select cast(raise_error('x') as int), 'a'")
    assert_rows(held(spark, numbers), [(3, "b"), (4, None)])


@pytest.mark.postgres
def test_delete_and_insert_in_one_transaction_restore_the_old_rows(database: Database) -> None:
    statements = snippet(
        "docs/idempotency.md", f"{THIS}test_delete_and_insert_in_one_transaction_restore_the_old_rows"
    )
    database.execute(
        "create table devices (id int not null, execution_date date)",
        "insert into devices values (1, '2024-09-21'), (-1, '2024-09-22'), (-2, '2024-09-22')",
        "create table devices_staging (id int, execution_date date)",
        "insert into devices_staging values (7, '2024-09-22'), (null, '2024-09-22')",
    )
    with database.connect() as connection:

        def ids() -> list[int]:
            return [id for (id,) in connection.execute("select id from devices order by id").fetchall()]

        with pytest.raises(psycopg.errors.NotNullViolation):
            connection.execute(statements.encode())
        connection.execute("rollback")
        assert ids() == [-2, -1, 1]
        connection.execute("update devices_staging set id = 8 where id is null")
        for _ in range(2):
            connection.execute(statements.encode())
            assert ids() == [1, 7, 8]


# --- sources and parameters -----------------------------------------------------------------------------


def test_an_absent_source_clears_nothing(spark: SparkSession, tmp_path: Path) -> None:
    devices = Devices(spark, tmp_path)
    devices.land("2024-09-22", CORRECTED)
    devices.load("2024-09-22")
    (tmp_path / "landing/date=2024-09-22/devices.csv").unlink()
    with pytest.raises(NotReady, match="holds no file"):
        devices.load("2024-09-22")
    devices.land("2024-09-22", [(1, "lg")])
    with pytest.raises(DataRefused, match=r"1 rows for .*, allowed are 2 or more \(min_rows\)"):
        devices.load("2024-09-22", min_rows=2)
    devices.land("2024-09-22", [("x", "lg")])  # type: ignore[list-item]
    with pytest.raises(
        DataRefused, match=r"cannot read .*devices\.csv: .* by it: id; nothing was overwritten"
    ):
        devices.load("2024-09-22")
    assert_rows(devices.rows(), [(7, "nokia", "2024-09-22"), (8, "sony", "2024-09-22")])
    for query in ("select nothing from {source}", "select", "select * from {sorce}"):
        with pytest.raises(WrongUse, match="the query can't be used"):
            devices.load("2024-09-22", query=query)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"partition": {"d": "1"}, "where": "id = 1"}, "either partition or where"),
        ({"where": ""}, "must name something"),
        ({"partition": {"d": "2024/09"}}, r"partition d is '2024/09'; allowed are letters"),
        ({"where": "id = 1", "target_format": "json"}, "where needs a Delta table; json files"),
        ({"schema": "id int"}, "schema belongs to the formats json and csv"),
        (
            {"target_format": "csv", "query": "select * from {target}"},
            "target_schema belongs to a query that reads {target} of the formats json and csv, and such a query needs",
        ),
        ({"target_schema": "id int"}, "target_schema belongs to a query that reads"),
        ({"format": "csv"}, "schema belongs to the formats json and csv, which need it"),
        ({"min_rows": -1}, "min_rows must be 0 or more, got -1"),
        ({"query": "absent.sql"}, r"can't read the query's file absent\.sql"),
    ],
)
def test_parameters_that_make_no_sense(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WrongUse, match=sentence):
        Parameters(**{"source": "a", "target": "b"} | arguments)


# --- plain files ----------------------------------------------------------------------------------------


def listed(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if not file.name.startswith((".", "_"))}


def read(spark: SparkSession, folder: Path) -> list[tuple[Any, ...]]:
    rows = spark.read.schema("id int, part string").json(str(folder))
    return [tuple(row) for row in rows.collect()]


def test_a_partition_of_plain_files_is_replaced_again_and_again(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "numbers"
    overwrite_files(frame(spark, (3, "b")), str(folder), "json", {"part": "b"})
    for rows in ([(1, "a"), (2, "a")], [(1, "a"), (2, "a")], [(5, "a")]):
        overwrite_files(frame(spark, *rows).coalesce(1), str(folder), "json", {"part": "a"})
        assert_rows(read(spark, folder), [*rows, (3, "b")])
        assert len(listed(folder / "part=a")) == 1
    assert listed(folder) == {"part=a", "part=b"}
    overwrite_files(frame(spark), str(folder), "json", {"part": "a"})
    assert_rows(read(spark, folder), [(3, "b")])


def test_a_row_of_another_partition_of_plain_files_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    folder = str(tmp_path / "numbers")
    overwrite_files(frame(spark, (1, "a")), folder, "json", {"part": "a"})
    for outside in ("b", None):
        with pytest.raises(DataRefused, match="a row lies outside of the partition part=a of"):
            overwrite_files(frame(spark, (2, "a"), (3, outside)), folder, "json", {"part": "a"})
    assert_rows(read(spark, Path(folder)), [(1, "a")])
    with pytest.raises(WrongUse, match="partition id is 'soon', which is no value of its type int; write it"):
        overwrite_files(frame(spark, (None, "a")), folder, "json", {"id": "soon"})
    with pytest.raises(WrongUse, match="the rows have no column day; they have id, part"):
        overwrite_files(frame(spark, (1, "a")), folder, "json", {"day": "1"})
    with pytest.raises(WrongUse, match="s3a://bucket/numbers is no local or mounted folder"):
        overwrite_files(frame(spark, (1, "a")), "s3a://bucket/numbers", "json", None)


def test_readers_see_neither_lock_nor_staging_folder_of_a_partition(
    spark: SparkSession, tmp_path: Path
) -> None:
    target = tmp_path / "hours"
    rows = frame(spark, (1, 9), schema="id int, hour int").coalesce(1)
    overwrite_files(rows, str(target), "parquet", {"hour": "9"})
    folder = Folder(target / "hour=9")
    with folder.claimed():
        rows.write.parquet(str(folder.staging))
        assert_rows(spark.read.parquet(str(target)), [(1, 9)])
        # The trap: what begins with "_" and has "=" in it is data for Spark.
        folder.staging.rename(target / "_staging_hour=9")
        with pytest.raises(SPARK_ERRORS, match="CONFLICTING_PARTITION_COLUMN_NAMES"):
            spark.read.parquet(str(target)).collect()
        (target / "_staging_hour=9").rename(folder.staging)
    source = str(tmp_path / "source")
    rows.write.format("delta").save(source)
    params = Parameters(
        source=source,
        target=str(target),
        target_format="parquet",
        query="select id + 1 as id, hour from {target}",
        partition={"hour": "9"},
    )
    assert run(spark, params)["files"] == 1
    assert_rows(spark.read.parquet(str(target)), [(2, 9)])


def test_the_folder_of_an_equal_value_is_replaced(spark: SparkSession, tmp_path: Path) -> None:
    target = tmp_path / "hours"
    rows = frame(spark, (1, 9), (2, 10), schema="id int, hour int")
    for hour in ("09", "10"):
        overwrite_files(rows.where(f"hour = {int(hour)}"), str(target), "json", {"hour": hour})
    path = overwrite_files(
        frame(spark, (3, 9), schema="id int, hour int"), str(target), "json", {"hour": "9"}
    )
    assert path.name == "hour=09"
    assert listed(target) == {"hour=09", "hour=10"}
    assert_rows(spark.read.schema("id int, hour int").json(str(target)), [(3, 9), (2, 10)])
    # As a text it is another value.
    texts = frame(spark, (4, "9"), schema="id int, hour string")
    assert overwrite_files(texts, str(target), "json", {"hour": "9"}).name == "hour=9"
    sentence = "has hour=09 and hour=9 for the partition hour=9; keep its rows in one"
    with pytest.raises(DataRefused, match=sentence):
        overwrite_files(rows.where("hour = 9"), str(target), "json", {"hour": "9"})


def test_a_folder_that_is_not_written_in_full_is_not_taken_for_the_value(
    spark: SparkSession, tmp_path: Path
) -> None:
    month = tmp_path / "days" / "d=2024-09"
    month.mkdir(parents=True)
    (month / "rows.json").write_text('{"id": 1}', encoding="utf-8")
    none = spark.sql("select 1 as id, date'2024-09-01' as d where false")
    sentence = "has d=2024-09 for the partition d=2024-09-01; keep its rows in one"
    with pytest.raises(DataRefused, match=sentence):
        overwrite_files(none, str(tmp_path / "days"), "json", {"d": "2024-09-01"})
    with pytest.raises(WrongUse, match="partition d is '2024-09', which is no value of its type date"):
        overwrite_files(none, str(tmp_path / "days"), "json", {"d": "2024-09"})
    assert (month / "rows.json").read_text(encoding="utf-8") == '{"id": 1}'
    overwrite_files(none, str(tmp_path / "days"), "json", {"d": "2024-09-02"})
    assert listed(tmp_path / "days") == {"d=2024-09", "d=2024-09-02"}


def test_plain_files_hold_microseconds_and_spaces(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.sql(
        "select '  a ' as text, timestamp'2024-03-01 10:00:00.123456Z' as at, "
        "timestamp_ntz'2024-03-01 10:00:00.000001' as local"
    )

    def lines(file_format: str) -> list[str]:
        overwrite_files(rows, str(tmp_path / file_format), file_format, None)
        (file,) = (tmp_path / file_format).glob("part-*")
        return file.read_text(encoding="utf-8").splitlines()

    with setting(spark, "spark.sql.session.timeZone", "Asia/Tokyo"):
        assert lines("csv") == [
            "text,at,local",
            "  a ,2024-03-01T10:00:00.123456Z,2024-03-01T10:00:00.000001",
        ]
        assert lines("json") == [
            '{"text":"  a ","at":"2024-03-01T10:00:00.123456Z","local":"2024-03-01T10:00:00.000001"}'
        ]


@pytest.mark.parametrize(
    ("file_format", "query", "kind", "sentence"),
    [
        ("csv", "X'FF00' as b", WrongUse, r"csv files can't hold the binary column b; select base64\(b\)"),
        ("csv", "array(1) as a", WrongUse, "csv files can't hold the rows .*UNSUPPORTED_DATA_TYPE"),
        (
            "csv",
            "concat('a', char(10)) as t",
            DataRefused,
            "line break, .* which csv files can't hold; write json",
        ),
        ("text", "concat('a', char(13)) as t", DataRefused, "line break, .* which text files can't hold"),
        ("text", "cast(null as string) as t", DataRefused, "a line is NULL, which text files can't hold"),
        (
            "text",
            "'a' as t, 'b' as u",
            WrongUse,
            "text files hold one column, a string; the rows have struct<t:",
        ),
        ("text", "1 as t", WrongUse, "text files hold one column, a string; the rows have struct<t:int>"),
    ],
)
def test_what_a_format_can_not_hold_is_refused_and_the_old_files_stay(
    spark: SparkSession, tmp_path: Path, file_format: str, query: str, kind: type[JobFailed], sentence: str
) -> None:
    overwrite_files(spark.sql("select 'old' as t"), str(tmp_path / "lines"), "text", None)
    with pytest.raises(kind, match=sentence):
        overwrite_files(spark.sql(f"select {query}"), str(tmp_path / "lines"), file_format, None)
    assert_rows(spark.read.text(str(tmp_path / "lines")), [("old",)])


TOO_EARLY, TOO_LATE = "timestamp'0001-01-01T00:00:00+05:00'", "timestamp'9999-12-31T23:59:59-05:00'"


@pytest.mark.parametrize(
    ("formats", "value"),
    [
        ("json", "double('NaN')"),
        ("json", "float('-Infinity')"),
        ("json", "array(named_struct('x', map('k', double('Infinity'))))"),
        ("json csv", TOO_EARLY),
        ("json csv", TOO_LATE),
        ("json", f"named_struct('x', array({TOO_EARLY}))"),
        ("json csv", "date_add(date'9999-12-31', 1)"),
        ("json csv", "timestamp_ntz'+10000-01-01 00:00:00'"),
    ],
)
def test_a_value_that_no_reader_of_lines_takes_is_refused(
    spark: SparkSession, tmp_path: Path, formats: str, value: str
) -> None:
    rows = spark.sql(f"select {value} as v")
    for file_format in formats.split():
        sentence = (
            f"a time is outside of the years .* infinite, which {file_format} files can't hold; write parq"
        )
        with pytest.raises(DataRefused, match=sentence):
            overwrite_files(rows, str(tmp_path / file_format), file_format, None)
    overwrite_files(rows, str(tmp_path / "parquet"), "parquet", None)


def test_values_that_readers_of_lines_take_are_written(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.sql(
        "select 1.5D as d, cast(null as float) as f, timestamp'0001-01-01T00:00:00Z' as t, date'9999-12-31' as day, "
        "array(timestamp_ntz'9999-12-31 23:59:59', null) as a, map('k', named_struct('x', cast(null as date))) as m"
    )
    overwrite_files(rows, str(tmp_path / "json"), "json", None)
    assert_rows(
        spark.read.text(str(tmp_path / "json")),
        [
            (
                '{"d":1.5,"t":"0001-01-01T00:00:00.000000Z","day":"9999-12-31",'
                '"a":["9999-12-31T23:59:59.000000",null],"m":{"k":{}}}',
            )
        ],
    )
    overwrite_files(spark.sql("select double('NaN') as d"), str(tmp_path / "csv"), "csv", None)
    assert_rows(spark.read.text(str(tmp_path / "csv")), [("d",), ("NaN",)])


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--where", "x/0 > 1"], 3, "DataRefused: where fails at a value ([DIVIDE_BY_ZERO]"),
        (
            ["--query", "select cast(s as int) as x, s from {source}"],
            3,
            "DataRefused: query fails at a value ([CAST_I",
        ),
        (["--query", "select 1 as `b c`"], 2, "WrongUse: a Delta table takes no column of this name"),
        (
            ["--query", "select 1 as a, 2 as A"],
            2,
            "WrongUse: two columns of a table must differ in more than case",
        ),
    ],
)
def test_sql_that_fails_ends_the_job_with_a_sentence(
    spark: SparkSession,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    sentence: str,
) -> None:
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    rows = frame(spark, (1, "a"), schema="x int, s string")
    rows.write.format("delta").save(source)
    rows.write.format("delta").save(target)
    argv = ["--source", source, "--target", target, *arguments]
    assert job_outcome(lambda: spark, Parameters, run, argv) == (code, None)
    assert capsys.readouterr().err.splitlines()[-1].startswith(sentence)
    assert_rows(held(spark, target), [(1, "a")])


def test_a_csv_holds_null_and_json_holds_line_breaks(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.sql("select cast(null as string) as t, 'b' as u")
    overwrite_files(rows, str(tmp_path / "csv"), "csv", None)
    assert_rows(spark.read.text(str(tmp_path / "csv")), [("t,u",), (",b",)])
    overwrite_files(spark.sql("select concat('a', char(10)) as t"), str(tmp_path / "json"), "json", None)
    assert_rows(spark.read.json(str(tmp_path / "json")), [("a\n",)])


def test_spark_alone_loses_the_old_files_when_it_fails(spark: SparkSession, tmp_path: Path) -> None:
    """The trap, and the same failure with the files of the job."""
    failing = spark.sql("select cast(raise_error('x') as string) as line from range(1)")
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    for folder in (plain, ours):
        spark.createDataFrame([("old",)], "line string").coalesce(1).write.text(str(folder))
    with pytest.raises(SPARK_ERRORS):
        failing.write.mode("overwrite").text(str(plain))
    assert not plain.exists() or listed(plain) == set()
    with pytest.raises(SPARK_ERRORS):
        overwrite_files(failing, str(ours), "text", None)
    assert_rows(spark.read.text(str(ours)), [("old",)])


def test_plain_files_are_read_and_overwritten_at_once(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "lines"
    lines = spark.createDataFrame([("a",), ("b",)], "line string")
    lines.write.parquet(str(folder))
    with pytest.raises(SPARK_ERRORS, match="FILE_NOT_EXIST"):
        spark.read.parquet(str(folder)).write.mode("overwrite").parquet(str(folder))
    assert listed(folder) == set(), "Spark alone has deleted what it was about to read"
    folder.rmdir()
    lines.write.parquet(str(folder))
    source = tmp_path / "source"
    spark.createDataFrame([("c",)], "line string").write.format("delta").save(str(source))
    report = run(
        spark,
        Parameters(
            source=str(source),
            target=str(folder),
            target_format="parquet",
            query="select * from {source} union all select * from {target} where line = 'b'",
        ),
    )
    assert report["replaced"] == "all"
    assert_rows(spark.read.parquet(str(folder)), [("b",), ("c",)])


def test_an_unreadable_file_of_the_target_is_not_lost_by_reading_the_others(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A session that skips corrupt files would replace the target by the rows of the others."""
    folder, source = tmp_path / "lines", tmp_path / "source"
    lines = spark.createDataFrame([("a",), ("b",)], "line string").coalesce(1)
    lines.write.parquet(str(folder))
    lines.write.format("delta").save(str(source))
    (folder / "part-corrupt.parquet").write_bytes(b"PAR1 and no more")
    params = Parameters(
        source=str(source), target=str(folder), target_format="parquet", query="select * from {target}"
    )
    before = listed(folder)
    with setting(spark, "spark.sql.files.ignoreCorruptFiles", "true"):
        assert spark.read.parquet(str(folder)).count() == 2
        with pytest.raises(JobFailed, match=r"part-corrupt\.parquet.*; nothing was overwritten"):
            run(spark, params)
    assert listed(folder) == before


ODD_TEXT = 'a "quoted", back\\slash '


@pytest.mark.parametrize("file_format", ["json", "csv"])
def test_a_target_of_lines_is_read_with_its_declared_schema(
    spark: SparkSession, tmp_path: Path, file_format: str
) -> None:
    """Spark's own reader would find other types: 007 as 7, a day as a text, 1.10 as 1.1."""
    folder = tmp_path / "days"
    source = tmp_path / "source"
    frame(
        spark, (1, "007", "1.10", "2024-03-01"), schema="id int, code string, price string, day string"
    ).write.format("delta").save(str(source))
    given = {
        "source": str(source),
        "target": str(folder),
        "target_format": file_format,
        "partition": {"day": "2024-03-01"},
    }
    odd = ODD_TEXT.replace("\\", "\\\\")
    values = f"id, code, cast(price as decimal(9, 2)) as price, '{odd}' as odd, date(day) as day"
    new = f"select {values} from {{source}}"
    run(spark, Parameters(**given, query=new))
    schema = "id int, code string, price decimal(9,2), odd string, day date"
    again = Parameters(
        **given,
        query=f"select * from {{target}} union all {new}",
        target_schema=schema,
    )
    run(spark, again)
    twice = Parameters(**given, query="select *, typeof(price) as type from {target}", target_schema=schema)
    row = (1, "007", Decimal("1.10"), ODD_TEXT, dt.date(2024, 3, 1), "decimal(9,2)")
    assert_rows(new_rows(spark, twice)[0], [row, row])

    file = next((folder / "day=2024-03-01").glob("part-*"))
    file.with_name(f".{file.name}.crc").unlink()
    file.write_text(file.read_text(encoding="utf-8").replace("1.10", "1.101"), encoding="utf-8")
    with pytest.raises(
        DataRefused, match="a value isn't of its type or would be changed by it: price; nothing"
    ):
        run(spark, again)
    (folder / "day=2024-03").mkdir()
    file.rename(folder / "day=2024-03" / file.name)
    with pytest.raises(DataRefused, match="its folder day=2024-03 is no value of the type date"):
        new_rows(spark, twice)


def test_a_target_of_lines_without_partitions_keeps_null_in_its_only_column(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = frame(spark, ("a",), (None,), schema="line string")
    for file_format in ("json", "csv"):
        overwrite_files(rows, str(tmp_path / file_format), file_format, None)
        params = Parameters(
            source=str(tmp_path / "source"),
            target=str(tmp_path / file_format),
            target_format=file_format,  # type: ignore[arg-type]
            query="select * from {target}",
            target_schema="line string",
        )
        assert_rows(data_overwrite._current_rows(spark, params), [("a",), (None,)])
    moments = spark.sql("select timestamp'2024-03-01 10:00:00.5Z' as at union all select null")
    overwrite_files(moments, str(tmp_path / "at"), "csv", None)
    lines = spark.read.text(str(tmp_path / "at")).where("value <> 'at'")
    assert_rows(lines, [("2024-03-01T10:00:00.500000Z",), ('""',)])


@pytest.mark.parametrize("died", ["before the swap", "in the swap", "after the swap"])
def test_a_run_that_died_is_repaired_by_the_next(tmp_path: Path, died: str) -> None:
    """The states a kill can leave, made by hand: two renames are too quick to be hit."""
    folder = Folder(tmp_path / "part=a")
    for place, content in ((folder.path, "old"), (folder.staging, "new")):
        place.mkdir()
        (place / "file").write_text(content, encoding="utf-8")
    if died != "before the swap":
        folder.path.rename(folder.replaced)
    if died == "after the swap":
        folder.staging.rename(folder.path)
    with folder.claimed():
        assert (folder.path / "file").read_text(encoding="utf-8") == (
            "new" if died == "after the swap" else "old"
        )
        with pytest.raises(JobFailed, match="another run is overwriting"), Folder(folder.path).claimed():
            pass
    assert listed(tmp_path) == {"part=a"}
    assert not folder.staging.exists()
    assert not folder.replaced.exists()


# --- killed, and as typed -------------------------------------------------------------------------------


@pytest.mark.kill
def test_a_killed_overwrite_leaves_the_version_before_and_the_retry_succeeds(
    spark: SparkSession, tmp_path: Path
) -> None:
    devices = Devices(spark, tmp_path)
    for day in ("2024-09-21", "2024-09-22"):
        devices.land(day, DAYS[day])
        devices.load(day)
    before = devices.rows()
    devices.land("2024-09-22", CORRECTED)
    given = devices.arguments("2024-09-22") | {"partition": '{"execution_date": "2024-09-22"}'}
    argv = [sys.executable, str(JOB), *(f"--{name}={value}" for name, value in given.items())]
    assert run_and_kill(argv, devices.target, TableState.DATA_WITHOUT_LOG) is TableState.DATA_WITHOUT_LOG
    assert_rows(devices.rows(), before)
    devices.load("2024-09-22")
    days = {"2024-09-21": DAYS["2024-09-21"], "2024-09-22": CORRECTED}
    assert_rows(devices.rows(), [(id, brand, day) for day, rows in days.items() for id, brand in rows])


def test_the_command_of_the_page(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAKEHOUSE_ROOT", str(tmp_path / "lakehouse"))
    devices = Devices(spark, tmp_path)
    devices.land("2024-09-22", CORRECTED)
    text = snippet("docs/idempotency.md", f"{THIS}test_the_command_of_the_page")
    command = shlex.split(os.path.expandvars(text.replace("\\\n", " ")))
    assert command[:2] == ["spark-submit", "python_jobs/idempotency/data_overwrite.py"]
    parameters, _ = parse_parameters(Parameters, command[2:])
    for _ in range(2):
        assert run(spark, parameters)["rows"] == 2
        assert_rows(devices.rows(), [(7, "nokia", "2024-09-22"), (8, "sony", "2024-09-22")])
