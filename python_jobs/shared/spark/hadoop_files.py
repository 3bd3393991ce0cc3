"""Folders of any Hadoop file system (local, HDFS, an object store), and the small files in them."""

from __future__ import annotations

import copy
import errno
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.paths import absolute
from python_jobs.shared.spark.jvm import Getter, hadoop_configuration, jvm, text_reader

OBJECT_STORES = {"s3", "s3a", "gs", "abfs", "abfss"}
"""Schemes of the file systems where replacing one object is atomic and a rename is a copy."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder, as a listing shows it."""

    name: str
    """Last part of its path."""
    is_folder: bool
    """Whether it is a folder."""
    size: int
    """Size in bytes."""
    modified_at: int
    """Modification time in milliseconds since 1970."""


class HadoopFolder:
    """A folder, or a file, which may be absent; the paths of its files are relative to the folder.

    ``raw`` reads and writes local files without Hadoop's checksums. By default Hadoop writes a checksum file
    (``.x.crc``) for each local file, hides it from listings, and refuses a file that was edited later.
    """

    def __init__(self, spark: SparkSession, path: str, *, raw: bool = False) -> None:
        # Each lookup of a package name is a call to the JVM: look up the classes once, not for every file.
        self._path_class: Any = jvm(spark).org.apache.hadoop.fs.Path
        self._io: Any = jvm(spark).org.apache.commons.io.IOUtils
        given: Any = self._path_class(absolute(path))
        self.file_system: Any = given.getFileSystem(hadoop_configuration(spark))
        """Hadoop's FileSystem object, for operations that this class doesn't have."""
        if raw and self.scheme == "file":
            self.file_system = self.file_system.getRawFileSystem()
        self._statuses = _Statuses(spark)
        self._spark = spark
        self._take_root(self.file_system.makeQualified(given))

    def _take_root(self, root: Any) -> None:
        self.root: Any = root
        """Hadoop's path of the folder."""
        self.local_root: Path | None = Path(root.toUri().getPath()) if self.scheme == "file" else None
        """Path of the folder for the operating system; None if the folder is in another file system."""

    def at(self, path: Any) -> HadoopFolder:
        """Return the folder that a Hadoop path of the same file system names."""
        other = copy.copy(self)
        other._take_root(path)
        return other

    @property
    def scheme(self) -> str:
        """Return the scheme of the file system's URIs: ``file``, ``hdfs``, ``s3a``…"""
        return str(self.file_system.getUri().getScheme())

    def path(self, relative: str = "") -> Any:
        """Return Hadoop's path of a file or folder in this folder."""
        # Path(parent, text) would parse a name such as "12:00.json" as a URI.
        path = self.root
        for part in relative.split("/") if relative else ():
            path = self._path_class(path, self._path_class(None, None, part))
        return path

    def exists(self, relative: str = "") -> bool:
        """Return whether the file or folder exists."""
        return bool(self.file_system.exists(self.path(relative)))

    def statuses(self, relative: str = "") -> list[Any]:
        """Return Hadoop's status of each file and folder directly in a folder; an absent folder has none."""
        return list(self.file_system.listStatus(self.path(relative))) if self.exists(relative) else []

    def names(self, relative: str = "") -> list[str]:
        """Return the sorted names of the files and folders directly in a folder; an absent folder has none."""
        return sorted(status.getPath().getName() for status in self.statuses(relative))

    def entry(self, relative: str = "") -> Entry | None:
        """Return the size and time of a file or folder; None if it is absent. A link counts as its target."""
        if self.local_root is not None:
            return _local_entry(self.local_root / relative)
        if not self.exists(relative):
            return None
        status = self.file_system.getFileStatus(self.path(relative))
        return Entry(
            status.getPath().getName(), status.isDirectory(), status.getLen(), status.getModificationTime()
        )

    def entries(self, relative: str = "") -> list[Entry]:
        """Return all files and folders directly in a folder, in no order; an absent folder has none.

        A link counts as its target; a link without a target is left out. The number of calls to the JVM doesn't depend
        on the number of files.
        """
        if self.local_root is not None:
            return _local_entries(self.local_root / relative)
        if not self.exists(relative):
            return []
        statuses = self.file_system.listStatusIterator(self.path(relative))
        return [entry for _, entry in self._statuses.entries(statuses)]

    def files(self, relative: str, is_skipped: Callable[[str], bool]) -> Iterator[tuple[str, Entry]]:
        """Yield path and entry of each file below a folder; files and folders of a skipped name are left out.

        An object store lists all objects below the folder at once, other file systems folder by folder.

        Raises:
            WrongUse: a local link makes a folder lie in itself.
        """
        if self.local_root is None and self.scheme in OBJECT_STORES:
            yield from self._objects(relative, is_skipped)
        else:
            yield from self._below(relative, is_skipped, frozenset())

    def _below(
        self, relative: str, is_skipped: Callable[[str], bool], above: frozenset[str]
    ) -> Iterator[tuple[str, Entry]]:
        above = self.entered(relative, above)
        for entry in self.entries(relative):
            if is_skipped(entry.name):
                continue
            path = f"{relative}/{entry.name}" if relative else entry.name
            if entry.is_folder:
                yield from self._below(path, is_skipped, above)
            else:
                yield path, entry

    def entered(self, relative: str, above: frozenset[str]) -> frozenset[str]:
        """Return the real paths of the local folders on the way down, with this one; ``above`` are those before it.

        Raises:
            WrongUse: a local link makes the folder lie in itself.
        """
        if self.local_root is None:
            return above
        folder = os.path.realpath(self.local_root / relative)
        if folder in above:
            raise WrongUse(
                f"{self.local_root / relative} is a link to {folder}, in which it lies: its files would be there again "
                "and again; remove the link"
            )
        return above | {folder}

    def _objects(self, relative: str, is_skipped: Callable[[str], bool]) -> Iterator[tuple[str, Entry]]:
        if not self.exists(relative):
            return
        below = self.path(relative).toString().rstrip("/") + "/"
        objects = self.file_system.listFiles(self.path(relative), True)
        for path, entry in self._statuses.entries(objects):
            names = path.removeprefix(below).split("/")
            if not any(map(is_skipped, names)):
                yield "/".join([relative, *names] if relative else names), entry

    def read(self, relative: str) -> bytes:
        """Return the content of an existing small file."""
        stream = self.file_system.open(self.path(relative))
        try:
            return bytes(self._io.toByteArray(stream))
        finally:
            stream.close()

    def part(self, start: int, length: int) -> bytes:
        """Return that many bytes of the file that this is, from byte ``start`` on."""
        stream = self.file_system.open(self.root)
        try:
            stream.seek(start)
            return bytes(self._io.toByteArray(stream, length))
        finally:
            stream.close()

    def read_text(self, relative: str) -> str | None:
        """Return the content of a small UTF-8 file; None if it is absent."""
        return self.read(relative).decode() if self.exists(relative) else None

    def write_text(self, relative: str, text: str) -> None:
        """Write or replace a small UTF-8 file; a reader may find it empty for a moment."""
        stream = self.file_system.create(self.path(relative), True)
        try:
            stream.write(bytearray(text, "utf-8"))
        finally:
            stream.close()

    def create_text(self, relative: str, text: str) -> bool:
        """Create a small UTF-8 file atomically; return False, and write nothing, if the file exists.

        If several processes call this at once, exactly one gets True on a local disk, on HDFS and in an object store
        with conditional writes. Not guaranteed in an object store without conditional writes: there the last write
        wins, and an earlier writer also gets True if it reads its file back before the last write.
        """
        if self.scheme in OBJECT_STORES:
            return self._put_once(relative, text)
        staging = f"{relative}.{uuid.uuid4()}.tmp"
        self.write_text(staging, text)
        try:
            if self.scheme != "file":
                return bool(self.file_system.rename(self.path(staging), self.path(relative)))
            # For local files Hadoop's rename would replace an existing file.
            local = [Path(self.path(name).toUri().getPath()) for name in (relative, staging)]
            local[0].hardlink_to(local[1])
        except FileExistsError:
            return False
        finally:
            self.delete(staging)
        return True

    def _put_once(self, relative: str, text: str) -> bool:
        path = self.path(relative)
        if self.exists(relative):
            return False
        builder = self.file_system.createFile(path).overwrite(False).recursive()
        stream = builder.opt("fs.option.create.conditional.overwrite", "true").build()
        stream.write(bytearray(text, "utf-8"))
        try:
            stream.close()
        except Py4JJavaError:
            if not self.exists(relative):
                raise
        return self.read_text(relative) == text

    def copy_file(self, relative: str, to: HadoopFolder) -> None:
        """Copy a file to the same place below another folder, on any file system; an existing file is replaced.

        The copy of a local file has its own checksum file. Hadoop refuses to copy a file that its checksum belies.
        """
        files = jvm(self._spark).org.apache.hadoop.fs.FileUtil
        configuration = hadoop_configuration(self._spark)
        source, target = (self.file_system, self.path(relative)), (to.file_system, to.path(relative))
        files.copy(*source, *target, False, True, configuration)

    def move_to(self, to: HadoopFolder) -> bool:
        """Move the folder to a path of the same file system; return whether it was moved.

        It is one step, except in an object store, where it is a copy of each file.
        """
        return bool(self.file_system.rename(self.root, to.root))

    def delete(self, relative: str = "") -> None:
        """Delete a file, or a folder with all its files; do nothing if it is absent."""
        self.file_system.delete(self.path(relative), True)


def _local_entries(path: Path) -> list[Entry]:
    try:
        with os.scandir(path) as found:
            entries = [_local_entry(entry) for entry in found]
    except FileNotFoundError:
        return []
    return [entry for entry in entries if entry is not None]


def _local_entry(path: Path | os.DirEntry[str]) -> Entry | None:
    try:
        status = path.stat()
    except OSError as failure:
        if failure.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    is_folder = stat.S_ISDIR(status.st_mode)
    return Entry(path.name, is_folder, status.st_size, status.st_mtime_ns // 1_000_000)


class _Statuses:
    """Reader of Hadoop's FileStatus objects: each field of all objects is one call to the JVM."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def entries(self, statuses: Any) -> list[tuple[str, Entry]]:
        """Return path and entry of each status of a Hadoop iterator."""
        lists = jvm(self._spark).org.apache.hadoop.util.functional.RemoteIterators
        found = lists.toList(statuses)
        fields = (read(found) for read in self._readers)
        return [
            (path, Entry(path.rsplit("/", 1)[-1], is_folder == "true", int(size), int(modified_at)))
            for path, is_folder, size, modified_at in zip(*fields, strict=True)
        ]

    @cached_property
    def _readers(self) -> list[Callable[[Any], list[str]]]:
        status, path = "org.apache.hadoop.fs.FileStatus", "org.apache.hadoop.fs.Path"
        path_text = [Getter(status, "getPath", path), Getter(path, "toString", "java.lang.String")]
        fields = [
            path_text,
            [Getter(status, "isDirectory", "boolean")],
            [Getter(status, "getLen", "long")],
            [Getter(status, "getModificationTime", "long")],
        ]
        return [text_reader(self._spark, *getters) for getters in fields]


def literal_path(path: str) -> str:
    """Return a path as Spark's readers take it when it is no pattern.

    Spark's own option for that (``__globPaths__``) reads every file once for each name that looks like a pattern.
    """
    return re.sub(r"([\\{}\[\]*?])", r"\\\1", path)
