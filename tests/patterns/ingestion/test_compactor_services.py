"""Compaction that a service does itself: a Kafka topic's log cleaner, PostgreSQL's vacuum."""

from __future__ import annotations

import time

import psycopg
import pytest
import yaml

from services.kafka import Broker, Record
from services.postgres import Database
from tests.support.snippets import snippet

PAGE = "docs/ingestion.md"
HERE = "tests/patterns/ingestion/test_compactor_services.py"
PATIENCE = 300


@pytest.mark.kafka
def test_a_compacted_topic_keeps_every_keys_latest_value(broker: Broker) -> None:
    settings = yaml.safe_load(snippet(PAGE, f"{HERE}::test_a_compacted_topic_keeps_every_keys_latest_value"))
    topic = broker.create_topic("devices_compacted", config={k: str(v) for k, v in settings.items()})
    written = [("device1", "ABC"), ("device2", "DEF"), ("device1", "GHI"), ("device3", "D")]
    broker.produce(topic, [Record(key=key.encode(), value=value.encode()) for key, value in written])

    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = [(m.key().decode(), m.value().decode()) for m in broker.records(topic)]
        # What a consumer must do itself; an older entry of a key may always be there, so nobody counts entries.
        latest = dict(found)
        assert {key: latest[key] for key in ("device1", "device2", "device3")} == {
            "device1": "GHI", "device2": "DEF", "device3": "D",
        }  # fmt: skip
        if ("device1", "ABC") not in found:
            return
        # The cleaner leaves the segment that is being written: another entry rolls it.
        broker.produce(topic, [Record(key=b"other", value=str(time.monotonic()).encode())])
    pytest.skip(f"the broker did not compact within {PATIENCE} s; it promises no time")


def dead_tuples(connection: psycopg.Connection) -> int:
    connection.execute("select pg_stat_force_next_flush(), pg_stat_clear_snapshot()")
    row = connection.execute("select n_dead_tup from pg_stat_user_tables where relname = 'visits'").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.postgres
def test_vacuum_removes_dead_tuples_and_no_row(database: Database) -> None:
    with database.connect() as connection:
        connection.execute("create table visits (id int, page text) with (autovacuum_enabled = false)")
        connection.execute("insert into visits select n, 'a' from generate_series(1, 100) n")
        connection.execute("update visits set page = 'b'")
        deadline = time.monotonic() + PATIENCE
        while dead_tuples(connection) != 100:
            assert time.monotonic() < deadline
        connection.execute(snippet(PAGE, f"{HERE}::test_vacuum_removes_dead_tuples_and_no_row").encode())
        while dead_tuples(connection) != 0:
            assert time.monotonic() < deadline
        assert connection.execute("select count(*) from visits").fetchone() == (100,)
