"""Incremental Sessionizer as a job: its runs, their reruns in order, and what a run that dies leaves behind."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from pyspark.sql import DataFrame, SparkSession

from python_jobs.data_value import incremental_sessionizer as job
from python_jobs.data_value.incremental_sessionizer import Parameters
from python_jobs.shared.core.failures import JobFailed, NotReady, WrongUse
from python_jobs.shared.delta.commits import latest_version, write_once
from python_jobs.shared.delta.overwrite import overwrite
from tests.support.failing_write import failing_at
from tests.support.page_commands import command_parameters
from tests.support.rows import assert_rows
from tests.support.snippets import snippet

PAGE = "docs/data_value.md"
HERE = "tests/patterns/data_value/test_incremental_sessionizer_job.py::"
VISITS = "user_id string, event_time string, page string, visit_date date, visit_hour int"
DAY = "2024-03-01"


class Hours:
    """A table of visits by hour, and the sessions that the page's command makes of it."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder

    def append(self, hour: int, *visits: tuple[str | None, str | None, str]) -> None:
        """Append visits to an hour's partition; a clock such as 09:05 is a time of the day."""
        rows = [
            (user, at and (at if len(at) > 5 else f"{DAY}T{at}:00Z"), page, dt.date.fromisoformat(DAY), hour)
            for user, at, page in visits
        ]
        write_once(
            self.spark,
            self.spark.createDataFrame(rows, VISITS).coalesce(1),
            str(self.folder / "visits"),
            partition_columns=["visit_date", "visit_hour"],
        )

    def parameters(self, hour: int, **changes: str) -> Parameters:
        text = snippet(PAGE, f"{HERE}test_each_run_completes_the_sessions_that_no_later_event_can_join")
        given = {"run": f"{DAY}T{hour:02}", "now": "2024-03-02T00:00:00Z"} | changes
        return command_parameters(Parameters, text, self.folder, given)

    def run(self, *hours: int, **changes: str) -> list[dict[str, Any]]:
        """Run the job for hours, in this order."""
        return [job.run(self.spark, self.parameters(hour, **changes)) for hour in hours]

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def table(self, name: str) -> DataFrame:
        return self.spark.read.format("delta").load(self.path(name))

    def sessions(self) -> list[tuple[Any, ...]]:
        """Return the completed sessions: run, user, start, end, pages."""
        rows = self.table("sessions").selectExpr(*_shown("run_start", "started_at", "ended_at"))
        return sorted(tuple(row) for row in rows.collect())

    def open(self) -> list[tuple[Any, ...]]:
        """Return the open sessions: run, user, start, end, pages, and the run that will complete them."""
        rows = self.table("pending_sessions").where("status = 'open'")
        shown = rows.selectExpr(*_shown("run_start", "started_at", "ended_at"), _hour("expiration_run"))
        return sorted(tuple(row) for row in shown.collect())

    def state(self) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        return self.open(), self.sessions()

    def versions(self) -> list[int]:
        return [latest_version(self.spark, self.path(name)) for name in ("pending_sessions", "sessions")]


def _shown(run: str, start: str, end: str) -> list[str]:
    clock = "date_format({}, 'HH:mm')"
    return [_hour(run), "user_id", clock.format(start), clock.format(end), "array_join(values, '')"]


def _hour(column: str) -> str:
    return f"hour({column})"


@pytest.fixture(scope="module")
def hours(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Hours:
    """Return visits of four hours; no user visits in the last one."""
    hours = Hours(spark, tmp_path_factory.mktemp("hours"))
    hours.append(
        9,
        ("u1", "09:50", "b"), ("u1", "09:05", "a"), ("u1", "09:50", "b"), ("u2", "09:30", "x"),
        ("u3", "09:01", "p"), ("u4", "09:01", "p"),
        (None, "09:10", "no user"), ("u1", None, "no time"), ("u1", "09:20:00", "no date"),
        ("u1", "08:59", "another hour"), (None, "10:00", "no user, another hour"),
    )  # fmt: skip
    hours.append(10, ("u1", "10:40", "d"), ("u1", "10:10", "c"))
    hours.append(11, ("u3", "11:30", "q"), ("u4", "11:01", "q"))
    return hours


# The stages of one story: each continues the tables of the one before.


@pytest.fixture(scope="module")
def day(hours: Hours) -> list[dict[str, Any]]:
    """Run the four hours."""
    return hours.run(9, 10, 11, 12)


OPEN_AT_9 = [
    (9, "u1", "09:05", "09:50", "ab", 11),
    (9, "u2", "09:30", "09:30", "x", 11),
    (9, "u3", "09:01", "09:01", "p", 11),
    (9, "u4", "09:01", "09:01", "p", 11),
]


def test_each_run_completes_the_sessions_that_no_later_event_can_join(
    hours: Hours, day: list[dict[str, Any]]
) -> None:
    assert hours.open() == [
        *OPEN_AT_9,
        (10, "u1", "09:05", "10:40", "abcd", 12),
        (10, "u2", "09:30", "09:30", "x", 11),
        (10, "u3", "09:01", "09:01", "p", 11),
        (10, "u4", "09:01", "09:01", "p", 11),
        (11, "u1", "09:05", "10:40", "abcd", 12),
        (11, "u3", "11:30", "11:30", "q", 13),
        (11, "u4", "09:01", "11:01", "pq", 13),
        (12, "u3", "11:30", "11:30", "q", 13),
        (12, "u4", "09:01", "11:01", "pq", 13),
    ]
    assert hours.sessions() == [
        (11, "u2", "09:30", "09:30", "x"),
        (11, "u3", "09:01", "09:01", "p"),
        (12, "u1", "09:05", "10:40", "abcd"),
    ]
    assert [(report["read"], report["dead"], report["completed"], report["open"]) for report in day] == [
        (11, 5, 0, 4), (2, 0, 0, 4), (2, 0, 2, 3), (0, 0, 1, 2),
    ]  # fmt: skip


def test_a_run_reads_its_partition_and_the_run_before_alone(hours: Hours, day: list[dict[str, Any]]) -> None:
    """Whatever else the tables hold: a run costs the same after a hundred days as after one."""
    run = job.Run(hours.spark, hours.parameters(11))
    folders = {unquote(unquote(file)).rsplit("/", 1)[0] for file in run.rows(run.judged()).inputFiles()}
    visits, pending = sorted(folders, key=lambda folder: "pending_sessions" in folder)
    assert visits.endswith(f"/visits/visit_date={DAY}/visit_hour=11")
    assert "/pending_sessions/run_start=2024-03-01" in pending
    assert "10:00:00" in pending


def test_unusable_visits_are_dead_letters(hours: Hours, day: list[dict[str, Any]]) -> None:
    dead = hours.table("visits_without_session")
    outside = (
        "event_time is not in the interval of the run, from 2024-03-01T09:00:00Z to 2024-03-01T10:00:00Z"
    )
    assert_rows(
        dead.select("page", "error_class", "error_message", "status"),
        [
            ("no user", "NULL_KEY", "the record has NULL in user_id", "pending"),
            ("no user, another hour", "NULL_KEY", "the record has NULL in user_id", "pending"),
            ("no time", "NULL_TIME", "the record has NULL in event_time", "pending"),
            ("no date", "NULL_TIME", "the record has NULL in event_time", "pending"),
            ("another hour", "OTHER_RUN", outside, "pending"),
        ],
    )


def test_a_run_without_the_one_before_is_refused_and_writes_nothing(
    hours: Hours, day: list[dict[str, Any]]
) -> None:
    before = hours.versions()
    with pytest.raises(
        NotReady, match="14:00:00Z needs the run before it, of 2024-03-01T13:00:00Z, published in"
    ):
        hours.run(14)
    with pytest.raises(NotReady, match="needs the run before it"):
        hours.run(9, first_run=f"{DAY}T08")
    with pytest.raises(WrongUse, match="is before first_run"):
        hours.run(8)
    with pytest.raises(WrongUse, match=r"an expression can't be used .*unknown_column"):
        hours.run(13, value="unknown_column")
    assert hours.versions() == before


@pytest.fixture(scope="module")
def rerun(hours: Hours, day: list[dict[str, Any]]) -> dict[str, Any]:
    """Run 10 again, although a late visit of 9 has come; the first try dies before it writes the sessions."""
    story: dict[str, Any] = {"day": hours.state(), "refused": []}
    hours.append(9, ("u1", "09:55", "L"))
    with failing_at(hours.path("sessions"), job, "overwrite", ConnectionError("no network")):
        hours.run(10)
    for hour in (11, 13):
        with pytest.raises(NotReady, match="needs the run before it") as refused:
            hours.run(hour)
        story["refused"].append(str(refused.value))
    hours.run(10)
    return story | {"rerun": hours.state()}


def test_after_a_dead_rerun_only_the_same_run_can_run(rerun: dict[str, Any]) -> None:
    """Run 12 was published, but it stands on the run that is being replaced."""
    assert len(rerun["refused"]) == 2


def test_a_rerun_removes_its_run_and_all_later_ones_and_a_late_visit_of_before_changes_nothing(
    rerun: dict[str, Any],
) -> None:
    open_, sessions = rerun["rerun"]
    assert sessions == []
    assert {row[0] for row in open_} == {9, 10}
    assert open_ == [row for row in rerun["day"][0] if row[0] <= 10]


@pytest.fixture(scope="module")
def replay(hours: Hours, rerun: dict[str, Any]) -> dict[str, Any]:
    """Run all hours again; the first one comes between the check and the write of another run, the last one dies."""
    story = dict(rerun)

    def after_the_other(*arguments: Any, **named: Any) -> Any:
        patch.undo()
        story["reports"] = hours.run(9)
        return overwrite(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "overwrite", after_the_other)
        with pytest.raises(JobFailed, match=r"another run has written into .* meanwhile") as refused:
            hours.run(11)
    story |= {"second writer": str(refused.value), "after 9": hours.open()}
    story["reports"] += hours.run(10, 11)
    with failing_at(hours.path("pending_sessions"), job, "write_once", ConnectionError("no network")):
        hours.run(12)
    story["replay"] = hours.state()
    with pytest.raises(NotReady, match="needs the run before it"):
        hours.run(13)
    story["reports"] += hours.run(12, keep_runs="2")
    return story | {"last run again": hours.state()}


def test_of_two_runs_at_once_the_second_is_refused(replay: dict[str, Any]) -> None:
    assert "one run at a time" in replay["second writer"]
    assert {row[0] for row in replay["after 9"]} == {9}


def test_a_replay_gives_the_same_tables_but_for_the_late_visit(replay: dict[str, Any]) -> None:
    def of_others(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return [row for row in rows if row[1] != "u1"]

    assert of_others(replay["replay"][0]) == of_others(replay["day"][0])
    assert of_others(replay["replay"][1]) == of_others(replay["day"][1])


def test_a_late_visit_counts_after_a_replay_from_its_hour(replay: dict[str, Any]) -> None:
    open_, sessions = replay["replay"]
    assert [row for row in open_ if row[1] == "u1"] == [
        (9, "u1", "09:05", "09:55", "abL", 11),
        (10, "u1", "09:05", "10:40", "abLcd", 12),
        (11, "u1", "09:05", "10:40", "abLcd", 12),
    ]
    assert [row for row in sessions if row[1] == "u1"] == [(12, "u1", "09:05", "10:40", "abLcd")]


def test_a_run_that_died_before_its_marker_and_ran_again_doubles_and_loses_nothing(
    replay: dict[str, Any],
) -> None:
    """The crash came after both tables were written."""
    before, after = replay["replay"], replay["last run again"]
    assert after == ([row for row in before[0] if row[0] >= 11], before[1])


def test_dead_letters_stay_as_they_are_in_a_rerun(hours: Hours, replay: dict[str, Any]) -> None:
    assert [report["dead"] for report in replay["reports"]] == [5, 0, 0, 0]
    assert hours.table("visits_without_session").count() == 5


def test_only_the_newest_runs_are_kept_for_a_rerun(hours: Hours, replay: dict[str, Any]) -> None:
    runs = {row.run_start.hour for row in hours.table("pending_sessions").select("run_start").collect()}
    assert runs == {11, 12}
    with pytest.raises(NotReady, match="needs the run before it, of 2024-03-01T10:00:00Z"):
        hours.run(11)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target": "lakehouse/visits"}, "must be four tables"),
        ({"keep_runs": "1"}, "keep_runs must be 2 or more"),
        ({"gap": "2 seconds"}, "gap must be a number of minutes, hours or days"),
        ({"run": "2024-03-01T09:30"}, "run must be the start of an interval"),
        ({"key.events": "page"}, "owner can't have the column 'events'"),
    ],
)
def test_wrong_use_is_refused_in_one_sentence(
    spark: SparkSession, tmp_path: Path, changes: dict[str, str], sentence: str
) -> None:
    hours = Hours(spark, tmp_path)
    with pytest.raises(WrongUse, match=sentence):
        job.run(
            spark,
            hours.parameters(
                9, **{name: value.replace("lakehouse", str(tmp_path)) for name, value in changes.items()}
            ),
        )
