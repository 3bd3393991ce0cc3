"""Kafka topics as Spark reads them: client settings without secrets, topics that must be there, known failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from python_jobs.shared.core.failures import JobFailed, NotReady

ANSWER_MILLISECONDS = 15_000

# What ends a stream from Kafka and a person can mend, by a sign in Spark's text.
SOURCE_FAILURES = {
    "KAFKA_DATA_LOSS": (
        "no longer has records that come next (expired, or the topic was made anew): restore them, or go on "
        "without them with --fail_on_data_loss false"
    ),
    "failOnDataLoss": (
        "no longer has records that come next (expired, or the topic was made anew): restore them, or go on "
        "without them with --fail_on_data_loss false"
    ),
    "org.apache.kafka.common.errors.TimeoutException": (
        "doesn't answer any more; run again, the checkpoint knows where to go on"
    ),
    "org.apache.kafka.common.errors.SslAuthenticationException": "refused TLS",
    "org.apache.kafka.common.errors.SaslAuthenticationException": "refused the user or the password",
    "UnknownTopicOrPartitionException": "has lost the topic",
}


def partition_counts(
    spark: SparkSession, topics: Sequence[str], settings: Mapping[str, str]
) -> dict[str, int]:
    """Return the number of partitions of each topic. Spark itself would wait minutes for a broker that is down.

    Raises:
        NotReady: no broker answers, or a topic isn't there.
        JobFailed: the broker refuses us.
    """
    with _answers(spark, topics, settings) as admin:
        jvm: Any = spark._jvm
        described = admin.describeTopics(jvm.java.util.ArrayList(list(topics))).allTopicNames().get()
        return {topic: described[topic].partitions().size() for topic in topics}


def offset_ranges(
    spark: SparkSession, topic: str, settings: Mapping[str, str]
) -> dict[tuple[str, int], tuple[int, int]]:
    """Return the first offset and the end of each (topic, partition); raises like :func:`partition_counts`."""
    partitions = partition_counts(spark, [topic], settings)[topic]
    with _answers(spark, [topic], settings) as admin:
        jvm: Any = spark._jvm
        asked = [jvm.org.apache.kafka.common.TopicPartition(topic, number) for number in range(partitions)]
        specs = jvm.org.apache.kafka.clients.admin.OffsetSpec
        ranges = []
        for spec in (specs.earliest(), specs.latest()):
            question = jvm.java.util.HashMap(dict.fromkeys(asked, spec))
            answers = admin.listOffsets(question).all().get()
            ranges.append([int(answers[partition].offset()) for partition in asked])
        return {(topic, number): bounds for number, bounds in enumerate(zip(*ranges, strict=True))}


@contextmanager
def _answers(spark: SparkSession, topics: Sequence[str], settings: Mapping[str, str]) -> Iterator[Any]:
    """Give a client that asks the brokers; what they don't answer becomes one sentence."""
    jvm: Any = spark._jvm
    properties = jvm.java.util.Properties()
    timeouts = {
        "default.api.timeout.ms": str(ANSWER_MILLISECONDS),
        "request.timeout.ms": str(ANSWER_MILLISECONDS // 3),
    }
    for name, value in (timeouts | dict(settings)).items():
        properties.setProperty(name, value)
    admin = None
    try:
        admin = jvm.org.apache.kafka.clients.admin.AdminClient.create(properties)
        yield admin
    except Py4JJavaError as failure:
        raise _one_sentence(failure, topics, settings["bootstrap.servers"], settings) from None
    finally:
        if admin is not None:
            admin.close(jvm.java.time.Duration.ZERO)


def source_failure(failure: Exception, source: str) -> JobFailed | None:
    """Return one sentence for a failure of the source that a person can mend, or None for any other."""
    text = str(failure)
    sentence = next((sentence for sign, sentence in SOURCE_FAILURES.items() if sign in text), None)
    return None if sentence is None else JobFailed(f"the source '{source}' {sentence}")


def _one_sentence(
    failure: Py4JJavaError, topics: Sequence[str], servers: str, settings: Mapping[str, str]
) -> JobFailed:
    cause = failure.java_exception
    while cause.getCause() is not None:
        cause = cause.getCause()
    kind = cause.getClass().getSimpleName()
    protocol = settings.get("security.protocol", "PLAINTEXT")
    if kind == "UnknownTopicOrPartitionException":
        return NotReady(f"not every topic of {', '.join(topics)} is at {servers}; topics are made by hand")
    if kind == "TimeoutException":
        return NotReady(
            f"no Kafka broker answers at {servers} by {protocol} within {ANSWER_MILLISECONDS // 1000} seconds"
        )
    # The class alone: a message may repeat the setting it is about.
    return JobFailed(f"the Kafka client for {servers} by {protocol} was refused ({kind})")
