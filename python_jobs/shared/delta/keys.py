"""Keyed Idempotency: hashes that identify a row, as columns.

The values are those of the macros ``surrogate_key``, ``content_hash`` and ``first_append_key``, which these functions
render: macros/idempotency/surrogate_key.sql says what is hashed, and why it is stable.

Source: Data Engineering Design Patterns, chapter 4, Keyed Idempotency; the guide's ``pat-idempotent``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.spark.macro_sql import Macros

_FILES = ("idempotency/surrogate_key.sql", "shared/arguments.sql", "shared/literals.sql")


def surrogate_key(
    *columns: str, nullable: Sequence[str] = (), on_null_key: Literal["fail", "null"] = "fail"
) -> Column:
    """Return the key that ``columns`` make, SQL expressions in an order that counts: 64 hexadecimal characters.

    Args:
        columns: the attributes; they must never change for a row.
        nullable: those in which NULL is a value like others.
        on_null_key: what NULL in another one does: it ends the query (``fail``), or the key is NULL (``null``).

    Raises:
        WrongUse: the arguments make no sense.
    """
    return _rendered("default__surrogate_key", list(columns), list(nullable), on_null_key)


def content_hash(*columns: str) -> Column:
    """Return the hash of a record that has no key: of the columns by name, whatever their order. NULL is a value.

    Events that are equal in all of them become one: leave out what loading adds (ingestion time, offsets), and don't
    use it where repeats are legitimate. Raises like :func:`surrogate_key`.
    """
    return _rendered("default__content_hash", list(columns))


def session_key(key: Sequence[str], append_time: str, ties: Sequence[str]) -> Column:
    """Return the key of a group whose first append is known: that of ``first_append_key`` over the group's rows.

    Args:
        key: columns of the group.
        append_time: when the group's first row was appended.
        ties: what tells that row from others of the same moment.
    """
    position = _macros().call("_append_position", append_time, list(ties))
    return surrogate_key(*key, str(position))


def _rendered(macro: str, *arguments: Any) -> Column:
    return F.expr(str(_macros().call(macro, *arguments)))


def _macros() -> Macros:
    return Macros(SparkSession.active(), _FILES)
