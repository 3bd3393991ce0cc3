"""Datasets of raw files that readers find through a pointer, for formats without transactions.

    <dataset>/_current                 name of the version that readers take
    <dataset>/_versions/<version>/…    its files, complete before the pointer names them

A reader resolves the pointer once (:func:`current_folder`) and reads one folder, whose files stay while it
reads. Spark ignores names that begin with ``_``: whoever reads the dataset's own folder gets an error, never two
versions at once.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
from pyspark.sql import SparkSession

from python_jobs.shared.core.failures import JobFailed, WrongUse
from python_jobs.shared.files.file_sets import is_hidden
from python_jobs.shared.spark.hadoop_files import OBJECT_STORES, HadoopFolder

_VERSION = re.compile(r"[A-Za-z0-9][\w.=-]*")
_LOCK_SECONDS = 30


@dataclass(frozen=True, order=True)
class RawFile:
    """One data file of a version, as a listing saw it."""

    path: str
    """Relative to the version's folder."""
    size: int
    """Bytes."""
    modified_at: int
    """Milliseconds since 1970."""


class PointedDataset:
    """A dataset's folder, local or in an object store."""

    def __init__(self, spark: SparkSession, dataset: str) -> None:
        self.dataset = dataset
        self._folder = HadoopFolder(spark, dataset)
        scheme = self._folder.scheme
        if scheme != "file" and scheme not in OBJECT_STORES:
            raise WrongUse(
                f"a pointer on {scheme}: can't be replaced atomically; use a local folder or an object store"
            )
        self._local = Path(self._folder.root.toUri().getPath()) if scheme == "file" else None

    def folder(self, version: str) -> str:
        """Return the folder of a version."""
        return str(self._folder.path(f"_versions/{version}"))

    def current(self) -> str | None:
        """Return the version that the pointer names; None without a pointer."""
        text = self.read_text("_current")
        return None if text is None else text.strip()

    def point_to(self, version: str, replaces: str | None) -> None:
        """Make readers take ``version``, if they still take ``replaces``.

        On a local file system the comparison and the replacement are one step among all who call this; in an
        object store let one program at a time publish.

        Raises:
            JobFailed: the pointer names another version by now, and stays.
        """
        if not _VERSION.fullmatch(version):
            raise WrongUse(f"'{version}' is no name of a version; use letters, digits, '.', '=', '_' and '-'")
        with self._lock():
            current = self.current()
            if current != replaces:
                raise JobFailed(
                    f"{self.dataset} points to {current} by now, not to {replaces}; it stays as it is"
                )
            self.write_text("_current", version + "\n")

    def read_text(self, path: str) -> str | None:
        """Return the content of a small file of the dataset; None if it is absent."""
        return self._folder.read_text(path)

    def write_text(self, path: str, text: str) -> None:
        """Write a small file of the dataset; a reader finds the old content or the new, never a part."""
        if self._local is None:
            self._folder.write_text(path, text)
        else:
            target = self._local / path
            target.parent.mkdir(parents=True, exist_ok=True)
            staging = target.with_name(f".{target.name}.{uuid.uuid4()}")
            staging.write_text(text, encoding="utf-8")
            staging.replace(target)

    def versions(self) -> list[str]:
        """Return the names of all version folders, in order."""
        return self._folder.names("_versions")

    def files(self, version: str) -> list[RawFile]:
        """Return a version's data files, in order; hidden ones (``_SUCCESS``, ``.crc``) are none."""
        folder = f"_versions/{version}"
        return sorted(
            RawFile(path.removeprefix(f"{folder}/"), entry.size, entry.modified_at)
            for path, entry in self._folder.files(folder, is_hidden)
        )

    def delete(self, path: str) -> None:
        """Delete a file or a folder of the dataset."""
        self._folder.delete(path)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        if self._local is None:
            lock: Any = nullcontext()
        else:
            self._local.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self._local / "_current.lock", timeout=_LOCK_SECONDS)
        with lock:
            yield


def current_folder(spark: SparkSession, dataset: str) -> str:
    """Return the folder that holds the dataset now: read all of a query's files from it.

    Raises:
        WrongUse: the dataset has no pointer.
    """
    pointed = PointedDataset(spark, dataset)
    version = pointed.current()
    if version is None:
        raise WrongUse(
            f"{dataset} has no pointer (_current): its readers list the folder itself and would see the old "
            "files and the new; let its producer publish versions first (python_jobs/shared/files/pointers.py)"
        )
    return pointed.folder(version)


def publish(spark: SparkSession, dataset: str, version: str) -> None:
    """Make readers take the files that a producer has written to ``<dataset>/_versions/<version>``."""
    pointed = PointedDataset(spark, dataset)
    if not pointed.files(version):
        raise WrongUse(f"{pointed.folder(version)} holds no file; write the version before publishing it")
    pointed.point_to(version, replaces=pointed.current())
