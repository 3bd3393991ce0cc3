"""Change Data Capture from a Delta table's Change Data Feed: the events, their order, and what applies them."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.ingestion import change_data_feed as job
from python_jobs.ingestion.change_data_feed import Parameters, messages
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from services.kafka import Broker
from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.rows import assert_rows
from tests.support.snippets import snippet, snippets
from tests.support.waiting import eventually

PAGE = "docs/ingestion.md"
HERE = "tests/patterns/ingestion/test_change_data_feed.py"
FEED_ON = "tblproperties (delta.enableChangeDataFeed = true)"


class Captured:
    """A Delta table with a change feed, and the events made of it."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.source, self.target = self.path("visits"), self.path("changes")

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def sql(self, statement: str) -> None:
        """Run one statement, one commit; ``visits`` stands for the source."""
        self.spark.sql(statement.replace("visits", f"delta.`{self.source}`", 1))

    def create(self, columns: str = "visit_id string, page string", properties: str = FEED_ON) -> None:
        self.sql(f"create table visits ({columns}) using delta {properties}")

    def insert(self, *rows: tuple[Any, ...], files: int = 1) -> None:
        """Append the rows in one commit of that many files."""
        schema = self.spark.read.format("delta").load(self.source).schema
        frame = self.spark.createDataFrame(list(rows), schema).repartition(files)
        frame.write.format("delta").mode("append").save(self.source)

    def parameters(self, **changes: Any) -> Parameters:
        given = {
            "source": self.source,
            "target": self.target,
            "key": ["visit_id"],
            "checkpoint": self.path("cp"),
        }
        return Parameters(**(given | changes))

    def run(self, **changes: Any) -> dict[str, Any]:
        return job.run(self.spark, self.parameters(**changes))

    def forget_last_commit(self) -> None:
        """Leave the checkpoint as a process does that ends between publishing a batch and noting that."""
        commits = self.folder / "cp" / "commits"
        last = max(commits.glob("[0-9]*"), key=lambda path: int(path.name))
        last.unlink()
        (commits / f".{last.name}.crc").unlink()

    def events(self) -> DataFrame:
        return self.spark.read.format("delta").load(self.target)

    def changes(self) -> list[tuple[Any, ...]]:
        """The events as (version, operation, key, page before, page after)."""
        columns = ("commit_version", "op", "key.visit_id", "before.page", "after.page")
        return sorted(tuple(row) for row in self.events().select(*columns).collect())


@pytest.fixture
def captured(spark: SparkSession, tmp_path: Path) -> Captured:
    return Captured(spark, tmp_path)


def one_life(captured: Captured) -> None:
    """A visit is inserted (version 1), updated (2) and deleted (3)."""
    captured.create()
    captured.insert(("v1", "home"))
    captured.sql("update visits set page = 'about'")
    captured.sql("delete from visits")


# --- the events ------------------------------------------------------------------------------------------


def test_insert_update_and_delete_become_one_event_each(captured: Captured) -> None:
    one_life(captured)
    report = captured.run(starting_version=0)
    assert captured.changes() == [
        (1, "c", "v1", None, "home"),
        (2, "u", "v1", "home", "about"),
        (3, "d", "v1", "about", None),
    ]
    assert (report["created"], report["updated"], report["deleted"], report["last_version"]) == (1, 1, 1, 3)
    assert {len(row.event_id) for row in captured.events().collect()} == {64}
    assert captured.run(starting_version=0)["created"] == 0  # nothing new: nothing more


def test_a_key_that_changes_is_deleted_and_created(captured: Captured) -> None:
    captured.create()
    captured.insert(("v1", "home"), ("v2", "blog"))
    captured.run(starting_version=0)
    captured.sql("update visits set visit_id = 'v9' where visit_id = 'v1'")
    captured.run(starting_version=0)
    assert captured.changes()[2:] == [(2, "c", "v9", None, "home"), (2, "d", "v1", "home", None)]


def test_a_row_replaced_in_one_commit_is_an_update(captured: Captured) -> None:
    captured.create()
    captured.insert(("v1", "home"))
    captured.spark.createDataFrame([("v1", "about")], "visit_id string, page string").write.format(
        "delta"
    ).mode("overwrite").save(captured.source)
    captured.run(starting_version=0)
    assert captured.changes()[1:] == [(2, "u", "v1", "home", "about")]


def test_messages_keep_every_value_and_carry_the_key(captured: Captured) -> None:
    captured.create("visit_id string, at timestamp, day date, views bigint, name string, ip string")
    captured.sql(
        "insert into visits values "
        "('v\"1', timestamp'2024-03-01 10:00:00.000001Z', date'2024-03-01', 9007199254740993, 'é', null)"
    )
    captured.run(key=["visit_id", "day"], starting_version=0)
    (message,) = messages(captured.events(), tombstones=False).collect()
    assert message.key == r'{"visit_id":"v\"1","day":"2024-03-01"}'
    value = json.loads(message.value)
    assert value["after"] == {
        "visit_id": 'v"1',
        "at": "2024-03-01T10:00:00.000001Z",
        "day": "2024-03-01",
        "views": 9007199254740993,
        "name": "é",
        "ip": None,
    }
    assert list(value) == ["event_id", "op", "before", "after", "commit_version", "commit_timestamp"]
    assert (value["op"], value["before"], value["commit_version"]) == ("c", None, 1)


def test_messages_of_a_key_are_sent_in_the_order_of_commits(captured: Captured) -> None:
    one_life(captured)
    captured.insert(("v1", "again"), ("v2", "home"))
    captured.run(starting_version=0)
    for tombstones, expected in ((False, ["c", "u", "d", "c"]), (True, ["c", "u", "d", None, "c"])):
        sent = messages(captured.events(), tombstones).collect()
        of_v1 = [json.loads(m.value)["op"] if m.value else None for m in sent if m.key == '{"visit_id":"v1"}']
        assert of_v1 == expected


# --- snapshot and feed -----------------------------------------------------------------------------------


def test_a_snapshot_and_the_feed_after_it_give_the_exact_state(captured: Captured) -> None:
    captured.create(properties="")
    captured.insert(*((f"v{n}", "home") for n in range(100)))
    captured.sql(f"alter table visits set {FEED_ON}")  # version 2: what came before was never recorded
    captured.run()
    captured.sql("update visits set page = 'about' where visit_id in ('v1', 'v2')")
    captured.sql("delete from visits where visit_id = 'v2'")
    captured.insert(("v100", "home"))
    report = captured.run()
    assert (report["created"], report["updated"], report["deleted"]) == (1, 2, 1)

    changes = captured.changes()
    assert len(changes) == 104  # the hundred once, and the four that followed
    assert [c for c in changes if c[0] == 2] == sorted((2, "c", f"v{n}", None, "home") for n in range(100))
    state: dict[str, str] = {}
    for _, op, key, _, page in changes:
        state.pop(key, None)
        if op != "d":
            state[key] = page
    rows = captured.spark.read.format("delta").load(captured.source).collect()
    assert state == {row.visit_id: row.page for row in rows}


def test_without_the_snapshot_none_of_the_rows_before_are_seen(captured: Captured) -> None:
    captured.create(properties="")
    captured.insert(*((f"v{n}", "home") for n in range(100)))
    captured.sql(f"alter table visits set {FEED_ON}")
    with pytest.raises(NotReady, match="is at version 2, there is no version 3 yet"):
        captured.run(starting_version=3)
    captured.insert(("v100", "home"))
    captured.run(starting_version=3)
    assert captured.changes() == [(3, "c", "v100", None, "home")]


@pytest.mark.parametrize("commits", [9, 1], ids=["nine-commits", "snapshot-of-nine-files"])
def test_a_batch_has_no_more_than_four_files(captured: Captured, commits: int) -> None:
    captured.create()
    visits = [(f"v{n}", "home") for n in range(9)]  # one row a file: events are files
    if commits == 1:
        captured.insert(*visits, files=9)
    else:
        for visit in visits:
            captured.insert(visit)
    assert len(list(Path(captured.source).glob("*.parquet"))) == 9
    start = {} if commits == 1 else {"starting_version": 1}
    batches = captured.run(max_files_per_trigger=4, **start)["batches"]
    assert len(batches) >= 3
    assert max(batch["created"] for batch in batches) <= 4
    assert captured.events().count() == 9


# --- restart ---------------------------------------------------------------------------------------------


def test_a_batch_that_runs_again_adds_nothing_to_the_table(captured: Captured) -> None:
    one_life(captured)
    captured.run(starting_version=0)
    before = captured.changes()
    captured.forget_last_commit()
    report = captured.run(starting_version=0)
    assert (report["created"], report["batches"]) == (0, [])
    assert captured.changes() == before
    captured.forget_last_commit()
    captured.insert(("v2", "home"))
    captured.run(starting_version=0)
    assert captured.changes() == [*before, (4, "c", "v2", None, "home")]


def test_a_checkpoint_of_another_table_is_refused(captured: Captured) -> None:
    one_life(captured)
    captured.run()
    captured.source = captured.path("others")
    captured.create()
    with pytest.raises(WrongUse, match="was made for another source"):
        captured.run()


def test_a_column_added_at_the_source_arrives_after_a_restart(captured: Captured) -> None:
    captured.create()
    captured.insert(("v1", "home"))
    captured.run()
    captured.sql("alter table visits add columns (referral string)")
    captured.insert(("v2", "home", "search"))
    captured.run()
    rows = captured.events().select("key.visit_id", "after.page", "after.referral")
    assert_rows(rows, [("v1", "home", None), ("v2", "home", "search")])


# --- to Kafka --------------------------------------------------------------------------------------------


def published(broker: Broker, topic: str) -> list[tuple[int, str, Any]]:
    """The topic's messages as (partition, key, value), each partition in its order."""
    return [
        (m.partition(), m.key().decode(), json.loads(m.value()) if m.value() is not None else None)
        for m in broker.records(topic)
    ]


@pytest.mark.kafka
def test_all_changes_of_a_key_are_in_one_partition_in_commit_order(
    captured: Captured, broker: Broker
) -> None:
    topic = broker.create_topic("lakehouse.visits", partitions=3)
    to_topic = {"target": None, "topic": topic, "bootstrap_servers": broker.bootstrap_servers}
    captured.create()
    captured.insert(*((f"v{n}", "home") for n in range(9)), files=3)
    captured.run(**to_topic)  # the snapshot
    for page in ("about", "blog"):
        captured.sql(f"update visits set page = '{page}'")
    captured.run(**to_topic)  # two commits in one batch
    captured.sql("delete from visits where visit_id < 'v3'")
    report = captured.run(**to_topic, tombstones=True)
    assert (report["deleted"], report["destination"]) == (3, topic)

    sent = published(broker, topic)
    assert len({partition for partition, *_ in sent}) == 3
    life = [(1, "c", None, "home"), (2, "u", "home", "about"), (3, "u", "about", "blog")]
    for n in range(9):
        of_key = [(partition, value) for partition, key, value in sent if key == f'{{"visit_id":"v{n}"}}']
        assert len({partition for partition, _ in of_key}) == 1
        ended = [(4, "d", "blog", None), None] if n < 3 else []
        assert [value and shortened(value) for _, value in of_key] == life + ended
    assert len(sent) == 9 * 3 + 3 * 2


def shortened(event: dict[str, Any]) -> tuple[Any, ...]:
    pages = (event[image] and event[image]["page"] for image in ("before", "after"))
    return event["commit_version"], event["op"], *pages


@pytest.mark.kafka
def test_a_batch_published_again_is_recognised_by_its_event_ids(
    captured: Captured, broker: Broker, topic: str
) -> None:
    to_topic = {"target": None, "topic": topic, "bootstrap_servers": broker.bootstrap_servers}
    one_life(captured)
    captured.run(starting_version=0, **to_topic)
    captured.forget_last_commit()
    captured.insert(("v2", "home"))
    captured.run(starting_version=0, **to_topic)
    events = [value for _, _, value in published(broker, topic)]
    assert [e["commit_version"] for e in events] == [1, 2, 3, 1, 2, 3, 4]
    assert [e["event_id"] for e in events[:3]] == [e["event_id"] for e in events[3:6]]
    assert len({e["event_id"] for e in events}) == 4


@pytest.mark.kafka
def test_what_could_not_be_published_is_published_later(
    captured: Captured, broker: Broker, topic: str
) -> None:
    captured.create()
    to_topic = {"target": None, "topic": topic, "bootstrap_servers": broker.bootstrap_servers}
    with pytest.raises(NotReady, match="not every topic of nowhere is at"):
        captured.run(**to_topic | {"topic": "nowhere"})
    impatient = {"delivery.timeout.ms": "2000", "request.timeout.ms": "1000", "max.block.ms": "1000"}
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(captured.run, trigger="1 second", producer=impatient, **to_topic)
        try:
            captured.insert(("v1", "home"))
            eventually(lambda: broker.records(topic), 60)
            broker.stop()
            captured.sql("update visits set page = 'about'")
            with pytest.raises(
                JobFailed, match=rf"cannot publish to {topic} at {broker.bootstrap_servers}: "
            ):
                run.result(120)
        finally:
            for query in captured.spark.streams.active:
                query.stop()
    broker.start()
    captured.sql("delete from visits")
    captured.run(**to_topic)
    assert [value["op"] for _, _, value in published(broker, topic)] == ["c", "u", "d"]


@pytest.mark.kafka
def test_each_of_20_commits_reaches_the_topic_while_the_query_runs(
    captured: Captured, broker: Broker, topic: str, record_property: Callable[[str, object], None]
) -> None:
    captured.create()
    params = captured.parameters(
        target=None, topic=topic, bootstrap_servers=broker.bootstrap_servers, trigger="1 second"
    )
    query, _ = job.start(captured.spark, params)
    try:
        for n in range(20):
            captured.insert((f"v{n}", "home"))
        eventually(lambda: len(broker.records(topic)) >= 20, seconds=60)
    finally:
        query.stop()
    sent = [(message.timestamp()[1], json.loads(message.value())) for message in broker.records(topic)]
    assert [event["after"]["visit_id"] for _, event in sent] == [f"v{n}" for n in range(20)]
    seconds = [
        at / 1000 - dt.datetime.fromisoformat(event["commit_timestamp"]).timestamp() for at, event in sent
    ]
    record_property("seconds from commit to topic, maximum of 20", round(max(seconds), 1))


# --- what applies them -----------------------------------------------------------------------------------

STATE = ("visit_id", "page")
PREIMAGE = """
{{ config(materialized='incremental', incremental_strategy='merge', file_format='delta', unique_key='visit_id',
    meta={'lakehouse_patterns': {'merger': {'sequence': 'row_version'}}}) }}
select before.*, commit_version as row_version from {{ source('raw', 'changes') }} where op = 'u'
"""


def test_the_models_of_the_page(captured: Captured, make_project: Callable[..., DbtProject]) -> None:
    from_table, from_messages = snippets(PAGE, f"{HERE}::test_the_models_of_the_page")
    project = make_project(
        {
            "models/current.sql": from_table,
            "models/current_of_topic.sql": from_messages,
            "models/preimages.sql": PREIMAGE,
            "models/sources.yml": raw_tables("changes", "change_messages"),
        }
    )
    one_life(captured)
    captured.insert(("v2", "home"), ("v3", "home"))
    captured.sql("update visits set page = 'about' where visit_id = 'v2'")
    captured.sql("update visits set page = 'blog' where visit_id = 'v2'")
    captured.run(starting_version=0)
    build(project, captured)
    for model in ("current", "current_of_topic"):
        # Several changes of v2 in one batch: the last commit's counts. v1 was deleted.
        assert_rows(living(project, model), [("v2", "blog"), ("v3", "home")], STATE)
        assert set(project.table(model).columns) == {*STATE, "row_version", "is_deleted"}
    # A preimage applied as an upsert brings the value back that the update replaced.
    assert_rows(project.table("preimages"), [("v1", "home"), ("v2", "about")], STATE)
    assert captured.events().count() == 7  # the history: three of v1, three of v2, one of v3

    captured.sql("delete from visits where visit_id = 'v3'")
    captured.sql("update visits set page = 'end' where visit_id = 'v2'")
    captured.run(starting_version=0)
    build(project, captured, "current+", "current_of_topic+")  # with every earlier message once more
    for model in ("current", "current_of_topic"):
        assert_rows(living(project, model), [("v2", "end")], STATE)
    deleted = project.table("current_of_topic").where("is_deleted")
    assert_rows(deleted, [("v1", "about"), ("v3", "home")], STATE)


def living(project: DbtProject, model: str) -> DataFrame:
    return project.table(model).where("not is_deleted")


def build(project: DbtProject, captured: Captured, *select: str) -> None:
    """Make the events so far the sources, the messages twice and with a field nobody knows, and build."""
    project.source("changes", captured.events())
    payloads = messages(captured.events(), tombstones=True).select(
        F.regexp_replace("value", r"^\{", '{"added_later":{"x":1},').alias("payload")
    )
    project.source("change_messages", payloads.union(payloads))
    project.run("run", *(["--select", *select] if select else []))


def test_the_stream_join_of_the_page(captured: Captured) -> None:
    """A visit without its user is not yet unmatched: the join waits for the watermark."""
    spark, emitted = captured.spark, []
    tables = {"visits": captured.path("visits"), "users": captured.path("users")}

    def arrive(table: str, *rows: tuple[str, str, str]) -> None:
        schema = "visit_id string, user_id string" if table == "visits" else "user_id string, name string"
        frame = spark.createDataFrame(list(rows), f"{schema}, time string")
        time = "event_time" if table == "visits" else "changed_at"
        frame = frame.withColumn(time, F.to_timestamp("time")).drop("time")
        frame.write.format("delta").mode("append").save(tables[table])

    def collect(rows: DataFrame, _: int) -> None:
        emitted.extend(tuple(row) for row in rows.select("visit_id", "name").collect())

    arrive("visits", ("v1", "u1", "2024-03-01 10:00:00"), ("v2", "nobody", "2024-03-01 10:00:00"))
    arrive("users", ("u0", "before", "2024-03-01 09:59:00"))
    scope: dict[str, Any] = {"spark": spark, **tables}
    exec(snippet(PAGE, f"{HERE}::test_the_stream_join_of_the_page"), scope)
    sink = scope["visits_with_users"].writeStream.foreachBatch(collect)
    query = sink.option("checkpointLocation", captured.path("join")).start()
    try:
        query.processAllAvailable()
        assert emitted == []
        arrive("users", ("u1", "Ada", "2024-03-01 10:01:00"))
        query.processAllAvailable()
        assert emitted == [("v1", "Ada")]
        arrive("visits", ("v3", "u1", "2024-03-01 12:00:00"))
        arrive("users", ("u9", "later", "2024-03-01 12:00:00"))
        query.processAllAvailable()
        assert emitted == [("v1", "Ada"), ("v2", None)]
    finally:
        query.stop()


def test_the_command_of_the_page(captured: Captured) -> None:
    command = snippet(PAGE, f"{HERE}::test_the_command_of_the_page")
    words = command.replace("\\\n", " ").replace("'", "").split()
    assert words[:2] == ["spark-submit", "python_jobs/ingestion/change_data_feed.py"]
    parameters, _ = parse_parameters(Parameters, words[2:])
    assert (parameters.key, parameters.topic, parameters.target) == (["user_id"], "lakehouse.users", None)


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [{}, {"starting_version": 0}], ids=["snapshot", "version"])
def test_a_table_without_feed_is_refused_at_the_start(captured: Captured, start: dict[str, int]) -> None:
    captured.create(properties="")
    captured.insert(("v1", "home"))
    with pytest.raises(
        WrongUse, match=r"feed of '.+' is off: set its table property delta.enableChangeDataFeed"
    ):
        captured.run(**start)
    assert not Path(captured.target).exists()


def test_changes_from_before_the_feed_was_on_are_one_sentence(captured: Captured) -> None:
    captured.create(properties="")
    captured.insert(("v1", "home"))
    captured.sql(f"alter table visits set {FEED_ON}")
    with pytest.raises(JobFailed, match="hasn't recorded these changes"):
        captured.run(starting_version=0)


def test_expired_versions_and_vacuumed_files_are_one_sentence(captured: Captured) -> None:
    one_life(captured)
    captured.run(starting_version=0)
    captured.sql("alter table visits set tblproperties (delta.checkpointInterval = 1)")
    captured.insert(("v2", "home"))
    captured.sql("update visits set page = 'about'")
    with_retention_off = "spark.databricks.delta.retentionDurationCheck.enabled"
    captured.spark.conf.set(with_retention_off, "false")
    try:
        captured.sql("vacuum visits retain 0 hours")
    finally:
        captured.spark.conf.unset(with_retention_off)
    with pytest.raises(JobFailed, match=r"no longer has the files of these changes \(vacuum\)"):
        captured.run()
    for version in range(4):
        (Path(captured.source) / "_delta_log" / f"{version:020}.json").unlink()
    with pytest.raises(JobFailed, match="no longer has the versions to read next"):
        captured.run(starting_version=0, checkpoint=captured.path("cp2"), target=captured.path("changes2"))


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([(None, "home")], r"the key has a NULL in version 1: \{.visit_id.:null\}"),
        ([("v1", "home"), ("v1", "blog")], r"several rows have one key in version 1: \{.visit_id.:.v1.\}"),
    ],
    ids=["null", "twice"],
)
def test_a_change_without_a_usable_key_is_refused(captured: Captured, rows: list[Any], sentence: str) -> None:
    captured.create()
    captured.insert(*rows)
    with pytest.raises(DataRefused, match=sentence):
        captured.run()
    assert captured.changes() == []


def test_a_key_that_is_none_and_a_target_that_is_another_table(captured: Captured) -> None:
    one_life(captured)
    with pytest.raises(WrongUse, match="has no key column user_id; it has visit_id, page"):
        captured.run(key=["user_id"])
    with pytest.raises(NotReady, match="there is no Delta table"):
        captured.run(source=captured.path("nowhere"))
    captured.spark.range(1).write.format("delta").save(captured.target)
    with pytest.raises(WrongUse, match="holds no change events: its columns are id"):
        captured.run()


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"topic": "t", "bootstrap_servers": "b:1"}, "either topic"),
        ({"target": None}, "either topic"),
        ({"target": None, "topic": "t"}, "belong together"),
        ({"tombstones": True}, "belong to topic"),
        ({"key": []}, "key is empty"),
        ({"target": "raw/visits"}, "two tables"),
        ({"starting_version": -1}, "0 or more"),
        ({"max_files_per_trigger": 0}, "max_files_per_trigger must be 1 or more"),
        ({"trigger": "often"}, "no duration"),
        (
            {
                "target": None,
                "topic": "t",
                "bootstrap_servers": "b:1",
                "producer": {"sasl.jaas.config": "hunter2"},
            },
            r"is a secret: pass it as \$\{env:NAME\}",
        ),
    ],
)
def test_wrong_parameters_are_refused(parameters: dict[str, Any], sentence: str) -> None:
    given = {"source": "raw/visits", "target": "bronze/changes", "key": ["visit_id"], "checkpoint": "cp"}
    with pytest.raises(WrongUse, match=sentence) as refusal:
        Parameters(**(given | parameters))
    assert "hunter2" not in str(refusal.value)
