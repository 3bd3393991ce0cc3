"""A folder of any Hadoop file system (local, HDFS, an object store), and the small files in it."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from python_jobs.shared.core.paths import absolute


class HadoopFolder:
    """A folder, which may be absent; its files are named relative to it.

    ``raw`` gives the bytes as a disk holds them: without it Hadoop writes checksum files (``.x.crc``) beside the local
    ones, hides them, and refuses a file that was edited since.
    """

    def __init__(self, spark: SparkSession, path: str, *, raw: bool = False) -> None:
        jvm: Any = spark._jvm
        # Each name of a package that Python looks up is a call to the JVM: once, not for every file.
        self._path_class: Any = jvm.org.apache.hadoop.fs.Path
        self._io: Any = jvm.org.apache.commons.io.IOUtils
        given: Any = self._path_class(absolute(path))
        self.file_system: Any = given.getFileSystem(spark._jsc.hadoopConfiguration())
        """Hadoop's own, for what is not here."""
        if raw and self.scheme == "file":
            self.file_system = self.file_system.getRawFileSystem()
        self.root: Any = self.file_system.makeQualified(given)
        """Hadoop's path of the folder."""

    @property
    def scheme(self) -> str:
        """What the URIs of its file system begin with: ``file``, ``hdfs``, ``s3a``…"""
        return str(self.file_system.getUri().getScheme())

    def path(self, relative: str = "") -> Any:
        """Return Hadoop's path of a file or folder in it."""
        # Not Path(parent, text), which takes a name such as "12:00.json" for a URI.
        path = self.root
        for part in relative.split("/") if relative else ():
            path = self._path_class(path, self._path_class(None, None, part))
        return path

    def exists(self, relative: str = "") -> bool:
        """Return whether there is such a file or folder."""
        return bool(self.file_system.exists(self.path(relative)))

    def statuses(self, relative: str = "") -> list[Any]:
        """Return Hadoop's status of each file and folder right in a folder; of an absent one, none."""
        return list(self.file_system.listStatus(self.path(relative))) if self.exists(relative) else []

    def names(self, relative: str = "") -> list[str]:
        """Return the names of the files and folders right in a folder, in order; of an absent one, none."""
        return sorted(status.getPath().getName() for status in self.statuses(relative))

    def read(self, relative: str) -> bytes:
        """Return the content of a small file that is there."""
        stream = self.file_system.open(self.path(relative))
        try:
            return bytes(self._io.toByteArray(stream))
        finally:
            stream.close()

    def read_text(self, relative: str) -> str | None:
        """Return the content of a small UTF-8 file; None if it is absent."""
        return self.read(relative).decode() if self.exists(relative) else None

    def write_text(self, relative: str, text: str) -> None:
        """Write or replace a small UTF-8 file; it is empty for a moment."""
        stream = self.file_system.create(self.path(relative), True)
        try:
            stream.write(bytearray(text, "utf-8"))
        finally:
            stream.close()

    def delete(self, relative: str = "") -> None:
        """Delete a file or a folder with all in it, if it is there."""
        self.file_system.delete(self.path(relative), True)
