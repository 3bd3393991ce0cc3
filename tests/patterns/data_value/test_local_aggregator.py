"""Local Aggregator: a keyed topic is grouped where its records are, and a key in two partitions is noticed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import NewPartitions
from delta.tables import DeltaMergeBuilder
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.data_value import local_aggregator as job
from python_jobs.data_value import local_aggregator_kafka as reorganisation
from python_jobs.data_value.local_aggregator import GroupWriter, Parameters
from python_jobs.data_value.partition_groups import KEY, PARTITION, RECORDS
from python_jobs.shared.core.failures import DataRefused, JobFailed, WrongUse
from python_jobs.shared.kafka.bronze_records import bronze_rows
from python_jobs.shared.kafka.clients import patiently
from python_jobs.shared.kafka.topics import StreamedTopics
from services.kafka import Broker, Record
from tests.support.page_commands import command_parameters
from tests.support.rows import assert_rows
from tests.support.snippets import snippet
from tests.support.topics import recreate

pytestmark = pytest.mark.kafka
PAGE = "docs/data_value.md"
HERE = "tests/patterns/data_value/test_local_aggregator.py"


class Visits:
    """A topic of visits, and the groups that the page's command makes of it."""

    def __init__(self, spark: SparkSession, broker: Broker, topic: str, folder: Path) -> None:
        self.spark, self.broker, self.topic, self.folder = spark, broker, topic, folder

    def parameters(self, **changes: str) -> Parameters:
        text = snippet(PAGE, f"{HERE}::test_each_visit_has_one_row_with_its_pages_in_order_of_time")
        given = {"bootstrap_servers": self.broker.bootstrap_servers, "topic": self.topic}
        given |= {"now": "2024-01-01T12:00:00Z"} | changes
        return command_parameters(Parameters, text, self.folder, given)

    def run(self, **changes: str) -> dict[str, Any]:
        return job.run(self.spark, self.parameters(**changes))

    def table(self, name: str) -> DataFrame:
        return self.spark.read.format("delta").load(str(self.folder / name))

    def records(self) -> DataFrame:
        """Return the topic's records as a batch."""
        reader = (
            self.spark.read.format("kafka").option("subscribe", self.topic).option("includeHeaders", True)
        )
        servers = self.broker.bootstrap_servers
        return bronze_rows(reader.option("kafka.bootstrap.servers", servers).load(), 0, {})

    def writer(self, **changes: str) -> GroupWriter:
        params = self.parameters(**changes)
        settings = {"bootstrap.servers": self.broker.bootstrap_servers}
        return GroupWriter(
            self.spark, params, StreamedTopics(self.spark, [self.topic], settings, ""), "writer"
        )


def page(visit: str | None, name: str, clock: str, partition: int | None = None) -> Record:
    value = json.dumps({"page": name, "event_time": f"2024-01-01T{clock}:00Z"})
    return Record(value.encode(), key=None if visit is None else visit.encode(), partition=partition)


@pytest.fixture(scope="module")
def visits(spark: SparkSession, broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Visits:
    """Bring two visits interleaved in one partition, another visit in the second; the third partition is empty."""
    topic = broker.create_topic("visits_by_partition", 3)
    broker.produce(
        topic,
        [
            page("A", "p2", "10:02", 0),
            page("C", "x", "10:00", 0),
            page("A", "p1", "10:00", 0),
            page("C", "y", "10:01", 0),
            page("B", "b", "10:05", 1),
        ],
    )
    return Visits(spark, broker, topic, tmp_path_factory.mktemp("local"))


@pytest.fixture(scope="module")
def first(visits: Visits) -> dict[str, Any]:
    return visits.run()


@pytest.fixture(scope="module")
def second(visits: Visits, first: dict[str, Any]) -> dict[str, Any]:
    """Bring the rest of a visit, records without key or time, and bytes that aren't UTF-8.

    The job dies between the merge and the batch's commit.
    """
    visits.broker.produce(
        visits.topic,
        [
            page("A", "p3", "10:03", 0),
            page(None, "n", "10:00", 1),
            page("D", "n", "late", 1),
            Record(b"\xff", partition=1),
            dataclasses.replace(page("", "f", "10:04", 1), key=b"\xff"),
        ],
    )
    with pytest.MonkeyPatch.context() as patch:
        execute = DeltaMergeBuilder.execute

        def dies(merge: DeltaMergeBuilder) -> None:
            execute(merge)
            raise ConnectionResetError

        patch.setattr(DeltaMergeBuilder, "execute", dies)
        with pytest.raises(ConnectionResetError):
            visits.run()
    assert visits.table("visits_by_id").where("key = 'A' and events = 3").count() == 1, (
        "the crash came after the write"
    )
    return visits.run()


def test_each_visit_has_one_row_with_its_pages_in_order_of_time(
    visits: Visits, second: dict[str, Any]
) -> None:
    found = visits.table("visits_by_id").selectExpr(
        "key", "partition", "events", "array_join(values, ' ')", "date_format(started_at, 'HH:mm')",
        "date_format(ended_at, 'HH:mm')",
    )  # fmt: skip
    assert_rows(
        found,
        [
            ("A", 0, 3, "p1 p2 p3", "10:00", "10:03"),  # p3 came in another batch
            ("C", 0, 2, "x y", "10:00", "10:01"),
            ("B", 1, 1, "b", "10:05", "10:05"),
            ("\ufffd", 1, 1, "f", "10:04", "10:04"),  # as Python shows the byte FF
        ],
    )


def test_a_repeated_batch_counts_no_record_twice(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert (first["records"], first["groups"]) == (5, 3)
    assert (second["records"], second["groups"], second["dead"]) == (2, 2, 3)


def test_records_without_key_or_time_are_dead_letters(visits: Visits, second: dict[str, Any]) -> None:
    dead = visits.table("visits_by_id_dead").select("partition", "offset", "error_class", "error_message")
    assert_rows(
        dead,
        [
            (1, 1, "NULL_KEY", "the record has NULL in key"),
            (1, 2, "NULL_TIME", "the record has NULL in event_time"),
            (1, 3, "NULL_KEY", "the record has NULL in key, event_time"),
        ],
    )


def test_bytes_that_are_no_utf_8_pass_through_unchanged(visits: Visits, second: dict[str, Any]) -> None:
    groups, dead = visits.table("visits_by_id"), visits.table("visits_by_id_dead")
    assert_rows(groups.where("not is_valid_utf8(key)").selectExpr("hex(key)", "events"), [("FF", 1)])
    assert_rows(dead.where("not is_valid_utf8(payload)").selectExpr("hex(payload)"), [("FF",)])


def test_the_groups_need_no_exchange_and_are_those_of_a_shuffle(
    visits: Visits, second: dict[str, Any]
) -> None:
    records = visits.records()
    local = job.aggregated(records, visits.parameters()).where(
        F.col(KEY).isNotNull() & F.col(RECORDS).isNotNull()
    )
    shuffled = records.where("key is not null and key <> 'D'").groupBy("key").count()
    assert "Exchange" not in plan(local)
    assert "Exchange hashpartitioning(key" in plan(shuffled)
    assert local.rdd.getNumPartitions() == 3, "a task for each partition"
    assert_rows(local.select(KEY, F.size(RECORDS)), shuffled.collect())


def plan(rows: DataFrame) -> str:
    return str(rows._jdf.queryExecution().executedPlan().toString())


# --- a key in two partitions -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grown(spark: SparkSession, broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Visits:
    """Aggregate a topic of two partitions; then a third one is added, and a visit goes on there."""
    grown = Visits(spark, broker, broker.create_topic("visits_grown", 2), tmp_path_factory.mktemp("grown"))
    broker.produce(grown.topic, [page("A", "p1", "10:00", 0), page("B", "b", "10:00", 1)])
    grown.run(partitions="2")
    broker.admin.create_partitions([NewPartitions(grown.topic, 3)])[grown.topic].result()
    patiently(lambda: broker.ends(grown.topic, 3), passes=lambda _: True)
    broker.produce(grown.topic, [page("A", "p2", "10:01", 2)])
    return grown


def test_another_number_of_partitions_is_refused_at_the_start(grown: Visits) -> None:
    with pytest.raises(WrongUse, match="has 3 partitions, and 2 are agreed"):
        grown.run(partitions="2")


def test_a_key_in_two_partitions_has_two_groups_without_the_refusal(grown: Visits) -> None:
    found = job.aggregated(grown.records(), grown.parameters()).where(F.col(KEY) == "A")
    assert_rows(found.select(KEY, PARTITION, F.size(RECORDS)), [("A", 0, 1), ("A", 2, 1)])


@pytest.mark.parametrize(
    ("agreed", "where", "failure", "sentence"),
    [
        ("2", "true", JobFailed, "has records in partition 2, and 2 partitions are agreed"),
        ("3", "true", DataRefused, "has records of one key in two partitions"),
        (
            "3",
            "partition = 2",
            DataRefused,
            "has records of one key in two partitions",
        ),  # the table has the first
    ],
)
def test_a_key_in_two_partitions_ends_the_batch_before_it_is_written(
    grown: Visits, agreed: str, where: str, failure: type[Exception], sentence: str
) -> None:
    before = grown.table("visits_by_id").collect()
    rows = job.aggregated(grown.records().where(where), grown.parameters())
    with pytest.raises(failure, match=sentence):
        grown.writer(partitions=agreed).write(rows, 1)
    assert_rows(grown.table("visits_by_id"), before)


def test_the_reorganised_topic_has_one_group_a_key_and_each_record_once(
    grown: Visits, broker: Broker, tmp_path: Path
) -> None:
    new = Visits(grown.spark, broker, broker.create_topic("visits_reorganised", 4), tmp_path)
    servers = broker.bootstrap_servers
    params = reorganisation.Parameters(
        source_topic=grown.topic,
        source_bootstrap_servers=servers,
        target_topic=new.topic,
        target_bootstrap_servers=servers,
        until_end=True,
    )
    assert reorganisation.run(params)["records"] == 3
    assert reorganisation.run(params)["records"] == 0, "a second run copies nothing"
    new.run(partitions="4")
    places = {(message.key(), message.partition()) for message in broker.records(new.topic)}
    assert places == {(b"A", 2), (b"B", 0)}, "by murmur2, the partitioner of Java's producers"
    assert_rows(
        new.table("visits_by_id").selectExpr("key", "array_join(values, ' ')"), [("A", "p1 p2"), ("B", "b")]
    )


def test_a_recreated_topic_ends_the_query_that_runs_and_the_next_one(grown: Visits) -> None:
    before = grown.table("visits_by_id").collect()
    running = grown.writer(partitions="3")
    recreate(grown.broker, grown.topic, [page("N", "n", "10:00", 0)] * 3, partitions=3)
    refused = f"the topic {grown.topic} was deleted and recreated: "
    with pytest.raises(DataRefused, match=refused):
        running.write(job.aggregated(grown.records(), grown.parameters()), 7)
    with pytest.raises(DataRefused, match=f"{refused}.*; aggregate the new topic into another target"):
        grown.run()
    assert_rows(grown.table("visits_by_id"), before)


# --- wrong use -------------------------------------------------------------------------------


def test_wrong_use_is_refused_in_one_sentence(visits: Visits, first: dict[str, Any]) -> None:
    for changes, sentence in [
        ({"partitions": "0"}, "partitions must be 1 or more, got 0"),
        ({"target": str(visits.folder / "visits_by_id_dead")}, "target and dead_letter must be two tables"),
        ({"value": "nothing"}, "an expression can't be resolved"),
        ({"value": "key"}, "was made for another rules"),
        ({"consumer": "{sasl.password: x}"}, "is a secret"),
    ]:
        with pytest.raises(WrongUse, match=sentence):
            visits.run(**changes)
