"""A PostgreSQL server on this machine with logical replication and password authentication, on a free loopback port.

    with running_postgres(folder) as postgres:
        shop = postgres.create_database("shop")
        with shop.connect() as connection:
            connection.execute("create table users (id bigint primary key)")

The binaries come with the pip package ``pgserver``. This module starts the server itself, because the package's own
server listens on no port and asks for no password.

PostgreSQL refuses to run as root, so root's server runs as a separate system user. If that user can't enter the folder,
the data is stored below /var/tmp, with a link to it in the folder; no folder's mode is changed.
"""

from __future__ import annotations

import contextlib
import hashlib
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

from services.processes import HOST, Process, ServiceFailed, free_port, running, write_private

SYSTEM_USER = "pgserver"  # PostgreSQL refuses to run as root
HOMES = Path("/var/tmp/lakehouse-postgres")
"""Folder, owned by root, for data that the system user couldn't reach elsewhere."""
CONNECT_SECONDS = 10

_SETTINGS = {
    "wal_level": "logical",
    "max_replication_slots": "40",
    "max_wal_senders": "40",
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    # Committed data survives a crash of the server, because the system has it, but not a crash of the machine.
    "fsync": "off",
    "shared_buffers": "32MB",
    "log_min_messages": "warning",
}


@dataclass(frozen=True)
class Database:
    """The address and the user of one database."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    database: str

    @property
    def jdbc_url(self) -> str:
        """The URL for Spark's JDBC source, without user and password."""
        return f"jdbc:postgresql://{self.host}:{self.port}/{self.database}"

    def dsn(self) -> str:
        """Return the connection string for psycopg; it holds the password."""
        return make_conninfo(
            host=self.host, port=self.port, user=self.user, password=self.password, dbname=self.database
        )

    def connect(self, *, autocommit: bool = True) -> psycopg.Connection[Any]:
        """Return a new connection.

        Raises:
            ServiceFailed: the database can't be reached; the sentence contains no password.
        """
        try:
            return psycopg.connect(self.dsn(), autocommit=autocommit, connect_timeout=CONNECT_SECONDS)
        except psycopg.OperationalError as failure:
            place = f"database '{self.database}' at {self.host}:{self.port} as user '{self.user}'"
            why = str(failure).splitlines()[0].rpartition("failed: ")[2].removeprefix("FATAL:").strip()
            raise ServiceFailed(f"can't connect to {place}: {why}") from None

    def execute(self, *statements: str) -> None:
        """Run statements, each in its own transaction."""
        with self.connect() as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query, which runs in its own transaction."""
        with self.connect() as connection:
            return connection.execute(query.encode()).fetchall()

    def environment(self, password_file: Path) -> dict[str, str]:
        """Return the environment variables of libpq, psql and psycopg; the password is in a file of mode 600.

        Args:
            password_file: file to write the password to, in libpq's format.
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
    """A server, addressed by its first database; it keeps port and data after a stop or a kill."""

    process: Process = field(repr=False)

    def start(self) -> None:
        """Start the server and wait until it accepts connections, after a crash including recovery."""
        self.process.start()

    def stop(self) -> None:
        """Shut the server down; open connections are closed."""
        self.process.stop()

    def restart(self) -> None:
        """Stop the server and start it again."""
        self.stop()
        self.start()

    def kill(self) -> None:
        """End the server and its backends as a crash would."""
        self.process.kill()

    def create_database(self, name: str) -> Database:
        """Create an empty database and return its address.

        Raises:
            ServiceFailed: the database exists.
        """
        with self.connect() as connection:
            try:
                connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
            except psycopg.errors.DuplicateDatabase:
                raise ServiceFailed(f"database '{name}' exists already") from None
        return self._database(name)

    def ensure_database(self, name: str) -> Database:
        """Return the address of a database, which is created if it doesn't exist."""
        with self.connect() as connection:
            found = connection.execute("select 1 from pg_database where datname = %s", [name]).fetchone()
        return self._database(name) if found else self.create_database(name)

    def _database(self, name: str) -> Database:
        return Database(self.host, self.port, self.user, self.password, name)


@contextlib.contextmanager
def running_postgres(folder: Path, port: int | None = None) -> Iterator[Postgres]:
    """Run a server until the block ends; it has the data and the password of an earlier run in ``folder``.

    Args:
        folder: folder for data and log; for root, ``data`` in it is a link if the system user can't enter the folder.
        port: loopback port; by default a free one.

    Raises:
        ServiceFailed: the server did not start.
    """
    with running(_server(folder.absolute(), port or free_port())) as postgres:
        yield postgres


def _server(folder: Path, port: int) -> Postgres:
    folder.mkdir(parents=True, exist_ok=True)
    data, password_file = _data_folder(folder), folder / "password"
    if not (data / "PG_VERSION").exists():
        shutil.rmtree(data, ignore_errors=True)  # of an interrupted start
        write_private(password_file, secrets.token_urlsafe(24))
        _make_data_folder(data, password_file.read_text(encoding="utf-8"))
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


def _make_data_folder(data: Path, password: str) -> None:
    user = _system_user()
    staging, password_file = data.with_name("data.new"), data.with_name("initdb.password")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(mode=0o700)
    write_private(password_file, password)
    if user is not None:
        for path in (staging, password_file):
            shutil.chown(path, user, user)
    command = [str(_binaries() / "initdb"), "--pgdata", str(staging), "--username=postgres", "--encoding=UTF8",
               "--locale=C", "--auth=scram-sha-256", f"--pwfile={password_file}", "--no-sync"]  # fmt: skip
    try:
        done = subprocess.run(command, user=user, group=user, extra_groups=[] if user else None, cwd=staging,
                              capture_output=True, text=True, check=False)  # fmt: skip
    finally:
        password_file.unlink()
    if done.returncode != 0:
        raise ServiceFailed(f"PostgreSQL's data folder was not made: {done.stderr.strip()[-300:]}")
    with (staging / "postgresql.conf").open("a", encoding="utf-8") as file:
        file.writelines(f"{name} = '{value}'\n" for name, value in _SETTINGS.items())
    staging.rename(data)


def _binaries() -> Path:
    """Return the folder of PostgreSQL's programs, without importing the package, which would start its own server."""
    package = importlib.util.find_spec("pgserver")
    if package is None or package.origin is None:
        raise ServiceFailed("the package pgserver is not installed: run `make setup`")
    installed = Path(package.origin).parent / "pginstall"
    programs = installed / "bin"
    if _system_user() is None or _others_may_enter(programs):
        return programs
    changed = (programs / "postgres").stat().st_mtime_ns
    copy = _homes() / f"programs-{_digest(f'{installed} {changed}')}"
    if not copy.exists():
        staging = copy.with_name(f"{copy.name}.{secrets.token_hex(4)}")
        shutil.copytree(installed, staging / "pgserver" / "pginstall", symlinks=True)
        libraries = installed.parent.with_name("pgserver.libs")  # the programs look there
        if libraries.exists():
            shutil.copytree(libraries, staging / libraries.name, symlinks=True)
        for path in (staging, *staging.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
        for path in (staging / "pgserver" / "pginstall" / "bin").iterdir():
            path.chmod(0o755)
        try:
            staging.rename(copy)
        except OSError:  # another process was faster
            shutil.rmtree(staging)
    return copy / "pgserver" / "pginstall" / "bin"


def _system_user() -> str | None:
    """Return the server's system user, created if it doesn't exist, or None for the current user."""
    if os.geteuid() != 0:
        return None
    try:
        pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        subprocess.run(["useradd", "--system", SYSTEM_USER], check=True, capture_output=True)
    return SYSTEM_USER


def _others_may_enter(folder: Path) -> bool:
    """Return whether any user may enter a folder, by its mode and the modes of its parents."""
    return all(path.stat().st_mode & 0o001 for path in (folder, *folder.parents))


def _data_folder(folder: Path) -> Path:
    """Return the folder of a server's data: in the given folder, or in a home that the server's user may enter."""
    data = folder / "data"
    if _system_user() is None or (_others_may_enter(folder) and not data.is_symlink()):
        return data
    home = _homes() / _digest(str(folder))
    _remove_homes_of_folders_that_are_gone()
    is_of_an_earlier_version = data.is_dir() and not data.is_symlink()
    if is_of_an_earlier_version:
        data = data.rename(folder / "data.old")
    if not (folder / "data").is_symlink():
        (folder / "data").symlink_to(home / "data")  # first: a home without a link is removed by others
    home.mkdir(mode=0o711, exist_ok=True)
    (home / "folder").write_text(str(folder), encoding="utf-8")
    if is_of_an_earlier_version:
        shutil.rmtree(home / "data", ignore_errors=True)
        shutil.move(data, home / "data")
        for path in (home / "data", *(home / "data").rglob("*")):
            shutil.chown(path, SYSTEM_USER, SYSTEM_USER)
    return home / "data"


def _homes() -> Path:
    """Return the folder of homes, in which only root may write.

    Raises:
        ServiceFailed: the folder belongs to another user.
    """
    HOMES.mkdir(mode=0o711, exist_ok=True)
    if HOMES.is_symlink() or HOMES.stat().st_uid != os.geteuid():
        raise ServiceFailed(f"{HOMES} doesn't belong to root: remove it, and run again")
    HOMES.chmod(0o711)
    return HOMES


def _remove_homes_of_folders_that_are_gone() -> None:
    for note in HOMES.glob("*/folder"):
        with contextlib.suppress(FileNotFoundError):  # another start removes it too
            link = Path(note.read_text(encoding="utf-8")) / "data"
            if not link.is_symlink() or link.readlink() != note.with_name("data"):
                shutil.rmtree(note.parent)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
