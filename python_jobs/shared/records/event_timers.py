"""Timers on event time of a stateful operator, for state that counts in microseconds."""

from __future__ import annotations

from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle


def move_timer(
    handle: StatefulProcessorHandle, had: int | None, wanted: int | None, *, is_gone: bool = False
) -> None:
    """Replace the only timer of the current key.

    Args:
        handle: the operator's handle.
        had: time of the key's timer in microseconds; None without one.
        wanted: time of the new timer in microseconds; None for none.
        is_gone: whether the timer has just expired; Spark has removed it then.
    """
    if had is not None and had != wanted and not is_gone:
        handle.deleteTimer(_milliseconds(had))
    if wanted is not None and (is_gone or had != wanted):
        handle.registerTimer(_milliseconds(wanted))


def watermark_micros(timer_values: object) -> int:
    """Return the watermark of the current batch in microseconds."""
    return int(timer_values.getCurrentWatermarkInMs()) * 1_000  # type: ignore[attr-defined]


def _milliseconds(micros: int) -> int:
    """Return the first whole millisecond that isn't before: a watermark has no finer times."""
    return -(-micros // 1_000)
