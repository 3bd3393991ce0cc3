"""Poison Pill Handling: find the records that end the task which processes them, so that the batch can go on without.

An exception, a killed Python worker or a dead driver says which *batch* failed and not which record. So tries are
counted outside of the process that dies, and after enough of them the batch is bisected: a part is processed for
nothing but to see whether it survives, one that doesn't is halved, down to single records. What is under test is
written down first; a part that takes the whole process with it is found there by the next run.

Parts are ranges of the records' hash, which needs no order and no sort; equal records are one. More than a few pills
mean that the environment is at fault (no memory, a missing file): then nothing is set aside.

Source: the guide's Poison Pill Handling (chapters 2 and 13).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from python_jobs.shared.core.failures import DataRefused

NOTE = "attempts.json"
EVERYTHING = (-(2**63), 2**63 - 1)

Range = tuple[int, int]
"""Lowest and highest hash, both included."""


@dataclass(frozen=True)
class Case:
    """What is known of the batch in hand."""

    batch_id: int
    attempts: int = 0
    """Tries since it began or since the last search, the current one included."""
    suspects: tuple[Range, ...] | None = None
    """Ranges still to be tested; None when no search is under way."""
    testing: Range | None = None
    """The range under test: if a run finds it here, the test ended the run before."""
    pills: tuple[int, ...] = ()
    """Hashes of the records found."""
    reason: str = "the process died"
    """How the last test failed."""


class Notes(Protocol):
    """Keeps small texts outside of the process."""

    def read_text(self, path: str) -> str | None:
        """Return a text, None if it is absent."""

    def write_text(self, path: str, text: str) -> None:
        """Replace a text as a whole."""


class CaseFile:
    """The note of the batch in hand, beside the stream's checkpoint."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def begin(self, batch_id: int) -> Case:
        """Count a try of a batch and return its case."""
        text = self._notes.read_text(NOTE)
        stored = json.loads(text) if text else {"batch_id": None}
        if stored["batch_id"] != batch_id:
            case = Case(batch_id)
        else:
            suspects, testing = stored["suspects"], stored["testing"]
            case = Case(
                **stored
                | {
                    "suspects": None if suspects is None else tuple((low, high) for low, high in suspects),
                    "testing": None if testing is None else (testing[0], testing[1]),
                    "pills": tuple(stored["pills"]),
                }
            )
        case = dataclasses.replace(case, attempts=case.attempts + 1)
        self.save(case)
        return case

    def save(self, case: Case) -> None:
        """Write the case down."""
        self._notes.write_text(NOTE, json.dumps(dataclasses.asdict(case)))


def isolate(
    case: Case,
    bounds: Callable[[Range], Range | None],
    failure: Callable[[Range], str | None],
    save: Callable[[Case], None],
    most: int,
) -> Case:
    """Return the case with every pill of the batch found; goes on where a run that died has stopped.

    Args:
        case: what is known.
        bounds: from a range to the lowest and highest hash that records have in it, None without any.
        failure: processes a range and returns how that failed, None if it didn't.
        save: writes the case down.
        most: pills allowed.

    Raises:
        DataRefused: there are more; the search starts anew with the next try.
    """
    if case.suspects is None:
        case = dataclasses.replace(case, suspects=(EVERYTHING,))
    elif case.testing is not None:
        case = _narrowed(dataclasses.replace(case, reason="the process died"), case.testing)
    while True:
        if len(case.pills) > most:
            save(Case(case.batch_id, case.attempts))
            raise DataRefused(
                f"alert: more than {most} records of batch {case.batch_id} end the task that processes them "
                f"({case.reason}): look at the environment; nothing was set aside"
            )
        if not case.suspects:
            # The tries count anew: a batch that fails even without these pills is searched again.
            case = dataclasses.replace(case, attempts=0, suspects=None)
            save(case)
            return case
        *rest, suspect = case.suspects
        case = dataclasses.replace(case, suspects=tuple(rest))
        found = bounds(suspect)
        if found is None:
            continue
        case = dataclasses.replace(case, testing=found)
        save(case)
        reason = failure(found)
        if reason is None:
            case = dataclasses.replace(case, testing=None)
        else:
            case = _narrowed(dataclasses.replace(case, reason=reason), found)


def _narrowed(case: Case, part: Range) -> Case:
    """Return the case after ``part`` failed: its halves are suspect, or its only record is a pill."""
    low, high = part
    if low == high:
        return dataclasses.replace(case, testing=None, pills=(*case.pills, low))
    middle = (low + high) // 2
    halves = ((middle + 1, high), (low, middle))
    return dataclasses.replace(case, testing=None, suspects=(*(case.suspects or ()), *halves))
