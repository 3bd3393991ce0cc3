"""SIGTERM and SIGINT ask a program to end, once; then they do what they did before."""

import os
import signal
import threading

import pytest

from python_jobs.shared.core.signals import end_requested


class Interrupted(Exception):
    """What the handler before the block raises."""


@pytest.fixture(autouse=True)
def raising_handlers():
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_interrupts(first: int, second: int) -> None:
    with end_requested() as stopped:
        assert not stopped.is_set()
        os.kill(os.getpid(), first)
        assert stopped.wait(5)
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), second)


def test_after_the_block_signals_do_what_they_did_before() -> None:
    with end_requested():
        pass
    for number in (signal.SIGTERM, signal.SIGINT):
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), number)


def test_another_thread_than_the_main_one_is_never_asked() -> None:
    seen = []

    def look() -> None:
        with end_requested() as stopped:
            seen.append(stopped.is_set())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [False]
    with pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGTERM)
