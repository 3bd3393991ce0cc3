"""Compaction of Delta tables: the policy that finds small files, and the OPTIMIZE that merges them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import JobFailed, WrongUse, require_at_least
from python_jobs.shared.core.intervals import duration, from_micros, moved, to_micros
from python_jobs.shared.delta.commits import CONFLICTS
from python_jobs.shared.delta.tables import active_files, partition_columns, read_table
from python_jobs.shared.spark.session import settings
from python_jobs.shared.spark.sql_text import (
    identifier,
    named_column,
    named_columns,
    string_literal,
    table_name,
    timestamp_literal,
)

_MB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class CompactionPolicy:
    """Which partitions of a table are compacted, and into files of which size."""

    min_age_minutes: int = 0
    """Minimum age of a partition's newest file, in minutes; a younger partition is still being written and stays."""
    min_small_files: int = 4
    """Minimum number of small files in a partition that is compacted."""
    min_small_ratio: float = 0.5
    """Minimum share of small files in a partition that is compacted."""
    small_file_mb: float = 32
    """Size below which a file is small, in MB."""
    target_file_mb: float = 128
    """Size up to which files are merged, in MB."""

    def __post_init__(self) -> None:
        if self.min_small_files < 2:
            raise WrongUse(f"min_small_files is {self.min_small_files}; merging takes at least 2 files")
        if not 0 <= self.min_small_ratio <= 1:
            raise WrongUse(f"min_small_ratio is {self.min_small_ratio}; it is a share between 0 and 1")
        require_at_least(0, target_file_mb=self.target_file_mb)
        if not 0 < self.small_file_mb <= self.target_file_mb:
            raise WrongUse(
                f"small_file_mb is {self.small_file_mb} and target_file_mb {self.target_file_mb}; "
                "the first must be above 0 and not above the second"
            )
        require_at_least(0, min_age_minutes=self.min_age_minutes)

    @property
    def small_bytes(self) -> int:
        """Size below which a file is small."""
        return int(self.small_file_mb * _MB)

    @property
    def target_bytes(self) -> int:
        """Size up to which files are merged."""
        return int(self.target_file_mb * _MB)


def worth_compacting(
    files: DataFrame, partitions: Sequence[str], policy: CompactionPolicy, now: dt.datetime
) -> DataFrame:
    """Return the partitions to compact, one row each.

    ``files`` is what :func:`python_jobs.shared.delta.tables.active_files` returns. Without partition columns the
    table is one partition.
    """
    newest_allowed = F.timestamp_micros(
        F.lit(to_micros(moved(now, -duration("minutes", policy.min_age_minutes))))
    )
    return (
        files.groupBy(*named_columns(partitions))
        .agg(
            F.struct(
                F.count(F.lit(1)).alias("all"),
                F.count_if(F.col("__size") < policy.small_bytes).alias("small"),
                F.max("__modified_at").alias("newest"),
            ).alias("__files")
        )
        .where(F.col("__files.small") >= policy.min_small_files)
        .where(F.col("__files.small") >= F.col("__files.all") * policy.min_small_ratio)
        # Without an age to wait for, a file that came after `now`, while this job started, keeps nobody waiting.
        .where((F.col("__files.newest") <= newest_allowed) if policy.min_age_minutes else F.lit(True))
        .select(*named_columns(partitions))
    )


def partition_predicate(rows: Sequence[Row], types: Mapping[str, str]) -> str:
    """Return the SQL that selects exactly these partitions; a NULL value is a value.

    The rows are those of :func:`without_zone`.
    """
    return " or ".join(
        "("
        + " and ".join(f"{identifier(name)} <=> {_literal(row[name], types[name])}" for name in types)
        + ")"
        for row in rows
    )


def _literal(value: Any, type_: str) -> str:
    if value is None:
        return "null"
    if type_ == "timestamp":
        return timestamp_literal(from_micros(value))
    if type_ == "binary":
        return f"X'{value.hex()}'"
    return f"cast({string_literal(str(value))} as {type_})"


def without_zone(partitions: DataFrame) -> DataFrame:
    """Return the rows with microseconds since 1970 for each timestamp: collected, it would be one of Python's zone."""
    types = dict(partitions.dtypes)
    return partitions.select(
        *(
            F.unix_micros(named_column(name)).alias(name) if type_ == "timestamp" else named_column(name)
            for name, type_ in types.items()
        )
    )


def optimize(spark: SparkSession, table: str, policy: CompactionPolicy, chosen: Sequence[Row]) -> Any:
    """Merge the small files of the chosen partitions in one commit and return Delta's metrics.

    Args:
        spark: session.
        table: Delta table, by path or catalog name.
        policy: sizes of small files and of their targets.
        chosen: partitions, as :func:`without_zone` returns them; ignored for a table without partition columns.

    Raises:
        JobFailed: another writer rewrote the same files meanwhile.
    """
    types = {name: dict(read_table(spark, table).dtypes)[name] for name in partition_columns(spark, table)}
    # Delta's own builder doesn't escape a backtick in a path.
    statement = f"optimize {table_name(table)}"
    if types:
        statement += f" where {partition_predicate(chosen, types)}"
    try:
        with settings(
            spark,
            {
                "spark.databricks.delta.optimize.minFileSize": str(policy.small_bytes),
                "spark.databricks.delta.optimize.maxFileSize": str(policy.target_bytes),
            },
        ):
            return spark.sql(statement).collect()[0].metrics
    except CONFLICTS:
        raise JobFailed(
            f"another writer rewrote files of {table} meanwhile; nothing was compacted, run again"
        ) from None


def compact(
    spark: SparkSession, table: str, policy: CompactionPolicy, now: dt.datetime
) -> dict[str, int] | None:
    """Compact a table where its policy finds it worth it; return the numbers of files, None if it did nothing.

    Raises:
        JobFailed: another writer rewrote the same files meanwhile.
    """
    columns = partition_columns(spark, table)
    worth = worth_compacting(active_files(spark, table), columns, policy, now)
    chosen = without_zone(worth).collect()
    if not chosen:
        return None
    metrics = optimize(spark, table, policy, chosen)
    return {"files_removed": metrics.numFilesRemoved, "files_added": metrics.numFilesAdded}
