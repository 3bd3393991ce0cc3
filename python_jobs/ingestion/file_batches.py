"""Batches of arrived files: when enough have arrived, and which of them can't be read."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.intervals import parse_duration, to_micros
from python_jobs.shared.delta.commits import write_once
from python_jobs.shared.delta.tables import read_table, table_exists
from python_jobs.shared.files.file_sets import SourceFile, unreadable_among
from python_jobs.shared.spark.hadoop_files import HadoopFolder

Identity = tuple[str, int, int]
"""Path, size and modification time: a repaired file has another one."""

_FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class BatchParameters:
    """When a job takes the files that have arrived; without any of the three, at each run."""

    min_files: int | None = None
    """Number of files that are enough for a load; a run that finds fewer ends with exit code 4."""
    min_bytes: int | None = None
    """Bytes of all files together that are enough for a load."""
    max_wait: str | None = None
    """Age of the oldest file, such as "15 minutes", at which the files are loaded however few they are."""

    def __post_init__(self) -> None:
        for name, value in (("min_files", self.min_files), ("min_bytes", self.min_bytes)):
            if value is not None and value < 1:
                raise WrongUse(f"{name} must be 1 or more, got {value}")
        if self.max_wait is not None:
            parse_duration(self.max_wait)

    def waits_for(self, files: Sequence[SourceFile], now: dt.datetime) -> str | None:
        """Return what arrived and what a load takes, in words; None if it is enough."""
        size = sum(file.size for file in files)
        age = now.timestamp() - min((file.modified_at for file in files), default=0) / 1000
        limits = [
            (self.min_files, f"{self.min_files} files", len(files)),
            (self.min_bytes, f"{self.min_bytes} bytes", size),
            (
                None if self.max_wait is None else parse_duration(self.max_wait).total_seconds(),
                f"a file that is {self.max_wait} old",
                age,
            ),
        ]
        wanted = [(limit, words, found) for limit, words, found in limits if limit is not None]
        if not files or not wanted or any(found >= limit for limit, _, found in wanted):
            return None
        return (
            f"{len(files)} files of {size} bytes wait, the oldest for {max(0, int(age))} seconds; a load takes "
            + " or ".join(words for _, words, _ in wanted)
        )


def identity(file: SourceFile) -> Identity:
    """Return what tells a file from its repaired successor."""
    return file.file_path, file.size, file.modified_at


class UnreadFiles(Exception):
    """Files of a batch that could not be read; the rest can be loaded without them."""

    def __init__(self, files: Mapping[SourceFile, str | None]) -> None:
        super().__init__(f"{len(files)} files could not be read")
        self.files = files


def unread_files(
    folder: HadoopFolder, batch: Sequence[SourceFile], failure: Exception
) -> dict[SourceFile, str | None]:
    """Return which files of the batch ended its load, with the cause; None for a file that is gone.

    The result is empty if the failure has another cause.
    """
    gone = [file for file in batch if not folder.exists(file.file_path)]
    if gone:
        return dict.fromkeys(gone)
    return dict(unreadable_among(batch, failure))


def set_aside(spark: SparkSession, table: str, files: Mapping[SourceFile, str], at: dt.datetime) -> None:
    """Append files that can't be read, with the cause, to the table of dead letters; it is created when absent."""
    rows = [(*identity(file), cause) for file, cause in files.items()]
    frame = spark.createDataFrame(
        rows, "file_path string, file_size bigint, modified_at bigint, reason string"
    )
    write_once(
        spark,
        frame.select(
            "file_path",
            "file_size",
            F.timestamp_millis("modified_at").alias("file_modified_at"),
            "reason",
            F.timestamp_micros(F.lit(to_micros(at))).alias("set_aside_at"),
            F.lit(_FORMAT_VERSION).alias("format_version"),
        ),
        table,
    )


def files_set_aside(spark: SparkSession, table: str) -> set[Identity]:
    """Return the files in the table of dead letters."""
    if not table_exists(spark, table):
        return set()
    millis = F.unix_millis("file_modified_at")
    rows = read_table(spark, table).select("file_path", "file_size", millis).distinct().collect()
    return {(row[0], row[1], row[2]) for row in rows}
