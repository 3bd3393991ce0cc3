"""Helpers that wait for a condition instead of sleeping, and that read repeatedly while a block runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

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


@contextmanager
def polled(read: Callable[[], object]) -> Iterator[list[object]]:
    """Collect a reader's results until the block has ended, and one more; a failure is collected as its text.

    Raises:
        AssertionError: no read began and ended while the block ran, so nothing is shown about readers.
    """
    seen: list[object] = []
    reads_within = 0
    ended = threading.Event()

    def poll() -> None:
        nonlocal reads_within
        while True:
            last = ended.is_set()
            try:
                seen.append(read())
            except Exception as failure:
                seen.append(str(failure))
            if last:
                return
            reads_within += not ended.is_set()

    reader = threading.Thread(target=poll)
    reader.start()
    try:
        yield seen
    finally:
        ended.set()
        reader.join()
    assert reads_within, "no read began and ended meanwhile"
