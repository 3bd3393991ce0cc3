"""The ledger of bronze_visits when visits come through Kafka: an hour of the topic counts as a file.

When the Incremental Loader loads files, it writes the ledger ``bronze_visits_files``. Models read from the ledger which
load of a file is current and which dates a load has touched. With this job the same models work for a topic's records.

    spark-submit case_study/datasets/topic_hours.py --bronze $LAKEHOUSE_ROOT/bronze/bronze_visits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.ingestion.incremental_loader import ledger_rows
from python_jobs.shared.delta.commits import latest_version, write_once
from python_jobs.shared.delta.tables import read_table, table_exists
from python_jobs.shared.spark.job import run_job


@dataclass(frozen=True)
class Parameters:
    """Append the hours of new records of bronze_visits to its ledger."""

    bronze: str
    """Bronze table, by path; the ledger is <bronze>_files."""


def topic_hours(records: DataFrame) -> DataFrame:
    """Return one ledger row for each hour of the topic and each batch with records of this hour."""
    files = records.groupBy("file_path", "load_id", "date", "hour", "ingested_at").agg(
        F.first("file_size").alias("file_size"), F.max("file_modified_at").alias("file_modified_at")
    )
    return ledger_rows(files)


def run(spark: SparkSession, parameters: Parameters) -> dict[str, Any]:
    """Append the hours of the batches that are newer than the ledger, in one commit, and return the report."""
    ledger = parameters.bronze.rstrip("/") + "_files"
    records = read_table(spark, parameters.bronze)
    if table_exists(spark, ledger):
        newest = (
            read_table(spark, ledger).agg(F.unix_micros(F.max("ingested_at")).alias("at")).collect()[0]["at"]
        )
        if newest is not None:
            records = records.where(F.col("ingested_at") > F.timestamp_micros(F.lit(newest)))
    hours = topic_hours(records).persist()
    try:
        count = hours.count()
        if count or not table_exists(spark, ledger):
            write_once(spark, hours, ledger)
    finally:
        hours.unpersist()
    return {"ledger": ledger, "hours": count, "table_version": latest_version(spark, ledger)}


if __name__ == "__main__":
    run_job(Parameters, run)
