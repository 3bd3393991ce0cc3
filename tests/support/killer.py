"""Kills a real process at an observable state of its output, usually a Delta table.

The process runs in its own group and gets SIGKILL, so that no part of it (driver, JVM) can clean up. The state is read
only from the table's folder, as a second process or the next run would find it. A caller that kills writers of other
outputs passes a way to observe their state (:class:`Observed`).
"""

import contextlib
import ctypes
import enum
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.support.session import process_environment

POLL_SECONDS = 0.003
LOG_ENTRY = re.compile(r"\d{20}\.json")
IN_OPEN, IN_ISDIR = 0x00000020, 0x40000000  # inotify(7)


class TableState(enum.Enum):
    """The progress of one Delta commit, compared with the folder before the process started."""

    NO_NEW_FILE = "no new file"
    DATA_WITHOUT_LOG = "data files without a log entry"
    LOG_WRITTEN = "log entry written"


class StateNotReachedError(AssertionError):
    """The process ended, or the time was up, before the table reached the wanted state."""


class ProcessEndedError(StateNotReachedError):
    """The process ended before the state was reached."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type["ProcessEndedError"], tuple[str, int]]:
        """Return how to pickle the error: by default an exception passes only its message to another process."""
        return type(self), (str(self), self.exit_code)


@dataclass(frozen=True)
class TableFiles:
    """The files of a Delta table's folder: non-empty data files and the log entries of its versions."""

    data: frozenset[str]
    log: frozenset[str]

    @classmethod
    def of(cls, table_path: Path) -> "TableFiles":
        log = {name for name in _names(table_path / "_delta_log") if LOG_ENTRY.fullmatch(name)}
        return cls(data=frozenset(_data_files(table_path)), log=frozenset(log))

    def state_since(self, before: "TableFiles") -> TableState:
        if self.log - before.log:
            return TableState.LOG_WRITTEN
        return TableState.DATA_WITHOUT_LOG if self.data - before.data else TableState.NO_NEW_FILE


class Observed(Protocol):
    """The output of a process, as seen from outside."""

    def files(self) -> TableFiles:
        """Return the names of the written and of the committed parts; a part keeps its name."""

    def was_opened(self, group: int) -> bool:
        """Return whether the group's processes have opened the output since the last call, or since it exists."""


def run_and_kill(
    argv: Sequence[str],
    table: str | Path | Observed,
    at: TableState,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    commits: int = 0,
) -> TableState:
    """Starts `argv`, kills its process group when the table reaches the state `at`, and returns the state found.

    `table` is the path of a Delta table, or another observed output. `NO_NEW_FILE` kills when the process opens the
    table's log for reading; if there is no table yet, as soon as its JVM runs. The other two states kill at the first
    new data file that has bytes, and at the first new log entry. The first `commits` commits of the process pass; the
    state is that of the commit after them. `env` is added to the environment of this process; `timeout` is in seconds.

    The returned state is read after every process of the group is dead: assert that it is the state `at`.
    Raises `StateNotReachedError` with the end of the process' output.
    """
    with contextlib.ExitStack() as stack:
        observed = (
            stack.enter_context(_observed_folder(Path(table))) if isinstance(table, str | Path) else table
        )
        before = observed.files()
        of_python = process_environment() if argv[0] == sys.executable else {}
        output = stack.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(
            argv,
            env={**os.environ, **of_python, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

        def reached() -> bool:
            nonlocal before, commits
            if commits:
                now = observed.files()
                passed = len(now.log - before.log)
                if passed:
                    # The next commit's data files may already exist; then only its log entry is new.
                    before, commits = now, max(commits - passed, 0)
                    observed.was_opened(process.pid)
                return False
            if at is TableState.NO_NEW_FILE:
                return observed.was_opened(process.pid)
            # A write that passed the state between two checks is killed at once, too: the caller sees its state.
            return observed.files().state_since(before) in (at, TableState.LOG_WRITTEN)

        deadline = time.monotonic() + timeout
        problem = None
        try:
            while not reached():
                if process.poll() is not None:
                    problem = f"the process ended with exit code {process.returncode}"
                elif time.monotonic() > deadline:
                    problem = f"{timeout} s were over"
                if problem:
                    break
                time.sleep(POLL_SECONDS)
        finally:
            kill_group(process)
        if problem:
            output.seek(0)
            tail = output.read().decode(errors="replace")[-3000:]
            message = f"{problem} before {table} came to the state '{at.value}':\n{tail}"
            if process.returncode >= 0:
                raise ProcessEndedError(message, process.returncode)
            raise StateNotReachedError(message)
        return observed.files().state_since(before)


@dataclass(frozen=True)
class _Folder:
    """A Delta table's folder, and whether a process reads its log."""

    path: Path
    log_was_opened: Callable[[], bool]

    def files(self) -> TableFiles:
        return TableFiles.of(self.path)

    def was_opened(self, group: int) -> bool:
        opened = self.log_was_opened()
        return opened if self.files().log else "java" in commands_of_group(group)


@contextlib.contextmanager
def _observed_folder(path: Path) -> Iterator[_Folder]:
    with _opened_files(path / "_delta_log") as log_was_opened:
        yield _Folder(path, log_was_opened)


def _data_files(folder: Path) -> set[str]:
    """Paths of the non-empty files under `folder`, without logs, checkpoints, checksums, temporary files."""
    found = set()
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith((".", "_")) and entry.name != "_change_data":
                continue
            if entry.is_dir():
                found |= _data_files(Path(entry.path))
            elif entry.stat().st_size > 0:
                found.add(entry.path)
    return found


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return [path.name for path in folder.iterdir()]
    return []


@contextlib.contextmanager
def _opened_files(folder: Path) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether a file in `folder` was opened since the last call, or since it exists."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    watched = False

    def look_at_folder() -> None:
        nonlocal watched
        if not watched and folder.is_dir():
            watched = libc.inotify_add_watch(watch, bytes(folder), IN_OPEN) >= 0
            if not watched:
                raise OSError(ctypes.get_errno(), f"cannot watch {folder}")

    look_at_folder()

    def was_opened() -> bool:
        look_at_folder()
        try:
            events = os.read(watch, 65536)
        except BlockingIOError:
            return False
        position = 0
        while position < len(
            events
        ):  # struct inotify_event: int wd; uint32 mask, cookie, len; char name[len]
            mask, _, length = (
                int.from_bytes(events[position + at : position + at + 4], "little") for at in (4, 8, 12)
            )
            if not mask & IN_ISDIR:
                return True
            position += 16 + length
        return False

    try:
        yield was_opened
    finally:
        os.close(watch)


def commands_of_group(group: int) -> set[str]:
    """Names of the group's living processes; a zombie is dead, because its parent may never collect it."""
    commands = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            head, _, tail = stat.read_text().rpartition(") ")
            state, _, process_group = tail.split()[:3]
            if int(process_group) == group and state not in "ZX":
                commands.add(head.partition("(")[2])
    return commands


def has_connection(process: int) -> bool:
    """Whether a process has a socket: a program's to its server, or that of Spark's driver to its JVM."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if str(descriptor.readlink()).startswith("socket:"):
                    return True
    return False


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Send SIGKILL to every process of the group and wait until all are dead."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while commands_of_group(process.pid):
        time.sleep(POLL_SECONDS)
