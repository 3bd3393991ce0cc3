"""Checkpointer, Structured Streaming: position and state outlive the query, wherever it dies."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import shlex
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from pyspark.sql import DataFrame, SparkSession

from python_jobs.error_management import checkpoint_rewind as rewind
from python_jobs.error_management import checkpointer as job
from python_jobs.error_management.checkpointer import Parameters
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.delta.streams import BatchFunction, append, await_end, start_stream
from python_jobs.shared.kafka.clients import WatchedTopic, committed_offsets
from services.kafka import Broker, Record
from tests.support.rows import assert_rows
from tests.support.snippets import snippet
from tests.support.topics import recreate
from tests.support.waiting import eventually

pytestmark = pytest.mark.kafka
PAGE = "docs/error_management.md"
HERE = "tests/patterns/error_management/test_checkpointer.py"
TEN = dt.datetime(2024, 3, 1, 10, tzinfo=dt.UTC)


def visit(user: str | None, minute: int, partition: int = 0) -> Record:
    payload = {"user_id": user, "event_time": f"2024-03-01T10:{minute:02}:00Z"}
    return Record(
        json.dumps(payload).encode(), partition=partition, timestamp=1_709_287_200_000 + minute * 60_000
    )


class Counts:
    """A topic of visits, the counts of its windows and the checkpoint."""

    def __init__(self, spark: SparkSession, broker: Broker, topic: str, folder: Path) -> None:
        self.spark, self.broker, self.topic, self.folder = spark, broker, topic, folder

    def produce(self, *records: Record) -> None:
        self.broker.produce(self.topic, records)

    def parameters(self, **changes: Any) -> Parameters:
        given = {
            "bootstrap_servers": self.broker.bootstrap_servers,
            "topic": self.topic,
            "key": "get_json_object(payload, '$.user_id')",
            "event_time": "get_json_object(payload, '$.event_time')",
            "target": str(self.folder / "counts"),
            "checkpoint": str(self.folder / "checkpoint"),
            "ephemeral": True,
        }
        return Parameters(**(given | changes))

    def run(self, **changes: Any) -> dict[str, Any]:
        return job.run(self.spark, self.parameters(**changes))

    def windows(self) -> list[tuple[Any, ...]]:
        rows = self.spark.read.format("delta").load(str(self.folder / "counts")).orderBy("window_start")
        return [(row.window_start.strftime("%H:%M"), row.unique_keys, row.batch_id) for row in rows.collect()]

    def forget_commit(self, batch_id: int) -> None:
        """Leave the checkpoint as a crash between the sink's write and Spark's commit mark does."""
        checkpoint = self.folder / "checkpoint"
        later = [file for file in checkpoint.glob("offsets/[0-9]*") if int(file.name) > batch_id]
        for file in (*later, *checkpoint.glob("commits/[0-9]*")):
            if int(file.name) >= batch_id:
                file.unlink()
                file.with_name(f".{file.name}.crc").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def counts(spark: SparkSession, broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Counts:
    """Return a stream that has counted a, b and a in the window of 10:00, two of them, in batch 0."""
    topic = broker.create_topic("checkpointer_visits", partitions=2)
    found = Counts(spark, broker, topic, tmp_path_factory.mktemp("checkpointer"))
    found.produce(
        visit("a", 1),
        visit("b", 2, partition=1),
        visit("a", 3),
        visit(None, 3),
        Record(b"no json"),
        Record(b'{"user_id": "of no day", "event_time": "10:03:00"}'),
    )
    report = found.run()
    assert (report["batches"], report["records"], report["unusable"]) == ([0, 1], 6, 3), (
        "the second batch has no records: it lets the watermark close windows"
    )
    assert found.windows() == [("10:00", 2, 0)]
    return found


def test_position_and_state_go_on_after_a_stop(counts: Counts) -> None:
    """In order: idle restart, restart with new records, lag, crash after the write, one that must not go on."""
    assert counts.run()["batches"] == [], "nothing new, nothing processed"

    counts.produce(visit("b", 4), visit("c", 5))
    assert counts.run()["batches"] == [2, 3], "batch ids go on"
    assert counts.windows() == [("10:00", 3, 2)], "the state of before counts on"

    # Crash after the sink's write, before the commit mark: the same batch, the same records, the same count.
    counts.forget_commit(2)
    counts.produce(visit("d", 6))
    status = counts.run(action="status")
    assert (status["batch_id"], status["committed"], status["lag"]) == (2, 1, 3)
    assert counts.run()["batches"] == [2, 3, 4]
    assert counts.windows() == [("10:00", 4, 3)]


def test_status_tells_the_lag_of_each_partition(counts: Counts) -> None:
    counts.run()
    before = counts.run(action="status")
    assert before["lag"] == 0
    counts.produce(visit("a", 7), visit("a", 8), visit("a", 8, partition=1))
    after = counts.run(action="status")
    assert [partition["lag"] for partition in after["partitions"]] == [2, 1]
    assert after["batch_id"] == after["committed"] == before["batch_id"]
    with pytest.raises(NotReady, match="no batch has begun under the checkpoint"):
        counts.run(action="status", checkpoint=str(counts.folder / "nowhere"))


def test_what_may_change_goes_on_and_what_may_not_is_refused_before_it_starts(counts: Counts) -> None:
    allowed = counts.run(action="check", lateness="20 minutes", max_records_per_trigger=10)
    assert allowed == {"compatible": True, "without_effect": []}
    for changed, sentence in [
        ({"topic": counts.broker.create_topic("other_visits")}, "Kafka topics were checkpointer_visits"),
        ({"window": "5 minutes"}, "was made for another window"),
        ({"key": "payload"}, "was made for another key"),
    ]:
        for action in ("check", "run"):
            with pytest.raises(WrongUse, match=sentence):
                counts.run(action=action, **changed)
    with pytest.raises(NotReady, match="there is no Delta table"):
        counts.run(action="check", target=str(counts.folder / "nowhere"))


def test_another_checkpoint_reads_all_again_and_only_when_told(counts: Counts) -> None:
    counts.run()
    before = [window[:2] for window in counts.windows()]
    new = str(counts.folder / "new_checkpoint")
    with pytest.raises(WrongUse, match=r"holds windows and the checkpoint .* is new"):
        counts.run(checkpoint=new)
    report = counts.run(checkpoint=new, start_over=True)
    assert report["batches"] == [0, 1]
    assert report["records"] == sum(1 for _ in counts.broker.records(counts.topic)), (
        "from the first record on"
    )
    assert [window[:2] for window in counts.windows()] == before, "a keyed merge holds nothing twice"


def test_a_truncated_topic_ends_the_query_with_one_sentence(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    lost = Counts(spark, broker, topic, tmp_path)
    lost.produce(visit("a", 1))
    lost.run()
    lost.produce(visit("b", 2), visit("c", 3))
    expired = TopicPartition(topic, 0, 2)
    broker.admin.delete_records([expired])[expired].result()
    with pytest.raises(JobFailed, match="no longer has the next records"):
        lost.run()
    assert lost.windows() == [("10:00", 1, 0)]
    (partition,) = lost.run(action="status")["partitions"]
    assert (partition["lag"], partition["expired"]) == (2, 1)

    goes_on = lost.run(fail_on_data_loss=False)
    assert (goes_on["records"], [window[:2] for window in lost.windows()]) == (1, [("10:00", 2)]), (
        "c is counted to a, b is lost"
    )

    # A rewind by a new checkpoint: the window is counted again from there on, without a.
    rewound = {"checkpoint": str(tmp_path / "rewound"), "start_over": True}
    report = lost.run(starting_offsets=json.dumps({topic: {"0": 2}}), **rewound)
    assert (report["records"], lost.windows()) == (1, [("10:00", 1, 0)])


def test_a_recreated_topic_is_refused_even_if_it_has_more_records(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    old = Counts(spark, broker, topic, tmp_path)
    old.produce(visit("a", 1))
    query, merger = job.start(spark, old.parameters())
    query.awaitTermination()
    recreate(broker, topic, [visit(user, minute) for user in "bcd" for minute in (2, 13)])
    refused = f"the topic {topic} was deleted and recreated: .* with a new checkpoint and --start_over true$"
    # The query that still runs, the next one, and a look at the lag.
    with pytest.raises(DataRefused, match=refused):
        merger.write(spark.createDataFrame([], job._COUNTS), 7)
    for action in ("run", "check", "status"):
        with pytest.raises(DataRefused, match=refused):
            old.run(action=action)
    assert old.windows() == [("10:00", 1, 0)]
    new = {"checkpoint": str(tmp_path / "new"), "start_over": True}
    assert old.run(**new)["records"] == 6
    assert old.windows() == [("10:00", 3, 0), ("10:10", 3, 0)]
    old.produce(visit("e", 14))
    assert old.run(**new)["records"] == 1


def test_a_stream_without_end_outlives_its_broker_s_restart(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    endless = Counts(spark, broker, topic, tmp_path)
    endless.produce(visit("a", 1))
    query, merger = job.start(spark, endless.parameters(trigger="1 second"))
    try:
        eventually(lambda: merger.batches)
        broker.stop()
        broker.start()
        endless.produce(visit("b", 2))
        eventually(lambda: len(endless.windows()) == 1 and endless.windows()[0][1] == 2, 60)
        assert query.isActive
    finally:
        query.stop()


def test_wrong_use_gives_one_sentence(counts: Counts) -> None:
    for changes, sentence in [
        ({"ephemeral": False}, "lies in the temporary folder /tmp"),
        ({"window": "ten"}, "'ten' is no duration"),
        ({"starting_offsets": "here"}, "must be earliest, latest or a JSON object, got 'here'"),
        ({"max_deviation": 0.5}, "max_deviation must be between 0.01 and 0.4, got 0.5"),
        ({"max_records_per_trigger": 0}, "max_records_per_trigger must be 1 or more, got 0"),
        ({"consumer": {"sasl.jaas.config": "password=geheim"}}, "is a secret"),
    ]:
        with pytest.raises(WrongUse, match=sentence):
            counts.parameters(**changes)


def test_the_command_of_the_page(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")  # its folders are relative, and this checkout may lie in a temporary folder
    command = snippet(PAGE, f"{HERE}::test_the_command_of_the_page").replace("\\\n", " ")
    words = shlex.split(command)
    assert words[:2] == ["spark-submit", "python_jobs/error_management/checkpointer.py"]
    parameters, _ = parse_parameters(Parameters, words[2:])
    ours = counts.parameters()
    assert (parameters.key, parameters.event_time) == (ours.key, ours.event_time)
    assert (parameters.window, parameters.action) == ("10 minutes", "run")


# --- crashes inside a batch, on any sink ------------------------------------------------------------------


class Crash(Exception):
    """Stands for the end of the process."""


class RowByRow(BatchFunction):
    """Delivers a batch's rows one after the other and crashes, once, behind the first."""

    def __init__(self, deliver: Callable[[DataFrame, str, int], None], crash: bool) -> None:
        self._deliver, self._crash = deliver, crash
        self.delivered: list[tuple[int, str]] = []

    def write(self, rows: DataFrame, batch_id: int) -> None:
        for row in rows.orderBy("visit").collect():
            self._deliver(rows, row.visit, batch_id)
            self.delivered.append((batch_id, row.visit))
            if self._crash:
                raise Crash


def test_a_crash_between_two_writes_repeats_the_batch_under_its_number(
    spark: SparkSession, tmp_path: Path
) -> None:
    """An appending sink holds v1 twice; one that is idempotent by batch id and key holds each once."""
    source, plain, safe = (str(tmp_path / name) for name in ("source", "plain", "safe"))
    spark.createDataFrame([("v1",), ("v2",)], "visit string").coalesce(1).write.format("delta").save(source)

    def deliver(rows: DataFrame, visit: str, batch_id: int) -> None:
        one = rows.where(rows.visit == visit)
        append(one, plain, {})
        append(one, safe, {"txnAppId": f"test-{visit}", "txnVersion": str(batch_id)})

    delivered = []
    for crash in (True, False):
        function = RowByRow(deliver, crash)
        query = start_stream(spark, source, function, str(tmp_path / "checkpoint"))
        if crash:
            with pytest.raises(Crash):
                await_end(query, function, source)
        else:
            await_end(query, function, source)
        delivered += function.delivered
    assert delivered == [(0, "v1"), (0, "v1"), (0, "v2")]
    assert_rows(spark.read.format("delta").load(plain), [("v1",), ("v1",), ("v2",)])
    assert_rows(spark.read.format("delta").load(safe), [("v1",), ("v2",)])


# --- rewind -----------------------------------------------------------------------------------------------


def test_a_rewind_reports_writes_and_refuses_to_skip(broker: Broker, topic: str) -> None:
    two = broker.create_topic(f"{topic}_rewind", partitions=2)
    broker.produce(two, [visit("a", minute) for minute in range(5)] + [visit("b", 1, partition=1)])
    client = {"bootstrap.servers": broker.bootstrap_servers, "group.id": "rewound"}
    with closing(Consumer(client)) as consumer:
        before = [TopicPartition(two, 0, 5), TopicPartition(two, 1, 0)]

        def is_committed() -> bool:
            with suppress(KafkaException):  # a broker that has just started coordinates no group yet
                return bool(consumer.commit(offsets=before, asynchronous=False))
            return False

        eventually(is_committed)

    words = shlex.split(
        snippet(PAGE, f"{HERE}::test_a_rewind_reports_writes_and_refuses_to_skip").replace("\\\n", " ")
    )
    of_page, _ = parse_parameters(rewind.Parameters, words[3:])
    ours = dataclasses.replace(
        of_page, bootstrap_servers=broker.bootstrap_servers, topic=two, group="rewound"
    )

    def run(**changes: Any) -> dict[str, Any]:
        return rewind.run(dataclasses.replace(ours, **changes))

    def committed() -> dict[int, int]:
        with closing(Consumer(client)) as consumer:
            return committed_offsets(consumer, two, [0, 1])

    report = run()
    assert (report["offsets"], report["again"], report["skipped"]) == ({0: 1, 1: 0}, {0: 4}, {})
    assert json.loads(report["starting_offsets"]) == {two: {"0": 1, "1": 0}}
    assert committed() == {0: 5, 1: 0}, "nothing was written"

    with pytest.raises(DataRefused, match=f"1 offsets of {two}/1 would never be read"):
        run(to="2024-03-01T10:03:00", publish=True)
    assert run(to="2024-03-01T10:03:00", publish=True, allow_skip=True)["skipped"] == {1: 1}
    assert committed() == {0: 3, 1: 1}
    assert run(publish=True)["again"] == {0: 2, 1: 1}
    assert committed() == {0: 1, 1: 0}
    assert run(to="2030-01-01", group=None)["offsets"] == {0: 5, 1: 1}, "no such record: the end"
    with pytest.raises(WrongUse, match="publish needs a group"):
        run(group=None, publish=True)

    # The group's position stays behind in a topic that is recreated while its consumers run.
    old = WatchedTopic({"bootstrap.servers": broker.bootstrap_servers}, two, "")
    recreate(broker, two, [visit("a", minute) for minute in range(3)], partitions=2)
    with closing(Consumer(client)) as consumer:
        consumer.commit(offsets=[old.position(two, 0, 1)], asynchronous=False)
    report = run(to="2024-03-01T10:02:00", publish=True)
    assert (report["committed_before"], report["skipped"], committed()[0]) == ({}, {}, 2)

    # A group that has members reads on from where it is.
    with closing(Consumer(client | {"auto.offset.reset": "earliest"})) as member:
        member.subscribe([two])
        while not member.assignment():
            member.poll(0.1)
        with pytest.raises(JobFailed, match="stop its consumers first"):
            run(publish=True)
