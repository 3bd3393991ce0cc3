"""API Gateway: what is accepted is delivered or kept, and nothing else reaches the topic."""

from __future__ import annotations

import json
import math
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from confluent_kafka import KafkaError, KafkaException

from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import JobFailed, NotReady, WrongUse
from python_jobs.shared.kafka import producers
from python_jobs.shared.kafka.producers import Delivery
from python_jobs.streaming import api_gateway_http as program
from python_jobs.streaming.api_gateway_http import Parameters, create_app, running_gateway
from python_jobs.streaming.gateway_client import GatewayProducer
from python_jobs.streaming.gateway_records import Message, Rule, Topic
from python_jobs.streaming.gateway_stores import Buffer, Fallback
from python_jobs.streaming.rate_limit import RateLimit
from services.kafka import Broker
from services.processes import free_port
from tests.support.service_process import service_process
from tests.support.snippets import snippets
from tests.support.waiting import at_once, eventually

PAGE = "docs/streaming.md"
HERE = "tests/patterns/streaming/test_api_gateway.py"
SERVICE = "python_jobs.streaming.api_gateway_http"
JSON = {"Content-Type": "application/json"}
SCHEMA = {"type": "object", "properties": {"visit_time": {"type": "string", "format": "date-time"}}}
URL = "/ingestion/ingest/visits/user-1"


class FakeProducer:
    """A producer whose broker acknowledges, refuses or doesn't answer, as a test says."""

    answer: Callable[[bytes], KafkaError | None] | None = staticmethod(lambda value: None)
    """Function from a message's value to the broker's error; None: the broker doesn't answer."""
    sent: list[tuple[str, bytes, bytes]]
    made = 0

    def __init__(self, settings: dict[str, Any]) -> None:
        type(self).made += 1
        self.settings = settings
        self._waiting: list[tuple[bytes, Callable[..., None]]] = []
        self._lock = threading.Lock()

    def produce(
        self,
        topic: str,
        value: bytes,
        key: bytes,
        headers: object,
        on_delivery: Callable[..., None],
        partition: int,
    ) -> None:
        with self._lock:
            self.sent.append((topic, key, value))
            self._waiting.append((value, on_delivery))

    def poll(self, seconds: float) -> None:
        with self._lock:
            answer = type(self).answer
            answered, self._waiting = (self._waiting, []) if answer else ([], self._waiting)
        for value, on_delivery in answered:
            assert answer is not None
            on_delivery(answer(value), None)
        time.sleep(0.001)

    def purge(self, **_: bool) -> None:
        with self._lock:
            purged, self._waiting = self._waiting, []
        for _, on_delivery in purged:
            on_delivery(KafkaError(KafkaError._PURGE_QUEUE), None)

    def flush(self, seconds: float) -> None:
        self.poll(0)


@pytest.fixture
def producer(monkeypatch: pytest.MonkeyPatch) -> type[FakeProducer]:
    """Return the class of the gateway's producers, which takes the place of Kafka's."""
    made: type[FakeProducer] = type("Fake", (FakeProducer,), {"sent": []})
    monkeypatch.setattr(producers, "Producer", made)
    monkeypatch.setattr(program, "_require_topics", lambda _: None)
    return made


@pytest.fixture
def parameters(tmp_path: Path) -> Callable[..., Parameters]:
    """Return a function from changes to the parameters of a gateway in the test's folder."""
    (tmp_path / "visits.json").write_text(json.dumps(SCHEMA), encoding="utf-8")
    rules = [
        Rule("visit_time", not_after="now", tolerance_seconds=60),
        Rule("started", not_after="ended"),
    ]

    def make(**changes: Any) -> Parameters:
        given = {
            "topics": [Topic("visits", str(tmp_path / "visits.json"), rules)],
            "bootstrap_servers": "127.0.0.1:9",
            "fallback": str(tmp_path / "fallback"),
            "flush_seconds": 0.2,
        }
        return Parameters(**given | changes)

    return make


@contextmanager
def client_of(parameters: Parameters, limit: RateLimit | None = None) -> Iterator[Any]:
    with running_gateway(parameters) as gateway:
        yield create_app(gateway, limit or RateLimit(10_000), parameters.max_body_bytes).test_client()


def post(client: Any, *records: Any, url: str = URL, **headers: str) -> Any:
    return client.post(url, data=json.dumps(list(records)), headers=JSON | headers)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the fallback's files, in the order of the files' names."""
    files = sorted((folder / "fallback").rglob("*.jsonl"), key=lambda file: file.name)
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def values(folder: Path) -> list[str]:
    return [line["value"] for line in lines(folder)]


# --- the broker is there ----------------------------------------------------------------------------------


@pytest.mark.kafka
@pytest.mark.parametrize("buffer", [None, "buffer.sqlite"], ids=["direct", "buffer"])
def test_records_are_delivered_as_they_were_sent(
    tmp_path: Path, parameters: Any, broker: Broker, topic: str, buffer: str | None
) -> None:
    given = parameters(
        topics=[Topic(topic, str(tmp_path / "visits.json"))],
        bootstrap_servers=broker.bootstrap_servers,
        buffer=buffer and str(tmp_path / buffer),
        flush_seconds=20,
    )
    body = b'[ {"a" :1.10,"n":12345678901234567890.0},{"\\u00fc": "\xc3\xbc\\ud800"},\n{"e":1E+2 } ]'
    headers = JSON | {"Referer": "https://example.org/\xc3\xbc", "Idempotency-Key": "r1"}
    with client_of(given) as client:
        answer = client.post(f"/ingestion/ingest/{topic}/us%C3%BCr%201", data=body, headers=headers)
        assert answer.status_code == 202
        where = {"buffered": 3} if buffer else {"delivered": 3, "stored": 0}
        assert answer.json == {"accepted": 3, **where}
        found = eventually(lambda: (records := broker.records(topic)) and len(records) == 3 and records)
        done = {"accepted": 3, "delivered": 3, "stored": 0, "rejected": 0, "buffered": 0}
        assert eventually(lambda: client.get("/status").json == done)
    assert [message.value() for message in found] == [
        b'{"a" :1.10,"n":12345678901234567890.0}',
        b'{"\\u00fc": "\xc3\xbc\\ud800"}',
        b'{"e":1E+2 }',
    ]
    assert [message.key() for message in found] == ["usür 1".encode()] * 3
    assert [message.headers() for message in found] == [
        [("origin", b"api"), ("referral", "https://example.org/ü".encode()), ("event_id", b"r1-%d" % ordinal)]
        for ordinal in range(3)
    ]
    assert lines(tmp_path) == []


@pytest.mark.kafka
def test_topics_that_a_broker_does_not_have_are_refused_at_the_start(parameters: Any, broker: Broker) -> None:
    given = parameters(bootstrap_servers=broker.bootstrap_servers)
    with (
        pytest.raises(NotReady, match=f"^there is no topic visits at {broker.bootstrap_servers}; create it$"),
        running_gateway(given),
    ):
        pass


# --- the broker is away -----------------------------------------------------------------------------------


def test_what_a_silent_broker_does_not_take_is_in_the_fallback_within_the_time(
    tmp_path: Path, parameters: Any, producer: type[FakeProducer]
) -> None:
    producer.answer = None
    with client_of(parameters()) as client:
        # The broker never answers: a wait without a limit would have no end.
        answer = post(client, {"n": 1}, {"n": 2}, **{"Idempotency-Key": "r1", "Referer": "here"})
        assert (answer.status_code, answer.json) == (202, {"accepted": 2, "delivered": 0, "stored": 2})
        (file,) = (tmp_path / "fallback").rglob("*.jsonl")
        assert file.parent.name == "topic=visits"
        for line in (stored := lines(tmp_path)):
            line.pop("accepted_at")
        assert stored == [
            {
                "key": "user-1",
                "value": f'{{"n": {n + 1}}}',
                "referral": "here",
                "event_id": f"r1-{n}",
                "ordinal": n,
            }
            for n in range(2)
        ]
        # Nothing is left in the producer's queue, from which it would be delivered as well.
        producer.answer = staticmethod(lambda value: None)
        assert post(client, {"n": 3}).json == {"accepted": 1, "delivered": 1, "stored": 0}
        assert len(lines(tmp_path)) == 2


def test_only_one_request_at_a_time_waits_for_a_broker_that_is_away(
    tmp_path: Path, parameters: Any, producer: type[FakeProducer]
) -> None:
    producer.answer = None
    with client_of(parameters(flush_seconds=1)) as client:
        post(client, {"n": 0})
        answers = at_once(*(lambda n=n: post(client, {"n": n}).json["stored"] for n in range(1, 5)))
        assert answers == [1] * 4
        assert len(producer.sent) == 2, (
            "of the four one tried; the others went to the fallback without waiting"
        )
        producer.answer = staticmethod(lambda value: None)
        delivered = [post(client, {"n": n}).json["delivered"] for n in range(5, 8)]
        assert delivered == [1, 1, 1]
    assert len(lines(tmp_path)) == 5


@pytest.mark.parametrize("code", [KafkaError._MSG_TIMED_OUT, KafkaError.MSG_SIZE_TOO_LARGE])
def test_of_three_records_only_the_one_that_fails_is_in_the_fallback(
    tmp_path: Path, parameters: Any, producer: type[FakeProducer], code: int
) -> None:
    producer.answer = staticmethod(lambda value: KafkaError(code) if b"2" in value else None)
    with client_of(parameters()) as client:
        assert post(client, {"n": 1}, {"n": 2}, {"n": 3}).json == {"accepted": 3, "delivered": 2, "stored": 1}
    assert values(tmp_path) == ['{"n": 2}']


def test_a_full_producer_and_a_refusing_one_send_the_rest_to_the_fallback(
    tmp_path: Path, parameters: Any, producer: type[FakeProducer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def produce(self: FakeProducer, topic: str, value: bytes, *rest: Any, **named: Any) -> None:
        if b"1" in value:
            raise BufferError
        if b"2" in value:
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
        FakeProducer.produce(self, topic, value, *rest, **named)

    monkeypatch.setattr(producer, "produce", produce)
    with client_of(parameters()) as client:
        assert post(client, {"n": 1}, {"n": 2}, {"n": 3}).json["stored"] == 2
    assert values(tmp_path) == ['{"n": 1}', '{"n": 2}']


def test_a_producer_that_fails_for_good_is_replaced(
    tmp_path: Path, parameters: Any, producer: type[FakeProducer]
) -> None:
    producer.answer = staticmethod(lambda value: KafkaError(KafkaError._FATAL, "fenced", True))
    with client_of(parameters()) as client:
        assert post(client, {"n": 1}).json["stored"] == 1
        producer.answer = staticmethod(lambda value: None)
        assert eventually(lambda: producer.made == 2)
        assert post(client, {"n": 2}).json["delivered"] == 1
    assert producer.made == 2


@pytest.mark.parametrize("buffer", [None, "buffer.sqlite"], ids=["direct", "buffer"])
def test_records_that_can_be_kept_nowhere_are_not_accepted(
    tmp_path: Path,
    parameters: Any,
    producer: type[FakeProducer],
    monkeypatch: pytest.MonkeyPatch,
    buffer: str | None,
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    producer.answer = None
    with client_of(parameters(buffer=buffer and str(tmp_path / buffer), buffer_records=1)) as client:
        monkeypatch.setattr(Fallback, "write", full)
        answer = post(client, {"n": 1}, {"n": 2})
        assert (answer.status_code, answer.headers.get("Retry-After")) == (503, "5")
        assert answer.json == {"error": "the records can't be kept now; send them again later"}
        assert client.get("/status").json["accepted"] == 0


# --- the buffer -------------------------------------------------------------------------------------------


def test_a_full_buffer_sends_records_to_the_fallback_and_a_broken_one_too(
    tmp_path: Path, parameters: Any, producer: type[FakeProducer], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer.answer = None
    with client_of(parameters(buffer=str(tmp_path / "buffer.sqlite"), buffer_records=3)) as client:
        assert post(client, {"n": 1}, {"n": 2}).json == {"accepted": 2, "buffered": 2}
        assert post(client, {"n": 3}, {"n": 4}).json == {"accepted": 2, "delivered": 0, "stored": 2}
        assert post(client, {"n": 5}).json == {"accepted": 1, "buffered": 1}

        def broken(*_: Any) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(Buffer, "append", broken)
        assert post(client, {"n": 6}).json == {"accepted": 1, "delivered": 0, "stored": 1}
        assert client.get("/status").json["buffered"] == 3
        producer.answer = staticmethod(lambda value: None)
        assert eventually(lambda: client.get("/status").json["buffered"] == 0)
    assert [value for _, _, value in producer.sent] == [b'{"n": 1}', b'{"n": 2}', b'{"n": 5}']
    assert values(tmp_path) == ['{"n": 3}', '{"n": 4}', '{"n": 6}']


def test_a_restart_delivers_what_the_buffer_holds_in_its_order(
    tmp_path: Path, parameters: Any, producer: type[FakeProducer]
) -> None:
    producer.answer = None
    given = parameters(buffer=str(tmp_path / "buffer.sqlite"))
    with client_of(given) as client:
        for n in range(3):
            post(client, {"n": n}, {"n": n + 10})
        with pytest.raises(JobFailed, match=r"another gateway works on .*; give this one its own buffer"):
            Buffer(str(tmp_path / "buffer.sqlite"), 10)
    producer.sent.clear()
    producer.answer = staticmethod(lambda value: None)
    with client_of(given) as client:
        assert eventually(lambda: client.get("/status").json["buffered"] == 0)
    assert [json.loads(value)["n"] for _, _, value in producer.sent] == [0, 10, 1, 11, 2, 12]
    producer.sent.clear()
    with client_of(given):
        pass
    assert (producer.sent, lines(tmp_path)) == ([], [])


def test_a_record_that_the_broker_refuses_for_good_does_not_hold_up_the_buffer(
    tmp_path: Path, parameters: Any, producer: type[FakeProducer]
) -> None:
    producer.answer = staticmethod(
        lambda value: KafkaError(KafkaError.MSG_SIZE_TOO_LARGE) if b"2" in value else None
    )
    with client_of(parameters(buffer=str(tmp_path / "buffer.sqlite"))) as client:
        post(client, {"n": 1}, {"n": 2}, {"n": 3})
        done = {"accepted": 3, "delivered": 2, "stored": 1, "rejected": 0, "buffered": 0}
        assert eventually(lambda: client.get("/status").json == done)
    assert values(tmp_path) == ['{"n": 2}']


@pytest.mark.kafka
def test_an_outage_is_no_matter_of_the_producers_and_the_buffer_s_order_holds(
    tmp_path: Path, parameters: Any, broker: Broker, topic: str
) -> None:
    given = parameters(
        topics=[Topic(topic, str(tmp_path / "visits.json"))],
        bootstrap_servers=broker.bootstrap_servers,
        buffer=str(tmp_path / "buffer.sqlite"),
    )
    url = f"/ingestion/ingest/{topic}/user-1"
    with client_of(given) as client:
        post(client, {"n": 0}, url=url)
        assert eventually(lambda: client.get("/status").json["delivered"] == 1)
        broker.kill()
        try:
            for n in range(1, 6):
                answer = post(client, {"n": n}, {"n": n + 100}, url=url)
                assert (answer.status_code, answer.json) == (202, {"accepted": 2, "buffered": 2})
            assert client.get("/status").json["buffered"] == 10
        finally:
            broker.start()
        assert eventually(lambda: client.get("/status").json["buffered"] == 0, 60)
    found = [json.loads(message.value() or b"")["n"] for message in broker.records(topic)]
    assert found == [0, 1, 101, 2, 102, 3, 103, 4, 104, 5, 105]
    assert lines(tmp_path) == []


def test_a_buffer_of_another_format_is_refused(tmp_path: Path) -> None:
    Buffer(str(tmp_path / "b"), 1).close()
    connection = sqlite3.connect(tmp_path / "b")
    connection.execute("pragma user_version = 9")
    connection.close()
    with pytest.raises(WrongUse, match="has format 9; this program writes format 1"):
        Buffer(str(tmp_path / "b"), 1)


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "rejected"),
    [
        (b"{nope", None),
        (b"", None),
        (b'{"n": 1}', None),
        (
            b'[{"n": 1}, {"visit_time": 5}]',
            {1: ['visit_time: 5 is not of type "string"', "visit_time: 5 is no timestamp"]},
        ),
        (
            b'[{"visit_time": "9999-01-01T00:00:00Z"}, {"n": 1}, {"started": 2, "ended": 1}, 7]',
            {
                0: ["visit_time: 9999"],
                2: ["started: 2 is after ended, 1"],
                3: ["a record must be a JSON object"],
            },
        ),
    ],
)
@pytest.mark.parametrize("buffer", [None, "buffer.sqlite"], ids=["direct", "buffer"])
def test_all_records_of_a_request_are_accepted_or_none_is(
    tmp_path: Path,
    parameters: Any,
    producer: type[FakeProducer],
    body: bytes,
    rejected: dict[int, list[str]] | None,
    buffer: str | None,
) -> None:
    with client_of(parameters(buffer=buffer and str(tmp_path / buffer))) as client:
        answer = client.post(URL, data=body, headers=JSON)
        assert answer.status_code == 400
        found = {entry["record"]: entry["reasons"] for entry in answer.json.get("rejected", [])}
        assert found.keys() == (rejected or {}).keys()
        for place, reasons in (rejected or {}).items():
            starts = [text[: len(start)] for text, start in zip(found[place], reasons, strict=True)]
            assert starts == reasons
        if rejected:
            total = body.count(b"{") + body.count(b"7")
            assert (
                answer.json["error"] == f"{len(rejected)} of {total} records are invalid; none was accepted"
            )
            assert client.get("/status").json["rejected"] == total
        assert client.get("/status").json["buffered"] == 0
        assert client.post(URL, data=b"[]", headers=JSON).status_code == 202
    assert (producer.sent, lines(tmp_path)) == ([], [])


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("visits/user-1", 202),
        ("visits/%C3%BC%20..", 202),
        ("clicks/user-1", 404),
        ("Visits/user-1", 404),
        ("../x/user-1", 400),
        ("%2E%2E%2Fx/user-1", 400),
        ("..%2Fx/user-1", 400),
        ("../user-1", 400),
        ("./user-1", 400),
        ("topic=x%2Fvisits/user-1", 400),
        ("visits%00/user-1", 400),
        ("visits/", 400),
        ("visits/a/b", 400),
        ("visits/a%2Fb", 400),
        ("visits/%FF", 400),
        ("visits", 400),
    ],
)
def test_an_unknown_topic_is_404_and_a_path_400(
    tmp_path: Path, parameters: Any, producer: type[FakeProducer], target: str, status: int
) -> None:
    producer.answer = None
    with client_of(parameters(flush_seconds=0.01)) as client:
        answer = client.post(f"/ingestion/ingest/{target}", data=b"[{}]", headers=JSON)
        assert answer.status_code == status
        assert "error" in answer.json or status == 202
    written = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_dir()}
    assert written == {"fallback"} | ({"fallback/topic=visits"} if status == 202 else set())


def test_size_rate_token_and_request_id_have_limits(parameters: Any, producer: type[FakeProducer]) -> None:
    clock = [0.0]
    with client_of(parameters(max_body_bytes=20), RateLimit(2, lambda: clock[0])) as client:
        assert client.post(URL, data=b"[" + b" " * 18 + b"]", headers=JSON).status_code == 202
        assert client.post(URL, data=b"[" + b" " * 19 + b"]", headers=JSON).status_code == 413
        answer = post(client)
        assert (answer.status_code, answer.json) == (429, {"error": "too many requests"})
        assert answer.headers["Retry-After"] == "1"
        clock[0] += 10
        assert post(client, **{"Idempotency-Key": "a b"}).status_code == 400
        assert post(client, **{"Idempotency-Key": "x" * 201}).status_code == 400
        clock[0] += 10
        assert client.post(URL, data=b"[]", headers={"Content-Type": "text/plain"}).status_code == 415
    with running_gateway(parameters()) as gateway:
        guarded = create_app(gateway, RateLimit(100), 100, token="s3cret").test_client()
        assert post(guarded).status_code == 401
        assert post(guarded, Authorization="Bearer s3cret").status_code == 202


@pytest.mark.parametrize(
    ("referer", "expected"),
    [(None, ""), ("", ""), ("https://example.org/a?b", "https://example.org/a?b"), ("caf\xe9", "café")],
)
def test_a_referer_is_kept_and_none_is_an_empty_referral(
    tmp_path: Path, parameters: Any, producer: type[FakeProducer], referer: str | None, expected: str
) -> None:
    producer.answer = None
    with client_of(parameters(flush_seconds=0.01)) as client:
        headers = {} if referer is None else {"Referer": referer}
        assert post(client, {"n": 1}, **headers).status_code == 202
    assert [line["referral"] for line in lines(tmp_path)] == [expected]


def test_wrong_configurations_are_refused(
    parameters: Any, producer: type[FakeProducer], tmp_path: Path
) -> None:
    for changes, sentence in [
        ({"topics": []}, "topics must have one name each, all different"),
        ({"topics": [Topic("a", "s"), Topic("a", "s")]}, "topics must have one name each, all different"),
        ({"host": "0.0.0.0"}, "host '0.0.0.0' is reachable from other machines"),
        ({"flush_seconds": math.nan}, "flush_seconds must be above 0, got nan"),
        ({"flush_seconds": 3601}, "flush_seconds 3600 at most"),
        ({"requests_per_second": math.inf}, "requests_per_second must be"),
        ({"buffer_records": 0}, "buffer_records must be 1 or more, got 0"),
        ({"max_body_bytes": 0}, "max_body_bytes must be 1 or more, got 0"),
        ({"threads": 0}, "threads must be 1 or more, got 0"),
        ({"settings": {"sasl.password": "s3cret"}}, "pass it as"),
        (
            {"settings": {"acks": "1", "enable.idempotence": "false"}},
            "settings acks, enable.idempotence can't be",
        ),
    ]:
        with pytest.raises(WrongUse, match=sentence):
            parameters(**changes)
    (tmp_path / "file").touch()
    with (
        pytest.raises(WrongUse, match=r"the fallback '.*/file' can't be created: File exists"),
        running_gateway(parameters(fallback=str(tmp_path / "file"))),
    ):
        pass


def test_wrong_settings_of_kafka_are_one_sentence(parameters: Any) -> None:
    with (
        pytest.raises(
            WrongUse, match=r'^the settings of Kafka are wrong: No such configuration property: "nope"'
        ),
        running_gateway(parameters(settings={"nope": "1"})),
    ):
        pass


# --- the fallback's files ---------------------------------------------------------------------------------


def message(n: int, topic: str = "visits") -> Message:
    return Message(topic, f"user-{n % 3}", f'{{"n": {n}}}', "", "r", n, "2024-03-01T12:00:00.000000+00:00")


def test_two_instances_write_files_of_their_own_and_no_reader_sees_a_part(tmp_path: Path) -> None:
    instances = [Fallback(str(tmp_path / "fallback")) for _ in range(2)]
    stopped = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not stopped.is_set():
            seen.append(len(lines(tmp_path)))  # a part of a line would be no JSON

    def write(instance: Fallback, start: int) -> None:
        for n in range(start, start + 40):
            instance.write([message(n)] * 50)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        at_once(*(lambda i=i, s=s: write(i, s) for s, i in ((0, instances[0]), (1000, instances[1]))))
    finally:
        stopped.set()
        reader.join()
    files = list((tmp_path / "fallback" / "topic=visits").iterdir())
    assert {file.suffix for file in files} == {".jsonl"}
    assert len(files) == 80
    assert len(lines(tmp_path)) == 4000
    assert all(count % 50 == 0 for count in seen)


def test_a_request_of_two_topics_is_a_file_of_each(tmp_path: Path) -> None:
    Fallback(str(tmp_path / "fallback")).write([message(1, "a"), message(2, "b"), message(3, "a")])
    folders = {folder.name: folder for folder in (tmp_path / "fallback").iterdir()}
    assert folders.keys() == {"topic=a", "topic=b"}
    (file,) = folders["topic=a"].iterdir()
    assert [json.loads(line)["value"] for line in file.read_text().splitlines()] == ['{"n": 1}', '{"n": 3}']


def test_a_delivery_without_an_answer_is_undelivered() -> None:
    delivery = Delivery([message(1), message(2), message(3)])
    delivery.answer(0, None)
    delivery.answer(1, error := KafkaError(KafkaError._MSG_TIMED_OUT))
    assert not delivery.wait(0)
    assert delivery.undelivered() == {1: error, 2: None}
    delivery.answer(2, None)
    assert delivery.wait(0)
    assert Delivery([]).wait(0)


# --- the producers' side ----------------------------------------------------------------------------------


def test_a_producer_keeps_its_requests_while_the_gateway_is_away(
    tmp_path: Path, parameters: Any, producer: type[FakeProducer]
) -> None:
    port = free_port()
    client = GatewayProducer(f"http://127.0.0.1:{port}", str(tmp_path / "spool"), timeout_seconds=5)
    assert client.send("visits", "user/1", [{"n": 0}]) == 1  # refused below: a key is no path
    assert client.send("visits", "user 1", [{"n": 1}]) == 2
    assert (
        GatewayProducer(f"http://127.0.0.1:{port}", str(tmp_path / "spool")).send(
            "visits", "user 1", [{"n": 2}]
        )
        == 3
    )
    with serving(parameters(port=port)):
        assert client.resend() == 0
        assert client.send("visits", "user 1", [{"n": 3}]) == 0
        assert client.resend() == 0
    assert [value for _, _, value in producer.sent] == [b'{"n": 1}', b'{"n": 2}', b'{"n": 3}']
    (refused,) = (tmp_path / "spool" / "refused").iterdir()
    content = json.loads(refused.read_text())
    assert (content["body"], "the path must be" in content["answer"]) == ('[{"n": 0}]', True)
    assert [file.name for file in (tmp_path / "spool").iterdir()] == ["refused"]


@pytest.mark.parametrize("status", [301, 401, 403, 408, 429, 500, 502, 503, 522])
def test_a_request_that_may_be_taken_later_waits_with_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    ids: list[str] = []

    def answer(url: str, data: bytes, headers: dict[str, str], **_: Any) -> requests.Response:
        ids.append(headers["Idempotency-Key"])
        given = requests.Response()
        given.status_code = status if len(ids) < 3 else 202
        return given

    monkeypatch.setattr(requests, "post", answer)
    client = GatewayProducer("http://gateway", str(tmp_path), "s3cret")
    assert [client.send("visits", "k", [{"n": 1}]), client.resend(), client.resend()] == [1, 1, 0]
    assert len(set(ids)) == 1
    with pytest.raises(ValueError, match="Out of range float values"):
        client.send("visits", "k", [{"n": math.nan}])


@contextmanager
def serving(given: Parameters) -> Iterator[None]:
    """Serve in a thread, without the process's signals."""
    with running_gateway(given) as gateway, ExitStack() as stack:
        app = create_app(gateway, RateLimit(10_000), given.max_body_bytes)
        server = program.listening_server(app, given.host, given.port)

        def run() -> None:
            with suppress(OSError):  # it is closed while it waits
                server.run()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        stack.callback(thread.join, 10)
        stack.callback(server.close)
        yield


# --- the process ------------------------------------------------------------------------------------------


@pytest.mark.kafka
@pytest.mark.kill
def test_a_killed_gateway_loses_nothing_that_it_has_accepted(
    tmp_path: Path, parameters: Any, broker: Broker, topic: str
) -> None:
    config = tmp_path / "gateway.yml"
    parameters()  # writes the schema
    config.write_text(
        yaml.safe_dump(
            {
                "topics": [{"name": topic, "schema": str(tmp_path / "visits.json")}],
                "bootstrap_servers": broker.bootstrap_servers,
                "fallback": str(tmp_path / "fallback"),
                "buffer": str(tmp_path / "buffer.sqlite"),
                "port": 0,
                "requests_per_second": 10_000,
            }
        )
    )
    accepted: list[int] = []
    stopped = threading.Event()

    def produce(url: str, start: int) -> None:
        n = start
        while not stopped.is_set():
            try:
                answer = requests.post(f"{url}/ingestion/ingest/{topic}/k{start}", json=[{"n": n}], timeout=5)
            except requests.RequestException:
                return
            if answer.status_code == 202:
                accepted.append(n)
            n += 1

    with service_process(SERVICE, config) as (gateway, url):
        threads = [threading.Thread(target=produce, args=(url, start)) for start in (0, 1_000_000)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(accepted) > 20)
        broker.kill()
        try:
            before = len(accepted)
            eventually(lambda: len(accepted) > before + 20)
            gateway.kill()  # while requests are on their way, and the buffer holds records
            gateway.wait()
            stopped.set()
            for thread in threads:
                thread.join()
        finally:
            broker.start()
    connection = sqlite3.connect(tmp_path / "buffer.sqlite")
    assert connection.execute("select count(*) from messages").fetchone()[0] >= 20
    connection.close()
    with service_process(SERVICE, config) as (gateway, url):
        eventually(lambda: requests.get(f"{url}/status", timeout=5).json()["buffered"] == 0, 60)
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(30) == 0
    found = [json.loads(record.value() or b"")["n"] for record in broker.records(topic)]
    assert set(accepted) - set(found) == set()
    for start in (0, 1_000_000):  # in their order, but for records that were delivered again
        first = list(dict.fromkeys(n for n in found if n // 1_000_000 == start // 1_000_000))
        assert first == sorted(first)
    assert lines(tmp_path) == []


def test_the_configuration_of_the_page(
    tmp_path: Path, producer: type[FakeProducer], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, schema, request = snippets(PAGE, f"{HERE}::test_the_configuration_of_the_page")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GATEWAY_TOKEN", "s3cret")
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / "visit.yml").write_text(schema, encoding="utf-8")
    (tmp_path / "api_gateway.yml").write_text(config, encoding="utf-8")
    given, _ = parse_parameters(
        Parameters, ["--config", "api_gateway.yml", "--fallback", "f", "--buffer", "b"]
    )
    assert given.topics[0].rules == [
        Rule("event_time", "now", 300), Rule("started_at", "ended_at"),
    ]  # fmt: skip
    with client_of(given) as client:
        url = "/ingestion/ingest/visits/user-1"
        assert client.post(url, data=request, headers=JSON).status_code == 202
        future = request.replace("2024", "9999")
        assert client.post(url, data=future, headers=JSON).status_code == 400
        assert eventually(lambda: client.get("/status").json["buffered"] == 0)
    assert [key for _, key, _ in producer.sent] == [b"user-1"] * len(json.loads(request))
