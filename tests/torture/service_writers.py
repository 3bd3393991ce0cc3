"""Writers that talk to a service: streams from Kafka, and programs that write to PostgreSQL."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession

from python_jobs.error_management import checkpointer
from python_jobs.ingestion import change_data_capture
from services import full_loader_postgres, stateful_merger_postgres, transactional_writer_postgres
from services.kafka import Record, running_broker
from services.postgres import running_postgres
from tests.support.session import environment
from tests.torture.inputs import csv_of_devices, noon
from tests.torture.stores import PostgresStore
from tests.torture.writer import DAYS, NOW, Day, Writer, in_order, nothing

KAFKA, TOPIC = "TORTURE_KAFKA", "visits"
DEVICES = "type text not null, version text not null, full_name text, primary key (type, version)"


# --- Kafka ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def week_in_kafka(folder: Path) -> Iterator[None]:
    """Run a broker with a topic of four visits a day, in two partitions."""
    with running_broker(folder / "kafka") as broker, environment(**{KAFKA: broker.bootstrap_servers}):
        broker.create_topic(TOPIC, partitions=2)
        records = []
        for day in DAYS:
            for visit in range(4):
                moment = noon(day) + dt.timedelta(minutes=visit)
                value = json.dumps({"user_id": visit // 2, "event_time": f"{moment:%FT%TZ}"}).encode()
                record = Record(value, partition=visit % 2, timestamp=int(moment.timestamp() * 1000))
                records.append(record)
        broker.produce(TOPIC, records)
        yield


def records_to_bronze(spark: SparkSession, folder: Path) -> None:
    """Change Data Capture, four records a batch."""
    parameters = change_data_capture.Parameters(
        bootstrap_servers=os.environ[KAFKA],
        topics=[TOPIC],
        target=str(folder / "bronze"),
        checkpoint=str(folder / "checkpoint"),
        max_records_per_trigger=4,
        now=NOW,
    )
    change_data_capture.run(spark, parameters)


def users_by_window(spark: SparkSession, folder: Path) -> None:
    """Checkpointer, four records a batch."""
    parameters = checkpointer.Parameters(
        bootstrap_servers=os.environ[KAFKA],
        topic=TOPIC,
        key="get_json_object(payload, '$.user_id')",
        event_time="try_to_timestamp(get_json_object(payload, '$.event_time'))",
        target=str(folder / "counts"),
        checkpoint=str(folder / "checkpoint"),
        max_records_per_trigger=4,
        ephemeral=True,
    )
    checkpointer.run(spark, parameters)


# --- PostgreSQL -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(_: Path) -> Iterator[None]:
    """Run a server; libpq's variables say where."""
    # Not under a folder that is closed to the server's system user.
    with (
        tempfile.TemporaryDirectory(prefix="postgres-") as folder,
        running_postgres(Path(folder) / "server") as postgres,
        environment(**postgres.environment(Path(folder) / "pgpass")),
    ):
        yield


def files_in_one_transaction(_: None, folder: Path, day: dt.date) -> None:
    """Transactional Writer, the day's file and the one of the day before."""
    files = [str(folder / "landing" / f"{date}.csv") for date in DAYS if 0 <= (day - date).days <= 1]
    parameters = transactional_writer_postgres.Parameters(
        files=files, target="devices", key=["type", "version"], run=f"{day}", now=NOW
    )
    transactional_writer_postgres.run(parameters)


def list_behind_a_view(_: None, folder: Path, day: dt.date) -> None:
    """Full Loader, a version a day."""
    parameters = full_loader_postgres.Parameters(
        source=str(folder / "landing" / f"{day}.csv"),
        target="devices",
        version=f"{day}",
        columns=DEVICES,
        keep_versions=len(DAYS),
    )
    full_loader_postgres.run(parameters)


def increment_merged(_: None, folder: Path, day: dt.date) -> None:
    """Stateful Merger: the second round over the days is a backfill."""
    parameters = stateful_merger_postgres.Parameters(
        source=str(folder / "landing" / f"{day}.csv"),
        target="devices",
        key=["type", "version"],
        execution_time=f"{day}",
    )
    stateful_merger_postgres.run(parameters)


def _program(name: str, day: Day, *tables: str, target_exists: bool = True) -> Writer:
    def in_its_database(spark: None, folder: Path, date: dt.date) -> None:
        with environment(PGDATABASE=folder.name):
            day(spark, folder, date)

    return Writer(
        f"{name} (PostgreSQL)",
        csv_of_devices,
        in_order(in_its_database),
        tables,
        needs_spark=False,
        store=PostgresStore({"devices": DEVICES} if target_exists else {}),
        service=server,
    )


def service_writers() -> Iterator[Writer]:
    """Yield the streams and programs."""
    for name, run, table in (
        ("change_data_capture", records_to_bronze, "bronze"),
        ("checkpointer", users_by_window, "counts"),
    ):
        yield Writer(name, nothing, run, (table,), resumes=True, pairs=False, service=week_in_kafka)
    yield _program("transactional_writer", files_in_one_transaction, "devices", "devices__runs")
    yield _program("stateful_merger", increment_merged, "devices", "devices_history")
    versions = [f"devices_{day:%Y%m%d}" for day in DAYS]
    yield _program("full_loader", list_behind_a_view, "devices", *versions, target_exists=False)
