"""PostgreSQL as a source: access without a password in the parameters, and one snapshot for all connections of a read.

Each connection of a split read would see the database as of its own first query, and a row that moves between two
parts during the read would be read twice or never. Therefore the driver holds one transaction open and exports its
snapshot, and each part of each read uses this snapshot. While a load runs, PostgreSQL keeps the dead rows that the
snapshot can see. A pooler that shares connections between transactions (PgBouncer's transaction mode) can't be used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import DataRefused, JobFailed, WrongUse, given
from python_jobs.shared.core.intervals import Interval
from python_jobs.shared.spark.job import RECORD_REFUSED, unreadable_file
from python_jobs.shared.spark.jvm import jvm
from python_jobs.shared.spark.sql_text import named_column

FETCH_ROWS = 10_000

_SCHEME = "jdbc:postgresql://"
_READ_ONLY = "set transaction isolation level repeatable read, read only"


@dataclass(frozen=True)
class PostgresAccess:
    """The URL and the user of a database, and the place of the password, which is read when a connection needs it."""

    url: str
    """jdbc:postgresql://host:port/database, with the driver's settings such as ?sslmode=verify-full."""
    user: str
    """Database user."""
    password_env: str | None = None
    """Environment variable that holds the password."""
    password_file: str | None = None
    """File that holds the password."""

    def __post_init__(self) -> None:
        if not self.url.startswith(_SCHEME):
            raise WrongUse(f"the URL of a PostgreSQL database begins with {_SCHEME}")
        if re.search(r"[?&](password|user|sslpassword)=|://[^/?]*@", self.url):
            raise WrongUse("the URL must not hold user or password; name the user, and where the password is")
        if (self.password_env is None) == (self.password_file is None):
            raise WrongUse("pass either password_env or password_file: where the password is, not what it is")

    @property
    def place(self) -> str:
        """The URL of the database without the driver's settings."""
        return self.url.removeprefix("jdbc:").split("?")[0]

    def password(self) -> str:
        """Return the password from its variable or file.

        Raises:
            WrongUse: the variable or the file doesn't exist.
        """
        if self.password_env is not None:
            if self.password_env not in os.environ:
                raise WrongUse(f"there is no environment variable {self.password_env} with the password")
            return os.environ[self.password_env]
        file = given(self.password_file, "password_file or password_env")
        try:
            return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as failure:
            raise WrongUse(f"the password file {self.password_file}: {failure.strerror}") from None


@dataclass(frozen=True, kw_only=True)
class PostgresParameters:
    """Parameters of a run that may use a PostgreSQL database."""

    jdbc_url: str | None = None
    """PostgreSQL database: jdbc:postgresql://host:port/database, ?sslmode=… and the like allowed."""
    user: str | None = None
    """Database user."""
    password_env: str | None = None
    """Environment variable that holds the database password."""
    password_file: str | None = None
    """File that holds the database password."""

    def __post_init__(self) -> None:
        if self.jdbc_url is None and (self.user or self.password_env or self.password_file):
            raise WrongUse("user, password_env and password_file belong to jdbc_url")
        _ = self.postgres  # refuses what is no access

    @property
    def postgres(self) -> PostgresAccess | None:
        """The access to the database, if the run has one."""
        if self.jdbc_url is None:
            return None
        if not self.user:
            raise WrongUse("jdbc_url needs user, and password_env or password_file")
        return PostgresAccess(self.jdbc_url, self.user, self.password_env, self.password_file)


@dataclass(frozen=True)
class Snapshot:
    """The database as of one moment, until the block of :func:`one_snapshot` ends."""

    spark: SparkSession
    access: PostgresAccess
    id: str
    """The snapshot's id, as returned by pg_export_snapshot()."""
    connection: Any
    """The java.sql.Connection that holds the snapshot."""

    def read(self, table: str, conditions: Sequence[str] = (), numerics_as_text: bool = False) -> DataFrame:
        """Return the rows of a table, a view or ``(query) as name``.

        Args:
            table: table, view or query, as in SQL's from clause.
            conditions: where clauses, one connection each; a row that meets two is returned twice. Default: all
                rows, over one connection.
            numerics_as_text: whether ``numeric`` columns that no decimal of Spark holds for certain (no precision,
                or more than 38 digits) are texts with all their digits. Default: decimal(38,18).

        ``timestamp`` columns become timestamp_ntz: Spark's default would read them as the JVM's local time. ``time``
        columns become texts. Evaluating a row fails (``RECORD_REFUSED``) where the driver would change a value:
        infinity, a year outside of 1 to 9999, NaN, a decimal that would be rounded, an array of arrays.
        """
        adopt = [_READ_ONLY, f"set transaction snapshot '{self.id}'", "set local time zone 'UTC'"]
        properties = {
            "user": self.access.user,
            "password": self.access.password(),
            "driver": "org.postgresql.Driver",
            # A value above 0 also turns autocommit off, so that adopting and reading are one transaction.
            "fetchsize": str(FETCH_ROWS),
            "sessionInitStatement": "; ".join(adopt),
            "preferTimestampNTZ": "true",
            # Spark would push down times without their zone; the caller passes its own conditions.
            "pushDownPredicate": "false",
        }
        columns = self._columns(table, numerics_as_text)
        extra = [f"{sql} as {quote(alias)}" for column in columns for alias, sql in column.selected.items()]
        read = (
            f"(select {', '.join(['*', *extra])} from {table}) as lakehouse_patterns_read" if extra else table
        )
        rows = self.spark.read.jdbc(
            self.access.url, read, predicates=list(conditions) or ["true"], properties=properties
        )
        return rows.select(*(column.checked() for column in columns))

    def _columns(self, table: str, numerics_as_text: bool) -> list[_Column]:
        """Return the columns of a table, a view or a query."""
        result = self.connection.createStatement().executeQuery(f"select * from {table} where false")
        of = result.getMetaData()
        return [
            _Column(
                i,
                of.getColumnLabel(i),
                of.getColumnTypeName(i),
                of.getPrecision(i),
                of.getScale(i),
                numerics_as_text,
            )
            for i in range(1, of.getColumnCount() + 1)
        ]


@dataclass(frozen=True)
class _Column:
    """A column of PostgreSQL, and the way to read it without loss."""

    position: int
    name: str
    type_name: str
    """Type as PostgreSQL names it; that of an array begins with an underscore."""
    precision: int
    scale: int
    numeric_as_text: bool

    @property
    def _element(self) -> str:
        return self.type_name.removeprefix("_")

    @property
    def _is_array(self) -> bool:
        return self.type_name.startswith("_")

    @property
    def _is_exact_numeric(self) -> bool:
        return 0 < self.precision <= 38 and 0 <= self.scale <= self.precision

    @property
    def _is_text(self) -> bool:
        is_long = self._element == "numeric" and self.numeric_as_text and not self._is_exact_numeric
        return is_long or self._element in ("time", "timetz")

    @property
    def _condition(self) -> str | None:
        """The condition, on ``{}``, under which the driver and Spark don't change a value; None: they never do."""
        if self._is_text:
            return None
        if self._element == "numeric":
            return "{0} <> 'NaN'" if self._is_exact_numeric else "abs({0}) < 1e20 and {0} = round({0}, 18)"
        if self._element in ("date", "timestamp", "timestamptz"):
            return "{0} >= '0001-01-01' and {0} < '10000-01-01'"  # infinity is outside
        return None

    @property
    def selected(self) -> dict[str, str]:
        """The expressions that are read in place of the column, by alias; none: the column itself is read."""
        column, condition = quote(self.name), self._condition
        if condition is not None:
            condition = condition.format("element" if self._is_array else column)
        if self._is_array:
            flat = f"coalesce(array_ndims({column}), 1) = 1"
            every = f"not exists (select from unnest({column}) as elements(element) where not ({condition}))"
            condition = flat if condition is None else f"{flat} and {every}"
        type_ = "text" if self._is_text else None
        if self._element == "numeric" and self._is_exact_numeric:
            type_ = f"numeric({self.precision},{self.scale})"  # a case has no precision
        cast = f"::{type_}{'[]' if self._is_array else ''}" if type_ else ""
        if condition is None:
            return {self._value: f"{column}{cast}"} if cast else {}
        return {
            self._value: f"(case when {condition} then {column} end){cast}",
            self._refused: f"case when not ({condition}) then left({column}::text, 100) end",
        }

    @property
    def _value(self) -> str:
        return f"lakehouse_patterns_value_{self.position}"

    @property
    def _refused(self) -> str:
        return f"lakehouse_patterns_refused_{self.position}"

    def checked(self) -> Column:
        """Return the column of what was read; evaluating a value that is refused fails."""
        selected = self.selected
        value = named_column(self._value if selected else self.name)
        if self._refused not in selected:
            return value.alias(self.name)
        message = F.concat(
            F.lit(f"{RECORD_REFUSED}column {self.name} holds "),
            F.col(self._refused),
            F.lit(
                f", which Spark's type for {self._element} can't hold; leave the row out, or round the value or "
                "cast it to text in a query: '(select ...) as name'"
            ),
        )
        return (
            F.when(F.col(self._refused).isNotNull(), F.raise_error(message)).otherwise(value).alias(self.name)
        )


@contextmanager
def one_snapshot(spark: SparkSession, access: PostgresAccess) -> Iterator[Snapshot]:
    """Hold one snapshot of the database for every read in the block.

    Raises:
        WrongUse: the password's variable or file doesn't exist.
        DataRefused: a value that is read can't be held without a change.
        JobFailed: PostgreSQL can't be reached, refuses, or goes away; one sentence, without the password.
    """
    connection = _connect(spark, access)
    try:
        connection.setAutoCommit(False)
        statement = connection.createStatement()
        statement.execute(f"{_READ_ONLY}; set local idle_in_transaction_session_timeout = 0")
        result = statement.executeQuery("select pg_export_snapshot()")
        result.next()
        yield Snapshot(spark, access, str(result.getString(1)), connection)
    except (PySparkException, Py4JJavaError) as failure:
        if RECORD_REFUSED in str(failure):
            raise DataRefused(f"{unreadable_file(failure)}; nothing was loaded") from None
        said = _server_message(failure)
        if said is None:
            raise
        raise JobFailed(f"PostgreSQL at {access.place} ended the read: {said}; run again") from None
    finally:
        with suppress(Py4JError):  # the server may be gone
            connection.close()


def time_slices(column: str, window: Interval, parts: int) -> list[str]:
    """Return conditions that split the window into ``parts`` of equal length; an index on the column serves them."""
    bounds = [window.start + (window.end - window.start) * part / parts for part in range(parts)]
    quoted = quote(column)
    return [
        f"{quoted} >= timestamptz '{start:%Y-%m-%d %H:%M:%S.%f}+00' "
        f"and {quoted} < timestamptz '{end:%Y-%m-%d %H:%M:%S.%f}+00'"
        for start, end in zip(bounds, [*bounds[1:], window.end], strict=True)
    ]


def quote(name: str) -> str:
    """Return a name as a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def _connect(spark: SparkSession, access: PostgresAccess) -> Any:
    """Return a java.sql.Connection of the driver that Spark uses."""
    properties = jvm(spark).java.util.Properties()
    properties.setProperty("user", access.user)
    properties.setProperty("password", access.password())
    try:
        return jvm(spark).org.postgresql.Driver().connect(access.url, properties)
    except Py4JJavaError as failure:
        said = _server_message(failure)
        raise JobFailed(f"can't connect to {access.place} as {access.user}: {said}") from None


def _server_message(failure: Exception) -> str | None:
    """Return the message of PostgreSQL or its driver, or None if the failure is not theirs."""
    found = re.search(r"org\.postgresql\.util\.PSQLException: (.+)", str(failure))
    return found[1].strip().rstrip(".") if found else None
