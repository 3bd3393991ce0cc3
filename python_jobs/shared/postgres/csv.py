"""COPY of a CSV file into a table of PostgreSQL: all of it or a sentence that says why not."""

from __future__ import annotations

from pathlib import Path

import psycopg
from psycopg import sql

from python_jobs.shared.core.failures import DataRefused, NotReady
from python_jobs.shared.postgres.relations import Connection, create_table

_CHUNK = 1 << 20


def copy_csv(
    connection: Connection, source: str, table: sql.Identifier, delimiter: str, *, stays: str
) -> int:
    """Copy a file, whose header names the table's columns in order, and return its rows; call it in a transaction.

    Args:
        connection: in a transaction, so that nothing is left of a refused file.
        source: path of the file.
        table: where to.
        delimiter: between the columns.
        stays: what is as it was after a failure.

    Raises:
        NotReady: there is no file.
        DataRefused: the header, a line, a key or a NULL doesn't fit.
    """
    if not (file := Path(source)).is_file():
        raise NotReady(f"there is no file {source}; nothing was loaded")
    command = sql.SQL("copy {} from stdin (format csv, header match, delimiter {})").format(
        table, sql.Literal(delimiter)
    )
    try:
        with file.open("rb") as content, connection.cursor() as cursor:
            with cursor.copy(command) as copy:
                while chunk := content.read(_CHUNK):
                    copy.write(chunk)
            return cursor.rowcount
    except (psycopg.DataError, psycopg.IntegrityError) as failure:
        where = f" ({failure.diag.context.splitlines()[0]})" if failure.diag.context else ""
        raise DataRefused(
            f"{source} was not loaded: {failure.diag.message_primary}{where}; {stays} stays as it is"
        ) from None


def create_from_csv(
    connection: Connection, source: str, table: sql.Identifier, columns: str, delimiter: str, *, stays: str
) -> int:
    """Create a table and do with it as :func:`copy_csv` does.

    Args:
        columns: the user's own DDL, what stands between the parentheses of create table.
        connection, source, table, delimiter, stays: as there.

    Raises:
        WrongUse: the columns are no such list.
        psycopg.errors.DuplicateTable: there is one.
    """
    if not Path(source).is_file():
        raise NotReady(f"there is no file {source}; nothing was loaded")
    create_table(connection, table, columns)
    return copy_csv(connection, source, table, delimiter, stays=stays)
