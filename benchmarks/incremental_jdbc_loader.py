"""Incremental Loader from PostgreSQL: a window over several connections against one, each into a new Delta table."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.ingestion.incremental_table_loader import Parameters, run
from services.postgres import Database, running_postgres

ROWS = 2_000_000
PASSWORD = "BENCHMARK_PASSWORD"
WINDOW = ("2024-03-01", "2024-03-02")


def make_visits(database: Database, rows: int) -> None:
    """Fill a table with visits whose ingestion times are spread evenly over one day."""
    database.execute(
        """
        create table visits (
            visit_id text, user_id bigint, page text, event_time timestamp, ingestion_time timestamptz
        )
        """,
        f"""
        insert into visits
        select
            'visit_' || md5(id::text),
            id % 100003,
            'category_' || id % 20 || '/article_' || id % 1009,
            timestamp '2024-03-01' + id * interval '1 day' / {rows} - interval '5 minutes',
            timestamptz '2024-03-01 00:00+00' + id * interval '1 day' / {rows}
        from generate_series(0, {rows - 1}) as ids (id)
        """,
        "create index on visits (ingestion_time)",
        "vacuum analyze visits",
    )


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """The loader over 1, 2 and 4 connections, and Spark's plain JDBC read, which has one and no snapshot."""
    spark, rows = bench.spark, bench.rows(ROWS)
    with (
        tempfile.TemporaryDirectory(prefix="postgres-") as folder,
        running_postgres(Path(folder) / "server") as database,
    ):
        make_visits(database, rows)
        os.environ[PASSWORD] = database.password

        def target(name: str) -> str:
            return str(bench.folder / name)

        def load(name: str, connections: int) -> None:
            report = run(
                spark,
                Parameters(
                    source="visits",
                    target=target(name),
                    delta_column="ingestion_time",
                    mode="replace_window",
                    from_=WINDOW[0],
                    to=WINDOW[1],
                    jdbc_url=database.jdbc_url,
                    user=database.user,
                    password_env=PASSWORD,
                    partitions=connections,
                ),
            )
            if report["rows_loaded"] != rows:
                raise AssertionError(f"{report['rows_loaded']:,} of {rows:,} rows were loaded")

        def plain() -> None:
            options = {"user": database.user, "password": database.password, "preferTimestampNTZ": "true"}
            query = f"select * from visits where ingestion_time >= '{WINDOW[0]}' and ingestion_time < '{WINDOW[1]}'"
            reader = spark.read.format("jdbc").options(url=database.jdbc_url, query=query, fetchsize=10_000)
            reader.options(**options).load().write.format("delta").save(target("plain"))

        def variant(name: str, connections: int | None) -> Variant:
            folder = "plain" if connections is None else f"connections_{connections}"

            return Variant(
                name,
                plain if connections is None else lambda: load(folder, connections),
                lambda: bench.table(target(folder)),
                lambda: shutil.rmtree(target(folder), ignore_errors=True),
            )

        yield Comparison(
            title="One day of visits from PostgreSQL into a new Delta table",
            rows=rows,
            note=(
                "The server runs on the same cores. The loader also looks for rows without an ingestion time, and "
                "reads all on one exported snapshot; Spark's plain read does neither."
            ),
            variants=[
                variant("Spark's JDBC read, one connection", None),
                variant("loader, one connection", 1),
                variant("loader, two connections", 2),
                variant("loader, four connections", 4),
            ],
            aims=[
                Aim("loader, one connection", "Spark's JDBC read, one connection", 1.15),
                Aim("loader, two connections", "loader, one connection", 0.8),
            ],
            repetitions=3,
        )
