"""Hybrid Source: the history up to the boundary, then the topic from the boundary on, each record once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from pyspark.sql import DataFrame, SparkSession

from python_jobs.data_value import stateful_sessionizer
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.delta.commits import write_once
from python_jobs.streaming import hybrid_source as job
from services.kafka import Broker, Record
from tests.support.page_commands import command_parameters
from tests.support.rows import assert_rows
from tests.support.snippets import snippet
from tests.support.topics import recreate

pytestmark = pytest.mark.kafka

PAGE = "docs/streaming.md"
HERE = "tests/patterns/streaming/test_hybrid_source.py"
HISTORY = "topic string, partition int, offset bigint, payload string"

# Visits by partition: the offset is the place in the list. x visits at the last offset of the history and at the first
# one of the topic.
VISITS = {
    0: [
        ("a", "09:00"),
        ("a", "09:01"),
        ("a", "09:02"),
        ("a", "09:03"),
        ("x", "10:58"),
        ("x", "11:03"),
        ("b", "11:04"),
    ],
    1: [("c", "09:00"), ("c", "09:01"), ("c", "09:02"), ("d", "12:00")],
}
BOUNDARY = {0: 5, 1: 3}


def at(clock: str) -> str:
    return f"2024-01-01T{clock}:00Z"


class Hybrid:
    """A topic, its history, and the table that the page's command makes of both."""

    def __init__(self, spark: SparkSession, broker: Broker, folder: Path, topic: str) -> None:
        self.spark, self.broker, self.folder, self.topic = spark, broker, folder, topic

    @staticmethod
    def records() -> list[Record]:
        """Return all visits: the broker still has what the history has."""
        return [
            Record(json.dumps({"visit": visit, "event_time": at(clock)}).encode(), partition=partition)
            for partition, visits in VISITS.items()
            for visit, clock in visits
        ]

    def produce(self) -> None:
        """Create and fill the topic."""
        self.broker.create_topic(self.topic, len(VISITS))
        self.broker.produce(self.topic, self.records())

    def add_history(self, partition: int, offsets: Sequence[int]) -> None:
        """Append visits as one file, under the name that the event's time had then."""
        rows = [
            (self.topic, partition, offset, json.dumps({"visit": visit, "event_timestamp": at(clock)}))
            for offset in offsets
            for visit, clock in [VISITS[partition][offset]]
        ]
        write_once(
            self.spark, self.spark.createDataFrame(rows, HISTORY).coalesce(1), str(self.folder / "history")
        )

    def run(self, **changes: str) -> dict[str, Any]:
        """Run the page's command and return its report."""
        text = snippet(PAGE, f"{HERE}::test_each_record_is_there_once_and_belongs_to_one_side")
        text = text.replace("localhost:9092", self.broker.bootstrap_servers)
        given = {"topic": self.topic} | changes
        return job.run(self.spark, command_parameters(job.Parameters, text, self.folder, given))

    def close_sessions(self) -> None:
        """Continue the sessions of the table, in the state that their checkpoint has."""
        parameters = stateful_sessionizer.Parameters(
            source=str(self.folder / "all_visits"),
            key={"visit": "visit_id"},
            event_time="event_time",
            ties=["partition", "offset"],
            value="origin",
            variant="session_window",
            target=str(self.folder / "sessions"),
            dead_letter=str(self.folder / "dead"),
            checkpoint=str(self.folder / "sessions_checkpoint"),
        )
        stateful_sessionizer.run(self.spark, parameters)

    def table(self, name: str = "all_visits") -> DataFrame:
        return self.spark.read.format("delta").load(str(self.folder / name))


@pytest.fixture(scope="module")
def hybrid(spark: SparkSession, broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    """Return a topic, and a history of five files that overlaps with what is live."""
    hybrid = Hybrid(spark, broker, tmp_path_factory.mktemp("hybrid"), "hybrid_visits")
    hybrid.produce()
    for partition, offsets in [(0, [0, 1]), (1, [0, 1, 2]), (0, [2, 3]), (1, [3]), (0, [4, 5])]:
        hybrid.add_history(partition, offsets)
    return hybrid


# One story: the history breaks off in its third chunk, ends, and is followed by the topic.


@pytest.fixture(scope="module")
def broken_off(hybrid: Hybrid) -> DataFrame:
    """Run both phases until the third chunk of two files fails; return the rows that are there.

    The second chunk is committed when its run dies, so that the next run gets it again.
    """
    writes = iter(["commits", "commits and dies", "is there", "fails"])
    target, original = str(hybrid.folder / "all_visits"), job.append_records

    def breaks_off(*arguments: Any) -> int | None:
        write = next(writes)
        if write == "fails":
            raise ConnectionResetError("the third chunk")
        records = original(*arguments)
        assert (records is None) == (write == "is there")
        if write == "commits and dies":
            raise ConnectionResetError("behind the second commit")
        return records

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "append_records", breaks_off)
        for message in ("behind the second commit", "the third chunk"):
            with pytest.raises(ConnectionResetError, match=message):
                hybrid.run()
    rows = hybrid.spark.read.format("delta").load(target)
    return hybrid.spark.createDataFrame(rows.collect(), rows.schema)


@pytest.fixture(scope="module")
def history(hybrid: Hybrid, broken_off: DataFrame) -> dict[str, Any]:
    """Run the history again, which has got a file meanwhile."""
    hybrid.add_history(0, [6])
    report = hybrid.run(phase="history")
    hybrid.close_sessions()
    return report


@pytest.fixture(scope="module")
def live(hybrid: Hybrid, history: dict[str, Any]) -> dict[str, Any]:
    """Run the whole workflow again after the history's success."""
    report = hybrid.run()
    hybrid.close_sessions()
    return report


def test_a_failed_history_starts_no_live_phase(hybrid: Hybrid, broken_off: DataFrame) -> None:
    assert_rows(broken_off.select("origin").distinct(), [("historical",)])
    with pytest.raises(NotReady, match=r"the history isn't complete in .*; run the phase history first"):
        hybrid.run(phase="live")


def test_a_restart_reads_the_chunks_that_are_left(broken_off: DataFrame, history: dict[str, Any]) -> None:
    assert broken_off.count() == 7, "two chunks of two files, of which offset 3 of partition 1 is live"
    # Five files in chunks of two are three batches; a fourth one has the file that came meanwhile, behind the boundary.
    assert history["history"]["batches"] == [{"batch_id": 2, "records": 1}, {"batch_id": 3, "records": 0}]
    assert history["live"] is None


def test_a_history_that_is_complete_is_not_read_again(live: dict[str, Any]) -> None:
    assert live["history"] is None
    assert live["live"]["records"] == 3


def test_each_record_is_there_once_and_belongs_to_one_side(hybrid: Hybrid, live: dict[str, Any]) -> None:
    """Both sources have the offsets 5 and 6 of partition 0, and 3 of partition 1."""
    expected = [
        (
            partition,
            offset,
            visit,
            f"2024-01-01 {clock}",
            "historical" if offset < BOUNDARY[partition] else "real_time",
        )
        for partition, visits in VISITS.items()
        for offset, (visit, clock) in enumerate(visits)
    ]
    found = hybrid.table().selectExpr(
        "partition", "offset", "visit_id", "date_format(event_time, 'yyyy-MM-dd HH:mm')", "origin"
    )
    assert_rows(found, expected)


def test_a_session_that_spans_the_switch_is_one(hybrid: Hybrid, live: dict[str, Any]) -> None:
    of_x = hybrid.table("sessions").where("visit = 'x'").selectExpr("duration_ms", "values")
    assert_rows(of_x, [(300_000, ["historical", "real_time"])])


def test_records_in_neither_source_are_refused_before_anything_is_written(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    hybrid = Hybrid(spark, broker, tmp_path, "hybrid_gap")
    hybrid.produce()
    hybrid.add_history(0, [0, 1, 2])
    hybrid.add_history(1, [0, 1, 2])
    with pytest.raises(
        NotReady, match=r"ends before offset 3, but the boundary is 5: .* or lower the boundary to 3"
    ):
        hybrid.run()
    expired = TopicPartition(hybrid.topic, 1, 2)
    broker.admin.delete_records([expired])[expired].result(30)
    with pytest.raises(JobFailed, match="partition 1 is 1, but hybrid_gap has no records before 2 any more"):
        hybrid.run(**{"boundary.0": "3", "boundary.1": "1"})
    assert hybrid.table().count() == 0


def test_the_live_phase_begins_where_the_history_of_this_topic_and_target_ended(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    """Each phase alone is right with another boundary, target or topic; together they would leave records out."""
    hybrid = Hybrid(spark, broker, tmp_path, "hybrid_phases")
    hybrid.produce()
    for partition, boundary in BOUNDARY.items():
        hybrid.add_history(partition, range(boundary))
    assert hybrid.run(phase="history")["history"]["records"] == 8

    with pytest.raises(WrongUse, match=r'up to the boundary \{"0": 5, "1": 3\}, got \{"0": 6, '):
        hybrid.run(phase="live", **{"boundary.0": "6"})
    spark.range(1).write.format("delta").save(str(tmp_path / "other"))
    with pytest.raises(WrongUse, match="was completed with another target than"):
        hybrid.run(phase="live", target=str(tmp_path / "other"))
    recreate(broker, hybrid.topic, hybrid.records(), partitions=len(VISITS))
    refused = "the topic hybrid_phases was deleted and recreated: .*; start again with another target"
    for phase in ("live", "both"):
        with pytest.raises(DataRefused, match=refused):
            hybrid.run(phase=phase)
    # As if the history had broken off behind its last chunk.
    (tmp_path / "checkpoints" / "all_visits" / "history_is_complete.json").unlink()
    with pytest.raises(DataRefused, match=refused):
        hybrid.run(phase="history")
    assert hybrid.table().count() == 8
    assert not (tmp_path / "checkpoints" / "all_visits" / "live").exists()


def test_wrong_use_is_refused_in_one_sentence(hybrid: Hybrid) -> None:
    without = str(hybrid.folder / "without_positions")
    hybrid.spark.range(1).selectExpr("'x' as topic", "'{}' as payload").write.format("delta").save(without)
    for changes, sentence in [
        ({"boundary": "{}"}, "boundary must name the first live offset of each partition"),
        ({"boundary": "{'0': 5}"}, "boundary must name each partition of hybrid_visits, 0 to 1, got 0"),
        ({"boundary.0": "99"}, "the history of partition 0 ends before"),
        (
            {"history": without},
            "has no column partition, offset: its bounds are its records' positions",
        ),
        ({"history_columns.other": "1"}, "must name the same columns in the same order"),
        (
            {"history_columns.event_time": "offset"},
            "'event_time' is bigint in the history and string in the topic",
        ),
        ({"live_columns.event_time": "absent"}, "an expression can't be resolved: .*absent"),
    ]:
        with pytest.raises((WrongUse, NotReady), match=sentence):
            hybrid.run(
                checkpoint=str(hybrid.folder / "never"), target=str(hybrid.folder / "never_filled"), **changes
            )
