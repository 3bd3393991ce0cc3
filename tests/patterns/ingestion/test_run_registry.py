"""The registry of triggered runs: what one SQLite file remembers, without a trigger around it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from python_jobs.ingestion.run_registry import DeadLetter, Envelope, Run, RunRegistry
from python_jobs.ingestion.trigger_events import Poison
from python_jobs.shared.core.failures import WrongUse

FIRST, SECOND, OTHER = Run("r1", "load", "{}"), Run("r2", "load", '{"a": 1}'), Run("r3", "clean", "{}")
ENVELOPE = Envelope("e1", '{"Records": []}')
POISON = Poison("p1", b"{nope", "the envelope is no JSON")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RunRegistry]:
    registry = RunRegistry(tmp_path / "new" / "folder" / "registry")
    yield registry
    registry.close()


def rows(registry: RunRegistry, query: str) -> list[tuple[object, ...]]:
    return [tuple(row) for row in registry._connection.execute(query)]


def test_an_envelope_of_known_runs_adds_nothing(registry: RunRegistry) -> None:
    assert registry.accept([FIRST, SECOND], [POISON], "10:00", envelope=ENVELOPE) == ["r1", "r2"]
    assert registry.accept([FIRST, OTHER], [POISON], "10:01", envelope=ENVELOPE) == ["r3"]
    assert rows(registry, "select run_id, queued_at, envelope_id from runs") == [
        ("r1", "10:00", "e1"), ("r2", "10:00", "e1"), ("r3", "10:01", "e1"),
    ]  # fmt: skip
    assert rows(registry, "select * from poisons") == [
        ("p1", b"{nope", "the envelope is no JSON", "10:00", None)
    ]
    assert registry.envelope("e1") == '{"Records": []}'
    assert registry.runs()[1] == {
        "run_id": "r2", "workload": "load", "status": "queued", "attempts": 0, "error": None,
    }  # fmt: skip


def test_an_envelope_without_a_new_run_is_not_kept(registry: RunRegistry) -> None:
    registry.accept([FIRST], [], "10:00")
    assert registry.accept([FIRST], [], "10:01", envelope=ENVELOPE) == []
    assert registry.envelope("e1") is None
    assert rows(registry, "select envelope_id from runs") == [(None,)]


def test_a_record_that_can_be_read_by_now_is_replayed_once(registry: RunRegistry) -> None:
    registry.accept([], [POISON], "10:00")
    assert registry.poison("p1") == POISON
    assert registry.accept([FIRST], [], "10:05", replaces="p1") == ["r1"]
    assert registry.poison("p1") is None
    assert registry.accept([SECOND], [], "10:06", replaces="p1") == []
    assert [run["run_id"] for run in registry.runs()] == ["r1"]
    assert rows(registry, "select replayed_at from poisons") == [("10:05",)]
    assert registry.poison("absent") is None


def test_the_oldest_run_of_a_workload_below_its_limit_is_next(registry: RunRegistry) -> None:
    registry.accept([SECOND], [], "10:01")
    registry.accept([FIRST], [], "10:00")
    registry.accept([OTHER], [], "10:02")
    limits = {"load": 1, "clean": 1}
    assert registry.claim(limits) == FIRST
    assert registry.claim(limits) == OTHER
    assert registry.claim(limits) is None
    assert registry.claim({"load": 2}) == SECOND
    assert registry.claim({"load": 9, "absent": 9}) is None
    assert {run["status"] for run in registry.runs()} == {"running"}


def test_a_run_ends_as_succeeded_or_dead_and_a_dead_one_is_replayed_once(registry: RunRegistry) -> None:
    registry.accept([FIRST, SECOND], [], "10:00")
    registry.claim({"load": 9})
    registry.attempted("r1")
    registry.attempted("r1")
    registry.finish("r1", "10:01", "exit code 1")
    registry.finish("r2", "10:02", None)
    assert rows(registry, "select run_id, status, attempts, error, ended_at from runs") == [
        ("r1", "dead", 2, "exit code 1", "10:01"), ("r2", "succeeded", 0, None, "10:02"),
    ]  # fmt: skip
    assert registry.dead_letters() == [DeadLetter("r1", "exit code 1")]
    assert [registry.replay("r1"), registry.replay("r1"), registry.replay("r2")] == [True, False, False]
    assert registry.dead_letters() == []
    assert registry.claim({"load": 9}) == FIRST
    assert rows(registry, "select status, error from runs where run_id = 'r1'") == [("running", None)]


def test_what_waits_for_a_replay_is_listed_with_runs_first(registry: RunRegistry) -> None:
    registry.accept([FIRST], [POISON], "10:00")
    registry.finish("r1", "10:01", "exit code 1")
    assert registry.dead_letters() == [
        DeadLetter("r1", "exit code 1"), DeadLetter("p1", "the envelope is no JSON"),
    ]  # fmt: skip


def test_running_runs_are_queued_again_after_a_crash_and_one_when_it_is_stopped(
    registry: RunRegistry, tmp_path: Path
) -> None:
    registry.accept([FIRST, SECOND, OTHER], [], "10:00")
    registry.claim({"load": 9})
    registry.claim({"load": 9})
    registry.finish("r3", "10:01", None)
    registry.requeue("r2")
    assert [run["status"] for run in registry.runs()] == ["running", "queued", "succeeded"]
    again = RunRegistry(tmp_path / "new" / "folder" / "registry")
    again.requeue_running()
    assert [run["status"] for run in again.runs()] == ["queued", "queued", "succeeded"]
    again.close()


def test_old_successes_are_deleted_with_their_envelopes_and_dead_letters_stay(registry: RunRegistry) -> None:
    registry.accept([FIRST], [POISON], "10:00", envelope=ENVELOPE)
    registry.accept([SECOND], [Poison("p2", b"x", "y")], "10:00", envelope=Envelope("e2", "{}"))
    registry.accept([OTHER], [], "10:00", replaces="p2", envelope=Envelope("e3", "{}"))
    registry.finish("r1", "10:01", None)
    registry.finish("r2", "10:01", "exit code 1")
    registry.finish("r3", "10:02", None)
    assert registry.prune("10:01") == []
    assert rows(registry, "select poison_id from poisons") == [("p1",)]  # p2 was replayed at 10:00
    assert registry.prune("10:02") == ["r1"]
    assert [registry.envelope(name) for name in ("e1", "e2", "e3")] == [None, "{}", "{}"]
    assert [letter.id for letter in registry.dead_letters()] == ["r2", "p1"]


def test_many_threads_use_one_registry(registry: RunRegistry) -> None:
    def accept(number: int) -> list[str]:
        return registry.accept([Run(f"r{number % 10}", "load", "{}")], [], "10:00")

    with ThreadPoolExecutor(4) as pool:
        new = [run for runs in pool.map(accept, range(40)) for run in runs]
    assert sorted(new) == [f"r{number}" for number in range(10)]


def test_a_failure_in_a_transaction_leaves_the_registry_as_it_was(registry: RunRegistry) -> None:
    broken = Run("r2", None, "{}")  # type: ignore[arg-type]
    with pytest.raises(sqlite3.IntegrityError):
        registry.accept([FIRST, broken], [], "10:00")
    assert registry.runs() == []
    assert registry.accept([FIRST], [], "10:01") == ["r1"]


def test_a_file_of_another_format_is_refused_and_one_of_format_1_is_extended(tmp_path: Path) -> None:
    file = tmp_path / "registry"
    RunRegistry(file).close()
    with sqlite3.connect(file) as database:
        assert database.execute("pragma user_version").fetchone() == (2,)
        database.execute("pragma user_version = 3")
    with pytest.raises(WrongUse, match="registry has format 3; this program writes format 2"):
        RunRegistry(file)
    with sqlite3.connect(file) as database:
        database.execute("alter table runs drop column envelope_id")
        database.execute("drop table envelopes")
        database.execute("pragma user_version = 1")
    extended = RunRegistry(file)
    assert extended.accept([FIRST], [], "10:00", envelope=ENVELOPE) == ["r1"]
    assert rows(extended, "pragma user_version") == [(2,)]
    assert rows(extended, "pragma journal_mode") == [("wal",)]
    assert rows(extended, "pragma synchronous") == [(2,)]  # full
    extended.close()
