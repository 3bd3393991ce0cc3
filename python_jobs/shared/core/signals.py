"""Lets a program end by SIGTERM or SIGINT where it is ready to, instead of in the middle of a call."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ENDING = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def end_requested() -> Iterator[threading.Event]:
    """Yield an event that the first SIGTERM or SIGINT sets; a second one does what it did before the block.

    A handler that raises, as Python's own for Ctrl-C, raises at whatever line the program is. In the middle of a
    command to the JVM this breaks Py4J's connection, and the commands that stop a query then fail. Python delivers
    signals to the main thread alone: in another one the event is never set.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def request(*_: object) -> None:
        event.set()
        restore()

    # None is a handler that Python did not set and can't set again.
    before = {number: signal.signal(number, request) or signal.SIG_DFL for number in _ENDING}
    try:
        yield event
    finally:
        restore()
