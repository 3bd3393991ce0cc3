"""A slice of ``make torture``, and proof that it sees what it looks for."""

from __future__ import annotations

import datetime as dt
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from python_jobs.idempotency import proxy_s3
from services.kafka import Broker, Record
from services.object_store import ObjectStore
from tests.support.killer import TableState
from tests.support.session import environment
from tests.torture import torture as engine
from tests.torture.file_writers import hashes_of_files
from tests.torture.inputs import VISITS, visits
from tests.torture.service_stores import KAFKA, TopicStore, bucket
from tests.torture.stores import FileStore
from tests.torture.torture import Plan, torture
from tests.torture.writer import DAYS, Run, Writer, in_order, nothing
from tests.torture.writers import WRITERS

pytestmark = pytest.mark.kill


def test_a_writer_that_is_killed_in_each_state_and_run_again_leaves_what_a_calm_run_leaves(
    spark: SparkSession, tmp_path: Path
) -> None:
    # At its first commits: here, each that is let pass costs a second.
    writer = replace(WRITERS["data_overwrite"], resumes=True)
    outcome = torture(writer, spark, tmp_path, Plan(kills=3, pairs=0, orders=0))
    assert outcome.kills == dict.fromkeys(TableState, 1)
    assert (outcome.lost, outcome.doubled) == (0, 0)


@pytest.mark.postgres
def test_a_program_of_postgresql_is_killed_and_run_beside_another(tmp_path: Path) -> None:
    writer = WRITERS["transactional_writer (PostgreSQL)"]
    with writer.service(tmp_path):
        outcome = torture(writer, None, tmp_path, Plan(kills=3))
    assert outcome.kills.total() == 3
    assert (outcome.pairs, outcome.lost, outcome.doubled) == (1, 0, 0)


def test_a_file_on_its_way_is_told_from_one_that_readers_look_at(tmp_path: Path) -> None:
    store = WRITERS["passthrough_replicator"].store
    before = store.files(tmp_path, "staging")
    for name, state in (
        (".passthrough_replicator/aside", TableState.DATA_WITHOUT_LOG),
        ("visits/part-0.parquet", TableState.LOG_WRITTEN),
    ):
        file = tmp_path / "staging" / name
        file.parent.mkdir(parents=True)
        file.write_text("x", encoding="utf-8")
        assert store.files(tmp_path, "staging").state_since(before) is state


def test_a_marker_that_is_written_again_is_a_new_one(tmp_path: Path) -> None:
    store = WRITERS["readiness_marker"].store
    marker = tmp_path / "shared" / "date=2024-03-01" / "_READY"
    marker.parent.mkdir(parents=True)
    marker.write_text("{}", encoding="utf-8")
    before = store.files(tmp_path, "shared")
    os.utime(marker, ns=(0, 0))
    assert store.files(tmp_path, "shared").state_since(before) is TableState.LOG_WRITTEN


@pytest.mark.kafka
def test_a_record_that_came_again_is_a_row_unless_that_is_allowed(broker: Broker) -> None:
    once, folder = TopicStore(lambda _: frozenset()), Path("repeated_records")
    with environment(**{KAFKA: broker.bootstrap_servers}):
        once.set_up(folder)
        before = once.files(folder, "{folder}")
        broker.produce(folder.name, [Record(b"value", b"key")] * 2)
        assert once.files(folder, "{folder}").state_since(before) is TableState.DATA_WITHOUT_LOG
        at_least_once = replace(once, at_least_once=True)
        assert [store.rows(None, folder, "{folder}").total() for store in (once, at_least_once)] == [2, 1]


@pytest.mark.s3
def test_a_locked_version_is_committed_when_readers_find_it(
    object_store: ObjectStore, tmp_path: Path
) -> None:
    writer, folder = WRITERS["proxy (S3)"], tmp_path / "locked_versions"
    writer.prepare(None, folder)
    with environment(**object_store.environment(tmp_path / "aws")):
        writer.store.set_up(folder)
        before = writer.store.files(folder, "devices")
        given: dict[str, Any] = {"bucket": bucket(folder), "dataset": "devices"}
        source = str(folder / "landing" / "date=2024-03-01")
        proxy_s3.run(proxy_s3.Parameters(**given, source=source, step="load"))
        assert writer.store.files(folder, "devices").state_since(before) is TableState.DATA_WITHOUT_LOG
        proxy_s3.run(proxy_s3.Parameters(**given, step="expose"))
        assert writer.store.files(folder, "devices").state_since(before) is TableState.LOG_WRITTEN
        assert {name for name, _ in writer.store.rows(None, folder, "devices")} == {
            "part-0.json",
            "part-1.json",
        }


@pytest.mark.parametrize(("keep", "differing"), [(True, 0), (False, 1)], ids=["own file", "last one wins"])
def test_days_that_build_on_each_other_are_found_by_another_order(
    tmp_path: Path, keep: bool, differing: int
) -> None:
    def write(_: None, folder: Path, day: dt.date) -> None:
        file = folder / "days" / (f"{day}" if keep else "last")
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{day}", encoding="utf-8")

    files = FileStore(lambda path: True, hashes_of_files)
    writer = Writer("days", nothing, in_order(write), ("days",), day=write, pairs=False, store=files)
    outcome = torture(writer, None, tmp_path, Plan(kills=0, orders=1))
    assert (outcome.orders, outcome.lost, outcome.doubled) == (1, differing, differing)


def append_each_day(spark: SparkSession, folder: Path) -> None:
    for day in DAYS:
        rows = spark.createDataFrame(visits(day), VISITS).coalesce(1)
        rows.write.format("delta").mode("append").save(str(folder / "visits"))


def skip_what_is_there(spark: SparkSession, folder: Path) -> None:
    """Take a table that exists for one that is complete."""
    if not (folder / "visits").exists():
        append_each_day(spark, folder)


@pytest.mark.parametrize(
    ("run", "fault"), [(append_each_day, "doubled"), (skip_what_is_there, "lost")], ids=["append", "skip"]
)
def test_a_writer_that_appends_doubles_and_one_that_trusts_what_is_there_loses(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, fault: str
) -> None:
    """The kill is played here: the first run of the chain ends after two days."""
    broken = Writer("broken", nothing, run, ("visits",), pairs=False)

    def two_days(writer: Writer, folder: Path, table: str, state: TableState, passed: int) -> TableState:
        for day in DAYS[:2]:
            rows = spark.createDataFrame(visits(day), VISITS).coalesce(1)
            rows.write.format("delta").mode("append").save(str(folder / table))
        return state

    monkeypatch.setattr(engine, "_kill", two_days)
    outcome = torture(broken, spark, tmp_path, Plan(kills=1))
    assert getattr(outcome, fault) == {"doubled": 8, "lost": 20}[fault]
    assert not outcome.is_sound
