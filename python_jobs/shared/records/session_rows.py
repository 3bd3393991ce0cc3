"""Sessions as rows: which owner and time a record has, and which row of a table a session is.

Streams and batches share this module, so that a batch gives the sessions that a stream would have given. It neither
reads nor writes: it imports no table, stream or topic, and a contract in pyproject.toml keeps it so. The rule of what
belongs together is in :mod:`python_jobs.shared.core.sessions`.

A session's id is the hash of its owner and its start, so that a stream, a batch and a reprocessing give one session one
id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import WrongUse, require_at_least
from python_jobs.shared.core.intervals import duration_micros, parse_duration
from python_jobs.shared.core.origins import ORIGIN, Origin
from python_jobs.shared.core.sessions import CLOSED, OPEN
from python_jobs.shared.delta.keys import require_stable, surrogate_key
from python_jobs.shared.records.event_times import absence, first_error, not_utf8, order_of
from python_jobs.shared.spark.expressions import resolved
from python_jobs.shared.spark.sql_text import identifier, named_column, named_columns, refuse_own_names
from python_jobs.shared.spark.times import with_timestamp

# The key's columns have names that the user chose.
EVENT_TIME, ORDER, DEAD = "__event_time", "__order", "__dead"
MICROS, VALUE = "__event_micros", "__value"
# Times are microseconds on their way through Python, which would read timestamps in a time zone.
CHANGES = (
    "__identity array<bigint>, __started_at bigint, __ended_at bigint, __events int, __values array<string>, "
    "__status string, __version bigint"
)

WRITTEN_AT = "written_at"
VERSION = ("release", "is_final", "version")
SESSION_COLUMNS = (
    "session_id",
    "started_at",
    "ended_at",
    "duration_ms",
    "events",
    "values",
    *VERSION,
    ORIGIN,
    "started_date",
    WRITTEN_AT,
)


@dataclass(frozen=True, kw_only=True)
class SessionRecords:
    """Parameters that say which owner, time, place and value a record has, and what joins records to sessions."""

    source: str
    """Append-only Delta table (name or path)."""
    key: dict[str, str]
    """Columns that identify the session's owner (such as user_id), each with its SQL expression over the source."""
    event_time: str
    """SQL expression of the event's time: a timestamp, or a text that names date and time; use try_ functions."""
    ties: list[str] = field(default_factory=list)
    """Integer columns that order and distinguish events of one time, such as partition and offset."""
    value: str
    """SQL expression of the value that a session lists for each event, such as the page."""
    gap: str = "30 minutes"
    """Maximum event time between two successive events of one session."""

    def __post_init__(self) -> None:
        parse_duration(self.gap)
        if not self.key:
            raise WrongUse("key is empty; it takes one column or more, each with its expression")
        refuse_own_names("key", self.key, self.own_columns())

    @classmethod
    def own_columns(cls) -> Sequence[str]:
        """Return the columns that the job adds to the key in its target."""
        return ()

    @property
    def gap_micros(self) -> int:
        """The gap in microseconds."""
        return duration_micros(parse_duration(self.gap))

    def times(self) -> dict[str, str]:
        """Return the expression of each time that a record must have, by parameter, the event's time first."""
        return {"event_time": self.event_time}

    def judged(self, records: DataFrame) -> DataFrame:
        """Return each record with its owner, time, order, value and error; the error is NULL if the record is complete.

        Raises:
            WrongUse: an expression can't be resolved or has another type.
        """
        times = {f"__{name}": name for name in self.times()}
        with resolved():
            timed = records
            for column, name in times.items():
                timed = with_timestamp(timed, column, self.times()[name], name)
            rows = timed.select(
                *(F.expr(expression).alias(name) for name, expression in self.key.items()),
                *times,
                self._order(timed, list(times)[1:]).alias(ORDER),
                F.expr(self.value).cast("string").alias(VALUE),
                F.struct(*(named_column(name) for name in records.columns)).alias(DEAD),
            )
        key = {name: name for name in self.key}
        require_stable(rows, key, "the key's column")
        errors = [*absence(key, times), not_utf8(rows, {**key, VALUE: "value"})]
        return rows.select("*", *first_error(errors))

    def _order(self, rows: DataFrame, times: Sequence[str]) -> Column:
        parts = [F.unix_micros(name) for name in times]
        parts += order_of(rows, self.ties)
        return F.array(*parts) if parts else F.expr("cast(array() as array<bigint>)")


@dataclass(frozen=True, kw_only=True)
class SessionRows(SessionRecords):
    """Parameters of sessions that are rows of a table."""

    origin: Origin = "real_time"
    """Origin that the rows carry."""
    release: int = 0
    """Number of the job's release: rows of a higher release replace those of a lower one, whatever these counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(0, release=self.release)

    @classmethod
    def own_columns(cls) -> Sequence[str]:
        """Return the columns that the job adds to the key in its target."""
        return SESSION_COLUMNS

    def rows(self, changed: DataFrame) -> DataFrame:
        """Return the state's changes as rows of the target, but for the time of writing."""
        start, last = F.col("__started_at"), F.col("__ended_at")
        return changed.select(
            surrogate_key(*map(identifier, self.key), "get(__identity, 0)").alias("session_id"),
            *named_columns(self.key),
            F.timestamp_micros(start).alias("started_at"),
            F.timestamp_micros(last).alias("ended_at"),
            F.floor((last - start) / 1000).alias("duration_ms"),
            F.col("__events").alias("events"),
            F.col("__values").alias("values"),
            F.lit(self.release).alias("release"),
            F.col("__version").alias("version"),
            (F.col("__status") != OPEN).alias("is_final"),
            F.lit(self.origin).alias(ORIGIN),
            F.to_date(F.timestamp_micros(F.expr("get(__identity, 0)"))).alias("started_date"),
        )

    def sessions(self, records: DataFrame) -> DataFrame:
        """Return the sessions of complete records, of a stream or a batch, in the form that :meth:`rows` takes.

        Of a stream, which needs a watermark, these are the sessions that the watermark has closed.
        """
        events = F.array_sort(F.collect_set(F.struct(F.col(MICROS).alias("at"), ORDER, VALUE)))
        return (
            records.withColumn(MICROS, F.unix_micros(EVENT_TIME))
            .groupBy(F.session_window(EVENT_TIME, self.gap), *named_columns(self.key))
            .agg(events.alias("__all"))
            .select(
                *named_columns(self.key),
                F.expr("array(__all[0].at)").alias("__identity"),
                F.expr("__all[0].at").alias("__started_at"),
                F.expr("element_at(__all, -1).at").alias("__ended_at"),
                F.size("__all").alias("__events"),
                F.expr(f"transform(__all, event -> event.{VALUE})").alias("__values"),
                F.lit(CLOSED).alias("__status"),
                F.size("__all").cast("bigint").alias("__version"),
            )
        )
