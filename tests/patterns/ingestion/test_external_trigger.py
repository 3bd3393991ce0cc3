"""External Trigger: each event starts its workloads once, and none gets lost."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import requests
import yaml
from confluent_kafka import Consumer, KafkaError, TopicPartition
from pyspark.sql import SparkSession

from python_jobs.ingestion import external_trigger_http as external_trigger
from python_jobs.ingestion.airflow_client import Airflow
from python_jobs.ingestion.external_trigger_http import (
    Kafka,
    Parameters,
    Trigger,
    Workload,
    create_app,
    running_trigger,
)
from python_jobs.ingestion.run_registry import Run, RunRegistry
from python_jobs.ingestion.trigger_events import Event, Filter, Poison, read_envelope
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from services.kafka import Broker, Record
from services.processes import free_port
from tests.support.airflow_api import AirflowApi, running_airflow_api
from tests.support.pytest_ids import REPOSITORY
from tests.support.rows import assert_rows
from tests.support.service_process import service_process
from tests.support.snippets import snippets
from tests.support.topics import recreate

PAGE = "docs/ingestion.md"
HERE = "tests/patterns/ingestion/test_external_trigger.py"
SERVICE = "python_jobs.ingestion.external_trigger_http"
NOW = "2024-03-01T11:00:00+00:00"
JSON = {"Content-Type": "application/json"}


def record(
    key: str = "input/devices.json",
    type_: str = "ObjectCreated:Put",
    bucket: str = "data",
    sequencer: str = "1",
) -> dict[str, Any]:
    """Return one record as S3 sends it; the key is encoded already."""
    return {
        "eventVersion": "2.1",
        "eventSource": "aws:s3",
        "eventName": type_,
        "eventTime": "2024-03-01T10:59:58.000Z",
        "s3": {"bucket": {"name": bucket}, "object": {"key": key, "sequencer": sequencer}},
    }


def envelope(*records: dict[str, Any]) -> bytes:
    return json.dumps({"Records": list(records or [record()])}).encode()


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


class Handler:
    """A trigger with its registry in a folder of its own, as one process has it."""

    def __init__(self, folder: Path, *workloads: Workload) -> None:
        self.folder = folder
        self.parameters = Parameters(registry=str(folder / "registry"), workloads=list(workloads))

    @contextlib.contextmanager
    def running(self) -> Iterator[Trigger]:
        with running_trigger(self.parameters) as trigger:
            yield trigger


def shell(name: str, script: str, **changes: Any) -> Workload:
    """Return a workload that runs a shell script with the file to load as $1."""
    given = {"retry_seconds": 0, "command": ["sh", "-c", script, "sh", "{file_to_load}"]}
    return Workload(name=name, **given | changes)


def statuses(trigger: Trigger) -> dict[str, int]:
    return dict(Counter(str(run["status"]) for run in trigger.registry.runs()))


def finished(trigger: Trigger) -> bool:
    return trigger.active() == 0 and not {"queued", "running"} & statuses(trigger).keys()


# --- what an event says -----------------------------------------------------------------------------------


def test_keys_are_decoded_and_an_event_has_one_identity() -> None:
    (event,), poisons = read_envelope(envelope(record("input/my+file%2B1.json")))
    assert (event.key, event.type, event.time, poisons) == (
        "input/my file+1.json", "ObjectCreated:Put", "2024-03-01T10:59:58.000Z", [],
    )  # fmt: skip
    again, _ = read_envelope(envelope(record("other"), record("input/my+file%2B1.json")))
    assert again[1].id == event.id
    written_again, _ = read_envelope(envelope(record("input/my+file%2B1.json", sequencer="2")))
    assert written_again[0].id != event.id
    numbered = envelope(record("a"), record("b")).replace(b'"2.1"', b"12345678901234567890.10")
    assert ["12345678901234567890.10" in each.alone for each in read_envelope(numbered)[0]] == [True, True]
    minio, _ = read_envelope(envelope(record(type_="s3:ObjectCreated:Put")))
    assert minio[0].type == "ObjectCreated:Put"


@pytest.mark.parametrize(
    ("key", "bounds"),
    [
        ("visits/date%3D2024-03-01/hour%3D23/_SUCCESS", ("2024-03-01T23", "2024-03-02T00")),
        ("users/date=2024-02-29/part.json", ("2024-02-29T00", "2024-03-01T00")),
        ("visits/date=2024-13-01/hour=10/a.json", (None, None)),
        ("visits/date=2024-03-01/hour=24/a.json", (None, None)),
        ("visits/a.json", (None, None)),
        ("visits/date=9999-12-31/a.json", (None, None)),
        ("visits/date=9999-12-31/hour=23/a.json", (None, None)),
    ],
)
def test_the_folders_of_a_key_name_its_partition(key: str, bounds: tuple[str | None, str | None]) -> None:
    (event,), _ = read_envelope(envelope(record(key)))
    assert (event.values().get("partition_from"), event.values().get("partition_to")) == bounds


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"{nope", "the envelope is no JSON"),
        (b"", "the envelope is no JSON"),
        (b"\xff\xfe", "the envelope is no JSON"),
        (envelope(record()).replace(b'"2.1"', b"NaN"), "the envelope is no JSON in UTF-8: NaN is no JSON"),
        (envelope(record()).replace(b'"2.1"', b"-Infinity"), "the envelope is no JSON in UTF-8: -Infinity is no JSON"),
        (b"[1]", "the envelope has no list 'Records'"),
        (b'{"Records": [1]}', "a record can't be read"),
        (b'{"Records": [{"eventName": "ObjectCreated:Put", "s3": {"bucket": {"name": "b"}, "object": {}}}]}',
         "a record can't be read: no 'key'"),
        (envelope(record("visits/../../etc/passwd")), "leaves its folder"),
        (b'{"eventName": 1}', "the envelope has no list 'Records'"),
        (b"[" * 100_000, "the envelope has more than 64 levels"),
        (b"[" * 200 + b"]" * 200, "the envelope has more than 64 levels"),
        (b'{"Records": ' + b"[" * 500 + b"]" * 500 + b"}", "the envelope has more than 64 levels"),
        (b"1" * 10_000, "the envelope is no JSON"),
        (b"null", "the envelope has no list 'Records'"),
        (b'{"Records": {"eventName": 1}}', "the envelope has no list 'Records'"),
        (envelope(record()).replace(b"devices", b"\xff"), "the envelope is no JSON in UTF-8"),
        (envelope(record()).decode().encode("utf-16"), "the envelope is no JSON in UTF-8"),
        (envelope({"eventName": 1}), "a record can't be read: no 's3'"),
        (envelope(record(type_=1)), "eventName must be a text, got 1"),  # type: ignore[arg-type]
        (envelope(record(key=5)), "key must be a text, got 5"),  # type: ignore[arg-type]
        (envelope(record(key=None)), "key must be a text, got null"),  # type: ignore[arg-type]
        (envelope(record(key=["a"])), "key must be a text"),  # type: ignore[arg-type]
        (envelope(record(key="")), "key must be a text"),
        (envelope(record(bucket={})), "bucket must be a text"),  # type: ignore[arg-type]
        (envelope(record() | {"s3": []}), "a record can't be read"),
        (envelope(record() | {"s3": {"bucket": "b", "object": "o"}}), "a record can't be read"),
        (envelope(record() | {"eventTime": 7}), "eventTime must be a text, got 7"),
        (envelope(record(key="%FF")), "a record can't be read: 'utf-8' codec"),
        (envelope(record(key="\ud800")), "a record can't be read: 'utf-8' codec"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_a_dead_letter_and_the_next_event_runs(
    tmp_path: Path, body: bytes, error: str
) -> None:
    with Handler(tmp_path, shell("load", "exit 0")).running() as trigger:
        (dead_letter,) = trigger.handle(body).dead_letters
        assert create_app(trigger).test_client().post("/events", data=body, headers=JSON).status_code == 422
        assert trigger.handle(body).dead_letters == [dead_letter]  # delivered again
        (kept,) = trigger.registry.dead_letters()
        assert kept.id == dead_letter
        assert error in kept.error
        with pytest.raises(JobFailed, match="still can't be read"):
            trigger.replay(dead_letter)
        trigger.handle(envelope())
        until(lambda: finished(trigger))
        assert statuses(trigger) == {"succeeded": 1}


def test_an_envelope_of_many_records_is_kept_once_and_each_run_has_its_own_record(tmp_path: Path) -> None:
    records = [record(f"other/{number:04}", bucket="b" * 300) for number in range(2_000)]
    body = envelope(*records)
    with Handler(tmp_path, shell("load", "exit 0", max_active_runs=1, attempts=1)).running() as trigger:
        trigger._stopping.set()  # nothing starts
        assert len(trigger.handle(body).triggered) == 2_000
        assert len(trigger.handle(body).known) == 2_000
        stored = trigger.registry._connection.execute("select conf from runs order by rowid").fetchall()
        confs = [json.loads(row["conf"]) for row in stored]
        assert [json.loads(conf["event"]) for conf in confs] == [{"Records": [one]} for one in records]
        (envelope_id,) = {conf["envelope_id"] for conf in confs}
        client = create_app(trigger).test_client()
        assert client.get(f"/envelopes/{envelope_id}").data == body
        assert client.get("/envelopes/unknown").status_code == 404
        assert sum(len(row["conf"]) for row in stored) < 4 * len(body)


def test_what_succeeded_is_forgotten_after_the_retention_and_dead_letters_are_not(tmp_path: Path) -> None:
    script = '[ "$1" != bad ] || exit 3'
    with Handler(tmp_path, shell("load", script)).running() as trigger:
        good = trigger.handle(envelope(record("good"))).triggered
        bad = trigger.handle(envelope(record("bad"))).triggered
        unread = trigger.handle(b"{nope").dead_letters
        until(lambda: finished(trigger))
        folders = tmp_path / "registry" / "runs"
        assert {folder.name for folder in folders.iterdir()} == {*good, *bad}
        now = dt.datetime.now(dt.UTC)
        trigger.prune(now + dt.timedelta(days=89.9))
        assert [run["run_id"] for run in trigger.registry.runs()] == good + bad
        trigger.prune(now + dt.timedelta(days=90.1))
        assert [run["run_id"] for run in trigger.registry.runs()] == bad
        assert {folder.name for folder in folders.iterdir()} == set(bad)
        assert [letter.id for letter in trigger.registry.dead_letters()] == bad + unread
        kept = trigger.registry._connection.execute("select body from envelopes").fetchall()
        assert [row["body"] for row in kept] == [envelope(record("bad")).decode()]
        # Its memory is gone: what is delivered again so late runs again.
        assert trigger.handle(envelope(record("good"))).triggered == good
        until(lambda: finished(trigger))


def test_a_dead_letter_that_can_be_read_by_now_runs_once(tmp_path: Path) -> None:
    with Handler(tmp_path, shell("load", "exit 0")).running() as trigger:
        trigger.registry.accept([], [Poison("p1", envelope(), "what an older version could not read")], NOW)
        (run_id,) = trigger.replay("p1")
        assert trigger.replay("p1") == []
        until(lambda: finished(trigger))
        assert [run["run_id"] for run in trigger.registry.runs()] == [run_id]
        assert trigger.registry.dead_letters() == []


# --- which events run, and as what ------------------------------------------------------------------------


def test_other_types_buckets_and_names_are_ignored_and_acknowledged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = Filter(type="s3:ObjectCreated:*", bucket="data", prefix="input/", suffix=".json")
    others = [
        record(type_="ObjectRemoved:Delete"),
        record(bucket="other"),
        record("output/devices.json"),
        record("input/devices.csv"),
    ]
    with (
        Handler(tmp_path, shell("load", "exit 0", when=wanted)).running() as trigger,
        caplog.at_level("INFO"),
    ):
        answer = create_app(trigger).test_client().post("/events", data=envelope(*others), headers=JSON)
        assert (answer.status_code, answer.json["ignored"], answer.json["triggered"]) == (202, 4, [])
        assert trigger.registry.runs() == trigger.registry.dead_letters() == []
        assert "ignored ObjectRemoved:Delete of input/devices.json in data" in caplog.text
        assert trigger.handle(b'{"Service": "Amazon S3", "Event": "s3:TestEvent"}').dead_letters == []
        assert len(trigger.handle(envelope()).triggered) == 1


def test_a_run_gets_its_context_and_a_redelivered_event_no_second_run(tmp_path: Path) -> None:
    workload = Workload(name="load", command=["cp", "{conf_file}", str(tmp_path / "got.json")])
    with Handler(tmp_path, workload).running() as trigger:
        body = envelope(record("input/my+file.json"))
        (run_id,) = trigger.handle(body, now=NOW).triggered
        until(lambda: finished(trigger))
        conf = json.loads((tmp_path / "got.json").read_text())
        assert trigger.registry.envelope(conf.pop("envelope_id")) == body.decode()
        assert conf.pop("trigger").keys() == {"function_name", "function_version", "request_id"}
        assert conf == {
            "event": body.decode(),
            "event_type": "ObjectCreated:Put",
            "bucket": "data",
            "file_to_load": "input/my file.json",
            "event_time": "2024-03-01T10:59:58.000Z",
            "processing_time": NOW,
            "values": {"bucket": "data", "file_to_load": "input/my file.json"},
        }
        again = trigger.handle(envelope(record("x", bucket="none"), record("input/my+file.json")))
        assert (again.known, len(again.triggered)) == ([run_id], 1)
        until(lambda: finished(trigger))
        assert [run["attempts"] for run in trigger.registry.runs()] == [1, 1]


def test_every_record_of_an_envelope_runs_and_one_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    script = f'[ "$1" != b ] || exit 3; echo "$1" >> {tmp_path}/loaded'
    with Handler(tmp_path, shell("load", script)).running() as trigger:
        outcome = trigger.handle(envelope(record("a"), {"eventName": "broken"}, record("b"), record("c")))
        assert (len(outcome.triggered), len(outcome.dead_letters)) == (3, 1)
        until(lambda: finished(trigger))
        assert sorted((tmp_path / "loaded").read_text().split()) == ["a", "c"]
        assert statuses(trigger) == {"succeeded": 2, "dead": 1}
        assert {letter.id for letter in trigger.registry.dead_letters()} == {
            outcome.triggered[1], outcome.dead_letters[0],
        }  # fmt: skip


def test_one_event_starts_each_subscribed_workload_and_each_is_retried_alone(tmp_path: Path) -> None:
    (tmp_path / "down").touch()
    flaky = f"echo try >> {tmp_path}/tries; [ $(wc -l < {tmp_path}/tries) -ge 3 ]"
    workloads = [
        shell("reports", "exit 0"),
        shell("search", flaky, attempts=3),
        shell("archive", f"[ ! -e {tmp_path}/down ] || (echo no disk >&2; exit 1)", attempts=2),
        shell("strict", "echo refused >&2; exit 3", attempts=5),
    ]
    with Handler(tmp_path, *workloads).running() as trigger:
        assert len(trigger.handle(envelope()).triggered) == 4
        until(lambda: finished(trigger))
        runs = [
            (run["workload"], run["status"], run["attempts"], run["error"]) for run in trigger.registry.runs()
        ]
        assert runs == [
            ("reports", "succeeded", 1, None),
            ("search", "succeeded", 3, None),
            ("archive", "dead", 2, "exit code 1: no disk"),
            ("strict", "dead", 1, "exit code 3: refused"),  # refused data is no matter of trying again
        ]
        (tmp_path / "down").unlink()
        archive = trigger.registry.dead_letters()[0].id
        assert (trigger.replay(archive), trigger.replay("unknown")) == ([archive], [])
        until(lambda: finished(trigger))
        assert statuses(trigger) == {"succeeded": 3, "dead": 1}
        assert trigger.replay(archive) == []


def test_at_most_five_run_at_a_time_and_a_failure_blocks_nobody(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = (
        f"echo start >> {log}; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; echo end >> {log}; "
        '[ "$1" != input/0 ]'
    )
    with Handler(tmp_path, shell("load", script, max_active_runs=5, attempts=1)).running() as trigger:
        for number in range(7):
            trigger.handle(envelope(record(f"input/{number}")))
        until(lambda: log.exists() and log.read_text().count("start") == 5)
        assert (trigger.active(), statuses(trigger)) == (5, {"running": 5, "queued": 2})
        (tmp_path / "go").touch()
        until(lambda: finished(trigger))
        assert statuses(trigger) == {"succeeded": 6, "dead": 1}
    active = highest = 0
    for line in log.read_text().split():
        active += 1 if line == "start" else -1
        highest = max(highest, active)
    assert (highest, log.read_text().count("end")) == (5, 7)


def test_a_release_on_tuesday_is_one_run_in_seven_days_and_nothing_polls(tmp_path: Path) -> None:
    threads, children = threading.active_count(), psutil.Process().children()
    with Handler(tmp_path, shell("refresh", f"echo run >> {tmp_path}/runs")).running() as trigger:
        monday = dt.datetime(2024, 3, 4, 9, tzinfo=dt.UTC)
        for day in range(7):
            if day == 1:
                trigger.handle(
                    envelope(record("features/release-7.json")), (monday + dt.timedelta(day)).isoformat()
                )
            until(lambda: finished(trigger))
            assert threading.active_count() == threads  # what ran has ended, and nothing waits
            assert psutil.Process().children() == children
        assert (tmp_path / "runs").read_text().split() == ["run"]


def test_a_command_that_cannot_run_is_a_dead_letter(tmp_path: Path) -> None:
    partition = Workload(name="partition", command=["echo", "--from={partition_from}"])
    missing = Workload(name="missing", command=["no-such-program"])
    slow = shell("slow", "sleep 60", timeout_seconds=0.1, attempts=1)
    with Handler(tmp_path, partition, missing, slow).running() as trigger:
        trigger.handle(envelope(record("input/a;echo $HOME `id`")))
        until(lambda: finished(trigger))
        errors = {str(run["workload"]): str(run["error"]) for run in trigger.registry.runs()}
    assert errors["partition"].startswith(
        "the command names {partition_from}, which input/a;echo $HOME `id` in data"
    )
    assert errors["missing"].startswith("FileNotFoundError")
    assert errors["slow"] == "ended after 0.1 s"


def test_what_an_event_says_is_neither_expanded_nor_a_shell_s(tmp_path: Path) -> None:
    key = "$HOME/`id`;{bucket} --x"
    workload = Workload(name="w", command=["$HOME/bin", "--file={file_to_load}", "{{}}"])
    event = Event("e", "ObjectCreated:Put", "b", key, NOW)
    conf = external_trigger._conf(event, "e", NOW, "r")
    command = external_trigger.command_of(workload, Run("r1", "w", conf), tmp_path / "c")
    assert command == [f"{os.environ['HOME']}/bin", f"--file={key}", "{}"]


# --- Airflow ----------------------------------------------------------------------------------------------


@pytest.fixture
def airflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[AirflowApi]:
    monkeypatch.setenv("AIRFLOW_USER", "trigger")
    monkeypatch.setenv("AIRFLOW_PASSWORD", "pa55word")
    with running_airflow_api({"devices-loader"}, {"trigger": "pa55word"}) as api:
        yield api


def dag(api: AirflowApi, name: str = "devices-loader") -> Workload:
    client = Airflow(api.url, name, user_env="AIRFLOW_USER", password_env="AIRFLOW_PASSWORD")
    return Workload(name="devices", airflow=client, attempts=2, retry_seconds=0)


def test_a_dag_run_is_named_by_the_event_and_existing_is_success(tmp_path: Path, airflow: AirflowApi) -> None:
    handler = Handler(tmp_path / "a", dag(airflow))
    with handler.running() as trigger:
        (run_id,) = trigger.handle(envelope(), now=NOW).triggered
        until(lambda: finished(trigger))
        assert statuses(trigger) == {"succeeded": 1}
    assert run_id.startswith("External-devices-")
    assert airflow.runs.keys() == {run_id}
    assert airflow.runs[run_id]["dag_id"] == "devices-loader"
    assert airflow.runs[run_id]["conf"]["file_to_load"] == "input/devices.json"
    assert airflow.runs[run_id]["conf"]["processing_time"] == NOW
    # A trigger that lost its memory meets the run in Airflow: 409.
    with Handler(tmp_path / "b", dag(airflow)).running() as trigger:
        trigger.handle(envelope())
        until(lambda: finished(trigger))
        assert statuses(trigger) == {"succeeded": 1}
    assert (airflow.requests, len(airflow.runs)) == (2, 1)


@pytest.mark.parametrize("failure", ["500", "refuses", "times out"])
def test_an_orchestrator_that_fails_keeps_the_event_and_a_replay_runs_it_once(
    tmp_path: Path, airflow: AirflowApi, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = airflow.url
    workload = dag(airflow)
    if failure == "500":
        airflow.fails_with = 500
    elif failure == "refuses":
        object.__setattr__(workload.airflow, "url", f"http://127.0.0.1:{free_port()}")
    else:
        post = requests.post

        def late(*arguments: Any, **keywords: Any) -> Any:
            post(*arguments, **keywords)  # it did arrive: only the answer is lost
            raise requests.ReadTimeout

        monkeypatch.setattr(requests, "post", late)
    with Handler(tmp_path, workload).running() as trigger:
        trigger.handle(envelope())
        until(lambda: finished(trigger))
        (kept,) = trigger.registry.dead_letters()
        expected = {"500": "Airflow answered 500 to POST /api/v2/dags/devices-loader/dagRuns"}
        assert expected.get(failure, "gave no answer") in kept.error
        assert trigger.registry.runs()[0]["attempts"] == 2

        monkeypatch.undo()
        monkeypatch.setenv("AIRFLOW_USER", "trigger")
        monkeypatch.setenv("AIRFLOW_PASSWORD", "pa55word")
        airflow.fails_with = None
        object.__setattr__(workload.airflow, "url", url)
        client = create_app(trigger).test_client()
        answers = [client.post(f"/dead-letters/{kept.id}/replay").json["triggered"] for _ in range(2)]
        assert answers == [[kept.id], []]
        until(lambda: finished(trigger))
        assert statuses(trigger) == {"succeeded": 1}
    assert airflow.runs.keys() == {kept.id}


@pytest.mark.parametrize(
    ("status", "body", "attempts"),
    [(302, b"", 1), (404, b"", 1), (408, b"", 2), (522, b"", 2), (200, b"<html>", 2), (200, b"{}", 2)],
)
def test_an_answer_that_is_not_airflow_s_is_classified(
    tmp_path: Path,
    airflow: AirflowApi,
    status: int,
    body: bytes,
    attempts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A redirect is not followed: it would make a GET of the request, whose 200 starts nothing."""

    def answer(*_: Any, allow_redirects: bool, **__: Any) -> requests.Response:
        assert not allow_redirects
        given = requests.Response()
        given.status_code, given._content = status, body
        return given

    monkeypatch.setattr(requests, "post", answer)
    with Handler(tmp_path, dag(airflow)).running() as trigger:
        trigger.handle(envelope())
        until(lambda: finished(trigger))
        (run,) = trigger.registry.runs()
        assert (run["status"], run["attempts"]) == ("dead", attempts)


def test_wrong_credentials_keep_the_event_and_are_never_shown(
    tmp_path: Path, airflow: AirflowApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AIRFLOW_PASSWORD", "wrong-pa55word")
    with Handler(tmp_path, dag(airflow)).running() as trigger, caplog.at_level("DEBUG"):
        trigger.handle(envelope())
        until(lambda: finished(trigger))
        monkeypatch.delenv("AIRFLOW_PASSWORD")
        trigger.handle(envelope(record(sequencer="2")))
        until(lambda: finished(trigger))
        errors = [letter.error for letter in trigger.registry.dead_letters()]
        assert [run["attempts"] for run in trigger.registry.runs()] == [1, 1]
    assert errors == [
        "Airflow answered 401 to POST /auth/token",
        "environment variable AIRFLOW_PASSWORD is not set",
    ]
    stored = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert "pa55word" not in caplog.text
    assert b"pa55word" not in stored


# --- HTTP -------------------------------------------------------------------------------------------------


def test_the_http_form_takes_envelopes_and_gives_dead_letters_out(tmp_path: Path) -> None:
    with Handler(tmp_path, shell("load", "exit 2")).running() as trigger:
        client = create_app(trigger, token="s3cret").test_client()
        assert client.post("/events", data=envelope(), headers=JSON).status_code == 401
        assert trigger.registry.runs() == []
        right = JSON | {"Authorization": "Bearer s3cret"}
        answer = client.post("/events", data=envelope(), headers=right)
        assert (answer.status_code, len(answer.json["triggered"])) == (202, 1)
        refused = client.post("/events", data=b"{nope", headers=right)
        assert (refused.status_code, len(refused.json["dead_letters"])) == (422, 1)
        assert refused.json["errors"][0].startswith(
            "the envelope is no JSON in UTF-8: Expecting property name"
        )
        assert client.post("/events", data=b"x" * 1_000_001, headers=right).status_code == 413
        until(lambda: finished(trigger))
        listed = client.get("/dead-letters", headers=right).json
        assert sorted(letter["error"][:11] for letter in listed) == ["exit code 2", "the envelop"]
        assert [run["status"] for run in client.get("/runs", headers=right).json] == ["dead"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 202),
        ({"Content-Type": "application/json; charset=utf-8"}, 202),
        ({"Host": "localhost:8123"}, 202),
        ({"Host": "127.0.0.1:8123"}, 202),
        ({"Host": "[::1]:8123"}, 202),
        ({"Sec-Fetch-Site": "none"}, 202),
        ({"Host": "rebound.example.org:8123"}, 403),
        ({"Host": "127.0.0.1.example.org"}, 403),
        ({"Origin": "https://example.org"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:8123"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data"}, 415),
    ],
)
def test_a_page_in_a_browser_of_this_machine_starts_nothing(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    with Handler(tmp_path, shell("load", "exit 0")).running() as trigger:
        client = create_app(trigger).test_client()
        assert client.post("/events", data=envelope(), headers=JSON | headers).status_code == status
        until(lambda: finished(trigger))
        assert statuses(trigger) == ({"succeeded": 1} if status == 202 else {})
        replayed = client.post("/dead-letters/none/replay", headers=headers).status_code
        assert replayed == (202 if status == 202 else status)


def test_a_token_lets_other_hosts_in_but_no_web_page(tmp_path: Path) -> None:
    with Handler(tmp_path, shell("load", "exit 0")).running() as trigger:
        client = create_app(trigger, token="s3cret").test_client()
        right = JSON | {"Authorization": "Bearer s3cret", "Host": "trigger.example.org"}
        assert client.get("/runs", headers=right).status_code == 200
        assert client.get("/runs", headers=right | {"Origin": "https://example.org"}).status_code == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.7", "trigger.example.org"])
def test_an_address_that_others_reach_needs_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        WrongUse, match=rf"^host '{host}' is reachable from other machines: name .* token_env"
    ):
        Parameters(registry="r", workloads=[shell("a", "")], host=host)
    monkeypatch.setenv("TRIGGER_TOKEN", "s3cret")
    Parameters(registry="r", workloads=[shell("a", "")], host=host, token_env="TRIGGER_TOKEN")
    for loopback in ("127.0.0.1", "::1", "localhost"):
        Parameters(registry="r", workloads=[shell("a", "")], host=loopback)


def test_an_event_that_cannot_be_kept_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError("no space left on device")

    with Handler(tmp_path, shell("load", "exit 0")).running() as trigger:
        monkeypatch.setattr(RunRegistry, "accept", full)
        assert (
            create_app(trigger).test_client().post("/events", data=envelope(), headers=JSON).status_code
            == 500
        )


# --- the process ------------------------------------------------------------------------------------------


@pytest.mark.kill
def test_a_lost_worker_loses_no_event_and_never_runs_one_twice_at_a_time(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f"echo start >> {log}; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; echo end >> {log}"
    config = tmp_path / "trigger.yml"
    config.write_text(
        yaml.safe_dump(
            {
                "registry": str(tmp_path / "registry"),
                "port": 0,
                "workloads": [{"name": "load", "max_active_runs": 1, "command": ["sh", "-c", script]}],
            }
        )
    )
    with service_process(SERVICE, config) as (process, url):
        for number in ("1", "2"):
            assert (
                requests.post(
                    f"{url}/events", envelope(record(sequencer=number)), headers=JSON, timeout=10
                ).status_code
                == 202
            )
        until(log.exists)
        children = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
    assert len(children) == 1
    assert children[0].is_running()  # the orphan goes on

    with service_process(SERVICE, config) as (_, url):
        queued = requests.get(f"{url}/runs", timeout=10).json()
        assert Counter(run["status"] for run in queued) == {"running": 1, "queued": 1}
        assert log.read_text().split() == ["start"]  # the run waits for its orphan
        (tmp_path / "go").touch()
        until(
            lambda: {run["status"] for run in requests.get(f"{url}/runs", timeout=10).json()} == {"succeeded"}
        )
        assert (
            requests.post(f"{url}/events", envelope(record()), headers=JSON, timeout=10).json()["triggered"]
            == []
        )
    assert log.read_text().split() == ["start", "end"] * 3  # the orphan, its run again, the other event


def test_a_stopped_trigger_takes_up_its_runs_and_two_on_one_registry_are_refused(tmp_path: Path) -> None:
    script = f"echo start >> {tmp_path}/log; [ -e {tmp_path}/go ] || sleep 60"
    handler = Handler(tmp_path, shell("load", script))
    with handler.running() as trigger:
        trigger.handle(envelope())
        until((tmp_path / "log").exists)
        with pytest.raises(JobFailed, match="another trigger works on"), handler.running():
            pass
    (tmp_path / "go").touch()
    with handler.running() as trigger:
        until(lambda: finished(trigger))
        assert statuses(trigger) == {"succeeded": 1}


# --- Kafka ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def consuming(trigger: Trigger, kafka: Kafka) -> Iterator[None]:
    stopping, (consumer, watched) = threading.Event(), external_trigger.consumer_of(kafka)
    thread = threading.Thread(target=external_trigger.consume, args=(consumer, watched, trigger, stopping))
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def committed(kafka: Kafka) -> int:
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": kafka.group})
    try:
        return int(consumer.committed([TopicPartition(kafka.topic, 0)], timeout=10)[0].offset)
    finally:
        consumer.close()


@pytest.mark.kafka
def test_messages_are_committed_after_they_are_kept(
    tmp_path: Path, broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka = Kafka(broker.bootstrap_servers, topic)
    broker.produce(topic, [Record(envelope()), Record(b"{nope"), Record(envelope(record("a"), record("b")))])
    with Handler(tmp_path, shell("load", "exit 0")).running() as trigger:
        with monkeypatch.context() as patch:
            # A process that dies between the registry and the commit.
            patch.setattr(
                external_trigger, "Consumer", type("Dying", (Consumer,), {"commit": lambda *a, **k: None})
            )
            with consuming(trigger, kafka):
                until(lambda: len(trigger.registry.runs()) == 3)
        assert committed(kafka) < 0
        with consuming(trigger, kafka):
            until(lambda: committed(kafka) == 3)
            until(lambda: finished(trigger))
        assert statuses(trigger) == {"succeeded": 3}
        assert [run["attempts"] for run in trigger.registry.runs()] == [1, 1, 1]
        assert len(trigger.registry.dead_letters()) == 1


@pytest.mark.kafka
def test_a_recreated_topic_ends_the_program_and_another_group_reads_it_from_its_first_message(
    tmp_path: Path, broker: Broker, topic: str
) -> None:
    kafka = Kafka(broker.bootstrap_servers, topic)
    broker.produce(topic, [Record(envelope(record("a")))] * 2)
    stopping, (consumer, old) = threading.Event(), external_trigger.consumer_of(kafka)
    refused = f"the topic {topic} was deleted and recreated: .* run again with another group"
    with Handler(tmp_path, shell("load", "exit 0")).running() as trigger:
        recreate(broker, topic, [Record(envelope(record(sequencer=f"{number}"))) for number in range(3)])
        with pytest.raises(DataRefused, match=refused):
            external_trigger.consume(consumer, old, trigger, stopping)
        assert trigger.registry.runs() == []
        # As if the topic had been recreated between the check and the commit.
        with contextlib.closing(
            Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": kafka.group})
        ) as client:
            client.commit(offsets=[old.position(topic, 0, 2)], asynchronous=False)
        with pytest.raises(DataRefused, match=refused):
            external_trigger.consumer_of(kafka)
        with consuming(trigger, replace(kafka, group="another")):
            until(lambda: len(trigger.registry.runs()) == 3)


class Messages:
    """A consumer that gives each of some bodies, or errors, once."""

    def __init__(self, *given: bytes | KafkaError) -> None:
        self.given, self.commits, self.closed = list(given), 0, False

    def poll(self, _: float) -> Any:
        if not self.given:
            return None
        first = self.given.pop(0)
        is_error = isinstance(first, KafkaError)
        return SimpleNamespace(
            error=lambda: first if is_error else None,
            value=lambda: None if is_error else first,
            partition=lambda: 0,
            offset=lambda: 0,
        )

    def commit(self, **_: Any) -> None:
        self.commits += 1

    def close(self) -> None:
        self.closed = True


UNWATCHED = SimpleNamespace(topic="t", require_unchanged=lambda: None, position=TopicPartition)


def test_malformed_messages_are_kept_and_the_consumer_goes_on(tmp_path: Path) -> None:
    messages = Messages(
        KafkaError(KafkaError._TRANSPORT), b'{"eventName":1}', b"[" * 100_000, envelope(record(key=5)),  # type: ignore[arg-type]
        envelope(),
    )  # fmt: skip
    stopping = threading.Event()
    with Handler(tmp_path, shell("load", "exit 0")).running() as trigger:
        arguments: Any = (messages, UNWATCHED, trigger, stopping)
        thread = threading.Thread(target=external_trigger.consume, args=arguments)
        thread.start()
        until(lambda: messages.commits == 4)
        stopping.set()
        thread.join()
        until(lambda: finished(trigger))
        assert statuses(trigger) == {"succeeded": 1}
        assert len(trigger.registry.dead_letters()) == 3


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), "reading from Kafka has ended: Kafka: "),
        (b"", "reading from Kafka has ended: OSError: no space left on device"),
    ],
)
def test_a_consumer_that_ends_ends_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, sentence: str
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError("no space left on device")

    messages = Messages(fault)
    monkeypatch.setattr(external_trigger, "consumer_of", lambda kafka: (messages, UNWATCHED))
    monkeypatch.setattr(RunRegistry, "accept", full)
    parameters = Parameters(
        registry=str(tmp_path), workloads=[shell("a", "")], port=0, kafka=Kafka("127.0.0.1:1", "t")
    )
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(JobFailed, match=sentence):
            external_trigger.serve(parameters)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (messages.commits, messages.closed) == (0, True)


@pytest.mark.kafka
def test_a_broker_that_is_down_or_a_topic_that_is_missing_is_one_sentence(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WrongUse, match=r"topic 'no_such_topic' can't be read: .*[Uu]nknown topic"):
        external_trigger.consumer_of(Kafka(broker.bootstrap_servers, "no_such_topic"))
    monkeypatch.setattr(external_trigger, "KAFKA_ANSWER_SECONDS", 0.5)
    with pytest.raises(NotReady, match="Kafka doesn't answer"):
        external_trigger.consumer_of(Kafka(f"127.0.0.1:{free_port()}", "visits"))


# --- the configuration ------------------------------------------------------------------------------------


def test_the_configuration_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, event = snippets(PAGE, f"{HERE}::test_the_configuration_of_the_page")
    monkeypatch.setenv("LAKEHOUSE_ROOT", "/lakehouse")
    (tmp_path / "trigger.yml").write_text(config)
    parameters, _ = parse_parameters(
        Parameters, ["--config", str(tmp_path / "trigger.yml"), "--registry", "r"]
    )
    load, report, orchestrated = parameters.workloads
    ((happened,), _) = read_envelope(event.encode())
    assert [workload.when.accepts(happened) for workload in parameters.workloads] == [True, True, True]
    conf = external_trigger._conf(happened, "e", NOW, "r")
    commands = [
        external_trigger.command_of(w, Run("run", w.name, conf), tmp_path / "c") for w in (load, report)
    ]
    assert commands == [
        ["spark-submit", "python_jobs/ingestion/incremental_loader.py", "--source=landing/visits",
         "--target=/lakehouse/bronze/bronze_visits", "--from=2024-03-01T10", "--to=2024-03-01T11"],
        ["dbt", "build", "--select", "source:bronze.bronze_visits+"],
    ]  # fmt: skip
    assert orchestrated.airflow == Airflow(
        "http://localhost:8080", "devices-loader", "AIRFLOW_USER", "AIRFLOW_PASSWORD"
    )
    assert parameters.kafka == Kafka("localhost:9092", "notifications")


def test_wrong_configurations_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(sentence: str, **changes: Any) -> None:
        with pytest.raises(WrongUse, match=sentence):
            Workload(**{"name": "w", "command": ["true"]} | changes)

    refused("needs either command or airflow", command=None)
    refused("names {bukket}; allowed are bucket, conf_file, file_to_load", command=["{bukket}"])
    refused(r"names \$NO_SUCH_VARIABLE, which is not set", command=["$NO_SUCH_VARIABLE/x"])
    refused(r"attempts of workload \S+ must be 1 or more, got 0", attempts=0)
    with pytest.raises(WrongUse, match="workloads must have one name each, all different"):
        Parameters(registry="r", workloads=[shell("a", ""), shell("a", "")])
    with pytest.raises(WrongUse, match="environment variable NO_TOKEN, which token_env names, is not set"):
        Parameters(registry="r", workloads=[shell("a", "")], token_env="NO_TOKEN")
    refused(r"timeout_seconds of workload w must be above 0, got nan", timeout_seconds=math.nan)
    refused(r"retry_seconds of workload w must be 0 or more, got nan", retry_seconds=math.nan)
    for days in (-1.0, math.nan, math.inf):
        with pytest.raises(WrongUse, match=f"retention_days must be between 0 and 36500, got {days:g}"):
            Parameters(registry="r", workloads=[shell("a", "")], retention_days=days)
    old = RunRegistry(tmp_path / "runs.sqlite")
    old._connection.execute("pragma user_version = 9")
    old.close()
    with pytest.raises(WrongUse, match="has format 9; this program writes format 2"):
        RunRegistry(tmp_path / "runs.sqlite")


def test_a_registry_of_format_1_keeps_its_runs(tmp_path: Path) -> None:
    file = tmp_path / "registry" / "runs.sqlite"
    new = RunRegistry(file)
    new._connection.executescript(
        "alter table runs drop column envelope_id; drop table envelopes; pragma user_version = 1;"
    )
    new._connection.execute(
        "insert into runs (run_id, workload, conf, status, queued_at) values (?, 'load', ?, 'queued', ?)",
        ["r1", external_trigger._conf(Event("e", "ObjectCreated:Put", "b", "k", NOW), "e", NOW, "r"), NOW],
    )
    new.close()
    with Handler(tmp_path, shell("load", "exit 0")).running() as trigger:
        assert len(trigger.handle(envelope()).triggered) == 1
        until(lambda: finished(trigger))
        assert statuses(trigger) == {"succeeded": 2}


# --- the case study ---------------------------------------------------------------------------------------


@pytest.mark.end_to_end
def test_a_new_landing_folder_loads_that_partition_only(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event's own folder is loaded by a real spark-submit, once, whatever else has landed."""
    for hour in ("09", "10", "11"):
        folder = tmp_path / "landing" / "visits" / "date=2024-03-01" / f"hour={hour}"
        folder.mkdir(parents=True)
        (folder / "visits.json").write_text(f"{hour}\n")
    monkeypatch.setenv("LAKEHOUSE_ROOT", str(tmp_path / "lakehouse"))
    config = (REPOSITORY / "conf" / "jobs" / "external_trigger_visits.yml").read_text()
    (tmp_path / "trigger.yml").write_text(config.replace("landing/visits", f"{tmp_path}/landing/visits"))
    flags = ["--config", str(tmp_path / "trigger.yml"), "--registry", str(tmp_path / "registry")]
    parameters, _ = parse_parameters(Parameters, flags)
    marker = record("visits/date%3D2024-03-01/hour%3D10/_SUCCESS", bucket="landing")
    data = record("visits/date%3D2024-03-01/hour%3D11/visits.json", bucket="landing")
    with running_trigger(parameters) as trigger:
        outcome = trigger.handle(envelope(data, marker))
        assert (len(outcome.triggered), outcome.ignored) == (1, 1)
        assert trigger.handle(envelope(marker)).triggered == []
        until(lambda: finished(trigger), seconds=120)
        assert statuses(trigger) == {"succeeded": 1}, trigger.registry.runs()
    bronze = spark.read.format("delta").load(str(tmp_path / "lakehouse" / "bronze" / "bronze_visits"))
    assert_rows(bronze.select("payload", "hour"), [("10", 10)])
