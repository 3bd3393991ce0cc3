"""Stateful Merger on PostgreSQL: the increments are kept, and a backfill rebuilds the table from them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from python_jobs.idempotency.stateful_merger_postgres import Parameters, Run, run
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from services.postgres import Database
from tests.support.rows import assert_rows
from tests.support.waiting import eventually

pytestmark = pytest.mark.postgres

SEVEN, EIGHT = ["A;1;"], ["A;U;false", "B;1;false"]
NINE, TEN = ["B;;true", "C;1;false"], ["M;1;", "N;1;", "O;1;"]
AFTER = {
    "07": [("A", "1")],
    "08": [("A", "U"), ("B", "1")],
    "09": [("A", "U"), ("C", "1")],
    "10": [("A", "U"), ("C", "1"), ("M", "1"), ("N", "1"), ("O", "1")],
}


class Letters:
    def __init__(self, database: Database, folder: Path) -> None:
        self.database, self.folder = database, folder
        database.execute("create table letters (id text primary key, value text not null)")
        for hour, lines in (("07", SEVEN), ("08", EIGHT), ("09", NINE), ("10", TEN)):
            self.write(hour, lines)

    def write(self, hour: str, lines: list[str], header: str = "id;value;is_deleted") -> None:
        (self.folder / f"{hour}.csv").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")

    def parameters(self, hour: str, **others: Any) -> Parameters:
        given: dict[str, Any] = {
            "source": str(self.folder / f"{hour}.csv"),
            "target": "letters",
            "execution_time": f"2024-10-07T{hour}",
            "key": ["id"],
            "is_deleted": "is_deleted",
        }
        return Parameters(**given | others)

    def run(self, hour: str, **others: Any) -> dict[str, Any]:
        return run(self.parameters(hour, **others), self.database.connect)

    def rows(self, query: str = "select * from letters") -> list[tuple[Any, ...]]:
        return self.database.rows(query)


@pytest.fixture
def letters(database: Database, tmp_path: Path) -> Letters:
    return Letters(database, tmp_path)


@pytest.fixture
def four(letters: Letters) -> Letters:
    for hour in ("07", "08", "09", "10"):
        assert letters.run(hour)["base"] == "keep"
        assert_rows(letters.rows(), AFTER[hour])
    return letters


def test_a_replay_shows_the_table_of_its_time(four: Letters) -> None:
    assert four.run("08") == {
        "target": "letters", "execution_time": "2024-10-07T08:00:00", "base": "rebuild", "rows": 2, "changed": 2,
        "to_replay": ["2024-10-07T09:00:00", "2024-10-07T10:00:00"],
    }  # fmt: skip
    assert_rows(four.rows(), AFTER["08"])
    for hour in ("09", "10"):
        assert four.run(hour)["base"] == "keep"
        assert_rows(four.rows(), AFTER[hour])


def test_the_newest_run_rerun_with_fewer_rows_forgets_the_others(four: Letters) -> None:
    four.write("10", ["M;2;"])
    assert four.run("10")["base"] == "rebuild"
    assert_rows(four.rows(), [*AFTER["09"], ("M", "2")])
    history = "select id from letters_history where __execution_time >= '2024-10-07T10:00Z'"
    assert_rows(four.rows(history), [("M",)])


def test_a_deleted_row_is_not_rebuilt(four: Letters) -> None:
    four.run("10")
    assert_rows(four.rows(), AFTER["10"])
    assert_rows(four.rows("select id from letters_history where __is_deleted"), [("B",)])


def test_an_empty_increment_is_a_run(four: Letters) -> None:
    four.write("11", [])
    assert four.run("11", previous_execution_time="2024-10-07T10")["rows"] == 0
    four.write("12", ["P;1;"])
    four.run("12", previous_execution_time="2024-10-07T11")
    four.write("11", ["O;;true"])
    assert four.run("11")["to_replay"] == ["2024-10-07T12:00:00"]
    assert_rows(four.rows(), [row for row in AFTER["10"] if row[0] != "O"])


def test_a_run_before_its_turn_is_refused(four: Letters) -> None:
    four.run("08")
    with pytest.raises(NotReady, match="the newest run before 2024-10-07T10 is that of 2024-10-07T08:00:00"):
        four.run("10", previous_execution_time="2024-10-07T09")
    assert_rows(four.rows(), AFTER["08"])


def test_of_several_changes_of_a_key_in_a_file_the_newest_applies(database: Database, tmp_path: Path) -> None:
    letters = Letters(database, tmp_path)
    database.execute("alter table letters add at int")
    letters.write("07", ["A;new;2;", "A;old;1;", "B;gone;2;true", "B;was;1;"], "id;value;at;is_deleted")
    letters.run("07", sequence=["at"])
    assert_rows(letters.rows(), [("A", "new", 2)])


@pytest.mark.parametrize(
    ("key", "failure"), [("A", psycopg.errors.CardinalityViolation), ("Z", psycopg.errors.UniqueViolation)]
)
def test_postgresql_alone_refuses_two_changes_of_a_key(
    letters: Letters, key: str, failure: type[psycopg.Error]
) -> None:
    """The key A is stored, Z is not; this job reduces a file to the newest change of each key before its MERGE."""
    letters.run("07")
    with pytest.raises(failure):
        letters.database.execute(
            f"merge into letters as t using (values ('{key}', 'old'), ('{key}', 'new')) as s (id, value) "
            "on t.id = s.id when matched then update set value = s.value "
            "when not matched then insert (id, value) values (s.id, s.value)"
        )
    assert_rows(letters.rows(), AFTER["07"])


def test_a_deleted_row_is_not_inserted_and_a_deleted_key_can_return(letters: Letters) -> None:
    letters.write("07", ["A;1;true", "B;1;"])
    letters.run("07")
    assert_rows(letters.rows(), [("B", "1")])
    letters.write("08", ["B;;true", "C;;true"])
    letters.run("08")
    assert_rows(letters.rows(), [])
    letters.write("09", ["B;2;"])
    letters.run("09")
    assert_rows(letters.rows(), [("B", "2")])


def test_without_deletions_the_file_has_the_table_s_columns(letters: Letters) -> None:
    letters.write("07", ["A;1"], "id;value")
    letters.run("07", is_deleted=None)
    letters.run("07", is_deleted=None)
    assert_rows(letters.rows(), [("A", "1")])


@pytest.mark.parametrize(
    ("lines", "header", "sentence"),
    [
        (["A"], "id;value;is_deleted", 'missing data for column "value"'),
        ([";1;"], "id;value;is_deleted", 'null value in column "id"'),
        (["P;;"], "id;value;is_deleted", 'null value in column "value"'),
        (["A;1;"], "id;name;is_deleted", "column name mismatch in header"),
    ],
)
def test_a_bad_file_leaves_table_and_history(
    four: Letters, lines: list[str], header: str, sentence: str
) -> None:
    four.write("08", lines, header)
    with pytest.raises(DataRefused, match=sentence):
        four.run("08")
    assert_rows(four.rows(), AFTER["10"])
    assert four.rows("select count(*) from letters_history") == [(8,)]


def test_a_run_that_dies_changes_nothing(four: Letters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "merge", dying(Run.restore))
    with pytest.raises(JobFailed, match=r"PostgreSQL: .*; run again"):
        four.run("08")
    monkeypatch.undo()
    assert_rows(four.rows(), AFTER["10"])
    four.run("08")
    assert_rows(four.rows(), AFTER["08"])


def dying(step: Callable[[Run], str]) -> Callable[[Run], str]:
    """Do a step and end the server's process of the run, as a crash would."""

    def do(one: Run) -> str:
        step(one)
        one._connection.execute("select pg_terminate_backend(pg_backend_pid())")
        raise AssertionError("it lives")

    return do


def test_two_runs_at_once_wait_for_each_other(letters: Letters) -> None:
    letters.run("07")
    with letters.database.connect(autocommit=False) as first:
        one = Run(first, letters.parameters("08"))
        one.restore()
        second = threading.Thread(target=letters.run, args=("09",))
        second.start()
        waiting = "select 1 from pg_locks where locktype = 'advisory' and not granted"
        eventually(lambda: letters.rows(waiting))
        one.merge()
        first.commit()
        second.join()
    assert_rows(letters.rows(), AFTER["09"])


def test_what_is_not_there_or_makes_no_sense(letters: Letters) -> None:
    with pytest.raises(NotReady, match="there is no file"):
        letters.run("06")
    with pytest.raises(NotReady, match="there is no table numbers"):
        letters.run("07", target="numbers")
    with pytest.raises(WrongUse, match="letters has no column ids; it has id, value"):
        letters.run("07", key=["ids"])
    letters.run("07")
    letters.database.execute("alter table letters add colour text")
    with pytest.raises(
        DataRefused,
        match="value text, colour text now, its history has id text, value text; alter",
    ):
        letters.run("08")
    letters.database.execute("alter table letters_history add colour text")
    letters.write("08", ["B;1;red;"], "id;value;colour;is_deleted")
    letters.run("08")
    letters.run("08")
    assert_rows(letters.rows(), [("A", "1", None), ("B", "1", "red")])
    for wrong in ({"target": "a.b.c"}, {"key": []}, {"previous_execution_time": "2024-10-08"}):
        with pytest.raises(WrongUse):
            letters.parameters("07", **wrong)


def test_a_table_may_have_columns_of_these_names(letters: Letters) -> None:
    own = "id text primary key, is_deleted boolean, execution_time text, at int, history int, deleted text"
    letters.database.execute(f"create table flags ({own})")
    header = "id;is_deleted;execution_time;at;history;deleted"
    letters.write("07", ["A;true;noon;1;1;x;", "B;false;noon;1;1;x;"], f"{header};gone")
    letters.write("08", ["A;;;;;;true", "B;true;one;2;2;y;"], f"{header};gone")
    for _ in range(2):
        for hour in ("07", "08"):
            letters.run(hour, target="flags", is_deleted="gone", sequence=["execution_time"])
        assert_rows(letters.rows("select * from flags"), [("B", True, "one", 2, 2, "y")])
    letters.run("07", target="flags", is_deleted="gone")
    assert_rows(
        letters.rows("select id, is_deleted, execution_time from flags"),
        [("A", True, "noon"), ("B", False, "noon")],
    )
    with pytest.raises(
        WrongUse, match=r"flags has the column is_deleted of its own, .*; rename it in the file"
    ):
        letters.run("09", target="flags")
    letters.database.execute("create table named (id text primary key, __is_deleted text)")
    with pytest.raises(WrongUse, match="named has a column __is_deleted, which its history adds; rename it"):
        letters.run("07", target="named", is_deleted="gone")


def test_a_history_of_an_earlier_version_is_refused_until_its_columns_are_renamed(four: Letters) -> None:
    four.write("11", ["P;1;"])
    names = (("__is_deleted", "is_deleted"), ("__execution_time", "execution_time"))
    four.database.execute(*(f"alter table letters_history rename {new} to {old}" for new, old in names))
    with pytest.raises(
        DataRefused,
        match=r"letters_history has no column __is_deleted and no column __execution_time: .* named them is_deleted "
        "and execution_time; rename these two columns in letters_history and run again",
    ):
        four.run("11")
    assert_rows(four.rows(), AFTER["10"])
    four.database.execute(*(f"alter table letters_history rename {old} to {new}" for new, old in names))
    assert four.run("08")["base"] == "rebuild"
    assert_rows(four.rows(), AFTER["08"])


def test_a_row_without_a_key_is_refused(letters: Letters) -> None:
    """A unique key lets NULLs in, and no row equals them: each run would add them again."""
    letters.database.execute("create table loose (id text unique, value text)")
    letters.write("07", ["a;1;", ";2;", ";3;"])
    with pytest.raises(
        DataRefused, match=r"07\.csv was not merged: 2 rows have a NULL in the key id; loose stays"
    ):
        letters.run("07", target="loose")
    letters.write("07", ["a;1;"])
    letters.run("07", target="loose")
    assert_rows(letters.rows("select * from loose"), [("a", "1")])


def test_a_table_narrower_than_its_history_is_refused(letters: Letters) -> None:
    letters.database.execute("create table prices (id text primary key, value numeric(6,3))")
    letters.write("07", ["a;1.239;"])
    letters.run("07", target="prices")
    letters.database.execute("alter table prices alter value type numeric(5,2)")
    with pytest.raises(
        DataRefused, match=r"value numeric\(5,2\) now, its history has id text, value numeric\(6,3\)"
    ):
        letters.run("07", target="prices")


def test_the_table_changes_for_readers_at_once(four: Letters) -> None:
    with four.database.connect(autocommit=False) as writer:
        Run(writer, four.parameters("08")).restore()
        assert_rows(writer.execute("select * from letters").fetchall(), AFTER["07"])
        assert_rows(four.rows(), AFTER["10"])


def test_one_companion_table_without_the_other_is_refused(letters: Letters) -> None:
    letters.run("07")
    letters.database.execute("alter table letters_runs rename to put_away")
    with pytest.raises(
        DataRefused, match="letters_history exists without letters_runs, so the runs can't be"
    ):
        letters.run("08")
    letters.database.execute("alter table put_away rename to letters_runs")
    letters.database.execute("drop table letters_history")
    with pytest.raises(DataRefused, match="letters_runs exists without letters_history"):
        letters.run("08")
    assert_rows(letters.rows(), AFTER["07"])
