"""The durable registry of triggered runs: one SQLite file, written before an event is acknowledged.

A run's name is built from the event and the workload, so a repeated event finds its run. The states of a run are
``queued`` → ``running`` → ``succeeded`` or ``dead``. A run that was ``running`` when its process died is queued again
at the next start.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from python_jobs.ingestion.trigger_events import Poison
from python_jobs.shared.core.failures import WrongUse

FORMAT_VERSION = 2

_SCHEMA = """
create table runs (
    run_id text primary key,
    workload text not null,
    conf text not null,
    status text not null check (status in ('queued', 'running', 'succeeded', 'dead')),
    attempts integer not null default 0,
    error text,
    queued_at text not null,
    ended_at text,
    envelope_id text
);
create index runs_by_status on runs (workload, status);
create table poisons (
    poison_id text primary key,
    body blob not null,
    error text not null,
    received_at text not null,
    replayed_at text
);
create table envelopes (
    envelope_id text primary key,
    body text not null
);
"""
_FROM_FORMAT_1 = """
alter table runs add column envelope_id text;
create table envelopes (
    envelope_id text primary key,
    body text not null
);
"""


@dataclass(frozen=True)
class Run:
    """One run of one workload for one event."""

    run_id: str
    workload: str
    conf: str
    """Context that the workload gets, as JSON."""


@dataclass(frozen=True)
class Envelope:
    """The content of one delivery; its runs refer to it."""

    id: str
    """Identity of the content: the same for every delivery."""
    body: str


@dataclass(frozen=True)
class DeadLetter:
    """A failed run or an unreadable record, kept until it is replayed."""

    id: str
    """Id of the run or of the unreadable record."""
    error: str


class RunRegistry:
    """The registry in the file at ``path``; many threads may use it."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it.

        Raises:
            WrongUse: the file has another format.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("pragma journal_mode = wal")
        self._connection.execute("pragma synchronous = full")  # an acknowledged event is on the disk
        with self._transaction() as db:
            version = db.execute("pragma user_version").fetchone()[0]
            changes = {0: _SCHEMA, 1: _FROM_FORMAT_1}.get(version)
            if changes is not None:
                for statement in filter(str.strip, changes.split(";")):
                    db.execute(statement)
                db.execute(f"pragma user_version = {FORMAT_VERSION}")
            elif version != FORMAT_VERSION:
                raise WrongUse(f"{path} has format {version}; this program writes format {FORMAT_VERSION}")

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def accept(
        self,
        runs: Sequence[Run],
        poisons: Sequence[Poison],
        now: str,
        replaces: str | None = None,
        envelope: Envelope | None = None,
    ) -> list[str]:
        """Store an envelope's runs and unreadable records in one transaction; return the ids of the new runs.

        Args:
            runs: runs that the envelope starts.
            poisons: unreadable records of the envelope.
            now: time of the delivery.
            replaces: unreadable record to mark as replayed in the same transaction; if it is already marked, nothing
                is stored.
            envelope: envelope to store if a run is new; it is stored once, however many runs refer to it.
        """
        new = []
        with self._transaction() as db:
            if replaces is not None:
                marked = db.execute(
                    "update poisons set replayed_at = ? where poison_id = ? and replayed_at is null",
                    (now, replaces),
                )
                if marked.rowcount == 0:
                    return []
            for run in runs:
                added = db.execute(
                    "insert into runs (run_id, workload, conf, status, queued_at, envelope_id) "
                    "values (?, ?, ?, 'queued', ?, ?) on conflict do nothing",
                    (run.run_id, run.workload, run.conf, now, envelope and envelope.id),
                )
                new += [run.run_id] * added.rowcount
            if new and envelope is not None:
                db.execute(
                    "insert into envelopes (envelope_id, body) values (?, ?) on conflict do nothing",
                    (envelope.id, envelope.body),
                )
            db.executemany(
                "insert into poisons (poison_id, body, error, received_at) values (?, ?, ?, ?) on conflict do nothing",
                [(poison.id, poison.body, poison.error, now) for poison in poisons],
            )
        return new

    def claim(self, limits: Mapping[str, int]) -> Run | None:
        """Claim the oldest queued run of a workload below its limit of running runs; None if there is none."""
        with self._transaction() as db:
            for workload, limit in limits.items():
                row = db.execute(
                    "update runs set status = 'running', error = null where run_id = ("
                    "  select run_id from runs where workload = :workload and status = 'queued'"
                    "  and (select count(*) from runs where workload = :workload and status = 'running') < :limit"
                    "  order by queued_at, rowid limit 1"
                    ") returning run_id, workload, conf",
                    {"workload": workload, "limit": limit},
                ).fetchone()
                if row is not None:
                    return Run(**row)
        return None

    def attempted(self, run_id: str) -> None:
        """Count one more attempt of a run."""
        with self._transaction() as db:
            db.execute("update runs set attempts = attempts + 1 where run_id = ?", (run_id,))

    def finish(self, run_id: str, now: str, error: str | None) -> None:
        """Mark a run as succeeded, or as dead with its error."""
        status = "succeeded" if error is None else "dead"
        with self._transaction() as db:
            db.execute(
                "update runs set status = ?, error = ?, ended_at = ? where run_id = ?",
                (status, error, now, run_id),
            )

    def requeue_running(self) -> None:
        """Queue all running runs again, because their process is gone."""
        with self._transaction() as db:
            db.execute("update runs set status = 'queued' where status = 'running'")

    def requeue(self, run_id: str) -> None:
        """Queue a stopped run again."""
        with self._transaction() as db:
            db.execute("update runs set status = 'queued' where run_id = ?", (run_id,))

    def replay(self, run_id: str) -> bool:
        """Queue a dead run again; return False if the run isn't dead, so that two replays start one run."""
        with self._transaction() as db:
            return (
                db.execute(
                    "update runs set status = 'queued' where run_id = ? and status = 'dead'", (run_id,)
                ).rowcount
                == 1
            )

    def poison(self, poison_id: str) -> Poison | None:
        """Return an unreadable record, or None if it is unknown or already replayed."""
        with self._transaction() as db:
            row = db.execute(
                "select poison_id as id, body, error from poisons where poison_id = ? and replayed_at is null",
                (poison_id,),
            ).fetchone()
        return None if row is None else Poison(**row)

    def envelope(self, envelope_id: str) -> str | None:
        """Return the body of a stored envelope, or None if it is unknown."""
        with self._transaction() as db:
            row = db.execute("select body from envelopes where envelope_id = ?", (envelope_id,)).fetchone()
        return None if row is None else str(row["body"])

    def prune(self, before: str) -> list[str]:
        """Delete runs that succeeded before a time, and envelopes without a run; return the deleted runs' ids.

        Dead letters stay until they are replayed.
        """
        with self._transaction() as db:
            rows = db.execute(
                "delete from runs where status = 'succeeded' and ended_at < ? returning run_id", (before,)
            ).fetchall()
            db.execute("delete from poisons where replayed_at < ?", (before,))
            db.execute(
                "delete from envelopes where envelope_id not in "
                "(select envelope_id from runs where envelope_id is not null)"
            )
        return [str(row["run_id"]) for row in rows]

    def dead_letters(self) -> list[DeadLetter]:
        """Return the dead runs and the unreadable records that wait for a replay, oldest first."""
        with self._transaction() as db:
            rows = db.execute(
                "select run_id as id, error from runs where status = 'dead' "
                "union all select poison_id, error from poisons where replayed_at is null"
            ).fetchall()
        return [DeadLetter(**row) for row in rows]

    def runs(self) -> list[dict[str, object]]:
        """Return every run with its workload, status, attempts and error, in the order they came."""
        with self._transaction() as db:
            rows = db.execute(
                "select run_id, workload, status, attempts, error from runs order by rowid"
            ).fetchall()
        return [dict(row) for row in rows]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("begin immediate")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("rollback")
                raise
            self._connection.execute("commit")
