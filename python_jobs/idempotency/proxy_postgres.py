"""Proxy with PostgreSQL as the target: each load is a table that stays for good, and one view shows the newest.

    python -m python_jobs.idempotency.proxy_postgres --step setup --target devices \\
        --custodian archive --loader etl  # once
    python -m python_jobs.idempotency.proxy_postgres --source devices.csv --target devices \\
        --columns "id int primary key, name text"

Connection and password come from libpq's environment (PGHOST, PGUSER, PGPASSFILE …) and appear in no command line.

- ``load`` copies the file into ``<target>_internal_<yyyymmdd_hhmmss>``. The name comes from the run's start, not from
  its logical date: a rerun writes its own table. The same transaction transfers the table to the role ``custodian`` and
  records the version in ``<target>_versions``. Revoking privileges from the loading role is not enough, because an
  owner can always drop its table. The loading role can call the function that transfers a table; it can't get a table
  back.
- ``expose`` points the view to the newest version of that registry, or to ``--version`` to go back. It copies no row
  and can be retried alone; grants on the view stay.

Guarantee: a version is complete or doesn't exist. The loading role can't insert into, update, truncate or drop it.

Not guaranteed: protection against superusers and users who can log in as ``custodian`` (the role needs no login).

Cost: every load stays for good. After its legal period the custodian may drop a version manually.

Source: Data Engineering Design Patterns, chapter 4, Proxy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import psycopg
from psycopg import sql

from python_jobs.shared.core.command_line import run_program
from python_jobs.shared.core.failures import (
    DataRefused,
    JobFailed,
    WrongUse,
    given,
    require_above_zero,
    require_at_least,
)
from python_jobs.shared.files.manifests import newest_or, require_version, taken, version_of
from python_jobs.shared.postgres.clients import reaching_postgres, require_table_name, table_name
from python_jobs.shared.postgres.csv import create_from_csv
from python_jobs.shared.postgres.relations import (
    Connection,
    connect_by_environment,
    execute,
    exists,
    replace_view,
)


@dataclass(frozen=True)
class Parameters:
    """Copy a CSV file into an immutable table and show the newest such table through one view."""

    target: str
    """Public view, as name or schema.name. Versions are <target>_internal_<yyyymmdd_hhmmss>."""
    source: str | None = None
    """CSV file with a header."""
    columns: str | None = None
    """DDL between the parentheses of create table, with keys and NOT NULL."""
    step: Literal["load_and_expose", "load", "expose", "setup"] = "load_and_expose"
    """Steps to run. setup (once, as an administrator) creates the registry and the function that transfers tables."""
    version: str | None = None
    """Version to expose (20240101_101500); by default the newest."""
    started_at: str | None = None
    """Start of the run (ISO 8601), which names the version; by default the clock's time."""
    delimiter: str = ";"
    """Character between the columns of the file."""
    min_rows: int = 1
    """Minimum number of rows; a smaller load is refused, and 0 allows an empty one."""
    lock_seconds: float = 2.0
    """Maximum time that readers wait for the change of the view, in seconds."""
    custodian: str | None = None
    """Role that owns the versions, for setup; it must exist and needs no login."""
    loader: str | None = None
    """Role that loads, for setup; it must exist."""

    def __post_init__(self) -> None:
        require_table_name(self.target)
        require_at_least(0, min_rows=self.min_rows)
        require_above_zero(lock_seconds=self.lock_seconds)
        require_version(self.version, self.step)
        if {self.custodian is not None, self.loader is not None} != {self.step == "setup"}:
            raise WrongUse("custodian and loader belong to step setup, which needs both")
        if self.step.startswith("load") and (self.source is None or self.columns is None):
            raise WrongUse(f"step {self.step} needs source and columns")

    def name(self, suffix: str = "") -> sql.Identifier:
        """Return the target's name with a suffix, quoted."""
        return table_name(f"{self.target}{suffix}")

    def table(self, version: str) -> sql.Identifier:
        """Return the name of a version's table."""
        return self.name(f"_internal_{version}")


def setup(connection: Connection, params: Parameters) -> None:
    """Create the registry and the function with which the loading role transfers a table; run it as an administrator.

    The function runs as the custodian. The custodian is a member of the loading role and so may alter its tables; the
    loading role is no member of the custodian.
    """
    schema, _, name = params.target.rpartition(".")
    if not schema:
        (schema,) = connection.execute("select current_schema()").fetchone()  # type: ignore[misc]
    if exists(connection, params.name()):
        raise WrongUse(f"{params.target} exists, and setup is for a new view of that name: rename or drop it")
    names = {
        "registry": sql.Identifier(schema, f"{name}_versions"),
        "seal": sql.Identifier(schema, f"{name}_seal"),
        "schema": sql.Identifier(schema),
        "custodian": sql.Identifier(params.custodian or ""),
        "loader": sql.Identifier(params.loader or ""),
        "table": sql.Literal(f"{name}_internal_"),
        "in_schema": sql.Literal(schema),
        "as_role": sql.Literal(params.custodian),
        "to_role": sql.Literal(params.loader),
    }
    for statement in (
        "grant {loader} to {custodian}",
        "grant usage, create on schema {schema} to {custodian}, {loader}",
        "create table {registry} (version text primary key, row_count bigint not null, sealed_at timestamptz not null)",
        "alter table {registry} owner to {custodian}",
        "grant select on {registry} to {loader}",
        """
        create function {seal}(version text, row_count bigint) returns void
        language plpgsql security definer set search_path = pg_catalog, pg_temp as $seal$
        begin
            execute format('alter table %I.%I owner to %I', {in_schema}, {table} || version, {as_role});
            execute format('grant select on %I.%I to %I', {in_schema}, {table} || version, {to_role});
            insert into {registry} values (version, row_count, now());
        end
        $seal$
        """,
        "alter function {seal} owner to {custodian}",
        "revoke execute on function {seal} from public",
        "grant execute on function {seal} to {loader}",
    ):
        connection.execute(sql.SQL(statement).format(**names))


def load(connection: Connection, params: Parameters) -> dict[str, Any]:
    """Copy the file into a new table and transfer the table to the custodian, in one transaction.

    Raises:
        NotReady: there is no file.
        DataRefused: the file doesn't fit, or has too few rows; nothing of the file is stored.
        JobFailed: there is a version of the same second; it stays as it is.
    """
    source, columns = given(params.source, "source"), given(params.columns, "columns")
    version = version_of(params.started_at)
    try:
        with connection.transaction():
            rows = create_from_csv(
                connection,
                source,
                params.table(version),
                columns,
                params.delimiter,
                stays=params.target,
            )
            if rows < params.min_rows:
                raise DataRefused(
                    f"{params.source} has {rows} rows, allowed are {params.min_rows} or more (min_rows); "
                    f"{params.target} stays as it is"
                )
            connection.execute(sql.SQL("select {}(%s, %s)").format(params.name("_seal")), [version, rows])
    except psycopg.errors.DuplicateTable:
        raise taken(version, params.target) from None
    return {"version": version, "rows": rows}


def expose(connection: Connection, params: Parameters) -> dict[str, Any]:
    """Point the view to a version, in one transaction.

    Raises:
        WrongUse: the version is not in the registry.
        JobFailed: the view is in use, or other objects need a column that the view would lose; it stays as it is.
    """
    registry = sql.SQL("select version from {}").format(params.name("_versions"))
    versions = [version for (version,) in connection.execute(registry).fetchall()]
    version = newest_or(params.version, versions, params.target)
    try:
        with connection.transaction():
            execute(connection, "set local lock_timeout = {}", sql.Literal(f"{params.lock_seconds}s"))
            # If two runs replace the view at once, PostgreSQL would end the second with an error of its catalog.
            execute(connection, "select pg_advisory_xact_lock(hashtext({}))", sql.Literal(params.target))
            replace_view(connection, params.name(), sql.SQL("select * from {}").format(params.table(version)))
    except psycopg.errors.LockNotAvailable:
        raise JobFailed(
            f"{params.target} is in use by long queries; it stays as it is, run step expose again"
        ) from None
    except psycopg.errors.DependentObjectsStillExist as failure:
        raise JobFailed(
            f"{params.target} loses or changes a column that others need: {failure.diag.message_detail}"
        ) from None
    return {"exposed_version": version}


def run(params: Parameters, connect: Callable[[], Connection] | None = None) -> dict[str, Any]:
    """Run the steps and return the report.

    Raises:
        JobFailed: PostgreSQL went away, can't be reached, or denies a statement.
    """
    report: dict[str, Any] = {"target": params.target}
    try:
        with reaching_postgres(), (connect or connect_by_environment)() as connection:
            if params.step == "setup":
                with connection.transaction():
                    setup(connection, params)
            if params.step.startswith("load"):
                report |= load(connection, params)
            if params.step.endswith("expose"):
                report |= expose(connection, params)
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedFunction):
        raise WrongUse(f"{params.target} has no registry; run step setup once") from None
    except psycopg.errors.InsufficientPrivilege as failure:
        raise JobFailed(f"PostgreSQL denies it: {failure.diag.message_primary}") from None
    return report


if __name__ == "__main__":
    run_program(Parameters, run)
