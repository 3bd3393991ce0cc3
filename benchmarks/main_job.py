"""The main job against one hand-written script that makes the same tables, and against half its input.

Both sides are timed as processes, JVM starts included: six for the main job's commands, one for the script. The script
gives none of the main job's promises (rerun, increments, corrections, audits): the ratio is what these cost at first
load, when they are of no use yet.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from case_study.main_job import FEEDS, generator_step, main_job

VISITS = 5_000_000
ROOT = Path(__file__).resolve().parent.parent
COMPARED = {
    "silver/silver_visits": ("visit_id", "event_time", "page", "user_id", "payload_hash"),
    "gold/gold_page_views_by_hour": ("event_hour", "page", "views"),
    "gold/gold_referral_statistics_by_day": ("event_date", "referral", "events", "visits", "users"),
    "gold/gold_visit_statistics": ("event_date", "events", "visits", "users"),
}


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """Generate the input once, then run both sides on the same files."""
    full, half = bench.folder / "landing", bench.folder / "half"
    visits = bench.rows(VISITS)
    for landing, count in ((full, visits), (half, visits // 2)):
        execute(generator_step(landing, count).command, bench.folder)
    lakehouses = {name: bench.folder / f"lakehouse_{name}" for name in ("main_job", "script", "half")}

    def steps(landing: Path, lakehouse: Path) -> None:
        for step in main_job(str(lakehouse), landing, FEEDS):
            execute(step.command, lakehouse)

    def fresh(name: str) -> Path:
        shutil.rmtree(lakehouses[name], ignore_errors=True)
        lakehouses[name].mkdir()
        return lakehouses[name]

    script = ("spark-submit", "benchmarks/hand_written_main_job.py", str(full), str(lakehouses["script"]))
    yield Comparison(
        title=f"Main job, first load of {visits:,} visits",
        rows=visits,
        repetitions=1,
        warm_up=False,
        note="Whole processes, JVM starts included. The script keeps none of the main job's promises.",
        variants=[
            Variant(
                "main job",
                run=lambda: steps(full, lakehouses["main_job"]),
                result=lambda: published(bench, lakehouses["main_job"]),
                prepare=lambda: fresh("main_job"),
            ),
            Variant(
                "one hand-written script",
                run=lambda: execute(script, lakehouses["script"]),
                result=lambda: published(bench, lakehouses["script"]),
                prepare=lambda: fresh("script"),
            ),
            Variant(
                "main job, half the visits",
                run=lambda: steps(half, lakehouses["half"]),
                result=None,
                prepare=lambda: fresh("half"),
            ),
        ],
        aims=[
            Aim("main job", "one hand-written script", 1.25),
            Aim("main job", "main job, half the visits", 2.0),
        ],
    )


def execute(command: tuple[str, ...], lakehouse: Path) -> None:
    """Run one command of either side; its output is shown only when it fails."""
    environment = os.environ | {"LAKEHOUSE_ROOT": str(lakehouse)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} exited {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


def published(bench: Workbench, lakehouse: Path) -> DataFrame:
    """Return the compared columns of every compared table as text, one row a row, with the table's name."""
    spark = bench.spark  # started by now only: both sides had the machine for themselves
    rows: DataFrame | None = None
    for table, columns in COMPARED.items():
        text = F.to_json(F.struct(*columns)).alias("row")
        part = (
            spark.read.format("delta").load(f"{lakehouse}/{table}").select(F.lit(table).alias("table"), text)
        )
        rows = part if rows is None else rows.unionByName(part)
    assert rows is not None
    return rows
