"""Report of the main job: the number of visit lines by outcome and by delay, and the published tables.

The job reads the tables of the accounting and of the delays, and the logs of the published tables, but no visits.

    spark-submit case_study/visits_report.py --lakehouse $LAKEHOUSE_ROOT

Exit code 3 means that the six counts of the precedence do not add up to the lines read; 4 means that gold is not ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import DataRefused
from python_jobs.shared.delta.commits import latest_version
from python_jobs.shared.delta.tables import read_table, table_exists, table_size
from python_jobs.shared.files.readiness import ready_versions
from python_jobs.shared.spark.job import run_job

PRECEDENCE = ("unparsable", "invalid", "filtered", "exact_duplicate", "superseded", "kept")
PUBLISHED = (
    "silver/silver_visits",
    "silver/silver_users",
    "silver/silver_devices",
    "gold/gold_page_views_by_hour",
    "gold/gold_referral_statistics_by_day",
    "gold/gold_visit_statistics",
    "gold/gold_users_history",
)


@dataclass(frozen=True)
class Parameters:
    """Print the number of visit lines by outcome and by delay, and the published tables."""

    lakehouse: str
    """Root of the lakehouse."""


def run(spark: SparkSession, parameters: Parameters) -> dict[str, Any]:
    """Return the report: ``lines`` by status and reason in the order of the precedence, ``delays`` and ``tables``.

    Raises:
        NotReady: gold is not published yet.
        DataRefused: the accounted lines are not as many as the lines read.
    """
    root = parameters.lakehouse.rstrip("/")
    ready_versions(spark, f"{root}/observability/observability_readiness", "gold")
    lines = lines_by_reason(read_table(spark, f"{root}/observability/observability_visits_accounting"))
    read = bronze_lines(spark, root)
    accounted = sum(entry["lines"] for entry in lines)
    if read != accounted:
        raise DataRefused(f"{read} lines were read, but {accounted} are accounted for")
    tables = [
        describe(spark, f"{root}/{table}") for table in PUBLISHED if table_exists(spark, f"{root}/{table}")
    ]
    return {
        "lines_read": read,
        "lines": [{"status": "read", "reason": "", "lines": read}, *lines],
        "delays": valid_lines_by_delay(
            read_table(spark, f"{root}/observability/observability_visits_lateness")
        ),
        "tables": tables,
    }


def valid_lines_by_delay(lateness: DataFrame) -> list[dict[str, Any]]:
    """Return the number of valid lines of each delay bucket over all dates; lines with 0 hours are on time."""
    totals = lateness.groupBy("bucket", "delay_up_to").agg(F.sum("lines").alias("lines")).orderBy("bucket")
    return [{"landed_after": row["delay_up_to"], "valid_lines": row["lines"]} for row in totals.collect()]


def lines_by_reason(accounting: DataFrame) -> list[dict[str, Any]]:
    """Return the number of lines of each status and reason over all dates, ordered by the precedence."""
    totals = accounting.groupBy("status", "reason").agg(F.sum("lines").alias("lines")).collect()
    order = {status: position for position, status in enumerate(PRECEDENCE)}
    return [
        {"status": row.status, "reason": row.reason, "lines": row.lines}
        for row in sorted(totals, key=lambda row: (order[row.status], row.reason))
    ]


def bronze_lines(spark: SparkSession, root: str) -> int:
    """Return the number of lines in the current load of every file, counted in bronze."""
    files = read_table(spark, f"{root}/bronze/bronze_visits_files")
    current = files.groupBy("file_path").agg(F.max("load_id").alias("load_id"))
    lines = read_table(spark, f"{root}/bronze/bronze_visits").select("file_path", "load_id")
    return lines.join(F.broadcast(current), ["file_path", "load_id"]).count()


def describe(spark: SparkSession, table: str) -> dict[str, Any]:
    """Return the name, version, and numbers of rows and files of one table."""
    files, _ = table_size(spark, table)
    return {
        "table": table.rsplit("/", 1)[-1],
        "rows": read_table(spark, table).count(),
        "files": files,
        "version": latest_version(spark, table),
    }


if __name__ == "__main__":
    run_job(Parameters, run)
