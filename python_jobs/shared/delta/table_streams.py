"""Declaration of a streaming job over a Delta table: the contract of its checkpoint and the options of its query.

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
    """A streaming query over an append-only Delta table."""

    job: str
    """Name of the job in the checkpoint's contract."""
    source: str
    """Existing Delta table, by path or catalog name."""
    writes: Mapping[str, str]
    """Existing Delta tables that the job writes, by role; with another table the checkpoint is refused."""
    appends_to: Sequence[str]
    """Tables that a new checkpoint would fill again; see :func:`python_jobs.shared.delta.checkpoints.claim`."""
    meaning: Mapping[str, str] = field(default_factory=dict)
    """Further parts of the contract: other destinations, and parameters that change the state or the results."""
    checkpoint: str
    """Folder of the stream's progress."""
    start_over: bool = False
    """Whether a new checkpoint may append the whole source to ``appends_to`` again."""
    trigger: str | None = None
    """Interval of the batches; None: process the available data and stop."""
    max_files_per_trigger: int | None = None
    """Maximum number of source files in one batch; None: Delta's default of 1000."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further options of Delta's reader."""
    transform: Callable[[DataFrame], DataFrame] = lambda rows: rows
    """Function applied to the stream before its batches reach the batch function, for example a watermark."""
    output_mode: OutputMode = "append"
    """``append``: the query passes on final results; ``update``: it passes on each change of a result."""

    def claim(self, spark: SparkSession) -> str:
        """Claim the checkpoint and return the writer id, the ``txnAppId`` of all batches.

        Raises:
            WrongUse: the checkpoint belongs to another query. Or the checkpoint is new, and the query has already
                written to a table in ``appends_to``.
        """
        tables = {"source": self.source, **self.writes}
        contract = {"job": self.job} | {role: table_id(spark, table) for role, table in tables.items()}
        return claim(spark, self.checkpoint, {**contract, **self.meaning}, self.appends_to, self.start_over)

    def start(self, spark: SparkSession, function: BatchFunction) -> StreamingQuery:
        """Start the query, which passes its batches to ``function``."""
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
