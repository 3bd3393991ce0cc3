"""Batch Reprocessor: sessions or windows of a past range again, from the lakehouse's copy of a topic's records.

Problem: a faulty release wrote wrong sessions for three weeks. The topic has the records of two weeks, the raw table
those of six months. A stream over the raw table would compute everything again, and a batch over the range alone cuts
the sessions at its edges.

The job computes sessions by the rule, the expressions and the ids of the streaming jobs (Stateful Sessionizer, Partial
State Writer), and replaces the rows in their table. Modes:

* ``full``: the sessions of all owners with records in ``[--from, --to)``. It reads the range's partitions, then one
  before and one behind, and so on, as far as a session can still go on: until the distance from an owner's first or
  last event to the unread partitions reaches ``--gap``. Rows of the target that lie over the range are computed again
  from their first to their last moment, so that a row that was too long leaves no hole. If the walk hasn't come to its
  end after ``--max_steps``, the job fails and writes nothing.
* ``approximate``: the range, and ``--neighbours`` partitions on each side. Sessions can be cut, so the rows go to a
  table of their own with a column ``is_approximate``.
* ``windows``: the number of events of each owner in windows of event time, such as 10 minutes. These need no
  neighbours: the job reads exactly the range.

Guarantee: the result depends on the raw table alone: a rerun gives the same rows and writes no commit. In one commit,
the target's rows of the range's owners are replaced, and those that the records don't give any more are deleted: wrong
sessions, and those of owners whose records were erased. Rows of other owners and of a higher ``--release`` stay. Rows
carry the origin ``reprocessing``. A live job can run meanwhile: ``--until`` is its watermark, and each session belongs
to one of both: those that it has closed by then are computed again, later ones are left to it.

Cost: each partition is read once. Each step is one action of Spark, with two exchanges by owner.

Submit::

    spark-submit python_jobs/streaming/batch_reprocessor.py --source lakehouse/bronze/visits_records \\
        --partition "visit_date = {date} and visit_hour = {hour}" --period "1 hour" \\
        --from 2024-03-01T10 --to 2024-03-02T00 --until 2024-03-21T09:55:00 --release 2 \\
        --key.visit_id "get_json_object(payload, '$.visit_id')" \\
        --event_time "get_json_object(payload, '$.event_time')" --ties '[partition, offset]' \\
        --value "get_json_object(payload, '$.page')" --gap "10 minutes" --target lakehouse/gold/live_sessions

Source: Data Engineering Design Patterns, chapter 11, Batch Reprocessor.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Literal, cast

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import JobFailed, WrongUse, require_at_least
from python_jobs.shared.core.intervals import Interval, moved, parse_duration, parse_time, to_micros
from python_jobs.shared.core.origins import ORIGIN, Origin
from python_jobs.shared.core.sessions import closing_time, is_same_session
from python_jobs.shared.delta.commits import latest_version
from python_jobs.shared.delta.keyed_tables import DeltaSink
from python_jobs.shared.delta.streams import empty_source, evaluated_once
from python_jobs.shared.delta.tables import read_table, read_version
from python_jobs.shared.records.json_records import ERROR_CLASS
from python_jobs.shared.records.session_rows import (
    EVENT_TIME,
    MICROS,
    ORDER,
    SESSION_COLUMNS,
    VALUE,
    VERSION,
    WRITTEN_AT,
    SessionRows,
)
from python_jobs.shared.spark.expressions import first_line
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.macro_sql import Macros
from python_jobs.shared.spark.sql_text import (
    date_literal,
    named_columns,
    timestamp_literal,
)
from python_jobs.shared.spark.times import stamped
from python_jobs.streaming.corrections import (
    ACTION,
    ADDED,
    OLD,
    REMOVED,
    REPLACED,
    UNCHANGED,
    as_struct,
    compared,
    write_corrections,
)
from python_jobs.streaming.reconstruction import HIGH, LOW, Walk, kept

IS_APPROXIMATE = "is_approximate"
WINDOW_COLUMNS = ("window_start", "window_end", "window_date")
_MICROSECOND = dt.timedelta(microseconds=1)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_OWNER, _BEYOND, _BEYOND_TYPE = "__owner", "__beyond", "struct<first: timestamp, last: timestamp>"


@dataclass(frozen=True, kw_only=True)
class Parameters(SessionRows, ProcessingTimeParameters):
    """Compute the sessions or windows of a past range again, from a Delta table of raw records."""

    mode: Literal["full", "approximate", "windows"] = "full"
    """``full`` (default): whole sessions; ``approximate``: sessions within what is read; ``windows``: counts."""
    partition: str
    """SQL condition of a period's records; {start}, {end}, {date}, {hour} stand for the period's interval."""
    period: str = "1 hour"
    """Length of the raw table's partitions: a divisor or a multiple of a day."""
    from_: str
    """Start of the range, which is the start of a period."""
    to: str
    """End of the range, the start of the first period that isn't in it."""
    until: str
    """The live job's watermark, or the time up to which the raw table is complete; nothing later is written."""
    gap: str = "10 minutes"
    """Maximum event time between two successive events of one session."""
    max_steps: int = 100
    """Maximum number of partitions that are read before the range, and behind it (mode full)."""
    neighbours: int = 0
    """Number of partitions that are read before the range, and behind it (mode approximate)."""
    window: str = "10 minutes"
    """Length of the windows, which the range holds whole (mode windows)."""
    erased: str | None = None
    """Delta table (name or path) of erased owners, with the key's columns: their records are left out."""
    target: str
    """Delta table (name or path) of the sessions, such as the live job's, or of the windows; created when absent."""
    origin: Origin = "reprocessing"
    """Origin that the rows carry."""
    release: int = 1
    """Number of the release: rows of a higher one stay as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ProcessingTimeParameters.__post_init__(self)
        require_at_least(1, max_steps=self.max_steps)
        require_at_least(0, neighbours=self.neighbours)
        if self.source == self.target:
            raise WrongUse(f"source and target must be two tables, got '{self.source}' for both")
        units = {"period": self.period} | ({"window": self.window} if self.mode == "windows" else {})
        for name, length in units.items():
            for moment in (self.range.start, self.range.end):
                if (moment - _EPOCH) % parse_duration(length):
                    raise WrongUse(
                        f"from and to must be starts of a {name} of '{length}', got {moment.isoformat()}"
                    )
        if self.range.end > parse_time(self.until):
            raise WrongUse(
                f"to {self.to} is later than until {self.until}: the live job hasn't finished this range yet"
            )

    @classmethod
    def own_columns(cls) -> Sequence[str]:
        """Return the columns that the job adds to the key in its targets."""
        return (*SESSION_COLUMNS, *WINDOW_COLUMNS, IS_APPROXIMATE)

    @property
    def range(self) -> Interval:
        """The range to reprocess."""
        return Interval.parse(self.from_, self.to)

    @property
    def walk(self) -> Walk:
        """How far the reconstruction goes."""
        return Walk(
            key=list(self.key),
            gap=parse_duration(self.gap),
            period=parse_duration(self.period),
            # The record of this very time still shows that a session is open.
            stop=moved(parse_time(self.until), _MICROSECOND),
            max_steps=self.max_steps if self.mode == "full" else self.neighbours,
        )

    def is_closed(self, ended_at: str) -> Column:
        """Return whether a session that ends at this column's time is closed at ``until``."""
        end: Any = F.unix_micros(ended_at)
        return cast(Column, closing_time(end, self.gap_micros) <= to_micros(parse_time(self.until)))

    def occupied(self, stored: DataFrame) -> DataFrame:
        """Return the owners and times of the target's sessions that lie over the range and may be replaced."""
        start, end = (timestamp_literal(moment) for moment in (self.range.start, self.range.end))
        over = stored.where(f"ended_at >= {start} and started_at < {end}")
        over = over.where(F.col("started_date") <= F.expr(date_literal(self.range.end.date())))
        over = over.where(self.is_closed("ended_at") & (F.col("release") <= self.release))
        ends = (F.unix_micros("started_at").alias(LOW), F.unix_micros("ended_at").alias(HIGH))
        return over.select(*named_columns(self.key), *ends)

    def windows(self, records: DataFrame) -> DataFrame:
        """Return the windows of complete records as rows of the target, but for the time of writing."""
        of_window = records.groupBy(
            F.window(EVENT_TIME, self.window).alias("__window"), *named_columns(self.key)
        )
        return of_window.agg(F.size(F.collect_set(F.struct(MICROS, ORDER, VALUE))).alias("__events")).select(
            F.col("__window.start").alias("window_start"),
            F.col("__window.end").alias("window_end"),
            *named_columns(self.key),
            F.col("__events").alias("events"),
            F.lit(self.release).alias("release"),
            F.lit(self.origin).alias(ORIGIN),
            F.to_date("__window.start").alias("window_date"),
        )

    def of_sessions(self, records: DataFrame, read: Interval) -> DataFrame:
        """Return the sessions of complete records as rows of the target, but for the time of writing."""
        sessions = self.rows(self.sessions(records))
        if self.mode == "full":
            return sessions
        start: Any = F.unix_micros("started_at")
        end: Any = F.unix_micros("ended_at")
        may_be_cut = cast(
            Column,
            is_same_session(to_micros(read.start) - 1, start, self.gap_micros)
            | is_same_session(end, to_micros(read.end), self.gap_micros),
        )
        return sessions.withColumn(IS_APPROXIMATE, may_be_cut)


class RawTable:
    """The raw table at one version: its partitions, and what their records are."""

    def __init__(self, spark: SparkSession, params: Parameters) -> None:
        """Take the table's newest version.

        Raises:
            NotReady: there is no such table, or no table of erased owners.
            WrongUse: an expression can't be resolved.
        """
        self._params, self._macros = params, Macros(spark, ["shared/sessions.sql", "shared/literals.sql"])
        self._empty = empty_source(spark, params.source, ())
        self.version = latest_version(spark, params.source)
        # Each step reads the same version, whatever is appended meanwhile.
        self._rows = read_version(spark, params.source, self.version)
        self._erased = None
        if params.erased is not None:
            owners = read_table(spark, params.erased)
            missing = [name for name in params.key if name not in owners.columns]
            if missing:
                raise WrongUse(f"erased '{params.erased}' has no column {', '.join(missing)} of the key")
            self._erased = owners.select(as_struct(list(params.key)).alias(_OWNER)).distinct()

    @cached_property
    def of_range(self) -> DataFrame:
        """The range's records with their owners, times and errors, of which one action keeps what all read."""
        columns = named_columns([*self._params.key, EVENT_TIME, ORDER, VALUE, ERROR_CLASS])
        return kept(self._judged(self._params.range).select(*columns))

    def complete(self, interval: Interval) -> DataFrame:
        """Return the records of an interval, whole periods, that have an owner and a time, without erased owners."""
        is_range = interval == self._params.range
        return self._complete(self.of_range if is_range else self._judged(interval), interval)

    def none(self) -> DataFrame:
        """Return no record, with the columns of complete ones."""
        return self._complete(self._params.judged(self._empty), self._params.range)

    def _judged(self, interval: Interval) -> DataFrame:
        """Return the records of an interval's partitions with their owners, times and errors.

        Raises:
            WrongUse: the condition of a partition can't be used.
        """
        period = parse_duration(self._params.period)
        starts, start = list[dt.datetime](), interval.start
        while start < interval.end:
            starts.append(start)
            start = moved(start, period)
        conditions = [self._condition(Interval(start, moved(start, period))) for start in starts]
        try:
            rows = self._rows.where(reduce(lambda one, other: one | other, map(F.expr, conditions)))
            return self._params.judged(rows)
        except (AnalysisException, ParseException) as failure:
            raise WrongUse(f"partition can't be used ({first_line(failure)})") from None

    def _condition(self, period: Interval) -> str:
        start, end = (moment.replace(tzinfo=None) for moment in (period.start, period.end))
        of_run = {"start": start, "end": end, "id": self._macros.call("timestamp_literal", start)}
        return str(self._macros.call("_run_partition", self._params.partition, of_run))

    def _complete(self, judged: DataFrame, interval: Interval) -> DataFrame:
        time = F.col(EVENT_TIME)
        start, end = (F.expr(timestamp_literal(moment)) for moment in (interval.start, interval.end))
        rows = judged.where(F.col(ERROR_CLASS).isNull() & (time >= start) & (time < end))
        if self._erased is not None:
            same = as_struct(list(self._params.key)).eqNullSafe(F.col(_OWNER))
            rows = rows.join(self._erased, same, "left_anti")
        return rows.select(
            *named_columns(self._params.key),
            EVENT_TIME,
            ORDER,
            VALUE,
            F.unix_micros(EVENT_TIME).alias(MICROS),
        )


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Compute the range again and return the report.

    Raises:
        NotReady: the raw table doesn't exist.
        WrongUse: an expression can't be resolved, or the target has another schema.
        JobFailed: the walk didn't come to its end, or a row of the target reaches beyond what was read.
    """
    raw = RawTable(spark, params)
    report: dict[str, Any] = {
        "mode": params.mode,
        "is_approximate": params.mode == "approximate",
        "source_version": raw.version,
        "dead": raw.of_range.where(F.col(ERROR_CLASS).isNotNull()).count(),
    }
    written = _windows(spark, params, raw) if params.mode == "windows" else _sessions(spark, params, raw)
    return {**report, **written, "target": params.target}


def _windows(spark: SparkSession, params: Parameters, raw: RawTable) -> dict[str, Any]:
    key = ["window_start", *params.key]
    rows = _stamped(params.windows(raw.complete(params.range)), params)
    sink = DeltaSink(spark, params.target, rows, key, "window_date", ("release",))
    start, end = (timestamp_literal(moment) for moment in (params.range.start, params.range.end))
    of_range = read_table(spark, params.target).where(f"window_start >= {start} and window_start < {end}")
    dates = (date_literal(moment.date()) for moment in (params.range.start, params.range.end))
    stored = of_range.where("window_date between {} and {}".format(*dates))
    stored = stored.withColumn(_BEYOND, F.lit(None).cast(_BEYOND_TYPE))
    return _correct(sink, rows, stored, key, params.release)


def _sessions(spark: SparkSession, params: Parameters, raw: RawTable) -> dict[str, Any]:
    none = _stamped(params.of_sessions(raw.none(), params.range), params)
    sink = DeltaSink(spark, params.target, none, ["session_id"], "started_date", VERSION, "is_final")
    stored = read_table(spark, params.target)
    found = params.walk.reconstruct(raw.complete, params.range, params.occupied(stored))
    if found.unfinished and params.mode == "full":
        raise JobFailed(
            f"the sessions of {found.unfinished} owners may go on before {found.read.start:%FT%T} or after "
            f"{found.read.end:%FT%T}, where max_steps {params.max_steps} ended the walk, and nothing was written; "
            "raise max_steps, or use the mode approximate"
        )
    with evaluated_once(_stamped(params.of_sessions(found.records, found.read), params)) as rows:
        is_open = ~params.is_closed("ended_at")
        bounds = found.spans.agg(F.min(LOW).alias("low"), F.max(HIGH).alias("high"))
        read = bounds.crossJoin(rows.agg(F.count_if(is_open).alias("left"))).collect()[0]
        stored = _replaceable(stored, found.spans, read.low, read.high, rows.where(is_open), params)
        report = _correct(
            sink, rows.where(params.is_closed("ended_at")), stored, ["session_id"], params.release
        )
    return {"steps": [step.as_dict() for step in found.steps], **report, "left_to_live": read.left}


def _replaceable(
    stored: DataFrame,
    spans: DataFrame,
    low: int | None,
    high: int | None,
    still_open: DataFrame,
    params: Parameters,
) -> DataFrame:
    """Return the target's sessions that were computed again, with _BEYOND where they reach out of what was.

    These are the owners' sessions that lie over the owners' ``spans``, from ``low`` to ``high``, but for those that the
    live job has to close.
    """
    owner, first, last = as_struct(list(params.key)), F.unix_micros("started_at"), F.unix_micros("ended_at")
    spans = spans.select(owner.alias(_OWNER), LOW, HIGH)
    opened = still_open.groupBy(owner.alias(_OWNER)).agg(F.min(first).alias("__open_from"))
    near = stored.where(F.col("ended_at") >= _moment(low))
    near = near.where(F.col("started_at") <= _moment(high))
    near = near.where(F.col("started_date") <= F.to_date(_moment(high)))
    over = near.withColumn(_OWNER, owner).join(spans.join(opened, _OWNER, "left"), _OWNER)
    over = over.where((first <= F.col(HIGH)) & (last >= F.col(LOW)) & params.is_closed("ended_at"))
    over = over.where(F.col("__open_from").isNull() | (last < F.col("__open_from")))
    is_beyond = ((first < F.col(LOW)) | (last > F.col(HIGH))) & F.lit(params.mode == "full")
    beyond = F.when(is_beyond, F.struct(F.col("started_at").alias("first"), F.col("ended_at").alias("last")))
    return over.select(*named_columns(stored.columns), beyond.alias(_BEYOND))


def _correct(
    sink: DeltaSink, rows: DataFrame, stored: DataFrame, key: Sequence[str], release: int
) -> dict[str, int]:
    """Make the target's rows ``stored`` to ``rows``, and return the number of rows by what was done to them.

    Raises:
        JobFailed: a row to remove reaches beyond what was read.
    """
    changes = compared(rows, stored, key, WRITTEN_AT, stays=F.col(f"{OLD}.release") > release)
    with evaluated_once(changes) as found:
        of_action = found.groupBy(ACTION).agg(
            F.count(F.lit(1)).alias("rows"),
            F.count(_BEYOND).alias("beyond"),
            F.min(f"{_BEYOND}.first").cast("string").alias("first"),
            F.max(f"{_BEYOND}.last").cast("string").alias("last"),
        )
        counts = {row[ACTION]: row for row in of_action.collect()}
        removed = counts.get(REMOVED)
        if removed is not None and removed.beyond:
            raise JobFailed(
                f"sessions of the target that the records don't give reach beyond what was read ({removed.beyond}), "
                f"and nothing was written; reprocess a range from {removed.first} to {removed.last} UTC"
            )
        if set(counts) - {UNCHANGED}:
            write_corrections(sink, found)
    return {
        name: counts[name].rows if name in counts else 0 for name in (ADDED, REPLACED, REMOVED, UNCHANGED)
    }


def _moment(micros: int | None) -> Column:
    return F.timestamp_micros(F.lit(micros).cast("bigint"))


def _stamped(rows: DataFrame, params: Parameters) -> DataFrame:
    return stamped(rows, WRITTEN_AT, params.processing_time().isoformat())


if __name__ == "__main__":
    run_job(Parameters, run)
