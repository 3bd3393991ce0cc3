"""Comparisons that NaN and infinity fail: every comparison with NaN is false, so a plain ``>`` lets NaN pass."""

from __future__ import annotations

import math
from typing import TypeGuard


def is_number(value: float | None) -> TypeGuard[float]:
    """Return whether a value is a finite number: not None, NaN or infinity."""
    return value is not None and math.isfinite(value)


def exceeds(value: float, limit: float) -> bool:
    """Return whether a value is above its limit; a value or a limit that is no finite number counts as above.

    >>> exceeds(2, 3), exceeds(4, 3), exceeds(math.nan, 3), exceeds(4, math.inf)
    (False, True, True, True)
    """
    return not (is_number(value) and is_number(limit) and value <= limit)
