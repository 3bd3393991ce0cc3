"""Late Data Detector against a plain stream that appends the same rows to one table.

The stream reads a Delta table of visits in four partitions, a fixed number of files a batch; one row in fifty is hours
late. The detector flags the rows and counts them in the same pass.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.error_management import late_data_detector as job
from python_jobs.error_management.late_data_detector import Parameters
from python_jobs.shared.delta.streams import BatchFunction, append, await_end, start_stream

ROWS = 20_000_000
BATCHES, FILES_A_BATCH = 4, 2
DAY_START = 1_767_225_600  # 2026-01-01
NOW = "2026-01-02T00:00:00Z"


def visits(ids: DataFrame, rows: int) -> DataFrame:
    """Visits of a day in the order of their times, but for one in fifty, which comes three hours late."""
    late = F.when(F.pmod(F.xxhash64("id"), F.lit(50)) == 0, 3 * 3600).otherwise(0)
    seconds = DAY_START + 4 * 3600 + F.col("id") * (16 * 3600 / rows) - late
    return ids.select(
        F.md5(F.col("id").cast("string")).alias("visit_id"),
        F.timestamp_micros((seconds * 1_000_000).cast("bigint")).alias("event_time"),
        F.concat(F.lit("category_"), F.col("id") % 20, F.lit("/article_"), F.col("id") % 1_009).alias("page"),
        (F.col("id") % 100_003).alias("user_id"),
        F.concat(F.lit("192.0.2."), F.col("id") % 256).alias("ip"),
        (F.xxhash64("id") % 600).alias("duration"),
        (F.col("id") % 4).cast("int").alias("partition"),
    )


class PlainWriter(BatchFunction):
    """Append each batch, once, as the job does with the rows on time."""

    def __init__(self, target: str) -> None:
        self.target = target

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Append one batch."""
        append(rows, self.target, {"txnAppId": "plain", "txnVersion": str(batch_id)})


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """The same batches through a plain stream and through the detector."""
    spark, rows = bench.spark, bench.rows(ROWS)
    source = str(bench.folder / "source")
    files = BATCHES * FILES_A_BATCH
    for file in range(files):  # one commit a file: their order is that of the event times
        ids = spark.range(file * rows // files, (file + 1) * rows // files, 1, 1)
        visits(ids, rows).write.format("delta").mode("append").save(source)
    columns = bench.table(source).columns
    reports: dict[str, Any] = {}

    def path(variant: str, name: str) -> str:
        return str(bench.folder / variant / name)

    def plain() -> None:
        writer = PlainWriter(path("plain", "target"))
        checkpoint = path("plain", "checkpoint")
        query = start_stream(spark, source, writer, checkpoint, max_files_per_trigger=FILES_A_BATCH)
        await_end(query, writer, source)

    def detector() -> None:
        parameters = Parameters(
            source=source,
            target=path("detector", "target"),
            dead_letter=path("detector", "dead_letter"),
            watermarks=path("detector", "watermarks"),
            checkpoint=path("detector", "checkpoint"),
            allowed_lateness="1 hour",
            partition_column="partition",
            max_files_per_trigger=FILES_A_BATCH,
            now=NOW,
        )
        reports["detector"] = job.run(spark, parameters)

    def table(variant: str, name: str) -> DataFrame:
        return bench.table(path(variant, name)).select(*columns)

    def clear(variant: str) -> None:
        shutil.rmtree(bench.folder / variant, ignore_errors=True)

    def counts() -> dict[str, Any]:
        report = reports["detector"]
        return {
            "late rows, of those read": f"{report['late']:,} of {report['read']:,}",
            "batches": len(report["batches"]),
        }

    yield Comparison(
        title="A stream of visits, one in fifty late",
        rows=rows,
        note=(
            f"{BATCHES} batches. The plain stream appends all rows to one table; the detector writes each row with its "
            "event time, flag, watermark and processing time, the late ones to their own partition, and one row a "
            "batch for the watermark; it also makes its three tables."
        ),
        variants=[
            Variant("plain stream", plain, lambda: table("plain", "target"), lambda: clear("plain")),
            Variant(
                "late_data_detector",
                detector,
                lambda: table("detector", "target"),
                lambda: clear("detector"),
            ),
        ],
        aims=[Aim("late_data_detector", "plain stream", 1.25)],
        repetitions=3,
        facts=counts,
    )
