"""Data Overwrite: replace a table, a partition or the rows that match a condition, in one write.

Problem: a daily job that appends doubles its rows when a day runs again. DELETE and then INSERT are two commits: a
crash between them leaves the day without rows, and readers see this. An overwrite in Spark's dynamic mode keeps the old
rows of a day that has no new rows. An overwrite in static mode deletes all other days.

Guarantee on Delta: one commit replaces the slice, which is ``--partition``, ``--where`` or the whole table. Readers see
the old rows or the new rows; a run that dies has changed nothing. Zero rows clear the slice. If a row lies outside of
the slice (also because of NULL in its columns), the run is refused and the table stays unchanged. The query may read
the table that it overwrites. The old rows stay readable by their version until VACUUM.

Guarantee on plain files (``--target_format parquet``, ``json``, ``csv``, ``text``): the old files stay until the new
files are complete. Spark's overwrite deletes first, so a failed job leaves an empty folder, and a query can't read the
folder that it overwrites. This job writes the new files to a staging folder and swaps the folders by two renames, on a
local or mounted file system. If two runs write one folder, the second is refused.

Not guaranteed on plain files: after a crash between the two renames the slice is absent until the next run, which
restores it first. A query that reads during the swap fails because its files are gone.

A source without any file does not count as empty: it is refused (exit code 4), and nothing is cleared. Files without a
record are refused (exit code 3) unless ``--allow_empty_source true`` is set. A record that doesn't fit the schema
exactly (:mod:`python_jobs.shared.files.sources`) refuses the run.

Cost: replacing a partition reads no data file, because the log has the names of its files. Any other condition rewrites
each file that also has other rows. ``--min_rows`` above 0 runs the query twice. Replaced files stay on disk until
VACUUM.

    spark-submit python_jobs/idempotency/data_overwrite.py \\
        --source landing/devices/date=2024-09-22 --format csv --delimiter ";" \\
        --schema "id int, brand_name string, state string" \\
        --query "select *, date'2024-09-22' as execution_date from {source} where state = 'valid'" \\
        --target lakehouse/silver/devices --partition.execution_date 2024-09-22

Source: Data Engineering Design Patterns, chapter 4, Data Overwrite.
"""

from __future__ import annotations

import functools
import operator
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import filelock
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse, require_at_least
from python_jobs.shared.core.paths import absolute, is_uri
from python_jobs.shared.delta.overwrite import OutsideSlice, overwrite
from python_jobs.shared.delta.tables import read_table
from python_jobs.shared.files.file_sets import NO_FILE_SKIPPED, list_files
from python_jobs.shared.files.sources import (
    parse_schema,
    read_files,
    require_records,
    source_files,
    source_identity,
)
from python_jobs.shared.records.partition_values import partition_condition, partition_literals, same_values
from python_jobs.shared.records.values import FIRST_MICROS, LAST_MICROS
from python_jobs.shared.spark.expressions import first_line
from python_jobs.shared.spark.hadoop_files import HadoopFolder, literal_path
from python_jobs.shared.spark.job import run_job, unreadable_files_refused
from python_jobs.shared.spark.queries import query_text, require_rows, user_query
from python_jobs.shared.spark.sql_text import identifier, named_column

NOTE = "data_overwrite"
_NESTED = ArrayType, MapType, StructType, VariantType

# Values that need no escape, neither as the name of a folder nor in quotes.
_PARTITION_VALUE = re.compile(r"[\w.+-]+")
_OUTSIDE = "a row lies outside of the partition that is overwritten"
_NO_LINE = "a text has a line break, or a line is NULL"
_NO_VALUE = "a time is outside of the years 1 to 9999, or a number is NaN or infinite"
# Spark's own formats keep milliseconds, and its csv drops spaces around a text.
_WRITER_OPTIONS = {
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "ignoreLeadingWhiteSpace": "false",
    "ignoreTrailingWhiteSpace": "false",
    # Readers of csv compare the header with their schema, and a quote within quotes is doubled.
    "header": "true",
    "escape": '"',
}


@dataclass(frozen=True)
class Parameters:
    """Replace a table, a partition or the rows that match a condition by the rows of a query."""

    source: str
    """Delta table, by path or catalog name; or file, or folder with its sub-folders. The source may be the target."""
    target: str
    """Delta table, by path or catalog name, created if absent; or folder of plain files."""
    format: Literal["delta", "json", "csv"] = "delta"
    """Format of the source. json: one record a line; csv: with a header that has the schema's columns in order."""
    schema: str = ""
    """Columns of json and csv as in SQL: id int, name string."""
    delimiter: str = ","
    """Character between the columns of csv."""
    null_marker: str = ""
    """Text of a csv field that is NULL, such as NULL or \\N; an empty field is always NULL."""
    allow_empty_source: bool = False
    """Whether files without a record may clear the slice."""
    query: str = "select * from {source}"
    """SQL of the new rows, as text or .sql file; it may also read {target}."""
    target_format: Literal["delta", "parquet", "json", "csv", "text"] = "delta"
    """Format of the target; all formats except delta are plain files, csv with a header."""
    target_schema: str = ""
    """Columns of a json or csv target, its partitions included, for a query that reads {target}: id int, day date."""
    partition: dict[str, str] | None = None
    """Partition to replace, as columns with values."""
    where: str | None = None
    """SQL condition of the rows to replace. Without partition and where the whole table is replaced."""
    min_rows: int = 0
    """Minimum number of rows of the query; fewer rows are refused. With 0 a query without rows clears the slice."""

    def __post_init__(self) -> None:
        if self.partition is not None and self.where is not None:
            raise WrongUse("pass either partition or where; without both the whole table is replaced")
        if self.partition == {} or self.where == "":
            raise WrongUse(
                "partition and where must name something; without them the whole table is replaced"
            )
        for column, value in (self.partition or {}).items():
            if not _PARTITION_VALUE.fullmatch(value):
                raise WrongUse(
                    f"partition {column} is '{value}'; allowed are letters, digits, '.', '+', '-' and '_': "
                    "use where for other slices"
                )
        if self.target_format != "delta" and self.where is not None:
            raise WrongUse(f"where needs a Delta table; {self.target_format} files are replaced by partition")
        if (self.format == "delta") == bool(self.schema):
            raise WrongUse("schema belongs to the formats json and csv, which need it")
        require_at_least(0, min_rows=self.min_rows)
        reads_lines = "{target}" in self.text and self.target_format in ("json", "csv")
        if reads_lines != bool(self.target_schema):
            raise WrongUse(
                "target_schema belongs to a query that reads {target} of the formats json and csv, and such a query "
                "needs it"
            )

    @cached_property
    def text(self) -> str:
        """Return the SQL of the query."""
        return query_text(self.query)


@dataclass(frozen=True)
class Target:
    """The plain files of a target as a source of the query."""

    source: str
    """Folder of the target."""
    format: str
    """json or csv."""
    schema: str
    """Columns of the files."""
    delimiter: str = ","
    """Character between the columns of csv."""
    null_marker: str = ""
    """Text of a csv field that is NULL."""


# --- plain files ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folder:
    """A folder of files that is replaced as a whole, with two companion folders that readers don't see.

    The companions' names begin with a dot: Spark reads a folder such as ``_staging_hour=9`` as a partition.
    """

    path: Path
    """Folder that readers read."""

    @property
    def staging(self) -> Path:
        """Return the folder in which the new files are written."""
        return self.path.with_name(f".staging_{self.path.name}")

    @property
    def replaced(self) -> Path:
        """Return the folder that has the old files during the swap."""
        return self.path.with_name(f".replaced_{self.path.name}")

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the folder for the block, and first repair the folder after a run that died.

        Raises:
            JobFailed: another run has the lock.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=0)
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
        """Replace the old files by the new files, with two renames."""
        if self.path.exists():
            self.path.rename(self.replaced)
        self.staging.rename(self.path)
        shutil.rmtree(self.replaced, ignore_errors=True)


def overwrite_files(
    rows: DataFrame, target: str, file_format: str, partition: Mapping[str, str] | None
) -> Path:
    """Replace a folder of plain files, or one partition of it (``column=value/``); return the replaced folder.

    Raises:
        WrongUse: the target is not on a local or mounted file system.
        DataRefused: a row belongs to another partition; the files stay unchanged.
        JobFailed: another run overwrites the folder.
    """
    if is_uri(target):
        raise WrongUse(
            f"{target} is no local or mounted folder, so a rename can't replace its files; use a Delta table, "
            "or versions behind a pointer (python_jobs/shared/files/pointers.py)"
        )
    literals = partition_literals(rows, partition or {})
    path = partition_path(rows, Path(absolute(target)), partition or {}, literals)
    folder = Folder(path)
    with folder.claimed():
        try:
            new = writable(inside(rows, literals), file_format)
            new.write.format(file_format).options(**_WRITER_OPTIONS).save(str(folder.staging))
        except AnalysisException as failure:
            raise WrongUse(f"{file_format} files can't hold the rows ({first_line(failure)})") from None
        except (PySparkException, Py4JJavaError) as failure:
            if _OUTSIDE in str(failure):
                raise OutsideSlice(
                    f"a row lies outside of the partition {path.name} of {target}; the files stay as they are"
                ) from None
            for problem, others in ((_NO_LINE, "json or parquet"), (_NO_VALUE, "parquet")):
                if problem in str(failure):
                    raise DataRefused(
                        f"{problem}, which {file_format} files can't hold; write {others}; the files of {target} "
                        "stay as they are"
                    ) from None
            raise
        folder.swap()
    return path


def partition_path(
    rows: DataFrame, root: Path, partition: Mapping[str, str], literals: Mapping[str, str]
) -> Path:
    """Return the folder of the partition: the one whose value is equal, such as ``hour=09`` for 9, or a new one.

    Raises:
        DataRefused: two folders have the partition's value, or a folder isn't written in full and readers take it for
            the value.
    """
    path = root
    for name, value in partition.items():
        type_ = rows.select(named_column(name)).schema[0].dataType
        names = (
            []
            if isinstance(type_, StringType) or not path.is_dir()
            else [entry.name for entry in path.iterdir()]
        )
        values = {unquote(found[len(name) + 1 :]): found for found in names if found.startswith(f"{name}=")}
        same = same_values(rows, list(values), literals[name], type_) if values else {}
        if len(same) > 1 or not all(same.values()):
            raise DataRefused(
                f"{path} has {' and '.join(sorted(values[text] for text in same))} for the partition {name}={value}; "
                "keep its rows in one folder whose value is written in full; nothing was overwritten"
            )
        path /= next((values[text] for text in same), f"{name}={value}")
    return path


def inside(rows: DataFrame, literals: Mapping[str, str]) -> DataFrame:
    """Return the rows without the partition's columns; the query fails at a row of another partition."""
    for column, literal in literals.items():
        belongs = named_column(column) == F.expr(literal)
        rows = rows.where(F.when(belongs, True).otherwise(F.raise_error(F.lit(_OUTSIDE))))
    return rows.drop(*literals)


def writable(rows: DataFrame, file_format: str) -> DataFrame:
    """Return the rows that a format of lines can hold; the query fails at a value that it can't.

    Raises:
        WrongUse: a column is of a type that the format can't hold.
    """
    if file_format == "parquet":
        return rows
    if file_format != "json":
        _require_types(rows.schema, file_format)
    for field in rows.schema:
        value = named_column(field.name)
        if _may_lack_text(field.dataType, file_format == "json"):
            has_text = _has_text(value, field.dataType)
            rows = rows.where(F.when(has_text, True).otherwise(F.raise_error(F.lit(_NO_VALUE))))
        if isinstance(field.dataType, StringType) and file_format != "json":
            is_line = ~value.rlike(r"[\r\n]")
            is_kept = is_line if file_format == "text" else value.isNull() | is_line
            rows = rows.where(F.when(is_kept, True).otherwise(F.raise_error(F.lit(_NO_LINE))))
    # The writer refuses a column of a nested type; as the text of to_csv it would be taken.
    if file_format == "csv" and len(rows.schema) == 1 and not isinstance(rows.schema[0].dataType, _NESTED):
        return rows.select(_never_blank(rows.schema[0]))
    return rows


def _never_blank(field: StructField) -> Column:
    """Return the only column of a csv, with an empty text for NULL: it is written as two quotes, and no blank line."""
    value = named_column(field.name)
    if not isinstance(field.dataType, StringType):
        value = F.to_csv(F.struct(value), _WRITER_OPTIONS)
    return F.when(named_column(field.name).isNull(), F.lit("")).otherwise(value).alias(field.name)


def _may_lack_text(type_: DataType, is_json: bool) -> bool:
    """Return whether a type has, at any depth, values without a text that readers take."""
    if isinstance(type_, StructType):
        return any(_may_lack_text(field.dataType, is_json) for field in type_.fields)
    if isinstance(type_, ArrayType):
        return _may_lack_text(type_.elementType, is_json)
    if isinstance(type_, MapType):
        return any(_may_lack_text(inner, is_json) for inner in (type_.keyType, type_.valueType))
    if isinstance(type_, FloatType | DoubleType):
        return is_json
    return isinstance(type_, DateType | TimestampType | TimestampNTZType)


def _has_text(value: Column, type_: DataType) -> Column:
    """Return whether a value is NULL, or has a text that readers take, at any depth."""
    has_text = F.lit(True)
    if isinstance(type_, StructType):
        fields = (_has_text(value[field.name], field.dataType) for field in type_.fields)
        has_text = functools.reduce(operator.and_, fields, has_text)
    elif isinstance(type_, ArrayType):
        has_text = F.forall(value, lambda element: _has_text(element, type_.elementType))
    elif isinstance(type_, MapType):
        has_text = F.forall(F.map_keys(value), lambda key: _has_text(key, type_.keyType))
        has_text &= F.forall(F.map_values(value), lambda inner: _has_text(inner, type_.valueType))
    elif isinstance(type_, FloatType | DoubleType):
        has_text = ~(F.isnan(value) | (F.abs(value) == float("inf")))
    elif isinstance(type_, TimestampType):
        has_text = F.unix_micros(value).between(FIRST_MICROS, LAST_MICROS)
    elif isinstance(type_, DateType | TimestampNTZType):
        has_text = F.year(value).between(1, 9999)
    return F.coalesce(has_text, F.lit(True))


def _require_types(schema: StructType, file_format: str) -> None:
    if file_format == "text" and (len(schema) != 1 or not isinstance(schema[0].dataType, StringType)):
        raise WrongUse(
            f"text files hold one column, a string; the rows have {schema.simpleString()}: select one, or write json"
        )
    for field in schema:
        if isinstance(field.dataType, BinaryType):
            raise WrongUse(
                f"csv files can't hold the binary column {field.name}; select base64({field.name})"
            )


# --- the run --------------------------------------------------------------------------------------------


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Overwrite the slice and return the report.

    Raises:
        NotReady: there is no source, or the source has no file.
        DataRefused: a record can't be read, there are too few rows, the rows have other columns than the table, or a
            row lies outside of the slice.
        WrongUse: the query or the condition can't be used.
    """
    with unreadable_files_refused("nothing was overwritten"):
        rows, identity = new_rows(spark, params)
        require_rows(rows, params.min_rows, params.target)
        where = params.where if params.partition is None else partition_condition(rows, params.partition)
        report = {"source": params.source, "target": params.target, "replaced": where or "all"}
        if params.target_format != "delta":
            path = overwrite_files(rows, params.target, params.target_format, params.partition)
            files = [name for name in path.iterdir() if not name.name.startswith(("_", "."))]
            return report | {"folder": str(path), "files": len(files)}
        commit = overwrite(
            spark,
            rows,
            params.target,
            where,
            partitioned_by=list(params.partition or ()),
            note={NOTE: {"replaced": where or "all", "source": identity}},
        )
    metrics = {} if commit is None else commit["operationMetrics"]
    # Delta copies other rows of the same files and counts them as written.
    rows_written = int(metrics.get("numOutputRows", 0)) - int(metrics.get("numCopiedRows", 0))
    return report | {
        "table_version": None if commit is None else int(commit["version"]),
        "rows": rows_written,
        "files_added": int(metrics.get("numFiles", 0)),
        "files_removed": int(metrics.get("numRemovedFiles", 0)),
    }


def new_rows(spark: SparkSession, params: Parameters) -> tuple[DataFrame, str | None]:
    """Return the rows of the query, and the identity of the source's files (None for a Delta table)."""
    files = [] if params.format == "delta" else source_files(spark, params)
    source = read_files(spark, params, files) if files else read_table(spark, params.source)
    tables: dict[str, Any] = {"source": source}
    if "{target}" in params.text:
        tables["target"] = _current_rows(spark, params)
    rows = user_query(spark, params.text, **tables)
    if not files:
        return rows, None
    require_records(source, files, params.source, params.allow_empty_source)
    return rows, source_identity(params, files)


def _current_rows(spark: SparkSession, params: Parameters) -> DataFrame:
    if params.target_format == "delta":
        return read_table(spark, params.target)
    if not Path(params.target).is_dir():
        raise NotReady(f"there is no folder {params.target}, which the query reads")
    if params.target_format not in ("json", "csv"):
        reader = spark.read.format(params.target_format).options(**NO_FILE_SKIPPED, lineSep="\n")
        return reader.load(literal_path(absolute(params.target)))
    declared = parse_schema(params.target_schema)
    partitions = [column for column in declared if column.name in (params.partition or {})]
    columns = [column for column in declared if column not in partitions]
    schema = ", ".join(f"{identifier(column.name)} {column.dataType.simpleString()}" for column in columns)
    target = Target(absolute(params.target), params.target_format, schema)
    return read_files(spark, target, list_files(HadoopFolder(spark, target.source)), partitions)


if __name__ == "__main__":
    run_job(Parameters, run)
