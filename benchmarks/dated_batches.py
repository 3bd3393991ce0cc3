"""What a streaming batch costs when its target holds 1 day or 100 days: windowed counter, Checkpointer, sessions.

Each batch changes rows of the newest day. The alternative is the same MERGE without the dates of the batch: Delta then
joins the batch with the keys of all days.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from unittest.mock import patch

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.error_management import checkpointer, windowed_counter
from python_jobs.shared.delta import keyed_tables
from python_jobs.shared.delta.streams import create_table, nullable

DAYS, GROUPS, SESSIONS = 100, 200, 50_000
LAST = "2024-12-31"
BATCH = "window_start >= timestamp'2024-12-31 22:00:00'"
Write = Callable[[DataFrame, int], None]


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """Each writer, on a table of one day and on a table of 100 days."""
    spark = bench.spark
    groups, sessions = max(2, int(GROUPS * bench.scale)), bench.rows(SESSIONS)

    def windows(days: int) -> DataFrame:
        """Return the windows of 10 minutes of the last days."""
        start = F.timestamp_seconds(
            F.unix_timestamp(F.lit(f"{LAST} 23:50:00").cast("timestamp")) - F.col("id") * 600
        )
        return spark.range(days * 144).select(
            start.alias("window_start"), (start + F.expr("interval 10 minutes")).alias("window_end")
        )

    def counter(target: str) -> Write:
        params = windowed_counter.Parameters(
            source="none", target=target, checkpoint="none", output_mode="update", group_by=["page"]
        )
        schema = windowed_counter.first_revisions(counts(1), params.processing_time()).schema
        create_table(spark, target, nullable(schema), ["window_date"])
        return windowed_counter.WindowReviser(spark, params).write

    def counts(days: int) -> DataFrame:
        pages = spark.range(groups).select(F.concat(F.lit("page_"), "id").alias("page"))
        return windows(days).crossJoin(pages).withColumn("events", F.lit(0).cast("bigint"))

    def visitors_of(target: str) -> Write:
        checkpointer.create_counts(spark, target)
        return checkpointer.WindowCountMerger(spark, target, "the topic").write

    def visitors(days: int) -> DataFrame:
        dated = windows(days).withColumn("window_date", F.to_date("window_start"))
        return dated.withColumn("unique_keys", F.lit(0).cast("bigint"))

    def sink(target: str) -> Write:
        return keyed_tables.DeltaSink(spark, target, found(1), ["session_id"], "first_append_date").write

    def found(days: int) -> DataFrame:
        start = F.timestamp_seconds(
            F.unix_timestamp(F.lit(f"{LAST} 23:59:59").cast("timestamp"))
            - (F.col("id") * 86_400 / sessions).cast("int")
        )
        return spark.range(days * sessions).select(
            F.sha2(F.col("id").cast("string"), 256).alias("session_id"),
            start.alias("window_start"),
            F.to_date(start).alias("first_append_date"),
            F.lit(0).cast("bigint").alias("visits"),
        )

    writers: list[tuple[str, Callable[[str], Write], Callable[[int], DataFrame], str, str]] = [
        ("windowed counter", counter, counts, "events", "python_jobs.error_management.windowed_counter"),
        ("Checkpointer", visitors_of, visitors, "unique_keys", "python_jobs.error_management.checkpointer"),
        ("sessions", sink, found, "visits", "python_jobs.shared.delta.keyed_tables"),
    ]
    for name, writer, rows, changed, module in writers:
        numbers = count(1)

        def variant(
            called: str,
            days: int,
            with_dates: bool = True,
            name: str = name,
            writer: Callable[[str], Write] = writer,
            rows: Callable[[int], DataFrame] = rows,
            changed: str = changed,
            module: str = module,
            numbers: Iterator[int] = numbers,
        ) -> Variant:
            write = writer(str(bench.folder / f"{name} {called}".replace(" ", "_")))
            write(rows(days), 0)

            def batch() -> None:
                number = next(numbers)
                write(rows(1).where(BATCH).withColumn(changed, F.lit(number).cast("bigint")), number)

            def without_dates() -> None:
                with patch(f"{module}.among", lambda *_: "true"):
                    batch()

            return Variant(called, batch if with_dates else without_dates, None)

        yield Comparison(
            title=f"A batch of {name} for the newest day",
            rows=rows(1).where(BATCH).count(),
            note=f"The table holds {rows(1).count():,} rows a day.",
            variants=[
                variant("after 1 day", 1),
                variant("after 100 days", DAYS),
                variant("after 100 days, without the dates", DAYS, with_dates=False),
            ],
            aims=[
                Aim("after 100 days", "after 1 day", 1.2),
                Aim("after 100 days", "after 100 days, without the dates", 1.0),
            ],
            repetitions=7,
        )
