"""Circuit Breaker for Data Pipelines: a source with bad data isn't read for a while, then one slice probes the source.

The job runs the command that loads one slice (hour or day) of a source, any ``spark-submit`` or ``dbt`` call, and reads
its exit code: 0 is good; 1 (failed) and 3 (data refused by an audit) are failures; 2 (wrong use) and 4 (not ready yet)
say nothing about the source. dbt ends with 2 also when it loses its connection, so 2 of a dbt command is a failure.
Each hourly run is a separate process, so the circuit's file keeps the state
(:mod:`.circuit_breaker`). A failure is a failed *slice*, so one bad file that is retried ten times doesn't open the
circuit.

A slice is owed until the command has exited with 0. While the circuit is open, no command is started, the job ends with
exit code 4, nothing is published, and readers keep the last good tables. After ``--open_seconds`` the oldest owed slice
is the probe; if it is good, the circuit closes and the other slices follow in order, without a gap. Each source has a
separate circuit.

Guarantee: slices are loaded in order, and only ``--action skip`` gives up a slice; one run of a source at a time.
If a run dies after the command's end and before the end is recorded, the slice is loaded again: the command must be
idempotent.

Run (instead of the plain command)::

    python -m python_jobs.error_management.pipeline_circuit_breaker \
        --circuits lakehouse/circuits --source visits --slice 2024-03-01T10 \
        --command '[spark-submit, python_jobs/ingestion/incremental_loader.py, --source, landing/visits,
                    --target, lakehouse/bronze/bronze_visits, --from, "{from}", --to, "{to}"]'

Source: the guide's Circuit Breaker for Data Pipelines (chapter 10.3).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import filelock

from python_jobs.error_management.circuit_breaker import (
    BreakerPolicy,
    Circuit,
    CircuitBreaker,
    CircuitOpen,
    State,
)
from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.command_line import run_program
from python_jobs.shared.core.failures import (
    DataRefused,
    JobFailed,
    NotReady,
    WrongUse,
    given,
    require_at_least,
)
from python_jobs.shared.core.intervals import Interval, parse_time

_GOOD, _WRONG_USE, _REFUSED, _NOT_READY = 0, 2, 3, 4
_FORMATS = {"hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d"}
_DAY_OR_HOUR = {10: "day", 13: "hour"}


@dataclass(frozen=True)
class Parameters(ProcessingTimeParameters):
    """Load a slice of a source and the missed slices before it, unless the source's circuit is open."""

    circuits: str
    """Local folder of the circuits' files, shared by all runs."""
    source: str
    """Name of the source or of one partition of it, such as visits or visits-eu."""
    slice: str | None = None
    """Hour (2024-03-01T10) or day (2024-03-01) to load or to skip."""
    command: list[str] = dataclasses.field(default_factory=list)
    """Command for one slice; {slice}, {from} and {to} stand for it and its bounds."""
    action: Literal["run", "status", "reset", "skip"] = "run"
    """run: load; status: only report; reset: close the circuit; skip: give up an owed slice."""
    failed_slices: int = 3
    """Failed slices in a row that open the circuit."""
    failure_rate: float = 0.5
    """Share of failed slices in the window that opens the circuit (0.5 = 50 %)."""
    minimum_slices: int = 10
    """Number of slices in the window from which the share is checked."""
    window_seconds: float = 7 * 86400
    """Seconds for which an outcome is kept (default 7 days)."""
    open_seconds: float = 300
    """Seconds without reading the source before a probe."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Checked before the policy, whose fields have other names.
        require_at_least(1, failed_slices=self.failed_slices, minimum_slices=self.minimum_slices)
        self.policy()
        if self.action in ("run", "skip"):
            if self.slice is None:
                raise WrongUse(f"action {self.action} needs a slice")
            _interval(self.slice)
        if self.action == "run":
            if not self.command:
                raise WrongUse("action run needs a command")
            for name in re.findall(r"\{(.*?)\}", " ".join(self.command)):
                if name not in ("slice", "from", "to"):
                    raise WrongUse(f"the command names {{{name}}}; allowed are slice, from and to")

    def policy(self) -> BreakerPolicy:
        """Return the rules by which the circuit opens; its calls are slices."""
        return BreakerPolicy(
            failures_in_a_row=self.failed_slices,
            failure_rate=self.failure_rate,
            minimum_calls=self.minimum_slices,
            window_seconds=self.window_seconds,
            open_seconds=self.open_seconds,
        )


def execute(command: Sequence[str]) -> int:
    """Run a command and return its exit code; its output doesn't replace this job's report on standard output.

    Raises:
        WrongUse: there is no such program, or it can't be started.
    """
    try:
        return subprocess.call(command, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    except (OSError, ValueError) as failure:
        cause = getattr(failure, "strerror", None) or failure
        raise WrongUse(
            f"the command '{command[0]}' can't be started ({cause}); the circuit is as it was"
        ) from None


def run(params: Parameters, execute: Callable[[Sequence[str]], int] = execute) -> dict[str, Any]:
    """Run the action and return the circuit and the loaded slices.

    Args:
        params: Parameters of the job.
        execute: Function that runs a command and returns its exit code.

    Raises:
        NotReady: the circuit is open, another run of the source is running, or the command ended with exit code 4.
        DataRefused: the command refused the data of a slice.
        JobFailed: the command failed.
        WrongUse: the command ended with exit code 2 and is no dbt command, or it can't be started.
    """
    breaker = CircuitBreaker(
        params.source, params.circuits, params.policy(), clock=lambda: params.processing_time().timestamp()
    )
    done: list[str] = []
    if params.action == "run":
        _owe(breaker, given(params.slice, "slice"))
        done = _load(breaker, params, execute)
    elif params.action == "skip":
        _settle(breaker, given(params.slice, "slice"))
    elif params.action == "reset":
        breaker.reset()
    circuit = breaker.status()
    return {
        "source": params.source,
        "state": str(circuit.state),
        "done": done,
        "pending": list(circuit.pending),
        "openings": circuit.openings,
        "transitions": circuit.transitions,
        "reason": circuit.reason,
    }


def _load(breaker: CircuitBreaker, params: Parameters, execute: Callable[[Sequence[str]], int]) -> list[str]:
    """Run the command for each owed slice in order, as long as the circuit allows it; return the loaded slices."""
    lock = filelock.FileLock(Path(params.circuits) / f".{params.source}.run.lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise NotReady(
            f"another run of the source '{params.source}' is at work; slice {params.slice} waits for the next one"
        ) from None
    done: list[str] = []
    failed: dict[str, int] = {}
    try:
        for owed in breaker.status().pending:
            try:
                permit = breaker.admit()
            except CircuitOpen:
                if failed:
                    break  # the circuit has just opened: raise the slice's failure, not CircuitOpen
                raise
            command = _command(params.command, owed)
            try:
                code = execute(command)
            except BaseException:
                breaker.record(permit, None)
                raise
            if code == _NOT_READY or (code == _WRONG_USE and not _is_dbt(command)):
                breaker.record(permit, None)
                kind: type[JobFailed] = WrongUse if code == _WRONG_USE else NotReady
                raise kind(
                    f"the command of slice {owed} ended with exit code {code}; the circuit is as it was"
                )
            breaker.record(permit, code == _GOOD, f"slice {owed} ended with exit code {code}", owed)
            if code == _GOOD:
                _settle(breaker, owed)
                done.append(owed)
            else:
                failed[owed] = code
    finally:
        lock.release()
    if failed:
        state = breaker.status().state
        kind = DataRefused if set(failed.values()) == {_REFUSED} else JobFailed
        raise kind(
            f"of the source '{params.source}' the slices {', '.join(failed)} failed, {len(done)} were loaded; "
            f"the circuit is {'closed' if state is State.CLOSED else 'open'}"
        )
    return done


def _is_dbt(command: Sequence[str]) -> bool:
    """Return whether a command's program is dbt, as in ``dbt build``, ``uv run dbt`` or ``python -m dbt.cli.main``."""
    words = itertools.takewhile(lambda word: word == "-m" or not word.startswith("-"), command)
    return any(Path(word).name in ("dbt", "dbt.cli.main") for word in words)


def _owe(breaker: CircuitBreaker, owed: str) -> None:
    def add(circuit: Circuit) -> tuple[Circuit, None]:
        return dataclasses.replace(circuit, pending=tuple(sorted({*circuit.pending, owed}))), None

    breaker.file.change(add)


def _settle(breaker: CircuitBreaker, owed: str) -> None:
    def remove(circuit: Circuit) -> tuple[Circuit, None]:
        return dataclasses.replace(circuit, pending=tuple(s for s in circuit.pending if s != owed)), None

    breaker.file.change(remove)


def _interval(owed: str) -> tuple[Interval, str]:
    """Return a slice's bounds and its unit; a text of another length is refused, because slices are sorted as texts."""
    start = parse_time(owed)
    unit = _DAY_OR_HOUR.get(len(owed))
    if unit is None or f"{start:{_FORMATS[unit]}}" != owed:
        raise WrongUse(f"'{owed}' is no slice; use an hour (2024-03-01T10) or a day (2024-03-01)")
    (interval,) = Interval(start, start.replace(minute=1)).split(unit)
    return interval, unit


def _command(command: Sequence[str], owed: str) -> list[str]:
    interval, unit = _interval(owed)
    values = {
        "{slice}": owed,
        "{from}": f"{interval.start:{_FORMATS[unit]}}",
        "{to}": f"{interval.end:{_FORMATS[unit]}}",
    }
    return [re.sub(r"\{(slice|from|to)\}", lambda name: values[name[0]], part) for part in command]


if __name__ == "__main__":
    run_program(Parameters, run)
