"""Distributed Aggregator: the cube of a day from JSON files and a PostgreSQL table.

Problem: a dashboard needs statistics of a day on every combination of some dimensions. The events are JSON files, and
what describes them is a table of a database.

Guarantee: a run joins the files with one snapshot of the table, aggregates the rows and replaces the day in the target
in one Delta commit. Readers see the cube of before or the new one. If PostgreSQL can't be reached or goes away, if a
record can't be read, or if a run dies, the cube stays as it was. A second run gives the same cube. Rows of another day
refuse the run, and so do files without a record and a query without rows, unless ``--allow_empty true`` lets it clear
the day.

The rows, measures and levels are those of the dbt macro ``cube_daily``, which is rendered here. A model with
``cube_weekly`` rolls the target up to ISO weeks.

``--table_key`` refuses a table that has a key twice: the join would count an event twice.

Cost: the files are read once, after a look at their first record, and the table over one connection; both are exchanged
for the join, unless the table is so small that Spark sends it to each task. Rows are aggregated to the cells before
they are exchanged, and then each cell goes to 2^n levels (n dimensions). The cells are kept on the executors' disks
until they are written.
``--table_key`` reads the table twice.

    spark-submit python_jobs/data_value/distributed_aggregator.py --source landing/visits/date=2024-01-01 \\
        --schema "event_date date, device string, country string, duration double" \\
        --jdbc_url jdbc:postgresql://localhost:5432/shop --user reader --password_file secrets/reader \\
        --table devices --table_key '[name]' \\
        --query "select event_date, country, kind, duration from {files} v join {table} d on d.name = v.device" \\
        --day event_date --date 2024-01-01 --dimensions '[country, kind]' \\
        --measures.duration duration --valid_when.duration "duration >= 0" --target lakehouse/gold/visits_by_day

Source: Data Engineering Design Patterns, chapter 5, Distributed Aggregator.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import and_
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, DataType, DateType, NumericType

from python_jobs.shared.core.dates import parse_date
from python_jobs.shared.core.failures import DataRefused, WrongUse
from python_jobs.shared.delta.overwrite import overwrite
from python_jobs.shared.delta.streams import evaluated_once
from python_jobs.shared.files.file_sets import SourceFile
from python_jobs.shared.files.sources import parse_schema, read_files, require_records, source_files
from python_jobs.shared.postgres.snapshots import PostgresAccess, Snapshot, one_snapshot
from python_jobs.shared.spark.expressions import first_line
from python_jobs.shared.spark.job import run_job, unreadable_files_refused
from python_jobs.shared.spark.macro_sql import Macros, refusal_of_macro
from python_jobs.shared.spark.queries import query_text, user_query
from python_jobs.shared.spark.sql_text import date_literal, identifier, named_columns

NOTE = "distributed_aggregator"

_FILES = [
    "data_value/distributed_aggregator/cube.sql",
    "data_value/distributed_aggregator/measures.sql",
    "shared/arguments.sql",
    "shared/literals.sql",
    "shared/numbers.sql",
]


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Aggregate JSON files joined with a PostgreSQL table to the cube of one day."""

    source: str
    """File, or folder with its sub-folders, of JSON records, one a line."""
    schema: str
    """Columns of the files as in SQL: event_date date, device string not null."""
    jdbc_url: str
    """PostgreSQL database: jdbc:postgresql://host:port/database, with settings such as ?sslmode=verify-full."""
    user: str
    """Database user."""
    password_env: str | None = None
    """Environment variable that holds the database password."""
    password_file: str | None = None
    """File that holds the database password."""
    table: str
    """What to read of PostgreSQL: a table, a view or (query) as name."""
    table_key: list[str] | None = None
    """Columns whose values identify a row of the table; a repeated value is refused. By default nothing is checked."""
    query: str
    """SQL of the rows to aggregate, as text or .sql file; {files} and {table} are the two sources."""
    day: str
    """Date column of the query, which partitions the target."""
    date: str
    """Day to replace (2024-01-01); the query may give rows of this day only."""
    dimensions: list[str]
    """Columns of the query, up to 10: the cube has a level for each combination."""
    measures: dict[str, str] | None = None
    """SQL expressions over the query's columns by name; each gives the columns <name>_count, _sum, _min, _max, _avg."""
    valid_when: dict[str, str] | None = None
    """SQL conditions by measure; a value that doesn't meet its condition is in no measure, and its row is counted."""
    target: str
    """Delta table, by path or catalog name; created if absent."""
    allow_empty: bool = False
    """Whether files without a record are right, and a query without rows may clear the day."""

    def __post_init__(self) -> None:
        _ = self.access, self.text  # refuse an incomplete access and a file that can't be read
        try:
            parse_date(self.date)
        except ValueError as failure:
            raise WrongUse(f"date: {failure}") from None
        unknown = [name for name in self.valid_when or {} if name not in (self.measures or {})]
        if unknown:
            raise WrongUse(
                f"valid_when names {', '.join(unknown)}; measures are {', '.join(self.measures or {}) or 'none'}"
            )

    @property
    def access(self) -> PostgresAccess:
        """Return how to reach the database."""
        return PostgresAccess(self.jdbc_url, self.user, self.password_env, self.password_file)

    @cached_property
    def text(self) -> str:
        """Return the SQL of the query."""
        return query_text(self.query)

    @property
    def replaced(self) -> str:
        """Return the condition of the day that is replaced."""
        return f"{identifier(self.day)} = {date_literal(parse_date(self.date))}"

    # What a source of JSON files has besides its path and schema.
    format, delimiter, null_marker = "json", ",", ""


# --- from DataFrames to DataFrames ----------------------------------------------------------------------


def cube(rows: DataFrame, params: Parameters) -> DataFrame:
    """Return the cube of the rows, by the macro ``cube_daily``.

    Raises:
        WrongUse: the rows lack a column, the day is no date, or a measure is no number.
    """
    _require_columns(rows, [params.day, *params.dimensions], "the query")
    _require_type(rows, params.day, identifier(params.day), DateType, "a date")
    measures = {
        name: {"value": value, "valid_when": (params.valid_when or {}).get(name, "true")}
        for name, value in (params.measures or {}).items()
    }
    for name, measure in measures.items():
        _require_type(rows, f"measures.{name}", measure["value"], NumericType, "a number")
        _require_type(rows, f"valid_when.{name}", measure["valid_when"], BooleanType, "a condition")
    spark, view = rows.sparkSession, f"aggregated_{uuid.uuid4().hex}"
    macros = Macros(spark, _FILES)
    rows.createOrReplaceTempView(view)
    try:
        return spark.sql(
            macros.call("default__cube_daily", view, params.day, params.dimensions, measures, None)
        )
    finally:
        spark.catalog.dropTempView(view)


def require_unique(table: DataFrame, key: Sequence[str], name: str) -> None:
    """Refuse a table that has a key twice; NULL joins with nothing.

    Raises:
        DataRefused: a key comes twice.
        WrongUse: the table lacks a column.
    """
    _require_columns(table, key, name)
    known = table.where(reduce(and_, (column.isNotNull() for column in named_columns(key))))
    keys = known.select(F.struct(*named_columns(key)).alias("key")).groupBy("key").count()
    repeated = keys.where("count > 1").select(F.to_json("key")).take(1)
    if repeated:
        raise DataRefused(
            f"{name} has the key {repeated[0][0]} more than once, so that the join would double rows; "
            "the cube stays as it is"
        )


def _require_columns(rows: DataFrame, names: Sequence[str], of: str) -> None:
    known = {name.lower() for name in rows.columns}
    absent = [name for name in names if name.lower() not in known]
    if absent:
        raise WrongUse(f"{of} has no column {', '.join(absent)}; it has {', '.join(rows.columns)}")


def _require_type(rows: DataFrame, name: str, value: str, allowed: type[DataType], what: str) -> None:
    try:
        type_ = rows.select(F.expr(value)).schema[0].dataType
    except (AnalysisException, ParseException) as failure:
        raise WrongUse(f"{name} can't be used ({first_line(failure)})") from None
    if not isinstance(type_, allowed):
        raise WrongUse(f"{name} must be {what}, got '{value}' of type {type_.simpleString()}")


# --- the run --------------------------------------------------------------------------------------------


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Aggregate and replace the day; return the report.

    Raises:
        NotReady: the source has no file.
        JobFailed: PostgreSQL can't be reached, refuses, or goes away.
        DataRefused: a record can't be read, the files have none, a key of the table comes twice, there is no row, or a
            row is of another day or of none.
        WrongUse: the query, a dimension or a measure can't be used.
    """
    parse_schema(params.schema)
    with unreadable_files_refused("the cube stays as it is"):
        files = source_files(spark, params)
        with one_snapshot(spark, params.access) as database:
            report = _replace(spark, cube(joined(spark, params, files, database), params), params)
    return {
        "source": params.source,
        "files": len(files),
        "target": params.target,
        "date": params.date,
    } | report


def joined(
    spark: SparkSession, params: Parameters, files: Sequence[SourceFile], database: Snapshot
) -> DataFrame:
    """Return the rows of the query over both sources, to be read while the database's snapshot lasts.

    Raises:
        WrongUse: the query can't be used.
        DataRefused: the files have no record, or a key of the table comes twice.
    """
    records = read_files(spark, params, files)
    # An outer join of the table with no record at all has rows, too.
    require_records(records, files, params.source, params.allow_empty, "allow_empty")
    table = database.read(params.table)
    if params.table_key:
        require_unique(table, params.table_key, params.table)
    return user_query(spark, params.text, files=records, table=table)


def _replace(spark: SparkSession, cells: DataFrame, params: Parameters) -> dict[str, Any]:
    with evaluated_once(cells) as kept:
        try:
            rows, cells = kept.agg(
                F.sum(F.when(F.col("grouping_id") == 0, F.col("row_count"))), F.count(F.lit(1))
            ).collect()[0]
        except (PySparkException, Py4JJavaError) as failure:
            refused = refusal_of_macro(failure)
            if refused is None:
                raise
            raise DataRefused(f"{refused}; the cube stays as it is") from None
        if rows is None and not params.allow_empty:
            raise DataRefused(
                f"the query has no row for {params.date}; pass allow_empty if that is right; the cube stays as it is"
            )
        day = [next(name for name in kept.columns if name.lower() == params.day.lower())]
        note = {NOTE: {"date": params.date, "rows": rows or 0}}
        commit = overwrite(spark, kept, params.target, params.replaced, partitioned_by=day, note=note)
        return {
            "rows": rows or 0,
            "cells": cells,
            "table_version": None if commit is None else int(commit["version"]),
        }


if __name__ == "__main__":
    run_job(Parameters, run)
