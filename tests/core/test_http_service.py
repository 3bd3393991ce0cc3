"""Who may send requests to an HTTP service, and how large they may be."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import flask
import pytest

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.http_service import guarded_app, listening_server, require_token

JSON = {"Content-Type": "application/json"}


def app(token: str | None = None) -> flask.Flask:
    made = guarded_app("test", token, 10)
    made.post("/echo")(lambda: flask.Response(flask.request.get_data()))
    return made


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8123"}, 200),
        ({"Host": "[::1]:8123"}, 200),
        ({"Host": "127.0.0.2"}, 200),
        ({"Host": "example.org:8123"}, 403),
        ({"Host": "127.0.0.1.example.org"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_without_a_token_only_programs_of_this_machine_are_answered(
    headers: dict[str, str], status: int
) -> None:
    assert app().test_client().post("/echo", data=b"[]", headers=JSON | headers).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "s3cret"}, 401),
        ({"Authorization": "Bearer s3cret"}, 200),
        ({"Authorization": "Bearer s3cret", "Host": "example.org"}, 200),
        ({"Authorization": "Bearer s3cret", "Origin": "https://example.org"}, 403),
    ],
)
def test_a_token_is_asked_of_every_request(headers: dict[str, str], status: int) -> None:
    assert app("s3cret").test_client().post("/echo", data=b"[]", headers=JSON | headers).status_code == status


def test_an_address_that_others_reach_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [require_token(host, None) for host in ("127.0.0.1", "::1", "[::1]", "localhost")] == [None] * 4
    for host in ("0.0.0.0", "::", "", "192.0.2.7", "example.org"):
        with pytest.raises(WrongUse, match=f"^host '{host}' is reachable from other machines: name an env"):
            require_token(host, None)
    with pytest.raises(WrongUse, match=r"^environment variable NO_TOKEN, which token_env names, is not set$"):
        require_token("127.0.0.1", "NO_TOKEN")
    monkeypatch.setenv("TEST_TOKEN", "s3cret")
    assert require_token("0.0.0.0", "TEST_TOKEN") == "s3cret"


@contextmanager
def running(made: flask.Flask) -> Iterator[int]:
    server = listening_server(made, "127.0.0.1", 0)

    def run() -> None:
        with suppress(OSError):  # it is closed while it waits
            server.run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield int(server.effective_port)
    finally:
        server.close()
        thread.join(10)


def test_a_body_above_the_limit_is_not_received() -> None:
    with running(app()) as port:
        answers = []
        for size in (10, 11, 1_000_000_000):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.putrequest("POST", "/echo")
            for name, value in {**JSON, "Content-Length": str(size)}.items():
                connection.putheader(name, value)
            connection.endheaders(b"x" * size if size < 20 else None)
            try:
                answers.append(connection.getresponse().status)
            except TimeoutError:  # it waits for the body
                answers.append(0)
            connection.close()
    assert answers == [200, 413, 413]
