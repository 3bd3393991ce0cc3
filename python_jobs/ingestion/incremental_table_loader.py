"""Incremental Loader, tables: load the rows whose ingestion time lies in a half-open window.

Problem: an append-only source table grows. Each run must load the rows that were added since the last run, and the
replay of an old window must read this window and not all later rows. The source is a Delta table or, with
``--jdbc_url``, a table of a PostgreSQL database.

Guarantee: each row of a window is loaded unchanged and once, even if windows are run repeatedly, in any order, or
killed. Rows without a usable ingestion time are in no window: they go to ``<target>_rejects`` with a reason, so that
loaded + already loaded + rejected = read.

- A run with a **window** (``--from``, ``--to``) has no state. ``append`` adds the rows of the window that the target
  lacks, compared by ``--key`` and the delta column. ``replace_window`` replaces the target's rows of the window by the
  source's rows, for targets that nobody reads as a stream.
- The window of a **stateful** run (``--bootstrap_from``) starts at the end of the last run's window. The commit of the
  data stores this time as its transaction number, so a killed run has stored both or neither, and the time never moves
  back. ``--overlap_minutes`` reads this much time before the window again, for rows that were committed late with an
  older ingestion time. Rows that the target has, by key and delta column, are left out.

The rejects are committed before the data. If two runs load one target at once, the run that commits second starts again
from the new state of the target.

PostgreSQL: ``--partitions`` connections read a window, each a slice of equal length. All connections see one snapshot
of the database, also for the rejects. A transaction that is open at that moment is not in the snapshot, whatever
ingestion time its rows have: ``--overlap_minutes`` must cover the longest transaction and the difference of the clocks.
``--password_env`` or ``--password_file`` names the password's source. A time of infinity is in no window.

Not guaranteed: deletions. A row that is deleted from the source stays in the target: mark it as deleted and update its
ingestion time, or use Change Data Capture.

Not guaranteed: a later row that has the key and the ingestion time of a loaded row. It counts as already loaded.

Cost: a run reads the source's files of the window, by Delta's file statistics of the delta column, and the target's
files of the same window. In PostgreSQL it reads an index range if the delta column has an index. With
``--delta_expression`` a run reads the whole source.

    spark-submit python_jobs/ingestion/incremental_table_loader.py --source legacy.visits \\
        --target lakehouse/bronze/bronze_legacy_visits --delta_column ingestion_time --key visit_id \\
        --from 2024-03-01T10 --to 2024-03-01T11

Source: Data Engineering Design Patterns, chapter 2, Incremental Loader.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, Literal

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, TimestampNTZType, TimestampType

from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import WrongUse, given, require_at_least
from python_jobs.shared.core.intervals import Interval, duration, from_micros, moved, parse_time, to_micros
from python_jobs.shared.delta.commits import (
    find_commit,
    latest_version,
    transaction_version,
    until_committed,
    write_once,
)
from python_jobs.shared.delta.tables import read_table, table_exists
from python_jobs.shared.postgres.snapshots import PostgresParameters, one_snapshot, quote, time_slices
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import identifier, named_column, named_columns, timestamp_literal
from python_jobs.shared.spark.times import EXACT_JSON, full_timestamp

APP_ID = "lakehouse_patterns.incremental_table_loader"

_COMMIT_ATTEMPTS = 10


@dataclass(frozen=True)
class Parameters(ProcessingTimeParameters, PostgresParameters):
    """Load the rows of a table whose ingestion time lies in a window."""

    source: str
    """Table to read, by path or catalog name; with jdbc_url, as in PostgreSQL's from clause."""
    target: str
    """Table to write, by path or catalog name; created if absent. Rejects go to <target>_rejects."""
    delta_column: str
    """Timestamp column with the ingestion time of a row; the event time would miss late rows."""
    delta_expression: str | None = None
    """SQL expression over the source's columns for the delta column, which the target has in addition; it gives a
    timestamp, or a text with date and time."""
    from_: str | None = None
    """Start of the window, inclusive."""
    to: str | None = None
    """End of the window, exclusive; by default a stateful run takes the clock's time."""
    bootstrap_from: str | None = None
    """Start of the first window of stateful runs, instead of from; later windows start at the end of the last one."""
    overlap_minutes: int = 0
    """Minutes before the window that a stateful run reads again, for rows that were committed late."""
    mode: Literal["append", "replace_window"] = "append"
    """replace_window rewrites the target's rows of the window: for tables that nobody reads as a stream."""
    key: list[str] | None = None
    """Columns that, together with the delta column, identify one version of a row."""
    partitions: int = 4
    """Number of connections that read a window of PostgreSQL at once."""

    def __post_init__(self) -> None:
        ProcessingTimeParameters.__post_init__(self)
        PostgresParameters.__post_init__(self)
        if (self.from_ is None) == (self.bootstrap_from is None):
            raise WrongUse(
                "pass either from and to (one window) or bootstrap_from (continue after the last run)"
            )
        if self.from_ is not None:
            if self.to is None:
                raise WrongUse(
                    "a window needs both from and to: without an end a replay also reads all later rows"
                )
            Interval.parse(self.from_, self.to)
            if self.overlap_minutes:
                raise WrongUse("overlap_minutes belongs to stateful runs; widen the window instead")
        require_at_least(0, overlap_minutes=self.overlap_minutes)
        if self.mode == "append" and not self.key and (self.from_ is not None or self.overlap_minutes):
            raise WrongUse(
                "mode append needs key here, to leave out rows that an earlier run of the window has loaded; "
                "or pass mode replace_window"
            )
        require_at_least(1, partitions=self.partitions)

    @property
    def rejects(self) -> str:
        """Return the companion table of the target for rows that belong to no window."""
        return self.target.rstrip("/") + "_rejects"

    @property
    def state_id(self) -> str:
        """Return the ``txnAppId`` under which the target stores the end of this source's last window."""
        place = "" if self.postgres is None else f"{self.postgres.place}/"
        return f"{APP_ID}:{place}{self.source}"


@dataclass(frozen=True)
class Source:
    """The rows of a Delta table or PostgreSQL table, with their delta column."""

    rows: DataFrame
    """All rows."""
    undated: DataFrame
    """All rows without an ingestion time; other rows may be among them."""
    within: Callable[[Interval], DataFrame]
    """Function that returns the rows of a window."""


# --- from DataFrames to DataFrames ----------------------------------------------------------------------


def with_delta_column(source: DataFrame, delta_column: str, delta_expression: str | None) -> DataFrame:
    """Return the source with its delta column; NULL where the text that an expression gives is no full timestamp.

    Raises:
        WrongUse: the column is absent or no timestamp, the computed column has the name of a source column, or the
            expression gives neither a timestamp nor a text.
    """
    types = {field.name: field.dataType for field in source.schema}
    if delta_expression is not None:
        if delta_column in types:
            raise WrongUse(
                f"the source has a column {delta_column}; give the computed delta column another name"
            )
        rows = source.withColumn(delta_column, F.expr(delta_expression))
        type_ = rows.select(named_column(delta_column)).schema[0].dataType
        if isinstance(type_, StringType):
            return rows.withColumn(delta_column, full_timestamp(identifier(delta_column)))
        if not isinstance(type_, TimestampType | TimestampNTZType):
            raise WrongUse(
                f"delta_expression {delta_expression} gives {type_.simpleString()}; it must give a timestamp, such as "
                "timestamp_millis(number), or a text with date and time"
            )
        return rows.withColumn(delta_column, named_column(delta_column).try_cast("timestamp"))
    if delta_column not in types:
        raise WrongUse(f"the source has no column {delta_column}; it has {', '.join(types)}")
    if not isinstance(types[delta_column], TimestampType | TimestampNTZType):
        raise WrongUse(
            f"delta column {delta_column} is {types[delta_column].simpleString()}, not a timestamp; "
            "pass delta_expression to compute one"
        )
    return source


def in_window(rows: DataFrame, delta_column: str, window: Interval) -> DataFrame:
    """Return the rows with ``start <= delta_column < end``."""
    return rows.where(window_condition(delta_column, window))


def window_condition(delta_column: str, window: Interval) -> str:
    """Return the window as an SQL condition with literal bounds, so that Delta can skip files by their statistics."""
    start, end = map(timestamp_literal, (window.start, window.end))
    return f"{identifier(delta_column)} >= {start} and {identifier(delta_column)} < {end}"


def not_in(rows: DataFrame, present: DataFrame, identity: Sequence[str]) -> DataFrame:
    """Return the rows whose values in ``identity`` are not in ``present``; NULL equals NULL."""
    same = (named_column(name, of="rows").eqNullSafe(named_column(name, of="present")) for name in identity)
    return rows.alias("rows").join(present.alias("present"), reduce(and_, same), "left_anti")


def undated(rows: DataFrame, delta_column: str, delta_expression: str | None) -> DataFrame:
    """Return the rows without an ingestion time as JSON (``source_row``) with a ``reason``."""
    columns = [name for name in rows.columns if delta_expression is None or name != delta_column]
    reason = F.lit(f"{delta_column} is null")
    if delta_expression is not None:
        unparsable = F.lit(f"{delta_expression} is not a timestamp")
        reason = F.when(F.expr(delta_expression).isNull(), F.lit(f"{delta_expression} is null")).otherwise(
            unparsable
        )
    return rows.where(named_column(delta_column).isNull()).select(
        F.to_json(F.struct(*named_columns(columns)), EXACT_JSON).alias("source_row"),
        reason.alias("reason"),
    )


# --- the run --------------------------------------------------------------------------------------------


def run(spark: SparkSession, parameters: Parameters) -> dict[str, Any]:
    """Load one window and return the report; if another run commits first, start again from its result.

    Raises:
        NotReady: there is no source table.
        WrongUse: the delta column can't be used, or the target has other columns.
        JobFailed: other runs committed first ten times in a row.
    """
    now = parameters.processing_time()
    other_runs = f"other runs kept committing to {parameters.target}; run again"
    return until_committed(lambda: _load(spark, parameters, now), _COMMIT_ATTEMPTS, other_runs)


def next_window(spark: SparkSession, parameters: Parameters, now: dt.datetime) -> Interval | None:
    """Return the window to load, without the overlap; None if a stateful run has nothing to load yet."""
    if parameters.from_ is not None and parameters.to is not None:
        return Interval.parse(parameters.from_, parameters.to)
    start = parse_time(given(parameters.bootstrap_from, "bootstrap_from"))
    if table_exists(spark, parameters.target):
        state = transaction_version(spark, parameters.target, parameters.state_id)
        start = start if state is None else from_micros(state)
    end = now if parameters.to is None else parse_time(parameters.to)
    return Interval(start, end) if start < end else None


@contextmanager
def open_source(spark: SparkSession, parameters: Parameters) -> Iterator[Source]:
    """Open one snapshot of the source for the block; raises like :func:`with_delta_column`."""
    column, expression = parameters.delta_column, parameters.delta_expression
    if parameters.postgres is None:
        rows = with_delta_column(read_table(spark, parameters.source), column, expression)
        yield Source(rows, rows, lambda window: in_window(rows, column, window))
        return
    with one_snapshot(spark, parameters.postgres) as snapshot:

        def read(*conditions: str) -> DataFrame:
            return with_delta_column(snapshot.read(parameters.source, conditions), column, expression)

        rows = read()
        if expression is not None:
            yield Source(rows, rows, lambda window: in_window(rows, column, window))
        else:
            yield Source(
                rows,
                read(f"{quote(column)} is null"),
                lambda window: read(*time_slices(column, window, parameters.partitions)),
            )


def _load(spark: SparkSession, parameters: Parameters, now: dt.datetime) -> dict[str, Any] | None:
    """Return the report; None if another run has committed the transaction number of this run."""
    with open_source(spark, parameters) as source:
        return _load_from(spark, parameters, source, now)


def _load_from(
    spark: SparkSession, parameters: Parameters, source: Source, now: dt.datetime
) -> dict[str, Any] | None:
    _check_target(spark, parameters.target, source.rows)
    window = next_window(spark, parameters, now)
    report: dict[str, Any] = {
        "source": parameters.source,
        "target": parameters.target,
        "from": window and window.start.isoformat(),
        "to": window and window.end.isoformat(),
    }
    if window is None:
        return report | {"rows_read": 0, "rows_loaded": 0, "rows_already_loaded": 0, "rows_rejected": 0}

    rejected = _write_rejects(spark, parameters, source.undated, now)
    if rejected is None:
        return None
    overlap = duration("minutes", parameters.overlap_minutes)
    reach = Interval(moved(window.start, -overlap), window.end)
    observation = Observation()
    rows = source.within(reach).observe(observation, F.count(F.lit(1)).alias("rows"))
    replacing = parameters.mode == "replace_window"
    if not replacing and parameters.key and table_exists(spark, parameters.target):
        target = in_window(read_table(spark, parameters.target), parameters.delta_column, reach)
        rows = not_in(rows, target, [*parameters.key, parameters.delta_column])

    state = to_micros(window.end)
    stateful = (parameters.state_id, state) if parameters.bootstrap_from is not None else None
    transaction = stateful or _first_write(spark, parameters.target)
    user_metadata = write_once(
        spark,
        rows,
        parameters.target,
        transaction=transaction,
        replace_where=window_condition(parameters.delta_column, reach) if replacing else None,
    )
    commit = find_commit(spark, parameters.target, user_metadata)
    if commit is None and transaction is not None:
        return None
    read = observation.get["rows"]
    # Delta writes no commit when there is nothing to write.
    loaded = int(commit["operationMetrics"].get("numOutputRows", 0)) if commit else 0
    return report | {
        "rows_read": read + rejected["rows_rejected"],
        "rows_loaded": loaded,
        "rows_already_loaded": read - loaded,
        **rejected,
        "table_version": commit["version"] if commit else latest_version(spark, parameters.target),
    }


def _write_rejects(
    spark: SparkSession, parameters: Parameters, source: DataFrame, now: dt.datetime
) -> dict[str, Any] | None:
    """Append the undated rows that the rejects table lacks; of a row that repeats, append the missing copies.

    Returns the report's part on rejects, or None if another run has created the table meanwhile.
    """
    rejects = undated(source, parameters.delta_column, parameters.delta_expression)
    seen = rejects.count()
    if table_exists(spark, parameters.rejects):
        rejects = rejects.exceptAll(read_table(spark, parameters.rejects).select("source_row", "reason"))
    if seen and not rejects.isEmpty():
        rejects = rejects.withColumn("rejected_at", F.timestamp_micros(F.lit(to_micros(now))))
        first = _first_write(spark, parameters.rejects)
        user_metadata = write_once(spark, rejects, parameters.rejects, transaction=first)
        if first and find_commit(spark, parameters.rejects, user_metadata) is None:
            return None
    version = latest_version(spark, parameters.rejects) if table_exists(spark, parameters.rejects) else None
    return {"rows_rejected": seen, "rejects_version": version}


def _first_write(spark: SparkSession, table: str) -> tuple[str, int] | None:
    """Return the transaction for the first write of an absent table; None if the table exists.

    Delta detects a concurrent commit to a table that the write has read. It can't do so for a table that was absent, so
    all first writes use the same transaction, and only one of them succeeds.
    """
    return None if table_exists(spark, table) else (f"{APP_ID}:first", 0)


def _check_target(spark: SparkSession, target: str, rows: DataFrame) -> None:
    """Raise WrongUse if the target exists and has other columns than the rows."""
    if not table_exists(spark, target):
        return
    has, needs = dict(read_table(spark, target).dtypes), dict(rows.dtypes)
    if has != needs:
        differing = sorted(name for name in has.keys() | needs.keys() if has.get(name) != needs.get(name))
        raise WrongUse(
            f"target {target} is a table of another schema: "
            + "; ".join(
                f"{n} is {has.get(n, 'absent')}, the source's is {needs.get(n, 'absent')}" for n in differing
            )
        )


if __name__ == "__main__":
    run_job(Parameters, run)
