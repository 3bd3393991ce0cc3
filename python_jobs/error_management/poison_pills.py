"""Poison Pill Handling: find the records that end the task that processes them, so that the batch can continue.

An exception, a killed Python worker or a dead driver shows which *batch* failed, and not which record. So attempts are
counted in a file that outlives the process. After enough failed attempts the batch is bisected: a part is processed
only to see whether it fails, and a part that fails is halved, down to single records. Each part is recorded before its
test; if the test kills the whole process, the next run finds the part in the record.

Parts are ranges of the records' hash, which needs no order and no sort; equal records are one record. More than a few
poison pills mean a fault of the environment (no memory, a missing file): then no record is parked.

Source: the guide's Poison Pill Handling (chapters 2 and 13).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from python_jobs.shared.core.failures import DataRefused
from python_jobs.shared.core.json_text import json_text

NOTE = "attempts.json"
EVERYTHING = (-(2**63), 2**63 - 1)

Range = tuple[int, int]
"""Lowest and highest hash, both included."""


@dataclass(frozen=True)
class Case:
    """The state of the search for poison pills in the current batch."""

    batch_id: int
    attempts: int = 0
    """Attempts since the batch began or since the last search, the current attempt included."""
    suspects: tuple[Range, ...] | None = None
    """Ranges still to be tested; None if no search is running."""
    testing: Range | None = None
    """The range under test: if a run finds a range here, its test ended the run before."""
    pills: tuple[int, ...] = ()
    """Hashes of the poison pills found."""
    reason: str = "the process died"
    """How the last test failed."""


class Notes(Protocol):
    """Keeps small texts outside of the process."""

    def read_text(self, path: str) -> str | None:
        """Return a text, None if it is absent."""

    def write_text(self, path: str, text: str) -> None:
        """Replace a text as a whole."""


class CaseFile:
    """The stored case of the current batch, in a file next to the stream's checkpoint."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def begin(self, batch_id: int) -> Case:
        """Count an attempt of a batch and return the batch's case."""
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
        """Store the case."""
        self._notes.write_text(NOTE, json_text(dataclasses.asdict(case)))


def isolate(
    case: Case,
    bounds: Callable[[Range], Range | None],
    failure: Callable[[Range], str | None],
    save: Callable[[Case], None],
    most: int,
) -> Case:
    """Return the case with every poison pill of the batch; the search continues where a dead run stopped.

    Args:
        case: State of the search so far.
        bounds: Function from a range to the lowest and highest hash of its records, None for a range without records.
        failure: Function that processes a range and returns the error, None if there is none.
        save: Function that stores the case.
        most: Largest allowed number of poison pills.

    Raises:
        DataRefused: there are more poison pills; the next attempt starts the search again.
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
                f"({case.reason}): check the environment; no record was parked"
            )
        if not case.suspects:
            # Attempts start again at 0: a batch that fails even without these pills is searched again.
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
    """Return the case after ``part`` failed: its halves are suspects, or its only record is a poison pill."""
    low, high = part
    if low == high:
        return dataclasses.replace(case, testing=None, pills=(*case.pills, low))
    middle = (low + high) // 2
    halves = ((middle + 1, high), (low, middle))
    return dataclasses.replace(case, testing=None, suspects=(*(case.suspects or ()), *halves))
