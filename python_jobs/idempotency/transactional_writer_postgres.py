"""Transactional Writer, PostgreSQL: several files into one table, merged by key, with one commit for all of them.

    python -m python_jobs.idempotency.transactional_writer_postgres \\
        --files '[devices_1.csv, devices_2.csv]' --target devices \\
        --key '[type, version]' --run 2024-11-20

Connection and password come from libpq's environment (PGHOST, PGUSER, PGPASSFILE …) and appear in no command line.

Guarantee: readers see nothing of a run before its commit and all of it afterwards. If a line of any file doesn't fit
the table, nothing of any file is written. The same commit records the run in ``<target>__runs``: a rerun with the same
files does nothing, and a rerun with corrected files merges them. Rows are merged by key, so a backfill duplicates no
row. If two processes have the same run, the second waits for the first and then does nothing.

Each file is copied into a temporary staging table like the target, so that the target's own types check its lines. Of
several lines with one key the last line of the last file is stored.

Cost: every row is written twice, and the target's changed rows stay locked until the commit.

Source: Data Engineering Design Patterns, chapter 4, Transactional Writer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from python_jobs.idempotency.inbox import Inbox
from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.command_line import run_program
from python_jobs.shared.core.failures import DataRefused, NotReady, WrongUse
from python_jobs.shared.core.intervals import parse_time
from python_jobs.shared.postgres.clients import listed, reaching_postgres, table_name
from python_jobs.shared.postgres.csv import copy_csv
from python_jobs.shared.postgres.relations import Connection, columns, connect_by_environment, execute, exists

_LINE = "transactional_writer_line"


@dataclass(frozen=True)
class Parameters(ProcessingTimeParameters):
    """Merge CSV files into a table in one transaction."""

    files: list[str]
    """CSV files with a header; for a key in several files the last file wins."""
    target: str
    """Table with a unique key, as name or schema.name; it must exist."""
    key: list[str]
    """Columns of the target's unique key."""
    run: str
    """Logical time of the run (2024-11-20), never the clock's."""
    delimiter: str = ";"
    """Character between the columns of the files."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files or not self.key:
            raise WrongUse(f"files and key take one name or more, got {self.files} and {self.key}")
        parse_time(self.run)

    @property
    def table(self) -> sql.Identifier:
        """The target's name, quoted."""
        return table_name(self.target)


def run(parameters: Parameters, connect: Callable[[], Connection] = connect_by_environment) -> dict[str, Any]:
    """Merge all files or none, and return the report.

    Raises:
        NotReady: a file or the target doesn't exist.
        DataRefused: a line doesn't fit the target; nothing was written.
        WrongUse: the target has no such column, or no such unique key.
    """
    now = parameters.processing_time()
    message = f"{parameters.run}/{_content_of(parameters.files)}"
    report: dict[str, Any] = {"target": parameters.target, "run": parameters.run, "rows": {}}
    with reaching_postgres(), connect() as connection:
        if not exists(connection, parameters.table):
            raise NotReady(f"there is no table {parameters.target}; nothing was written")
        _require_columns(connection, parameters)

        def merge_all() -> None:
            report["rows"] = {file: _merge(connection, parameters, file) for file in parameters.files}

        written = Inbox(connection, f"{parameters.target}__runs").once(message, merge_all, now)
    return report | {"already": not written}


def _content_of(files: list[str]) -> str:
    """Return a hash of the files' content, without their names."""
    digest = hashlib.sha256()
    for file in files:
        path = Path(file)
        if not path.is_file():
            raise NotReady(f"there is no file {file}; nothing was written")
        with path.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _require_columns(connection: Connection, parameters: Parameters) -> None:
    names = [name for name, _ in columns(connection, parameters.table)]
    absent = [name for name in parameters.key if name not in names]
    if absent:
        raise WrongUse(f"{parameters.target} has no column {', '.join(absent)}; it has {', '.join(names)}")


def _merge(connection: Connection, parameters: Parameters, file: str) -> int:
    """Copy one file into a staging table and merge it; return the number of inserted or changed rows."""
    staging = sql.Identifier("transactional_writer_file")
    try:
        execute(
            connection,
            "create temporary table {} (like {} including defaults) on commit drop",
            staging,
            parameters.table,
        )
        copy_csv(connection, file, staging, parameters.delimiter, stays=parameters.target)
        # The number of each line; added after COPY, because COPY fills all existing columns.
        execute(connection, "alter table {} add column {} bigserial", staging, sql.Identifier(_LINE))
        merged = connection.execute(_upsert(connection, parameters, staging)).rowcount
        execute(connection, "drop table {}", staging)
        return merged
    except psycopg.IntegrityError as failure:
        raise DataRefused(
            f"{file} was not merged: {failure.diag.message_primary}; {parameters.target} stays as it is"
        ) from None
    except psycopg.errors.InvalidColumnReference:
        raise WrongUse(
            f"{parameters.target} has no unique key of exactly {', '.join(parameters.key)}; nothing was written"
        ) from None


def _upsert(connection: Connection, parameters: Parameters, staging: sql.Identifier) -> sql.Composed:
    names = [name for name, _ in columns(connection, parameters.table)]
    values = [name for name in names if name not in parameters.key]
    key = listed(parameters.key)
    if values:
        changed: sql.Composable = sql.SQL(
            "do update set ({}) = row({}) where ({}) is distinct from ({})"
        ).format(
            listed(values),
            listed(values, "excluded"),
            listed(values, "stored"),
            listed(values, "excluded"),
        )
    else:
        changed = sql.SQL("do nothing")
    return sql.SQL(
        "insert into {} as stored ({}) select distinct on ({}) {} from {} order by {}, {} desc on conflict ({}) {}"
    ).format(
        parameters.table,
        listed(names),
        key,
        listed(names),
        staging,
        key,
        sql.Identifier(_LINE),
        key,
        changed,
    )


if __name__ == "__main__":
    run_program(Parameters, run)
