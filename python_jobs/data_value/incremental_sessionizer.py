"""Incremental Sessionizer: sessions of events that land in partitions of time, one run for each partition.

Problem: visits land each hour, and a session spans several hours. A query over one partition cuts sessions in pieces,
and a query over all of them costs more each day.

A run reads the events of its interval (``--run``, the start) and the sessions that the run before left open. It writes
three kinds of rows into the private table ``--pending``, in one commit: open sessions, completed sessions, and a marker
that the run is computed. Then it writes the completed sessions into ``--target``, the events without owner, time or
place in the interval into ``--dead_letter``, and the marker that the run is published into ``--pending``.

Guarantee: a session is completed by the run that shows that no event of a later run can join it; events exactly
``--gap`` apart belong to one session. Equal events count once, in any order. A session's id is the hash of its owner
and its start, the same as that of the Stateful Sessionizer. A run is refused (exit code 4) unless the run before is
published; the run that has no run before is named by ``--first_run``. A run that died anywhere leaves no marker: run it
again. A rerun removes the rows of its run and of all later ones from both tables, so that these have to run again in
their order, with late events of their hours. If two runs write at once, the second one is refused.

The sessions of a run can be seen in ``--target`` shortly before the run is published; the macro ``sessions_with_open``
shows published runs alone, with the sessions that are still open.

Cost: one partition of the source, and the open sessions of one run, are read and exchanged once. Completed sessions are
written twice. ``--keep_runs`` limits the runs in ``--pending``, and so how far back a rerun can start.

    spark-submit python_jobs/data_value/incremental_sessionizer.py --source lakehouse/visits \\
        --partition "visit_date = {date} and visit_hour = {hour}" --key.user_id user_id \\
        --event_time event_time --value page --gap "2 hours" \\
        --run 2024-03-01T09 --first_run 2024-03-01T09 --pending lakehouse/pending_sessions \\
        --target lakehouse/sessions --dead_letter lakehouse/visits_without_session

The calculation is that of the dbt macro ``incremental_sessions``, which is rendered here.

Source: Data Engineering Design Patterns, chapter 5, Incremental Sessionizer.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from delta.tables import DeltaTable
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import JobFailed, NotReady, WrongUse, require_at_least
from python_jobs.shared.core.intervals import duration_micros, moved, parse_time, to_micros
from python_jobs.shared.delta.commits import find_commit, numeric_metrics, transaction_version, write_once
from python_jobs.shared.delta.overwrite import overwrite
from python_jobs.shared.delta.streams import create_table, nullable
from python_jobs.shared.delta.tables import delta_table, read_table, table_exists
from python_jobs.shared.records.dead_letters import DEAD_LETTER_COLUMNS, dead_letters
from python_jobs.shared.records.event_times import order_of
from python_jobs.shared.records.json_records import ERROR_CLASS, ERROR_MESSAGE
from python_jobs.shared.spark.expressions import first_line, resolved
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.macro_sql import Macros, refusal_of_macro
from python_jobs.shared.spark.sql_text import (
    columns_of,
    require_free_names,
    string_literal,
    table_name,
    timestamp_literal,
)

WRITES = "incremental_sessionizer"
"""``txnAppId`` under which the runs' commits to the pending table are counted."""

_FILES = [
    "data_value/incremental_sessionizer/events.sql",
    "data_value/incremental_sessionizer/runs.sql",
    "data_value/incremental_sessionizer/sessions.sql",
    "idempotency/surrogate_key.sql",
    "shared/arguments.sql",
    "shared/literals.sql",
    "shared/sessions.sql",
    "shared/times.sql",
]


@dataclass(frozen=True, kw_only=True)
class Parameters(ProcessingTimeParameters):
    """Write the sessions that one run completes, and keep those that it leaves open."""

    source: str
    """Delta table (name or path) of the events."""
    partition: str
    """SQL condition of the run's events; {start}, {end}, {date}, {hour} stand for the run's interval."""
    key: dict[str, str]
    """Columns that identify the session's owner (such as user_id), each with its SQL expression over the source."""
    event_time: str
    """SQL expression of the event's time: a timestamp, a date, or a text that names date and time."""
    ties: list[str] = field(default_factory=list)
    """Integer columns that order and distinguish events of one time, such as partition and offset."""
    value: str
    """SQL expression of the value that a session lists for each event, such as the page."""
    gap: str = "2 hours"
    """Maximum time between two successive events of one session, in minutes, hours or days."""
    run: str
    """Start of the run's interval (2024-03-01T09), which identifies the run."""
    first_run: str
    """Start of the first run's interval; only this run needs no run before it."""
    period: str = "1 hour"
    """Length of the interval of each run, in minutes, hours or days."""
    pending: str
    """Delta table (name or path) of the runs and their open sessions, for this job alone; created when absent."""
    target: str
    """Delta table (name or path) of the completed sessions; created when absent."""
    dead_letter: str
    """Delta table (name or path) of the events that belong to no session of the run; created when absent."""
    keep_runs: int = 168
    """Number of runs in the pending table, the newest one included: a rerun can start at each but the oldest."""
    job_name: str = "incremental_sessionizer"
    """Name of the job in the dead letters."""
    job_version: str = "1"
    """Version of the expressions in the dead letters; raise it with each fix."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(2, keep_runs=self.keep_runs)
        if len({self.source, self.pending, self.target, self.dead_letter}) < 4:
            raise WrongUse("source, pending, target and dead_letter must be four tables")

    def utc(self, text: str) -> str:
        """Return a time as the macros read it."""
        return parse_time(text).replace(tzinfo=None).isoformat()


class Run:
    """One run: the SQL of the macros, with the run's interval."""

    def __init__(self, spark: SparkSession, params: Parameters) -> None:
        """Check the parameters, and read nothing.

        Raises:
            WrongUse: a parameter makes no sense.
        """
        self.spark, self.params = spark, params
        self._macros = Macros(spark, _FILES)
        self._of_run = self._macros.call(
            "_session_run", params.utc(params.run), params.period, params.utc(params.first_run)
        )
        self._gap = self._macros.call("_session_gap", params.gap)
        self._rules = self._macros.call(
            "_session_rules", params.key, params.event_time, params.value, params.partition, params.ties
        )
        self.start: dt.datetime = self._of_run["start"].replace(tzinfo=dt.UTC)
        self.name = str(self._of_run["text"])

    @property
    def is_first(self) -> bool:
        """Whether the run needs no run before it."""
        return bool(self._of_run["is_first"])

    @property
    def from_here(self) -> str:
        """Return the condition of the rows of this run and of all later ones."""
        return f"run_start >= {timestamp_literal(self.start)}"

    @cached_property
    def replaced(self) -> str:
        """Return the condition of the pending table's rows that the run replaces: also those of runs too old."""
        oldest = moved(self.start, -(self.params.keep_runs - 1) * self._of_run["period"])
        return f"{self.from_here} or run_start < {timestamp_literal(oldest)}"

    @property
    def number(self) -> int:
        """Return the run's number since 1970."""
        return to_micros(self.start) // duration_micros(self._of_run["period"])

    def require_previous(self) -> None:
        """Refuse the run if the run before isn't published.

        Raises:
            NotReady: it isn't.
        """
        if self.is_first:
            return
        pending = self.params.pending
        is_published = (
            table_exists(self.spark, pending)
            and (
                self.spark.sql(
                    f"select {self._macros.call('_is_published', table_name(pending), self._of_run)}"
                ).collect()[0][0]
            )
        )
        if not is_published:
            raise NotReady(self._macros.call("_no_previous_run", f"'{pending}'", self._of_run))

    def judged(self) -> DataFrame:
        """Return the run's events with their errors.

        Raises:
            NotReady: there is no source.
            WrongUse: an expression can't be resolved.
        """
        rows = read_table(self.spark, self.params.source)
        require_free_names(rows.columns, DEAD_LETTER_COLUMNS)
        with resolved("ties"):
            order_of(rows, self.params.ties)
        sql = self._macros.call(
            "_judged_session_events_sql", table_name(self.params.source), self._rules, self._of_run
        )
        try:
            return self.spark.sql(sql)
        except (AnalysisException, ParseException) as failure:
            raise WrongUse(f"an expression can't be used ({first_line(failure)})") from None

    def rows(self, judged: DataFrame) -> DataFrame:
        """Return the run's rows of the pending table."""
        view = f"judged_{uuid.uuid4().hex}"
        judged.createOrReplaceTempView(view)
        try:
            return self.spark.sql(
                self._macros.call(
                    "_session_rows_sql",
                    view,
                    table_name(self.params.pending),
                    self._rules["owner"],
                    self._gap,
                    self._of_run,
                )
            )
        finally:
            self.spark.catalog.dropTempView(view)

    def completed(self) -> DataFrame:
        """Return the sessions that the run has completed, from the pending table."""
        return self._of_pending("default__completed_sessions", list(self.params.key))

    def published_marker(self) -> DataFrame:
        """Return the row of the pending table that says that the run is published."""
        sql = self._macros.call("_published_marker_sql", table_name(self.params.pending), self._of_run)
        return self.spark.sql(sql)

    def _of_pending(self, macro: str, owner: Sequence[str]) -> DataFrame:
        params = self.params
        return self.spark.sql(
            self._macros.call(
                macro,
                table_name(params.pending),
                owner,
                params.utc(params.first_run),
                params.utc(params.run),
                params.period,
            )
        )


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Compute and publish one run; return the report.

    Raises:
        NotReady: there is no source, or the run before isn't published.
        JobFailed: another run has written meanwhile.
        WrongUse: a parameter or an expression makes no sense.
        DataRefused: a table has other columns.
    """
    this = Run(spark, params)
    pending = params.pending
    judged = this.judged()
    # The number comes first: whatever another run commits after it, also between the check and the write, is noticed.
    number = (transaction_version(spark, pending, WRITES) or 0) if table_exists(spark, pending) else 0
    this.require_previous()
    counts = Observation()
    counted = judged.observe(
        counts, F.count(F.lit(1)).alias("read"), F.count_if(F.col(ERROR_CLASS).isNotNull()).alias("dead")
    )
    rows = this.rows(counted)
    if not table_exists(
        spark, pending
    ):  # a write would create it by a query without rows, which ends the counts
        create_table(spark, pending, nullable(rows.schema), ["run_start"])
    computed = overwrite(
        spark,
        rows,
        pending,
        this.replaced,
        transaction=(WRITES, number + 1),
        note={WRITES: {"run": this.name}},
    )
    _require_own_turn(computed, params)
    dead = int(counts.get["dead"])
    completed = _publish(this, params, number + 2, dead)
    return {
        "run": this.name,
        "read": int(counts.get["read"]),
        "dead": dead,
        "completed": completed,
        "open": _rows_written(computed) - completed - 1,
        "target": params.target,
    }


def _publish(this: Run, params: Parameters, number: int, dead: int) -> int:
    """Write the completed sessions, the dead letters and then the marker; return the number of completed sessions."""
    spark = this.spark
    try:
        written = overwrite(
            spark, this.completed(), params.target, this.from_here, partitioned_by=["started_date"]
        )
    except (PySparkException, Py4JJavaError) as failure:
        refused = refusal_of_macro(failure)
        if refused is None:
            raise
        raise JobFailed(f"another run has written meanwhile ({refused})") from None
    if dead:
        _keep_dead_letters(this, params)
    marker = write_once(spark, this.published_marker(), params.pending, transaction=(WRITES, number))
    _require_own_turn(find_commit(spark, params.pending, marker), params)
    return _rows_written(written)


def _keep_dead_letters(this: Run, params: Parameters) -> None:
    """Add the run's dead letters that aren't there yet: a rerun changes no state of theirs."""
    rows = this.judged().where(F.col(ERROR_CLASS).isNotNull())
    records = rows.select("lakehouse_patterns_record.*", ERROR_CLASS, ERROR_MESSAGE)
    found = dead_letters(
        records,
        records.columns[:-2],
        this.number,
        params.job_name,
        params.job_version,
        params.processing_time().isoformat(),
    ).coalesce(1)
    create_table(this.spark, params.dead_letter, nullable(found.schema))
    table: DeltaTable = delta_table(this.spark, params.dead_letter)
    same = f"t.batch_id = {this.number} and t.job_name = {string_literal(params.job_name)} and "
    merge = table.alias("t").merge(found.alias("s"), f"{same}t.dead_letter_id = s.dead_letter_id")
    merge.whenNotMatchedInsert(values=columns_of("s", found.columns)).execute()


def _require_own_turn(commit: dict[str, Any] | None, params: Parameters) -> None:
    """Refuse the run if another one has taken the number of its commit.

    Raises:
        JobFailed: another one has.
    """
    if commit is None:
        raise JobFailed(
            f"another run has written into '{params.pending}' meanwhile; one run at a time is right: run again"
        )


def _rows_written(commit: dict[str, Any] | None) -> int:
    return 0 if commit is None else numeric_metrics(commit).get("numOutputRows", 0)


if __name__ == "__main__":
    run_job(Parameters, run)
