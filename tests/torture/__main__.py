"""Tortures every writer and prints what is left: ``make torture``.

python -m tests.torture [--writers '["data_overwrite"]'] [--kills 20] [--pairs 1] [--orders 20] [--executors 2]
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from jsonargparse import auto_cli
from tabulate import tabulate

from tests.support.class_archive import make_archive
from tests.support.killer import TableState
from tests.support.session import start_session
from tests.torture.executors import lose_executors, running_executors
from tests.torture.torture import Outcome, Plan, tortured
from tests.torture.writers import WRITERS

HEADERS = [
    "writer",
    *(state.value for state in TableState),
    "kills",
    "two at once",
    "orders",
    "executors lost",
    "rows lost",
    "rows doubled",
]


def main(
    writers: list[str] | None = None,
    kills: int = 20,
    pairs: int = 1,
    orders: int = 20,
    executors: int = 2,
    seed: int = 1,
    workers: int = os.cpu_count() or 1,
) -> None:
    """Torture writers, and print lost and doubled rows; exit code 1 if there is one, or if one failed.

    Args:
        writers: their names; by default all.
        kills: of each writer, at least.
        pairs: how often two of a writer run at once.
        orders: random orders in which the days are done.
        executors: lost by each writer, on a standalone cluster of two workers.
        seed: decides on the table, state and commit of each kill, and on the orders.
        workers: how many writers at once; by default one a core.
    """
    started = time.monotonic()
    names = writers or list(WRITERS)
    if unknown := sorted(set(names) - set(WRITERS)):
        sys.exit(f"there is no writer {', '.join(unknown)}; there are {', '.join(WRITERS)}")
    outcomes: dict[str, Outcome] = {}

    def done(name: str, result: Callable[[], Outcome]) -> bool:
        """Tell what came of a writer, return whether it is as it should be. One that fails doesn't end the others."""
        try:
            outcome = outcomes[name] = result()
            sentence, is_sound = f"{outcome}", outcome.is_sound
        except Exception as error:
            sentence, is_sound = f"{name} failed: {error}", False
        print(f"{time.monotonic() - started:6.0f} s  {sentence}", file=sys.stderr, flush=True)
        return is_sound

    make_archive()
    plan = Plan(kills, pairs, orders, seed)
    # A process a writer: a session's cached tables and catalog are those of one writer only.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        futures = {pool.submit(tortured, name, plan): name for name in names}
        sound = [done(futures[future], future.result) for future in as_completed(futures)]
    on_cluster = [name for name in names if executors and WRITERS[name].on_cluster]
    if on_cluster:
        with (
            tempfile.TemporaryDirectory(prefix="torture-") as root,
            running_executors(Path(root)) as master,
        ):
            folder = Path(root)
            spark = start_session(folder / "session")

            def lose(name: str) -> Outcome:
                outcome = outcomes.get(name, Outcome(name))
                lose_executors(WRITERS[name], spark, folder / "work", master, folder, outcome, executors)
                return outcome

            sound += [done(name, partial(lose, name)) for name in on_cluster]
    rows = [row(outcomes[name]) for name in WRITERS if name in outcomes]
    print(tabulate(rows, HEADERS, tablefmt="github"))
    sys.exit(not all(sound))


def row(outcome: Outcome) -> list[object]:
    """Return a line of the table."""
    together = f"{outcome.pairs}, {outcome.refusals.total()} refused" if outcome.refusals else outcome.pairs
    kills = [outcome.kills[state] for state in TableState]
    return [
        outcome.writer, *kills, sum(kills), together or None, outcome.orders or None, outcome.executors or None,
        outcome.lost, outcome.doubled,
    ]  # fmt: skip


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
