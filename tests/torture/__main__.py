"""Tortures every writer and prints what is left: ``make torture``.

python -m tests.torture [--writers '["data_overwrite"]'] [--kills 20] [--seed 1]
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

from jsonargparse import auto_cli
from tabulate import tabulate

from tests.support.killer import TableState
from tests.torture.torture import tortured
from tests.torture.writers import WRITERS


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
        names = {pool.submit(tortured, name, kills, seed): name for name in writers or WRITERS}
        for done in as_completed(names):
            name, failure = names[done], done.exception()
            what = f"failed: {failure}"
            if failure is None:
                outcomes.append(done.result())
                what = f"lost {outcomes[-1].lost}, doubled {outcomes[-1].doubled}"
            print(f"{time.monotonic() - started:6.0f} s  {name}: {what}", file=sys.stderr, flush=True)
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
    sys.exit(len(outcomes) < len(names) or not all(outcome.is_sound for outcome in outcomes))


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
