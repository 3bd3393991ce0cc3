"""Plain Kafka clients (librdkafka), for programs that read or write topics without Spark."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from python_jobs.job import DataRefused, JobFailed, NotReady, WrongUse

ANSWER_SECONDS = 30


def client_settings(bootstrap_servers: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of one client, with secrets (``${env:NAME}``) looked up."""

    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise WrongUse(f"the environment variable {match[1]} that a Kafka setting names isn't set")
        return os.environ[match[1]]

    resolved = {name: re.sub(r"\$\{env:(\w+)\}", variable, value) for name, value in settings.items()}
    # librdkafka prints what it also reports to us.
    return {"bootstrap.servers": bootstrap_servers, "log_level": 0} | resolved


def topic_partitions(client: Mapping[str, Any], topic: str) -> int:
    """Return the number of a topic's partitions.

    Raises:
        NotReady: no broker answers, or there is no such topic.
        JobFailed: the broker refuses us.
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
        raise NotReady(f"there is no topic {topic} at {servers}; topics are made by hand")
    return len(topics[topic].partitions)


def surviving_offset(consumer: Consumer, position: TopicPartition, fail_on_data_loss: bool) -> int:
    """Return where to go on: at ``position`` if it is still there, otherwise at the first record that is left.

    Raises:
        DataRefused: it is gone and ``fail_on_data_loss`` is set.
        KafkaException: the broker doesn't answer.
    """
    low, high = consumer.get_watermark_offsets(position, ANSWER_SECONDS)
    if low <= position.offset <= high:
        return position.offset
    if fail_on_data_loss:
        raise DataRefused(
            f"records of {position.topic}/{position.partition} from offset {position.offset} on are gone (expired, or "
            "the topic was made anew): go on without them with --fail_on_data_loss false"
        )
    return int(low)
