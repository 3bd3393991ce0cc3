"""HTTP services of this package: who may send requests, and how large a request may be."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re

import flask
from waitress.server import BaseWSGIServer, MultiSocketServer, create_server

from python_jobs.shared.core.failures import WrongUse


def require_token(host: str, token_env: str | None) -> str | None:
    """Return the token that every request must carry, or None on an address that only this machine reaches.

    Args:
        host: address on which the service listens.
        token_env: name of the environment variable that holds the token.

    Raises:
        WrongUse: the variable isn't set, or other machines reach the address and there is no token.
    """
    if token_env is None and not _is_loopback(host):
        raise WrongUse(
            f"host '{host}' is reachable from other machines: name an environment variable with a token in "
            "token_env, or listen on 127.0.0.1"
        )
    if token_env is not None and not os.environ.get(token_env):
        raise WrongUse(f"environment variable {token_env}, which token_env names, is not set")
    return None if token_env is None else os.environ[token_env]


def guarded_app(name: str, token: str | None, max_body_bytes: int) -> flask.Flask:
    """Return an application without routes that refuses requests of strangers and requests that are too large.

    Refused are a request without the token (401), a request of a web page or, without a token, for another host than
    this machine (403), a larger body (413), and a POST whose body isn't declared as JSON (415).
    """
    app = flask.Flask(name)
    app.config["MAX_CONTENT_LENGTH"] = max_body_bytes

    @app.before_request
    def authorize() -> None:
        request = flask.request
        given = request.headers.get("Authorization", "")
        if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            flask.abort(401)
        # Any web page open on this machine may send requests here, but its requests have one of these signs.
        if "Origin" in request.headers or request.headers.get("Sec-Fetch-Site", "none") != "none":
            flask.abort(403, "requests of web pages are refused")
        if token is None and not _is_loopback(_host_name(request.host)):
            flask.abort(403, f"the host '{request.host}' is not this machine's; use 127.0.0.1 or localhost")
        is_bare = not request.mimetype and not request.content_length
        if request.method == "POST" and request.mimetype != "application/json" and not is_bare:
            flask.abort(415, "the content type must be application/json")

    return app


def listening_server(
    app: flask.Flask, host: str, port: int, threads: int = 4
) -> MultiSocketServer | BaseWSGIServer:
    """Return a server that accepts connections; its ``run`` answers them, at most ``threads`` at a time.

    A body above the application's limit isn't received: the server itself answers 413.
    """
    limit = app.config["MAX_CONTENT_LENGTH"]
    return create_server(app, host=host, port=port, threads=threads, max_request_body_size=limit + 1)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _host_name(host: str) -> str:
    """Return a Host header without its port; an IPv6 address is in brackets."""
    return re.sub(r":[0-9]*$", "", host).lower()
