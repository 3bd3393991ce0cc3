"""The two endpoints of Airflow 3's API that a trigger calls, on a free loopback port.

They follow Airflow's specification: ``POST /auth/token`` returns a token for user and password, and
``POST /api/v2/dags/{dag_id}/dagRuns`` creates a run named ``dag_run_id``, or answers 409 if the run exists.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flask import Flask, Response, abort, jsonify, request
from werkzeug.serving import make_server

TOKEN = "token-of-the-stand-in"


@dataclass
class AirflowApi:
    """The state of the server, and the faults that it simulates."""

    dags: set[str]
    users: dict[str, str]
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    fails_with: int | None = None
    requests: int = 0
    url: str = ""


@contextlib.contextmanager
def running_airflow_api(dags: set[str], users: dict[str, str]) -> Iterator[AirflowApi]:
    """Serve until the block ends."""
    api = AirflowApi(dags, users)
    app = Flask("airflow")

    @app.post("/auth/token")
    def token() -> tuple[Response, int]:
        body = request.get_json()
        if api.users.get(body["username"]) != body["password"]:
            abort(401)
        return jsonify(access_token=TOKEN), 201

    @app.post("/api/v2/dags/<dag_id>/dagRuns")
    def trigger(dag_id: str) -> Response:
        api.requests += 1
        if api.fails_with is not None:
            abort(api.fails_with)
        if api.users and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            abort(401)
        if dag_id not in api.dags:
            abort(404)
        body = request.get_json()
        if body["dag_run_id"] in api.runs:
            abort(409)
        if "logical_date" not in body:  # required, and may be null
            abort(422)
        api.runs[body["dag_run_id"]] = {"dag_id": dag_id, **body}
        return jsonify(dag_run_id=body["dag_run_id"], state="queued")

    server = make_server("127.0.0.1", 0, app, threaded=True)
    api.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
