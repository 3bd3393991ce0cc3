"""Full Loader against the plain ways to load the same file: Spark's overwrite into Delta, and PostgreSQL's COPY."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Comparison, Variant, Workbench
from python_jobs.ingestion import full_loader, full_loader_postgres
from services.postgres import Database, running_postgres

ROWS = 1_000_000
SCHEMA = "type string not null, full_name string not null, version string not null"
COLUMNS = "type varchar(15) not null, full_name varchar(50) not null, version varchar(40) not null"
KEY = ["full_name", "version"]


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """1 M devices, the most that the dataset ever has, from one CSV file."""
    rows = bench.rows(ROWS)
    file = _devices(bench.folder / "devices.csv", rows)
    spark = bench.spark
    plain, checked, public = (str(bench.folder / "delta" / name) for name in ("plain", "checked", "public"))

    def read() -> Any:
        reader = spark.read.schema(SCHEMA).option("mode", "FAILFAST")
        return reader.csv(str(file), sep=";", header=True, enforceSchema=False)

    def overwrite() -> None:
        read().write.format("delta").mode("overwrite").save(plain)

    def load(target: str, key: list[str] | None) -> None:
        file.touch()  # another modification time: the file is read again
        parameters = full_loader.Parameters(
            source=str(file),
            target=target,
            version="2024-01-01",
            schema=SCHEMA,
            format="csv",
            delimiter=";",
            key=key,
        )
        full_loader.run(spark, parameters)

    yield Comparison(
        "CSV into Delta",
        rows,
        [
            Variant("overwrite in place", overwrite, lambda: bench.table(plain)),
            Variant(
                "Full Loader, NOT NULL",
                lambda: load(public, None),
                lambda: bench.table(public),
            ),
            Variant(
                "Full Loader, NOT NULL and key",
                lambda: load(checked, KEY),
                lambda: bench.table(checked),
            ),
        ],
        repetitions=3,
        note="The loader writes the rows twice, to a staging table and to the public one, and checks them in between.",
    )

    with running_postgres(bench.folder / "postgres") as postgres:
        key = f"{COLUMNS}, primary key (full_name, version)"
        postgres.execute(f"create table plain ({key})")

        def truncate_and_copy() -> None:
            with postgres.connect(autocommit=False) as connection:
                connection.execute("truncate plain")
                with (
                    connection.cursor() as cursor,
                    cursor.copy("copy plain from stdin (format csv, header, delimiter ';')") as copy,
                    file.open("rb") as content,
                ):
                    while chunk := content.read(1 << 20):
                        copy.write(chunk)

        def load_versioned() -> None:
            parameters = full_loader_postgres.Parameters(
                source=str(file), target="devices", version="2024-01-01", columns=key
            )
            full_loader_postgres.run(parameters, postgres.connect)

        def table(name: str) -> Any:
            return _table(spark, postgres, name)

        yield Comparison(
            "CSV into PostgreSQL",
            rows,
            [
                Variant(
                    "truncate and COPY in one transaction",
                    truncate_and_copy,
                    lambda: table("plain"),
                ),
                Variant("COPY into a new table and view swap", load_versioned, lambda: table("devices")),
            ],
            repetitions=3,
            note="Both check the primary key; the first makes readers wait for all of the COPY.",
        )


def _devices(file: Path, rows: int) -> Path:
    with file.open("w", encoding="utf-8") as content:
        content.write("type;full_name;version\n")
        content.writelines(f"galaxy;Galaxy S {number};Android {number % 15}\n" for number in range(rows))
    return file


def _table(spark: Any, postgres: Database, name: str) -> Any:
    properties = {"user": postgres.user, "password": postgres.password, "driver": "org.postgresql.Driver"}
    return spark.read.jdbc(postgres.jdbc_url, name, properties=properties)
