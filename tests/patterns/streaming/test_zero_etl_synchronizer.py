"""Zero-ETL Synchronizer: raw copies of a real broker's topics, each record once, whatever happens meanwhile."""

from __future__ import annotations

import datetime as dt
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Producer, TopicPartition
from delta.tables import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.delta.commits import commits, latest_version, write_once
from python_jobs.shared.delta.tables import table_size
from python_jobs.streaming import zero_etl_synchronizer as job
from services.kafka import Broker, Record
from tests.support.dbt_project import DbtProject
from tests.support.rows import assert_rows
from tests.support.session import setting
from tests.support.snippets import snippet, snippets
from tests.support.topics import recreate

pytestmark = pytest.mark.kafka

PAGE = "docs/streaming.md"
HERE = "tests/patterns/streaming/test_zero_etl_synchronizer.py"
PREFIX = "zero_"
VALUES: list[bytes | None] = [
    b'{"visit_id": "v0", "page": "home"}',
    b'{"visit_id": -1, "page": ["no", "page"]}',  # malformed business values
    b"\xff\x00 no JSON and no UTF-8",
    b"",
    None,
    b'{"visit_id": "v5",  "page":"a\\u0062c", "amount": 1.10}',  # blanks, escapes and digits stay
    b'{"visit_id": "v6"}',
]


def milliseconds(clock: str) -> int:
    return int(dt.datetime.fromisoformat(f"2024-03-01T{clock}:00+00:00").timestamp() * 1000)


def visit(number: int, clock: str, partition: int = 0) -> Record:
    value = {"visit_id": f"v{number}", "page": "home", "event_time": f"2024-03-01T{clock}:00Z", "a.b": number}
    return Record(json.dumps(value).encode(), partition=partition, timestamp=milliseconds(clock))


class Lake:
    """Topics, their configuration, and the tables that the page's command makes of them."""

    def __init__(self, spark: SparkSession, broker: Broker, folder: Path) -> None:
        self.spark, self.broker, self.folder = spark, broker, folder
        self.entries: dict[str, dict[str, Any]] = {}
        documented = yaml.safe_load(snippet(PAGE, f"{HERE}::test_one_entry_creates_a_registered_table"))
        for entry in documented["topics"]:  # schemas and compaction come with the story
            self.add(entry["topic"], location=entry["location"], table=entry["table"])

    def add(self, topic: str, **entry: Any) -> None:
        """Add an entry with small segments."""
        location = {"table": f"raw.{topic}", "location": f"raw/{topic}"}
        self.entries[topic] = location | entry | {"topic": PREFIX + topic, "segment_records": 5}

    def declare(self, topic: str, **fields: str) -> None:
        """Declare fields of a topic's values."""
        schema = self.folder / f"{topic}.yml"
        schema.write_text(yaml.safe_dump(fields))
        self.entries[topic]["schema"] = str(schema)

    def produce(self, topic: str, *records: Record) -> None:
        self.broker.produce(PREFIX + topic, records)

    def run(self, clock: str, *topics: str, **changes: Any) -> dict[str, Any]:
        """Run the page's command for some of the topics, all by default; return the report by topic."""
        chosen = [self.entries[topic] for topic in topics or self.entries]
        configuration = self.folder / "synchronized_topics.yml"
        configuration.write_text(yaml.safe_dump({"topics": chosen}))
        text = snippet(PAGE, f"{HERE}::test_each_record_is_there_once_whatever_happened").replace("\\\n", " ")
        words = shlex.split(text.replace("localhost:9092", self.broker.bootstrap_servers))[2:]
        own = {
            "now": f"2024-03-01T{clock}",
            "configuration": configuration,
            "root": f"{self.folder}/{words[words.index('--root') + 1]}",
        }
        for name, value in (own | changes).items():
            words += [f"--{name}", str(value)]
        report = job.run(self.spark, parse_parameters(job.Parameters, words)[0])
        return {topic.removeprefix(PREFIX): result for topic, result in report["topics"].items()}

    def location(self, topic: str) -> str:
        return str(self.folder / "lakehouse" / "raw" / topic)

    def table(self, topic: str) -> DataFrame:
        return self.spark.read.format("delta").load(self.location(topic))

    def offsets(self, topic: str) -> list[tuple[int, int]]:
        return sorted((row.partition, row.offset) for row in self.table(topic).collect())

    def copies(self, topic: str) -> int:
        """Return the number of commits with records or progress."""
        return sum(row.operation == "WRITE" for row in commits(self.spark, self.location(topic)))


@pytest.fixture(scope="module")
def lake(spark: SparkSession, broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    spark.sql(f"create database raw location '{tmp_path_factory.mktemp('database')}'")
    yield Lake(spark, broker, tmp_path_factory.mktemp("lake [1], {a} b"))
    spark.sql("drop database raw cascade")


# One story of two topics: each fixture is a run, and the next one begins where it ended.


@pytest.fixture(scope="module")
def first(lake: Lake) -> dict[str, Any]:
    """Run five minutes after seven visits came: five of them fill a segment."""
    lake.broker.create_topic("zero_visits", 2)
    headers = (("origin", b"api"), ("empty", None))
    lake.produce("visits", *(Record(value, b"\x00k", headers, 0, milliseconds("10:00")) for value in VALUES))
    report = lake.run("10:05", "visits")["visits"]
    return report | {"rows": lake.table("visits").collect(), "names": lake.spark.table("raw.visits").columns}


@pytest.fixture(scope="module")
def second(lake: Lake, first: dict[str, Any]) -> dict[str, Any]:
    """Add a topic of transactions; visits crash behind their commit, ten minutes after the first of them came."""
    lake.produce("visits", visit(7, "10:19"), visit(100, "10:00", 1), visit(101, "10:15", 1))
    lake.broker.create_topic("zero_payments")
    producer = Producer({"bootstrap.servers": lake.broker.bootstrap_servers, "transactional.id": "zero"})
    producer.init_transactions()
    for amounts, end in (([1, 2], producer.abort_transaction), (range(3, 9), producer.commit_transaction)):
        producer.begin_transaction()
        for amount in amounts:
            producer.produce("zero_payments", json.dumps({"amount": amount}), timestamp=milliseconds("10:00"))
        producer.flush()  # what the broker doesn't have yet would not be aborted, but never be sent
        end()
    producer.begin_transaction()
    producer.produce("zero_payments", b"open", timestamp=milliseconds("10:00"))
    producer.flush()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "write_once", crashing(write_once, lake.location("visits")))
        with pytest.raises(JobFailed) as failure:
            lake.run("10:20")
    producer.abort_transaction()
    return {"sentence": str(failure.value), "rows": {topic: lake.offsets(topic) for topic in lake.entries}}


@pytest.fixture(scope="module")
def third(lake: Lake, second: dict[str, Any]) -> dict[str, Any]:
    """Run again at the same time, then two runs at once."""
    again = lake.run("10:20")
    copies = lake.copies("visits")
    inner: list[dict[str, Any]] = []

    def write_behind_another_run(*arguments: Any, **named: Any) -> Any:
        if not inner:
            inner.append({})  # the other run's own writes are written at once
            inner[0] |= lake.run("11:00", "visits")
        return write_once(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "write_once", write_behind_another_run)
        outer = lake.run("11:01", "visits")
    return {"again": again, "copies": copies, "inner": inner[0], "outer": outer, "all": lake.copies("visits")}


@pytest.fixture(scope="module")
def fourth(lake: Lake, third: dict[str, Any]) -> dict[str, Any]:
    """Declare fields, and add two topics."""
    lake.produce("visits", visit(8, "11:02"), visit(9, "11:02"))
    lake.declare("visits", visit_id="string")
    lake.declare("payments", amount="int")
    for topic in ("expired", "recreated"):
        lake.broker.create_topic(PREFIX + topic)
        lake.produce(topic, *(visit(number, "10:00") for number in range(3)))
        lake.add(topic)
    return lake.run("11:03")


@pytest.fixture(scope="module")
def fifth(lake: Lake, fourth: dict[str, Any]) -> dict[str, Any]:
    """Change a type, lose records, recreate a topic; visits get another field and a full segment."""
    lake.produce("visits", *(visit(number, "11:04") for number in range(10, 15)))
    lake.declare("visits", page="string", visit_id="string", **{"a.b": "int"})
    lake.declare("payments", amount="string")
    lake.produce("expired", *(visit(number, "10:00") for number in range(3, 6)))
    expired = TopicPartition("zero_expired", 0, 5)
    lake.broker.admin.delete_records([expired])[expired].result(30)
    recreate(lake.broker, "zero_recreated", [visit(number, "10:00") for number in range(9)])
    before = {topic: lake.table(topic).collect() for topic in lake.entries}
    with pytest.raises(DataRefused) as failure:
        lake.run("11:05")
    lake.spark.catalog.refreshTable("raw.visits")
    return {"sentence": str(failure.value), "before": before, "names": lake.spark.table("raw.visits").columns}


@pytest.fixture(scope="module")
def repaired(lake: Lake, fifth: dict[str, Any]) -> dict[str, Any]:
    """Repair all of it and compact."""
    lake.declare("payments", amount="int")
    lake.entries["recreated"] |= {"table": "raw.recreated_again", "location": "raw/recreated_again"}
    lake.entries["visits"]["compaction"] = {"min_small_files": 2}
    files, rows = table_size(lake.spark, lake.location("visits"))[0], lake.table("visits").collect()
    return lake.run("11:05", fail_on_data_loss="false") | {"files": files, "rows": rows}


def crashing(write: Callable[..., Any], location: str) -> Callable[..., Any]:
    """Return the function that writes and then crashes, for one table."""

    def written_and_crashed(spark: SparkSession, rows: DataFrame, table: str, **options: Any) -> Any:
        written = write(spark, rows, table, **options)
        if table == location:
            raise ConnectionResetError("behind the commit")
        return written

    return written_and_crashed


def test_one_entry_creates_a_registered_table(lake: Lake, first: dict[str, Any]) -> None:
    assert first["table"] == "raw.visits"
    assert first["location"] == lake.location("visits")
    assert first["names"] == ["value", "key", "topic", "partition", "offset", "timestamp", "headers"]
    assert lake.spark.table("raw.visits").where("partition = 0 and offset < 5").count() == 5


def test_a_closed_segment_is_copied_and_the_active_one_waits(first: dict[str, Any]) -> None:
    assert first["records"] == 5
    assert sorted(row.offset for row in first["rows"]) == [0, 1, 2, 3, 4]
    position = {(row.topic, row.partition, str(row.timestamp)) for row in first["rows"]}
    assert position == {("zero_visits", 0, "2024-03-01 10:00:00")}


def test_the_bytes_of_a_record_are_unchanged(lake: Lake, third: dict[str, Any]) -> None:
    rows = {row.offset: row for row in lake.table("visits").where("partition = 0 and offset < 7").collect()}
    assert [rows[offset].value for offset in range(7)] == VALUES
    assert {bytes(row.key) for row in rows.values()} == {b"\x00k"}
    headers = {
        (row.headers[0].key, bytes(row.headers[0].value), row.headers[1].value) for row in rows.values()
    }
    assert headers == {("origin", b"api", None)}


def test_the_lag_is_what_the_topic_has_more(first: dict[str, Any], third: dict[str, Any]) -> None:
    assert first["lag"] == 2
    assert first["partitions"] == {
        "0": {"synchronized": 5, "end": 7, "lag": 2},
        "1": {"synchronized": 0, "end": 0, "lag": 0},
    }
    assert third["again"]["visits"]["lag"] == 2, "one record of each partition is younger than ten minutes"
    assert third["again"]["payments"]["lag"] == 2, "an aborted record and its mark are in an open segment"


def test_records_of_an_age_are_in_a_closed_segment(second: dict[str, Any]) -> None:
    """The visits of 10:00 are there at 10:20, and those of 10:15 and 10:19 aren't."""
    assert second["rows"]["visits"] == [(0, offset) for offset in range(7)] + [(1, 0)]


def test_only_committed_records_are_copied(second: dict[str, Any], lake: Lake, third: dict[str, Any]) -> None:
    """The topic begins with an aborted transaction; one that is open when the run begins is aborted later."""
    committed = [(0, offset) for offset in range(3, 9)]
    assert second["rows"]["payments"] == committed
    drained = lake.run("11:01", "payments", now="2100-01-01")["payments"]  # when every segment is closed
    assert (drained["records"], drained["lag"]) == (0, 0), "offsets without a record are behind, too"
    assert lake.offsets("payments") == committed


def test_a_crash_behind_the_commit_copies_nothing_twice(
    second: dict[str, Any], third: dict[str, Any]
) -> None:
    assert (
        "zero_visits failed: behind the commit; synchronized: zero_payments with a lag of 0"
        in second["sentence"]
    )
    assert {topic: report["records"] for topic, report in third["again"].items()} == {
        "visits": 0,
        "payments": 0,
    }
    assert third["copies"] == 2, "a rerun without closed segments has no commit"


def test_two_runs_at_once_copy_each_record_once(third: dict[str, Any]) -> None:
    assert third["inner"]["visits"]["records"] == 2
    assert third["outer"]["visits"]["records"] == 0
    assert third["all"] == 3


def test_a_new_field_is_a_nullable_column_and_null_in_older_rows(
    lake: Lake, first: dict[str, Any], fourth: dict[str, Any], fifth: dict[str, Any]
) -> None:
    assert fourth["visits"]["added_columns"] == ["visit_id"]
    assert fifth["names"] == [*first["names"], "visit_id", "a.b", "page"], "the catalog has the columns"
    assert all(field.nullable for field in lake.table("visits").schema.fields)
    rows = (
        lake.table("visits")
        .where("partition = 0 and offset >= 7")
        .select("offset", "visit_id", "`a.b`", "page")
    )
    expected = [(7, None, None, None), (8, "v8", None, None), (9, "v9", None, None)]
    assert_rows(rows, expected + [(number, f"v{number}", number, "home") for number in range(10, 15)])


def test_a_topic_that_fails_stops_no_other(lake: Lake, fifth: dict[str, Any]) -> None:
    """Another type, expired records and a recreated topic are one sentence; visits go on."""
    for sentence in (
        "zero_payments failed: the schema declares amount as string, but the table has it as int",
        "zero_expired failed: the offsets 3 to 4 of partition 0 expired before they were copied",
        "zero_recreated failed: the topic zero_recreated was deleted and recreated",
        "synchronized: zero_visits with a lag of 0",
    ):
        assert sentence in fifth["sentence"]
    assert lake.offsets("visits")[-2:] == [(1, 0), (1, 1)]
    assert len(fifth["before"]["visits"]) == 12


def test_a_topic_that_failed_resumes_after_its_repair(
    lake: Lake, repaired: dict[str, Any], fifth: Any
) -> None:
    for topic in ("payments", "expired"):
        rows = lake.table(topic).collect()
        assert all(row in rows for row in fifth["before"][topic])
    assert (repaired["expired"]["records"], repaired["expired"]["lost_offsets"]) == (1, 2)
    assert lake.offsets("expired") == [(0, 0), (0, 1), (0, 2), (0, 5)]
    assert lake.offsets("recreated_again") == [(0, offset) for offset in range(9)]
    assert lake.offsets("recreated") == [(0, 0), (0, 1), (0, 2)]


def test_compaction_merges_files_and_leaves_the_rows(lake: Lake, repaired: dict[str, Any]) -> None:
    assert repaired["files"] > 4
    assert repaired["visits"]["compaction"] == {"files_removed": repaired["files"], "files_added": 1}
    assert table_size(lake.spark, lake.location("visits"))[0] == 1
    assert_rows(lake.table("visits"), repaired["rows"])
    assert_rows(lake.spark.table("raw.visits"), repaired["rows"])


def test_each_record_is_there_once_whatever_happened(lake: Lake, repaired: dict[str, Any]) -> None:
    """The offsets of the table are those of the topic: nothing twice, nothing missing, in any partition."""
    records = lake.broker.records("zero_visits")
    assert lake.offsets("visits") == [(record.partition(), record.offset()) for record in records]


def test_a_silver_model_reads_the_raw_table_and_writes_another(
    lake: Lake, repaired: dict[str, Any], make_project: Callable[..., DbtProject]
) -> None:
    sources, model = snippets(PAGE, f"{HERE}::test_a_silver_model_reads_the_raw_table_and_writes_another")
    project = make_project({"models/sources.yml": sources, "models/silver_visits.sql": model})
    project.run("run")
    rows = project.table("silver_visits").selectExpr("visit_id", "date_format(event_time, 'HH:mm')", "offset")
    expected = [(f"v{number}", "11:02", number) for number in (8, 9)]
    assert_rows(rows, expected + [(f"v{number}", "11:04", number) for number in range(10, 15)])
    assert latest_version(lake.spark, "raw.visits") == repaired["visits"]["table_version"]


def test_a_raw_table_refuses_changes_in_place(lake: Lake, repaired: dict[str, Any]) -> None:
    with pytest.raises(PySparkException, match="DELTA_CANNOT_MODIFY_APPEND_ONLY"):
        lake.spark.sql("update raw.visits set value = null")


def test_a_restored_table_gets_again_what_it_lost(lake: Lake, repaired: dict[str, Any]) -> None:
    """The notes of the commits that the restore has undone say that the records are there."""
    location = lake.location("expired")
    lake.spark.sql(f"alter table delta.`{location}` set tblproperties ('delta.appendOnly' = 'false')")
    DeltaTable.forPath(lake.spark, location).restoreToVersion(0)
    report = lake.run("11:05", "expired", fail_on_data_loss="false")["expired"]
    assert (report["records"], report["lag"]) == (1, 0)
    assert lake.offsets("expired") == [(0, 0), (0, 1), (0, 2), (0, 5)]
    copies = lake.copies("expired")
    assert lake.run("11:05", "expired")["expired"]["records"] == 0
    assert lake.copies("expired") == copies


# Places that can't be written.


def test_a_place_that_can_not_be_written_is_one_sentence_and_resumes_after_its_repair(
    lake: Lake, tmp_path: Path
) -> None:
    """Of three topics one may not write its folder, and the catalogs of two don't take a table."""
    places = Lake(lake.spark, lake.broker, tmp_path)
    places.entries.clear()
    mount = tmp_path / "mount"
    mount.symlink_to("/proc")
    places.add("forbidden", location=f"{mount}/forbidden")
    places.add("unregistered", table="not_yet.unregistered")
    places.add("unreachable", table="metastore.raw.unreachable")
    for topic in places.entries:
        lake.broker.create_topic(PREFIX + topic)
        places.produce(topic, visit(1, "10:00"))
    catalog = "spark.sql.catalog.metastore"
    with (
        setting(lake.spark, f"{catalog}.url", "jdbc:postgresql://127.0.0.1:9/catalog"),
        setting(lake.spark, f"{catalog}.driver", "org.postgresql.Driver"),
        setting(lake.spark, catalog, "org.apache.spark.sql.execution.datasources.v2.jdbc.JDBCTableCatalog"),
        pytest.raises(JobFailed) as failure,
    ):
        places.run("10:20")
    for sentence in (
        "zero_forbidden failed: permission denied (",
        "zero_unregistered failed: the catalog failed at the table not_yet.unregistered (",
        f"the copy at {places.location('unregistered')} is complete, and the next run registers it",
        "zero_unreachable failed: the catalog failed at the table metastore.raw.unreachable (",
        "nothing was copied; run again when it answers",
    ):
        assert sentence in str(failure.value)
    assert not lake.spark.catalog.tableExists("raw.forbidden")
    assert not Path(places.location("unreachable")).exists()

    mount.unlink()
    mount.mkdir()
    lake.spark.sql(f"create database not_yet location '{tmp_path}/not_yet'")
    places.entries["unreachable"]["table"] = "raw.unreachable"
    try:
        report = places.run("10:20")
        copied = {topic: result["records"] for topic, result in report.items()}
        assert copied == {"forbidden": 1, "unregistered": 0, "unreachable": 1}
        for name in ("raw.forbidden", "not_yet.unregistered", "raw.unreachable"):
            assert lake.spark.table(name).count() == 1, name
    finally:
        lake.spark.sql("drop database not_yet cascade")


def test_wrong_use_is_refused_in_one_sentence(lake: Lake, repaired: dict[str, Any]) -> None:
    original = lake.entries["visits"]
    with pytest.raises(WrongUse, match=r"the Kafka setting sasl\.jaas\.config is a secret"):
        lake.run("11:05", "visits", consumer='{"sasl.jaas.config": "password=x"}')
    for changes, kind, sentence in [
        ({"topic": "zero_absent"}, NotReady, "not every topic of zero_absent is at"),
        (
            {"location": "raw/payments", "table": "raw.other"},
            WrongUse,
            "isn't a copy of the topic zero_visits",
        ),
        (
            {"location": "raw/elsewhere"},
            WrongUse,
            "the catalog has a table raw.visits at .*raw/visits, not at",
        ),
        ({"table": "raw visits"}, WrongUse, "'raw visits' is no name of a table"),
        ({"schema": "absent.yml"}, WrongUse, "the schema file 'absent.yml' doesn't exist"),
        ({"filter": "page = 'home'"}, WrongUse, "unknown key filter; .* use the Transformation Replicator"),
    ]:
        lake.entries["visits"] = original | changes
        with pytest.raises(kind, match=sentence):
            lake.run("11:05", "visits")
    lake.entries["visits"] = original
    lake.declare("visits", Offset="bigint")
    with pytest.raises(WrongUse, match="fields that are named like columns of the record: Offset"):
        lake.run("11:05", "visits")
