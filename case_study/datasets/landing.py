"""The landing folder: files with names and bytes that don't depend on the number of Spark's tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import JobFailed, WrongUse
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.spark.hadoop_files import HadoopFolder

LINES_PER_FILE = 100_000
LINES_PER_TASK = 50_000
MOST_FILES_PER_FOLDER = 1_000_000

STAGING = "_staging"
TRUTH = "truth.json"


def files_for(lines: int) -> int:
    """Return the number of files for this number of lines."""
    return max(1, -(-lines // LINES_PER_FILE))


def tasks_for(lines: int) -> int:
    """Return the number of tasks for this number of lines."""
    return max(1, -(-lines // LINES_PER_TASK))


class LandingFolder:
    """The output folder, in the file system of its path or URI."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        # Without raw, Hadoop would write checksums, and Spark would refuse a file that a user has edited.
        self._folder = HadoopFolder(spark, path, raw=True)
        self._files = self._folder.file_system
        self.path = path

    def prepare(self, feeds: Sequence[str], overwrite: bool) -> None:
        """Create the folder; with ``overwrite`` delete the files of an earlier run, the truth first.

        Raises:
            WrongUse: the folder is not empty and ``overwrite`` is not set, or the path is a file.
            JobFailed: the folder can't be created.
        """
        if self._folder.exists():
            if not self._files.getFileStatus(self._folder.root).isDirectory():
                raise WrongUse(f"--output '{self.path}' is a file, but must be a folder")
            if self._folder.names() and not overwrite:
                raise WrongUse(
                    f"--output '{self.path}' is not empty; pass --overwrite true to replace its feeds"
                )
            for name in (TRUTH, STAGING, *feeds):
                self._folder.delete(name)
        elif not self._files.mkdirs(self._folder.root):
            raise JobFailed(f"--output '{self.path}' can't be created")

    def write_feed(
        self, feed: str, lines: DataFrame, tasks: int, folders: Sequence[str], order: Sequence[str]
    ) -> int:
        """Write ``payload`` as ``<feed>/<folder>/<feed>-<file>.json``; return the number of files.

        ``partition`` is the number of the folder. All lines of a file go to one task, which sorts them by
        ``order`` (unique within a file), so that the bytes don't depend on the number of tasks.
        """
        staging = self._folder.path(f"{STAGING}/{feed}")
        slot = F.col("partition").cast("bigint") * MOST_FILES_PER_FOLDER + F.col("file")
        (
            lines.withColumn("slot", slot)
            .repartition(tasks, "slot")
            .sortWithinPartitions("slot", *order)
            .select("slot", "payload")
            .write.partitionBy("slot")
            .text(str(staging))
        )
        slots = [path for path in self._list(staging) if path.getName().startswith("slot=")]
        for path in slots:
            partition, file = divmod(int(path.getName().removeprefix("slot=")), MOST_FILES_PER_FOLDER)
            (part,) = (child for child in self._list(path) if child.getName().startswith("part-"))
            target = self._folder.path(f"{feed}/{folders[partition]}/{feed}-{file:05d}.json")
            self._files.mkdirs(target.getParent())
            if not self._files.rename(part, target):
                raise JobFailed(f"'{target}' can't be written")
        return len(slots)

    def _list(self, folder: Any) -> list[Any]:
        return [status.getPath() for status in self._files.listStatus(folder)]

    def finish(self, truth: Mapping[str, Any]) -> None:
        """Delete the staging folder and write truth.json by a rename, as the last step."""
        self._folder.delete(STAGING)
        text = json_text(truth, ensure_ascii=False, indent=1, sort_keys=True) + "\n"
        self._folder.write_text(staged := f"_{TRUTH}", text)
        self._files.rename(self._folder.path(staged), self._folder.path(TRUTH))
