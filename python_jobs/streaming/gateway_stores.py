"""What the API Gateway keeps on disk while the broker is away: fallback files, and a queue in one SQLite file."""

from __future__ import annotations

import sqlite3
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import filelock

from python_jobs.shared.core.failures import JobFailed, WrongUse
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.core.whole_files import write_whole
from python_jobs.streaming.gateway_records import Message

FILE_ENDING = ".jsonl"
TOPIC_FOLDER = "topic="
FORMAT_VERSION = 1

_SCHEMA = """
create table messages (
    position integer primary key autoincrement,
    topic text not null,
    key text not null,
    value text not null,
    referral text not null,
    request_id text not null,
    ordinal integer not null,
    accepted_at text not null
)
"""
_COLUMNS = "topic, key, value, referral, request_id, ordinal, accepted_at"


class Fallback:
    """A folder of undelivered messages, which the replay job reads: ``topic=<topic>/<unique name>.jsonl``.

    A line is a JSON object in ASCII; ``value`` is the record's text. A file gets its name when it is complete and on
    the disk, so that no reader sees a part of it.
    """

    def __init__(self, folder: str) -> None:
        """Create the folder if it doesn't exist.

        Raises:
            WrongUse: it can't be created.
        """
        self._folder = Path(folder).absolute()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise WrongUse(f"the fallback '{folder}' can't be created: {failure.strerror}") from None

    def write(self, messages: Iterable[Message]) -> None:
        """Store messages, one file for each topic.

        Raises:
            OSError: the folder can't be written; the messages must not be acknowledged.
        """
        for topic, of_topic in groupby(sorted(messages, key=lambda m: m.topic), key=lambda m: m.topic):
            folder = self._folder / f"{TOPIC_FOLDER}{topic}"
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{time.time_ns():020d}-{uuid.uuid4().hex}{FILE_ENDING}"
            write_whole(folder / name, map(line_of, of_topic))


def line_of(message: Message) -> str:
    """Return the line of a fallback file."""
    return json_text(
        {
            "key": message.key,
            "value": message.value,
            "referral": message.referral,
            "event_id": message.event_id,
            "ordinal": message.ordinal,
            "accepted_at": message.accepted_at,
        }
    )


class BufferFull(Exception):
    """The buffer has no room for the messages of a request; none of them is in it."""


class Buffer:
    """A queue of messages in a SQLite file; many threads of one process may use it."""

    def __init__(self, path: str, max_records: int) -> None:
        """Open the file, or create it; it has the messages that an earlier process has not delivered.

        Raises:
            JobFailed: another process uses the file.
            WrongUse: the file has another format.
        """
        file = Path(path).absolute()
        file.parent.mkdir(parents=True, exist_ok=True)
        self._only_one = filelock.FileLock(f"{file}.lock", timeout=0)
        try:
            self._only_one.acquire()
        except filelock.Timeout:
            raise JobFailed(f"another gateway works on {file}; give this one its own buffer") from None
        self._lock = threading.Lock()
        self._max_records = max_records
        self._connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False, timeout=30)
        self._connection.execute("pragma journal_mode = wal")
        self._connection.execute("pragma synchronous = full")  # an accepted record is on the disk
        with self._transaction() as db:
            version = db.execute("pragma user_version").fetchone()[0]
            if version == 0:
                db.execute(_SCHEMA)
                db.execute(f"pragma user_version = {FORMAT_VERSION}")
            elif version != FORMAT_VERSION:
                raise WrongUse(f"{file} has format {version}; this program writes format {FORMAT_VERSION}")
            self._count = int(db.execute("select count(*) from messages").fetchone()[0])

    def __len__(self) -> int:
        """Return the number of messages that wait."""
        return self._count

    def append(self, messages: Sequence[Message]) -> None:
        """Store messages behind all others, all or none of them.

        Raises:
            BufferFull: there is no room for all of them.
            sqlite3.Error: the file can't be written.
        """
        with self._lock:
            if self._count + len(messages) > self._max_records:
                raise BufferFull
            with self._transaction_of_holder() as db:
                db.executemany(
                    f"insert into messages ({_COLUMNS}) values (?, ?, ?, ?, ?, ?, ?)",
                    [
                        (m.topic, m.key, m.value, m.referral, m.request_id, m.ordinal, m.accepted_at)
                        for m in messages
                    ],
                )
            self._count += len(messages)

    def oldest(self, limit: int) -> dict[int, Message]:
        """Return the messages that wait for the longest, by their positions, in their order."""
        with self._lock:
            rows = self._connection.execute(
                f"select position, {_COLUMNS} from messages order by position limit ?", (limit,)
            ).fetchall()
        return {position: Message(*columns) for position, *columns in rows}

    def remove(self, positions: Sequence[int]) -> None:
        """Forget messages that were delivered."""
        with self._lock:
            with self._transaction_of_holder() as db:
                db.executemany("delete from messages where position = ?", [(p,) for p in positions])
            self._count -= len(positions)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
        self._only_one.release()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._transaction_of_holder() as db:
            yield db

    @contextmanager
    def _transaction_of_holder(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("begin immediate")
        try:
            yield self._connection
            self._connection.execute("commit")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("rollback")
            raise
