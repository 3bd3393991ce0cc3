"""CSV records: one definition for every job that reads CSV files.

A record is a line. Its quotes are closed and stand around whole values; a quote within quotes is doubled. The first
line that isn't blank is the header, and each line below it that isn't blank is a record. A line break within quotes is
refused, because a quote that is never closed would make the following lines part of its value.

The headers of several files are the same if they have the same names in the same order; case, quotes and line ends may
differ. Each file's header is read before the lines: one small read a file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from python_jobs.shared.core.failures import DataRefused, WrongUse
from python_jobs.shared.files.file_sets import (
    NO_FILE_SKIPPED,
    SourceFile,
    first_lines,
    read_lines,
    require_whole,
    url_path,
)
from python_jobs.shared.spark.hadoop_files import literal_path

LINE, FILE, FIELDS = "__line", "__file", "__fields"
"""Columns of :func:`csv_lines`: the line without its end, its file as in a URI, and its fields as they are written."""

# Each byte is a character of its own in it: nothing is replaced while lines are cut.
_BYTES = "ISO-8859-1"
# A line as one CSV column: no byte is one of these two signs. Spark leaves out the header where a file starts.
_WHOLE_LINES = {
    "header": "true",
    "enforceSchema": "true",
    "mode": "FAILFAST",
    "sep": "\u2400",
    "quote": "\u2401",
    "encoding": _BYTES,
    "lineSep": "\n",
}
# Pattern of a line that Spark's CSV reader takes for blank.
_BLANKS = r"[\x00-\x20]"


@dataclass(frozen=True)
class CsvHeader:
    """The header that all files of a source have."""

    file: SourceFile
    """The first file that has one."""
    line: bytes
    """The line without its LF."""
    names: list[str]
    """Names of the columns."""


def csv_delimiter(text: str) -> str:
    r"""Return the delimiter that a parameter says; ``\t`` is the tab.

    Raises:
        WrongUse: no line could be cut by it.
    """
    if not text or re.search(r'["\r\n]', text):
        raise WrongUse(
            f"the delimiter of csv is one or more characters other than quotes and line ends, got {text!r}"
        )
    return "\t" if text == r"\t" else text


def csv_header(spark: SparkSession, files: Sequence[SourceFile], delimiter: str) -> CsvHeader | None:
    """Return the header of the files that have a line; None if none has.

    Raises:
        DataRefused: a header is not one CSV record in UTF-8, or names other columns than the first one. The text isn't
            repeated: without a header it is data.
        UnreadableFile: a file can't be read.
    """
    require_whole(spark, files)
    header: CsvHeader | None = None
    for file, line in first_lines(spark, [file for file in files if file.size]):
        if line is None or (header is not None and line == header.line):
            continue
        names = header_names(line, delimiter)
        if names is None:
            raise DataRefused(f"cannot read {file.path}: its header is not one CSV record in UTF-8")
        header = header or CsvHeader(file, line, names)
        if [name.casefold() for name in names] != [name.casefold() for name in header.names]:
            raise DataRefused(
                f"cannot read {file.path}: its header isn't that of {header.file.path}; all files must name the same "
                "columns in the same order"
            )
    return header


def header_names(line: bytes, delimiter: str) -> list[str] | None:
    """Return the names that a header line holds; None if it isn't one CSV record in UTF-8."""
    try:
        text = line.decode().removesuffix("\r")
    except UnicodeDecodeError:
        return None
    if re.fullmatch(_record(delimiter), text) is None:
        return None
    found = re.findall(_delimited(delimiter), delimiter + text)
    return [name[1:-1].replace('""', '"') if name.startswith('"') else name for name in found]


def csv_lines(
    spark: SparkSession, files: Sequence[SourceFile], header: CsvHeader, delimiter: str
) -> DataFrame:
    """Return the lines below the header of each file; the headers are those that :func:`csv_header` has compared."""
    # Spark warns of each header that isn't the schema's.
    schema = StructType([StructField(header.line.decode(_BYTES), StringType())])
    reader = spark.read.options(**NO_FILE_SKIPPED, **_WHOLE_LINES).schema(schema)
    lines = reader.csv([literal_path(file.path) for file in files if file.size]).toDF(LINE)
    # The carriage return goes while each byte is a character: functions of texts replace bytes that are no UTF-8.
    line = F.encode(F.regexp_replace(LINE, r"\r\z", ""), _BYTES).cast("string")
    found = _cut(lines.select(line.alias(LINE), url_path().alias(FILE)), delimiter)
    # The reader passes over lines of blanks: between delimiters that are blanks, and in one column, they are records.
    if len(header.names) == 1:
        is_record = ~F.col("value").rlike(r"^\r?\z")
    elif all(character <= " " for character in delimiter):
        is_record = F.col("value").contains(delimiter)
    else:
        return found
    blank = read_lines(spark, files).where(F.col("value").rlike(rf"^{_BLANKS}+\z") & is_record)
    text = F.regexp_replace("value", r"\r\z", "")
    return found.union(_cut(blank.select(text.alias(LINE), url_path().alias(FILE)), delimiter))


def is_blank_line(line: Column, delimiter: str) -> Column:
    """Return whether a line has blanks only, and no delimiter that is a blank."""
    return line.rlike(rf"^{_BLANKS}*\z") & ~line.contains(delimiter)


def is_csv_record(line: Column, delimiter: str) -> Column:
    """Return whether the quotes of a line are closed, and stand around whole values only."""
    return line.rlike(rf"^{_record(delimiter)}\z")


def csv_value(fields: Column, place: int) -> Column:
    """Return the text of a field without its quotes; NULL where nothing is written, or the record is too short."""
    field = F.get(fields, F.lit(place))
    text = F.replace(F.substring(field, F.lit(2), F.length(field) - 2), F.lit('""'), F.lit('"'))
    return F.when(field.startswith('"'), text).otherwise(F.nullif(field, F.lit("")))


def _cut(lines: DataFrame, delimiter: str) -> DataFrame:
    """Return the lines with their fields."""
    fields = F.regexp_extract_all(
        F.concat(F.lit(delimiter), F.col(LINE)), F.lit(_delimited(delimiter)), F.lit(1)
    )
    return lines.withColumn(FIELDS, fields)


def _record(delimiter: str) -> str:
    return rf"{_field(delimiter)}(?:{re.escape(delimiter)}{_field(delimiter)})*+"


def _delimited(delimiter: str) -> str:
    return f"{re.escape(delimiter)}({_field(delimiter)})"


def _field(delimiter: str) -> str:
    return rf'(?:"[^"]*+(?:""[^"]*+)*+"|(?!")(?:(?!{re.escape(delimiter)})[\s\S])*+)'
