"""Windowed Deduplicator: the macro against dbt_utils' and plain forms, the job against a plain stream, its state.

The stream reads 24 files, an hour of event time each, in batches of one file.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dbt.adapters.spark.relation import SparkRelation
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.harness import Comparison, Variant, Workbench
from python_jobs.error_management import windowed_deduplicator as job
from python_jobs.error_management.windowed_deduplicator import Parameters
from python_jobs.shared.delta.state_stores import STATE_STORE
from python_jobs.shared.spark.session import settings
from tests.support.render import MacroRenderer

BATCH_ROWS = 5_000_000
HOUR_ROWS = 50_000
HOURS = 24
DAY_START = 1_767_225_600_000_000  # 2026-01-01, in microseconds


def visits(ids: DataFrame, seconds_of_a_row: float) -> DataFrame:
    """Visits with a key of 32 characters, of which each tenth comes a second time, five rows later, as it was."""
    number = F.when(F.col("id") % 10 == 9, F.col("id") - 5).otherwise(F.col("id"))
    return ids.select(
        F.md5(number.cast("string")).alias("visit_id"),
        F.timestamp_micros((F.lit(DAY_START) + number * seconds_of_a_row * 1_000_000).cast("bigint")).alias(
            "event_time"
        ),
        F.concat(F.lit("category_"), number % 20, F.lit("/article_"), number % 1_009).alias("page"),
        (number % 100_003).alias("user_id"),
        (number % 600).alias("duration"),
    )


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """A batch in SQL, then a day as a stream."""
    yield _batch(bench)
    yield _stream(bench)


def _folder(bench: Workbench, variant: str) -> Path:
    return bench.folder / re.sub(r"\W+", "_", variant)


def _batch(bench: Workbench) -> Comparison:
    spark, rows = bench.spark, bench.rows(BATCH_ROWS)
    render = MacroRenderer(bench.folder / "render", spark)
    visits(spark.range(rows), 86_400 / rows).write.format("delta").saveAsTable("default.batch")
    source = SparkRelation.create(schema="default", identifier="batch")  # as a model's ref gives it
    ranked = f"select *, row_number() over (partition by visit_id order by event_time) as rn from {source}"
    by_key = {"key": "visit_id", "order_by": "event_time"}
    statements = {
        "macro": render("windowed_deduplicator", relation=source, **by_key),
        "macro, with flags": render("windowed_deduplicator_flags", relation=source, **by_key),
        "plain row_number": f"select * except (rn) from ({ranked}) where rn = 1",
        "dbt_utils.deduplicate": (
            f"with row_numbered as ({ranked}) select distinct data.* from {source} as data "
            "natural join row_numbered where row_numbered.rn = 1"
        ),
    }

    def variant(name: str, query: Callable[[], DataFrame], kept: str = "true") -> Variant:
        path = str(_folder(bench, name))
        return Variant(
            name,
            lambda: query().write.format("delta").mode("overwrite").save(path),
            lambda: bench.table(path).where(kept).drop("duplicate_as"),
        )

    return Comparison(
        title="A batch, one row in ten a repeat",
        rows=rows,
        note=(
            "All read one Delta table and write another. `dbt_utils.deduplicate` is the SQL of its default form, which "
            "a Spark target gets; it loses rows with a NULL in any column. Only the macro gives the same row for any "
            "order of rows whose `order_by` is equal."
        ),
        variants=[
            variant("dropDuplicates", lambda: spark.table("default.batch").dropDuplicates(["visit_id"])),
            variant("plain row_number", lambda: spark.sql(statements["plain row_number"])),
            variant("dbt_utils.deduplicate", lambda: spark.sql(statements["dbt_utils.deduplicate"])),
            variant("macro", lambda: spark.sql(statements["macro"])),
            variant(
                "macro, with flags",
                lambda: spark.sql(statements["macro, with flags"]),
                "duplicate_as is null",
            ),
        ],
        repetitions=3,
    )


def _stream(bench: Workbench) -> Comparison:
    spark, an_hour = bench.spark, bench.rows(HOUR_ROWS)
    source = str(bench.folder / "hours")
    for hour in range(HOURS):
        rows = spark.range(hour * an_hour, (hour + 1) * an_hour, numPartitions=1)
        visits(rows, 3_600 / an_hour).write.format("delta").mode("append").save(source)
    states: dict[str, list[int]] = {}

    def path(variant: str, name: str) -> str:
        return str(_folder(bench, variant) / name)

    def run_job(name: str, form: job.Form) -> None:
        report = job.run(
            spark,
            Parameters(
                source=source,
                target=path(name, "target"),
                dead_letter=path(name, "dead_letter"),
                checkpoint=path(name, "checkpoint"),
                key=["visit_id"],
                event_time="event_time",
                form=form,
                max_files_per_trigger=1,
                now="2026-01-02",
            ),
        )
        states[name] = [batch["state_rows"] for batch in report["batches"]][:HOURS]

    def run_plain(name: str, keys: list[str], state_store: dict[str, str]) -> None:
        rows = spark.readStream.format("delta").option("maxFilesPerTrigger", 1).load(source)
        unique = rows.withWatermark("event_time", "10 minutes").dropDuplicates(keys)
        sink = unique.writeStream.format("delta").option("checkpointLocation", path(name, "checkpoint"))
        with settings(spark, state_store):
            query: StreamingQuery = sink.trigger(availableNow=True).start(path(name, "target"))
        query.awaitTermination()
        progress = query.recentProgress[:HOURS]
        states[name] = [batch.stateOperators[0].numRowsTotal for batch in progress]

    def variant(name: str, run: Callable[[], None]) -> Variant:
        return Variant(
            name,
            run,
            lambda: bench.table(path(name, "target")),
            prepare=lambda: shutil.rmtree(_folder(bench, name), ignore_errors=True),
        )

    def facts() -> dict[str, Any]:
        run_plain(f"{plain} without event time", ["visit_id"], STATE_STORE)
        hours = (2, HOURS // 2, HOURS)
        return {
            f"state rows after hours {hours[0]}, {hours[1]} and {hours[2]}, {name}": ", ".join(
                f"{rows[hour - 1]:,}" for hour in hours
            )
            for name, rows in states.items()
        }

    timed, plain = ["visit_id", "event_time"], "plain dropDuplicates"
    return Comparison(
        title="A day of event time as a stream, watermark 10 minutes",
        rows=an_hour * HOURS,
        note=(
            "24 batches of an hour each into a Delta table. The plain streams take the key with its event time; "
            "without it, as the last fact shows, the state only grows."
        ),
        variants=[
            variant(
                f"{plain}, state on the heap", lambda: run_plain(f"{plain}, state on the heap", timed, {})
            ),
            variant(f"{plain}, RocksDB", lambda: run_plain(f"{plain}, RocksDB", timed, STATE_STORE)),
            variant("job, key_and_time", lambda: run_job("job, key_and_time", "key_and_time")),
            variant("job, within_watermark", lambda: run_job("job, within_watermark", "within_watermark")),
        ],
        repetitions=3,
        warm_up=False,  # each run has 24 batches, and the comparison before has warmed Spark up
        facts=facts,
    )
