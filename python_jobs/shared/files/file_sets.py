"""The files of a source and the lines in them: one definition for every job that reads files.

* A source is a file, or a folder with all its sub-folders. Its path is literal: ``[1]``, ``{a}``, ``*`` and ``?``
  are characters, unless a job has an option for patterns.
* A file or folder whose name starts with ``_`` or ``.``, or ends with ``._COPYING_``, is hidden: a job reads neither
  the file nor the files in the folder.
* Files are UTF-8. A byte order mark at the start of a file is dropped. LF ends a line; parsers drop a CR before the LF.
  A CR elsewhere ends no line.
* Names that end as Hadoop's codecs do (``.gz``, ``.bz2``, ``.zst``, ``.lz4``, ``.snappy``, ``.deflate``) are unpacked;
  a file with such a name and another content fails the job.
* A job reads exactly the files that it has listed. A folder ``x=1`` adds no column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.spark.hadoop_files import HadoopFolder, literal_path

NO_FILE_SKIPPED = {"ignoreCorruptFiles": "false", "ignoreMissingFiles": "false"}
"""Options of a reader, whatever the session says."""

_SCHEME_AND_HOST = r"^[A-Za-z][A-Za-z0-9+.-]*:(//[^/]*)?(?=/)"


@dataclass(frozen=True)
class SourceFile:
    """One file as the listing saw it. Content that changes later has another identity and is loaded again."""

    file_path: str
    """Relative to the source; the name, if the source is the file."""
    path: str
    """As Hadoop names it."""
    url_path: str
    """As Spark's ``_metadata.file_path`` spells it, without scheme and host."""
    size: int
    """Bytes."""
    modified_at: int
    """Milliseconds since 1970."""


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name counts for nothing."""
    return name.startswith((".", "_")) or name.endswith("._COPYING_")


def list_files(folder: HadoopFolder, below: Iterable[str] = ("",)) -> list[SourceFile]:
    """Return the files under the folders ``below`` a source, in order; of an absent one, none.

    Raises:
        WrongUse: Spark can't open a file of this name.
    """
    prefix = folder.root.toString().rstrip("/") + "/"
    found = [file for part in below for file in _walk(folder, folder.path(part), prefix)]
    return sorted(found, key=lambda file: file.file_path)


def matching_files(folder: HadoopFolder) -> list[SourceFile]:
    """Return the files under all that the folder's path, taken as a pattern, matches."""
    matches = folder.file_system.globStatus(folder.root) or []
    return [file for status in matches for file in _walk(folder, status.getPath(), "")]


def _walk(folder: HadoopFolder, path: Any, prefix: str) -> Iterator[SourceFile]:
    file_system = folder.file_system
    if not file_system.exists(path):
        return
    for status in file_system.listStatus(path):
        child = status.getPath()
        if is_hidden(child.getName()):
            continue
        if status.isDirectory():
            yield from _walk(folder, child, prefix)
            continue
        name = child.toString()
        if ":" in child.getName() and folder.scheme == "file":
            raise WrongUse(f"{name} can't be opened: a local file's name must have no colon; rename it")
        yield SourceFile(
            file_path=name.removeprefix(prefix) if name.startswith(prefix) else child.getName(),
            path=name,
            url_path=child.toUri().getRawPath(),
            size=status.getLen(),
            modified_at=status.getModificationTime(),
        )


def url_path() -> Any:
    """Return the expression of a row's file, as :attr:`SourceFile.url_path` names it."""
    return F.regexp_replace("_metadata.file_path", _SCHEME_AND_HOST, "")


def read_lines(spark: SparkSession, files: Sequence[SourceFile]) -> DataFrame:
    r"""Return each line of the files as ``value``, byte for byte, with Spark's hidden ``_metadata``.

    Only ``\n`` ends a line: a ``\r`` before it is content.
    """
    if not files:
        empty = spark.createDataFrame([], "value string, file_path string, file_block_start bigint")
        return empty.select("value", F.struct("file_path", "file_block_start").alias("_metadata"))
    reader = spark.read.options(**NO_FILE_SKIPPED).option("lineSep", "\n")
    return reader.text([literal_path(file.path) for file in files])
