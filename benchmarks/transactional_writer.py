"""Transactional Writer against plain appends: what the run's number and reading each table's log cost."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator

from pyspark.sql import DataFrame

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.idempotency import transactional_writer
from python_jobs.idempotency.transactional_writer import Parameters

ROWS = 5_000_000
SMALL_ROWS = 10_000
QUERIES = {
    "visits": "select visit_id, user_id, page from {source}",
    "pages": "select page, count(*) as visits from {source} group by page",
}


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """Two tables from one source, of 5 M rows and of 10,000."""
    spark = bench.spark

    def compare(title: str, rows: int, folder: str) -> Comparison:
        source = str(bench.folder / folder / "source")
        spark.range(rows).selectExpr(
            "md5(cast(id as string)) as visit_id",
            "id % 100003 as user_id",
            "concat('article_', id % 1009) as page",
        ).write.format("delta").save(source)
        numbers, number = itertools.count(), {}

        def path(variant: str, table: str) -> str:
            return str(bench.folder / folder / variant / str(number[variant]) / table)

        def empty(variant: str) -> None:
            """Take a new folder for the next run: Delta remembers the tables of a path."""
            shutil.rmtree(bench.folder / folder / variant, ignore_errors=True)
            number[variant] = next(numbers)

        def transactional() -> None:
            write = {path("transactional", table): query for table, query in QUERIES.items()}
            transactional_writer.run(spark, Parameters(source, write, "2024-01-01"))

        def plain(file_format: str) -> None:
            rows = bench.table(source)
            for table, query in QUERIES.items():
                frame = spark.sql(query, source=rows)
                frame.write.format(file_format).mode("append").save(path(file_format, table))

        def result(variant: str) -> DataFrame:
            file_format = "parquet" if variant == "parquet" else "delta"
            visits = spark.read.format(file_format).load(path(variant, "visits"))
            pages = spark.read.format(file_format).load(path(variant, "pages"))
            return visits.join(pages, "page")

        return Comparison(
            title=title,
            rows=rows,
            note="Each run writes into empty folders: the rows of one query, and counts by page of another.",
            variants=[
                Variant(name, run, lambda folder=folder: result(folder), lambda folder=folder: empty(folder))
                for name, folder, run in (
                    ("Transactional Writer", "transactional", transactional),
                    ("Delta, plain append", "delta", lambda: plain("delta")),
                    ("Parquet files, not transactional", "parquet", lambda: plain("parquet")),
                )
            ],
            aims=[Aim("Transactional Writer", "Delta, plain append", 1.1)] if rows > SMALL_ROWS else [],
            repetitions=5,
        )

    yield compare("Two tables of a large run", bench.rows(ROWS), "large")
    yield compare("Two tables of a small run", SMALL_ROWS, "small")
