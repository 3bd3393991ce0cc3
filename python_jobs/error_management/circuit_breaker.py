"""Circuit Breaker: a dependency that keeps failing isn't called for a while, then one call probes whether it is back.

While the circuit is *closed*, calls pass and their outcomes are kept for a sliding window. If the last
``failures_in_a_row`` calls have failed, or a share of ``failure_rate`` of at least ``minimum_calls``, the circuit
*opens*: calls are rejected with :class:`CircuitOpen`, and the dependency isn't called. After ``open_seconds`` the
circuit is *half open*: exactly one caller may probe. A successful probe closes the circuit and clears the window; a
failed probe opens the circuit for the same time again.

The state is one JSON file for each circuit, changed under a lock: it outlives the process, and all processes of a
machine share it. Calls run outside of the lock. An error that is the caller's own fault (permanent by
:func:`python_jobs.shared.core.retry.classify`) says nothing about the dependency and is not counted.

In a Spark job guard calls on the driver: executors on other machines don't see the file.

Sources: the guide's Circuit Breaker (chapters 2 and 10.3); M. Nygard, *Release It!*; resilience4j, for counting a
rate over a window.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import filelock

from python_jobs.shared.core.failures import (
    JobFailed,
    NotReady,
    WrongUse,
    present,
    require_above_zero,
    require_at_least,
)
from python_jobs.shared.core.intervals import duration, from_micros, moved
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.core.retry import Failure, classify

Result = TypeVar("Result")

FORMAT_VERSION = 1
_LOCK_SECONDS = 30
_LONGEST_SECONDS = 100 * 365 * 86400
_NONE = type(None)
_LOG = logging.getLogger(__name__)


class CircuitOpen(NotReady):
    """The call was rejected, and the dependency wasn't called."""


class State(enum.StrEnum):
    """The state of a circuit, which decides on the next call."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True)
class BreakerPolicy:
    """The rules by which a circuit opens, and for how long."""

    failures_in_a_row: int = 5
    """Failures without a success between them that open the circuit."""
    failure_rate: float = 0.5
    """Share of failed calls that opens the circuit (0.5 = 50 %), in any order of failures and successes."""
    minimum_calls: int = 20
    """Number of calls in the window from which the share is checked."""
    window_seconds: float = 600
    """Seconds for which an outcome is kept."""
    open_seconds: float = 60
    """Seconds without calls before a probe; also the seconds after which an unanswered probe expires."""

    def __post_init__(self) -> None:
        require_at_least(1, failures_in_a_row=self.failures_in_a_row, minimum_calls=self.minimum_calls)
        if not 0 < self.failure_rate <= 1:
            raise WrongUse(f"failure_rate is {self.failure_rate}; it is a share above 0 and up to 1")
        require_above_zero(window_seconds=self.window_seconds, open_seconds=self.open_seconds)
        if self.open_seconds > _LONGEST_SECONDS:
            raise WrongUse(
                f"open_seconds must be {_LONGEST_SECONDS} (100 years) or less, got {self.open_seconds:g}"
            )


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call."""

    at: float
    """Seconds since 1970."""
    ok: bool
    subject: str | None = None
    """Subject of the call; a later outcome of the same subject replaces this one."""


@dataclass(frozen=True)
class Circuit:
    """The content of one circuit's file."""

    state: State = State.CLOSED
    changed_at: float | None = None
    """Time of the last change of the state."""
    retry_at: float | None = None
    """Open: time from which a probe is allowed. Half open: time when the probe expires. Closed: None."""
    reason: str | None = None
    """Reason of the last opening."""
    openings: int = 0
    """Number of changes from closed to open, which is the number of alerts."""
    transitions: int = 0
    """Number of changes of the state."""
    probe: str | None = None
    """Id of the running probe."""
    outcomes: tuple[Outcome, ...] = ()
    """Outcomes in the window, oldest first."""
    pending: tuple[str, ...] = ()
    """Slices of a guarded pipeline that are still owed, in order."""

    def to(self, state: State, now: float, **changes: Any) -> Circuit:
        """Return the circuit in another state."""
        return dataclasses.replace(
            self, **({"probe": None} | changes), state=state, changed_at=now, transitions=self.transitions + 1
        )


@dataclass(frozen=True)
class Permit:
    """Permission for one call."""

    probe: str | None = None
    """Id of the probe, None for a call of a closed circuit."""


def admit(circuit: Circuit, now: float, policy: BreakerPolicy) -> tuple[Circuit, Permit | None]:
    """Return the circuit after a request to call, and the permit; the permit is None if the call is rejected."""
    if circuit.state is State.CLOSED:
        return circuit, Permit()
    # If the clock was set back, no caller waits longer than open_seconds from now.
    retry_at = present(circuit.retry_at, "the time of the next probe of an open circuit")
    retry_at = min(retry_at, now + policy.open_seconds)
    if now < retry_at:
        return dataclasses.replace(circuit, retry_at=retry_at), None
    probe = str(uuid.uuid4())
    half_open = circuit.to(State.HALF_OPEN, now, probe=probe, retry_at=now + policy.open_seconds)
    return half_open, Permit(probe)


def record(
    circuit: Circuit,
    permit: Permit,
    ok: bool | None,
    now: float,
    policy: BreakerPolicy,
    reason: str = "",
    subject: str | None = None,
) -> Circuit:
    """Return the circuit after a call has ended; ``ok`` None means that the end says nothing about the dependency."""
    if circuit.state is State.CLOSED:
        if ok is None or permit.probe is not None:
            return circuit
        kept = [
            outcome
            for outcome in circuit.outcomes
            if abs(now - outcome.at) <= policy.window_seconds
            and (subject is None or outcome.subject != subject)
        ]
        circuit = dataclasses.replace(circuit, outcomes=(*kept, Outcome(now, ok, subject)))
        if not _must_open(circuit.outcomes, policy):
            return circuit
        return circuit.to(
            State.OPEN, now, retry_at=now + policy.open_seconds, reason=reason, openings=circuit.openings + 1
        )
    if permit.probe is None or permit.probe != circuit.probe:
        return circuit  # the call began before the circuit opened, or expired: other calls decide
    if ok:
        return circuit.to(State.CLOSED, now, retry_at=None, outcomes=())
    wait = 0 if ok is None else policy.open_seconds
    return circuit.to(State.OPEN, now, retry_at=now + wait, reason=reason or circuit.reason)


def _must_open(outcomes: tuple[Outcome, ...], policy: BreakerPolicy) -> bool:
    latest = outcomes[-policy.failures_in_a_row :]
    if len(latest) == policy.failures_in_a_row and not any(outcome.ok for outcome in latest):
        return True
    failed = sum(not outcome.ok for outcome in outcomes)
    return len(outcomes) >= policy.minimum_calls and failed / len(outcomes) >= policy.failure_rate


class CircuitFile:
    """The file of one circuit: ``<folder>/<name>.json``, one line, replaced as a whole under a lock."""

    def __init__(self, folder: str | Path, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][\w=-]*", name):
            raise WrongUse(f"'{name}' is no name of a circuit; use letters, digits, '_', '=' and '-'")
        self.name = name
        self.path = Path(folder) / f"{name}.json"

    def read(self) -> Circuit:
        """Return the circuit; a new one is closed.

        Raises:
            JobFailed: the file is not one that this class writes.
        """
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            outcomes = tuple(
                Outcome(_seconds(entry["at"]), _of(entry["ok"], bool), _of(entry["subject"], str, _NONE))
                for entry in stored["outcomes"]
            )
            return Circuit(
                state=State(stored["state"]),
                changed_at=stored["changed_at"] and _seconds(stored["changed_at"]),
                retry_at=stored["retry_at"] and _seconds(stored["retry_at"]),
                outcomes=outcomes,
                pending=tuple(_of(owed, str) for owed in _of(stored["pending"], list)),
                reason=_of(stored["reason"], str, _NONE),
                probe=_of(stored["probe"], str, _NONE),
                openings=_of(stored["openings"], int),
                transitions=_of(stored["transitions"], int),
            )
        except FileNotFoundError:
            return Circuit()
        except (ValueError, KeyError, TypeError) as failure:
            # A circuit of unknown state must neither allow calls nor be silently recreated.
            raise JobFailed(
                f"the circuit's file {self.path} can't be read ({type(failure).__name__}); repair or remove it"
            ) from None

    def change(self, function: Callable[[Circuit], tuple[Circuit, Result]]) -> Result:
        """Replace the circuit by the one that ``function`` returns, in one step; return the second result."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(self.path.with_name(f".{self.name}.lock"), timeout=_LOCK_SECONDS):
            before = self.read()
            after, result = function(before)
            if after != before or not self.path.exists():
                staging = self.path.with_name(f".{self.name}.{uuid.uuid4()}")
                staging.write_text(json_text(self._as_dict(after)) + "\n", encoding="utf-8")
                staging.replace(self.path)
        if after.openings > before.openings:
            _LOG.error("alert: the circuit '%s' has opened: %s", self.name, after.reason)
        return result

    def _as_dict(self, circuit: Circuit) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "name": self.name,
            **dataclasses.asdict(circuit),
            "changed_at": None if circuit.changed_at is None else _iso(circuit.changed_at),
            "retry_at": None if circuit.retry_at is None else _iso(circuit.retry_at),
            "outcomes": [
                dataclasses.asdict(outcome) | {"at": _iso(outcome.at)} for outcome in circuit.outcomes
            ],
        }


def _of(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise TypeError(f"{value!r} is of another type")
    return value


def _iso(seconds: float) -> str:
    return moved(from_micros(0), duration("seconds", seconds)).isoformat()


def _seconds(text: str) -> float:
    return dt.datetime.fromisoformat(text).timestamp()


@dataclass(frozen=True)
class Answer(Generic[Result]):
    """A value and whether it is fresh."""

    value: Result
    stale: bool
    """Whether the value is the last good one, because the dependency returned no value now."""
    read_at: float
    """Time when the dependency returned the value, in seconds since 1970."""


class CircuitBreaker:
    """Guards the calls to one dependency, or to one partition of it; threads and processes may share it.

    Args:
        name: Name of the dependency, part of the file's name.
        folder: Folder of the circuits' files.
        policy: Rules by which the circuit opens.
        classifier: Function from an error to its class; permanent errors are not counted.
        clock: Function that returns seconds since 1970. A monotonic clock can't be used, because the file outlives a
            restart of the machine. If the clock is set back, no caller waits longer than ``open_seconds``.
    """

    def __init__(
        self,
        name: str,
        folder: str | Path,
        policy: BreakerPolicy | None = None,
        *,
        classifier: Callable[[BaseException], Failure] = classify,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.file = CircuitFile(folder, name)
        self.policy = policy or BreakerPolicy()
        self._classifier = classifier
        self._clock = clock
        self._last_good: Answer[Any] | None = None

    def call(
        self, operation: Callable[[], Result], failed: Callable[[Result], bool] = lambda result: False
    ) -> Result:
        """Return the result of ``operation`` if the circuit allows the call.

        ``failed`` returns whether a result is a failure, such as an HTTP answer of 500, which is not an exception.

        Raises:
            CircuitOpen: the circuit rejects the call.
            Exception: the operation's error.
        """
        permit = self.admit()
        try:
            result = operation()
        except BaseException as error:
            counts = isinstance(error, Exception) and self._classifier(error) is not Failure.PERMANENT
            self.record(permit, False if counts else None, type(error).__name__)
            raise
        self.record(permit, not failed(result), "a result that counts as failure")
        return result

    def call_or_last_good(
        self, operation: Callable[[], Result], failed: Callable[[Result], bool] = lambda result: False
    ) -> Answer[Result]:
        """Return a fresh value, or the last good one that this object has seen, marked as stale.

        Raises:
            Exception: no fresh value and no last good one; or a permanent error, which an old value would hide.
        """
        try:
            result = self.call(operation, failed)
        except Exception as error:
            is_own_fault = not isinstance(error, CircuitOpen) and self._classifier(error) is Failure.PERMANENT
            if self._last_good is None or is_own_fault:
                raise
            return dataclasses.replace(self._last_good, stale=True)
        if not failed(result):
            self._last_good = Answer(result, stale=False, read_at=self._clock())
            return self._last_good
        if self._last_good is None:
            raise JobFailed(f"'{self.file.name}' gave no good value, and there is no earlier one")
        return dataclasses.replace(self._last_good, stale=True)

    def admit(self) -> Permit:
        """Return the permit for one call, whose end must be given to :meth:`record`.

        Raises:
            CircuitOpen: the circuit is open, or another caller's probe is running.
        """

        def ask(circuit: Circuit) -> tuple[Circuit, tuple[Circuit, Permit | None]]:
            after, permit = admit(circuit, self._clock(), self.policy)
            return after, (after, permit)

        circuit, permit = self.file.change(ask)
        if permit is None:
            until = present(circuit.retry_at, "the time of the next probe of an open circuit")
            raise CircuitOpen(
                f"the circuit '{self.file.name}' is {circuit.state.replace('_', ' ')} until "
                f"{_iso(until)} ({circuit.reason}); nothing was called"
            )
        return permit

    def record(
        self, permit: Permit, ok: bool | None, reason: str = "", subject: str | None = None
    ) -> Circuit:
        """Record the end of a call: good, failed, or None for an end that says nothing about the dependency."""

        def take_down(circuit: Circuit) -> tuple[Circuit, Circuit]:
            after = record(circuit, permit, ok, self._clock(), self.policy, reason, subject)
            return after, after

        return self.file.change(take_down)

    def reset(self) -> None:
        """Close the circuit and clear the window; owed slices stay owed."""

        def close(circuit: Circuit) -> tuple[Circuit, None]:
            if circuit.state is State.CLOSED:
                return dataclasses.replace(circuit, outcomes=()), None
            return circuit.to(State.CLOSED, self._clock(), retry_at=None, outcomes=()), None

        self.file.change(close)

    def status(self) -> Circuit:
        """Return the circuit as it is now: state, openings and transitions are its metrics."""
        return self.file.read()
