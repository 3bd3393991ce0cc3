"""Texts as typed values without loss: one rule for all readers.

Spark's casts and parsers change values silently: ``1.239`` becomes ``1.24`` in a ``decimal(5,2)``, the text
of a timestamp becomes a date, ``10:00`` becomes ten o'clock of today, ``16777217`` becomes ``16777216`` in a float.
Here such a text is not a value of the type: the result is NULL, and the caller counts or refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    CharType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

from python_jobs.shared.core.failures import WrongUse

FIRST_MICROS, LAST_MICROS = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The first and the last microsecond of the years 1 to 9999 in UTC, counted from 1970."""

_NUMBER = r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\z"
_DAY = r"^(?!0000)[0-9]{4}-[0-9]{2}-[0-9]{2}"
_CLOCK = r"[ T][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6}0*)?)?"
_OFFSET = r" ?(?:Z|[+-][0-9]{2}(?::?[0-9]{2})?)"
_DATE = _DAY + r"\z"
_LOCAL_TIMESTAMP = _DAY + _CLOCK + r"\z"
_FULL_TIMESTAMP = _DAY + _CLOCK + f"(?:{_OFFSET})?" + r"\z"
_ATOMIC = (
    StringType,
    BooleanType,
    IntegralType,
    FloatType,
    DoubleType,
    DecimalType,
    DateType,
    TimestampType,
    TimestampNTZType,
    BinaryType,
)
_KINDS = (IntegralType, FloatType, DoubleType, DecimalType), (DateType, TimestampType, TimestampNTZType)
_LARGEST_BIGINT = 2**63 - 1
_SAFE_DIGITS = {FloatType: 6, DoubleType: 15}


def declared_schema(declaration: str | Mapping[str, Any]) -> StructType:
    """Return the schema that a SQL text, or Spark's JSON form of a schema, declares.

    Raises:
        ValueError: it declares none, or a struct has two fields that differ in case alone: Spark can't tell them apart.
    """
    try:
        if isinstance(declaration, str):
            schema = StructType.fromDDL(declaration)
        else:
            schema = StructType.fromJson(dict(declaration))
    except PySparkException as failure:
        raise ValueError(str(failure).strip().splitlines()[0]) from None
    except (KeyError, TypeError, AttributeError) as failure:  # pyspark checks the JSON form no further
        raise ValueError(f"Spark's JSON form of a schema has {failure} missing or of another type") from None
    if not isinstance(schema, StructType) or not schema.fields:  # 'string' is a type, but no schema
        raise ValueError(f"'{declaration}' names no columns")
    twice = _repeated_name("", schema)
    if twice is not None:
        raise ValueError(f"it names {twice} twice; names must differ in more than the case of letters")
    return schema


def _repeated_name(path: str, type_: DataType) -> str | None:
    """Return the path of a field that has the name of an earlier field of its struct; None if there is none."""
    if isinstance(type_, ArrayType | MapType):
        inner = [(path, type_.elementType if isinstance(type_, ArrayType) else type_.valueType)]
    elif isinstance(type_, StructType):
        seen: set[str] = set()
        for field in type_.fields:
            if field.name.casefold() in seen:
                return f"{path}{field.name}"
            seen.add(field.name.casefold())
        inner = [(f"{path}{field.name}.", field.dataType) for field in type_.fields]
    else:
        return None
    return next(filter(None, (_repeated_name(*child) for child in inner)), None)


def require_readable(schema: StructType, nested: bool) -> None:
    """Refuse types that no text is read as.

    Raises:
        WrongUse: a column is of another type; ``nested`` allows structs, arrays and maps.
    """
    for path, type_ in _leaves("", schema, nested):
        if not isinstance(type_, _ATOMIC) or is_limited(type_):
            raise WrongUse(
                f"column {path} is of type {type_.simpleString()}, which no text is read as: declare a string, "
                "boolean, integer, float, double, decimal, date, timestamp or binary"
            )


def is_limited(type_: DataType) -> bool:
    """Return whether a type is a text of limited length, which nobody checks once Spark has read the value."""
    return isinstance(type_, CharType | VarcharType)


def _leaves(path: str, type_: DataType, nested: bool) -> Iterator[tuple[str, DataType]]:
    if isinstance(type_, StructType) and (nested or not path):
        for field in type_.fields:
            yield from _leaves(f"{path}.{field.name}".lstrip("."), field.dataType, nested)
    elif isinstance(type_, ArrayType) and nested:
        yield from _leaves(f"{path}.element", type_.elementType, nested)
    elif isinstance(type_, MapType) and nested and isinstance(type_.keyType, StringType):
        yield from _leaves(f"{path}.value", type_.valueType, nested)
    else:
        yield path, type_


def exact_value(text: Column, type_: DataType) -> Column:
    """Return the text as a value of an atomic type; NULL if the type can't hold exactly what it says.

    An integral number such as ``517.0`` is an integer. A date is a date alone. A timestamp says date, hour and minute
    at least, and no more than microseconds; without an offset it is one of UTC (``macros/shared/times.sql`` has the
    same rule). A timestamp without time zone has no offset. Years are 1 to 9999, in UTC. Floats hold the digits they
    would print, or fewer. ``NaN`` and ``Infinity`` are no numbers.
    """
    if isinstance(type_, StringType):
        return text
    if isinstance(type_, BooleanType):
        return F.when(F.lower(text) == "true", True).when(F.lower(text) == "false", False)
    if isinstance(type_, IntegralType):
        plain = text.try_cast(type_)
        integral = F.when(_scale(text) <= 0, text.try_cast("decimal(38,0)").try_cast(type_))
        return F.when(text.rlike(_NUMBER), F.coalesce(plain, integral))
    if isinstance(type_, DecimalType):
        return F.when(text.rlike(_NUMBER) & (_scale(text) <= type_.scale), text.try_cast(type_))
    if isinstance(type_, FloatType | DoubleType):
        value = text.try_cast(type_)
        short = (F.length(text) <= _SAFE_DIGITS[type(type_)]) & ~F.lower(text).contains("e")
        return F.when(text.rlike(_NUMBER) & (short | _prints_as(text, value)), value)
    if isinstance(type_, BinaryType):
        return F.try_to_binary(text, F.lit("base64"))
    if isinstance(type_, TimestampType):
        in_a_zone = F.when(text.rlike(_LOCAL_TIMESTAMP), F.concat(text, F.lit("Z"))).otherwise(text)
        # Spark's cast takes an offset only behind seconds.
        with_seconds = F.regexp_replace(in_a_zone, r"^(.{16})( ?[Z+-].*)$", "$1:00$2")
        value = with_seconds.try_cast(type_)
        # Only on these days an offset can lead out of the years.
        is_edge = text.startswith("0001-01-01") | text.startswith("9999-12-31")
        is_inside = ~is_edge | F.unix_micros(value).between(FIRST_MICROS, LAST_MICROS)
        return F.when(text.rlike(_FULL_TIMESTAMP) & is_inside, value)
    pattern = _DATE if isinstance(type_, DateType) else _LOCAL_TIMESTAMP
    return F.when(text.rlike(pattern), text.try_cast(type_))


def _scale(number: Column) -> Column:
    """Return how many decimals the number needs: those it has, without zeros at the end, less its exponent."""
    decimals = F.length(F.regexp_extract(number, r"\.([0-9]*?)0*(?:[eE]|$)", 1))
    exponent = F.nullif(F.regexp_extract(number, r"[eE]([+-]?[0-9]+)$", 1), F.lit(""))
    return decimals - F.coalesce(exponent, F.lit("0")).try_cast("int")


def _prints_as(text: Column, value: Column) -> Column:
    """Return whether Java prints the digits of the text, or more of them, for the float that the text is read as.

    It prints more than needed for some: ``2e23`` as ``1.9999999999999998E23``, ``5e-324`` as ``4.9E-324``.
    """
    of_text, printed = _digits(text), _digits(value.cast("string"))
    is_shorter = (F.length(of_text) < F.length(printed)) & (printed != "Infinity")
    return (of_text == printed) | is_shorter


def _digits(number: Column) -> Column:
    """Return a number's digits, without zeros at either end."""
    mantissa = F.regexp_replace(number, r"[eE].*$|[-+.]", "")
    return F.regexp_replace(mantissa, r"^0+|0+$", "")


def exact_cast(value: Column, source: DataType, target: DataType) -> Column:
    """Return a typed value as another type; NULL for a value that would change by it.

    Numbers are no times or booleans, and a date is no timestamp. An array is cast by its elements.
    """
    if source == target:
        return value
    if isinstance(source, ArrayType) and isinstance(target, ArrayType):
        return _exact_elements(value, source.elementType, target.elementType)
    if isinstance(source, StringType):
        return exact_value(value, target)
    cast = value.try_cast(target)
    if isinstance(target, StringType):
        return F.try_validate_utf8(cast)
    if isinstance(source, _ATOMIC) and isinstance(target, _ATOMIC) and not _of_one_kind(source, target):
        return F.lit(None).cast(target)
    is_same = cast.try_cast(source).eqNullSafe(value)
    for whole, other, side in ((source, target, value), (target, source, cast)):
        # Spark casts a float of 2^63 and more to this number, which no float holds.
        if isinstance(whole, LongType) and isinstance(other, FloatType | DoubleType):
            is_same &= side != _LARGEST_BIGINT
    return F.when(is_same, cast)


def _exact_elements(value: Column, source: DataType, target: DataType) -> Column:
    cast = F.transform(value, lambda element: exact_cast(element, source, target))
    is_lost = F.zip_with(value, cast, lambda before, after: before.isNotNull() & after.isNull())
    return F.when(~F.exists(is_lost, lambda lost: lost), cast)


def _of_one_kind(source: DataType, target: DataType) -> bool:
    if isinstance(source, DateType):
        return isinstance(target, DateType)
    kinds = [
        next((kind for kind in _KINDS if isinstance(type_, kind)), type(type_)) for type_ in (source, target)
    ]
    return kinds[0] == kinds[1]
