"""Who a streaming checkpoint belongs to.

Spark keeps a query's progress in its checkpoint but not whose progress it is: another job started on the
same folder skips data or dies with a long trace. The first run writes its contract beside Spark's own
files, later runs compare.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping

from pyspark.sql import SparkSession

from python_jobs.hadoop_files import HadoopFolder
from python_jobs.job import WrongUse

FORMAT_VERSION = 1
_FILE = "owner.json"


def claim(spark: SparkSession, checkpoint: str, contract: Mapping[str, str]) -> str:
    """Claim ``checkpoint`` for the query that ``contract`` describes; return its writer id.

    ``contract`` maps roles to identities: the job to its name, a table to its id. An id survives a move of
    the table and not its replacement, under which the progress would silently skip rows.

    The writer id lives as long as the checkpoint. Use it as Delta's ``txnAppId``: batch ids start again at
    0 in a new checkpoint, and a fixed id would silently skip its batches.

    Raises:
        WrongUse: the checkpoint holds the progress of another query.
    """
    folder = HadoopFolder(spark, checkpoint)
    if claimed := folder.read_text(_FILE):
        owner = json.loads(claimed)
        different = [f"another {role}" for role in contract if owner.get(role) != contract[role]]
        if different:
            raise WrongUse(
                f"the checkpoint '{checkpoint}' was made for {' and '.join(different)}; "
                "give this query a checkpoint of its own"
            )
        return str(owner["writer_id"])
    if folder.exists("metadata"):
        raise WrongUse(
            f"the checkpoint '{checkpoint}' belongs to a query of another job; "
            "give this one a checkpoint of its own"
        )
    owner = {"format_version": FORMAT_VERSION, "writer_id": str(uuid.uuid4()), **contract}
    # Written aside and renamed, so that a killed run leaves no half-written contract.
    aside = f".{_FILE}.{owner['writer_id']}"
    folder.write_text(aside, json.dumps(owner))
    if not folder.file_system.rename(folder.path(aside), folder.path(_FILE)):
        raise WrongUse(f"the checkpoint '{checkpoint}' was claimed by another run at this moment; run again")
    return str(owner["writer_id"])


def has_progress(spark: SparkSession, checkpoint: str) -> bool:
    """Return whether a query has begun a batch under ``checkpoint``."""
    return HadoopFolder(spark, checkpoint).exists("offsets")
