"""Windowed Counter: count events by tumbling window with Spark's own watermark, and report the dropped rows.

Spark's watermark is the latest event time of all partitions minus ``--delay``. It moves between micro-batches. When it
reaches the end of a window, the window is closed, and Spark silently drops a later event of the window. The job reports
each batch's watermark and the dropped rows (``numRowsDroppedByWatermark``), and exits with 3 if a run dropped more
than ``--max_dropped``: then run the Late Data Detector before this job, or use a longer delay.

``--output_mode`` sets when a window is written: ``append`` writes it once, when it is closed; ``update`` writes it with
its first events, and again with each batch that changes its count. With ``update``, late events may revise a window
until ``--delay`` is over. The table then has the ``revision`` (1 at first), its time (``revised_at``) and the window's
date, by which the table is partitioned; consumers must accept revisions.

Spark counts the dropped rows after each task has counted its own events by window: late events of one window and task
are one dropped row. 0 means that no row was dropped. Events without a time are in no window; the report counts them.

Guarantee: each window is in the target once, also after a kill. An append has the batch's transaction id. An update
writes the window's whole count, so a rerun of the batch finds the same count and creates no revision. Cost: one row of
state for each open window and group; ``update`` merges each batch into the windows of its dates. The last windows stay
open until later events come.

Submit (available data, then stop)::

    spark-submit python_jobs/error_management/windowed_counter.py \
        --source lakehouse/silver/visits_by_lateness --target lakehouse/gold/visits_by_10_minutes \
        --checkpoint lakehouse/checkpoints/visits_by_10_minutes --delay "1 hour" --window "10 minutes" \
        --group_by '[page]'

Source: Data Engineering Design Patterns, chapter 3, Late Data Detector; the guide's Watermarking and Late Arrival
Handling.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Any

from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import TimestampType

from python_jobs.shared.core.failures import DataRefused, WrongUse, require_at_least
from python_jobs.shared.core.intervals import parse_duration, to_micros
from python_jobs.shared.delta.commits import is_committed, latest_version
from python_jobs.shared.delta.progress import run_counted
from python_jobs.shared.delta.streams import (
    BatchFunction,
    OutputMode,
    StreamParameters,
    append,
    batch_options,
    create_table,
    evaluated_once,
    nullable,
)
from python_jobs.shared.delta.table_streams import TableStream
from python_jobs.shared.delta.tables import delta_table, read_table
from python_jobs.shared.delta.touched_dates import among, dates_of
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import (
    columns_of,
    identifier,
    named_column,
    named_columns,
    same_columns,
    taken_names,
)

WINDOW_COLUMNS = ("window_start", "window_end", "events")
REVISION_COLUMNS = ("revision", "revised_at", "window_date")
_INPUT = "input"
_WINDOW = "__window"


@dataclass(frozen=True, kw_only=True)
class Parameters(StreamParameters):
    """Count the events of a Delta table by tumbling window of event time."""

    source: str
    """Delta table (name or path) that only grows."""
    target: str
    """Delta table (name or path) of the windows; created when absent."""
    checkpoint: str
    """Folder of the query's progress and state: one for each source and target, kept as long as these tables."""
    event_time: str = "event_time"
    """Timestamp column with the event time."""
    delay: str = "10 minutes"
    """Time by which the watermark stays behind the latest event."""
    window: str = "10 minutes"
    """Length of a window; windows begin at multiples of it since 1970, in UTC."""
    group_by: list[str] = field(default_factory=list)
    """Columns to count by within a window; by default all events together."""
    output_mode: OutputMode = "append"
    """append: a window once, when it is closed; update: at once, and a new revision whenever its count changes."""
    max_dropped: int | None = None
    """Largest allowed number of dropped rows in a run; more rows give exit code 3. By default no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for duration in (self.delay, self.window):
            parse_duration(duration)
        require_at_least(0, max_dropped=self.max_dropped)


def windows(events: DataFrame, params: Parameters) -> DataFrame:
    """Return the count of each window and group; a stream returns a window when the watermark reaches its end."""
    time, groups = named_column(params.event_time), named_columns(params.group_by)
    return (
        events.observe(_INPUT, F.count(F.lit(1)).alias("read"), F.count(time).alias("with_time"))
        .withWatermark(identifier(params.event_time), params.delay)
        .groupBy(F.window(time, params.window).alias(_WINDOW), *groups)
        .agg(F.count(F.lit(1)).alias("events"))
        .select(
            F.col(f"{_WINDOW}.start").alias("window_start"),
            F.col(f"{_WINDOW}.end").alias("window_end"),
            *groups,
            "events",
        )
    )


class ClosedWindowWriter(BatchFunction):
    """The ``foreachBatch`` function of the job: append the windows that closed."""

    def __init__(self, target: str, writer_id: str) -> None:
        self._target, self._writer_id = target, writer_id

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Append one batch of windows, once."""
        if is_committed(rows.sparkSession, self._target, self._writer_id, batch_id):
            # After a run that died after this write, Delta would skip the write without reading the rows. But the state
            # changes while the rows are read, and Spark ends a query whose batch has changed no state.
            rows.write.format("noop").mode("overwrite").save()
            return
        append(rows, self._target, batch_options(self._writer_id, batch_id))


class WindowReviser(BatchFunction):
    """The ``foreachBatch`` function of ``update``: merge the counts that changed, as whole numbers."""

    def __init__(self, spark: SparkSession, params: Parameters) -> None:
        self._target: DeltaTable = delta_table(spark, params.target)
        self._now = params.processing_time
        key = ("window_date", "window_start", *params.group_by)
        self._same_window = same_columns(key, null_safe=True)

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Merge one batch of counts; a count that the table already holds gives no revision."""
        # Kept and read: a merge may read its source twice, and the state changes while the rows are read.
        with evaluated_once(first_revisions(rows, self._now())) as counts:
            dates = dates_of(counts, "window_date")
            if not dates:
                return
            condition = f"{among('window_date', dates)} and {self._same_window}"
            merge = self._target.alias("t").merge(counts.alias("s"), condition)
            changes: dict[str, str | Column] = {
                "events": "s.events",
                "revision": "t.revision + 1",
                "revised_at": "s.revised_at",
            }
            new = columns_of("s", counts.columns)
            merge.whenMatchedUpdate("t.events <> s.events", changes).whenNotMatchedInsert(
                values=new
            ).execute()


def first_revisions(counts: DataFrame, now: dt.datetime) -> DataFrame:
    """Return the counts with the :data:`REVISION_COLUMNS` of windows that are written for the first time."""
    return counts.select(
        "*",
        F.lit(1).alias("revision"),
        F.timestamp_micros(F.lit(to_micros(now))).alias("revised_at"),
        F.to_date("window_start").alias("window_date"),
    )


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the query to its end and report the batches.

    Raises:
        NotReady: the source doesn't exist.
        WrongUse: the event time is not a timestamp, or the target or the checkpoint belongs to another query.
        DataRefused: more rows were dropped than ``max_dropped``; the windows are written without them.
    """
    source = read_table(spark, params.source).limit(0)
    types = {column.name: column.dataType for column in source.schema}
    if not isinstance(types.get(params.event_time), TimestampType):
        raise WrongUse(
            f"'{params.event_time}' is no timestamp column of the source; it has {', '.join(types)}"
        )
    own = (*WINDOW_COLUMNS, *REVISION_COLUMNS)
    unknown = [name for name in params.group_by if name not in types or taken_names([name], by=own)]
    if unknown:
        raise WrongUse(f"group_by can't take {', '.join(unknown)}; it takes columns of the source")
    updates = params.output_mode == "update"
    written = windows(source, params)
    if updates:
        written = first_revisions(written, params.processing_time())
    create_table(spark, params.target, nullable(written.schema), ["window_date"] if updates else [])
    declared = TableStream(
        job="windowed_counter",
        source=params.source,
        writes={"target": params.target},
        appends_to=[params.target],
        meaning={"windows": f"{params.event_time} {params.window} {','.join(params.group_by)}"},
        checkpoint=params.checkpoint,
        start_over=params.start_over,
        trigger=params.trigger,
        max_files_per_trigger=params.max_files_per_trigger,
        transform=lambda events: windows(events, params),
        output_mode=params.output_mode,
    )
    writer_id = declared.claim(spark)
    writer: BatchFunction = (
        WindowReviser(spark, params) if updates else ClosedWindowWriter(params.target, writer_id)
    )
    _, totals = run_counted(spark, lambda: (declared.start(spark, writer), writer), params.source)
    if params.max_dropped is not None and totals.late_rows > params.max_dropped:
        raise DataRefused(
            f"alert: {totals.late_rows} rows came after their window was closed, {params.max_dropped} allowed; "
            "the windows are written without them"
        )
    read = totals.observed(_INPUT, "read")
    return {
        "read": read,
        "without_time": read - totals.observed(_INPUT, "with_time"),
        "dropped": totals.late_rows,
        "open_windows": totals.batches[-1].state_rows if totals.batches else 0,
        "batches": [batch.as_dict() for batch in totals.batches],
        "target": {"table": params.target, "version": latest_version(spark, params.target)},
    }


if __name__ == "__main__":
    run_job(Parameters, run)
