"""Passthrough Replicator for Kafka: the replica is the topic, record for record, also after a kill."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import NewPartitions

from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.kafka import clients as kafka_clients
from python_jobs.shared.kafka.replication import Parameters, Replicator
from services.kafka import Broker, Record
from services.processes import free_port
from tests.support.pytest_ids import REPOSITORY
from tests.support.snippets import snippet
from tests.support.topics import recreate

pytestmark = pytest.mark.kafka
PAGE = "docs/ingestion.md"
THIS = "tests/patterns/ingestion/test_topic_replicator.py::"
_NUMBERS = itertools.count()

# In partition 0 and 1: values 1-1, 1-2 of one key in order, NULL and empty values and keys, a header twice.
RECORDS = [
    Record(b"1-1", b"event1", (("h1", b"a"), ("h2", b"b"), ("h1", b"c")), 0, 1_700_000_000_001),
    Record(b"2-1", b"event2", (("h1", None), ("h2", b"")), 1, 1_700_000_000_000),
    Record(b"3-1", b"event3", (), 0, 1),
    Record(b"1-2", b"event1", (), 0, 1_600_000_000_000),
    Record(None, b"event1", (("deleted", b"yes"),), 0, 1_700_000_000_003),
    Record(b"no key", None, (), 1, 1_700_000_000_004),
    Record(b"", b"", (), 1, 1_700_000_000_005),
    Record(b"\xff\x00\xfe", b"\x00", (), 1, 1_700_000_000_006),
]


def as_written(record: Record) -> tuple[Any, ...]:
    return record.partition, record.key, record.value, record.headers, record.timestamp


def as_read(message: Message) -> tuple[Any, ...]:
    headers = tuple(message.headers() or ())
    return message.partition(), message.key(), message.value(), headers, message.timestamp()[1]


def replica(broker: Broker, topic: str, count: int) -> list[Message]:
    """Return the records of a replica once it has ``count``: Kafka shows a transaction soon after its commit."""

    _until(lambda: _count(broker, topic) >= count)
    return broker.records(topic)


def by_partition(records: list[tuple[Any, ...]]) -> dict[int, list[tuple[Any, ...]]]:
    return {p: [r for r in records if r[0] == p] for p in sorted({r[0] for r in records})}


@pytest.fixture
def pair(broker: Broker) -> tuple[str, str]:
    """Return a topic of two partitions that holds RECORDS, and an empty one like it."""
    number = next(_NUMBERS)
    source = broker.create_topic(f"events_{number}", partitions=2)
    target = broker.create_topic(f"events_replicated_{number}", partitions=2)
    broker.produce(source, RECORDS)
    return source, target


@pytest.fixture
def parameters(broker: Broker, pair: tuple[str, str]) -> Callable[..., Parameters]:
    def make(**changes: Any) -> Parameters:
        source, target = pair
        servers = broker.bootstrap_servers
        return Parameters(
            **{
                "source_topic": source,
                "source_bootstrap_servers": servers,
                "target_topic": target,
                "target_bootstrap_servers": servers,
                "until_end": True,
            }
            | changes
        )

    return make


def replicate(parameters: Parameters, stopped: threading.Event | None = None) -> dict[str, Any]:
    replicator = Replicator(parameters)
    try:
        return replicator.run(stopped or threading.Event())
    finally:
        replicator.close()


def command(parameters: Parameters, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "python_jobs.ingestion.passthrough_replicator_kafka",
        "--source_topic", parameters.source_topic, "--target_topic", parameters.target_topic,
        "--source_bootstrap_servers", parameters.source_bootstrap_servers,
        "--target_bootstrap_servers", parameters.target_bootstrap_servers, *more,
    ]  # fmt: skip


def test_the_replica_is_the_topic_record_for_record(broker: Broker, pair: Any, parameters: Any) -> None:
    source, target = pair
    assert replicate(parameters(position_header=None))["records"] == 8
    copied = [as_read(message) for message in replica(broker, target, 8)]
    assert by_partition(copied) == by_partition([as_written(record) for record in RECORDS])
    assert copied == [as_read(message) for message in broker.records(source)]


def test_the_header_says_where_a_record_comes_from_and_a_rerun_adds_nothing(
    broker: Broker, pair: Any, parameters: Any
) -> None:
    source, target = pair
    replicate(parameters())
    assert replicate(parameters())["records"] == 0
    broker.produce(source, [Record(b"1-3", b"event1", partition=0, timestamp=5)])
    assert replicate(parameters()) == {"records": 1, "bytes": 9, "next_offsets": {0: 5, 1: 4}}
    copied = replica(broker, target, 9)
    assert [message.headers()[-1] for message in copied] == [
        ("replicated_from", f"{source}/{message.partition()}/{number}".encode())
        for number, message in zip([0, 1, 2, 3, 4, 0, 1, 2, 3], copied, strict=True)
    ]
    assert [tuple(message.headers()[:-1]) for message in copied[:2]] == [RECORDS[0].headers, ()]


def test_records_that_the_source_gave_up_are_not_copied(broker: Broker, pair: Any, parameters: Any) -> None:
    source, target = pair
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "transactional.id": source})
    producer.init_transactions()
    for value, end in (("given up", producer.abort_transaction), ("kept", producer.commit_transaction)):
        producer.begin_transaction()
        producer.produce(source, value, partition=0)
        end()
    assert replicate(parameters())["records"] == 9
    assert replicate(parameters())["records"] == 0, "the transaction's end mark is no record to wait for"
    values = [message.value() for message in replica(broker, target, 9)]
    assert (values.count(b"kept"), values.count(b"given up")) == (1, 0)


def test_a_target_that_can_not_be_a_replica_is_refused(broker: Broker, pair: Any, parameters: Any) -> None:
    source, _ = pair
    narrow = broker.create_topic(f"{source}_narrow", partitions=1)
    with pytest.raises(WrongUse, match=f"{narrow} has 1 partitions, source topic {source} has 2"):
        replicate(parameters(target_topic=narrow))
    stamped = broker.create_topic(f"{source}_stamped", 2, {"message.timestamp.type": "LogAppendTime"})
    with pytest.raises(WrongUse, match=r"message\.timestamp.type=LogAppendTime"):
        replicate(parameters(target_topic=stamped))
    with pytest.raises(WrongUse, match="its own replica"):
        parameters(target_topic=source)
    with pytest.raises(WrongUse, match=r"sasl.password is a secret"):
        parameters(source_settings={"sasl.password": "hunter2"})
    with pytest.raises(WrongUse, match="commit_seconds"):
        parameters(commit_seconds=0)
    assert broker.records(narrow) == broker.records(stamped) == []


def test_what_is_not_there_is_not_ready(parameters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_clients, "ANSWER_SECONDS", 3)
    with pytest.raises(NotReady, match="there is no topic absent"):
        replicate(parameters(source_topic="absent"))
    nobody = f"127.0.0.1:{free_port()}"
    with pytest.raises(NotReady, match=f"no Kafka broker answers at {nobody}"):
        replicate(parameters(source_bootstrap_servers=nobody))
    monkeypatch.setenv("SOURCE_PASSWORD", "hunter2")
    secured = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "u",
        "sasl.password": "${env:SOURCE_PASSWORD}",
    }
    with pytest.raises(JobFailed) as refused:
        replicate(parameters(source_settings=secured))
    assert "hunter2" not in str(refused.value)
    monkeypatch.delenv("SOURCE_PASSWORD")
    with pytest.raises(WrongUse, match=r"SOURCE_PASSWORD.* isn't set"):
        replicate(parameters(source_settings=secured))


def test_expired_records_stop_the_replica_unless_it_may_go_on(
    broker: Broker, pair: Any, parameters: Any
) -> None:
    source, target = pair
    replicate(parameters())
    broker.produce(source, [Record(b"lost", partition=0), Record(b"next", partition=0)])
    expired = TopicPartition(source, 0, 5)
    broker.admin.delete_records([expired])[expired].result()
    with pytest.raises(DataRefused, match=f"records of {source}/0 from offset 4 on are gone"):
        replicate(parameters())
    assert replicate(parameters(fail_on_data_loss=False))["records"] == 1
    assert [m.value() for m in replica(broker, target, 9)].count(b"next") == 1


def test_a_recreated_source_is_refused_even_if_it_has_more_records(
    broker: Broker, pair: Any, parameters: Any
) -> None:
    source, target = pair
    assert replicate(parameters())["records"] == 8
    new = [Record(f"new {number}".encode(), partition=number % 2) for number in range(20)]
    refused = f"the topic {source} was deleted and recreated: .* with --fail_on_data_loss false$"
    with contextlib.closing(Replicator(parameters(until_end=False))) as running:
        recreate(broker, source, new, partitions=2)
        with pytest.raises(DataRefused, match=refused):
            running.run(threading.Event())
    with pytest.raises(DataRefused, match=refused):
        replicate(parameters())
    assert len(broker.records(target)) == 8
    assert replicate(parameters(fail_on_data_loss=False))["records"] == 20
    assert Counter(message.value() for message in replica(broker, target, 28)[-10:]) == Counter(
        record.value for record in new if record.partition == 1
    )
    assert replicate(parameters())["records"] == 0


def test_records_of_unknown_origin_in_the_target_stop_the_start(
    broker: Broker, pair: Any, parameters: Any
) -> None:
    _, target = pair
    broker.produce(target, [Record(b"somebody else's", partition=1)])
    with pytest.raises(DataRefused, match=f"{target}/1 holds records and no position is known"):
        replicate(parameters())
    assert replicate(parameters(start_over=True))["records"] == 8


def test_a_successor_claims_the_topic_and_its_predecessor_ends(
    broker: Broker, pair: Any, parameters: Any
) -> None:
    source, target = pair
    first = Replicator(parameters(until_end=False))
    replicate(parameters())
    broker.produce(source, [Record(b"after the change", partition=0)])
    # The first still believes that it is at the start.
    with pytest.raises(JobFailed, match="claimed the target topic"):
        first.run(threading.Event())
    first.close()
    assert replicate(parameters())["records"] == 1
    assert Counter(m.value() for m in replica(broker, target, 9))[b"1-1"] == 1


def test_added_partitions_end_the_run_instead_of_being_missed(
    broker: Broker, pair: Any, parameters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = pair
    monkeypatch.setattr("python_jobs.shared.kafka.replication._TOPICS_SECONDS", 0)
    replicator = Replicator(parameters(until_end=False))
    broker.admin.create_partitions([NewPartitions(source, 3)])[source].result()
    with pytest.raises(JobFailed, match=f"{source} has 3 partitions now, and 2 are replicated"):
        replicator.run(threading.Event())
    replicator.close()


@pytest.mark.kill
def test_a_killed_replicator_goes_on_without_loss_or_double(
    broker: Broker, pair: Any, parameters: Any
) -> None:
    """Killed in the middle of a transaction: what it wrote is given up, and told apart by its header."""
    source, target = pair
    many = [Record(f"{number}".encode(), b"k", partition=number % 2) for number in range(2_000)]
    broker.produce(source, many)
    log = subprocess.Popen(
        command(parameters(), "--commit_seconds", "300"), cwd=REPOSITORY, start_new_session=True
    )
    # One record keeps arriving, so that the source never pauses and the transaction stays open.
    with _end_of(broker, target) as end:
        while sum(map(end, (0, 1))) < 1_500:
            assert log.poll() is None
            broker.produce(source, [Record(b"more", partition=0)])
    log.kill()
    log.wait()
    assert broker.records(target) == [], "nothing was committed"

    replicate(parameters())
    originals = broker.records(source)
    copied = replica(broker, target, len(originals))
    assert [as_read(m)[:3] for m in copied] == [as_read(m)[:3] for m in originals]
    seen = Counter(message.headers()[-1][1] for message in _all_records(broker, target))
    assert max(seen.values()) == 2
    assert set(seen) == {f"{source}/{m.partition()}/{m.offset()}".encode() for m in originals}


def test_a_broker_that_restarts_costs_nothing_but_another_run(
    broker: Broker, pair: Any, parameters: Any
) -> None:
    """The program goes on, or ends with a sentence and the next one goes on."""
    source, target = pair
    main = (
        "import sys; from python_jobs.shared.kafka import replication; replication._COMMIT_SECONDS = 3; "
        "from python_jobs.ingestion import passthrough_replicator_kafka as t; "
        "sys.argv[0] = 'topic_replicator'; t.run_program(t.Parameters, t.run)"
    )
    arguments = command(parameters())[3:]
    program = subprocess.Popen(
        [sys.executable, "-c", main, *arguments], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
    )
    try:
        replica(broker, target, 8)
        broker.stop()
        broker.start()
        broker.produce(source, [Record(b"after the restart", partition=1)])
        _until(lambda: program.poll() is not None or _count(broker, target) == 9)
        if program.poll() is None:
            program.terminate()
        assert (program.wait(30), "run again" in program.communicate()[1]) in [(0, False), (1, True)]
    finally:
        program.kill()
    replicate(parameters())
    assert [m.value() for m in replica(broker, target, 9)].count(b"after the restart") == 1
    assert len(broker.records(target)) == 9


def test_the_command_of_the_page(broker: Broker, pair: Any) -> None:
    """Stopped by SIGTERM it ends with 0."""
    source, target = pair
    text = snippet(PAGE, f"{THIS}test_the_command_of_the_page")
    for written, real in {
        "kafka.production:9092": broker.bootstrap_servers,
        "kafka.staging:9092": broker.bootstrap_servers,
        "--source_topic events ": f"--source_topic {source} ",
        "--target_topic events ": f"--target_topic {target} ",
        "python -m": f"exec {sys.executable} -m",
    }.items():
        text = text.replace(written, real)
    program = subprocess.Popen(
        ["bash", "-c", text], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        _until(lambda: program.poll() is not None or _count(broker, target) >= 8)
        assert len(broker.records(target)) == 8
        program.terminate()
        out, err = program.communicate(timeout=30)
        assert program.returncode == 0, err
        assert '"records": 8' in out.splitlines()[-1]
    finally:
        program.kill()


def _count(broker: Broker, topic: str) -> int:
    with contextlib.suppress(KafkaException):  # a broker that has just started leads no partition yet
        return len(broker.records(topic))
    return -1


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class _end_of:  # noqa: N801
    """Tell how many records, committed or not, a partition has."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": broker.bootstrap_servers,
                "group.id": "ends",
                "isolation.level": "read_uncommitted",
            }
        )
        self._topic = topic

    def __enter__(self) -> Callable[[int], int]:
        return lambda p: self._consumer.get_watermark_offsets(TopicPartition(self._topic, p), 10)[1]

    def __exit__(self, *_: object) -> None:
        self._consumer.close()


def _all_records(broker: Broker, topic: str) -> Iterator[Message]:
    """Read a topic as a consumer does that also takes what was given up."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": f"uncommitted-{topic}",
            "isolation.level": "read_uncommitted",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, partition, 0) for partition in (0, 1)])
    ends = 0
    while ends < 2:
        message = consumer.poll(10)
        if message is None or message.error():
            ends += 1
        else:
            yield message
    consumer.close()
