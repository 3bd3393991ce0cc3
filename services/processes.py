"""Programs that run beside Spark: started in a process group of their own, awaited, stopped by their own handle.

A program never outlives the one that started it: it gets SIGTERM when that one dies, however it dies.
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

import psutil

HOST = "127.0.0.1"
READY_SECONDS = 90
STOP_SECONDS = 30
_POLL_SECONDS = 0.05

# Below the range that the kernel hands to outgoing connections: a service that comes back finds its port free.
_PORTS = range(20_000, 32_768)


class ServiceFailed(Exception):
    """A service can't be used; the message is one sentence for a person and names no secret."""


def free_port() -> int:
    """Return a loopback port that nothing listens on at this moment."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        if not is_taken(port):
            return port


def is_taken(port: int) -> bool:
    """Return whether a server on the loopback address could not have this port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
        return False


def listens(port: int) -> bool:
    """Return whether a server answers on this loopback port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


def write_private(path: Path, text: str) -> None:
    """Write a file that nobody else can read, at no moment."""
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
    ) -> None:
        """Describe the program; :meth:`start` runs it.

        Args:
            name: what it is called in messages; its log is ``<folder>/<name>.log``.
            command: program and arguments; no secrets, everybody on the machine can read them.
            folder: its working directory, made if absent.
            ready: whether it can be used, from what it has logged since it was started; called until it is.
            ports: loopback ports it listens on, which must be free.
            environment: added to this process' environment.
            user: run as this system user (needs root and setpriv).
            stop_signal: what asks it to end.
        """
        self.name = name
        self.log_path = folder / f"{name}.log"
        self._command = [*_guard(user), *command]
        self._folder = folder
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
        """Start the program and wait until it is ready; nothing happens if it runs.

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
                was_running = self.is_running  # asked first, so that the last look is at the whole log
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
        """Ask the program to end and wait for it; kill what is left of it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, self._stop_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the program with SIGKILL, and with it what it has started, as a crash would."""
        if self._process is None:
            return
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            # Children may have groups of their own, as PostgreSQL's have.
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
            cwd=self._folder,
        )

    def _logged_since(self, begin: int) -> str:
        with self.log_path.open("rb") as log:
            log.seek(begin)
            return log.read().decode(errors="replace")


@contextlib.contextmanager
def running_process(
    name: str,
    command: Sequence[str],
    folder: Path,
    ready: Callable[[str], bool],
    *,
    ports: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Process]:
    """Run a program until the block ends; enter the block when it is ready. Arguments as of :class:`Process`."""
    process = Process(name, command, folder, ready, ports=ports, environment=environment)
    with running(process):
        yield process


@contextlib.contextmanager
def running(process: Process) -> Iterator[None]:
    """Start ``process`` and stop it when the block ends."""
    process.start()
    try:
        yield
    finally:
        process.stop()


# The kernel signals a child when the *thread* that started it ends: this one lives as long as the program.
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
