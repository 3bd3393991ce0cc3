"""Checkpointer, rewind: set a reader of a Kafka topic back to a time.

In each partition the reader continues with the first record whose timestamp is not before ``--to``, or at the end if
there is no such record. Without ``--publish true`` nothing is written: the report gives the number of records that
would be read again.

* A consumer group (``--group``): the job commits new offsets. Stop the group's consumers first; Kafka refuses a group
  that has members. A group that hasn't read a partition yet begins at these offsets.
* A Structured Streaming query: the offsets in its checkpoint are not edited. Start the query with a *new* checkpoint
  and the report's ``starting_offsets``.

Records that are read again are processed again. The effect depends on the reader's output:

* keyed merges and partition overwrites stay the same;
* appends hold the records twice. The exactly-once consumer ignores the group's offsets as long as its table has a
  position; with ``--generation`` raised by one it follows the group's offsets and appends again: deduplicate by topic,
  partition and offset;
* counts over windows are recomputed from ``--to`` on, so choose the start of a window: otherwise the older records of
  the window are missing from its count.

A time ahead of the group's position would skip records; this is refused without ``--allow_skip true``. A position in
a topic that was deleted and recreated since is not a position in today's topic: the report leaves it out.

    python -m python_jobs.error_management.checkpoint_rewind --bootstrap_servers localhost:9092 --topic visits \\
        --group visits_to_bronze --to 2024-03-01T10:00:00 --publish true

Source: Data Engineering Design Patterns, chapter 3, Checkpointer.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaException
from confluent_kafka.admin import AdminClient

from python_jobs.shared.core.command_line import run_program
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.core.intervals import parse_time
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.kafka.clients import (
    ANSWER_SECONDS,
    WatchedTopic,
    client_settings,
    offsets_at,
    partition_count,
    positions_of_topic,
)
from python_jobs.shared.kafka.settings import refuse_secrets


@dataclass(frozen=True)
class Parameters:
    """Set a reader of a Kafka topic back to a time."""

    bootstrap_servers: str
    """Kafka brokers, host:port,host:port."""
    topic: str
    """Topic that the reader reads."""
    to: str
    """Time of the first record to read again (ISO 8601, UTC by default)."""
    group: str | None = None
    """Consumer group to rewind; without one only starting_offsets for a new checkpoint are reported."""
    publish: bool = False
    """Write the group's new offsets; by default only report the number of records that would be read again."""
    allow_skip: bool = False
    """Whether a partition may move forward, over records that were never read."""
    settings: dict[str, str] = field(default_factory=dict)
    """Further settings of Kafka's client (librdkafka's names); a secret as ${env:NAME}."""

    def __post_init__(self) -> None:
        parse_time(self.to)
        refuse_secrets(self.settings)
        if self.publish and self.group is None:
            raise WrongUse(
                "publish needs a group; a query is rewound by a new checkpoint and starting_offsets"
            )


def rewound(
    committed: Mapping[int, int], at_time: Mapping[int, int]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return for each partition the number of offsets that are read again, and the number that are skipped."""
    moves = {
        partition: committed[partition] - offset
        for partition, offset in at_time.items()
        if partition in committed
    }
    return (
        {partition: move for partition, move in moves.items() if move > 0},
        {partition: -move for partition, move in moves.items() if move < 0},
    )


def run(params: Parameters) -> dict[str, Any]:
    """Find the offsets, write them with ``publish``, and report them.

    Raises:
        NotReady: no broker answers, or the topic doesn't exist.
        DataRefused: records would be skipped.
        JobFailed: the group has active consumers.
    """
    client = client_settings(params.bootstrap_servers, params.settings)
    partitions = range(partition_count(client, params.topic))
    group = (
        params.group or "checkpoint_rewind"
    )  # Kafka's client needs a group name, also for a report without a group
    with closing(Consumer(client | {"group.id": group, "enable.auto.commit": False})) as consumer:
        try:
            at_time = offsets_at(consumer, params.topic, partitions, parse_time(params.to))
            topic = WatchedTopic(client, params.topic, "run again")
            found = positions_of_topic(consumer, params.topic, partitions, topic, fail_on_data_loss=False)
        except KafkaException as failure:
            raise NotReady(
                f"the broker doesn't tell offsets of {params.topic}: {failure.args[0].str()}"
            ) from None
    committed = {
        partition: offset
        for partition, offset in found.items()
        if params.group is not None and offset is not None
    }
    again, skipped = rewound(committed, at_time)
    if skipped and not params.allow_skip:
        partition, count = next(iter(skipped.items()))
        raise DataRefused(
            f"{params.to} is ahead of the group {params.group}: {count} offsets of {params.topic}/{partition} would "
            "never be read; allow that with --allow_skip true"
        )
    if params.publish:
        _write(client, params, topic, at_time)
    return {
        "group": params.group,
        "published": params.publish,
        "offsets": at_time,
        "committed_before": committed,
        "again": again,
        "skipped": skipped,
        "starting_offsets": json_text({params.topic: {str(p): offset for p, offset in at_time.items()}}),
    }


def _write(
    client: Mapping[str, Any], params: Parameters, topic: WatchedTopic, offsets: Mapping[int, int]
) -> None:
    positions = [topic.position(params.topic, partition, offset) for partition, offset in offsets.items()]
    request = ConsumerGroupTopicPartitions(str(params.group), positions)
    admin = AdminClient(dict(client))  # kept in a variable: its answers need the client
    try:
        (answer,) = admin.alter_consumer_group_offsets([request]).values()
        refused = [
            position.error for position in answer.result(ANSWER_SECONDS).topic_partitions if position.error
        ]
        if refused:
            raise KafkaException(refused[0])
    except KafkaException as failure:
        raise JobFailed(
            f"the offsets of group {params.group} were not written ({failure.args[0].str()}): stop its consumers first"
        ) from None


if __name__ == "__main__":
    run_program(Parameters, run)
