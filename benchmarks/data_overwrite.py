"""Data Overwrite and Fast Metadata Cleaner against DELETE and INSERT: one of 20 days of 10 million rows, or all.

Each variant starts from a copy of the same table and leaves the same rows; the new rows wait in a table of their own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.shared.delta.overwrite import overwrite
from python_jobs.shared.spark.session import settings

ROWS, DAYS = 10_000_000, 20
DAY = "2024-09-12"


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """A day of a partitioned table, a day of an unpartitioned one, a whole table."""
    spark, rows = bench.spark, bench.rows(ROWS)
    built = bench.folder / "built"

    def visits(page: str) -> DataFrame:
        return spark.range(0, rows, numPartitions=8).select(
            F.concat(F.lit("visit_"), F.xxhash64("id").cast("string")).alias("visit_id"),
            F.concat(F.lit(f"{page}_"), (F.xxhash64("id") % 1_009).cast("string")).alias("page"),
            F.date_add(F.lit("2024-09-01").cast("date"), (F.col("id") % DAYS).cast("int")).alias(
                "event_date"
            ),
        )

    def of_day(frame: DataFrame) -> DataFrame:
        return frame.where(f"event_date = '{DAY}'")

    old, new = visits("page"), visits("corrected")
    old.write.format("delta").save(str(built / "plain"))
    old.repartition(8, "event_date").write.format("delta").partitionBy("event_date").save(str(built / "days"))
    of_day(old).write.format("delta").save(str(built / "units" / "day"))
    old.where(f"event_date <> '{DAY}'").write.format("delta").save(str(built / "units" / "others"))
    of_day(new).write.format("delta").save(str(built / "new_day"))
    new.write.format("delta").save(str(built / "new_all"))

    def variant(
        name: str,
        table: str,
        work: Callable[[str], object],
        result: Callable[[Path], DataFrame] = bench.table,
    ) -> Variant:
        place = bench.folder / "runs" / name.replace(" ", "_")

        def prepare() -> None:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(built / table, place)

        return Variant(name, lambda: work(str(place)), lambda: result(place), prepare)

    def delete_and_insert(where: str, source: str) -> Callable[[str], object]:
        def work(path: str) -> None:
            spark.sql(f"delete from delta.`{path}` where {where}")
            bench.table(built / source).write.format("delta").mode("append").save(path)

        return work

    def replace(where: str | None, source: str) -> Callable[[str], object]:
        return lambda path: overwrite(spark, bench.table(built / source), path, where)

    def dynamic(path: str) -> None:
        with settings(spark, {"spark.sql.sources.partitionOverwriteMode": "dynamic"}):
            bench.table(built / "new_day").write.format("delta").mode("overwrite").save(path)

    def clean_unit(path: str) -> None:
        spark.sql(f"delete from delta.`{path}/day`")
        bench.table(built / "new_day").write.format("delta").mode("append").save(f"{path}/day")

    def union_of_units(path: Path) -> DataFrame:
        return bench.table(path / "others").unionByName(bench.table(path / "day"))

    of_the_day = f"event_date = '{DAY}'"
    yield Comparison(
        title=f"Replace one of {DAYS} days, table partitioned by day",
        rows=rows,
        note="Dynamic overwrite keeps a day that has lost all its rows; the others clear it.",
        variants=[
            variant("delete and insert", "days", delete_and_insert(of_the_day, "new_day")),
            variant("partition", "days", replace(of_the_day, "new_day")),
            variant("dynamic overwrite", "days", dynamic),
        ],
        aims=[Aim("partition", "delete and insert", 1.0)],
    )
    yield Comparison(
        title=f"Replace one of {DAYS} days, table not partitioned",
        rows=rows,
        note="Each file holds rows of each day, so a condition rewrites all of them; a unit's table is emptied unread.",
        variants=[
            variant("delete and insert by day", "plain", delete_and_insert(of_the_day, "new_day")),
            variant("condition", "plain", replace(of_the_day, "new_day")),
            variant("unit table cleaned", "units", clean_unit, union_of_units),
        ],
        aims=[Aim("unit table cleaned", "delete and insert by day", 0.5)],
    )
    yield Comparison(
        title="Replace the whole table",
        rows=rows,
        variants=[
            variant("delete and insert all", "plain", delete_and_insert("true", "new_all")),
            variant("table", "plain", replace(None, "new_all")),
        ],
        aims=[Aim("table", "delete and insert all", 1.1)],
    )
