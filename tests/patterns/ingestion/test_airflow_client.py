"""The client of Airflow's API alone: what it sends, and what it says of each answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests

from python_jobs.ingestion.airflow_client import Airflow, TriggerFailed
from services.processes import free_port
from tests.support.airflow_api import AirflowApi, running_airflow_api


@pytest.fixture(scope="module")
def server() -> Iterator[AirflowApi]:
    with running_airflow_api({"load", "load & clean"}, {"trigger": "pa55word"}) as api:
        yield api


@pytest.fixture
def airflow(server: AirflowApi, monkeypatch: pytest.MonkeyPatch) -> AirflowApi:
    monkeypatch.setenv("AIRFLOW_USER", "trigger")
    monkeypatch.setenv("AIRFLOW_PASSWORD", "pa55word")
    server.runs.clear()
    server.users, server.fails_with, server.requests = {"trigger": "pa55word"}, None, 0
    return server


def client(api: AirflowApi, dag: str = "load", **changes: Any) -> Airflow:
    return Airflow(
        **{"url": api.url, "dag": dag, "user_env": "AIRFLOW_USER", "password_env": "AIRFLOW_PASSWORD"}
        | changes
    )


def test_a_run_is_started_under_its_name_with_its_context(airflow: AirflowApi) -> None:
    client(airflow).trigger("run-1", {"file_to_load": "a.json"})
    assert airflow.runs == {
        "run-1": {
            "dag_id": "load",
            "dag_run_id": "run-1",
            "logical_date": None,
            "conf": {"file_to_load": "a.json"},
        }
    }
    client(airflow).trigger("run-1", {})  # 409, a success
    assert airflow.requests == 2
    assert airflow.runs["run-1"]["conf"] == {"file_to_load": "a.json"}


def test_the_name_of_a_dag_is_one_part_of_the_path(airflow: AirflowApi) -> None:
    client(airflow, "load & clean").trigger("run-1", {})
    assert airflow.runs["run-1"]["dag_id"] == "load & clean"
    with pytest.raises(TriggerFailed) as failed:
        client(airflow, "a/b").trigger("run-2", {})
    assert str(failed.value) == "Airflow answered 404 to POST /api/v2/dags/a%2Fb/dagRuns"
    assert not failed.value.transient


@pytest.mark.parametrize("absent", ["user_env", "password_env"])
def test_without_both_credentials_no_token_is_requested(airflow: AirflowApi, absent: str) -> None:
    airflow.users = {}
    client(airflow, **{absent: None}).trigger("run-1", {})
    assert airflow.runs.keys() == {"run-1"}


@pytest.mark.parametrize("name", ["AIRFLOW_USER", "AIRFLOW_PASSWORD"])
def test_a_missing_variable_is_named(airflow: AirflowApi, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(TriggerFailed) as failed:
        client(airflow).trigger("run-1", {})
    assert str(failed.value) == f"environment variable {name} is not set"
    assert not failed.value.transient


@pytest.mark.parametrize(("status", "transient"), [(500, True), (503, True), (400, False), (422, False)])
def test_an_answer_says_whether_a_retry_can_succeed(
    airflow: AirflowApi, status: int, transient: bool
) -> None:
    airflow.fails_with = status
    with pytest.raises(TriggerFailed) as failed:
        client(airflow).trigger("run-1", {})
    assert str(failed.value) == f"Airflow answered {status} to POST /api/v2/dags/load/dagRuns"
    assert failed.value.transient is transient


def test_wrong_credentials_are_refused_once(airflow: AirflowApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_PASSWORD", "wrong")
    with pytest.raises(TriggerFailed) as failed:
        client(airflow).trigger("run-1", {})
    assert str(failed.value) == "Airflow answered 401 to POST /auth/token"
    assert not failed.value.transient
    assert airflow.requests == 0


def test_a_server_that_is_away_can_come_back(airflow: AirflowApi) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(TriggerFailed) as failed:
        client(airflow, url=url).trigger("run-1", {})
    assert str(failed.value) == f"Airflow at {url} gave no answer (ConnectionError)"
    assert failed.value.transient


@pytest.mark.parametrize("content", [b"<html>", b"{}", b"[]", b"null"])
def test_an_answer_without_a_token_is_worth_a_retry(
    airflow: AirflowApi, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def answer(url: str, **options: Any) -> requests.Response:
        asked.append({"url": url.removeprefix(airflow.url), **options})
        given = requests.Response()
        given.status_code, given._content = 200, content
        return given

    monkeypatch.setattr(requests, "post", answer)
    with pytest.raises(TriggerFailed) as failed:
        client(airflow).trigger("run-1", {})
    assert str(failed.value) == "Airflow's answer to POST /auth/token holds no access_token"
    assert failed.value.transient
    assert asked == [
        {
            "url": "/auth/token", "json": {"username": "trigger", "password": "pa55word"}, "headers": {},
            "timeout": 30, "allow_redirects": False,
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "accepted"), [(200, True), (201, True), (204, False), (302, False), (409, True)]
)
def test_the_statuses_of_a_started_run(
    airflow: AirflowApi, status: int, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = requests.Response()
    given.status_code = status
    monkeypatch.setattr(requests, "post", lambda *_, **__: given)
    alone = client(airflow, user_env=None)
    if accepted:
        alone.trigger("run-1", {})
    else:
        with pytest.raises(TriggerFailed, match=f"Airflow answered {status} to POST"):
            alone.trigger("run-1", {})


@pytest.mark.parametrize(("status", "accepted"), [(200, True), (201, True), (409, False)])
def test_the_statuses_of_a_token(
    airflow: AirflowApi, status: int, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(url: str, *, headers: dict[str, str], **_: Any) -> requests.Response:
        given = requests.Response()
        given.status_code, given._content = status, b'{"access_token": "abc"}'
        if "dagRuns" in url:
            assert headers == {"Authorization": "Bearer abc"}
        return given

    monkeypatch.setattr(requests, "post", answer)
    if accepted:
        client(airflow).trigger("run-1", {})
    else:
        with pytest.raises(TriggerFailed, match="Airflow answered 409 to POST /auth/token"):
            client(airflow).trigger("run-1", {})
