"""Files as a source: their identity, their schema and their rows.

A record is a line: one JSON object, or one CSV record (:mod:`python_jobs.shared.files.csv_records`) below a header that
names the schema's columns in order, in all files. A blank line is no record. The load is refused if a record doesn't
fit the schema exactly, by the rules of :mod:`python_jobs.shared.records.json_records` and
:mod:`python_jobs.shared.records.values`. In CSV an empty field is NULL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import unquote

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from python_jobs.shared.core.failures import DataRefused, NotReady, WrongUse
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.files.csv_records import (
    FIELDS,
    FILE,
    LINE,
    CsvHeader,
    csv_delimiter,
    csv_header,
    csv_lines,
    csv_value,
    is_csv_record,
)
from python_jobs.shared.files.file_sets import (
    SourceFile,
    is_blank,
    list_files,
    read_lines,
    url_path,
)
from python_jobs.shared.records.json_records import TYPED, UNREADABLE, with_fields
from python_jobs.shared.records.values import (
    declared_schema,
    exact_cast,
    exact_value,
    is_limited,
    require_readable,
)
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.shared.spark.job import RECORD_REFUSED
from python_jobs.shared.spark.sql_text import named_column


def parse_schema(ddl: str) -> StructType:
    """Return the schema that the SQL text describes.

    Raises:
        WrongUse: it is no schema.
    """
    try:
        return declared_schema(ddl)
    except ValueError as failure:
        raise WrongUse(f"schema must read like 'type string not null, name string': {failure}") from None


class FileSource(Protocol):
    """The place of a dataset and the options that read its files; see :class:`Parameters`."""

    @property
    def source(self) -> str:
        """File or folder."""

    @property
    def format(self) -> str:
        """json, csv or postgres."""

    @property
    def schema(self) -> str:
        """Columns as in SQL."""

    @property
    def delimiter(self) -> str:
        """Between the columns of csv."""

    @property
    def null_marker(self) -> str:
        """Return the text that means NULL in a CSV field, as an empty field does."""


def source_files(spark: SparkSession, parameters: FileSource) -> list[SourceFile]:
    """Return the source's files, which are what is read and what its identity is made of.

    Raises:
        NotReady: there is no file.
    """
    files = list_files(HadoopFolder(spark, parameters.source))
    if not files:
        raise NotReady(
            f"{parameters.source} holds no file; nothing was loaded (names that start with '_' or '.' don't count)"
        )
    return files


def source_identity(parameters: FileSource, files: Sequence[SourceFile]) -> str:
    """Return a hash of the files (path, size, modification time) and of how they are read."""
    how = [parameters.source, parameters.format, parameters.schema, parameters.delimiter]
    how += [parameters.null_marker] if parameters.null_marker else []
    content = [(file.file_path, file.size, file.modified_at) for file in files]
    return hashlib.sha256(json_text([how, content]).encode()).hexdigest()


def read_files(
    spark: SparkSession,
    parameters: FileSource,
    files: Sequence[SourceFile],
    partition_columns: Sequence[StructField] = (),
) -> DataFrame:
    """Return the records of the files; reading one that doesn't fit the schema exactly will fail.

    ``partition_columns`` are further columns, whose values are the names of the files' folders (``column=value``).

    Raises:
        WrongUse: a column's type isn't read from files of this format.
        DataRefused: a file's header isn't the schema's.
    """
    schema = parse_schema(parameters.schema)
    require_readable(schema, nested=parameters.format == "json")
    if parameters.format == "json":
        return _with_partitions(
            spark, _checked(*_json_records(spark, files, schema)), files, partition_columns
        )
    delimiter = csv_delimiter(parameters.delimiter)
    header = csv_header(spark, files, delimiter)
    if header is None:
        return spark.createDataFrame([], StructType([*schema, *partition_columns]))
    _require_names(header, schema)
    rows = _checked(*_csv_records(spark, files, header, schema, parameters.null_marker, delimiter))
    return _with_partitions(spark, rows, files, partition_columns)


def _with_partitions(
    spark: SparkSession, rows: DataFrame, files: Sequence[SourceFile], columns: Sequence[StructField]
) -> DataFrame:
    """Return the records of :func:`_checked` without their file, and with the columns that the files' folders name.

    Raises:
        DataRefused: a file is in no folder of a column, or the folder's value isn't of the column's type.
    """
    if not columns:
        return rows.drop(FILE)
    texts = [(file.url_path, *(_folder_value(file, column.name) for column in columns)) for file in files]
    places = [f"__{place}" for place in range(len(columns))]
    folders = spark.createDataFrame(texts, ", ".join(f"{name} string" for name in (FILE, *places)))
    values = [
        exact_value(F.col(place), column.dataType).alias(column.name)
        for place, column in zip(places, columns, strict=True)
    ]
    typed = folders.select(FILE, *values)
    for (url, *given), found in zip(texts, typed.collect(), strict=True):
        for text, column in zip(given, columns, strict=True):
            if text is not None and found[column.name] is None:
                raise DataRefused(
                    f"cannot read {url}: its folder {column.name}={text} is no value of the type "
                    f"{column.dataType.simpleString()}"
                )
    return rows.join(F.broadcast(typed), FILE).drop(FILE)


def _folder_value(file: SourceFile, name: str) -> str | None:
    """Return the value that a file's folders name for a column, as it is written unescaped; None for NULL."""
    for folder in file.file_path.split("/")[:-1]:
        if folder.startswith(f"{name}="):
            value = unquote(folder[len(name) + 1 :])
            return None if value == "__HIVE_DEFAULT_PARTITION__" else value
    raise DataRefused(
        f"cannot read {file.path}: it is in no folder {name}=…; give the path of the whole dataset"
    )


def _json_records(
    spark: SparkSession, files: Sequence[SourceFile], schema: StructType
) -> tuple[DataFrame, Column, Column]:
    lines = read_lines(spark, files).where(~is_blank(F.col("value")))
    rows = with_fields(lines.select(F.col("value").alias(LINE), url_path().alias(FILE)), schema, F.col(LINE))
    unreadable = F.concat(
        F.lit("a value isn't of its type or would be changed by it: "), F.array_join(UNREADABLE, ", ")
    )
    problem = F.when(F.col(TYPED).isNull(), F.lit("a line is not one JSON object in UTF-8")).when(
        F.size(UNREADABLE) > 0, unreadable
    )
    return rows, F.col(TYPED), problem


def _csv_records(
    spark: SparkSession,
    files: Sequence[SourceFile],
    header: CsvHeader,
    schema: StructType,
    null_marker: str,
    delimiter: str,
) -> tuple[DataFrame, Column, Column]:
    rows = csv_lines(spark, files, header, delimiter)
    values, wrong = [], []
    for place, column in enumerate(schema):
        text = F.nullif(F.nullif(csv_value(F.col(FIELDS), place), F.lit("")), F.lit(null_marker))
        value = exact_value(text, column.dataType)
        values.append(value.alias(column.name))
        wrong.append(F.when(text.isNotNull() & value.isNull(), column.name))
    names = F.array_join(F.array(*wrong), ", ")
    is_record = F.is_valid_utf8(LINE) & is_csv_record(F.col(LINE), delimiter)
    problem = (
        F.when(~is_record, F.lit("a line is not one CSV record in UTF-8"))
        .when(F.size(FIELDS) != len(schema), F.lit("a line has more or fewer columns than the header"))
        .when(names != "", F.concat(F.lit("a value isn't of its type or would be changed by it: "), names))
    )
    return rows, F.struct(*values), problem


def _require_names(header: CsvHeader, schema: StructType) -> None:
    """Compare the header of all files with the schema."""
    if [name.casefold() for name in header.names] != [name.casefold() for name in schema.names]:
        raise DataRefused(
            f"cannot read {header.file.path}: its header names {', '.join(header.names)[:300]}, the schema "
            f"{', '.join(schema.names)}; both must name the same columns in the same order"
        )


def _checked(rows: DataFrame, record: Column, problem: Column) -> DataFrame:
    """Return the records as columns, and their files; evaluating a row that has a problem fails.

    The rows pass a generator, behind which Spark moves no filter: lines are parsed once, and a query that needs no
    column still meets the problems.
    """
    pair = F.struct(record.alias("record"), problem.alias("problem"), F.col(FILE).alias("file"))
    one = rows.select(F.explode(F.array(pair)).alias("r"))
    message = F.concat(
        F.lit(f"{RECORD_REFUSED}cannot read "), F.col("r.file"), F.lit(": "), F.col("r.problem")
    )
    good = F.when(F.col("r.problem").isNull(), True).otherwise(F.raise_error(message).cast("boolean"))
    return one.where(good).select("r.record.*", F.col("r.file").alias(FILE))


def require_records(
    rows: DataFrame,
    files: Sequence[SourceFile],
    source: str,
    allow_empty: bool,
    option: str = "allow_empty_source",
) -> None:
    """Refuse files that hold not one record; ``option`` is the job's parameter with the value of ``allow_empty``.

    Raises:
        DataRefused: there is none, and ``allow_empty`` doesn't say that this is right.
    """
    if not allow_empty and rows.isEmpty():
        raise DataRefused(
            f"the {len(files)} files of {source} hold no record; pass {option} if that is right"
        )


def with_schema(rows: DataFrame, schema: StructType) -> DataFrame:
    """Return the database's columns as the schema names and types them; a value that this would change fails.

    Raises:
        WrongUse: a column is absent, or its type can't be declared so. Extra ones are left out: the schema is explicit.
    """
    absent = [name for name in schema.names if name not in rows.columns]
    if absent:
        raise WrongUse(f"the source has no column {', '.join(absent)}; it has {', '.join(rows.columns)}")
    return rows.select(*(_as_declared(rows, field) for field in schema))


def _as_declared(rows: DataFrame, field: StructField) -> Column:
    given = named_column(field.name)
    type_ = rows.schema[field.name].dataType
    value = exact_cast(given, type_, field.dataType)
    is_readable = not is_limited(field.dataType)
    try:
        rows.select(value)
    except AnalysisException:
        is_readable = False
    if not is_readable:
        raise WrongUse(
            f"column {field.name} is of type {type_.simpleString()}, which is not read as "
            f"{field.dataType.simpleString()}; declare {type_.simpleString()}"
        )
    text = F.substring(given.cast("string"), 1, 100)
    message = F.concat(
        F.lit(f"{RECORD_REFUSED}column {field.name} holds "),
        text,
        F.lit(f", which {field.dataType.simpleString()} would change; declare {type_.simpleString()}"),
    )
    refused = F.raise_error(message).cast(field.dataType)
    return F.when(given.isNotNull() & value.isNull(), refused).otherwise(value).alias(field.name)
