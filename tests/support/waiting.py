"""Helpers that wait for a condition instead of sleeping, that read while a block runs, and that call in parallel."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar
from unittest.mock import patch

from services.postgres import Database

Answer = TypeVar("Answer")


def eventually(ask: Callable[[], Answer], seconds: float = 30) -> Answer:
    """Return the first true answer of repeated calls.

    Raises:
        AssertionError: no answer is true within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"not true within {seconds} s, last answer: {answer!r}"
        time.sleep(0.02)
    return answer


def at_once(*calls: Callable[[], Answer]) -> list[Answer]:
    """Return the results of calls that begin together, each in its own thread, in the order of the calls.

    Raises:
        Exception: that of the first call that failed, after all have ended.
    """
    together = threading.Barrier(len(calls))

    def begin(call: Callable[[], Answer]) -> Answer:
        together.wait(60)
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(begin, calls))


@contextmanager
def polled(read: Callable[[], object], held: tuple[object, str] | None = None) -> Iterator[list[object]]:
    """Collect a reader's results until the block has ended, and one more; a failure is collected as its text.

    Args:
        held: the module or class and the name of a function that the block calls. It waits before its first line
            until a read has begun and ended in the block: a short write may else be faster than any read.

    Raises:
        AssertionError: no read began and ended while the block ran, so nothing is shown about readers, or the block
            never called the function that is held.
    """
    seen: list[object] = []
    read_within, ended = threading.Event(), threading.Event()

    def poll() -> None:
        while True:
            last = ended.is_set()
            try:
                seen.append(read())
            except Exception as failure:
                seen.append(str(failure))
            if last:
                return
            if not ended.is_set():
                read_within.set()

    reader = threading.Thread(target=poll)
    with _waits_for(read_within, *held) if held else nullcontext() as calls:
        reader.start()
        try:
            yield seen
        finally:
            ended.set()
            reader.join()
    assert read_within.is_set(), "no read began and ended meanwhile"
    assert calls != [], f"{held} was never called"


@contextmanager
def polled_count(database: Database, relation: str) -> Iterator[list[object]]:
    """Collect the numbers of rows that a reader counts in a PostgreSQL table or view while the block runs."""
    with database.connect() as connection:

        def count() -> object:
            (rows,) = connection.execute(f"select count(*) from {relation}".encode()).fetchone() or (None,)
            return rows

        with polled(count) as seen:
            yield seen


@contextmanager
def _waits_for(event: threading.Event, owner: object, name: str) -> Iterator[list[str]]:
    """Let a function wait for an event, and collect its calls."""
    original, calls = getattr(owner, name), list[str]()

    @functools.wraps(original)
    def waits(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        assert event.wait(60), "no read ended within 60 s"
        return original(*arguments, **named)

    with patch.object(owner, name, waits):
        yield calls
