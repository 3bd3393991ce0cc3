"""Writers that need a service: programs without Spark on PostgreSQL and S3, and a job that reads from PostgreSQL."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from python_jobs.data_value import distributed_aggregator
from python_jobs.idempotency import (
    fast_metadata_cleaner_postgres,
    proxy_postgres,
    proxy_s3,
    stateful_merger_postgres,
    transactional_writer_postgres,
)
from python_jobs.ingestion import full_loader_postgres
from python_jobs.shared.postgres.relations import connect_by_environment
from services.object_store import running_object_store
from services.postgres import running_postgres
from tests.support.session import environment
from tests.torture.inputs import csv_of_devices, days_of_files, parts_of_devices
from tests.torture.service_stores import BucketStore, bucket, client
from tests.torture.stores import PostgresStore
from tests.torture.writer import DAYS, NOW, Day, Writer, below, in_order

COLUMNS = "type text not null, version text not null, full_name text"
DEVICES = f"{COLUMNS}, primary key (type, version)"
CUSTODIAN, LOADER = "custodian", "loader"


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
        postgres.execute(f"create role {CUSTODIAN}", f"create role {LOADER} login password '{LOADER}'")
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


def day_behind_a_view(_: None, folder: Path, day: dt.date) -> None:
    """Fast Metadata Cleaner: the first day of the month cleans it, the others append."""
    parameters = fast_metadata_cleaner_postgres.Parameters(
        target="devices",
        unit="month",
        source=str(folder / "landing" / f"{day}.csv"),
        date=f"{day}",
        columns=COLUMNS,
        now=NOW,
    )
    fast_metadata_cleaner_postgres.run(parameters)


def table_for_good(_: None, folder: Path, day: dt.date) -> None:
    """Proxy, as the role that loads; each try has a name of its own."""
    with environment(PGUSER=LOADER, PGPASSWORD=LOADER):
        with connect_by_environment() as connection:
            tries = connection.execute("select count(*) from devices_versions").fetchone()
        assert tries is not None
        parameters = proxy_postgres.Parameters(
            "devices",
            source=str(folder / "landing" / f"{day}.csv"),
            columns=DEVICES,
            started_at=_start(tries[0]),
        )
        proxy_postgres.run(parameters)


def cube_of_a_day(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Distributed Aggregator: files joined with a query of the database."""
    address = f"{os.environ['PGHOST']}:{os.environ['PGPORT']}/{os.environ['PGDATABASE']}"
    with environment(LOADER_PASSWORD=LOADER):
        parameters = distributed_aggregator.Parameters(
            **below(folder, target="cube"),
            source=str(folder / "landing" / f"date={day}"),
            schema="visit string",
            jdbc_url=f"jdbc:postgresql://{address}",
            user=LOADER,
            password_env="LOADER_PASSWORD",
            table="(values (0, 'even'), (1, 'odd')) as lines(remainder, kind)",
            query="select date(left(visit, 10)) as day, kind, int(right(visit, 1)) as line from {files} "
            "join {table} on int(right(visit, 1)) % 2 = remainder",
            day="day",
            date=f"{day}",
            dimensions=["kind"],
            measures={"line": "line"},
        )
        distributed_aggregator.run(spark, parameters)


@dataclass(frozen=True)
class HandedOver(PostgresStore):
    """Databases in which the custodian takes tables over."""

    def set_up(self, folder: Path) -> None:
        """Create the folder's database, its registry and function."""
        super().set_up(folder)
        with environment(PGDATABASE=folder.name):
            proxy_postgres.run(
                proxy_postgres.Parameters("devices", step="setup", custodian=CUSTODIAN, loader=LOADER)
            )


def _start(tries: int) -> str:
    return f"{dt.datetime(2024, 3, 31, tzinfo=dt.UTC) + dt.timedelta(seconds=tries)}"


# --- S3 ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def store(folder: Path) -> Iterator[None]:
    """Run a store; the variables of AWS say where."""
    with running_object_store(folder / "s3") as running, environment(**running.environment(folder / "aws")):
        yield


def files_for_good(_: None, folder: Path, day: dt.date) -> None:
    """Proxy in an S3 store; each try has a name of its own."""
    versions = client().list_objects_v2(Bucket=bucket(folder), Prefix="devices/_versions/", Delimiter="/")
    parameters = proxy_s3.Parameters(
        bucket=bucket(folder),
        dataset="devices",
        source=str(folder / "landing" / f"date={day}"),
        started_at=_start(len(versions.get("CommonPrefixes", []))),
    )
    proxy_s3.run(parameters)


# --- all of them ------------------------------------------------------------------------------------------


def _program(name: str, day: Day, *tables: str, database: PostgresStore | None = None) -> Writer:
    def in_its_database(spark: None, folder: Path, date: dt.date) -> None:
        with environment(PGDATABASE=folder.name):
            day(spark, folder, date)

    return Writer(
        f"{name} (PostgreSQL)",
        csv_of_devices,
        in_order(in_its_database),
        tables,
        needs_spark=False,
        store=database or PostgresStore(),
        service=server,
    )


def service_writers() -> Iterator[Writer]:
    """Yield the programs."""
    with_table = PostgresStore({"devices": DEVICES})
    yield _program(
        "transactional_writer", files_in_one_transaction, "devices", "devices__runs", database=with_table
    )
    yield _program("stateful_merger", increment_merged, "devices", "devices_history", database=with_table)
    versions = [f"devices_{day:%Y%m%d}" for day in DAYS]
    yield _program("full_loader", list_behind_a_view, "devices", *versions)
    yield _program("fast_metadata_cleaner", day_behind_a_view, "devices", "devices__units", "devices__loads")
    yield _program("proxy", table_for_good, "devices", database=HandedOver())
    yield Writer(
        "distributed_aggregator",
        days_of_files,
        in_order(cube_of_a_day),
        ("cube",),
        day=cube_of_a_day,
        service=server,
    )
    yield Writer(
        "proxy (S3)",
        parts_of_devices,
        in_order(files_for_good),
        ("devices",),
        needs_spark=False,
        store=BucketStore(),
        service=store,
    )
