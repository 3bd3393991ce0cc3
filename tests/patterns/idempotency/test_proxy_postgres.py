"""Proxy on PostgreSQL: versions that the loading role can't touch any more, behind one view."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from python_jobs.idempotency import proxy_postgres
from python_jobs.idempotency.proxy_postgres import Parameters, run
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from services.postgres import Database
from tests.support.rows import assert_rows
from tests.support.snippets import snippets
from tests.support.waiting import eventually

pytestmark = pytest.mark.postgres
HERE = "tests/patterns/idempotency/test_proxy_postgres.py"

COLUMNS = (
    "type text not null, full_name text not null, version text not null, primary key (full_name, version)"
)
FIFTY = [("galaxy", f"Galaxy S {number}", "13") for number in range(50)]
FOUR = [("mac", f"MacBook {number}", "14") for number in range(4)]
FIRST, SECOND = "2024-01-01T10:15:00", "2024-01-01T11:00:00"
OLD = "devices_internal_20240101_101500"


class Devices:
    """A loading role without privileges beyond those of setup, and the administrator beside it."""

    def __init__(self, admin: Database, loader: Database, folder: Path) -> None:
        self.admin, self.loader, self.file = admin, loader, folder / "devices.csv"

    def load(self, started_at: str, rows: list[tuple[str, ...]], **others: Any) -> dict[str, Any]:
        header = others.pop("header", "type;full_name;version")
        self.file.write_text("\n".join([header, *map(";".join, rows)]) + "\n", encoding="utf-8")
        given = {"target": "devices", "source": str(self.file), "columns": COLUMNS, "started_at": started_at}
        return run(Parameters(**given | others), self.loader.connect)

    def expose(self, version: str | None = None, **others: Any) -> dict[str, Any]:
        return run(Parameters("devices", step="expose", version=version, **others), self.loader.connect)

    def query(self, text: str) -> list[tuple[Any, ...]]:
        return self.admin.rows(text)

    def tables(self) -> list[str]:
        return [name for (name,) in self.query("select tablename from pg_tables where schemaname = 'public'")]

    def checksum(self, table: str) -> Any:
        return self.query(f"select md5(string_agg(t::text, '|' order by t::text)) from {table} as t")


@pytest.fixture
def devices(database: Database, tmp_path: Path) -> Iterator[Devices]:
    database.execute(
        "create role custodian_of_the_test nologin",
        "create role loader_of_the_test login password 'loader'",
        "create role reader_of_the_test nologin",
    )
    loader = Database(database.host, database.port, "loader_of_the_test", "loader", database.database)
    try:
        setup = Parameters(
            "devices", step="setup", custodian="custodian_of_the_test", loader="loader_of_the_test"
        )
        run(setup, database.connect)
        yield Devices(database, loader, tmp_path)
    finally:
        for role in ("loader", "custodian", "reader"):
            database.execute(f"drop owned by {role}_of_the_test cascade")
        for role in ("custodian", "loader", "reader"):
            database.execute(f"drop role {role}_of_the_test")


def test_each_load_is_a_table_and_the_view_shows_the_newest(devices: Devices) -> None:
    assert devices.load(FIRST, FIFTY) == {
        "target": "devices", "version": "20240101_101500", "rows": 50, "exposed_version": "20240101_101500",
    }  # fmt: skip
    assert_rows(devices.query("select * from devices"), FIFTY)
    before = devices.checksum(OLD)
    devices.load(SECOND, FOUR)
    assert_rows(devices.query("select * from devices"), FOUR)
    assert devices.checksum(OLD) == before
    assert sorted(devices.tables()) == [OLD, "devices_internal_20240101_110000", "devices_versions"]


def test_a_rerun_writes_a_table_of_its_own_and_two_of_one_second_do_not(devices: Devices) -> None:
    devices.load(FIRST, FIFTY)
    devices.load(SECOND, FIFTY)
    assert len(devices.tables()) == 3
    before = devices.checksum(OLD)
    with pytest.raises(JobFailed, match="there is a version 20240101_101500 of devices already"):
        devices.load(FIRST, FOUR)
    assert devices.checksum(OLD) == before


def test_of_two_that_begin_in_one_second_the_later_fails_with_a_sentence(devices: Devices) -> None:
    failures: list[str] = []

    def load() -> None:
        with pytest.raises(JobFailed) as failure:
            devices.load(FIRST, FOUR)
        failures.append(str(failure.value))

    second = threading.Thread(target=load)
    with devices.loader.connect() as first, first.transaction():
        first.execute(f"create table {OLD} (id int)".encode())
        second.start()
        eventually(lambda: devices.query("select 1 from pg_locks where not granted"))
    second.join()
    assert "there is a version 20240101_101500 of devices already, by a run of the same second" in failures[0]


@pytest.mark.parametrize(
    ("rows", "others", "sentence"),
    [
        ([*FOUR, FOUR[0]], {}, "duplicate key value"),
        ([*FOUR, ("mac",)], {}, 'missing data for column "full_name"'),
        ([], {}, "has 0 rows, allowed are 1 or more"),
    ],
    ids=["duplicate", "malformed", "empty"],
)
def test_a_load_that_fails_midway_leaves_nothing(
    devices: Devices, rows: list[tuple[str, ...]], others: dict[str, Any], sentence: str
) -> None:
    devices.load(FIRST, FIFTY)
    with pytest.raises(DataRefused, match=sentence):
        devices.load(SECOND, rows, **others)
    assert sorted(devices.tables()) == [OLD, "devices_versions"]
    assert_rows(devices.query("select * from devices"), FIFTY)


def test_a_load_that_dies_leaves_nothing(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.load(FIRST, FIFTY)
    create = proxy_postgres.create_from_csv

    def create_and_die(connection: psycopg.Connection[Any], *arguments: Any, **named: Any) -> int:
        create(connection, *arguments, **named)
        devices.query(f"select pg_terminate_backend({connection.info.backend_pid})")
        return 50

    monkeypatch.setattr(proxy_postgres, "create_from_csv", create_and_die)
    with pytest.raises(JobFailed, match=r"PostgreSQL: .*; run again"):
        devices.load(SECOND, FOUR)
    monkeypatch.undo()
    assert sorted(devices.tables()) == [OLD, "devices_versions"]
    assert_rows(devices.query("select * from devices"), FIFTY)


def test_an_empty_load_is_published_if_that_is_allowed(devices: Devices) -> None:
    devices.load(FIRST, FIFTY)
    devices.load(SECOND, [], min_rows=0)
    assert devices.query("select count(*) from devices") == [(0,)]


def test_a_view_that_could_not_be_changed_is_changed_by_that_step_alone(devices: Devices) -> None:
    devices.load(FIRST, FIFTY)
    devices.load(SECOND, FOUR, step="load")
    with devices.admin.connect(autocommit=False) as reader:
        reader.execute("select count(*) from devices")
        with pytest.raises(
            JobFailed, match="in use by long queries; it stays as it is, run step expose again"
        ):
            devices.expose(lock_seconds=0.1)
    assert_rows(devices.query("select * from devices"), FIFTY)
    devices.expose()
    assert_rows(devices.query("select * from devices"), FOUR)
    assert len(devices.tables()) == 3


@pytest.mark.parametrize(
    "statement",
    [
        f"insert into {OLD} values ('a', 'b', 'c')",
        f"update {OLD} set type = 'x'",
        f"delete from {OLD}",
        f"truncate {OLD}",
        f"drop table {OLD}",
        f"alter table {OLD} owner to loader_of_the_test",
        "set role custodian_of_the_test",
        "delete from devices_versions",
        "insert into devices_versions values ('20990101_000000', 1, now())",
    ],
)
def test_the_loading_role_can_not_touch_a_version(devices: Devices, statement: str) -> None:
    devices.load(FIRST, FIFTY)
    with devices.loader.connect() as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute(statement.encode())
    with devices.loader.connect() as connection:
        connection.execute("create table something_new (id int)")


def test_revoking_alone_does_not_keep_an_owner_from_dropping(devices: Devices) -> None:
    devices.loader.execute("create table mine (id int)", "revoke all on mine from loader_of_the_test")
    with devices.loader.connect() as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("insert into mine values (1)")
    devices.loader.execute("drop table mine")
    assert "mine" not in devices.tables()


def test_going_back_is_one_step_and_copies_nothing(devices: Devices) -> None:
    devices.load(FIRST, FIFTY)
    devices.load(SECOND, FOUR)
    assert devices.expose("20240101_101500") == {"target": "devices", "exposed_version": "20240101_101500"}
    assert_rows(devices.query("select * from devices"), FIFTY)
    assert len(devices.tables()) == 3
    with pytest.raises(
        WrongUse, match="no version 20230101_000000 of devices; there are 20240101_101500, 2024"
    ):
        devices.expose("20230101_000000")


def test_grants_stay_when_a_column_goes(devices: Devices) -> None:
    devices.load(FIRST, FIFTY)
    devices.loader.execute("grant select on devices to reader_of_the_test")
    narrow = {"header": "type;full_name", "columns": "type text, full_name text"}
    devices.load(SECOND, [row[:2] for row in FOUR], **narrow)
    assert_rows(devices.query("select full_name from devices"), [(row[1],) for row in FOUR])
    assert devices.query("select has_table_privilege('reader_of_the_test', 'devices', 'select')") == [(True,)]


def test_the_commands_of_the_page(devices: Devices) -> None:
    setup, commands = snippets("docs/idempotency.md", f"{HERE}::test_the_commands_of_the_page")
    first, back = (parsed(line) for line in commands.replace("\\\n", " ").splitlines())
    # The fixture has done the set-up of the page, for roles of its own.
    assert (parsed(setup).step, parsed(setup).target) == ("setup", "devices")
    devices.load("2024-01-01T10:15:00", FIFTY, columns=first.columns)
    devices.load("2024-01-01T11:00:00", FOUR, columns=first.columns)
    run(back, devices.loader.connect)
    assert_rows(devices.query("select * from devices"), FIFTY)


def parsed(command: str) -> Parameters:
    """Return the parameters of one command line of the page."""
    program, flag, module, *arguments = shlex.split(command)
    assert (program, flag, module) == ("python", "-m", "python_jobs.idempotency.proxy_postgres")
    return parse_parameters(Parameters, arguments)[0]


def test_what_is_not_there_or_makes_no_sense(devices: Devices) -> None:
    with pytest.raises(WrongUse, match="there is no version to expose of devices; there are none"):
        devices.expose()
    with pytest.raises(NotReady, match=r"there is no file nowhere\.csv"):
        devices.load(FIRST, FIFTY, source="nowhere.csv")
    with pytest.raises(WrongUse, match="phones has no registry; run step setup once"):
        devices.load(FIRST, FIFTY, target="phones")
    devices.admin.execute("create view phones as select 1 as mine")
    with pytest.raises(WrongUse, match="phones exists, and setup is for a new view of that name"):
        run(Parameters("phones", step="setup", custodian="a", loader="b"), devices.admin.connect)
    assert devices.query("select mine from phones") == [(1,)]
    devices.admin.execute("revoke create on schema public from loader_of_the_test")
    with pytest.raises(JobFailed, match="PostgreSQL denies it: permission denied for schema public"):
        devices.load(FIRST, FIFTY)
    for wrong in (
        {"target": "a.b.c"},
        {"min_rows": -1},
        {"version": "today", "step": "expose"},
        {"version": "20240101_101500"},
        {"custodian": "a"},
        {"step": "setup"},
        {"source": None},
    ):
        with pytest.raises(WrongUse):
            Parameters(**{"target": "devices", "source": "a.csv", "columns": "id int"} | wrong)  # type: ignore[arg-type]
