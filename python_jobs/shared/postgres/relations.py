"""Tables and views of a PostgreSQL database, for programs that publish data through a view.

Connection and password come from libpq's environment (PGHOST, PGUSER, PGPASSFILE …) and appear in no command line.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from python_jobs.shared.core.failures import WrongUse, present

Connection = psycopg.Connection[Any]


def connect_by_environment() -> Connection:
    """Return a connection in autocommit mode: each statement outside of a transaction block is its own transaction."""
    return psycopg.connect("", autocommit=True)


def execute(connection: Connection, statement: str, *names: sql.Composable) -> None:
    """Run one statement whose ``{}`` are replaced by the names."""
    connection.execute(sql.SQL(statement).format(*names))


def one_at_a_time(connection: Connection, target: sql.Identifier) -> None:
    """Wait until no other run writes to a target; the lock ends with the connection, even if a run dies."""
    execute(connection, "select pg_advisory_lock(hashtext({}))", sql.Literal(target.as_string(connection)))


def exists(connection: Connection, relation: sql.Identifier) -> bool:
    """Return whether a table or a view of that name exists."""
    found = connection.execute("select to_regclass(%s)", [relation.as_string(connection)]).fetchone()
    return found is not None and found[0] is not None


def mark(connection: Connection, table: sql.Identifier, owner: str) -> None:
    """Note in a table's comment which program made it; :func:`is_marked` finds it there."""
    execute(connection, "comment on table {} is {}", table, sql.Literal(owner))


def is_marked(connection: Connection, relation: sql.Identifier, owner: str) -> bool:
    """Return whether a table exists that :func:`mark` marked, or a view that reads such a table."""
    found = connection.execute(
        "select 1 from pg_class where oid = to_regclass(%(name)s) and ("
        "  strpos(obj_description(oid, 'pg_class'), %(owner)s) > 0"
        "  or relkind = 'v' and exists ("
        "    select 1 from pg_rewrite join pg_depend on pg_depend.objid = pg_rewrite.oid"
        "    where ev_class = pg_class.oid and classid = 'pg_rewrite'::regclass"
        "    and refclassid = 'pg_class'::regclass and strpos(obj_description(refobjid, 'pg_class'), %(owner)s) > 0"
        "))",
        {"name": relation.as_string(connection), "owner": owner},
    ).fetchone()
    return found is not None


def create_table(connection: Connection, table: sql.Identifier, columns: str) -> None:
    """Create a table from the user's own DDL between the parentheses of create table.

    Raises:
        WrongUse: the DDL is no list for create table.
        psycopg.errors.DuplicateTable: the table exists.
    """
    try:
        execute(connection, "create table {} ({})", table, sql.SQL(columns))
    except psycopg.errors.SyntaxError as failure:
        raise WrongUse(f"columns is no list for create table: {failure.diag.message_primary}") from None
    except psycopg.errors.UniqueViolation as failure:
        # The catalog raises this one: another transaction has created the table meanwhile.
        raise psycopg.errors.DuplicateTable(str(failure)) from None


def count_rows(connection: Connection, relation: sql.Identifier) -> int:
    """Return the number of rows of a table or a view."""
    row = connection.execute(sql.SQL("select count(*) from {}").format(relation)).fetchone()
    return int(present(row, "PostgreSQL's answer to count(*)")[0])


def columns(connection: Connection, relation: sql.Identifier) -> list[tuple[str, str]]:
    """Return the names and types of a relation's columns, in order."""
    return connection.execute(
        "select attname, format_type(atttypid, atttypmod) from pg_attribute "
        "where attrelid = %s::regclass and attnum > 0 and not attisdropped order by attnum",
        [relation.as_string(connection)],
    ).fetchall()


def stored_columns(connection: Connection, relation: sql.Identifier) -> list[tuple[str, str]]:
    """Return names and base types of the columns that a row stores, in order, without generated columns."""
    return connection.execute(
        "select attname, case typtype when 'd' then format_type(typbasetype, typtypmod) "
        "else format_type(atttypid, atttypmod) end from pg_attribute join pg_type on pg_type.oid = atttypid "
        "where attrelid = %s::regclass and attnum > 0 and not attisdropped and attgenerated = '' order by attnum",
        [relation.as_string(connection)],
    ).fetchall()


def replace_view(connection: Connection, view: sql.Identifier, query: sql.Composable) -> None:
    """Create a view of the query, or replace the existing one; call it in a transaction.

    ``create or replace view`` can only add columns at the end. If a column is removed, renamed or retyped, the view is
    dropped and recreated with its grants.

    Raises:
        psycopg.errors.DependentObjectsStillExist: another object depends on the view that must be dropped.
    """
    if not exists(connection, view):
        execute(connection, "create view {} as {}", view, query)
        return
    before, after = columns(connection, view), _columns_of(connection, query)
    if after[: len(before)] == before:
        execute(connection, "create or replace view {} as {}", view, query)
        return
    grants = connection.execute(
        "select grantee::regrole::text, privilege_type, is_grantable "
        "from pg_class, aclexplode(relacl) where oid = %s::regclass and grantee <> 0 and grantee <> relowner",
        [view.as_string(connection)],
    ).fetchall()
    to_all = connection.execute(
        "select privilege_type from pg_class, aclexplode(relacl) where oid = %s::regclass and grantee = 0",
        [view.as_string(connection)],
    ).fetchall()
    execute(connection, "drop view {}", view)
    execute(connection, "create view {} as {}", view, query)
    statements = [(privilege, "public", False) for (privilege,) in to_all]
    statements += [(privilege, grantee, grantable) for grantee, privilege, grantable in grants]
    for privilege, grantee, grantable in statements:  # regrole::text is quoted already
        option = " with grant option" if grantable else ""
        execute(connection, f"grant {privilege} on {{}} to {grantee}{option}", view)


def _columns_of(connection: Connection, query: sql.Composable) -> list[tuple[str, str]]:
    """Return names and types of a query's columns without running the query."""
    probe = sql.Identifier("columns_of_the_query")
    execute(connection, "create temporary view {} as {}", probe, query)
    found = columns(connection, probe)
    execute(connection, "drop view {}", probe)
    return found
