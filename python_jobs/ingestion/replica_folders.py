"""Folders whose bytes the Passthrough Replicator copies: of any Hadoop file system, and on local disks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from python_jobs.shared.core.failures import JobFailed, given
from python_jobs.shared.spark.hadoop_files import Entry, HadoopFolder
from python_jobs.shared.spark.jvm import jvm

STAGING = ".passthrough_replicator"
"""Folder in the target for files that are not complete yet; no listing shows it."""
DELTA_LOG = "_delta_log"
"""Folder of a Delta table's log."""

_BUFFER_BYTES = 1 << 20
# Two blocks that are compared stay in the processor's cache.
_COMPARED_BYTES = 1 << 18
# A process that is killed ends after one such part.
_KERNEL_BYTES = 1 << 24
# File systems in which a program can set a modification time. In an object store it is the time of the upload.
_KEEP_TIMES = frozenset({"file", "hdfs", "viewfs", "webhdfs"})


@dataclass(frozen=True)
class File:
    """One file of a listing."""

    path: str
    """Path relative to the folder."""
    size: int
    """Size in bytes."""
    modified_at: int
    """Modification time in milliseconds since 1970."""

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def in_delta_log(self) -> bool:
        """Return whether the file belongs to the log of a Delta table."""
        return DELTA_LOG in self.path.split("/")[:-1]


@dataclass(frozen=True)
class Listing:
    """All files and folders below a folder."""

    files: dict[str, File]
    """Files by path."""
    folders: frozenset[str]
    """Paths of the folders."""


def replica_folder(spark: SparkSession, path: str) -> Folder:
    """Return a folder, given as path or URI."""
    is_local = HadoopFolder(spark, path).local_root is not None
    return LocalFolder(spark, path) if is_local else Folder(spark, path)


class Folder(HadoopFolder):
    """A folder of any Hadoop file system (local, HDFS, S3), with the bytes as they are stored."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        # Without raw, Hadoop would hide Spark's checksum files, and they would not be copied.
        super().__init__(spark, path, raw=True)
        self._checksum_class = jvm(spark).java.util.zip.CRC32C
        self._checked_class = jvm(spark).java.util.zip.CheckedInputStream
        self._nothing = jvm(spark).java.io.OutputStream.nullOutputStream()
        self.given = path

    @property
    def keeps_times(self) -> bool:
        """Return whether a program can set the modification time of a file."""
        return self.scheme in _KEEP_TIMES

    def listing(self) -> Listing:
        """List the whole tree; the logs of Delta tables are listed before the files that they name.

        Raises:
            WrongUse: a local link makes a folder lie in itself.
        """
        files: dict[str, File] = {}
        folders: set[str] = set()
        for path, entry in self._walk("", frozenset()):
            if entry.is_folder:
                folders.add(path)
            else:
                files[path] = File(path, entry.size, entry.modified_at)
        return Listing(files, frozenset(folders))

    def current(self, path: str) -> File | None:
        """Return the current size and time of a file; None if it is absent."""
        entry = self.entry(path)
        return None if entry is None else File(path, entry.size, entry.modified_at)

    def inside_a_delta_table(self) -> str | None:
        """Return the Delta table that contains this folder, or None."""
        folder = self.root.getParent()
        while folder is not None:
            if self.file_system.exists(self._path_class(folder, DELTA_LOG)):
                return str(folder.toString())
            folder = folder.getParent()
        return None

    def has_bytes_of(self, source: Folder, path: str) -> bool:
        """Return whether the file has the same bytes in this folder and in the source."""
        ours, theirs = self._open(path), source._open(path)
        try:
            return bool(self._io.contentEquals(ours, theirs))
        finally:
            ours.close()
            theirs.close()

    def take(self, source: Folder, path: str, staged: str) -> tuple[int, bool]:
        """Copy a file of the source to ``staged`` and read the copy back.

        Returns the number of bytes that were copied, and whether the copy has the bytes that were read.
        """
        written = self._write(staged, source._open(path))
        return written[0], self._checksum(staged) == written

    def set_modified_at(self, path: str, milliseconds: int) -> None:
        """Set the modification time of a file."""
        self.file_system.setTimes(self.path(path), milliseconds, -1)

    def rename(self, path: str, to: str) -> None:
        """Rename a file; an existing file of the new name is replaced.

        Raises:
            JobFailed: the file system refuses the rename.
        """
        source, target = self.path(path), self.path(to)
        # In these file systems a rename onto an existing file fails.
        if self.file_system.exists(target):
            self.file_system.delete(target, False)
        if not self.file_system.rename(source, target):
            raise _not_writable(target)

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents, unless they exist."""
        self.file_system.mkdirs(self.path(path))

    def _open(self, path: str) -> Any:
        """Return a stream of a file's bytes, which computes their checksum."""
        stream = self.file_system.open(self.path(path), _BUFFER_BYTES)
        return self._checked_class(stream, self._checksum_class())

    def _checksum(self, path: str) -> tuple[int, int]:
        """Return the number of a file's bytes and their CRC-32C."""
        stream = self._open(path)
        try:
            return self._pump(stream, self._nothing)
        finally:
            stream.close()

    def _write(self, path: str, stream: Any) -> tuple[int, int]:
        """Write a file from a stream; return the number of the stream's bytes and their CRC-32C."""
        sink = self.file_system.create(self.path(path), True, _BUFFER_BYTES)
        try:
            return self._pump(stream, sink)
        finally:
            stream.close()
            sink.close()

    def _pump(self, source: Any, sink: Any) -> tuple[int, int]:
        # Pass the buffer's size, not a buffer: py4j would copy a buffer's bytes to Python and back.
        count = self._io.copy(source, sink, _BUFFER_BYTES)
        return int(count), int(source.getChecksum().getValue())

    def _walk(self, folder: str, above: frozenset[str]) -> Iterator[tuple[str, Entry]]:
        above = self.entered(folder, above)
        prefix = f"{folder}/" if folder else ""
        entries = self.entries(folder)
        for log in (entry for entry in entries if entry.name == DELTA_LOG):
            yield prefix + DELTA_LOG, log
            yield from self._walk(prefix + DELTA_LOG, above)
            # List the folder again after the log, so that it has all files that the log names.
            entries = self.entries(folder)
        for entry in entries:
            if entry.name == DELTA_LOG or (entry.name == STAGING and not prefix):
                continue
            yield prefix + entry.name, entry
            if entry.is_folder:
                yield from self._walk(prefix + entry.name, above)


class LocalFolder(Folder):
    """A folder on a local disk, without the JVM: between two of them the kernel copies."""

    def has_bytes_of(self, source: Folder, path: str) -> bool:
        """Return whether the file has the same bytes in this folder and in the source."""
        if not isinstance(source, LocalFolder):
            return super().has_bytes_of(source, path)
        with self._local(path).open("rb", 0) as ours, source._local(path).open("rb", 0) as theirs:
            return same_bytes(ours, theirs)

    def take(self, source: Folder, path: str, staged: str) -> tuple[int, bool]:
        """Copy a file of the source to ``staged`` and compare the copy with the source, byte by byte."""
        if not isinstance(source, LocalFolder):
            return super().take(source, path, staged)
        copy = self._local(staged)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with source._local(path).open("rb", 0) as original, copy.open("w+b", 0) as written:
            copy_bytes(original, written)
            is_equal = same_bytes(original, written)
            return os.fstat(written.fileno()).st_size, is_equal

    def set_modified_at(self, path: str, milliseconds: int) -> None:
        """Set the modification time of a file."""
        file = self._local(path)
        os.utime(file, ns=(file.stat().st_atime_ns, milliseconds * 1_000_000))

    def rename(self, path: str, to: str) -> None:
        """Rename a file; an existing file of the new name is replaced in one step.

        Raises:
            JobFailed: there is a folder of the new name.
        """
        try:
            self._local(path).replace(self._local(to))
        except IsADirectoryError:
            raise _not_writable(self._local(to)) from None

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents, unless they exist."""
        self._local(path).mkdir(parents=True, exist_ok=True)

    def delete(self, relative: str = "") -> None:
        """Delete a file, or a folder with all its files; do nothing if it is absent."""
        path = self._local(relative)
        with suppress(FileNotFoundError, NotADirectoryError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _local(self, path: str) -> Path:
        return given(self.local_root, "a local folder") / path


def copy_bytes(source: FileIO, target: FileIO) -> None:
    """Copy all bytes of an open file to another open file, in the kernel if it can (some file systems share blocks)."""
    # If the kernel refuses, fails or copies a part (two file systems, an old kernel), the loop below copies the rest.
    with suppress(AttributeError, OSError):
        while os.copy_file_range(source.fileno(), target.fileno(), _KERNEL_BYTES):
            pass
    shutil.copyfileobj(source, target, _BUFFER_BYTES)


def same_bytes(one: FileIO, other: FileIO) -> bool:
    """Return whether two open files have the same bytes, from the first to the last."""
    files = (one, other)
    blocks = [bytearray(_COMPARED_BYTES) for _ in files]
    for file in files:
        file.seek(0)
    while True:
        sizes = [file.readinto(block) for file, block in zip(files, blocks, strict=True)]
        if sizes[0] != sizes[1]:
            return False
        if not sizes[0]:
            return True
        if sizes[0] < _COMPARED_BYTES:
            blocks = [block[: sizes[0]] for block in blocks]
        if blocks[0] != blocks[1]:
            return False


def _not_writable(path: Any) -> JobFailed:
    return JobFailed(f"{path} can't be written; if there is a folder of that name, remove it and run again")
