"""A producer's side of the API Gateway: requests wait in a local folder while the gateway is away.

    producer = GatewayProducer("https://gateway.example.org", "/var/spool/visits", token)
    producer.send("visits", "user-1", [{"visit_id": "v1", "event_time": "2024-03-01T10:00:00Z"}])

A request is a file before it is sent, so a stop of the producer loses none. It keeps its Idempotency-Key when it is
sent again: consumers recognise records that arrive twice. Requests are sent in their order; ``resend`` sends what
waits, so call it again after a while.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import requests

from python_jobs.shared.core.whole_files import write_whole

REFUSED_FOLDER = "refused"
_ENDING = ".request.json"
_REFUSALS = {400, 404, 413, 415}
"""Statuses that the same request gets each time; for any other the request waits."""


class GatewayProducer:
    """Sends records to a gateway, and keeps them on the local disk until the gateway has them.

    One process uses a folder; its threads may share the producer.
    """

    def __init__(self, url: str, folder: str, token: str | None = None, timeout_seconds: float = 30) -> None:
        self._url = url.rstrip("/")
        self._folder = Path(folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout = timeout_seconds
        self._lock = threading.Lock()

    def send(self, topic: str, key: str, records: Sequence[Mapping[str, Any]]) -> int:
        """Store a request and send all that wait, in their order; return the number that still wait.

        Raises:
            OSError: the request can't be stored, so it is not taken.
            ValueError: a record is no JSON.
        """
        body = json.dumps(list(records), allow_nan=False)
        path = f"/ingestion/ingest/{quote(topic, safe='')}/{quote(key, safe='')}"
        with self._lock:
            newest = max((int(file.name.split("-")[0]) for file in self._waiting()), default=0)
            number = max(time.time_ns(), newest + 1)  # a clock that was set back doesn't change the order
            file = self._folder / f"{number:020d}-{uuid.uuid4().hex}{_ENDING}"
            write_whole(file, [json.dumps({"path": path, "body": body})])
        return self.resend()

    def resend(self) -> int:
        """Send the requests that wait until one is not taken; return the number that still wait.

        A request that the gateway refuses for good is moved into the folder ``refused``, with the answer.
        """
        with self._lock:
            waiting = self._waiting()
            for sent, file in enumerate(waiting):
                if not self._is_done(file):
                    return len(waiting) - sent
            return 0

    def _waiting(self) -> list[Path]:
        return sorted(file for file in self._folder.glob(f"*{_ENDING}") if not file.name.startswith("."))

    def _is_done(self, file: Path) -> bool:
        request = json.loads(file.read_text(encoding="utf-8"))
        request_id = file.name.removesuffix(_ENDING).split("-")[1]
        try:
            answer = requests.post(
                self._url + request["path"],
                data=request["body"].encode(),
                headers=self._headers | {"Idempotency-Key": request_id},
                timeout=self._timeout,
                allow_redirects=False,
            )
        except requests.RequestException:
            return False
        if answer.status_code in _REFUSALS:
            refused = self._folder / REFUSED_FOLDER
            refused.mkdir(exist_ok=True)
            write_whole(refused / file.name, [json.dumps(request | {"answer": answer.text[:10_000]})])
        elif not answer.ok or answer.status_code >= 300:
            return False
        file.unlink()
        return True
