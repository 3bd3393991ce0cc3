"""Folders of any Hadoop file system (local, HDFS, an object store), and the small files in them."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from python_jobs.shared.core.paths import absolute
from python_jobs.shared.spark.jvm import hadoop_configuration, jvm

OBJECT_STORES = {"s3", "s3a", "gs", "abfs", "abfss"}
"""Schemes of the file systems where replacing one object is atomic and a rename is a copy."""


class HadoopFolder:
    """A folder, which may be absent; the paths of its files are relative to the folder.

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
        self.root: Any = self.file_system.makeQualified(given)
        """Hadoop's path of the folder."""

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

    def read(self, relative: str) -> bytes:
        """Return the content of an existing small file."""
        stream = self.file_system.open(self.path(relative))
        try:
            return bytes(self._io.toByteArray(stream))
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

    def delete(self, relative: str = "") -> None:
        """Delete a file, or a folder with all its files; do nothing if it is absent."""
        self.file_system.delete(self.path(relative), True)


def literal_path(path: str) -> str:
    """Return a path as Spark's readers take it when it is no pattern.

    Spark's own option for that (``__globPaths__``) reads every file once for each name that looks like a pattern.
    """
    return re.sub(r"([\\{}\[\]*?])", r"\\\1", path)
