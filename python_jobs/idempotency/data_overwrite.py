"""Data Overwrite: replace the rows of a table, of a partition or of a condition in the write itself.

Problem: a daily job that appends doubles its rows when a day runs again. DELETE and then INSERT are two commits: a
crash in between leaves a hole, and readers see it. An overwrite in Spark's dynamic mode keeps the rows of a day that
has none any more, and in static mode it wipes all the other days.

Guarantee on Delta: what ``--partition`` or ``--where`` names, or the whole table, is replaced in one commit. Readers
see the rows before or the new ones; a run that dies has changed nothing. Zero rows clear the slice. A row outside of
it, NULL in its columns included, refuses the run with the table as it was. The query may read the table that it
overwrites. The rows before stay readable by their version until VACUUM.

Guarantee on plain files (``--target_format parquet``, ``json``, ``csv``, ``text``): Spark's own overwrite deletes
first, so a job that fails leaves an empty folder, and it can't read what it overwrites. Here the new files are complete
in a folder beside before the old ones make place, by two renames on a local or mounted file system. Dying between these
two leaves the slice absent until the next run, which puts it back first; a query that reads meanwhile fails, as its
files are gone. Two runs on one folder: the second is refused.

A source without a single file is not an empty one: it is refused (exit code 4), and nothing is cleared.

Cost: a partition is replaced by the names of its files in the log, none is read; any other condition rewrites each file
that also holds other rows. ``--min_rows`` above 0 runs the query once more. Replaced files stay on disk until VACUUM.

    spark-submit python_jobs/idempotency/data_overwrite.py \\
        --source landing/devices/date=2024-09-22 --format csv --delimiter ";" \\
        --schema "id int, brand_name string, state string" \\
        --query "select *, date'2024-09-22' as execution_date from {source} where state = 'valid'" \\
        --target lakehouse/silver/devices --partition.execution_date 2024-09-22

Source: Data Engineering Design Patterns, chapter 4, Data Overwrite.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import filelock
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import JobFailed, NotReady, WrongUse, require_at_least
from python_jobs.shared.core.paths import absolute, is_uri
from python_jobs.shared.delta.overwrite import (
    OutsideSlice,
    overwrite,
    partition_condition,
)
from python_jobs.shared.delta.tables import read_table
from python_jobs.shared.files.sources import read_files, source_identity
from python_jobs.shared.spark.job import run_job, unreadable_files_refused
from python_jobs.shared.spark.queries import query_text, require_rows, user_query
from python_jobs.shared.spark.sql_text import named_column

NOTE = "data_overwrite"

# As a folder's name and between quotes a value means the same.
_PARTITION_VALUE = re.compile(r"[\w.+-]+")
_OUTSIDE = "a row is outside of the partition that is overwritten"


@dataclass(frozen=True)
class Parameters:
    """Replace a table, a partition or what a condition matches by the rows of a query."""

    source: str
    """Delta table, by path or catalog name; or file or folder. It may be the target itself."""
    target: str
    """Delta table, by path or catalog name, made if it is absent; or folder of plain files."""
    format: Literal["delta", "json", "csv"] = "delta"
    """Of the source. json: one record a line; csv: with a header, which names the schema's columns in order."""
    schema: str = ""
    """Columns of json and csv as in SQL: id int, name string."""
    delimiter: str = ","
    """Between the columns of csv."""
    query: str = "select * from {source}"
    """SQL of the new rows, as text or .sql file; it may also read {target}."""
    target_format: Literal["delta", "parquet", "json", "csv", "text"] = "delta"
    """Of the target; all but delta are plain files."""
    partition: dict[str, str] | None = None
    """Replace one partition: its columns and values."""
    where: str | None = None
    """Replace the rows that this condition matches. Without partition and where: the whole table."""
    min_rows: int = 0
    """Fewer rows are refused; 0 lets an empty source clear its slice."""

    def __post_init__(self) -> None:
        if self.partition is not None and self.where is not None:
            raise WrongUse("pass either partition or where; none of them replaces the whole table")
        if self.partition == {} or self.where == "":
            raise WrongUse(
                "partition and where must name something; without them the whole table is replaced"
            )
        for column, value in (self.partition or {}).items():
            if not _PARTITION_VALUE.fullmatch(value):
                raise WrongUse(
                    f"partition {column} is '{value}'; allowed are letters, digits, '.', '+', '-' and '_': "
                    "name other slices by where"
                )
        if self.target_format != "delta" and self.where is not None:
            raise WrongUse(f"where needs a Delta table; {self.target_format} files are replaced by partition")
        if (self.format == "delta") == bool(self.schema):
            raise WrongUse("schema belongs to the formats json and csv, which need it")
        require_at_least(0, min_rows=self.min_rows)
        _ = self.text  # refuses a file that can't be read

    @cached_property
    def text(self) -> str:
        """The SQL of the query."""
        return query_text(self.query)

    @property
    def slice(self) -> str | None:
        """The condition of the rows that are replaced; None: all."""
        return self.where if self.partition is None else partition_condition(self.partition)


# --- Delta ----------------------------------------------------------------------------------------------


# --- plain files ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folder:
    """A folder of files that is replaced as a whole; readers see neither of the two beside it."""

    path: Path
    """What readers read."""

    @property
    def staging(self) -> Path:
        """Where the new files become complete."""
        return self.path.with_name(f"_staging_{self.path.name}")

    @property
    def replaced(self) -> Path:
        """Where the old files are for the moment of the swap."""
        return self.path.with_name(f"_replaced_{self.path.name}")

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep other runs out, and repair what a run that died left.

        Raises:
            JobFailed: another run is at work.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self.path.with_name(f"_{self.path.name}.lock"), timeout=0)
        try:
            with lock:
                if self.replaced.exists() and not self.path.exists():
                    self.replaced.rename(self.path)
                for leftover in (self.replaced, self.staging):
                    shutil.rmtree(leftover, ignore_errors=True)
                yield
        except filelock.Timeout:
            raise JobFailed(f"another run is overwriting {self.path}; wait for it") from None

    def swap(self) -> None:
        """Show the new files in place of the old ones."""
        if self.path.exists():
            self.path.rename(self.replaced)
        self.staging.rename(self.path)
        shutil.rmtree(self.replaced, ignore_errors=True)


def overwrite_files(
    rows: DataFrame, target: str, file_format: str, partition: Mapping[str, str] | None
) -> Path:
    """Replace a folder of plain files, or one partition of it (``column=value/``); return what was replaced.

    Raises:
        WrongUse: the target is not on a local or mounted file system.
        DataRefused: a row belongs to another partition; the files stay as they are.
        JobFailed: another run is at work.
    """
    if is_uri(target):
        raise WrongUse(
            f"{target} is no local or mounted folder: without a rename nothing can be swapped; use a Delta table, "
            "or versions behind a pointer (python_jobs/shared/files/pointers.py)"
        )
    path = Path(absolute(target)).joinpath(*(f"{name}={value}" for name, value in (partition or {}).items()))
    folder = Folder(path)
    with folder.claimed():
        try:
            inside(rows, partition or {}).write.format(file_format).save(str(folder.staging))
        except (PySparkException, Py4JJavaError) as failure:
            if _OUTSIDE in str(failure):
                raise OutsideSlice(
                    f"a row is outside of the partition {path.name} of {target}; it stays as it is"
                ) from None
            raise
        folder.swap()
    return path


def inside(rows: DataFrame, partition: Mapping[str, str]) -> DataFrame:
    """Return the rows without the partition's columns; reading one of another partition fails."""
    absent = [column for column in partition if column not in rows.columns]
    if absent:
        raise WrongUse(f"the rows have no column {', '.join(absent)}; they have {', '.join(rows.columns)}")
    for column, value in partition.items():
        belongs = named_column(column).cast("string").eqNullSafe(value)
        rows = rows.where(F.when(belongs, True).otherwise(F.raise_error(F.lit(_OUTSIDE))))
    return rows.drop(*partition)


# --- the run --------------------------------------------------------------------------------------------


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Overwrite and report what was replaced.

    Raises:
        NotReady: there is no source, or not one file in it.
        DataRefused: a record can't be read, too few rows, other columns, or a row outside of the slice.
        WrongUse: the query or the condition can't be used.
    """
    with unreadable_files_refused("nothing was overwritten"):
        rows, identity = new_rows(spark, params)
        require_rows(rows, params.min_rows, params.target)
        report = {"source": params.source, "target": params.target, "replaced": params.slice or "all"}
        if params.target_format != "delta":
            path = overwrite_files(rows, params.target, params.target_format, params.partition)
            files = [name for name in path.iterdir() if not name.name.startswith(("_", "."))]
            return report | {"folder": str(path), "files": len(files)}
        commit = overwrite(
            spark,
            rows,
            params.target,
            params.slice,
            partitioned_by=list(params.partition or ()),
            note={NOTE: {"replaced": params.slice or "all", "source": identity}},
        )
    metrics = {} if commit is None else commit["operationMetrics"]
    # Rows beside the slice in the same files are copied, and count as written.
    rows_written = int(metrics.get("numOutputRows", 0)) - int(metrics.get("numCopiedRows", 0))
    return report | {
        "table_version": None if commit is None else int(commit["version"]),
        "rows": rows_written,
        "files_added": int(metrics.get("numFiles", 0)),
        "files_removed": int(metrics.get("numRemovedFiles", 0)),
    }


def new_rows(spark: SparkSession, params: Parameters) -> tuple[DataFrame, str | None]:
    """Return what the query gives, and the identity of the source's files (None: a Delta table)."""
    if params.format == "delta":
        source, identity = read_table(spark, params.source), None
    else:
        identity = source_identity(spark, params)
        source = read_files(spark, params)
    tables: dict[str, Any] = {"source": source}
    if "{target}" in params.text:
        tables["target"] = _current_rows(spark, params)
    return user_query(spark, params.text, **tables), identity


def _current_rows(spark: SparkSession, params: Parameters) -> DataFrame:
    if params.target_format == "delta":
        return read_table(spark, params.target)
    if not Path(params.target).is_dir():
        raise NotReady(f"there is no folder {params.target}, which the query reads")
    return spark.read.format(params.target_format).load(absolute(params.target))


if __name__ == "__main__":
    run_job(Parameters, run)
