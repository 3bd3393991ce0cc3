"""SIGTERM and SIGINT end a program where it is ready for it."""

import os
import signal
import threading
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from python_jobs.shared.core.signals import end_requested
from python_jobs.shared.delta.streams import BatchFunction, append, await_end, start_stream


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


class AskedToEnd(BatchFunction):
    """Appends a batch; is told to end in the middle of the first, which lasts until somebody stops the query."""

    def __init__(self, target: str, number: int, stopping: threading.Event) -> None:
        self._target, self._number, self._stopping = target, number, stopping

    def write(self, rows: DataFrame, batch_id: int) -> None:
        append(rows, self._target, {})
        os.kill(os.getpid(), self._number)
        assert self._stopping.wait(30)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stream_ends_by_a_signal_and_a_run_that_had_an_end_says_that_it_was_interrupted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    stopping = threading.Event()
    stop = StreamingQuery.stop
    monkeypatch.setattr(StreamingQuery, "stop", lambda query: (stopping.set(), stop(query)))
    source = str(tmp_path / "source")
    spark.range(2).repartition(2).write.format("delta").save(source)
    interrupted = []
    for trigger in ("1 second", None):
        stopping.clear()
        target = str(tmp_path / f"target_{trigger}")
        function = AskedToEnd(target, number, stopping)
        query = start_stream(
            spark, source, function, f"{target}_checkpoint", trigger, max_files_per_trigger=1
        )
        try:
            await_end(query, function, source)
        except KeyboardInterrupt:
            interrupted.append(trigger)
        assert not query.isActive
        assert spark.read.format("delta").load(target).count() == 1
    assert interrupted == [None]
