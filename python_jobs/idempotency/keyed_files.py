"""Keyed Idempotency, files: one file for each logical run, named after the run.

Problem: a job that names its output after the clock leaves another file at each rerun.

Guarantee: ``<target>/<run>.json`` has the whole result of the run's last execution: the job writes a staging file and
renames it. A run of another logical time has another file. The wall clock has no influence.

Not guaranteed in object stores: there a rename is a copy, and a reader may see a replacement that is not complete.

Cost: one task writes the file. For larger results use partitions and Data Overwrite.

The query reads ``{source}`` and may name ``{run}``, its time as text::

    spark-submit python_jobs/idempotency/keyed_files.py --source lakehouse/silver/silver_visits \\
        --query "select visit_id, page from {source} where event_date = date({run})" \\
        --target exports/visits --run 2024-11-20

Source: Data Engineering Design Patterns, chapter 4, Keyed Idempotency.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from python_jobs.idempotency.keyed_sinks import FileSink
from python_jobs.idempotency.run_queries import rows_of_run
from python_jobs.shared.core.intervals import parse_time
from python_jobs.shared.delta.tables import read_table
from python_jobs.shared.spark.job import run_job


@dataclass(frozen=True)
class Parameters:
    """Write the result of a query to one JSON-lines file of the run."""

    source: str
    """Delta table (name or path) that the query reads as {source}."""
    query: str
    """SQL query of the rows."""
    target: str
    """Folder of the files."""
    run: str
    """Logical time of the run (2024-11-20, 2024-11-20T10), never the clock's."""

    def __post_init__(self) -> None:
        parse_time(self.run)

    @property
    def file_name(self) -> str:
        """Return the run's time as a file name: 20241120 for midnight, 20241120T103000 for any other time."""
        moment = parse_time(self.run)
        shape = "%Y%m%d" if (moment.hour, moment.minute, moment.second) == (0, 0, 0) else "%Y%m%dT%H%M%S"
        return f"{moment:{shape}}"


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Write or replace the run's file.

    Raises:
        NotReady: there is no source table.
    """
    rows = rows_of_run(read_table(spark, params.source), params.query, params.run)
    return {"run": params.run, "file": FileSink(spark, params.target).write_named(rows, params.file_name)}


if __name__ == "__main__":
    run_job(Parameters, run)
