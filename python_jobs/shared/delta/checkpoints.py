"""Who a streaming checkpoint belongs to.

Spark keeps a query's progress in its checkpoint but not whose progress it is: another job started on the
same folder skips data or dies with a long trace. The first run writes its contract beside Spark's own
files, later runs compare.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence

from pyspark.sql import SparkSession

from python_jobs.shared.core.failures import WrongUse
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

    ``contract`` maps roles to identities: the job to its name, a table to its id. An id survives a move of
    the table and not its replacement, under which the progress would silently skip rows.

    The writer id lives as long as the checkpoint. Use it as Delta's ``txnAppId``: batch ids start again at
    0 in a new checkpoint, and a fixed id would silently skip its batches. It begins with the query's own id, by which a
    table that the query ``appends_to`` tells that an earlier checkpoint has filled it: a new one, made because that was
    lost, would append the whole source again. Only ``start_over`` allows that.

    Raises:
        WrongUse: the checkpoint holds the progress of another query; or it is new, and a table isn't.
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
    query_id = hashlib.sha256(json.dumps(contract, sort_keys=True).encode()).hexdigest()[:16]
    for table in () if start_over else appends_to:
        writers = transaction_versions(spark, table) if table_exists(spark, table) else {}
        if any(writer_id.startswith(query_id) for writer_id in writers):
            raise WrongUse(
                f"the checkpoint '{checkpoint}' is new, and the table '{table}' holds what this query wrote under "
                "another: the whole source would be appended again; give that checkpoint, or allow it with "
                "--start_over true"
            )
    owner = {"format_version": FORMAT_VERSION, "writer_id": f"{query_id}-{uuid.uuid4()}", **contract}
    if not folder.create_text(_FILE, json.dumps(owner)):
        raise WrongUse(f"the checkpoint '{checkpoint}' was claimed by another run at this moment; run again")
    return str(owner["writer_id"])


def has_progress(spark: SparkSession, checkpoint: str) -> bool:
    """Return whether a query has begun a batch under ``checkpoint``."""
    return HadoopFolder(spark, checkpoint).exists("offsets")
