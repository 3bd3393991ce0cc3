"""Delta tables by catalog name or by path, and what their log says of a commit."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from delta import exceptions as delta_exceptions
from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from python_jobs.job import NotReady

# What Delta raises when another writer's commit came first. They have no common class of their own.
CONFLICTS = (
    delta_exceptions.ConcurrentAppendException,
    delta_exceptions.ConcurrentDeleteDeleteException,
    delta_exceptions.ConcurrentDeleteReadException,
    delta_exceptions.ConcurrentTransactionException,
    delta_exceptions.ConcurrentWriteException,
    delta_exceptions.DeltaConcurrentModificationException,
    delta_exceptions.MetadataChangedException,
    delta_exceptions.ProtocolChangedException,
)


def is_path(table: str) -> bool:
    """Return whether ``table`` is a path or URI; anything without ``/`` or ``:`` is a catalog name."""
    return "/" in table or ":" in table


def absolute(path: str) -> str:
    """Return a local path made absolute (Delta refuses relative ones in SQL); a URI stays as it is."""
    return path if ":" in path.split("/", 1)[0] else str(Path(path).absolute())


def sql_name(table: str) -> str:
    """Return ``table`` as it is written in SQL: the catalog name, or ``delta.`path```."""
    return f"delta.`{absolute(table)}`" if is_path(table) else table


def table_exists(spark: SparkSession, table: str) -> bool:
    """Return whether ``table`` is an existing Delta table."""
    if is_path(table):
        return bool(DeltaTable.isDeltaTable(spark, absolute(table)))
    return bool(spark.catalog.tableExists(table))


def delta_table(spark: SparkSession, table: str) -> DeltaTable:
    """Return the handle of an existing Delta table.

    Raises:
        NotReady: there is no such table.
    """
    if not table_exists(spark, table):
        raise NotReady(f"there is no Delta table '{table}'")
    return DeltaTable.forPath(spark, absolute(table)) if is_path(table) else DeltaTable.forName(spark, table)


def read_table(spark: SparkSession, table: str) -> DataFrame:
    """Return the current rows of an existing Delta table; raises like :func:`delta_table`."""
    return delta_table(spark, table).toDF()


def read_version(spark: SparkSession, table: str, version: int) -> DataFrame:
    """Return the rows of one version of an existing Delta table, whatever is written meanwhile."""
    return spark.sql(f"select * from {sql_name(table)} version as of {version}")


def latest_commit(spark: SparkSession, table: str) -> dict[str, Any]:
    """Return the last entry of the table's history: version, operation, operationMetrics, userMetadata…"""
    return delta_table(spark, table).history(1).collect()[0].asDict(recursive=True)


def latest_version(spark: SparkSession, table: str) -> int:
    """Return the table's current version."""
    return int(_snapshot(spark, table).version())


def table_id(spark: SparkSession, table: str) -> str:
    """Return what tells an existing table from one that was dropped and made anew in its place."""
    return str(_snapshot(spark, table).metadata().id())


def commit_metrics(spark: SparkSession, table: str) -> dict[str, int]:
    """Return the numeric metrics of the last commit (numOutputRows, numTargetFilesAdded…): no second scan."""
    metrics = latest_commit(spark, table)["operationMetrics"]
    return {name: int(value) for name, value in metrics.items() if str(value).lstrip("-").isdigit()}


def transaction_version(spark: SparkSession, table: str, app_id: str) -> int | None:
    """Return the last ``txnVersion`` that ``app_id`` committed to the table, or None.

    The number is part of the table's state (log and checkpoint), as durable as the data written with it.
    Delta silently skips a write whose ``txnVersion`` is not above it; of two concurrent writes with one
    ``txnAppId`` the later commit fails.
    """
    version = _snapshot(spark, table).transactions().get(app_id)
    return int(version.get()) if version.isDefined() else None


def transaction_versions(spark: SparkSession, table: str) -> dict[str, int]:
    """Return what :func:`transaction_version` does, for all ``txnAppId`` that have committed to the table."""
    transactions = _snapshot(spark, table).setTransactions()
    found = (transactions.apply(position) for position in range(transactions.size()))
    return {str(transaction.appId()): int(transaction.version()) for transaction in found}


def active_files(spark: SparkSession, table: str) -> DataFrame:
    """Return one row for each data file of the current version, as the log knows it; no data is read.

    Columns: ``add_path``, ``add_size`` (bytes), ``add_modified_at`` and the table's partition columns.
    """
    snapshot = _snapshot(spark, table)
    return DataFrame(snapshot.allFiles().toDF(), spark).select(
        F.col("path").alias("add_path"),
        F.col("size").alias("add_size"),
        F.timestamp_millis("modificationTime").alias("add_modified_at"),
        *partition_values(spark, table, "partitionValues"),
    )


def partition_values(spark: SparkSession, table: str, from_map: str) -> list[Column]:
    """Return the partition columns, typed, out of the map of texts that a log's ``add`` has."""
    metadata = _snapshot(spark, table).metadata()
    fields = {field["name"]: field for field in json.loads(metadata.schema().json())["fields"]}
    types = dict(read_table(spark, table).dtypes)
    columns = []
    for name in partition_columns(spark, table):
        # With column mapping the log writes the name of the file column.
        physical = fields[name]["metadata"].get("delta.columnMapping.physicalName", name)
        columns.append(F.col(from_map)[physical].cast(types[name]).alias(name))
    return columns


def partition_columns(spark: SparkSession, table: str) -> list[str]:
    """Return the names of the columns that the table is partitioned by, in order."""
    return list(_snapshot(spark, table).metadata().partitionSchema().fieldNames())


def table_size(spark: SparkSession, table: str) -> tuple[int, int]:
    """Return how many data files the current version has, and their bytes, from the log."""
    snapshot = _snapshot(spark, table)
    return int(snapshot.numOfFiles()), int(snapshot.sizeInBytes())


def deleted_file_retention(spark: SparkSession, table: str) -> dt.timedelta:
    """Return how long the table promises to keep the files that a commit removed (7 days by default)."""
    assert spark._jvm is not None
    delta_log: Any = spark._jvm.org.apache.spark.sql.delta.DeltaLog
    return dt.timedelta(
        milliseconds=int(delta_log.tombstoneRetentionMillis(_snapshot(spark, table).metadata()))
    )


def retention_properties(days: int) -> dict[str, str]:
    """Return the properties by which a table keeps its log and the files that a commit removed for so many days."""
    duration = f"interval {days} days"
    return {"delta.deletedFileRetentionDuration": duration, "delta.logRetentionDuration": duration}


def table_location(spark: SparkSession, table: str) -> str:
    """Return the path of an existing table, given by path or by catalog name."""
    return str(delta_table(spark, table)._jdt.deltaLog().dataPath().toString())


def write_once(
    spark: SparkSession,
    rows: DataFrame,
    table: str,
    *,
    transaction: tuple[str, int] | None = None,
    partition_columns: Sequence[str] = (),
    properties: Mapping[str, str] | None = None,
    replace_where: str | None = None,
    replace_all: bool = False,
    note: Mapping[str, Any] | None = None,
) -> str:
    """Append ``rows`` to a table, or replace rows of it, in one Delta commit.

    ``replace_where`` replaces what matches it, ``replace_all`` the rows and the schema of the whole table.
    ``note`` is kept with the commit: :func:`commit_note` reads it.

    An absent table is made first, with ``partition_columns`` and ``properties``. ``transaction`` is the
    ``txnAppId`` and ``txnVersion`` of the commit; Delta skips the write, silently, if that number is taken.

    Returns the commit's user metadata: :func:`find_commit` tells by it whether the write happened.
    """
    user_metadata = json.dumps({"commit": str(uuid.uuid4()), **(note or {})})
    writer = rows.write.format("delta").option("userMetadata", user_metadata)
    if transaction is not None:
        writer = writer.options(txnAppId=transaction[0], txnVersion=str(transaction[1]))
    exists = table_exists(spark, table)
    if not exists and is_path(table):
        writer = writer.options(**properties or {})
    elif not exists:  # saveAsTable would drop the transaction and the user metadata of a first write
        _create(spark, table, rows.schema, partition_columns, properties or {})
    if exists and replace_where:
        writer = writer.mode("overwrite").option("replaceWhere", replace_where)
    elif exists and replace_all:
        writer = writer.mode("overwrite").option("overwriteSchema", "true")
    else:
        writer = writer.mode("append")
    path = absolute(table) if is_path(table) else table_location(spark, table)
    writer.partitionBy(*partition_columns).save(path)
    return user_metadata


def find_commit(spark: SparkSession, table: str, user_metadata: str) -> dict[str, Any] | None:
    """Return one of the table's newest commits, as :func:`latest_commit` does, by its user metadata."""
    history = delta_table(spark, table).history(20).collect()
    return next((row.asDict(recursive=True) for row in history if row.userMetadata == user_metadata), None)


def commit_note(user_metadata: str | None) -> dict[str, Any]:
    """Return the JSON object that a commit carries as ``userMetadata``; of another program's text, nothing."""
    try:
        note = json.loads(user_metadata or "{}")
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def _create(
    spark: SparkSession,
    table: str,
    schema: StructType,
    partition_columns: Sequence[str],
    properties: Mapping[str, str],
) -> None:
    builder = DeltaTable.createIfNotExists(spark).tableName(table).addColumns(schema)
    for name, value in properties.items():
        builder = builder.property(name, value)
    builder.partitionedBy(*partition_columns).execute()


def _snapshot(spark: SparkSession, table: str) -> Any:
    """Return Delta's snapshot of the table's newest version, without a Spark job over its history."""
    log = delta_table(spark, table)._jdt.deltaLog()
    defaults = [getattr(log, f"update$default${position}")() for position in (1, 2, 3)]
    return log.update(*defaults)
