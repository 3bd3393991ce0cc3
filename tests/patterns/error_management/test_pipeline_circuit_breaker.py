"""Circuit Breaker for Data Pipelines: each run is a new job over the circuit's file; the clock is an argument."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession

from python_jobs.error_management import pipeline_circuit_breaker as job
from python_jobs.error_management.circuit_breaker import CircuitBreaker, State
from python_jobs.error_management.pipeline_circuit_breaker import Parameters
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.snippets import snippet, snippets

PAGE = "docs/error_management.md"
HERE = "tests/patterns/error_management/test_pipeline_circuit_breaker.py"


class Feed:
    """A feed whose slices are bad or good, and what has been read of it, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bad: dict[str, int] = {}
        self.read: list[str] = []
        self.loaded: list[str] = []

    def load(self, command: Sequence[str]) -> int:
        (owed,) = command
        self.read.append(owed)
        if owed in self.bad:
            return self.bad[owed]
        self.loaded.append(owed)
        return 0

    def run(self, at: str, owed: str | None = None, source: str = "visits", **changes: Any) -> dict[str, Any]:
        given = {"command": ["{slice}"], "now": f"2024-03-01T{at}"} | changes
        return job.run(Parameters(str(self.folder), source, owed, **given), self.load)

    def state(self, source: str = "visits") -> State:
        return CircuitBreaker(source, self.folder).status().state


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    return Feed(tmp_path / "circuits")


def open_it(feed: Feed) -> None:
    """Three bad hours, each in a run of its own; the third run, at 04:05, opens the circuit."""
    for hour in ("01", "02", "03"):
        feed.bad[f"2024-03-01T{hour}"] = 3
        with pytest.raises(DataRefused):
            feed.run(f"{int(hour) + 1:02}:05", f"2024-03-01T{hour}")
    assert feed.state() is State.OPEN


def test_after_three_bad_hours_the_fourth_is_not_read(feed: Feed) -> None:
    open_it(feed)
    feed.read.clear()
    with pytest.raises(NotReady, match=r"the circuit 'visits' is open until 2024-03-01T04:10:00"):
        feed.run("04:09", "2024-03-01T04")
    assert feed.read == []


def test_a_good_trial_closes_it_and_what_was_missed_follows_in_order(feed: Feed) -> None:
    open_it(feed)
    with pytest.raises(NotReady):
        feed.run("04:06", "2024-03-01T04")
    feed.bad.clear()
    feed.read.clear()
    report = feed.run("05:05", "2024-03-01T05")
    hours = [f"2024-03-01T0{hour}" for hour in range(1, 6)]
    assert feed.read == feed.loaded == report["done"] == hours
    assert (report["state"], report["pending"], report["openings"]) == ("closed", [], 1)
    assert feed.run("05:06", "2024-03-01T05")["done"] == ["2024-03-01T05"], "asked for again, loaded again"


def test_a_bad_trial_opens_it_again_after_one_slice(feed: Feed) -> None:
    open_it(feed)
    feed.read.clear()
    with pytest.raises(DataRefused, match="the circuit is open"):
        feed.run("05:05", "2024-03-01T05")
    assert feed.read == ["2024-03-01T01"]
    with pytest.raises(NotReady, match="until 2024-03-01T05:10:00"):
        feed.run("05:09", "2024-03-01T05")


def test_other_sources_go_on(feed: Feed) -> None:
    open_it(feed)
    report = feed.run("04:06", "2024-03-01T04", source="users")
    assert (report["done"], report["state"]) == (["2024-03-01T04"], "closed")


def test_one_bad_file_tried_again_and_again_does_not_keep_good_ones_out(feed: Feed) -> None:
    feed.bad["2024-03-01T01"] = 1
    for hour in range(1, 9):
        with pytest.raises(JobFailed, match=r"the slices 2024-03-01T01 failed.*the circuit is closed"):
            feed.run(f"{hour:02}:05", f"2024-03-01T{hour:02}")
    assert feed.loaded == [f"2024-03-01T{hour:02}" for hour in range(2, 9)]

    skipped = feed.run("10:00", "2024-03-01T01", action="skip")
    assert skipped["pending"] == []
    assert feed.run("10:05", "2024-03-01T09")["done"] == ["2024-03-01T09"]


def test_the_failure_names_slices_and_says_data_refused_only_of_refused_data(feed: Feed) -> None:
    feed.bad = {"2024-03-01T01": 3, "2024-03-01T02": 1}
    with pytest.raises(DataRefused, match="the slices 2024-03-01T01 failed, 0 were loaded"):
        feed.run("02:05", "2024-03-01T01")
    with pytest.raises(JobFailed, match="the slices 2024-03-01T01, 2024-03-01T02 failed") as failed:
        feed.run("03:05", "2024-03-01T02")
    assert failed.value.exit_code == 1


@pytest.mark.parametrize(("code", "kind"), [(2, WrongUse), (4, NotReady)])
def test_wrong_use_and_not_ready_are_no_failures_of_the_source(
    feed: Feed, code: int, kind: type[JobFailed]
) -> None:
    feed.bad["2024-03-01T01"] = code
    for minute in range(5):
        with pytest.raises(kind, match=f"ended with exit code {code}; the circuit is as it was"):
            feed.run(f"02:0{minute}", "2024-03-01T01")
    assert feed.state() is State.CLOSED
    assert feed.run("02:09", action="status")["pending"] == ["2024-03-01T01"]


@pytest.mark.parametrize(
    ("command", "opens"),
    [
        (["dbt", "build", "--vars", "{slice}"], True),
        (["/usr/bin/dbt", "build"], True),
        (["uv", "run", "dbt", "build"], True),
        (["python", "-m", "dbt.cli.main", "build"], True),
        (["spark-submit", "job.py", "--source", "dbt"], False),
        (["sh", "-c", "dbt build"], False),
    ],
)
def test_exit_code_2_of_dbt_is_a_failure_of_the_slice(
    tmp_path: Path, command: list[str], opens: bool
) -> None:
    """dbt ends with it when the connection is lost, and for wrong use alike."""
    for hour in ("01", "02", "03"):
        params = Parameters(
            str(tmp_path), "visits", f"2024-03-01T{hour}", command, now=f"2024-03-01T{hour}:30"
        )
        with pytest.raises(JobFailed if opens else WrongUse) as failed:
            job.run(params, lambda _: 2)
        assert failed.value.exit_code == (1 if opens else 2)
    assert CircuitBreaker("visits", tmp_path).status().state is (State.OPEN if opens else State.CLOSED)


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("no-such-program", "No such file or directory"),
        ("/", "Permission denied"),
        ("a\0b", "embedded null byte"),
    ],
)
def test_a_command_that_can_not_be_started_is_wrong_use(feed: Feed, program: str, cause: str) -> None:
    params = Parameters(str(feed.folder), "visits", "2024-03-01T01", [program], failed_slices=1)
    with pytest.raises(WrongUse, match=rf"can't be started \({cause}\); the circuit is as it was"):
        job.run(params)
    assert feed.state() is State.CLOSED


@pytest.mark.parametrize(
    "changed",
    [{"pending": [5]}, {"pending": "2024"}, {"openings": "x"}, {"reason": 5}, {"transitions": None}],
)
def test_a_circuit_s_file_of_another_form_is_one_sentence(feed: Feed, changed: dict[str, Any]) -> None:
    feed.run("02:05", "2024-03-01T01")
    file = feed.folder / "visits.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(JobFailed, match=r"the circuit's file .*visits\.json can't be read \(TypeError\)"):
        feed.run("03:05", "2024-03-01T02")


def test_one_run_of_a_source_at_a_time_so_one_trial(feed: Feed) -> None:
    open_it(feed)
    other: list[str] = []

    def load(command: Sequence[str]) -> int:
        with pytest.raises(NotReady, match="another run of the source 'visits' is at work"):
            feed.run("05:05", "2024-03-01T06")
        other.append(command[0])
        return 0

    feed.read.clear()
    job.run(
        Parameters(str(feed.folder), "visits", "2024-03-01T05", ["{slice}"], now="2024-03-01T05:05"), load
    )
    assert feed.read == []
    assert other[0] == "2024-03-01T01"
    feed.bad.clear()
    assert feed.run("07:05", "2024-03-01T07")["done"] == ["2024-03-01T06", "2024-03-01T07"], "none is lost"


def test_a_run_that_dies_owes_its_slice_and_its_trial_is_given_up(feed: Feed) -> None:
    open_it(feed)
    feed.bad.clear()
    CircuitBreaker("visits", feed.folder, clock=lambda: 4e9).admit()  # a trial, and no end of it
    job._owe(CircuitBreaker("visits", feed.folder), "2024-03-01T04")
    assert feed.state() is State.HALF_OPEN
    report = feed.run("05:05", "2024-03-01T05", now="2096-10-02T08:00")
    assert report["done"] == [f"2024-03-01T0{hour}" for hour in range(1, 6)]


def test_each_opening_alerts_once(feed: Feed, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        open_it(feed)
        for at in ("04:06", "04:07"):
            with pytest.raises(NotReady):
                feed.run(at, "2024-03-01T04")
        with pytest.raises(DataRefused):
            feed.run("05:05", "2024-03-01T05")
    assert caplog.messages == [
        "alert: the circuit 'visits' has opened: slice 2024-03-01T03 ended with exit code 3"
    ]


def test_reset_by_hand_owes_nothing_less(feed: Feed) -> None:
    open_it(feed)
    feed.bad.clear()
    report = feed.run("04:06", action="reset")
    assert (report["state"], len(report["pending"])) == ("closed", 3)
    assert len(feed.run("04:07", "2024-03-01T04")["done"]) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slice": None}, "action run needs a slice"),
        ({"action": "skip", "slice": None}, "action skip needs a slice"),
        ({"command": []}, "action run needs a command"),
        ({"slice": "2024-03-01T10:30"}, "'2024-03-01T10:30' is no slice"),
        ({"slice": "20240301"}, "'20240301' is no slice"),
        ({"slice": "today"}, "'today' is not a time"),
        ({"command": ["{bucket}"]}, r"the command names \{bucket\}; allowed are slice, from and to"),
        ({"failed_slices": 0}, "failed_slices must be 1 or more, got 0"),
        ({"minimum_slices": 0}, "minimum_slices must be 1 or more, got 0"),
        ({"failure_rate": 2}, "failure_rate is 2"),
        ({"open_seconds": 1e300}, r"open_seconds must be 3153600000 \(100 years\) or less, got 1e\+300"),
    ],
)
def test_wrong_use_gives_one_sentence(changes: dict[str, Any], message: str) -> None:
    given = {"circuits": "c", "source": "visits", "slice": "2024-03-01T10", "command": ["true"]}
    with pytest.raises(WrongUse, match=message):
        Parameters(**(given | changes))


@pytest.mark.parametrize(
    ("owed", "command"),
    [
        ("2024-03-01T23", ["--from=2024-03-01T23", "2024-03-02T00", "2024-03-01T23"]),
        ("2024-02-29", ["--from=2024-02-29", "2024-03-01", "2024-02-29"]),
    ],
)
def test_commands_get_the_bounds_of_their_slice(owed: str, command: list[str]) -> None:
    assert job._command(["--from={from}", "{to}", "{slice}"], owed) == command


def test_as_a_process_it_keeps_the_contract_and_its_state(tmp_path: Path) -> None:
    """The page's configuration, with a command of two lines in place of spark-submit."""
    config = tmp_path / "visits.yml"
    config.write_text(snippet(PAGE, f"{HERE}::test_as_a_process_it_keeps_the_contract_and_its_state"))
    parameters, _ = parse_parameters(
        Parameters, ["--config", str(config), "--circuits", "c", "--slice", "2024-03-01T10"]
    )
    assert job._command(parameters.command, "2024-03-01T10")[-2:] == [
        "--from=2024-03-01T10",
        "--to=2024-03-01T11",
    ]

    def process(owed: str, script: str) -> subprocess.CompletedProcess[str]:
        command = [
            *(sys.executable, "-m", "python_jobs.error_management.pipeline_circuit_breaker"),
            *("--config", str(config), "--circuits", str(tmp_path), "--slice", owed, "--failed_slices", "1"),
            *("--command", json.dumps(["sh", "-c", script])),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    refused = process("2024-03-01T10", "echo loading {slice}; exit 3")
    assert refused.returncode == 3
    assert "loading 2024-03-01T10" in refused.stderr
    assert "alert: the circuit 'visits' has opened" in refused.stderr
    later = process("2024-03-01T11", f"touch {tmp_path}/started")
    assert (later.returncode, (tmp_path / "started").exists()) == (4, False)
    assert "CircuitOpen: the circuit 'visits' is open until" in later.stderr


@pytest.fixture(scope="module")
def circuits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("circuits")


@pytest.fixture(scope="module")
def project(make_project: Callable[..., DbtProject], circuits: Path) -> DbtProject:
    text = "\n".join(snippets(PAGE, f"{HERE}::test_a_model_is_not_built_while_its_source_is_out"))
    hook = yaml.safe_load(text.replace("lakehouse/circuits", str(circuits)))
    return make_project(
        {
            "models/visits_by_page.sql": (
                "{{ config(materialized='table') }}\n"
                "select page, count(*) as visits from {{ source('raw', 'visits') }} group by page"
            ),
            "models/typo.sql": (
                "{{ config(materialized='table', pre_hook=\"{{ lakehouse_patterns.require_closed_circuits("
                f"'visitz', '{circuits}') }}}}\") }}}}\nselect 1 as one"
            ),
            "models/sources.yml": raw_tables("visits"),
            "models/visits.yml": yaml.safe_dump(hook),
        }
    )


def test_a_model_is_not_built_while_its_source_is_out(
    spark: SparkSession, project: DbtProject, circuits: Path
) -> None:
    breaker = CircuitBreaker("visits", circuits)
    breaker.reset()
    CircuitBreaker("users", circuits).reset()
    project.source("visits", spark.createDataFrame([("/a",)], "page string"))
    project.run("run", "--select", "visits_by_page")

    project.source("visits", spark.createDataFrame([("/rubbish",)], "page string"))
    for _ in range(breaker.policy.failures_in_a_row):
        breaker.record(breaker.admit(), ok=False, reason="slice 2024-03-01T03 ended with exit code 3")
    error = project.fails("run", "--select", "visits_by_page")
    assert "the circuit of source 'visits' is open until" in error
    assert "(slice 2024-03-01T03 ended with exit code 3); nothing was built from it" in error
    assert [row.page for row in project.table("visits_by_page").collect()] == ["/a"], "the last good one"

    breaker.reset()
    project.run("run", "--select", "visits_by_page")
    assert [row.page for row in project.table("visits_by_page").collect()] == ["/rubbish"]

    error = project.fails("run", "--select", "typo")
    assert f"there is no circuit 'visitz' in {circuits}, only users, visits" in error


def test_the_case_study_s_configuration_is_one_that_the_job_takes() -> None:
    parameters, _ = parse_parameters(
        Parameters,
        ["--config", "conf/jobs/circuit_breaker_visits.yml", "--circuits", "c", "--slice", "2024-03-01T23"],
    )
    script = job._command(parameters.command, "2024-03-01T23")[-1]
    assert "--from 2024-03-01T23 --to 2024-03-02T00; spark-submit" in script
    assert "--checkpoint" in script
