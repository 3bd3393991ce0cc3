"""JSON values that are compared and checked: a number keeps its digits, and a repeated name is noticed.

Python's own reader makes infinity of ``1e400``, takes NaN, UTF-16 and halves of surrogate pairs, and keeps the last of
two values that have one name.
"""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from typing import Any

from python_jobs.shared.core.exact_json import RepeatedName, refuse

_DIGITS = 4_000  # Python refuses to read an integer of more than 4,300 digits


def decoder(repeated: list[str]) -> json.JSONDecoder:
    """Return a reader of texts whose numbers with a fraction or an exponent become decimals.

    It raises a ValueError for what is no JSON, NaN and infinity included.

    Args:
        repeated: gets the names that an object of the text has twice; the value is the last one.
    """

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        named = dict(pairs)
        if len(named) < len(pairs):
            names = [name for name, _ in pairs]
            repeated.extend(sorted({name for name in names if names.count(name) > 1}))
        return named

    return json.JSONDecoder(
        parse_float=_decimal, parse_int=_integer, parse_constant=refuse, object_pairs_hook=members
    )


def read_value(data: bytes) -> Any:
    """Return the value of one JSON text in UTF-8; a byte order mark before it is skipped.

    Raises:
        ValueError: the bytes are something else, or an object has a name twice.
        RecursionError: the text is nested too deep.
    """
    repeated: list[str] = []
    value = decoder(repeated).decode(data.decode("utf-8-sig"))
    if repeated:
        raise RepeatedName(f"names are there twice: {', '.join(repeated)}")
    return value


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(f"the exponent of {text[:50]} is too large") from None


def _integer(text: str) -> int | Decimal:
    return int(text) if len(text) <= _DIGITS else _decimal(text)
