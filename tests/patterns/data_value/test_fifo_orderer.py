"""FIFO Orderer: records of interest arrive in their order, whatever happens to requests and answers on their way."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from python_jobs.data_value import fifo_orderer_kafka as program
from python_jobs.data_value.fifo_orderer_kafka import Forwarder, Parameters
from python_jobs.data_value.ordering_scopes import Positions, lane_of
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.kafka.partitions import partition_of
from python_jobs.shared.kafka.producers import Outgoing, Sender
from services.kafka import Broker, Record
from tests.support.kafka_proxy import LOSE, LOSE_ANSWER, PASS, KafkaProxy, proxied
from tests.support.pytest_ids import REPOSITORY
from tests.support.snippets import snippet
from tests.support.topics import recreate
from tests.support.waiting import eventually

PAGE = "docs/data_value.md"
HERE = "tests/patterns/data_value/test_fifo_orderer.py"
_NUMBERS = itertools.count()
# Each record is a request of its own, and a lost request is noticed after half a second.
SINGLY = {"batch.num.messages": "1", "linger.ms": "0", "socket.timeout.ms": "500"}


def event(name: str, key: bytes = b"user", page: str = "login", **fields: Any) -> Record:
    return Record(json.dumps({"event": name, "page": page} | fields).encode(), key)


@pytest.fixture(scope="module")
def proxy(broker: Broker) -> Iterator[KafkaProxy]:
    with proxied(broker) as running:
        yield running


class Topics:
    """A source and a target, which is reached through the proxy, and the runs between them."""

    def __init__(self, broker: Broker, proxy: KafkaProxy, folder: Path) -> None:
        self.broker, self.proxy = broker, proxy
        number = next(_NUMBERS)
        self.source = broker.create_topic(f"fifo_visits_{number}")
        self.target = broker.create_topic(f"fifo_logins_{number}")
        self.interest = folder / "logins.yml"
        self.interest.write_text("properties: {page: {const: login}}\nrequired: [page]\n")
        proxy.reset()

    def parameters(self, **changes: Any) -> Parameters:
        given = {
            "source_topic": self.source,
            "source_bootstrap_servers": self.broker.bootstrap_servers,
            "target_topic": self.target,
            "target_bootstrap_servers": self.proxy.address,
            "interest": str(self.interest),
            "until_end": True,
            "wait_seconds": 0,
        }
        return Parameters(**(given | changes))

    def put(self, *records: Record) -> None:
        self.broker.produce(self.source, records)

    def run(self, **changes: Any) -> dict[str, Any]:
        with contextlib.closing(Forwarder(self.parameters(**changes))) as forwarder:
            return forwarder.run(threading.Event())

    def arrived(self) -> list[str]:
        return [json.loads(found.value() or b"")["event"] for found in self.broker.records(self.target)]


@pytest.fixture
def topics(broker: Broker, proxy: KafkaProxy, tmp_path: Path) -> Topics:
    return Topics(broker, proxy, tmp_path)


def losing(value: bytes, times: int, what: str = LOSE) -> Callable[[bytes], str]:
    """Return the decision to lose the first requests that hold a value."""
    left = iter(range(times))
    return lambda request: what if value in request and next(left, None) is not None else PASS


@pytest.mark.kafka
def test_records_of_interest_are_sent_when_the_one_before_is_acknowledged(topics: Topics) -> None:
    topics.put(
        event("e1", at="10:05"),
        event("x", page="home"),
        Record(b'{"event": "no page"}', b"user"),
        Record(None, b"user"),
        event("e2", at="09:00"),  # late: arrival decides
        event("e3", key=b"other"),
    )
    assert topics.run() == {"records": 6, "forwarded": 3, "unreadable": 0, "next_offsets": {0: 6}}
    assert topics.arrived() == ["e1", "e2", "e3"]
    assert topics.proxy.timeline == ["request", "answer"] * 3
    found = topics.broker.records(topics.target)
    assert [message.key() for message in found] == [b"user", b"user", b"other"]
    places = [dict(message.headers() or [])["forwarded_from"].decode() for message in found]
    assert places == [f"{topics.source}/0/{offset}" for offset in (0, 4, 5)]
    # Again: nothing is left.
    assert topics.run()["forwarded"] == 0
    assert topics.arrived() == ["e1", "e2", "e3"]


@pytest.mark.kafka
def test_a_record_that_fails_is_tried_again_and_nothing_passes_it(topics: Topics) -> None:
    topics.put(event("e1"), event("e2"), event("e3"))
    topics.proxy.reset(losing(b"e2", 99))
    sentence = rf"{topics.source}/0 offset 1 was not delivered to .* \(1 of 1 records were not taken .*Purged"
    for workers in (2, 1):  # of one worker no record is read before the one before is acknowledged
        with pytest.raises(JobFailed, match=sentence):
            topics.run(attempts=2, attempt_seconds=0.3, workers=workers)
    assert len(topics.proxy.holding(b"e2")) == 4
    assert topics.proxy.holding(b"e3") == []
    assert topics.arrived() == ["e1"]
    topics.proxy.reset(losing(b"e2", 2))
    assert topics.run(attempts=3, attempt_seconds=0.3)["forwarded"] == 2
    assert len(topics.proxy.holding(b"e2")) == 3
    assert topics.arrived() == ["e1", "e2", "e3"]


@pytest.mark.kafka
def test_five_requests_without_sequence_numbers_change_the_order(topics: Topics) -> None:
    """The negative control: these settings are refused, so a producer of Kafka's client gets them."""
    topics.proxy.reset(losing(b"e1", 1))
    unsafe = {"enable.idempotence": False, "max.in.flight": 5, "bootstrap.servers": topics.proxy.address}
    sender = Sender(SINGLY | unsafe)
    delivery = sender.start([Outgoing(topics.target, event(f"e{n}").value, b"k") for n in range(1, 6)])
    assert delivery.wait(30)
    sender.close()
    assert topics.arrived() == ["e2", "e3", "e4", "e5", "e1"]


@pytest.mark.kafka
@pytest.mark.parametrize(("variant", "in_flight"), [("one_in_flight", 1), ("idempotent", 5)])
def test_the_order_survives_a_lost_request(topics: Topics, variant: str, in_flight: int) -> None:
    names = [f"e{n}" for n in range(8)]
    topics.put(*map(event, names))
    # Also the very first one: the broker would take any sequence number of a new producer.
    lost = [losing(b'"e0"', 1), losing(b'"e3"', 1)]
    topics.proxy.reset(lambda request: LOSE if LOSE in [decide(request) for decide in lost] else PASS)
    topics.run(variant=variant, target_settings=SINGLY)
    assert topics.arrived() == names
    assert 1 <= topics.proxy.max_in_flight <= in_flight
    assert (topics.proxy.max_in_flight > 1) == (in_flight > 1)


@pytest.mark.kafka
@pytest.mark.parametrize("variant", ["one_in_flight", "idempotent"])
def test_collected_records_need_fewer_requests(topics: Topics, variant: str) -> None:
    names = [f"e{n}" for n in range(20)]
    topics.put(*map(event, names))
    topics.run(variant=variant, target_settings={"linger.ms": "200"})
    assert topics.arrived() == names
    assert len(topics.proxy.requests) <= 4


@pytest.mark.kafka
def test_a_record_refused_for_good_stops_what_is_behind(topics: Topics) -> None:
    topics.target = topics.broker.create_topic(f"{topics.target}_small", 1, {"max.message.bytes": "1000"})
    topics.put(event("e1"), event("e2", text="x" * 2000), event("e3"), event("e4"))
    for variant, settings in (("one_request", {}), ("idempotent", SINGLY)):
        with pytest.raises(JobFailed, match=r"offset 1 was not delivered .*(too large|MSG_SIZE|larger)"):
            topics.run(variant=variant, target_settings=settings)
        assert topics.arrived() == ["e1"]


@pytest.mark.kafka
def test_a_producer_goes_on_behind_a_fatal_error(broker: Broker) -> None:
    """Kafka's client raises such an error in its next call; the thread that asks for answers must survive it."""
    topic = broker.create_topic(f"fifo_fatal_{next(_NUMBERS)}", 1, {"max.message.bytes": "1000"})
    gapless = {"enable.idempotence": True, "enable.gapless.guarantee": True}
    sender = Sender({"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 0, "log_level": 0} | gapless)
    try:
        (error,) = sender.deliver([Outgoing(topic, b"x" * 2000, b"k")], 30).values()
        assert error is not None
        assert error.fatal()
        assert "too large" in error.str()
        eventually(lambda: sender.deliver([Outgoing(topic, b"small", b"k")], 30) == {})
    finally:
        sender.close()
    assert [message.value() for message in broker.records(topic)] == [b"small"]


@pytest.mark.kafka
def test_a_broker_that_does_not_answer_ends_the_run(topics: Topics) -> None:
    topics.put(event("e1"), event("e2"))
    topics.proxy.reset(losing(b"e", 99))
    with pytest.raises(JobFailed, match=r"offset 0 was not delivered .*no answer within 0\.5 s"):
        topics.run(variant="one_in_flight", total_seconds=0.5, target_settings={"linger.ms": "0"})
    topics.proxy.reset()
    assert topics.run()["forwarded"] == 2
    assert topics.arrived()[-2:] == ["e1", "e2"]


@pytest.mark.kafka
def test_a_crash_before_the_commit_sends_one_record_again(
    topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.put(event("e1"), event("e2"), event("e3"))
    commit, killed = Forwarder._commit, list[bool]()

    def crashing(self: Forwarder) -> None:
        if killed:
            return  # as a dead process
        if self._positions.next() == {0: 2}:
            killed.append(True)
            raise RuntimeError("killed between the acknowledgement and the commit")
        commit(self)

    with monkeypatch.context() as crash:
        crash.setattr(Forwarder, "_commit", crashing)
        with pytest.raises(RuntimeError, match="killed between"):
            topics.run()
    assert topics.arrived() == ["e1", "e2"]
    assert topics.run()["forwarded"] == 2
    assert topics.arrived() == ["e1", "e2", "e2", "e3"]
    # A sink that knows the place of each record has it once.
    with sqlite3.connect(":memory:") as sink:
        sink.execute("create table logins (place text primary key, event text)")
        for message in topics.broker.records(topics.target):
            row = (dict(message.headers())["forwarded_from"], json.loads(message.value())["event"])
            sink.execute("insert into logins values (?, ?) on conflict do nothing", row)
        assert sink.execute("select event from logins").fetchall() == [("e1",), ("e2",), ("e3",)]


@pytest.mark.kafka
def test_a_slow_key_does_not_delay_another_and_no_key_changes_its_worker(topics: Topics) -> None:
    keys = (b"A", b"D")
    assert {lane_of(key, 2) for key in keys} == {0, 1}
    topics.put(*(event(f"{key.decode()}{n}", key) for n in range(4) for key in keys))
    others_arrived = threading.Event()

    def slow(request: bytes) -> str:
        if b'"A' in request:
            assert others_arrived.wait(30)
        return PASS

    topics.proxy.reset(slow)
    with contextlib.closing(Forwarder(topics.parameters(workers=2))) as forwarder:
        running = threading.Thread(target=forwarder.run, args=[threading.Event()])
        running.start()
        eventually(lambda: topics.arrived() == ["D0", "D1", "D2", "D3"])
        others_arrived.set()
        running.join()
    assert topics.arrived() == ["D0", "D1", "D2", "D3", "A0", "A1", "A2", "A3"]
    of_a, of_b = topics.proxy.holding(b'"A'), topics.proxy.holding(b'"D')
    assert (len(of_a), len(set(of_a)), len(of_b), len(set(of_b))) == (4, 1, 4, 1)
    assert set(of_a) != set(of_b)


@pytest.mark.kafka
def test_a_stop_delivers_what_was_read(topics: Topics) -> None:
    topics.put(event("e1"), event("e2"), event("e3"))
    given = topics.parameters(
        variant="one_in_flight", until_end=False, target_settings={"linger.ms": "60000"}
    )
    stopped = threading.Event()
    with contextlib.closing(Forwarder(given)) as forwarder:
        running = threading.Thread(target=forwarder.run, args=[stopped])
        running.start()
        eventually(lambda: forwarder._read == 3)
        assert topics.arrived() == []  # they linger
        stopped.set()
        running.join()
    assert topics.arrived() == ["e1", "e2", "e3"]
    assert topics.run()["records"] == 0  # and their positions are stored


@pytest.mark.kafka
def test_partitions_that_another_process_gets_are_finished_first(broker: Broker, topics: Topics) -> None:
    topics.source = broker.create_topic(f"{topics.source}_wide", 2)
    given = topics.parameters(until_end=False, source_settings={"heartbeat.interval.ms": "100"})
    stopped = threading.Event()
    with contextlib.ExitStack() as stack:

        def start() -> Forwarder:
            forwarder = stack.enter_context(contextlib.closing(Forwarder(given)))
            running = threading.Thread(target=forwarder.run, args=[stopped])
            running.start()
            stack.callback(running.join)
            return forwarder

        stack.callback(stopped.set)
        first = start()
        broker.produce(topics.source, [Record(event(f"a{n}").value, b"k", partition=n % 2) for n in range(4)])
        eventually(lambda: len(topics.arrived()) == 4)
        second = start()
        eventually(lambda: {len(first._positions.next()), len(second._positions.next())} == {1})
        broker.produce(topics.source, [Record(event(f"b{n}").value, b"k", partition=n % 2) for n in range(4)])
        eventually(lambda: len(topics.arrived()) == 8)
        stopped.set()
    assert sorted(topics.arrived()) == sorted(f"{run}{n}" for run in "ab" for n in range(4))
    for names in (["b0", "b2"], ["b1", "b3"]):
        assert [name for name in topics.arrived() if name in names] == names


@pytest.mark.kafka
def test_a_value_that_is_no_json_stops_the_run_or_is_counted(topics: Topics) -> None:
    topics.interest.write_text(
        "{properties: {page: {const: login}, x: {maximum: 9007199254740992}}, required: [page]}"
    )
    login = '{"event": "e", "page": "login"}'
    no_json = [
        b"fff",
        b'{"page": NaN}',
        login.encode("utf-16"),
        b'{"page": "login", "event": "\xed\xa0\x80"}',
        b'{"page": "login", "page": "login"}',
    ]
    # Numbers that a double takes for infinity and for the limit: they don't fit the schema, which is no failure.
    large = [f'{login[:-1]}, "x": {number}}}'.encode() for number in ("1e400", "9007199254740992.1")]
    values = [*no_json, *large]
    topics.put(event("e1"), *(Record(value, b"user") for value in values), event("e2", x=9007199254740992))
    for _ in range(2):
        with pytest.raises(
            DataRefused, match=rf"{topics.source}/0 offset 1 is no JSON: .*--unreadable skip$"
        ):
            topics.run()
        assert topics.arrived() == ["e1"]
    assert topics.run(unreadable="skip") == {
        "records": 8, "forwarded": 1, "unreadable": 5, "next_offsets": {0: 9},
    }  # fmt: skip
    assert topics.arrived() == ["e1", "e2"]


@pytest.mark.kafka
def test_records_that_are_gone_stop_the_run_unless_it_may_go_on(broker: Broker, topics: Topics) -> None:
    with pytest.raises(NotReady, match="there is no topic absent"):
        topics.run(source_topic="absent")
    topics.put(event("e1"), event("e2"), event("e3"))
    topics.proxy.reset(losing(b"e2", 99))
    with pytest.raises(JobFailed, match="offset 1 was not delivered"):
        topics.run(attempts=1, attempt_seconds=0.2)
    topics.proxy.reset()
    gone = TopicPartition(topics.source, 0, 2)
    broker.admin.delete_records([gone])[gone].result()
    with pytest.raises(DataRefused, match=f"records of {topics.source}/0 from offset 1 on are gone"):
        topics.run()
    assert topics.run(fail_on_data_loss=False)["forwarded"] == 1
    assert topics.arrived() == ["e1", "e3"]
    with contextlib.closing(Forwarder(topics.parameters())) as forwarder:
        recreate(broker, topics.source, [event(f"n{n}") for n in range(5)])
        with pytest.raises(DataRefused, match="was deleted and recreated"):
            forwarder.run(threading.Event())
    assert topics.arrived() == ["e1", "e3"]
    assert topics.run()["forwarded"] == 5, "the brokers have forgotten the positions in the deleted topic"


@pytest.mark.kafka
def test_sigterm_ends_the_command_of_the_page_well(topics: Topics) -> None:
    topics.put(event("e1"), event("x", page="home"))
    command = snippet(PAGE, f"{HERE}::test_sigterm_ends_the_command_of_the_page_well")
    for name, value in {
        "--source_bootstrap_servers localhost:9092": f"--source_bootstrap_servers {topics.broker.bootstrap_servers}",
        "--target_bootstrap_servers localhost:9092": f"--target_bootstrap_servers {topics.proxy.address}",
        "--source_topic visits": f"--source_topic {topics.source}",
        "--target_topic logins": f"--target_topic {topics.target}",
        "logins.yml": str(topics.interest),
        "python -m": f"{sys.executable} -m",
    }.items():
        assert name in command
        command = command.replace(name, value)
    words = shlex.split(command.replace("\\\n", " "))
    with subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        eventually(lambda: topics.arrived() == ["e1"])
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(said)["forwarded"] == 1


@pytest.mark.kafka
@pytest.mark.kill
def test_a_kill_between_send_and_answer_sends_one_record_again(topics: Topics) -> None:
    topics.put(event("e1"), event("e2"), event("e3"))
    topics.proxy.reset(losing(b"e2", 99, LOSE_ANSWER))
    given = topics.parameters()
    words = [sys.executable, "-m", program.__name__]
    for name in ("source_topic", "source_bootstrap_servers", "target_topic", "target_bootstrap_servers"):
        words += [f"--{name}", getattr(given, name)]
    with subprocess.Popen([*words, "--interest", given.interest], cwd=REPOSITORY) as process:
        eventually(lambda: topics.arrived() == ["e1", "e2"])
        os.kill(process.pid, signal.SIGKILL)
    topics.proxy.reset()
    # The killed one is a member of the group until its session is over.
    assert topics.run()["forwarded"] == 2
    assert topics.arrived() == ["e1", "e2", "e2", "e3"]


IN_FLIGHT = "max.in.flight.requests.per.connection"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"variant": "idempotent", "target_settings": {"max.in.flight": "6"}},
            f"{IN_FLIGHT} must be 1 to 5, got 6",
        ),
        ({"target_settings": {IN_FLIGHT: "many"}}, f"{IN_FLIGHT} must be 1 to 5, got many"),
        (
            {"variant": "one_in_flight", "target_settings": {IN_FLIGHT: "2"}},
            f"{IN_FLIGHT} is 2 and enable.idempotence is off",
        ),
        (
            {"variant": "idempotent", "target_settings": {"enable.idempotence": "false"}},
            f"{IN_FLIGHT} is 5 and enable.idempotence is off",
        ),
        ({"target_settings": {"request.required.acks": "1"}}, "acks must be all, got 1"),
        ({"target_settings": {"message.timeout.ms": "5"}}, "the setting message.timeout.ms can't be given"),
        ({"target_settings": {"partitioner": "random"}}, "the setting partitioner can't be given"),
        ({"target_settings": {"sasl.password": "hunter2"}}, "sasl.password is a secret"),
        ({"workers": 0}, "workers must be 1 or more, got 0"),
        ({"attempts": 0}, "attempts must be 1 or more, got 0"),
        ({"total_seconds": 0}, "total_seconds must be above 0"),
        ({"target_topic": "visits"}, "visits would forward to itself"),
        ({"interest": "absent.yml"}, "the JSON Schema 'absent.yml' doesn't exist"),
    ],
)
def test_settings_that_could_change_the_order_and_wrong_use_are_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "any.json").write_text("{}")
    given = {
        "source_topic": "visits",
        "source_bootstrap_servers": "a:1",
        "target_topic": "logins",
        "target_bootstrap_servers": "a:1",
        "interest": str(tmp_path / "any.json"),
    }
    Parameters(**given)
    with pytest.raises(WrongUse, match=sentence):
        Parameters(**given | changes)


def test_a_position_waits_for_the_oldest_record_on_its_way() -> None:
    positions = Positions()
    positions.start(0, 10, None)
    positions.start(1, 0, 0)
    assert positions.moved() == {0: 10}
    for offset, is_open in ((10, True), (11, False), (12, True)):
        positions.read(0, offset, is_open)
    positions.done(0, 12)
    assert positions.next() == {0: 10, 1: 0}
    positions.done(0, 10)
    assert positions.moved() == {0: 13}
    positions.stored({0: 13})
    assert positions.moved() == {}
    positions.clear()
    positions.done(0, 10)  # acknowledged after the partition was given away
    assert positions.next() == {}


@pytest.mark.kafka
def test_keys_have_the_partitions_of_kafkas_own_clients(broker: Broker) -> None:
    topic = broker.create_topic(f"fifo_keys_{next(_NUMBERS)}", 7)
    keys = [b"", *(bytes(range(size)) for size in range(1, 30)), *(f"ü{n}".encode() for n in range(30))]
    broker.produce(topic, [Record(b"", key) for key in keys], {"partitioner": "murmur2"})
    found = {message.key(): message.partition() for message in broker.records(topic)}
    assert found == {key: partition_of(key, 7) for key in keys}
    assert len(set(found.values())) == 7
    assert partition_of(None, 7) == partition_of(b"", 7)
