"""JSON whose numbers keep their digits: ``1.10`` stays ``1.10`` after it is parsed and written."""

from __future__ import annotations

import json
from typing import Any


class Number(str):
    """A number with the digits of its text: 1.10 is not 1.1."""

    __slots__ = ()


class Object(list[tuple[str, Any]]):
    """A JSON object as pairs, which keep their order and repeated names."""


def parse(text: str | bytes) -> Any:
    """Return the value with numbers as :class:`Number` and objects as :class:`Object`.

    Bytes are UTF-8; a byte order mark before them is skipped.

    Raises:
        ValueError: the text is no JSON; ``NaN`` and ``Infinity`` are no JSON either, nor are other encodings.
        RecursionError: the text is nested too deep.
    """
    if isinstance(text, bytes):  # Python would take UTF-16, UTF-32 and halves of surrogate pairs
        text = text.decode("utf-8-sig")
    return json.loads(
        text, parse_float=Number, parse_int=Number, parse_constant=refuse, object_pairs_hook=Object
    )


class RepeatedName(ValueError):
    """An object has a name twice: nobody knows which value is meant."""


def by_name(pairs: Object) -> dict[str, Any]:
    """Return an object's values by name.

    Raises:
        RepeatedName: it has a name twice.
    """
    named = dict(pairs)
    if len(named) < len(pairs):
        raise RepeatedName("a JSON object has a name twice")
    return named


def refuse(constant: str) -> Any:
    """Refuse NaN and Infinity: the ``parse_constant`` of a strict reader.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{constant} is no JSON")


def write(value: Any, separators: tuple[str, str] = (", ", ": ")) -> str:
    """Return the JSON text of a value of :func:`parse`; texts that UTF-8 can't hold are escaped."""
    between, colon = separators
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, Object):
        pairs = (f"{write(name, separators)}{colon}{write(item, separators)}" for name, item in value)
        return "{" + between.join(pairs) + "}"
    if isinstance(value, list):
        return "[" + between.join(write(item, separators) for item in value) + "]"
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        # Half a surrogate pair has no UTF-8: it stays an escape.
        return text if is_utf8(text) else json.dumps(value)
    return json.dumps(value)


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can hold a text: JSON also has escapes for halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
