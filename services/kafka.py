"""A Kafka broker on this machine (KRaft: broker and controller in one process), on a free loopback port.

    with running_broker(folder) as broker:
        broker.create_topic("visits", partitions=2)
        broker.produce("visits", [Record(key=b"1", value=b"{}")])

Only code creates topics, so that a job that names a missing topic gets an error.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from confluent_kafka.cimpl import NewTopic

from python_jobs.shared.kafka.clients import patiently
from services.jars import java
from services.processes import HOST, Process, ServiceFailed, free_port, running

ANSWER_SECONDS = 30
# What librdkafka takes for "none given".
_NO_TIMESTAMP = 0
_BY_KEY = -1


@dataclass(frozen=True)
class Record:
    """A record for a producer; a value of None is a tombstone."""

    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    partition: int | None = None
    """Partition of the record; None: by the key's hash."""
    timestamp: int | None = None
    """Time in milliseconds since 1970; None: the clock's time."""


class Cluster:
    """Running brokers, as their clients see them."""

    def __init__(self, bootstrap_servers: str) -> None:
        """Name the brokers, host:port,host:port; no request is sent yet."""
        self.bootstrap_servers = bootstrap_servers

    @cached_property
    def admin(self) -> AdminClient:
        """The client for topics, offsets and groups; it reconnects after a restart of the broker."""
        return AdminClient(self._client())

    def create_topic(self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        """Create a topic, wait until it can be used, return its name.

        Raises:
            ServiceFailed: the topic exists, or a setting is refused.
        """
        topic = NewTopic(name, partitions, 1, config=dict(config or {}))
        try:
            self.admin.create_topics([topic])[name].result(ANSWER_SECONDS)
        except KafkaException as failure:
            raise ServiceFailed(f"topic '{name}' was not created: {failure.args[0].str()}") from None
        try:
            # The topic is new: all errors pass when its partitions have leaders.
            patiently(lambda: self.ends(name, partitions), passes=lambda _: True)
        except KafkaException as failure:
            raise ServiceFailed(f"topic '{name}' doesn't answer: {failure.args[0].str()}") from None
        return name

    def topics(self) -> dict[str, int]:
        """Return the number of partitions of each topic, without Kafka's own."""
        found = self.admin.list_topics(timeout=ANSWER_SECONDS).topics
        return {name: len(topic.partitions) for name, topic in found.items() if not name.startswith("__")}

    def ends(self, topic: str, partitions: int) -> dict[int, int]:
        """Return the offset after the last record of each partition, from the partition's leader.

        Raises:
            KafkaException: a partition has no leader, as for a moment after the topic was created.
        """
        # A client that found no leader answers from its cache until it lists topics.
        self.admin.list_topics(topic, ANSWER_SECONDS)
        latest = {TopicPartition(topic, number): OffsetSpec.latest() for number in range(partitions)}
        answers = self.admin.list_offsets(latest).items()
        return {partition.partition: answer.result(ANSWER_SECONDS).offset for partition, answer in answers}

    def produce(self, topic: str, records: Iterable[Record], config: Mapping[str, Any] | None = None) -> int:
        """Write records in their order, wait until the broker has all of them, and return their number.

        A batch whose answer got lost is sent again and may be there twice; ``{"enable.idempotence": True}``
        prevents this and costs half a second at the start.

        Raises:
            ServiceFailed: a record was not delivered.
        """
        failed: list[str] = []
        producer = Producer(self._client() | {"linger.ms": 5, "max.in.flight": 1} | dict(config or {}))
        count = 0
        for record in records:
            while True:
                try:
                    producer.produce(
                        topic,
                        record.value,
                        record.key,
                        on_delivery=lambda error, _: failed.append(error.str()) if error else None,
                        headers=list(record.headers),
                        timestamp=_NO_TIMESTAMP if record.timestamp is None else record.timestamp,
                        partition=_BY_KEY if record.partition is None else record.partition,
                    )
                    break
                except BufferError:  # the queue is full: wait for deliveries
                    producer.poll(1)
            producer.poll(0)
            count += 1
        left = producer.flush(ANSWER_SECONDS)
        if failed or left:
            why = failed[0] if failed else "the broker does not answer"
            raise ServiceFailed(f"{len(failed) + left} of {count} records did not reach '{topic}': {why}")
        return count

    def records(self, topic: str) -> list[Message]:
        """Return every record of a topic up to its current end, by partition and offset.

        Raises:
            ServiceFailed: the topic doesn't exist, or could not be read to its end.
        """
        partitions = self.topics().get(topic)
        if partitions is None:
            raise ServiceFailed(f"there is no topic '{topic}'")
        consumer = Consumer(
            self._client()
            | {
                "group.id": f"reader-{uuid.uuid4()}",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 50,
                "isolation.level": "read_committed",
            }
        )
        try:
            found: list[Message] = []
            for partition in range(partitions):
                found += _read_partition(consumer, TopicPartition(topic, partition))
            return found
        finally:
            consumer.close()

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which programs find this broker."""
        return {"KAFKA_BOOTSTRAP_SERVERS": self.bootstrap_servers}

    def _client(self) -> dict[str, Any]:
        # Callers ask whether the broker is down; librdkafka would also print it.
        return {"bootstrap.servers": self.bootstrap_servers, "log_level": 0}


class Broker(Cluster):
    """One broker with its data folder; it keeps port and data after a stop or a kill."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        """Create the data folder if it doesn't exist; :meth:`start` runs the broker.

        Args:
            folder: folder for data, settings and log.
            port: loopback port for clients; by default a free one.
        """
        port, controller_port = port or free_port(), free_port()
        self.proxy_port = free_port()
        """Port that clients are sent to if they connect through a proxy on it; the broker doesn't listen on it."""
        self.behind_proxy_port = free_port()
        """Port on which the broker listens for that proxy."""
        super().__init__(f"{HOST}:{port}")
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        settings = folder / "server.properties"
        listeners = {
            "PLAINTEXT": port,
            "CONTROLLER": controller_port,
            "PROXIED": self.behind_proxy_port,
        }
        advertised = {"PLAINTEXT": port, "PROXIED": self.proxy_port}
        settings.write_text(_settings(folder, listeners, advertised), encoding="utf-8")
        if not (folder / "data" / "meta.properties").exists():
            _format(settings)
        self._process = Process(
            "kafka",
            [*java("kafka"), "kafka.Kafka", str(settings)],
            folder,
            lambda log: self._answers(),
            ports=tuple(listeners.values()),
        )

    def start(self) -> None:
        """Start the broker and wait until it answers."""
        self._process.start()

    def stop(self) -> None:
        """Shut the broker down."""
        self._process.stop()

    def kill(self) -> None:
        """End the broker as a crash would."""
        self._process.kill()

    @property
    def is_running(self) -> bool:
        """Whether the broker's process is running."""
        return self._process.is_running

    def _answers(self) -> bool:
        try:
            return bool(self.admin.list_topics(timeout=1).brokers)
        except KafkaException:
            return False


@contextlib.contextmanager
def running_broker(folder: Path, port: int | None = None) -> Iterator[Broker]:
    """Run a broker until the block ends; it has the data of an earlier run in ``folder``.

    Args:
        folder: folder for data, settings and log.
        port: loopback port for clients; by default a free one.

    Raises:
        ServiceFailed: the broker did not start.
    """
    with running(Broker(folder, port)) as broker:
        yield broker


def _settings(folder: Path, listeners: Mapping[str, int], advertised: Mapping[str, int]) -> str:
    def addresses(ports: Mapping[str, int]) -> str:
        return ",".join(f"{name}://{HOST}:{port}" for name, port in ports.items())

    settings = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "listeners": addresses(listeners),
        "advertised.listeners": addresses(advertised),
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in listeners),
        "controller.quorum.voters": f"1@{HOST}:{listeners['CONTROLLER']}",
        "log.dirs": folder / "data",
        "auto.create.topics.enable": "false",
        # With one broker Kafka's own topics can have only one replica; few partitions start faster.
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 1,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "transaction.state.log.num.partitions": 1,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
        # Retention uses the records' own times: by default last month's records would be deleted at once.
        "log.retention.ms": -1,
        "group.initial.rebalance.delay.ms": 0,
        # A killed broker can only return when its old session is over.
        "broker.session.timeout.ms": 3_000,
        "broker.heartbeat.interval.ms": 500,
        "log.cleaner.backoff.ms": 500,  # by default the cleaner checks a compacted topic every 15 s
        "num.network.threads": 2,
        "num.io.threads": 2,
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def _format(settings: Path) -> None:
    command = [*java("kafka", memory="128m"), "kafka.tools.StorageTool", "format", "--config", str(settings)]
    done = subprocess.run(
        [*command, "--cluster-id", "lakehouse-patterns-001"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ServiceFailed(f"Kafka's data folder was not made: {(done.stdout + done.stderr).strip()[-300:]}")


def _read_partition(consumer: Consumer, partition: TopicPartition) -> list[Message]:
    low, high = consumer.get_watermark_offsets(partition, timeout=ANSWER_SECONDS)
    partition.offset = low
    consumer.assign([partition])
    found: list[Message] = []
    deadline = time.monotonic() + ANSWER_SECONDS
    # Offsets have gaps (transactions, compaction): only the partition's end shows that all records are read.
    while low < high and time.monotonic() < deadline:
        message = consumer.poll(0.5)
        if message is None:
            continue
        if message.error() is not None:
            if consumer.position([partition])[0].offset >= high:
                return found
            continue
        found.append(message)
        deadline = time.monotonic() + ANSWER_SECONDS
    if low < high:
        raise ServiceFailed(f"{partition.topic}/{partition.partition} could not be read to its end")
    return found
