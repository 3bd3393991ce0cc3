"""Metadata Decorator: a technical table for what dbt loads, notes in Delta's commits, headers of records."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from confluent_kafka import Message
from dbt_common.exceptions import DbtRuntimeError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from python_jobs.data_value import metadata_decorator as job
from python_jobs.data_value.metadata_decorator import Parameters, decorate, run
from python_jobs.data_value.technical_metadata import METADATA_KEYS
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import NotReady, WrongUse
from python_jobs.shared.kafka import topics
from services.kafka import Broker, Record
from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.session import environment, setting
from tests.support.snippets import snippet, snippets

PAGE = "docs/data_value.md"
HERE = "tests/patterns/data_value/test_metadata_decorator.py"
NOTE = "spark.databricks.delta.commitInfo.userMetadata"
FIRST, SECOND = "2024-03-01 00:00:00", "2024-03-02 00:00:00"
MODEL, VIEW, PROPERTIES, BY_VERSION = snippets(
    PAGE, f"{HERE}::test_rows_are_counted_by_version_through_the_technical_table"
)


# --- the technical table ----------------------------------------------------------------------------------


@dataclass
class Story:
    """Loads of two dates by three versions of the code."""

    project: DbtProject
    contexts: list[list[tuple[Any, ...]]] = field(default_factory=list)
    """The technical table after each load."""
    notes: list[dict[str, Any] | str | None] = field(default_factory=list)
    """The note of the commits of visits, oldest first."""
    by_version: list[dict[str, int]] = field(default_factory=list)
    """Number of visits by version after each load."""
    last_note: str | None = None
    """The note of the technical table's last commit, behind which the session's note is as it was."""
    failure: str = ""
    statuses: dict[str, str] = field(default_factory=dict)
    before_empty: tuple[Any, ...] = ()
    after_empty: tuple[Any, ...] = ()

    def look_at_all(self) -> tuple[Any, ...]:
        """Return the technical table's rows and commits, and the visits."""
        spark, table = self.project.spark, f"{self.project.schema}_technical.visits_context"
        rows = spark.table(table).orderBy("execution_time").collect()
        visits = self.project.table("visits").orderBy("visit_id").collect()
        return rows, spark.sql(f"describe history {table}").count(), visits

    def look(self) -> None:
        """Read the technical table, and the versions that the page's query counts."""
        spark, schema = self.project.spark, self.project.schema
        columns = "string(execution_time), code_version, loading_attempt, finished_at is not null"
        rows = spark.sql(f"select {columns} from {schema}_technical.visits_context order by 1")
        self.contexts.append([tuple(row) for row in rows.collect()])
        if spark.catalog.tableExists(f"{schema}.visits"):
            query = BY_VERSION.replace("{technical_schema}", f"{schema}_technical")
            rows = spark.sql(query.replace("from visits", f"from {schema}.visits"))
            self.by_version.append({row.code_version: row.visits for row in rows.collect()})


@pytest.fixture(scope="module")
def story(make_project: Callable[..., DbtProject], spark: SparkSession) -> Story:
    """Load a date that fails once, a second date by a new version, and the first again by a third version."""
    project = make_project(
        {
            "models/visits.sql": MODEL,
            "models/public_visits.sql": VIEW,
            "models/properties.yml": PROPERTIES,
            "models/raw.yml": raw_tables("visit_events"),
            "models/exposed.sql": "select * from {{ ref('visits') }}",
            "models/exposed.yml": (
                "models: [{name: exposed, config: {materialized: view}, "
                "data_tests: [lakehouse_patterns.no_technical_columns]}]"
            ),
        }
    )
    story = Story(project)
    visits = "values ('v1', date'2024-03-01'), ('v2', date'2024-03-01'), ('v3', date'2024-03-02')"

    def source(visit_id: str) -> None:
        spark.sql(
            f"create or replace view {project.schema}.visit_events as "
            f"select {visit_id} as visit_id, event_date from {visits} as t (visit_id, event_date)"
        )

    def load(time: str, version: str, call: Callable[..., Any] = project.run) -> Any:
        with environment(LOGICAL_DATE=time[:10], CODE_VERSION=version):
            found = call("run", "--select", "visits")
        story.look()
        return found

    # The query ends behind the hook, which has written the context.
    source("if(visit_id = 'v2', raise_error('lost connection'), visit_id)")
    story.failure = load(FIRST, "v1.0.0", project.fails)
    source("visit_id")
    load(FIRST, "v1.0.0")
    load(SECOND, "v2.0.0")
    load(FIRST, "v3.0.0")
    with setting(spark, NOTE, "mine"):
        load(SECOND, "v2.0.0")
    history = spark.sql(f"describe history {project.schema}_technical.visits_context")
    story.last_note = history.collect()[0].userMetadata
    with environment(LOGICAL_DATE="2024-03-02", CODE_VERSION="v2.0.0"):
        project.run("test", "--select", "visits", "source:technical")
    story.statuses = project.statuses()
    texts = [commit["userMetadata"] for commit in reversed(project.history("visits"))]
    story.before_empty = story.look_at_all()
    with environment(LOGICAL_DATE="2024-03-02", CODE_VERSION="v9.9.9"):
        project.run("run", "--empty", "--select", "visits")
    story.after_empty = story.look_at_all()
    story.notes = [json.loads(text) if text and text.startswith("{") else text for text in texts]
    return story


def test_a_retry_after_a_failed_load_counts_its_attempt_in_the_one_row_of_the_date(story: Story) -> None:
    assert "lost connection" in story.failure
    assert story.contexts[0] == [(FIRST, "v1.0.0", 1, False)]
    assert story.contexts[1] == [(FIRST, "v1.0.0", 2, True)]


def test_no_visit_is_doubled_and_each_has_a_context(story: Story, spark: SparkSession) -> None:
    visits = spark.table(f"{story.project.schema}.visits")
    assert_rows(
        visits.selectExpr("visit_id", "string(processing_context_id)"),
        [("v1", FIRST), ("v2", FIRST), ("v3", SECOND)],
    )
    resolved = [found for name, found in story.statuses.items() if name.startswith("relationships_visits_")]
    assert resolved == ["pass"]
    assert story.statuses["source_unique_technical_visits_context_execution_time"] == "pass"
    assert story.statuses["not_null_visits_processing_context_id"] == "pass"


def test_rows_are_counted_by_version_through_the_technical_table(story: Story) -> None:
    assert story.by_version[:2] == [{"v1.0.0": 2}, {"v1.0.0": 2, "v2.0.0": 1}]
    assert {"code_version", "loading_attempt"}.isdisjoint(story.project.table("visits").columns)


def test_a_backfill_by_another_version_changes_the_context_of_its_date_alone(story: Story) -> None:
    assert story.contexts[2] == [(FIRST, "v1.0.0", 2, True), (SECOND, "v2.0.0", 1, True)]
    assert story.contexts[3] == [(FIRST, "v3.0.0", 3, True), (SECOND, "v2.0.0", 1, True)]
    assert story.by_version[2] == {"v3.0.0": 2, "v2.0.0": 1}


def test_a_public_view_has_no_technical_column_and_the_test_finds_one(story: Story) -> None:
    story.project.run("run", "--select", "public_visits")
    assert story.project.table("public_visits").columns == ["visit_id", "event_date"]
    story.project.run("test", "--select", "public_visits")
    story.project.run("run", "--select", "exposed")
    assert "Got 1 result" in story.project.fails("test", "--select", "exposed")


def test_the_technical_table_is_in_a_schema_of_its_own(story: Story, spark: SparkSession) -> None:
    schema = story.project.schema
    technical, public = (
        {row.tableName for row in spark.sql(f"show tables in {name}").collect() if not row.isTemporary}
        for name in (f"{schema}_technical", schema)
    )
    assert technical == {"visits_context"}
    assert {"visits", "visits_context"} & public == {"visits"}


def test_a_commit_names_its_version_and_attempt(story: Story) -> None:
    found = [
        [note["processing_context"][key] for key in ("execution_time", "code_version", "loading_attempt")]
        for note in story.notes
        if isinstance(note, dict)
    ]
    assert [load for n, load in enumerate(found) if load not in found[:n]] == [
        ["2024-03-01T00:00:00Z", "v1.0.0", 2],
        ["2024-03-02T00:00:00Z", "v2.0.0", 1],
        ["2024-03-01T00:00:00Z", "v3.0.0", 3],
    ]


def test_an_empty_run_is_no_attempt(story: Story) -> None:
    assert story.after_empty == story.before_empty
    assert len(story.before_empty[0]) == 2


def test_a_note_of_the_user_stays(story: Story) -> None:
    assert story.notes[-1] == "mine"
    assert story.last_note == "mine"
    assert story.contexts[4][1] == (SECOND, "v2.0.0", 2, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"code_version": None}, "code_version must be a text of 1 to 15 characters, got None"),
        ({"code_version": " "}, "code_version must be a text of 1 to 15 characters, got ' '"),
        ({"code_version": 1.5}, "code_version must be a text of 1 to 15 characters, got 1.5"),
        ({"code_version": "v" * 16}, "code_version must be a text of 1 to 15 characters, got 'vvvvvvvvvvvvvvvv'"),
        ({"metadata": {"shipping_address": "x"}}, "metadata has no key 'shipping_address'; allowed: commit_id, "),
        ({"metadata": {"run_id": None}}, "metadata.run_id must be a text that isn't empty, got None"),
        ({"metadata": ["run_id"]}, "metadata must map keys to texts"),
        ({"execution_time": "noon"}, "execution_time must be a time such as 2024-03-01"),
    ],
)  # fmt: skip
def test_what_is_no_metadata_is_refused_before_anything_is_written(
    spark: SparkSession, render: MacroRenderer, arguments: dict[str, Any], sentence: str
) -> None:
    given = {"table": "refused", "code_version": "v1", "execution_time": "2024-03-01T10:00:00Z"}
    with pytest.raises(DbtRuntimeError) as refusal:
        render("record_context", **given | {"schema": "refused_contexts"} | arguments)
    assert sentence in str(refusal.value)
    assert not spark.catalog.databaseExists("refused_contexts") or not spark.catalog.listTables(
        "refused_contexts"
    )


def test_the_macro_and_the_jobs_permit_the_same_keys(render: MacroRenderer) -> None:
    assert tuple(render("_metadata_keys")) == METADATA_KEYS


def test_awkward_texts_hours_of_a_day_and_two_hooks_of_a_run(
    spark: SparkSession, render: MacroRenderer, tmp_path: Path
) -> None:
    place = {"table": "select", "schema": "order"}
    metadata = {"triggered_by": 'O\'Brien; `x` \\n "ü"', "run_id": "{{ 1 }}"}
    for hour in ("10", "11", "11"):
        render(
            "record_context", **place, code_version="v'1", metadata=metadata,
            execution_time=f"2024-03-01T{hour}:00:00+01:00", location_root=str(tmp_path),
        )  # fmt: skip
    rows = spark.table("`order`.`select`")
    found = rows.selectExpr(
        "string(execution_time)", "code_version", "loading_attempt", "to_json(metadata)"
    ).collect()
    assert [(row[0], row[1], row[2], json.loads(row[3])) for row in sorted(found)] == [
        (f"2024-03-01 {hour}:00:00", "v'1", 1, metadata) for hour in ("09", "10")
    ]
    assert (tmp_path / "select" / "_delta_log").is_dir()
    assert str(render("context_table", **place)) == "`order`.`select`"


def test_a_misspelt_technical_column_ends_the_query(spark: SparkSession, render: MacroRenderer) -> None:
    spark.sql("select 1 as id, 2 as `Context Of`").createOrReplaceTempView("decorated")
    assert spark.sql(render("public_view", relation="decorated", technical_columns="context of")).columns == [
        "id"
    ]
    with pytest.raises(PySparkException, match="processing_context_id"):
        spark.sql(render("public_view", relation="decorated")).collect()
    with pytest.raises(DbtRuntimeError, match="public_view needs technical_columns"):
        render("public_view", relation="decorated", technical_columns=[])


# --- headers ----------------------------------------------------------------------------------------------

SCHEMA = "key string, payload binary, headers array<struct<key: string, value: binary>>"
OLD: list[Any] = [
    ("k1", b'{"a" :1.10}', [("origin", b"api"), ("job_version", b"v0")]),
    ("k2", b"caf\xe9", None),
    ("k3", None, []),
]
NEW: list[Any] = [("k4", b"new", [])]


@pytest.fixture(scope="module")
def records(
    spark: SparkSession, broker: Broker, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Message]]:
    """Publish rows by two versions; the second ends behind its delivery once, before its batch is committed."""
    folder = tmp_path_factory.mktemp("decorator")
    decorated, plain = broker.create_topic("visits-decorated"), broker.create_topic("visits-plain")

    def add(rows: list[Any]) -> None:
        spark.createDataFrame(rows, SCHEMA).write.format("delta").mode("append").save(str(folder / "source"))
        broker.produce(plain, [Record(payload, key.encode()) for key, payload, _ in rows])

    def publish(version: str, **others: Any) -> dict[str, Any]:
        params = Parameters(
            source=str(folder / "source"), topic=decorated, bootstrap_servers=broker.bootstrap_servers,
            checkpoint=str(folder / "checkpoint"), job_version=version, key_column="key", **others,
        )  # fmt: skip
        return run(spark, params)

    def crash(*arguments: Any) -> None:
        real(*arguments)
        raise ConnectionError("killed")

    real = topics.publish
    add(OLD)
    assert publish("v1") == {"batches": 1}
    assert publish("v1") == {"batches": 0}
    add(NEW)
    with patch.object(job, "publish", crash), pytest.raises(ConnectionError, match="killed"):
        publish("v2", origin="replay", metadata={"environment": "tést"})
    assert publish("v2", origin="replay", metadata={"environment": "tést"}) == {"batches": 1}
    return {"decorated": broker.records(decorated), "plain": broker.records(plain)}


def by_key(records: list[Message]) -> dict[bytes, list[tuple[str, bytes]]]:
    return {record.key() or b"": record.headers() or [] for record in records}  # type: ignore[misc]


@pytest.mark.kafka
def test_each_record_has_the_headers_of_its_version_and_batch(records: dict[str, list[Message]]) -> None:
    found = by_key(records["decorated"])
    assert found[b"k2"] == found[b"k3"] == [("job_version", b"v1"), ("batch_version", b"0")]
    assert found[b"k4"] == [
        ("job_version", b"v2"), ("batch_version", b"1"), ("origin", b"replay"), ("environment", "tést".encode()),
    ]  # fmt: skip


@pytest.mark.kafka
def test_earlier_headers_stay_but_those_of_the_same_name(records: dict[str, list[Message]]) -> None:
    assert by_key(records["decorated"])[b"k1"] == [
        ("origin", b"api"), ("job_version", b"v1"), ("batch_version", b"0"),
    ]  # fmt: skip


@pytest.mark.kafka
def test_the_value_is_the_same_bytes_as_without_headers(records: dict[str, list[Message]]) -> None:
    values = {record.key(): record.value() for record in records["plain"]}
    assert {record.key(): record.value() for record in records["decorated"]} == values
    assert values == {key.encode(): payload for key, payload, _ in OLD + NEW}


@pytest.mark.kafka
def test_a_consumer_without_headers_sees_the_same_records(
    spark: SparkSession, broker: Broker, records: dict[str, list[Message]]
) -> None:
    seen = {}
    for topic in ("visits-decorated", "visits-plain"):
        options = {"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": topic}
        rows = spark.read.format("kafka").options(**options).load()
        seen[topic] = (rows.columns, {(row.key, row.value) for row in rows.collect()})
    assert seen["visits-decorated"] == seen["visits-plain"]
    assert "headers" not in seen["visits-plain"][0]


@pytest.mark.kafka
def test_a_batch_that_runs_again_is_delivered_again_with_the_same_headers(
    records: dict[str, list[Message]],
) -> None:
    keys = [record.key() for record in records["decorated"]]
    assert sorted(key or b"" for key in keys) == [b"k1", b"k2", b"k3", b"k4", b"k4"]
    again = [record.headers() for record in records["decorated"] if record.key() == b"k4"]
    assert again[0] == again[1]


@pytest.mark.kafka
def test_a_topic_that_is_not_there_and_wrong_columns_are_refused(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    source = str(tmp_path / "source")
    spark.createDataFrame([(1, "x", "h")], "n int, payload string, headers string").write.format(
        "delta"
    ).save(source)
    given: dict[str, Any] = {
        "source": source, "topic": "nowhere", "bootstrap_servers": broker.bootstrap_servers,
        "checkpoint": str(tmp_path / "checkpoint"), "job_version": "v1",
    }  # fmt: skip
    with pytest.raises(WrongUse, match="needs a column 'n' of texts or bytes; it has n int, payload string"):
        run(spark, Parameters(**given, payload_column="n"))
    with pytest.raises(
        WrongUse, match="column headers must be array<struct<key:string,value:binary>>, got string"
    ):
        run(spark, Parameters(**given))
    spark.sql("select 'x' as payload").write.format("delta").save(str(tmp_path / "good"))
    with pytest.raises(NotReady, match="not every topic of nowhere is at"):
        run(spark, Parameters(**given | {"source": str(tmp_path / "good")}))
    assert not (tmp_path / "checkpoint").exists()


def test_earlier_headers_are_found_in_any_case_of_letters(spark: SparkSession) -> None:
    rows = spark.createDataFrame(OLD[:1], SCHEMA).withColumnRenamed("headers", "Headers")
    found = decorate(rows, "payload", "key", {"job_version": "v1"}).collect()[0].headers
    assert [(header.key, bytes(header.value)) for header in found] == [
        ("origin", b"api"), ("job_version", b"v1"),
    ]  # fmt: skip
    wrong = rows.selectExpr("payload", "'h' as HEADERS")
    with pytest.raises(WrongUse, match="column HEADERS must be array<"):
        job.check_columns(wrong, Parameters(
            source="s", topic="t", bootstrap_servers="b", checkpoint="c", job_version="v1"
        ))  # fmt: skip


def test_spark_takes_no_header_whose_value_is_a_text(spark: SparkSession) -> None:
    """The book's sketch; `decorate` makes all values bytes."""
    texts = spark.sql(
        "select 'x' as value, array(named_struct('key', 'job_version', 'value', 'v1')) as headers"
    )
    with pytest.raises(PySparkException, match="headers"):
        texts.write.format("kafka").option("kafka.bootstrap.servers", "localhost:1").option(
            "topic", "t"
        ).save()
    rows = decorate(spark.sql("select 'x' as `pay load`"), "pay load", None, {"job_version": "v1"})
    assert rows.schema["headers"].dataType.simpleString() == job.HEADERS_TYPE


def test_the_command_of_the_page() -> None:
    command = shlex.split(snippet(PAGE, f"{HERE}::test_the_command_of_the_page").replace("\\\n", ""))
    params, _ = parse_parameters(Parameters, command[3:])
    assert params.headers(7) == {
        "job_version": "v2.5.1", "batch_version": "7", "environment": "production",
    }  # fmt: skip
