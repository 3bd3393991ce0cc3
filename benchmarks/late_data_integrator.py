"""What the two Late Data Integrators cost: a lookback of 15 days, of which 2 have late data.

Each variant starts from the same tables: daily statistics of 16 days of visits, then late visits for 2 of them. The
dynamic form also reads the Delta log and keeps its state; both leave the same statistics.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pyspark.sql import functions as F

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.error_management import dynamic_late_data_integrator as dynamic
from python_jobs.error_management import static_late_data_integrator as static

DAYS, ROWS = 16, 8_000_000
FIRST, TODAY = "2024-12-16", "2024-12-31"
LATE = ("2024-12-19", "2024-12-27")
QUERY = (
    "select event_date, page, count(*) as events, count(distinct visit_id) as visits from {source} "
    "where event_date = {date} group by event_date, page"
)


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """Static, static with its control task, dynamic."""
    spark, rows = bench.spark, bench.rows(ROWS)
    source, built = bench.folder / "visits", bench.folder / "built"

    def visits(first: int, count: int, day: str, days: int) -> None:
        date = F.date_add(F.lit(day).cast("date"), (F.col("id") % days).cast("int"))
        frame = spark.range(first, first + count, numPartitions=4).select(
            F.concat(F.lit("visit_"), (F.xxhash64("id") % (rows // 3)).cast("string")).alias("visit_id"),
            F.concat(F.lit("page_"), F.xxhash64("id") % 1_009).alias("page"),
            date.alias("event_date"),
        )
        frame.write.format("delta").mode("append").partitionBy("event_date").save(str(source))

    def tables(folder: Path) -> dict[str, Any]:
        return {"source": str(source), "target": str(folder / "statistics"), "query": QUERY, "date": TODAY}

    def run_dynamic(folder: Path, action: Literal["run", "adopt"] = "run") -> None:
        params = dynamic.Parameters(
            **tables(folder), state=str(folder / "state"), depends_on_past=False, action=action
        )
        dynamic.run(spark, params)

    def run_static(folder: Path, only_changed: bool) -> None:
        params = static.Parameters(**tables(folder), lookback_days=DAYS - 1, only_changed=only_changed)
        static.run(spark, params)

    visits(0, rows, FIRST, DAYS)
    run_static(built, only_changed=False)
    run_dynamic(built, "adopt")
    for day in LATE:
        visits(rows, max(rows // 1_000, 10), day, 1)

    def variant(name: str, run_in: str, only_changed: bool | None) -> Variant:
        folder = bench.folder / run_in

        def prepare() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(built, folder)

        def work() -> None:
            if only_changed is None:
                run_dynamic(folder)
            else:
                run_static(folder, only_changed)

        return Variant(name, work, lambda: bench.table(folder / "statistics"), prepare)

    yield Comparison(
        title="Integrate the late data of 2 of 15 days",
        rows=rows,
        note="Each run also processes the current day; the lookback processes 16 days, the others 3.",
        variants=[
            variant("lookback", "lookback", only_changed=False),
            variant("lookback, only_changed", "only_changed", only_changed=True),
            variant("dynamic", "dynamic", only_changed=None),
        ],
        aims=[Aim("dynamic", "lookback", 0.5)],
        repetitions=3,
    )
