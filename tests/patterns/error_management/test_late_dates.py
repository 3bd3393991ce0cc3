"""Planners of the Late Data Integrators: which dates, without Spark."""

from __future__ import annotations

import subprocess
import sys

import pytest

from python_jobs.error_management.late_dates import (
    LatePlan,
    Partition,
    backfill_runs,
    late_plan,
    lookback_dates,
    not_redone,
)
from python_jobs.shared.core.dates import dates_between
from tests.support.pytest_ids import REPOSITORY


def test_lookback_dates() -> None:
    assert lookback_dates("2024-01-03", 2) == ["2024-01-01", "2024-01-02"]
    assert lookback_dates("2024-12-31", 14) == [f"2024-12-{day}" for day in range(17, 31)]
    assert lookback_dates("2024-03-01", 2) == ["2024-02-28", "2024-02-29"]
    assert lookback_dates("2024-03-01", 0) == []
    with pytest.raises(ValueError, match="a lookback of -1 days is not possible; it must be 0 or more"):
        lookback_dates("2024-03-01", -1)
    with pytest.raises(ValueError, match="'2024-02-30' is not a date"):
        lookback_dates("2024-02-30", 1)


def test_backfill_runs_overlap_nowhere_and_say_what_they_cover() -> None:
    october = "2024-10-"
    (single,) = backfill_runs(f"{october}10", f"{october}12", 4)
    assert single.date == f"{october}12"
    assert single.covers == tuple(f"{october}{day:02}" for day in range(8, 13))
    assert not_redone(f"{october}10", f"{october}12", 4) == [f"{october}06", f"{october}07"]
    runs = backfill_runs(f"{october}01", f"{october}12", 4)
    assert [run.date for run in runs] == [f"{october}02", f"{october}07", f"{october}12"]
    covered = [date for run in runs for date in run.covers]
    assert covered == dates_between("2024-09-28", "2024-10-12")
    (one_day,) = backfill_runs("2024-10-02", "2024-10-02", 1)
    assert one_day.covers == ("2024-10-01", "2024-10-02")
    with pytest.raises(ValueError, match="the backfill from 2024-10-02 to 2024-10-01 is empty"):
        backfill_runs("2024-10-02", "2024-10-01", 4)


def test_planners_need_no_spark() -> None:
    """An orchestrator imports them without it."""
    check = "import sys; import python_jobs.error_management.late_dates; assert 'pyspark' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], cwd=REPOSITORY, check=True)


def december(**versions: tuple[int | None, int | None]) -> dict[str, Partition]:
    """Return partitions from ``d17=(changed, read)``."""
    return {f"2024-12-{day[1:]}": Partition(*pair) for day, pair in versions.items()}


def test_late_is_what_changed_after_it_was_read_strictly_before_the_run() -> None:
    partitions = december(d17=(3, 10), d18=(12, 9))
    assert late_plan(partitions, "2024-12-19").dates == ("2024-12-18",)
    assert late_plan(partitions, "2024-12-18").dates == ()


def test_a_date_without_a_processed_version_is_late_once_it_has_data() -> None:
    assert late_plan(december(d10=(4, None), d11=(None, None)), "2024-12-12").dates == ("2024-12-10",)


def old_history() -> dict[str, Partition]:
    """Return 30 processed dates up to 2024-10-20; late data has come for the first."""
    dates = dates_between("2024-09-21", "2024-10-20")
    history = {date: Partition(position, position) for position, date in enumerate(dates)}
    return history | {"2024-09-21": Partition(30, 0)}


def test_old_late_data_is_one_date_or_for_a_stateful_query_all_since() -> None:
    assert late_plan(old_history(), "2024-10-21").dates == ("2024-09-21",)
    runs = late_plan(old_history(), "2024-10-21", stateful=True).dates
    assert list(runs) == dates_between("2024-09-21", "2024-10-20")
    assert len(runs) == 30


@pytest.mark.parametrize("stateful", [False, True])
def test_beyond_the_accepted_lookback_late_data_is_ignored_and_reported(stateful: bool) -> None:
    plan = late_plan(old_history(), "2024-10-21", stateful=stateful, max_lookback_days=15)
    assert plan == LatePlan(ignored=("2024-09-21",))


def test_the_last_day_of_the_lookback_is_accepted() -> None:
    plan = late_plan(december(d16=(2, 1), d17=(2, 1)), "2024-12-19", max_lookback_days=2)
    assert plan == LatePlan(dates=("2024-12-17",), ignored=("2024-12-16",))


def test_a_date_behind_one_that_was_read_later_is_outdated_in_a_chain_alone() -> None:
    for behind in ((1, 4), (None, None)):
        partitions = december(d10=(1, 5), d11=behind)
        assert late_plan(partitions, "2024-12-12").dates == ()
        assert late_plan(partitions, "2024-12-12", stateful=True).dates == ("2024-12-11",)
    at_the_first_version = december(d10=(0, 0), d11=(None, None))
    assert late_plan(at_the_first_version, "2024-12-12", stateful=True).dates == ("2024-12-11",)
    assert late_plan(december(d10=(None, None)), "2024-12-12", stateful=True).dates == ()


def test_one_run_takes_at_most_so_many_and_an_interrupted_chain_goes_on() -> None:
    history = old_history()
    plan = late_plan(history, "2024-10-21", stateful=True, max_partitions=3)
    assert plan.dates == ("2024-09-21", "2024-09-22", "2024-09-23")
    assert len(plan.postponed) == 27
    done = {date: Partition(history[date].changed_version, 31) for date in plan.dates}
    rest = late_plan(history | done, "2024-10-21", stateful=True)
    assert list(rest.dates) == dates_between("2024-09-24", "2024-10-20")
    all_done = {date: Partition(known.changed_version, 31) for date, known in (history | done).items()}
    assert late_plan(all_done, "2024-10-21", stateful=True) == LatePlan()


def test_a_chain_waits_for_a_claim_in_it_while_other_dates_do_not() -> None:
    partitions = december(d10=(5, 1), d11=(2, 2))
    partitions["2024-12-11"] = Partition(6, 2, claimed=True)
    assert late_plan(partitions, "2024-12-12").dates == ("2024-12-10",)
    assert late_plan(partitions, "2024-12-12").claimed == ("2024-12-11",)
    chain = late_plan(partitions, "2024-12-12", stateful=True)
    assert (chain.dates, chain.claimed, chain.postponed) == ((), ("2024-12-11",), ("2024-12-10",))
    ignored = late_plan(
        partitions | december(d01=(5, 1)), "2024-12-12", stateful=True, max_lookback_days=5
    ).ignored
    assert ignored == ("2024-12-01",)
