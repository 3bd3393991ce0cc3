"""Bulk APIs that refuse single records as a test says: a real HTTP server, and Kinesis behind a proxy.

The proxy takes the refused records out of a PutRecords request, gives the others to the service behind it (moto's
server), and adds the refusals to its answer, as Kinesis does for a shard that is too busy.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import requests

from tests.support.http_server import QuietHandler, serving

Record = dict[str, Any]
Refuse = Callable[[Record], Any]


def nothing(record: Record) -> None:
    """Refuse no record."""


@dataclass
class BulkApi:
    """What an API got, and what it refuses."""

    url: str = ""
    refuse: Refuse = nothing
    """Function from a record to the reason why it is refused, an HTTP status or an error code; None takes it."""
    status: int = 200
    """Status of each answer; another than 200 takes nothing."""
    broken_answers: int = 0
    """Number of the next answers whose body breaks off; the records are taken."""
    requests: list[list[Record]] = field(default_factory=list)
    """Records of each request, the refused ones included."""
    stored: list[Record] = field(default_factory=list)
    """Records that the API has, in the order in which it took them."""
    tokens: set[str | None] = field(default_factory=set)

    def reset(self, refuse: Refuse = nothing, status: int = 200) -> None:
        """Forget all records, and refuse as the function says."""
        self.requests, self.stored, self.refuse, self.status = [], [], refuse, status

    def shown(self, records: list[Record] | None = None) -> list[str]:
        """Return the stored or given records as ``key clock``."""
        return [
            f"{found['key']} {found['at'][11:16]}" for found in (self.stored if records is None else records)
        ]

    def calls(self) -> list[list[str]]:
        """Return the records of each request as ``key clock``."""
        return [self.shown(records) for records in self.requests]

    def take(self, records: list[Record]) -> list[Any]:
        """Store the records that aren't refused; return the reason of each record, None if it was stored."""
        self.requests.append(records)
        reasons = [self.refuse(record) for record in records]
        self.stored += [record for record, reason in zip(records, reasons, strict=True) if reason is None]
        return reasons


@contextmanager
def running_bulk_api() -> Iterator[BulkApi]:
    """Serve a bulk API that answers with one item for each record."""
    api = BulkApi()

    class Handler(QuietHandler):
        def post(self, body: bytes) -> None:
            api.tokens.add(self.headers["Authorization"])
            if api.status != 200:
                api.requests.append(json.loads(body))
                return self.answer(api.status, b"")
            items = [
                {"status": 201} if reason is None else {"status": reason}
                for reason in api.take(json.loads(body))
            ]
            return self.answer(200, json.dumps({"items": items}).encode())

    with serving(Handler) as url:
        api.url = f"{url}/bulk"
        yield api


@contextmanager
def kinesis_behind_proxy(endpoint: str) -> Iterator[BulkApi]:
    """Serve Kinesis at another address, where single records of PutRecords can be refused."""
    api = BulkApi()

    class Handler(QuietHandler):
        def post(self, body: bytes) -> None:
            if not self.headers["X-Amz-Target"].endswith(".PutRecords"):
                return self._pass(body)
            asked = json.loads(body)
            reasons = api.take([json.loads(base64.b64decode(record["Data"])) for record in asked["Records"]])
            taken = [
                record for record, reason in zip(asked["Records"], reasons, strict=True) if reason is None
            ]
            answers = iter(())
            if taken:
                answer = self._forward(json.dumps(asked | {"Records": taken}).encode())
                if answer.status_code != 200:
                    return self.answer(answer.status_code, answer.content)
                answers = iter(answer.json()["Records"])
            records = [
                next(answers)
                if reason is None
                else {"ErrorCode": reason, "ErrorMessage": "refused by the test"}
                for reason in reasons
            ]
            found = {"FailedRecordCount": len(records) - len(taken), "Records": records}
            body = json.dumps(found).encode()
            if api.broken_answers:
                api.broken_answers, body = api.broken_answers - 1, body[: len(body) // 2]
            return self.answer(200, body)

        def _forward(self, body: bytes) -> requests.Response:
            headers = {
                name: value for name, value in self.headers.items() if name not in ("Content-Length", "Host")
            }
            return requests.post(endpoint, data=body, headers=headers, timeout=30)

        def _pass(self, body: bytes) -> None:
            answer = self._forward(body)
            self.answer(answer.status_code, answer.content)

    with serving(Handler) as url:
        api.url = url
        yield api
