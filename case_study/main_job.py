"""The steps of the case study's main job: the commands that a person would type, in order.

Landing folder -> bronze (Incremental Loader) -> silver (Dead-Letter, then dbt) -> gold (dbt) -> report. This module
keeps no state: a person can run each command alone, and the next run repairs a run that died.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

FEEDS = ("visits", "users", "user_changes", "devices", "devices_list")
FULL_LOADS = ("devices_list",)
# Feeds that may come through Kafka, with the bronze table and the job configuration of their records.
KAFKA_FEEDS = {
    "visits": ("bronze_visits", "visits_records"),
    "user_changes": ("bronze_users_records", "users_records"),
}
BUILD, REPORT = "dbt build", "report"
# Tables below silver/ that a job writes: to dbt they are sources, as all of bronze.
SOURCES = ("silver/silver_visits_parsed", "silver/silver_visits_dead_letter")


@dataclass(frozen=True)
class Step:
    """One command of the main job."""

    name: str
    """Short name for the table of step times."""
    command: tuple[str, ...]
    """Command, as typed in the repository root."""
    when_refused: str = ""
    """Advice for the user if the step ends with exit code 3 (data refused)."""
    tables: tuple[str, ...] = ()
    """Tables below the lakehouse that the step reads and writes: while they are those of the last complete run, it has
    nothing to do. Empty: it reads something else too."""


def submit(name: str, job: str, master: str | None = None, **parameters: object) -> Step:
    """Return the step that runs a job with spark-submit; ``job`` is the path of its script without suffix."""
    return _step(name, ["spark-submit", *(["--master", master] if master else []), f"{job}.py"], parameters)


def program(name: str, module: str, **parameters: object) -> Step:
    """Return the step that runs a program without Spark."""
    return _step(name, ["python", "-m", module], parameters)


def _step(name: str, command: Sequence[str], parameters: Mapping[str, object]) -> Step:
    flags = [word for parameter, value in parameters.items() for word in (f"--{parameter}", str(value))]
    return Step(name, (*command, *flags))


def generator_step(landing: Path, visits: int) -> Step:
    """Return the step that generates the case study's input."""
    return submit(
        "generate", "case_study/datasets/blog_platform", output=landing, visits=visits, overwrite="true"
    )


def main_job(
    lakehouse: str,
    landing: Path,
    feeds: Sequence[str],
    *,
    target: str = "local",
    master: str | None = None,
    window: Mapping[str, str] | None = None,
    bootstrap_servers: str | None = None,
) -> list[Step]:
    """Return the steps from raw files to published tables.

    Args:
        lakehouse: root of the tables, as path or URI.
        landing: folder with one folder for each feed.
        feeds: feeds of :data:`FEEDS` in ``landing``; for dbt the other feeds have no rows.
        target: dbt target.
        master: Spark master of the jobs; None: spark-submit's default.
        window: landing hours to load, ``{"from": …, "to": …}``; default: all.
        bootstrap_servers: Kafka brokers of visits and user changes; None: they come from the landing folder. With
            brokers dbt needs ``LAKEHOUSE_SOURCE=kafka``.
    """
    days = {feed: newest_day(landing / feed, window) for feed in FULL_LOADS if feed in feeds}
    feeds = [feed for feed in feeds if days.get(feed, "") is not None]
    by_kafka = [feed for feed in feeds if feed in KAFKA_FEEDS] if bootstrap_servers else []
    steps = [_record_step(feed, lakehouse, master, str(bootstrap_servers)) for feed in by_kafka]
    if set(by_kafka) == set(KAFKA_FEEDS):
        steps.append(_raw_copies_step(lakehouse, master, str(bootstrap_servers)))
    if "visits" in by_kafka:
        bronze = f"{lakehouse}/bronze/bronze_visits"
        steps.append(submit("hours of visits", "case_study/datasets/topic_hours", master, bronze=bronze))
    steps += [
        submit(
            f"load {feed}",
            "python_jobs/ingestion/incremental_loader",
            master,
            source=landing / feed,
            target=f"{lakehouse}/bronze/bronze_{feed}",
            **(window or {}),
        )
        for feed in feeds
        if feed not in by_kafka and feed not in FULL_LOADS
    ]
    steps += [
        submit(
            f"load {feed}",
            "python_jobs/ingestion/full_loader",
            master,
            config=f"conf/jobs/full_loader_{feed}.yml",
            source=landing / feed / f"date={day}",
            target=f"{lakehouse}/bronze/bronze_{feed}",
            version=day,
        )
        for feed, day in days.items()
        if day is not None
    ]
    if "visits" in feeds:
        steps.append(_parse_step(lakehouse, master))
    steps.append(Step(BUILD, ("dbt", "build", "--target", target)))
    if "visits" in feeds:
        steps.append(submit(REPORT, "case_study/visits_report", master, lakehouse=lakehouse))
    return steps


def _parse_step(lakehouse: str, master: str | None) -> Step:
    """Return the step that parses the visit lines; its advice has the command that accepts a refused batch once."""
    step = submit(
        "dead-letter visits",
        "python_jobs/error_management/dead_letter",
        master,
        config="conf/jobs/dead_letter_visits.yml",
        source=f"{lakehouse}/bronze/bronze_visits",
        target=f"{lakehouse}/silver/silver_visits_parsed",
        dead_letter=f"{lakehouse}/silver/silver_visits_dead_letter",
        checkpoint=f"{lakehouse}/checkpoints/dead_letter_visits",
    )
    accepting = "`" + shlex.join((*step.command, "--max_bad_share", "1")) + "`"
    return replace(
        step,
        tables=("bronze/bronze_visits", *SOURCES),
        when_refused="correct the file if you can, or make the refused lines dead letters with "
        f"{accepting}, then run the main job again",
    )


def newest_day(folder: Path, window: Mapping[str, str] | None = None) -> str | None:
    """Return the last whole day of a feed of full lists before the window's end; None if there is no such day."""
    end = (window or {}).get("to", "9999")
    days = (path.name.removeprefix("date=") for path in folder.glob("date=*"))
    return max((day for day in days if f"{day}T23" < end), default=None)


def _raw_copies_step(lakehouse: str, master: str | None, bootstrap_servers: str) -> Step:
    """Return the step that copies all topics as they are: what a reprocessing reads when the topics have expired."""
    return submit(
        "raw copies",
        "python_jobs/streaming/zero_etl_synchronizer",
        master,
        configuration="conf/jobs/raw_topics.yml",
        bootstrap_servers=bootstrap_servers,
        root=lakehouse,
    )


def _record_step(feed: str, lakehouse: str, master: str | None, bootstrap_servers: str) -> Step:
    """Return the step that loads the records of a feed's topic into bronze."""
    table, configuration = KAFKA_FEEDS[feed]
    return submit(
        f"load {feed}",
        "python_jobs/ingestion/change_data_capture",
        master,
        config=f"conf/jobs/{configuration}.yml",
        bootstrap_servers=bootstrap_servers,
        target=f"{lakehouse}/bronze/{table}",
        checkpoint=f"{lakehouse}/checkpoints/{table}",
    )
