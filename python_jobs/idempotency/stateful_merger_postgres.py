"""Stateful Merger with PostgreSQL as the target: it has no versions, so raw increments are kept for replays.

    python -m python_jobs.idempotency.stateful_merger_postgres --source devices_2024-10-07.csv \\
        --target devices --key '["id"]' \\
        --is_deleted is_deleted --execution_time 2024-10-07

Connection and password come from libpq's environment (PGHOST, PGUSER, PGPASSFILE …) and appear in no command line.

The table must exist. The first run creates two companion tables: ``<target>_history`` (the rows of each increment with
``__is_deleted`` and ``__execution_time``) and ``<target>_runs`` (execution times and counts, also of empty increments).
A run is one transaction:

- If a run with the same or a later execution time is recorded, the run is a backfill. The rerun of the newest run is a
  backfill, too, because its former increment must be deleted. The increments from this time on are deleted, and the
  table is rebuilt from the increments before it: the newest row of each key, unless this row is a deletion.
- The file is copied into the history and merged into the table.

Guarantee: a run has its whole effect or none, even if it dies. Two runs of one target wait for each other. Runs later
than a backfill must follow in order (``to_replay``), and with ``--previous_execution_time`` a run that comes too early
is refused. Readers see the table before the run or after it.

Cost: the history grows with every increment and nothing is deleted from it; a backfill sorts the history by key.

Source: Data Engineering Design Patterns, chapter 4, Stateful Merger; its check (``>``) misses the newest run's rerun.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from python_jobs.shared.core.command_line import run_program
from python_jobs.shared.core.failures import DataRefused, NotReady, WrongUse
from python_jobs.shared.core.intervals import parse_time, previous_run_time
from python_jobs.shared.postgres.clients import listed, reaching_postgres, require_table_name, table_name
from python_jobs.shared.postgres.csv import copy_csv
from python_jobs.shared.postgres.relations import Connection, columns, connect_by_environment, exists

_STAGED = sql.Identifier("stateful_merger_increment")
_DELETED, _AT = "__is_deleted", "__execution_time"


@dataclass(frozen=True)
class Parameters:
    """Merge a CSV file into a table, restored to its state before the run."""

    source: str
    """CSV file of the run's increment; its header names the target's columns in order, then is_deleted if given."""
    target: str
    """Table, as name or schema.name; it must exist, with a primary or unique key over key."""
    execution_time: str
    """Logical time of the run (2024-10-07 or 2024-10-07T08), never the clock's."""
    key: list[str]
    """Columns that identify a row and never change."""
    previous_execution_time: str | None = None
    """Logical time of the run before; until that run is recorded, this run ends with exit code 4."""
    is_deleted: str | None = None
    """Boolean column of the file, not of the table, that marks a deletion; empty means not deleted."""
    sequence: list[str] = field(default_factory=list)
    """Columns that order the changes of a key within one file."""
    delimiter: str = ";"
    """Character between the columns of the file."""

    def __post_init__(self) -> None:
        require_table_name(self.target)
        if not self.key:
            raise WrongUse("key is empty; name the columns that identify a row")
        _ = self.previous  # refuses one that is not before

    @property
    def at(self) -> dt.datetime:
        """The run's logical time."""
        return parse_time(self.execution_time)

    @property
    def previous(self) -> dt.datetime | None:
        """The logical time of the run before, if it was given."""
        return previous_run_time(self.previous_execution_time, self.execution_time)

    def table(self, suffix: str = "") -> sql.Identifier:
        """Return the target's name with a suffix, quoted."""
        return table_name(f"{self.target}{suffix}")


class Run:
    """One run inside of a transaction."""

    def __init__(self, connection: Connection, params: Parameters) -> None:
        """Lock the target against other runs, and create its companion tables if they don't exist.

        Raises:
            NotReady: the target doesn't exist.
            WrongUse: the target lacks a column of key or sequence, or has one of is_deleted or of the history alone.
            DataRefused: the history's columns differ from the target's, or have the names of an earlier version.
        """
        self._connection, self._params = connection, params
        if not exists(connection, params.table()):
            raise NotReady(f"there is no table {params.target}")
        connection.execute(
            "select pg_advisory_xact_lock(hashtext(%s))", [params.table().as_string(connection)]
        )
        self._columns = [name for name, _ in columns(connection, params.table())]
        for name in (*params.key, *params.sequence):
            if name not in self._columns:
                raise WrongUse(f"{params.target} has no column {name}; it has {', '.join(self._columns)}")
        if params.is_deleted in self._columns:
            raise WrongUse(
                f"{params.target} has the column {params.is_deleted} of its own, so is_deleted can't name it: "
                "is_deleted is a column of the file alone; rename it in the file"
            )
        for name in {_DELETED, _AT}.intersection(self._columns):
            raise WrongUse(
                f"{params.target} has a column {name}, which its history adds; rename it in the table"
            )
        self._names = {
            "target": params.table(),
            "history": params.table("_history"),
            "runs": params.table("_runs"),
            "staged": _STAGED,
            "columns": listed(self._columns),
            "key": listed(params.key),
            "deleted": sql.Identifier(params.is_deleted) if params.is_deleted else sql.SQL("false"),
            "at": sql.Literal(params.at),
            "is_deleted": sql.Identifier(_DELETED),
            "execution_time": sql.Identifier(_AT),
        }
        self._make_tables()

    def recorded(self) -> list[dt.datetime]:
        """Return the execution times of all runs, in order."""
        return [time for (time,) in self._execute("select execution_time from {runs} order by 1").fetchall()]

    def restore(self) -> str:
        """Restore the table's state before this run; return 'keep' if nothing was to do, else 'rebuild'."""
        if not any(time >= self._params.at for time in self.recorded()):
            return "keep"
        self._execute("delete from {history} where {execution_time} >= {at}")
        self._execute("delete from {runs} where execution_time >= {at}")
        self._execute("delete from {target}")
        self._execute(
            "insert into {target} ({columns}) select {columns} from ({latest}) as latest where not {is_deleted}",
            latest=self._latest("select * from {history}", [_AT, *self._params.sequence]),
        )
        return "rebuild"

    def merge(self) -> dict[str, int]:
        """Copy the file into the history, merge it into the table and return the numbers of rows.

        Raises:
            NotReady: there is no file.
            DataRefused: a line, a key or a NULL doesn't fit.
        """
        read = copy_csv(
            self._connection, self._params.source, _STAGED, self._params.delimiter, stays=self._params.target
        )
        self._require_keys()
        if self._params.is_deleted:
            self._execute("update {staged} set {deleted} = false where {deleted} is null")
        self._execute(
            "insert into {history} ({columns}, {is_deleted}, {execution_time}) "
            "select {columns}, {deleted}, {at} from {staged}"
        )
        merged = self._execute(
            "merge into {target} as t using ({latest}) as s on {same} "
            "when matched and s.{is_deleted} then delete "
            "when matched then update set {updates} "
            "when not matched and not s.{is_deleted} then insert ({columns}) values ({values})",
            latest=self._latest(
                "select {columns}, {deleted} as {is_deleted} from {staged}", self._params.sequence
            ),
            same=sql.SQL(" and ").join(_equal("t", "s", name) for name in self._params.key),
            updates=sql.SQL(", ").join(
                sql.SQL("{} = {}").format(sql.Identifier(name), sql.Identifier("s", name))
                for name in self._columns
            ),
            values=listed(self._columns, "s"),
        ).rowcount
        self._execute(
            "insert into {runs} (execution_time, rows_read) values ({at}, {read})", read=sql.Literal(read)
        )
        return {"rows": read, "changed": merged}

    def _require_keys(self) -> None:
        """Refuse rows with NULL in the key: they match no row of the table, so each run would add them again."""
        nulls = sql.SQL(" or ").join(
            sql.SQL("{} is null").format(sql.Identifier(name)) for name in self._params.key
        )
        (count,) = self._execute("select count(*) from {staged} where {nulls}", nulls=nulls).fetchone() or (
            0,
        )
        if count:
            raise DataRefused(
                f"{self._params.source} was not merged: {count} rows have a NULL in the key "
                f"{', '.join(self._params.key)}; {self._params.target} stays as it is"
            )

    def _make_tables(self) -> None:
        companions = {
            f"{self._params.target}{suffix}": self._params.table(suffix) for suffix in ("_history", "_runs")
        }
        absent = [name for name, table in companions.items() if not exists(self._connection, table)]
        if len(absent) == 1:
            (there,) = companions.keys() - set(absent)
            raise DataRefused(
                f"{there} exists without {absent[0]}, so the runs can't be replayed; restore {absent[0]}, or drop "
                f"{there} to begin with new ones"
            )
        if absent:
            # Columns come from the target: a second list would drift. A deletion may have only its key.
            self._execute("create table {history} (like {target}, {is_deleted} boolean not null, "
                          "{execution_time} timestamptz not null)")  # fmt: skip
            self._execute("create index on {history} ({execution_time})")
            for name in self._columns:
                if name not in self._params.key:
                    self._execute(
                        "alter table {history} alter {name} drop not null", name=sql.Identifier(name)
                    )
            self._execute(
                "create table {runs} (execution_time timestamptz primary key, rows_read bigint not null)"
            )
        history = columns(self._connection, self._params.table("_history"))
        if missing := [name for name in (_DELETED, _AT) if name not in dict(history)]:
            raise DataRefused(
                f"{self._params.target}_history has no column {' and no column '.join(missing)}: it is no history, or "
                "one of an earlier version, which named them is_deleted and execution_time; rename these two columns "
                f"in {self._params.target}_history and run again"
            )
        kept = [column for column in history if column[0] not in (_DELETED, _AT)]
        now = columns(self._connection, self._params.table())
        if kept != now:  # types too: a value of a wider history would be rounded for the table
            raise DataRefused(
                f"{self._params.target} has the columns {_described(now)} now, its history has "
                f"{_described(kept)}; alter {self._params.target}_history in the same way as the table"
            )
        self._execute("create temporary table {staged} (like {history}) on commit drop")
        for name in (_DELETED, _AT):
            self._execute("alter table {staged} drop {name}", name=sql.Identifier(name))
        if self._params.is_deleted:
            self._execute("alter table {staged} add {deleted} boolean")

    def _latest(self, rows: str, order: Sequence[str]) -> sql.Composed:
        """Return the query for each key's newest row; ties are broken by all columns, and a deletion wins."""
        descending = [
            sql.SQL("{} desc nulls last").format(sql.Identifier(name))
            for name in (*order, _DELETED, *self._columns)
        ]
        query = f"select distinct on ({{key}}) * from ({rows}) as rows order by {{key}}, {{descending}}"
        return sql.SQL(query).format(**self._names, descending=sql.SQL(", ").join(descending))

    def _execute(self, statement: str, **names: sql.Composable) -> psycopg.Cursor[Any]:
        """Run a statement with the names of the run's tables and return its cursor."""
        return self._connection.execute(sql.SQL(statement).format(**self._names, **names))


def _described(found: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {type_}" for name, type_ in found)


def _equal(left: str, right: str, name: str) -> sql.Composed:
    return sql.SQL("{} = {}").format(sql.Identifier(left, name), sql.Identifier(right, name))


def run(params: Parameters, connect: Callable[[], Connection] | None = None) -> dict[str, Any]:
    """Do the run in one transaction and return the report.

    Raises:
        NotReady: the run before is not recorded, or there is no file or no table.
        DataRefused: the file doesn't fit.
        JobFailed: PostgreSQL went away or can't be reached.
    """
    try:
        with (
            reaching_postgres(),
            (connect or connect_by_environment)() as connection,
            connection.transaction(),
        ):
            one = Run(connection, params)
            recorded = one.recorded()
            earlier = [time for time in recorded if time < params.at]
            if earlier and params.previous is not None and params.previous != earlier[-1]:
                raise NotReady(
                    f"the newest run before {params.execution_time} is that of {earlier[-1]:%FT%T}, "
                    f"not of {params.previous:%FT%T}"
                )
            return {
                "target": params.target,
                "execution_time": f"{params.at:%FT%T}",
                "base": one.restore(),
                **one.merge(),
                "to_replay": [f"{time:%FT%T}" for time in recorded if time > params.at],
            }
    except psycopg.IntegrityError as failure:
        raise DataRefused(
            f"{params.source} was not merged: {failure.diag.message_primary}; {params.target} stays as it is"
        ) from None


if __name__ == "__main__":
    run_program(Parameters, run)
