"""Keyed Idempotency: a session is one row under one key, whatever comes late, restarts or is tried again."""

from __future__ import annotations

import datetime as dt
import json
import random
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from python_jobs.idempotency import keyed_files
from python_jobs.idempotency import keyed_sessions as job
from python_jobs.idempotency.keyed_sessions import Parameters
from python_jobs.idempotency.keyed_sinks import FileSink, PostgresSink
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.core.sessions import (
    CLOSED,
    MERGED,
    OPEN,
    Change,
    Event,
    advance,
    each_update,
    first_append,
)
from python_jobs.shared.delta.commits import write_once
from python_jobs.shared.postgres.snapshots import PostgresAccess
from python_jobs.shared.records.session_streams import SessionState
from services.kafka import Broker
from services.postgres import Database
from tests.support.rows import assert_rows
from tests.support.snippets import snippet
from tests.support.waiting import polled

PAGE = "docs/idempotency.md"
HERE = "tests/patterns/idempotency/test_keyed_sessions.py"


# --- without Spark -----------------------------------------------------------------------------------------

A, B, C = Event(0, (100, 0), "a"), Event(40, (101, 0), "b"), Event(200, (102, 0), "c")


def outcome(changes: list[Change]) -> list[tuple[str, int, str]]:
    return sorted(("".join(v.value or "" for v in c.session), c.identity[0], c.status) for c in changes)


def test_partial_and_final_sessions_have_one_first_append() -> None:
    changes, known, _ = advance([], [A], 50, watermark=-1)
    assert outcome(changes) == [("a", 100, OPEN)]
    changes, known, _ = advance(known, [B], 50, watermark=20)
    assert outcome(changes) == [("ab", 100, OPEN)]
    changes, known, _ = advance(known, [], 50, watermark=89)
    assert (changes, known) == ([], [A, B])
    changes, known, _ = advance(known, [], 50, watermark=90)
    assert outcome(changes) == [("ab", 100, CLOSED)]
    assert known == []
    changes, _, _ = advance(known, [C], 50, watermark=90)
    assert outcome(changes) == [("c", 102, OPEN)], "the next session of the user has another first append"


def test_a_late_visit_becomes_the_first_and_not_the_key() -> None:
    _, known, _ = advance([], [B], 50, watermark=-1)
    changes, _, _ = advance(known, [A._replace(order=(109, 0))], 50, watermark=-1)
    assert outcome(changes) == [("ab", 101, OPEN)]


def test_a_visit_that_joins_two_sessions_takes_the_later_one_back() -> None:
    _, known, _ = advance([], [A, C._replace(at=90)], 50, watermark=-1)
    changes, known, _ = advance(known, [Event(45, (103, 0), "b")], 50, watermark=-1)
    assert outcome(changes) == [("", 102, MERGED), ("abc", 100, OPEN)]
    assert len(known) == 3


def test_batches_of_any_size_give_the_same_sessions() -> None:
    drawn = random.Random(20)
    visits = [Event(drawn.randrange(2_000), (number, number % 3), str(number)) for number in range(60)]
    expected: Any = None
    for size in (1, 7, 60):
        written: dict[tuple[int, ...], Change] = {}
        known: list[Event] = []
        for start in range(0, len(visits), size):
            changes, known, _ = advance(known, visits[start : start + size], 50, watermark=-1)
            written |= {change.identity: change for change in changes}
        final, _, _ = advance(known, [], 50, watermark=10_000)
        written |= {change.identity: change for change in final}
        kept = outcome([change for change in written.values() if change.status != MERGED])
        expected = expected or kept
        assert kept == expected
    assert {status for _, _, status in expected} == {CLOSED}


def test_visits_of_one_append_second_are_told_apart_by_their_position() -> None:
    """Kafka stamps a producer's batch once: two sessions of it must not share a key."""
    changes, _, _ = advance([], [A, C._replace(order=(100, 1))], 50, watermark=-1)
    assert sorted(change.identity for change in changes) == [(100, 0), (100, 1)]


class State:
    """Stands for Spark's state of an owner who is new."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def getListState(self, name: str, schema: str) -> State:  # noqa: N802
        return self

    def getCurrentWatermarkInMs(self) -> int:  # noqa: N802
        return 0

    def get(self) -> list[Any]:
        return self.events

    def put(self, events: list[Any]) -> None:
        self.events = events

    def registerTimer(self, moment: int) -> None:  # noqa: N802
        self.timer = moment


def test_the_first_append_is_found_in_any_of_a_users_many_chunks() -> None:
    """Spark hands over many rows of a user in chunks; the text's loop keeps the last chunk's first append."""
    rows = (
        # The least append time is in the second of three chunks.
        Row(__event_micros=number, __order=[(number - 12_000) ** 2, number], __value="page")
        for number in range(25_000)
    )
    state: Any = State()
    sessions = SessionState(["user_id"], 50, first_append, each_update)
    sessions.init(state)
    (written,) = sessions.handleInputRows((1,), rows, state)
    user, identity, _, _, visits, _, status, _ = written
    assert (user, identity, visits, status) == (1, [0, 12_000], 25_000, OPEN)
    assert (len(state.events), state.timer) == (25_000, 26)


# --- the stream --------------------------------------------------------------------------------------------


def at(clock: str) -> str:
    return f"2024-01-01T{clock}Z"


def record(offset: int, user: object, clock: str, page: str, appended: str | None = None) -> tuple[Any, ...]:
    payload = json.dumps({"user_id": user, "event_time": at(clock), "page": page})
    return payload, dt.datetime.fromisoformat(at(appended or clock)), 0, offset


FIRST = [
    record(0, 1, "03:03:20", "A"),
    record(1, 1, "03:03:26", "B"),
    record(2, 1, "03:05:26", "C"),
    record(3, 2, "03:05:26", "other"),
]


@dataclass(frozen=True)
class Left:
    """What a run reported and left in the table of sessions."""

    report: dict[str, Any]
    rows: list[tuple[int, list[str], int, str]]
    """User, pages, number of visits and status."""
    ids: dict[tuple[int, str], str]
    """The session's id by user and pages."""


class Sessions:
    """A table of a topic's records, and the sessions that the job makes of it."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder

    def append(self, *records: tuple[Any, ...]) -> None:
        rows = self.spark.createDataFrame(
            list(records), "payload string, timestamp timestamp, partition int, offset bigint"
        )
        write_once(self.spark, rows.coalesce(1), str(self.folder / "records"))

    def arguments(self, **changes: str) -> list[str]:
        """Return the page's command, on this folder's tables."""
        text = snippet(PAGE, f"{HERE}::test_sessions_are_written_once_and_keep_their_key").replace(
            "\\\n", " "
        )
        for name, own in {
            "bronze/visits_records": "records",
            "gold/sessions": "sessions",
            "silver/visits_without_session": "dead",
            "checkpoints/sessions": "checkpoint",
        }.items():
            assert f"lakehouse/{name}" in text
            text = text.replace(f"lakehouse/{name}", str(self.folder / own))
        words = shlex.split(text)[2:]
        for name, value in changes.items():
            words += [f"--{name}", value]
        return words

    def parameters(self, **changes: str) -> Parameters:
        return parse_parameters(Parameters, self.arguments(**({"now": at("12:00:00")} | changes)))[0]

    def run(self, **changes: str) -> dict[str, Any]:
        return job.run(self.spark, self.parameters(**changes))

    def table(self, name: str = "sessions") -> DataFrame:
        return self.spark.read.format("delta").load(str(self.folder / name))

    def run_and_look(self, **changes: str) -> Left:
        """Run the job and return what it left, before the next run changes it."""
        report, rows = self.run(**changes), self.table().where("status <> 'merged'").collect()
        return Left(
            report,
            rows=[(row.user_id, row.pages, row.visits, row.status) for row in rows],
            ids={(row.user_id, "".join(row.pages)): row.session_id for row in rows},
        )


# The stages of one story: each continues the query of the one before, and stands above the tests that look at it.


@pytest.fixture(scope="module")
def sessions(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    return Sessions(spark, tmp_path_factory.mktemp("sessions"))


@pytest.fixture(scope="module")
def first(sessions: Sessions) -> Left:
    """Run the job on three visits of user 1 and one of user 2."""
    sessions.append(*FIRST)
    return sessions.run_and_look()


def test_sessions_are_written_once_and_keep_their_key(first: Left) -> None:
    assert_rows(first.rows, [(1, ["A", "B", "C"], 3, OPEN), (2, ["other"], 1, OPEN)])
    assert first.report["sessions_written"] == 2
    assert len(set(first.ids.values())) == 2, "two users, the same append second"


@pytest.fixture(scope="module")
def restarted(sessions: Sessions, first: Left) -> Left:
    """Start the query again with a late visit, which becomes its session's first, a broken and an ownerless record."""
    sessions.append(
        record(4, 1, "03:02:30", "late", appended="03:06:00"),
        ("{broken", dt.datetime(2024, 1, 1, 3, 6, tzinfo=dt.UTC), 0, 5),
        record(6, None, "03:05:30", "nobody"),
    )
    return sessions.run_and_look()


def test_a_late_visit_before_a_restart_keeps_the_key(first: Left, restarted: Left) -> None:
    assert restarted.ids == {(1, "lateABC"): first.ids[1, "ABC"], (2, "other"): first.ids[2, "other"]}


def test_records_without_owner_or_time_are_dead_lettered_and_the_query_goes_on(
    sessions: Sessions, restarted: Left
) -> None:
    assert restarted.report["dead"] == 2
    assert_rows(
        sessions.table("dead").select("offset", "error_class", "error_message"),
        [
            (5, "NULL_KEY", "the record has NULL in user_id, event_time"),
            (6, "NULL_KEY", "the record has NULL in user_id"),
        ],
    )


@pytest.fixture(scope="module")
def expired(sessions: Sessions, restarted: Left) -> Left:
    """Go on hours later: the watermark closes the first sessions, and user 2 begins another one."""
    sessions.append(record(7, 2, "04:55:26", "next"))
    sessions.append(record(8, 2, "04:55:30", "last"))
    return sessions.run_and_look(max_files_per_trigger="1")


def test_a_session_after_the_expired_one_has_its_own_key(first: Left, expired: Left) -> None:
    assert_rows(
        expired.rows,
        [
            (1, ["late", "A", "B", "C"], 4, CLOSED),
            (2, ["other"], 1, CLOSED),
            (2, ["next", "last"], 2, OPEN),
        ],
    )
    assert expired.ids[2, "other"] == first.ids[2, "other"]
    assert expired.ids[2, "nextlast"] != expired.ids[2, "other"]


def test_a_replay_from_the_beginning_in_other_batches_gives_the_same_rows(
    sessions: Sessions, expired: Left
) -> None:
    another = str(sessions.folder / "another")
    replayed = sessions.run_and_look(checkpoint=another, start_over="true", now=at("13:00:00"))
    assert replayed.ids == expired.ids
    assert_rows(replayed.rows, expired.rows)
    assert sessions.table().count() == 3
    assert sessions.table().select("ingested_at").distinct().count() == 1, "only that differs"


@pytest.mark.kafka
def test_a_topic_whose_producers_set_the_time_is_refused(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    sessions = Sessions(spark, tmp_path)
    sessions.append(*FIRST)
    of_topic = {"bootstrap_servers": broker.bootstrap_servers}
    with pytest.raises(WrongUse, match=rf"topic {topic} has message.timestamp.type=CreateTime"):
        sessions.run(topic=topic, **of_topic)
    stamped = broker.create_topic(f"{topic}_stamped", 1, {"message.timestamp.type": "LogAppendTime"})
    query, _ = job.start(spark, sessions.parameters(topic=stamped, **of_topic))
    query.stop()
    with pytest.raises(NotReady, match="there is no topic absent"):
        sessions.run(topic="absent", **of_topic)


def test_wrong_use_is_refused_in_one_sentence(spark: SparkSession, tmp_path: Path) -> None:
    sessions = Sessions(spark, tmp_path)
    with pytest.raises(NotReady, match="there is no Delta table"):
        sessions.run()
    sessions.append(*FIRST)
    for changes, sentence in [
        ({"gap": "soon"}, "'soon' is no duration"),
        ({"topic": "visits"}, "topic and bootstrap_servers go together"),
        ({"event_time": "partition"}, "event_time 'partition' is of type .*; it must be a timestamp"),
        ({"value": "absent"}, "an expression can't be resolved: .*absent"),
        ({"target": str(tmp_path / "records")}, "must be three tables"),
        ({"jdbc_url": "jdbc:postgresql://nowhere/x"}, "jdbc_url needs user, and password_env or password_file"),
    ]:  # fmt: skip
        with pytest.raises(WrongUse, match=sentence):
            sessions.run(**changes)


# --- sinks -------------------------------------------------------------------------------------------------


@pytest.fixture
def access(database: Database, tmp_path: Path) -> PostgresAccess:
    password = tmp_path / "password"
    password.write_text(database.password)
    return PostgresAccess(database.jdbc_url, database.user, password_file=str(password))


def in_postgres(database: Database) -> list[tuple[Any, ...]]:
    with database.connect() as connection:
        return connection.execute("select id, pages from sessions").fetchall()


def batch(spark: SparkSession, *rows: tuple[str, list[str]]) -> DataFrame:
    return spark.createDataFrame(list(rows), "id string, pages array<string>").repartition(2)


@pytest.mark.postgres
def test_postgres_takes_each_batch_once_together_with_its_number(
    spark: SparkSession, database: Database, access: PostgresAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = PostgresSink(access, "sessions", ["id"], "checkpoint_1")
    sink.write(batch(spark, ("s1", ["a"]), ("s2", ["b"])), 0)
    sink.write(batch(spark, ("s1", ["a", "c"])), 1)
    assert_rows(in_postgres(database), [("s1", ["a", "c"]), ("s2", ["b"])])
    # Spark runs a batch again whose commit mark is missing: the table is ahead of the checkpoint.
    sink.write(batch(spark, ("s1", ["replayed"])), 1)
    sink.write(batch(spark, ("s1", ["replayed"])), 0)
    assert_rows(in_postgres(database), [("s1", ["a", "c"]), ("s2", ["b"])])
    with pytest.raises(JobFailed, match="run 3 of checkpoint_1 came after its run 1"):
        sink.write(batch(spark, ("s1", ["d"])), 3)

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    # Between the tasks' writes and the move; then between the move and the record of the batch.
    for step in ("_move", "_record"):
        with monkeypatch.context() as patched:
            patched.setattr(PostgresSink, step, dies)
            with pytest.raises(KeyboardInterrupt):
                sink.write(batch(spark, ("s1", ["e"]), ("s3", ["e"])), 2)
        assert_rows(in_postgres(database), [("s1", ["a", "c"]), ("s2", ["b"])])
    with database.connect() as reader:

        def read() -> object:
            return sorted(reader.execute("select id, pages[1] from sessions").fetchall())

        with polled(read) as seen:
            sink.write(batch(spark, ("s1", ["e"]), ("s3", ["e"])), 2)
    old, new = [("s1", "a"), ("s2", "b")], [("s1", "e"), ("s2", "b"), ("s3", "e")]
    assert all(state in (old, new) for state in seen)
    assert seen[-1] == new


@pytest.mark.postgres
def test_a_row_that_does_not_fit_leaves_table_and_progress(
    spark: SparkSession, database: Database, access: PostgresAccess
) -> None:
    database.execute("create table sessions (id varchar(2) primary key, pages text[])")
    sink = PostgresSink(access, "sessions", ["id"], "checkpoint_1")
    with pytest.raises(DataRefused, match="run 0 doesn't fit sessions: value too long"):
        sink.write(batch(spark, ("s1", ["a"]), ("longer", ["b"])), 0)
    assert in_postgres(database) == []
    sink.write(batch(spark, ("s1", ["a"])), 0)
    assert in_postgres(database) == [("s1", ["a"])]


@pytest.mark.postgres
def test_the_job_writes_to_postgres(
    spark: SparkSession, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SESSIONS_PASSWORD", database.password)
    sessions = Sessions(spark, tmp_path)
    sessions.append(*FIRST)
    to_postgres = {
        "jdbc_url": database.jdbc_url,
        "user": database.user,
        "password_env": "SESSIONS_PASSWORD",
        "target": "sessions",
    }
    sessions.run(**to_postgres)
    with database.connect() as connection:
        rows = connection.execute("select user_id, pages, status from sessions").fetchall()
    assert_rows(rows, [(1, ["A", "B", "C"], OPEN), (2, ["other"], OPEN)])


@pytest.mark.kafka
def test_in_kafka_a_batch_that_comes_again_has_the_keys_of_the_first(
    spark: SparkSession, broker: Broker, topic: str
) -> None:
    """What the page says of a topic: consumers keep the latest of each key, as the broker's compaction does."""
    messages = batch(spark, ("s1", ["a"]), ("s2", ["b"])).selectExpr("id as key", "to_json(pages) as value")
    for _ in range(2):
        sink = messages.write.format("kafka").option("kafka.bootstrap.servers", broker.bootstrap_servers)
        sink.option("topic", topic).save()
    found = [(message.key(), message.value()) for message in broker.records(topic)]
    assert_rows(found, [(b"s1", b'["a"]'), (b"s2", b'["b"]')] * 2)
    assert dict(found) == {b"s1": b'["a"]', b"s2": b'["b"]'}


def test_a_file_has_all_digits_of_a_time_and_each_column(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.sql("select timestamp'2024-11-20 10:00:00.123456Z' as at, cast(null as string) as page")
    FileSink(spark, str(tmp_path)).write(rows, 7)
    assert (tmp_path / "7.json").read_text() == '{"at":"2024-11-20T10:00:00.123456Z","page":null}\n'


def test_a_run_has_one_file_whatever_the_clock_says(spark: SparkSession, tmp_path: Path) -> None:
    source, target = str(tmp_path / "visits"), tmp_path / "exports"
    write_once(spark, spark.sql("select 1 as visit_id, date'2024-11-20' as day"), source)

    def run(day: str) -> dict[str, Any]:
        query = snippet(PAGE, f"{HERE}::test_a_run_has_one_file_whatever_the_clock_says").strip()
        return keyed_files.run(spark, keyed_files.Parameters(source, query, str(target), day))

    for visit_id in (2, 3):
        run("2024-11-20")
        write_once(spark, spark.sql(f"select {visit_id} as visit_id, date'2024-11-20' as day"), source)
    report = run("2024-11-20T00:00:00")
    assert report["file"].endswith("exports/20241120.json")
    assert_rows(spark.read.json(str(target)), [(1,), (2,), (3,)])
    run("2024-11-21")
    visible = sorted(file.name for file in target.iterdir() if not file.name.startswith("."))
    assert visible == ["20241120.json", "20241121.json"]
    assert (target / "20241121.json").read_text() == ""
    assert keyed_files.Parameters("s", "q", "t", "2024-11-20T10").file_name == "20241120T100000"
    with pytest.raises(WrongUse, match="'today' is not a time"):
        keyed_files.Parameters("s", "q", "t", "today")
