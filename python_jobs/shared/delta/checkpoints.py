"""Owners of streaming checkpoints: a checkpoint belongs to one query and is refused to all others.

Spark stores a query's progress in its checkpoint, but not the query's identity. Another job that starts on the same
folder skips data or fails with a long trace. Therefore the first run writes its contract into the folder, next to
Spark's files, and later runs compare their contract with it.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence

from pyspark.sql import SparkSession

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.delta.commits import transaction_versions
from python_jobs.shared.delta.tables import table_exists
from python_jobs.shared.spark.hadoop_files import HadoopFolder

FORMAT_VERSION = 1
_FILE = "owner.json"


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
            already written to a table in ``appends_to`` under another checkpoint.
    """
    folder = HadoopFolder(spark, checkpoint)
    if owner := contract_of(spark, checkpoint):
        different = [f"another {role}" for role in contract if owner.get(role) != contract[role]]
        if different:
            raise WrongUse(
                f"the checkpoint '{checkpoint}' was made for {' and '.join(different)}; "
                "give this query another checkpoint folder"
            )
        return owner["writer_id"]
    if folder.exists("metadata"):
        raise WrongUse(
            f"the checkpoint '{checkpoint}' belongs to a query of another job; "
            "give this one another checkpoint folder"
        )
    query_id = hashlib.sha256(json_text(contract, sort_keys=True).encode()).hexdigest()[:16]
    for table in () if start_over else appends_to:
        writers = transaction_versions(spark, table) if table_exists(spark, table) else {}
        if any(writer_id.startswith(query_id) for writer_id in writers):
            raise WrongUse(
                f"the checkpoint '{checkpoint}' is new, but this query has already written to the table '{table}' "
                "under another checkpoint: a run would append the whole source again; give that checkpoint, or "
                "allow the second append with --start_over true"
            )
    writer_id = f"{query_id}-{uuid.uuid4()}"
    claimed = {"format_version": FORMAT_VERSION, "writer_id": writer_id, **contract}
    if not folder.create_text(_FILE, json_text(claimed)):
        raise WrongUse(f"the checkpoint '{checkpoint}' was claimed by another run at this moment; run again")
    return writer_id


def contract_of(spark: SparkSession, checkpoint: str) -> dict[str, str]:
    """Return the contract with which a query claimed the checkpoint; it is empty if none did."""
    claimed = HadoopFolder(spark, checkpoint).read_text(_FILE)
    return {role: str(value) for role, value in json.loads(claimed or "{}").items()}


def has_progress(spark: SparkSession, checkpoint: str) -> bool:
    """Return whether a query has started a batch with ``checkpoint``."""
    return HadoopFolder(spark, checkpoint).exists("offsets")


def batch_watermark(spark: SparkSession, checkpoint: str, batch_id: int) -> int:
    """Return the watermark of a batch that has started, in microseconds; 0 before the first event time.

    Spark writes it before the batch runs. Joins and aggregates of the batch after it drop the rows up to it.
    """
    offsets = HadoopFolder(spark, checkpoint).read_text(f"offsets/{batch_id}")
    return int(json.loads(offsets.splitlines()[1])["batchWatermarkMs"]) * 1_000 if offsets else 0
