"""Programs that run next to Spark, each in its own process group, which its handle starts, awaits and stops.

A program never outlives the program that started it: it gets SIGTERM when that program ends in any way.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which
from typing import Protocol, TypeVar

import psutil

HOST = "127.0.0.1"
READY_SECONDS = 90
STOP_SECONDS = 30
_POLL_SECONDS = 0.05

# Below the kernel's range for outgoing connections: a service that restarts finds its port free.
_PORTS = range(20_000, 32_768)


class ServiceFailed(Exception):
    """A service can't be used; the message is one sentence for the user and contains no secret."""


def free_port() -> int:
    """Return a loopback port on which no program listens at this moment."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        if not is_taken(port):
            return port


def is_taken(port: int) -> bool:
    """Return whether a loopback port can't be used by a new server."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
        return False


def listens(port: int) -> bool:
    """Return whether a server answers on a loopback port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


def write_private(path: Path, text: str) -> None:
    """Write a file that other users can't read at any moment."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(text, encoding="utf-8")


class Process:
    """One program with its log; it can be stopped, killed and started again with the same command."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        ready: Callable[[str], bool],
        *,
        ports: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        working_folder: Path | None = None,
    ) -> None:
        """Describe the program; :meth:`start` runs it.

        Args:
            name: name in messages and of the log, ``<folder>/<name>.log``.
            command: program and arguments, without secrets, because everybody on the machine can read them.
            folder: folder of the log, created if it doesn't exist.
            ready: function that returns whether the program is ready, from its log since the start.
            ports: loopback ports on which the program listens; they must be free.
            environment: variables added to this process' environment.
            user: system user to run as (needs root and setpriv); by default the current user.
            stop_signal: signal that asks the program to end.
            working_folder: working directory; by default the log's folder.
        """
        self.name = name
        self.log_path = folder / f"{name}.log"
        self._command = [*_guard(user), *command]
        self._folder = folder
        self._working_folder = working_folder or folder
        self._ready = ready
        self._ports = tuple(ports)
        self._environment = dict(environment or {})
        self._stop_signal = stop_signal
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the program was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the program and wait until it is ready; do nothing if it is running.

        Raises:
            ServiceFailed: a port is taken, the program ended, or it was not ready in time.
        """
        if self.is_running:
            return
        for port in self._ports:
            if is_taken(port):
                raise ServiceFailed(f"{self.name} can't start: port {port} is taken")
        self._folder.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            begin = log.tell()
            self._process = _SPAWNER.submit(self._spawn, log.fileno()).result()
        deadline = time.monotonic() + READY_SECONDS
        try:
            while True:
                was_running = self.is_running  # asked first, so that the last check reads the whole log
                if self._ready(self._logged_since(begin)):
                    break
                if not was_running or time.monotonic() > deadline:
                    state = "was not ready in time" if was_running else "ended while starting"
                    raise ServiceFailed(f"{self.name} {state}; see {self.log_path}")
                time.sleep(_POLL_SECONDS)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Ask the program to end and wait for it; kill its processes that are left."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, self._stop_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the program and all its child processes with SIGKILL, as a crash would."""
        if self._process is None:
            return
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            # Children may have their own groups, as PostgreSQL's have.
            family = psutil.Process(self._process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._process.wait()
        psutil.wait_procs(family)
        self._process = None

    def _spawn(self, log: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | self._environment,
            cwd=self._working_folder,
        )

    def _logged_since(self, begin: int) -> str:
        with self.log_path.open("rb") as log:
            log.seek(begin)
            return log.read().decode(errors="replace")


class Startable(Protocol):
    """A :class:`Process`, or what has one."""

    def start(self) -> None:
        """Start it and wait until it is ready."""

    def stop(self) -> None:
        """Stop it."""


Started = TypeVar("Started", bound=Startable)


@contextlib.contextmanager
def running(program: Started) -> Iterator[Started]:
    """Start a program, and stop it when the block ends; the block begins when the program is ready."""
    program.start()
    try:
        yield program
    finally:
        program.stop()


# The kernel signals a child when the *thread* that started it ends: this thread lives as long as the process.
_SPAWNER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")


def _guard(user: str | None) -> list[str]:
    """Return the command that changes to ``user`` and has the kernel end the program when ours ends."""
    setpriv = which("setpriv")
    if setpriv is None:
        if user is not None:
            raise ServiceFailed(f"running as user {user} needs the program setpriv (package util-linux)")
        return []
    identity = [f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
    return [setpriv, *identity, "--pdeathsig=TERM"]
