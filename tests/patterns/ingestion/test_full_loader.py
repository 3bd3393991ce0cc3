"""Full Loader on Delta: all of the dataset or what was there before, never a part."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

from python_jobs.ingestion import full_loader
from python_jobs.ingestion.full_loader import Parameters, run, version_tables
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from services.postgres import Database
from tests.support.failing_write import failing_at
from tests.support.other_commits import commit
from tests.support.rows import assert_rows
from tests.support.snippets import snippet
from tests.support.waiting import polled

THIS = "tests/patterns/ingestion/test_full_loader.py::"
SCHEMA = "type string not null, full_name string not null, version string not null"
DEVICES = [("lenovo", 'ThinkBook 16 Gen 6 (16" Intel) Laptop', "Android 14"), ("lg", "G2x", "Android 14")] + [
    ("galaxy", f"Galaxy S {number}", "Android 13") for number in range(48)
]
DEVICES_2 = [
    *(d for d in DEVICES if d[1] != "G2x"),
    ("mac", "MacBook Air", "macOS"),
    ("htc", "One", "Android 12"),
]
SIXTY = [*DEVICES, *(("ipad", f"iPad {number}", "1") for number in range(10))]


@dataclass
class Devices:
    """A landing folder with one file a logical date, and the public table."""

    spark: SparkSession
    folder: Path
    target: str

    def land(self, date: str, rows: list[tuple[str | None, ...]], extra: str = "") -> None:
        folder = self.folder / f"date={date}"
        folder.mkdir(parents=True, exist_ok=True)
        names = ("type", "full_name", "version")
        lines = [json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows]
        (folder / "devices.json").write_text("".join(lines) + extra, encoding="utf-8")

    def load(self, date: str, **parameters: Any) -> dict[str, Any]:
        return run(self.spark, self.parameters(date, **parameters))

    def parameters(self, date: str, **parameters: Any) -> Parameters:
        given = {
            "source": str(self.folder / f"date={date}"),
            "schema": SCHEMA,
            "key": ["full_name", "version"],
        }
        return Parameters(**{**given, "target": self.target, "version": date, **parameters})

    def rows(self) -> DataFrame:
        return self.spark.read.format("delta").load(self.target)

    def commits(self) -> int:
        return len(list(Path(self.target, "_delta_log").glob("*.json")))


@pytest.fixture
def devices(spark: SparkSession, tmp_path: Path) -> Devices:
    return Devices(spark, tmp_path / "landing", str(tmp_path / "bronze" / "devices"))


# --- versions -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class After:
    """What a load reported, what readers found then, and what they had counted meanwhile."""

    report: dict[str, Any]
    rows: list[tuple[Any, ...]]
    seen: list[object]


class Loads(Devices):
    """Loads of one target, looked at one after the other."""

    def load_and_look(self, date: str, **parameters: Any) -> After:
        report = self.load(date, **parameters)
        return After(report, [tuple(row) for row in self.rows().collect()], seen=[])

    def load_while_counted(self, date: str) -> After:
        """Load while a reader counts the rows again and again, also right before the new version is exposed."""
        with polled(lambda: self.rows().count(), held=(full_loader, "expose")) as seen:
            after = self.load_and_look(date)
        return replace(after, seen=seen)


# The stages of one story: each goes on from the one before, and stands above the tests that look at it.


@pytest.fixture(scope="module")
def loads(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Loads:
    root = tmp_path_factory.mktemp("loads")
    return Loads(spark, root / "landing", str(root / "bronze" / "devices"))


@pytest.fixture(scope="module")
def first(loads: Loads) -> After:
    loads.land("2024-01-01", DEVICES)
    return loads.load_and_look("2024-01-01")


@pytest.fixture(scope="module")
def same(loads: Loads, first: After) -> After:
    """Load the same files again."""
    return loads.load_and_look("2024-01-01")


@pytest.fixture(scope="module")
def second(loads: Loads, same: After) -> After:
    loads.land("2024-01-02", DEVICES_2)
    return loads.load_while_counted("2024-01-02")


def test_the_target_equals_the_newest_version_whatever_was_loaded_before(
    first: After, same: After, second: After
) -> None:
    report = first.report
    assert (report["loaded"], report["exposed"], report["rows"]) == (True, True, 50)
    assert report["previous_rows"] == 0
    assert_rows(first.rows, DEVICES)
    again = same.report
    assert (again["loaded"], again["exposed"], again["rows"]) == (False, False, 50), "they aren't even read"
    assert again["table_version"] is None
    assert_rows(same.rows, DEVICES)
    assert second.report["rows"] == 51
    assert_rows(second.rows, DEVICES_2)
    assert ("lg", "G2x", "Android 14") not in second.rows


def test_readers_see_the_version_before_or_the_new_one(second: After) -> None:
    assert second.seen[-1] == 51
    assert set(second.seen) <= {50, 51}


@pytest.fixture(scope="module")
def second_again(loads: Loads, second: After) -> After:
    """Load the exposed version again, of other files."""
    loads.land("2024-01-02", SIXTY)
    return loads.load_while_counted("2024-01-02")


def test_the_exposed_version_can_be_loaded_again(second_again: After) -> None:
    assert second_again.report["exposed"]
    assert second_again.seen[-1] == 60
    assert set(second_again.seen) <= {51, 60}
    assert_rows(second_again.rows, SIXTY)


def test_exposing_an_older_version_takes_readers_back_as_restore_does(
    loads: Loads, second_again: After
) -> None:
    assert loads.load("2024-01-01", step="expose")["exposed_version"] == "20240101"
    assert_rows(loads.rows(), DEVICES)
    loads.spark.sql(f"restore table delta.`{loads.target}` to version as of 1").collect()
    assert_rows(loads.rows(), DEVICES_2)
    # After another writer's commit nothing is taken for exposed.
    assert loads.load("2024-01-02", step="expose")["exposed"]
    assert_rows(loads.rows(), SIXTY)


def test_a_backfill_writes_the_version_of_its_logical_date_and_exposes_nothing(
    loads: Loads, second_again: After
) -> None:
    loads.land("2023-12-31", DEVICES[:30])
    backfill = loads.load("2023-12-31")
    assert backfill["version_table"] == f"{loads.target}_20231231"
    assert (backfill["exposed"], backfill["exposed_version"]) == (False, "20240102")
    assert_rows(loads.spark.read.format("delta").load(f"{loads.target}_20231231"), DEVICES[:30])
    assert_rows(loads.rows(), SIXTY)


def test_old_versions_are_dropped_but_not_the_exposed_one_nor_strangers(devices: Devices) -> None:
    devices.spark.range(1).write.format("delta").save(f"{devices.target}_20230101")
    for day in (1, 2, 3, 4):
        devices.land(f"2024-01-0{day}", DEVICES)
        devices.load(f"2024-01-0{day}", step="load", keep_versions=2)  # loading alone drops nothing
    report = devices.load("2024-01-01", step="expose", keep_versions=2)
    assert report["dropped_versions"] == ["20240102"]
    assert sorted(version_tables(devices.spark, devices.target)) == [
        "20230101", "20240101", "20240103", "20240104",
    ]  # fmt: skip
    with pytest.raises(WrongUse, match=r"20240102 of .* is not there; kept are 20230101, 20240101, 20240103"):
        devices.load("2024-01-02", step="expose")


def test_a_table_that_only_has_a_version_s_name_is_never_replaced(devices: Devices) -> None:
    devices.land("2024-01-01", DEVICES)
    stranger = f"{devices.target}_20240101"
    devices.spark.range(1).write.format("delta").save(stranger)
    with pytest.raises(
        WrongUse, match=r"devices_20240101 exists and was not created by this job: rename or drop"
    ):
        devices.load("2024-01-01")
    assert_rows(devices.spark.read.format("delta").load(stranger), [(0,)])
    # One that was corrected and optimized is still ours.
    shutil.rmtree(stranger)
    devices.load("2024-01-01")
    devices.spark.sql(f"delete from delta.`{stranger}` where version is null")
    devices.spark.sql(f"optimize delta.`{stranger}`")
    devices.land("2024-01-01", DEVICES_2)
    assert devices.load("2024-01-01")["loaded"]


def test_a_table_of_the_catalog(devices: Devices) -> None:
    devices.target = "full_loader_devices"
    devices.land("2024-01-01", DEVICES)
    devices.land("2024-01-02", DEVICES_2)
    devices.load("2024-01-01")
    devices.load("2024-01-02")
    assert_rows(devices.spark.table("full_loader_devices"), DEVICES_2)
    devices.load("2024-01-01", step="expose")
    assert_rows(devices.spark.table("full_loader_devices"), DEVICES)
    assert sorted(version_tables(devices.spark, "full_loader_devices")) == ["20240101", "20240102"]


def test_another_schema_replaces_the_one_before(devices: Devices) -> None:
    devices.land("2024-01-01", DEVICES)
    devices.load("2024-01-01")
    devices.land("2024-01-02", DEVICES)
    devices.load("2024-01-02", schema="full_name string not null, type string", key=["full_name"])
    assert devices.rows().columns == ["full_name", "type"]
    devices.load("2024-01-01", step="expose")
    assert devices.rows().columns == ["type", "full_name", "version"]


def test_twice_the_rows_with_the_same_settings(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    collect = ClassicDataFrame.collect

    def counting(rows: ClassicDataFrame) -> Any:
        collected.append(len(result := collect(rows)))
        return result

    monkeypatch.setattr(ClassicDataFrame, "collect", counting)
    for day, copies in (("2024-01-01", 2_000), ("2024-01-02", 4_000)):
        devices.land(day, [("galaxy", f"Galaxy {number}", "1") for number in range(copies)])
        assert devices.load(day)["rows"] == copies
    assert 0 < max(collected) <= 50  # entries of a history, never the dataset


# --- what is refused ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exposed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Devices:
    """Return devices with 50 rows exposed; tests of refusals load 2024-01-02 and leave the public table alone."""
    root = tmp_path_factory.mktemp("exposed")
    devices = Devices(spark, root / "landing", str(root / "bronze" / "devices"))
    devices.land("2024-01-01", DEVICES)
    devices.load("2024-01-01")
    return devices


@pytest.mark.parametrize(
    ("rows", "extra", "sentence"),
    [
        (DEVICES, '{"type": "lg", \n', r"cannot read .*devices\.json"),
        (DEVICES, '{"type": ["a", ]}\n', r"cannot read .*devices\.json"),
        (
            [*DEVICES, DEVICES[1]],
            "",
            '1 keys more than once, such as {"full_name":"G2x","version":"Android 14"}',
        ),
        ([*DEVICES, ("lg", None, "Android 14")], "", "1 rows with NULL in full_name;"),
        ([*DEVICES, (None, "G3", "Android 14")], "", "1 rows with NULL in type;"),
        (DEVICES[:24], "", r"24 rows, exposed are 50 and allowed is a drop of 50 % \(max_shrink_percent\)"),
        ([], "", r"0 rows, allowed are 1 or more \(min_rows\)"),
    ],
    ids=["cut", "no json", "duplicate key", "NULL in key", "NULL", "shrunken", "empty"],
)
def test_a_bad_dataset_fails_the_load_and_the_version_before_stays(
    exposed: Devices, rows: list[tuple[str | None, ...]], extra: str, sentence: str
) -> None:
    exposed.land("2024-01-02", rows, extra)
    with pytest.raises(DataRefused, match=sentence) as refused:
        exposed.load("2024-01-02")
    assert "\n" not in str(refused.value)
    assert_rows(exposed.rows(), DEVICES)
    assert exposed.commits() == 1


def test_what_is_exposed_is_known_behind_any_number_of_upkeep_commits(
    spark: SparkSession, tmp_path: Path
) -> None:
    devices = Devices(spark, tmp_path / "landing", str(tmp_path / "devices"))
    devices.land("2024-01-02", DEVICES)
    assert devices.load("2024-01-02")["exposed"]
    commit(devices.target, 130, "VACUUM END")
    again = devices.load("2024-01-02")
    assert (again["loaded"], again["exposed"]) == (False, False), "it is there already"
    commit(devices.target, 1)
    assert devices.load("2024-01-02")["exposed"], "another program's write"


def test_a_refused_version_is_not_exposed_later_either(exposed: Devices) -> None:
    exposed.land("2024-01-02", [*DEVICES, DEVICES[1]])
    for step in ("load_and_expose", "expose"):
        with pytest.raises(DataRefused, match="more than once"):
            exposed.load("2024-01-02", step=step)


def test_without_the_declarations_the_same_datasets_are_loaded(devices: Devices) -> None:
    loose = {"schema": "type string, full_name string, version string", "key": None}
    devices.land("2024-01-01", [*DEVICES, DEVICES[1], (None, None, "Android 14")])
    assert devices.load("2024-01-01", **loose)["rows"] == 52
    devices.land("2024-01-02", DEVICES[:10])
    assert devices.load("2024-01-02", **loose, max_shrink_percent=90)["rows"] == 10
    devices.land("2024-01-03", [])
    assert devices.load("2024-01-03", **loose, max_shrink_percent=100, min_rows=0)["rows"] == 0
    assert devices.rows().isEmpty()
    assert devices.load("2024-01-01", step="expose", **loose)["rows"] == 52


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("type;full_name;version\nlg;G2x\n", "cannot read"),
        ("type;full_name;version\nlg;G2x;Android 14;more\n", "cannot read"),
        ("type;version;full_name\nlg;Android 14;G2x\n", "cannot read"),
    ],
    ids=["too few columns", "too many", "another order"],
)
def test_csv_that_does_not_fit_the_schema_is_refused(devices: Devices, content: str, sentence: str) -> None:
    devices.folder.mkdir()
    (devices.folder / "devices.csv").write_text(content)
    with pytest.raises(DataRefused, match=sentence):
        devices.load("2024-01-01", source=str(devices.folder / "devices.csv"), format="csv", delimiter=";")
    assert not Path(devices.target).exists()


def test_one_csv_file_with_quotes_and_a_file_with_its_header_only(devices: Devices) -> None:
    devices.folder.mkdir()
    file = devices.folder / "devices.csv"
    file.write_text('type;full_name;version\nlenovo;"ThinkBook 16 Gen 6 (16"" Intel) Laptop";Android 14\n')
    csv = {"source": str(file), "format": "csv", "delimiter": ";"}
    devices.load("2024-01-01", **csv)
    assert_rows(devices.rows(), DEVICES[:1])
    file.write_text("type;full_name;version\n")
    with pytest.raises(DataRefused, match="0 rows, allowed are 1 or more"):
        devices.load("2024-01-02", **csv)
    devices.load(
        "2024-01-02", **csv, min_rows=0, max_shrink_percent=100
    )  # the text's design: 0 rows are exposed
    assert devices.rows().isEmpty()
    devices.load("2024-01-01", **csv, step="expose")
    assert_rows(devices.rows(), DEVICES[:1])


def test_a_dataset_that_has_not_arrived(devices: Devices) -> None:
    with pytest.raises(NotReady, match="holds no file; nothing was loaded"):
        devices.load("2024-01-01")
    (devices.folder / "date=2024-01-01").mkdir(parents=True)
    (devices.folder / "date=2024-01-01" / "_SUCCESS").touch()
    with pytest.raises(NotReady, match="holds no file"):
        devices.load("2024-01-01")
    assert not Path(devices.target).exists()


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"version": "2024-01-01T10"}, "a version is a day such as 2024-01-01"),
        ({"version": "yesterday"}, "'yesterday' is not a time"),
        ({"min_rows": -1}, "min_rows must be 0 or more"),
        ({"max_shrink_percent": 101}, "between 0 and 100"),
        ({"keep_versions": 1}, "at least 2"),
        ({"table": "devices"}, "table belongs to format postgres"),
        ({"format": "postgres"}, "which needs it"),
        ({"format": "postgres", "table": "devices"}, "needs user"),
        (
            {"format": "postgres", "table": "d", "user": "u", "source": "jdbc:postgresql://h/d?password=x"},
            "must not hold",
        ),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_read(
    parameters: dict[str, Any], sentence: str
) -> None:
    given = {"source": "landing", "target": "bronze/devices", "version": "2024-01-01", "schema": SCHEMA}
    with pytest.raises(WrongUse, match=sentence):
        Parameters(**given | parameters)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"schema": "type strin"}, "schema must read like"),
        ({"schema": "string"}, "schema must read like"),
        ({"schema": ""}, "schema must read like .*: '' names no columns"),
        ({"key": ["serial"]}, "key names serial, but the schema has type, full_name, version"),
    ],
)
def test_a_schema_that_is_none(devices: Devices, parameters: dict[str, Any], sentence: str) -> None:
    devices.land("2024-01-01", DEVICES)
    with pytest.raises(WrongUse, match=sentence):
        devices.load("2024-01-01", **parameters)


def test_a_name_that_no_table_can_have(devices: Devices) -> None:
    devices.land("2024-01-01", DEVICES)
    for target in ("b c", "a,b"):
        with pytest.raises(
            WrongUse, match=f"'{target}_20240101' is no name of a table; use a path with '/', or"
        ):
            devices.load("2024-01-01", target=target)


# --- PostgreSQL -----------------------------------------------------------------------------------------


@pytest.mark.postgres
def test_a_table_of_postgresql(devices: Devices, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    database.execute("create table devices (type text, full_name text, version text, serial int)")
    with database.connect() as connection, connection.cursor().copy("copy devices from stdin") as copy:
        for row in DEVICES:
            copy.write_row([*row, 1])
    monkeypatch.setenv("DEVICES_PASSWORD", database.password)
    source = {"source": database.jdbc_url, "format": "postgres", "table": "devices", "user": database.user}
    pointer = {"password_env": "DEVICES_PASSWORD"}
    assert devices.load("2024-01-01", **source, **pointer)["rows"] == 50
    assert_rows(devices.rows(), DEVICES)

    database.execute("delete from devices where full_name = 'G2x'")
    again = devices.load("2024-01-01", **source, **pointer)  # a database has no identity: it is read again
    assert (again["loaded"], again["rows"]) == (True, 49)

    monkeypatch.setenv("DEVICES_PASSWORD", "not-the-password")
    with pytest.raises(JobFailed, match="password authentication failed") as failure:
        devices.load("2024-01-02", **source, **pointer)
    assert "not-the-password" not in str(failure.value)
    monkeypatch.setenv("DEVICES_PASSWORD", database.password)
    with pytest.raises(WrongUse, match="the source has no column colour"):
        devices.load("2024-01-02", **source, **pointer, schema="colour string", key=None)
    assert devices.rows().count() == 49


# --- interrupted, and as typed --------------------------------------------------------------------------


@pytest.mark.parametrize("dies_at", ["version", "public"])
def test_a_load_that_ends_before_a_commit_leaves_the_version_before_and_the_next_one_completes(
    devices: Devices, dies_at: str
) -> None:
    devices.land("2024-01-01", DEVICES)
    devices.load("2024-01-01")
    devices.land("2024-01-02", DEVICES_2)
    table = devices.target if dies_at == "public" else f"{devices.target}_20240102"
    with failing_at(table, full_loader, "write_once", KeyboardInterrupt()):
        devices.load("2024-01-02")
    assert_rows(devices.rows(), DEVICES)
    assert devices.load("2024-01-02")["exposed"]
    assert_rows(devices.rows(), DEVICES_2)


def test_the_command_of_the_page(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAKEHOUSE_ROOT", str(tmp_path / "lakehouse"))
    devices = Devices(
        spark, tmp_path / "landing" / "devices", str(tmp_path / "lakehouse/bronze/bronze_devices")
    )
    devices.land("2024-01-01", DEVICES)
    text = snippet("docs/ingestion.md", f"{THIS}test_the_command_of_the_page")
    command = shlex.split(os.path.expandvars(text.replace("\\\n", " ")))
    assert command[:2] == ["spark-submit", "python_jobs/ingestion/full_loader.py"]
    parameters, _ = parse_parameters(Parameters, command[2:])
    assert run(spark, parameters)["exposed"]
    assert_rows(devices.rows(), DEVICES)
