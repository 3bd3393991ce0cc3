"""Fast Metadata Cleaner on PostgreSQL: one table for each unit of time behind one view, cleaned by TRUNCATE or DROP.

    python -m python_jobs.idempotency.fast_metadata_cleaner_postgres --source visits.csv \\
        --target visits --date 2023-11-06 \\
        --columns "visit_id text, event_time timestamptz, page text, primary key (visit_id, event_time)"

Connection and password come from libpq's environment (PGHOST, PGUSER, PGPASSFILE …) and appear in no command line.

A run loads one day into the table of its unit, ``visits_2023_45``. On the first day of a unit the run cleans that table
first, at a cost that doesn't depend on its size; on any other day it only loads. Two companion tables hold the state:

- ``<target>__units``: the table of each unit. The view is built from this list, so it never shows another table.
- ``<target>__loads``: the loaded days, written in the transaction of the day's COPY. If a day runs again without its
  unit's first day, the key of this table refuses it, even while another run loads the day.

``--action freeze --units '["2023_44", "2023_45"]' --into 2023_11`` copies finished units into one table, in one
transaction: readers see each row exactly once, and a later run for such a unit is refused.

If two runs of one target are concurrent, the second waits for the first.

Source: Data Engineering Design Patterns, chapter 4, Fast Metadata Cleaner.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psycopg
from psycopg import sql

from python_jobs.idempotency.unit_tables import Unit, route, unit_name
from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.command_line import run_program
from python_jobs.shared.core.dates import parse_date
from python_jobs.shared.core.failures import DataRefused, NotReady, WrongUse
from python_jobs.shared.postgres.clients import reaching_postgres, require_table_name, table_name
from python_jobs.shared.postgres.csv import copy_csv
from python_jobs.shared.postgres.relations import (
    Connection,
    columns,
    connect_by_environment,
    create_table,
    execute,
    exists,
    one_at_a_time,
    replace_view,
)


@dataclass(frozen=True)
class Parameters(ProcessingTimeParameters):
    """Load a day into the table of its unit of time, or drop or freeze units, behind one view."""

    target: str
    """Public view, as name or schema.name. Units are <target>_<unit>."""
    unit: Unit = "week"
    """Period of one table: day, week, month or year. A run cleans whole units, and a replay starts with a unit."""
    action: Literal["load", "drop", "freeze", "expose"] = "load"
    """load a day; drop units; freeze units; expose: recreate the view, such as after altering tables."""
    source: str = ""
    """CSV file with a header, for load."""
    date: str = ""
    """Logical date of the file (2023-11-06), never the clock's, for load."""
    columns: str = ""
    """DDL between the parentheses of create table, with keys, for load."""
    delimiter: str = ";"
    """Character between the columns of the file."""
    clean: Literal["truncate", "drop"] = "truncate"
    """truncate keeps the table's columns; drop takes the table out of the view, drops it and recreates it."""
    units: list[str] = dataclasses.field(default_factory=list)
    """Units to drop or to freeze, such as 2023_45."""
    into: str = ""
    """Suffix of the table of frozen units, <target>_frozen_<into>, for freeze."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_table_name(self.target)
        loads = self.action == "load"
        if loads != all((self.source, self.date, self.columns)):
            raise WrongUse("source, date and columns belong to load, which needs them")
        if bool(self.units) != (self.action in ("drop", "freeze")):
            raise WrongUse("units belong to drop and freeze, which need them")
        if (self.action == "freeze") != bool(self.into) or not re.fullmatch(r"\w*", self.into):
            raise WrongUse(f"freeze needs into, a name of letters, digits and '_', got '{self.into}'")
        if loads and self.day > self.today:
            raise WrongUse(f"the day {self.date} is in the future: there is nothing to load yet")

    @property
    def day(self) -> dt.date:
        """The logical date."""
        try:
            return parse_date(self.date)
        except ValueError:
            raise WrongUse(f"a date is a day such as 2023-11-06, got '{self.date}'") from None

    @property
    def today(self) -> dt.date:
        """The day of the run."""
        return self.processing_time().date()

    def name(self, suffix: str) -> str:
        """Return the target's name with a suffix."""
        return f"{self.target}{suffix}"

    def table(self, suffix: str = "") -> sql.Identifier:
        """Return the target's name with a suffix, quoted."""
        return table_name(self.name(suffix))


# --- loading a day: two steps, each in one transaction ---------------------------------------------------


def initialise(connection: Connection, params: Parameters) -> None:
    """Create or empty the unit's table, and delete the records of its days' loads.

    Raises:
        DataRefused: the unit is frozen, or this program did not create the table.
    """
    unit = unit_name(params.day, params.unit)
    with connection.transaction():
        place = _unit_table(connection, params, unit)
        if place is not None and params.clean == "truncate":
            execute(connection, "truncate table {}", place)
        else:
            if place is not None:
                _forget_units(connection, params, [unit])
                _drop_tables(connection, params, [unit])
            _create(connection, params, unit)
        execute(connection, "delete from {} where unit = {}", params.table("__loads"), sql.Literal(unit))


def load(connection: Connection, params: Parameters) -> int:
    """Append the day's file to the unit's table and record the day; return the number of the file's rows.

    Raises:
        NotReady: there is no file.
        DataRefused: the unit already holds the day, is frozen or doesn't exist, or a line doesn't fit.
    """
    unit = unit_name(params.day, params.unit)
    with connection.transaction():
        if _unit_table(connection, params, unit) is None:
            if _units(connection, params):
                raise DataRefused(
                    f"unit {unit} of {params.target} is not there: load it from its first day on"
                )
            _create(connection, params, unit)
        try:
            with connection.transaction():
                execute(
                    connection,
                    "insert into {} (day, unit) values ({}, {})",
                    params.table("__loads"),
                    sql.Literal(params.day),
                    sql.Literal(unit),
                )
        except psycopg.errors.UniqueViolation:
            raise DataRefused(
                f"{params.name(f'_{unit}')} holds {params.date} already, and loading it again would double its rows: "
                "load the unit again from its first day on"
            ) from None
        return copy_csv(
            connection,
            params.source,
            params.table(f"_{unit}"),
            params.delimiter,
            stays=params.name(f"_{unit}"),
        )


def _create(connection: Connection, params: Parameters, unit: str) -> None:
    create_table(connection, params.table(f"_{unit}"), params.columns)
    execute(
        connection,
        "insert into {} values ({}, {})",
        params.table("__units"),
        sql.Literal(unit),
        sql.Literal(params.name(f"_{unit}")),
    )
    expose(connection, params)


# --- units ----------------------------------------------------------------------------------------------


def drop(connection: Connection, params: Parameters) -> None:
    """Take units out of the view and drop their tables.

    Raises:
        WrongUse: a unit doesn't exist.
        DataRefused: a unit is frozen.
    """
    with connection.transaction():
        _require_units(connection, params)
        _forget_units(connection, params, params.units)
        _drop_tables(connection, params, params.units)


def freeze(connection: Connection, params: Parameters) -> None:
    """Copy finished units into one table and drop their own tables.

    Raises:
        WrongUse: a unit doesn't exist or is not over, or the frozen table exists.
        DataRefused: a unit is already frozen.
    """
    this_unit = unit_name(params.today, params.unit)
    suffix = f"_frozen_{params.into}"
    with connection.transaction():
        _require_units(connection, params)
        for unit in params.units:
            if unit >= this_unit:
                raise WrongUse(
                    f"{unit} is not over yet, rows may still come: freeze units before {this_unit}"
                )
        if exists(connection, params.table(suffix)):
            raise WrongUse(f"the table {params.name(suffix)} already exists; give another name as into")
        rows = _union(connection, [params.table(f"_{unit}") for unit in params.units])
        execute(connection, "create table {} as {}", params.table(suffix), rows)
        execute(
            connection,
            "update {} set table_name = {} where unit = any({})",
            params.table("__units"),
            sql.Literal(params.name(suffix)),
            sql.Literal(params.units),
        )
        expose(connection, params)
        _drop_tables(connection, params, params.units)


def expose(connection: Connection, params: Parameters) -> None:
    """Replace the view by the union of all tables, matched by column names; a missing column is NULL."""
    places = sorted(set(_units(connection, params).values()))
    view = params.table()
    if places:
        replace_view(connection, view, _union(connection, [table_name(place) for place in places]))
    elif exists(connection, view):
        nothing = [(name, type_, sql.NULL) for name, type_ in columns(connection, view)]
        replace_view(connection, view, sql.SQL("select {} where false").format(_typed(nothing)))


def _union(connection: Connection, tables: Sequence[sql.Identifier]) -> sql.Composable:
    found = [dict(columns(connection, table)) for table in tables]
    types = {name: type_ for table in reversed(found) for name, type_ in table.items()}
    selects = [
        sql.SQL("select {} from {}").format(
            _typed(
                [(name, types[name], sql.Identifier(name) if name in has else sql.NULL) for name in types]
            ),
            table,
        )
        for table, has in zip(tables, found, strict=True)
    ]
    return sql.SQL(" union all ").join(selects)


def _typed(expressions: Sequence[tuple[str, str, sql.Composable]]) -> sql.Composable:
    return sql.SQL(", ").join(
        # A column keeps its own type: a cast to another table's narrower type would cut its values.
        sql.SQL(("{}::" + type_ if expression is sql.NULL else "{}") + " as {}").format(
            expression, sql.Identifier(name)
        )
        for name, type_, expression in expressions
    )


def _units(connection: Connection, params: Parameters) -> dict[str, str]:
    """Return the table of each unit by the unit's name; the registry's rows are locked for this transaction."""
    query = sql.SQL("select unit, table_name from {} order by unit for update").format(
        params.table("__units")
    )
    return dict(connection.execute(query).fetchall())


def _unit_table(connection: Connection, params: Parameters, unit: str) -> sql.Identifier | None:
    """Return the table of a unit; None if there is no table yet.

    Raises:
        DataRefused: the unit is frozen, or a table of that name exists that this program did not create.
    """
    place, own = _units(connection, params).get(unit), params.name(f"_{unit}")
    if place is None and exists(connection, params.table(f"_{unit}")):
        raise DataRefused(f"{own} exists and was not created by this job: rename or drop it")
    if place is not None and place != own:
        raise DataRefused(f"{unit} is frozen in {place}: its rows can no longer change")
    return None if place is None else params.table(f"_{unit}")


def _require_units(connection: Connection, params: Parameters) -> None:
    known = _units(connection, params)
    for unit in params.units:
        if unit not in known:
            there = ", ".join(known) or "none"
            raise WrongUse(f"{params.target} has no unit '{unit}'; it has: {there}")
        _unit_table(connection, params, unit)


def _forget_units(connection: Connection, params: Parameters, units: Sequence[str]) -> None:
    for registry in ("__units", "__loads"):
        execute(
            connection,
            "delete from {} where unit = any({})",
            params.table(registry),
            sql.Literal(list(units)),
        )
    expose(connection, params)


def _drop_tables(connection: Connection, params: Parameters, units: Sequence[str]) -> None:
    for unit in units:
        execute(connection, "drop table {}", params.table(f"_{unit}"))


# --- the run --------------------------------------------------------------------------------------------


def run(params: Parameters, connect: Callable[[], Connection] | None = None) -> dict[str, Any]:
    """Run the action and return the report."""
    report: dict[str, Any] = {"target": params.target, "action": params.action}
    with reaching_postgres(), (connect or connect_by_environment)() as connection:
        one_at_a_time(connection, params.table())
        _create_registry(connection, params)
        if params.action == "load":
            branch = route(params.day, params.unit)
            if branch == "initialise_unit":
                if not Path(params.source).is_file():
                    raise NotReady(f"there is no file {params.source}; nothing was cleaned")
                initialise(connection, params)
            report |= {"date": params.date, "unit": unit_name(params.day, params.unit), "branch": branch}
            return report | {"rows": load(connection, params)}
        if params.action == "expose":
            with connection.transaction():
                expose(connection, params)
            return report
        (drop if params.action == "drop" else freeze)(connection, params)
        return report | {"units": params.units}


def _create_registry(connection: Connection, params: Parameters) -> None:
    """Create the tables of the units and of the days, if they are absent.

    Raises:
        DataRefused: there is a relation of the target's name, but no registry: this program did not create it.
    """
    if exists(connection, params.table()) and not exists(connection, params.table("__units")):
        raise DataRefused(f"{params.target} exists and was not created by this job: rename or drop it")
    execute(
        connection,
        "create table if not exists {} (unit text primary key, table_name text not null)",
        params.table("__units"),
    )
    execute(
        connection,
        "create table if not exists {} (day date primary key, unit text not null)",
        params.table("__loads"),
    )


if __name__ == "__main__":
    run_program(Parameters, run)
