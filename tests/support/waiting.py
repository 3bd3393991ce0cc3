"""Waiting for a condition instead of sleeping for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
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
