"""Pseudo-random values, as hashes of a row's number: they don't depend on Spark's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F

from case_study.datasets.parameters import Parameters

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
SHARE_STEPS = 1_000_000

# Numbers of folders between a line and its repetition.
REPEAT_DELAYS = (0, 0, 0, 1, 2, 6)


def roll(params: Parameters, salt: str, sides: int | Column, *key: str) -> Column:
    """Return a number in ``[0, sides)`` that depends only on the seed, the salt and the key columns."""
    drawn = F.xxhash64(F.lit(f"{params.seed}/{salt}"), *key)
    return F.pmod(drawn, sides if isinstance(sides, Column) else F.lit(sides))


def roll_low(params: Parameters, salt: str, sides: int, *key: str) -> Column:
    """Return a number in ``[0, sides)`` that is more often low, because some users and pages are popular."""
    return roll(params, salt, 1 + roll(params, f"{salt} reach", sides, *key), *key)


def happens(params: Parameters, feed: str, imperfection: str, *key: str) -> Column:
    """Return true for the rows of an imperfection; its share doesn't change the rows of other imperfections."""
    steps = round(getattr(params, f"{imperfection}_share") * SHARE_STEPS)
    return roll(params, f"{feed} {imperfection}", SHARE_STEPS, *key) < steps


def pick(values: Sequence[Any], index: Column) -> Column:
    """Return the value at an index, counted from 0."""
    return F.get(F.array(*map(F.lit, values)), index.cast("int"))


def hour_of(params: Parameters, milliseconds: str) -> Column:
    """Return the hour, counted from the first hour, of a time in milliseconds since the epoch."""
    return F.expr(f"({milliseconds} - {params.start_ms}L) div {HOUR_MS}L")


def landing_hour(params: Parameters, hour: Column, delay: Column) -> Column:
    """Return the number of the folder ``delay`` hours after ``hour``, and at most the last folder."""
    return F.least(hour + delay, F.lit(params.hours - 1)).cast("int")
