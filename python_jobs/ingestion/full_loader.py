"""Full Loader: load the complete dataset each time; readers see all of it or nothing of it.

Problem: a dataset doesn't tell what changed in it, so every run loads all of it. If the load writes in place, readers
find a part of the rows, or no rows after the load dies. An empty or incomplete source replaces a good table.

Guarantee: a run loads the dataset into a version table ``<target>_<yyyymmdd>``, named after the logical date. Then it
checks the loaded rows (keys, NULLs, volume). Only then it replaces the public table's rows, in one Delta commit.
Readers see the previous version or the new one. A load that fails, is killed or is refused leaves the public table as
it was; run it again, nothing needs cleaning.

- **Rollback**: ``--step expose --version 2024-01-01`` shows an older version again, after the same checks. The last
  ``--keep_versions`` are kept; Delta's time travel on the public table works, too.
- **Backfill**: a run for a date before the exposed one loads its version and doesn't change the public table.
- **Rerun**: files that have not changed since the version was loaded are not read again. A version that is already
  exposed is not exposed again.

The job reads files with the explicit schema, and fails at the first record that doesn't fit it exactly
(:mod:`python_jobs.shared.files.sources`). Spark's own readers would turn some values into NULL, round others, and drop
the text after the first object of a line. A PostgreSQL table is read over one connection, as of one moment.

Cost: the dataset is written twice. The loaded rows are read twice more, the first time only their key columns. Nothing
is collected to the driver.

    spark-submit python_jobs/ingestion/full_loader.py --source landing/devices/date=2024-01-01 --format json \\
        --schema "type string not null, full_name string not null, version string not null" \\
        --key '["full_name", "version"]' --target lakehouse/bronze/devices --version 2024-01-01

Source: Data Engineering Design Patterns, chapter 2, Full Loader.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import DataRefused, WrongUse, given, present, require_at_least
from python_jobs.shared.core.intervals import parse_time
from python_jobs.shared.core.paths import absolute, is_path
from python_jobs.shared.delta.commits import commit_note, commits, find_commit, latest_commit, write_once
from python_jobs.shared.delta.tables import delta_table, read_table, read_version, table_exists
from python_jobs.shared.files.readiness_names import UPKEEP
from python_jobs.shared.files.sources import (
    parse_schema,
    read_files,
    source_files,
    source_identity,
    with_schema,
)
from python_jobs.shared.postgres.snapshots import PostgresAccess, one_snapshot
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.shared.spark.job import run_job, unreadable_files_refused
from python_jobs.shared.spark.sql_text import named_column, named_columns, string_literal

NOTE = "full_loader"

_VERSION = re.compile(r"\d{8}")
_VERSION_OF = "lakehouse_patterns.full_loader.version"
"""Table property of a version's table: its version."""


@dataclass(frozen=True)
class Parameters:
    """Load a complete dataset into a version table, check it, and expose it in one commit."""

    source: str
    """File, or folder with its sub-folders, as its name is written; or jdbc:postgresql://host:port/database."""
    target: str
    """Public Delta table, by path or catalog name. Versions are <target>_<yyyymmdd>."""
    version: str
    """Logical date of the dataset (2024-01-01), never the clock's."""
    schema: str
    """Columns as in SQL: type string not null, full_name string; NOT NULL is checked."""
    format: Literal["json", "csv", "postgres"] = "json"
    """json: one record a line; csv: with a header, which must name the schema's columns in order."""
    key: list[str] | None = None
    """Columns that identify a row: no two rows have the same values, and none is NULL."""
    delimiter: str = ","
    """Character between the columns of csv."""
    null_marker: str = ""
    """Text of a csv field that is NULL, such as NULL or \\N; an empty field is NULL in any case."""
    table: str | None = None
    """Source in PostgreSQL: a table, a view or (query) as name."""
    user: str | None = None
    """Database user."""
    password_env: str | None = None
    """Environment variable that holds the database password."""
    password_file: str | None = None
    """File that holds the database password."""
    min_rows: int = 1
    """Minimum number of rows; a smaller version is not exposed, and 0 allows an empty dataset."""
    max_shrink_percent: float = 50.0
    """Maximum percentage of rows that a version may lose against the exposed one; 100 allows any loss."""
    step: Literal["load_and_expose", "load", "expose"] = "load_and_expose"
    """Steps to run. load only stages a version; expose shows a loaded version, or an older one to go back."""
    keep_versions: int = 7
    """Number of the newest versions that stay, to go back; the exposed one always stays."""

    def __post_init__(self) -> None:
        require_at_least(0, min_rows=self.min_rows)
        if not 0 <= self.max_shrink_percent <= 100:
            raise WrongUse(f"max_shrink_percent must be between 0 and 100, got {self.max_shrink_percent}")
        if self.keep_versions < 2:
            raise WrongUse(
                f"keep_versions must be at least 2, the exposed one and a way back, got {self.keep_versions}"
            )
        if (self.table is None) == (self.format == "postgres"):
            raise WrongUse("table belongs to format postgres, which needs it")
        _ = self.version_name  # refuses what is no day
        if self.format == "postgres":
            _ = self.access  # refuses an incomplete one

    @property
    def version_name(self) -> str:
        """The logical date without dashes."""
        moment = parse_time(self.version)
        if (moment.hour, moment.minute, moment.second, moment.microsecond) != (0, 0, 0, 0):
            raise WrongUse(f"a version is a day such as 2024-01-01, got '{self.version}'")
        return f"{moment:%Y%m%d}"

    @property
    def version_table(self) -> str:
        """Return the path or name of this version's table."""
        return f"{self.target.rstrip('/')}_{self.version_name}"

    @property
    def access(self) -> PostgresAccess:
        """How to reach the database."""
        if self.user is None:
            raise WrongUse("format postgres needs user")
        return PostgresAccess(self.source, self.user, self.password_env, self.password_file)


@dataclass(frozen=True)
class Loaded:
    """A loaded version."""

    commit: int
    """Delta version of its table."""
    is_new: bool
    """Whether this run loaded it."""


# --- from DataFrames to DataFrames ----------------------------------------------------------------------


def findings(rows: DataFrame, key: Sequence[str], not_null: Sequence[str]) -> DataFrame:
    """Return one row: ``rows``, ``nulls`` by column, ``repeated_keys`` and ``repeated_key`` (one of them, as JSON)."""
    nulls = [
        F.count_if(named_column(name).isNull()).alias(f"null_{position}")
        for position, name in enumerate(not_null)
    ]
    # The key is a struct: its columns may have any names. Without a key the dataset is one group, and repeats nothing.
    of_key = F.struct(*named_columns(key)) if key else F.struct(F.lit(True))
    groups = rows.groupBy(of_key.alias("key")).agg(F.count(F.lit(1)).alias("copies"), *nulls)
    repeated = F.lit(bool(key)) & (F.col("copies") > 1)
    return groups.agg(
        F.coalesce(F.sum("copies"), F.lit(0)).alias("rows"),
        F.array(
            *(F.coalesce(F.sum(f"null_{position}"), F.lit(0)) for position in range(len(not_null)))
        ).alias("nulls"),
        F.count_if(repeated).alias("repeated_keys"),
        F.max(F.when(repeated, F.to_json("key"))).alias("repeated_key"),
    )


# --- the source -----------------------------------------------------------------------------------------


# --- the two steps --------------------------------------------------------------------------------------


def load(spark: SparkSession, parameters: Parameters) -> Loaded:
    """Write the dataset to the version's table in one commit, unless its files are there already."""
    _require_own(spark, parameters)
    files = [] if parameters.format == "postgres" else source_files(spark, parameters)
    identity = source_identity(parameters, files) if files else None
    if identity is not None and table_exists(spark, parameters.version_table):
        last = latest_commit(spark, parameters.version_table)
        if _note_of(last).get("source") == identity:
            return Loaded(int(last["version"]), is_new=False)
    snapshot = one_snapshot(spark, parameters.access) if parameters.format == "postgres" else nullcontext()
    with snapshot as database:
        if database is None:
            rows = read_files(spark, parameters, files)
        else:
            read = database.read(given(parameters.table, "table"), numerics_as_text=True)
            rows = with_schema(read, parse_schema(parameters.schema))
        note = {"version": parameters.version_name, "source": identity}
        own = {_VERSION_OF: parameters.version_name}
        return Loaded(replace_table(spark, rows, parameters.version_table, note, own), is_new=True)


def _require_own(spark: SparkSession, parameters: Parameters) -> None:
    """Refuse to replace a table that has the version's name and isn't one of this job.

    Raises:
        WrongUse: there is such a table.
    """
    table = parameters.version_table
    if not table_exists(spark, table):
        return
    properties = delta_table(spark, table).detail().select("properties").collect()[0][0]
    # Delta keeps no such property of a table by path, and earlier releases set none: their commits have the version.
    noted = (_note_of(entry.asDict()).get("version") for entry in commits(spark, table))
    if parameters.version_name not in chain([properties.get(_VERSION_OF)], noted):
        raise WrongUse(f"{table} exists and was not created by this job: rename or drop it")


def check(spark: SparkSession, parameters: Parameters, rows: DataFrame) -> dict[str, int]:
    """Return the rows of a version and those exposed now.

    Raises:
        DataRefused: a key comes twice, a column that must not be NULL is, or the volume is not allowed.
    """
    schema, key = parse_schema(parameters.schema), parameters.key or []
    not_null = [field.name for field in schema if not field.nullable or field.name in key]
    unknown = [name for name in key if name not in schema.names]
    if unknown:
        raise WrongUse(f"key names {', '.join(unknown)}, but the schema has {', '.join(schema.names)}")
    found = findings(rows, key, not_null).collect()[0]
    exposed = read_table(spark, parameters.target).count() if table_exists(spark, parameters.target) else 0
    faults = [
        f"{count} rows with NULL in {name}"
        for name, count in zip(not_null, found.nulls, strict=True)
        if count
    ]
    if found.repeated_keys:
        faults.append(f"{found.repeated_keys} keys more than once, such as {found.repeated_key}")
    if found.rows < parameters.min_rows:
        faults.append(f"{found.rows} rows, allowed are {parameters.min_rows} or more (min_rows)")
    if found.rows < exposed * (1 - parameters.max_shrink_percent / 100):
        faults.append(
            f"{found.rows} rows, exposed are {exposed} and allowed is a drop of "
            f"{parameters.max_shrink_percent:g} % (max_shrink_percent)"
        )
    if faults:
        raise DataRefused(
            f"version {parameters.version_name} has {' and '.join(faults)}; {parameters.target} stays as it is"
        )
    return {"rows": int(found.rows), "previous_rows": int(exposed)}


def expose(spark: SparkSession, parameters: Parameters, commit: int, shown: Mapping[str, Any]) -> int | None:
    """Replace the public table's rows by those of the version; None if ``shown`` says that they are exposed."""
    note = {"version": parameters.version_name, "commit": commit}
    if shown == note:
        return None
    return replace_table(
        spark, read_version(spark, parameters.version_table, commit), parameters.target, note
    )


def exposed_version(spark: SparkSession, target: str) -> dict[str, Any]:
    """Return ``version`` and ``commit`` of what the public table shows; nothing if another writer was the last."""
    if not table_exists(spark, target):
        return {}
    for entry in commits(spark, target):
        if entry.operation not in UPKEEP:
            return _note_of(entry.asDict())
    return {}


def replace_table(
    spark: SparkSession,
    rows: DataFrame,
    table: str,
    note: Mapping[str, Any],
    properties: Mapping[str, str] | None = None,
) -> int:
    """Replace rows and schema of a table in one commit; return its Delta version. A new one gets the properties."""
    user_metadata = write_once(
        spark, rows, table, replace_all=True, properties=properties, note={NOTE: dict(note)}
    )
    commit = find_commit(spark, table, user_metadata)
    return int(present(commit, f"the commit of the rows written to {table}")["version"])


def drop_old_versions(spark: SparkSession, parameters: Parameters) -> list[str]:
    """Drop versions beyond the newest ones; the one just exposed and tables that this job didn't make stay."""
    versions = version_tables(spark, parameters.target)
    old = [name for name in sorted(versions)[: -parameters.keep_versions] if name != parameters.version_name]
    dropped = [name for name in old if _note_of(latest_commit(spark, versions[name])).get("version") == name]
    for name in dropped:
        _drop(spark, versions[name])
    return dropped


def version_tables(spark: SparkSession, target: str) -> dict[str, str]:
    """Return the tables ``<target>_<yyyymmdd>`` by their version."""
    target = target.rstrip("/")
    if is_path(target):
        target = absolute(target)
        prefix = target.rsplit("/", 1)[0]
        names = [f"{prefix}/{name}" for name in HadoopFolder(spark, prefix).names()]
    else:
        database, _, name = target.rpartition(".")
        place = f" in {database}" if database else ""
        found = spark.sql(f"show tables{place} like {string_literal(f'{name}_*')}").collect()
        names = [f"{database}.{row.tableName}" if database else row.tableName for row in found]
    versions = ((name, name.removeprefix(f"{target}_")) for name in names if name.startswith(f"{target}_"))
    return {version: name for name, version in versions if _VERSION.fullmatch(version)}


# --- the run --------------------------------------------------------------------------------------------


def run(spark: SparkSession, parameters: Parameters) -> dict[str, Any]:
    """Load the version and expose it, or one of the two."""
    parse_schema(parameters.schema)
    report: dict[str, Any] = {
        "source": parameters.source,
        "target": parameters.target,
        "version": parameters.version_name,
        "version_table": parameters.version_table,
    }
    with unreadable_files_refused("nothing was loaded, the public table stays as it is"):
        if parameters.step == "expose":
            loaded = Loaded(_loaded_commit(spark, parameters), is_new=False)
        else:
            loaded = load(spark, parameters)
        report |= {"loaded": loaded.is_new}
        rows = read_version(spark, parameters.version_table, loaded.commit)
        if parameters.step == "load":
            return report | {"rows": rows.count(), "exposed": False}
        shown = exposed_version(spark, parameters.target)
        if parameters.step == "load_and_expose" and shown.get("version", "") > parameters.version_name:
            # A backfill must not take the public table back; step expose does, because it says so.
            return report | {"rows": rows.count(), "exposed": False, "exposed_version": shown["version"]}
        report |= check(spark, parameters, rows)
        table_version = expose(spark, parameters, loaded.commit, shown)
        return report | {
            "exposed": table_version is not None,
            "exposed_version": parameters.version_name,
            "table_version": table_version,
            "dropped_versions": drop_old_versions(spark, parameters),
        }


def _loaded_commit(spark: SparkSession, parameters: Parameters) -> int:
    if not table_exists(spark, parameters.version_table):
        there = ", ".join(sorted(version_tables(spark, parameters.target))) or "none"
        raise WrongUse(
            f"version {parameters.version_name} of {parameters.target} is not there; kept are {there}"
        )
    return int(latest_commit(spark, parameters.version_table)["version"])


def _note_of(commit: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this job noted with a commit; nothing if another writer made it."""
    return dict(commit_note(commit["userMetadata"]).get(NOTE, {}))


def _drop(spark: SparkSession, table: str) -> None:
    if is_path(table):
        HadoopFolder(spark, table).delete()
    else:
        spark.sql(f"drop table {table}")


if __name__ == "__main__":
    run_job(Parameters, run)
