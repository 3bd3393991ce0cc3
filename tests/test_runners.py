"""Steps of the main job run in one session or as processes: exit codes, reports, settings."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from case_study import demo
from case_study.main_job import Step
from case_study.runners import OneSession, Outcome, Runner, as_process
from python_jobs.shared.core.failures import DataRefused
from tests.support.session import settings_kept

ANSI, OVERWRITE = "spark.sql.ansi.enabled", "spark.sql.sources.partitionOverwriteMode"


@dataclass(frozen=True)
class Parameters:
    """What the job of this module does; the tests run this module as a step."""

    end: str


def run(spark: SparkSession, parameters: Parameters) -> dict[str, Any]:
    """Return the session's settings and change them, or fail."""
    if parameters.end == "refused":
        raise DataRefused("too many lines")
    if parameters.end == "fault":
        raise ZeroDivisionError("a fault of ours")
    found = {
        "ansi": spark.conf.get(ANSI),
        "overwrite": spark.conf.get(OVERWRITE),
        "zone": spark.conf.get("spark.sql.session.timeZone"),
    }
    spark.conf.set(OVERWRITE, "dynamic")
    return found


def job_step(end: str) -> Step:
    """Return the step that runs this module as a job."""
    command = ("spark-submit", "--master", "local[1]", "tests/test_runners.py", "--end", end)
    return Step(end, command)


def test_what_dbt_or_a_job_sets_has_no_effect_on_the_next_job(spark: SparkSession) -> None:
    one = OneSession(spark)
    untouched = one(job_step("done"))
    with settings_kept(spark):
        spark.conf.set(ANSI, "false")
        spark.conf.set(OVERWRITE, "dynamic")
        spark.conf.set("spark.sql.session.timeZone", "America/New_York")
        touched = one(job_step("done"))
    assert (
        untouched == touched == Outcome(0, json.dumps({"ansi": "true", "overwrite": "STATIC", "zone": "UTC"}))
    )


def test_a_job_that_fails_gives_its_exit_code_and_prints_why(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    one = OneSession(spark)
    assert one(job_step("refused")) == Outcome(DataRefused.exit_code)
    assert capsys.readouterr() == ("", "DataRefused: too many lines\n")
    assert one(job_step("fault")) == Outcome(1)
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback")
    assert printed.endswith("ZeroDivisionError: a fault of ours\n")


@pytest.mark.parametrize(
    "program",
    [
        ("spark-submit", "tests/test_runners.py"),
        ("python", "-m", "python_jobs.data_value.fifo_orderer_kafka"),
    ],
    ids=["job", "program without Spark"],
)
def test_wrong_parameters_of_a_step_end_with_two(
    spark: SparkSession, capsys: pytest.CaptureFixture[str], program: tuple[str, ...]
) -> None:
    assert OneSession(spark)(Step("misspelt", (*program, "--ned", "done"))) == Outcome(2)
    assert "ned" in capsys.readouterr().err


@pytest.mark.parametrize("runner", ["one session", "process"])
def test_dbt_that_fails_gives_its_exit_code(spark: SparkSession, runner: str) -> None:
    run_step: Runner = OneSession(spark) if runner == "one session" else as_process
    assert run_step(Step("dbt", ("dbt", "--quiet", "ls", "--no-such-flag"))) == Outcome(2)


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (
            ["visits", "users"],
            ["load visits", "hours of visits", "dead-letter visits", "dbt build", "report"],
        ),
        (["user_changes"], ["load user_changes", "dbt build"]),
        (["devices"], ["load devices", "dbt build"]),
    ],
)
def test_a_folder_without_some_feeds_is_planned_for_kafka_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: list[str], expected: list[str]
) -> None:
    """Users come from their changes; a folder that has only their extracts has no users."""
    for feed in present:
        (tmp_path / feed / "date=2024-03-01").mkdir(parents=True)
    played: list[list[str]] = []

    @contextlib.contextmanager
    def no_services(spark: Any, landing: Path, feeds: list[str], folder: Path) -> Iterator[str]:
        played.append(feeds)
        yield "broker:9092"

    monkeypatch.setattr(demo, "played_sources", no_services)
    monkeypatch.setattr(demo, "spark_session", lambda _: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr(demo, "run_steps", lambda steps, *_: ({step.name: 1.0 for step in steps}, {}))
    seconds, _, feeds = demo.run_from_kafka(
        "/lakehouse", tmp_path, demo.present_feeds(tmp_path), "local", None, as_process, None
    )
    assert list(seconds) == expected
    assert played == [feeds] == [[feed for feed in present if feed != "users"]]
