"""Stateful Merger: going back by restore or by rebuilding from the increments, and what a run costs over its merge."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.idempotency.stateful_merger import Parameters, run
from python_jobs.shared.delta.commits import write_once
from python_jobs.shared.delta.merge import MergeRules, merge

ROWS = 10_000_000
RUNS = 8
"""Increments; each inserts its share of the rows and updates a tenth of as many older ones."""


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """A table of 10 M rows, made by eight runs; then the newest of them again."""
    spark, rows = bench.spark, bench.rows(ROWS)
    share = rows // RUNS
    increments, saved, live = (bench.folder / name for name in ("increments", "saved", "live"))
    built = str(bench.folder / "built")

    def increment(number: int) -> DataFrame:
        new = spark.range(number * share, (number + 1) * share)
        old = spark.range(0, number * share, 10).limit(share // 10)
        return new.unionAll(old).select(
            "id",
            F.lit(number).alias("run"),
            F.sha2(F.concat_ws("-", "id", F.lit(number)), 256).alias("payload"),
        )

    for number in range(RUNS):
        folder = str(increments / f"day=2024-10-0{number + 1}")
        increment(number).write.parquet(folder)

    def parameters(root: Path, day: int, step: str = "all") -> Parameters:
        return Parameters(
            target=str(root / "table"),
            versions=str(root / "versions"),
            query=f"select id, run, payload from parquet.`{increments}` where day = {{execution_time}}",
            execution_time=f"2024-10-0{day}",
            key=["id"],
            step=step,  # type: ignore[arg-type]
        )

    for day in range(1, RUNS + 1):
        run(spark, parameters(saved, day))

    def fresh() -> None:
        """Files are never changed, so links are as good as copies."""
        shutil.rmtree(live, ignore_errors=True)
        shutil.copytree(saved, live, copy_function=os.link)

    def restore() -> None:
        run(spark, parameters(live, RUNS, "restore"))

    def rebuild() -> None:
        all_before = spark.read.parquet(str(increments)).where(f"day < '2024-10-0{RUNS}'")
        newest = all_before.groupBy("id").agg(F.max_by(F.struct("run", "payload"), "run").alias("row"))
        write_once(spark, newest.select("id", "row.*"), built, replace_all=True)

    yield Comparison(
        "Back to the table before the newest run",
        rows,
        [
            Variant("rebuild from the increments", rebuild, lambda: bench.table(built)),
            Variant("restore", restore, lambda: bench.table(f"{live}/table"), fresh),
        ],
        [Aim("restore", "rebuild from the increments", 0.5)],
        repetitions=3,
        note="The rebuild takes the newest row of each key of all increments and overwrites a table.",
    )

    plain = str(live / "table")

    def replay() -> None:
        run(spark, parameters(live, RUNS))

    def merge_alone() -> None:
        merge(spark, spark.sql(parameters(live, RUNS).query.replace("{execution_time}", f"'2024-10-0{RUNS}'")), plain,
              MergeRules(["id"]))  # fmt: skip

    def before_the_run() -> None:
        fresh()
        restore()

    yield Comparison(
        "The newest run",
        rows,
        [
            Variant("Merger alone", merge_alone, lambda: bench.table(plain), before_the_run),
            Variant("Stateful Merger", replay, lambda: bench.table(plain), before_the_run),
            Variant("Stateful Merger, which restores first", replay, lambda: bench.table(plain), fresh),
        ],
        repetitions=3,
        note="Merger alone starts, as the others do, from the table before that run.",
    )
