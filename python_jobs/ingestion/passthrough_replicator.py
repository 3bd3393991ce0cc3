"""Passthrough Replicator, files: make a target folder equal to a source folder, byte for byte.

Problem: two environments need exactly the data of a third. A second load from the original source gives other data. A
job that reads and writes the data changes it: text readers turn CRLF into LF and unpack ``.gz``, JSON readers turn 1.10
into 1.1, the names and the number of files change, and hidden files are left out.

Guarantee: after a run the target has exactly the source's folders and files, also hidden and empty ones, with their
names, bytes and modification times. The job doesn't interpret the content. It writes each file to a staging folder,
reads it back, compares it with the source (between local folders byte by byte, otherwise by CRC-32C) and renames it: a
file is complete or absent under its final name. If a run is killed, the next run continues with the first missing file.
The job only reads the source.

The copy of a Delta table is a Delta table with the same history and time travel. The job lists the log first and copies
it last, so the copy is a version that the source had, also if the source is written meanwhile. A part of a Delta table,
and a table with files in another folder (a shallow clone), are refused, because their copies could not be read. If a
target changes, its ``_SUCCESS`` files are deleted first and copied last.

The source's owner runs the job, with a policy (:mod:`python_jobs.ingestion.replication_policy`) or with ``--source``
and ``--target``. A dataset that the policy tags ``pii`` is refused.

Cost: both folders are listed. New and changed files are read once (between local folders the kernel copies them, and
they are read once more for the comparison), and their copies once. The driver copies ``--threads`` files at a time with
one buffer for each; executors do nothing, and the memory doesn't depend on the size of the files.

    spark-submit python_jobs/ingestion/passthrough_replicator.py --policy replication.yml
    spark-submit python_jobs/ingestion/passthrough_replicator.py --source /production/devices \\
        --target /staging/devices

Source: Data Engineering Design Patterns, chapter 2, Passthrough Replicator.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from python_jobs.ingestion.replica_folders import (
    DELTA_LOG,
    STAGING,
    File,
    Folder,
    Listing,
    replica_folder,
)
from python_jobs.ingestion.replication_policy import Dataset, load_policy, refuse_sensitive
from python_jobs.shared.core.failures import DataRefused, JobFailed, WrongUse, given, require_at_least
from python_jobs.shared.core.paths import absolute
from python_jobs.shared.spark.job import run_job

_ATTEMPTS = 3
_SUCCESS = "_SUCCESS"


@dataclass(frozen=True)
class Parameters:
    """Make target folders equal to source folders, byte for byte."""

    source: str | None = None
    """Folder to copy, as path or URI of any Hadoop file system; or give a policy."""
    target: str | None = None
    """Folder that becomes equal to the source; all other files in it are deleted."""
    policy: str | None = None
    """YAML file with the datasets to push and their targets, instead of source and target."""
    dataset: str | None = None
    """Dataset of the policy to replicate; by default all, in order."""
    compare: Literal["time", "content"] = "time"
    """Rule by which a copy is equal: time compares size and modification time (in an object store the copy must not be
    older than the source), content reads both files and compares their bytes."""
    allow_empty: bool = False
    """Whether a source without files may empty a target with files."""
    threads: int = 4
    """Number of files copied at a time."""

    def __post_init__(self) -> None:
        if (self.policy is None) == (self.source is None or self.target is None):
            raise WrongUse("give either source and target, or a policy")
        if self.policy is not None and (self.source is not None or self.target is not None):
            raise WrongUse("a policy names its sources and targets: leave source and target out")
        if self.dataset is not None and self.policy is None:
            raise WrongUse(
                f"dataset {self.dataset} needs a policy, got none; give policy, or leave dataset out"
            )
        require_at_least(1, threads=self.threads)

    def datasets(self) -> list[Dataset]:
        """Return the datasets to replicate.

        Raises:
            WrongUse: the policy can't be used, or it lacks the dataset.
        """
        if self.policy is None:
            source = given(self.source, "source")
            return [Dataset(source, source, (given(self.target, "target"),))]
        datasets = load_policy(self.policy)
        chosen = [dataset for dataset in datasets if self.dataset in (None, dataset.name)]
        if not chosen:
            known = ", ".join(dataset.name for dataset in datasets)
            raise WrongUse(f"the policy {self.policy} has no dataset {self.dataset}; it has {known}")
        return chosen


@dataclass(frozen=True)
class Changes:
    """Changes that make the target equal to the source."""

    copied: tuple[File, ...]
    """Files to copy, in this order: data, logs of Delta tables, ``_SUCCESS``."""
    deleted: tuple[str, ...]
    """Paths of the files that the source lacks."""
    first_deleted: tuple[str, ...]
    """Paths of ``_SUCCESS`` files, deleted first so that no reader takes a changing target for complete."""


# --- changes between two listings -----------------------------------------------------------------------


def changes_between(source: Listing, target: Listing, there: Iterable[str]) -> Changes:
    """Return the changes that make ``target`` equal to ``source``; ``there`` are the files whose copies are equal."""
    copied = source.files.keys() - set(there)
    deleted = target.files.keys() - source.files.keys()
    first_deleted: set[str] = set()
    if copied or deleted:
        first_deleted = {path for path, file in target.files.items() if file.name == _SUCCESS}
        copied |= {path for path in first_deleted if path in source.files}
        deleted -= first_deleted
    return Changes(
        tuple(sorted((source.files[path] for path in copied), key=_order)),
        tuple(sorted(deleted)),
        tuple(sorted(first_deleted)),
    )


def _order(file: File) -> tuple[int, str]:
    """Return the sort key of a file's copy: data comes before the logs and ``_SUCCESS`` files that readers rely on."""
    return (2 if file.name == _SUCCESS else 1 if file.in_delta_log else 0), file.path


def is_there(source: File, target: File | None, keeps_times: bool) -> bool:
    """Return whether the target's file is a copy of the source's file, judged by size and modification time."""
    if target is None or target.size != source.size:
        return False
    if keeps_times:
        return target.modified_at == source.modified_at
    return target.modified_at >= source.modified_at


# --- the run --------------------------------------------------------------------------------------------


def run(spark: SparkSession, parameters: Parameters) -> dict[str, Any]:
    """Replicate every dataset to every target and return the report.

    Raises:
        DataRefused: a dataset is refused; nothing was copied.
        WrongUse: a source is absent, or source and target overlap; nothing was copied.
        JobFailed: a file could not be copied.
    """
    datasets = parameters.datasets()
    for dataset in datasets:
        refuse_sensitive(dataset)
    pairs = [
        (dataset, _source(spark, dataset.source), replica_folder(spark, target))
        for dataset in datasets
        for target in dataset.targets
    ]
    for _, source, target in pairs:
        _refuse_nested(source, target)
    replicated = [
        {"dataset": dataset.name, "source": source.given, "target": target.given}
        | replicate(source, target, parameters)
        for dataset, source, target in pairs
    ]
    return {"replicated": replicated}


def replicate(source: Folder, target: Folder, parameters: Parameters) -> dict[str, int]:
    """Make ``target`` equal to ``source``; return the numbers of files and bytes.

    Raises:
        DataRefused: the source is empty, the target isn't, and ``allow_empty`` is false.
        JobFailed: a file kept changing or was deleted during the copy, or its copy has other bytes.
    """
    wanted = source.listing()
    present = target.listing() if target.exists() else Listing({}, frozenset())
    if present.files and not wanted.files and not parameters.allow_empty:
        raise DataRefused(
            f"source {source.given} has no file, but target {target.given} has {len(present.files)}; pass "
            "--allow_empty true to delete them"
        )

    with ThreadPoolExecutor(parameters.threads) as threads:
        common = [file for path, file in wanted.files.items() if path in present.files]
        if parameters.compare == "content":
            same = threads.map(lambda file: target.has_bytes_of(source, file.path), common)
        else:
            same = iter([is_there(f, present.files[f.path], target.keeps_times) for f in common])
        changes = changes_between(
            wanted, present, [f.path for f, equal in zip(common, same, strict=True) if equal]
        )

        target.delete(STAGING)
        for path in changes.first_deleted:
            target.delete(path)
        # A file where the source has a folder, and a folder where it has a file, are deleted before the copies. Other
        # files are deleted after the copies, because the target's old Delta log may still name them.
        in_the_way = (present.files.keys() & wanted.folders) | (present.folders & wanted.files.keys())
        for path in sorted(in_the_way):
            target.delete(path)
        target.make_folder("")
        for path in sorted(wanted.folders - present.folders):
            target.make_folder(path)
        for rank in (0, 1, 2):
            batch = [file for file in changes.copied if _order(file)[0] == rank]
            if rank == 0:
                copied = list(threads.map(lambda file: _copy(source, target, file), batch))
            else:  # in the order of their names: a reader must not find version 11 without version 10
                copied += [_copy(source, target, file) for file in batch]
    gone = {*changes.deleted, *(present.folders - wanted.folders)} - wanted.folders - wanted.files.keys()
    for path in sorted(gone):
        if not any(path.startswith(f"{replaced}/") for replaced in in_the_way):
            target.delete(path)
    target.delete(STAGING)
    return {
        "files": len(wanted.files),
        "files_copied": len(copied),
        "bytes_copied": sum(copied),
        "files_skipped": len(wanted.files) - len(copied),
        "files_deleted": len(present.files.keys() - wanted.files.keys()),
    }


def _copy(source: Folder, target: Folder, file: File) -> int:
    """Copy one file and return its number of bytes; a file that changes meanwhile is copied again."""
    staged = f"{STAGING}/{uuid.uuid4()}"
    for _ in range(_ATTEMPTS):
        try:
            size, is_equal = target.take(source, file.path, staged)
        except (Py4JJavaError, OSError) as failure:
            if source.current(file.path) is None:
                raise JobFailed(
                    f"{file.path} was deleted from {source.given} while it was copied; run again"
                ) from failure
            raise
        now = source.current(file.path)
        if now == file and size == file.size:
            break
        if now is None:
            raise JobFailed(f"{file.path} was deleted from {source.given} while it was copied; run again")
        file = now
    else:
        raise JobFailed(f"{file.path} of {source.given} kept changing while it was copied; run again")
    if not is_equal:
        raise JobFailed(
            f"the copy of {file.path} in {target.given} has other bytes than the source file; run again"
        )
    if target.keeps_times:
        target.set_modified_at(staged, file.modified_at)
    target.rename(staged, file.path)
    return size


def _source(spark: SparkSession, path: str) -> Folder:
    """Return the source's folder.

    Raises:
        WrongUse: the folder is absent, or it is a file.
        DataRefused: the folder is a part of a Delta table, or a Delta table with files in another folder.
    """
    folder = replica_folder(spark, path)
    entry = folder.entry()
    if entry is None:
        raise WrongUse(f"there is no source folder {path}")
    if not entry.is_folder:
        raise WrongUse(f"source {path} is a file; pass the folder in which it lies")
    if (table := folder.inside_a_delta_table()) is not None:
        raise DataRefused(
            f"source {path} is a part of the Delta table {table}, and a copy without {DELTA_LOG} could not be "
            "read; replicate the whole table"
        )
    if folder.exists(DELTA_LOG):
        root = folder.root.toUri().getRawPath().rstrip("/") + "/"
        files = spark.read.format("delta").load(absolute(path)).inputFiles()
        if outside := [file for file in files if root not in file]:
            raise DataRefused(
                f"the Delta table {path} has {len(outside)} files outside its folder, such as a shallow clone, and "
                "its copy would still read them there; replicate the table that has the files"
            )
    return folder


def _refuse_nested(source: Folder, target: Folder) -> None:
    one, other = (folder.root.toString().rstrip("/") + "/" for folder in (source, target))
    if one.startswith(other) or other.startswith(one):
        raise WrongUse(f"source {source.given} and target {target.given} must not lie in one another")
    if (table := target.inside_a_delta_table()) is not None:
        raise WrongUse(f"target {target.given} lies inside the Delta table {table}")


if __name__ == "__main__":
    run_job(Parameters, run)
