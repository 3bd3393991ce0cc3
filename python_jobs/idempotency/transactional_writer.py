"""Transactional Writer, Delta: one run writes several tables, and each table gets all rows of the run once, or none.

Problem: tasks are lost and retried, jobs are killed and restarted. Readers must see no part of a run, and no row twice.

Guarantee: each table gets the run's rows in one Delta commit. Files of failed tasks, or of a job that was killed before
the commit, are never read; vacuum deletes them. The commit has the run's number (``txnAppId``, ``txnVersion``). So a
rerun skips the tables that have the run and writes the others, from the same version of the source as the first
attempt.

Not guaranteed: one commit over all tables. The tables are written in the given order, so until the run or its rerun
ends, a reader may see the run in the first table and not yet in the last.

A run that is older than the newest run in a table is refused (exit code 3) before anything is written, because Delta
would silently skip it. Runs must come in order. ``--generation`` starts a new sequence, in which past runs may be
written again. The rows of the first pass stay, so an append then duplicates them: delete them first, or use Data
Overwrite or Merger instead.

Cost: two reads of a table's log for each write, and one entry for each writer in the table's state.

Queries read ``{source}`` and may name ``{run}``, its time as text::

    spark-submit python_jobs/idempotency/transactional_writer.py --config conf/jobs/visits_by_device.yml \\
        --run 2024-11-20

Source: Data Engineering Design Patterns, chapter 4, Transactional Writer; the guide's ``pat-exactly-once``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.idempotency.run_queries import rows_of_run
from python_jobs.shared.core.failures import DataRefused, JobFailed, WrongUse, require_at_least
from python_jobs.shared.core.intervals import parse_time, to_micros
from python_jobs.shared.delta.commits import find_commit, latest_version, transaction_version, write_once
from python_jobs.shared.delta.tables import delta_table, read_version, table_exists
from python_jobs.shared.spark.job import run_job


@dataclass(frozen=True)
class Parameters:
    """Append the rows of one run to several Delta tables, to each in one transaction."""

    source: str
    """Delta table (name or path) that the queries read as {source}."""
    write: dict[str, str]
    """Target tables (name or path, created if absent), each with its query, in the order of writing."""
    run: str
    """Logical time of the run (2024-11-20, 2024-11-20T10), never the clock's."""
    writer: str = "transactional_writer"
    """Name of the pipeline in the tables' logs; each pipeline that writes to these tables needs another name."""
    generation: int = 0
    """Number of the sequence of runs; raise it by one to write past runs again. Rows of earlier sequences stay."""

    def __post_init__(self) -> None:
        if not self.write:
            raise WrongUse("write names no table; it takes one or more, each with its query")
        if self.source in self.write:
            raise WrongUse(f"'{self.source}' can't be source and target")
        require_at_least(0, generation=self.generation)
        _ = self.version  # refuses a text that is no time

    @property
    def version(self) -> int:
        """Return the run's time as a number (Delta's txnVersion): microseconds since 1970."""
        return to_micros(parse_time(self.run))

    @property
    def app_id(self) -> str:
        """Return the name under which Delta counts the runs (Delta's txnAppId)."""
        return f"{self.writer}/{self.generation}"


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Write the run to the tables that don't have it yet, and return the report.

    Raises:
        NotReady: there is no source table.
        DataRefused: a table has a later run; nothing was written.
        JobFailed: another process wrote the same run at the same time.
    """
    having = _tables_with_the_run(spark, params)
    source_version = _version_read_before(spark, params, having)
    if source_version is None:
        source_version = latest_version(spark, params.source)
    source = read_version(spark, params.source, source_version)
    # All queries are analysed before the first table is written.
    rows = {table: rows_of_run(source, query, params.run) for table, query in params.write.items()}
    note = {"writer": params.app_id, "version": params.version, "source_version": source_version}
    written = []
    for table in params.write:
        count = 0 if table in having else _write(spark, rows[table], table, params, note)
        written.append({"table": table, "already": table in having, "rows": count})
    return {"run": params.run, "source_version": source_version, "tables": written}


def _tables_with_the_run(spark: SparkSession, params: Parameters) -> set[str]:
    having = set()
    for table in params.write:
        exists = table_exists(spark, table)
        newest = transaction_version(spark, table, params.app_id) if exists else None
        if newest is not None and newest > params.version:
            raise DataRefused(
                f"'{table}' has a later run than {params.run} of {params.app_id}, so Delta would silently skip this "
                f"run; nothing was written. To write past runs again, pass --generation {params.generation + 1}"
            )
        if newest == params.version:
            having.add(table)
    return having


def _version_read_before(spark: SparkSession, params: Parameters, having: set[str]) -> int | None:
    """Return the version of the source that an earlier attempt at this run has read; None without such an attempt."""
    writer, version, source_version = (
        F.get_json_object("userMetadata", f"$.{name}") for name in ("writer", "version", "source_version")
    )
    same_run = (writer == params.app_id) & (version == str(params.version))
    for table in having:
        found = delta_table(spark, table).history().where(same_run).select(source_version).first()
        if found is not None:
            return int(found[0])
    return None


def _write(spark: SparkSession, rows: DataFrame, table: str, params: Parameters, note: dict[str, Any]) -> int:
    """Append the rows and return their number, from the commit's metrics."""
    metadata = write_once(spark, rows, table, transaction=(params.app_id, params.version), note=note)
    commit = find_commit(spark, table, metadata)
    if commit is None:
        raise JobFailed(f"another process wrote {params.run} to '{table}' at the same time; run again")
    return int(commit["operationMetrics"]["numOutputRows"])


if __name__ == "__main__":
    run_job(Parameters, run)
