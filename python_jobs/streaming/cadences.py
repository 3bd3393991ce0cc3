"""Cadences of one job: the cheapest way to run it that keeps a given latency. This module doesn't use Spark.

An event waits for the next run, and then for the end of that run. A run that ends before the next one starts takes at
most the time between two starts. So an event's result is there within two intervals: the interval is half the latency.

Source: the guide's pattern Batch-Microbatch Continuum; its table of latencies and its example of costs.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any, Literal, get_args

from python_jobs.shared.core.failures import WrongUse

Cadence = Literal["batch", "available_now", "micro_batch", "continuous"]
Mode = Literal["batch", "mini-batch", "micro-batch", "streaming"]
CADENCES: tuple[Cadence, ...] = get_args(Cadence)

_SECOND, _DAY = dt.timedelta(seconds=1), dt.timedelta(days=1)
# Below this latency a micro-batch costs more to plan than its few rows cost to process.
_MICRO_BATCH = dt.timedelta(seconds=10)
# From this latency on a cluster that stops between two runs is cheaper than one that waits.
_MINI_BATCH = dt.timedelta(minutes=15)


@dataclass(frozen=True)
class Load:
    """The cluster of a job for one day."""

    cores: int
    hours_of_a_run: float
    runs_a_day: int

    @property
    def core_hours(self) -> float:
        """Return the core-hours of a day."""
        return self.cores * self.hours_of_a_run * self.runs_a_day


_ALWAYS_ON = Load(cores=100, hours_of_a_run=24, runs_a_day=1)
# The guide's example, a billion events a day. It has no micro-batch: that cluster never stops either.
EXAMPLE: dict[Mode, Load] = {
    "streaming": _ALWAYS_ON,
    "micro-batch": _ALWAYS_ON,
    "mini-batch": Load(cores=200, hours_of_a_run=0.25, runs_a_day=24),
    "batch": Load(cores=1000, hours_of_a_run=1, runs_a_day=1),
}


@dataclass(frozen=True)
class Choice:
    """How to run a job."""

    mode: Mode
    """Name in the guide."""
    cadence: Cadence
    """Cadence of the job."""
    interval: dt.timedelta
    """Time between two micro-batches or two runs; for ``continuous`` between two checkpoints."""

    @property
    def saved(self) -> float:
        """Return the part of a cluster's core-hours that the example saves against one that always runs."""
        return 1 - EXAMPLE[self.mode].core_hours / _ALWAYS_ON.core_hours

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a report, with the costs of the guide's example."""
        return {
            "mode": self.mode,
            "cadence": self.cadence,
            "interval_seconds": int(self.interval.total_seconds()),
            "cluster": "stops between two runs"
            if self.cadence in ("batch", "available_now")
            else "always on",
            "example_core_hours_a_day": EXAMPLE[self.mode].core_hours,
            "example_saved_percent": round(100 * self.saved),
        }


def require_cadence(name: str | None) -> None:
    """Refuse a name that is no cadence.

    Raises:
        WrongUse: it is unknown.
    """
    if name not in CADENCES:
        raise WrongUse(f"cadence must be one of {', '.join(CADENCES)}, got '{name}'")


def choose(latency: dt.timedelta, *, windows: bool) -> Choice:
    """Return the cheapest cadence that publishes a result within ``latency`` after its event.

    For ``batch`` the latency counts from the end of the day.

    Args:
        latency: time within which a result must be there.
        windows: whether the job aggregates by window, which ``continuous`` can't.

    Raises:
        WrongUse: no cadence is as fast; micro-batches are at least a second apart.
    """
    half = max(latency // (2 * _SECOND), 1) * _SECOND
    if latency >= _DAY:
        return Choice("batch", "batch", _DAY)
    if latency >= _MINI_BATCH:
        return Choice("mini-batch", "available_now", half)
    if latency >= _MICRO_BATCH:
        return Choice("micro-batch", "micro_batch", half)
    if not windows:
        return Choice("streaming", "continuous", _SECOND)
    if latency < 2 * _SECOND:
        raise WrongUse(
            f"windows can't be published within {latency.total_seconds():g} seconds: allowed are 2 seconds or more for "
            "windows, and any latency for rows"
        )
    return Choice("streaming", "micro_batch", half)
