"""Declaration of a streaming job over Kafka topics: the contract of its checkpoint, where it begins, its query.

stream = TopicStream(job="local_aggregator", topics=[topic], settings=…, appends_to=[dead_letter], checkpoint=…)
topics = stream.describe(spark)
query = stream.start(spark, topics, GroupWriter(topics, stream.claim(spark, topics)))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.shared.delta.checkpoints import claim, has_progress
from python_jobs.shared.delta.commits import is_committed
from python_jobs.shared.delta.streams import BatchFunction, append, start_query
from python_jobs.shared.delta.tables import table_id
from python_jobs.shared.kafka.topics import StreamedTopics, read_topics, source_failures

StartingOffsets = Literal["earliest", "latest"]
Offsets = Mapping[tuple[str, int], int]
# Spark's numbers for "from the first offset" and "from the end" of one partition.
_STARTS: dict[StartingOffsets, int] = {"earliest": -2, "latest": -1}


@dataclass(frozen=True, kw_only=True)
class TopicStream:
    """A streaming query over Kafka topics, which are known by their ids."""

    job: str
    """Name of the job in the checkpoint's contract."""
    topics: Sequence[str]
    """Topics that the job reads."""
    target_topics: Sequence[str] = ()
    """Topics that the job writes; with other ones the checkpoint is refused."""
    settings: Mapping[str, str]
    """Settings of Kafka's Java client."""
    way_out: str
    """What the user can do when a topic was deleted and recreated, the end of the sentence."""
    writes: Mapping[str, str] = field(default_factory=dict)
    """Delta tables that the job writes, by role; with another table the checkpoint is refused."""
    appends_to: Sequence[str]
    """Tables that a new checkpoint would fill again; see :func:`python_jobs.shared.delta.checkpoints.claim`."""
    meaning: Mapping[str, str] = field(default_factory=dict)
    """Further parts of the contract: other destinations, and parameters that change the state or the results."""
    checkpoint: str
    """Folder of the stream's progress."""
    start_over: bool = False
    """Whether a new checkpoint may append the whole source to ``appends_to`` again."""
    starting_offsets: StartingOffsets = "earliest"
    """Where a new checkpoint begins in the partitions for which :meth:`read` gets no offset."""
    trigger: str | None = None
    """Interval of the batches; None: process the available data and stop."""
    max_records_per_trigger: int | None = None
    """Maximum number of records in one batch; None: all available records."""
    fail_on_data_loss: bool = True
    """Whether the query ends if records expired before they were read."""
    transform: Callable[[DataFrame], DataFrame] = lambda records: records
    """Function applied to Kafka's records before their batches reach the batch function."""

    def describe(self, spark: SparkSession) -> StreamedTopics:
        """Return the topics as they are now.

        Raises:
            NotReady: no broker answers, or a topic doesn't exist.
            JobFailed: the broker refuses the client.
            DataRefused: a topic was deleted and recreated since the checkpoint was claimed.
        """
        topics = StreamedTopics(spark, [*self.topics, *self.target_topics], self.settings, self.way_out)
        topics.require_checkpoint(self.checkpoint)
        return topics

    def claim(self, spark: SparkSession, topics: StreamedTopics) -> str:
        """Claim the checkpoint and return the writer id, the ``txnAppId`` of all batches, which names the topics.

        The tables of ``writes`` must exist.

        Raises:
            WrongUse: the checkpoint belongs to another query. Or the checkpoint is new, and the query has already
                written to a table in ``appends_to``.
        """
        tables = {role: table_id(spark, table) for role, table in self.writes.items()}
        contract = {"job": self.job, **tables, **self.meaning, **topics.contract}
        return topics.writer(claim(spark, self.checkpoint, contract, self.appends_to, self.start_over))

    def read(
        self, spark: SparkSession, topics: StreamedTopics, first_offsets: Callable[[], Offsets] = dict
    ) -> DataFrame:
        """Return the stream of Kafka's records, with their headers.

        Without progress it begins at the offsets that ``first_offsets`` returns by topic and partition, and in other
        partitions at ``starting_offsets``. With progress the function isn't called.
        """
        begins = None if has_progress(spark, self.checkpoint) else self._begins(topics, first_offsets())
        return read_topics(
            spark, self.topics, self.settings, begins, self.max_records_per_trigger, self.fail_on_data_loss
        )

    def _begins(self, topics: StreamedTopics, first_offsets: Offsets) -> Offsets:
        default = _STARTS[self.starting_offsets]
        partitions = {topic: topics.described[topic].partitions for topic in self.topics}
        places = ((topic, number) for topic, count in partitions.items() for number in range(count))
        return {place: first_offsets.get(place, default) for place in places}

    def start(
        self,
        spark: SparkSession,
        topics: StreamedTopics,
        function: BatchFunction,
        first_offsets: Callable[[], Offsets] = dict,
    ) -> StreamingQuery:
        """Start the query, which passes its batches to ``function``; see :meth:`read`."""
        records = self.read(spark, topics, first_offsets)
        return start_query(self.transform(records), function, self.checkpoint, self.trigger)


def append_records(rows: DataFrame, table: str, options: dict[str, str], source: str) -> int | None:
    """Append the rows of a topic's records in one commit and return their number, without a second pass.

    Returns None if the table has the batch that ``options`` name: Delta would skip the write, and its number would be
    waited for without end.

    Raises:
        JobFailed: the source can't be read any more; the message is one sentence, which names ``source``.
    """
    if is_committed(rows.sparkSession, table, options["txnAppId"], int(options["txnVersion"])):
        return None
    observation = Observation()
    observed = rows.observe(observation, F.count(F.lit(1)).alias("records"))
    with source_failures(source):
        append(observed, table, options)
    return int(observation.get["records"])
