"""Keyed Idempotency: hashes that identify a row, as columns.

These functions render the macros ``surrogate_key``, ``content_hash`` and ``first_append_key`` and return the same
values. macros/idempotency/surrogate_key.sql says which bytes are hashed, and why the hash is stable.

Source: Data Engineering Design Patterns, chapter 4, Keyed Idempotency; the guide's ``pat-idempotent``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.spark.macro_sql import Macros

_UNSTABLE = re.compile(r"(?:^|[:<])(?:(?:float|double)(?:$|[,>])|map<)")
_FILES = ("idempotency/surrogate_key.sql", "shared/arguments.sql", "shared/literals.sql")


def surrogate_key(
    *columns: str, nullable: Sequence[str] = (), on_null_key: Literal["fail", "null"] = "fail"
) -> Column:
    """Return the surrogate key of ``columns``: 64 hexadecimal characters.

    Args:
        columns: SQL expressions that identify a row; their values must never change for a row. Another order gives
            other keys.
        nullable: columns in which NULL is an ordinary value; default none.
        on_null_key: effect of NULL in another column: ``fail`` (default) ends the query, ``null`` makes the key NULL.

    Raises:
        WrongUse: the arguments make no sense.
    """
    return _rendered("default__surrogate_key", list(columns), list(nullable), on_null_key)


def require_stable(rows: DataFrame, columns: Mapping[str, str], what: str) -> None:
    """Refuse columns of which :func:`surrogate_key` makes no key before a query with it runs.

    Args:
        rows: rows with the columns, of which the schema is read.
        columns: names of columns, each with the name that the sentence shows.
        what: what the columns are; it begins the sentence.

    Raises:
        WrongUse: the text of a column's type isn't stable.
    """
    for column, shown in columns.items():
        type_ = rows.schema[column].dataType.simpleString()
        if _UNSTABLE.search(type_):
            raise WrongUse(
                f"{what} '{shown}' is a {type_}: a key takes no float, double or map, whose texts aren't stable; cast "
                "it, such as to a decimal"
            )


def content_hash(*columns: str) -> Column:
    """Return the hash of a record that has no key. The order of ``columns`` does not matter, and NULL is a value.

    Events with equal values in all columns get the same hash. Leave out the columns that loading adds (ingestion time,
    offsets), and don't use the hash where equal events are legitimate. Raises like :func:`surrogate_key`.
    """
    return _rendered("default__content_hash", list(columns))


def session_key(key: Sequence[str], append_time: str, ties: Sequence[str]) -> Column:
    """Return the key of a group whose first append is known: the same key as ``first_append_key`` of the group's rows.

    Args:
        key: columns that identify the group.
        append_time: column with the append time of the group's first row.
        ties: columns that distinguish this row from other rows with the same append time.
    """
    position = _macros().call("_append_position", append_time, list(ties))
    return surrogate_key(*key, str(position))


def _rendered(macro: str, *arguments: Any) -> Column:
    return F.expr(str(_macros().call(macro, *arguments)))


def _macros() -> Macros:
    return Macros(SparkSession.active(), _FILES)
