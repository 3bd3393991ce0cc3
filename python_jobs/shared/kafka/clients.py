"""Plain Kafka clients (librdkafka), for programs that read or write topics without Spark."""

from __future__ import annotations

import datetime as dt
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.core.retry import Failure, Retrier, RetryPolicy
from python_jobs.shared.kafka.topic_ids import require_same_topic

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


class WatchedTopic:
    """A topic with its id as of the start, for readers that notice when it is deleted and recreated.

    Args:
        client: settings of the client.
        topic: name of an existing topic.
        way_out: what a reader of the old topic can do, the end of the sentence.
    """

    def __init__(self, client: Mapping[str, Any], topic: str, way_out: str) -> None:
        self.topic, self._way_out = topic, way_out
        self._admin = AdminClient(dict(client))  # kept: its answers are lost when it is freed
        self.id = self._current_id()

    def _current_id(self) -> str:
        asked = TopicCollection([self.topic])
        found = patiently(lambda: self._admin.describe_topics(asked)[self.topic].result(ANSWER_SECONDS))
        # librdkafka writes an id with + and /, Kafka's own clients and tools with - and _.
        return str(found.topic_id).replace("+", "-").replace("/", "_")

    def require_known(self, known: Collection[str]) -> None:
        """Refuse positions that are kept with other ids than this topic's."""
        require_same_topic(self.topic, known, self.id, self._way_out)

    def require_unchanged(self) -> None:
        """Refuse to go on if the topic was deleted and recreated since the start."""
        require_same_topic(self.topic, {self.id}, self._current_id(), self._way_out)

    def position(self, topic: str, partition: int, offset: int) -> TopicPartition:
        """Return a group's position for a commit; it also holds this topic's id."""
        return TopicPartition(topic, partition, offset, metadata=self.id)


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
    return {found.partition: found.offset for found in _committed(consumer, topic, partitions)}


def positions_of_topic(
    consumer: Consumer, topic: str, partitions: Sequence[int], source: WatchedTopic, fail_on_data_loss: bool
) -> dict[int, int | None]:
    """Return the position of the consumer's group in each partition that has one, None for one in an older topic.

    Args:
        consumer: client of the group.
        topic: topic under whose name the group keeps the positions.
        partitions: partitions to look up.
        source: topic in which the positions are; a position without an id was set by another program, and is taken.
        fail_on_data_loss: whether a position in an older topic of the source's name is refused.

    Raises:
        DataRefused: a position belongs to an older topic, and ``fail_on_data_loss`` is set.
    """
    positions: dict[int, int | None] = {}
    for found in _committed(consumer, topic, partitions):
        is_known = found.metadata in (None, "", source.id)
        if fail_on_data_loss and not is_known:
            source.require_known({str(found.metadata)})
        positions[found.partition] = found.offset if is_known else None
    return positions


def _committed(consumer: Consumer, topic: str, partitions: Sequence[int]) -> list[TopicPartition]:
    asked = [TopicPartition(topic, partition) for partition in partitions]
    answers = patiently(lambda: consumer.committed(asked, ANSWER_SECONDS))
    return [found for found in answers if found.offset != OFFSET_INVALID]


def offset_range(consumer: Consumer, partition: TopicPartition) -> tuple[int, int]:
    """Return the first offset of a partition and its end."""
    low, high = patiently(lambda: consumer.get_watermark_offsets(partition, ANSWER_SECONDS))
    return low, high


def offsets_at(consumer: Consumer, topic: str, partitions: Sequence[int], at: dt.datetime) -> dict[int, int]:
    """Return the offset of each partition's first record that is not before the time, or the partition's end."""
    milliseconds = int(at.timestamp() * 1000)
    asked = [TopicPartition(topic, partition, milliseconds) for partition in partitions]
    found = {}
    for answer in consumer.offsets_for_times(asked, ANSWER_SECONDS):
        _, end = consumer.get_watermark_offsets(answer, ANSWER_SECONDS)
        found[answer.partition] = answer.offset if answer.offset >= 0 else end
    return found


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


def seek_surviving(consumer: Consumer, position: TopicPartition, fail_on_data_loss: bool) -> int:
    """Continue a partition at a position that the broker denied, and return the offset.

    A restarting broker may also deny a record that exists; then the next denial asks again.

    Raises:
        DataRefused: the offset is gone and ``fail_on_data_loss`` is set.
    """
    with suppress(KafkaException):
        position.offset = surviving_offset(consumer, position, fail_on_data_loss)
    consumer.seek(position)
    return int(position.offset)


def place_header(name: str, message: Message) -> tuple[str, bytes]:
    """Return a header that holds a record's topic/partition/offset."""
    return name, f"{message.topic()}/{message.partition()}/{message.offset()}".encode()
