"""Delta tables by catalog name or by path: their rows, files, partitions and properties."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import Any

from delta.tables import DeltaTable
from pyspark.errors import ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from python_jobs.shared.core.failures import NotReady, WrongUse
from python_jobs.shared.core.intervals import duration
from python_jobs.shared.core.paths import absolute, is_path
from python_jobs.shared.spark.hadoop_files import literal_path
from python_jobs.shared.spark.jvm import (
    data_frame,
    delta_log,
    newest_snapshot,
    tombstone_retention_milliseconds,
)
from python_jobs.shared.spark.sql_text import table_name


def table_exists(spark: SparkSession, table: str) -> bool:
    """Return whether ``table`` is an existing Delta table.

    Raises:
        WrongUse: ``table`` is neither a path nor a name.
    """
    if is_path(table):
        return bool(DeltaTable.isDeltaTable(spark, absolute(table)))
    try:
        return bool(spark.catalog.tableExists(table))
    except ParseException:
        raise WrongUse(
            f"'{table}' is no name of a table; use a path with '/', or database.table with backticks around a part "
            "that has other characters than letters, digits and '_'"
        ) from None


def delta_table(spark: SparkSession, table: str) -> DeltaTable:
    """Return the handle of an existing Delta table.

    Raises:
        NotReady: there is no such table.
    """
    if not table_exists(spark, table):
        raise NotReady(f"there is no Delta table '{table}'")
    return DeltaTable.forPath(spark, absolute(table)) if is_path(table) else DeltaTable.forName(spark, table)


def create_if_absent(
    spark: SparkSession,
    table: str,
    schema: StructType,
    partition_by: Sequence[str] = (),
    properties: Mapping[str, str] | None = None,
) -> None:
    """Create an empty Delta table with these columns, partition columns and table properties; keep an existing one."""
    builder = DeltaTable.createIfNotExists(spark).addColumns(schema)
    builder = builder.location(absolute(table)) if is_path(table) else builder.tableName(table)
    for name, value in (properties or {}).items():
        builder = builder.property(name, value)
    builder.partitionedBy(*partition_by).execute()


def read_table(spark: SparkSession, table: str) -> DataFrame:
    """Return the current rows of an existing Delta table; raises like :func:`delta_table`."""
    return delta_table(spark, table).toDF()


def read_version(spark: SparkSession, table: str, version: int) -> DataFrame:
    """Return the rows of one version of an existing Delta table; later commits don't change them."""
    return spark.sql(f"select * from {table_name(table)} version as of {version}")


def table_id(spark: SparkSession, table: str) -> str:
    """Return the id of an existing table; a table that is dropped and recreated gets a new id."""
    return str(delta_snapshot(spark, table).metadata().id())


def active_files(spark: SparkSession, table: str) -> DataFrame:
    """Return one row for each data file of the current version, from the log, without reading the data.

    Columns: ``__size`` (bytes), ``__modified_at`` and the table's partition columns.
    """
    snapshot = delta_snapshot(spark, table)
    return data_frame(spark, snapshot.allFiles().toDF()).select(
        F.col("size").alias("__size"),
        F.timestamp_millis("modificationTime").alias("__modified_at"),
        *partition_values(spark, table, "partitionValues"),
    )


def committed_files(spark: SparkSession, table: str, after: int, until: int) -> DataFrame:
    """Return the files that the commits after version ``after``, up to ``until``, have added and removed.

    Columns: ``add`` and ``remove`` (``partitionValues``, ``dataChange``), one of them NULL, and ``version``. Spark
    raises PATH_NOT_FOUND if the log no longer has one of the entries.

    The function reads the entries as JSON. The library ``deltalake`` can't replace this: it lists the files of a
    version, but not the files that a commit removed. And it doesn't read the session's Hadoop settings (HDFS,
    credentials of an object store).
    """
    log = f"{table_location(spark, table)}/_delta_log"
    file = "struct<partitionValues: map<string, string>, dataChange: boolean>"
    entries = [literal_path(f"{log}/{version:020d}.json") for version in range(after + 1, until + 1)]
    actions = spark.read.schema(f"add {file}, remove {file}").json(entries)
    version = F.regexp_extract("_metadata.file_name", r"(\d{20})\.json$", 1).cast("long").alias("version")
    return actions.select("add", "remove", version)


def partition_values(spark: SparkSession, table: str, from_map: str) -> list[Column]:
    """Return the typed partition columns, read from a log entry's map of texts (the column ``from_map``)."""
    metadata = delta_snapshot(spark, table).metadata()
    fields = {field["name"]: field for field in json.loads(metadata.schema().json())["fields"]}
    types = dict(read_table(spark, table).dtypes)
    columns = []
    for name in partition_columns(spark, table):
        # With column mapping the log has the physical name of the column.
        physical = fields[name]["metadata"].get("delta.columnMapping.physicalName", name)
        columns.append(F.col(from_map)[physical].cast(types[name]).alias(name))
    return columns


def partition_columns(spark: SparkSession, table: str) -> list[str]:
    """Return the names of the table's partition columns, in order."""
    return list(delta_snapshot(spark, table).metadata().partitionSchema().fieldNames())


def table_size(spark: SparkSession, table: str) -> tuple[int, int]:
    """Return the number of data files of the current version and their total bytes, from the log."""
    snapshot = delta_snapshot(spark, table)
    return int(snapshot.numOfFiles()), int(snapshot.sizeInBytes())


def deleted_file_retention(spark: SparkSession, table: str) -> dt.timedelta:
    """Return how long the table keeps removed files before a vacuum may delete them (7 days by default)."""
    snapshot = delta_snapshot(spark, table)
    return duration("milliseconds", tombstone_retention_milliseconds(spark, snapshot))


def retention_properties(days: int) -> dict[str, str]:
    """Return the table properties that keep log entries and removed files for ``days`` days."""
    duration = f"interval {days} days"
    return {"delta.deletedFileRetentionDuration": duration, "delta.logRetentionDuration": duration}


def table_location(spark: SparkSession, table: str) -> str:
    """Return the path of an existing table, given by path or by catalog name."""
    return str(delta_log(delta_table(spark, table)).dataPath().toString())


def delta_snapshot(spark: SparkSession, table: str) -> Any:
    """Return Delta's snapshot of the table's newest version; no Spark job reads the history."""
    return newest_snapshot(delta_table(spark, table))
