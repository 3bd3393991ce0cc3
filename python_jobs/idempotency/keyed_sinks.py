"""Keyed Idempotency: sinks in which a row replaces the row of its key, or a file replaces the file of its run.

A sink takes the rows of one run: a micro-batch, or the logical time of a batch job. If the same rows of the same run
are written again, the content stays the same. The sink of a Delta table is :class:`.keyed_tables.DeltaSink`.

* :class:`PostgresSink`: Spark's tasks write to a staging table, each in its own transaction. Then one transaction moves
  the rows to the target and records the run. A recorded run is skipped, so the target and the progress always agree.
* :class:`FileSink`: one file for each run, named after the run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.failures import DataRefused, JobFailed
from python_jobs.shared.core.paths import absolute
from python_jobs.shared.delta.keyed_tables import KeyedSink
from python_jobs.shared.postgres.clients import listed, reaching_postgres, table_name
from python_jobs.shared.postgres.snapshots import PostgresAccess
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.shared.spark.jvm import hadoop_configuration, java_array, jvm
from python_jobs.shared.spark.times import EXACT_JSON


class PostgresSink(KeyedSink):
    """A PostgreSQL table, created if absent; ``<table>__progress`` has the last recorded run of each writer.

    The runs of a writer must come in order, from 0 on.
    """

    def __init__(self, access: PostgresAccess, table: str, key: Sequence[str], writer: str) -> None:
        """Configure the sink; it connects at the first write.

        Args:
            access: access to the database.
            table: name or schema.name of the table.
            key: columns that make a row unique.
            writer: id of the program that numbers the runs, such as the id of a checkpoint.
        """
        self._access, self._name, self._key, self._writer = access, table, list(key), writer
        # One staging table for each writer: two writers may write at once.
        self._staging_name = f"{table}__{re.sub(r'[^0-9a-z]', '_', writer.lower())[:8]}"
        self._table, self._staging, self._progress = (
            table_name(name) for name in (table, self._staging_name, f"{table}__progress")
        )

    def write(self, rows: DataFrame, run: int) -> None:
        """Move the rows into the table and record the run, in one transaction; skip a recorded run.

        Raises:
            JobFailed: an earlier run is missing, or PostgreSQL can't be reached.
            DataRefused: a row doesn't fit the table; the table and the progress stay unchanged.
        """
        try:
            with reaching_postgres(), self._connect() as connection:
                connection.execute(
                    sql.SQL(
                        "create table if not exists {} (writer text primary key, run bigint not null)"
                    ).format(self._progress)
                )
                if self._is_recorded(connection, run):
                    return
                self._stage(rows)
                with connection.transaction():
                    if not self._is_recorded(connection, run):
                        self._move(connection, rows.columns)
                        self._record(connection, run)
        except (psycopg.DataError, psycopg.IntegrityError) as failure:
            raise DataRefused(
                f"run {run} doesn't fit {self._name}: {failure.diag.message_primary}; no row of the run was written"
            ) from None

    def _connect(self) -> psycopg.Connection[Any]:
        # libpq reads the JDBC driver's URL with its settings, such as sslmode, and refuses unknown settings.
        uri = self._access.url.removeprefix("jdbc:")
        return psycopg.connect(uri, user=self._access.user, password=self._access.password(), autocommit=True)

    def _is_recorded(self, connection: psycopg.Connection[Any], run: int) -> bool:
        """Return whether the run is recorded. In a transaction, the call locks out other processes of the writer."""
        recorded = connection.execute(
            sql.SQL("select run from {} where writer = %s for update").format(self._progress), [self._writer]
        ).fetchone()
        reached = -1 if recorded is None else int(recorded[0])
        if run > reached + 1:
            raise JobFailed(
                f"run {run} of {self._writer} came after its run {reached}: {self._name} lacks the runs between them"
            )
        return run <= reached

    def _stage(self, rows: DataFrame) -> None:
        properties = {
            "user": self._access.user,
            "password": self._access.password(),
            "driver": "org.postgresql.Driver",
        }
        rows.write.jdbc(self._access.url, self._staging_name, "overwrite", properties)

    def _move(self, connection: psycopg.Connection[Any], names: Sequence[str]) -> None:
        columns, key = listed(names), listed(self._key)
        values = [name for name in names if name not in self._key]
        connection.execute(
            sql.SQL("create table if not exists {} (like {}, primary key ({}))").format(
                self._table, self._staging, key
            )
        )
        connection.execute(
            sql.SQL(
                "insert into {} ({}) select {} from {} on conflict ({}) do update set ({}) = row({})"
            ).format(
                self._table,
                columns,
                columns,
                self._staging,
                key,
                listed(values),
                listed(values, "excluded"),
            )
        )

    def _record(self, connection: psycopg.Connection[Any], run: int) -> None:
        connection.execute(
            sql.SQL(
                "insert into {} values (%s, %s) on conflict (writer) do update set run = excluded.run"
            ).format(self._progress),
            [self._writer, run],
        )


class FileSink(KeyedSink):
    """A folder of JSON-lines files, ``<run>.json``; on a local disk and HDFS a reader finds complete files only."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        """Configure the sink; the folder may be absent."""
        self._spark, self._folder = spark, absolute(folder)

    def write(self, rows: DataFrame, run: int) -> None:
        """Write or replace the file of the run."""
        self.write_named(rows, str(run))

    def write_named(self, rows: DataFrame, name: str) -> str:
        """Write or replace ``<name>.json``; return its path."""
        staging = f"{self._folder}/_{name}"  # Spark's readers ignore names that begin with "_"
        rows.coalesce(1).write.mode("overwrite").options(**EXACT_JSON).json(staging)
        written = HadoopFolder(self._spark, staging)
        parts = [part for part in written.names() if part.startswith("part-")]
        if len(parts) != 1:
            raise JobFailed(f"{staging} has {len(parts)} files, but this run wrote one file; run again")
        part, target = written.path(parts[0]), HadoopFolder(self._spark, self._folder).path(f"{name}.json")
        if written.scheme == "file":
            Path(part.toUri().getPath()).replace(target.toUri().getPath())
        else:
            fs = jvm(self._spark).org.apache.hadoop.fs
            configuration = hadoop_configuration(self._spark)
            option = getattr(fs, "Options$Rename")
            overwrite = java_array(self._spark, option, option.OVERWRITE)
            fs.FileContext.getFileContext(part.toUri(), configuration).rename(part, target, overwrite)
        written.delete()
        return str(target.toString())
