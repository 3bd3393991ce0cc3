"""The case study's sources as servers: visits become records of a topic, users a table in PostgreSQL that changes.

What a producer and an application would do, played from the landing files, so that both ways end in the same tables.
Played again, only what is new is sent.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from services.debezium import running_debezium
from services.kafka import Broker, Record, running_broker
from services.postgres import Database, running_postgres

VISITS_TOPIC = "visits"
USERS_TABLE = "public.users"
_VISITS_PARTITIONS = 2

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
    # How far the feed was applied, in the transaction of the change itself.
    "create table if not exists users_position (sequence bigint not null, id text not null)",
)


@contextlib.contextmanager
def played_sources(landing: Path, feeds: Sequence[str], folder: Path) -> Iterator[str]:
    """Run the services and play the feeds into them; when all of it is in Kafka, give its address to the block.

    Args:
        landing: landing folder.
        feeds: those of ``visits`` and ``user_changes`` that are to be played.
        folder: the services' data, kept for the next run.

    Raises:
        ServiceFailed: a service did not come up or did not take what it was sent.
    """
    with running_broker(folder / "kafka") as broker:
        if "visits" in feeds:
            print(f"visits sent to topic {VISITS_TOPIC}: {produce_visits(broker, landing, folder / 'sent')}")
        if "user_changes" in feeds:
            with running_postgres(folder / "postgres") as postgres:
                database = postgres.ensure_database("blog")
                changes = change_users(database, landing, until=first_hour(landing))
                with running_debezium(
                    folder / "debezium", broker, database, [USERS_TABLE], TOPIC_PREFIX
                ) as connector:
                    changes += change_users(database, landing)
                    connector.catch_up()
                print(f"changes made in PostgreSQL: {changes}", flush=True)
        yield broker.bootstrap_servers


def produce_visits(broker: Broker, landing: Path, ledger: Path) -> int:
    """Send every line of the visit files that wasn't sent yet to the topic ``visits``; return how many.

    A record's timestamp is its landing hour, its value the line's bytes. A file is noted in ``ledger`` when the broker
    has it: killed in between, its lines come again, as exact duplicates that the models count.
    """
    if VISITS_TOPIC not in broker.topics():
        broker.create_topic(VISITS_TOPIC, _VISITS_PARTITIONS)
    sent = ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else []
    count = 0
    for path in sorted((landing / "visits").glob("date=*/hour=*/*.json")):
        name = str(path.relative_to(landing))
        if name not in sent:
            count += broker.produce(VISITS_TOPIC, _visits(path), {"enable.idempotence": True})
            with ledger.open("a", encoding="utf-8") as file:
                file.write(f"{name}\n")
    return count


def _visits(path: Path) -> Iterator[Record]:
    date, hour = (part.partition("=")[2] for part in path.parts[-3:-1])
    landed = dt.datetime.fromisoformat(f"{date}T{hour}:00:00+00:00")
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines):
        yield Record(line, partition=number % _VISITS_PARTITIONS, timestamp=int(landed.timestamp() * 1000))


def change_users(database: Database, landing: Path, until: dt.datetime | None = None) -> int:
    """Apply the users' change feed to the table ``users``, in the feed's order; return how many changes were new.

    With ``until`` only the changes made before: what an application had before anybody read its log.
    """
    database.execute(*_TABLES)
    count = 0
    with database.connect(autocommit=False) as connection:
        newest = connection.execute(
            "select sequence, id from users_position order by 1 desc, 2 desc limit 1"
        ).fetchone()
        last = tuple(newest or (-1, ""))
        for change in _changes(landing):
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


def first_hour(landing: Path) -> dt.datetime:
    """Return the start of the first landing hour of the users' change feed."""
    folder = min((landing / "user_changes").glob("date=*/hour=*"))
    date, hour = (part.partition("=")[2] for part in folder.parts[-2:])
    return dt.datetime.fromisoformat(f"{date}T{hour}:00:00+00:00")


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
_FIELDS = (
    "login",
    "email",
    "registered_datetime",
    "first_connection_datetime",
    "last_connection_datetime",
    "plan",
)


def _changes(landing: Path) -> list[dict[str, Any]]:
    """Return the feed's usable changes in their order; the rest is what a database would not have let in."""
    found = []
    for path in sorted((landing / "user_changes").rglob("*.json")):
        for line in path.read_bytes().splitlines():
            try:
                change = json.loads(line)
            except ValueError:
                continue
            if not isinstance(change, dict) or change.get("op") not in ("I", "U", "D"):
                continue
            if change.get("id") and change.get("changed_at") and isinstance(change.get("sequence"), int):
                complete = {name: change.get(name) for name in _FIELDS}
                complete |= {name: change[name] for name in ("id", "op", "sequence")}
                complete["changed_at"] = dt.datetime.fromisoformat(change["changed_at"])
                found.append(complete | {"is_deleted": bool(change.get("is_deleted"))})
    return sorted(found, key=lambda change: (change["sequence"], change["id"]))
