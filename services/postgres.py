"""A PostgreSQL server on this machine with logical replication and password authentication, on a free loopback port.

    with running_postgres(folder) as postgres:
        shop = postgres.create_database("shop")
        with shop.connect() as connection:
            connection.execute("create table users (id bigint primary key)")

The binaries come with the pip package ``pgserver``; the server is started by our own hand, because that package's
listens on no port and asks for no password.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from services.processes import HOST, Process, ServiceFailed, free_port, write_private

SYSTEM_USER = "pgserver"  # PostgreSQL refuses to run as root
CONNECT_SECONDS = 10

_SETTINGS = {
    "wal_level": "logical",
    "max_replication_slots": "40",
    "max_wal_senders": "40",
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    # What was committed survives the server's death, as the system still has it; not the machine's.
    "fsync": "off",
    "shared_buffers": "32MB",
    "log_min_messages": "warning",
}


@dataclass(frozen=True)
class Database:
    """Where one database is reached, and as whom."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    database: str

    @property
    def jdbc_url(self) -> str:
        """URL for Spark's JDBC source; user and password go separately."""
        return f"jdbc:postgresql://{self.host}:{self.port}/{self.database}"

    def dsn(self) -> str:
        """Return the connection string for psycopg; it holds the password."""
        return make_conninfo(
            host=self.host, port=self.port, user=self.user, password=self.password, dbname=self.database
        )

    def connect(self, *, autocommit: bool = True) -> psycopg.Connection[Any]:
        """Return a new connection.

        Raises:
            ServiceFailed: there is none to be had; the sentence names no password.
        """
        try:
            return psycopg.connect(self.dsn(), autocommit=autocommit, connect_timeout=CONNECT_SECONDS)
        except psycopg.OperationalError as failure:
            place = f"database '{self.database}' at {self.host}:{self.port} as user '{self.user}'"
            why = str(failure).splitlines()[0].rpartition("failed: ")[2].removeprefix("FATAL:").strip()
            raise ServiceFailed(f"can't connect to {place}: {why}") from None

    def execute(self, *statements: str) -> None:
        """Run statements, each in a transaction of its own."""
        with self.connect() as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def environment(self, password_file: Path) -> dict[str, str]:
        """Return the variables that libpq, psql and psycopg read; the password is in a file of mode 600.

        Args:
            password_file: written here, in libpq's format.
        """
        line = ":".join(
            str(part).replace("\\", "\\\\").replace(":", "\\:")
            for part in (self.host, self.port, "*", self.user, self.password)
        )
        write_private(password_file, line + "\n")
        return {
            "PGHOST": self.host,
            "PGPORT": str(self.port),
            "PGUSER": self.user,
            "PGDATABASE": self.database,
            "PGPASSFILE": str(password_file),
        }


@dataclass(frozen=True)
class Postgres(Database):
    """A server, seen through its first database; it keeps port and data when it is stopped or killed."""

    process: Process = field(repr=False)

    def start(self) -> None:
        """Start the server and wait until it takes connections; after a crash that includes recovery."""
        _let_the_server_in(self.process.log_path.parent)
        self.process.start()

    def stop(self) -> None:
        """Shut the server down; open connections are closed."""
        self.process.stop()

    def restart(self) -> None:
        """Stop and start."""
        self.stop()
        self.start()

    def kill(self) -> None:
        """End the server and its backends as a crash would."""
        self.process.kill()

    def create_database(self, name: str) -> Database:
        """Create an empty database and return where it is reached.

        Raises:
            ServiceFailed: there is one of that name.
        """
        with self.connect() as connection:
            try:
                connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
            except psycopg.errors.DuplicateDatabase:
                raise ServiceFailed(f"database '{name}' exists already") from None
        return self._database(name)

    def ensure_database(self, name: str) -> Database:
        """Return where a database is reached, and create it if it is absent."""
        with self.connect() as connection:
            found = connection.execute("select 1 from pg_database where datname = %s", [name]).fetchone()
        return self._database(name) if found else self.create_database(name)

    def _database(self, name: str) -> Database:
        return Database(self.host, self.port, self.user, self.password, name)


@contextlib.contextmanager
def running_postgres(folder: Path, port: int | None = None) -> Iterator[Postgres]:
    """Run a server until the block ends; data and password of an earlier run in ``folder`` are there again.

    Args:
        folder: data and log; run as root, its parents are opened to the server's own system user for reading.
        port: loopback port; None: a free one.

    Raises:
        ServiceFailed: it did not come up.
    """
    postgres = _server(folder.absolute(), port or free_port())
    postgres.start()
    try:
        yield postgres
    finally:
        postgres.stop()


def _server(folder: Path, port: int) -> Postgres:
    folder.mkdir(parents=True, exist_ok=True)
    _let_the_server_in(folder)
    data, password_file = folder / "data", folder / "password"
    if not (data / "PG_VERSION").exists():
        shutil.rmtree(data, ignore_errors=True)  # of an interrupted start
        write_private(password_file, secrets.token_urlsafe(24))
        _make_data_folder(data, password_file)
    process = Process(
        "postgres",
        [str(_binaries() / "postgres"), "-D", str(data), "-p", str(port)],
        folder,
        lambda log: "database system is ready to accept connections" in log,
        ports=(port,),
        user=_system_user(),
        stop_signal=signal.SIGINT,  # "fast": SIGTERM would wait for clients to leave
    )
    password = password_file.read_text(encoding="utf-8")
    return Postgres(HOST, port, "postgres", password, "postgres", process)


def _make_data_folder(data: Path, password_file: Path) -> None:
    user = _system_user()
    if user is not None:
        shutil.chown(password_file, user)
    aside = data.with_name("data.new")
    shutil.rmtree(aside, ignore_errors=True)
    command = [str(_binaries() / "initdb"), "--pgdata", str(aside), "--username=postgres", "--encoding=UTF8",
               "--locale=C", "--auth=scram-sha-256", f"--pwfile={password_file}", "--no-sync"]  # fmt: skip
    done = subprocess.run(command, user=user, group=user, extra_groups=[] if user else None, cwd=data.parent,
                          capture_output=True, text=True, check=False)  # fmt: skip
    if done.returncode != 0:
        raise ServiceFailed(f"PostgreSQL's data folder was not made: {done.stderr.strip()[-300:]}")
    with (aside / "postgresql.conf").open("a", encoding="utf-8") as file:
        file.writelines(f"{name} = '{value}'\n" for name, value in _SETTINGS.items())
    aside.rename(data)


def _binaries() -> Path:
    """Return the folder of PostgreSQL's programs; importing the package would start its own machinery."""
    package = importlib.util.find_spec("pgserver")
    if package is None or package.origin is None:
        raise ServiceFailed("the package pgserver is not installed: run `make setup`")
    return Path(package.origin).parent / "pginstall" / "bin"


def _system_user() -> str | None:
    """Return the user to run the server as, or None for our own."""
    return SYSTEM_USER if os.geteuid() == 0 else None


def _let_the_server_in(folder: Path) -> None:
    """As root: make the server's user, let it reach the binaries and its folder, and own the latter."""
    if _system_user() is None:
        return
    try:
        pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        subprocess.run(["useradd", "--system", SYSTEM_USER], check=True, capture_output=True)
    for parent in {*folder.parents, *_binaries().parents}:
        mode = parent.stat().st_mode
        if mode & 0o005 != 0o005:
            parent.chmod(mode | 0o005)
    shutil.chown(folder, SYSTEM_USER)
