"""Commits of Delta tables: what the log says of them, and writes that a rerun doesn't repeat."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from delta import exceptions as delta_exceptions
from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from python_jobs.shared.core.paths import absolute, is_path
from python_jobs.shared.delta.tables import delta_snapshot, delta_table, table_exists, table_location

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


def latest_commit(spark: SparkSession, table: str) -> dict[str, Any]:
    """Return the last entry of the table's history: version, operation, operationMetrics, userMetadata…"""
    return delta_table(spark, table).history(1).collect()[0].asDict(recursive=True)


def latest_version(spark: SparkSession, table: str) -> int:
    """Return the table's current version."""
    return int(delta_snapshot(spark, table).version())


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
    version = delta_snapshot(spark, table).transactions().get(app_id)
    return int(version.get()) if version.isDefined() else None


def transaction_versions(spark: SparkSession, table: str) -> dict[str, int]:
    """Return what :func:`transaction_version` does, for all ``txnAppId`` that have committed to the table."""
    transactions = delta_snapshot(spark, table).setTransactions()
    found = (transactions.apply(position) for position in range(transactions.size()))
    return {str(transaction.appId()): int(transaction.version()) for transaction in found}


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
