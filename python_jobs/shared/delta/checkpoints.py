"""Owners of streaming checkpoints: a checkpoint belongs to one query and is refused to all others.

Spark stores a query's progress in its checkpoint, but not the query's identity. Another job that starts on the same
folder skips data or fails with a long trace. Therefore the first run writes its contract into the folder, next to
Spark's files, and later runs compare their contract with it.

A checkpoint that was restored to an earlier batch (Streaming Reprocessor) has the contract without a writer id: its
batches have the numbers of batches that are already written, but other rows, so its next run gets a writer id of its
own.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pyspark.sql import SparkSession

from python_jobs.shared.core.failures import NotReady, WrongUse
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.delta.commits import transaction_versions
from python_jobs.shared.delta.tables import table_exists
from python_jobs.shared.spark.hadoop_files import HadoopFolder

FORMAT_VERSION = 1
_WRITER_ID = "writer_id"
OWNER = "owner.json"
RESTORED = "restored.json"
BEING_RESTORED = "being_restored.json"
"""File in a checkpoint whose newer batches are being deleted: until it is gone no query of ours starts."""


@dataclass(frozen=True)
class Restored:
    """What a restored checkpoint tells about itself."""

    source: str
    """Folder of the checkpoint that it was restored from, or of the back-up."""
    batch_id: int
    """Last batch that was kept."""
    restored_at: str
    """Time of the restore (ISO 8601)."""
    contract: dict[str, str]
    """Contract of the query, without a writer id; empty if no query of ours has claimed the checkpoint."""
    reached: list[list[Any]]
    """Where queries have ended that a restore has rewound: for each of them its position in each source."""
    format_version: int = FORMAT_VERSION
    """Version of this file."""


def restored(folder: HadoopFolder, name: str = RESTORED) -> Restored | None:
    """Return what a file of a restored checkpoint tells; None if the folder has no such file."""
    text = folder.read_text(name)
    return Restored(**json.loads(text)) if text else None


def write_restored(folder: HadoopFolder, content: Restored, name: str = RESTORED) -> None:
    """Write or replace such a file."""
    folder.write_text(name, json_text(asdict(content)))


def claim(
    spark: SparkSession,
    checkpoint: str,
    contract: Mapping[str, str],
    appends_to: Sequence[str] = (),
    start_over: bool = False,
) -> str:
    """Claim ``checkpoint`` for the query that ``contract`` describes; return its writer id.

    ``contract`` maps roles to identities: the job to its name, a table to its id. A moved table keeps its id. A
    recreated table has a new id: with the old progress, the query would silently skip its rows.

    The writer id lives as long as the checkpoint. Use it as Delta's ``txnAppId``. A fixed id does not work: batch ids
    start at 0 in a new checkpoint, and Delta would silently skip those batches. The writer id begins with the query's
    id. So the log of a table in ``appends_to`` shows whether an earlier checkpoint of the query has filled the table.
    If it has, a new checkpoint would append the whole source again; only ``start_over`` allows this.

    Raises:
        WrongUse: the checkpoint holds the progress of another query. Or the checkpoint is new, and the query has
            already written to a table in ``appends_to`` under another checkpoint; likewise if it was restored.
        NotReady: a restore of the checkpoint isn't complete.
    """
    folder = HadoopFolder(spark, checkpoint)
    if folder.exists(BEING_RESTORED):
        raise NotReady(
            f"the checkpoint '{checkpoint}' is being restored, or its restore was interrupted: run the restore again"
        )
    if owner := contract_of(spark, checkpoint):
        different = [f"another {role}" for role in contract if owner.get(role) != contract[role]]
        if different:
            raise WrongUse(
                f"the checkpoint '{checkpoint}' was made for {' and '.join(different)}; "
                "give this query another checkpoint folder"
            )
        if writer_id := owner.get(_WRITER_ID):
            return writer_id
    elif folder.exists("metadata"):
        raise WrongUse(
            f"the checkpoint '{checkpoint}' belongs to a query of another job; "
            "give this one another checkpoint folder"
        )
    query_id = hashlib.sha256(json_text(contract, sort_keys=True).encode()).hexdigest()[:16]
    before = restored(folder)
    kept = before.batch_id if before else -1
    for table in () if start_over else appends_to:
        writers = transaction_versions(spark, table) if table_exists(spark, table) else {}
        if any(writer.startswith(query_id) and batch > kept for writer, batch in writers.items()):
            raise WrongUse(_would_append_again(checkpoint, table, before))
    writer_id = f"{query_id}-{uuid.uuid4()}"
    claimed = {"format_version": FORMAT_VERSION, _WRITER_ID: writer_id, **contract}
    if not folder.create_text(OWNER, json_text(claimed)):
        raise WrongUse(f"the checkpoint '{checkpoint}' was claimed by another run at this moment; run again")
    return writer_id


def _would_append_again(checkpoint: str, table: str, before: Restored | None) -> str:
    if before:
        return (
            f"the checkpoint '{checkpoint}' was restored to batch {before.batch_id}, and this query has appended later "
            f"batches to the table '{table}': a run would append their rows again; allow that with --start_over true"
        )
    return (
        f"the checkpoint '{checkpoint}' is new, but this query has already written to the table '{table}' "
        "under another checkpoint: a run would append the whole source again; give that checkpoint, or "
        "allow the second append with --start_over true"
    )


def contract_of(spark: SparkSession, checkpoint: str) -> dict[str, str]:
    """Return the contract with which a query claimed the checkpoint; it is empty if none did.

    The contract of a restored checkpoint has no ``writer_id`` until its first run.
    """
    folder = HadoopFolder(spark, checkpoint)
    if claimed := folder.read_text(OWNER):
        return {role: str(value) for role, value in json.loads(claimed).items()}
    before = restored(folder)
    return before.contract if before else {}


def inherited_contract(contract: Mapping[str, str]) -> dict[str, str]:
    """Return the contract that a restored checkpoint inherits from one with this contract."""
    return {role: value for role, value in contract.items() if role not in (_WRITER_ID, "format_version")}


def has_progress(spark: SparkSession, checkpoint: str) -> bool:
    """Return whether a query has started a batch with ``checkpoint``.

    A query that died before its first batch leaves an empty folder ``offsets``.
    """
    return any(name.isdecimal() for name in HadoopFolder(spark, checkpoint).names("offsets"))


def batch_watermark(spark: SparkSession, checkpoint: str, batch_id: int) -> int:
    """Return the watermark of a batch that has started, in microseconds; 0 before the first event time.

    Spark writes it before the batch runs. Joins and aggregates of the batch after it drop the rows up to it.
    """
    offsets = HadoopFolder(spark, checkpoint).read_text(f"offsets/{batch_id}")
    return int(json.loads(offsets.splitlines()[1])["batchWatermarkMs"]) * 1_000 if offsets else 0
