"""Data contracts: the columns and fields of a dataset that may leave its environment, and their form.

    dataset: users
    columns:
      - {name: id, tags: [pii], transform: {keyed_hash: USERS_PSEUDONYM_KEY}}
      - {name: plan}
      - {name: email, tags: [pii]}
      - {name: address.city}
      - {name: devices.element.version}
      - {name: settings, keys: [theme, language]}

A column that isn't listed doesn't leave. A listed column with the tag ``pii`` leaves only if it has a ``transform``.
Nested fields are listed one by one, with Delta's names: ``element`` for the elements of an array, ``value`` for the
values of a map. Only the entries of ``keys`` leave a map. The case of names is ignored.

The macro ``transformation_replicator`` applies the same rules to the columns of a dbt YAML file.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.types import ArrayType, DataType, MapType, StructType, VariantType

from python_jobs.ingestion.replication_policy import SENSITIVE_TAG
from python_jobs.shared.core import exact_json
from python_jobs.shared.core.exact_json import Object
from python_jobs.shared.core.failures import DataRefused, JobFailed, WrongUse
from python_jobs.shared.core.yaml_files import read_yaml
from python_jobs.shared.spark.sql_text import identifier, string_literal

_COLUMN_KEYS = {"name", "tags", "transform", "keys", "description"}
_TRANSFORMS = ("keyed_hash", "substring", "constant")


@dataclass
class Node:
    """A column or nested field of the contract; the children of the root are the columns."""

    name: str = ""
    """Name as the contract spells it; the copy has the same spelling."""
    listed: bool = False
    """Whether the contract has an entry with exactly this path."""
    sensitive: bool = False
    """Whether the entry is tagged as personal data."""
    transform: tuple[str, Any] | None = None
    """Transformation of the value, with its argument; None: the value is unchanged."""
    keys: tuple[str, ...] | None = None
    """Keys whose entries leave, for a map."""
    children: dict[str, Node] = field(default_factory=dict)
    """Nested fields by lower-case name."""

    @property
    def leaves(self) -> bool:
        """Return whether the node or one of its nested fields may leave."""
        if self.children:
            return any(child.leaves for child in self.children.values())
        return self.listed and (not self.sensitive or self.transform is not None)


@dataclass(frozen=True)
class Contract:
    """The contract of one dataset."""

    dataset: str
    """Name of the dataset."""
    root: Node
    """Node whose children are the columns."""

    def treatments(self) -> dict[str, str]:
        """Return the treatment of each path that leaves: ``as is`` or the transformation with its argument."""
        return {
            path: "as is" if node.transform is None else f"{node.transform[0]} {node.transform[1]}"
            for path, node in _paths(self.root, "")
            if node.leaves
        }

    def withheld(self) -> list[str]:
        """Return the listed paths that don't leave because they are tagged."""
        return sorted(path for path, node in _paths(self.root, "") if not node.leaves)


def _paths(node: Node, prefix: str) -> Iterator[tuple[str, Node]]:
    for child in node.children.values():
        path = f"{prefix}{child.name}"
        if child.keys is not None:
            yield f"{path}[{','.join(child.keys)}]", Node(child.name, child.listed, child.sensitive)
        if child.children:
            yield from _paths(child, f"{path}.")
        elif child.keys is None:
            yield path, child


def load_contract(path: str) -> Contract:
    """Read a contract.

    Raises:
        WrongUse: the file is missing, or an entry is wrong; the message names it.
    """
    document = read_yaml(path, "contract")
    if not isinstance(document, Mapping) or not document.get("columns") or "dataset" not in document:
        raise WrongUse(f"the contract '{path}' must hold 'dataset' and a list 'columns'")
    root = Node(listed=True)
    for entry in document["columns"]:
        _add(root, entry, path)
    _check(root, "", path)
    if not root.leaves:
        raise WrongUse(f"by the contract '{path}' nothing may leave")
    return Contract(str(document["dataset"]), root)


def _add(root: Node, entry: Any, path: str) -> None:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise WrongUse(f"each column of the contract '{path}' needs a name, got {entry!r}")
    if unknown := sorted(entry.keys() - _COLUMN_KEYS):
        raise WrongUse(f"column {entry['name']} of the contract '{path}' has an unknown key: {unknown[0]}")
    node = root
    for part in entry["name"].split("."):
        node = node.children.setdefault(part.casefold(), Node(part))
    if node.listed:
        raise WrongUse(f"the contract '{path}' lists {entry['name']} twice (case doesn't count)")
    node.listed = True
    node.sensitive = SENSITIVE_TAG in (str(tag).casefold() for tag in entry.get("tags") or [])
    node.transform = _transform(entry, path)
    if (keys := entry.get("keys")) is not None:
        node.keys = tuple(str(key) for key in keys)


def _transform(entry: Mapping[str, Any], path: str) -> tuple[str, Any] | None:
    given = entry.get("transform")
    if given is None:
        return None
    where = f"transform of {entry['name']} in the contract '{path}'"
    if not isinstance(given, Mapping) or len(given) != 1 or next(iter(given)) not in _TRANSFORMS:
        raise WrongUse(f"{where} must be one of {', '.join(_TRANSFORMS)} with its argument, got {given!r}")
    ((kind, argument),) = given.items()
    if kind == "keyed_hash" and not re.fullmatch(r"[A-Za-z_]\w*", str(argument)):
        raise WrongUse(f"{where}: keyed_hash takes the name of the environment variable that holds the key")
    if kind == "substring" and not (isinstance(argument, int) and argument >= 1):
        raise WrongUse(f"{where}: substring takes the position of the first character kept, from 1")
    if kind == "constant" and not isinstance(argument, str):
        raise WrongUse(f"{where}: constant takes a text")
    return kind, argument


def _check(node: Node, prefix: str, path: str) -> None:
    for child in node.children.values():
        where = f"{prefix}{child.name}"
        if child.children and child.listed and child.keys is None:
            raise WrongUse(
                f"the contract '{path}' lists {where} and fields of it: list the fields only, what isn't listed "
                "doesn't leave"
            )
        if (child.children and child.transform is not None) or (child.keys is not None and child.transform):
            raise WrongUse(f"the contract '{path}' transforms {where}, which has fields: transform these")
        if child.children and child.sensitive:
            raise WrongUse(f"the contract '{path}' tags {where}, which has fields: tag these")
        _check(child, f"{where}.", path)


# --- tables: SQL expressions, checked against the schema ------------------------------------------------


def unknown_columns(contract: Contract, schema: StructType) -> list[str]:
    """Return the columns and fields of the schema that the contract doesn't list.

    Raises:
        DataRefused: the contract names a path that the schema lacks, or lists a nested column without its fields.
    """
    return sorted(_compare(contract.root, schema, ""))


def select_list(contract: Contract) -> list[str]:
    """Return the SQL expressions of the columns that leave."""
    return [
        f"{_expression(child, identifier(child.name), 0)} as {identifier(child.name)}"
        for child in contract.root.children.values()
        if child.leaves
    ]


def required_keys(contract: Contract) -> set[str]:
    """Return the names of the environment variables that hold the keys of keyed hashes."""
    return {
        str(node.transform[1])
        for _, node in _paths(contract.root, "")
        if node.transform and node.transform[0] == "keyed_hash"
    }


def _compare(node: Node, schema: StructType, prefix: str) -> Iterator[str]:
    fields: dict[str, DataType] = {}
    for f in schema.fields:
        if f.name.casefold() in fields:
            raise DataRefused(f"{prefix}{f.name} is there twice in the source, spelled in different cases")
        fields[f.name.casefold()] = f.dataType
        if f.name.casefold() not in node.children:
            yield prefix + f.name
    for name, child in node.children.items():
        if name not in fields:
            raise DataRefused(
                f"the contract names {prefix}{child.name}, which the source doesn't have; it has "
                f"{', '.join(prefix + f.name for f in schema.fields)}"
            )
        yield from _compare_type(child, fields[name], f"{prefix}{child.name}")


def _compare_type(node: Node, type_: DataType, path: str) -> Iterator[str]:
    if not node.children and not node.leaves and node.keys is None:
        return  # withheld, so its type doesn't matter
    if node.transform is not None and not _is_atomic(type_):
        raise DataRefused(
            f"{path} is a {type_.simpleString()[:40]}: the contract can only transform what is in it"
        )
    if isinstance(type_, StructType):
        if not node.children:
            raise DataRefused(f"{path} is a struct: the contract must list its fields, such as {path}.name")
        yield from _compare(node, type_, f"{path}.")
    elif isinstance(type_, ArrayType) and not node.children and _is_atomic(type_.elementType):
        return
    elif isinstance(type_, ArrayType):
        if set(node.children) != {"element"}:
            raise DataRefused(f"{path} is an array: the contract must list its elements, as {path}.element")
        yield from _compare_type(node.children["element"], type_.elementType, f"{path}.element")
    elif isinstance(type_, MapType):
        if node.keys is None:
            raise DataRefused(
                f"{path} is a map: the contract must list the keys that may leave, as keys: […]"
            )
        if not _is_atomic(type_.keyType):
            raise DataRefused(f"{path} is a map whose keys are no texts or numbers: it can't be replicated")
        if node.children.keys() - {"value"}:
            raise DataRefused(
                f"{path} is a map: the contract must list the fields of its values, as {path}.value"
            )
        if node.children:
            yield from _compare_type(node.children["value"], type_.valueType, f"{path}.value")
        elif not _is_atomic(type_.valueType):
            raise DataRefused(
                f"{path} is a map: the contract must list the fields of its values, as {path}.value"
            )
    elif node.children or node.keys is not None:
        raise DataRefused(
            f"{path} is a {type_.simpleString()}: it has no fields that the contract could list"
        )
    elif isinstance(type_, VariantType):
        raise DataRefused(f"{path} is a variant, which may hold anything: it can't be replicated")


def _is_atomic(type_: DataType) -> bool:
    return not isinstance(type_, StructType | ArrayType | MapType | VariantType)


def _expression(node: Node, value: str, depth: int) -> str:
    """Return the SQL expression of a value without the parts that may not leave; NULL stays NULL."""
    children = [child for child in node.children.values() if child.leaves]
    if node.keys is not None:
        keys = ", ".join(string_literal(key) for key in node.keys)
        value = f"map_filter({value}, (k{depth}, v{depth}) -> string(k{depth}) in ({keys}))"
        if children:
            inner = _expression(children[0], f"v{depth}", depth + 1)
            value = f"transform_values({value}, (k{depth}, v{depth}) -> {inner})"
        return value
    if list(node.children) == ["element"]:
        return f"transform({value}, e{depth} -> {_expression(children[0], f'e{depth}', depth + 1)})"
    if node.children:
        fields = ", ".join(
            f"{string_literal(child.name)}, {_expression(child, f'{value}.{identifier(child.name)}', depth)}"
            for child in children
        )
        return f"case when {value} is not null then named_struct({fields}) end"
    return value if node.transform is None else _transformed(node.transform, value)


def _transformed(transform: tuple[str, Any], value: str) -> str:
    kind, argument = transform
    text = f"string({value})"
    if kind == "substring":
        return f"substring({text}, {argument})"
    if kind == "constant":
        return f"case when {value} is not null then {string_literal(argument)} end"
    # The task that processes the row reads the key, so neither a plan nor a log ever contains the key. reflect returns
    # the text 'null' for a variable that isn't set.
    key = f"reflect('java.lang.System', 'getenv', {string_literal(argument)})"
    digest = f"reflect('org.apache.commons.codec.digest.HmacUtils', 'hmacSha256Hex', {key}, {text})"
    missing = (
        f"raise_error('the environment variable {argument}, which holds the key of a keyed_hash, is not set')"
    )
    return f"case when {value} is null then null when {key} in ('null', '') then {missing} else {digest} end"


# --- JSON lines: values that leave keep their text ---------------------------------------------------------


def filter_line(contract: Contract, line: str) -> tuple[str | None, list[str]]:
    """Return the parts of a JSON line that may leave, and the paths that the contract doesn't list.

    A blank line stays unchanged. For a line that is no JSON object the result is None, because its content is unknown.
    If a value has another shape than in the contract, it is withheld and its path is among the returned paths.
    """
    if not line.strip():
        return line, []
    try:
        value = exact_json.parse(line)
    except (ValueError, RecursionError):
        return None, []
    if not isinstance(value, Object):
        return None, []
    unknown: list[str] = []
    return exact_json.write(_filter(contract.root, value, "", unknown)), unknown


_WITHHELD = object()


def _filter(node: Node, value: Any, path: str, unknown: list[str]) -> Any:
    if value is None:
        return None
    if node.keys is not None and isinstance(value, Object):
        allowed = [(name, item) for name, item in value if name in node.keys]
        inner = node.children.get("value")
        if inner is not None:
            return _object((name, _filter(inner, item, f"{path}.value", unknown)) for name, item in allowed)
        if all(_is_scalar(item) for _, item in allowed):
            return _object(allowed)
    elif "element" in node.children and isinstance(value, list) and not isinstance(value, Object):
        items = (_filter(node.children["element"], item, f"{path}.element", unknown) for item in value)
        return [item for item in items if item is not _WITHHELD]
    elif node.children and "element" not in node.children and isinstance(value, Object):
        kept = []
        for name, item in value:
            where = f"{path}.{name}" if path else name
            child = node.children.get(name.casefold())
            if child is None:
                unknown.append(where)
            elif child.leaves:
                kept.append((name, _filter(child, item, where, unknown)))
        return _object(kept)
    elif not node.children and node.keys is None:
        if _is_scalar(value):
            return value if node.transform is None else transform_text(node.transform, _text(value))
        if isinstance(value, list) and node.transform is None and all(_is_scalar(item) for item in value):
            return value
    unknown.append(path)
    return _WITHHELD


def _object(pairs: Iterable[tuple[str, Any]]) -> Object:
    return Object((name, value) for name, value in pairs if value is not _WITHHELD)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | bool)


def _text(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def transform_text(transform: tuple[str, Any], text: str) -> str:
    """Return a transformed value of a text format; the result equals that of the SQL expression for a table.

    Raises:
        JobFailed: the environment variable of a keyed hash is not set.
    """
    kind, argument = transform
    if kind == "substring":
        return text[argument - 1 :]
    if kind == "constant":
        return str(argument)
    key = os.environ.get(argument, "")
    if not key:
        raise JobFailed(
            f"the environment variable {argument}, which holds the key of a keyed_hash, is not set"
        )
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()
