"""Writers that are jobs of Spark: each with a week's input, and how it does a day or all that is there."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pyspark.sql import SparkSession

from python_jobs.data_value import (
    dynamic_joiner,
    incremental_sessionizer,
    stateful_sessionizer,
    static_joiner,
    static_joiner_api,
    wrapper,
)
from python_jobs.error_management import (
    dead_letter,
    dead_letter_queue,
    dead_letter_replay,
    dynamic_late_data_integrator,
    filter_interceptor,
    late_data_detector,
    static_late_data_integrator,
    windowed_counter,
    windowed_deduplicator,
)
from python_jobs.error_management.late_state import StateTable
from python_jobs.idempotency import (
    backfill,
    data_overwrite,
    keyed_sessions,
    stateful_merger,
    time_travel,
    transactional_writer,
)
from python_jobs.ingestion import (
    change_data_feed,
    compactor,
    full_loader,
    incremental_loader,
    incremental_table_loader,
    transformation_replicator,
)
from python_jobs.streaming import (
    batch_microbatch_continuum,
    batch_reprocessor,
    batch_reprocessor_records,
    partial_state_writer,
    sidecar,
)
from python_jobs.streaming.batch_sinks import SideSink
from python_jobs.streaming.inputs import Source
from tests.support.geo_api import running_geo_api
from tests.torture.inputs import (
    DERIVED_FROM_PAYLOAD,
    PAYLOAD,
    VISITS,
    appended_visits,
    changed_users,
    days_of_files,
    dead_letters,
    lists_of_devices,
    payloads,
    records_of_visits,
    small_files,
    visits_and_ads,
    visits_and_pages,
    visits_by_day,
    visits_by_event_date,
)
from tests.torture.writer import DAYS, NOW, Writer, below, by_day, interval_of, orchestrated, stream

# --- jobs that do a day -----------------------------------------------------------------------------------


def files_of_a_day(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Incremental Loader."""
    parameters = incremental_loader.Parameters(
        **below(folder, source="landing", target="bronze"),
        **interval_of(day),
        grain="day",
        now=NOW,
    )
    incremental_loader.run(spark, parameters)


def rows_of_a_day(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Incremental Loader from a table."""
    parameters = incremental_table_loader.Parameters(
        **below(folder, source="visits", target="bronze"),
        delta_column="event_time",
        key=["visit_id", "number"],
        **interval_of(day),
        now=NOW,
    )
    incremental_table_loader.run(spark, parameters)


def list_of_a_day(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Full Loader, a version a day."""
    parameters = full_loader.Parameters(
        **below(folder, target="devices"),
        source=str(folder / "landing" / f"date={day}"),
        version=f"{day}",
        schema="type string, version string",
        keep_versions=len(DAYS),
    )
    full_loader.run(spark, parameters)


def day_and_the_one_before(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Static Late Data Integrator."""
    parameters = static_late_data_integrator.Parameters(
        **below(folder, source="visits", target="counts"),
        query="select event_date, count(*) as visits from {source} where event_date = {date} group by event_date",
        date=f"{day}",
        lookback_days=1,
    )
    static_late_data_integrator.run(spark, parameters)


def day_replaced(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Data Overwrite, a partition."""
    parameters = data_overwrite.Parameters(
        **below(folder, source="visits", target="copy"),
        query=f"select * from {{source}} where event_date = '{day}'",
        partition={"event_date": f"{day}"},
    )
    data_overwrite.run(spark, parameters)


def week_backfilled(spark: SparkSession, folder: Path) -> None:
    """Replay and Backfill, a chunk a day, one after the other."""
    parameters = backfill.Parameters(
        **below(folder, source="visits", target="counts", ledger="backfills"),
        job_id="week",
        pipeline_version="1",
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
        **below(folder, target="merged", versions="versions"),
        query=f"select distinct visit_id, page, number from delta.`{folder}/visits` "
        "where event_date = {execution_time}",
        execution_time=f"{day}",
        key=["visit_id"],
    )
    stateful_merger.run(spark, parameters)


def day_into_two_tables(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Transactional Writer."""
    parameters = transactional_writer.Parameters(
        **below(folder, source="visits"),
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
        **below(folder, source="visits", target="valid", statistics="statistics"),
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


def dead_letter_replayed(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Dead-Letter's replay of one day's dead letter by an expression that is fixed."""
    parameters = dead_letter_replay.Parameters(
        **below(folder, target="parsed", dead_letter="dead"),
        schema=PAYLOAD,
        derive=DERIVED_FROM_PAYLOAD["fixed"],
        require=["at"],
        where=_dead_letter_of(day),
        publish_partitions=True,
        now=NOW,
    )
    dead_letter_replay.run(spark, parameters)


def dead_letter_discarded(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Dead-Letter's queue: one day's dead letter is discarded."""
    parameters = dead_letter_queue.Parameters(
        dead_letter=str(folder / "dead"),
        action="discard",
        where=_dead_letter_of(day),
        reason="too old",
        now=NOW,
    )
    dead_letter_queue.run(spark, parameters)


def _dead_letter_of(day: dt.date) -> str:
    return f"payload like '%{day:%d/%m/%Y}%'"


def lines_wrapped(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Wrapper, the file of a day as a batch."""
    parameters = wrapper.Parameters(
        **below(folder, target="envelopes"),
        source=str(folder / "landing" / f"date={day}"),
        job_version="1",
        source_format="files",
        batch_version=day.day,
    )
    wrapper.run(spark, parameters)


def visits_with_titles(spark: SparkSession, folder: Path) -> None:
    """Static Joiner, a file a batch."""
    parameters = static_joiner.Parameters(
        **file_by_file(folder, source="visits", reference="pages", target="joined"),
        keys={"page": "page"},
        columns={"title": "title"},
    )
    static_joiner.run(spark, parameters)


def visits_and_counts(spark: SparkSession, folder: Path) -> None:
    """Sidecar, a file a batch."""
    tables = below(folder, visits="visits", rows="rows", counts="counts", checkpoint="checkpoint")
    columns = {"visit_id": "visit_id", "number": "number", "page": "page"}
    counts = "select page, count(*) as visits from {rows} group by page"
    parameters = sidecar.Parameters(
        sources=[Source("site", columns, table=tables["visits"])],
        target=tables["rows"],
        sinks=[SideSink("counts", counts, table=tables["counts"])],
        checkpoint=tables["checkpoint"],
        max_files_per_trigger=1,
    )
    sidecar.run(spark, parameters)


def titles_of_a_day(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Static Joiner with an HTTP API, the visits of a day; the API of this process knows one of the two pages."""
    with running_geo_api() as api:
        api.places = {"home": "Welcome"}
        parameters = static_joiner_api.Parameters(
            **below(folder, source="visits", cache="titles", target="joined"),
            key="page",
            column="title",
            url=api.url,
            keys_parameter="ips",
            where=f"event_date = date'{day}'",
            now=NOW,
        )
        static_joiner_api.run(spark, parameters)


def version_named(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Time Travel, the version that a day's commit made."""
    parameters = time_travel.Parameters(
        **below(folder, table="visits", registry="versions"),
        action="name",
        name=f"day-{day}",
        version=DAYS.index(day),
        keep_until="2034-12-31",
    )
    time_travel.run(spark, parameters)


def late_dates_integrated(spark: SparkSession, folder: Path) -> None:
    """Dynamic Late Data Integrator, day by day; first the claims of a run that died are released.

    A run is named after its process, so that it can be told whether it lives.
    """

    def act(action: Literal["run", "release"], run_id: str, day: dt.date) -> None:
        parameters = dynamic_late_data_integrator.Parameters(
            **below(folder, source="visits", target="counts", state="state"),
            query="select event_date, count(*) as visits from {source} where event_date = {date} group by event_date",
            date=f"{day}",
            action=action,
            run_id=run_id,
            now=NOW,
        )
        dynamic_late_data_integrator.run(spark, parameters)

    claimed_by = {
        known.claimed_by for known in StateTable(spark, str(folder / "state")).read().dates.values()
    }
    for run_id in claimed_by - {None}:
        if not Path(f"/proc/{run_id}").exists():
            act("release", f"{run_id}", DAYS[0])
    orchestrated(lambda _, __, day: act("run", f"{os.getpid()}", day))(spark, folder)


# --- jobs that do what is there ---------------------------------------------------------------------------


def file_by_file(folder: Path, **tables: str) -> dict[str, Any]:
    """Return a stream's parameters: its tables, its checkpoint and batches of one file."""
    return below(folder, checkpoint="checkpoint", **tables) | {"max_files_per_trigger": 1}


def lines_to_rows(spark: SparkSession, folder: Path) -> None:
    """Dead-Letter, a file a batch."""
    parameters = dead_letter.Parameters(
        **file_by_file(folder, source="lines", target="parsed", dead_letter="dead"),
        schema="visit_id string, number int",
        now=NOW,
    )
    dead_letter.run(spark, parameters)


def unique_visits(spark: SparkSession, folder: Path) -> None:
    """Windowed Deduplicator, a file a batch."""
    parameters = windowed_deduplicator.Parameters(
        **file_by_file(folder, source="visits", target="unique", dead_letter="dead"),
        key=["visit_id"],
        event_time="event_time",
        watermark="2 days",
        now=NOW,
    )
    windowed_deduplicator.run(spark, parameters)


def late_visits(spark: SparkSession, folder: Path) -> None:
    """Late Data Detector, a file a batch."""
    parameters = late_data_detector.Parameters(
        **file_by_file(
            folder,
            source="visits",
            target="flagged",
            dead_letter="dead",
            watermarks="watermarks",
        ),
        allowed_lateness="1 hour",
        now=NOW,
    )
    late_data_detector.run(spark, parameters)


def counted_windows(spark: SparkSession, folder: Path) -> None:
    """Windows counted by a stream, a file a batch."""
    parameters = windowed_counter.Parameters(
        **file_by_file(folder, source="visits", target="counts"),
        delay="1 hour",
        group_by=["page"],
    )
    windowed_counter.run(spark, parameters)


def sessions(spark: SparkSession, folder: Path) -> None:
    """Keyed Idempotency, sessions of each user, a file a batch."""
    parameters = keyed_sessions.Parameters(
        **file_by_file(folder, source="visits", target="sessions", dead_letter="dead"),
        key={"user_id": "user_id"},
        event_time="event_time",
        append_time="appended_at",
        ties=["position"],
        value="visit_id",
        now=NOW,
    )
    keyed_sessions.run(spark, parameters)


def sessions_of_a_day(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Incremental Sessionizer; a session ends on the next day, and the late visits are dead letters."""
    parameters = incremental_sessionizer.Parameters(
        **below(folder, source="visits", pending="pending", target="sessions", dead_letter="dead"),
        partition=f"number = {DAYS.index(day)}",
        key={"page": "page"},
        event_time="event_time",
        value="visit_id",
        gap="18 hours",
        run=f"{day}",
        first_run=f"{DAYS[0]}",
        period="1 day",
        now=NOW,
    )
    incremental_sessionizer.run(spark, parameters)


def closed_sessions(spark: SparkSession, folder: Path) -> None:
    """Stateful Sessionizer, a file a batch."""
    stateful_sessionizer.run(spark, stateful_sessionizer.Parameters(**sessions_of_visits(folder)))


def growing_sessions(spark: SparkSession, folder: Path) -> None:
    """Partial State Writer, a file a batch."""
    partial_state_writer.run(spark, partial_state_writer.Parameters(**sessions_of_visits(folder)))


def sessions_of_a_day_again(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Batch Reprocessor, the sessions of a day: each visit of a morning is an hour and more after the one before."""
    parameters = batch_reprocessor.Parameters(
        source=str(folder / "visits"),
        partition="event_date = {date}",
        period="1 day",
        from_=f"{day}",
        to=f"{day + dt.timedelta(days=1)}",
        until=f"{DAYS[-1] + dt.timedelta(days=7)}",
        key={"page": "page"},
        event_time="event_time",
        value="visit_id",
        gap="18 hours",
        target=str(folder / "sessions"),
        now=NOW,
    )
    batch_reprocessor.run(spark, parameters)


def records_of_a_day_again(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Batch Reprocessor of records, a day's range of offsets."""
    first = 4 * DAYS.index(day)
    parameters = batch_reprocessor_records.Parameters(
        source=str(folder / "visits"),
        topic="visits",
        begin={"0": first},
        end={"0": first + 4},
        columns={"visit_id": "visit_id"},
        target=str(folder / "rows"),
        now=NOW,
    )
    batch_reprocessor_records.run(spark, parameters)


def sessions_of_visits(folder: Path) -> dict[str, Any]:
    """Return the parameters of a job that writes the visits' sessions by user."""
    return {
        **file_by_file(folder, source="visits", target="live_sessions", dead_letter="dead"),
        "key": {"user_id": "user_id"},
        "event_time": "event_time",
        "ties": ["position"],
        "value": "visit_id",
        "now": NOW,
    }


def windows_of_a_day(spark: SparkSession, folder: Path, day: dt.date) -> None:
    """Batch-Microbatch Continuum as a batch."""
    windows(spark, folder, "batch", **interval_of(day))


def windows_of_what_came(spark: SparkSession, folder: Path) -> None:
    """Batch-Microbatch Continuum as a stream, a file a batch."""
    windows(spark, folder, "available_now")


def windows(
    spark: SparkSession, folder: Path, cadence: Literal["batch", "available_now"], **dates: Any
) -> None:
    """Run the job on the visits of all users."""
    parameters = batch_microbatch_continuum.Parameters(
        **file_by_file(folder, source="visits", target="windows"),
        cadence=cadence,
        key={"user_id": "user_id"},
        window="1 hour",
        sums={"positions": "position"},
        **dates,
    )
    batch_microbatch_continuum.run(spark, parameters)


def visits_with_ads(spark: SparkSession, folder: Path) -> None:
    """Dynamic Joiner, a file of each side a batch."""
    parameters = dynamic_joiner.Parameters(
        **file_by_file(folder, left="visits", right="ads", target="joined", late="late", dead_letter="dead"),
        left_key={"user_id": "user_id"},
        right_key={"user_id": "user_id"},
        left_time="event_time",
        right_time="shown_at",
        left_columns={"visit_id": "visit_id"},
        right_columns={"ad_id": "ad_id"},
        left_id=["visit_id"],
        right_id=["ad_id"],
        max_after="2 minutes",
        now=NOW,
    )
    dynamic_joiner.run(spark, parameters)


def changes_as_events(spark: SparkSession, folder: Path) -> None:
    """Change Data Capture of a Delta table into another one, a commit a batch."""
    publish_changes(spark, folder, target=str(folder / "events"))


def publish_changes(spark: SparkSession, folder: Path, **destination: Any) -> None:
    """Run the job from the first commit on that has rows."""
    parameters = change_data_feed.Parameters(
        **file_by_file(folder, source="users"),
        key=["id"],
        starting_version=1,
        **destination,
    )
    change_data_feed.run(spark, parameters)


# --- all of them ------------------------------------------------------------------------------------------


def job_writers() -> Iterator[Writer]:
    """Yield the jobs."""
    yield by_day(
        "incremental_loader", days_of_files, files_of_a_day, ("bronze", "bronze_files"), any_order=True
    )
    yield by_day("incremental_table_loader", visits_by_day, rows_of_a_day, ("bronze",))
    versions = tuple(f"devices_{day:%Y%m%d}" for day in DAYS)
    yield by_day("full_loader", lists_of_devices, list_of_a_day, ("devices", *versions))
    yield stream("dead_letter", payloads, lines_to_rows, ("parsed", "dead"))
    yield by_day("dead_letter_replay", dead_letters, dead_letter_replayed, ("parsed", "dead"), adds_once=True)
    yield by_day(
        "dead_letter_queue", dead_letters, dead_letter_discarded, ("dead",), adds_once=True, on_cluster=False
    )
    yield stream("windowed_deduplicator", visits_by_day, unique_visits, ("unique",))
    yield stream("late_data_detector", visits_by_day, late_visits, ("flagged", "watermarks"))
    yield stream("windowed_counter", visits_by_day, counted_windows, ("counts",))
    yield stream("keyed_sessions", appended_visits, sessions, ("sessions",))
    yield stream("dynamic_joiner", visits_and_ads, visits_with_ads, ("joined",))
    yield by_day("incremental_sessionizer", visits_by_day, sessions_of_a_day, ("pending", "sessions", "dead"))
    yield stream("stateful_sessionizer", appended_visits, closed_sessions, ("live_sessions",))
    yield stream("partial_state_writer", appended_visits, growing_sessions, ("live_sessions",))
    yield by_day(
        "batch_microbatch_continuum (batch)", appended_visits, windows_of_a_day, ("windows",), any_order=True
    )
    yield stream("batch_microbatch_continuum", appended_visits, windows_of_what_came, ("windows",))
    yield by_day(
        "batch_reprocessor",
        visits_by_event_date,
        sessions_of_a_day_again,
        ("sessions",),
        any_order=True,
        adds_once=True,
    )
    yield by_day(
        "batch_reprocessor_records",
        records_of_visits,
        records_of_a_day_again,
        ("rows",),
        any_order=True,
        adds_once=True,
    )
    yield by_day(
        "static_late_data_integrator",
        visits_by_event_date,
        day_and_the_one_before,
        ("counts",),
        any_order=True,
    )
    yield Writer(
        "dynamic_late_data_integrator",
        visits_by_event_date,
        late_dates_integrated,
        ("counts",),
        resumes=True,
        on_cluster=True,
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
    yield by_day("time_travel", visits_by_day, version_named, ("versions",), on_cluster=False)
    yield by_day("wrapper", days_of_files, lines_wrapped, ("envelopes",), adds_once=True)
    yield stream("static_joiner", visits_and_pages, visits_with_titles, ("joined",))
    yield stream("sidecar", visits_by_day, visits_and_counts, ("rows", "counts"))
    yield by_day(
        "static_joiner_api", visits_by_event_date, titles_of_a_day, ("titles", "joined"), any_order=True
    )
    yield by_day("filter_interceptor", visits_by_day, day_filtered, ("valid", "statistics"))
    yield by_day("compactor", small_files, partition_compacted, ("table",))
    yield by_day("transformation_replicator", visits_by_day, replica, ("replica",), pairs=False)
    yield stream("change_data_feed", changed_users, changes_as_events, ("events",))
