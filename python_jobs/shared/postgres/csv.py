"""COPY of a CSV file into a table of PostgreSQL: the whole file unchanged, or one sentence with the reason.

A file is UTF-8, with or without a byte order mark. Its lines end with LF or CRLF, as for the readers on Spark, and all
alike. PostgreSQL would also take a CR alone for a line end: it is refused.

PostgreSQL would silently round ``1.239`` for a ``numeric(5,2)``, drop the time of a ``date`` and cut blanks: such a
value is refused with its row. To find such values, a file for a table with such columns is sent a second time, into a
temporary table of texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
from psycopg import sql

from python_jobs.shared.core.failures import DataRefused, NotReady
from python_jobs.shared.postgres.relations import Connection, create_table, execute, stored_columns

_CHUNK = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CR_ENDS_HEADER = re.compile(rb'(?:[^"\r\n]++|"[^"]*+")*+\r(?!\n)')
_END_MARK = re.compile(rb"(?<![^\r\n])\\\.(?=[\r\n])")
_TEXTS, _ROW = "csv of texts", "row of the csv"


def copy_csv(
    connection: Connection, source: str, table: sql.Identifier, delimiter: str, *, stays: str
) -> int:
    """Copy a file whose header names the table's columns in order, and return the number of its rows.

    Args:
        connection: connection in a transaction, so that a refused file leaves nothing.
        source: path of the file.
        table: table to copy into.
        delimiter: character between the columns.
        stays: name of the relation that stays unchanged after a failure, for the error.

    Raises:
        NotReady: there is no file.
        DataRefused: the encoding, the header, a line, a key or a NULL doesn't fit, or a value would be changed.
    """
    if not (file := Path(source)).is_file():
        raise NotReady(f"there is no file {source}; nothing was loaded")
    try:
        found = stored_columns(connection, table)
        rows = _copy(connection, file, table, [name for name, _ in found], delimiter)
        lossy = {name: check for name, type_ in found if (check := _loses(name, type_)) is not None}
        loss = _first_loss(connection, file, dict(found), lossy, delimiter) if lossy else None
    except (psycopg.DataError, psycopg.IntegrityError) as failure:
        where = f" ({failure.diag.context.splitlines()[0]})" if failure.diag.context else ""
        raise DataRefused(
            f"{source} was not loaded: {failure.diag.message_primary}{where}; {stays} stays as it is"
        ) from None
    if loss is not None:
        raise DataRefused(f"{source} was not loaded: {loss}; {stays} stays as it is")
    return rows


def create_from_csv(
    connection: Connection, source: str, table: sql.Identifier, columns: str, delimiter: str, *, stays: str
) -> int:
    """Create a table, copy a file into it as :func:`copy_csv` does, and return the number of its rows.

    Args:
        columns: the user's own DDL between the parentheses of create table.
        connection, source, table, delimiter, stays: as in :func:`copy_csv`.

    Raises:
        WrongUse: the columns are no list for create table.
        psycopg.errors.DuplicateTable: the table exists.
    """
    if not Path(source).is_file():
        raise NotReady(f"there is no file {source}; nothing was loaded")
    create_table(connection, table, columns)
    return copy_csv(connection, source, table, delimiter, stays=stays)


def _copy(
    connection: Connection, file: Path, table: sql.Identifier, columns: list[str], delimiter: str
) -> int:
    command = sql.SQL(
        "copy {} ({}) from stdin (format csv, header match, encoding 'UTF8', delimiter {})"
    ).format(table, sql.SQL(", ").join(map(sql.Identifier, columns)), sql.Literal(delimiter))
    with connection.cursor() as cursor:
        with cursor.copy(command) as copy:
            for chunk in _content(file):
                copy.write(chunk)
        return cursor.rowcount


def _content(file: Path) -> Iterator[bytes]:
    """Yield a file's bytes without its byte order mark.

    Raises:
        DataRefused: a line is ``\\.``, which PostgreSQL reads as the end of the data, or a CR alone ends the header.
    """
    with file.open("rb") as content:
        before = b"\n"
        first = content.read(len(_BYTE_ORDER_MARK))
        chunk = (b"" if first == _BYTE_ORDER_MARK else first) + content.read(_CHUNK)
        lines = 0
        while chunk:
            following = content.read(_CHUNK)
            # A mark may cross the bounds of a chunk, so the neighbouring bytes are searched, too.
            seen = before + chunk + (following[:2] or b"\n")
            if before == b"\n" and _CR_ENDS_HEADER.match(chunk + following[:1]):
                raise DataRefused(
                    f"{file} was not loaded: its header ends with a carriage return alone; end the lines with LF or "
                    "CRLF"
                )
            if mark := _END_MARK.search(seen, max(0, len(before) - 2)):
                number = lines + seen[len(before) : mark.start()].count(b"\n") + 1
                raise DataRefused(
                    f"{file} was not loaded: line {number} is '\\.', which PostgreSQL reads as the end of the data; "
                    "quote it"
                )
            yield chunk
            lines += chunk.count(b"\n")
            before, chunk = (before + chunk)[-3:], following


def _first_loss(
    connection: Connection,
    file: Path,
    types: dict[str, str],
    lossy: dict[str, sql.Composed],
    delimiter: str,
) -> str | None:
    """Return a sentence with the first value that PostgreSQL would store differently; None if there is none."""
    texts, row = sql.Identifier(_TEXTS), sql.Identifier(_ROW)
    listed = sql.SQL(", ").join(sql.SQL("{} text").format(sql.Identifier(name)) for name in types)
    execute(connection, "create temporary table {} ({}, {} bigserial) on commit drop", texts, listed, row)
    _copy(connection, file, texts, list(types), delimiter)
    zone = connection.execute("select current_setting('TimeZone')").fetchone()
    connection.execute("set local time zone 'UTC'")
    found = []
    for name, loses in lossy.items():
        query = sql.SQL("select {row}, {name} from {texts} where {loses} order by {row} limit 1").format(
            row=row, name=sql.Identifier(name), texts=texts, loses=loses
        )
        found += [(at, name, value) for at, value in connection.execute(query).fetchall()]
    execute(connection, "drop table {}", texts)
    connection.execute("select set_config('TimeZone', %s, true)", zone)
    if not found:
        return None
    at, name, value = min(found)
    return f"row {at}, column {name}: '{value}' does not fit {types[name]} without loss"


def _loses(name: str, type_: str) -> sql.Composed | None:
    """Return the SQL condition for texts that a type would change; None for types that refuse such texts."""
    condition = None
    if match := re.fullmatch(r"numeric\(.*\)((?:\[\])*)", type_):
        condition = f"{{text}}::numeric{match[1]} <> {{text}}::{type_}"
    elif re.fullmatch(r"character(?: varying)?\(\d+\)", type_):
        condition = f"char_length({{text}}) > {re.findall('[0-9]+', type_)[0]}"
    elif type_ in ("real", "double precision"):
        # Fractions are approximate in these types; whole numbers must not change.
        condition = (
            f"{{text}} ~ '^\\s*[+-]?[0-9]+\\s*$' and {{text}}::numeric <> ({{text}}::{type_})::text::numeric"
        )
    elif type_ == "date":
        condition = "{text}::timestamp <> {text}::date::timestamp"
    elif match := re.fullmatch(r"(timestamp|time)(?:\(([0-6])\))? (with|without) time zone", type_):
        digits = 6 if match[2] is None else int(match[2])
        condition = f"{{text}} ~ '[0-9][.,][0-9]{{{{{digits}}}}}[0-9]*[1-9]'"
        if match[3] == "without":
            if match[1] == "timestamp":
                condition += " or {text}::timestamp <> ({text}::timestamptz at time zone 'UTC')"
            else:
                condition += " or {text} ~ '[0-9]{{4}}-[0-9]'"
    return None if condition is None else sql.SQL(condition).format(text=sql.Identifier(name))
