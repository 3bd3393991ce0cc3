"""Files as a source: their identity, their schema and their rows.

A record is a line: one JSON object, or one CSV record below a header line that is the same in all files and names the
schema's columns in order. Blank lines are none. What doesn't fit the schema exactly refuses the load, as
:mod:`python_jobs.shared.records.json_records` and :mod:`python_jobs.shared.records.values` say it; in CSV an empty
field is NULL.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Protocol

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from python_jobs.shared.core.failures import DataRefused, NotReady, WrongUse
from python_jobs.shared.files.file_sets import (
    NO_FILE_SKIPPED,
    SourceFile,
    list_files,
    read_lines,
    url_path,
)
from python_jobs.shared.records.json_records import TYPED, UNREADABLE, with_fields
from python_jobs.shared.records.values import exact_cast, exact_value, is_limited, require_readable
from python_jobs.shared.spark.hadoop_files import HadoopFolder, literal_path
from python_jobs.shared.spark.job import RECORD_REFUSED
from python_jobs.shared.spark.sql_text import named_column

# Each byte is a character of its own in it: nothing is replaced while lines are cut.
_BYTES = "ISO-8859-1"
_LINE = "__line"
_CORRUPT = "__corrupt"
_ROW = "__row"
# A line as one CSV column, cut by nothing; the header is left out where a file starts.
_WHOLE_LINES = {"header": "true", "enforceSchema": "false", "mode": "FAILFAST", "sep": "\x01", "quote": ""}


def parse_schema(ddl: str) -> StructType:
    """Return the schema that the SQL text describes.

    Raises:
        WrongUse: it is no schema.
    """
    try:
        schema = StructType.fromDDL(ddl)
        if not isinstance(schema, StructType):  # 'string' is a type, but no schema
            raise ValueError(f"'{ddl}' names no columns")
        return schema
    except (ParseException, ValueError) as failure:
        reason = str(failure).strip().splitlines()[0]
        raise WrongUse(f"schema must read like 'type string not null, name string': {reason}") from None


class FileSource(Protocol):
    """What says where a dataset is and how its files are read; see :class:`Parameters`."""

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
        """What a field of csv that is NULL holds, beside nothing."""


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
    return hashlib.sha256(json.dumps([how, content]).encode()).hexdigest()


def read_files(spark: SparkSession, parameters: FileSource, files: Sequence[SourceFile]) -> DataFrame:
    """Return the records of the files; reading one that doesn't fit the schema exactly will fail.

    Raises:
        WrongUse: a column's type isn't read from files of this format.
        DataRefused: the first file's header isn't the schema's.
    """
    schema = parse_schema(parameters.schema)
    require_readable(schema, nested=parameters.format == "json")
    if parameters.format == "json":
        return _checked(*_json_records(spark, files, schema))
    filled = [file for file in files if file.size]
    if not filled:
        return spark.createDataFrame([], schema)
    return _checked(*_csv_records(spark, filled, schema, parameters.delimiter, parameters.null_marker))


def _json_records(
    spark: SparkSession, files: Sequence[SourceFile], schema: StructType
) -> tuple[DataFrame, Column, Column]:
    lines = read_lines(spark, files).where(~F.col("value").rlike(r"^[ \t\r]*$"))
    rows = with_fields(
        lines.select(F.col("value").alias(_LINE), url_path().alias("__file")), schema, F.col(_LINE)
    )
    unreadable = F.concat(
        F.lit("a value isn't of its type or would be changed by it: "), F.array_join(UNREADABLE, ", ")
    )
    problem = F.when(F.col(TYPED).isNull(), F.lit("a line is not one JSON object in UTF-8")).when(
        F.size(UNREADABLE) > 0, unreadable
    )
    return rows, F.col(TYPED), problem


def _csv_records(
    spark: SparkSession, files: Sequence[SourceFile], schema: StructType, delimiter: str, null_marker: str
) -> tuple[DataFrame, Column, Column]:
    texts = [f"c{i}" for i in range(len(schema.fields))]
    options = {"sep": delimiter, "escape": '"', "columnNameOfCorruptRecord": _CORRUPT}
    header = _first_line(spark, files[0])
    _require_header(header, schema, delimiter, files[0])
    reader = spark.read.options(**NO_FILE_SKIPPED, **_WHOLE_LINES, encoding=_BYTES, lineSep="\n")
    one_column = StructType([StructField(header.decode(_BYTES), StringType())])
    lines = reader.schema(one_column).csv([literal_path(file.path) for file in files]).toDF(_LINE)
    # The carriage return goes while each byte is a character: functions of texts replace bytes that are no UTF-8.
    line = F.encode(F.regexp_replace(_LINE, r"\r\z", ""), _BYTES).cast("string")
    rows = lines.select(line.alias(_LINE), url_path().alias("__file"))
    ddl = ", ".join(f"{name} string" for name in [*texts, _CORRUPT])
    rows = rows.withColumn(_ROW, F.from_csv(_LINE, ddl, options))
    values, wrong = [], []
    for name, column in zip(texts, schema, strict=True):
        text = F.nullif(F.nullif(F.col(_ROW)[name], F.lit("")), F.lit(null_marker))
        value = exact_value(text, column.dataType)
        values.append(value.alias(column.name))
        wrong.append(F.when(text.isNotNull() & value.isNull(), column.name))
    names = F.array_join(F.array(*wrong), ", ")
    is_record = F.is_valid_utf8(_LINE) & F.col(_LINE).rlike(_csv_record(delimiter))
    problem = (
        F.when(~is_record, F.lit("a line is not one CSV record in UTF-8"))
        .when(F.col(_ROW)[_CORRUPT].isNotNull(), F.lit("a line has more or fewer columns than the header"))
        .when(names != "", F.concat(F.lit("a value isn't of its type or would be changed by it: "), names))
    )
    return rows, F.struct(*values), problem


def _csv_record(delimiter: str) -> str:
    """Return the pattern of a line whose quotes are closed, and stand around whole values only."""
    cut = re.escape(delimiter)
    field = rf'(?:"[^"]*+(?:""[^"]*+)*+"|(?!")(?:(?!{cut})[\s\S])*+)'
    return rf"^{field}(?:{cut}{field})*+\z"


def _first_line(spark: SparkSession, file: SourceFile) -> bytes:
    row = read_lines(spark, [file]).select(F.col("value").cast("binary")).first()
    return b"" if row is None else bytes(row[0])


def _require_header(header: bytes, schema: StructType, delimiter: str, file: SourceFile) -> None:
    """Compare the first file's header line with the schema; Spark compares those of the others with it."""
    cut = re.escape(delimiter)
    text = header.decode(errors="replace").removesuffix("\r")
    names = [
        name.strip('"').replace('""', '"') for name in re.split(f'{cut}(?=(?:[^"]*"[^"]*")*[^"]*$)', text)
    ]
    if [name.casefold() for name in names] != [name.casefold() for name in schema.names]:
        raise DataRefused(
            f"cannot read {file.path}: its header names {', '.join(names)[:300]}, the schema "
            f"{', '.join(schema.names)}; both must name the same columns in the same order"
        )


def _checked(rows: DataFrame, record: Column, problem: Column) -> DataFrame:
    """Return the records as columns; evaluating a row that has a problem fails.

    The rows pass a generator, behind which Spark moves no filter: lines are parsed once, and a query that needs no
    column still meets the problems.
    """
    pair = F.struct(record.alias("record"), problem.alias("problem"), F.col("__file").alias("file"))
    one = rows.select(F.explode(F.array(pair)).alias("r"))
    message = F.concat(
        F.lit(f"{RECORD_REFUSED}cannot read "), F.col("r.file"), F.lit(": "), F.col("r.problem")
    )
    good = F.when(F.col("r.problem").isNull(), True).otherwise(F.raise_error(message).cast("boolean"))
    return one.where(good).select("r.record.*")


def require_records(rows: DataFrame, files: Sequence[SourceFile], source: str, allow_empty: bool) -> None:
    """Refuse files that hold not one record.

    Raises:
        DataRefused: there is none, and ``allow_empty`` doesn't say that this is right.
    """
    if not allow_empty and rows.isEmpty():
        raise DataRefused(
            f"the {len(files)} files of {source} hold no record; pass allow_empty_source if that is right"
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
