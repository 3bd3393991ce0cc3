"""JSON texts: what Python's own writer gives for NaN and infinity is no JSON, and many readers refuse it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def json_text(
    value: Any,
    *,
    ensure_ascii: bool = True,
    indent: int | None = None,
    sort_keys: bool = False,
    default: Callable[[Any], str] | None = None,
) -> str:
    """Return the JSON text of a value.

    NaN and the infinities become the texts "NaN", "Infinity" and "-Infinity", as in Spark's ``to_json``.

    Args:
        value: objects, lists, texts, numbers, booleans and None.
        ensure_ascii: whether all characters outside of ASCII are escaped.
        indent: number of spaces for each level; by default the text is one line.
        sort_keys: whether objects are sorted by their keys.
        default: function from any other value to a text; by default such a value raises a TypeError.
    """
    return json.dumps(
        _with_texts(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        sort_keys=sort_keys,
        default=default,
        allow_nan=False,
    )


def _with_texts(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {_with_texts(name): _with_texts(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_texts(item) for item in value]
    return value
