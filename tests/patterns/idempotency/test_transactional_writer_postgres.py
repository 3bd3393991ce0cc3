"""Transactional Writer into PostgreSQL and the inbox below it: one commit for all that belongs together."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from python_jobs.idempotency.inbox import Inbox
from python_jobs.idempotency.transactional_writer_postgres import Parameters, run
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.postgres.relations import Connection
from services.postgres import Database
from tests.support.rows import assert_rows
from tests.support.snippets import snippet
from tests.support.waiting import at_once, eventually, polled_count

pytestmark = pytest.mark.postgres
PAGE = "docs/idempotency.md"
HERE = "tests/patterns/idempotency/test_transactional_writer_postgres.py"
NOW = dt.datetime(2024, 11, 20, tzinfo=dt.UTC)

THREE = "type;full_name;version\nlg;G2x;14\ngalaxy;Galaxy S2;13\nmac;MacBook Pro;Sonoma\n"
TOO_LONG = "type;full_name;version\nhtc11111111;One;12\n"
FITS = "type;full_name;version\nhtc;One;12\n"


class Devices:
    """The table `devices` and two files for it."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database, self.files = database, [folder / "dataset_1.csv", folder / "dataset_2.csv"]
        database.execute(
            "create table devices (type varchar(6), full_name text not null, version varchar(25), "
            "primary key (type, version))"
        )
        self.write(THREE, TOO_LONG)

    def write(self, *contents: str) -> None:
        for file, content in zip(self.files, contents, strict=True):
            file.write_text(content, encoding="utf-8")

    def run(self, **changes: Any) -> dict[str, Any]:
        given = {
            "files": [str(file) for file in self.files],
            "target": "devices",
            "key": ["type", "version"],
            "run": "2024-11-20",
            "now": "2024-11-20T06:00:00Z",
        }
        return run(Parameters(**(given | changes)), self.database.connect)

    def query(self, text: str = "select type, full_name, version from devices") -> list[tuple[Any, ...]]:
        return self.database.rows(text)


@pytest.fixture
def devices(database: Database, tmp_path: Path) -> Devices:
    return Devices(database, tmp_path)


FOUR = [
    ("lg", "G2x", "14"),
    ("galaxy", "Galaxy S2", "13"),
    ("mac", "MacBook Pro", "Sonoma"),
    ("htc", "One", "12"),
]


def test_a_bad_line_of_the_second_file_leaves_nothing_of_the_first(devices: Devices) -> None:
    with pytest.raises(
        DataRefused, match=r"dataset_2.csv was not loaded: value too long .* line 2.* devices stays as it is"
    ):
        devices.run()
    assert devices.query() == []
    devices.write(THREE, FITS)
    assert devices.run()["already"] is False
    assert_rows(devices.query(), FOUR)
    again = devices.run()
    assert (again["already"], again["rows"]) == (True, {})
    assert_rows(devices.query(), FOUR)
    assert devices.run(run="2024-11-19")["already"] is False, "a backfill merges"
    assert_rows(devices.query(), FOUR)
    devices.write(THREE, FITS.replace("One", "One M8"))
    assert devices.run()["rows"] == {str(devices.files[0]): 0, str(devices.files[1]): 1}, "a corrected file"
    assert ("htc", "One M8", "12") in devices.query()


def test_readers_see_nothing_before_the_commit_and_all_after_it(devices: Devices) -> None:
    devices.write(THREE, FITS)
    with polled_count(devices.database, "devices") as seen:
        devices.run()
    assert set(seen) == {0, 4}


def test_of_two_processes_with_one_run_the_second_has_nothing_to_do(devices: Devices) -> None:
    devices.write(THREE, FITS)
    reports = at_once(devices.run, devices.run)
    assert sorted(report["already"] for report in reports) == [False, True]
    assert_rows(devices.query(), FOUR)


def test_a_connection_that_is_lost_leaves_nothing(devices: Devices) -> None:
    """A row that is locked holds the run up after its first file; then its session is ended."""
    devices.write(THREE, FITS)
    devices.database.execute("insert into devices values ('htc', 'Two', '12')")
    failures: list[BaseException] = []

    def writes() -> None:
        try:
            devices.run()
        except JobFailed as failure:
            failures.append(failure)

    with devices.database.connect(autocommit=False) as locks:
        locks.execute("update devices set full_name = 'Three'")
        writer = threading.Thread(target=writes)
        writer.start()
        waiting = (
            "select pid from pg_stat_activity where wait_event_type = 'Lock' and query like 'insert into%'"
        )
        (pid,) = eventually(lambda: devices.query(waiting))[0]
        devices.query(f"select pg_terminate_backend({pid})")
        writer.join()
        locks.rollback()
    assert ["run again" in str(failure) for failure in failures] == [True]
    assert devices.query() == [("htc", "Two", "12")]
    assert devices.run()["already"] is False
    assert_rows(devices.query(), FOUR)


def test_the_last_line_of_a_key_counts_and_a_null_key_is_refused(devices: Devices) -> None:
    devices.write(THREE + "lg;G3;14\n", FITS + "mac;MacBook Air;Sonoma\n")
    devices.run()
    assert_rows(
        devices.query(),
        [
            ("lg", "G3", "14"),
            ("galaxy", "Galaxy S2", "13"),
            ("mac", "MacBook Air", "Sonoma"),
            ("htc", "One", "12"),
        ],
    )
    devices.write(THREE, FITS + ";Nameless;1\n")
    with pytest.raises(DataRefused, match='null value in column "type"'):
        devices.run(run="2024-11-21")


def test_wrong_use_is_refused_in_one_sentence(devices: Devices) -> None:
    devices.write(THREE, FITS)
    for changes, failure, sentence in [
        ({"files": []}, WrongUse, "files and key take one name or more"),
        ({"run": "today"}, WrongUse, "'today' is not a time"),
        ({"key": ["type", "model"]}, WrongUse, "devices has no column model; it has type, full_name, version"),
        ({"key": ["full_name"]}, WrongUse, "devices has no unique key of exactly full_name"),
        ({"target": "absent"}, NotReady, "there is no table absent"),
        ({"files": ["absent.csv"]}, NotReady, r"there is no file absent\.csv"),
    ]:  # fmt: skip
        with pytest.raises(failure, match=sentence):
            devices.run(**changes)  # type: ignore[arg-type]
    assert devices.query() == []


# --- the limits of tasks that commit on their own ----------------------------------------------------------


def test_tasks_that_commit_on_their_own_leave_a_part_and_write_it_again(
    spark: SparkSession, devices: Devices
) -> None:
    """What Spark's JDBC writer does: one transaction a task."""
    devices.database.execute("create table visits (visit_id int)")
    rows = spark.range(0, 2, 1, 2).selectExpr("if(id = 1, raise_error('lost'), cast(id as int)) as visit_id")
    properties = {"user": devices.database.user, "password": devices.database.password}
    for _ in range(2):
        with pytest.raises(PySparkException, match="lost"):
            rows.write.jdbc(devices.database.jdbc_url, "visits", "append", properties)
    assert devices.query("select visit_id from visits") == [(0,), (0,)]


# --- inbox -------------------------------------------------------------------------------------------------


@pytest.fixture
def connection(database: Database) -> Iterator[Connection]:
    database.execute("create table visits (visit_id text)")
    with database.connect() as connection:
        yield connection


def visits(connection: Connection) -> list[str]:
    return [row[0] for row in connection.execute("select visit_id from visits order by 1").fetchall()]


def test_an_effect_that_fails_takes_the_id_with_it(connection: Connection) -> None:
    inbox = Inbox(connection, "inbox")

    def fails() -> None:
        connection.execute("insert into visits values ('v1')")
        raise ConnectionError("after the id, before the end")

    with pytest.raises(ConnectionError):
        inbox.once("v1", fails, NOW)
    assert visits(connection) == []
    assert inbox.once("v1", lambda: connection.execute("insert into visits values ('v1')"), NOW) is True
    assert inbox.once("v1", fails, NOW) is False
    assert visits(connection) == ["v1"]


def test_two_workers_with_one_message_have_one_effect_and_no_error(
    connection: Connection, database: Database
) -> None:
    insert = b"insert into visits values ('v1')"
    with database.connect() as one, database.connect() as other:
        inboxes = Inbox(one, "inbox"), Inbox(other, "inbox")
        outcomes = at_once(
            lambda: inboxes[0].once("v1", lambda: one.execute(insert), NOW),
            lambda: inboxes[1].once("v1", lambda: other.execute(insert), NOW),
        )
    assert sorted(outcomes) == [False, True]
    assert visits(connection) == ["v1"]


def test_a_duplicate_is_known_for_the_horizon_and_no_longer(connection: Connection) -> None:
    inbox = Inbox(connection, "inbox", horizon=dt.timedelta(days=7))
    effects = []
    for day in (0, 6, 8):
        effects.append(inbox.once("v1", lambda: None, NOW + dt.timedelta(days=day)))
    assert effects == [True, False, True]
    assert inbox.forget(NOW + dt.timedelta(days=14)) == 0
    assert inbox.forget(NOW + dt.timedelta(days=16)) == 1
    assert Inbox(connection, "inbox").forget(NOW) == 0


def test_an_id_is_text_whatever_it_holds(connection: Connection) -> None:
    inbox = Inbox(connection, "inbox")
    assert inbox.once("x'); drop table visits; --", lambda: None, NOW) is True
    assert connection.execute("select message_id from inbox").fetchall() == [("x'); drop table visits; --",)]
    assert visits(connection) == []


def test_snippet_of_the_inbox(connection: Connection) -> None:
    messages = [("v1", "/home"), ("v2", "/about"), ("v1", "/home")]
    names: dict[str, Any] = {"connection": connection, "messages": messages, "now": NOW}
    exec(snippet(PAGE, f"{HERE}::test_snippet_of_the_inbox"), names)
    assert visits(connection) == ["v1", "v2"]


def test_an_inbox_makes_its_transactions_itself(database: Database) -> None:
    with database.connect(autocommit=False) as connection, pytest.raises(WrongUse, match="autocommit"):
        Inbox(connection, "inbox")
