"""Full Loader with PostgreSQL as the target: COPY into a staging table, then one transaction that replaces the view.

    python -m python_jobs.ingestion.full_loader_postgres --source devices.csv --target devices --version 2024-01-01 \\
        --columns "type varchar(15) not null, full_name varchar(50) not null, version varchar(40) not null, \\
                   primary key (full_name, version)"

Connection and password come from libpq's environment (PGHOST, PGUSER, PGPASSFILE …) and appear in no command line.

Readers find the view at every moment:

- ``load`` copies the file into ``<target>_<yyyymmdd>__loaded`` in its own transaction: a bad line, a repeated key or a
  NULL leaves nothing, and no reader waits.
- ``expose`` gives that table the version's name and points the view to it, in one transaction. Without a loaded table
  it points the view to the existing table of the version, to go back. ``create or replace view`` can only add columns
  at the end. If a column is removed, renamed or retyped, the same transaction drops the view and recreates it with its
  grants.

The program requests the view's lock with a time limit and retries. A long query on the view delays the swap, but other
readers never wait longer than the limit.

The program marks its version tables by their comments. It counts, replaces and drops only tables with this mark, and
replaces only a view of such a table; a relation of another owner in the place of one of them is refused.

If two runs of one target are concurrent, the second waits for the first.

Source: Data Engineering Design Patterns, chapter 2, Full Loader.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import psycopg
from psycopg import sql

from python_jobs.shared.core.command_line import run_program
from python_jobs.shared.core.dates import parse_date
from python_jobs.shared.core.failures import DataRefused, JobFailed, WrongUse, require_above_zero
from python_jobs.shared.core.retry import Failure, Retrier, RetryPolicy
from python_jobs.shared.postgres.clients import reaching_postgres, require_table_name, table_name
from python_jobs.shared.postgres.csv import create_from_csv
from python_jobs.shared.postgres.relations import (
    Connection,
    connect_by_environment,
    count_rows,
    execute,
    exists,
    is_marked,
    mark,
    one_at_a_time,
    replace_view,
)

_WAIT_BETWEEN_TRIES_SECONDS = 0.2
_MARK = "version of full_loader_postgres, which replaces and drops it"
_IN_USE = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)


@dataclass(frozen=True)
class Parameters:
    """Copy a CSV file into a versioned table and show that table through one view."""

    source: str
    """CSV file with a header."""
    target: str
    """Public view, as name or schema.name. Versions are <target>_<yyyymmdd>."""
    version: str
    """Logical date of the dataset (2024-01-01), never the clock's."""
    columns: str
    """DDL between the parentheses of create table, with keys and NOT NULL."""
    delimiter: str = ";"
    """Character between the columns of the file."""
    min_rows: int = 1
    """Minimum number of rows; a smaller version is not exposed, and 0 allows an empty dataset."""
    max_shrink_percent: float = 50.0
    """Maximum percentage of rows that a version may lose against the exposed one; 100 allows any loss."""
    step: Literal["load_and_expose", "load", "expose"] = "load_and_expose"
    """Steps to run. load only stages a version; expose shows a loaded version, or an older one to go back."""
    keep_versions: int = 7
    """Number of the newest versions that stay, to go back; at least 2. The exposed one always stays."""
    lock_seconds: float = 2.0
    """Maximum time that readers wait for one try of the swap, in seconds."""
    tries: int = 30
    """Number of tries of the swap while a long query uses the view."""

    def __post_init__(self) -> None:
        require_table_name(self.target)
        if not 0 <= self.max_shrink_percent <= 100:
            raise WrongUse(f"max_shrink_percent must be between 0 and 100, got {self.max_shrink_percent}")
        if self.keep_versions < 2:
            raise WrongUse(f"keep_versions must be at least 2, got {self.keep_versions}")
        require_above_zero(lock_seconds=self.lock_seconds)
        _ = self.version_name  # refuses what is no day

    @property
    def version_name(self) -> str:
        """The logical date without its dashes, such as 20240101."""
        try:
            return f"{parse_date(self.version):%Y%m%d}"
        except ValueError:
            raise WrongUse(f"a version is a day such as 2024-01-01, got '{self.version}'") from None

    def table(self, suffix: str = "") -> sql.Identifier:
        """Return the target's name with a suffix, quoted."""
        return table_name(f"{self.target}{suffix}")


# --- the two steps: each is a task that an orchestrator can retry alone ---------------------------------


def load(connection: Connection, parameters: Parameters) -> int:
    """Copy the file into the version's staging table and return the number of its rows.

    Raises:
        NotReady: there is no file.
        WrongUse: a relation that this program did not create has a name that it needs.
        DataRefused: a line, a key or a NULL doesn't fit; nothing is left behind.
    """
    fresh = parameters.table(f"_{parameters.version_name}__loaded")
    with connection.transaction():
        _refuse_others(connection, parameters)
        execute(connection, "drop table if exists {}", fresh)
        rows = create_from_csv(
            connection,
            parameters.source,
            fresh,
            parameters.columns,
            parameters.delimiter,
            stays=parameters.target,
        )
        mark(connection, fresh, _MARK)
    return rows


def expose(connection: Connection, parameters: Parameters) -> dict[str, Any]:
    """Point the view to the version; return the numbers of the version's rows and of the rows shown before.

    Raises:
        WrongUse: the version doesn't exist, or a relation that this program did not create has a name that it needs.
        DataRefused: the number of rows is not allowed; the view stays as it is.
        JobFailed: the view was in use during all tries.
    """
    policy = RetryPolicy(
        attempts=parameters.tries,
        base_seconds=_WAIT_BETWEEN_TRIES_SECONDS,
        cap_seconds=_WAIT_BETWEEN_TRIES_SECONDS,
        jitter="tenth",
        total_seconds=math.inf,
    )
    retrier = Retrier(policy, classifier=_classify)
    try:
        return retrier.call(lambda _: _swap(connection, parameters), idempotent=True)
    except _IN_USE:
        raise JobFailed(
            f"{parameters.target} was in use by long queries for {parameters.tries} tries; it stays as it is"
        ) from None
    except psycopg.errors.DependentObjectsStillExist as failure:
        raise JobFailed(
            f"{parameters.target} loses or changes a column that others need: {failure.diag.message_detail}"
        ) from None


def _classify(error: BaseException) -> Failure:
    return Failure.TRANSIENT if isinstance(error, _IN_USE) else Failure.UNKNOWN


def _swap(connection: Connection, parameters: Parameters) -> dict[str, Any]:
    """Check and swap in one transaction: after any failure or crash the view is unchanged."""
    version = f"_{parameters.version_name}"
    loaded, named, old = (parameters.table(version + suffix) for suffix in ("__loaded", "", "__old"))
    with connection.transaction():
        connection.execute(
            sql.SQL("set local lock_timeout = {}").format(sql.Literal(f"{parameters.lock_seconds}s"))
        )
        _refuse_others(connection, parameters)
        is_fresh = exists(connection, loaded)
        if not is_fresh and not exists(connection, named):
            raise WrongUse(f"version {parameters.version_name} of {parameters.target} is not there")
        counts = _check(connection, parameters, loaded if is_fresh else named)
        if exists(connection, parameters.table()):
            # Lock the view first and then its table, as readers do: the opposite order would cause deadlocks.
            execute(connection, "lock table {} in access exclusive mode", parameters.table())
        replaces = is_fresh and exists(connection, named)
        if replaces:  # a view follows the renaming of its table: readers still see the old rows
            execute(connection, "alter table {} rename to {}", named, old)
        if is_fresh:
            execute(connection, "alter table {} rename to {}", loaded, named)
        replace_view(connection, parameters.table(), sql.SQL("select * from {}").format(named))
        if replaces:
            execute(connection, "drop table {}", old)
    return counts


def _refuse_others(connection: Connection, parameters: Parameters) -> None:
    for suffix in ("", *(f"_{parameters.version_name}{step}" for step in ("", "__loaded", "__old"))):
        relation = parameters.table(suffix)
        if exists(connection, relation) and not is_marked(connection, relation, _MARK):
            raise WrongUse(
                f"{parameters.target}{suffix} exists and was not created by this program: rename or drop it, or load "
                "another target"
            )


def _check(connection: Connection, parameters: Parameters, table: sql.Identifier) -> dict[str, Any]:
    rows = count_rows(connection, table)
    view = parameters.table()
    shown = count_rows(connection, view) if exists(connection, view) else 0
    least = shown * (1 - parameters.max_shrink_percent / 100)
    if rows < parameters.min_rows or rows < least:
        raise DataRefused(
            f"version {parameters.version_name} ({table.as_string(None)}) has {rows} rows, "
            f"allowed are {parameters.min_rows} or more (min_rows) "
            f"and a drop of {parameters.max_shrink_percent:g} % from {shown} (max_shrink_percent); "
            f"{parameters.target} stays as it is"
        )
    return {"rows": rows, "previous_rows": shown}


def drop_old_versions(connection: Connection, parameters: Parameters) -> list[str]:
    """Drop all but the newest of this program's versions, never the exposed one; return the dropped versions."""
    schema, _, name = parameters.target.rpartition(".")
    tables = connection.execute(
        "select tablename from pg_tables where schemaname = coalesce(nullif(%s, ''), current_schema()) "
        "and tablename ~ %s order by tablename",
        [schema, rf"^{name}_\d{{8}}$"],
    ).fetchall()
    versions = [
        version
        for (table,) in tables
        if is_marked(connection, parameters.table(f"_{(version := table.removeprefix(f'{name}_'))}"), _MARK)
    ]
    old = [v for v in versions[: -parameters.keep_versions] if v != parameters.version_name]
    for version in old:
        execute(connection, "drop table {}", parameters.table(f"_{version}"))
    return old


# --- the run --------------------------------------------------------------------------------------------


def run(parameters: Parameters, connect: Callable[[], Connection] | None = None) -> dict[str, Any]:
    """Load the version, expose it, or both, and return the report."""
    report: dict[str, Any] = {
        "source": parameters.source,
        "target": parameters.target,
        "version": parameters.version_name,
    }
    with reaching_postgres(), (connect or connect_by_environment)() as connection:
        one_at_a_time(connection, parameters.table())
        if parameters.step != "expose":
            report["rows"] = load(connection, parameters)
        if parameters.step != "load":
            report |= expose(connection, parameters)
            report["dropped_versions"] = drop_old_versions(connection, parameters)
    return report | {"exposed": parameters.step != "load"}


if __name__ == "__main__":
    run_program(Parameters, run)
