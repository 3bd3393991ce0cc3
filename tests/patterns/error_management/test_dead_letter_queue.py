"""Dead-Letter queue: depth, age and rate by reason, alerts that come once, letters given up with a reason."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from python_jobs.error_management import dead_letter_queue as job
from python_jobs.error_management.dead_letter_queue import Parameters
from python_jobs.shared.core.failures import DataRefused, NotReady, WrongUse
from python_jobs.shared.spark.job import run_job
from tests.support.dbt_project import DbtProject
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.snippets import snippet, snippets

PAGE = "docs/error_management.md"
HERE = "tests/patterns/error_management/test_dead_letter_queue.py"
NOW = "2024-03-10T12:00:00Z"
COLUMNS = (
    "dead_letter_id string, error_class string, processed_at timestamp, attempts int, status string, "
    "status_changed_at timestamp, status_reason string"
)


def at(day: int, hour: int = 9) -> dt.datetime:
    return dt.datetime(2024, 3, day, hour, tzinfo=dt.UTC)


# Two open ones of today, an open one of three days ago, one replayed, one too old for the classes' week.
LETTERS = [
    ("1", "MISSING_FIELD", at(10), 1, "pending", None, None),
    ("2", "MISSING_FIELD", at(10, 11), 2, "parked", at(10, 11), None),
    ("3", "NOT_A_JSON_OBJECT", at(7, 12), 1, "pending", None, None),
    ("4", "MISSING_FIELD", at(9), 3, "replayed", at(10), None),
    ("5", "UNPARSABLE_FIELD", at(1), 1, "replayed", at(2), None),
]


class Queue:
    """A dead-letter table and the job on it."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.path = str(folder / "dead")
        spark.createDataFrame(LETTERS, COLUMNS).coalesce(1).write.format("delta").save(self.path)

    def run(self, **changes: Any) -> dict[str, Any]:
        given = {"dead_letter": self.path, "now": NOW}
        return job.run(self.spark, Parameters(**(given | changes)))

    def rows(self) -> DataFrame:
        return self.spark.read.format("delta").load(self.path)


@pytest.fixture(scope="module")
def counted(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Queue:
    """Return a queue that tests only count."""
    return Queue(spark, tmp_path_factory.mktemp("queue"))


@pytest.fixture
def queue(spark: SparkSession, tmp_path: Path) -> Queue:
    return Queue(spark, tmp_path)


def test_the_report_counts_depth_age_and_rate_by_reason(counted: Queue) -> None:
    report = counted.run()
    assert (report["open"], report["age_hours"], report["per_day"]) == (3, 72.0, 2)
    assert report["statuses"] == {"parked": 1, "pending": 2, "replayed": 2}
    assert report["alerts"] == []
    utc = {
        name: at(*time).replace(tzinfo=None)
        for name, time in {"a": (9, 9), "b": (10, 11), "c": (7, 12)}.items()
    }
    assert report["by_class"] == [
        {"error_class": "MISSING_FIELD", "letters": 3, "open": 2, "oldest": utc["a"], "newest": utc["b"],
         "mean_attempts": 2.0},
        {"error_class": "NOT_A_JSON_OBJECT", "letters": 1, "open": 1, "oldest": utc["c"], "newest": utc["c"],
         "mean_attempts": 1.0},
    ]  # fmt: skip
    assert report["by_day"] == {"2024-03-01": 1, "2024-03-07": 1, "2024-03-09": 1, "2024-03-10": 2}


@pytest.mark.parametrize(
    ("limits", "alert"),
    [
        ({"max_open": 3, "max_age_hours": 72, "max_per_day": 2}, None),
        ({"max_open": 2}, "max_open is 2 and 3 were found"),
        ({"max_age_hours": 71}, "max_age_hours is 71 and 72 were found"),
        ({"max_per_day": 1}, "max_per_day is 1 and 2 were found"),
    ],
)
def test_a_limit_that_is_passed_is_an_alert(
    counted: Queue, limits: dict[str, float], alert: str | None
) -> None:
    if alert is None:
        assert counted.run(**limits)["alerts"] == []
    else:
        with pytest.raises(DataRefused, match=f"alert: dead letters of .*: {alert}"):
            counted.run(**limits)


def test_a_day_s_alert_fails_the_job_once(queue: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    """1001 letters of today: exit code 3, then 0 as it is known, and 3 again on a day with as many."""
    rows = [(f"n{i}", "MISSING_FIELD", at(10, 10), 1, "pending", None, None) for i in range(999)]
    queue.spark.createDataFrame(rows, COLUMNS).write.format("delta").mode("append").save(queue.path)
    alerts = str(queue.folder / "alerts")
    arguments = ["--dead_letter", queue.path, "--alerts", alerts, "--max_per_day", "1000"]

    def exit_code(now: str) -> object:
        with pytest.raises(SystemExit) as end:
            run_job(Parameters, job.run, [*arguments, "--now", now])
        return end.value.code

    assert [exit_code(NOW), exit_code(NOW), exit_code("2024-03-10T23:00:00Z")] == [3, 0, 0]
    assert "max_per_day is 1000 and 1001 were found" in capsys.readouterr().err
    assert exit_code("2024-03-11T12:00:00Z") == 0, "none came today"
    noted = queue.spark.read.format("delta").load(alerts).select("day", "limit", "got", "allowed")
    assert_rows(noted, [(dt.date(2024, 3, 10), "max_per_day", 1001.0, 1000.0)])


def test_letters_are_given_up_with_a_reason_and_once(queue: Queue) -> None:
    discard = {"action": "discard", "reason": "expired", "older_than": "2 days"}
    report = queue.run(**discard)
    assert report["discarded"] == 1
    assert_rows(
        queue.rows().where("status_reason is not null"),
        [("3", "NOT_A_JSON_OBJECT", at(7, 12), 1, "discarded", at(10, 12), "expired")],
    )
    assert queue.run(**discard) == {"discarded": 0, "dead_letter": report["dead_letter"]}, "no second commit"
    chosen = {"where": "error_class = 'MISSING_FIELD'", "reason": "test traffic"}
    assert queue.run(action="discard", **chosen)["discarded"] == 2, "the replayed one stays replayed"
    assert queue.run()["statuses"] == {"discarded": 3, "replayed": 2}


def test_wrong_use_gives_one_sentence(counted: Queue) -> None:
    for changes, sentence in [
        ({"action": "discard", "where": "true"}, "action discard needs a reason"),
        ({"action": "discard", "reason": "x"}, "action discard needs where or older_than"),
        ({"max_open": -1}, "max_open must be 0 or more, got -1"),
        ({"max_age_hours": math.nan}, "max_age_hours must be 0 or more, got nan"),
        ({"max_age_hours": math.inf}, "max_age_hours must be 0 or more and finite, got inf"),
        ({"older_than": "long"}, "'long' is no duration"),
    ]:
        with pytest.raises(WrongUse, match=sentence):
            counted.run(**changes)
    with pytest.raises(NotReady, match="there is no Delta table"):
        counted.run(dead_letter=str(counted.folder / "nowhere"))


def test_sql_counts_as_the_job_does(counted: Queue, render: MacroRenderer, ansi_modes: str) -> None:
    counted.rows().createOrReplaceTempView("letters")
    now = "2024-03-10 12:00:00"
    assert_rows(
        counted.spark.sql(render("dead_letter_statistics", dead_letter="letters", days=7, now=now)).select(
            "day", "error_class", "letters", "open_letters", "mean_attempts"
        ),
        [
            (dt.date(2024, 3, 10), "MISSING_FIELD", 2, 2, 1.5),
            (dt.date(2024, 3, 9), "MISSING_FIELD", 1, 0, 3.0),
            (dt.date(2024, 3, 7), "NOT_A_JSON_OBJECT", 1, 1, 1.0),
        ],
    )

    def failures(**limits: float) -> DataFrame:
        return counted.spark.sql(
            render("dead_letter_queue_failures", dead_letter="letters", now=now, **limits)
        )

    assert_rows(failures(max_open=3, max_age_hours=72, max_per_day=2), [])
    assert_rows(
        failures(max_open=2, max_age_hours=71, max_per_day=1),
        [("max_open", 3.0, 2.0), ("max_age_hours", 72.0, 71.0), ("max_per_day", 2.0, 1.0)],
    )
    counted.rows().limit(0).createOrReplaceTempView("letters")
    assert_rows(failures(max_open=0, max_age_hours=0, max_per_day=0), [])


def test_sql_refuses_wrong_arguments(render: MacroRenderer) -> None:
    with pytest.raises(Exception, match="dead_letter_queue needs a limit: max_open"):
        render("dead_letter_queue_failures", dead_letter="letters")
    with pytest.raises(Exception, match="max_open must be a number from 0 on, got many"):
        render("dead_letter_queue_failures", dead_letter="letters", max_open="many")
    with pytest.raises(Exception, match="days must be a number of days above 0, got 0"):
        render("dead_letter_statistics", dead_letter="letters", days=0)


def test_snippets_of_the_page(counted: Queue, make_project: Callable[..., DbtProject]) -> None:
    model, properties = snippets(PAGE, f"{HERE}::test_snippets_of_the_page")
    project = make_project({"models/dead_letters_by_day.sql": model, "models/properties.yml": properties})
    project.source("visits_dead_letter", counted.rows())
    project.run("run")
    assert project.table("dead_letters_by_day").count() == 0, "all of them are older than thirty days"
    assert re.search("dead_letters_in_time: fail", project.fails("test"))


def test_command_of_the_page(counted: Queue) -> None:
    words = snippet(PAGE, f"{HERE}::test_command_of_the_page").replace("\\\n", " ").split()
    with pytest.raises(SystemExit) as end:
        run_job(Parameters, job.run, ["--dead_letter", counted.path, "--now", NOW, *words[4:6], *words[8:]])
    assert end.value.code == 0
