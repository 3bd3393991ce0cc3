"""A streaming job over a Delta table, declared: whose progress its checkpoint holds, and how the query is run.

stream = TableStream(job="wrapper", source=…, writes={"target": target}, appends_to=[target], checkpoint=…)
query = stream.start(spark, EnvelopeWriter(stream.claim(spark)))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.shared.delta.checkpoints import claim
from python_jobs.shared.delta.streams import BatchFunction, OutputMode, start_stream
from python_jobs.shared.delta.tables import table_id


@dataclass(frozen=True, kw_only=True)
class TableStream:
    """A query over a Delta table that only grows."""

    job: str
    """Name of the job in the checkpoint's contract."""
    source: str
    """Delta table, by path or catalog name; it exists."""
    writes: Mapping[str, str]
    """Role to existing Delta table: another table in its place is another query."""
    appends_to: Sequence[str]
    """Tables that a second first run would fill again; see :func:`python_jobs.shared.delta.checkpoints.claim`."""
    meaning: Mapping[str, str] = field(default_factory=dict)
    """Further parts of the contract: other destinations, and what the state and the results mean."""
    checkpoint: str
    """Folder of the stream's progress."""
    start_over: bool = False
    """Whether a new checkpoint may fill ``appends_to`` again."""
    trigger: str | None = None
    """Pace of the batches; None: what is there, then stop."""
    max_files_per_trigger: int | None = None
    """Most source files in one batch."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further options of Delta's reader."""
    transform: Callable[[DataFrame], DataFrame] = lambda rows: rows
    """What the stream does before its batches reach the batch function: watermarks and other work with state."""
    output_mode: OutputMode = "append"
    """When the stream passes on a result that may still change."""

    def claim(self, spark: SparkSession) -> str:
        """Claim the checkpoint; return the writer id, Delta's ``txnAppId`` of all batches.

        Raises:
            WrongUse: the checkpoint belongs to another query, or it is new and a table isn't.
        """
        tables = {"source": self.source, **self.writes}
        contract = {"job": self.job} | {role: table_id(spark, table) for role, table in tables.items()}
        return claim(spark, self.checkpoint, {**contract, **self.meaning}, self.appends_to, self.start_over)

    def start(self, spark: SparkSession, function: BatchFunction) -> StreamingQuery:
        """Start the query with the function of its batches."""
        return start_stream(
            spark,
            self.source,
            function,
            self.checkpoint,
            self.trigger,
            self.max_files_per_trigger,
            self.options,
            self.transform,
            self.output_mode,
        )
