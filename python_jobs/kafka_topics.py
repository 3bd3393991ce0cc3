"""Kafka topics as Spark reads them: client settings without secrets, topics that must be there, known failures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from python_jobs.job import JobFailed, NotReady, WrongUse

ANSWER_MILLISECONDS = 15_000
_SECRET = re.compile(r"password|jaas|secret|ssl\.keystore\.key", re.IGNORECASE)

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


def refuse_secrets(settings: Mapping[str, str]) -> None:
    """Refuse client settings that hold a secret itself: command lines, plans and logs would show it.

    Raises:
        WrongUse: a secret isn't given as ``${env:NAME}``.
    """
    for name, value in settings.items():
        if _SECRET.search(name) and not re.fullmatch(r".*\$\{env:\w+\}.*", value, re.DOTALL):
            raise WrongUse(f"the Kafka setting {name} is a secret: pass it as ${{env:NAME}}")


def client_settings(bootstrap_servers: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a Kafka client; it looks ``${env:NAME}`` up itself, so that Spark never holds it."""
    found = {"bootstrap.servers": bootstrap_servers, **settings}
    if "${env:" in "".join(settings.values()):
        provider = "org.apache.kafka.common.config.provider.EnvVarConfigProvider"
        found |= {"config.providers": "env", "config.providers.env.class": provider}
    return found


def consumer_settings(bootstrap_servers: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a client that reads: without records of transactions that were given up or are open.

    Kafka's own default would show them. ``isolation.level: read_uncommitted`` among the settings brings it back.
    """
    return client_settings(bootstrap_servers, {"isolation.level": "read_committed", **settings})


def topic_partitions(
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
    """Return the first offset and the end of each (topic, partition); raises like :func:`topic_partitions`."""
    partitions = topic_partitions(spark, [topic], settings)[topic]
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
