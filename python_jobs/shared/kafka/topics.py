"""Kafka topics as Spark reads them: their ids, partitions and offsets, and one sentence for each known failure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.failures import JobFailed, NotReady
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.delta.checkpoints import contract_of
from python_jobs.shared.kafka.settings import java_client_settings
from python_jobs.shared.kafka.topic_ids import known_ids, require_same_topic, with_topic_ids
from python_jobs.shared.spark.jvm import jvm

ANSWER_MILLISECONDS = 15_000
_PATIENT_MILLISECONDS = 60_000

# Failures of a stream from Kafka that the user can fix, by a sign in Spark's text.
SOURCE_FAILURES = {
    "KAFKA_DATA_LOSS": (
        "no longer has the next records (expired, or the topic was recreated): restore them, or continue "
        "without them with --fail_on_data_loss false"
    ),
    "failOnDataLoss": (
        "no longer has the next records (expired, or the topic was recreated): restore them, or continue "
        "without them with --fail_on_data_loss false"
    ),
    "org.apache.kafka.common.errors.TimeoutException": (
        "no longer answers; run again, the checkpoint holds the position"
    ),
    "org.apache.kafka.common.errors.SslAuthenticationException": "refused TLS",
    "org.apache.kafka.common.errors.SaslAuthenticationException": "refused the user or the password",
    "UnknownTopicOrPartitionException": "has lost the topic",
}


@dataclass(frozen=True)
class Topic:
    """What a broker says of a topic."""

    id: str
    """Id, which another topic of the same name doesn't have."""
    partitions: int
    """Number of partitions."""


def describe_topics(
    spark: SparkSession,
    topics: Sequence[str],
    settings: Mapping[str, str],
    milliseconds: int = ANSWER_MILLISECONDS,
) -> dict[str, Topic]:
    """Return each topic by its name; Spark itself would wait minutes for a broker that is down.

    Raises:
        NotReady: no broker answers within the milliseconds, or a topic doesn't exist.
        JobFailed: the broker refuses the client.
    """
    with _answers(spark, topics, settings, milliseconds) as admin:
        described = admin.describeTopics(jvm(spark).java.util.ArrayList(list(topics))).allTopicNames().get()
        return {topic: _topic(described[topic]) for topic in topics}


def find_topics(
    spark: SparkSession, topics: Sequence[str], settings: Mapping[str, str]
) -> tuple[dict[str, Topic], dict[str, str]]:
    """Return each topic that is there, and for each other one the sentence that says why it isn't, both by name.

    Raises:
        JobFailed: the broker refuses the client.
    """
    found: dict[str, Topic] = {}
    absences: dict[str, str] = {}
    with _answers(spark, topics, settings) as admin:
        answers = admin.describeTopics(jvm(spark).java.util.ArrayList(list(topics))).topicNameValues()
        for topic in topics:
            try:
                found[topic] = _topic(answers[topic].get())
            except Py4JJavaError as failure:
                sentence = _one_sentence(failure, [topic], settings["bootstrap.servers"], settings)
                if not isinstance(sentence, NotReady):
                    raise sentence from None
                absences[topic] = str(sentence)
    return found, absences


def _topic(description: Any) -> Topic:
    return Topic(description.topicId().toString(), description.partitions().size())


def require_brokers(spark: SparkSession, settings: Mapping[str, str]) -> None:
    """Refuse brokers that don't answer; raises like :func:`describe_topics`, for a job that asks topic by topic."""
    with _answers(spark, [], settings) as admin:
        admin.describeCluster().clusterId().get()


class StreamedTopics:
    """The topics of a stream, with their ids as of the start: a topic that is deleted and recreated is noticed.

    Args:
        spark: session of the stream.
        topics: names of topics.
        settings: settings of Kafka's Java client.
        way_out: what a reader of an old topic can do, the end of the sentence.
        may_be_absent: whether topics that aren't there, or whose brokers don't answer, are no error.

    Raises:
        NotReady: no broker answers, or a topic doesn't exist.
        JobFailed: the broker refuses the client.
    """

    def __init__(
        self,
        spark: SparkSession,
        topics: Sequence[str],
        settings: Mapping[str, str],
        way_out: str,
        *,
        may_be_absent: bool = False,
    ) -> None:
        self._spark, self._settings, self._way_out = spark, settings, way_out
        self.described: dict[str, Topic]
        """The topics that were there at the start."""
        self.absences: dict[str, str] = {}
        """Why the others weren't, in a sentence for each."""
        if may_be_absent:
            self.described, self.absences = find_topics(spark, topics, settings)
        else:
            self.described = describe_topics(spark, topics, settings)

    @property
    def contract(self) -> dict[str, str]:
        """The part of a checkpoint's contract that binds the checkpoint to these topics."""
        return {"topics": self.writer("")}

    def writer(self, writer_id: str) -> str:
        """Return the ``txnAppId`` of a writer whose batches are read from these topics."""
        return with_topic_ids(writer_id, {name: topic.id for name, topic in self.described.items()})

    def require_checkpoint(self, checkpoint: str) -> None:
        """Refuse a checkpoint whose offsets are those of older topics of the same names."""
        self.require_written_by([contract_of(self._spark, checkpoint).get("topics", "")])

    def require_written_by(self, app_ids: Sequence[str]) -> None:
        """Refuse a table with records of older topics of the same names, by the ``txnAppId`` of its commits."""
        for name, topic in self.described.items():
            require_same_topic(name, known_ids(app_ids, name), topic.id, self._way_out)

    def require_unchanged(self) -> None:
        """Refuse to go on if a topic was deleted and recreated since the start."""
        if not self.described:
            return
        today = describe_topics(self._spark, list(self.described), self._settings, _PATIENT_MILLISECONDS)
        for name, topic in self.described.items():
            require_same_topic(name, {topic.id}, today[name].id, self._way_out)


def read_topics(
    spark: SparkSession,
    topics: Sequence[str],
    settings: Mapping[str, str],
    starting_offsets: Mapping[tuple[str, int], int] | None,
    max_records_per_trigger: int | None = None,
    fail_on_data_loss: bool = True,
) -> DataFrame:
    """Return a stream of the topics' records, with their headers.

    Args:
        spark: session of the stream.
        topics: names of existing topics.
        settings: settings of Kafka's Java client.
        starting_offsets: first offset of each (topic, partition), -2 for the earliest and -1 for the end; None for a
            query whose checkpoint has the position.
        max_records_per_trigger: maximum number of records in one batch; None: all available records.
        fail_on_data_loss: whether the query ends if records expired before they were read.
    """
    reader = spark.readStream.format("kafka").options(**_reader_options(settings, fail_on_data_loss))
    reader = reader.option("subscribe", ",".join(topics))
    if max_records_per_trigger is not None:
        reader = reader.option("maxOffsetsPerTrigger", max_records_per_trigger)
    if starting_offsets is not None:
        reader = reader.option("startingOffsets", _offsets_text(starting_offsets))
    return reader.load()


def read_offsets(
    spark: SparkSession, ranges: Mapping[tuple[str, int], tuple[int, int]], settings: Mapping[str, str]
) -> DataFrame:
    """Return the records in ranges of offsets, with their headers; a record that is gone fails the query.

    Args:
        spark: session.
        ranges: first offset and end of at least one (topic, partition); the end isn't read.
        settings: settings of Kafka's Java client.
    """
    assigned: dict[str, list[int]] = {}
    for topic, partition in ranges:
        assigned.setdefault(topic, []).append(partition)
    return (
        spark.read.format("kafka")
        .options(**_reader_options(settings, fail_on_data_loss=True))
        .option("assign", json_text(assigned))
        .option("startingOffsets", _offsets_text({place: first for place, (first, _) in ranges.items()}))
        .option("endingOffsets", _offsets_text({place: end for place, (_, end) in ranges.items()}))
        .load()
    )


def _reader_options(settings: Mapping[str, str], fail_on_data_loss: bool) -> dict[str, Any]:
    return {f"kafka.{name}": value for name, value in settings.items()} | {
        "includeHeaders": True,
        "failOnDataLoss": fail_on_data_loss,
    }


def _offsets_text(offsets: Mapping[tuple[str, int], int]) -> str:
    by_topic: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in offsets.items():
        by_topic.setdefault(topic, {})[str(partition)] = offset
    return json_text(by_topic)


def offset_ranges(
    spark: SparkSession, topic: str, settings: Mapping[str, str]
) -> dict[tuple[str, int], tuple[int, int]]:
    """Return the first offset and the end of each (topic, partition); raises like :func:`describe_topics`.

    A reader with ``isolation.level: read_committed`` gets the end of what it can read: the first open transaction.
    """
    specs = jvm(spark).org.apache.kafka.clients.admin.OffsetSpec
    first, end = _list_offsets(spark, topic, settings, [specs.earliest(), specs.latest()])
    return {place: (offset, end[place]) for place, offset in first.items()}


def first_offsets_since(
    spark: SparkSession, topic: str, settings: Mapping[str, str], milliseconds: int
) -> dict[tuple[str, int], int | None]:
    """Return each (topic, partition)'s first offset whose record isn't older than a time; None if all are older.

    ``milliseconds`` is the time since 1970, compared with the records' own. Raises like :func:`describe_topics`.
    """
    specs = jvm(spark).org.apache.kafka.clients.admin.OffsetSpec
    (found,) = _list_offsets(spark, topic, settings, [specs.forTimestamp(milliseconds)])
    return {place: None if offset < 0 else offset for place, offset in found.items()}


def _list_offsets(
    spark: SparkSession, topic: str, settings: Mapping[str, str], specs: Sequence[Any]
) -> list[dict[tuple[str, int], int]]:
    partitions = describe_topics(spark, [topic], settings)[topic].partitions
    with _answers(spark, [topic], settings) as admin:
        kafka = jvm(spark).org.apache.kafka
        asked = [kafka.common.TopicPartition(topic, number) for number in range(partitions)]
        level = settings.get("isolation.level", "read_uncommitted").upper()
        options = kafka.clients.admin.ListOffsetsOptions(kafka.common.IsolationLevel.valueOf(level))
        found = []
        for spec in specs:
            question = jvm(spark).java.util.HashMap(dict.fromkeys(asked, spec))
            answers = admin.listOffsets(question, options).all().get()
            found.append({(topic, place.partition()): int(answers[place].offset()) for place in asked})
        return found


@contextmanager
def _answers(
    spark: SparkSession,
    topics: Sequence[str],
    settings: Mapping[str, str],
    milliseconds: int = ANSWER_MILLISECONDS,
) -> Iterator[Any]:
    """Provide an admin client of the brokers; its errors become one sentence."""
    properties = jvm(spark).java.util.Properties()
    timeouts = {
        "default.api.timeout.ms": str(milliseconds),
        "request.timeout.ms": str(ANSWER_MILLISECONDS // 3),
    }
    for name, value in (timeouts | dict(settings)).items():
        properties.setProperty(name, value)
    admin = None
    try:
        admin = jvm(spark).org.apache.kafka.clients.admin.AdminClient.create(properties)
        yield admin
    except Py4JJavaError as failure:
        raise _one_sentence(failure, topics, settings["bootstrap.servers"], settings) from None
    finally:
        if admin is not None:
            admin.close(jvm(spark).java.time.Duration.ZERO)


def source_failure(failure: Exception, source: str) -> JobFailed | None:
    """Return one sentence for a failure of the source that the user can fix, or None for any other failure."""
    text = str(failure)
    sentence = next((sentence for sign, sentence in SOURCE_FAILURES.items() if sign in text), None)
    return None if sentence is None else JobFailed(f"the source '{source}' {sentence}")


@contextmanager
def source_failures(source: str) -> Iterator[None]:
    """Raise one sentence for a failure of the source in the block, in which Spark reads its records.

    Raises:
        JobFailed: the user can fix the failure.
    """
    try:
        yield
    except (PySparkException, Py4JJavaError) as failure:
        raise source_failure(failure, source) or failure from None


def producer_settings(bootstrap_servers: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a Java client that publishes each record to all replicas, and once if it has to retry."""
    safe = {"acks": "all", "enable.idempotence": "true", "max.block.ms": "60000"}
    return java_client_settings(bootstrap_servers, safe | dict(settings))


def publish(records: DataFrame, settings: Mapping[str, str], topics: str) -> None:
    """Publish rows for Spark's Kafka sink: ``topic``, ``key``, ``value`` and ``headers``.

    Args:
        records: the rows; ``headers`` is ``array<struct<key:string,value:binary>>``.
        settings: settings of Kafka's Java client.
        topics: what the sentence of a failure calls the topics.

    Raises:
        JobFailed: the brokers refuse the records or don't answer.
    """
    writer = records.write.format("kafka")
    try:
        writer.options(**{f"kafka.{name}": value for name, value in settings.items()}).save()
    except (PySparkException, Py4JJavaError) as failure:
        servers = settings["bootstrap.servers"]
        raise publishing_failure(failure, topics, servers) or failure from failure


def publishing_failure(failure: Exception, topics: str, servers: str) -> JobFailed | None:
    """Return one sentence for what Kafka's client said while Spark wrote to topics, or None for any other failure."""
    said = re.search(r"org\.apache\.kafka\.common\.\S+: (.+)", str(failure))
    return None if said is None else JobFailed(f"cannot publish to {topics} at {servers}: {said[1][:200]}")


def _one_sentence(
    failure: Py4JJavaError, topics: Sequence[str], servers: str, settings: Mapping[str, str]
) -> JobFailed:
    cause = failure.java_exception
    while cause.getCause() is not None:
        cause = cause.getCause()
    kind = cause.getClass().getSimpleName()
    protocol = settings.get("security.protocol", "PLAINTEXT")
    if kind == "UnknownTopicOrPartitionException":
        return NotReady(f"not every topic of {', '.join(topics)} is at {servers}; create the missing ones")
    if kind == "TimeoutException":
        return NotReady(
            f"no Kafka broker answers at {servers} by {protocol} within {ANSWER_MILLISECONDS // 1000} seconds"
        )
    # Name only the class: a message may contain the value of a setting.
    return JobFailed(f"the Kafka client for {servers} by {protocol} was refused ({kind})")
