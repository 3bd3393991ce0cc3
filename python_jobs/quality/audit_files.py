"""Audit-Write-Audit-Publish, first audit of files: refuse a broken delivery before anything reads it.

Problem: a provider delivers files that are empty, cut off, of another format or with other columns; the
transformation then fails half-way or, worse, publishes less than it should.

Guarantee: every problem of every file is named in one error (exit code 3), the first invalid line with its
number; nothing is written. The files and lines are those that the loaders take
(:mod:`python_jobs.shared.files.file_sets`), and the rule for a JSON line is theirs: exactly one object, or blank, which
is no record. A file that can't be unpacked or read has a problem like any other. The content of a line is not audited
here: the second audit does that, on the transformed rows.

Cost: sizes come from the listing; lines are read once, and once more for each file that can't be read. After 20 such
files the job audits no others.

    spark-submit python_jobs/quality/audit_files.py --path landing/visits/date=2024-03-01/hour=10 \\
        --min_bytes 100 --min_lines 2

Source: Data Engineering Design Patterns, chapter 9, Audit-Write-Audit-Publish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from python_jobs.shared.core.failures import DataRefused, NotReady, WrongUse
from python_jobs.shared.files.csv_records import csv_delimiter, header_names, is_blank_line, is_csv_record
from python_jobs.shared.files.file_sets import (
    SourceFile,
    is_blank,
    list_files,
    matching_files,
    read_lines,
    unreadable_among,
    url_path,
)
from python_jobs.shared.records.json_records import ERROR_CLASS, parse_records
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.shared.spark.job import run_job

_SHOWN_PROBLEMS = 20
_LINES = {"json_lines": "one JSON object in UTF-8", "csv": "one CSV record in UTF-8", "text": "UTF-8"}
_NO_FACTS = {"lines": 0, "header": None, "first_invalid_line": None}


@dataclass(frozen=True)
class Parameters:
    """Check the files of a folder before they are processed; any problem ends the job with exit code 3."""

    path: str
    """A file, or a folder with its sub-folders, as its name is written."""
    format: Literal["json_lines", "csv", "text"] = "json_lines"
    """What each line must be, in UTF-8: one JSON object; one CSV record; any text."""
    min_bytes: int = 1
    """Least size of each file, in bytes as stored."""
    min_lines: int = 1
    """Least number of lines of each file; a CSV file's header counts, blank lines of JSON lines and CSV don't."""
    columns: list[str] = field(default_factory=list)
    """For csv: the columns that the first line must name, in any order and case."""
    delimiter: str = ","
    """For csv: what separates the names of the header."""
    pattern: bool = False
    """Whether path is a pattern (date=2024-03-0*, {a,b}, [0-9], ?) of files and folders."""

    def __post_init__(self) -> None:
        if self.min_bytes < 0 or self.min_lines < 0:
            raise WrongUse(
                f"min_bytes and min_lines must not be negative, got {self.min_bytes}, {self.min_lines}"
            )
        if self.columns and self.format != "csv":
            raise WrongUse(
                f"columns are those of a CSV header; they can't be checked with format {self.format}"
            )


def line_facts(
    lines: DataFrame, is_invalid: Column | None = None, is_none: Column | None = None
) -> DataFrame:
    """Return what one pass over the lines of files tells of each file.

    Args:
        lines: ``value`` (the line) with Spark's hidden ``_metadata``.
        is_invalid: condition on a line; None when any line will do.
        is_none: condition on a line that counts for nothing, such as a blank one; None when all count.

    Returns:
        one row a file: ``file`` (its path, as in a URI), ``lines``, ``header`` (the first line) and
        ``first_invalid_line``, counted from 1 or NULL, with all lines in the count. Spark cuts large files into blocks
        that tasks read in any order; within a block row ids are consecutive, so a line's number is its place in the
        block after the lines of earlier blocks.
    """
    numbered = lines.select(
        url_path().alias("file"),
        F.col("_metadata.file_block_start").alias("block"),
        F.monotonically_increasing_id().alias("id"),
        F.col("value"),
        (F.lit(True) if is_none is None else ~is_none).alias("counts"),
        (F.lit(False) if is_invalid is None else is_invalid).alias("is_invalid"),
    )
    is_wrong = F.col("is_invalid") & F.col("counts")
    blocks = numbered.groupBy("file", "block").agg(
        F.count("*").alias("all_lines"),
        F.count_if("counts").alias("lines"),
        F.min(F.when(F.col("counts"), F.struct("id", "value"))).alias("header"),
        (F.min(F.when(is_wrong, F.col("id"))) - F.min("id") + 1).alias("invalid_in_block"),
    )
    earlier = Window.partitionBy("file").orderBy("block").rowsBetween(Window.unboundedPreceding, -1)
    placed = blocks.withColumn("lines_before", F.coalesce(F.sum("all_lines").over(earlier), F.lit(0)))
    first = F.min(F.when(F.col("header").isNotNull(), F.struct("block", "header.value")))
    return placed.groupBy("file").agg(
        F.sum("lines").alias("lines"),
        first["value"].alias("header"),
        F.min(F.col("invalid_in_block") + F.col("lines_before")).alias("first_invalid_line"),
    )


def problems_of(facts: dict[str, Any], parameters: Parameters) -> list[str]:
    """Return one sentence for each problem of a file.

    ``facts`` are those of `line_facts`, ``size``, and ``unreadable`` (the cause) for a file that can't be read.
    """
    problems = []
    if facts["size"] < parameters.min_bytes:
        problems.append(f"{facts['size']} bytes, allowed at least {parameters.min_bytes}")
    if facts.get("unreadable") is not None:
        return [*problems, f"it can't be read ({facts['unreadable']})"]
    if facts["lines"] < parameters.min_lines:
        problems.append(f"{facts['lines']} lines, allowed at least {parameters.min_lines}")
    if facts["first_invalid_line"] is not None:
        problems.append(f"line {facts['first_invalid_line']} is not {_LINES[parameters.format]}")
    if parameters.columns:
        header = (facts["header"] or "").encode()
        names = {name.casefold() for name in header_names(header, csv_delimiter(parameters.delimiter)) or []}
        absent = [name for name in parameters.columns if name.casefold() not in names]
        if absent:
            problems.append(f"the header lacks {', '.join(absent)}")
    return problems


def run(spark: SparkSession, parameters: Parameters) -> dict[str, Any]:
    """Audit the files; return their number, size and lines.

    Raises:
        NotReady: there is no file.
        DataRefused: a file has a problem; the sentence names all of them, of every file.
    """
    folder = HadoopFolder(spark, parameters.path)
    files = matching_files(folder) if parameters.pattern else list_files(folder)
    if not files:
        raise NotReady(f"there is no file at {parameters.path}")
    sizes = {file.url_path: file.size for file in files}
    by_file = _facts_by_file(spark, files, parameters)
    problems: list[str] = []
    for file, size in sorted(sizes.items()):
        facts = by_file.get(file, _NO_FACTS)
        of_file = problems_of(facts | {"size": size}, parameters)
        if of_file:
            problems.append(f"{file}: {'; '.join(of_file)}")
    if problems:
        more = f" and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
        shown = " | ".join(problems[:_SHOWN_PROBLEMS])
        raise DataRefused(f"{len(problems)} of {len(sizes)} files failed the audit: {shown}{more}")
    return {
        "files": len(sizes),
        "bytes": sum(sizes.values()),
        "lines": sum(facts["lines"] for facts in by_file.values()),
    }


def _facts_by_file(
    spark: SparkSession, files: Sequence[SourceFile], parameters: Parameters
) -> dict[str, dict[str, Any]]:
    """Return the facts of each file that has a line or can't be read, by its path."""
    unreadable: dict[SourceFile, str] = {}
    rows: list[Row] | None = None
    while rows is None:
        readable = [file for file in files if file not in unreadable]
        try:
            rows = _facts(read_lines(spark, readable), parameters).collect()
        except (PySparkException, Py4JJavaError) as failure:
            found = unreadable_among(readable, failure)
            if not found:
                raise
            unreadable |= found
            if len(unreadable) == _SHOWN_PROBLEMS:
                shown = " | ".join(f"{file.url_path}: {cause}" for file, cause in unreadable.items())
                raise DataRefused(
                    f"{_SHOWN_PROBLEMS} or more of {len(files)} files can't be read, so the others were not audited: "
                    f"{shown}"
                ) from failure
    causes = {file.url_path: _NO_FACTS | {"unreadable": cause} for file, cause in unreadable.items()}
    return {row["file"]: row.asDict() for row in rows} | causes


def _facts(lines: DataFrame, parameters: Parameters) -> DataFrame:
    value = F.col("value")
    if parameters.format == "json_lines":
        parsed = parse_records(lines.select("value", "_metadata"), StructType([]), payload_column="value")
        return line_facts(parsed, F.col(ERROR_CLASS).isNotNull(), is_blank(value))
    if parameters.format == "csv":
        delimiter = csv_delimiter(parameters.delimiter)
        is_record = is_csv_record(F.regexp_replace(value, r"\r\z", ""), delimiter)
        return line_facts(lines, ~(F.is_valid_utf8(value) & is_record), is_blank_line(value, delimiter))
    return line_facts(lines, ~F.is_valid_utf8(value))


if __name__ == "__main__":
    run_job(Parameters, run)
