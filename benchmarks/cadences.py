"""Batch-Microbatch Continuum: the same day by one batch, by one run of ``available_now``, and by micro-batches.

The day comes in eight files, in order of time, so that nothing is late. The micro-batches are those of one query that
takes a file at a time: the time that a scheduler waits, or that a cluster idles, isn't measured.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

from pyspark.sql import functions as F

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.streaming import batch_microbatch_continuum as job

ROWS = 400_000
FILES = 8
PAGES = 200
DAY_START = 1_767_225_600_000_000  # 2026-01-01, in microseconds
BATCH, ONE_RUN, EIGHT = "batch", "available_now", "8 micro-batches"


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """Compare the cadences over one day."""
    rows = bench.rows(ROWS)
    runs = Runs(bench)
    for number in range(FILES):
        ids = bench.spark.range(number * rows // FILES, (number + 1) * rows // FILES, 1, 1)
        visits = ids.select(
            F.timestamp_micros(F.lit(DAY_START) + F.col("id") * (86_400_000_000 // rows)).alias("event_time"),
            F.pmod(F.xxhash64("id"), F.lit(PAGES)).alias("page"),
            (F.col("id") % 997).alias("duration_s"),
        )
        visits.write.format("delta").mode("append").save(runs.path("visits"))
    yield Comparison(
        title="Windows of ten minutes of one day",
        rows=rows,
        note=f"{FILES} files, {PAGES} pages, {144 * PAGES:,} windows; all variants leave the same table.",
        variants=[
            runs.variant(BATCH, cadence="batch", from_="2026-01-01", to="2026-01-02"),
            runs.variant(ONE_RUN, cadence="available_now"),
            runs.variant(EIGHT, cadence="available_now", max_files_per_trigger=1),
        ],
        aims=[Aim(ONE_RUN, BATCH, 2.0)],
        repetitions=2,
        facts=runs.batches,
    )


class Runs:
    """Runs of the job over one source, each with a table and a checkpoint of its own."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self._reports: dict[str, dict[str, Any]] = {}

    def path(self, *names: str) -> str:
        """Return a path below the benchmark's folder."""
        return str(self._bench.folder.joinpath(*names))

    def variant(self, name: str, **parameters: Any) -> Variant:
        """Return a variant that starts without table and without state."""

        def run() -> None:
            self._reports[name] = job.run(
                self._bench.spark,
                job.Parameters(
                    source=self.path("visits"),
                    target=self.path(name, "gold"),
                    checkpoint=self.path(name, "checkpoint"),
                    key={"page": "page"},
                    window="10 minutes",
                    sums={"seconds": "duration_s"},
                    **parameters,
                ),
            )

        return Variant(
            name,
            run,
            lambda: self._bench.table(self.path(name, "gold")),
            lambda: shutil.rmtree(self._bench.folder / name, ignore_errors=True),
        )

    def batches(self) -> dict[str, Any]:
        """Return the number of batches of each stream and its largest state."""
        streams = {name: report["batches"] for name, report in self._reports.items() if "batches" in report}
        return {
            f"{name}: batches, most rows of state": (
                f"{len(batches)}, {max(batch['state_rows'] for batch in batches):,}"
            )
            for name, batches in streams.items()
        }
