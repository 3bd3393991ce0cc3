"""Half-open time intervals in UTC, the unit of every load and backfill."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from python_jobs.shared.core.failures import DataRefused, WrongUse

_TIME_TEXT = re.compile(r"[0-9TWZ :.,+-]+")
# As in macros/shared/times.sql.
_FULL_TIMESTAMP = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[ T](?:[01][0-9]|2[0-3]):[0-9]{2}(?::[0-9]{2}(?:[.][0-9]{1,6}0*)?)?"
    r"(?: ?(?:Z|[+-](?P<offset_hours>[0-9]{2})(?::?(?P<offset_minutes>[0-9]{2}))?))?"
)
_DAY = dt.timedelta(days=1)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
Moment = TypeVar("Moment", dt.date, dt.datetime)

_DURATION = re.compile(r"(\d+) (second|minute|hour|day)s?")
_UNITS = {"hour": dt.timedelta(hours=1), "day": _DAY}


def parse_time(text: str) -> dt.datetime:
    """Read an ISO 8601 date, hour or time; a value without offset is UTC.

    >>> parse_time("2024-03-01T10")
    datetime.datetime(2024, 3, 1, 10, 0, tzinfo=datetime.timezone.utc)
    """
    try:
        if not _TIME_TEXT.fullmatch(text):  # Python takes any character between date and time
            raise ValueError(text)
        moment = dt.datetime.fromisoformat(text)
        return moment.replace(tzinfo=dt.UTC) if moment.tzinfo is None else moment.astimezone(dt.UTC)
    except ValueError:
        raise WrongUse(
            f"'{text}' is not a time; use 2024-03-01, 2024-03-01T10 or 2024-03-01T10:30:00"
        ) from None
    except OverflowError:
        raise WrongUse(f"'{text}' is outside of the years 1 to 9999 in UTC") from None


def full_timestamp(text: str) -> dt.datetime | None:
    """Return the time in UTC that a text names with date and time, as macros and jobs read it; None for another text.

    A text without offset is UTC.

    >>> full_timestamp("2024-03-01 11:00+01")
    datetime.datetime(2024, 3, 1, 10, 0, tzinfo=datetime.timezone.utc)
    """
    parts = _FULL_TIMESTAMP.fullmatch(text)
    if parts is None or (parts["offset_hours"] or "00") + (parts["offset_minutes"] or "00") > "1800":
        return None
    try:
        return parse_time(text.replace(" Z", "Z").replace(" +", "+").replace(" -", "-"))
    except WrongUse:
        return None


def previous_run_time(previous_execution_time: str | None, execution_time: str) -> dt.datetime | None:
    """Return the logical time of the run before a run; None if it is not given.

    Raises:
        WrongUse: it is not before the run's own logical time.
    """
    if previous_execution_time is None:
        return None
    previous = parse_time(previous_execution_time)
    if previous >= parse_time(execution_time):
        raise WrongUse(f"previous_execution_time {previous_execution_time} is not before {execution_time}")
    return previous


def to_micros(moment: dt.datetime) -> int:
    """Return an aware time as exact microseconds since 1970, as Spark's ``timestamp_micros`` reads them."""
    return duration_micros(moment - _EPOCH)


def duration_micros(length: dt.timedelta) -> int:
    """Return a duration as exact microseconds."""
    return length // dt.timedelta(microseconds=1)


def from_micros(micros: int) -> dt.datetime:
    """Return the time in UTC from microseconds since 1970, as Spark's ``unix_micros`` returns them.

    Spark's times reach further than Python's.

    >>> from_micros(1_500_000)
    datetime.datetime(1970, 1, 1, 0, 0, 1, 500000, tzinfo=datetime.timezone.utc)

    Raises:
        DataRefused: the time is outside of the years 1 to 9999.
    """
    try:
        return _EPOCH + dt.timedelta(microseconds=micros)
    except OverflowError:
        raise DataRefused(
            f"the time {micros} (microseconds since 1970) is outside of the years 1 to 9999; correct it at its source"
        ) from None


def moved(moment: Moment, by: dt.timedelta) -> Moment:
    """Return the date or time that is later by a duration, or earlier by a negative one.

    Raises:
        WrongUse: it is outside of the years 1 to 9999.
    """
    try:
        return moment + by
    except OverflowError:
        days = f"{abs(by) / _DAY:g} days {'before' if by < dt.timedelta() else 'after'}"
        raise WrongUse(
            f"the time {days} {moment.isoformat()} is outside of the years 1 to 9999; give another time or duration"
        ) from None


def duration(unit: str, count: float) -> dt.timedelta:
    """Return a duration of so many units (``days``, ``hours``, ``minutes``, ``seconds``, ``milliseconds``).

    Raises:
        WrongUse: it is longer than 999,999,999 days.
    """
    try:
        return dt.timedelta(**{unit: count})
    except OverflowError:
        raise WrongUse(f"{count:g} {unit} are too long; a duration has at most 999999999 days") from None


def parse_duration(text: str) -> dt.timedelta:
    """Return the duration that a text such as ``10 minutes`` names.

    Raises:
        WrongUse: the text is no duration, or the duration is zero or too long.
    """
    match = _DURATION.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise WrongUse(f"'{text}' is no duration; use a text such as '10 seconds', '10 minutes' or '1 hour'")
    return duration(f"{match[2]}s", int(match[1]))


def partition_folder(start: dt.datetime, grain: str) -> str:
    """Return the folder ``date=…/hour=…`` or ``date=…`` of the hour or day that starts at ``start``."""
    return f"date={start:%Y-%m-%d}" + (f"/hour={start:%H}" if grain == "hour" else "")


@dataclass(frozen=True)
class Interval:
    """The interval of all times ``start <= t < end``."""

    start: dt.datetime
    end: dt.datetime

    def __post_init__(self) -> None:
        if self.start >= self.end:
            raise WrongUse(
                f"the interval [{self.start:%FT%T}, {self.end:%FT%T}) is empty: from must be before to"
            )

    @classmethod
    def parse(cls, start: str, end: str) -> Interval:
        """Return the interval between two texts, each read with :func:`parse_time`."""
        return cls(parse_time(start), parse_time(end))

    def __contains__(self, moment: dt.datetime) -> bool:
        return self.start <= moment < self.end

    def split(self, unit: str) -> Iterator[Interval]:
        """Yield the whole hours or days that the interval touches, in order (``unit``: hour or day)."""
        if unit not in _UNITS:
            raise WrongUse(f"an interval splits by hour or day, not by '{unit}'")
        floor = {"minute": 0, "second": 0, "microsecond": 0} | ({"hour": 0} if unit == "day" else {})
        moment = self.start.replace(**floor)  # type: ignore[arg-type]
        while moment < self.end:
            end = moved(moment, _UNITS[unit])
            yield Interval(moment, end)
            moment = end
