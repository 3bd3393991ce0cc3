"""The case study's main job, as a person would run it: every step is a command that this prints before running it.

    python -m services.demo [--input FOLDER] [--visits N] [--target local|cluster] [--master URL]

Landing folder -> bronze (Incremental Loader) -> silver (Dead-Letter, then dbt) -> gold (dbt). A rerun changes
nothing; a new or changed landing file is all that a later run reads. The steps keep no state here: each can be run
by hand, in this order, and a run that died is repaired by the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import filelock
from jsonargparse import auto_cli
from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
FEEDS = ("visits", "users", "user_changes", "devices")
LOADER = "python_jobs/ingestion/incremental_loader.py"
DEAD_LETTER = "python_jobs/error_management/dead_letter.py"
REPORT = "python_jobs/observability/visits_report.py"
GENERATOR = "python_jobs/datasets/blog_platform.py"


class StepFailed(Exception):
    """A step's command exited with another code than 0; its own message is already on standard error."""


@dataclass
class Run:
    """One run of the main job: where it works, how it submits, and what its steps took and reported."""

    lakehouse: Path
    landing: Path
    target: str
    master: str | None
    seconds: dict[str, float] = field(default_factory=dict)
    reports: dict[str, dict[str, object]] = field(default_factory=dict)

    def submit(self, step: str, job: str, **parameters: object) -> dict[str, object]:
        """Run one job with spark-submit and return its report."""
        command = ["spark-submit", *(["--master", self.master] if self.master else []), job]
        for name, value in parameters.items():
            command += [f"--{name}", str(value)]
        output = self.run(step, command, capture=True)
        report = json.loads(output.strip().splitlines()[-1])
        self.reports[step] = report
        return report  # type: ignore[no-any-return]

    def run(self, step: str, command: list[str], *, capture: bool = False) -> str:
        """Print and run one command; its time is kept under ``step``."""
        print(f"\n$ {shlex.join(command)}", flush=True)
        started = time.monotonic()
        done = subprocess.run(
            command, cwd=ROOT, text=True, check=False, stdout=subprocess.PIPE if capture else None
        )
        self.seconds[step] = time.monotonic() - started
        if capture:
            print(done.stdout, end="", flush=True)
        if done.returncode != 0:
            raise StepFailed(f"step '{step}' exited {done.returncode}; the tables keep their last good version")
        return done.stdout or ""


def main(
    input: str | None = None,  # noqa: A002 (the flag's name)
    visits: int = 200_000,
    target: str = "local",
    master: str | None = None,
) -> int:
    """Run the main job from raw JSON files to published gold tables.

    Args:
        input: landing folder (visits/, users/, user_changes/, devices/); without it, data is generated once.
        visits: how many page events to generate.
        target: dbt target, local (embedded Spark) or cluster (Spark Thrift Server).
        master: Spark master of the jobs; without it, the default of spark-submit.

    Returns:
        The exit code: that of the contract in python_jobs/job.py.
    """
    if "LAKEHOUSE_ROOT" not in os.environ:
        print("LAKEHOUSE_ROOT is not set: run `source .venv/bin/activate` first, or `make demo`", file=sys.stderr)
        return 2
    lakehouse = Path(os.environ["LAKEHOUSE_ROOT"])
    landing = Path(input).absolute() if input else ROOT / "landing"
    if input and not landing.is_dir():
        print(f"the input folder '{input}' doesn't exist", file=sys.stderr)
        return 2
    run = Run(lakehouse, landing, target, master)
    try:
        with only_run(lakehouse):
            if not input:
                generate(run, visits)
            return main_job(run)
    except (StepFailed, filelock.Timeout) as failure:
        print(failure, file=sys.stderr)
        return 1


@contextlib.contextmanager
def only_run(lakehouse: Path) -> Iterator[None]:
    """Hold the lakehouse for this run; a second one says so in one sentence and changes nothing."""
    try:
        lakehouse.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(lakehouse / ".main_job.lock", timeout=0)
        lock.acquire()
    except filelock.Timeout:
        raise StepFailed(f"another main job is running on {lakehouse}; wait for it to end") from None
    except OSError as failure:
        raise StepFailed(f"the lakehouse at {lakehouse} can't be written: {failure.strerror}") from None
    try:
        yield
    finally:
        lock.release()


def generate(run: Run, visits: int) -> None:
    """Make the case study's data unless it is there; truth.json is written last, so it marks a complete set."""
    truth = run.landing / "truth.json"
    if truth.exists() and json.loads(truth.read_text(encoding="utf-8")).get("visits_requested", visits) == visits:
        print(f"landing data is there: {run.landing}")
        return
    run.submit("generate", GENERATOR, output=run.landing, visits=visits, overwrite="true")


def main_job(run: Run) -> int:
    """Landing to gold; returns the exit code and ends with the table of what happened."""
    present = [feed for feed in FEEDS if (run.landing / feed).is_dir()]
    absent = [feed for feed in FEEDS if feed not in present]
    if not present:
        print(f"{run.landing} holds none of the folders {', '.join(FEEDS)}", file=sys.stderr)
        return 4
    for feed in present:
        run.submit(
            f"load {feed}", LOADER, source=run.landing / feed, target=run.lakehouse / f"bronze/bronze_{feed}"
        )
    if "visits" in present:
        run.submit(
            "dead-letter visits",
            DEAD_LETTER,
            config="conf/jobs/dead_letter_visits.yml",
            source=run.lakehouse / "bronze/bronze_visits",
            target=run.lakehouse / "silver/silver_visits_parsed",
            dead_letter=run.lakehouse / "silver/silver_visits_dead_letter",
            checkpoint=run.lakehouse / "checkpoints/dead_letter_visits",
        )
    exclude = [f"source:bronze.bronze_{feed}+" for feed in absent]
    if "visits" in absent:
        exclude.append("source:parsed.*+")
    run.run(
        "dbt build",
        ["dbt", "build", "--target", run.target, *(["--exclude", *exclude] if exclude else [])],
    )
    if "visits" in present:
        run.submit("report", REPORT, lakehouse=run.lakehouse)
    summarise(run, absent)
    return 0


def summarise(run: Run, absent: list[str]) -> None:
    """Print what was read, kept, rejected and published, what a step took, and where to look next."""
    report = run.reports.get("report", {})
    print("\nVisit lines\n" + tabulate(report.get("lines", []), headers="keys", tablefmt="simple"))
    print("\nPublished\n" + tabulate(report.get("tables", []), headers="keys", tablefmt="simple"))
    steps = [(step, f"{seconds:.1f} s") for step, seconds in run.seconds.items()]
    print("\nSteps\n" + tabulate([*steps, ("total", f"{sum(run.seconds.values()):.1f} s")], tablefmt="simple"))
    if absent:
        print(f"\nSkipped, no such folder in the input: {', '.join(absent)}, and the tables made of them")
    print(
        "\nLook next"
        "\n  rejected lines   silver_visits_dead_letter, silver_visits_quarantine"
        "\n  their numbers    observability_visits_accounting"
        "\n  a query          dbt show --inline \"select * from {{ ref('gold_page_views_by_hour') }}\""
        "\n  what it all is   dbt docs generate && dbt docs serve; docs/"
    )


if __name__ == "__main__":
    sys.exit(auto_cli(main, as_positional=False))
