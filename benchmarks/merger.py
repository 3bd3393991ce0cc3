"""Merger against a hand-written MERGE and dbt-spark's merge; and what it costs on a table ten times as large.

The statements are timed, not dbt around them: starting dbt takes the same seconds with either merge.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from tests.support.render import MacroRenderer

ROWS_A_DAY = 100_000
KEY = ["visit_id", "day"]
COLUMNS = [*KEY, "user_id", "page", "duration", "load_id"]


def visits(ids: DataFrame, days: int, load_id: int) -> DataFrame:
    """Visits with a 36-character key for the given ids, spread evenly over `days` days."""
    digest = F.md5(F.col("id").cast("string"))
    parts = [
        F.substring(digest, start, length) for start, length in ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))
    ]
    return ids.select(
        F.concat_ws("-", *parts).alias("visit_id"),
        F.date_add(F.lit("2026-01-01").cast("date"), (F.col("id") % days).cast("int")).alias("day"),
        (F.col("id") % 100_003).alias("user_id"),
        F.concat(F.lit("category_"), F.col("id") % 20, F.lit("/article_"), F.col("id") % 1_009).alias("page"),
        (F.xxhash64("id") % 600).alias("duration"),
        F.lit(load_id).cast("bigint").alias("load_id"),
    )


class Target:
    """A partitioned table of visits that every run finds as it was written."""

    def __init__(self, bench: Workbench, name: str, days: int) -> None:
        self.spark, self.days = bench.spark, days
        self.path = bench.folder / name
        self.name = f"delta.`{self.path}`"
        rows = bench.rows(ROWS_A_DAY) * days
        frame = visits(bench.spark.range(rows), days, load_id=1)
        frame.repartition(days, "day").write.format("delta").partitionBy("day").save(str(self.path))

    def twin(self, name: str) -> Target:
        """A second table of the same files: Delta never changes a file in place, so links are enough."""
        twin = object.__new__(Target)
        twin.spark, twin.days, twin.path = self.spark, self.days, self.path.parent / name
        twin.name = f"delta.`{twin.path}`"
        shutil.copytree(self.path, twin.path, copy_function=os.link)
        return twin

    def reset(self) -> None:
        """Undo every merge."""
        self.spark.sql(f"restore table {self.name} to version as of 0")

    def rows(self) -> DataFrame:
        """The table."""
        return self.spark.table(self.name)

    def last_two_days(self) -> DataFrame:
        """What a merge may change; the other days are files that the variants share, and none is rewritten."""
        return self.rows().where(F.col("day") >= F.date_add(F.lit("2026-01-01").cast("date"), self.days - 2))

    def last_merge(self) -> str:
        """What the newest merge says in the table's history."""
        history = self.spark.sql(f"describe history {self.name}").where("operation = 'MERGE'")
        metrics = history.orderBy(F.desc("version")).first()["operationMetrics"]
        files = self.spark.sql(f"describe detail {self.name}").first()["numFiles"]
        return (
            f"{metrics['numTargetFilesRemoved']} of {files} files rewritten, "
            f"{metrics['numTargetRowsUpdated']} rows updated, {metrics['numTargetRowsInserted']} inserted, "
            f"{metrics['numTargetRowsCopied']} copied; searched for {metrics['scanTimeMs']} ms"
        )


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """Two of 100 days touched in 10 M rows; then the same batch on a tenth of the days."""
    spark = bench.spark
    render = MacroRenderer(bench.folder / "render", spark)
    large = Target(bench, "large", days=100)
    by_hand, by_dbt, small = large.twin("by_hand"), large.twin("by_dbt"), Target(bench, "small", days=10)

    def batch_for(target: Target) -> str:
        """A fifth of the target's last two days changed, and a tenth as many new visits; one row a key."""
        day, stored = F.col("id") % target.days, bench.rows(ROWS_A_DAY) * target.days
        ids = spark.range(stored + stored // 50).where(day >= target.days - 2)
        changed = ids.where((F.floor(F.col("id") / target.days) % 5 == 0) | (F.col("id") >= stored))
        path = bench.folder / f"batch_of_{target.path.name}"
        visits(changed, target.days, load_id=2).write.format("delta").save(str(path))
        return f"delta.`{path}`"

    batch, small_batch = batch_for(large), batch_for(small)
    merger: dict[str, Any] = {
        "types": dict(large.rows().dtypes),
        "key": KEY,
        "nullable_key": [],
        "keep_on_null": [],
        "on_null_key": "fail",
        "sequence": ["load_id"],
        "deletes": "none",
        "is_deleted": None,
        "partitions": ["day"],
        "prune_by": ["day"],
    }

    statements: dict[str, list[str]] = {}

    def prepare(target: Target, batch: str) -> None:
        """Undo every merge and write down what Merger sends: its two look-ups and the merge."""
        target.reset()
        configured = merger | {"relation": target.name}
        looked_up = render("_merger_look_up", merger=configured, batch=batch, target=target.name)
        statements[target.name] = [
            render("_merger_batch_query", merger=configured, batch=batch),
            render(
                "_merger_stale_query",
                merger=configured,
                target=target.name,
                partitions=looked_up["partitions"],
                least_sequence="2",
            ),
            render(
                "_merger_merge",
                merger=configured,
                batch=batch,
                target=target.name,
                columns={"inserted": COLUMNS, "updated": COLUMNS},
                looked_up=looked_up,
                incremental_predicates=[],
            ),
        ]

    def merge(target: Target) -> None:
        for statement in statements[target.name]:
            spark.sql(statement).collect()

    last_days = [f"date'2026-04-{day:02}'" for day in (9, 10)]  # the 99th and 100th day of 2026
    hand_written = f"""
        merge into {by_hand.name} as t
        using (
            select {", ".join(COLUMNS)} from (
                select *, row_number() over (partition by visit_id, day order by load_id desc) as rank
                from {batch}
            ) where rank = 1
        ) as s
        on s.visit_id = t.visit_id and s.day = t.day and t.day in ({", ".join(last_days)})
        when matched and s.load_id > t.load_id then update set *
        when not matched then insert *
    """
    dbt_spark = f"""
        merge into {by_dbt.name} as DBT_INTERNAL_DEST
        using {batch} as DBT_INTERNAL_SOURCE
        on DBT_INTERNAL_SOURCE.visit_id = DBT_INTERNAL_DEST.visit_id
            and DBT_INTERNAL_SOURCE.day = DBT_INTERNAL_DEST.day
        when matched then update set *
        when not matched then insert *
    """
    yield Comparison(
        title="One batch into a large table",
        rows=large.rows().count(),
        note=(
            f"100 days as partitions, two of them touched; {spark.table(batch).count():,} rows in the batch; "
            "key of 36 characters and the day. The hand-written MERGE takes the newest row of each key and "
            "names the two days in its text; Merger looks them up, and also leaves out stale rows beforehand."
        ),
        variants=[
            Variant("Merger", lambda: merge(large), large.last_two_days, lambda: prepare(large, batch)),
            Variant(
                "hand-written MERGE", lambda: spark.sql(hand_written), by_hand.last_two_days, by_hand.reset
            ),
            Variant("dbt-spark's merge", lambda: spark.sql(dbt_spark), by_dbt.last_two_days, by_dbt.reset),
        ],
        aims=[Aim("Merger", "hand-written MERGE", 1.05), Aim("Merger", "dbt-spark's merge", 1 / 1.8)],
        repetitions=5,
        facts=lambda: {
            name: target.last_merge()
            for name, target in (
                ("Merger", large),
                ("hand-written MERGE", by_hand),
                ("dbt-spark's merge", by_dbt),
            )
        },
    )
    yield Comparison(
        title="The same batch into a table of a tenth of the size",
        rows=small.rows().count(),
        note="Days of the same size, ten instead of a hundred: the results differ, the cost should not.",
        variants=[
            Variant("Merger, 100 days", lambda: merge(large), None, lambda: prepare(large, batch)),
            Variant("Merger, 10 days", lambda: merge(small), None, lambda: prepare(small, small_batch)),
        ],
        aims=[Aim("Merger, 100 days", "Merger, 10 days", 1.25)],
        repetitions=5,
    )
