"""Where writers write: Delta tables, plain files, PostgreSQL; how far a write has come there, and what it has left.

Kafka's topics and S3's buckets are in :mod:`.service_stores`.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from tests.support.killer import Observed, TableFiles, has_connection
from tests.support.rows import CLOCK_COLUMNS

Rows = Counter[tuple[str, ...]]

# A checkpoint's id is drawn when it is made.
DIFFERS = CLOCK_COLUMNS | {"writer_id"}


class Store(ABC):
    """One kind of place for tables."""

    def set_up(self, folder: Path) -> None:
        """Make what a copy of the input needs beside it; by default nothing."""
        return

    def observed(self, folder: Path, table: str) -> contextlib.AbstractContextManager[Path | Observed]:
        """Yield what the killer looks at; by default :meth:`files`, as often as it asks."""
        return contextlib.nullcontext(Seen(self, folder, table))

    @abstractmethod
    def files(self, folder: Path, table: str) -> TableFiles:
        """Return what is written and what is committed now."""

    @abstractmethod
    def rows(self, spark: Any, folder: Path, table: str) -> Rows:
        """Return the rows, as texts, without what differs between any two runs; none of an absent table."""


@dataclass(frozen=True)
class Seen:
    """A table that is looked at as often as the killer asks."""

    store: Store
    folder: Path
    table: str

    def files(self) -> TableFiles:
        """Return what is written and what is committed now."""
        return self.store.files(self.folder, self.table)

    def was_opened(self, group: int) -> bool:
        """Return whether the writer has come to its JVM or its service: before that it opens no connection."""
        return has_connection(group)


def _place(folder: Path, table: str) -> Path:
    return folder / table.format(folder=folder.name)


class DeltaStore(Store):
    """Delta tables, a folder each."""

    def observed(self, folder: Path, table: str) -> contextlib.AbstractContextManager[Path | Observed]:
        """Yield the table's path."""
        return contextlib.nullcontext(_place(folder, table))

    def files(self, folder: Path, table: str) -> TableFiles:
        """Return data files and log entries."""
        return TableFiles.of(_place(folder, table))

    def rows(self, spark: Any, folder: Path, table: str) -> Rows:
        """Return the current version's rows; paths in them begin below the folder."""
        place = _place(folder, table)
        if not (place / "_delta_log").is_dir():
            return Counter()
        table_now = spark.read.format("delta").load(str(place))
        columns = sorted(set(table_now.columns) - DIFFERS)
        rows = table_now.select(*columns).collect()
        return Counter(tuple(repr(value).replace(str(folder), "") for value in row) for row in rows)


DELTA = DeltaStore()


@dataclass(frozen=True)
class FileStore(Store):
    """Folders of plain files, of which some are what readers look at."""

    is_committed: Callable[[Path], bool]
    """Whether readers look at a file, by its path below the table's folder; the others are on their way."""
    read: Callable[[Any, Path], Rows]
    """Return what readers find in a table's folder."""

    def files(self, folder: Path, table: str) -> TableFiles:
        """Return the files on their way and those that readers look at, which are new ones when they are replaced."""
        place = _place(folder, table)
        found: dict[bool, set[str]] = {True: set(), False: set()}
        for parent, _, names in os.walk(place):
            for name in names:
                file = Path(parent, name)
                path = file.relative_to(place)
                with contextlib.suppress(FileNotFoundError):
                    found[self.is_committed(path)].add(f"{path} of {file.stat().st_mtime_ns}")
        return TableFiles(data=frozenset(found[False]), log=frozenset(found[True]))

    def rows(self, spark: Any, folder: Path, table: str) -> Rows:
        """Return what readers find."""
        return self.read(spark, _place(folder, table))


@dataclass(frozen=True)
class PostgresStore(Store):
    """Tables of PostgreSQL, a database for each folder; libpq's variables say where the server is."""

    columns: dict[str, str] = field(default_factory=dict)
    """Tables that the writer finds: what stands between the parentheses of create table."""

    def set_up(self, folder: Path) -> None:
        """Create the folder's database with the tables."""
        with _connect() as connection:
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(folder.name)))
        with _connect(folder.name) as connection:
            for table, columns in self.columns.items():
                connection.execute(f"create table {table} ({columns})".encode())

    @contextlib.contextmanager
    def observed(self, folder: Path, table: str) -> Iterator[Path | Observed]:
        """Yield the server's transactions: nobody else writes there."""
        with _connect() as connection:
            yield _Transactions(connection, folder.name, _next_transaction(connection))

    def files(self, folder: Path, table: str) -> TableFiles:
        """Return the server's transactions so far."""
        with _connect() as connection:
            return _Transactions(connection, folder.name).files()

    def rows(self, spark: Any, folder: Path, table: str) -> Rows:
        """Return the rows of a table or a view."""
        with _connect(folder.name) as connection, connection.cursor(row_factory=dict_row) as cursor:
            try:
                cursor.execute(sql.SQL("select * from {}").format(sql.Identifier(table)))
            except psycopg.errors.UndefinedTable:
                return Counter()
            return Counter(
                tuple(repr(row[name]) for name in sorted(row.keys() - DIFFERS)) for row in cursor.fetchall()
            )


@dataclass(frozen=True)
class _Transactions:
    """Transactions that write: under way and given up are data without a log entry, committed is one."""

    connection: psycopg.Connection[Any]
    database: str
    since: int = 3
    """The first that counts; those below 3 are PostgreSQL's own."""

    def files(self) -> TableFiles:
        # A snapshot ends behind the last transaction that is over: those under way are the backends'.
        states = self.connection.execute(
            "select number::text, pg_xact_status(number::text::xid8) = 'committed' "
            "from generate_series(%s::bigint, pg_snapshot_xmax(pg_current_snapshot())::text::bigint - 1) number "
            "union all select backend_xid::text, false from pg_stat_activity "
            "where backend_xid is not null and datname = %s",
            [self.since, self.database],
        ).fetchall()
        return TableFiles(
            data=frozenset(number for number, committed in states if not committed),
            log=frozenset(number for number, committed in states if committed),
        )

    def was_opened(self, group: int) -> bool:
        found = self.connection.execute(
            "select 1 from pg_stat_activity where datname = %s", [self.database]
        ).fetchone()
        return found is not None


def _connect(database: str = "postgres") -> psycopg.Connection[Any]:
    return psycopg.connect(dbname=database, autocommit=True)


def _next_transaction(connection: psycopg.Connection[Any]) -> int:
    found = connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
    assert found is not None
    return int(found[0])
