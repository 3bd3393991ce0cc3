"""Full Loader into PostgreSQL: the view is there at every moment, and shows all of a version."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest

from python_jobs.ingestion import full_loader_postgres
from python_jobs.ingestion.full_loader_postgres import Parameters, load, run
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.postgres.relations import Connection
from services.postgres import Database
from tests.support.rows import assert_rows
from tests.support.waiting import eventually, polled_count

pytestmark = pytest.mark.postgres

COLUMNS = (
    "type varchar(15) not null, full_name varchar(50) not null, version varchar(40) not null, "
    "primary key (full_name, version)"
)
DEVICES = [("lg", "G2x", "Android 14"), ("lenovo", 'ThinkBook 16 Gen 6 (16" Intel) Laptop', "Android 14")] + [
    ("galaxy", f"Galaxy S {number}", "Android 13") for number in range(48)
]
DEVICES_2 = [
    *DEVICES[1:],
    ("mac", "MacBook Pro (13-inch, M1, 2020)", "macOS Sonoma"),
    ("htc", "One", "Android 12"),
]


class Devices:
    def __init__(self, database: Database, folder: Path) -> None:
        self.database, self.file = database, folder / "devices.csv"

    def write(self, rows: list[tuple[str, ...]], header: str = "type;full_name;version") -> None:
        quoted = (
            ";".join('"' + value.replace('"', '""') + '"' if value else "" for value in row) for row in rows
        )
        self.file.write_text("\n".join([header, *quoted]) + "\n", encoding="utf-8")

    def parameters(self, date: str, **parameters: Any) -> Parameters:
        given = {"source": str(self.file), "target": "devices", "version": date, "columns": COLUMNS}
        return Parameters(**given | parameters)

    def run(self, date: str, **parameters: Any) -> dict[str, Any]:
        return run(self.parameters(date, **parameters), self.database.connect)

    def query(self, text: str) -> list[tuple[Any, ...]]:
        return self.database.rows(text)

    def tables(self) -> list[str]:
        return [
            row[0]
            for row in self.query("select tablename from pg_tables where schemaname = 'public' order by 1")
        ]


@pytest.fixture
def devices(database: Database, tmp_path: Path) -> Devices:
    devices = Devices(database, tmp_path)
    devices.write(DEVICES)
    devices.run("2024-01-01")
    return devices


def test_the_view_shows_the_newest_version_exactly(devices: Devices) -> None:
    assert_rows(devices.query("select * from devices"), DEVICES)
    devices.run("2024-01-01")
    assert_rows(devices.query("select * from devices"), DEVICES)
    devices.write(DEVICES_2)
    assert devices.run("2024-01-02") == {
        "source": str(devices.file), "target": "devices", "version": "20240102",
        "rows": 51, "previous_rows": 50, "dropped_versions": [], "exposed": True,
    }  # fmt: skip
    assert_rows(devices.query("select * from devices"), DEVICES_2)
    assert devices.tables() == ["devices_20240101", "devices_20240102"]


def test_readers_never_miss_the_view_nor_see_a_part(devices: Devices) -> None:
    sixty = [*DEVICES, *(("ipad", f"iPad {number}", "1") for number in range(10))]
    with polled_count(devices.database, "devices") as seen:
        for _ in range(5):
            devices.write(sixty)
            devices.run("2024-01-02")
            devices.run("2024-01-01", step="expose")
        devices.write(sixty)
        devices.run("2024-01-01")  # the exposed version loaded again, its old table dropped
    assert set(seen) == {50, 60}


def test_the_view_is_dropped_and_recreated_in_one_transaction_for_a_removed_column(devices: Devices) -> None:
    devices.database.execute(
        "create role reader_of_the_test",
        "grant select on devices to reader_of_the_test",
        "grant select on devices to public",
    )
    try:
        devices.write([row[:2] for row in DEVICES], "type;name")
        with polled_count(devices.database, "devices") as seen:
            devices.run("2024-01-02", columns="type text, name text")
            devices.run("2024-01-01", step="expose")
            devices.run("2024-01-02", step="expose", columns="type text, name text")
        assert set(seen) == {50}
        assert devices.query("select name from devices where name = 'G2x'") == [("G2x",)]
        can_read = "select has_table_privilege('reader_of_the_test', 'devices', 'select')"
        assert devices.query(can_read) == [(True,)]
    finally:
        devices.database.execute("drop owned by reader_of_the_test", "drop role reader_of_the_test")


def test_replacing_alone_can_not_remove_a_column(devices: Devices) -> None:
    with pytest.raises(psycopg.errors.InvalidTableDefinition, match="cannot drop columns from view"):
        devices.database.execute("create or replace view devices as select type from devices_20240101")


def test_a_view_on_the_view_keeps_its_columns(devices: Devices) -> None:
    devices.database.execute("create view phones as select full_name from devices")
    devices.write([row[:2] for row in DEVICES], "type;name")
    with pytest.raises(JobFailed, match="that others need: view phones depends on view devices"):
        devices.run("2024-01-02", columns="type text, name text")
    assert_rows(devices.query("select * from devices"), DEVICES)


@pytest.mark.parametrize(
    ("rows", "header", "sentence"),
    [
        ([*DEVICES, ("lg", "G3")], "type;full_name;version", 'missing data for column "version"'),
        ([*DEVICES, DEVICES[0]], "type;full_name;version", "duplicate key value violates unique constraint"),
        ([*DEVICES, ("", "G3", "1")], "type;full_name;version", 'null value in column "type"'),
        (DEVICES, "type;version;full_name", "column name mismatch in header line"),
        (DEVICES[:24], "type;full_name;version", ".* has 24 rows, allowed are 1 or more .* 50 % from 50"),
        ([], "type;full_name;version", "has 0 rows"),
    ],
    ids=["malformed", "duplicate key", "NULL", "header", "shrunken", "empty"],
)
def test_a_bad_file_leaves_the_version_before(
    devices: Devices, rows: list[tuple[str, ...]], header: str, sentence: str
) -> None:
    devices.write(rows, header)
    with pytest.raises(DataRefused, match=sentence):
        devices.run("2024-01-02")
    assert_rows(devices.query("select * from devices"), DEVICES)
    devices.write(DEVICES_2)
    devices.run("2024-01-02")  # nothing needs cleaning
    assert_rows(devices.query("select * from devices"), DEVICES_2)


def test_an_empty_file_is_exposed_when_that_is_allowed_and_taken_back(devices: Devices) -> None:
    devices.write([])
    devices.run("2024-01-02", min_rows=0, max_shrink_percent=100)
    assert devices.query("select count(*) from devices") == [(0,)]
    devices.run("2024-01-01", step="expose")
    assert_rows(devices.query("select * from devices"), DEVICES)


def test_a_load_that_loses_its_connection_leaves_no_table_behind(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.write(DEVICES_2)
    with devices.database.connect() as connection:
        process = connection.info.backend_pid
        write = psycopg.Copy.write

        def write_and_die(copy: psycopg.Copy, data: bytes) -> None:
            write(copy, data)
            devices.query(f"select pg_terminate_backend({process})")

        monkeypatch.setattr(psycopg.Copy, "write", write_and_die)
        with pytest.raises(psycopg.OperationalError):
            load(connection, devices.parameters("2024-01-02"))
    monkeypatch.undo()
    assert devices.tables() == ["devices_20240101"]
    assert_rows(devices.query("select * from devices"), DEVICES)
    assert devices.run("2024-01-02")["rows"] == 51


def test_of_two_runs_at_once_the_second_waits_for_the_first(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.write(DEVICES_2)
    reports: list[dict[str, Any]] = []
    second = threading.Thread(target=lambda: reports.append(devices.run("2024-01-02")))

    def load_when_the_other_waits(connection: Connection, parameters: Parameters) -> int:
        monkeypatch.undo()
        second.start()
        eventually(
            lambda: devices.query("select 1 from pg_locks where locktype = 'advisory' and not granted")
        )
        return load(connection, parameters)

    monkeypatch.setattr(full_loader_postgres, "load", load_when_the_other_waits)
    reports.append(devices.run("2024-01-02"))
    second.join()
    assert [report["rows"] for report in reports] == [51, 51]
    assert devices.tables() == ["devices_20240101", "devices_20240102"]
    assert_rows(devices.query("select * from devices"), DEVICES_2)


def test_loading_makes_no_reader_wait_and_is_no_exposure(devices: Devices) -> None:
    devices.write(DEVICES_2)
    with devices.database.connect(autocommit=False) as reader:
        reader.execute("select count(*) from devices")  # holds the view until its transaction ends
        with devices.database.connect() as connection:
            assert load(connection, devices.parameters("2024-01-02")) == 51
        with pytest.raises(JobFailed, match="was in use by long queries for 2 tries"):
            devices.run("2024-01-02", step="expose", lock_seconds=0.1, tries=2)
    assert_rows(devices.query("select * from devices"), DEVICES)
    devices.run("2024-01-02", step="expose")
    assert_rows(devices.query("select * from devices"), DEVICES_2)


def test_old_versions_are_dropped_and_never_the_exposed_one(devices: Devices) -> None:
    for day in ("2024-01-02", "2024-01-03"):
        devices.run(day)
    report = devices.run("2024-01-01", step="expose", keep_versions=2)
    assert report["dropped_versions"] == []
    devices.run("2024-01-04")
    assert devices.run("2024-01-01", step="expose", keep_versions=2)["dropped_versions"] == ["20240102"]
    with pytest.raises(WrongUse, match="version 20240102 of devices is not there"):
        devices.run("2024-01-02", step="expose")


def test_relations_of_another_owner_stay_and_are_no_versions(devices: Devices) -> None:
    devices.database.execute(
        "create table devices_20200101 as select 'mine' as owner",
        "create table devices_20240109__loaded as select 'mine' as owner",
        "create view phones as select owner from devices_20200101",
        "create table tablets as select 'mine' as owner",
    )
    before = devices.tables()
    devices.run("2024-01-02")
    assert devices.run("2024-01-03", keep_versions=2)["dropped_versions"] == ["20240101"]
    for day, others, name in (
        ("2020-01-01", {}, "devices_20200101"),
        ("2020-01-01", {"step": "expose"}, "devices_20200101"),
        ("2024-01-09", {}, "devices_20240109__loaded"),
        ("2024-01-04", {"target": "phones"}, "phones"),
        ("2024-01-04", {"target": "tablets"}, "tablets"),
    ):
        with pytest.raises(WrongUse, match=f"^{name} exists and was not created by this program"):
            devices.run(day, **others)
    assert_rows(devices.query("select * from devices"), DEVICES)
    assert {*devices.tables()} >= {*before} - {"devices_20240101"}
    mine = "select owner from {}"
    for name in ("devices_20200101", "devices_20240109__loaded", "phones", "tablets"):
        assert devices.query(mine.format(name)) == [("mine",)]


def test_what_is_not_there_or_makes_no_sense(devices: Devices) -> None:
    with pytest.raises(NotReady, match="there is no file"):
        devices.run("2024-01-02", source="nowhere.csv")
    with pytest.raises(WrongUse, match="columns is no list for create table"):
        devices.run("2024-01-02", columns="type varchar(")
    for wrong in (
        {"target": "a.b.c"},
        {"version": "today"},
        {"version": "2024-W01-1"},
        {"version": "20240101"},
        {"keep_versions": 1},
        {"max_shrink_percent": -1},
    ):
        with pytest.raises(WrongUse):
            devices.parameters(
                **{"date": "2024-01-02"} | wrong if "version" not in wrong else {"date": wrong["version"]}
            )
