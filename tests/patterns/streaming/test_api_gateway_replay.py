"""API Gateway's replay: what the fallback holds reaches its topics, each file once, a key's records in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import NotReady, WrongUse
from python_jobs.shared.spark.hadoop_files import literal_path
from python_jobs.streaming import api_gateway_http as gateway
from python_jobs.streaming import api_gateway_replay as job
from python_jobs.streaming.api_gateway_replay import Parameters, judged, messages
from python_jobs.streaming.gateway_records import Message, Topic
from python_jobs.streaming.gateway_stores import Fallback, line_of
from python_jobs.streaming.rate_limit import RateLimit
from services.kafka import Broker, Record
from tests.support.rows import assert_rows
from tests.support.session import setting
from tests.support.snippets import snippet

PAGE = "docs/streaming.md"
HERE = "tests/patterns/streaming/test_api_gateway_replay.py"


def message(topic: str, n: int, value: str | None = None, key: str = "k") -> Message:
    accepted = f"2024-03-01T12:00:{n:02d}.000000+00:00"
    return Message(topic, key, value or f'{{"n": {n}}}', "https://example.org/ü", f"r{n}", 0, accepted)


# --- lines ------------------------------------------------------------------------------------------------

GOOD = message("visits", 1, '{"a" :1.10,"\\u00fc": "ü\\ud800\ufdd0","e":1E+2}')


def test_a_line_is_a_record_or_says_what_it_lacks(spark: SparkSession) -> None:
    line, here = line_of(GOOD), "/f/topic=visits/a.jsonl"
    stories = {
        line: None,
        line[:-10]: "NOT_A_JSON_OBJECT",
        "": "NOT_A_JSON_OBJECT",
        "null": "NOT_A_JSON_OBJECT",
        "[1]": "NOT_A_JSON_OBJECT",
        f"{line} x": "NOT_A_JSON_OBJECT",
        line + line: "NOT_A_JSON_OBJECT",
        f"{line},{line}": "NOT_A_JSON_OBJECT",
        f"{line}]{line}": "NOT_A_JSON_OBJECT",
        f" {line}\r": None,
        line.replace('"key": "k"', '"key": 5'): "MISSING_FIELD",
        line.replace('"key": "k"', '"key": "k", "key": "j"'): "NOT_A_JSON_OBJECT",
        '{"key": "k", "value": {"a": 1}, "referral": "", "event_id": "1-0"}': "MISSING_FIELD",
        '{"key": "k", "value": "{}", "event_id": "1-0"}': "MISSING_FIELD",
        line_of(message("visits", 1, '{"a": "' + "ü" * 46 + '"}')): "TOO_LARGE",
    }
    rows = spark.createDataFrame([(text, here) for text in stories], "line string, file string")
    found = judged(rows, 100)
    assert_rows(found.select("line", "error_class"), list(stories.items()))
    valid = (
        found.where("error_class is null").select("topic", "key", "value", "referral", "event_id").collect()
    )
    assert [tuple(row) for row in valid] == [
        ("visits", "k", GOOD.value, "https://example.org/ü", "r1-0"),
    ] * 2
    elsewhere = spark.createDataFrame([(line, "/f/a.jsonl"), (line, "/f/topic=a b/a.jsonl")], rows.schema)
    assert_rows(judged(elsewhere, 100).select("error_class"), [("MISSING_FIELD",)] * 2)


def test_a_key_s_records_are_in_the_order_of_their_times(spark: SparkSession) -> None:
    def stored(topic: str, *payloads: str) -> list[tuple[str, str]]:
        return [
            (line_of(message(topic, n, value)), f"/f/topic={topic}/{n}.jsonl")
            for n, value in enumerate(payloads)
        ]

    lines = [
        *stored(
            "a",
            '{"n": 0}',
            '{"n": 1, "at": {"time": "2024-03-01T12:00:00Z"}}',
            '{"n": 2, "at": {"time": "2024-03-01T12:30:00+01:00"}}',
            '{"n": 3, "at": {"time": "soon"}}',
            '{"n": 4, "at": {"time": "2024-03-01 09:00"}}',
        ),
        *stored("b", '{"n": 5, "t": 10}', '{"n": 6, "t": 9.5}', '{"n": 7, "t": "2024-03-01T12:00Z"}'),
        *stored("c", '{"n": 8, "t": 2}', '{"n": 9, "t": 1}'),
        *stored(  # a double takes the first two for one time, and NaN for the last one
            "d",
            '{"n": 10, "t": 1709287200000000001}',
            '{"n": 11, "t": 1709287200000000000}',
            '{"n": 12, "t": "NaN"}',
            '{"n": 13, "t": {"t": 1}}',
            '{"n": 14, "t": 17e17}',
        ),
        *stored("e", '{"n": 15, "t": 1709287200.000000001}', '{"n": 16, "t": 1709287200.000000000}'),
    ]
    rows = spark.createDataFrame(lines[::-1], "line string, file string").repartition(3)
    sent = messages(judged(rows, 1000), {"a": "at.time", "b": "t", "d": "t", "e": "t"})
    by_topic: dict[str, list[int]] = {}
    for row in sent.withColumn("p", F.spark_partition_id()).collect():
        by_topic.setdefault(row.topic, []).append(json.loads(row.value)["n"])
    assert by_topic == {
        "a": [4, 2, 1, 0, 3], "b": [6, 5, 7], "c": [8, 9], "d": [14, 11, 10, 12, 13], "e": [16, 15],
    }  # fmt: skip
    headers = {header["key"]: bytes(header["value"]) for header in sent.first().headers}  # type: ignore[union-attr]
    assert headers.pop("event_id").startswith(b"r")
    assert headers == {"origin": b"replay", "referral": "https://example.org/ü".encode()}


# --- the job ----------------------------------------------------------------------------------------------


@pytest.fixture
def replay(spark: SparkSession, broker: Broker, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that runs the job on the test's fallback."""

    def run(**changes: Any) -> dict[str, Any]:
        given = {
            "fallback": str(tmp_path / "fall [back]"),
            "bootstrap_servers": broker.bootstrap_servers,
            "checkpoint": str(tmp_path / "checkpoint"),
            "dead_letter": str(tmp_path / "dead"),
            "job_name": "replay",
        }
        return job.run(spark, Parameters(**given | changes))

    return run


def seen(broker: Broker, topic: str) -> list[tuple[Any, ...]]:
    """Return partition, key, origin, event id and number of each message of a topic."""
    return [
        (
            found.partition(),
            (found.key() or b"").decode(),
            *(dict(found.headers() or [])[name].decode() for name in ("origin", "event_id")),
            json.loads(found.value() or b"").get("n"),
        )
        for found in broker.records(topic)
    ]


@pytest.mark.kafka
def test_an_outage_s_records_are_replayed_once_to_their_topics_and_partitions(
    broker: Broker, topic: str, replay: Any, tmp_path: Path
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    other = broker.create_topic(f"{topic}.other", partitions=5)
    given = gateway.Parameters(
        topics=[Topic(topic, str(schema)), Topic(other, str(schema))],
        bootstrap_servers=broker.bootstrap_servers,
        fallback=str(tmp_path / "fall [back]"),
        flush_seconds=2,
    )
    keys = [f"ü{n}" for n in range(12)]
    with gateway.running_gateway(given) as running:
        client = gateway.create_app(running, RateLimit(1000), 10_000).test_client()

        def post(name: str, key: str, request_id: str, *records: Any) -> Any:
            answer = client.post(
                f"/ingestion/ingest/{name}/{key}", json=list(records), headers={"Idempotency-Key": request_id}
            )
            assert answer.status_code == 202
            return answer.json

        for n, key in enumerate(keys):
            assert post(other, key, f"live-{n}", {"n": 0})["delivered"] == 1
        broker.stop()
        try:
            at = "2024-03-01T10:0{}:00Z".format
            late = [
                {"n": 3, "visit_time": at(3)},
                {"n": 1, "visit_time": at(1)},
                {"n": 2, "visit_time": at(2)},
            ]
            assert post(topic, "user-1", "r1", *late)["stored"] == 3
            (file,) = (tmp_path / "fall [back]" / f"topic={topic}").iterdir()
            assert len(file.read_text().splitlines()) == 3
        finally:
            broker.start()
    Fallback(given.fallback).write(message(other, n, key=key) for n, key in enumerate(keys, 1))
    (tmp_path / "fall [back]" / f"topic={topic}" / ".unfinished.jsonl.tmp").write_text('{"key":')

    report = replay(time_fields={topic: "visit_time"})
    assert report == {"records": {topic: 3, other: 12}, "dead_letters": 0}
    assert seen(broker, topic) == [
        (0, "user-1", "replay", "r1-1", 1),
        (0, "user-1", "replay", "r1-2", 2),
        (0, "user-1", "replay", "r1-0", 3),
    ]
    places = {(key, origin): partition for partition, key, origin, _, _ in seen(broker, other)}
    assert len({places[key, "api"] for key in keys}) > 1
    assert [places[key, "replay"] for key in keys] == [places[key, "api"] for key in keys]

    assert replay(time_fields={topic: "visit_time"}) == {"records": {}, "dead_letters": 0}
    assert (len(seen(broker, topic)), len(seen(broker, other))) == (3, 24)


@pytest.mark.kafka
def test_a_missing_topic_and_a_crash_after_the_delivery_lose_nothing(
    spark: SparkSession,
    broker: Broker,
    topic: str,
    replay: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(NotReady, match=r"there is no folder '.*' to read undelivered records from"):
        replay()
    folder, later = tmp_path / "fall [back]", f"{topic}.later"
    Fallback(str(folder)).write([*(message(topic, n) for n in (1, 2, 3)), message(later, 4)])
    (folder / f"topic={topic}" / "broken.jsonl").write_bytes(b'{"key": "k"}\n\xff\n{"key"')
    with pytest.raises(NotReady, match=f"not every topic of {topic}, {later} is at"):
        replay()
    broker.create_topic(later)
    # A file that can't be read, in a session that would skip it: Hadoop compares a file with its checksums.
    (file,) = (folder / f"topic={later}").iterdir()
    checksums = file.with_name(f".{file.name}.crc")
    checksums.write_bytes(b"crc\0" + (512).to_bytes(4, "big") + b"none")
    with setting(spark, "spark.sql.files.ignoreCorruptFiles", "true"):
        assert spark.read.text(literal_path(str(file.parent))).count() == 0
        with pytest.raises((PySparkException, Py4JJavaError), match=rf"FAILED_READ_FILE.*{file.name}"):
            replay()
    checksums.unlink()
    write = job.Replayer.write

    def crashing(self: job.Replayer, rows: DataFrame, batch_id: int) -> None:
        write(self, rows, batch_id)
        raise RuntimeError("killed between the delivery and the commit")

    with monkeypatch.context() as crash:
        crash.setattr(job.Replayer, "write", crashing)
        with pytest.raises(RuntimeError, match="killed"):
            replay()
    assert [n for *_, n in seen(broker, topic)] == [1, 2, 3]
    assert replay() == {"records": {topic: 3, later: 1}, "dead_letters": 3}
    found = seen(broker, topic)
    assert [n for *_, n in found] == [1, 2, 3, 1, 2, 3]
    assert len({event_id for *_, event_id, _ in found}) == 3
    assert [n for *_, n in seen(broker, later)] == [4, 4]
    dead = spark.read.format("delta").load(str(tmp_path / "dead"))
    assert_rows(
        dead.select("topic", "error_class", "status", F.length("line")),
        [
            (topic, "MISSING_FIELD", "pending", 12),
            (topic, "NOT_A_JSON_OBJECT", "pending", 1),
            (topic, "NOT_A_JSON_OBJECT", "pending", 6),
        ],
    )
    (tmp_path / "other").mkdir()
    with pytest.raises(WrongUse, match="was made for another fallback"):
        replay(fallback=str(tmp_path / "other"))


@pytest.mark.kafka
def test_consumers_see_each_event_once_with_the_page_s_query(
    spark: SparkSession, broker: Broker, topic: str
) -> None:
    for n in (1, 2, 1, 3, 2):
        found = message(topic, n)
        headers = tuple(
            (name, bytes(value)) for name, value in found.headers("replay") if isinstance(value, bytes)
        )
        broker.produce(topic, [Record(found.value.encode(), b"k", headers)])
    options = {
        "kafka.bootstrap.servers": broker.bootstrap_servers,
        "subscribe": topic,
        "includeHeaders": "true",
    }
    rows = spark.read.format("kafka").options(**options).load()
    rows.createOrReplaceTempView("visits_records")
    once = spark.sql(snippet(PAGE, f"{HERE}::test_consumers_see_each_event_once_with_the_page_s_query"))
    assert_rows(once.select("value"), [(f'{{"n": {n}}}',) for n in (1, 2, 3)])
