"""Full reconstruction of sessions: from the owners of a range into past and future, as far as their sessions go.

A session has no bounds that are known before: a range's first session may have begun hours earlier. A walk reads the
range, then one period before it and one behind it, then the next ones, while the rule of
:mod:`python_jobs.shared.core.sessions` can still join an unread record to a session of the range's owners. It stops by
the distance to what is unread, not at a period without records, which may be shorter than the gap.

This module neither reads nor writes tables: the caller passes a function that reads.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.intervals import Interval, duration_micros, moved, to_micros
from python_jobs.shared.core.sessions import is_same_session
from python_jobs.shared.records.session_rows import EVENT_TIME, MICROS
from python_jobs.shared.spark.macro_sql import Macros
from python_jobs.shared.spark.sql_text import identifier, named_columns

LOW, HIGH = "__low", "__high"

Read = Callable[[Interval], DataFrame]
"""Return an interval's complete records: the owner's columns, EVENT_TIME, MICROS, ORDER and VALUE."""


@dataclass(frozen=True)
class Step:
    """One step outward, with the numbers of records that belong to sessions of the range's owners."""

    past: Interval | None
    """Period before what was read; None if no session can reach into it."""
    past_records: int
    future: Interval | None
    """Period behind what was read; None if no session can reach into it."""
    future_records: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a report."""
        return {
            "past": None if self.past is None else self.past.start.isoformat(),
            "past_records": self.past_records,
            "future": None if self.future is None else self.future.start.isoformat(),
            "future_records": self.future_records,
        }


@dataclass(frozen=True)
class Reconstruction:
    """The records of all sessions of the range's owners, as far as a walk has come."""

    records: DataFrame
    """Each record once, as the function that reads gave it."""
    spans: DataFrame
    """Each owner with the times from which (LOW) and up to which (HIGH) its sessions are complete, in microseconds."""
    read: Interval
    """Everything from the first period that was read to the last one."""
    steps: list[Step]
    unfinished: int
    """Number of owners whose sessions may go on in what is unread; 0 if the walk came to its end."""


@dataclass(frozen=True, kw_only=True)
class Walk:
    """How far a reconstruction may go, and what it looks for."""

    key: Sequence[str]
    """Names of the owner's columns."""
    gap: dt.timedelta
    """Maximum time between two successive events of one session."""
    period: dt.timedelta
    """Length of what one step reads on each side."""
    stop: dt.datetime
    """Time from which on nothing is read."""
    max_steps: int
    """Number of steps after which the walk gives up."""

    def reconstruct(self, read: Read, asked: Interval, occupied: DataFrame) -> Reconstruction:
        """Return the records of the sessions of all owners that have records in the range ``asked``.

        Args:
            read: function that reads; the records of ``asked`` are used several times.
            asked: the range, whole periods.
            occupied: owners with further times, in the columns LOW and HIGH: all their sessions between these times
                are reconstructed as well, as if an event were at each of them.
        """
        in_range = read(asked)
        own = in_range.select(*named_columns(self.key), F.col(MICROS).alias(LOW), F.col(MICROS).alias(HIGH))
        spans = kept(self._spans(own.unionByName(occupied)))
        parts, all_spans, steps, covered = [in_range], [spans], list[Step](), asked
        found = spans.agg(*self._going_on(covered)).collect()[0]
        while found.owners and len(steps) < self.max_steps:
            past = Interval(moved(covered.start, -self.period), covered.start) if found.past else None
            future = None
            if found.future:
                future = Interval(covered.end, min(moved(covered.end, self.period), self.stop))
            active = spans.where(self._past(covered) | self._future(covered))
            new = [read(side) for side in (past, future) if side is not None]
            reached = kept(self._reached(new, active))
            records = reached.where(F.col(LOW).isNull())
            before, behind = F.col(MICROS) < to_micros(asked.start), F.col(MICROS) >= to_micros(asked.end)
            # The marks of what was known are at its ends, so these are the new ends.
            spans = reached.groupBy(*named_columns(self.key)).agg(
                F.min(MICROS).alias(LOW),
                F.max(MICROS).alias(HIGH),
                F.count_if(F.col(LOW).isNull() & before).alias("__past"),
                F.count_if(F.col(LOW).isNull() & behind).alias("__future"),
            )
            covered = Interval(
                covered.start if past is None else past.start, covered.end if future is None else future.end
            )
            found = spans.agg(
                *self._going_on(covered),
                F.sum("__past").alias("past_records"),
                F.sum("__future").alias("future_records"),
            ).collect()[0]
            steps.append(Step(past, found.past_records or 0, future, found.future_records or 0))
            spans = spans.drop("__past", "__future")
            parts.append(records.drop(LOW, HIGH))
            all_spans.append(spans)
        return Reconstruction(
            reduce(DataFrame.unionByName, parts),
            self._spans(reduce(DataFrame.unionByName, all_spans)),
            covered,
            steps,
            found.owners,
        )

    @property
    def _gap_micros(self) -> int:
        return duration_micros(self.gap)

    def _spans(self, times: DataFrame) -> DataFrame:
        of_owner = times.groupBy(*named_columns(self.key))
        return of_owner.agg(F.min(LOW).alias(LOW), F.max(HIGH).alias(HIGH))

    def _past(self, covered: Interval) -> Column:
        """Whether an unread record before what was read could join an owner's first session."""
        last_unread: Any = to_micros(covered.start) - 1
        first: Any = F.col(LOW)
        return cast(Column, is_same_session(last_unread, first, self._gap_micros))

    def _future(self, covered: Interval) -> Column:
        """Whether an unread record behind what was read could join an owner's last session."""
        if covered.end >= self.stop:
            return F.lit(False)
        last: Any = F.col(HIGH)
        return cast(Column, is_same_session(last, to_micros(covered.end), self._gap_micros))

    def _going_on(self, covered: Interval) -> list[Column]:
        past, future = self._past(covered), self._future(covered)
        return [
            F.count_if(past).alias("past"),
            F.count_if(future).alias("future"),
            F.count_if(past | future).alias("owners"),
        ]

    def _reached(self, new: Sequence[DataFrame], active: DataFrame) -> DataFrame:
        """Return the new records that belong to the sessions of active owners, and marks at both ends of what is known.

        A record belongs to them if its session has a mark, or if it lies between the marks. The marks alone have LOW
        and HIGH. Nothing is joined: marks and records stand in one line of each owner.
        """
        marks = active.withColumn(MICROS, F.explode(F.array(LOW, HIGH)))
        marks = marks.withColumn(EVENT_TIME, F.timestamp_micros(MICROS))
        lines = reduce(DataFrame.unionByName, new).unionByName(marks, allowMissingColumns=True)
        key = ", ".join(map(identifier, self.key))
        line = f"partition by {key} order by {EVENT_TIME}"
        macros = Macros(SparkSession.active(), ["shared/sessions.sql"])
        starts = macros.call("_starts_session", EVENT_TIME, f"lag({EVENT_TIME}) over ({line})", self.gap)
        session = f"count_if(__starts) over ({line} range unbounded preceding)"
        numbered = lines.withColumn("__starts", F.expr(starts)).withColumn("__session", F.expr(session))
        belongs = (
            f"max({LOW}) over (partition by {key}, __session) is not null or {MICROS} between "
            f"min({LOW}) over (partition by {key}) and max({HIGH}) over (partition by {key})"
        )
        chosen = numbered.withColumn("__belongs", F.expr(belongs)).where("__belongs")
        return chosen.drop("__starts", "__session", "__belongs")


def kept(rows: DataFrame) -> DataFrame:
    """Return rows that the first action computes and keeps on disk, cut off from their plan.

    The plan of a walk would grow with each step. When an executor is lost with its disk, the run fails.
    """
    return rows.localCheckpoint(eager=False, storageLevel=StorageLevel.DISK_ONLY)
