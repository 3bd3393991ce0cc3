"""The case study's sources as servers: visits become records of a topic, and users become a changing PostgreSQL table.

The module plays the producer and the application from the landing files, so both forms of the case study end in the
same tables. It reads the files with the Incremental Loader's functions, so both forms have the same files and lines. If
the feeds are played again, only new lines and changes are sent.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from python_jobs.ingestion.incremental_loader import Landing, LandingFile
from python_jobs.shared.core.failures import DataRefused
from python_jobs.shared.core.intervals import from_micros
from python_jobs.shared.files.file_sets import read_lines, url_path
from python_jobs.shared.spark.macro_sql import Macros
from services.debezium import Connector
from services.kafka import Broker, Record, running_broker
from services.postgres import Database, running_postgres
from services.processes import running

VISITS_TOPIC = "visits"
USERS_TABLE = "public.users"
_VISITS_PARTITIONS = 2
_FILES_AT_ONCE = 100

TOPIC_PREFIX = "blog"
_TABLES = (
    """
    create table if not exists users (
        id text primary key,
        login text,
        email text,
        registered_at timestamptz,
        first_connection_at timestamptz,
        last_connection_at timestamptz,
        plan text,
        is_deactivated boolean not null
    )
    """,
    # Position of the last applied change, written in the transaction of the change.
    "create table if not exists users_position (sequence bigint not null, id text not null)",
)


@contextlib.contextmanager
def played_sources(spark: SparkSession, landing: Path, feeds: Sequence[str], folder: Path) -> Iterator[str]:
    """Run the services and play the feeds into them; the block gets Kafka's address when Kafka has all records.

    Args:
        spark: session that reads the files; the block doesn't need it.
        landing: landing folder.
        feeds: feeds to play, of ``visits`` and ``user_changes``.
        folder: folder of the services' data, which is kept for the next run.

    Raises:
        ServiceFailed: a service did not start or did not accept the records.
    """
    with running_broker(folder / "kafka") as broker:
        if "visits" in feeds:
            sent = produce_visits(spark, broker, landing, folder / "sent")
            print(f"visits sent to topic {VISITS_TOPIC}: {sent}")
        if "user_changes" in feeds:
            with running_postgres(folder / "postgres") as postgres:
                database = postgres.ensure_database("blog")
                feed = user_changes(spark, landing)
                changes = change_users(database, feed, until=first_hour(spark, landing))
                connector = Connector(folder / "debezium", broker, database, [USERS_TABLE], TOPIC_PREFIX)
                with running(connector):
                    changes += change_users(database, feed)
                    connector.catch_up()
                print(f"changes made in PostgreSQL: {changes}", flush=True)
        yield broker.bootstrap_servers


def produce_visits(spark: SparkSession, broker: Broker, landing: Path, ledger: Path) -> int:
    """Send the lines of all visit files that were not sent yet to the topic ``visits``; return the number of lines.

    ``ledger`` records a file when the broker has its lines. If the process is killed in between, the lines are sent
    again, as exact duplicates that the models count.
    """
    if VISITS_TOPIC not in broker.topics():
        broker.create_topic(VISITS_TOPIC, _VISITS_PARTITIONS)
    sent = set(ledger.read_text(encoding="utf-8").splitlines()) if ledger.exists() else set()
    files = [file for file in landing_files(spark, landing, "visits") if _ledger_name(file) not in sent]
    count = 0
    for start in range(0, len(files), _FILES_AT_ONCE):
        batch = files[start : start + _FILES_AT_ONCE]
        count += broker.produce(VISITS_TOPIC, visit_records(spark, batch), {"enable.idempotence": True})
        with ledger.open("a", encoding="utf-8") as recorded:
            recorded.writelines(f"{_ledger_name(file)}\n" for file in batch)
    return count


def visit_records(spark: SparkSession, files: Sequence[LandingFile]) -> Iterator[Record]:
    """Yield one record for each line of the files: the line's bytes, with the landing hour as timestamp.

    Raises:
        DataRefused: a file is in no ``date=`` folder, so it has no landing hour.
    """
    landed = {file.url_path: int(landing_hour(file).timestamp() * 1000) for file in files}
    lines = read_lines(spark, files).select(
        F.col("value").cast("binary").alias("line"), url_path().alias("url_path")
    )
    for number, row in enumerate(lines.toLocalIterator()):
        yield Record(bytes(row.line), partition=number % _VISITS_PARTITIONS, timestamp=landed[row.url_path])


def landing_files(spark: SparkSession, landing: Path, feed: str) -> list[LandingFile]:
    """Return the files of a feed as the Incremental Loader lists them."""
    return Landing(spark, str(landing / feed)).files([""])


def landing_hour(file: LandingFile) -> dt.datetime:
    """Return the start of the hour, or of the day, of a file's landing folder.

    Raises:
        DataRefused: the file is in no ``date=`` folder.
    """
    if "date" not in file.partition:
        raise DataRefused(
            f"{file.path} is in no date=YYYY-MM-DD folder, but with SOURCE=kafka the folder gives the record's time"
        )
    hour = dt.time(file.partition.get("hour", 0), tzinfo=dt.UTC)
    return dt.datetime.combine(file.partition["date"], hour)


def _ledger_name(file: LandingFile) -> str:
    return f"visits/{file.file_path}"


def change_users(
    database: Database, changes: Sequence[Mapping[str, Any]], until: dt.datetime | None = None
) -> int:
    """Apply the changes of :func:`user_changes` to the table ``users`` in order; return the number of new changes.

    With ``until`` only the changes before this time are applied: the application's rows before Debezium starts.
    """
    database.execute(*_TABLES)
    count = 0
    with database.connect(autocommit=False) as connection:
        newest = connection.execute(
            "select sequence, id from users_position order by 1 desc, 2 desc limit 1"
        ).fetchone()
        last = tuple(newest or (-1, ""))
        for change in changes:
            place = (change["sequence"], change["id"])
            if place <= last or (until is not None and change["changed_at"] >= until):
                continue
            if change["op"] == "D":
                connection.execute("delete from users where id = %(id)s", change)
            else:
                connection.execute(_UPSERT, change)
            connection.execute("insert into users_position values (%(sequence)s, %(id)s)", change)
            connection.commit()
            last = place
            count += 1
    return count


def first_hour(spark: SparkSession, landing: Path) -> dt.datetime | None:
    """Return the start of the first landing hour of the feed of user changes; None if the feed has no file."""
    return min(map(landing_hour, landing_files(spark, landing, "user_changes")), default=None)


_UPSERT = """
    insert into users values (
        %(id)s, %(login)s, %(email)s, %(registered_datetime)s, %(first_connection_datetime)s,
        %(last_connection_datetime)s, %(plan)s, %(is_deleted)s
    )
    on conflict (id) do update set
        login = excluded.login,
        email = excluded.email,
        registered_at = excluded.registered_at,
        first_connection_at = excluded.first_connection_at,
        last_connection_at = excluded.last_connection_at,
        plan = excluded.plan,
        is_deactivated = excluded.is_deactivated
"""
_TEXTS = ("id", "op", "sequence", "login", "email", "plan", "is_deleted")
_TIMES = ("changed_at", "registered_datetime", "first_connection_datetime", "last_connection_datetime")


def user_changes(spark: SparkSession, landing: Path) -> list[dict[str, Any]]:
    """Return the feed's usable changes in their order, because a database would have refused the others.

    A change is usable if the model ``silver_user_changes_flagged`` finds it usable, and if PostgreSQL can store it: a
    text there has no NUL character.
    """
    macros = Macros(spark, ["shared/json.sql", "shared/literals.sql", "shared/times.sql"])
    fields = ", ".join(f"{name}: string" for name in (*_TEXTS, *_TIMES))
    json_object = macros.call("_json_value", "value", f"struct<{fields}>")
    lines = read_lines(spark, landing_files(spark, landing, "user_changes"))
    rows = lines.selectExpr(f"{json_object} as line").selectExpr(
        *(f"line.{name}" for name in ("id", "op", "login", "email", "plan")),
        "try_cast(line.sequence as bigint) as sequence",
        "coalesce(try_cast(line.is_deleted as boolean), false) as is_deleted",
        *(f"unix_micros({macros.call('_full_timestamp', f'line.{name}')}) as {name}" for name in _TIMES),
    )
    usable = "id is not null and op in ('I', 'U', 'D') and sequence is not null and changed_at is not null"
    changes = [_change(row.asDict()) for row in rows.where(usable).collect()]
    return sorted(
        (change for change in changes if not any("\0" in str(value) for value in change.values())),
        key=lambda change: (change["sequence"], change["id"]),
    )


def _change(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with its times, which come as microseconds since 1970."""
    given = {name: row[name] for name in _TIMES if row[name] is not None}
    times = {name: from_micros(micros) for name, micros in given.items()}
    return row | times
