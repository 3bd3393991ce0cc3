"""JSON lines read with a declared schema: a bad field costs no other field, a bad line not the job.

What a reader of JSON lines promises (``tests/patterns/error_management/test_dead_letter.py``):

* a line is *unparsable* when it isn't exactly one JSON object in UTF-8: text, a truncated object, an array, ``null``,
  two objects glued together, anything after the closing brace, bytes that are no UTF-8, an object that has a name
  twice, at any depth;
* a value that the field's type can't hold exactly becomes NULL in its own field only, at any depth, and is named in
  ``unreadable``: a text in a boolean, integer or float field, a fraction in an integer field, a decimal that would be
  rounded, a date without time in a timestamp field (:mod:`python_jobs.shared.records.values`), a value of another shape
  where an object, array or map is declared;
* a number or boolean in a string field is read as it is written (``1.10`` stays ``1.10``); an object or array there
  is a wrong type.

``from_json`` alone promises none of it: it stops reading after the first object, rounds, completes times by today's
date, and hands numbers to a string field through a double. So the line is parsed as the first element of an array
that must end with an element of ours, with all numbers and booleans quoted and marked, and every field as a text. A
line is parsed again only where a string begins like an object or array, and where a declared object, array or map is
absent though its name is in the line.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    MapType,
    StringType,
    StructField,
    StructType,
    VariantType,
)

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.yaml_files import read_yaml
from python_jobs.shared.records.values import declared_schema, exact_value, require_readable
from python_jobs.shared.spark.sql_text import (
    identifier,
    named_column,
    named_columns,
    require_free_names,
    taken_names,
)

ERROR_CLASS = "error_class"
ERROR_MESSAGE = "error_message"

NOT_A_JSON_OBJECT = "NOT_A_JSON_OBJECT"
MISSING_FIELD = "MISSING_FIELD"
UNPARSABLE_FIELD = "UNPARSABLE_FIELD"
NULL_DERIVED_FIELD = "NULL_DERIVED_FIELD"

TYPED = "__typed"
"""Struct of a record's fields."""
UNREADABLE = "unreadable_fields"
"""Names of the fields whose value is there and isn't of the field's type; they are NULL."""

_RECORD = "__record"
_OTHERS = "__fields_of_another_shape"
_END = "__end_of_line"
_SCHEMA_FILES = {".ddl", ".sql", ".json", ".yml", ".yaml"}
# Strict JSON: Spark's defaults also take single quotes and NaN.
_OPTIONS = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}

# Before the text of what was a number or a boolean: a noncharacter of Unicode, which no text holds.
_MARK = "\ufdd0"
_HOLDS_MARK = rf"{_MARK}|\\u[fF][dD][dD]0"
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_SCALAR = r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+|true|false"
# Token by token from the start, so that what is no JSON ends the search and stays what it is. All loops are possessive:
# Java's matcher needs no stack for them, however long the line is.
_TOKENS = rf'\G([^"0-9tf-]*+)(?:({_STRING})|({_SCALAR})(?=\s*+(?:[,}}\]]|$)))'


def load_schema(text: str) -> StructType:
    """Return the schema given as a DDL string, or as the path of a file that holds one.

    A ``.ddl`` or ``.sql`` file holds a DDL string; a ``.yml``, ``.yaml`` or ``.json`` file maps field names
    to types, with nested maps for structs, or holds Spark's own JSON form of a schema.

    Raises:
        WrongUse: the file is missing, or its content is no schema.
    """
    path = Path(text)
    if path.suffix not in _SCHEMA_FILES:
        return _declared(text, text)
    if not path.is_file():
        raise WrongUse(f"the schema file '{text}' doesn't exist")
    if path.suffix in {".ddl", ".sql"}:
        try:
            return _declared(path.read_text(encoding="utf-8"), text)
        except UnicodeDecodeError:
            raise WrongUse(f"the schema file '{text}' is not UTF-8") from None
    tree = read_yaml(text, "schema file")
    if not isinstance(tree, dict):
        raise WrongUse(f"the schema file '{text}' holds no map of field names to types")
    if tree.get("type") == "struct" and isinstance(tree.get("fields"), list):
        return _declared(tree, text)
    return _declared(
        ", ".join(f"{identifier(str(name))} {_type_ddl(type_)}" for name, type_ in tree.items()), text
    )


def _type_ddl(type_: Any) -> str:
    if isinstance(type_, dict):
        return f"struct<{', '.join(f'{identifier(str(name))}: {_type_ddl(child)}' for name, child in type_.items())}>"
    return str(type_)


def _declared(declaration: str | Mapping[str, Any], given_as: str) -> StructType:
    try:
        schema = declared_schema(declaration)
    except ValueError as error:
        raise WrongUse(f"'{given_as}' is no schema: {error}") from None
    quoted = [name for name in schema.fieldNames() if "'" in name or "`" in name]
    if quoted:
        raise WrongUse(f"field names can't hold quotes: {', '.join(quoted)}")
    return schema


def json_object(payload: Column, schema: StructType) -> Column:
    """Return the fields of a JSON line as texts (:func:`typed_fields` types them); NULL if it isn't one object."""
    element = StructType([*_texts_of(schema).fields, StructField(_END, BooleanType())])
    array = _elements(payload, element)
    # The parser of variants alone refuses a repeated name.
    is_one = F.is_valid_utf8(payload) & ~payload.rlike(_HOLDS_MARK) & F.try_parse_json(payload).isNotNull()
    parsed = F.when(is_one, array)
    # One look at the array: Spark would parse the line again for each.
    one = F.filter(F.array(parsed), lambda a: (F.size(a) == 2) & F.get(a, 0).isNotNull() & F.get(a, 1)[_END])
    return F.get(F.get(one, 0), 0)


def json_variant(text: Column) -> Column:
    """Return what a JSON text holds as a variant; NULL if it isn't exactly one JSON value in UTF-8.

    ``try_parse_json`` alone takes the first value and drops what follows it. So the text is read within a list before a
    hash of it, which is there only if the text ends where its value ends.
    """
    end = F.xxhash64(text)
    items = F.concat(F.lit("["), text, F.lit(","), end.cast("string"), F.lit("]"))
    # One look at the list: Spark would parse the text again for each.
    lists = F.array(F.when(F.is_valid_utf8(text), F.try_parse_json(items)))
    whole = F.filter(lists, lambda found: F.try_variant_get(found, "$[1]", "bigint") == end)
    return F.try_variant_get(F.get(whole, 0), "$[0]", "variant")


def _elements(payload: Column, element: StructType) -> Column:
    """Return what the line holds as an array, with an element of ours at its end."""
    # Numbers and booleans become texts with a mark: from_json would change the digits of some.
    quoted = F.replace(F.regexp_replace(payload, _TOKENS, f'$1$2"{_MARK}$3"'), F.lit(f'"{_MARK}"'), F.lit(""))
    line = F.concat(F.lit("["), quoted, F.lit(f',{{"{_END}":true}}]'))
    return F.from_json(line, ArrayType(element), _OPTIONS)


def _texts_of(type_: DataType, levels: int | None = None, text: DataType | None = None) -> Any:
    """Return a type with a string, or ``text``, for each atomic one.

    Args:
        levels: number of levels that stay; a struct, an array or a map below them is a string. Default: all.
    """
    below = None if levels is None else levels - 1
    if levels == 0:
        return StringType()
    if isinstance(type_, StructType):
        fields = [StructField(field.name, _texts_of(field.dataType, below, text)) for field in type_.fields]
        return StructType(fields)
    if isinstance(type_, ArrayType):
        return ArrayType(_texts_of(type_.elementType, below, text))
    if isinstance(type_, MapType):
        return MapType(StringType(), _texts_of(type_.valueType, below, text))
    return text or StringType()


def with_fields(records: DataFrame, schema: StructType, payload: Column) -> DataFrame:
    """Return the records with ``__typed``, a struct of their fields (NULL: not one object), and ``unreadable_fields``.

    ``__record`` holds the fields' texts. Each step is a column of its own: Spark evaluates it once then.
    """
    rows = records.withColumn(_RECORD, json_object(payload, schema))
    rows = rows.withColumn(TYPED, _typed(F.col(_RECORD), schema))
    rows = rows.withColumn(TYPED, _without_nested_texts(F.col(TYPED), F.col(_RECORD), schema, payload))
    rows = rows.withColumn(_OTHERS, _other_shapes(F.col(_RECORD), schema, payload))
    texts, typed = F.col(_RECORD), F.col(TYPED)
    unreadable = [
        F.when(
            _is_unreadable(texts[f.name], typed[f.name], f.dataType) | F.array_contains(_OTHERS, f.name),
            f.name,
        )
        for f in schema.fields
    ]
    found = F.when(typed.isNotNull(), F.array_compact(F.array(*unreadable))) if unreadable else F.array()
    nothing = F.array().cast("array<string>")
    return rows.withColumn(UNREADABLE, F.coalesce(found.cast("array<string>"), nothing)).drop(_OTHERS)


def _typed(text: Column, type_: DataType) -> Column:
    if isinstance(type_, StructType):
        fields = [_typed(text[field.name], field.dataType).alias(field.name) for field in type_.fields]
        return F.when(text.isNotNull(), F.struct(*fields))
    if isinstance(type_, ArrayType):
        return F.transform(text, lambda element: _typed(element, type_.elementType))
    if isinstance(type_, MapType):
        return F.transform_values(text, lambda _, value: _typed(value, type_.valueType))
    is_token = text.startswith(_MARK)
    if isinstance(type_, StringType):
        as_written = F.regexp_replace(text, f'"{_MARK}([^"]*)"', "$1")  # of an object or array
        return F.when(is_token, _unmarked(text)).when(text.contains(_MARK), as_written).otherwise(text)
    if isinstance(type_, DecimalType):  # many write decimals as texts, to keep their digits
        return exact_value(_bare(text), type_)
    if isinstance(type_, BooleanType | IntegralType | FloatType | DoubleType):
        return exact_value(F.when(is_token, _unmarked(text)), type_)
    return exact_value(F.when(~is_token, text), type_)


def _bare(text: Column) -> Column:
    """Return a token without its mark, and any other text as it is."""
    return F.when(text.startswith(_MARK), _unmarked(text)).otherwise(text)


def _unmarked(token: Column) -> Column:
    return token.substr(2, 2**31 - 1)


def _is_unreadable(text: Column, value: Column, type_: DataType) -> Column:
    """Return whether a text is there, at any depth, that isn't a value of its type."""
    inside = F.lit(False)
    if isinstance(type_, ArrayType | MapType):
        inner = _inner(type_)
        pair = (text, value) if isinstance(type_, ArrayType) else (F.map_values(text), F.map_values(value))
        inside = _holds(F.zip_with(*pair, lambda t, v: _is_unreadable(t, v, inner)))
    if isinstance(type_, StructType):
        inside = _any(_is_unreadable(text[f.name], value[f.name], f.dataType) for f in type_.fields)
    return (text.isNotNull() & value.isNull()) | inside


def _inner(type_: ArrayType | MapType) -> DataType:
    return type_.elementType if isinstance(type_, ArrayType) else type_.valueType


def _any(conditions: Iterable[Column]) -> Column:
    return functools.reduce(operator.or_, conditions, F.lit(False))


def _holds(conditions: Column) -> Column:
    return F.coalesce(F.exists(conditions, lambda holds: holds), F.lit(False))


def _other_shapes(record: Column, schema: StructType, payload: Column) -> Column:
    """Return the names of fields that hold, at any depth, a value of another shape than their struct, array or map.

    ``from_json`` gives NULL for such a value. Where a struct, an array or a map is absent though its name is in the
    line, or may be, the line is parsed again with a string in its place: a string takes a value of any shape.
    """
    nested = [field for field in schema.fields if _depth(field.dataType)]
    if not nested:
        return F.array().cast("array<string>")
    may_be = _any(_may_be_other(record[field.name], field.dataType, field.name, payload) for field in nested)
    depths = range(max(_depth(field.dataType) for field in nested))
    found = [
        F.when(_is_other(record[field.name], parsed[field.name], field.dataType, depth), field.name)
        for depth in depths
        for parsed in [F.get(_elements(payload, _texts_of(schema, depth + 1)), 0)]
        for field in nested
        if depth < _depth(field.dataType)
    ]
    return F.when(record.isNotNull() & may_be, _interpreted(F.array_compact(F.array(*found))))


def _interpreted(value: Column) -> Column:
    """Return a value by a higher-order function, which Spark interprets.

    In the generated code a large expression would make the method too long for the JIT compiler, and every row slow.
    """
    return F.get(F.transform(F.array(F.lit(0)), lambda _: value), 0)


def _depth(type_: DataType) -> int:
    """Return how many structs, arrays and maps a type has within each other."""
    if isinstance(type_, StructType):
        return 1 + max((_depth(field.dataType) for field in type_.fields), default=0)
    return 1 + _depth(_inner(type_)) if isinstance(type_, ArrayType | MapType) else 0


def _may_be_other(text: Column, type_: DataType, name: str, payload: Column) -> Column:
    """Return whether a struct, an array or a map is absent, and its name in the line or written with an escape."""
    absent = text.isNull() & (payload.contains(f'"{name}"') | payload.contains("\\"))
    if isinstance(type_, StructType):
        fields = [field for field in type_.fields if _depth(field.dataType)]
        return absent | _any(
            _may_be_other(text[field.name], field.dataType, field.name, payload) for field in fields
        )
    inner = _inner(type_) if isinstance(type_, ArrayType | MapType) else None
    if inner is None or not _depth(inner):
        return absent
    values = text if isinstance(type_, ArrayType) else F.map_values(text)
    return absent | _holds(F.transform(values, lambda value: _may_be_other(value, inner, name, payload)))


def _is_other(text: Column, parsed: Column, type_: DataType, depth: int) -> Column:
    """Return whether a value at this depth is absent from the texts, and there where a string stands for it."""
    if depth == 0:
        return text.isNull() & parsed.isNotNull()
    if isinstance(type_, StructType):
        return _any(
            _is_other(text[field.name], parsed[field.name], field.dataType, depth - 1)
            for field in type_.fields
            if _depth(field.dataType) >= depth
        )
    if isinstance(type_, ArrayType | MapType):
        inner = _inner(type_)
        pair = (text, parsed) if isinstance(type_, ArrayType) else (F.map_values(text), F.map_values(parsed))
        return _holds(F.zip_with(*pair, lambda t, p: _is_other(t, p, inner, depth - 1)))
    return F.lit(False)


def parse_records(
    records: DataFrame,
    schema: StructType,
    payload_column: str = "payload",
    derive: Mapping[str, str] | None = None,
    require: Iterable[str] = (),
    rename: Mapping[str, str] | None = None,
    unreadable_is_error: bool = False,
) -> DataFrame:
    """Return one row for each record, with its typed fields and, when it can't be processed, the error.

    Args:
        records: the payload column and any source columns, which pass through unchanged.
        schema: the fields to read from the JSON object.
        derive: column name to SQL expression, in order; an expression sees the fields, the source columns
            and the columns derived before it, and replaces a column of its own name. Use ``try_``
            functions: an expression that raises fails the job, it doesn't reject the row.
        require: columns that a processable record has; a NULL there is an error.
        rename: field to column name, such as for a field that is named like a column of the source.
        unreadable_is_error: whether a record with an unreadable field can't be processed.

    Returns:
        fields, new derived columns, the record's columns, ``unreadable_fields`` (names), then ``error_class`` and
        ``error_message`` (both NULL for a processable record). The grain is that of ``records``.

    Raises:
        WrongUse: the payload column is missing, a name is used twice, or a field's type isn't read from JSON.
    """
    derive, rename, require = dict(derive or {}), dict(rename or {}), list(require)
    require_readable(schema, nested=True)
    unknown = [name for name in rename if name not in schema.fieldNames()]
    if unknown:
        raise WrongUse(f"rename names no field of the schema: {', '.join(unknown)}")
    columns = {rename.get(name, name): name for name in schema.fieldNames()}
    if len(columns) < len(schema.fieldNames()):
        raise WrongUse(f"two fields would be columns of one name: {', '.join(rename.values())}")
    _check_names(records, columns, payload_column, derive, require)
    payload = named_column(payload_column)

    rows = with_fields(records, schema, payload)
    fields = [named_column(name, of=TYPED).alias(column) for column, name in columns.items()]
    rows = rows.select(*fields, *named_columns(records.columns), UNREADABLE, _RECORD)
    for name, expression in derive.items():
        rows = rows.withColumn(name, F.expr(expression))
    ordered = dict.fromkeys([*columns, *derive, *records.columns])
    return rows.select(
        *named_columns(ordered),
        UNREADABLE,
        *_first_error(rows.schema, schema, columns, payload, require, unreadable_is_error),
    )


def _check_names(
    records: DataFrame,
    columns: Mapping[str, str],
    payload_column: str,
    derive: Mapping[str, str],
    require: list[str],
) -> None:
    if payload_column not in records.columns:
        raise WrongUse(
            f"the source has no payload column '{payload_column}'; it has {', '.join(records.columns)}"
        )
    require_free_names((*records.columns, *columns, *derive), (_RECORD, TYPED, _OTHERS))
    taken = taken_names((*columns, *derive), by=records.columns)
    if taken:
        raise WrongUse(
            f"the source already has columns of these names: {', '.join(taken)}; give the fields others with rename "
            "(--rename.FIELD COLUMN)"
        )
    unknown = [name for name in require if name not in {*columns, *derive}]
    if unknown:
        raise WrongUse(f"required columns are neither in the schema nor derived: {', '.join(unknown)}")


def _without_nested_texts(typed: Column, record: Column, schema: StructType, payload: Column) -> Column:
    """Return the typed fields with NULL for each string, at any depth, that the JSON gives an object or array.

    ``from_json`` hands their JSON text to the string. Only a text that begins like one is worth the look: the line is
    parsed again with variants, which know what they were, in place of strings.
    """
    if not _has_text(schema):
        return typed
    parsed = F.get(_elements(payload, _texts_of(schema, text=VariantType())), 0)
    looked_up = _interpreted(_without_nested(typed, parsed, schema))
    return F.when(_looks_nested(record, schema), looked_up).otherwise(typed)


def _has_text(type_: DataType) -> bool:
    if isinstance(type_, StructType):
        return any(_has_text(field.dataType) for field in type_.fields)
    return (
        _has_text(_inner(type_)) if isinstance(type_, ArrayType | MapType) else isinstance(type_, StringType)
    )


def _looks_nested(text: Column, type_: DataType) -> Column:
    """Return whether a string begins like an object or an array."""
    if not _has_text(type_):
        return F.lit(False)
    if isinstance(type_, StructType):
        return _any(_looks_nested(text[field.name], field.dataType) for field in type_.fields)
    if isinstance(type_, ArrayType | MapType):
        inner = _inner(type_)
        values = text if isinstance(type_, ArrayType) else F.map_values(text)
        return _holds(F.transform(values, lambda value: _looks_nested(value, inner)))
    return F.coalesce(text.startswith("{") | text.startswith("["), F.lit(False))


def _without_nested(value: Column, parsed: Column, type_: DataType) -> Column:
    """Return the value without the strings in whose place ``parsed`` holds an object or array."""
    if isinstance(type_, StringType):
        return F.when(~F.schema_of_variant(parsed).rlike("^(?:OBJECT|ARRAY)"), value)
    if not _has_text(type_):
        return value
    if isinstance(type_, StructType):
        children = [
            _without_nested(value[field.name], parsed[field.name], field.dataType).alias(field.name)
            for field in type_.fields
        ]
        return F.when(value.isNotNull(), F.struct(*children))
    if isinstance(type_, ArrayType):
        return F.zip_with(value, parsed, lambda v, p: _without_nested(v, p, type_.elementType))
    inner = _inner(cast(MapType, type_))
    values = F.zip_with(F.map_values(value), F.map_values(parsed), lambda v, p: _without_nested(v, p, inner))
    return F.map_from_arrays(F.map_keys(value), values)


def _first_error(
    typed: StructType,
    schema: StructType,
    columns: Mapping[str, str],
    payload: Column,
    require: list[str],
    unreadable_is_error: bool,
) -> tuple[Column, Column]:
    """Return class and message of a record's first error: not an object, ``require`` in its order, unreadable."""
    not_an_object = F.col(_RECORD).isNull()
    size = F.coalesce(F.length(payload).cast("string"), F.lit("no"))
    error_class = F.when(not_an_object, NOT_A_JSON_OBJECT)
    message = F.when(
        not_an_object, F.concat(F.lit("the payload is not one JSON object ("), size, F.lit(" characters)"))
    )
    for name in require:
        is_null = named_column(name).isNull()
        if name not in columns:
            error_class = error_class.when(is_null, NULL_DERIVED_FIELD)
            message = message.when(is_null, f"the expression of '{name}' gives NULL")
            continue
        field = columns[name]
        is_nested = isinstance(schema[field].dataType, StructType | ArrayType | MapType)
        in_payload = F.get_json_object(payload, f"$['{field}']")
        raw = in_payload if is_nested else _bare(F.col(_RECORD)[field])
        wanted = typed[name].dataType.simpleString()
        error_class = error_class.when(is_null & raw.isNull(), MISSING_FIELD).when(is_null, UNPARSABLE_FIELD)
        message = message.when(is_null & raw.isNull(), f"field '{name}' is missing or null").when(
            is_null,
            F.concat(F.lit(f"field '{name}' can't be read as {wanted}: "), F.substring(raw, 1, 100)),
        )
    if unreadable_is_error:
        is_unreadable = F.size(UNREADABLE) > 0
        error_class = error_class.when(is_unreadable, UNPARSABLE_FIELD)
        names = F.array_join(UNREADABLE, ", ")
        message = message.when(
            is_unreadable, F.concat(F.lit("values of other types than the schema's: "), names)
        )
    return error_class.alias(ERROR_CLASS), message.alias(ERROR_MESSAGE)
