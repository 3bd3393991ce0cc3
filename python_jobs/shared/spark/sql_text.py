"""Quoted names and escaped values for the SQL that jobs build. No other module writes quotes around them.

User input that is SQL (a query, a condition, an expression) is not quoted.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping

from pyspark.sql import Column
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.paths import absolute, is_path


def identifier(name: str) -> str:
    """Return the name of a column or a field, quoted for SQL.

    >>> identifier("a`b c")
    '`a``b c`'
    """
    return "`" + name.replace("`", "``") + "`"


def columns_of(relation: str, columns: Iterable[str]) -> dict[str, str | Column]:
    """Return the assignments of a MERGE that takes these columns from a relation.

    Delta's own ``whenMatchedUpdateAll`` and ``whenNotMatchedInsertAll`` fail on a name with a backtick.

    >>> columns_of("s", ["a b"])
    {'`a b`': 's.`a b`'}
    """
    return {identifier(name): f"{relation}.{identifier(name)}" for name in columns}


def named_column(name: str, of: str | None = None) -> Column:
    """Return a column by its whole name, which may have any characters; ``of`` is the struct or relation around it."""
    return F.col(identifier(name) if of is None else f"{identifier(of)}.{identifier(name)}")


def named_columns(names: Iterable[str]) -> list[Column]:
    """Return columns by their whole names, which may have any characters."""
    return [named_column(name) for name in names]


def taken_names(names: Iterable[str], by: Iterable[str]) -> list[str]:
    """Return the names that Spark can't tell from another's: the case of letters makes no difference to it.

    >>> taken_names(["id", "Error_Class"], by=["error_class"])
    ['Error_Class']
    """
    lowered = {name.lower() for name in by}
    return [name for name in names if name.lower() in lowered]


def refuse_own_names(parameter: str, names: Iterable[str], own: Iterable[str]) -> None:
    """Refuse a parameter that names a column of ``own``, the columns that a job adds, in any case of letters.

    Raises:
        WrongUse: it does.
    """
    taken = taken_names(names, by=own)
    if taken:
        raise WrongUse(f"{parameter} can't name columns that the job writes itself: {', '.join(taken)}")


def require_free_names(names: Iterable[str], own: Iterable[str]) -> None:
    """Refuse rows that already have a column of ``own``, the columns that a job adds, in any case of letters.

    Raises:
        WrongUse: there is such a column.
    """
    taken = taken_names(names, by=own)
    if taken:
        raise WrongUse(
            f"the source has columns that this job writes itself: {', '.join(taken)}; rename them, or read a table "
            "without them"
        )


def table_name(table: str) -> str:
    """Return a table for SQL: a catalog name unchanged, a path as ``delta.`path```."""
    return f"delta.{identifier(absolute(table))}" if is_path(table) else table


def string_literal(text: str) -> str:
    r"""Return a text as a Spark SQL literal.

    >>> print(string_literal("it's a \\"))
    'it\'s a \\'
    """
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def timestamp_literal(moment: dt.datetime) -> str:
    """Return an aware time as a SQL literal that doesn't depend on the session's time zone.

    >>> timestamp_literal(dt.datetime(2024, 3, 1, 10, tzinfo=dt.UTC))
    "timestamp'2024-03-01 10:00:00.000000+00:00'"
    """
    return f"timestamp'{moment.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S.%f}+00:00'"


def date_literal(date: dt.date) -> str:
    """Return a date as a SQL literal."""
    return f"date'{date:%Y-%m-%d}'"


def same_columns(names: Iterable[str], *, null_safe: bool) -> str:
    """Return the SQL condition that rows ``t`` and ``s`` have equal columns; NULL equals NULL if ``null_safe``.

    >>> same_columns(["id"], null_safe=True)
    't.`id` <=> s.`id`'
    """
    equals = "<=>" if null_safe else "="
    return " and ".join(f"t.{identifier(name)} {equals} s.{identifier(name)}" for name in names)


def properties_list(properties: Mapping[str, str]) -> str:
    """Return table properties as the list that ``set tblproperties`` takes.

    >>> properties_list({"a": "1"})
    "('a' = '1')"
    """
    pairs = (f"{string_literal(name)} = {string_literal(value)}" for name, value in properties.items())
    return f"({', '.join(pairs)})"
