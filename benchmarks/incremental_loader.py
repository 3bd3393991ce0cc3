"""Incremental Loader: what a run with few new files costs in a landing folder of many.

The landing folder has 100,000 files in hourly folders. Each measured run finds ten more. The ledger lists all earlier
files: ten of them were loaded by the job, and their rows in the ledger, and those of all others, were written at once,
because lines that were loaded before are read by no run.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.ingestion import incremental_loader
from python_jobs.ingestion.incremental_loader import Landing, Parameters
from python_jobs.shared.delta.commits import write_once

FILES, NEW_FILES, FILES_OF_AN_HOUR = 100_000, 10, 100
FIRST_HOUR = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
SPARK_LISTS, JOB_LISTS, JOB = (
    "Spark lists the folder",
    "the job's listing alone",
    f"the job, {NEW_FILES} new files",
)


def folder_of(landing: Path, number: int) -> Path:
    """Return the folder of the hour in which a file lies."""
    hour = FIRST_HOUR + dt.timedelta(hours=number // FILES_OF_AN_HOUR)
    return landing / f"date={hour:%Y-%m-%d}" / f"hour={hour:%H}"


def land(landing: Path, name: str, number: int) -> None:
    """Write a file of three lines."""
    path = folder_of(landing, number) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f'{{"visit_id": "{name}-{line}"}}\n' for line in range(3)), encoding="utf-8")


class LandingZone:
    """A landing folder with its bronze table and ledger."""

    def __init__(self, bench: Workbench, files: int) -> None:
        self.spark, self.files = bench.spark, files
        self.landing = bench.folder / "landing"
        self.parameters = Parameters(source=str(self.landing), target=str(bench.folder / "bronze"))
        self._numbers = itertools.count()
        for number in range(NEW_FILES):
            land(self.landing, f"part-{number}.json", number)
        incremental_loader.run(self.spark, self.parameters)
        for number in range(NEW_FILES, files):
            land(self.landing, f"part-{number}.json", number)
        listed = Landing(self.spark, str(self.landing)).files([""])
        load_ids = incremental_loader.assign_load_ids(listed, {})
        rows = incremental_loader.files_frame(self.spark, load_ids, ingested_at=0)
        write_once(self.spark, incremental_loader.ledger_rows(rows), self.parameters.ledger)

    def land_new_files(self) -> None:
        """Add new files to the newest hour."""
        run = next(self._numbers)
        for number in range(NEW_FILES):
            land(self.landing, f"new-{run}-{number}.json", self.files - 1)

    def load(self) -> None:
        """Run the job.

        Raises:
            AssertionError: it loaded other files than the new ones.
        """
        report = incremental_loader.run(self.spark, self.parameters)
        found = (report["files_new"], report["files_changed"], report["lines_written"])
        if found != (NEW_FILES, 0, 3 * NEW_FILES):
            raise AssertionError(f"the job loaded {found}")

    def list_by_spark(self) -> object:
        """List the folder as Spark does before it reads one."""
        return self.spark.read.option("recursiveFileLookup", "true").text(str(self.landing))

    def facts(self) -> dict[str, Any]:
        """Return the size of the ledger."""
        ledger = self.spark.read.format("delta").load(self.parameters.ledger)
        return {"files in the ledger at the end": f"{ledger.select('file_path').distinct().count():,}"}


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """One landing folder, listed and loaded."""
    zone = LandingZone(bench, bench.rows(FILES))
    yield Comparison(
        title=f"{NEW_FILES} new files in a landing folder of {zone.files:,} files",
        rows=zone.files,
        note=(
            "Rows are files. A listing alone does less on purpose: it loads nothing. Spark's listing is what any "
            "program pays that lets Spark read the folder."
        ),
        variants=[
            Variant(SPARK_LISTS, zone.list_by_spark, None),
            Variant(JOB_LISTS, lambda: Landing(bench.spark, str(zone.landing)).files([""]), None),
            Variant(JOB, zone.load, None, zone.land_new_files),
        ],
        aims=[Aim(JOB, SPARK_LISTS, 3.0)],
        facts=zone.facts,
    )
