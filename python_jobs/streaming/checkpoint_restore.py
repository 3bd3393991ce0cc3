"""Restore of a checkpoint to an earlier batch: into a new folder, or in place after a back-up.

Into a new folder: the files are copied into a folder beside it, which gets its name when it is complete. In place: the
whole checkpoint is copied in the same way; then the files of later batches are deleted. While they are, a file in the
checkpoint keeps our queries from starting, and the next restore continues.

A restored checkpoint is another lineage of batches: batch 5 has other rows than batch 5 had before. Delta's streaming
sink recognizes a batch by the query's id and the batch's number, and our jobs by their writer id. So it gets a new
query id, and its next run a new writer id.

Sources: Data Engineering Design Patterns, chapter 11, Streaming Reprocessor.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import uuid
from collections.abc import Sequence

from pyspark.sql import SparkSession

from python_jobs.shared.core.failures import JobFailed, NotReady, WrongUse
from python_jobs.shared.core.intervals import from_micros
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.delta.checkpoints import (
    BEING_RESTORED,
    OWNER,
    RESTORED,
    Restored,
    contract_of,
    inherited_contract,
    restored,
    write_restored,
)
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.streaming.checkpoint_versions import QUERY, CheckpointVersions

_OPERATOR_METADATA = re.compile(r"state/\d+/_metadata/v2/\d+")
_STATE_SCHEMA = re.compile(r"/state/\d+/_stateSchema/.*")


def require_stopped(
    spark: SparkSession, versions: CheckpointVersions, now: dt.datetime, quiet_seconds: int
) -> None:
    """Refuse a checkpoint whose query runs, as far as one can see.

    A query of this session is known. A query of another process has no lock: it is noticed by its files.

    Raises:
        NotReady: the query runs in this session, or a file is younger than ``quiet_seconds``.
    """
    query = json.loads(versions.folder.read(QUERY))["id"]
    if query in {str(active.id) for active in spark.streams.active}:
        raise NotReady(f"the query of '{versions.checkpoint}' is running: stop it first")
    path, newest = max(versions.files.items(), key=lambda item: item[1].modified_at)
    age = now - from_micros(newest.modified_at * 1_000)
    if age < dt.timedelta(seconds=quiet_seconds):
        raise NotReady(
            f"'{versions.checkpoint}' has a file of {age.total_seconds():.0f} seconds ago, {path}: stop its query and "
            f"wait {quiet_seconds} seconds, or run with --quiet_seconds 0 when you know that it is stopped"
        )


def is_restored(folder: HadoopFolder, source: str, batch: int) -> bool:
    """Return whether the folder was restored from this source to this batch."""
    before = restored(folder)
    return before is not None and (before.source, before.batch_id) == (source, batch)


def restore_into(
    spark: SparkSession, versions: CheckpointVersions, batch: int, files: Sequence[str], to: str, now: str
) -> None:
    """Copy ``files``, which a query needs to continue behind the batch, into a new folder, or nothing.

    Raises:
        WrongUse: the folder exists.
        NotReady: the query has written to the checkpoint meanwhile.
    """
    target = HadoopFolder(spark, to)
    with_lineage = _restored(spark, versions, batch, str(versions.folder.root), now)
    staging = _copy(versions, files, target)
    try:
        for path in files:
            if _OPERATOR_METADATA.fullmatch(path):
                staging.write_text(path, _moved_schemas(staging.read(path).decode(), str(target.root)))
        _begin_lineage(staging, with_lineage)
        _publish(versions, staging, target)
    finally:
        staging.delete()


def restore_in_place(
    spark: SparkSession, versions: CheckpointVersions, batch: int, backup: str, now: str
) -> None:
    """Copy the whole checkpoint, then delete the files of later batches; continue a restore that was interrupted.

    Raises:
        WrongUse: the folder of the back-up exists, or another restore was interrupted.
        NotReady: the query has written to the checkpoint meanwhile.
    """
    folder, target = versions.folder, HadoopFolder(spark, backup)
    interrupted = restored(folder, BEING_RESTORED)
    if interrupted is None:
        interrupted = _restored(spark, versions, batch, str(target.root), now)
        staging = _copy(versions, list(versions.files), target)
        try:
            _publish(versions, staging, target)
        finally:
            staging.delete()
        write_restored(folder, interrupted, BEING_RESTORED)
    elif (interrupted.source, interrupted.batch_id) != (str(target.root), batch):
        raise WrongUse(
            f"a restore of '{versions.checkpoint}' to batch {interrupted.batch_id} with the back-up "
            f"'{interrupted.source}' was interrupted: run it again first"
        )
    for path in versions.newer(batch):
        folder.delete(path)
    folder.delete(OWNER)
    _begin_lineage(folder, interrupted)
    folder.delete(BEING_RESTORED)


def _restored(
    spark: SparkSession, versions: CheckpointVersions, batch: int, source: str, now: str
) -> Restored:
    before = restored(versions.folder)
    reached = [*before.reached] if before else []
    reached.append(list(versions.offsets(versions.begun[-1]).sources))
    contract = inherited_contract(contract_of(spark, versions.checkpoint))
    return Restored(source, batch, now, contract, reached)


def _copy(versions: CheckpointVersions, files: Sequence[str], target: HadoopFolder) -> HadoopFolder:
    """Copy files into a new folder beside the target and return it."""
    if target.exists():
        raise WrongUse(f"'{target.root}' exists already; a restore needs a folder of its own")
    if f"{target.root}/".startswith(f"{versions.folder.root}/"):
        raise WrongUse(
            f"'{target.root}' lies in the checkpoint itself; a restore needs a folder outside of it"
        )
    name = f".{target.root.getName()}.{uuid.uuid4()}.restoring"
    staging = target.at(target.at(target.root.getParent()).path(name))
    try:
        for path in files:
            versions.folder.copy_file(path, staging)
    except BaseException:
        staging.delete()
        raise
    return staging


def _publish(versions: CheckpointVersions, staging: HadoopFolder, target: HadoopFolder) -> None:
    """Give the complete copy its name, if the query hasn't gone on meanwhile."""
    if versions.has_changed():
        raise NotReady(f"the query of '{versions.checkpoint}' has gone on meanwhile: stop it first")
    if target.exists() or not staging.move_to(target):
        raise JobFailed(f"'{target.root}' was created meanwhile, so the copy was removed; run again")


def _begin_lineage(folder: HadoopFolder, content: Restored) -> None:
    write_restored(folder, content, RESTORED)
    folder.write_text(QUERY, json_text({"id": str(uuid.uuid4())}))


def _moved_schemas(text: str, root: str) -> str:
    """Return an operator's metadata with the new paths of its state's schemas, which Spark writes as absolute ones."""
    version, _, body = text.partition("\n")
    metadata = json.loads(body)
    for store in metadata["stateStoreInfo"]:
        paths = store.get("stateSchemaFilePaths") or []
        found = [_STATE_SCHEMA.search(path) for path in paths]
        store["stateSchemaFilePaths"] = [
            root + match[0] if match else path for match, path in zip(found, paths, strict=True)
        ]
    return f"{version}\n{json_text(metadata)}"
