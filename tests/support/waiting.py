"""Waiting for a condition instead of sleeping for a time, and looking on while something goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Answer = TypeVar("Answer")


def eventually(ask: Callable[[], Answer], seconds: float = 30) -> Answer:
    """Ask again and again until the answer is true, and return it.

    Raises:
        AssertionError: it is not within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"not true within {seconds} s, last answer: {answer!r}"
        time.sleep(0.02)
    return answer


@contextmanager
def polled(read: Callable[[], object]) -> Iterator[list[object]]:
    """Collect what a reader sees, again and again, until the block has ended and once more; a failure as its text."""
    seen: list[object] = []
    ended = threading.Event()

    def poll() -> None:
        while True:
            last = ended.is_set()
            try:
                seen.append(read())
            except Exception as failure:
                seen.append(str(failure))
            if last:
                return

    reader = threading.Thread(target=poll)
    reader.start()
    try:
        yield seen
    finally:
        ended.set()
        reader.join()
