"""Time Travel: named versions of a Delta table, which stay readable until a date of each name.

Problem: an audit, a training set or a report needs an old version of a table. Delta refuses versions older than 7 days,
and the next VACUUM deletes their files. And nobody remembers the number of a version.

Actions (``--action``):

- ``name`` registers a version, given by number or time, under a name. It raises the table's retention
  (``delta.deletedFileRetentionDuration``, ``delta.logRetentionDuration``) so that each named version can be read until
  its ``--keep_until``. Every VACUUM of the table obeys this retention.
- ``restore`` restores the table to a named version, in one commit, and raises the retention again, because RESTORE also
  brings back the old properties.
- ``protect`` only raises the retention, for a table that another program has restored.
- ``forget`` deletes a name. The retention stays: the owner of the table may lower it.
- ``list`` reports the named versions.

In dbt: ``{{ lakehouse_patterns.time_travel(ref('orders'), name='audit', registry=source('ops', 'versions')) }}``.

Guarantee: a name never changes to another version. The version is protected before it is registered.

Not guaranteed: versions after a VACUUM with ``retentionDurationCheck`` switched off, or after the table is dropped. A
named version is no backup.

Cost: the table keeps all files removed since its oldest named version, including files that this version doesn't need.

    spark-submit python_jobs/idempotency/time_travel.py --table lakehouse/orders --registry lakehouse/versions \\
        --action name --name audit-2024 --version 12 --keep_until 2034-12-31

Source: the guide's Time Travel and Versioning (chapter 6).
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from python_jobs.idempotency.registries import read_registry, register
from python_jobs.shared.core.failures import WrongUse, given, root_cause
from python_jobs.shared.core.intervals import from_micros, parse_time
from python_jobs.shared.delta.tables import deleted_file_retention, delta_table, read_version, table_id
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import properties_list, table_name

FORMAT_VERSION = 1
_LOG_HOURS = 30 * 24  # Delta's default
_REGISTRY = (
    "name string, table_id string, table_name string, version long, committed_at timestamp, keep_until timestamp, "
    "format_version int"
)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Parameters:
    """Name a version of a table, and keep this version readable."""

    table: str
    """Delta table, by path or catalog name."""
    registry: str
    """Delta table of the named versions, by path or catalog name; one may serve many tables."""
    action: Literal["name", "list", "restore", "protect", "forget"]
    """Action to run."""
    name: str | None = None
    """Name of the version, unique within the table."""
    version: int | None = None
    """Number of the version, for action name."""
    timestamp: str | None = None
    """Time (ISO 8601) instead of a number, for action name: it means the last commit at or before this time."""
    keep_until: str | None = None
    """Time (ISO 8601) until which the version stays readable, for action name."""

    def __post_init__(self) -> None:
        if (self.name is None) != (self.action in ("list", "protect")):
            raise WrongUse(f"name belongs to the actions name, restore and forget; got action {self.action}")
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise WrongUse(f"'{self.name}' is no name of a version; use letters, digits, '.', '_' and '-'")
        if self.action == "name":
            if (self.version is None) == (self.timestamp is None):
                raise WrongUse("action name needs either version or timestamp")
            if self.keep_until is None:
                raise WrongUse("action name needs keep_until, the time until which the version is kept")
            parse_time(self.keep_until)


@dataclass(frozen=True)
class NamedVersion:
    """A version that must stay readable."""

    name: str
    version: int
    committed_at: dt.datetime
    keep_until: dt.datetime

    @property
    def retention_days(self) -> int:
        """Return for how many days the table must keep removed files, counted from the version's commit."""
        return math.ceil((self.keep_until - self.committed_at) / dt.timedelta(days=1))


def named_versions(spark: SparkSession, params: Parameters) -> list[NamedVersion]:
    """Return the named versions of the table, sorted by name.

    Raises:
        WrongUse: the registry has other columns.
    """
    rows = read_registry(spark, params.registry, _REGISTRY, "registry of versions")
    if rows is None:
        return []
    times = {name: F.unix_micros(name) for name in ("committed_at", "keep_until")}
    found = rows.where(F.col("table_id") == table_id(spark, params.table)).withColumns(times).orderBy("name")
    return [
        NamedVersion(row["name"], row.version, from_micros(row.committed_at), from_micros(row.keep_until))
        for row in found.collect()
    ]


def protect(spark: SparkSession, table: str, versions: Sequence[NamedVersion]) -> int:
    """Raise the retention of the table's files and log so that the versions stay readable; return it in days."""
    needed = max((named.retention_days for named in versions), default=0)
    there = deleted_file_retention(spark, table).days
    if there >= needed:
        return there
    _set_retention(spark, table, dt.timedelta(days=needed))
    return needed


def _set_retention(spark: SparkSession, table: str, retention: dt.timedelta) -> None:
    hours = retention // dt.timedelta(hours=1)
    properties = {
        "delta.deletedFileRetentionDuration": f"interval {hours} hours",
        "delta.logRetentionDuration": f"interval {max(hours, _LOG_HOURS)} hours",
    }
    spark.sql(f"alter table {table_name(table)} set tblproperties {properties_list(properties)}")


def give_name(spark: SparkSession, params: Parameters) -> NamedVersion:
    """Protect the version and register it.

    Raises:
        WrongUse: there is no such version, or the name means another version.
    """
    name, keep_until = given(params.name, "name"), given(params.keep_until, "keep_until")
    commit = _commit(spark, params)
    named = NamedVersion(name, commit[0], commit[1], parse_time(keep_until))
    versions = named_versions(spark, params)
    for other in versions:
        if other.name == named.name and other.version != named.version:
            raise WrongUse(
                f"the name {params.name} means version {other.version} of {params.table}; choose another name, or run "
                "--action forget first"
            )
    before = deleted_file_retention(spark, params.table)
    # Protect the version before the read: Delta refuses to read versions that are older than the retention.
    protect(spark, params.table, [*versions, named])
    try:
        read_version(spark, params.table, named.version).collect()
    except (PySparkException, Py4JJavaError) as failure:
        _set_retention(spark, params.table, before)
        raise WrongUse(
            f"version {named.version} of {params.table} can't be read any more ({root_cause(failure)[:200]})"
        ) from None
    row = spark.createDataFrame(
        [(named.name, table_id(spark, params.table), params.table, named.version, named.committed_at,
          named.keep_until, FORMAT_VERSION)], _REGISTRY
    )  # fmt: skip
    register(spark, row, params.registry, ["name", "table_id"])
    return named


def _commit(spark: SparkSession, params: Parameters) -> tuple[int, dt.datetime]:
    """Return the number and the commit time of the version that the parameters name."""
    history = (
        delta_table(spark, params.table).history().select("version", F.unix_micros("timestamp").alias("at"))
    )
    commits = [(row.version, from_micros(row.at)) for row in history.collect()]
    if params.timestamp is not None:
        moment = parse_time(params.timestamp)
        wanted = max((version for version, at in commits if at <= moment), default=None)
    else:
        wanted = params.version
    for version, at in commits:
        if version == wanted:
            return version, at
    raise WrongUse(
        f"{params.table} has no version {params.version if params.timestamp is None else 'of ' + params.timestamp}; "
        f"its log goes from {commits[-1][0]} ({commits[-1][1]:%FT%T}) to {commits[0][0]}"
    )


def _named(spark: SparkSession, params: Parameters) -> tuple[NamedVersion, list[NamedVersion]]:
    versions = named_versions(spark, params)
    for named in versions:
        if named.name == params.name:
            return named, versions
    there = ", ".join(named.name for named in versions) or "none"
    raise WrongUse(f"{params.table} has no version named {params.name}; its named versions are: {there}")


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the action and return the report, which has the table's named versions."""
    delta_table(spark, params.table)
    report: dict[str, Any] = {"table": params.table}
    if params.action == "name":
        report["version"] = give_name(spark, params).version
    elif params.action == "restore":
        named, versions = _named(spark, params)
        spark.sql(f"restore table {table_name(params.table)} to version as of {named.version}").collect()
        report |= {"version": named.version, "retention_days": protect(spark, params.table, versions)}
    elif params.action == "protect":
        report["retention_days"] = protect(spark, params.table, named_versions(spark, params))
    elif params.action == "forget":
        named, _ = _named(spark, params)
        of_table = F.col("table_id") == table_id(spark, params.table)
        delta_table(spark, params.registry).delete(of_table & (F.col("name") == named.name))
    return report | {"named": {named.name: named.version for named in named_versions(spark, params)}}


if __name__ == "__main__":
    run_job(Parameters, run)
