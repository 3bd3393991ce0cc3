"""Writers that are jobs of Spark: each with a week's input, and how it does a day or all that is there."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession

from python_jobs.error_management import (
    dead_letter,
    filter_interceptor,
    late_data_detector,
    static_late_data_integrator,
    windowed_counter,
    windowed_deduplicator,
)
from python_jobs.idempotency import (
    backfill,
    data_overwrite,
    keyed_sessions,
    proxy,
    stateful_merger,
    transactional_writer,
)
from python_jobs.ingestion import (
    compactor,
    full_loader,
    incremental_loader,
    incremental_table_loader,
    passthrough_replicator,
    transformation_replicator,
)
from python_jobs.pointers import PointedDataset
from tests.torture.inputs import (
    VISITS,
    appended_visits,
    days_of_files,
    lists_of_devices,
    payloads,
    small_files,
    visits_by_day,
    visits_by_event_date,
)
from tests.torture.stores import FileStore, Rows
from tests.torture.writer import DAYS, NOW, Day, Run, Writer, in_order, orchestrated

# --- jobs that do a day -----------------------------------------------------------------------------------


def files_of_a_day(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Incremental Loader."""
    parameters = incremental_loader.Parameters(
        source=str(folder / "landing"),
        target=str(folder / "bronze"),
        from_=f"{day}",
        to=f"{day + dt.timedelta(days=1)}",
        grain="day",
        now=NOW,
    )
    incremental_loader.run(spark, parameters)


def rows_of_a_day(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Incremental Loader from a table."""
    parameters = incremental_table_loader.Parameters(
        source=str(folder / "visits"),
        target=str(folder / "bronze"),
        delta_column="event_time",
        key=["visit_id", "number"],
        from_=f"{day}",
        to=f"{day + dt.timedelta(days=1)}",
        now=NOW,
    )
    incremental_table_loader.run(spark, parameters)


def list_of_a_day(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Full Loader, a version a day."""
    parameters = full_loader.Parameters(
        source=str(folder / "landing" / f"date={day}"),
        target=str(folder / "devices"),
        version=f"{day}",
        schema="type string, version string",
        keep_versions=len(DAYS),
    )
    full_loader.run(spark, parameters)


def day_and_the_one_before(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Static Late Data Integrator."""
    parameters = static_late_data_integrator.Parameters(
        source=str(folder / "visits"),
        target=str(folder / "counts"),
        query="select event_date, count(*) as visits from {source} where event_date = {date} group by event_date",
        date=f"{day}",
        lookback_days=1,
    )
    static_late_data_integrator.run(spark, parameters)


def day_replaced(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Data Overwrite, a partition."""
    parameters = data_overwrite.Parameters(
        source=str(folder / "visits"),
        target=str(folder / "copy"),
        query=f"select * from {{source}} where event_date = '{day}'",
        partition={"event_date": f"{day}"},
    )
    data_overwrite.run(spark, parameters)


def week_backfilled(spark: SparkSession, folder: Path) -> None:
    """Replay and Backfill, a chunk a day, one after the other."""
    parameters = backfill.Parameters(
        job_id="week",
        pipeline_version="1",
        source=str(folder / "visits"),
        target=str(folder / "counts"),
        ledger=str(folder / "backfills"),
        query="select event_date, count(*) as visits from {source} group by event_date",
        from_=f"{DAYS[0]}",
        to=f"{DAYS[-1]}",
        chunk_days=1,
        parallel=1,
        now=NOW,
    )
    backfill.run(spark, parameters)


def day_merged(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Stateful Merger."""
    parameters = stateful_merger.Parameters(
        target=str(folder / "merged"),
        versions=str(folder / "versions"),
        query=f"select distinct visit_id, page, number from delta.`{folder}/visits` "
        "where event_date = {execution_time}",
        execution_time=f"{day}",
        key=["visit_id"],
    )
    stateful_merger.run(spark, parameters)


def day_into_two_tables(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Transactional Writer."""
    parameters = transactional_writer.Parameters(
        source=str(folder / "visits"),
        write={
            str(folder / "by_page"): "select page, count(*) as visits, {run} as run from {source} "
            "where event_date = date({run}) group by page",
            str(folder / "ids"): "select visit_id from {source} where event_date = date({run})",
        },
        run=f"{day}",
    )
    transactional_writer.run(spark, parameters)


def day_filtered(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Filter Interceptor, all visits a run; the runs have names of their own."""
    conditions = folder / "conditions.yml"
    conditions.write_text("- {name: about, condition: page <> 'about'}\n", encoding="utf-8")
    parameters = filter_interceptor.Parameters(
        source=str(folder / "visits"),
        target=str(folder / "valid"),
        statistics=str(folder / "statistics"),
        conditions=str(conditions),
        run_id=f"run-{day}",
        now=NOW,
    )
    filter_interceptor.run(spark, parameters)


def partition_compacted(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Compactor, a partition."""
    where = f"event_date = '{day}'"
    compactor.run(spark, compactor.Parameters(table=str(folder / "table"), where=where, vacuum=False))


def replica(spark: SparkSession, folder: Path, _: dt.date) -> None:
    """Transformation Replicator, the whole table each day."""
    contract = folder / "contract.yml"
    columns = "".join(f"  - name: {part.split()[0]}\n" for part in VISITS.split(", "))
    contract.write_text(f"dataset: visits\ncolumns:\n{columns}", encoding="utf-8")
    parameters = transformation_replicator.Parameters(
        source=str(folder / "visits"), target=str(folder / "replica"), contract=str(contract)
    )
    transformation_replicator.run(spark, parameters)


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


# --- jobs that do what is there ---------------------------------------------------------------------------


def lines_to_rows(spark: SparkSession, folder: Path) -> None:
    """Dead-Letter, a file a batch."""
    parameters = dead_letter.Parameters(
        source=str(folder / "lines"),
        target=str(folder / "parsed"),
        dead_letter=str(folder / "dead"),
        checkpoint=str(folder / "checkpoint"),
        schema="visit_id string, number int",
        max_files_per_trigger=1,
        now=NOW,
    )
    dead_letter.run(spark, parameters)


def unique_visits(spark: SparkSession, folder: Path) -> None:
    """Windowed Deduplicator, a file a batch."""
    parameters = windowed_deduplicator.Parameters(
        source=str(folder / "visits"),
        target=str(folder / "unique"),
        dead_letter=str(folder / "dead"),
        checkpoint=str(folder / "checkpoint"),
        key=["visit_id"],
        event_time="event_time",
        watermark="2 days",
        max_files_per_trigger=1,
        now=NOW,
    )
    windowed_deduplicator.run(spark, parameters)


def late_visits(spark: SparkSession, folder: Path) -> None:
    """Late Data Detector, a file a batch."""
    parameters = late_data_detector.Parameters(
        source=str(folder / "visits"),
        on_time=str(folder / "on_time"),
        late=str(folder / "late"),
        dead_letter=str(folder / "dead"),
        watermarks=str(folder / "watermarks"),
        checkpoint=str(folder / "checkpoint"),
        allowed_lateness="1 hour",
        max_files_per_trigger=1,
        now=NOW,
    )
    late_data_detector.run(spark, parameters)


def counted_windows(spark: SparkSession, folder: Path) -> None:
    """Windows counted by a stream, a file a batch."""
    parameters = windowed_counter.Parameters(
        source=str(folder / "visits"),
        target=str(folder / "counts"),
        checkpoint=str(folder / "checkpoint"),
        delay="1 hour",
        group_by=["page"],
        max_files_per_trigger=1,
    )
    windowed_counter.run(spark, parameters)


def sessions(spark: SparkSession, folder: Path) -> None:
    """Keyed Idempotency, sessions of each user, a file a batch."""
    parameters = keyed_sessions.Parameters(
        source=str(folder / "visits"),
        target=str(folder / "sessions"),
        dead_letter=str(folder / "dead"),
        checkpoint=str(folder / "checkpoint"),
        key={"user_id": "user_id"},
        event_time="event_time",
        append_time="appended_at",
        ties=["position"],
        value="visit_id",
        max_files_per_trigger=1,
        now=NOW,
    )
    keyed_sessions.run(spark, parameters)


def copied_bytes(spark: SparkSession, folder: Path) -> None:
    """Passthrough Replicator, a Delta table as files."""
    parameters = passthrough_replicator.Parameters(
        source=str(folder / "visits"), target=str(folder / "staging"), threads=1
    )
    passthrough_replicator.run(spark, parameters)


# --- files ------------------------------------------------------------------------------------------------


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


COPIES = FileStore(lambda path: not path.parts[0].startswith(".passthrough"), hashes_of_files)
VERSIONS = FileStore(lambda path: path.parts[0] == "_manifests", exposed_rows)


# --- all of them ------------------------------------------------------------------------------------------


def by_day(
    name: str, prepare: Run, day: Day, tables: tuple[str, ...], *, any_order: bool = False, pairs: bool = True
) -> Writer:
    """Return a writer that does all its days again, whatever is there."""
    run, one_day = in_order(day), day if any_order else None
    return Writer(name, prepare, run, tables, day=one_day, pairs=pairs, on_cluster=True)


def stream(name: str, prepare: Run, run: Run, tables: tuple[str, ...]) -> Writer:
    """Return a writer that goes on from its checkpoint, which is one query's at a time."""
    return Writer(name, prepare, run, tables, resumes=True, pairs=False, on_cluster=True)


def job_writers() -> Iterator[Writer]:
    """Yield the jobs."""
    yield by_day(
        "incremental_loader", days_of_files, files_of_a_day, ("bronze", "bronze_files"), any_order=True
    )
    yield by_day("incremental_table_loader", visits_by_day, rows_of_a_day, ("bronze",))
    versions = tuple(f"devices_{day:%Y%m%d}" for day in DAYS)
    yield by_day("full_loader", lists_of_devices, list_of_a_day, ("devices", *versions))
    yield stream("dead_letter", payloads, lines_to_rows, ("parsed", "dead"))
    yield stream("windowed_deduplicator", visits_by_day, unique_visits, ("unique",))
    yield stream("late_data_detector", visits_by_day, late_visits, ("on_time", "late", "watermarks"))
    yield stream("windowed_counter", visits_by_day, counted_windows, ("counts",))
    yield stream("keyed_sessions", appended_visits, sessions, ("sessions",))
    yield by_day(
        "static_late_data_integrator",
        visits_by_event_date,
        day_and_the_one_before,
        ("counts",),
        any_order=True,
    )
    yield by_day("data_overwrite", visits_by_event_date, day_replaced, ("copy",), any_order=True)
    yield Writer("backfill", visits_by_event_date, week_backfilled, ("counts",), resumes=True)
    yield by_day("stateful_merger", visits_by_event_date, day_merged, ("merged",))
    yield Writer(
        "transactional_writer",
        visits_by_event_date,
        orchestrated(day_into_two_tables),
        ("by_page", "ids"),
        resumes=True,
        on_cluster=True,
    )
    yield by_day("filter_interceptor", visits_by_day, day_filtered, ("valid", "statistics"))
    yield by_day("compactor", small_files, partition_compacted, ("table",))
    yield by_day("transformation_replicator", visits_by_day, replica, ("replica",), pairs=False)
    yield Writer(
        "passthrough_replicator",
        visits_by_day,
        copied_bytes,
        ("staging",),
        pairs=False,
        store=COPIES,
    )
    yield Writer("proxy", visits_by_event_date, in_order(version_exposed), ("proxied",), store=VERSIONS)
