"""The project's writers, each with an input of many small intervals: what the torture kills and runs again.

A writer's ``run`` does all its intervals in one process, from the first to the last, and is what a person would start
again after a crash: a stream goes on, a loop over days begins anew. What may be left of a run is in its tables alone.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from python_jobs.error_management import (
    dead_letter,
    filter_interceptor,
    late_data_detector,
    static_late_data_integrator,
    windowed_counter,
    windowed_deduplicator,
)
from python_jobs.idempotency import data_overwrite, stateful_merger
from python_jobs.ingestion import (
    compactor,
    full_loader,
    incremental_loader,
    incremental_table_loader,
    transformation_replicator,
)
from tests.support.dbt_project import DbtProject

INTERVALS = 6
NOW = "2024-03-31T00:00:00Z"
DAYS = [dt.date(2024, 3, 1) + dt.timedelta(days=number) for number in range(INTERVALS)]
VISITS = "visit_id string, event_time timestamp, event_date date, page string, number int"
Rows = Sequence[tuple[Any, ...]]


@dataclass(frozen=True)
class Writer:
    """One writer and its input."""

    name: str
    """As the table of results has it."""
    prepare: Callable[[SparkSession, Path], None]
    """Write the input into an empty folder."""
    run: Callable[[SparkSession, Path], object]
    """Do every interval; doing it again adds nothing."""
    tables: tuple[str, ...]
    """What it writes, below the folder, whose own name is ``{folder}`` in it."""
    resumes: bool = False
    """Whether a run goes on where the one before ended: its later commits are near then."""

    def table(self, folder: Path, name: str) -> Path:
        """Return the path of one of ``tables``."""
        return folder / name.format(folder=folder.name)


# --- inputs -----------------------------------------------------------------------------------------------


def visits(day: dt.date) -> Rows:
    """Return three visits of a day, one of the morning before and one that is there twice."""
    number = DAYS.index(day)
    noon = dt.datetime.combine(day, dt.time(12), dt.UTC)
    times = [noon, noon, noon + dt.timedelta(minutes=5), noon - dt.timedelta(hours=26)]
    ids = [f"v{number}", f"v{number}", f"w{number}", f"late{number}"]
    return [
        (visit, time, time.date(), page, number)
        for visit, time, page in zip(ids, times, ["home", "home", "home", "about"], strict=True)
    ]


def visits_by_day(spark: SparkSession, folder: Path) -> None:
    """Append each day's visits to a Delta table, a file and a commit a day."""
    for day in DAYS:
        rows = spark.createDataFrame(visits(day), VISITS).coalesce(1)
        rows.write.format("delta").mode("append").save(str(folder / "visits"))


def visits_by_event_date(spark: SparkSession, folder: Path) -> None:
    """The same, partitioned by the date of the event."""
    rows = spark.createDataFrame([row for day in DAYS for row in visits(day)], VISITS).coalesce(1)
    rows.write.format("delta").partitionBy("event_date").save(str(folder / "visits"))


def payloads(spark: SparkSession, folder: Path) -> None:
    """Append a valid and an unparsable line for each day, a file a day."""
    for number in range(INTERVALS):
        lines = [(json.dumps({"visit_id": f"v{number}", "number": number}),), (f"not json {number}",)]
        rows = spark.createDataFrame(lines, "payload string").coalesce(1)
        rows.write.format("delta").mode("append").save(str(folder / "lines"))


def hours_of_files(_: SparkSession, folder: Path) -> None:
    """Land one file of JSON lines an hour."""
    for hour in range(INTERVALS):
        place = folder / "landing" / "date=2024-03-01" / f"hour={hour:02d}"
        place.mkdir(parents=True)
        lines = [json.dumps({"visit": f"{hour}-{line}"}) + "\n" for line in range(3)]
        (place / "lines.json").write_text("".join(lines), encoding="utf-8")


def lists_of_devices(_: SparkSession, folder: Path) -> None:
    """Land a full list a day, each with a device more."""
    for number, day in enumerate(DAYS):
        place = folder / "landing" / f"date={day}"
        place.mkdir(parents=True)
        lines = [json.dumps({"type": "phone", "version": f"{v}"}) + "\n" for v in range(number + 2)]
        (place / "devices.json").write_text("".join(lines), encoding="utf-8")


def small_files(spark: SparkSession, folder: Path) -> None:
    """Append four small files to each of a table's partitions."""
    for number in range(4):
        rows = spark.createDataFrame([(day, number) for day in DAYS], "event_date date, number int")
        writer = rows.coalesce(1).write.format("delta").mode("append").partitionBy("event_date")
        writer.save(str(folder / "table"))


def nothing(_: SparkSession, __: Path) -> None:
    """The writer makes its own input."""


# --- jobs -------------------------------------------------------------------------------------------------


def each_hour(spark: SparkSession, folder: Path) -> None:
    """Incremental Loader, an hour after the other."""
    for hour in range(INTERVALS):
        window = {"from_": f"2024-03-01T{hour:02d}", "to": f"2024-03-01T{hour + 1:02d}"}
        places = {"source": str(folder / "landing"), "target": str(folder / "bronze")}
        incremental_loader.run(spark, incremental_loader.Parameters(**places, **window, now=NOW))


def each_window(spark: SparkSession, folder: Path) -> None:
    """Incremental Loader from a table, a day after the other."""
    for day in DAYS:
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


def each_list(spark: SparkSession, folder: Path) -> None:
    """Full Loader, a version a day."""
    for day in DAYS:
        parameters = full_loader.Parameters(
            source=str(folder / "landing" / f"date={day}"),
            target=str(folder / "devices"),
            version=f"{day}",
            schema="type string, version string",
            keep_versions=INTERVALS,
        )
        full_loader.run(spark, parameters)


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


def each_lookback(spark: SparkSession, folder: Path) -> None:
    """Static Late Data Integrator, a day after the other, each with the day before."""
    for day in DAYS:
        parameters = static_late_data_integrator.Parameters(
            source=str(folder / "visits"),
            target=str(folder / "counts"),
            query="select event_date, count(*) as visits from {source} where event_date = {date} group by event_date",
            date=f"{day}",
            lookback_days=1,
        )
        static_late_data_integrator.run(spark, parameters)


def each_day_replaced(spark: SparkSession, folder: Path) -> None:
    """Data Overwrite, a partition after the other."""
    for day in DAYS:
        parameters = data_overwrite.Parameters(
            source=str(folder / "visits"),
            target=str(folder / "copy"),
            query=f"select * from {{source}} where event_date = '{day}'",
            partition={"event_date": f"{day}"},
        )
        data_overwrite.run(spark, parameters)


def each_increment(spark: SparkSession, folder: Path) -> None:
    """Stateful Merger, a day after the other."""
    for day in DAYS:
        parameters = stateful_merger.Parameters(
            target=str(folder / "merged"),
            versions=str(folder / "versions"),
            query=f"select distinct visit_id, page, number from delta.`{folder}/visits` "
            "where event_date = {execution_time}",
            execution_time=f"{day}",
            key=["visit_id"],
        )
        stateful_merger.run(spark, parameters)


def each_filtered(spark: SparkSession, folder: Path) -> None:
    """Filter Interceptor, all visits a run; the runs have names of their own."""
    conditions = folder / "conditions.yml"
    conditions.write_text("- {name: about, condition: page <> 'about'}\n", encoding="utf-8")
    for number in range(INTERVALS):
        parameters = filter_interceptor.Parameters(
            source=str(folder / "visits"),
            target=str(folder / "valid"),
            statistics=str(folder / "statistics"),
            conditions=str(conditions),
            run_id=f"run-{number}",
            now=NOW,
        )
        filter_interceptor.run(spark, parameters)


def each_partition_compacted(spark: SparkSession, folder: Path) -> None:
    """Compactor, a partition after the other."""
    for day in DAYS:
        where = f"event_date = '{day}'"
        compactor.run(spark, compactor.Parameters(table=str(folder / "table"), where=where, vacuum=False))


def each_replica(spark: SparkSession, folder: Path) -> None:
    """Transformation Replicator, the whole table time after time."""
    contract = folder / "contract.yml"
    columns = "".join(f"  - name: {part.split()[0]}\n" for part in VISITS.split(", "))
    contract.write_text(f"dataset: visits\ncolumns:\n{columns}", encoding="utf-8")
    for _ in range(INTERVALS):
        parameters = transformation_replicator.Parameters(
            source=str(folder / "visits"), target=str(folder / "replica"), contract=str(contract)
        )
        transformation_replicator.run(spark, parameters)


# --- dbt --------------------------------------------------------------------------------------------------

USERS = "id int, name string, sequence int, changed_at timestamp, is_deleted boolean"


def changes(number: int) -> Rows:
    """Return a day's changes: a new user, one renamed, one deleted."""
    at = dt.datetime.combine(DAYS[number], dt.time(12), dt.UTC)
    rows = [(number, f"new {number}", number, at, False)]
    if number:
        rows.append((number - 1, f"renamed {number}", number, at, False))
    if number > 2:
        rows.append((number - 3, None, number, at, True))
    return rows


MODELS = {
    "merged_users": """
        {{ config(materialized='incremental', incremental_strategy='merge', unique_key='id',
            meta={'lakehouse_patterns': {'merger': {
                'sequence': ['sequence'], 'deletes': 'soft', 'is_deleted': 'is_deleted'}}}) }}
        select * from changes
    """,
    "users_history": """
        {{ config(materialized='scd2', unique_key='id', meta={'lakehouse_patterns': {'scd2': {
            'changed_at': 'changed_at', 'sequence': 'sequence', 'is_deleted': 'is_deleted'}}}) }}
        select * from changes
    """,
    "audited_users": """
        {{ config(materialized='awap', meta={'lakehouse_patterns': {'awap': {'audits': [
            {'name': 'has a name', 'type': 'record', 'valid_when': 'name is not null', 'outcome': 'dispatch',
             'max_invalid_share': 0.5}]}}}) }}
        select * from changes
    """,
    "appended_changes": """
        {{ config(materialized='incremental', incremental_strategy='append') }}
        select * from changes
        where {{ lakehouse_patterns.incremental_window('changed_at', bootstrap_from='2024-03-01T00') }}
    """,
}


def each_day_built(model: str) -> Callable[[SparkSession, Path], None]:
    """Return a run of dbt for each day's changes."""

    def run(spark: SparkSession, folder: Path) -> None:
        files = {f"models/{model}.sql": MODELS[model]}
        project = DbtProject(folder / f"project_{folder.name}", spark, files)
        known = {row.tableName for row in spark.sql(f"show tables in {project.schema}").collect()}
        for log in project.location.glob("*/_delta_log"):  # what the adopting hook does for a user
            if log.parent.name not in known:
                spark.sql(
                    f"create table {project.schema}.{log.parent.name} using delta location '{log.parent}'"
                )
        for number in range(INTERVALS):
            spark.createDataFrame(changes(number), USERS).coalesce(1).createOrReplaceTempView("changes")
            project.run("run")

    return run


def dbt_writers() -> Iterator[Writer]:
    """Yield one writer for each model."""
    for model in MODELS:
        yield Writer(
            f"dbt {model}", nothing, each_day_built(model), (f"project_{{folder}}/lakehouse/{model}",)
        )


WRITERS = {
    writer.name: writer
    for writer in (
        Writer("incremental_loader", hours_of_files, each_hour, ("bronze", "bronze_files")),
        Writer("incremental_table_loader", visits_by_day, each_window, ("bronze",)),
        Writer(
            "full_loader", lists_of_devices, each_list, ("devices", *(f"devices_{d:%Y%m%d}" for d in DAYS))
        ),
        Writer("dead_letter", payloads, lines_to_rows, ("parsed", "dead"), resumes=True),
        Writer("windowed_deduplicator", visits_by_day, unique_visits, ("unique",), resumes=True),
        Writer(
            "late_data_detector", visits_by_day, late_visits, ("on_time", "late", "watermarks"), resumes=True
        ),
        Writer("windowed_counter", visits_by_day, counted_windows, ("counts",), resumes=True),
        Writer("static_late_data_integrator", visits_by_event_date, each_lookback, ("counts",)),
        Writer("data_overwrite", visits_by_event_date, each_day_replaced, ("copy",)),
        Writer("stateful_merger", visits_by_event_date, each_increment, ("merged",)),
        Writer("filter_interceptor", visits_by_day, each_filtered, ("valid", "statistics")),
        Writer("compactor", small_files, each_partition_compacted, ("table",)),
        Writer("transformation_replicator", visits_by_day, each_replica, ("replica",)),
        *dbt_writers(),
    )
}
