"""Incremental Loader from PostgreSQL: several connections, one snapshot, rows committed late, credentials."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.ingestion import incremental_table_loader
from python_jobs.ingestion.incremental_table_loader import Parameters, run
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, WrongUse
from python_jobs.shared.core.intervals import Interval
from python_jobs.shared.delta.tables import table_exists
from python_jobs.shared.files.sources import parse_schema, with_schema
from python_jobs.shared.postgres.snapshots import PostgresAccess, one_snapshot, time_slices
from python_jobs.shared.spark.job import run_job
from services.postgres import Database, Postgres
from tests.support.rows import assert_rows
from tests.support.session import process_environment
from tests.support.snippets import snippet

pytestmark = pytest.mark.postgres

HERE = "tests/patterns/ingestion/test_incremental_table_loader_postgres.py"
PASSWORD = "LEGACY_PASSWORD"
TABLE = """
create table visits (
    visit_id text primary key, page text, event_time timestamp, ingestion_time timestamptz
)
"""


def hours(start: int, end: int) -> dict[str, str]:
    return {"from_": f"2024-03-01T{start:02d}", "to": f"2024-03-01T{end:02d}"}


def at(hour: int, minute: int = 0) -> str:
    return f"2024-03-01 {hour:02d}:{minute:02d}:00+00"


@dataclass
class Legacy:
    """A table of visits in PostgreSQL, and the target that is loaded from it."""

    spark: SparkSession
    database: Database
    folder: Path

    def add(self, *visits: tuple[str, str | None]) -> None:
        """Commit visits, by id and ingestion time."""
        with self.database.connect() as connection:
            for visit in visits:
                connection.execute("insert into visits values (%s, 'home', '2024-03-01 08:50', %s)", visit)

    def parameters(self, **changes: Any) -> Parameters:
        given = {
            "source": "visits",
            "target": str(self.folder / "bronze_visits"),
            "delta_column": "ingestion_time",
            "key": ["visit_id"],
            "jdbc_url": self.database.jdbc_url,
            "user": self.database.user,
            "password_env": PASSWORD,
            "partitions": 3,
        }
        return Parameters(**(given | changes))

    def load(self, **changes: Any) -> dict[str, Any]:
        return run(self.spark, self.parameters(**changes))

    def rows(self, suffix: str = "") -> DataFrame:
        return self.spark.read.format("delta").load(str(self.folder / "bronze_visits") + suffix)

    def ids(self) -> list[str]:
        return sorted(row[0] for row in self.rows().select("visit_id").collect())


@pytest.fixture
def legacy(
    spark: SparkSession, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Legacy:
    monkeypatch.setenv(PASSWORD, database.password)
    database.execute(TABLE)
    return Legacy(spark, database, tmp_path)


def counts(report: dict[str, Any]) -> tuple[int, ...]:
    return tuple(report[f"rows_{name}"] for name in ("read", "loaded", "already_loaded", "rejected"))


def between_two_reads(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let ``act`` happen once in the next load, when it has its snapshot and before it reads the window."""
    write_rejects = incremental_table_loader._write_rejects

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(incremental_table_loader, "_write_rejects", write_rejects)
        rejected = write_rejects(*arguments)
        act()
        return rejected

    monkeypatch.setattr(incremental_table_loader, "_write_rejects", meanwhile)


# --- windows ---------------------------------------------------------------------------------------------


def test_windows_are_half_open_over_several_connections(legacy: Legacy) -> None:
    legacy.add(
        ("v1", at(10)), ("v2", at(10, 20)), ("v3", at(10, 40)), ("v4", "2024-03-01 10:59:59.999999+00")
    )
    legacy.add(("v5", at(11)), ("n1", None), ("n2", None))
    assert counts(legacy.load(**hours(10, 11))) == (6, 4, 0, 2)
    assert counts(legacy.load(**hours(10, 11))) == (6, 0, 4, 2)
    assert legacy.ids() == ["v1", "v2", "v3", "v4"]
    assert counts(legacy.load(mode="replace_window", **hours(11, 12))) == (3, 1, 0, 2)
    assert legacy.ids() == ["v1", "v2", "v3", "v4", "v5"]
    row = '{"visit_id":"%s","page":"home","event_time":"2024-03-01T08:50:00.000000","ingestion_time":null}'
    assert_rows(
        legacy.rows("_rejects").select("source_row", "reason"),
        [(row % name, "ingestion_time is null") for name in ("n1", "n2")],
    )


def test_a_delta_column_without_zone_is_utc(legacy: Legacy) -> None:
    legacy.add(("v1", at(10)), ("v2", at(10)))  # event_time 08:50
    by_event_time = {"delta_column": "event_time", **hours(8, 9)}
    assert counts(legacy.load(**by_event_time)) == (2, 2, 0, 0)
    assert counts(legacy.load(**by_event_time)) == (2, 0, 2, 0)


def test_a_window_is_cut_into_slices_that_an_index_can_answer() -> None:
    window = Interval.parse("2024-03-01T10", "2024-03-01T11")
    assert time_slices('odd"name', window, 2) == [
        '"odd""name" >= timestamptz \'2024-03-01 10:00:00.000000+00\' '
        'and "odd""name" < timestamptz \'2024-03-01 10:30:00.000000+00\'',
        '"odd""name" >= timestamptz \'2024-03-01 10:30:00.000000+00\' '
        'and "odd""name" < timestamptz \'2024-03-01 11:00:00.000000+00\'',
    ]


def test_text_that_is_no_time_is_a_reject(legacy: Legacy) -> None:
    legacy.database.execute(
        "create table raw (value text)",
        "insert into raw values ('2024-03-01T10:30:00Z'), ('soon'), (null)",
    )
    computed = {"source": "raw", "delta_column": "ingested_at", "delta_expression": "value", "key": ["value"]}
    assert counts(legacy.load(**computed, **hours(10, 11))) == (3, 1, 0, 2)
    assert_rows(
        legacy.rows("_rejects").select("source_row", "reason"),
        [('{"value":"soon"}', "value is not a timestamp"), ('{"value":null}', "value is null")],
    )


def test_values_are_kept_as_they_are(legacy: Legacy) -> None:
    odd = "\r\n é e\u0301 🦆 \\\" {'a': 1} "
    with legacy.database.connect() as connection:
        connection.execute(
            "insert into visits values ('v1', %s, '2024-03-31 02:30:00.000001', '2024-03-01 12:00:00.000001+02')",
            [odd],
        )
    legacy.load(**hours(10, 11))
    # A clock time that a zone with summer time doesn't have: as timestamp_ntz it stays what it is.
    ingested = dt.datetime(2024, 3, 1, 10, 0, 0, 1, dt.UTC)
    assert_rows(legacy.rows(), [("v1", odd, dt.datetime(2024, 3, 31, 2, 30, 0, 1, dt.UTC), ingested)])
    assert dict(legacy.rows().dtypes)["event_time"] == "timestamp_ntz"


def test_parallel_backfill_equals_the_sequential_one(legacy: Legacy) -> None:
    legacy.add(*((f"v{hour}-{minute}", at(hour, minute)) for hour in (10, 11, 12) for minute in (0, 30, 59)))
    windows = [hours(hour, hour + 1) for hour in (12, 10, 11)]
    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(lambda window: legacy.load(**window), windows))
    assert [report["rows_loaded"] for report in reports] == [3, 3, 3]
    parallel = legacy.rows().collect()
    legacy.folder /= "sequential"
    for window in windows:
        legacy.load(**window)
    assert len(parallel) == 9
    assert_rows(legacy.rows(), parallel, legacy.rows().columns)


REFUSED = {
    # value as SQL: the type that Spark reads it as; None: the value is refused
    "timestamptz 'infinity'": None,
    "timestamptz '-infinity'": None,
    "timestamp 'infinity'": None,
    "date 'infinity'": None,
    "date '0044-03-15 BC'": None,
    "timestamptz '10000-01-01 00:00+00'": None,
    "array[timestamptz 'infinity']": None,
    "0.1234567890123456789012345::numeric": None,
    "1234567890123456789012345678901234567890.5::numeric(50,10)": None,
    "'NaN'::numeric": None,
    "'NaN'::numeric(10,2)": None,
    "array[0.1234567890123456789]::numeric[]": None,
    "array[[1,2],[3,4]]": None,
    "timestamptz '9999-12-31 23:59:59.999999+00'": ("timestamp", "9999-12-31 23:59:59.999999"),
    "timestamp '0001-01-01 00:00'": ("timestamp_ntz", "0001-01-01 00:00:00"),
    "date '1500-01-01'": ("date", "1500-01-01"),
    "0.123456789012345678::numeric": ("decimal(38,18)", "0.123456789012345678"),
    "1.10::numeric(10,2)": ("decimal(10,2)", "1.10"),
    "array[1.10, null]::numeric(10,2)[]": ("array<decimal(10,2)>", "[1.10, null]"),
    "time '10:00:00.123456'": ("string", "10:00:00.123456"),
    "timetz '10:00+02'": ("string", "10:00:00+02"),
    "array[time '24:00', null]": ("array<string>", "[24:00:00, null]"),
    "null::timestamptz": ("timestamp", None),
}
TEXTS = {
    # value as SQL: the type that is declared, the value that is loaded; None: it is refused
    "0.1234567890123456789012345::numeric": ("string", "0.1234567890123456789012345"),
    "1234567890123456789012345678901234567890.5::numeric(50,10)": (
        "string",
        "1234567890123456789012345678901234567890.5000000000",
    ),
    "array[0.1234567890123456789]::numeric[]": ("array<string>", "[0.1234567890123456789]"),
    "5.00::numeric": ("int", "5"),
    "1.25::numeric": ("decimal(38,18)", "1.250000000000000000"),
    "0.1234567890123456789::numeric": ("decimal(38,18)", None),
    "'NaN'::numeric": ("decimal(38,18)", None),
    "time '10:00'": ("timestamp", None),
    "timestamp '2024-03-01 00:00'": ("date", "2024-03-01"),
    "9223372036854775807": ("double", None),
}


def test_a_value_that_the_driver_would_change_is_refused(legacy: Legacy) -> None:
    access = PostgresAccess(legacy.database.jdbc_url, legacy.database.user, PASSWORD)

    def read(value: str, declared: str | None) -> tuple[str, str | None]:
        with one_snapshot(legacy.spark, access) as snapshot:
            rows = snapshot.read(f"(select {value} as a) as one", numerics_as_text=declared is not None)
            rows = rows if declared is None else with_schema(rows, parse_schema(f"a {declared}"))
            ((held,),) = rows.select(F.col("a").cast("string")).collect()
            return rows.dtypes[0][1], held

    stories = [(value, None, wanted) for value, wanted in REFUSED.items()]
    stories += [(value, type_, text and (type_, text)) for value, (type_, text) in TEXTS.items()]
    for value, declared, wanted in stories:
        if wanted is None:
            with pytest.raises(DataRefused, match=r"^column a holds .*; nothing was loaded$"):
                read(value, declared)
        else:
            assert read(value, declared) == wanted, value


def test_a_window_with_a_value_that_the_driver_would_change_is_not_loaded(legacy: Legacy) -> None:
    legacy.add(("v1", at(10)))
    legacy.database.execute("update visits set event_time = 'infinity'")
    with pytest.raises(DataRefused, match=r"column event_time holds infinity, .*; nothing was loaded$"):
        legacy.load(**hours(10, 11))
    legacy.database.execute("update visits set event_time = '2024-03-01 08:50'")
    assert counts(legacy.load(**hours(10, 11))) == (1, 1, 0, 0)


# --- one moment ------------------------------------------------------------------------------------------


def test_all_connections_see_one_snapshot(legacy: Legacy, monkeypatch: pytest.MonkeyPatch) -> None:
    legacy.add(("first", at(10)), ("last", at(10, 59)), ("undated", None))

    def swap_the_slices() -> None:
        """What reads over separate moments would see twice, never, or in both tables."""
        legacy.database.execute(
            f"update visits set ingestion_time = '{at(10, 58)}' where visit_id = 'first'",
            "delete from visits where visit_id = 'last'",
            f"update visits set ingestion_time = '{at(10, 30)}' where visit_id = 'undated'",
            f"insert into visits values ('new', 'home', null, '{at(10, 30)}')",
        )

    between_two_reads(monkeypatch, swap_the_slices)
    assert counts(legacy.load(**hours(10, 11))) == (3, 2, 0, 1)
    assert legacy.ids() == ["first", "last"]
    # The next snapshot is a later moment: what the first one could not see is loaded then.
    legacy.load(**hours(10, 11))
    assert legacy.ids() == ["first", "first", "last", "new", "undated"]


@pytest.mark.parametrize(("overlap", "expected"), [(0, ["v1", "v2"]), (60, ["late", "v1", "v2"])])
def test_an_overlap_finds_the_rows_of_a_long_transaction(
    legacy: Legacy, overlap: int, expected: list[str]
) -> None:
    def stateful(hour: int) -> None:
        legacy.load(bootstrap_from="2024-03-01T09", to=f"2024-03-01T{hour}", overlap_minutes=overlap)

    with legacy.database.connect(autocommit=False) as long_transaction:
        long_transaction.execute(f"insert into visits values ('late', 'home', null, '{at(9, 30)}')")
        legacy.add(("v1", at(9, 50)))
        stateful(10)
        assert legacy.ids() == ["v1"]
        long_transaction.commit()
    legacy.add(("v2", at(10, 30)))
    stateful(11)
    assert legacy.ids() == expected


# --- what goes wrong -------------------------------------------------------------------------------------


def test_a_server_that_restarts_midway_is_one_sentence_and_the_rerun_loads_all(
    legacy: Legacy, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    legacy.add(("v1", at(10)), ("n1", None))
    between_two_reads(monkeypatch, postgres.restart)
    with pytest.raises(JobFailed, match=r"^PostgreSQL at postgresql://\S+ ended the read: .+; run again$"):
        legacy.load(**hours(10, 11))
    assert not table_exists(legacy.spark, legacy.parameters(**hours(10, 11)).target)
    assert counts(legacy.load(**hours(10, 11))) == (2, 1, 0, 1)
    assert legacy.rows("_rejects").count() == 1


def test_a_server_that_is_down_and_tls_that_it_refuses_are_one_sentence(
    legacy: Legacy, postgres: Postgres
) -> None:
    tls = legacy.database.jdbc_url + "?sslmode=require"
    with pytest.raises(
        JobFailed, match=r"can't connect to \S+ as postgres: The server does not support SSL$"
    ):
        legacy.load(jdbc_url=tls, **hours(10, 11))
    postgres.stop()
    try:
        with pytest.raises(JobFailed, match=r"can't connect to \S+ as postgres: Connection to .+ refused"):
            legacy.load(**hours(10, 11))
    finally:
        postgres.start()


def test_a_table_that_is_not_there_is_one_sentence(legacy: Legacy) -> None:
    with pytest.raises(JobFailed, match='relation "nowhere" does not exist'):
        legacy.load(source="nowhere", **hours(10, 11))


# --- credentials -----------------------------------------------------------------------------------------


def test_a_wrong_password_is_one_sentence_that_does_not_hold_it(
    legacy: Legacy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PASSWORD, "hunter2-wrong")
    with pytest.raises(JobFailed) as refusal:
        legacy.load(**hours(10, 11))
    assert 'as postgres: FATAL: password authentication failed for user "postgres"' in str(refusal.value)
    assert "hunter2-wrong" not in "".join(traceback.format_exception(refusal.value))

    def fail(spark: SparkSession, parameters: Parameters) -> dict[str, Any]:
        return run(spark, legacy.parameters(**hours(10, 11)))

    arguments = ["--source=visits", "--target=t", "--delta_column=c", "--mode=replace_window"]
    with pytest.raises(SystemExit) as end:
        run_job(Parameters, fail, [*arguments, "--from=2024-03-01T10", "--to=2024-03-01T11"])
    assert end.value.code == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("JobFailed: can't connect to postgresql://")
    assert "hunter2-wrong" not in printed.err + printed.out


def test_the_password_is_in_no_plan_log_or_event(legacy: Legacy, tmp_path: Path) -> None:
    legacy.add(("v1", at(10)))
    access = PostgresAccess(legacy.database.jdbc_url, legacy.database.user, password_env=PASSWORD)
    with one_snapshot(legacy.spark, access) as snapshot:
        plans = str(snapshot.read("visits")._jdf.queryExecution().toString())
    assert "visit_id" in plans
    assert legacy.database.password not in plans + repr(legacy.parameters(**hours(10, 11)))

    password_file, events = tmp_path / "password", tmp_path / "events"
    password_file.write_text(legacy.database.password + "\n")
    events.mkdir()
    settings = ["--conf", f"spark.eventLog.dir=file:{events}", "--conf", "spark.eventLog.enabled=true",
                "--conf", "spark.eventLog.compress=false", "--conf", "spark.log.level=INFO"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "python_jobs.ingestion.incremental_table_loader", "--source=visits",
         f"--target={tmp_path / 'bronze_visits'}", "--delta_column=ingestion_time", "--key=[visit_id]",
         f"--jdbc_url={legacy.database.jdbc_url}", "--user=postgres", f"--password_file={password_file}",
         "--from=2024-03-01T10", "--to=2024-03-01T11"],
        env={name: value for name, value in os.environ.items() if name != PASSWORD}
        | process_environment(*settings),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    logged = "".join(path.read_text(errors="replace") for path in events.rglob("*") if path.is_file())
    assert "SparkListenerSQLExecutionStart" in logged
    assert "INFO" in done.stderr
    assert legacy.database.password not in logged + done.stdout + done.stderr
    assert legacy.ids() == ["v1"]


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"jdbc_url": "jdbc:mysql://h/d"}, "begins with jdbc:postgresql://"),
        ({"jdbc_url": "jdbc:postgresql://h/d?password=hunter2"}, "must not hold user or password"),
        ({"jdbc_url": "jdbc:postgresql://me:hunter2@h/d"}, "must not hold user or password"),
        ({"user": None}, "jdbc_url needs user"),
        ({"password_env": None}, "either password_env or password_file"),
        ({"password_file": "/run/secrets/x"}, "either password_env or password_file"),
        ({"jdbc_url": None}, "belong to jdbc_url"),
        ({"partitions": 0}, "1 or more, got 0"),
    ],
)
def test_wrong_parameters_are_refused(parameters: dict[str, Any], sentence: str) -> None:
    given = {
        "source": "visits", "target": "bronze/visits", "delta_column": "ingestion_time", "key": ["visit_id"],
        "jdbc_url": "jdbc:postgresql://h/d", "user": "me", "password_env": "P", **hours(10, 11),
    }  # fmt: skip
    with pytest.raises(WrongUse, match=sentence) as refusal:
        Parameters(**(given | parameters))
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize("where", [{"password_env": "NOT_SET"}, {"password_file": "/nowhere/password"}])
def test_a_password_that_is_not_where_it_should_be(where: dict[str, str]) -> None:
    with pytest.raises(WrongUse, match=r"no environment variable NOT_SET|/nowhere/password: No such file"):
        PostgresAccess("jdbc:postgresql://h/d", "me", **where).password()


def test_the_command_of_the_page(legacy: Legacy) -> None:
    command = snippet("docs/ingestion.md", f"{HERE}::test_the_command_of_the_page")
    words = command.replace("\\\n", " ").replace("'", "").split()
    assert words[:2] == ["spark-submit", "python_jobs/ingestion/incremental_table_loader.py"]
    paths = {
        "jdbc:postgresql://legacy-db:5432/blog": legacy.database.jdbc_url,
        "$LAKEHOUSE_ROOT/bronze/bronze_legacy_visits": str(legacy.folder / "bronze_visits"),
        "loader": legacy.database.user,
    }
    parameters, _ = parse_parameters(Parameters, [paths.get(word, word) for word in words[2:]])
    legacy.database.execute("alter table visits set schema public")
    legacy.add(("v1", at(10)))
    assert run(legacy.spark, parameters)["rows_loaded"] == 1
    assert run(legacy.spark, parameters)["rows_loaded"] == 0
