"""SIGTERM and SIGINT end a program where it is ready for it."""

import os
import signal
import threading
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from python_jobs.shared.delta.streams import BatchFunction, append, await_end, start_stream


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
