"""Airflow's REST API (version 2), as far as a trigger needs it: start a DAG's run once, under a given name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import requests

from python_jobs.shared.core.retry import Failure, classify_status
from python_jobs.shared.core.urls import require_http_url

ANSWER_SECONDS = 30


class TriggerFailed(Exception):
    """The orchestrator did not accept the run; the message contains no secret."""

    def __init__(self, sentence: str, *, transient: bool) -> None:
        super().__init__(sentence)
        self.transient = transient
        """Whether a retry can succeed."""


@dataclass(frozen=True)
class Airflow:
    """A DAG of an Airflow server, and the environment variables of its credentials."""

    url: str
    """Base URL, such as http://localhost:8080."""
    dag: str
    """DAG to run."""
    user_env: str | None = None
    """Environment variable that holds the user's name; without it the client requests no token."""
    password_env: str | None = None
    """Environment variable that holds the user's password."""

    def __post_init__(self) -> None:
        require_http_url("airflow's url", self.url)

    def trigger(self, run_id: str, conf: Mapping[str, Any]) -> None:
        """Start the run ``run_id``; a run that already exists is a success.

        Raises:
            TriggerFailed: Airflow refused, returned an error or didn't answer.
        """
        body = {"dag_run_id": run_id, "logical_date": None, "conf": dict(conf)}
        path = f"/api/v2/dags/{quote(self.dag, safe='')}/dagRuns"
        self._post(path, body, {200, 201, 409}, self._authorization())

    def _authorization(self) -> dict[str, str]:
        """Return the header with a new token, because tokens expire after about a day."""
        if self.user_env is None or self.password_env is None:
            return {}
        missing = [name for name in (self.user_env, self.password_env) if name not in os.environ]
        if missing:
            raise TriggerFailed(f"environment variable {missing[0]} is not set", transient=False)
        login = {"username": os.environ[self.user_env], "password": os.environ[self.password_env]}
        answer = self._post("/auth/token", login, {200, 201}, {})
        try:
            token = answer.json()["access_token"]
        except (requests.exceptions.JSONDecodeError, LookupError, TypeError):
            # The answer is truncated, or is a proxy's page.
            raise TriggerFailed(
                "Airflow's answer to POST /auth/token holds no access_token", transient=True
            ) from None
        return {"Authorization": f"Bearer {token}"}

    def _post(
        self, path: str, body: Mapping[str, Any], good: set[int], headers: Mapping[str, str]
    ) -> requests.Response:
        try:
            # A redirect would turn the request into a GET, whose status 200 starts nothing.
            answer = requests.post(
                self.url + path, json=body, headers=headers, timeout=ANSWER_SECONDS, allow_redirects=False
            )
        except requests.RequestException as failure:
            # Name only the failure's class: its text may hold the request.
            raise TriggerFailed(
                f"Airflow at {self.url} gave no answer ({type(failure).__name__})", transient=True
            ) from None
        if answer.status_code not in good:
            raise TriggerFailed(
                f"Airflow answered {answer.status_code} to POST {path}",
                transient=classify_status(answer.status_code) is not Failure.PERMANENT,
            )
        return answer
