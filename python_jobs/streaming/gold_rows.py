"""One definition of a gold table: the rows that a job makes of its records, as a batch or as a stream.

A definition gives either one row for each record, or the counts and sums of the records of a window. Its functions take
a DataFrame of either kind, so that nothing has to be written twice.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, FloatType

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.intervals import parse_duration
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.records.json_messages import json_message
from python_jobs.shared.spark.expressions import first_line
from python_jobs.shared.spark.sql_text import identifier, named_column, named_columns, taken_names
from python_jobs.shared.spark.times import with_timestamp

WINDOW_START, WINDOW_END, EVENTS = "window_start", "window_end", "events"
EVENT_TIME, EVENT_DATE = "event_time", "event_date"
_OWN = (WINDOW_START, WINDOW_END, EVENTS, EVENT_TIME, EVENT_DATE)
_TIME, _WINDOW, _NEWEST = "__event_time", "__window", "__newest"
_DAY = dt.timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class Definition:
    """What the rows of a gold table are, whatever the cadence of the job."""

    key: dict[str, str]
    """Key of a row within its window, or within its day without window: columns with their SQL expressions."""
    event_time: str = "event_time"
    """SQL expression of the event time: a timestamp, a date or an ISO text with date and time (UTC without offset)."""
    where: str | None = None
    """SQL condition of the records that count; default: all."""
    window: str | None = None
    """Length of a window of event time, which divides a day, such as "10 minutes"; default: a row for each record."""
    sums: dict[str, str] = field(default_factory=dict)
    """Sums of a window: columns with the SQL expression that is summed up, an integer or a decimal."""
    columns: dict[str, str] = field(default_factory=dict)
    """Further columns of a row without window, with their SQL expressions."""

    def __post_init__(self) -> None:
        if not self.key:
            raise WrongUse("key must name at least one column")
        if self.window is not None and _DAY % parse_duration(self.window):
            raise WrongUse(f"window must divide a day, such as '10 minutes' or '1 day', got '{self.window}'")
        if self.window is None and self.sums:
            raise WrongUse("sums belong to a window, and the definition has none; set window")
        if self.window is not None and self.columns:
            raise WrongUse("columns belong to rows without window; a window has key and sums")
        names = [*self.key, *self.sums, *self.columns]
        taken = [*taken_names(names, by=_OWN), *_repeated(names)]
        if taken:
            raise WrongUse(
                f"key, sums and columns must have different names, in any case of letters, and none of "
                f"{', '.join(_OWN)}; got {', '.join(taken)}"
            )

    @property
    def text(self) -> str:
        """Return the definition as text: two definitions with one text give the same rows."""
        parts = {
            "key": self.key,
            "event_time": self.event_time,
            "where": self.where,
            "window": self.window,
            "sums": self.sums,
            "columns": self.columns,
        }
        return json_text(parts, sort_keys=True)

    @property
    def identity(self) -> list[str]:
        """Return the columns that make a row unique; the date is one of them, by which the table is partitioned."""
        return [EVENT_DATE, *([WINDOW_START] if self.window else []), *self.key]

    @property
    def version(self) -> list[str]:
        """Return the columns that order the states of a row, the most important first.

        The number of a window's events only grows with a source that only grows. Of two records with one key the later
        one wins, and of two with one time the one with the larger columns: the order of arrival decides nothing.
        """
        return [EVENTS] if self.window else [EVENT_TIME, *self.columns]

    def usable(
        self,
        records: DataFrame,
        between: tuple[dt.date, dt.date] | None = None,
        observation: Observation | str | None = None,
    ) -> DataFrame:
        """Return the records' values, without records that have no time or lack a part of the key.

        Args:
            records: rows of the source.
            between: first date and the date after the last one; default: all dates.
            observation: observation of the records, with the counts read, without_key and without_time.
        """
        matching = records if self.where is None else records.where(self.where)
        timed = with_timestamp(matching, _TIME, self.event_time)
        if between is not None:
            first, end = (F.lit(date).cast("timestamp") for date in between)
            timed = timed.where((F.col(_TIME) >= first) & (F.col(_TIME) < end))
        expressions = {**self.key, **self.sums, **self.columns}
        values = timed.select(_TIME, *(F.expr(text).alias(name) for name, text in expressions.items()))
        keyed = F.lit(True)
        for name in self.key:
            keyed = keyed & named_column(name).isNotNull()
        if observation is not None:
            values = values.observe(
                observation,
                F.count(F.lit(1)).alias("read"),
                F.count_if(~keyed).alias("without_key"),
                F.count_if(F.col(_TIME).isNull()).alias("without_time"),
            )
        return values.where(keyed & F.col(_TIME).isNotNull())

    def rows(self, usable: DataFrame, delay: str | None = None) -> DataFrame:
        """Return the gold rows of :meth:`usable` records; ``delay`` is the delay of a stream's watermark."""
        keys = named_columns(self.key)
        if self.window is None:
            return usable.select(
                F.col(_TIME).alias(EVENT_TIME),
                F.to_date(_TIME).alias(EVENT_DATE),
                *keys,
                *named_columns(self.columns),
            )
        if delay is not None:
            usable = usable.withWatermark(_TIME, delay)
        return (
            usable.groupBy(F.window(F.col(_TIME), self.window).alias(_WINDOW), *keys)
            .agg(
                F.count(F.lit(1)).alias(EVENTS),
                *(F.sum(named_column(name)).alias(name) for name in self.sums),
            )
            .select(
                F.col(f"{_WINDOW}.start").alias(WINDOW_START),
                F.col(f"{_WINDOW}.end").alias(WINDOW_END),
                F.to_date(f"{_WINDOW}.start").alias(EVENT_DATE),
                *keys,
                EVENTS,
                *named_columns(self.sums),
            )
        )

    def newest(self, rows: DataFrame) -> DataFrame:
        """Return one row of each key and day: the newest one; windows are unique as they are."""
        if self.window is not None:
            return rows
        newest = F.max(F.struct(*named_columns(self.version))).alias(_NEWEST)
        return (
            rows.groupBy(*named_columns(self.identity))
            .agg(newest)
            .select(
                *(
                    named_column(name, of=_NEWEST if name in self.version else None).alias(name)
                    for name in rows.columns
                )
            )
        )

    def require_usable(self, empty: DataFrame) -> DataFrame:
        """Return the gold rows of an empty source.

        Raises:
            WrongUse: an expression can't be resolved, or a sum isn't exact.
        """
        try:
            rows = self.newest(self.rows(self.usable(empty)))
        except (AnalysisException, ParseException) as failure:
            raise WrongUse(f"the definition can't be used ({first_line(failure)})") from None
        inexact = [
            name for name in self.sums if isinstance(rows.schema[name].dataType, DoubleType | FloatType)
        ]
        if inexact:
            raise WrongUse(
                f"the sums of floating-point numbers depend on the order of the rows, so a batch and a stream would "
                f"differ; cast {', '.join(inexact)} to a decimal"
            )
        return rows


def on_date(dates: tuple[dt.date, dt.date]) -> str:
    """Return the SQL condition of gold rows from the first date up to the second one, which is left out."""
    first, end = dates
    date = identifier(EVENT_DATE)
    return f"{date} >= date'{first}' and {date} < date'{end}'"


def as_message(rows: DataFrame, key: list[str]) -> DataFrame:
    """Return gold rows as records of Kafka: the key and the whole row as JSON."""
    return rows.select(json_message(rows, key).alias("key"), json_message(rows, rows.columns).alias("value"))


def _repeated(names: list[str]) -> list[str]:
    lowered = [name.lower() for name in names]
    return [name for number, name in enumerate(names) if name.lower() in lowered[:number]]
