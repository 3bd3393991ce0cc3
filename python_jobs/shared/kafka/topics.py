"""Kafka topics as Spark reads them: their partitions and offsets, and one sentence for each known failure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from python_jobs.shared.core.failures import JobFailed, NotReady
from python_jobs.shared.spark.jvm import jvm

ANSWER_MILLISECONDS = 15_000

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


def partition_counts(
    spark: SparkSession, topics: Sequence[str], settings: Mapping[str, str]
) -> dict[str, int]:
    """Return the number of partitions of each topic; Spark itself would wait minutes for a broker that is down.

    Raises:
        NotReady: no broker answers, or a topic doesn't exist.
        JobFailed: the broker refuses the client.
    """
    with _answers(spark, topics, settings) as admin:
        described = admin.describeTopics(jvm(spark).java.util.ArrayList(list(topics))).allTopicNames().get()
        return {topic: described[topic].partitions().size() for topic in topics}


def offset_ranges(
    spark: SparkSession, topic: str, settings: Mapping[str, str]
) -> dict[tuple[str, int], tuple[int, int]]:
    """Return the first offset and the end of each (topic, partition); raises like :func:`partition_counts`."""
    partitions = partition_counts(spark, [topic], settings)[topic]
    with _answers(spark, [topic], settings) as admin:
        partition_class = jvm(spark).org.apache.kafka.common.TopicPartition
        asked = [partition_class(topic, number) for number in range(partitions)]
        specs = jvm(spark).org.apache.kafka.clients.admin.OffsetSpec
        ranges = []
        for spec in (specs.earliest(), specs.latest()):
            question = jvm(spark).java.util.HashMap(dict.fromkeys(asked, spec))
            answers = admin.listOffsets(question).all().get()
            ranges.append([int(answers[partition].offset()) for partition in asked])
        return {(topic, number): bounds for number, bounds in enumerate(zip(*ranges, strict=True))}


@contextmanager
def _answers(spark: SparkSession, topics: Sequence[str], settings: Mapping[str, str]) -> Iterator[Any]:
    """Provide an admin client of the brokers; its errors become one sentence."""
    properties = jvm(spark).java.util.Properties()
    timeouts = {
        "default.api.timeout.ms": str(ANSWER_MILLISECONDS),
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
