"""Fast Metadata Cleaner on PostgreSQL: TRUNCATE or DROP of a week's table, COPY of a day, one view."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest

from python_jobs.idempotency.fast_metadata_cleaner_postgres import Parameters, run
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.postgres.relations import one_at_a_time
from services.postgres import Database
from tests.support.pytest_ids import REPOSITORY
from tests.support.rows import assert_rows
from tests.support.snippets import snippet
from tests.support.waiting import eventually, polled_count

pytestmark = pytest.mark.postgres

THIS = "tests/patterns/idempotency/test_fast_metadata_cleaner_postgres.py::"
COLUMNS = "visit_id text, event_time timestamptz, page text, primary key (visit_id, event_time)"
MONDAY, TUESDAY, WEDNESDAY, THURSDAY = "2023-11-06", "2023-11-07", "2023-11-08", "2023-11-09"
WEEK = (MONDAY, TUESDAY, WEDNESDAY, THURSDAY)


class Visits:
    def __init__(self, database: Database, folder: Path) -> None:
        self.database, self.file = database, folder / "visits.csv"

    def land(self, day: str, page: str = "index", rows: int = 50) -> None:
        lines = [f"{day}-{number};{day} 10:00:00+00;{page}" for number in range(rows)]
        self.file.write_text("\n".join(["visit_id;event_time;page", *lines]) + "\n", encoding="utf-8")

    def arguments(self, **others: Any) -> dict[str, Any]:
        return {"target": "visits", "now": "2024-01-01"} | others

    def load(self, day: str, page: str = "index", rows: int = 50, **others: Any) -> dict[str, Any]:
        self.land(day, page, rows)
        given = {"source": str(self.file), "date": day, "columns": COLUMNS} | others
        return run(Parameters(**self.arguments(**given)), self.database.connect)

    def act(self, action: str, *units: str, **others: Any) -> dict[str, Any]:
        return run(
            Parameters(**self.arguments(action=action, units=list(units), **others)), self.database.connect
        )

    def query(self, text: str) -> list[tuple[Any, ...]]:
        return self.database.rows(text)

    def count(self, relation: str = "visits") -> int:
        return int(self.query(f"select count(*) from {relation}")[0][0])

    def pages(self) -> list[tuple[Any, ...]]:
        return self.query(
            "select event_time::date::text, page, count(*) from visits group by 1, 2 order by 1"
        )


@pytest.fixture
def visits(database: Database, tmp_path: Path) -> Visits:
    return Visits(database, tmp_path)


def test_four_days_are_200_rows_however_often_the_week_is_loaded(visits: Visits) -> None:
    branches = [visits.load(day)["branch"] for day in WEEK]
    assert branches == ["initialise_unit", "load_day", "load_day", "load_day"]
    assert (visits.count(), visits.count("visits_2023_45")) == (200, 200)
    visits.database.execute("create role reader", "grant select on visits to reader")
    node = visits.query("select relfilenode from pg_class where relname = 'visits_2023_45'")
    visits.load(MONDAY)
    assert visits.query("select relfilenode from pg_class where relname = 'visits_2023_45'") != node, (
        "truncated"
    )
    for day, page in ((TUESDAY, "index"), (WEDNESDAY, "corrected"), (THURSDAY, "index")):
        visits.load(day, page)
    expected = [(day, "corrected" if day == WEDNESDAY else "index", 50) for day in WEEK]
    assert_rows(visits.pages(), expected)
    with pytest.raises(DataRefused, match="visits_2023_45 holds 2023-11-08 already, and loading it again"):
        visits.load(WEDNESDAY, "again", 3)
    assert_rows(visits.pages(), expected)
    assert visits.query("select has_table_privilege('reader', 'visits', 'select')") == [(True,)]


def test_the_first_of_january_starts_a_unit(visits: Visits) -> None:
    visits.load("2024-12-31", now="2025-02-01")
    visits.load("2025-01-01", rows=7, now="2025-02-01")
    assert (visits.count("visits_2024_53"), visits.count("visits_2025_00"), visits.count()) == (50, 7, 57)


def test_readers_of_a_table_that_is_dropped_and_recreated_get_the_other_units(visits: Visits) -> None:
    visits.load(MONDAY, rows=5)
    visits.load("2023-11-13", rows=7)
    with polled_count(visits.database, "visits") as seen:
        visits.load("2023-11-13", rows=9, clean="drop")
    assert set(seen) <= {12, 5, 14}
    assert seen[-1] == 14


def test_a_view_of_another_owner_stays(visits: Visits) -> None:
    visits.database.execute("create view visits as select 'mine' as page")
    with pytest.raises(DataRefused, match="visits exists and was not created by this job: rename or drop it"):
        visits.load(MONDAY)
    assert visits.query("select * from visits") == [("mine",)]


def test_bad_input_is_refused_in_one_sentence(visits: Visits) -> None:
    visits.load(MONDAY, rows=1)
    visits.database.execute(
        "create table visits_2023_46 (page text)", "insert into visits_2023_46 values ('mine')"
    )
    with pytest.raises(DataRefused, match="visits_2023_46 exists and was not created by this job"):
        visits.load("2023-11-13")
    with pytest.raises(
        DataRefused, match="unit 2023_47 of visits is not there: load it from its first day on"
    ):
        visits.load("2023-11-21")
    with pytest.raises(WrongUse, match="the day 2024-01-02 is in the future"):
        visits.load("2024-01-02")
    with pytest.raises(WrongUse, match="visits has no unit '2023_48'; it has: 2023_45"):
        visits.act("drop", "2023_48")
    with pytest.raises(
        WrongUse, match="2023_45 is not over yet, rows may still come: freeze units before 2023_45"
    ):
        visits.act("freeze", "2023_45", into="early", now="2023-11-08")
    with pytest.raises(WrongUse, match="columns is no list for create table"):
        visits.load("2023-11-27", columns="visit_id text,")
    with pytest.raises(DataRefused, match=r"visits\.csv was not loaded: .*; visits_2023_45 stays as it is"):
        visits.load(TUESDAY, page="index;more")
    visits.land(TUESDAY)
    visits.file.unlink()
    with pytest.raises(NotReady, match="nothing was cleaned"):
        run(Parameters(**visits.arguments(source=str(visits.file), date=MONDAY, columns=COLUMNS)),
            visits.database.connect)  # fmt: skip
    assert (visits.count(), visits.count("visits_2023_46")) == (1, 1)
    visits.load(TUESDAY, rows=2)
    assert visits.count() == 3

    def unreachable() -> Any:
        raise psycopg.OperationalError("connection refused\nmore")

    with pytest.raises(JobFailed, match="PostgreSQL: connection refused; run again"):
        run(Parameters(target="visits", action="expose"), unreachable)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"target": "a b"}, "target must be a name or schema.name, got 'a b'"),
        ({"date": ""}, "source, date and columns belong to load"),
        ({"date": "2023-1-6"}, "a date is a day such as 2023-11-06, got '2023-1-6'"),
        ({"action": "drop"}, "source, date and columns belong to load"),
        ({"units": ["2023_45"]}, "units belong to drop and freeze"),
        ({"into": "2023_11"}, "freeze needs into"),
    ],
)
def test_parameters_that_make_no_sense(arguments: dict[str, Any], sentence: str) -> None:
    given = {"target": "visits", "source": "a.csv", "date": MONDAY, "columns": "id int"}
    with pytest.raises(WrongUse, match=sentence):
        Parameters(**given | arguments)


def test_columns_are_matched_by_name_and_a_view_without_units_has_no_rows(visits: Visits) -> None:
    visits.load(MONDAY, rows=1)
    visits.database.execute("alter table visits_2023_45 add column referral text")
    visits.act("expose")
    assert visits.query("select * from visits limit 0") == []
    visits.load("2023-11-13", rows=1)
    shown = visits.query("select page, referral from visits")
    assert_rows(shown, [("index", None), ("index", None)])
    visits.act("drop", "2023_45", "2023_46")
    assert visits.query("select visit_id, referral from visits") == []
    visits.load(TUESDAY, rows=2)
    assert visits.count() == 2


def test_the_view_cuts_no_value_of_a_wider_unit(visits: Visits) -> None:
    visits.load(MONDAY, rows=1)
    visits.load("2023-11-13", rows=1)
    visits.database.execute(
        "alter table visits_2023_45 add column note varchar(2)",
        "alter table visits_2023_46 add column note varchar(9)",
        "update visits_2023_45 set note = 'ab'",
        "update visits_2023_46 set note = 'abcdefghi'",
    )
    visits.act("expose")
    assert_rows(visits.query("select note from visits"), [("ab",), ("abcdefghi",)])


def test_frozen_units_are_one_table_and_are_shown_once(visits: Visits) -> None:
    weeks = {
        "2023_40": "2023-10-02",
        "2023_41": "2023-10-09",
        "2023_42": "2023-10-16",
        "2023_43": "2023-10-23",
    }
    for rows, day in enumerate((*weeks.values(), "2023-10-30"), start=1):
        visits.load(day, rows=rows)
    before = visits.pages()
    with polled_count(visits.database, "visits") as seen:
        visits.act("freeze", *weeks, into="2023_10")
    assert set(seen) == {15}, "no reader sees a row twice or not at all"
    assert_rows(visits.pages(), before)
    assert visits.count("visits_frozen_2023_10") == 10
    tables = visits.query(
        "select tablename from pg_tables where tablename ~ '^visits_(frozen|[0-9])' order by 1"
    )
    assert tables == [("visits_2023_44",), ("visits_frozen_2023_10",)]
    for refused in (lambda: visits.load("2023-10-09"), lambda: visits.load("2023-10-10"),
                    lambda: visits.act("freeze", "2023_43", "2023_44", into="overlapping"),
                    lambda: visits.act("drop", "2023_41")):  # fmt: skip
        with pytest.raises(
            DataRefused, match=r"2023_4\d is frozen in visits_frozen_2023_10: its rows can no longer change"
        ):
            refused()
    with pytest.raises(WrongUse, match="the table visits_frozen_2023_10 already exists"):
        visits.act("freeze", "2023_44", into="2023_10")
    assert_rows(visits.pages(), before)


@pytest.mark.kill
def test_a_killed_load_leaves_nothing_and_runs_again(visits: Visits, tmp_path: Path) -> None:
    visits.load(MONDAY, rows=1)
    visits.database.execute(
        "create function wait() returns trigger language plpgsql as "
        "$$ begin perform pg_advisory_xact_lock(1); return new; end $$",
        "create trigger wait before insert on visits_2023_45 for each row execute function wait()",
    )
    visits.land(TUESDAY)
    argv = [sys.executable, "-m", "python_jobs.idempotency.fast_metadata_cleaner_postgres", "--source",
            str(visits.file), "--target", "visits", "--date", TUESDAY, "--columns", COLUMNS]  # fmt: skip
    with visits.database.connect() as holder:
        holder.execute("select pg_advisory_lock(1)")
        env = os.environ | visits.database.environment(tmp_path / "pgpass")
        process = subprocess.Popen(argv, cwd=REPOSITORY, env=env, start_new_session=True)
        try:
            # It has noted the day and is inside of COPY.
            eventually(
                lambda: visits.query("select 1 from pg_locks where locktype = 'advisory' and not granted")
            )
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert visits.count() == 1
    assert visits.load(TUESDAY)["rows"] == 50
    assert visits.count() == 51


def test_of_two_first_runs_at_once_the_second_waits_for_the_first(visits: Visits) -> None:
    visits.land(MONDAY)
    reports: list[dict[str, Any]] = []
    second = threading.Thread(target=lambda: reports.append(visits.load(MONDAY)))
    with visits.database.connect() as first:
        one_at_a_time(first, Parameters(**visits.arguments(action="expose")).table())
        second.start()
        eventually(lambda: visits.query("select 1 from pg_locks where locktype = 'advisory' and not granted"))
        assert visits.query("select to_regclass('visits__units')") == [(None,)]
    second.join()
    assert [report["rows"] for report in reports] == [50]


def test_the_commands_of_the_page(visits: Visits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    visits.file.write_text("visit_id;event_time;page\n1;2023-11-06 10:00:00+00;index\n", encoding="utf-8")
    text = snippet("docs/idempotency.md", f"{THIS}test_the_commands_of_the_page").replace("\\\n", " ")
    for command in (shlex.split(line) for line in text.strip().splitlines()):
        assert command[:3] == ["python", "-m", "python_jobs.idempotency.fast_metadata_cleaner_postgres"]
        parameters, _ = parse_parameters(Parameters, command[3:])
        run(parameters, visits.database.connect)
    assert_rows(visits.query("select visit_id, page from visits_frozen_2023_11"), [("1", "index")])
    assert visits.count() == 1
