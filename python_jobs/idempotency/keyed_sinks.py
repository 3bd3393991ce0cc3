"""Keyed Idempotency: sinks in which a row replaces the one of its key, and a file the one of its run.

A sink takes the rows of one run: a micro-batch, or the logical time of a batch job. Written again, the same rows of the
same run leave the same content.

* :class:`DeltaSink`: one merge a run.
* :class:`PostgresSink`: Spark's tasks write to a table beside, each in its own transaction; then one transaction moves
  the rows and notes the batch. A batch that is noted is skipped, so the target and the progress can't disagree.
* :class:`FileSink`: one file a run, named after it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
from delta.tables import DeltaTable
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.failures import DataRefused, JobFailed
from python_jobs.shared.core.paths import absolute
from python_jobs.shared.delta.streams import create_table, nullable
from python_jobs.shared.delta.tables import delta_table
from python_jobs.shared.postgres.clients import listed, reaching_postgres, table_name
from python_jobs.shared.postgres.snapshots import PostgresAccess
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.shared.spark.jvm import hadoop_configuration, java_array, jvm
from python_jobs.shared.spark.sql_text import same_columns


class KeyedSink(ABC):
    """Where rows with a key go."""

    @abstractmethod
    def write(self, rows: DataFrame, run: int) -> None:
        """Write the rows of one run, numbered from 0; each key comes once."""


class DeltaSink(KeyedSink):
    """A Delta table, made if absent; the newest write of a key stays."""

    def __init__(self, spark: SparkSession, table: str, rows: DataFrame, key: Sequence[str]) -> None:
        """Create the table for rows like these, or check the one there.

        Raises:
            WrongUse: it has other columns.
        """
        create_table(spark, table, nullable(rows.schema))
        self._table: DeltaTable = delta_table(spark, table)
        self._same_key = same_columns(key, null_safe=False)

    def write(self, rows: DataFrame, run: int) -> None:
        """Merge the rows in one commit."""
        merge = self._table.alias("t").merge(rows.alias("s"), self._same_key)
        merge.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()


class PostgresSink(KeyedSink):
    """A PostgreSQL table, made if absent, and how far each writer is in ``<table>__progress``.

    Runs of a writer come in order, from 0 on.
    """

    def __init__(self, access: PostgresAccess, table: str, key: Sequence[str], writer: str) -> None:
        """Name the table; nothing is connected yet.

        Args:
            access: the database.
            table: name or schema.name.
            key: columns that make a row unique.
            writer: whose runs these are, such as the id of a checkpoint.
        """
        self._access, self._name, self._key, self._writer = access, table, list(key), writer
        # One for each writer: two of them may write at once.
        self._beside = f"{table}__{re.sub(r'[^0-9a-z]', '_', writer.lower())[:8]}"
        self._table, self._staging, self._progress = (
            table_name(name) for name in (table, self._beside, f"{table}__progress")
        )

    def write(self, rows: DataFrame, run: int) -> None:
        """Move the rows into the table in the transaction that notes the run; skip one that is noted.

        Raises:
            JobFailed: a run before this one is missing, or PostgreSQL can't be reached.
            DataRefused: a row doesn't fit the table; the table and the progress stay as they are.
        """
        try:
            with reaching_postgres(), self._connect() as connection:
                connection.execute(
                    sql.SQL(
                        "create table if not exists {} (writer text primary key, run bigint not null)"
                    ).format(self._progress)
                )
                if self._is_noted(connection, run):
                    return
                self._stage(rows)
                with connection.transaction():
                    if not self._is_noted(connection, run):
                        self._move(connection, rows.columns)
                        self._note(connection, run)
        except (psycopg.DataError, psycopg.IntegrityError) as failure:
            raise DataRefused(
                f"run {run} doesn't fit {self._name}: {failure.diag.message_primary}; nothing of it was written"
            ) from None

    def _connect(self) -> psycopg.Connection[Any]:
        # libpq reads the driver's URL, settings such as sslmode included, and refuses those that it doesn't know.
        uri = self._access.url.removeprefix("jdbc:")
        return psycopg.connect(uri, user=self._access.user, password=self._access.password(), autocommit=True)

    def _is_noted(self, connection: psycopg.Connection[Any], run: int) -> bool:
        """Return whether the run is in the table. In a transaction, other processes of the writer wait meanwhile."""
        noted = connection.execute(
            sql.SQL("select run from {} where writer = %s for update").format(self._progress), [self._writer]
        ).fetchone()
        reached = -1 if noted is None else int(noted[0])
        if run > reached + 1:
            raise JobFailed(
                f"run {run} of {self._writer} came after run {reached} of it: runs between them are not in {self._name}"
            )
        return run <= reached

    def _stage(self, rows: DataFrame) -> None:
        properties = {
            "user": self._access.user,
            "password": self._access.password(),
            "driver": "org.postgresql.Driver",
        }
        rows.write.jdbc(self._access.url, self._beside, "overwrite", properties)

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

    def _note(self, connection: psycopg.Connection[Any], run: int) -> None:
        connection.execute(
            sql.SQL(
                "insert into {} values (%s, %s) on conflict (writer) do update set run = excluded.run"
            ).format(self._progress),
            [self._writer, run],
        )


class FileSink(KeyedSink):
    """A folder of JSON-lines files, ``<run>.json``; on a local file system and HDFS a reader never finds a part."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        """Name the folder; it may be absent."""
        self._spark, self._folder = spark, absolute(folder)

    def write(self, rows: DataFrame, run: int) -> None:
        """Write or replace the file of the run."""
        self.write_named(rows, str(run))

    def write_named(self, rows: DataFrame, name: str) -> str:
        """Write or replace ``<name>.json``; return its path."""
        beside = f"{self._folder}/_{name}"  # Spark's readers ignore it
        rows.coalesce(1).write.mode("overwrite").json(beside)
        written = HadoopFolder(self._spark, beside)
        parts = [part for part in written.names() if part.startswith("part-")]
        if len(parts) != 1:
            raise JobFailed(f"{beside} holds {len(parts)} files where one was written; run again")
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
