"""Helpers of programs that write to PostgreSQL with psycopg: names in SQL, one sentence for a server that is away."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psycopg
from psycopg import sql

from python_jobs.shared.core.failures import JobFailed, WrongUse


def require_table_name(target: str) -> None:
    """Refuse a text that is no plain name of a table.

    Raises:
        WrongUse: the text is neither name nor schema.name.
    """
    if not re.fullmatch(r"(\w+\.)?\w+", target):
        raise WrongUse(f"target must be a name or schema.name, got '{target}'")


def table_name(target: str) -> sql.Identifier:
    """Return a table's name (name or schema.name), quoted."""
    return sql.Identifier(*target.split("."))


def listed(names: Iterable[str], relation: str | None = None) -> sql.Composed:
    """Return column names, quoted and separated by commas, each with ``relation`` as its prefix if given."""
    prefix = [relation] if relation else []
    return sql.SQL(", ").join(sql.Identifier(*prefix, name) for name in names)


@contextmanager
def reaching_postgres() -> Iterator[None]:
    """Turn a lost server or a cancelled statement into one sentence.

    Raises:
        JobFailed: the server can't be reached, went away, or ended a statement.
    """
    try:
        yield
    except (psycopg.OperationalError, psycopg.InterfaceError) as failure:
        raise JobFailed(f"PostgreSQL: {str(failure).splitlines()[0]}; run again") from None
