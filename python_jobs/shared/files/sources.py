"""Files as a source: their identity, their schema and their rows."""

from __future__ import annotations

import hashlib
import json
from typing import Protocol

from pyspark.errors import ParseException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from python_jobs.shared.core.failures import NotReady, WrongUse
from python_jobs.shared.core.paths import absolute
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.shared.spark.sql_text import named_column

# What a reader of files must never do silently: a bad record as NULLs, a column under another's name.
_STRICT = {"mode": "FAILFAST", "enforceSchema": "false"}


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


def source_identity(spark: SparkSession, parameters: FileSource) -> str | None:
    """Return a hash of the files (path, size, modification time) and of how they are read; None for a database.

    Raises:
        NotReady: there is no file.
    """
    if parameters.format == "postgres":
        return None
    folder = HadoopFolder(spark, parameters.source)
    files = []
    if folder.exists():
        prefix = folder.root.toString()
        found = folder.file_system.listFiles(folder.root, True)
        while found.hasNext():
            status = found.next()
            relative = status.getPath().toString().removeprefix(prefix)
            if not any(part.startswith((".", "_")) for part in relative.split("/")):
                files.append((relative, status.getLen(), status.getModificationTime()))
    if not files:
        raise NotReady(f"{parameters.source} holds no file; nothing was loaded")
    how = (parameters.source, parameters.format, parameters.schema, parameters.delimiter)
    return hashlib.sha256(json.dumps([how, sorted(files)]).encode()).hexdigest()


def read_files(spark: SparkSession, parameters: FileSource) -> DataFrame:
    """Return the records of the files; reading one that doesn't fit the schema will fail."""
    reader = spark.read.schema(parse_schema(parameters.schema)).options(**_STRICT)
    path = absolute(parameters.source)
    if parameters.format == "json":
        return reader.json(path)
    return reader.csv(path, sep=parameters.delimiter, header=True, escape='"')


def with_schema(rows: DataFrame, schema: StructType) -> DataFrame:
    """Return the database's columns as the schema names and types them.

    Raises:
        WrongUse: a column is absent. Extra ones are left out: the schema is explicit.
    """
    absent = [name for name in schema.names if name not in rows.columns]
    if absent:
        raise WrongUse(f"the source has no column {', '.join(absent)}; it has {', '.join(rows.columns)}")
    return rows.select(*(named_column(field.name).cast(field.dataType) for field in schema))
