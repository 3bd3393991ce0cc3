"""Readiness Marker: write partitions of raw files, each with a marker that says that it is complete.

Problem: consumers of another team read a dataset while a job writes it, and get a part of the data. The producer can't
call them: they must be able to check when to start.

Guarantee: a partition (``date=…/hour=…``) is ready when it has the file ``_READY``. A run removes the marker first and
writes it last, so a run that fails or is killed leaves a partition without marker. A partition without rows is written
with its marker, too. So the next partition is always created: consumers that rely on the naming convention wait
for it.

A late row comes after its partition was closed. ``event_column`` has the partition that the row belongs to,
``ingestion_column`` the time at which the row came:

- ``--late strict``: a closed partition never changes. A late row goes to ``<target>_late``, into the partition in which
  it came. Each row is in exactly one of the two datasets.
- ``--late mutable``: the whole partition of a late row is written again, and a notice in ``_changes/`` tells consumers
  to read it again. Consumers store the names of the notices that they have handled; a rerun gives a notice the same
  name.

The result depends on the window only: after a rerun, or in another order of runs, the files have the same rows.

Spark's ``_SUCCESS`` is no such marker: a failed append leaves the old one, a dynamic overwrite writes none, and a
static ``partitionBy`` writes one for all partitions. Therefore the job writes the partitions one by one, directly into
their folders.

A Delta table needs no marker, because a commit makes its data visible.
:func:`~python_jobs.shared.files.readiness.newest_data_version` distinguishes a commit with data from an OPTIMIZE. For
several tables at once, and for dbt, see ``macros/ingestion/readiness_marker.sql``. Consumers wait with
``python_jobs/ingestion/readiness_marker_sensor.py``, which needs no Spark.

Cost: one read of the source's rows of each partition. ``mutable`` also reads the partitions of late rows.

    spark-submit python_jobs/ingestion/readiness_marker.py --source lakehouse/silver/silver_visits \\
        --target shared/visits --event_column event_time --ingestion_column ingested_at \\
        --from 2024-03-01T10 --to 2024-03-01T11

Source: Data Engineering Design Patterns, chapter 2, Readiness Marker.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any, Literal

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.intervals import Interval, from_micros, moved, partition_folder
from python_jobs.shared.core.paths import absolute, is_path
from python_jobs.shared.delta.tables import read_table
from python_jobs.shared.files.readiness import (
    Marker,
    regenerated,
)
from python_jobs.shared.files.readiness_names import CHANGES
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import named_column


@dataclass(frozen=True)
class Parameters(ProcessingTimeParameters):
    """Write partitions of raw files, and the marker of each partition as its last file."""

    source: str
    """Table to read, by path or catalog name."""
    target: str
    """Folder of the dataset; partitions are date=YYYY-MM-DD/hour=HH or date=YYYY-MM-DD."""
    event_column: str
    """Timestamp column that determines the partition of a row."""
    ingestion_column: str
    """Timestamp column with the time at which a row came."""
    from_: str
    """First partition, inclusive (2024-03-01T10)."""
    to: str
    """End of the last partition, exclusive."""
    grain: Literal["hour", "day"] = "hour"
    """Period of one partition."""
    format: Literal["parquet", "json", "csv"] = "parquet"
    """Format of the files."""
    late: Literal["strict", "mutable"] = "strict"
    """Treatment of late rows. strict writes them to <target>_late; mutable writes their partition again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_path(self.target):
            raise WrongUse(f"target must be a folder, got '{self.target}'")
        for bound in (self.window.start, self.window.end):
            if bound != next(Interval(bound, moved(bound, dt.timedelta(minutes=1))).split(self.grain)).start:
                raise WrongUse(
                    f"{bound:%FT%T} is inside a partition, but a run writes whole partitions; give the start of a "
                    f"{self.grain}"
                )

    @property
    def window(self) -> Interval:
        """Return the interval of the partitions to write."""
        return Interval.parse(self.from_, self.to)

    @property
    def root(self) -> str:
        """Return the dataset's folder without a slash at its end."""
        return self.target.rstrip("/")


# --- the run --------------------------------------------------------------------------------------------


def run(spark: SparkSession, parameters: Parameters) -> dict[str, Any]:
    """Write each partition of the window, and the late rows that came in it; return the report.

    Raises:
        NotReady: there is no source table.
        WrongUse: the source lacks a column.
    """
    now = parameters.processing_time()
    source = read_table(spark, parameters.source)
    for name in (parameters.event_column, parameters.ingestion_column):
        if name not in source.columns:
            raise WrongUse(f"the source has no column {name}; it has {', '.join(source.columns)}")
    made: list[str] = []
    notices: list[str] = []
    late_rows = 0
    for partition in parameters.window.split(parameters.grain):
        folder = partition_folder(partition.start, parameters.grain)
        _write(spark, rows_of(source, parameters, partition), parameters, f"{parameters.root}/{folder}", now)
        made.append(folder)
        late = came_late(source, parameters, partition)
        if parameters.late == "strict":
            _write(spark, late, parameters, f"{parameters.root}_late/{folder}", now)
            late_rows += late.count()
            continue
        for earlier, rows in touched(late, parameters):
            late_rows += rows
            notices.append(_revise(spark, source, parameters, earlier, f"{folder}_{rows}", now))
    return {
        "source": parameters.source,
        "target": parameters.target,
        "partitions": made,
        "late_rows": late_rows,
        "notices": notices,
    }


def rows_of(source: DataFrame, parameters: Parameters, partition: Interval) -> DataFrame:
    """Return the partition's rows; in strict mode only those that came before its end, whenever the job runs."""
    rows = source.where(_within(parameters.event_column, partition))
    if parameters.late == "strict":
        return rows.where(named_column(parameters.ingestion_column) < F.lit(partition.end))
    return rows


def came_late(source: DataFrame, parameters: Parameters, partition: Interval) -> DataFrame:
    """Return the rows that came during the partition and belong to an earlier partition."""
    return source.where(_within(parameters.ingestion_column, partition)).where(
        named_column(parameters.event_column) < F.lit(partition.start)
    )


def touched(late: DataFrame, parameters: Parameters) -> list[tuple[Interval, int]]:
    """Return each partition that late rows belong to, with the number of these rows."""
    start = F.unix_seconds(F.date_trunc(parameters.grain, named_column(parameters.event_column)))
    counts = late.groupBy(start.alias("start")).count().orderBy("start").collect()
    length = dt.timedelta(hours=1) if parameters.grain == "hour" else dt.timedelta(days=1)
    starts = [(from_micros(row["start"] * 1_000_000), int(row["count"])) for row in counts]
    return [(Interval(start, moved(start, length)), rows) for start, rows in starts]


def _revise(
    spark: SparkSession,
    source: DataFrame,
    parameters: Parameters,
    partition: Interval,
    cause: str,
    now: dt.datetime,
) -> str:
    """Write a closed partition again: its files, then its notice, then its marker. Return the notice's name."""
    folder = partition_folder(partition.start, parameters.grain)
    name = f"{folder}_by_{cause}.json".replace("/", "_")
    with regenerated(spark, f"{parameters.root}/{folder}", published_at=now.isoformat()):
        _write_files(rows_of(source, parameters, partition), parameters, f"{parameters.root}/{folder}")
        notice = {"partition": folder, "published_at": now.isoformat()}
        Marker(spark, f"{parameters.root}/{CHANGES}").write_beside(name, notice)
    return name


def _within(column: str, interval: Interval) -> Column:
    time = named_column(column)
    return (time >= F.lit(interval.start)) & (time < F.lit(interval.end))


def _write(
    spark: SparkSession, rows: DataFrame, parameters: Parameters, folder: str, now: dt.datetime
) -> None:
    with regenerated(spark, folder, published_at=now.isoformat()):
        _write_files(rows, parameters, folder)


def _write_files(rows: DataFrame, parameters: Parameters, folder: str) -> None:
    """Write directly into the folder: a static ``partitionBy`` would replace the other partitions."""
    rows.write.format(parameters.format).mode("overwrite").save(absolute(folder))


if __name__ == "__main__":
    run_job(Parameters, run)
