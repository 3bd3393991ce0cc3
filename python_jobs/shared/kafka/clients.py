"""Plain Kafka clients (librdkafka), for programs that read or write topics without Spark."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.core.retry import Failure, Retrier, RetryPolicy

Answer = TypeVar("Answer")

ANSWER_SECONDS = 30
_PASSING = {
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.NOT_COORDINATOR,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._MAX_POLL_EXCEEDED,  # the next poll joins the group again
    KafkaError._NOENT,  # "no leaders found"
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._TRANSPORT,
    KafkaError._WAIT_COORD,
}


def passes(error: KafkaError) -> bool:
    """Return whether an error passes when a broker is back; librdkafka's own ``retriable()`` mostly returns False."""
    return error.retriable() or error.code() in _PASSING


def client_settings(bootstrap_servers: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of one client, with secrets (``${env:NAME}``) replaced by their values."""

    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise WrongUse(
                f"a Kafka setting names the environment variable {match[1]}, which isn't set: set it"
            )
        return os.environ[match[1]]

    resolved = {name: re.sub(r"\$\{env:(\w+)\}", variable, value) for name, value in settings.items()}
    # librdkafka would print the errors that it also reports to us.
    return {"bootstrap.servers": bootstrap_servers, "log_level": 0} | resolved


def partition_count(client: Mapping[str, Any], topic: str) -> int:
    """Return the number of a topic's partitions.

    Raises:
        NotReady: no broker answers, or there is no such topic.
        JobFailed: the broker refuses the client.
    """
    errors: list[str] = []
    servers = client["bootstrap.servers"]
    try:
        admin = AdminClient(dict(client) | {"error_cb": lambda error: errors.append(error.name())})
        topics = admin.list_topics(timeout=ANSWER_SECONDS / 3).topics
    except KafkaException as failure:
        protocol = client.get("security.protocol", "plaintext")
        for sign, sentence in {"_SSL": "TLS", "_AUTHENTICATION": "the user or the password"}.items():
            if sign in errors:
                raise JobFailed(f"the Kafka broker at {servers} refused {sentence}") from None
        if failure.args[0].code() == KafkaError._INVALID_ARG:
            raise WrongUse(f"a Kafka setting for {servers} is wrong: {failure.args[0].str()}") from None
        raise NotReady(f"no Kafka broker answers at {servers} by {protocol}") from None
    if topic not in topics:
        raise NotReady(f"there is no topic {topic} at {servers}; create it")
    if (error := topics[topic].error) is not None:  # the topic's list of partitions is empty then
        kind = NotReady if passes(error) else JobFailed
        raise kind(f"the topic {topic} at {servers} can't be read: {error.str()}")
    return len(topics[topic].partitions)


def topic_id(client: Mapping[str, Any], topic: str) -> str:
    """Return what tells a topic that is there from one that was deleted and recreated under its name."""
    admin = AdminClient(dict(client))  # kept by name: its answers die with it
    asked = TopicCollection([topic])
    found = patiently(lambda: admin.describe_topics(asked)[topic].result(ANSWER_SECONDS))
    return str(found.topic_id)


def topic_setting(client: Mapping[str, Any], topic: str, name: str) -> str:
    """Return one setting of an existing topic."""
    resource = ConfigResource(ResourceType.TOPIC, topic)
    admin = AdminClient(dict(client))  # kept in a variable: its answers are lost when it is freed
    return str(admin.describe_configs([resource])[resource].result(ANSWER_SECONDS)[name].value)


def patiently(ask: Callable[[], Answer], passes: Callable[[KafkaError], bool] = passes) -> Answer:
    """Return a broker's answer to a repeatable request, retried until a restarted broker can answer.

    Args:
        ask: function that sends the request; its last error is raised.
        passes: function that returns whether an error passes after a while.
    """

    def classify(error: BaseException) -> Failure:
        is_passing = isinstance(error, KafkaException) and passes(error.args[0])
        return Failure.TRANSIENT if is_passing else Failure.UNKNOWN

    policy = RetryPolicy(attempts=20, base_seconds=0.1, cap_seconds=5, total_seconds=2 * ANSWER_SECONDS)
    return Retrier(policy, classifier=classify).call(lambda _: ask(), idempotent=True)


def committed_offsets(consumer: Consumer, topic: str, partitions: Sequence[int]) -> dict[int, int]:
    """Return the position of the consumer's group in each partition that has one."""
    asked = [TopicPartition(topic, partition) for partition in partitions]
    answers = patiently(lambda: consumer.committed(asked, ANSWER_SECONDS))
    return {found.partition: found.offset for found in answers if found.offset != OFFSET_INVALID}


def offset_range(consumer: Consumer, partition: TopicPartition) -> tuple[int, int]:
    """Return the first offset of a partition and its end."""
    low, high = patiently(lambda: consumer.get_watermark_offsets(partition, ANSWER_SECONDS))
    return low, high


def surviving_offset(consumer: Consumer, position: TopicPartition, fail_on_data_loss: bool) -> int:
    """Return the offset to continue at: that of ``position`` if it still exists, else the first one that is left.

    Raises:
        DataRefused: the offset is gone and ``fail_on_data_loss`` is set.
        KafkaException: the broker doesn't answer.
    """
    low, high = consumer.get_watermark_offsets(position, ANSWER_SECONDS)
    if low <= position.offset <= high:
        return position.offset
    if fail_on_data_loss:
        raise DataRefused(
            f"records of {position.topic}/{position.partition} from offset {position.offset} on are gone (expired, or "
            "the topic was recreated): continue without them with --fail_on_data_loss false"
        )
    return int(low)
