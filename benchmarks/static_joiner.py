"""Static Joiner's stream against a plain stream-static join of the same tables.

The stream reads a Delta table of visits, two files a batch; the reference lacks the device of each tenth visit. What
the job adds is mostly a fixed time: it makes its target, checks the reference once and counts the rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.data_value import static_joiner as job
from python_jobs.data_value.static_joiner import Parameters

ROWS = 8_000_000
DEVICES = 20_000
BATCHES, FILES_A_BATCH = 4, 2


def visits(ids: DataFrame) -> DataFrame:
    """Visits of devices, one in ten of a device that the reference doesn't have."""
    device = F.pmod(F.xxhash64("id"), F.lit(DEVICES * 10 // 9))
    return ids.select(
        F.md5(F.col("id").cast("string")).alias("visit_id"),
        F.concat(F.lit("category_"), F.col("id") % 20, F.lit("/article_"), F.col("id") % 1_009).alias("page"),
        F.concat(F.lit("type_"), device % 7).alias("dev_type"),
        device.cast("string").alias("dev_version"),
    )


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """The same batches through a plain stream and through the job."""
    spark, rows = bench.spark, bench.rows(ROWS)
    source, reference = str(bench.folder / "source"), str(bench.folder / "reference")
    files = BATCHES * FILES_A_BATCH
    for file in range(files):
        ids = spark.range(file * rows // files, (file + 1) * rows // files, 1, 1)
        visits(ids).write.format("delta").mode("append").save(source)
    devices = spark.range(0, DEVICES, 1, 1).select(
        F.concat(F.lit("type_"), F.col("id") % 7).alias("type"),
        F.col("id").cast("string").alias("version"),
        F.concat(F.lit("device "), F.col("id")).alias("full_name"),
    )
    devices.write.format("delta").save(reference)
    reports: dict[str, Any] = {}

    def path(variant: str, name: str) -> str:
        return str(bench.folder / variant / name)

    def plain() -> None:
        facts = spark.readStream.format("delta").option("maxFilesPerTrigger", FILES_A_BATCH).load(source)
        names = bench.table(reference).select(
            F.col("type").alias("dev_type"),
            F.col("version").alias("dev_version"),
            F.col("full_name").alias("device"),
        )
        joined = facts.join(names, ["dev_type", "dev_version"], "left")
        sink = joined.writeStream.format("delta").option("checkpointLocation", path("plain", "checkpoint"))
        sink.trigger(availableNow=True).start(path("plain", "target")).awaitTermination()

    def static_joiner() -> None:
        parameters = Parameters(
            source=source,
            reference=reference,
            target=path("static_joiner", "target"),
            checkpoint=path("static_joiner", "checkpoint"),
            keys={"dev_type": "type", "dev_version": "version"},
            columns={"device": "full_name"},
            max_files_per_trigger=FILES_A_BATCH,
        )
        reports["static_joiner"] = job.run(spark, parameters)

    def variant(name: str, run: Any) -> Variant:
        columns = ["visit_id", "page", "dev_type", "dev_version", "device"]
        return Variant(
            name,
            run,
            lambda: bench.table(path(name, "target")).select(*columns),
            lambda: shutil.rmtree(bench.folder / name, ignore_errors=True),
        )

    def counts() -> dict[str, Any]:
        report = reports["static_joiner"]
        return {
            "rows without a device": f"{report['unmatched']:,} of {report['rows']:,}",
            "batches": report["batches"],
        }

    yield Comparison(
        title="A stream of visits with the name of their device",
        rows=rows,
        note=f"{BATCHES} batches; the reference has {DEVICES:,} rows and is broadcast in both.",
        variants=[variant("plain", plain), variant("static_joiner", static_joiner)],
        aims=[Aim("static_joiner", "plain", 1.1)],
        repetitions=3,
        facts=counts,
    )
