"""The input, the runs and the tables of a job that writes the sessions of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from python_jobs.shared.delta.commits import write_once
from python_jobs.shared.delta.keyed_tables import DeltaSink
from tests.support.broken_texts import with_broken_texts
from tests.support.page_commands import command_parameters

EVENTS = "visit string, at string, page string, position bigint"

Rows = list[Row]


def at(clock: str) -> str:
    """Return the time of a clock on the day of all events."""
    return f"2024-01-01T{clock}:00Z"


class SessionStream:
    """A table of events, and the sessions that a job makes of it with the page's command."""

    def __init__(self, spark: SparkSession, folder: Path, job: Any, command: str) -> None:
        self.spark, self.folder, self.position = spark, folder, 0
        self._job, self._command = job, command

    def append(self, *events: tuple[str | None, str | None, str]) -> None:
        """Append events as one file: one micro-batch of a run with ``max_files_per_trigger`` 1."""
        rows = [(*event, self.position + number) for number, event in enumerate(events)]
        self.position += len(rows)
        events_of_file = with_broken_texts(self.spark.createDataFrame(rows, EVENTS)).coalesce(1)
        write_once(self.spark, events_of_file, str(self.folder / "events"))

    def parameters(self, **changes: str) -> Any:
        """Return the command's parameters on this folder's tables, with ``changes``."""
        given = {"now": "2024-01-01T12:00:00Z"} | changes
        return command_parameters(self._job.Parameters, self._command, self.folder, given)

    def run(self, **changes: str) -> dict[str, Any]:
        """Run the job to its end and return its report."""
        report: dict[str, Any] = self._job.run(self.spark, self.parameters(**changes))
        return report

    def run_until_crash(self, crashes: Callable[[Rows], bool], **changes: str) -> list[Rows]:
        """Run the job until the crash after the write of a batch for whose rows ``crashes``; return all batches."""
        with written_batches(crashes) as batches, pytest.raises(ConnectionResetError):
            self.run(**changes)
        return batches

    def table(self, name: str) -> DataFrame:
        """Return a Delta table of this folder."""
        return self.spark.read.format("delta").load(str(self.folder / name))

    def rows_now(self, name: str) -> DataFrame:
        """Return a table's rows as they are now, whatever later runs change."""
        table = self.table(name)
        return self.spark.createDataFrame(table.collect(), table.schema)


@contextmanager
def written_batches(crashes: Callable[[Rows], bool] = lambda rows: False) -> Iterator[list[Rows]]:
    """Collect the rows of each batch that the block writes.

    ``crashes`` gets the rows of a batch after their write; if it returns true, the query ends before its commit.
    """
    batches: list[Rows] = []
    write = DeltaSink.write

    def recorded(sink: DeltaSink, rows: DataFrame, run: int) -> None:
        write(sink, rows, run)
        batches.append(rows.collect())
        if crashes(batches[-1]):
            raise ConnectionResetError

    with patch.object(DeltaSink, "write", recorded):
        yield batches
