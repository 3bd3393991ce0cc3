"""Exactly-Once, absolute values: a row of PostgreSQL is set only if it is still at the version that was read.

Problem: "set the stock to 41" may be repeated; "take one from the stock" may not. But if two programs have both read
42, both set 41, and one of two sales is lost.

Guarantee: each row has a version. The caller passes the version from which it computed the new values. If another
program has set the row since, nothing is set and ``StaleVersion`` is raised; the caller must read and compute again.

    inbox.once("sale-7", lambda: set_row(connection, "stock", {"article": "a"}, {"pieces": 41}, version=3), now)

A repetition of the same set is refused, too: it can't be told from a second sale, which also sets 41. Use an inbox
(:mod:`python_jobs.idempotency.inbox`) to skip repetitions. Cost: only the row's own update, which locks the row.

Source: the guide's ``pat-exactly-once``, corrected in its chapter 10.
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
    """The row has changed since it was read; read it and compute the values again."""


def read_row(connection: Connection, table: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the row of a key with its column ``version``; None if there is no row."""
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
        connection: connection in the caller's transaction; without one, each call is a transaction.
        table: name or schema.name of a table with a unique key on the columns of ``key`` and ``version bigint``.
        key: columns and values that identify the row.
        values: columns and their new absolute values.
        version: version of the row from which the values were computed; 0 (default) if there was no row.

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
            "nothing was set, read the row again"
        )
    return version + 1


def _is(key: Mapping[str, Any]) -> sql.Composed:
    """Return the condition that selects a key's row."""
    return sql.SQL(" and ").join(sql.SQL("{} = %s").format(sql.Identifier(name)) for name in key)
