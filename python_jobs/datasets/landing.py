"""The landing folder: files with names and bytes that don't depend on how the work was split."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.job import JobFailed, WrongUse

LINES_PER_FILE = 100_000
LINES_PER_TASK = 50_000
MOST_FILES_PER_FOLDER = 1_000_000

STAGING = "_staging"
TRUTH = "truth.json"


def files_for(lines: int) -> int:
    """Return how many files hold this many lines."""
    return max(1, -(-lines // LINES_PER_FILE))


def tasks_for(lines: int) -> int:
    """Return how many tasks make this many lines."""
    return max(1, -(-lines // LINES_PER_TASK))


class LandingFolder:
    """The output folder, on whatever file system its path or URI names."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        jvm: Any = spark._jvm
        self._new_path = jvm.org.apache.hadoop.fs.Path
        self._root = self._new_path(path)
        self._files = self._root.getFileSystem(spark._jsc.hadoopConfiguration())
        if self._files.getScheme() == "file":
            # Without Hadoop's checksum files: Spark refuses a file that was edited beside them.
            self._files = self._files.getRawFileSystem()
        self.path = path

    def _child(self, name: str) -> Any:
        return self._new_path(self._root, name)

    def prepare(self, feeds: Sequence[str], overwrite: bool) -> None:
        """Make the folder; an earlier run is removed if it may be, the truth first.

        Raises:
            WrongUse: the folder is not empty and ``overwrite`` is not set, or the path is a file.
            JobFailed: the folder can't be made.
        """
        if self._files.exists(self._root):
            if not self._files.getFileStatus(self._root).isDirectory():
                raise WrongUse(f"--output '{self.path}' is a file, but must be a folder")
            if len(self._files.listStatus(self._root)) and not overwrite:
                raise WrongUse(
                    f"--output '{self.path}' is not empty; pass --overwrite true to replace its feeds"
                )
            for name in (TRUTH, STAGING, *feeds):
                self._files.delete(self._child(name), True)
        elif not self._files.mkdirs(self._root):
            raise JobFailed(f"--output '{self.path}' can't be made")

    def write_feed(
        self, feed: str, lines: DataFrame, tasks: int, folders: Sequence[str], order: Sequence[str]
    ) -> int:
        """Write ``payload`` as ``<feed>/<folder>/<feed>-<file>.json``; return the number of files.

        ``partition`` is the number of the folder. All lines of a file go to one task, which sorts them by
        ``order`` (unique within a file), so that the bytes don't depend on how the work is split.
        """
        staging = self._child(f"{STAGING}/{feed}")
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
            target = self._child(f"{feed}/{folders[partition]}/{feed}-{file:05d}.json")
            self._files.mkdirs(target.getParent())
            if not self._files.rename(part, target):
                raise JobFailed(f"'{target}' can't be written")
        return len(slots)

    def _list(self, folder: Any) -> list[Any]:
        return [status.getPath() for status in self._files.listStatus(folder)]

    def finish(self, truth: Mapping[str, Any]) -> None:
        """Remove the staging folder and write truth.json in one step, as the very last."""
        self._files.delete(self._child(STAGING), True)
        text = json.dumps(truth, ensure_ascii=False, indent=1, sort_keys=True) + "\n"
        aside = self._child(f"_{TRUTH}")
        stream = self._files.create(aside, True)
        stream.write(bytearray(text, "utf-8"))
        stream.close()
        self._files.rename(aside, self._child(TRUTH))
