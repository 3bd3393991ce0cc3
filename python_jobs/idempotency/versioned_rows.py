"""Exactly-Once, absolute values: a row of PostgreSQL is set only on top of the version that it was computed from.

Problem: "set the stock to 41" may be repeated, unlike "take one from the stock". But two programs that have both read
42 both set 41, and one of two sales is lost.

Guarantee: each row has a version. Who sets a row names the version that the new values were computed from; if another
one came before, nothing is set and the caller is told, reads again and computes again.

    inbox.once("sale-7", lambda: set_row(connection, "stock", {"article": "a"}, {"pieces": 41}, version=3), now)

The guard takes a repetition of the same set for a second one, as it must: two sales from 42 both set 41. An inbox
(:mod:`python_jobs.idempotency.inbox`) tells which of them was done. Cost: none beyond the row's own update, which
locks it.

Source: the guide's ``pat-exactly-once``, revisited in its chapter 10.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psycopg import sql
from psycopg.rows import dict_row

from python_jobs.shared.core.failures import JobFailed
from python_jobs.shared.postgres.clients import listed, table_name
from python_jobs.shared.postgres.relations import Connection


class StaleVersion(JobFailed):
    """The row has changed since it was read; read it again and compute anew."""


def read_row(connection: Connection, table: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the row of a key with its column ``version``; None if there is none."""
    query = sql.SQL("select * from {} where {}").format(table_name(table), _is(key))
    return connection.cursor(row_factory=dict_row).execute(query, list(key.values())).fetchone()


def set_row(
    connection: Connection,
    table: str,
    key: Mapping[str, Any],
    values: Mapping[str, Any],
    version: int = 0,
) -> int:
    """Set columns of a key's row and return its new version.

    Args:
        connection: within the caller's transaction, or each call is one.
        table: name or schema.name; it has a unique key of the columns of ``key``, and a column ``version bigint``.
        key: columns and values that identify the row.
        values: columns and their new values, absolute ones.
        version: that of the row when the values were computed; 0 where there was none.

    Raises:
        StaleVersion: the row is at another version; nothing is set.
    """
    if version == 0:
        columns = {**key, **values, "version": 1}
        statement = sql.SQL("insert into {} ({}) values ({}) on conflict ({}) do nothing").format(
            table_name(table),
            listed(columns),
            sql.SQL(", ").join(sql.Placeholder() * len(columns)),
            listed(key),
        )
        done = connection.execute(statement, list(columns.values()))
    else:
        changed = {**values, "version": version + 1}
        assigned = sql.SQL(", ").join(sql.SQL("{} = %s").format(sql.Identifier(name)) for name in changed)
        statement = sql.SQL("update {} set {} where {} and version = %s").format(
            table_name(table), assigned, _is(key)
        )
        done = connection.execute(statement, [*changed.values(), *key.values(), version])
    if done.rowcount == 0:
        row = ", ".join(f"{name} {value}" for name, value in key.items())
        raise StaleVersion(
            f"{table}, {row}: the values were computed from version {version}, which is not the row's; "
            "read it again, nothing was set"
        )
    return version + 1


def _is(key: Mapping[str, Any]) -> sql.Composed:
    """Return the condition that selects a key's row."""
    return sql.SQL(" and ").join(sql.SQL("{} = %s").format(sql.Identifier(name)) for name in key)
