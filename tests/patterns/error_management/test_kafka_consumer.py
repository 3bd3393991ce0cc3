"""Checkpointer, plain Kafka consumer: what a crash repeats or loses, by the order of processing and commit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition
from pyspark.sql import DataFrame, SparkSession

from python_jobs.error_management import kafka_consumer as job
from python_jobs.error_management.kafka_consumer import (
    CheckpointedConsumer,
    Delivery,
    Parameters,
    Subscription,
)
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.delta.commits import write_once
from python_jobs.shared.kafka.clients import committed_offsets, passes
from services.kafka import Broker, Record
from tests.support.rows import assert_rows
from tests.support.snippets import snippet
from tests.support.topics import recreate
from tests.support.waiting import eventually

pytestmark = pytest.mark.kafka
PAGE = "docs/error_management.md"
HERE = "tests/patterns/error_management/test_kafka_consumer.py"


class Crash(Exception):
    """Stands for the end of the process: what was not committed by now never is."""


class Effects:
    """What a program does with records, one after the other; it may crash at one of them."""

    def __init__(self, crash_at: int | None = None) -> None:
        self.crash_at = crash_at
        self.seen: list[int] = []

    def __call__(self, records: Sequence[Message]) -> None:
        for record in records:
            if record.offset() == self.crash_at:
                raise Crash
            offset = record.offset()
            assert offset is not None
            self.seen.append(offset)


def subscription(broker: Broker, topic: str, **changes: Any) -> Subscription:
    given = {
        "bootstrap_servers": broker.bootstrap_servers,
        "topic": topic,
        "group": f"group_of_{topic}",
        "until_end": True,
    }
    return Subscription(**(given | changes))


def consume(source: Subscription, delivery: Delivery, effects: Effects) -> dict[str, Any]:
    with closing(CheckpointedConsumer(source, delivery, effects)) as consumer:
        return consumer.run(threading.Event())


def committed(broker: Broker, source: Subscription, partitions: Sequence[int] = (0,)) -> dict[int, int]:
    """Return the group's positions as another client sees them."""
    client = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": source.group})
    with closing(client):
        return committed_offsets(client, source.topic, partitions)


def numbers(count: int, partition: int = 0) -> list[Record]:
    return [Record(f"{number}".encode(), b"k", partition=partition) for number in range(count)]


@pytest.mark.parametrize(
    ("delivery", "committed_at_crash", "afterwards"),
    [("at_least_once", 5, [5, 6, 7, 8, 9]), ("at_most_once", 10, [])],
)
def test_a_crash_repeats_or_loses_by_the_order_of_commit_and_processing(
    broker: Broker, topic: str, delivery: Delivery, committed_at_crash: int, afterwards: list[int]
) -> None:
    """Records 0-9, a commit every 5, a crash while handling 6."""
    broker.produce(topic, numbers(10))
    source = subscription(broker, topic, commit_every=5)
    before = Effects(crash_at=6)
    with pytest.raises(Crash):
        consume(source, delivery, before)
    assert before.seen == [0, 1, 2, 3, 4, 5]
    assert committed(broker, source) == {0: committed_at_crash}

    after = Effects()
    report = consume(source, delivery, after)
    assert after.seen == afterwards
    assert report["records"] == len(afterwards)
    assert committed(broker, source) == {0: 10}


def test_the_committed_value_is_the_next_offset_of_its_own_partition(broker: Broker, topic: str) -> None:
    two = broker.create_topic(f"{topic}_two", partitions=2)
    source = subscription(broker, two)
    broker.produce(two, numbers(3, partition=0))
    consume(source, "at_least_once", Effects())
    assert committed(broker, source, (0, 1)) == {0: 3}

    broker.produce(two, numbers(2, partition=1))
    effects = Effects()
    consume(source, "at_least_once", effects)
    assert effects.seen == [0, 1]
    assert committed(broker, source, (0, 1)) == {0: 3, 1: 2}
    assert consume(source, "at_least_once", Effects())["records"] == 0


def test_fewer_records_are_redone_the_more_often_it_commits(broker: Broker, topic: str) -> None:
    broker.produce(topic, numbers(30))
    redone = {}
    for interval in (1, 5, 10):
        source = subscription(broker, topic, group=f"{topic}_{interval}", commit_every=interval)
        before, after = Effects(crash_at=18), Effects()
        with pytest.raises(Crash):
            consume(source, "at_least_once", before)
        consume(source, "at_least_once", after)
        assert sorted({*before.seen, *after.seen}) == list(range(30)), "nothing is lost"
        redone[interval] = len(before.seen) + len(after.seen) - 30
    assert redone == {1: 0, 5: 3, 10: 8}
    assert all(count < interval for interval, count in redone.items())


def test_a_truncated_source_ends_the_program_unless_it_may_go_on(broker: Broker, topic: str) -> None:
    broker.produce(topic, numbers(4))
    source = subscription(broker, topic)
    consume(source, "at_least_once", Effects())
    broker.produce(topic, numbers(3))
    expired = TopicPartition(topic, 0, 6)
    broker.admin.delete_records([expired])[expired].result()
    with pytest.raises(DataRefused, match=f"records of {topic}/0 from offset 4 on are gone"):
        consume(source, "at_least_once", Effects())
    effects = Effects()
    consume(subscription(broker, topic, fail_on_data_loss=False), "at_least_once", effects)
    assert effects.seen == [6]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (KafkaError.NOT_COORDINATOR, True),  # librdkafka's retriable() is False
        (KafkaError.UNKNOWN_LEADER_EPOCH, True),
        (KafkaError._TRANSPORT, True),
        (KafkaError._NOENT, True),  # of the ends of a topic: no leaders found
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, False),
        (KafkaError._FENCED, False),
    ],
)
def test_errors_of_a_broker_that_restarts_pass_and_others_do_not(code: int, expected: bool) -> None:
    assert passes(KafkaError(code)) is expected


def test_a_broker_that_restarts_is_waited_for(broker: Broker, topic: str) -> None:
    broker.produce(topic, numbers(2))
    source = subscription(broker, topic, until_end=False, commit_every=1)
    effects, stopped = Effects(), threading.Event()
    with closing(CheckpointedConsumer(source, "at_least_once", effects)) as consumer:
        thread = threading.Thread(target=consumer.run, args=[stopped])
        thread.start()
        try:
            eventually(lambda: effects.seen == [0, 1])
            broker.stop()
            broker.start()
            broker.produce(topic, numbers(1))
            eventually(lambda: effects.seen[-1] == 2, 60)
        finally:
            stopped.set()
            thread.join()
    assert effects.seen == [0, 1, 2]
    assert committed(broker, source) == {0: 3}


def test_snippet_with_effects_of_your_own(broker: Broker, topic: str) -> None:
    broker.produce(topic, numbers(2))
    sent: list[tuple[Any, ...]] = []
    code = snippet(PAGE, f"{HERE}::test_snippet_with_effects_of_your_own").replace('"visits"', repr(topic))
    exec(code, {"servers": broker.bootstrap_servers, "send": lambda *record: sent.append(record)})
    assert sent == [(b"k", b"0"), (b"k", b"1")]


def test_wrong_use_and_what_is_not_there_give_one_sentence(broker: Broker, topic: str) -> None:
    for changes, sentence in [
        ({"commit_every": 0}, "commit_every must be 1 or more, got 0"),
        ({"commit_seconds": 0}, "commit_seconds must be above 0, got 0"),
        ({"settings": {"sasl.password": "hunter2"}}, r"sasl.password is a secret"),
    ]:  # fmt: skip
        with pytest.raises(WrongUse, match=sentence):
            subscription(broker, topic, **changes)
    with pytest.raises(WrongUse, match=r"delivery must be one of at_least_once, .*, got 'never'"):
        consume(subscription(broker, topic), "never", Effects())  # type: ignore[arg-type]
    with pytest.raises(WrongUse, match="exactly_once, and no other delivery, needs positions"):
        consume(subscription(broker, topic), "exactly_once", Effects())
    with pytest.raises(NotReady, match="there is no topic absent"):
        consume(subscription(broker, "absent"), "at_least_once", Effects())


# --- exactly once: the position is committed with the records ---------------------------------------------


class Bronze:
    """A topic of two partitions and the table of its records."""

    def __init__(self, spark: SparkSession, broker: Broker, topic: str, folder: Path) -> None:
        self.spark, self.broker, self.folder = spark, broker, folder
        self.topic = broker.create_topic(f"{topic}_records", partitions=2)
        self.target = str(folder / "bronze")

    def parameters(self, **changes: Any) -> Parameters:
        given = {
            "bootstrap_servers": self.broker.bootstrap_servers,
            "topic": self.topic,
            "group": "bronze",
            "target": self.target,
            "until_end": True,
            "now": "2024-03-01T10:00:00Z",
        }
        return Parameters(**(given | changes))

    def load(self, **changes: Any) -> dict[str, Any]:
        return job.run(self.spark, self.parameters(**changes))

    def rows(self) -> DataFrame:
        return self.spark.read.format("delta").load(self.target).select("partition", "offset", "payload")


@pytest.fixture
def bronze(spark: SparkSession, broker: Broker, topic: str, tmp_path: Path) -> Bronze:
    return Bronze(spark, broker, topic, tmp_path)


def test_records_and_position_are_one_commit_whatever_kafka_holds(
    bronze: Bronze, monkeypatch: pytest.MonkeyPatch
) -> None:
    bronze.broker.produce(bronze.topic, [*numbers(2, 0), *numbers(1, 1), Record(None, b"k", partition=1)])
    bronze.load()
    expected = [(0, 0, "0"), (0, 1, "1"), (1, 0, "0"), (1, 1, None)]
    assert_rows(bronze.rows(), expected)

    # A crash between the table's commit and the group's: Kafka's position is behind, the table's is not.
    bronze.broker.produce(bronze.topic, numbers(1, 0))
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointedConsumer, "_commit", lambda *_: (_ for _ in ()).throw(Crash))
        with pytest.raises(Crash):
            bronze.load()
    assert committed(bronze.broker, bronze.parameters(), (0, 1)) == {0: 2, 1: 2}
    expected.append((0, 2, "0"))
    assert_rows(bronze.rows(), expected)
    assert bronze.load()["records"] == 0
    # A crash before the table's commit: the records come again.
    bronze.broker.produce(bronze.topic, numbers(1, 1))
    with monkeypatch.context() as patched:
        patched.setattr(job, "write_once", lambda *_, **__: (_ for _ in ()).throw(Crash))
        with pytest.raises(Crash):
            bronze.load()
    assert bronze.load()["records"] == 1
    assert_rows(bronze.rows(), [*expected, (1, 2, "0")])

    # A rewound group moves nothing here; a new generation begins where the group stands, and repeats.
    client = Consumer({"bootstrap.servers": bronze.broker.bootstrap_servers, "group.id": "bronze"})
    with closing(client):
        client.commit(offsets=[TopicPartition(bronze.topic, 0, 1)], asynchronous=False)
    assert bronze.load()["records"] == 0
    assert bronze.load(generation=1)["records"] == 2
    assert_rows(bronze.rows().where("partition = 0 and offset > 0"), [(0, 1, "1"), (0, 2, "0")] * 2)


def test_a_recreated_topic_is_refused_or_read_from_its_first_record(bronze: Bronze) -> None:
    bronze.broker.produce(bronze.topic, numbers(5, 0))
    bronze.load()
    old = [(0, offset, str(offset)) for offset in range(5)]
    # First the new topic ends before the old one's position, then behind it.
    for generation, count in enumerate((1, 7)):
        recreate(bronze.broker, bronze.topic, [Record(b"new", b"k", partition=0)] * count, partitions=2)
        with pytest.raises(DataRefused, match=f"the topic {bronze.topic} was deleted and recreated"):
            bronze.load()
        new = [(0, offset, "new") for offset in range(count)]
        assert_rows(bronze.rows(), old)
        assert bronze.load(fail_on_data_loss=False)["records"] == count, generation
        assert_rows(bronze.rows(), old + new)
        bronze.broker.produce(bronze.topic, [Record(b"newer", b"k", partition=0)])
        assert bronze.load()["next_offsets"] == {0: count + 1, 1: 0}
        old += [*new, (0, count, "newer")]
        assert_rows(bronze.rows(), old)


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_a_topic_recreated_while_it_is_read_loses_nothing_of_the_new_one(
    broker: Broker, topic: str, delivery: Delivery
) -> None:
    broker.produce(topic, numbers(3))
    source = subscription(broker, topic)
    effects = Effects()
    with closing(CheckpointedConsumer(source, delivery, effects)) as consumer:
        old = consumer._topic
        recreate(broker, topic, numbers(6))
        with pytest.raises(
            DataRefused, match=f"the topic {topic} was deleted and recreated.* {old.id}, and "
        ):
            consumer.run(threading.Event())
    assert (effects.seen, committed(broker, source)) == ([], {})

    # As if the topic had been recreated between the check and the commit.
    with closing(
        Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": source.group})
    ) as client:
        client.commit(offsets=[old.position(topic, 0, 3)], asynchronous=False)
    with pytest.raises(DataRefused, match=r"with --fail_on_data_loss false$"):
        consume(source, delivery, effects)
    consume(replace(source, fail_on_data_loss=False), delivery, effects)
    assert effects.seen == [0, 1, 2, 3, 4, 5]
    broker.produce(topic, numbers(1))
    consume(source, delivery, effects)
    assert effects.seen == [0, 1, 2, 3, 4, 5, 6]


def test_a_write_that_delta_skips_ends_the_program(bronze: Bronze, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a topic recreated while it is read: the table's position is beyond the records that come."""
    bronze.broker.produce(bronze.topic, numbers(2, 0))
    sink = job.TableSink(bronze.spark, bronze.parameters())
    rows = bronze.spark.createDataFrame([], "value string")
    write_once(bronze.spark, rows, bronze.target, transaction=(sink._app_id(0), 9))
    monkeypatch.setattr(job.TableSink, "positions", lambda *_: {})
    with pytest.raises(JobFailed, match=f"already has records of {bronze.topic}/0 up to offset 2 or beyond"):
        bronze.load()
    assert committed(bronze.broker, bronze.parameters()) == {}


@pytest.mark.parametrize("loads_before", [1, 0], ids=["later", "at the first record"])
def test_two_processes_of_one_group_are_noticed(bronze: Bronze, loads_before: int) -> None:
    for _ in range(loads_before):
        bronze.broker.produce(bronze.topic, numbers(1, 0))
        bronze.load()
    sink = job.TableSink(bronze.spark, bronze.parameters())
    with closing(
        CheckpointedConsumer(bronze.parameters(), "exactly_once", sink.append_once, sink.positions)
    ) as first:
        first._ends = {0: None}
        bronze.broker.produce(bronze.topic, numbers(1, 0))
        bronze.load()
        with pytest.raises(JobFailed, match=f"another process claimed {bronze.topic}/0 of group bronze"):
            first.run(threading.Event())
    assert bronze.rows().count() == loads_before + 1


def test_job_snippet_of_the_page(bronze: Bronze) -> None:
    config = bronze.folder / "visits.yml"
    config.write_text(snippet(PAGE, f"{HERE}::test_job_snippet_of_the_page"))
    given = bronze.parameters()
    names = ("bootstrap_servers", "topic", "group", "target")
    options = [word for name in names for word in (f"--{name}", getattr(given, name))]
    parameters, _ = parse_parameters(Parameters, ["--config", str(config), *options])
    assert parameters.delivery == "exactly_once"
    bronze.broker.produce(bronze.topic, numbers(7, 0))
    for records in (7, 0):
        assert job.run(bronze.spark, replace(parameters, until_end=True))["records"] == records
    assert_rows(bronze.rows().select("offset"), [(offset,) for offset in range(7)])
