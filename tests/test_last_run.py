"""What a run of the main job builds: what depends on a source that has changed since the last complete run."""

from __future__ import annotations

from pathlib import Path

import arro3.core
import pytest
from deltalake import DeltaTable, write_deltalake

from case_study.last_run import News, table_versions
from case_study.main_job import Step

BUILD = Step("dbt build", ("dbt", "build", "--target", "local"))
PARSE = Step("parse", ("true",), tables=("bronze/bronze_visits", "silver/silver_visits_parsed"))
LOAD = Step("load visits", ("true",))
REPORT = Step("report", ("spark-submit", "case_study/visits_report.py"))
LINES, SECONDS = {"lines": [1]}, {"load visits": 2.5}


def commit(root: Path, table: str) -> None:
    rows = arro3.core.Table.from_pydict({"id": arro3.core.Array([1], arro3.core.DataType.int64())})
    write_deltalake(root / table, rows, mode="append")


class Case:
    """A lakehouse of four tables, the project of the build, and a complete run over both."""

    def __init__(self, root: Path) -> None:
        self.lakehouse, self.project = root / "lake house", root / "project"
        for table in ("bronze/bronze_visits", "bronze/bronze_devices",
                      "silver/silver_visits_parsed", "gold/gold_visits"):  # fmt: skip
            commit(self.lakehouse, table)
        (self.project / "models").mkdir(parents=True)
        (self.project / "models" / "visits.sql").write_text("select 1")
        news = self.news()
        assert news.needed(BUILD) == BUILD
        assert news.needed(REPORT) == REPORT
        news.save(LINES, SECONDS)

    def news(self, target: str = "local") -> News:
        return News(self.lakehouse, self.project, target)

    def build(self, target: str = "local") -> str | None:
        step = self.news(target).needed(BUILD)
        return step and " ".join(step.command)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_without_news_nothing_is_built_and_the_report_is_the_last_one(case: Case) -> None:
    news = case.news()
    assert news.needed(LOAD) == LOAD, "it reads files"
    assert news.needed(PARSE) is None
    assert news.needed(BUILD) is None
    assert news.needed(REPORT) is None
    assert (news.last.report, news.last.seconds) == (LINES, SECONDS)
    news.save({}, {"load visits": 0.5})
    again = case.news()
    assert again.needed(BUILD) is None
    assert (again.last.report, again.last.seconds) == (LINES, {"load visits": 0.5})


def test_what_depends_on_a_changed_source_is_built_until_a_run_is_complete(case: Case) -> None:
    commit(case.lakehouse, "bronze/bronze_devices")
    commit(case.lakehouse, "silver/silver_visits_parsed")
    narrowed = (
        "dbt build --target local --select source:*.bronze_devices+ source:*.silver_visits_parsed+ tag:gold"
    )
    assert case.build() == narrowed
    assert case.build() == narrowed, "the build before failed and saved nothing"
    news = case.news()
    news.needed(BUILD)
    # A record that comes during the build may not be in it.
    commit(case.lakehouse, "bronze/bronze_devices")
    commit(case.lakehouse, "gold/gold_visits")
    assert news.needed(REPORT) == REPORT
    news.save(LINES, SECONDS)
    assert case.build() == "dbt build --target local --select source:*.bronze_devices+ tag:gold"


def test_a_step_runs_when_a_table_that_it_reads_or_writes_has_changed(case: Case) -> None:
    commit(case.lakehouse, "bronze/bronze_devices")
    assert case.news().needed(PARSE) is None
    commit(case.lakehouse, "bronze/bronze_visits")
    news = case.news()
    assert news.needed(PARSE) == PARSE
    # Records that come after the step has read the table are news to the next run.
    commit(case.lakehouse, "bronze/bronze_visits")
    news.needed(BUILD)
    news.save(LINES, SECONDS)
    again = case.news()
    assert again.needed(PARSE) == PARSE
    again.save(LINES, SECONDS)
    assert case.news().needed(PARSE) is None
    (case.lakehouse / "silver" / "silver_visits_parsed").rename(case.lakehouse / "lost")
    assert case.news().needed(PARSE) == PARSE


def test_compiled_files_are_no_part_of_the_project(case: Case) -> None:
    (case.project / "python_jobs" / "__pycache__").mkdir(parents=True)
    (case.project / "python_jobs" / "__pycache__" / "job.cpython-311.pyc").write_bytes(b"compiled")
    assert case.build() is None
    (case.project / "python_jobs" / "job.py").write_text("changed = True")
    assert case.build() == "dbt build --target local"
    assert case.news().needed(PARSE) == PARSE


@pytest.mark.parametrize(
    "what", ["a result", "a lost result", "a new result", "the project", "a log", "no file"]
)
def test_everything_is_built_when_more_than_sources_changed(case: Case, what: str) -> None:
    commit(case.lakehouse, "bronze/bronze_devices")
    gold = case.lakehouse / "gold" / "gold_visits"
    match what:
        case "a result":
            commit(case.lakehouse, "gold/gold_visits")
        case "a lost result":
            gold.rename(case.lakehouse / "lost")
        case "a new result":
            commit(case.lakehouse, "gold/gold_others")
        case "the project":
            (case.project / "models" / "visits.sql").write_text("select 2")
        case "a log":
            (gold / "_delta_log" / "00000000000000000000.json").write_text("{")
        case _:
            (case.lakehouse / ".last_run.json").write_text('{"projects": 1}')
    assert case.build() == "dbt build --target local"


def test_another_target_and_another_origin_of_the_records_are_news(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert case.build("cluster") == "dbt build --target local"
    monkeypatch.setenv("LAKEHOUSE_SOURCE", "kafka")
    assert case.build() == "dbt build --target local"


def test_versions_are_deltas_own(case: Case) -> None:
    commit(case.lakehouse, "gold/gold_visits")
    assert table_versions(case.lakehouse) == {
        "bronze/bronze_visits": 0, "bronze/bronze_devices": 0, "silver/silver_visits_parsed": 0,
        "gold/gold_visits": 1,
    }  # fmt: skip
    assert DeltaTable(case.lakehouse / "gold" / "gold_visits").version() == 1
    assert table_versions(case.lakehouse / "nothing") == {}
