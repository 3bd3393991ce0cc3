"""Dead-Letter: the streaming job, its replay, and the SQL form."""

from __future__ import annotations

import datetime as dt
import importlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, asdict, fields
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.error_management import dead_letter as job
from python_jobs.error_management import dead_letter_replay
from python_jobs.error_management.dead_letter import BatchAccount, Parameters
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.core.retry import RetryPolicy
from python_jobs.shared.delta.commits import CONFLICTS
from python_jobs.shared.delta.streams import BatchFunction, append, await_end, start_stream
from python_jobs.shared.files.sources import parse_schema
from python_jobs.shared.records.json_records import load_schema, parse_records
from python_jobs.shared.spark.job import job_outcome, run_job
from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.killer import TableState, run_and_kill
from tests.support.other_commits import commit
from tests.support.pytest_ids import REPOSITORY
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.snippets import snippet, snippets

PAGE = "docs/error_management.md"
HERE = "tests/patterns/error_management/test_dead_letter.py"
VISIT_SCHEMA = "visit_id string, event_time string, page string"
VALID = '{"visit_id":"v1","event_time":"2024-01-01T10:00:00+00:00","page":"/a"}'
BAD_TIME = '{"visit_id":"v2","event_time":"nope","page":"/b"}'
NO_TIME = '{"visit_id":"v3","page":"/c"}'
NOT_JSON = "not json"
NOW = "2024-01-01T12:00:00Z"
READABLE = {"unreadable": 0, "unreadable_fields": {}}
EPOCH = {"event_time": "unix_seconds(try_to_timestamp(event_time))"}


class Stream:
    """A bronze table, the two targets and the checkpoint of one test."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.appended = 0

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def append(self, *payloads: str | None) -> None:
        """Append one file of payloads to the source; offsets go on from the last one, as in a topic."""
        rows = [(payload, "visits", 0, self.appended + i) for i, payload in enumerate(payloads)]
        self.appended += len(rows)
        source = self.spark.createDataFrame(
            rows, "payload string, topic string, partition int, offset bigint"
        )
        source.coalesce(1).write.format("delta").mode("append").save(self.path("bronze"))

    def parameters(self, **changes: Any) -> Parameters:
        given = {
            "source": self.path("bronze"),
            "target": self.path("main"),
            "dead_letter": self.path("dead"),
            "checkpoint": self.path("checkpoint"),
            "schema": VISIT_SCHEMA,
            "derive": EPOCH,
            "require": ["event_time"],
            "now": NOW,
        }
        return Parameters(**(given | changes))

    def run(self, **changes: Any) -> dict[str, Any]:
        return job.run(self.spark, self.parameters(**changes))

    def table(self, name: str) -> DataFrame:
        return self.spark.read.format("delta").load(self.path(name))

    def version(self, name: str) -> int:
        return len(list((self.folder / name / "_delta_log").glob("*.json"))) - 1


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> Stream:
    return Stream(spark, tmp_path)


def test_bad_records_go_to_the_dead_letter_table_whole_and_with_their_error(stream: Stream) -> None:
    stream.append(VALID, BAD_TIME, NO_TIME, NOT_JSON)
    report = stream.run(job_name="visits", job_version="7")

    assert_rows(stream.table("main"), [("v1", 1704103200, "/a")], columns=["visit_id", "event_time", "page"])
    at = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)
    origin = ("visits", "7", at, 1, "pending", "visits", 0)
    assert_rows(
        stream.table("dead"),
        [
            (BAD_TIME, "UNPARSABLE_FIELD", "field 'event_time' can't be read as bigint: nope", *origin, 1),
            (NO_TIME, "MISSING_FIELD", "field 'event_time' is missing or null", *origin, 2),
            (NOT_JSON, "NOT_A_JSON_OBJECT", "the payload is not one JSON object (8 characters)", *origin, 3),
        ],
        columns=[
            "payload", "error_class", "error_message", "job_name", "job_version", "processed_at", "attempts",
            "status", "topic", "partition", "offset",
        ],
    )  # fmt: skip
    assert (report["read"], report["valid"], report["dead"]) == (4, 1, 3)
    assert report["bad_share"] == 0.75


def test_job_snippet_of_the_page(stream: Stream) -> None:
    config = stream.folder / "visits.yml"
    config.write_text(snippet(PAGE, f"{HERE}::test_job_snippet_of_the_page"))
    tables = {"source": "bronze", "target": "main", "dead_letter": "dead", "checkpoint": "checkpoint"}
    options = [text for option, name in tables.items() for text in (f"--{option}", stream.path(name))]
    parameters, _ = parse_parameters(Parameters, ["--config", str(config), *options])
    stream.append(VALID, BAD_TIME, NOT_JSON)
    assert job.run(stream.spark, parameters)["dead"] == 2
    assert_rows(
        stream.table("main"),
        [("v1", dt.date(2024, 1, 1), False)],
        ["visit_id", "event_date", "was_dead_lettered"],
    )
    assert (stream.folder / "main" / "event_date=2024-01-01").is_dir()


def test_continuous_query_outlives_bad_records(stream: Stream) -> None:
    stream.append(VALID)
    query, _ = job.start(stream.spark, stream.parameters(trigger="1 second"))
    try:
        query.processAllAvailable()
        stream.append(NOT_JSON, VALID.replace("v1", "v4"))
        query.processAllAvailable()
        assert query.isActive
        assert_rows(stream.table("main"), [("v1",), ("v4",)], columns=["visit_id"])
        assert_rows(stream.table("dead"), [(NOT_JSON,)], columns=["payload"])
    finally:
        query.stop()


def test_no_job_sorts_records_out_without_a_dead_letter_table() -> None:
    """What judges records has one, which must be named. A job that is added shows up here.

    `audit_files` passes a file on whole or not at all; `checkpointer` keeps no records, it counts what it leaves out.
    `batch_reprocessor` counts records that the live job has among its dead letters. `zero_etl_synchronizer` keeps every
    record whole, beside the fields that it can read.
    """
    judging = {}
    for file in (REPOSITORY / "python_jobs").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        judging_modules = ("json_records", "dead_letters", "session_tables")
        judges = any(f"shared.records.{module}" in text for module in judging_modules)
        if '__name__ == "__main__"' in text and judges:
            module = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
            parameters = fields(importlib.import_module(module).Parameters)
            judging[file.stem] = [field.default for field in parameters if field.name == "dead_letter"]
    assert all(
        judging.pop(job) == [] for job in ("audit_files", "batch_reprocessor", "zero_etl_synchronizer")
    )
    assert judging == {
        "api_gateway_replay": [MISSING],
        "bin_pack_orderer": [MISSING],
        "dead_letter": [MISSING],
        "dead_letter_queue": [MISSING],
        "dead_letter_replay": [MISSING],
        "dynamic_joiner": [MISSING],
        "incremental_sessionizer": [MISSING],
        "keyed_sessions": [MISSING],
        "late_data_detector": [MISSING],
        "local_aggregator": [MISSING],
        "partial_state_writer": [MISSING],
        "stateful_sessionizer": [MISSING],
        "windowed_deduplicator": [MISSING],
    }


class FailFast(BatchFunction):
    """What a job without a dead-letter table does: it raises at the first record that it can't read."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.batches: list[int] = []

    def write(self, rows: DataFrame, batch_id: int) -> None:
        self.batches.append(batch_id)
        strict = F.from_json("payload", VISIT_SCHEMA, {"mode": "FAILFAST"})
        append(rows.select(strict.alias("visit")), self.target, {})


def test_a_job_without_dead_letters_stays_at_the_record_that_this_one_passes(stream: Stream) -> None:
    stream.append(VALID, NOT_JSON)
    for _ in range(2):
        function = FailFast(stream.path("plain"))
        query = start_stream(stream.spark, stream.path("bronze"), function, stream.path("plain_checkpoint"))
        with pytest.raises(Exception, match="MALFORMED_RECORD_IN_PARSING"):
            await_end(query, function, stream.path("bronze"))
        assert function.batches == [0], "the same batch, for ever"
    assert (stream.run()["valid"], stream.run()["read"]) == (1, 0)
    assert_rows(stream.table("dead"), [(NOT_JSON, 1)], columns=["payload", "offset"])


def test_each_batch_accounts_for_its_records_and_idle_runs_add_nothing(stream: Stream) -> None:
    stream.append(VALID, NOT_JSON, NOT_JSON)
    stream.append(VALID, NO_TIME)
    report = stream.run(max_files_per_trigger=1)

    expected = [
        {"batch_id": 0, "read": 3, "valid": 1, "dead": 2, "error_classes": {"NOT_A_JSON_OBJECT": 2}}
        | READABLE,
        {"batch_id": 1, "read": 2, "valid": 1, "dead": 1, "error_classes": {"MISSING_FIELD": 1}} | READABLE,
    ]
    assert report["batches"] == expected
    commit(stream.path("main"), 130)
    assert job.accounting(stream.spark, stream.path("main")) == expected
    assert job.accounting(stream.spark, stream.path("main"), newest=1) == expected[1:]
    assert [account.dead for account in job.earlier_accounts(stream.spark, stream.path("main"))] == [2, 1]
    assert (stream.table("main").count(), stream.table("dead").count()) == (2, 3)
    ids = {row.dead_letter_id for row in stream.table("dead").collect()}
    assert len(ids) == 3, "equal lines are two dead letters"

    before = stream.version("main"), stream.version("dead")
    idle = stream.run()
    assert (idle["read"], idle["batches"], idle["bad_share"]) == (0, [], 0.0)
    assert (stream.version("main"), stream.version("dead")) == before


LINES = {
    # one JSON object: what the fields hold (text, flag, number, nested.text)
    '{"text":"a","flag":true,"number":5,"nested":{"text":"x"}}': ("a", True, 5, "x"),
    '{"text":"a","flag":"yes","number":"5","nested":{"text":"x"}}': ("a", None, None, "x"),
    '{"text":12,"flag":1,"number":5.5,"nested":{"text":false}}': ("12", None, None, "false"),
    '{"text":{"a":1},"flag":false,"number":1,"nested":{"text":[1]}}': (None, False, 1, None),
    '{"text":"{\\"a\\":1}","nested":{"text":"[1]"}}': ('{"a":1}', None, None, "[1]"),
    '{"text":"{........","number":7,"nested":"text"}': ("{........", None, 7, None),
    '{"text":"a","nested":[1],"other":1}': ("a", None, None, None),
    ' {"text":"last"} ': ("last", None, None, None),
    "{}": (None, None, None, None),
}
NO_OBJECTS = [
    "not json", "", "{........", '{"text":"a"', '{"text":"a","number":', '{"text":"a"} x',
    '{"text":"a"}{"text":"b"}', '{"text":"a"},{"text":"b"}', '{"text":"a"},"number":1', '{"text":"a"}] x',
    "[]", '[{"text":"a"}]', "null", "12",
    '"text"', '{"text":"a","text":"b"}', '{"text":"a","\\u0074ext":"a"}', '{"other":[{"b":{"a":1,"a":1}}]}',
    "{'text':'a'}", '{"number":NaN}', '{"text":"\x01"}', "\x1f\ufffd\x08\x00binary", None,
]  # fmt: skip


def test_one_bad_field_costs_no_other_and_only_whole_objects_are_records(
    spark: SparkSession, ansi_modes: str
) -> None:
    records = spark.createDataFrame([(line,) for line in [*LINES, *NO_OBJECTS]], "payload string")
    schema = load_schema("text string, flag boolean, number bigint, nested struct<text: string>")
    parsed = parse_records(records, schema)
    fields = ("text", "flag", "number", F.col("nested.text").alias("nested_text"))
    assert_rows(
        parsed.select("payload", *fields, F.col("error_class")),
        [(line, *values, None) for line, values in LINES.items()]
        + [(line, None, None, None, None, "NOT_A_JSON_OBJECT") for line in NO_OBJECTS],
    )
    nested_is_null = {row.payload: row.nested is None for row in parsed.collect()}
    assert nested_is_null['{"text":"{........","number":7,"nested":"text"}']
    assert not nested_is_null['{"text":{"a":1},"flag":false,"number":1,"nested":{"text":[1]}}']


SHAPES_SCHEMA = (
    'items array<struct<k: int, tags: array<string>>>, `größe` struct<a: int>, `a"b` struct<c: array<int>>, '
    "lists array<array<int>>, named map<string, struct<k: int>>, texts array<string>, by_name map<string, string>"
)
SHAPES = {
    # the one field that holds a value of another shape, and what it is read as; None: no field does
    '{"items":[{"k":1,"tags":"red"},{"k":2,"tags":["x"]}]}': ("items", [(1, None), (2, ["x"])]),
    '{"items":5,"other":1e400}': ("items", None),
    '{"items":{"k":1}}': ("items", None),
    '{"items":[5,{"k":1}]}': ("items", None),
    '{"gr\\u00f6\\u00dfe":5}': ("größe", None),
    '{"größe":[1]}': ("größe", None),
    '{"a\\"b":5}': ('a"b', None),
    '{"a\\"b":{"c":{"d":1}}}': ('a"b', (None,)),
    '{"lists":[[1],"x"]}': ("lists", None),
    '{"named":{"a":5,"b":{"k":2}}}': ("named", None),
    '{"texts":[{"a":1.10},[1],"[1]","x",null]}': ("texts", [None, None, "[1]", "x", None]),
    '{"by_name":{"a":{"b":1},"c":"{}"}}': ("by_name", {"a": None, "c": "{}"}),
    '{"items":[{"k":1,"tags":["x"]},{"tags":null},null]}': (None, "items", [(1, ["x"]), (None, None), None]),
    '{"gr\\u00f6\\u00dfe":{"a":5}}': (None, "größe", (5,)),
    '{"gr\\u00f6\\u00dfe":null,"note":"\\n"}': (None, "größe", None),
    '{"named":{"a":null,"b":{}},"items":null}': (None, "named", {"a": None, "b": (None,)}),
    '{"texts":["{","[]"],"by_name":{"a":"{"}}': (None, "texts", ["{", "[]"]),
}


def test_a_value_of_another_shape_is_named_at_any_depth_and_however_its_name_is_written(
    spark: SparkSession, ansi_modes: str
) -> None:
    records = spark.createDataFrame([(line,) for line in SHAPES], "payload string")
    parsed = parse_records(records, parse_schema(SHAPES_SCHEMA)).collect()
    found = {}
    for row in parsed:
        named, *place, _ = SHAPES[row.payload]
        field = named or place[0]
        found[row.payload] = (row.unreadable_fields, row[field], row.error_class)
    assert found == {
        line: ([] if named is None else [named], read, None) for line, (named, *_, read) in SHAPES.items()
    }


def test_required_columns_tell_missing_unreadable_and_underived_apart(spark: SparkSession) -> None:
    lines = [
        '{"id":1,"at":"2024-01-01","user":{"name":"guest"}}',
        '{"id":"x","at":"2024-01-01","user":{"name":"user_1"}}',
        '{"at":"2024-01-01","user":{"name":"user_2"}}',
        '{"id":4,"at":"2024-13-01","user":{"name":"user_3"}}',
        '{"id":5,"at":"2024-01-01","user":{"name":"user_42"}}',
    ]
    parsed = parse_records(
        spark.createDataFrame([(line,) for line in lines], "payload string"),
        load_schema("id bigint, at string, user struct<name: string>"),
        derive={
            "at": "try_to_timestamp(at)",
            "user_id": "try_cast(nullif(regexp_extract(user.name, '^user_(\\\\d+)$', 1), '') as bigint)",
        },
        require=["id", "at", "user_id"],
    )
    assert_rows(
        parsed.select("id", "user_id", "error_class", "error_message"),
        [
            (1, None, "NULL_DERIVED_FIELD", "the expression of 'user_id' gives NULL"),
            (None, 1, "UNPARSABLE_FIELD", "field 'id' can't be read as bigint: x"),
            (None, 2, "MISSING_FIELD", "field 'id' is missing or null"),
            (4, 3, "UNPARSABLE_FIELD", "field 'at' can't be read as timestamp: 2024-13-01"),
            (5, 42, None, None),
        ],
    )


def test_the_case_study_completes_no_time_of_a_visit(spark: SparkSession) -> None:
    config = yaml.safe_load((REPOSITORY / "conf/jobs/dead_letter_visits.yml").read_text(encoding="utf-8"))
    texts = [
        "2024-03-01T10:30:00Z",
        "2024-03-01 10:30:00.5",
        "10:30:00",
        "2024-03-01",
        "2024",
        " T10:30Z",
        None,
    ]
    lines = [(json.dumps({"event_time": text}),) for text in texts]
    parsed = parse_records(
        spark.createDataFrame(lines, "payload string"),
        load_schema(str(REPOSITORY / config["schema"])),
        derive=config["derive"],
    )
    assert_rows(
        parsed.select("event_time_text", F.col("event_time").cast("string")),
        [
            ("2024-03-01T10:30:00Z", "2024-03-01 10:30:00"),
            ("2024-03-01 10:30:00.5", "2024-03-01 10:30:00.5"),
            *((text, None) for text in texts[2:]),
        ],
    )


def test_every_record_is_evaluated_once_for_both_tables(stream: Stream) -> None:
    calls = stream.spark.sparkContext.accumulator(0)

    def counted(page: str | None) -> str | None:
        calls.add(1)
        return page

    stream.spark.udf.register("counted", counted, "string")
    stream.append(VALID, BAD_TIME, NO_TIME, NOT_JSON)
    report = stream.run(derive=EPOCH | {"page": "counted(page)"})
    assert (report["valid"], report["dead"]) == (1, 3)
    assert calls.value == 4


def test_too_many_bad_records_stop_the_job_before_anything_is_written(
    stream: Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.append(*[VALID] * 95, *[NOT_JSON] * 5)
    assert stream.run(max_bad_share=0.1)["bad_share"] == 0.05

    stream.append(*[VALID] * 60, *[NOT_JSON] * 40)
    before = stream.version("main"), stream.version("dead")
    arguments = [
        *("--source", stream.path("bronze"), "--target", stream.path("main")),
        *("--dead_letter", stream.path("dead"), "--checkpoint", stream.path("checkpoint")),
        *(
            "--schema",
            VISIT_SCHEMA,
            "--derive.event_time",
            EPOCH["event_time"],
            "--require",
            '["event_time"]',
        ),
    ]
    with pytest.raises(SystemExit) as stopped:
        run_job(Parameters, job.run, [*arguments, "--max_bad_share", "0.1"])
    assert stopped.value.code == 3
    alert = (
        "DataRefused: alert: batch 1 has 40 bad records of 100: 40.0% of the latest records, "
        "10.0% allowed; nothing of it was published"
    )
    assert alert in capsys.readouterr().err
    assert (stream.version("main"), stream.version("dead")) == before

    with pytest.raises(SystemExit) as stopped:
        run_job(Parameters, job.run, [*arguments, "--max_bad_share", "0.5"])
    assert stopped.value.code == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["dead"] == 40
    assert (stream.table("main").count(), stream.table("dead").count()) == (155, 45)


@pytest.mark.parametrize(
    ("batches", "share"),
    [
        ([(100, 6)], 0.06),
        ([(100, 4)], 0.04),
        ([(99, 99)], None),
        ([(1000, 0), (50, 10), (50, 30)], 0.4),
        ([(1000, 0), (200, 100)], 0.5),
    ],
)
def test_bad_share_looks_at_the_latest_hundred_records(
    batches: list[tuple[int, int]], share: float | None
) -> None:
    accounts = [BatchAccount(i, read, dead, {}) for i, (read, dead) in enumerate(batches)]
    assert job.bad_share(accounts, 100) == share


@pytest.mark.parametrize(("dead", "refused"), [(4, False), (5, False), (6, True)])
def test_share_above_the_threshold_is_refused(stream: Stream, dead: int, refused: bool) -> None:
    writer = job.BatchWriter(stream.parameters(max_bad_share=0.05), lambda rows: rows, "writer")
    if refused:
        with pytest.raises(DataRefused, match="alert: batch 0 has 6 bad records of 100"):
            writer.refuse_bad_batch(BatchAccount(0, 100, dead, {}))
    else:
        writer.refuse_bad_batch(BatchAccount(0, 100, dead, {}))


def test_a_value_that_cannot_be_read_is_counted_limited_or_dead_lettered(stream: Stream) -> None:
    flights = {"schema": "dep_time int, price decimal(5,2), at timestamp", "derive": {}, "require": []}
    stream.append(
        '{"dep_time":517.0,"price":1.10,"at":"2024-01-01T10:00Z"}', '{"dep_time":"soon","price":1.239}',
        '{"dep_time":"517","at":"10:00"}', '{"dep_time":null}', NOT_JSON,
    )  # fmt: skip
    with pytest.raises(
        DataRefused,
        match=r"has 2 records with an unreadable value of 5 \(at 1, dep_time 2, price 1\): 40.0% of the latest "
        r"records, 39.0% allowed; nothing",
    ):
        stream.run(**flights, max_unreadable_share=0.39, min_records=5)
    report = stream.run(**flights, max_unreadable_share=0.4, min_records=5)
    assert (report["valid"], report["dead"]) == (4, 1)
    assert report["unreadable_fields"] == {"at": 1, "dep_time": 2, "price": 1}
    ((account,)) = job.accounting(stream.spark, stream.path("main"))
    assert (account["unreadable"], account["unreadable_fields"]) == (2, {"at": 1, "dep_time": 2, "price": 1})
    ten = dt.datetime(2024, 1, 1, 10, tzinfo=dt.UTC)
    first = (517, Decimal("1.10"), ten)
    nothing = (None, None, None)
    assert_rows(stream.table("main"), [first, nothing, nothing, nothing], columns=["dep_time", "price", "at"])

    stream.append('{"dep_time":"late"}', '{"dep_time":1.5,"price":"1.10"}')
    report = stream.run(**flights, on_unreadable="dead_letter")
    assert (report["dead"], report["unreadable_fields"]) == (2, {})
    letters = stream.table("dead").where("error_class = 'UNPARSABLE_FIELD'")
    message = "values of other types than the schema's: dep_time"
    assert_rows(letters, [(message, "pending")] * 2, columns=["error_message", "status"])
    replay = {key: flights[key] for key in ("schema", "derive", "require")}
    replayed = dead_letter_replay.run(
        stream.spark,
        dead_letter_replay.Parameters(
            target=stream.path("main"), dead_letter=stream.path("dead"), now=NOW, publish_partitions=True,
            where="error_class = 'UNPARSABLE_FIELD'", **replay,
        ),
    )  # fmt: skip
    assert replayed["replayed"] == 2


def test_small_runs_are_judged_together_with_those_before(stream: Stream) -> None:
    stream.append(*[NOT_JSON] * 5, *[VALID] * 5)
    assert stream.run(max_bad_share=0.3, min_records=20)["dead"] == 5
    stream.append(*[VALID] * 10)
    assert stream.run(max_bad_share=0.1, min_records=20)["dead"] == 0, "a batch without a bad record passes"
    stream.append(*[NOT_JSON] * 5, *[VALID] * 5)
    with pytest.raises(
        DataRefused, match=r"batch 2 has 5 bad records of 10: 25.0% of the latest records, 20.0%"
    ):
        stream.run(max_bad_share=0.2, min_records=20)
    assert stream.run(max_bad_share=0.25, min_records=20)["dead"] == 5
    stream.append(*[NOT_JSON] * 20)
    assert stream.run(max_bad_share=1, min_records=20)["dead"] == 20
    stream.append(NOT_JSON, *[VALID] * 9)
    assert stream.run(max_bad_share=0.3, min_records=20)["dead"] == 1, "what was let pass is judged no more"


def test_a_field_named_like_a_column_of_the_source_gets_another_name(stream: Stream) -> None:
    stream.append('{"offset":7,"topic":"a"}', '{"topic":"b"}')
    fields = {"schema": "offset bigint, topic string", "derive": {}, "require": ["payload_offset"]}
    rename = {"offset": "payload_offset", "topic": "payload_topic"}
    assert stream.run(**fields, rename=rename)["dead"] == 1
    columns = ["payload_offset", "payload_topic", "offset", "topic"]
    assert_rows(stream.table("main"), [(7, "a", 0, "visits")], columns=columns)
    assert_rows(
        stream.table("dead"), [("field 'payload_offset' is missing or null",)], columns=["error_message"]
    )


class FailingSink:
    """Stands for ``append`` and fails a number of times on one table."""

    def __init__(self, table: str, error: Exception, times: int) -> None:
        self.table, self.error, self.times, self.calls = table, error, times, 0

    def __call__(self, rows: DataFrame, table: str, options: dict[str, str]) -> None:
        if table == self.table:
            self.calls += 1
            if self.calls <= self.times:
                raise self.error
        append(rows, table, options)


def test_transient_failures_of_the_sink_are_retried_and_never_dead_lettered(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "RetryPolicy", partial(RetryPolicy, base_seconds=0))
    sink = FailingSink(stream.path("main"), ConnectionError("the store is away"), times=2)
    monkeypatch.setattr(job, "append", sink)
    stream.append(VALID)
    report = stream.run(sink_attempts=3)
    assert (report["valid"], report["dead"], sink.calls) == (1, 0, 3)
    assert stream.table("main").count() == 1
    assert stream.table("dead").count() == 0


@pytest.mark.parametrize("failing", ["dead", "main"])
def test_batch_whose_write_fails_is_run_again_and_doubles_nothing(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    stream.append(VALID, NOT_JSON)
    with monkeypatch.context() as patched:
        patched.setattr(
            job, "append", FailingSink(stream.path(failing), PermissionError("read-only"), times=1)
        )
        with pytest.raises(PermissionError, match="read-only"):
            stream.run()
    written = 0 if failing == "dead" else 1
    assert (stream.table("main").count(), stream.table("dead").count()) == (0, written), "dead letters first"

    stream.run()
    assert (stream.table("main").count(), stream.table("dead").count()) == (1, 1)

    # A crash after both writes and before Spark's own commit: the batch comes again with the same number.
    (stream.folder / "checkpoint" / "commits" / "0").unlink()
    (stream.folder / "checkpoint" / "commits" / ".0.crc").unlink(missing_ok=True)
    assert stream.run()["read"] == 2
    assert (stream.table("main").count(), stream.table("dead").count()) == (1, 1)


@pytest.mark.kill
def test_killed_between_its_two_tables_the_next_run_completes_the_batch(stream: Stream) -> None:
    stream.append(VALID)
    stream.run()
    stream.append(VALID.replace("v1", "v2"), NOT_JSON)
    parameters = asdict(stream.parameters())
    config = stream.folder / "job.yml"
    config.write_text(
        yaml.safe_dump({name: value for name, value in parameters.items() if value is not None})
    )
    state = run_and_kill(
        [sys.executable, "-m", "python_jobs.error_management.dead_letter", "--config", str(config)],
        stream.path("main"),
        TableState.DATA_WITHOUT_LOG,
    )
    assert state is TableState.DATA_WITHOUT_LOG
    assert (stream.table("main").count(), stream.table("dead").count()) == (1, 1)

    stream.run()
    assert_rows(stream.table("main"), [("v1",), ("v2",)], columns=["visit_id"])
    assert_rows(stream.table("dead"), [(NOT_JSON,)], columns=["payload"])


def test_checkpoint_of_another_query_is_refused_in_one_sentence(stream: Stream) -> None:
    stream.append(VALID)
    stream.run()
    with pytest.raises(
        WrongUse, match=r"was made for another target; give this query another checkpoint folder"
    ):
        stream.run(target=stream.path("other"))
    # The same path, recreated: the progress would skip what it never held.
    shutil.rmtree(stream.path("dead"))
    with pytest.raises(WrongUse, match="was made for another dead_letter table"):
        stream.run()

    foreign = stream.spark.readStream.format("delta").load(stream.path("bronze")).writeStream.format("noop")
    foreign.option("checkpointLocation", stream.path("foreign")).trigger(
        availableNow=True
    ).start().awaitTermination()
    with pytest.raises(WrongUse, match="belongs to a query of another job"):
        stream.run(checkpoint=stream.path("foreign"))


def test_bad_input_and_wrong_use_give_one_sentence(stream: Stream) -> None:
    with pytest.raises(NotReady, match=r"there is no Delta table '.*bronze' to read from"):
        stream.run()

    stream.append()
    empty = stream.run()
    assert (empty["read"], empty["valid"], empty["dead"]) == (0, 0, 0)
    assert (stream.table("main").count(), stream.table("dead").count()) == (0, 0)

    for changes, sentence in [
        ({"schema": VISIT_SCHEMA.replace("visit_id string", "visit_id bigint")}, "it has visit_id string"),
        ({"partition_by": ["page"]}, "is partitioned by nothing, not by page"),
        ({"partition_by": ["day"]}, "partition_by names no column of the target: day"),
        ({"payload_column": "value"}, "no payload column 'value'; it has payload, topic"),
        ({"schema": "offset bigint"}, "already has columns of these names: offset; give the fields others with"),
        ({"rename": {"offset": "x"}}, "rename names no field of the schema: offset"),
        ({"schema": "visit_id interval day"}, "column visit_id is of type interval day, which no text is read as"),
        ({"max_unreadable_share": -1.0}, "max_unreadable_share is -1.0; it is a share between 0 and 1"),
        ({"require": ["user_id"]}, "neither in the schema nor derived: user_id"),
        ({"schema": "visit_id strange"}, "is no schema"),
        ({"schema": "string"}, "'string' is no schema: 'string' names no columns"),
        ({"schema": "id int, ID int"}, "'id int, ID int' is no schema: it names ID twice"),
        ({"schema": "missing.yml"}, "the schema file 'missing.yml' doesn't exist"),
        ({"target": stream.path("bronze")}, "must be three tables"),
        ({"trigger": "often"}, "'often' is no duration"),
        ({"max_bad_share": 10.0}, "it is a share between 0 and 1"),
        ({"min_records": 0}, "min_records must be 1 or more, got 0"),
    ]:  # fmt: skip
        with pytest.raises(WrongUse, match=re.escape(sentence)):
            stream.run(**changes)


@pytest.mark.parametrize(
    ("flag", "sql", "sentence"),
    [
        ("derive.x", "nofunc(a)", "derive.x can't be used ([UNRESOLVED_ROUTINE]"),
        ("derive.x", "page +", "derive.x can't be used ([PARSE_SYNTAX_ERROR]"),
        ("derive.x", "max(page)", "an expression over one row can't aggregate ([MISSING_GROUP_BY]"),
        ("where", "nocol", "where can't be used ([UNRESOLVED_COLUMN.WITH_SUGGESTION]"),
    ],
)
def test_an_expression_that_spark_can_not_analyze_ends_the_job_with_a_sentence(
    spark: SparkSession,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    sql: str,
    sentence: str,
) -> None:
    used, target, dead = (str(tmp_path / name) for name in ("used", "target", "dead"))
    columns = "'{}' as payload" + (", 'pending' as status" if flag == "where" else "")
    spark.sql(f"select {columns}").write.format("delta").save(used)
    argv = ["--schema", "page string", f"--{flag}", sql]
    if flag == "where":
        argv += ["--target", used, "--dead_letter", f"{used}/"]
        outcome = job_outcome(lambda: spark, dead_letter_replay.Parameters, dead_letter_replay.run, argv)
    else:
        argv += [
            "--source",
            used,
            "--target",
            target,
            "--dead_letter",
            dead,
            "--checkpoint",
            f"{dead}_checkpoint",
        ]
        outcome = job_outcome(lambda: spark, Parameters, job.run, argv)
    assert outcome == (2, None)
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"WrongUse: {sentence}")


def test_source_that_rewrites_rows_ends_the_stream_with_one_sentence(stream: Stream) -> None:
    stream.append(VALID)
    stream.run()
    stream.append(BAD_TIME)
    stream.spark.sql(f"update delta.`{stream.path('bronze')}` set topic = 'x' where offset = 0")
    with pytest.raises(JobFailed, match="has rewritten rows; a stream needs a source that only appends"):
        stream.run()


def test_schema_reads_the_same_from_ddl_yaml_and_json(tmp_path: Path, spark: SparkSession) -> None:
    ddl = "visit_id string, keep_private boolean, context struct<user: struct<ip: string>>"
    (tmp_path / "s.ddl").write_text(ddl)
    (tmp_path / "s.yml").write_text(
        "visit_id: string\nkeep_private: boolean\ncontext:\n  user: {ip: string}\n"
    )
    (tmp_path / "s.json").write_text(load_schema(ddl).json())
    for file in ("s.ddl", "s.yml", "s.json"):
        assert load_schema(str(tmp_path / file)) == load_schema(ddl)


class TestReplay:
    """A record fails at 10:01 between two that pass; the fixed expression reads it."""

    BROKEN: ClassVar = {
        "event_time": "try_to_timestamp(event_time)",
        "event_date": "cast(event_time as date)",
    }
    FIXED: ClassVar = {
        "event_time": "coalesce("
        "try_to_timestamp(event_time), try_to_timestamp(event_time, 'dd/MM/yyyy HH:mm'))",
        "event_date": "cast(event_time as date)",
    }

    @pytest.fixture(scope="class")
    @staticmethod
    def ran(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Stream:
        stream = Stream(spark, tmp_path_factory.mktemp("failed"))
        stream.append(
            '{"visit_id":"v0","event_time":"2024-01-01T10:00:00Z","page":"/a"}',
            '{"visit_id":"v1","event_time":"01/01/2024 10:01","page":"/b"}',
            '{"visit_id":"v2","event_time":"2024-01-01T10:02:00Z","page":"/c"}',
            NOT_JSON,
        )
        stream.run(derive=TestReplay.BROKEN, partition_by=["event_date"])
        assert (stream.table("main").count(), stream.table("dead").count()) == (2, 2)
        return stream

    @pytest.fixture
    def failed(self, ran: Stream, tmp_path: Path) -> Stream:
        """Return a copy of the tables for one test."""
        shutil.copytree(ran.folder, tmp_path / "copy")
        copy = Stream(ran.spark, tmp_path / "copy")
        copy.appended = ran.appended
        return copy

    def replay(self, stream: Stream, **changes: Any) -> dict[str, Any]:
        given = {
            "target": stream.path("main"),
            "dead_letter": stream.path("dead"),
            "schema": VISIT_SCHEMA,
            "derive": self.FIXED,
            "require": ["event_time"],
            "publish_partitions": True,
            "job_version": "2",
            "now": "2024-01-02T00:00:00Z",
        }
        return dead_letter_replay.run(stream.spark, dead_letter_replay.Parameters(**(given | changes)))

    def test_without_the_switch_or_with_other_columns_it_writes_nothing(self, failed: Stream) -> None:
        before = failed.version("main"), failed.version("dead")
        report = self.replay(failed, publish_partitions=False)
        assert (report["read"], report["replayed"], report["failed"]) == (2, 1, 1)
        assert report["touched_partitions"] == [{"event_date": "2024-01-01"}]
        with pytest.raises(WrongUse, match=r"differ in the columns event_date"):
            self.replay(failed, derive={"event_time": "try_to_timestamp(event_time)"})
        with pytest.raises(NotReady, match="there is no Delta table"):
            self.replay(failed, dead_letter=failed.path("nowhere"))
        assert (failed.version("main"), failed.version("dead")) == before

    def test_fixed_records_join_the_main_table_once(self, failed: Stream) -> None:
        report = self.replay(failed)
        assert (report["replayed"], report["failed"], report["parked"]) == (1, 1, 0)
        assert report["touched_partitions"] == [{"event_date": "2024-01-01"}]
        rows = failed.table("main")
        letter = failed.table("dead").where("status = 'replayed'").collect()[0]
        at = dt.datetime(2024, 1, 2, tzinfo=dt.UTC)
        assert_rows(
            rows.where("was_dead_lettered").select("visit_id", "offset", "replay.*"),
            [("v1", 1, letter.dead_letter_id, "dead_letter_replay", "2", at, 2)],
        )
        assert (letter.attempts, letter.status_changed_at.replace(tzinfo=dt.UTC)) == (2, at)
        assert letter.error_class == "UNPARSABLE_FIELD", "the error stays on record"
        in_order = [row.event_time.strftime("%H:%M") for row in rows.orderBy("event_time").collect()]
        assert in_order == ["10:00", "10:01", "10:02"]

        self.replay(failed)
        assert failed.table("main").count() == 3

        # A run that died after the target and before the dead letters: the next one finds the row by its id.
        failed.spark.sql(
            f"update delta.`{failed.path('dead')}` set status = 'pending' where status = 'replayed'"
        )
        assert self.replay(failed)["replayed"] == 1
        assert failed.table("main").count() == 3
        assert failed.table("dead").where("status = 'replayed'").count() == 1

    def test_a_replay_of_one_error_class_leaves_the_others_and_parked_ones_come_when_told(
        self, failed: Stream
    ) -> None:
        before = failed.table("dead").where("error_class = 'NOT_A_JSON_OBJECT'").collect()
        report = self.replay(failed, where="error_class = 'UNPARSABLE_FIELD'", max_attempts=1)
        assert (report["read"], report["replayed"]) == (1, 1)
        assert failed.table("dead").where("error_class = 'NOT_A_JSON_OBJECT'").collect() == before

        assert self.replay(failed, max_attempts=1)["parked"] == 1
        assert self.replay(failed)["read"] == 0, "parked"
        assert self.replay(failed, include_parked=True, max_attempts=1)["parked"] == 1
        (letter,) = failed.table("dead").where("status = 'parked'").collect()
        assert letter.attempts == 3
        assert letter.processed_at == before[0].processed_at, "when it was first seen"
        closed = failed.table("dead").where("status = 'replayed'").count()
        assert failed.table("main").count() + failed.table("dead").count() - closed == 4, "none is lost"

    def test_two_replays_at_once_add_each_letter_once(self, failed: Stream) -> None:
        # Two processes share no cache. In one session equal plans do, and Delta refuses a MERGE whose source another
        # thread caches meanwhile.
        with ThreadPoolExecutor(2) as threads:
            runs = [threads.submit(self.replay, failed, where=where) for where in ("true", "1 = 1")]
        errors = [run.exception() for run in runs if run.exception() is not None]
        assert len(errors) < 2, [str(error)[:500] for error in errors]
        assert all(isinstance(error, CONFLICTS) for error in errors), errors
        assert failed.table("main").count() == 3
        assert failed.table("dead").where("status = 'replayed'").count() == 1

    def test_the_days_that_a_replay_touches_are_what_has_to_be_built_again(self, failed: Stream) -> None:
        """A table of visits by day, corrected for the reported days alone, is the one built from everything."""
        failed.append('{"visit_id":"v9","event_time":"2024-01-02T09:00:00Z","page":"/a"}')
        failed.run(derive=self.BROKEN, partition_by=["event_date"])

        def by_day() -> DataFrame:
            return failed.table("main").groupBy("event_date").count()

        by_day().write.format("delta").save(failed.path("gold"))
        (touched,) = self.replay(failed)["touched_partitions"]
        day = f"event_date = '{touched['event_date']}'"
        writer = by_day().where(day).write.format("delta").mode("overwrite").option("replaceWhere", day)
        writer.save(failed.path("gold"))
        assert_rows(failed.table("gold"), by_day())
        assert_rows(failed.table("gold"), [(dt.date(2024, 1, 1), 3), (dt.date(2024, 1, 2), 1)])

    def test_a_replayed_record_is_a_row_beside_a_newer_one_of_its_key(
        self, failed: Stream, render: MacroRenderer
    ) -> None:
        """v1 came again at 11:00, readable, before its letter of 10:01 is replayed: the newer row stays the latest."""
        failed.append('{"visit_id":"v1","event_time":"2024-01-01T11:00:00Z","page":"/newer"}')
        failed.run(derive=self.BROKEN, partition_by=["event_date"])
        assert self.replay(failed)["replayed"] == 1
        rows = failed.table("main").select("visit_id", "event_time", "page", "was_dead_lettered")
        rows.where("visit_id = 'v1'").createOrReplaceTempView("rows_of_v1")
        assert_rows(
            failed.spark.table("rows_of_v1"),
            [("/newer", False), ("/b", True)],
            columns=["page", "was_dead_lettered"],
        )
        latest = render(
            "windowed_deduplicator", relation="rows_of_v1", key="visit_id", order_by="event_time", keep="last"
        )
        assert_rows(failed.spark.sql(latest), [("/newer",)], columns=["page"])

    def test_records_that_go_on_failing_are_parked(self, failed: Stream) -> None:
        states = []
        for _ in range(3):
            self.replay(failed, max_attempts=3)
            states.append(failed.table("dead").where(F.col("payload") == NOT_JSON).collect()[0])
        assert [(row.attempts, row.status) for row in states] == [
            (2, "pending"),
            (3, "parked"),
            (3, "parked"),
        ]
        assert self.replay(failed)["read"] == 0


DEVICES = [("Air", "1"), (None, "1"), ("Pro", None), (None, None)]
NAME_WITH_VERSION = {
    "name": "name_with_version",
    "expression": "concat(full_name, version)",
    "inputs": ["full_name", "version"],
}


def test_sql_compares_output_with_input(spark: SparkSession, render: MacroRenderer, ansi_modes: str) -> None:
    spark.createDataFrame(DEVICES, "full_name string, version string").createOrReplaceTempView(
        "devices_to_load"
    )
    spark.sql(
        render("dead_letter_flags", relation="devices_to_load", transformations=[NAME_WITH_VERSION])
    ).createOrReplaceTempView("devices_flagged")
    valid = spark.sql(render("dead_letter_valid_rows", flagged="devices_flagged"))
    assert_rows(valid, [("Air", "1", "Air1"), (None, None, None)])
    assert valid.columns == ["full_name", "version", "name_with_version"]
    dead = spark.sql(
        render(
            "dead_letter_rows",
            flagged="devices_flagged",
            job_name="devices",
            processed_at="2024-01-01 12:00:00",
        )
    )
    message = "name_with_version is NULL although an input is present (full_name, version)"
    context = ("NULL_RESULT", message, "devices", "1", dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC))
    assert_rows(dead, [(None, "1", None, *context), ("Pro", None, None, *context)])


def test_sql_shows_where_an_error_safe_function_hid_an_error(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    rows = [("1", "2024-01-01", 10), ("x", "2024-01-01", 10), ("2", "2024-13-01", 10), (None, None, None)]
    spark.createDataFrame(rows, "id string, at string, length int").createOrReplaceTempView("untyped")
    flagged = spark.sql(
        render(
            "dead_letter_flags",
            relation="untyped",
            transformations=[
                {"name": "number", "expression": "try_cast(id as bigint)", "inputs": ["id"]},
                {"name": "moment", "expression": "try_to_timestamp(at)", "inputs": ["at", "length"]},
            ],
        )
    )
    assert_rows(
        flagged.select("id", "number", F.substring_index("error_message", " ", 1)),
        [("1", 1, None), ("x", None, "number"), ("2", 2, "moment"), (None, None, None)],
    )


def test_sql_macros_refuse_wrong_arguments(render: MacroRenderer) -> None:
    for transformations, sentence in [
        ([], "transformations must be a list"),
        ([{"name": "x", "expression": "y"}], "needs name, expression and a list of inputs"),
        ([NAME_WITH_VERSION | {"input": "y"}], "has no option 'input'"),
    ]:
        with pytest.raises(Exception, match=sentence):
            render("dead_letter_flags", relation="t", transformations=transformations)
    with pytest.raises(Exception, match="max_share must be a share between 0 and 1, got 10"):
        render("dead_letter_share_failures", flagged="t", max_share=10, min_records=1)


def test_sql_models_evaluate_each_row_once_and_the_share_test_alarms(
    spark: SparkSession, make_project: Callable[..., DbtProject]
) -> None:
    calls = spark.sparkContext.accumulator(0)

    def concat(left: str | None, right: str | None) -> str | None:
        calls.add(1)
        return None if left is None or right is None else left + right

    spark.udf.register("counted_concat", concat, "string")
    flagged, valid, dead, properties = snippets(
        PAGE, f"{HERE}::test_sql_models_evaluate_each_row_once_and_the_share_test_alarms"
    )
    project = make_project(
        {
            "models/devices_flagged.sql": flagged.replace("concat(", "counted_concat("),
            "models/devices_valid.sql": "{{ config(materialized='table') }}" + valid,
            "models/devices_dead_letter.sql": "{{ config(materialized='table') }}" + dead,
            "models/properties.yml": properties,
            "models/sources.yml": raw_tables("devices"),
        }
    )
    project.source("devices", spark.createDataFrame(DEVICES, "full_name string, version string"))
    project.run("run")
    assert calls.value == 4
    assert_rows(project.table("devices_valid"), [("Air", "1", "Air1"), (None, None, None)])
    assert_rows(
        project.table("devices_dead_letter").select("full_name", "version", "job_name"),
        [(None, "1", "devices"), ("Pro", None, "devices")],
    )
    assert project.fails("test").startswith("few_dead_letters: fail")


@pytest.mark.parametrize(
    ("max_share", "min_records", "alarm"), [(0.5, 4, False), (0.49, 4, True), (0.49, 5, False)]
)
def test_sql_share_test_has_both_limits(
    spark: SparkSession, render: MacroRenderer, max_share: float, min_records: int, alarm: bool
) -> None:
    rows = [(None,), (None,), ("NULL_RESULT",), ("NULL_RESULT",)]
    spark.createDataFrame(rows, "error_class string").createOrReplaceTempView("half_flagged")
    sql = render(
        "dead_letter_share_failures", flagged="half_flagged", max_share=max_share, min_records=min_records
    )
    assert_rows(spark.sql(sql), [(4, 2, 0.5)] if alarm else [])
