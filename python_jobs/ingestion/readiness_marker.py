"""Readiness Marker: raw files whose partitions say when they are complete.

Problem: consumers of another team read a dataset while it is being made, and get a part of it. They can't be called:
they must see for themselves when to start.

Guarantee: a partition (``date=…/hour=…``) is ready when it holds the file ``_READY``. The marker is removed before
anything else is touched and written when everything else is done, so that a run that fails or is killed leaves a
partition without one. A partition without rows is made too, with its marker: complete, and empty; and so the next
partition always comes into being, which is all the proof that readers of the naming convention have.

A row that comes after its partition was closed (``event_column`` says which partition it belongs to,
``ingestion_column`` when it came):

- ``--late strict``: a closed partition never changes; the row goes to ``<target>_late``, under the partition in which
  it came. Each row is in exactly one of the two.
- ``--late mutable``: the row's own partition is made anew, whole, and a notice in ``_changes/`` tells consumers to take
  it again: they remember the notices that they have handled, by name. A rerun gives the notice the same name.

Both follow from the window alone: run again, or in another order, the files hold the same rows.

Spark's own ``_SUCCESS`` is no such marker: a failed append leaves the old one, a dynamic overwrite writes none, a
static ``partitionBy`` writes one for all partitions. So partitions are written one by one, straight into their folders.

Delta needs no marker for a table: its commit is one. :func:`newest_data_version` tells a commit with data from an
OPTIMIZE; for several tables at once, and for dbt, see ``macros/ingestion/readiness_marker.sql``. Waiting is
``python_jobs/ingestion/readiness_marker_sensor.py``, which needs no Spark.

Cost: one read of the source's rows of each partition; ``mutable`` also reads the partitions that late rows touch.

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
from python_jobs.shared.core.intervals import Interval, partition_folder
from python_jobs.shared.core.paths import absolute, is_path
from python_jobs.shared.delta.tables import read_table
from python_jobs.shared.files.readiness import (
    Marker,
    regenerated,
)
from python_jobs.shared.files.readiness_names import CHANGES
from python_jobs.shared.spark.job import run_job


@dataclass(frozen=True)
class Parameters(ProcessingTimeParameters):
    """Write partitions of raw files, each with its marker as the very last step."""

    source: str
    """Table to read, by path or catalog name."""
    target: str
    """Folder of the dataset; partitions are date=YYYY-MM-DD/hour=HH or date=YYYY-MM-DD."""
    event_column: str
    """Timestamp that says which partition a row belongs to."""
    ingestion_column: str
    """Timestamp that says when a row came."""
    from_: str
    """First partition, inclusive (2024-03-01T10)."""
    to: str
    """End of the last partition, exclusive."""
    grain: Literal["hour", "day"] = "hour"
    """What a partition is."""
    format: Literal["parquet", "json", "csv"] = "parquet"
    """Of the files."""
    late: Literal["strict", "mutable"] = "strict"
    """What becomes of a row whose partition was closed before it came."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_path(self.target):
            raise WrongUse(f"target must be a folder, got '{self.target}'")
        for bound in (self.window.start, self.window.end):
            if bound != next(Interval(bound, bound + dt.timedelta(minutes=1)).split(self.grain)).start:
                raise WrongUse(f"{bound:%FT%T} is inside a partition: a run makes each {self.grain} whole")

    @property
    def window(self) -> Interval:
        """The partitions to make."""
        return Interval.parse(self.from_, self.to)

    @property
    def root(self) -> str:
        """The dataset's folder without a slash at its end."""
        return self.target.rstrip("/")


# --- markers --------------------------------------------------------------------------------------------


# --- Delta: the commit is the marker --------------------------------------------------------------------


# --- the run --------------------------------------------------------------------------------------------


def run(spark: SparkSession, parameters: Parameters) -> dict[str, Any]:
    """Make each partition of the window in turn, with what came late in it."""
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
        _write(spark, _rows_of(source, parameters, partition), parameters, f"{parameters.root}/{folder}", now)
        made.append(folder)
        late = _came_late(source, parameters, partition)
        if parameters.late == "strict":
            _write(spark, late, parameters, f"{parameters.root}_late/{folder}", now)
            late_rows += late.count()
            continue
        for earlier, rows in _touched(late, parameters):
            late_rows += rows
            notices.append(_revise(spark, source, parameters, earlier, f"{folder}_{rows}", now))
    return {
        "source": parameters.source,
        "target": parameters.target,
        "partitions": made,
        "late_rows": late_rows,
        "notices": notices,
    }


def _rows_of(source: DataFrame, parameters: Parameters, partition: Interval) -> DataFrame:
    """Return the partition's rows; in strict mode as of its own end, whenever it is made."""
    rows = source.where(_within(parameters.event_column, partition))
    if parameters.late == "strict":
        return rows.where(F.col(parameters.ingestion_column) < F.lit(partition.end))
    return rows


def _came_late(source: DataFrame, parameters: Parameters, partition: Interval) -> DataFrame:
    """Return the rows that came during the partition and belong to an earlier one."""
    return source.where(_within(parameters.ingestion_column, partition)).where(
        F.col(parameters.event_column) < F.lit(partition.start)
    )


def _touched(late: DataFrame, parameters: Parameters) -> list[tuple[Interval, int]]:
    """Return the partitions that the late rows belong to, with their number."""
    start = F.unix_seconds(F.date_trunc(parameters.grain, parameters.event_column))
    counts = late.groupBy(start.alias("start")).count().orderBy("start").collect()
    length = dt.timedelta(hours=1) if parameters.grain == "hour" else dt.timedelta(days=1)
    starts = [(dt.datetime.fromtimestamp(row["start"], dt.UTC), int(row["count"])) for row in counts]
    return [(Interval(start, start + length), rows) for start, rows in starts]


def _revise(
    spark: SparkSession,
    source: DataFrame,
    parameters: Parameters,
    partition: Interval,
    cause: str,
    now: dt.datetime,
) -> str:
    """Make a closed partition anew; its notice comes between its files and its marker. Return the notice's name."""
    folder = partition_folder(partition.start, parameters.grain)
    name = f"{folder}_by_{cause}.json".replace("/", "_")
    with regenerated(spark, f"{parameters.root}/{folder}", published_at=now.isoformat()):
        _write_files(_rows_of(source, parameters, partition), parameters, f"{parameters.root}/{folder}")
        notice = {"partition": folder, "published_at": now.isoformat()}
        Marker(spark, f"{parameters.root}/{CHANGES}").write_beside(name, notice)
    return name


def _within(column: str, interval: Interval) -> Column:
    return (F.col(column) >= F.lit(interval.start)) & (F.col(column) < F.lit(interval.end))


def _write(
    spark: SparkSession, rows: DataFrame, parameters: Parameters, folder: str, now: dt.datetime
) -> None:
    with regenerated(spark, folder, published_at=now.isoformat()):
        _write_files(rows, parameters, folder)


def _write_files(rows: DataFrame, parameters: Parameters, folder: str) -> None:
    """Write straight into the folder: a static ``partitionBy`` would replace the other partitions."""
    rows.write.format(parameters.format).mode("overwrite").save(absolute(folder))


if __name__ == "__main__":
    run_job(Parameters, run)
