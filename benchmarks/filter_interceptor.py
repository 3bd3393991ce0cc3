"""Filter Interceptor against a plain WHERE: what it costs to know which condition rejected how many rows.

Each way reads one Delta table of visits and leaves the valid rows in a Delta table, or in a view over one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.error_management.filter_interceptor import Condition, Interceptor
from tests.support.render import MacroRenderer

ROWS = 10_000_000
CONDITIONS = [
    {"name": "visit_without_user", "condition": "user_id is not null", "category": "invalid"},
    {"name": "unreadable_time", "condition": "event_time is not null", "category": "invalid"},
    {"name": "monitoring_probe", "condition": "not startswith(page, 'healthcheck')"},
    {"name": "bot", "condition": "browser not in ('bot', 'crawler')"},
    {"name": "too_short", "condition": "length(page) > 2"},
]


def visits(ids: DataFrame) -> DataFrame:
    """Visits with a key of 32 characters, of which about 15 % fail one of the conditions."""
    draw = F.pmod(F.xxhash64("id"), F.lit(100))
    return ids.select(
        F.md5(F.col("id").cast("string")).alias("visit_id"),
        F.when(draw >= 3, F.col("id") % 100_003).alias("user_id"),
        F.when(draw != 3, F.timestamp_seconds(F.lit(1_767_225_600) + F.col("id") % 86_400)).alias(
            "event_time"
        ),
        F.when((draw >= 4) & (draw < 10), "healthcheck/live")
        .otherwise(F.concat(F.lit("category_"), F.col("id") % 20, F.lit("/article_"), F.col("id") % 1_009))
        .alias("page"),
        F.when((draw >= 10) & (draw < 15), "bot").otherwise("firefox").alias("browser"),
        F.concat(F.lit("192.0.2."), F.col("id") % 256).alias("ip"),
        (F.xxhash64("id") % 600).alias("duration"),
    )


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """A plain WHERE, the observed counts of the PySpark form, and the SQL form with and without a third table."""
    spark = bench.spark
    render = MacroRenderer(bench.folder / "render", spark)
    rows = bench.rows(ROWS)
    tables = {
        name: f"delta.`{bench.folder / name}`"
        for name in (
            "source",
            "plain",
            "observed",
            "flagged",
            "flagged_too",
            "statistics",
            "statistics_too",
            "valid",
        )
    }
    visits(spark.range(rows)).write.format("delta").save(str(bench.folder / "source"))
    counts: dict[str, Any] = {}

    def create(table: str, sql: str) -> None:
        spark.sql(f"create or replace table {tables[table]} using delta as {sql}")

    def plain() -> None:
        conditions = " and ".join(f"({condition['condition']})" for condition in CONDITIONS)
        create("plain", f"select * from {tables['source']} where {conditions}")

    def observed() -> None:
        interceptor = Interceptor([Condition(**condition) for condition in CONDITIONS])
        valid = interceptor.filter(spark.table(tables["source"]))
        valid.write.format("delta").mode("overwrite").save(str(bench.folder / "observed"))
        counts["PySpark"] = interceptor.counts().rejected

    def flag_and_count(flagged: str, statistics: str) -> None:
        create(flagged, render("filter_interceptor_flags", relation=tables["source"], conditions=CONDITIONS))
        create(
            statistics,
            render(
                "filter_interceptor_statistics",
                flagged=tables[flagged],
                conditions=CONDITIONS,
                run_id="benchmark",
                run_at="2026-01-01 00:00:00",
            ),
        )

    def three_tables() -> None:
        flag_and_count("flagged_too", "statistics_too")
        create("valid", render("filter_interceptor_valid_rows", flagged=tables["flagged_too"]))

    def counted() -> dict[str, Any]:
        statistics = spark.table(tables["statistics"]).orderBy("position").collect()
        counts["SQL"] = {row.condition_name: row.rejected_rows for row in statistics}
        if counts["SQL"] != counts["PySpark"]:
            raise AssertionError(f"the forms count differently: {counts}")
        return {"rejected rows, in both forms": ", ".join(f"{n} {c:,}" for n, c in counts["SQL"].items())}

    yield Comparison(
        title="Five conditions, 15 % of the rows rejected",
        rows=rows,
        note=(
            "All read one Delta table. The SQL form writes every row with its flag, then the statistics; its "
            "valid rows are a view over the flagged table, or a third table."
        ),
        variants=[
            Variant("plain WHERE", plain, lambda: spark.table(tables["plain"])),
            Variant("PySpark, observed counts", observed, lambda: spark.table(tables["observed"])),
            Variant(
                "SQL, valid rows as a view",
                lambda: flag_and_count("flagged", "statistics"),
                lambda: spark.sql(render("filter_interceptor_valid_rows", flagged=tables["flagged"])),
            ),
            Variant("SQL, valid rows as a table", three_tables, lambda: spark.table(tables["valid"])),
        ],
        aims=[
            Aim("PySpark, observed counts", "plain WHERE", 1.1),
            Aim("SQL, valid rows as a view", "plain WHERE", 1.3),
        ],
        repetitions=3,
        facts=counted,
    )
