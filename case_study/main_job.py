"""The steps of the case study's main job: the commands a person would type, in order.

Landing folder -> bronze (Incremental Loader) -> silver (Dead-Letter, then dbt) -> gold (dbt) -> report. The steps keep
no state here: each can be run by hand, and a run that died is repaired by the next one.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

FEEDS = ("visits", "users", "user_changes", "devices", "devices_list")
FULL_LOADS = ("devices_list",)
# Feeds that may come by Kafka, with the bronze table (and job configuration) of their records.
KAFKA_FEEDS = {
    "visits": ("bronze_visits", "visits_records"),
    "user_changes": ("bronze_users_records", "users_records"),
}
REPORT = "report"


@dataclass(frozen=True)
class Step:
    """One command of the main job."""

    name: str
    """Short name for the end table."""
    command: tuple[str, ...]
    """The command, as typed in the repository root."""
    when_refused: str = ""
    """What to do when the step exits 3, data refused."""


def submit(name: str, job: str, master: str | None = None, **parameters: object) -> Step:
    """Return the step that runs one job, the path of a script without its suffix, with spark-submit."""
    command = ["spark-submit", *(["--master", master] if master else []), f"{job}.py"]
    for parameter, value in parameters.items():
        command += [f"--{parameter}", str(value)]
    return Step(name, tuple(command))


def generator_step(landing: Path, visits: int) -> Step:
    """Return the step that makes the case study's input."""
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
        lakehouse: root of the tables, path or URI.
        landing: folder with one folder a feed.
        feeds: those of :data:`FEEDS` that ``landing`` holds; dbt takes the others for feeds without rows.
        target: dbt target.
        master: Spark master of the jobs; none leaves it to spark-submit.
        window: ``{"from": …, "to": …}``, to load only these landing hours.
        bootstrap_servers: Kafka brokers that visits and user changes come from, in place of the landing folder; dbt
            needs ``LAKEHOUSE_SOURCE=kafka`` then.
    """
    days = {feed: newest_day(landing / feed, window) for feed in FULL_LOADS if feed in feeds}
    feeds = [feed for feed in feeds if days.get(feed, "") is not None]
    by_kafka = [feed for feed in feeds if feed in KAFKA_FEEDS] if bootstrap_servers else []
    steps = [_record_step(feed, lakehouse, master, str(bootstrap_servers)) for feed in by_kafka]
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
    steps.append(Step("dbt build", ("dbt", "build", "--target", target)))
    if "visits" in feeds:
        steps.append(submit(REPORT, "case_study/visits_report", master, lakehouse=lakehouse))
    return steps


def _parse_step(lakehouse: str, master: str | None) -> Step:
    """Return the step that reads the visit lines; a refused batch passes once with a command that the step names."""
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
        when_refused="correct the file if you can, make the refused lines dead letters with "
        f"{accepting}, then run the main job again",
    )


def newest_day(folder: Path, window: Mapping[str, str] | None = None) -> str | None:
    """Return the last whole day that a feed of full lists holds before the window's end; None without any."""
    end = (window or {}).get("to", "9999")
    days = (path.name.removeprefix("date=") for path in folder.glob("date=*"))
    return max((day for day in days if f"{day}T23" < end), default=None)


def _record_step(feed: str, lakehouse: str, master: str | None, bootstrap_servers: str) -> Step:
    """Return the step that brings the records of one feed's topic into bronze."""
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
