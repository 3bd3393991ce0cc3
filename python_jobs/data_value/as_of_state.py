"""State of the Dynamic Joiner's as-of join: the versions of a key, and the probes that wait for the watermark.

The rule is in :mod:`python_jobs.data_value.versions`. The state is two lists for each key, in RocksDB, and one timer on
event time: the watermark with which a probe is answered or a version is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from python_jobs.data_value.versions import Probe, Version, advance, next_change
from python_jobs.shared.records.event_timers import move_timer, watermark_micros

# Columns of both inputs. The users' columns pass through Python as JSON, times as microseconds: Python would read
# timestamps in a time zone.
IS_PROBE, MICROS, ORDER, VALUE = "__is_probe", "__micros", "__order", "__value"
ANSWERS = "__left_value string, __left_micros bigint, __right_value string, __version array<bigint>"
_Answer = Row(*(column.split()[0] for column in ANSWERS.split(", ")))


class AsOfState(StatefulProcessor):
    """State of a key; Spark calls it for new rows, and when the watermark reaches the time of the next change."""

    def __init__(self, validity: int | None) -> None:
        """Take the validity of :func:`python_jobs.data_value.versions.advance`."""
        self._validity = validity

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        self._handle = handle
        self._versions = handle.getListState(
            "versions", "at bigint, version_order array<bigint>, value string"
        )
        self._waiting = handle.getListState("waiting", "at bigint, value string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Yield the answers of probes that the watermark has reached."""
        new = list(rows)
        versions = [Version(row[MICROS], tuple(row[ORDER]), row[VALUE]) for row in new if not row[IS_PROBE]]
        probes = [Probe(row[MICROS], row[VALUE]) for row in new if row[IS_PROBE]]
        return self._advance(versions, probes, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Yield the answers of probes that the watermark has reached."""
        return self._advance([], [], timerValues, timer_is_gone=True)

    def close(self) -> None:
        """Do nothing: nothing was opened."""

    def _advance(
        self, versions: list[Version], probes: list[Probe], timer_values: Any, timer_is_gone: bool = False
    ) -> Iterator[Row]:
        known = [Version(at, tuple(order), value) for at, order, value in self._versions.get()]
        waiting = [Probe(at, value) for at, value in self._waiting.get()]
        had = next_change(known, waiting, self._validity)
        result = advance([*known, *versions], waiting, probes, watermark_micros(timer_values), self._validity)
        if result.versions != known:
            _put(
                self._versions,
                [(version.at, list(version.order), version.value) for version in result.versions],
            )
        if result.waiting != waiting:
            _put(self._waiting, [tuple(probe) for probe in result.waiting])
        wanted = next_change(result.versions, result.waiting, self._validity)
        move_timer(self._handle, had, wanted, is_gone=timer_is_gone)
        for probe, version in result.answers:
            identity = [] if version is None else [version.at, *version.order]
            yield _Answer(probe.value, probe.at, None if version is None else version.value, identity)


def _put(state: Any, rows: list[Any]) -> None:
    if rows:
        state.put(rows)
    else:
        state.clear()
