"""Change Data Capture with the real services: PostgreSQL, Debezium, Kafka, and the job that fills bronze."""

from __future__ import annotations

import datetime as dt
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from case_study.continuous import Models, follow
from python_jobs.ingestion import change_data_capture
from python_jobs.ingestion.change_data_capture import Parameters, run, start
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.kafka import topics as kafka_topics
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.jvm import jvm
from services.debezium import Connector
from services.kafka import Broker, Record
from services.postgres import Database, running_postgres
from services.processes import ServiceFailed, free_port, running
from tests.support.dbt_project import REPOSITORY
from tests.support.killer import kill_group
from tests.support.rows import assert_rows
from tests.support.session import process_environment, settings_kept
from tests.support.snippets import snippet
from tests.support.topics import recreate
from tests.support.waiting import eventually

pytestmark = pytest.mark.kafka
JOB = "python_jobs/ingestion/change_data_capture.py"
THIS = "tests/patterns/ingestion/test_change_data_capture.py::"
NOW = "2026-01-01T00:00:00"


class Bronze:
    """One bronze table fed from one topic."""

    def __init__(self, spark: SparkSession, broker: Broker, topic: str, folder: Path) -> None:
        self.spark, self.broker, self.topic = spark, broker, topic
        self.target, self.checkpoint = str(folder / "bronze"), str(folder / "checkpoint")

    def parameters(self, **more: Any) -> Parameters:
        given = {
            "bootstrap_servers": self.broker.bootstrap_servers,
            "topics": [self.topic],
            "target": self.target,
            "checkpoint": self.checkpoint,
        }
        return Parameters(**{**given, **more})

    def load(self, **more: Any) -> int:
        """Run the job on what is there and return how many records it appended."""
        return int(run(self.spark, self.parameters(**more))["records"])

    def rows(self) -> DataFrame:
        return self.spark.read.format("delta").load(self.target)

    def offsets(self) -> list[int]:
        return sorted(row["offset"] for row in self.rows().select("offset").collect())


@pytest.fixture
def bronze(spark: SparkSession, broker: Broker, topic: str, tmp_path: Path) -> Bronze:
    return Bronze(spark, broker, topic, tmp_path)


def messages(*values: str) -> list[Record]:
    return [Record(value.encode()) for value in values]


def test_a_record_is_kept_as_it_is(bronze):
    headers = (("kind", b"\x00\xff"), ("none", None))
    bronze.broker.produce(
        bronze.topic,
        [
            Record(b"\xff not text\r\n", key=b"\xfe", headers=headers, timestamp=1_767_225_600_001),
            Record(None, key=b"gone", timestamp=1_767_225_600_002),
            Record(b"", timestamp=1_767_225_600_003),
        ],
    )
    assert bronze.load(now=NOW) == 3
    found = bronze.rows().selectExpr(
        "hex(payload)", "hex(key)", "topic", "partition", "offset", "unix_millis(timestamp)", "headers", "ingested_at"
    )  # fmt: skip
    moment = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    assert_rows(
        found,
        [
            (b"\xff not text\r\n".hex().upper(), "FE", bronze.topic, 0, 0, 1_767_225_600_001,
             [("kind", b"\x00\xff"), ("none", None)], moment),
            (None, b"gone".hex().upper(), bronze.topic, 0, 1, 1_767_225_600_002, None, moment),
            ("", None, bronze.topic, 0, 2, 1_767_225_600_003, None, moment),
        ],
    )  # fmt: skip


def test_each_offset_is_there_once_whatever_happens_to_the_checkpoint(bronze):
    bronze.broker.produce(bronze.topic, messages("a", "b"))
    assert bronze.load(now=NOW) == 2
    assert bronze.load(now=NOW) == 0
    bronze.broker.produce(bronze.topic, messages("c"))
    assert bronze.load(now=NOW, checkpoint=bronze.checkpoint + "_new") == 1
    assert bronze.offsets() == [0, 1, 2]
    # A clock that stands still: readers can still ask for what is newer than they have.
    rows = bronze.rows().orderBy("offset").select(F.unix_micros("ingested_at")).collect()
    assert [row[0] - rows[0][0] for row in rows] == [0, 0, 1]


def test_a_query_that_died_before_its_first_batch_begins_at_the_first_record(bronze):
    """Spark makes the folder of offsets when it starts the query, and without a position it would begin at the end."""
    bronze.broker.produce(bronze.topic, messages("a", "b"))
    (Path(bronze.checkpoint) / "offsets").mkdir(parents=True)
    assert bronze.load() == 2


def test_records_of_three_partitions_are_there_once_in_the_order_of_their_key(bronze):
    """60 records are there before the first start, 40 come before the restart; a second query reads all by itself."""
    bronze.topic = bronze.broker.create_topic(f"{bronze.topic}_three", partitions=3)
    sent = [Record(f"{number:03}".encode(), key=f"user {number % 7}".encode()) for number in range(100)]
    bronze.broker.produce(bronze.topic, sent[:60])
    assert bronze.load() == 60
    bronze.broker.produce(bronze.topic, sent[60:])
    assert bronze.load() == 40
    rows = (
        bronze.rows().select("key", "partition", "offset", "payload").orderBy("partition", "offset").collect()
    )
    assert len({(row["partition"], row["offset"]) for row in rows}) == len(rows) == 100
    assert {row["partition"] for row in rows} == {0, 1, 2}
    for user in range(7):
        of_user = [row["payload"] for row in rows if row["key"] == f"user {user}"]
        assert of_user == [f"{number:03}" for number in range(user, 100, 7)]
    others = {name: f"{getattr(bronze, name)}_second" for name in ("target", "checkpoint")}
    assert bronze.load(**others) == 100
    assert bronze.load() == 0


def test_a_batch_that_was_committed_is_not_written_again(bronze):
    bronze.broker.produce(bronze.topic, messages("a"))
    bronze.load()
    # Spark's own note that the batch is done gets lost, as by a kill right after the commit.
    for name in ("0", ".0.crc"):
        (Path(bronze.checkpoint) / "commits" / name).unlink()
    bronze.broker.produce(bronze.topic, messages("b"))
    assert bronze.load() == 1
    assert bronze.offsets() == [0, 1]


def test_records_of_a_transaction_that_was_given_up_never_reach_bronze(bronze):
    producer = Producer(
        {"bootstrap.servers": bronze.broker.bootstrap_servers, "transactional.id": bronze.topic}
    )
    producer.init_transactions(30)

    def send(value: str) -> None:
        producer.begin_transaction()
        producer.produce(bronze.topic, value.encode())
        producer.flush(30)

    send("committed")
    producer.commit_transaction(30)
    send("given up")
    producer.abort_transaction(30)
    send("late")  # open
    assert bronze.load() == 1
    producer.commit_transaction(30)
    eventually(lambda: bronze.load() == 1)
    assert_rows(bronze.rows().selectExpr("cast(payload as string)"), [("committed",), ("late",)])
    # What Kafka shows by default:
    others = {name: f"{getattr(bronze, name)}_dirty" for name in ("target", "checkpoint")}
    assert bronze.load(consumer={"isolation.level": "read_uncommitted"}, **others) == 3


def test_latest_begins_at_the_end_and_batches_are_bounded(bronze):
    bronze.broker.produce(bronze.topic, messages("old"))
    assert bronze.load(starting_offsets="latest") == 0
    bronze.broker.produce(bronze.topic, messages("a", "b", "c"))
    report = run(bronze.spark, bronze.parameters(max_records_per_trigger=2))
    assert [batch["records"] for batch in report["batches"]] == [2, 1]


def test_columns_are_derived_and_the_table_partitioned_by_them(bronze):
    bronze.broker.produce(bronze.topic, [Record(b"a", timestamp=1_767_225_600_000)])
    bronze.load(derive={"date": "to_date(timestamp)"}, partition_by=["date"])
    assert_rows(bronze.rows().select("payload", "date"), [("a", dt.date(2026, 1, 1))])
    assert bronze.rows().inputFiles()[0].split("/")[-2] == "date=2026-01-01"
    with pytest.raises(WrongUse, match="derive names columns that the record itself has: key"):
        bronze.parameters(derive={"key": "1"})


def test_the_command_of_the_page(bronze, monkeypatch, capsys):
    command = snippet("docs/ingestion.md", f"{THIS}test_the_command_of_the_page")
    for variable, value in {
        "$KAFKA_BOOTSTRAP_SERVERS": bronze.broker.bootstrap_servers,
        "shop.public.users": bronze.topic,
        "$LAKEHOUSE_ROOT/bronze/bronze_users_records": bronze.target,
        "$LAKEHOUSE_ROOT/checkpoints/bronze_users_records": bronze.checkpoint,
    }.items():
        assert variable in command
        command = command.replace(variable, value)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["spark-submit", JOB]
    bronze.broker.produce(bronze.topic, messages("a"))
    with pytest.raises(SystemExit) as end:
        run_job(Parameters, run, words[2:])
    assert end.value.code == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["records"] == 1


# --- bad input ------------------------------------------------------------------------------------------


def test_wrong_parameters_are_refused(bronze):
    for more, sentence in (
        ({"topics": []}, r"topics must name each topic once, got \[\]"),
        ({"trigger": "soon"}, "'soon' is no duration"),
        ({"max_records_per_trigger": 0}, "max_records_per_trigger must be 1 or more, got 0"),
        ({"consumer": {"sasl.jaas.config": "password=geheim"}}, r"is a secret: pass it as \$\{env:NAME\}"),
    ):
        with pytest.raises(WrongUse, match=sentence) as refused:
            bronze.parameters(**more)
        assert "geheim" not in str(refused.value)


def test_a_topic_that_is_missing_and_a_broker_that_is_down_or_refuses_are_one_sentence(bronze, monkeypatch):
    with pytest.raises(NotReady, match="not every topic of nowhere is at "):
        bronze.load(topics=["nowhere"])
    monkeypatch.setattr(kafka_topics, "ANSWER_MILLISECONDS", 3_000)
    down = f"127.0.0.1:{free_port()}"
    with pytest.raises(NotReady, match=f"no Kafka broker answers at {down} by PLAINTEXT within 3 seconds"):
        bronze.load(bootstrap_servers=down)
    with pytest.raises(JobFailed, match=r"by SSL (was refused|within 3 seconds)"):
        bronze.load(consumer={"security.protocol": "SSL"})
    monkeypatch.setenv("JAAS", 'Plain required username="a" password="geheim";')
    secured = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.jaas.config": "${env:JAAS}",
    }
    with pytest.raises(JobFailed, match="by SASL_PLAINTEXT ") as refused:
        bronze.load(consumer=secured)
    assert "geheim" not in str(refused.value)
    assert not Path(bronze.target).exists()


def test_expired_records_end_the_job_unless_the_user_goes_on_without_them(bronze):
    bronze.broker.produce(bronze.topic, messages("a", "b"))
    bronze.load()
    bronze.broker.produce(bronze.topic, messages("c", "d", "e"))
    expired = TopicPartition(bronze.topic, 0, 4)
    bronze.broker.admin.delete_records([expired])[expired].result(10)
    with pytest.raises(JobFailed, match=r"no longer has the next records .*--fail_on_data_loss false"):
        bronze.load()
    assert bronze.load(fail_on_data_loss=False) == 1
    assert bronze.offsets() == [0, 1, 4]


def test_a_recreated_topic_is_refused_even_if_it_has_more_records(spark, bronze):
    bronze.broker.produce(bronze.topic, messages("a", "b"))
    query, appender = start(spark, bronze.parameters())
    query.awaitTermination()
    recreate(bronze.broker, bronze.topic, messages("c", "d", "e", "f"))
    refused = f"the topic {bronze.topic} was deleted and recreated: .* another target with a new checkpoint$"
    # The query that still runs, the next one, and one that takes the position from the table.
    with pytest.raises(DataRefused, match=refused):
        appender.write(bronze.rows(), 7)
    for checkpoint in (bronze.checkpoint, bronze.checkpoint + "_new"):
        with pytest.raises(DataRefused, match=refused):
            bronze.load(checkpoint=checkpoint)
    assert bronze.offsets() == [0, 1]
    bronze.target, bronze.checkpoint = bronze.target + "_new", bronze.checkpoint + "_new"
    assert (bronze.load(), bronze.offsets()) == (4, [0, 1, 2, 3])
    bronze.broker.produce(bronze.topic, messages("g"))
    assert bronze.load(checkpoint=bronze.checkpoint + "_third") == 1


def test_the_checkpoint_and_the_table_of_another_job_are_refused(bronze, broker, tmp_path):
    bronze.load()
    other = broker.create_topic(bronze.topic + "_other")
    with pytest.raises(
        WrongUse, match="was made for another topics; give this query another checkpoint folder"
    ):
        bronze.load(topics=[other])
    table = str(tmp_path / "other")
    bronze.spark.range(1).write.format("delta").save(table)
    with pytest.raises(
        WrongUse,
        match=f"the table '{table}' holds no such records: its columns are id; the job writes payload, key",
    ):
        bronze.load(target=table, checkpoint=table + "_checkpoint")


@pytest.mark.kill
def test_a_broker_killed_in_the_middle_is_waited_for(bronze):
    bronze.broker.produce(bronze.topic, messages("a"))
    query, _ = start(bronze.spark, bronze.parameters(trigger="1 second"))
    try:
        eventually(lambda: bronze.rows().count() == 1)
        bronze.broker.kill()
        bronze.broker.start()
        bronze.broker.produce(bronze.topic, messages("b"))
        eventually(lambda: query.exception() or bronze.rows().count() == 2, 60)
    finally:
        query.stop()
    assert bronze.offsets() == [0, 1]


def test_stream_and_models_of_the_runner_take_turns(bronze):
    seen: list[list[int]] = []

    class Watched(Models):
        """Models that look at bronze, send two records once there is one, and stop once there are more."""

        def __init__(self) -> None: ...

        def run(self) -> None:
            seen.append(bronze.offsets())
            if len(seen[-1]) > 1:
                raise KeyboardInterrupt
            if seen[-1] == [0] and seen.count([0]) == 1:
                bronze.broker.produce(bronze.topic, messages("b"))
                bronze.broker.produce(bronze.topic, messages("c"))

    bronze.broker.produce(bronze.topic, messages("a"))
    with pytest.raises(KeyboardInterrupt):
        follow(bronze.spark, bronze.parameters(), Watched())
    # Neither came while the models ran, so both came in the batch after it.
    assert seen[-1] == [0, 1, 2]
    assert bronze.rows().select("ingested_at").distinct().count() == 2


def test_a_signal_during_a_build_of_the_runner_lets_the_build_end(bronze):
    done: list[str] = []

    class Signalled(Models):
        """Models that are told to end while they run."""

        def __init__(self) -> None: ...

        def run(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("built")

    follow(bronze.spark, bronze.parameters(), Signalled())
    assert done == ["built"]
    assert not bronze.spark.streams.active


def test_a_batch_that_the_runners_end_interrupts_is_no_failure(bronze, monkeypatch):
    in_batch = threading.Event()

    def interrupted(*_: Any) -> None:
        in_batch.set()
        try:
            jvm(bronze.spark).java.lang.Thread.sleep(60_000)
        except Py4JJavaError:
            raise JobFailed("the Kafka client was refused (InterruptedException)") from None

    class Signalled(Models):
        """Models that are told to end while a batch asks Kafka."""

        def __init__(self) -> None: ...

        def run(self) -> None:
            assert in_batch.wait(60)
            os.kill(os.getpid(), signal.SIGTERM)

    bronze.broker.produce(bronze.topic, messages("a"))
    monkeypatch.setattr(kafka_topics.StreamedTopics, "require_unchanged", interrupted)
    follow(bronze.spark, bronze.parameters(), Signalled())
    monkeypatch.undo()
    bronze.load()
    assert bronze.rows().count() == 1


def test_a_job_that_ends_before_its_commit_leaves_no_gap_and_no_double(bronze, monkeypatch):
    bronze.broker.produce(bronze.topic, messages("a"))
    bronze.load()
    bronze.broker.produce(bronze.topic, messages("b", "c"))

    def die(*_: Any) -> None:
        raise OSError("the machine is gone")

    with monkeypatch.context() as dying:
        dying.setattr(change_data_capture, "append_records", die)
        with pytest.raises(OSError, match="the machine is gone"):
            bronze.load()
    assert bronze.offsets() == [0]
    assert bronze.load() == 2
    assert bronze.offsets() == [0, 1, 2]


# --- PostgreSQL and Debezium ----------------------------------------------------------------------------

USERS = "create table users (id bigint primary key, name text, amount numeric(10, 2))"


class Captured:
    """A table in PostgreSQL whose changes a connector publishes."""

    def __init__(self, connector: Connector, database: Database, broker: Broker, folder: Path) -> None:
        self.connector, self.database, self.broker, self.folder = connector, database, broker, folder
        self.topic = connector.topic("public.users")

    def wait_for(self, id_: int, op: str = "c") -> list[Any]:
        """Wait until the change of a row is in the topic; return the topic's records."""

        def found() -> list[Any]:
            if self.topic not in self.broker.topics():
                return []
            records = self.broker.records(self.topic)
            values = [json.loads(record.value()) for record in records if record.value()]
            rows = [value["after"] or value["before"] for value in values if value["op"] == op]
            return records if any(row and row["id"] == id_ for row in rows) else []

        return eventually(found, 60)


@pytest.fixture(scope="module")
def captured(postgres: Any, broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captured]:
    """100 rows are there; more come while the connector takes its snapshot."""
    database = postgres.create_database("captured")
    database.execute(USERS, "insert into users select i, 'user ' || i, i from generate_series(1, 100) as i")
    folder = tmp_path_factory.mktemp("captured")
    stop = threading.Event()
    writer = threading.Thread(target=_write_until, args=(database, stop))
    writer.start()
    try:
        with running(Connector(folder, broker, database, ["public.users"], "captured")) as connector:
            stop.set()
            writer.join()
            database.execute("insert into users values (1000, 'last of the beginning', 0)")
            yield Captured(connector, database, broker, folder)
    finally:
        stop.set()
        writer.join()


def _write_until(database: Database, stop: threading.Event) -> None:
    number = 100
    with database.connect() as connection:
        while not stop.wait(0.01):
            number += 1
            connection.execute("insert into users values (%s, 'new', 1)", [number])
            connection.execute("update users set name = 'changed ' || id where id = %s", [number % 100 + 1])


def latest(spark: SparkSession, render: Callable[..., str], bronze: Bronze) -> DataFrame:
    """Return the rows that are in the source after all changes of bronze, by their order in the log."""
    bronze.rows().createOrReplaceTempView("captured_records")
    columns = {"id": "bigint", "name": "string", "amount": "decimal(10,2)"}
    flags = render("change_data_capture_flags", relation="captured_records", columns=columns, key="id")
    row = "max_by(struct(name, amount, is_deleted), lsn)"
    return spark.sql(
        f"select id, row.name, row.amount from (select id, {row} as row from ({flags}) "
        "where error_class is null and op in ('c', 'r', 'u', 'd') group by id) where not row.is_deleted"
    )


@pytest.mark.postgres
def test_a_snapshot_and_then_the_stream_without_gap_or_double(spark, render, captured, broker, tmp_path):
    captured.wait_for(1000)
    bronze = Bronze(spark, broker, captured.topic, tmp_path)
    bronze.load()
    with captured.database.connect() as connection:
        expected = connection.execute("select id, name, amount from users").fetchall()
    assert len(expected) > 101
    assert_rows(latest(spark, render, bronze), expected)
    # Each of the 100 was read once, by the snapshot, and each later one came once, from either.
    count = F.count_if(F.get_json_object("payload", "$.op").isin("c", "r")).alias("first_seen")
    key = F.get_json_object("key", "$.id").alias("id")
    assert_rows(bronze.rows().groupBy(key).agg(count).select("first_seen").distinct(), [(1,)])


@pytest.mark.postgres
def test_changes_of_a_key_are_in_one_partition_in_the_order_of_their_commits(captured):
    assert captured.topic == "captured.public.users"
    with captured.database.connect(autocommit=False) as connection:
        connection.execute("insert into users values (2000, 'a', 1), (2001, 'x', 1)")
        connection.execute("update users set name = 'b' where id = 2000")
        connection.execute("delete from users where id = 2000")
        connection.commit()
        connection.execute("insert into users values (2000, 'c', 1)")
        connection.execute("insert into users values (2002, 'rolled back', 1)")
        connection.rollback()
        connection.execute("insert into users values (2003, 'end', 1)")
        connection.commit()
    records = captured.wait_for(2003)
    of_key = [record for record in records if record.key() == b'{"id":2000}']
    values = [json.loads(record.value()) if record.value() else None for record in of_key]
    assert [value and value["op"] for value in values] == ["c", "u", "d", None]
    assert {record.partition() for record in of_key} == {0}
    changes = [value for value in values if value]
    lsns = [value["source"]["lsn"] for value in changes]
    assert lsns == sorted(set(lsns))
    assert len({value["transaction"]["id"].split(":")[0] for value in changes}) == 1
    assert b"rolled back" not in b"".join(record.value() or b"" for record in records)


@pytest.mark.postgres
def test_each_of_20_changes_reaches_the_topic_before_the_next_is_made(captured, record_property):
    seconds = []
    with captured.database.connect() as connection:
        for number in range(3000, 3020):
            connection.execute("insert into users values (%s, 'trickled', 1)", [number])
            committed = dt.datetime.now(dt.UTC)
            captured.wait_for(number)
            seconds.append((dt.datetime.now(dt.UTC) - committed).total_seconds())
    record_property("seconds from commit to topic, maximum of 20", round(max(seconds), 1))


@pytest.mark.postgres
def test_columns_added_dropped_and_widened_at_the_source(spark, render, captured, broker, tmp_path):
    captured.database.execute(
        "alter table users add column plan text",
        "insert into users values (4000, 'added', 1, 'pro')",
        "alter table users drop column name",
        "alter table users alter column amount type numeric(12, 4)",
        "insert into users values (4001, 1.0001, 'pro'), (4002, 2.5, 'pro')",
        "alter table users add column name text",
        "insert into users values (4003, 1, 'pro', 'back')",
    )
    captured.wait_for(4003)
    bronze = Bronze(spark, broker, captured.topic, tmp_path)
    bronze.load()
    bronze.rows().createOrReplaceTempView("captured_records")

    def changes(columns: dict[str, str]) -> DataFrame:
        flags = render("change_data_capture_flags", relation="captured_records", columns=columns, key="id")
        return spark.sql(f"select * from ({flags}) where id >= 4000")

    before = {"id": "bigint", "name": "string", "amount": "decimal(10,2)"}
    assert_rows(
        changes(before).selectExpr("id", "name", "string(amount)", "error_message"),
        [
            (4000, "added", "1.00", None),
            (4001, None, None, "no value of the type in amount (decimal(10,2))"),
            (4002, None, "2.50", None),
            (4003, "back", "1.00", None),
        ],
    )
    after = {"id": "bigint", "amount": "decimal(12,4)", "plan": "string"}
    assert_rows(
        changes(after).where("error_class is null").selectExpr("id", "string(amount)", "plan"),
        [(4000, "1.0000", "pro"), (4001, "1.0001", "pro"), (4002, "2.5000", "pro"), (4003, "1.0000", "pro")],
    )


@pytest.mark.postgres
@pytest.mark.kill
def test_a_killed_connector_and_a_restarted_server_lose_nothing(captured, postgres):
    captured.database.execute("insert into users (id) values (5000)")
    captured.wait_for(5000)
    captured.connector.kill()
    captured.database.execute("insert into users (id) values (5001)", "delete from users where id = 5000")
    captured.connector.start()
    captured.wait_for(5000, "d")
    postgres.restart()
    captured.database.execute("insert into users (id) values (5002)")
    records = captured.wait_for(5002)
    ids = [
        json.loads(r.value())["after"]["id"]
        for r in records
        if r.value() and json.loads(r.value())["op"] == "c"
    ]
    assert [ids.count(number) >= 1 for number in (5000, 5001, 5002)] == [True, True, True]
    assert captured.connector.failure() is None


@pytest.mark.postgres
def test_a_lost_replication_slot_is_one_sentence_not_a_silent_gap(captured):
    """The last test of the connector: it can't go on without its slot."""
    captured.connector.stop()
    with captured.database.connect() as connection:
        connection.execute("select pg_drop_replication_slot(%s)", [captured.connector.slot_name])
    captured.database.execute("insert into users (id) values (6000)")
    with pytest.raises(
        ServiceFailed, match=r"^connector 'captured' can't start: .*(slot|no longer available)"
    ):
        captured.connector.start()


@pytest.mark.postgres
def test_a_server_without_a_logical_log_is_one_sentence(broker, tmp_path):
    with running_postgres(tmp_path / "postgres") as plain:
        plain.execute("alter system set wal_level = 'replica'")
        plain.restart()
        with (
            pytest.raises(ServiceFailed, match=r"^connector 'plain' can't start: .*wal_level"),
            running(Connector(tmp_path / "connect", broker, plain, topic_prefix="plain")),
        ):
            pass


def test_the_runner_makes_views_once_and_leaves_out_what_has_its_own_schedule(make_project):
    project = make_project(
        {
            "models/numbers.sql": "{{ config(materialized='view') }} select 1 as number",
            "models/counted.sql": "{{ config(materialized='incremental') }} select * from {{ ref('numbers') }}",
            "models/apart.sql": "{{ config(materialized='table') }} select * from {{ ref('numbers') }}",
        }
    )
    models = Models("numbers+", exclude=["apart"], flags=project.flags())
    with settings_kept(project.spark):
        models.run()
        project.spark.sql(f"create or replace view {project.schema}.numbers as select 2 as number")
        models.run()
    assert_rows(project.table("counted"), [{"number": 1}, {"number": 2}])
    assert not project.spark.catalog.tableExists(f"{project.schema}.apart")


def test_the_runner_as_a_program_ends_well_when_it_is_told_to(bronze, make_project, tmp_path):
    project = make_project({"models/numbers.sql": "{{ config(materialized='table') }} select 1 as number"})
    job, log = tmp_path / "job.yml", tmp_path / "log"
    job.write_text(f"topics: [{bronze.topic}]\n", encoding="utf-8")
    bronze.broker.produce(bronze.topic, messages("a"))
    command = [
        sys.executable, "-m", "case_study.continuous", "--job", str(job), "--select", "numbers",
        "--bootstrap_servers", bronze.broker.bootstrap_servers,
        "--target", bronze.target, "--checkpoint", bronze.checkpoint,
    ]  # fmt: skip
    places = {"LAKEHOUSE_ROOT": str(tmp_path), "DBT_PROFILES_DIR": str(project.root)}
    with log.open("w") as output:
        runner = subprocess.Popen(
            command, cwd=project.root, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | process_environment() | places | {"PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip
    try:
        eventually(lambda: runner.poll() is not None or '"bronze_version": 1' in log.read_text(), 120)
        runner.terminate()
        assert runner.wait(60) == 0, log.read_text()
    finally:
        kill_group(runner)
    assert bronze.offsets() == [0]
    assert (project.location / "numbers").is_dir()
