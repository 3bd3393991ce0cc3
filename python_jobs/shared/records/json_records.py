"""JSON lines read with a declared schema: a bad field costs no other field, a bad line not the job.

What the reader promises, checked on Spark 4.2 (``tests/patterns/error_management/test_dead_letter.py``):

* a line is *unparsable* when it isn't exactly one JSON object: text, a truncated object, an array,
  ``null``, two objects glued together, anything after the closing brace;
* a value of the wrong type becomes NULL in its own field only, at any depth
  (``spark.sql.json.enablePartialResults``, Spark's default); a text in a boolean or number field is a wrong
  type;
* a number or boolean in a string field is read as its text; an object or array there is a wrong type.

``from_json`` alone promises neither the first nor the last: it stops reading after the first object, and
hands an object to a string field as JSON text. So the line is parsed as the first element of an array that
must end with an element of ours, and a string that starts like an object or array is looked up in the
payload, which is rare and therefore cheap.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BooleanType, DataType, StringType, StructField, StructType

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.yaml_files import read_yaml
from python_jobs.shared.spark.sql_text import identifier, named_column

ERROR_CLASS = "error_class"
ERROR_MESSAGE = "error_message"

NOT_A_JSON_OBJECT = "NOT_A_JSON_OBJECT"
MISSING_FIELD = "MISSING_FIELD"
UNPARSABLE_FIELD = "UNPARSABLE_FIELD"
NULL_DERIVED_FIELD = "NULL_DERIVED_FIELD"

_RECORD = "__record"
_END = "__end_of_line"
_SCHEMA_FILES = {".ddl", ".sql", ".json", ".yml", ".yaml"}
# Strict JSON: Spark's defaults also take single quotes and NaN.
_OPTIONS = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}


def load_schema(text: str) -> StructType:
    """Return the schema given as a DDL string, or as the path of a file that holds one.

    A ``.ddl`` or ``.sql`` file holds a DDL string; a ``.yml``, ``.yaml`` or ``.json`` file maps field names
    to types, with nested maps for structs, or holds Spark's own JSON form of a schema.

    Raises:
        WrongUse: the file is missing, or its content is no schema.
    """
    path = Path(text)
    if path.suffix not in _SCHEMA_FILES:
        return _from_ddl(text, text)
    if not path.is_file():
        raise WrongUse(f"the schema file '{text}' doesn't exist")
    if path.suffix in {".ddl", ".sql"}:
        return _from_ddl(path.read_text(encoding="utf-8"), text)
    tree = read_yaml(text, "schema file")
    if not isinstance(tree, dict):
        raise WrongUse(f"the schema file '{text}' holds no map of field names to types")
    if tree.get("type") == "struct" and isinstance(tree.get("fields"), list):
        return StructType.fromJson(tree)
    return _from_ddl(
        ", ".join(f"{identifier(name)} {_type_ddl(type_)}" for name, type_ in tree.items()), text
    )


def _type_ddl(type_: Any) -> str:
    if isinstance(type_, dict):
        return (
            f"struct<{', '.join(f'{identifier(name)}: {_type_ddl(child)}' for name, child in type_.items())}>"
        )
    return str(type_)


def _from_ddl(ddl: str, given_as: str) -> StructType:
    try:
        schema = cast(StructType, StructType.fromDDL(ddl))
    except PySparkException as error:
        raise WrongUse(f"'{given_as}' is no schema: {str(error).splitlines()[0]}") from None
    quoted = [name for name in schema.fieldNames() if "'" in name or "`" in name]
    if quoted:
        raise WrongUse(f"field names can't hold quotes: {', '.join(quoted)}")
    return schema


def parse_records(
    records: DataFrame,
    schema: StructType,
    payload_column: str = "payload",
    derive: Mapping[str, str] | None = None,
    require: Iterable[str] = (),
) -> DataFrame:
    """Return one row for each record, with its typed fields and, when it can't be processed, the error.

    Args:
        records: the payload column and any source columns, which pass through unchanged.
        schema: the fields to read from the JSON object.
        derive: column name to SQL expression, in order; an expression sees the fields, the source columns
            and the columns derived before it, and replaces a column of its own name. Use ``try_``
            functions: an expression that raises fails the job, it doesn't reject the row.
        require: columns that a processable record has; a NULL there is an error.

    Returns:
        fields, new derived columns, the record's columns, then ``error_class`` and ``error_message`` (both
        NULL for a processable record). The grain is that of ``records``.

    Raises:
        WrongUse: the payload column is missing, or a name is used twice.
    """
    derive = dict(derive or {})
    require = list(require)
    _check_names(records, schema, payload_column, derive, require)
    payload = named_column(payload_column)

    element = StructType([*schema.fields, StructField(_END, BooleanType())])
    line = F.concat(F.lit("["), payload, F.lit(f',{{"{_END}":true}}]'))
    rows = records.withColumn(_RECORD, F.from_json(line, ArrayType(element), _OPTIONS))
    first, last = F.get(_RECORD, 0), F.get(_RECORD, 1)
    is_object = F.coalesce((F.size(_RECORD) == 2) & first.isNotNull() & last[_END], F.lit(False))
    rows = rows.withColumn(_RECORD, F.when(is_object, _without_nested_texts(first, element, payload)))

    fields = [named_column(field.name, of=_RECORD) for field in schema.fields]
    is_error = F.col(_RECORD).isNull().alias(_RECORD)
    rows = rows.select(*fields, *(named_column(name) for name in records.columns), is_error)
    for name, expression in derive.items():
        rows = rows.withColumn(name, F.expr(expression))
    ordered = dict.fromkeys([*schema.fieldNames(), *derive, *records.columns])
    return rows.select(
        *(named_column(name) for name in ordered),
        *_first_error(rows.schema, schema, payload, require),
    )


def _check_names(
    records: DataFrame, schema: StructType, payload_column: str, derive: Mapping[str, str], require: list[str]
) -> None:
    if payload_column not in records.columns:
        raise WrongUse(
            f"the source has no payload column '{payload_column}'; it has {', '.join(records.columns)}"
        )
    taken = [name for name in (*schema.fieldNames(), *derive) if name in records.columns]
    if taken:
        raise WrongUse(f"the source already has columns of these names: {', '.join(taken)}")
    unknown = [name for name in require if name not in {*schema.fieldNames(), *derive}]
    if unknown:
        raise WrongUse(f"required columns are neither in the schema nor derived: {', '.join(unknown)}")


def _without_nested_texts(record: Column, type_: StructType, payload: Column) -> Column:
    """Return ``record`` with NULL in each string field that the JSON gives an object or array.

    ``from_json`` hands their JSON text to the field. Only the payload tells that from a string of the same text,
    and only a text that begins like one is worth the look. Strings inside arrays and maps are left as they are:
    their place in the payload varies by row.
    """
    texts = list(_texts(record, type_))
    if not texts:
        return record
    looks_nested = functools.reduce(operator.or_, map(_looks_nested, texts))
    # The look is wrapped in a higher-order function, which Spark interprets: in the generated code its size would
    # make the method too long for the JIT compiler, and every row slow.
    looked_up = F.get(F.transform(F.array(F.lit(0)), lambda _: _looked_up(record, type_, "$", payload)), 0)
    return F.when(looks_nested, looked_up).otherwise(record)


def _texts(value: Column, type_: DataType) -> Iterator[Column]:
    """Yield each string field of a record, at any depth."""
    if isinstance(type_, StringType):
        yield value
    elif isinstance(type_, StructType):
        for child in type_.fields:
            yield from _texts(value[child.name], child.dataType)


def _looks_nested(text: Column) -> Column:
    return text.startswith("{") | text.startswith("[")


def _looked_up(value: Column, type_: DataType, path: str, payload: Column) -> Column:
    if isinstance(type_, StringType):
        kind = F.schema_of_variant(F.try_variant_get(F.try_parse_json(payload), path, "variant"))
        return F.when(~_looks_nested(value) | (kind == "STRING"), value)
    if isinstance(type_, StructType):
        children = [
            _looked_up(value[child.name], child.dataType, f"{path}['{child.name}']", payload).alias(
                child.name
            )
            for child in type_.fields
        ]
        return F.when(value.isNotNull(), F.struct(*children))
    return value


def _first_error(
    typed: StructType, schema: StructType, payload: Column, require: list[str]
) -> tuple[Column, Column]:
    """Return class and message of a record's first error: not an object, then ``require`` in its order."""
    not_an_object = F.col(_RECORD)
    size = F.coalesce(F.length(payload).cast("string"), F.lit("no"))
    error_class = F.when(not_an_object, NOT_A_JSON_OBJECT)
    message = F.when(
        not_an_object, F.concat(F.lit("the payload is not one JSON object ("), size, F.lit(" characters)"))
    )
    for name in require:
        is_null = named_column(name).isNull()
        if name not in schema.fieldNames():
            error_class = error_class.when(is_null, NULL_DERIVED_FIELD)
            message = message.when(is_null, f"the expression of '{name}' gives NULL")
            continue
        raw = F.get_json_object(payload, f"$['{name}']")
        wanted = typed[name].dataType.simpleString()
        error_class = error_class.when(is_null & raw.isNull(), MISSING_FIELD).when(is_null, UNPARSABLE_FIELD)
        message = message.when(is_null & raw.isNull(), f"field '{name}' is missing or null").when(
            is_null,
            F.concat(F.lit(f"field '{name}' can't be read as {wanted}: "), F.substring(raw, 1, 100)),
        )
    return error_class.alias(ERROR_CLASS), message.alias(ERROR_MESSAGE)
