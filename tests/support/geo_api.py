"""A real HTTP server with a bulk API, whose answers a test sets."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.http_server import QuietHandler, serving


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

    class Handler(QuietHandler):
        def get(self) -> None:
            ips = parse_qs(urlsplit(self.path).query)["ips"][0].split(",")
            api.asked.append(ips)
            api.tokens.add(self.headers["Authorization"])
            failure = api.failures.pop(0) if api.failures else None
            if isinstance(failure, float):
                time.sleep(failure)
            known = {ip: api.places[ip] for ip in ips if ip in api.places}
            body = failure if isinstance(failure, bytes) else json.dumps({"mapped": known}).encode()
            self.answer(failure if isinstance(failure, int) else 200, body)

    with serving(Handler) as url:
        api.url = f"{url}/fetch"
        yield api
