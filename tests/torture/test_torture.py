"""A slice of ``make torture``, and proof that it sees what it looks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.killer import TableState
from tests.torture import torture as engine
from tests.torture import writers
from tests.torture.torture import torture
from tests.torture.writers import DAYS, VISITS, WRITERS, Writer, visits

pytestmark = pytest.mark.kill


@pytest.mark.parametrize("name", ["data_overwrite"])
def test_a_writer_that_is_killed_in_each_state_and_run_again_leaves_what_a_calm_run_leaves(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    outcome = torture(WRITERS[name], spark, tmp_path, kills=3)
    assert outcome.kills == dict.fromkeys(TableState, 1)
    assert (outcome.lost, outcome.doubled) == (0, 0)


def append_each_day(spark: SparkSession, folder: Path) -> None:
    for day in DAYS:
        rows = spark.createDataFrame(visits(day), VISITS).coalesce(1)
        rows.write.format("delta").mode("append").save(str(folder / "visits"))


def skip_what_is_there(spark: SparkSession, folder: Path) -> None:
    """Take a table that exists for one that is complete."""
    if not (folder / "visits").exists():
        append_each_day(spark, folder)


@pytest.mark.parametrize(
    ("run", "fault"), [(append_each_day, "doubled"), (skip_what_is_there, "lost")], ids=["append", "skip"]
)
def test_a_writer_that_appends_doubles_and_one_that_trusts_what_is_there_loses(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: object, fault: str
) -> None:
    """The kill is played here: the first run of the chain ends after two days."""
    broken = Writer("broken", writers.nothing, run, ("visits",))

    def two_days(writer: Writer, folder: Path, table: str, state: TableState, passed: int) -> TableState:
        for day in DAYS[:2]:
            rows = spark.createDataFrame(visits(day), VISITS).coalesce(1)
            rows.write.format("delta").mode("append").save(str(folder / table))
        return state

    monkeypatch.setattr(engine, "_kill", two_days)
    outcome = torture(broken, spark, tmp_path, kills=1)
    assert getattr(outcome, fault) == {"doubled": 8, "lost": 16}[fault]
    assert not outcome.is_sound
