"""Kills a writer again and again, runs it once more in peace, and counts the rows that are lost or doubled.

A chain of kills works on one folder: the process after a kill is the rerun of the one before, and is killed as well.
After the chain the writer runs to its end, and the multiset of every table is compared with that of a run that nobody
disturbed. Table, state and commit of each kill are drawn from a seed; of the three states (see
:mod:`tests.support.killer`) the one that was hit least comes next.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from tests.support.dbt_project import REPOSITORY
from tests.support.killer import ProcessEndedError, TableFiles, TableState, run_and_kill
from tests.support.lakehouse import CLOCK_COLUMNS
from tests.support.session import start_session
from tests.torture.writers import WRITERS, Writer

CHAIN = 5
# A checkpoint's id is drawn when it is made.
DIFFERS = CLOCK_COLUMNS | {"writer_id"}


@dataclass
class Outcome:
    """What a writer's kills have done to its tables."""

    writer: str
    kills: Counter[TableState] = field(default_factory=Counter)
    """By the state in which the table was found."""
    lost: int = 0
    """Rows that a calm run has and a chain of kills hasn't."""
    doubled: int = 0
    """Rows that only the chain has, or has more often."""

    @property
    def is_sound(self) -> bool:
        """Whether every state was hit and no row is lost or doubled."""
        return not self.lost and not self.doubled and set(self.kills) == set(TableState)


def tortured(name: str, kills: int, seed: int) -> Outcome:
    """Torture one writer in a session of this process."""
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        spark = start_session(Path(folder) / "session")
        return torture(WRITERS[name], spark, Path(folder) / "work", kills, seed)


def torture(writer: Writer, spark: SparkSession, folder: Path, kills: int, seed: int = 1) -> Outcome:
    """Kill ``writer`` at least ``kills`` times, each state as often as the other, and compare.

    Raises:
        ProcessEndedError: the writer failed by itself.
    """
    draw = random.Random(f"{seed} {writer.name}")
    calm = folder / f"{_slug(writer)}_calm"
    calm.mkdir(parents=True)
    writer.prepare(spark, calm)
    prepared = folder / "input"
    shutil.copytree(calm, prepared)
    before = _commits(writer, prepared)
    writer.run(spark, calm)
    expected = _contents(spark, writer, calm)
    commits = {table: count - before[table] for table, count in _commits(writer, calm).items()}
    written = [table for table, count in commits.items() if count]

    outcome = Outcome(writer.name)
    chains = 0
    while outcome.kills.total() < kills and chains < kills:
        chains += 1
        tortured = folder / f"{_slug(writer)}_{chains}"
        shutil.copytree(prepared, tortured)
        for _ in range(min(CHAIN, kills - outcome.kills.total())):
            table = draw.choice(written)
            # Where a run goes on, only few commits are left after a kill; all are as good there.
            passed = draw.randrange(2 if writer.resumes else commits[table])
            wanted = min(TableState, key=lambda state: (outcome.kills[state], draw.random()))
            try:
                found = _kill(writer, tortured, table, wanted, passed)
            except ProcessEndedError as ended:
                if ended.exit_code:
                    raise
                break  # it had nothing left to do
            outcome.kills[found] += 1
        writer.run(spark, tortured)
        left = _contents(spark, writer, tortured)
        for table, rows in expected.items():
            outcome.lost += (rows - left[table]).total()
            outcome.doubled += (left[table] - rows).total()
        shutil.rmtree(tortured)
    shutil.rmtree(calm)
    shutil.rmtree(prepared)
    return outcome


def _kill(writer: Writer, folder: Path, table: str, state: TableState, passed: int) -> TableState:
    command = [sys.executable, "-m", "tests.torture.process", writer.name, str(folder)]
    return run_and_kill(
        command, writer.table(folder, table), state, {"PYTHONPATH": str(REPOSITORY)}, commits=passed
    )


def _contents(spark: SparkSession, writer: Writer, folder: Path) -> dict[str, Counter[tuple[str, ...]]]:
    """Return each table's rows, as texts, without what differs between any two runs."""
    return {table: _rows(spark, writer.table(folder, table)) for table in writer.tables}


def _rows(spark: SparkSession, path: Path) -> Counter[tuple[str, ...]]:
    if not (path / "_delta_log").is_dir():
        return Counter()
    table: DataFrame = spark.read.format("delta").load(str(path))
    columns = sorted(set(table.columns) - DIFFERS)
    return Counter(tuple(map(repr, row)) for row in table.select(*columns).collect())


def _commits(writer: Writer, folder: Path) -> dict[str, int]:
    return {table: len(TableFiles.of(writer.table(folder, table)).log) for table in writer.tables}


def _slug(writer: Writer) -> str:
    return writer.name.replace(" ", "_")
