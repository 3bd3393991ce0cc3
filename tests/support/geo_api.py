"""A real HTTP server with a bulk API, whose answers a test sets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class GeoApi:
    """``GET /fetch?ips=a,b`` answers ``{"mapped": {ip: value}}`` for the IPs that it knows."""

    places: dict[str, Any] = field(default_factory=dict)
    """Value of each IP; an IP that isn't here is missing in the answer."""
    failures: list[int | float | bytes] = field(default_factory=list)
    """What the next requests get instead of an answer: a status, seconds of silence, or a body of status 200."""
    asked: list[list[str]] = field(default_factory=list)
    """IPs of each request, those that failed too."""
    tokens: set[str | None] = field(default_factory=set)
    """Authorization headers."""
    url: str = ""

    @property
    def asked_once(self) -> list[str]:
        """Return all IPs of all requests, sorted: one that was asked for twice is there twice."""
        return sorted(ip for ips in self.asked for ip in ips)

    def reset(self, places: dict[str, Any], *failures: int | float | bytes) -> None:
        """Forget the requests and set the next answers."""
        self.places, self.failures, self.asked = places, list(failures), []
        self.tokens = set()


@contextmanager
def running_geo_api() -> Iterator[GeoApi]:
    """Serve on a free port until the block ends."""
    api = GeoApi()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ips = parse_qs(urlsplit(self.path).query)["ips"][0].split(",")
            api.asked.append(ips)
            api.tokens.add(self.headers["Authorization"])
            failure = api.failures.pop(0) if api.failures else None
            status, body = (
                200,
                json.dumps({"mapped": {ip: api.places[ip] for ip in ips if ip in api.places}}).encode(),
            )
            if isinstance(failure, bytes):
                body = failure
            elif isinstance(failure, int):
                status = failure
            elif failure is not None:
                time.sleep(failure)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(BrokenPipeError):  # the client may have given up waiting
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        api.url = f"http://127.0.0.1:{server.server_port}/fetch"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield api
        server.shutdown()
        thread.join()
