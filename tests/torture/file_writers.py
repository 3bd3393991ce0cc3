"""Writers of plain files: what readers look at is told from what is on its way by a name."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession

from python_jobs.idempotency import keyed_files, proxy
from python_jobs.ingestion import passthrough_replicator, readiness_marker
from python_jobs.shared.files.pointers import PointedDataset
from python_jobs.shared.files.readiness_names import MARKER
from tests.torture.inputs import arrived_visits, visits_by_day, visits_by_event_date
from tests.torture.stores import FileStore, Rows
from tests.torture.writer import NOW, Writer, below, by_day, in_order, interval_of


def copied_bytes(spark: SparkSession, folder: Path) -> None:
    """Passthrough Replicator, a Delta table as files."""
    parameters = passthrough_replicator.Parameters(
        source=str(folder / "visits"), target=str(folder / "staging"), threads=1
    )
    passthrough_replicator.run(spark, parameters)


def version_exposed(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Proxy, all visits up to a day; a run is named after its start, so that each try has a name of its own."""
    target = folder / "proxied"
    tries = len(PointedDataset(spark, str(target)).versions())
    parameters = proxy.Parameters(
        target=str(target),
        query=f"select * from delta.`{folder}/visits` where event_date <= '{day}'",
        started_at=f"{dt.datetime(2024, 3, 31, tzinfo=dt.UTC) + dt.timedelta(seconds=tries)}",
    )
    proxy.run(spark, parameters)


def day_marked(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Readiness Marker, the partition of a day and what came late in it."""
    parameters = readiness_marker.Parameters(
        **below(folder, source="visits", target="shared"),
        event_column="event_time",
        ingestion_column="arrived_at",
        **interval_of(day),
        grain="day",
        now=NOW,
    )
    readiness_marker.run(spark, parameters)


def file_of_a_day(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Keyed Idempotency, files."""
    parameters = keyed_files.Parameters(
        **below(folder, source="visits", target="files"),
        query="select visit_id, page from {source} where event_date = date({run})",
        run=f"{day}",
    )
    keyed_files.run(spark, parameters)


# --- what is left -----------------------------------------------------------------------------------------


def hashes_of_files(_: SparkSession, folder: Path) -> Rows:
    """Return path and content of each file."""
    return Counter(
        (str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.rglob("*")
        if path.is_file()
    )


def exposed_rows(spark: SparkSession, folder: Path) -> Rows:
    """Return the rows of the version that the pointer names."""
    return Counter(tuple(map(repr, row)) for row in proxy.read_exposed(spark, str(folder)).collect())


def ready_rows(spark: SparkSession, folder: Path) -> Rows:
    """Return the rows of the partitions that are ready, each with its partition's name, and the names themselves."""
    found: Rows = Counter()
    for marker in folder.glob(f"*/{MARKER}"):
        partition = marker.parent
        rows = spark.read.parquet(str(partition)).collect()
        found += Counter([(partition.name,), *((partition.name, *map(repr, row)) for row in rows)])
    return found


COPIES = FileStore(lambda path: not path.parts[0].startswith(".passthrough"), hashes_of_files)
VERSIONS = FileStore(lambda path: path.parts[0] == "_manifests", exposed_rows)
PARTITIONS = FileStore(lambda path: path.name == MARKER, ready_rows)
RUNS = FileStore(lambda path: len(path.parts) == 1 and path.suffix == ".json", hashes_of_files)


def file_writers() -> Iterator[Writer]:
    """Yield the jobs."""
    yield Writer(
        "passthrough_replicator", visits_by_day, copied_bytes, ("staging",), pairs=False, store=COPIES
    )
    yield Writer("proxy", visits_by_event_date, in_order(version_exposed), ("proxied",), store=VERSIONS)
    yield by_day(
        "readiness_marker",
        arrived_visits,
        day_marked,
        ("shared", "shared_late"),
        pairs=False,
        store=PARTITIONS,
    )
    yield by_day(
        "keyed_files",
        visits_by_event_date,
        file_of_a_day,
        ("files",),
        any_order=True,
        pairs=False,
        store=RUNS,
    )
