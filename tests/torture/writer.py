"""What the torture kills and runs again: a writer, its input of a week, and how its days are done.

A writer's ``run`` does all its days in one process, from the first to the last, and is what a person would start again
after a crash: a stream goes on, a loop over days begins again, an orchestrator begins with the day that isn't done.
What else is left of a run is in its tables alone.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.torture.stores import DELTA, Store

NOW = "2024-03-31T00:00:00Z"
DAYS = [dt.date(2024, 3, 1) + dt.timedelta(days=number) for number in range(7)]

Run = Callable[[Any, Path], object]
"""Of the session and the folder; a writer that needs no session gets None."""
Day = Callable[[Any, Path, dt.date], object]


def below(folder: Path, **parameters: str) -> dict[str, Any]:
    """Return a job's parameters that are tables or folders, each below the writer's folder."""
    return {parameter: str(folder / name) for parameter, name in parameters.items()}


def interval_of(day: dt.date) -> dict[str, Any]:
    """Return a loader's parameters for the interval of a day."""
    return {"from_": f"{day}", "to": f"{day + dt.timedelta(days=1)}"}


def nothing(_: object, __: Path) -> None:
    """The writer makes its own input."""


@contextlib.contextmanager
def no_service(_: Path) -> Iterator[None]:
    """The writer needs files only."""
    yield


@dataclass(frozen=True)
class Writer:
    """One writer and its input."""

    name: str
    """As the table of results has it."""
    prepare: Run
    """Write the input into an empty folder."""
    run: Run
    """Do every day; doing it again adds nothing."""
    tables: tuple[str, ...]
    """What it writes, below the folder, whose own name is ``{folder}`` in it."""
    resumes: bool = False
    """Whether a run goes on where the one before ended: its later commits are near then."""
    day: Day | None = None
    """Do one day; for writers that may do them in any order."""
    pairs: bool = True
    """Whether two at once are promised to leave what one leaves."""
    on_cluster: bool = False
    """Whether its tasks run on executors that may be lost."""
    needs_spark: bool = True
    """Whether it is a job of Spark; else a program without a session."""
    store: Store = DELTA
    """What its tables are."""
    service: Callable[[Path], contextlib.AbstractContextManager[None]] = no_service
    """Runs what it talks to, given a folder; it finds that by environment variables."""


def in_order(day: Day) -> Run:
    """Return a run of all days, from the first, however often it is begun."""

    def run(spark: Any, folder: Path) -> None:
        for date in DAYS:
            day(spark, folder, date)

    return run


def orchestrated(day: Day) -> Run:
    """Return a run of the days that aren't done yet, as an orchestrator remembers them."""

    def run(spark: Any, folder: Path) -> None:
        done = folder / "days_done"
        done.mkdir(exist_ok=True)
        for date in DAYS:
            if not (done / f"{date}").exists():
                day(spark, folder, date)
                (done / f"{date}").touch()

    return run


def by_day(
    name: str,
    prepare: Run,
    day: Day,
    tables: tuple[str, ...],
    *,
    any_order: bool = False,
    adds_once: bool = False,
    pairs: bool = True,
    on_cluster: bool = True,
    store: Store = DELTA,
) -> Writer:
    """Return a writer that does all its days again, whatever is there.

    Args:
        name, prepare, tables, pairs, on_cluster, store: as :class:`Writer` has them.
        day: does a day.
        any_order: whether the days may be done in any order.
        adds_once: whether a day that is done commits nothing when it is done again.
    """
    run, one_day = in_order(day), day if any_order else None
    return Writer(
        name,
        prepare,
        run,
        tables,
        resumes=adds_once,
        day=one_day,
        pairs=pairs,
        on_cluster=on_cluster,
        store=store,
    )


def stream(name: str, prepare: Run, run: Run, tables: tuple[str, ...]) -> Writer:
    """Return a writer that goes on from its checkpoint, which is one query's at a time."""
    return Writer(name, prepare, run, tables, resumes=True, pairs=False, on_cluster=True)
