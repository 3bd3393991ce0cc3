"""The steps of the case study's main job: the commands a person would type, in order.

Landing folder -> bronze (Incremental Loader) -> silver (Dead-Letter, then dbt) -> gold (dbt) -> report. The steps keep
no state here: each can be run by hand, and a run that died is repaired by the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FEEDS = ("visits", "users", "user_changes", "devices")
REPORT = "report"


@dataclass(frozen=True)
class Step:
    """One command of the main job."""

    name: str
    """Short name for the end table."""
    command: tuple[str, ...]
    """The command, as typed in the repository root."""


def submit(name: str, job: str, master: str | None = None, **parameters: object) -> Step:
    """Return the step that runs one job with spark-submit."""
    command = ["spark-submit", *(["--master", master] if master else []), f"python_jobs/{job}.py"]
    for parameter, value in parameters.items():
        command += [f"--{parameter}", str(value)]
    return Step(name, tuple(command))


def generator_step(landing: Path, visits: int) -> Step:
    """Return the step that makes the case study's input."""
    return submit("generate", "datasets/blog_platform", output=landing, visits=visits, overwrite="true")


def main_job(
    lakehouse: str,
    landing: Path,
    feeds: Sequence[str],
    *,
    target: str = "local",
    master: str | None = None,
    window: Mapping[str, str] | None = None,
) -> list[Step]:
    """Return the steps from raw files to published tables.

    Args:
        lakehouse: root of the tables, path or URI.
        landing: folder with one folder a feed.
        feeds: those of :data:`FEEDS` that ``landing`` holds; the tables of the others are skipped.
        target: dbt target.
        master: Spark master of the jobs; none leaves it to spark-submit.
        window: ``{"from": …, "to": …}``, to load only these landing hours.
    """
    steps = [
        submit(
            f"load {feed}",
            "ingestion/incremental_loader",
            master,
            source=landing / feed,
            target=f"{lakehouse}/bronze/bronze_{feed}",
            **(window or {}),
        )
        for feed in feeds
    ]
    if "visits" in feeds:
        steps.append(
            submit(
                "dead-letter visits",
                "error_management/dead_letter",
                master,
                config="conf/jobs/dead_letter_visits.yml",
                source=f"{lakehouse}/bronze/bronze_visits",
                target=f"{lakehouse}/silver/silver_visits_parsed",
                dead_letter=f"{lakehouse}/silver/silver_visits_dead_letter",
                checkpoint=f"{lakehouse}/checkpoints/dead_letter_visits",
            )
        )
    absent = [
        f"source:bronze.bronze_{feed}{suffix}+"
        for feed in FEEDS
        if feed not in feeds
        for suffix in ("", "_files")
    ]
    if "visits" not in feeds:
        absent.append("source:parsed+")
    exclude = ("--exclude", *absent) if absent else ()
    steps.append(Step("dbt build", ("dbt", "build", "--target", target, *exclude)))
    if "visits" in feeds:
        steps.append(submit(REPORT, "observability/visits_report", master, lakehouse=lakehouse))
    return steps
