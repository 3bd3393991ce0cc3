"""A partner of the blogging platform: a bulk API that is sometimes too busy for a record, and keeps what it has taken.

    python -m case_study.partner --file deliveries.sqlite --port 8125

``POST /page_views`` takes a JSON array of records and answers with one status for each: 201 when the record is on the
disk, 429 when the partner is busy. It is busy for every fifth record that is new to it, and takes it when it comes
again. It drops a record whose id it has, as each partner of a delivery that is at least once must do.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import flask
from jsonargparse import auto_cli

from python_jobs.shared.core.http_service import guarded_app, listening_server
from python_jobs.shared.core.json_text import json_text

TAKEN, BUSY = 201, 429
_HOST = "127.0.0.1"
_BUSY_EACH = 5
_MAX_BODY_BYTES = 5_000_000
_TABLE = "create table if not exists deliveries (place integer primary key, id text unique, record text)"


class Partner:
    """What the partner has taken, in a SQLite file; one thread uses it."""

    def __init__(self, file: str) -> None:
        """Open the file; it is created when absent."""
        self._database = sqlite3.connect(file, check_same_thread=False)
        self._database.execute(_TABLE)
        self._new: set[str] = set()

    def take(self, records: Sequence[dict[str, Any]]) -> list[int]:
        """Store the records for which the partner isn't busy; return the status of each."""
        statuses = [BUSY if self._is_busy(record["id"]) else TAKEN for record in records]
        taken = [
            (record["id"], json_text(record))
            for record, status in zip(records, statuses, strict=True)
            if status == TAKEN
        ]
        with self._database:
            self._database.executemany("insert or ignore into deliveries (id, record) values (?, ?)", taken)
        return statuses

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _is_busy(self, record_id: str) -> bool:
        if record_id in self._new:
            return False
        self._new.add(record_id)
        return len(self._new) % _BUSY_EACH == 0


def deliveries(file: str) -> list[dict[str, Any]]:
    """Return the records that a partner has taken, in the order in which it took them."""
    with closing(sqlite3.connect(file)) as database:
        rows = database.execute("select record from deliveries order by place").fetchall()
    return [json.loads(record) for (record,) in rows]


def create_app(partner: Partner) -> flask.Flask:
    """Return the HTTP application."""
    app = guarded_app("partner", None, _MAX_BODY_BYTES)

    @app.post("/page_views")
    def page_views() -> flask.Response:
        statuses = partner.take(flask.request.get_json())
        return flask.jsonify(items=[{"status": status} for status in statuses])

    return app


def main(file: str, port: int) -> int:
    """Take page views until a signal.

    Args:
        file: SQLite file of the records.
        port: loopback port to listen on.

    Returns:
        The exit code.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    with closing(Partner(file)) as partner, suppress(KeyboardInterrupt):
        # One thread, because the order of the records counts.
        server = listening_server(create_app(partner), _HOST, port, threads=1)
        print(f"http://{_HOST}:{port}", flush=True)
        server.run()
    return 0


if __name__ == "__main__":
    sys.exit(auto_cli(main, as_positional=False))
