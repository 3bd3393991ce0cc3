"""Does to a writer what a cluster does on a bad day, runs it once more in peace, and counts lost and doubled rows.

Kills: a chain of them works on one folder, the process after a kill is the rerun of the one before, and is killed as
well. After the chain the writer runs to its end. Table, state and commit of each kill are drawn from a seed; of the
three states (see :mod:`tests.support.killer`) the one that was hit least comes next.

Pairs: two processes do the same days at once. One may be refused with a sentence; then it is run again.

Orders: the days are done in a random order, again and again.

Each time the multiset of every table is compared with that of a run that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import SparkSession

from tests.support.dbt_project import REPOSITORY
from tests.support.killer import ProcessEndedError, TableState, kill_group, run_and_kill
from tests.support.session import start_session
from tests.torture.process import REFUSED
from tests.torture.stores import Rows
from tests.torture.writer import DAYS, Writer
from tests.torture.writers import WRITERS

CHAIN = 10
RUN_SECONDS = 600


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    kills: int = 20
    """At least; the kills of a chain that ends early are made up for in the next."""
    pairs: int = 1
    """For writers of which that is promised."""
    orders: int = 20
    """For writers whose days may be done in any order."""
    seed: int = 1
    """Decides on the table, state and commit of each kill, and on the orders."""


@dataclass
class Outcome:
    """What was done to a writer, and to its tables."""

    writer: str
    kills: Counter[TableState] = field(default_factory=Counter)
    """By the state in which the table was found."""
    pairs: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    """Kind of failure of those of a pair that were refused."""
    orders: int = 0
    executors: int = 0
    """Executors that were lost."""
    lost: int = 0
    """Rows that a calm run has and a disturbed one hasn't."""
    doubled: int = 0
    """Rows that only the disturbed one has, or has more often."""

    def __str__(self) -> str:
        """What a person reads while the others go on."""
        kills = ", ".join(f"{state.value} {self.kills[state]}" for state in TableState)
        refused = "".join(f", {count} refused by {kind}" for kind, count in self.refusals.items())
        return (
            f"{self.writer}: kills ({kills}); two at once {self.pairs}{refused}; orders {self.orders}; "
            f"executors lost {self.executors}; rows lost {self.lost}, doubled {self.doubled}"
        )

    @property
    def is_sound(self) -> bool:
        """Whether no row is lost or doubled and, if it was killed at all, every state was hit."""
        return not self.lost and not self.doubled and (not self.kills or set(self.kills) == set(TableState))

    def compare(self, expected: dict[str, Rows], left: dict[str, Rows]) -> None:
        """Count what differs."""
        for table, rows in expected.items():
            self.lost += (rows - left[table]).total()
            self.doubled += (left[table] - rows).total()


class RunFailedError(AssertionError):
    """A writer failed without a sentence; the message holds the end of its output."""


def tortured(name: str, plan: Plan) -> Outcome:
    """Torture one writer, in a session of this process if it needs one."""
    writer = WRITERS[name]
    with tempfile.TemporaryDirectory(prefix="torture-") as folder, writer.service(Path(folder)):
        spark = start_session(Path(folder) / "session") if writer.needs_spark else None
        return torture(writer, spark, Path(folder) / "work", plan)


class Calm:
    """A writer's input and what an undisturbed run makes of it."""

    def __init__(self, writer: Writer, spark: SparkSession | None, folder: Path) -> None:
        """Prepare the input below ``folder`` and run the writer once."""
        self._writer, self._spark, self._folder = writer, spark, folder
        calm, self._input = self._path("calm"), self._path("input")
        calm.mkdir(parents=True)
        writer.prepare(spark, calm)
        shutil.copytree(calm, self._input)
        writer.store.set_up(calm)
        before = self._commits(calm)
        writer.run(spark, calm)
        self.expected = self.contents(calm)
        """Rows by table."""
        self.commits = {table: count - before[table] for table, count in self._commits(calm).items()}
        """How many commits the run has made, by table."""
        shutil.rmtree(calm)

    @contextlib.contextmanager
    def copy(self, name: object) -> Iterator[Path]:
        """Yield a folder with the input; it is gone afterwards."""
        folder = self._path(name)
        shutil.copytree(self._input, folder)
        self._writer.store.set_up(folder)
        yield folder
        shutil.rmtree(folder)

    def contents(self, folder: Path) -> dict[str, Rows]:
        """Return the rows of each table."""
        store = self._writer.store
        return {table: store.rows(self._spark, folder, table) for table in self._writer.tables}

    def _commits(self, folder: Path) -> dict[str, int]:
        store = self._writer.store
        return {table: len(store.files(folder, table).log) for table in self._writer.tables}

    def _path(self, name: object) -> Path:
        slug = "".join(letter if letter.isalnum() else "_" for letter in self._writer.name)
        return self._folder / f"{slug}_{name}".lower()


def torture(writer: Writer, spark: SparkSession | None, folder: Path, plan: Plan) -> Outcome:
    """Do all of the plan that applies to the writer.

    Raises:
        ProcessEndedError: the writer failed by itself.
        RunFailedError: it did so beside another.
    """
    draw = random.Random(f"{plan.seed} {writer.name}")
    calm, outcome = Calm(writer, spark, folder), Outcome(writer.name)
    _kill_in_chains(writer, spark, calm, outcome, plan.kills, draw)
    if writer.pairs:
        for number in range(plan.pairs):
            with calm.copy(f"pair_{number}") as place:
                outcome.refusals += run_two(writer, place)
                writer.run(spark, place)
                outcome.pairs += 1
                outcome.compare(calm.expected, calm.contents(place))
    if writer.day is not None:
        for number in range(plan.orders):
            with calm.copy(f"order_{number}") as place:
                for day in draw.sample(DAYS, len(DAYS)):
                    writer.day(spark, place, day)
                outcome.orders += 1
                outcome.compare(calm.expected, calm.contents(place))
    return outcome


def _kill_in_chains(
    writer: Writer, spark: SparkSession | None, calm: Calm, outcome: Outcome, kills: int, draw: random.Random
) -> None:
    """Kill the writer at least ``kills`` times, each state as often as the other."""
    written = [table for table, count in calm.commits.items() if count]
    chains = 0
    while outcome.kills.total() < kills and chains < kills:
        chains += 1
        with calm.copy(chains) as place:
            for _ in range(min(CHAIN, kills - outcome.kills.total())):
                table = draw.choice(written)
                # Where a run goes on, only few commits are left after a kill. Elsewhere any may be hit, and it is the
                # lower of two draws: each commit before the kill takes a second, and early ones are as good as late.
                commits = 2 if writer.resumes else calm.commits[table]
                passed = min(draw.randrange(commits), draw.randrange(commits))
                wanted = min(TableState, key=lambda state: (outcome.kills[state], draw.random()))
                try:
                    found = _kill(writer, place, table, wanted, passed)
                except ProcessEndedError as ended:
                    if ended.exit_code:
                        raise
                    break  # it had nothing left to do
                outcome.kills[found] += 1
            writer.run(spark, place)
            outcome.compare(calm.expected, calm.contents(place))


def command(writer: Writer, folder: Path, *master: str) -> list[str]:
    """Return the command of the writer's process."""
    return [sys.executable, "-m", "tests.torture.process", writer.name, str(folder), *master]


def _kill(writer: Writer, folder: Path, table: str, state: TableState, passed: int) -> TableState:
    with writer.store.observed(folder, table) as observed:
        return run_and_kill(
            command(writer, folder), observed, state, {"PYTHONPATH": str(REPOSITORY)}, RUN_SECONDS, passed
        )


def run_two(writer: Writer, folder: Path) -> Counter[str]:
    """Run the writer twice at once; return the kinds of refusals.

    Raises:
        RunFailedError: one failed without a sentence.
    """
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    processes = [
        subprocess.Popen(
            command(writer, folder), env=environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    refusals = Counter[str]()
    try:
        for process in processes:
            # A pipe that nobody reads meanwhile is big enough for what a writer prints.
            output, _ = process.communicate(timeout=RUN_SECONDS)
            if process.returncode == REFUSED:
                refusals[output.strip().splitlines()[-1].split(":")[0]] += 1
            elif process.returncode:
                raise RunFailedError(f"one of two {writer.name} failed without a sentence:\n{output[-3000:]}")
    finally:
        for process in processes:
            kill_group(process)
    return refusals
