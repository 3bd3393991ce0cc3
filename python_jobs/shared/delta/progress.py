"""Progress of the micro-batches of a stateful query: the number of dropped rows and the size of the state.

Spark silently drops late rows and duplicates; only its progress events have their counts. ``query.recentProgress``
keeps the last hundred events, so a listener adds up the counts of all events.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.shared.core.intervals import from_micros
from python_jobs.shared.delta.streams import SOURCE_FAILURES, BatchFunction, await_end

Function = TypeVar("Function", bound=BatchFunction)

_EPOCH = from_micros(0)
_DELIVERY_SECONDS = 30


@dataclass(frozen=True)
class BatchProgress:
    """One micro-batch. A micro-batch without input only moves the watermark and evicts state."""

    batch_id: int
    watermark: dt.datetime | None
    """Watermark with which the batch ran, computed from the earlier batches; None if there was none yet."""
    late_rows: int
    """Number of rows that the stateful operators dropped because they were behind the watermark."""
    duplicate_rows: int
    """Number of rows dropped as duplicates; 0 for a query that doesn't deduplicate."""
    state_rows: int
    state_bytes: int
    observed: dict[str, dict[str, Any]]
    """Values of the query's observed metrics (``DataFrame.observe``), by name of the observation and of the metric."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a report."""
        return {name: value for name, value in asdict(self).items() if name != "observed"}


def batch_progress(progress: StreamingQueryProgress) -> BatchProgress:
    """Return the progress of the batch that an event describes."""
    operators = progress.stateOperators
    watermark = (progress.eventTime or {}).get("watermark")
    moment = dt.datetime.fromisoformat(watermark) if watermark else _EPOCH
    return BatchProgress(
        batch_id=progress.batchId,
        watermark=None if moment == _EPOCH else moment,
        late_rows=sum(operator.numRowsDroppedByWatermark for operator in operators),
        duplicate_rows=sum(
            operator.customMetrics.get("numDroppedDuplicateRows", 0) for operator in operators
        ),
        state_rows=sum(operator.numRowsTotal for operator in operators),
        state_bytes=sum(operator.memoryUsedBytes for operator in operators),
        observed={name: row.asDict() for name, row in progress.observedMetrics.items()},
    )


class ProgressListener(StreamingQueryListener):
    """Adds up the progress of each query that starts while it listens."""

    def __init__(self) -> None:
        self._totals: dict[str, ProgressTotals] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """Start the totals of the query at 0."""
        self._totals[str(event.runId)] = ProgressTotals()

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """Add one batch."""
        self._totals[str(event.progress.runId)].add(batch_progress(event.progress))

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        """Do nothing: an idle query has no batch."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """Mark the totals of the query as complete."""
        self._totals[str(event.runId)].ended.set()

    def totals(self, query: StreamingQuery) -> ProgressTotals:
        """Return the totals of a query that has ended.

        Spark delivers the last events shortly after the end; the method waits for them up to 30 seconds.
        """
        totals = self._totals[str(query.runId)]
        if not totals.ended.wait(_DELIVERY_SECONDS):
            raise TimeoutError(
                f"Spark didn't deliver the query's last progress in {_DELIVERY_SECONDS} seconds"
            )
        return totals


class ProgressTotals:
    """Sums over all batches of one run of a query, and the progress of its last hundred batches."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.batches: deque[BatchProgress] = deque(maxlen=100)
        self.late_rows = self.duplicate_rows = self.peak_state_rows = 0
        self._observed: dict[tuple[str, str], int] = {}

    def add(self, batch: BatchProgress) -> None:
        """Add one batch."""
        self.batches.append(batch)
        self.late_rows += batch.late_rows
        self.duplicate_rows += batch.duplicate_rows
        self.peak_state_rows = max(self.peak_state_rows, batch.state_rows)
        for name, metrics in batch.observed.items():
            for metric, value in metrics.items():
                self._observed[name, metric] = self._observed.get((name, metric), 0) + (value or 0)

    def observed(self, name: str, metric: str) -> int:
        """Return the sum of an observed count over all batches; 0 before the first batch."""
        return self._observed.get((name, metric), 0)


def run_counted(
    spark: SparkSession,
    start: Callable[[], tuple[StreamingQuery, Function]],
    source: str,
    source_failures: Mapping[str, str] = SOURCE_FAILURES,
) -> tuple[Function, ProgressTotals]:
    """Run the query that ``start`` starts to its end; return its batch function and the totals of its batches.

    ``source`` and ``source_failures`` are those of :func:`python_jobs.shared.delta.streams.await_end`, which raises.
    """
    with listening(spark) as listener:
        query, function = start()
        await_end(query, function, source, source_failures)
        return function, listener.totals(query)


@contextmanager
def listening(spark: SparkSession) -> Iterator[ProgressListener]:
    """Listen to the queries that the block starts; read their totals within the block."""
    listener = ProgressListener()
    spark.streams.addListener(listener)
    try:
        yield listener
    finally:
        spark.streams.removeListener(listener)
