"""Tortures every writer and prints what is left: ``make torture``.

python -m tests.torture [--writers '["data_overwrite"]'] [--kills 20] [--seed 1]
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from jsonargparse import auto_cli
from tabulate import tabulate

from tests.support.killer import TableState
from tests.support.session import start_session
from tests.torture.torture import Outcome, torture
from tests.torture.writers import WRITERS


def tortured(name: str, kills: int, seed: int) -> Outcome:
    """Torture one writer in a session of this process."""
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        spark = start_session(Path(folder) / "session")
        return torture(WRITERS[name], spark, Path(folder) / "work", kills, seed)


def main(writers: list[str] | None = None, kills: int = 20, seed: int = 1, workers: int = 2) -> None:
    """Kill writers, run them again, and print lost and doubled rows; exit code 1 if there is one.

    Args:
        writers: their names; by default all.
        kills: of each writer, at least.
        seed: decides on the table, state and commit of each kill.
        workers: how many writers at once.
    """
    outcomes = []
    # A process a writer: a session's cached tables and catalog are those of one writer only.
    context = multiprocessing.get_context("spawn")
    started = time.monotonic()
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(tortured, name, kills, seed) for name in writers or WRITERS]):
            outcomes.append(done.result())
            print(f"{time.monotonic() - started:6.0f} s  {outcomes[-1].writer}", file=sys.stderr, flush=True)
    order = list(WRITERS)
    rows = [
        (
            outcome.writer,
            *(outcome.kills[state] for state in TableState),
            outcome.kills.total(),
            outcome.lost,
            outcome.doubled,
        )
        for outcome in sorted(outcomes, key=lambda outcome: order.index(outcome.writer))
    ]
    headers = ["writer", *(state.value for state in TableState), "kills", "rows lost", "rows doubled"]
    print(tabulate(rows, headers, tablefmt="github"))
    sys.exit(not all(outcome.is_sound for outcome in outcomes))


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
