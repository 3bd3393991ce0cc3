"""Comparisons that NaN and infinity fail."""

from __future__ import annotations

import math

import pytest

from python_jobs.shared.core.numbers import exceeds, is_number


@pytest.mark.parametrize(
    ("value", "limit", "expected"),
    [
        (2, 3, False),
        (3, 3, False),
        (4, 3, True),
        (math.nan, 3, True),
        (math.inf, 3, True),
        (-math.inf, 3, True),
        (2, math.nan, True),
        (2, math.inf, True),
        (math.inf, math.inf, True),
    ],
)
def test_what_is_no_number_exceeds_every_limit(value: float, limit: float, expected: bool) -> None:
    assert exceeds(value, limit) is expected


def test_a_number_is_finite() -> None:
    assert [is_number(value) for value in (0, -1.5, None, math.nan, math.inf, -math.inf)] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
