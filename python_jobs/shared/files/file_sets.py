"""The files of a source and the lines in them: one definition for every job that reads files.

* A source is a file, or a folder with all its sub-folders. Its path is literal: ``[1]``, ``{a}``, ``*`` and ``?``
  are characters, unless a job has an option for patterns.
* A file or folder whose name starts with ``_`` or ``.``, or ends with ``._COPYING_``, is hidden: a job reads neither
  the file nor the files in the folder.
* Files are UTF-8. A byte order mark at the start of a file is dropped. LF ends a line; parsers drop a CR before the LF.
  A CR elsewhere ends no line.
* Names that end as Hadoop's codecs do (``.gz``, ``.bz2``, ``.zst``, ``.deflate``) are unpacked; a file with such a name
  that holds something else, or breaks off, fails the job. ``.lz4`` and ``.snappy`` always fail the job, because such
  a file doesn't mark its end, so that a part of it looks complete. Not guaranteed: that bytes between two bzip2 streams
  of one file are noticed.
* A job reads exactly the files that it has listed. A folder ``x=1`` adds no column.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import JobFailed, WrongUse, root_cause
from python_jobs.shared.spark.hadoop_files import Entry, HadoopFolder, literal_path
from python_jobs.shared.spark.jvm import hadoop_configuration, jvm

NO_FILE_SKIPPED = {"ignoreCorruptFiles": "false", "ignoreMissingFiles": "false"}
"""Options of a reader, whatever the session says."""

_ENDLESS = (".lz4", ".snappy")
_BZIP2_START = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")
_BZIP2_END = 0x177245385090
_OPEN_FILES = 16
_BLANKS = bytes(range(0x21))
_SCHEME_AND_HOST = r"^[A-Za-z][A-Za-z0-9+.-]*:(//[^/]*)?(?=/)"
# Characters that java.net.URI escapes in a path: it keeps letters of all languages, but no blanks or controls.
_ESCAPED = re.compile(
    r"[^A-Za-z0-9_\-!.~'()*;:@&=+$,/\x80-\U0010ffff]|[\x80-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
)


@dataclass(frozen=True)
class SourceFile:
    """One file as the listing saw it. Content that changes later has another identity and is loaded again."""

    file_path: str
    """Relative to the source; the name, if the source is the file."""
    path: str
    """As Hadoop names it."""
    size: int
    """Bytes."""
    modified_at: int
    """Milliseconds since 1970."""

    @property
    def url_path(self) -> str:
        """Return the path as Spark's ``_metadata.file_path`` spells it, without scheme and host."""
        path = re.sub(_SCHEME_AND_HOST, "", self.path)
        return _ESCAPED.sub(lambda character: quote(character[0], safe=""), path)


class UnreadableFile(JobFailed, PySparkException):
    """A file that Spark would silently read in part; who handles Spark's unreadable files handles it too."""

    def __init__(self, file: SourceFile, cause: str) -> None:
        PySparkException.__init__(self, f"cannot read {file.path}: {cause}")
        self.file, self.cause = file, cause


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name counts for nothing."""
    return name.startswith((".", "_")) or name.endswith("._COPYING_")


def list_files(folder: HadoopFolder, below: Iterable[str] = ("",)) -> list[SourceFile]:
    """Return the files under the folders ``below`` a source, in order; of an absent one, none.

    Raises:
        WrongUse: Spark can't open a file of this name.
    """
    root, path = folder.entry(), folder.root.toString()
    if root is not None and not root.is_folder:
        return [] if is_hidden(root.name) else [_source_file(folder, root.name, path, root)]
    prefix = path.rstrip("/") + "/"
    found = [
        _source_file(folder, relative, prefix + relative, entry)
        for part in below
        for relative, entry in folder.files(part, is_hidden)
    ]
    return sorted(found, key=lambda file: file.file_path)


def matching_files(folder: HadoopFolder) -> list[SourceFile]:
    """Return the files under all that the folder's path, taken as a pattern, matches.

    Raises:
        WrongUse: it is no pattern.
    """
    try:
        matches = folder.file_system.globStatus(folder.root) or []
    except Py4JJavaError as failure:
        if "Illegal file pattern" not in str(failure):
            raise
        raise WrongUse(
            f"{folder.root} is no pattern of files ({root_cause(failure)}); close each '{{' and '['"
        ) from None
    return [file for status in matches for file in list_files(folder.at(status.getPath()))]


def _source_file(folder: HadoopFolder, file_path: str, path: str, entry: Entry) -> SourceFile:
    require_openable(folder, path)
    return SourceFile(file_path, path, entry.size, entry.modified_at)


def require_openable(folder: HadoopFolder, path: str) -> None:
    """Refuse a file whose name Spark can't open.

    Raises:
        WrongUse: the file is local, and its name has a colon or is no UTF-8.
    """
    if folder.local_root is None:
        return
    if ":" in path.rsplit("/", 1)[-1]:
        raise WrongUse(f"{path} can't be opened: a local file's name must have no colon; rename it")
    # Bytes that are no UTF-8 are half characters in Python's name of the file.
    if not path.isascii() and re.search("[\ud800-\udfff]", path):
        name = path.encode(errors="backslashreplace").decode()
        raise WrongUse(f"{name} can't be opened: a local file's name must be UTF-8; rename it")


def url_path() -> Any:
    """Return the expression of a row's file, as :attr:`SourceFile.url_path` names it."""
    return F.regexp_replace("_metadata.file_path", _SCHEME_AND_HOST, "")


def read_lines(spark: SparkSession, files: Sequence[SourceFile]) -> DataFrame:
    r"""Return each line of the files as ``value``, byte for byte, with Spark's hidden ``_metadata``.

    Only ``\n`` ends a line: a ``\r`` before it is content.

    Raises:
        UnreadableFile: see :func:`require_whole`.
    """
    require_whole(spark, files)
    if not files:
        empty = spark.createDataFrame([], "value string, file_path string, file_block_start bigint")
        return empty.select("value", F.struct("file_path", "file_block_start").alias("_metadata"))
    reader = spark.read.options(**NO_FILE_SKIPPED).option("lineSep", "\n")
    return reader.text([literal_path(file.path) for file in files])


def first_lines(
    spark: SparkSession, files: Sequence[SourceFile]
) -> Iterator[tuple[SourceFile, bytes | None]]:
    """Yield each file, in order, with its first line that holds more than blanks; None if it has none.

    The driver opens each file once, several at a time; the files are those of one file system.

    Raises:
        UnreadableFile: a file can't be opened or unpacked.
    """
    if not files:
        return
    folder = HadoopFolder(spark, files[0].path)
    hadoop = jvm(spark).org.apache.hadoop
    packings = hadoop.io.compress.CompressionCodecFactory(hadoop_configuration(spark))
    codec_of = functools.cache(lambda suffix: packings.getCodec(hadoop.fs.Path("/file" + suffix)))

    def lines(file: SourceFile) -> Iterator[bytes]:
        codec = codec_of(Path(file.file_path).suffix)
        if codec is None and folder.local_root is not None:
            with Path(re.sub(_SCHEME_AND_HOST, "", file.path)).open("rb") as content:
                yield from content
            return
        stream = folder.file_system.open(hadoop.fs.Path(file.path))
        with (
            closing(stream),
            closing(stream if codec is None else codec.createInputStream(stream)) as unpacked,
        ):
            reader, line = hadoop.util.LineReader(unpacked, bytearray(b"\n")), hadoop.io.Text()
            while reader.readLine(line):
                yield bytes(line.copyBytes())

    def first(file: SourceFile) -> bytes | None:
        try:
            for place, line in enumerate(lines(file)):
                text = line.removesuffix(b"\n").removeprefix(b"" if place else codecs.BOM_UTF8)
                if text.strip(_BLANKS):
                    return text
            return None
        except (Py4JJavaError, OSError) as failure:
            raise UnreadableFile(file, root_cause(failure)) from None

    with ThreadPoolExecutor(_OPEN_FILES) as pool:
        yield from zip(files, pool.map(first, files), strict=True)


def is_blank(line: Column) -> Column:
    """Return whether a line of JSON lines holds nothing; such a line is no record, and no fault."""
    return line.rlike(r"^[ \t\r]*\z")


def unreadable_among(files: Iterable[SourceFile], failure: Exception) -> dict[SourceFile, str]:
    """Return which of the files can't be read, with the cause; the failure of a job names one. Else an empty result."""
    if isinstance(failure, UnreadableFile):
        return {file: failure.cause for file in files if file == failure.file}
    text = str(failure)
    named = [file for file in files if file.url_path in text] if "FAILED_READ_FILE" in text else []
    return {max(named, key=lambda file: len(file.url_path)): root_cause(failure)} if named else {}


def require_whole(spark: SparkSession, files: Iterable[SourceFile]) -> None:
    """Refuse packed files whose end Spark's readers don't check; only the first and last bytes of ``.bz2`` are read.

    Raises:
        UnreadableFile: a file isn't bzip2 from its first byte to its last, or of a format that doesn't tell its end.
    """
    for file in files:
        name = file.path.casefold()
        if name.endswith(_ENDLESS):
            raise UnreadableFile(
                file,
                "lz4 and snappy don't tell where a file ends, so that a part looks whole; pack it as .gz or .zst",
            )
        if name.endswith(".bz2") and file.size and not _is_bzip2(HadoopFolder(spark, file.path), file.size):
            raise UnreadableFile(
                file, "it isn't bzip2 from its first byte to its last: it broke off, or holds something else"
            )


def _is_bzip2(file: HadoopFolder, size: int) -> bool:
    """Return whether a file begins with a bzip2 stream and ends with the end of one: a mark, a checksum, fill bits."""
    length = min(size, 11)
    tail = int.from_bytes(file.part(size - length, length), "big")
    ends = any(tail % (1 << fill) == 0 and (tail >> fill + 32) % (1 << 48) == _BZIP2_END for fill in range(8))
    return ends and _BZIP2_START.match(file.part(0, length)) is not None
