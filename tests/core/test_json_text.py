"""JSON texts: no text that is written is refused by a strict reader."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from python_jobs.shared.core import exact_json
from python_jobs.shared.core.json_text import json_text


def test_numbers_that_are_no_json_are_texts_at_every_depth() -> None:
    nan, infinity = float("nan"), float("inf")
    value: dict[Any, Any] = {"a": nan, "b": [infinity, (-infinity, 1.5)], "c": {"d": {"e": nan}}, nan: 0}
    text = json_text(value)
    assert text == ('{"a": "NaN", "b": ["Infinity", ["-Infinity", 1.5]], "c": {"d": {"e": "NaN"}}, "NaN": 0}')
    exact_json.parse(text)
    with pytest.raises(ValueError, match="NaN is no JSON"):
        exact_json.parse(json.dumps(value))


def test_what_is_json_is_written_as_python_writes_it() -> None:
    value = {"ü": [1, 1.0, True, None, "x"], "a": {}, "b": []}
    assert json_text(value) == json.dumps(value)
    assert json_text(value, ensure_ascii=False, indent=1, sort_keys=True) == json.dumps(
        value, ensure_ascii=False, indent=1, sort_keys=True
    )


def test_other_values_are_refused_unless_a_function_gives_their_text() -> None:
    assert json_text([Path("/a"), Decimal("1.10"), Decimal("NaN")], default=str) == '["/a", "1.10", "NaN"]'
    with pytest.raises(TypeError, match="not JSON serializable"):
        json_text(Path("/a"))
