"""Sidecar: rows of several sources with the same columns, in several stores by one evaluation of each batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from python_jobs.ingestion import change_data_feed
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, NotReady, WrongUse
from python_jobs.shared.delta.commits import latest_version, write_once
from python_jobs.shared.kafka import topics as kafka_topics
from python_jobs.streaming import batch_sinks
from python_jobs.streaming import sidecar as job
from python_jobs.streaming.batch_sinks import SideSink, TopicSink
from python_jobs.streaming.gold_rows import as_message
from python_jobs.streaming.inputs import Source, united
from services.kafka import Broker, Record
from tests.support.failing_write import failing_at
from tests.support.rows import assert_rows
from tests.support.snippets import snippet
from tests.support.topics import recreate
from tests.support.waiting import eventually

PAGE = "docs/streaming.md"
HERE = "tests/patterns/streaming/test_sidecar.py"
WEB = "visit_id string, event_ts string, device_type string, device_version string"
ROWS = "visit_id string, type string, version string, origin string, source string"
# The text's batch: two visits of mobile 1.0, one of desktop 2.0.
VISITS = [("v1", "mobile", "1.0"), ("v2", "mobile", "1.0"), ("v3", "desktop", "2.0")]
STATISTICS = ("type", "version", "visits", "batch_id")


def at(visit_id: str) -> str:
    return f"2024-01-01T10:0{visit_id[1:]}:00Z"


class Story:
    """The page's two sources and the stores that its configuration names."""

    def __init__(self, spark: SparkSession, broker: Broker, folder: Path) -> None:
        self.spark, self.broker, self.folder = spark, broker, folder
        text = snippet(PAGE, f"{HERE}::test_rows_of_all_sources_have_the_same_columns_and_their_source")
        text = text.replace("lakehouse/", f"{folder}/").replace("archive/", f"{folder}/archive/")
        self.config = yaml.safe_load(text.replace("localhost:9092", broker.bootstrap_servers))
        broker.create_topic("device_statistics")
        # What is below a file can't be written: the archive is down.
        self.archive = folder / "archive"
        self.archive.write_text("no folder")

    def web(self, *visits: tuple[str, str, str]) -> None:
        """Append visits to the table, as one file."""
        rows = [(visit_id, at(visit_id), type_, version) for visit_id, type_, version in visits]
        table = str(self.folder / "bronze" / "web_visits")
        write_once(self.spark, self.spark.createDataFrame(rows, WEB).coalesce(1), table)

    def app(self, *visits: tuple[str, str, str]) -> None:
        """Publish visits to the topic."""
        values = [
            {"visit": visit_id, "event_timestamp": at(visit_id), "type": type_, "version": version}
            for visit_id, type_, version in visits
        ]
        self.broker.produce("app_visits", [Record(json.dumps(value).encode()) for value in values])

    def run(self, **changes: Any) -> dict[str, Any]:
        """Run the page's command and return its report."""
        file = self.folder / "sidecar.yml"
        file.write_text(yaml.safe_dump(self.config | changes, sort_keys=False))
        return job.run(self.spark, parse_parameters(job.Parameters, ["--config", str(file)])[0])

    def table(self, name: str) -> DataFrame:
        return self.spark.read.format("delta").load(str(self.folder / name))

    def cached(self) -> dict[int, str | None]:
        """Return the names of what the session keeps, also for other tests, by its number."""
        kept: Any = self.spark.sparkContext._jsc
        return {number: rdd.name() for number, rdd in kept.getPersistentRDDs().items()}

    def rows_now(self, name: str, *columns: str) -> list[tuple[Any, ...]]:
        """Return a table's rows as they are now, whatever later runs change."""
        return [tuple(row) for row in self.table(name).select(*columns).collect()]


@pytest.fixture(scope="module")
def story(spark: SparkSession, broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = Story(spark, broker, tmp_path_factory.mktemp("sidecar"))
    story.web(*VISITS)
    return story


# One story. The topic doesn't exist and the archive is down. A first run ends between two sinks, and the next one
# repeats its batch. Then the topic is there, and later the archive.


@pytest.fixture(scope="module")
def crashed(story: Story) -> dict[str, Any]:
    """Run the job until the statistics fail, behind the target; return what is there, and what it left cached."""
    cached_before = story.cached()
    with failing_at(
        str(story.folder / "gold" / "device_statistics"), batch_sinks, "append", ConnectionResetError("down")
    ):
        story.run()
    return {
        "target": story.rows_now("silver/all_visits", "visit_id"),
        "statistics": story.rows_now("gold/device_statistics", *STATISTICS),
        "still cached": [name for rdd, name in story.cached().items() if rdd not in cached_before],
    }


@pytest.fixture(scope="module")
def repeated(story: Story, crashed: dict[str, Any]) -> dict[str, Any]:
    """Run again: the batch that was begun is repeated."""
    report = story.run()
    return report | {
        "target": story.rows_now("silver/all_visits", "visit_id", "source"),
        "statistics": story.rows_now("gold/device_statistics", *STATISTICS),
        "log": story.rows_now("observability/missing_batches", "sink", "batch_id", "event", "error"),
    }


@pytest.fixture(scope="module")
def both(story: Story, repeated: dict[str, Any]) -> dict[str, Any]:
    """Run aligned until both sources have new rows, one of them in both; keep the refusals."""
    refusals = []

    def refused() -> None:
        with pytest.raises(NotReady) as refusal:
            story.run(alignment="aligned")
        refusals.append(str(refusal.value).partition(";")[0])

    refused()
    story.broker.create_topic("app_visits")
    story.app(("v1", "mobile", "1.0"), ("v4", "tablet", "3.0"))
    story.spark.sql(f"alter table delta.`{story.folder}/bronze/web_visits` set tblproperties ('a' = 'b')")
    refused()
    story.web(("v5", "mobile", "1.0"))
    return story.run(alignment="aligned") | {"refusals": refusals}


@pytest.fixture(scope="module")
def repaired(story: Story, both: dict[str, Any]) -> list[dict[str, Any]]:
    """Repair the archive, and once more, after it was declared a required sink in vain."""
    assert both["missing"] == {"archive": [0, 1]}
    required = [sink | {"required": True} for sink in story.config["sinks"]]
    with pytest.raises(
        WrongUse, match="the required sink archive lacks the batches 0, 1: repair it as an optional one"
    ):
        story.run(sinks=required)
    story.archive.unlink()
    return [story.run(action="repair") for _ in range(2)]


def test_an_absent_source_holds_up_no_other(repeated: dict[str, Any]) -> None:
    assert repeated["absent"] == ["app"]
    assert repeated["rows"] == {"web": 3, "app": 0}
    assert_rows(repeated["target"], [("v1", "web"), ("v2", "web"), ("v3", "web")])


def test_a_batch_that_is_repeated_after_a_failed_sink_is_in_each_store_once(
    crashed: dict[str, Any], repeated: dict[str, Any]
) -> None:
    assert (len(crashed["target"]), crashed["statistics"]) == (3, [])
    assert len(repeated["target"]) == 3
    assert_rows(repeated["statistics"], [("mobile", "1.0", 2, 0), ("desktop", "2.0", 1, 0)])


def test_a_failed_batch_leaves_no_rows_cached(crashed: dict[str, Any]) -> None:
    """What stays are Delta's own states of tables."""
    assert [name for name in crashed["still cached"] if not str(name).startswith("Delta Table State")] == []


def test_an_optional_sink_that_is_down_is_recorded_and_the_batch_complete(repeated: dict[str, Any]) -> None:
    assert repeated["missing"] == {"archive": [0]}
    ((*line, error),) = repeated["log"]
    assert line == ["archive", 0, "missing"]
    assert "archive" in error


def test_rows_of_all_sources_have_the_same_columns_and_their_source(
    story: Story, both: dict[str, Any]
) -> None:
    """The sources name their columns in another order: type and version are both texts, and don't change places."""
    assert both["batches"] == [{"batch_id": 1, "rows": {"web": 1, "app": 2}}]
    assert both["absent"] == []
    rows = story.table("silver/all_visits").selectExpr(
        "visit_id", "date_format(event_time, 'mm')", "type", "version", "origin", "source", "batch_id"
    )
    web = [(*visit, "real_time", "web", 0) for visit in VISITS] + [
        ("v5", "mobile", "1.0", "real_time", "web", 1)
    ]
    app = [("v1", "mobile", "1.0", "real_time", "app", 1), ("v4", "tablet", "3.0", "real_time", "app", 1)]
    assert_rows(rows, [(row[0], f"0{row[0][1:]}", *row[1:]) for row in web + app])


def test_a_topic_gets_the_same_batches(story: Story, both: dict[str, Any]) -> None:
    messages = [
        ((message.key() or b"").decode(), json.loads(message.value() or b""))
        for message in story.broker.records("device_statistics")
    ]
    found = [(key, value["visits"], value["batch_id"]) for key, value in messages]
    assert sorted(found) == [("desktop", 1, 0), ("mobile", 2, 0), ("mobile", 2, 1), ("tablet", 1, 1)]


def test_a_repair_writes_the_missing_batches_alone(
    story: Story, both: dict[str, Any], repaired: list[dict[str, Any]]
) -> None:
    assert repaired == [{"repaired": {"archive": [0, 1]}}, {"repaired": {}}]
    columns = ("visit_id", "event_time", "type", "source", "batch_id", "writer_id")
    assert_rows(
        story.table("archive/visits").select(*columns),
        story.table("silver/all_visits").select(*columns),
    )


def test_aligned_sources_wait_for_each_other(both: dict[str, Any]) -> None:
    """A commit without rows is no news."""
    assert both["refusals"] == ["no new data of web, app", "no new data of web"]
    assert both["rows"] == {"web": 1, "app": 2}


def test_a_source_that_was_read_before_and_is_away_ends_the_run(
    story: Story, repaired: list[dict[str, Any]]
) -> None:
    table = story.folder / "bronze" / "web_visits"
    version = latest_version(story.spark, str(story.folder / "silver" / "all_visits"))
    table.rename(table.with_name("away"))
    with pytest.raises(NotReady, match="the source web was read before and is away now: there is no table"):
        story.run()
    table.with_name("away").rename(table)
    assert latest_version(story.spark, str(story.folder / "silver" / "all_visits")) == version


# --- single batches --------------------------------------------------------------------------------------


class Batches:
    """A writer, without a query, and its tables."""

    def __init__(self, spark: SparkSession, folder: Path, **queries: str) -> None:
        """Take the query of each sink; a sink named optional is optional."""
        self.spark, self.folder, self.writer_id = spark, folder, "checkpoint"
        self.params = job.Parameters(
            sources=[Source("web", dict.fromkeys(("visit_id", "type", "version"), "''"), table="web")],
            target=str(folder / "target"),
            sinks=[
                SideSink(name, query, table=str(folder / name), required=name != "optional")
                for name, query in queries.items()
            ],
            missing=str(folder / "missing"),
            checkpoint=str(folder / "checkpoint"),
        )
        self.repairs = job.Repairs(spark, self.params, self.writer_id)
        self.writer = job.BatchWriter(
            self.params, [], self.params.batch_sinks(), self.writer_id, self.repairs
        )

    def write(self, batch_id: int, *visits: tuple[str, str, str], token: str = "''") -> None:
        rows = [(*visit, "real_time", "web") for visit in visits]
        frame = self.spark.createDataFrame(rows, ROWS)
        self.writer.write(frame.selectExpr("*", f"{token} as token"), batch_id)

    def rows(self, name: str = "target", *columns: str) -> list[tuple[Any, ...]]:
        found = self.spark.read.format("delta").load(str(self.folder / name))
        return [tuple(row) for row in found.select(*columns or ["visit_id"]).collect()]


def misspelt(writer_id: str, batch_id: int) -> dict[str, str]:
    """Return the options as the text's sample has them."""
    return {"txnnAppId": writer_id, "txnverson": str(batch_id)}


def test_a_batch_comes_twice_with_misspelt_options(spark: SparkSession, tmp_path: Path) -> None:
    """With the right ones it comes once: see the batch that is repeated after a failed sink."""
    batches = Batches(spark, tmp_path)
    with patch.object(job, "batch_options", misspelt):
        for _ in range(2):
            batches.write(0, *VISITS)
    assert len(batches.rows()) == 6


@pytest.mark.parametrize(("is_cached", "evaluations"), [(True, 3), (False, 6)])
def test_the_rows_are_evaluated_once(
    spark: SparkSession, tmp_path: Path, is_cached: bool, evaluations: int
) -> None:
    """Each evaluation of a row gives another token."""
    batches = Batches(spark, tmp_path, copies="select token from {rows}")
    with nullcontext() if is_cached else patch.object(job, "evaluated_once", nullcontext):
        batches.write(0, *VISITS, token="reflect('java.util.UUID', 'randomUUID')")
    assert len({*batches.rows("target", "token"), *batches.rows("copies", "token")}) == evaluations


@contextmanager
def down(folder: Path) -> Iterator[None]:
    """Let nothing be written below a folder: a file has its place."""
    folder.write_text("no folder")
    try:
        yield
    finally:
        folder.unlink()


def test_a_sink_that_is_back_gets_its_batches_in_order(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each batch some of the missing ones are written: here one. Batches without rows are heartbeats."""
    monkeypatch.setattr(job, "CATCH_UP", 1)
    batches = Batches(spark, tmp_path, optional="select visit_id from {rows}")
    with down(tmp_path / "optional"):
        batches.write(0, VISITS[0])
        batches.write(1, VISITS[1])
        batches.write(2)
    assert batches.repairs.missing() == {"optional": [0, 1]}
    assert job.Repairs(spark, batches.params, "another checkpoint").missing() == {}
    batches.write(3, VISITS[2])
    assert_rows(batches.rows("optional", "visit_id", "batch_id"), [("v1", 0)])
    assert batches.repairs.missing() == {"optional": [1, 3]}
    assert ("optional", 3, "batch 1 comes first") in batches.rows("missing", "sink", "batch_id", "error")
    batches.write(4)
    batches.write(5)
    assert_rows(batches.rows("optional", "visit_id", "batch_id"), [("v1", 0), ("v2", 1), ("v3", 3)])
    assert batches.repairs.missing() == {}

    # Delta skips a batch behind a later one without a word; hence the order.
    (sink,) = batches.params.batch_sinks()
    sink.write(spark.createDataFrame([(*VISITS[0], "real_time", "web")], ROWS), batches.writer_id, 2)
    assert len(batches.rows("optional")) == 3


# --- an idle job -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Idle:
    """What a job did whose sources are idle, one of them without any row."""

    writer: job.BatchWriter
    input_rows: list[int]
    """Rows that Spark read in the batches behind the first one."""
    folder: Path


@pytest.fixture(scope="module")
def idle(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Idle:
    """Run a job with a heartbeat. Its archive is down in the first batch, and back when nothing is new."""
    folder = tmp_path_factory.mktemp("idle")
    for name, visits in (("web", VISITS), ("app", [])):
        rows = spark.createDataFrame(visits, "visit_id string, type string, version string")
        write_once(spark, rows, str(folder / name))
    params = job.Parameters(
        sources=[Source(name, {"visit_id": "visit_id"}, table=str(folder / name)) for name in ("web", "app")],
        target=str(folder / "target"),
        sinks=[SideSink("archive", "select * from {rows}", table=str(folder / "archive"), required=False)],
        missing=str(folder / "missing"),
        checkpoint=str(folder / "checkpoint"),
        heartbeat=True,
        trigger="1 second",
    )
    with down(folder / "archive"):
        query, writer = job.start(spark, params)
        eventually(lambda: writer.batches, 60)
    try:
        eventually(lambda: not query.isActive or writer.as_dict()["missing"] == {}, 60)
        eventually(
            lambda: not query.isActive or (len(writer.batches) > 2 and len(query.recentProgress) > 2), 60
        )
    finally:
        query.stop()
    return Idle(writer, [progress.numInputRows for progress in query.recentProgress[1:3]], folder)


def test_a_source_without_rows_holds_up_no_other(idle: Idle) -> None:
    assert idle.writer.rows == {"web": 3, "app": 0}


def test_a_heartbeat_is_in_no_store_and_no_count(spark: SparkSession, idle: Idle) -> None:
    assert [batch["rows"] for batch in idle.writer.batches][:3] == [{"web": 3}, {}, {}]
    assert idle.input_rows == [1, 1], "Spark itself counts the heartbeat"
    assert latest_version(spark, str(idle.folder / "target")) == 1, "its creation, and one batch with rows"


def test_an_idle_job_does_what_is_due(spark: SparkSession, idle: Idle) -> None:
    """It repairs its optional sink without new data."""
    archive = spark.read.format("delta").load(str(idle.folder / "archive"))
    assert_rows(archive.select("visit_id", "batch_id"), [(visit_id, 0) for visit_id, *_ in VISITS])


# --- a store that follows the target ---------------------------------------------------------------------


def test_a_store_that_reads_the_change_feed_equals_the_table(spark: SparkSession, tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    with_feed = {"spark.databricks.delta.properties.defaults.enableChangeDataFeed": "true"}
    batches = Batches(spark, tmp_path)
    for name, value in with_feed.items():
        spark.conf.set(name, value)
    try:
        batches.write(0, *VISITS)
    finally:
        for name in with_feed:
            spark.conf.unset(name)
    spark.sql(f"update delta.`{target}` set type = 'phone' where visit_id = 'v1'")
    spark.sql(f"delete from delta.`{target}` where visit_id = 'v2'")
    batches.write(1, ("v4", "tablet", "3.0"))
    feed = spark.read.option("readChangeFeed", True).option("startingVersion", 0).format("delta").load(target)
    change_data_feed.events(feed, ["visit_id"], "target").createOrReplaceTempView("visit_changes")
    view = snippet(PAGE, f"{HERE}::test_a_store_that_reads_the_change_feed_equals_the_table")
    spark.sql(view.replace("create view", "create or replace temp view")).collect()
    found = spark.table("current_visits")
    assert_rows(found, spark.read.format("delta").load(target))
    assert_rows(found.select("visit_id", "type"), [("v1", "phone"), ("v3", "desktop"), ("v4", "tablet")])


# --- wrong use -------------------------------------------------------------------------------------------


def parameters(folder: Path, *sources: Source, **changes: Any) -> job.Parameters:
    given = {"target": str(folder / "target"), "checkpoint": str(folder / "checkpoint")} | changes
    return job.Parameters(sources=list(sources), **given)


def test_a_recreated_topic_ends_the_batch_and_one_client_asks_for_all_topics(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    for name in ("sidecar_one", "sidecar_two"):
        broker.create_topic(name)
    params = parameters(
        tmp_path,
        *(Source(name, {"x": "payload"}, topic=f"sidecar_{name}") for name in ("one", "two", "none")),
        bootstrap_servers=broker.bootstrap_servers,
    )
    inputs = params.inputs(spark)
    assert [source.name for source in inputs if source.id is None] == ["none"]
    assert inputs[2].absence.startswith("not every topic of sidecar_none is at ")
    writer = job.BatchWriter(params, inputs, [], "writer", None)
    no_rows = spark.createDataFrame([], "x string, origin string, source string")
    with patch.object(kafka_topics, "describe_topics", wraps=kafka_topics.describe_topics) as asked:
        writer.write(no_rows, 0)
    assert [call.args[1] for call in asked.call_args_list] == [["sidecar_one", "sidecar_two"]]
    recreate(broker, "sidecar_two", [])
    refused = (
        "the topic sidecar_two was deleted and recreated: .*; start again with another target and another"
    )
    with pytest.raises(DataRefused, match=refused):
        writer.write(no_rows, 1)


def test_a_column_of_two_types_is_refused_at_the_start_with_its_name(
    spark: SparkSession, tmp_path: Path
) -> None:
    for name, type_ in (("web", "string"), ("app", "bigint")):
        write_once(spark, spark.createDataFrame([], f"visit_id string, at {type_}"), str(tmp_path / name))
    web, app = (
        Source(name, {"visit_id": "visit_id", "event_time": "at"}, table=str(tmp_path / name))
        for name in ("web", "app")
    )
    with pytest.raises(
        WrongUse, match="'event_time' is string in source web and bigint in source app; cast one of them"
    ):
        job.run(spark, parameters(tmp_path, web, app))
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sources": []}, "sources is empty"),
        ({"sources": [("a", {"x": "1"}), ("a", {"x": "1"})]}, "sources must have different names, got a, a"),
        ({"sources": [("a", {"x": "1"}), ("b", {"y": "1"})]}, "the same columns, got x of a and y of b"),
        (
            {"sources": [("a", {"Batch_ID": "1"})]},
            "columns can't name columns that the job writes itself: Batch_ID",
        ),
        ({"sources": [("a", {})]}, "the source a has no columns"),
        ({"sources": [("a/b", {"x": "1"})]}, "a source's name must be of letters"),
        ({"target": "tables/a"}, "target, missing, sinks and sources must be different"),
        ({"heartbeat": True}, "heartbeat needs a trigger"),
        ({"alignment": "aligned", "trigger": "1 second"}, "aligned takes no trigger"),
        ({"sinks": [SideSink("s", "q", table="t", required=False)]}, "missing is missing"),
        ({"sinks": [SideSink("s", "q", topic="t")]}, "bootstrap_servers is missing"),
    ],
)
def test_wrong_parameters_are_refused(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    given = {"sources": [("a", {"x": "1"})]} | changes
    declared = given.pop("sources")

    def declare() -> None:
        sources = [Source(name, columns, table=f"tables/{name}") for name, columns in declared]
        parameters(tmp_path, *sources, **given)

    with pytest.raises(WrongUse, match=sentence):
        declare()


def test_a_source_or_sink_of_no_place_or_two_is_refused() -> None:
    with pytest.raises(WrongUse, match="the source a must have either a table or a topic"):
        Source("a", {"x": "1"})
    with pytest.raises(WrongUse, match="the sink s must have either a table or a topic"):
        SideSink("s", "select 1", table="t", topic="t")


def test_queries_expressions_and_absent_sources_are_refused_before_anything_is_written(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = str(tmp_path / "web")
    with pytest.raises(NotReady, match=r"none of the sources is there: there is no table .*web"):
        job.run(spark, parameters(tmp_path, Source("web", {"x": "1"}, table=table)))
    write_once(spark, spark.createDataFrame([], "visit_id string"), table)
    with pytest.raises(WrongUse, match=r"an expression can't be resolved: .*absent"):
        job.run(spark, parameters(tmp_path, Source("web", {"x": "absent"}, table=table)))
    web = Source("web", {"x": "visit_id"}, table=table)
    for query, sentence in [
        ("select absent from {rows}", "the query can't be used .*absent"),
        ("select 1 as batch_id from {rows}", "columns that this job writes itself: batch_id"),
    ]:
        sink = SideSink("sink", query, table=str(tmp_path / "sink"))
        with pytest.raises(WrongUse, match=sentence):
            job.run(spark, parameters(tmp_path, web, sinks=[sink]))
    with pytest.raises(NotReady, match="has no batches yet"):
        job.run(spark, parameters(tmp_path, web, action="repair", missing=str(tmp_path / "missing")))


def test_two_names_of_one_table_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    """The second sink's batches have the numbers of the first one's: Delta would skip them silently."""
    source, out, again = f"{tmp_path}/web", f"{tmp_path}/out", f"{tmp_path}/./out/"
    spark.range(3).write.format("delta").save(source)
    sinks = [
        SideSink("one", "select id from {rows}", out),
        SideSink("two", "select -id as id from {rows}", again),
    ]
    parameters = job.Parameters(
        sources=[Source("web", {"id": "id"}, source)], target=f"{tmp_path}/all", sinks=sinks,
        checkpoint=f"{tmp_path}/checkpoint",
    )  # fmt: skip
    with pytest.raises(
        WrongUse, match=r"out' and '.*/\./out/' are one table: target, missing, sinks and sources"
    ):
        job.run(spark, parameters)


def test_a_message_never_has_replaced_characters(spark: SparkSession, tmp_path: Path) -> None:
    """JSON has one character for all bytes that aren't UTF-8. Bytes of a binary column are base64."""
    sink = TopicSink(SideSink("out", "select * from {rows}", topic="out"), {})
    with pytest.raises(
        PySparkException, match="record refused: the record has bytes that aren't UTF-8 in page"
    ):
        sink.messages(spark.sql("select 1 as id, cast(x'ff' as string) as page")).collect()
    whole = sink.messages(spark.sql("select 1 as id, x'ff' as page, '\ufffd' as title, string(null) as none"))
    assert_rows(whole, [("out", None, '{"id":1,"page":"/w==","title":"\ufffd","none":null}')])
    gold = spark.sql("select cast(x'ff' as string) as page, 1 as visits")
    with pytest.raises(
        PySparkException, match="record refused: the record has bytes that aren't UTF-8 in page"
    ):
        as_message(gold, ["visits"]).collect()
    assert_rows(as_message(gold.drop("page"), ["visits"]), [('{"visits":1}', '{"visits":1}')])


def test_an_absent_source_has_a_checkpoint_in_any_folder(spark: SparkSession, tmp_path: Path) -> None:
    """`{1` would be the begin of a pattern."""
    checkpoint = f"{tmp_path}/run{{1 [a], b"
    absent = Source("absent", {"id": "id"}, f"{tmp_path}/absent")
    (given,) = job.Parameters(sources=[absent], target=f"{tmp_path}/t", checkpoint=checkpoint).inputs(spark)
    rows = united(spark, [given], spark.range(0).schema, checkpoint)
    query = rows.writeStream.format("noop").option("checkpointLocation", f"{checkpoint}/query")
    running = query.trigger(availableNow=True).start()
    assert running.awaitTermination(60)
