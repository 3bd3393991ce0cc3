"""Commits of Delta tables: entries of the log, and writes that a rerun doesn't repeat."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from delta import exceptions as delta_exceptions
from pyspark.sql import DataFrame, Row, SparkSession

from python_jobs.shared.core.failures import JobFailed
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.core.paths import absolute, is_path
from python_jobs.shared.delta.tables import (
    create_if_absent,
    delta_snapshot,
    delta_table,
    table_exists,
    table_location,
)
from python_jobs.shared.spark.session import settings

Result = TypeVar("Result")

_USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
# Number of history entries that the first read returns.
_PORTION = 50

# Delta's errors when another writer has committed first. They have no common base class.
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


def until_committed(write: Callable[[], Result | None], attempts: int, other_runs: str) -> Result:
    """Return the result of the first call of ``write`` that commits before all other runs.

    Args:
        write: function that reads the table and writes what follows from it; it returns None if another run has
            taken its number, or raises one of :data:`CONFLICTS`.
        attempts: number of calls.
        other_runs: message if other runs commit first each time.

    Raises:
        JobFailed: other runs committed first each time.
    """
    for _ in range(attempts):
        with suppress(*CONFLICTS):
            result = write()
            if result is not None:
                return result
    raise JobFailed(other_runs)


def latest_commit(spark: SparkSession, table: str) -> dict[str, Any]:
    """Return the last entry of the table's history: version, operation, operationMetrics, userMetadata…"""
    return delta_table(spark, table).history(1).collect()[0].asDict(recursive=True)


def latest_version(spark: SparkSession, table: str) -> int:
    """Return the table's current version."""
    return int(delta_snapshot(spark, table).version())


def commits(spark: SparkSession, table: str) -> Iterator[Row]:
    """Yield the entries of the table's history that the log still has, newest first.

    The entries are read in growing portions: a caller that stops early reads few entries, and a caller that continues
    gets all of them.
    """
    handle, limit, above = delta_table(spark, table), _PORTION, None
    while True:
        rows = handle.history(limit).collect()
        yield from (row for row in rows if above is None or row.version < above)
        if len(rows) < limit:
            return
        above, limit = rows[-1].version, limit * 8


def commits_after(spark: SparkSession, table: str, version: int) -> list[Row]:
    """Return all entries of the table's history above ``version``, newest first."""
    handle, wanted = delta_table(spark, table), latest_version(spark, table) - version
    while wanted > 0:
        rows: list[Row] = handle.history(wanted).collect()
        newer = rows[0].version - version
        if newer <= wanted:
            return rows
        wanted = newer  # others have committed between the two reads
    return []


def transaction_version(spark: SparkSession, table: str, app_id: str) -> int | None:
    """Return the last ``txnVersion`` that ``app_id`` committed to the table, or None.

    The number is part of the table's state (log and checkpoint), as durable as the data written with it.
    Delta silently skips a write whose ``txnVersion`` is not above it; of two concurrent writes with one
    ``txnAppId`` the later commit fails.
    """
    version = delta_snapshot(spark, table).transactions().get(app_id)
    return int(version.get()) if version.isDefined() else None


def is_committed(spark: SparkSession, table: str, app_id: str, version: int) -> bool:
    """Return whether Delta would skip a write with this ``txnAppId`` and ``txnVersion``."""
    last = transaction_version(spark, table, app_id)
    return last is not None and last >= version


def transaction_versions(spark: SparkSession, table: str) -> dict[str, int]:
    """Return the last ``txnVersion`` of each ``txnAppId`` that has committed to the table."""
    transactions = delta_snapshot(spark, table).setTransactions()
    found = (transactions.apply(position) for position in range(transactions.size()))
    return {str(transaction.appId()): int(transaction.version()) for transaction in found}


@dataclass(frozen=True)
class Written:
    """A write, by which :func:`find_commit` finds its commit; Delta may have skipped the write or made no commit."""

    user_metadata: str
    """User metadata of the commit; no other commit has the same."""
    before: int
    """Version of the table just before the write; -1 if the table was absent."""


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
    add_columns: bool = False,
    note: Mapping[str, Any] | None = None,
) -> Written:
    """Append ``rows`` to a table, or replace rows of it, in one Delta commit.

    ``replace_where`` replaces the rows that match the condition. ``replace_all`` replaces the rows and the schema of
    the whole table. ``add_columns`` gives the table the columns that only ``rows`` have, NULL in its older rows.
    ``note`` is stored in the commit; :func:`commit_note` reads it.

    An absent table is created first, with ``partition_columns`` and ``properties``. ``transaction`` is the
    ``txnAppId`` and ``txnVersion`` of the commit. If that version is already committed, Delta silently skips the write.

    Returns the write: :func:`find_commit` uses it to find the commit, if there is one.
    """
    user_metadata = _user_metadata(note)
    writer = rows.write.format("delta").option("userMetadata", user_metadata)
    if transaction is not None:
        writer = writer.options(txnAppId=transaction[0], txnVersion=str(transaction[1]))
    exists = table_exists(spark, table)
    before = latest_version(spark, table) if exists else -1
    if not exists and is_path(table):
        writer = writer.options(**properties or {})
    elif not exists:  # saveAsTable would drop the transaction and the user metadata of a first write
        create_if_absent(spark, table, rows.schema, partition_columns, properties)
    if exists and replace_where:
        writer = writer.mode("overwrite").option("replaceWhere", replace_where)
    elif exists and replace_all:
        writer = writer.mode("overwrite").option("overwriteSchema", "true")
    else:
        writer = writer.mode("append")
    if add_columns:
        writer = writer.option("mergeSchema", "true")
    path = absolute(table) if is_path(table) else table_location(spark, table)
    writer.partitionBy(*partition_columns).save(path)
    return Written(user_metadata, before)


@contextmanager
def noted(spark: SparkSession, table: str, note: Mapping[str, Any] | None = None) -> Iterator[Written]:
    """Store ``note`` in all commits that the block's statements make (MERGE, UPDATE, RESTORE, VACUUM…)."""
    before = latest_version(spark, table) if table_exists(spark, table) else -1
    written = Written(_user_metadata(note), before)
    with settings(spark, {_USER_METADATA: written.user_metadata}):
        yield written


def find_commits(spark: SparkSession, table: str, written: Written) -> list[dict[str, Any]]:
    """Return the history entries of a write's commits, newest first; an empty list if Delta made no commit.

    The function reads all commits since the write began: it finds the write even if others have committed meanwhile.
    """
    newer = commits_after(spark, table, written.before)
    return [row.asDict(recursive=True) for row in newer if row.userMetadata == written.user_metadata]


def find_commit(spark: SparkSession, table: str, written: Written) -> dict[str, Any] | None:
    """Return the history entry of a write's newest commit; None if Delta made no commit."""
    return next(iter(find_commits(spark, table, written)), None)


def numeric_metrics(commit: Mapping[str, Any]) -> dict[str, int]:
    """Return the numeric metrics of a commit (numOutputRows, numTargetFilesAdded…), without a scan of the table."""
    metrics = commit["operationMetrics"].items()
    return {name: int(value) for name, value in metrics if str(value).lstrip("-").isdigit()}


def commit_note(user_metadata: str | None) -> dict[str, Any]:
    """Return the JSON object in a commit's ``userMetadata``; an empty one if the text is no JSON object."""
    try:
        note = json.loads(user_metadata or "{}")
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def _user_metadata(note: Mapping[str, Any] | None) -> str:
    return json_text({"commit": str(uuid.uuid4()), **(note or {})})
