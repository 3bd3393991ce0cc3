"""Streams of sessions: the Stateful Sessionizer against Spark's window, and the Partial State Writer against it.

The stream reads an hour of event time in each batch, in order, so that nothing is late. A last event closes all
sessions but its own.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.data_value import stateful_sessionizer
from python_jobs.shared.delta.state_stores import STATE_STORE
from python_jobs.shared.spark.session import settings
from python_jobs.streaming import partial_state_writer

ROWS = 800_000
HOURS = 8
EVENTS_OF_A_USER = 80
DAY_START = 1_767_225_600_000_000  # 2026-01-01, in microseconds
GAP, DELAY = "10 minutes", "1 minute"
COMPARED = ["user_id", "started_at", "ended_at", "events"]


def events(ids: DataFrame, users: int, micros_of_a_row: int) -> DataFrame:
    """Events in order of time, each of a user who is drawn by hash: about one in six minutes for each user."""
    return ids.select(
        F.pmod(F.xxhash64("id"), F.lit(users)).alias("user_id"),
        F.timestamp_micros(F.lit(DAY_START) + F.col("id") * micros_of_a_row).alias("event_time"),
        F.concat(F.lit("page "), F.col("id") % 1_009).alias("page"),
        F.col("id").alias("position"),
    )


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """Final sessions by three routes, then growing sessions."""
    rows = bench.rows(ROWS)
    source = str(bench.folder / "source")
    micros_of_a_row = HOURS * 3_600_000_000 // rows
    bounds = [hour * rows // HOURS for hour in range(HOURS + 1)]
    for first, end in [*itertools.pairwise(bounds), (rows * 2, rows * 2 + 1)]:
        ids = bench.spark.range(first, end, 1, 1)
        hour = events(ids, max(1, rows // EVENTS_OF_A_USER), micros_of_a_row)
        hour.write.format("delta").mode("append").save(source)
    runs = Runs(bench, source)
    yield Comparison(
        title="Sessions of eight hours of event time",
        rows=rows,
        note=(
            f"{HOURS + 1} batches, gap {GAP}. The plain stream is Spark's session_window alone, appended to a Delta "
            "table: without ids, dead letters and a table that takes a repeated batch."
        ),
        variants=[
            runs.variant("plain session_window", runs.plain),
            runs.variant(
                "job, session_window", lambda: runs.sessionizer("job, session_window", "session_window")
            ),
            runs.variant("job, timers", lambda: runs.sessionizer("job, timers", "timers")),
        ],
        aims=[Aim("job, timers", "plain session_window", 1.3)],
        repetitions=3,
        facts=lambda: runs.state_rows("job, timers"),
    )
    yield Comparison(
        title="The same sessions while they grow",
        rows=rows,
        note="Each batch also writes the sessions that it has changed and not closed.",
        variants=[
            runs.variant("final sessions", lambda: runs.sessionizer("final sessions", "timers")),
            runs.variant("partial and final sessions", runs.partial),
        ],
        aims=[Aim("partial and final sessions", "final sessions", 1.5)],
        repetitions=3,
        facts=lambda: runs.rows_written("final sessions", "partial and final sessions"),
    )


class Runs:
    """Runs of the streams over one source, each in a folder of its own."""

    def __init__(self, bench: Workbench, source: str) -> None:
        self._bench, self._source = bench, source
        self._reports: dict[str, dict[str, Any]] = {}

    def variant(self, name: str, run: Any) -> Variant:
        """Return a variant that starts without tables and without state, and leaves its final sessions."""
        return Variant(
            name,
            run,
            lambda: self._bench.table(self._path(name, "target")).where("is_final").select(*COMPARED),
            lambda: shutil.rmtree(self._bench.folder / name, ignore_errors=True),
        )

    def plain(self) -> None:
        """Run Spark's window."""
        name = "plain session_window"
        stream = (
            self._bench.spark.readStream.format("delta").option("maxFilesPerTrigger", 1).load(self._source)
        )
        windows = stream.withWatermark("event_time", DELAY).groupBy(
            F.session_window("event_time", GAP), "user_id"
        )
        listed = F.array_sort(F.collect_list(F.struct("event_time", "position", "page")))
        sessions = windows.agg(listed.alias("listed")).select(
            "user_id",
            F.expr("listed[0].event_time").alias("started_at"),
            F.expr("element_at(listed, -1).event_time").alias("ended_at"),
            F.size("listed").alias("events"),
            F.expr("listed.page").alias("values"),
            F.lit(True).alias("is_final"),
        )
        sink = sessions.writeStream.format("delta").option(
            "checkpointLocation", self._path(name, "checkpoint")
        )
        with settings(self._bench.spark, STATE_STORE):
            sink.trigger(availableNow=True).start(self._path(name, "target")).awaitTermination()

    def sessionizer(self, name: str, variant: str) -> None:
        """Run the Stateful Sessionizer."""
        parameters = stateful_sessionizer.Parameters(**self._parameters(name), variant=variant)
        self._reports[name] = stateful_sessionizer.run(self._bench.spark, parameters)

    def partial(self) -> None:
        """Run the Partial State Writer, which writes each session that a batch has changed."""
        name = "partial and final sessions"
        parameters = partial_state_writer.Parameters(**self._parameters(name))
        self._reports[name] = partial_state_writer.run(self._bench.spark, parameters)

    def state_rows(self, name: str) -> dict[str, Any]:
        """Return how many owners have state after the batches."""
        owners = [batch["state_rows"] for batch in self._reports[name]["batches"]]
        return {"most owners with state": max(owners), "owners with state in the end": owners[-1]}

    def rows_written(self, *names: str) -> dict[str, Any]:
        """Return the number of rows that the runs gave to MERGE."""
        return {f"rows merged, {name}": f"{self._reports[name]['sessions_written']:,}" for name in names}

    def _parameters(self, name: str) -> dict[str, Any]:
        return {
            "source": self._source,
            "key": {"user_id": "user_id"},
            "event_time": "event_time",
            "ties": ["position"],
            "value": "page",
            "gap": GAP,
            "watermark": DELAY,
            "target": self._path(name, "target"),
            "dead_letter": self._path(name, "dead"),
            "checkpoint": self._path(name, "checkpoint"),
            "max_files_per_trigger": 1,
        }

    def _path(self, variant: str, name: str) -> str:
        return str(self._bench.folder / variant / name)
