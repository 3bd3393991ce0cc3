"""What readers gain from a compacted table, and what Compactor costs compared with a bare OPTIMIZE.

The table is a stream's: a file every ten minutes for thirty days, in partitions of a day.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import functions as F

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.ingestion.compactor import Parameters, run

DAYS, FILES_A_DAY = 30, 144
ROWS = 4_320_000


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """Read everything, then one day of 30; then compact."""
    spark = bench.spark
    rows, small = bench.rows(ROWS), bench.folder / "small_files"
    # One task a file: rows of one id range go to one ten-minute file of one day.
    visits = spark.range(rows, numPartitions=DAYS * FILES_A_DAY).select(
        F.date_add(F.lit("2024-03-01").cast("date"), F.floor(F.col("id") * DAYS / rows).cast("int")).alias(
            "date"
        ),
        F.concat(F.lit("visit_"), F.md5(F.col("id").cast("string"))).alias("visit_id"),
        (F.xxhash64("id") % 100_003).alias("user_id"),
        F.concat(F.lit("page_"), F.col("id") % 1_009).alias("page"),
    )
    visits.write.format("delta").partitionBy("date").save(str(small))

    def twin(name: str) -> Path:
        """The same files under another path; Delta never changes one in place."""
        path = bench.folder / name
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(small, path, copy_function=os.link)
        return path

    def compact(path: Path) -> dict[str, object]:
        return run(spark, Parameters(table=str(path), vacuum=False))

    compacted = twin("compacted")
    report = compact(compacted)
    facts = {name: report[name] for name in report if name.endswith(("_before", "_after")) and report[name]}

    for title, condition in (("Read all rows", "true"), ("Read one day of 30", "date = '2024-03-10'")):

        def read(path: Path, condition: str = condition) -> None:
            bench.table(path).where(condition).write.format("noop").mode("overwrite").save()

        yield Comparison(
            title=title,
            rows=rows,
            note=f"{report['files_before']} files against the {report['files_after']} they became.",
            variants=[
                Variant("small files", lambda read=read: read(small), lambda: bench.table(small)),
                Variant("compacted", lambda read=read: read(compacted), lambda: bench.table(compacted)),
            ],
            aims=[Aim("compacted", "small files", 0.5)],
            repetitions=3,
            facts=lambda: facts,
        )

    def optimize() -> None:
        with_same_sizes = {"minFileSize": 32 * 2**20, "maxFileSize": 128 * 2**20}
        for name, size in with_same_sizes.items():
            spark.conf.set(f"spark.databricks.delta.optimize.{name}", str(size))
        spark.sql(f"optimize delta.`{bench.folder}/by_hand`")

    yield Comparison(
        title="Compact the table",
        rows=rows,
        note="Compactor also decides for each partition, measures the listing and writes its report.",
        variants=[
            Variant(
                "Compactor",
                lambda: compact(bench.folder / "by_job"),
                lambda: bench.table(bench.folder / "by_job"),
                lambda: twin("by_job"),
            ),
            Variant(
                "OPTIMIZE", optimize, lambda: bench.table(bench.folder / "by_hand"), lambda: twin("by_hand")
            ),
        ],
        aims=[Aim("Compactor", "OPTIMIZE", 1.15)],
        repetitions=3,
    )
