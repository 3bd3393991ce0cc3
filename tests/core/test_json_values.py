"""JSON values that are compared: digits stay, and what is no JSON or has a name twice is refused."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from python_jobs.shared.core import json_values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"a": 1.10, "b": [true, null, "\xc3\xbc"]}', {"a": Decimal("1.10"), "b": [True, None, "ü"]}),
        (b"1e400", Decimal("1e400")),
        (b"-0.0", Decimal("-0.0")),
        (b"12345678901234567890123", 12345678901234567890123),
        (b"7" * 4_000, int("7" * 4_000)),
        (b"7" * 5_000, Decimal("7" * 5_000)),
        (b"\xef\xbb\xbf5", 5),
        (b'{"a": {"x": 1}, "b": {"x": 1}}', {"a": {"x": 1}, "b": {"x": 1}}),
    ],
)
def test_a_number_keeps_its_digits(text: bytes, value: Any) -> None:
    found = json_values.read_value(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"a": 1}'.encode("utf-16"), "codec can't decode"),
        ('{"a": 1}'.encode("utf-16-le"), "char 1"),
        (b'"\xed\xa0\x80"', "codec can't decode"),
        (b'"\xff"', "codec can't decode"),
        (b'{"a": NaN}', "NaN is no JSON"),
        (b"-Infinity", "-Infinity is no JSON"),
        (b"1e99999999999999999999", "^the exponent of 1e99999999999999999999 is too large$"),
        (b'{"a": 1}{', "Extra data"),
        (b"", "Expecting value"),
        (b'{"a": {"b": 1, "c": 2, "b": 3, "c": 2}, "a": 1}', "^names are there twice: b, c, a$"),
    ],
)
def test_what_is_no_json_in_utf_8_is_refused(text: bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        json_values.read_value(text)


def test_the_names_of_each_text_are_added() -> None:
    repeated: list[str] = []
    reader = json_values.decoder(repeated)
    assert reader.raw_decode('{"a": 1, "a": 2} {', 0) == ({"a": 2}, 16)
    assert repeated == ["a"]
    assert reader.decode('{"b": 1}') == {"b": 1}
    assert repeated == ["a"]
