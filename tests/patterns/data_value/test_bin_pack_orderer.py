"""Bin Pack Orderer: each key's events arrive in order at APIs that take only a part of a request."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.exceptions import ClientError, CredentialRetrievalError, NoCredentialsError, SSLError
from pyspark.sql import SparkSession

from python_jobs.data_value import bin_pack_orderer as job
from python_jobs.data_value.bin_pack_orderer import OutputWriter, Parameters
from python_jobs.data_value.bulk_sinks import HttpSink, KinesisSink, Output, Sent
from python_jobs.data_value.ordered_delivery import Courier, Undelivered
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import JobFailed, NotReady, WrongUse
from python_jobs.shared.core.retry import Failure, RetryPolicy
from services.object_store import ObjectStore
from services.processes import free_port
from tests.support.broken_texts import BROKEN, with_broken_texts
from tests.support.bulk_apis import BulkApi, kinesis_behind_proxy, running_bulk_api
from tests.support.rows import assert_rows
from tests.support.session import environment
from tests.support.snippets import snippet
from tests.support.waiting import eventually

PAGE = "docs/data_value.md"
HERE = "tests/patterns/data_value/test_bin_pack_orderer.py"
STREAM = "partner_visits"
EVENTS = "visit string, at string, page string, provider string, number bigint"


class Table:
    """A table of events and the job over it."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder, self.number = spark, folder, 0

    def append(self, *events: tuple[Any, ...], partitions: int = 1) -> None:
        """Append events (visit, clock, page, provider), each with its number, as one micro-batch."""
        rows = []
        for visit, clock, page, provider in events:
            at = f"2024-01-01T{clock}Z" if clock else None
            rows.append((visit, at, page, provider, self.number))
            self.number += 1
        frame = with_broken_texts(self.spark.createDataFrame(rows, EVENTS)).repartition(partitions)
        frame.write.format("delta").mode("append").save(str(self.folder / "events"))

    def parameters(self, **changes: Any) -> Parameters:
        given = {
            "source": str(self.folder / "events"),
            "key": "visit",
            "event_time": "at",
            "ties": ["number"],
            "fields": {"page": "page"},
            "dead_letter": str(self.folder / "dead"),
            "checkpoint": str(self.folder / "checkpoint"),
            "now": "2024-01-01T12:00:00Z",
            "attempts": 3,
            "wait_seconds": 0,
        }
        return Parameters(**(given | changes))

    def run(self, **changes: Any) -> dict[str, Any]:
        return job.run(self.spark, self.parameters(**changes))


def refusing(times: int, *shown: str, reason: Any = "ProvisionedThroughputExceededException") -> Any:
    """Return the function that refuses records (``key clock``) their first times."""
    left = dict.fromkeys(shown, times)

    def refuse(record: dict[str, Any]) -> Any:
        name = f"{record['key']} {record['at'][11:16]}"
        if not left.get(name):
            return None
        left[name] -= 1
        return reason

    return refuse


@pytest.fixture(scope="module")
def kinesis(object_store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BulkApi]:
    """Return a stream of moto's Kinesis behind the proxy, which boto3 finds in its environment."""
    folder = tmp_path_factory.mktemp("kinesis")
    with kinesis_behind_proxy(object_store.endpoint) as api:
        found = object_store.environment(folder / "credentials") | {
            "AWS_ENDPOINT_URL": api.url,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        with environment(**found):
            boto3.client("kinesis").create_stream(StreamName=STREAM, ShardCount=2)
            yield api


# --- one stream of Kinesis: each event is a record -----------------------------------------------------------


@pytest.fixture(scope="module")
def visits(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, kinesis: BulkApi) -> Table:
    return Table(spark, tmp_path_factory.mktemp("visits"))


TO_KINESIS = [Output("partner", "kinesis", STREAM)]
FIRST = [
    ("C", "10:30", "c2"), ("A", "10:20", "a3"), ("B", "10:05", "b1"), ("A", "10:00", "a1"), ("C", "10:00", "c1"),
    ("A", "10:10", "a2"), (None, "10:00", "no key"), ("", "10:00", "empty key"), ("N", None, "no time"),
    ("N", "10", "hour alone"), ("L" * 257, "10:00", "long key"),
    (BROKEN, "10:00", "broken key"), ("A", "10:00", f"broken value {BROKEN}"),
]  # fmt: skip


@pytest.fixture(scope="module")
def first(visits: Table, kinesis: BulkApi) -> dict[str, Any]:
    """Deliver events that are spread over two partitions; A's first one is refused once."""
    kinesis.reset(refusing(1, "A 10:00"))
    visits.append(*((*event, "partner") for event in FIRST), partitions=2)
    report = visits.run(outputs=TO_KINESIS)
    return report | {"calls": kinesis.calls(), "records": list(kinesis.stored)}


def test_only_the_refused_record_is_sent_again_before_the_next_bin(first: dict[str, Any]) -> None:
    assert first["calls"] == [
        ["A 10:00", "B 10:05", "C 10:00"],
        ["A 10:00"],
        ["A 10:10", "C 10:30"],
        ["A 10:20"],
    ]
    assert first["outputs"] == {"partner": {"records": 6, "bins": 3, "requests": 4}}


def test_a_record_has_its_key_time_and_values_and_its_partition_key(
    kinesis: BulkApi, first: dict[str, Any]
) -> None:
    records = {record["data"]["page"]: record for record in first["records"]}
    assert len({record.pop("id") for record in records.values()}) == 6
    assert records["a1"] == {"key": "A", "at": "2024-01-01T10:00:00.000000Z", "data": {"page": "a1"}}
    client = boto3.client("kinesis")
    found = []
    for shard in client.describe_stream(StreamName=STREAM)["StreamDescription"]["Shards"]:
        start = client.get_shard_iterator(
            StreamName=STREAM, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
        )
        found += client.get_records(ShardIterator=start["ShardIterator"])["Records"]
    assert sorted(record["PartitionKey"] for record in found)[:6] == ["A", "A", "A", "B", "C", "C"]


def test_events_without_key_or_time_are_dead_letters(visits: Table, first: dict[str, Any]) -> None:
    assert first["dead"] == 7
    dead = visits.spark.read.format("delta").load(str(visits.folder / "dead"))
    assert_rows(
        dead.select("page", "error_class"),
        [
            ("no key", "NULL_KEY"),
            ("empty key", "NULL_KEY"),
            ("no time", "NULL_TIME"),
            ("hour alone", "NULL_TIME"),
            ("long key", "LONG_KEY"),
            ("broken key", "NOT_UTF8"),
            ("broken value \ufffd", "NOT_UTF8"),  # as Python shows the byte FF
        ],
    )


@pytest.fixture(scope="module")
def refused(visits: Table, kinesis: BulkApi, first: dict[str, Any]) -> dict[str, Any]:
    """Deliver nothing new; then events of which C's second one is refused at each try; then all is well again."""
    kinesis.reset()
    idle = visits.run(outputs=TO_KINESIS)["outputs"]["partner"], list(kinesis.requests)
    kinesis.reset(refusing(99, "C 11:30"))
    visits.append(*((visit, clock, "p", "x") for visit, clock, _ in FIRST[:6]))
    visits.append(*((key, "11:30", "late", "x") for key in "CCA"))
    with pytest.raises(Undelivered) as failure:
        visits.run(outputs=TO_KINESIS)
    stopped = kinesis.calls()
    before = len(kinesis.stored)
    kinesis.reset()
    visits.run(outputs=TO_KINESIS)
    return {
        "idle": idle,
        "failure": str(failure.value),
        "stopped": stopped,
        "before": before,
        "again": kinesis.calls(),
    }


def test_an_empty_window_sends_no_request(refused: dict[str, Any]) -> None:
    assert refused["idle"] == ({"records": 0, "bins": 0, "requests": 0}, [])


def test_a_record_refused_at_each_try_ends_the_job_before_the_next_bin(refused: dict[str, Any]) -> None:
    # C has 10:00, 10:30, then twice 11:30; A has four events, too.
    assert refused["stopped"] == [
        ["A 10:00", "B 10:05", "C 10:00"],
        ["A 10:10", "C 10:30"],
        ["A 10:20", "C 11:30"],
        ["C 11:30"],
        ["C 11:30"],
    ]
    assert refused["failure"].startswith(
        "output partner failed: bin 3 of 4 of batch 1 is not complete: 1 of 2"
    )


def test_the_next_run_begins_with_the_first_bin_that_is_not_complete(refused: dict[str, Any]) -> None:
    assert refused["again"] == [["A 10:20", "C 11:30"], ["A 11:30", "C 11:30"]]


def test_a_crash_behind_a_bin_sends_it_again_with_the_same_ids(
    visits: Table, kinesis: BulkApi, refused: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinesis.reset()
    visits.append(("A", "12:01", "2", "x"), ("A", "12:00", "1", "x"), ("B", "12:00", "1", "x"))
    # Equal times: their numbers decide.
    visits.append(("A", "12:01", "0", "x"))
    store = OutputWriter._store

    def crashing(self: OutputWriter, batch_id: int, bins: int, content: str) -> None:
        if bins == 2:
            raise RuntimeError("killed between the delivery and the progress")
        store(self, batch_id, bins, content)

    with monkeypatch.context() as crash:
        crash.setattr(OutputWriter, "_store", crashing)
        with pytest.raises(RuntimeError, match="killed"):
            visits.run(outputs=TO_KINESIS)
    visits.run(outputs=TO_KINESIS)
    assert kinesis.calls() == [["A 12:00", "B 12:00"], ["A 12:01"], ["A 12:01"], ["A 12:01"]]
    ids = [record["id"] for record in kinesis.stored]
    pages = {record["id"]: record["data"]["page"] for record in kinesis.stored if record["key"] == "A"}
    assert ids[2] == ids[3]
    assert len(set(ids)) == 4
    assert list(pages.values()) == ["1", "2", "0"]  # once for a partner that drops an id which it has


def test_a_stored_progress_of_other_events_counts_for_nothing(
    visits: Table, kinesis: BulkApi, refused: dict[str, Any]
) -> None:
    """An expression that gives other values at each run makes other bins: all are sent, so that none is lost."""
    folder = job.HadoopFolder(visits.spark, str(visits.folder / "progress"))
    writer = OutputWriter(visits.parameters(outputs=TO_KINESIS), TO_KINESIS[0], "writer", folder)
    writer._store(7, 1, "these")
    writer._store(7, 2, "these")
    assert folder.names("delivered") == ["7-2"]
    assert [writer._delivered(7, "these"), writer._delivered(7, "others"), writer._delivered(8, "these")] == [
        2,
        0,
        0,
    ]


# --- an output for each provider: aggregates by minute -------------------------------------------------------


def test_each_output_has_its_own_bins_and_a_failed_one_holds_up_no_other(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTNER_TOKEN", "hunter2")
    table = Table(spark, tmp_path)
    config = yaml.safe_load(
        snippet(PAGE, f"{HERE}::test_each_output_has_its_own_bins_and_a_failed_one_holds_up_no_other")
    )
    with running_bulk_api() as north, running_bulk_api() as south:
        for output, api in zip(config["outputs"], (north, south), strict=True):
            output["target"] = api.url
        own = {name: str(tmp_path / Path(config[name]).name) for name in ("dead_letter", "checkpoint")}
        trigger = config.pop("trigger")
        assert trigger == "10 minutes"
        (tmp_path / "job.yml").write_text(
            yaml.safe_dump(
                config | own | {"source": str(tmp_path / "events"), "attempts": 2, "wait_seconds": 0}
            )
        )
        given, _ = parse_parameters(Parameters, ["--config", str(tmp_path / "job.yml")])
        south.reset(status=503)
        table.append(
            ("v1", "10:03:10", "p", "north"), ("v2", "10:03:50", "p", "north"), ("v3", "10:04:00", "q", "north"),
            ("v1", "10:03:00", "p", "south"), ("v4", "10:09:00", "p", "west"), ("v5", "10:09:00", "p", None),
            ("v8", "10:04:10", BROKEN, "north"),
        )  # fmt: skip
        with pytest.raises(
            Undelivered, match=r"^output south failed: bin 1 of 1 .*\(HTTPError\).*the other outputs"
        ):
            job.run(spark, given)
        assert north.calls() == [["north 10:03"], ["north 10:04"]]
        assert [record["data"] for record in north.stored] == [
            {"visits": 2, "pages": 1},
            {"visits": 1, "pages": 1},
        ]
        assert len(south.requests) == 2
        assert (north.tokens, south.tokens) == ({None}, {"Bearer hunter2"})
        dead = spark.read.format("delta").load(own["dead_letter"]).select("provider", "error_class")
        assert_rows(dead, [("west", "UNKNOWN_OUTPUT"), (None, "NULL_KEY"), ("north", "NOT_UTF8")])

        # Without end: the north's next window is delivered while the south is away, and then the south's, too.
        north.reset()

        def watch() -> None:
            try:
                eventually(lambda: len(south.requests) >= 4)
                table.append(("v6", "10:03:30", "p", "north"), ("v7", "10:13:00", "p", "north"))
                eventually(lambda: north.shown() == ["north 10:03", "north 10:13"])
                south.reset()
                eventually(lambda: south.shown() == ["south 10:03"])
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        watching = threading.Thread(target=watch)
        watching.start()
        given = dataclasses.replace(given, trigger="1 second")
        report = job.run(spark, given)
        watching.join()
        assert report["outputs"]["north"]["records"] == 2
        assert report["outputs"]["south"]["records"] == 1
        assert south.calls() == [["south 10:03"]]


# --- the sinks -------------------------------------------------------------------------------------------------


def courier(sink: Any, attempts: int = 2) -> Courier[Sent]:
    return Courier(sink, RetryPolicy(attempts=attempts, base_seconds=0, cap_seconds=0))


def records(count: int) -> list[Sent]:
    body = '{{"key": "k{0}", "at": "2024-01-01T10:00:00Z"}}'
    return [Sent(f"k{number}", body.format(number)) for number in range(count)]


def test_600_keys_are_two_calls_of_kinesis(kinesis: BulkApi) -> None:
    kinesis.reset()
    courier(KinesisSink(STREAM, 5)).deliver(records(600))
    assert [len(call) for call in kinesis.requests] == [500, 100]
    assert len(kinesis.stored) == 600


def test_kinesis_refusals_are_retried_if_they_may_pass(
    kinesis: BulkApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinesis.reset(refusing(99, "k1 10:00", reason="AccessDenied"))
    with pytest.raises(Undelivered, match=r"1 of 3 records were not taken \(AccessDenied\)"):
        courier(KinesisSink(STREAM, 5)).deliver(records(3))
    assert len(kinesis.requests) == 1
    with pytest.raises(Undelivered, match=r"3 of 3 .*\(ResourceNotFoundException\)"):
        courier(KinesisSink("absent", 5)).deliver(records(3))
    assert len(kinesis.requests) == 2
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    deliverer = courier(KinesisSink(STREAM, 5), attempts=3)
    with pytest.raises(Undelivered, match=r"3 of 3 .*\(EndpointConnectionError\)"):
        deliverer.deliver(records(3))
    assert deliverer.requests == 3


def test_what_kinesis_says_in_an_unknown_way_is_retried(kinesis: BulkApi) -> None:
    kinesis.reset(refusing(1, "k1 10:00", reason="ANewCode"))
    courier(KinesisSink(STREAM, 5)).deliver(records(3))
    assert kinesis.calls() == [["k0 10:00", "k1 10:00", "k2 10:00"], ["k1 10:00"]]
    kinesis.reset()
    kinesis.broken_answers = 1
    courier(KinesisSink(STREAM, 5)).deliver(records(2))
    assert kinesis.calls() == [["k0 10:00", "k1 10:00"]] * 2
    kinesis.broken_answers = 2
    with pytest.raises(Undelivered, match=r"2 of 2 .*\(ResponseStreamingError\)"):
        courier(KinesisSink(STREAM, 5)).deliver(records(2))


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("ProvisionedThroughputExceededException", 400, Failure.TRANSIENT),
        ("AccessDeniedException", 400, Failure.PERMANENT),
        ("ANewCode", 400, Failure.AMBIGUOUS),
        ("ANewCode", 403, Failure.PERMANENT),
        ("413", 413, Failure.PERMANENT),
        ("503", 503, Failure.TRANSIENT),
        ("500", 500, Failure.AMBIGUOUS),
    ],
)
def test_a_request_that_kinesis_refuses_is_classified_by_its_code_and_its_status(
    kinesis: BulkApi, code: str, status: int, expected: Failure
) -> None:
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    assert KinesisSink(STREAM, 5).failure(ClientError(answer, "PutRecords")) is expected


def test_an_error_of_boto3_is_final_only_if_the_request_is_wrong(kinesis: BulkApi) -> None:
    sink = KinesisSink(STREAM, 5)
    assert sink.failure(NoCredentialsError()) is Failure.PERMANENT
    for error in (
        CredentialRetrievalError(provider="sso", error_msg="timeout"),
        SSLError(endpoint_url="https://kinesis", error="EOF occurred"),
    ):
        assert sink.failure(error) is Failure.AMBIGUOUS


def test_an_http_api_that_says_not_enough_is_refused() -> None:
    with running_bulk_api() as api:
        api.reset(refusing(1, "k1 10:00", reason=429))
        courier(HttpSink(Output("a", "http", api.url))).deliver(records(3))
        assert api.calls() == [["k0 10:00", "k1 10:00", "k2 10:00"], ["k1 10:00"]]
        api.reset(refusing(1, "k1 10:00", reason=400))
        with pytest.raises(Undelivered, match=r"1 of 3 records were not taken \(400\)"):
            courier(HttpSink(Output("a", "http", api.url))).deliver(records(3))
        assert len(api.requests) == 1
        sink = HttpSink(Output("a", "http", api.url))
        for answer, sentence in (
            (b"[]", "items"),
            (b'{"items": [{"status": 201}]}', "answered for 1 of 3 records"),
            (b'{"items": [{"status": 500, "status": 201}]}', "RepeatedName"),
        ):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("requests.Response.content", answer)
                with pytest.raises(JobFailed, match=sentence):
                    courier(sink).deliver(records(3))


OUTPUT = Output("a", "http", "http://localhost/bulk")


@pytest.mark.parametrize("every", [None, "1 minute"])
def test_a_record_s_times_keep_their_microseconds(
    spark: SparkSession, tmp_path: Path, every: str | None
) -> None:
    fields = {"seen": "seen", "local": "local"}
    if every is not None:
        fields = {name: f"max({expression})" for name, expression in fields.items()}
    params = Table(spark, tmp_path).parameters(outputs=[OUTPUT], every=every, ties=[], fields=fields)
    rows = spark.sql(
        "select 'A' as visit, '2024-01-01T10:00:00Z' as at, timestamp'2024-01-01 10:00:00.123456Z' as seen, "
        "timestamp_ntz'2024-01-01 10:00:00.000001' as local"
    )
    ((_, _, _, payload),) = params.deliverable(params.judged(rows)).collect()
    assert json.loads(payload) == {
        "seen": "2024-01-01T10:00:00.123456Z",
        "local": "2024-01-01T10:00:00.000001",
    }


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"outputs": []}, "outputs must have one name each"),
        ({"outputs": [OUTPUT, OUTPUT]}, "outputs must have one name each"),
        ({"outputs": [OUTPUT, Output("b", "kinesis", "s")]}, "output is missing"),
        ({"fields": {}}, "fields is empty"),
        ({"every": "soon"}, "'soon' is no duration"),
        ({"every": "1 minute"}, "ties have no meaning with every"),
        ({"attempts": 0}, "attempts must be 1 or more, got 0"),
    ],
)
def test_wrong_use_is_refused(
    spark: SparkSession, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(WrongUse, match=sentence):
        Table(spark, tmp_path).parameters(**({"outputs": [OUTPUT]} | changes))


def test_what_cannot_be_delivered_is_refused_before_a_request(
    spark: SparkSession, tmp_path: Path, visits: Table, refused: dict[str, Any]
) -> None:
    for kind, target, sentence in (("http", "ftp://x", "must begin with http://"),):
        with pytest.raises(WrongUse, match=sentence):
            Output("a", kind, target)  # type: ignore[arg-type]
    with pytest.raises(WrongUse, match="an output's name must be of letters"):
        Output("a/b", "http", "http://x")
    with pytest.raises(WrongUse, match="environment variable ABSENT_TOKEN"):
        Output("a", "http", "http://x", "ABSENT_TOKEN")
    with pytest.raises(NotReady, match="there is no Delta table"):
        Table(spark, tmp_path).run(outputs=[OUTPUT])
    with pytest.raises(WrongUse, match=r"an expression can't be resolved: .*absent"):
        visits.run(outputs=TO_KINESIS, fields={"x": "absent"})
    with pytest.raises(WrongUse, match="was made for another rules"):
        visits.run(outputs=TO_KINESIS, fields={"page": "upper(page)"})
