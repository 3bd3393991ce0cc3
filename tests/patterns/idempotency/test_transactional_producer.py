"""Transactional Writer into Kafka: what read_committed and read_uncommitted see of committed and aborted records."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from python_jobs.idempotency.transactional_writer_kafka import Parameters, Reducer
from python_jobs.shared.core.failures import DataRefused, JobFailed, WrongUse
from services.kafka import Broker, Record
from tests.support.pytest_ids import REPOSITORY
from tests.support.snippets import snippet
from tests.support.waiting import eventually

pytestmark = pytest.mark.kafka
PAGE = "docs/idempotency.md"
HERE = "tests/patterns/idempotency/test_transactional_producer.py"
_NUMBERS = itertools.count()


def visit(number: int) -> Record:
    record = {
        "visit_id": f"v{number}",
        "event_time": 1_700_000_000 + number,
        "page": "/home",
        "user": {"id": 1},
    }
    return Record(json.dumps(record).encode(), b"user")


def reduced(*numbers: int) -> list[bytes]:
    return [b'{"visit_id":"v%d","at":%d}' % (number, 1_700_000_000 + number) for number in numbers]


def seen(broker: Broker, topic: str, isolation: str) -> list[bytes | None]:
    """Return the values that a consumer of this isolation level gets up to the topic's end."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "reader",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    values = []
    try:
        while (message := consumer.poll(30)) is not None and message.error() is None:
            values.append(message.value())
        assert message is not None, "the end of the topic didn't come"
        return values
    finally:
        consumer.close()


@pytest.fixture
def parameters(broker: Broker) -> Callable[..., Parameters]:
    number = next(_NUMBERS)
    source = broker.create_topic(f"visits_{number}")
    target = broker.create_topic(f"reduced_visits_{number}")

    def make(**changes: Any) -> Parameters:
        given = {
            "source_topic": source,
            "source_bootstrap_servers": broker.bootstrap_servers,
            "target_topic": target,
            "target_bootstrap_servers": broker.bootstrap_servers,
            "fields": {"visit_id": "visit_id", "at": "event_time"},
            "until_end": True,
        }
        return Parameters(**(given | changes))

    return make


def reduce(parameters: Parameters) -> dict[str, Any]:
    reducer = Reducer(parameters)
    try:
        return reducer.run(threading.Event())
    finally:
        reducer.close()


def test_records_are_reduced_and_read_once(broker: Broker, parameters: Any) -> None:
    given = parameters()
    broker.produce(given.source_topic, [visit(1), visit(2), Record(None, b"user")])
    assert reduce(given)["records"] == 3
    assert reduce(given)["records"] == 0
    expected = [*reduced(1, 2), None]
    eventually(lambda: seen(broker, given.target_topic, "read_committed") == expected)
    assert seen(broker, given.target_topic, "read_uncommitted") == expected


def test_a_poison_message_aborts_its_transaction_and_only_dirty_readers_see_of_it(
    broker: Broker, parameters: Any
) -> None:
    given = parameters(commit_seconds=30)
    broker.produce(given.source_topic, [visit(1)])
    reduce(given)
    broker.produce(given.source_topic, [visit(2), Record(b"fff")])
    reducer = Reducer(given)
    with pytest.raises(
        DataRefused, match=rf"{given.source_topic}/0 offset 2 is no JSON object with visit_id, event_time"
    ):
        reducer.run(threading.Event())
    # The open transaction's record is sent, and then given up.
    reducer._producer.flush(30)
    assert seen(broker, given.target_topic, "read_uncommitted") == reduced(1, 2)
    reducer.close()
    eventually(lambda: seen(broker, given.target_topic, "read_committed") == reduced(1))
    assert seen(broker, given.target_topic, "read_uncommitted") == reduced(1, 2)
    # Again and again, until the record is gone from the source; then each record is there once.
    with pytest.raises(DataRefused):
        reduce(given)
    gone = TopicPartition(given.source_topic, 0, 3)
    broker.admin.delete_records([gone])[gone].result()
    broker.produce(given.source_topic, [visit(3)])
    assert reduce(parameters(fail_on_data_loss=False))["records"] == 1
    eventually(lambda: seen(broker, given.target_topic, "read_committed") == reduced(1, 3))


def test_a_successor_fences_the_one_that_still_lives(broker: Broker, parameters: Any) -> None:
    given = parameters(until_end=False)
    zombie = Reducer(given)
    broker.produce(given.source_topic, [visit(1)])
    reduce(parameters())
    with pytest.raises(JobFailed, match="claimed the target topic"):
        zombie.run(threading.Event())
    zombie.close()
    eventually(lambda: seen(broker, given.target_topic, "read_committed") == reduced(1))


def test_a_transaction_outlives_its_commit_and_can_not_be_set_up_otherwise(
    parameters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker gives a transaction up 60 s after its commit is due; its own limit is 15 minutes."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "python_jobs.shared.kafka.replication.Producer",
        lambda settings: made.append(settings) or _refuse(),
    )
    with pytest.raises(InterruptedError):
        Reducer(parameters(commit_seconds=5))
    assert made[0]["transaction.timeout.ms"] == 65_000
    for seconds in (0, 301):
        with pytest.raises(WrongUse, match="commit_seconds must be above 0 and at most 300"):
            parameters(commit_seconds=seconds)
    with pytest.raises(WrongUse, match="fields names no field"):
        parameters(fields={})


def _refuse() -> Any:
    raise InterruptedError


def test_the_command_of_the_page(broker: Broker, parameters: Any) -> None:
    given = parameters()
    broker.produce(given.source_topic, [visit(1)])
    command = snippet(PAGE, f"{HERE}::test_the_command_of_the_page")
    for name, value in {
        "localhost:9092": broker.bootstrap_servers,
        "--target_topic reduced_visits": f"--target_topic {given.target_topic}",
        "--source_topic visits": f"--source_topic {given.source_topic}",
        "python -m": f"{sys.executable} -m",
    }.items():
        assert name in command
        command = command.replace(name, value)
    done = subprocess.run(
        command.strip() + " --until_end true",
        shell=True,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["records"] == 1
    eventually(lambda: seen(broker, given.target_topic, "read_committed") == reduced(1))
