"""Run the case study's main job: every step is a command, which the demo prints before it runs the command.

    python -m case_study.demo [--input FOLDER] [--visits N] [--source files|kafka]
        [--target local|cluster] [--master URL] [--separate true]

All steps run in one Spark session of this process; with ``--separate`` each runs as a process, as an orchestrator
would run it.

A rerun changes nothing. A later run reads only new and changed landing files, and builds only what depends on them: if
no table has changed since the last complete run, dbt has nothing to do. `dbt build` builds everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import filelock
from jsonargparse import auto_cli
from tabulate import tabulate

from case_study.last_run import News
from case_study.main_job import FEEDS, REPORT, Step, generator_step, main_job
from case_study.runners import ROOT, OneSession, Runner, as_process
from case_study.sources import played_sources
from python_jobs.shared.core.failures import DataRefused, JobFailed
from python_jobs.shared.spark.session import spark_session
from services.processes import ServiceFailed


class DemoFailed(Exception):
    """A failure of the demo: one sentence, and an exit code of the contract in python_jobs/shared/spark/job.py."""

    def __init__(self, sentence: str, exit_code: int = 1) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


def main(
    input: str | None = None,
    visits: int = 200_000,
    source: Literal["files", "kafka"] = "files",
    target: str = "local",
    master: str | None = None,
    separate: bool = False,
) -> int:
    """Run the main job from raw JSON files to published gold tables.

    Args:
        input: landing folder (visits/, users/, user_changes/, devices/, devices_list/); by default the demo generates
            data once.
        visits: number of page events to generate.
        source: files, or kafka: visits come as records of a topic, and users come from PostgreSQL through Debezium. The
            services run as long as the demo.
        target: dbt target, local (embedded Spark) or cluster (Spark Thrift Server).
        master: Spark master of the jobs; by default spark-submit's.
        separate: run each step as a process.

    Returns:
        The exit code.
    """
    try:
        lakehouse = lakehouse_root()
        if source == "kafka":
            # Tables from Kafka have other sources than tables from files, so they are in a separate lakehouse.
            os.environ |= {
                "LAKEHOUSE_ROOT": f"{os.environ['LAKEHOUSE_ROOT']}/by_kafka",
                "LAKEHOUSE_SOURCE": source,
            }
            lakehouse = os.environ["LAKEHOUSE_ROOT"]
        landing = Path(input).absolute() if input else ROOT / "landing"
        if input:
            feeds = present_feeds(landing)
        with only_run(Path(lakehouse)):
            news = News(Path(lakehouse), ROOT, target)
            run = as_process if separate else OneSession.opened_by_dbt(target, master)
            if not input:
                generate(landing, visits, run)
                feeds = present_feeds(landing)
            if source == "kafka":
                seconds, report, feeds = run_from_kafka(lakehouse, landing, feeds, target, master, run, news)
            else:
                steps = main_job(lakehouse, landing, feeds, target=target, master=master)
                seconds, report = run_steps(steps, run, news)
            absent = [feed for feed in FEEDS if feed not in feeds]
            summarise(seconds, report or news.last.report, absent, news.last.seconds)
            news.save(report, seconds)
    except ServiceFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    except (DemoFailed, JobFailed) as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code
    return 0


def lakehouse_root() -> str:
    """Return the root of the lakehouse (LAKEHOUSE_ROOT), which the activate script sets.

    Raises:
        DemoFailed: LAKEHOUSE_ROOT is not set.
    """
    if not os.environ.get("LAKEHOUSE_ROOT"):
        raise DemoFailed(
            "LAKEHOUSE_ROOT is not set: run `source .venv/bin/activate` first, or `make demo`", 2
        )
    return os.environ["LAKEHOUSE_ROOT"]


def present_feeds(landing: Path) -> list[str]:
    """Return the feeds in the landing folder.

    Raises:
        DemoFailed: the folder doesn't exist, can't be read, or has no feed.
    """
    try:
        if not landing.is_dir():
            raise DemoFailed(f"the input folder '{landing}' doesn't exist", 4)
        feeds = [feed for feed in FEEDS if (landing / feed).is_dir()]
    except OSError as failure:
        raise DemoFailed(f"the input folder '{landing}' can't be entered: {failure.strerror}") from None
    for feed in feeds:
        if not os.access(landing / feed, os.R_OK | os.X_OK):
            raise DemoFailed(f"the folder '{landing / feed}' can't be read: Permission denied")
    if not feeds:
        raise DemoFailed(f"'{landing}' holds none of the folders {', '.join(FEEDS)}", 4)
    return feeds


@contextlib.contextmanager
def only_run(lakehouse: Path) -> Iterator[None]:
    """Lock the lakehouse for the block.

    Raises:
        DemoFailed: another run has the lock, or the lakehouse can't be written.
    """
    try:
        lakehouse.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(lakehouse / ".main_job.lock", timeout=0)
        lock.acquire()
    except filelock.Timeout:
        raise DemoFailed(f"another main job is running on {lakehouse}; wait for it to end") from None
    except OSError as failure:
        raise DemoFailed(f"the lakehouse at {lakehouse} can't be written: {failure.strerror}") from None
    try:
        yield
    finally:
        lock.release()


def generate(landing: Path, visits: int, run: Runner) -> None:
    """Generate the case study's data unless it exists; truth.json is written last and marks a complete set."""
    truth = landing / "truth.json"
    if truth.exists() and json.loads(truth.read_text(encoding="utf-8"))["parameters"]["visits"] == visits:
        print(f"landing data exists: {landing}", flush=True)
    else:
        run_steps([generator_step(landing, visits)], run)


def run_from_kafka(
    lakehouse: str, landing: Path, feeds: list[str], target: str, master: str | None, run: Runner, news: News
) -> tuple[dict[str, float], dict[str, Any], list[str]]:
    """Play the landing folder's feeds into services and run the main job on these services.

    Returns the seconds of each step, the report and the used feeds. Users come from their changes, so the feed of their
    extracts is not used.
    """
    feeds = [feed for feed in feeds if feed != "users"]
    spark = run.spark if isinstance(run, OneSession) else spark_session("played_sources")
    with played_sources(spark, landing, feeds, Path(lakehouse) / ".services") as bootstrap_servers:
        if not isinstance(run, OneSession):
            spark.stop()
        steps = main_job(
            lakehouse, landing, feeds, target=target, master=master, bootstrap_servers=bootstrap_servers
        )
        return *run_steps(steps, run, news), feeds


def run_steps(
    steps: list[Step], run: Runner, news: News | None = None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Run the steps in order; return the seconds of each step that ran, and the report of the last step.

    Args:
        steps: the steps.
        run: how a step runs.
        news: what says that a step has nothing to do; by default each step runs.

    Raises:
        DemoFailed: a step failed.
    """
    seconds: dict[str, float] = {}
    report: dict[str, Any] = {}
    for number, planned in enumerate(steps, start=1):
        elapsed = sum(seconds.values())
        print(f"\nstep {number} of {len(steps)}, after {elapsed:.0f} s", flush=True)
        step = news.needed(planned) if news else planned
        if step is None:
            print(f"{planned.name}: no table has changed since the last complete run", flush=True)
            continue
        print(f"$ {shlex.join(step.command)}", flush=True)
        started = time.monotonic()
        outcome = run(step)
        seconds[step.name] = time.monotonic() - started
        if outcome.report and step.name != REPORT:
            print(outcome.report, flush=True)
        if outcome.exit_code != 0:
            sentence = (
                f"step '{step.name}' exited {outcome.exit_code}; the tables keep their last good version"
            )
            if outcome.exit_code == DataRefused.exit_code and step.when_refused:
                sentence += f"; {step.when_refused}"
            raise DemoFailed(sentence, outcome.exit_code)
        if step.name == REPORT:
            report = json.loads(outcome.report or "{}")
    return seconds, report


def summarise(
    seconds: dict[str, float], report: dict[str, Any], absent: list[str], last_seconds: dict[str, float]
) -> None:
    """Print the report's numbers, the steps' times with those of the last complete run, and further commands."""
    if report:
        for table in ("lines", "delays", "tables"):
            print("\n" + tabulate(report[table], headers="keys", tablefmt="simple"))
    times = [(step, seconds.get(step), last_seconds.get(step)) for step in {**last_seconds, **seconds}]
    times.append(("total", sum(seconds.values()), sum(last_seconds.values()) if last_seconds else None))
    headers = ["step", "seconds", "last run"]
    print("\n" + tabulate(times, headers=headers, tablefmt="simple", floatfmt=".1f", missingval="-"))
    if absent:
        print(f"\nnot in the input: {', '.join(absent)}; the tables made from these feeds got no rows")
    # Commands that the user types need the environment variables that the demo has set for its steps.
    by_kafka = ""
    if os.environ.get("LAKEHOUSE_SOURCE") == "kafka":
        root = shlex.quote(os.environ["LAKEHOUSE_ROOT"])
        by_kafka = f"\n  first            export LAKEHOUSE_ROOT={root} LAKEHOUSE_SOURCE=kafka"
    print(
        "\nwhere to look next"
        "\n  rejected lines   silver_visits_dead_letter, silver_visits_quarantine"
        "\n  their numbers    observability_visits_accounting, observability_visits_lateness"
        f"{by_kafka}"
        "\n  a query          dbt show --inline \"select * from {{ ref('gold_page_views_by_hour') }}\""
        "\n  documentation    dbt docs generate && dbt docs serve, and docs/"
    )


if __name__ == "__main__":
    sys.exit(auto_cli(main, as_positional=False))
