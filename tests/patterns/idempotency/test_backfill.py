"""Replay and Backfill: past dates are recomputed, in chunks that are checked, resumed and counted."""

from __future__ import annotations

import dataclasses
import datetime as dt
import itertools
import json
import math
import os
import shlex
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from python_jobs.idempotency.backfill import Backfill, Parameters, job_of, run
from python_jobs.idempotency.backfill_ledger import ChunkState, Job, Ledger
from python_jobs.idempotency.backfill_plan import Chunk, chunks_of
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.delta.commits import latest_commit, latest_version
from python_jobs.shared.files.readiness import Marker
from tests.support.rows import assert_rows
from tests.support.snippets import snippet

THIS = "tests/patterns/idempotency/test_backfill.py::"
NOW = "2024-03-08T12:00:00Z"
VIEWS = "event_date date, page string, views long, pipeline_version string"
# Version 2 counts no bots any more.
QUERY = (
    "select event_date, page, count(*) as views, {pipeline_version} as pipeline_version "
    "from {source} where page not like 'bot%' group by event_date, page"
)
PAGES = {
    "2024-03-01": ["home", "home", "about", "bot"],
    "2024-03-02": ["home", "about", "bot"],
    "2024-03-03": ["home", "about", "about", "bot"],
    "2024-03-04": ["home", "bot", "bot too"],  # two of three pages are bots
    "2024-03-05": ["home", "about", "bot"],
}
COUNTED = [
    ("2024-03-01", "home", 2, "v2"),
    ("2024-03-01", "about", 1, "v2"),
    ("2024-03-02", "home", 1, "v2"),
    ("2024-03-02", "about", 1, "v2"),
    ("2024-03-03", "home", 1, "v2"),
    ("2024-03-03", "about", 2, "v2"),
    ("2024-03-04", "home", 1, "v2"),
    ("2024-03-05", "home", 1, "v2"),
    ("2024-03-05", "about", 1, "v2"),
]
# Of days that no backfill covers; 03-07 is loaded while one runs.
BESIDE = [("2024-02-29", "home", 9, "v1"), ("2024-03-06", "home", 9, "v1"), ("2024-03-07", "home", 9, "v1")]


@dataclass
class Views:
    """Visits, the page views that a live job made of them, and a ledger."""

    spark: SparkSession
    root: Path

    @property
    def source(self) -> str:
        return str(self.root / "visits")

    @property
    def target(self) -> str:
        return str(self.root / "views")

    @property
    def ledger(self) -> str:
        return str(self.root / "backfills")

    def land(self, pages: dict[str, list[str]]) -> None:
        """Append visits to the source, in one commit."""
        rows = [(dt.date.fromisoformat(day), page) for day, pages in pages.items() for page in pages]
        self.append(rows, "event_date date, page string", self.source)

    def load(self, views: list[tuple[str, str, int, str]]) -> None:
        """Append rows to the target, as the live job does."""
        self.append([(dt.date.fromisoformat(day), *others) for day, *others in views], VIEWS, self.target)

    def append(self, rows: list[Any], columns: str, table: str) -> None:
        frame = self.spark.createDataFrame(rows, columns).coalesce(1)
        frame.write.format("delta").mode("append").partitionBy("event_date").save(table)

    def arguments(self, job_id: str, first: str, last: str, **others: Any) -> dict[str, Any]:
        return {
            "job_id": job_id,
            "pipeline_version": "v2",
            "source": self.source,
            "target": self.target,
            "ledger": self.ledger,
            "query": QUERY,
            "from_": first,
            "to": last,
            "chunk_days": 1,
            "now": NOW,
        } | others

    def parameters(self, job_id: str, first: str, last: str, **others: Any) -> Parameters:
        return Parameters(**self.arguments(job_id, first, last, **others))

    def run(self, job_id: str, first: str, last: str, **others: Any) -> dict[str, Any]:
        return run(self.spark, self.parameters(job_id, first, last, **others))

    def rows(self) -> list[tuple[str, str, int, str]]:
        return [(str(r.event_date), r.page, r.views, r.pipeline_version) for r in self.table().collect()]

    def table(self, path: str | None = None) -> DataFrame:
        return self.spark.read.format("delta").load(path or self.target)

    def files(self, *days: str) -> set[str]:
        """Return the data files that the days' rows are in now."""
        return {
            file for file in self.table().inputFiles() if any(f"event_date={day}" in file for day in days)
        }


WEEK = ("2024-03-01", "2024-03-05")


class Died(BaseException):
    """Nothing catches it: what is on disk is what a process leaves that ends."""


def dying_after(nth: int) -> Callable[..., ChunkState]:
    """Return a replacement of chunks that dies when the nth is committed and nobody knows of it yet."""
    calls, replace = itertools.count(1), Backfill.replace

    def replace_or_die(backfill: Backfill, chunk: Chunk, note: Mapping[str, Any]) -> ChunkState:
        call = next(calls)
        if call <= nth:
            outcome = replace(backfill, chunk, note)
        if call >= nth:  # no chunk after it begins
            raise Died
        return outcome

    return replace_or_die


def of(rows: list[tuple[str, str, int, str]], *days: str) -> list[tuple[str, str, int, str]]:
    return [row for row in rows if row[0] in days]


# --- resumed --------------------------------------------------------------------------------------------
# The stages of one story: each continues the job of the one before, and stands above the tests that look at it.


@pytest.fixture(scope="module")
def week(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Views:
    """Return five days that version 1 has counted, with bots; on the first a canary of version 2 counted a page."""
    week = Views(spark, tmp_path_factory.mktemp("week"))
    week.land(PAGES)
    live = [
        (day, page, pages.count(page), "v1") for day, pages in PAGES.items() for page in sorted(set(pages))
    ]
    live = [row for row in live if row[:2] != ("2024-03-01", "about")] + [("2024-03-01", "about", 1, "v2")]
    week.load(live + BESIDE[:2])
    return week


@pytest.fixture(scope="module")
def interrupted(week: Views) -> dict[str, Any]:
    """Let the job die in its third of five chunks, between that one's commit and the ledger's; return its status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backfill, "replace", dying_after(3))
        with pytest.raises(Died):
            week.run("v2", *WEEK, parallel=1, tolerance=0.4, totals=["views"])
    return week.run("v2", *WEEK, action="status")


def test_the_ledger_knows_the_percentage_while_the_job_runs(interrupted: dict[str, Any]) -> None:
    assert (interrupted["status"], interrupted["percent"]) == ("running", 40)
    statuses = [chunk["status"] for chunk in interrupted["chunks"]]
    assert statuses == ["done", "done", "pending", "pending", "pending"]


@dataclass(frozen=True)
class Failed:
    """What a job said and left whose chunk failed."""

    error: DataRefused
    status: dict[str, Any]
    rows: list[tuple[str, str, int, str]]


@pytest.fixture(scope="module")
def failed(week: Views, interrupted: dict[str, Any]) -> Failed:
    """Resume it, with more visits in the source and a live load meanwhile; the day of the bots shrinks too much."""
    week.land({"2024-03-03": ["late"], "2024-03-04": ["late"]})
    with ThreadPoolExecutor() as pool:
        live_load = pool.submit(week.load, BESIDE[2:])
        with pytest.raises(DataRefused) as refused:
            week.run("v2", *WEEK, tolerance=0.4, totals=["views"], parallel=2)
        live_load.result()
    return Failed(refused.value, week.run("v2", *WEEK, action="status"), week.rows())


def test_a_chunk_that_fails_its_validation_keeps_its_rows_and_stops_no_other(failed: Failed) -> None:
    assert "2024-03-04: 1 rows in place of 3" in str(failed.error)
    assert "4 of 5 chunks are done; run the job 'v2' again for the others" in str(failed.error)
    assert (failed.status["status"], failed.status["percent"]) == ("completed_with_failures", 80)
    (error,) = [chunk["error"] for chunk in failed.status["chunks"] if chunk["status"] == "failed"]
    assert "1 rows in place of 3" in error
    bots = [("2024-03-04", page, 1, "v1") for page in ("home", "bot", "bot too")]
    others = [row for row in COUNTED if row[0] != "2024-03-04"]
    assert_rows(failed.rows, [*others, *bots, *BESIDE])


@pytest.fixture(scope="module")
def completed(week: Views, failed: Failed) -> dict[str, Any]:
    """Run it once more, with a tolerance that lets the bots go; return its report."""
    return week.run("v2", *WEEK, tolerance=0.7)


def test_the_job_run_again_does_the_failed_chunk_only(completed: dict[str, Any]) -> None:
    assert completed["processed"] == ["2024-03-04"]
    assert (completed["status"], completed["percent"]) == ("completed", 100)


def test_a_job_that_died_in_its_third_chunk_goes_on_with_the_third(completed: dict[str, Any]) -> None:
    attempts = {chunk["first_date"]: chunk["attempt"] for chunk in completed["chunks"]}
    assert attempts == {
        "2024-03-01": 1, "2024-03-02": 1, "2024-03-03": 1, "2024-03-04": 2, "2024-03-05": 1,
    }  # fmt: skip


# --- the rows -------------------------------------------------------------------------------------------


def test_rows_that_the_new_rule_drops_are_gone_and_other_dates_stay(
    week: Views, completed: dict[str, Any]
) -> None:
    assert_rows(week.rows(), [*COUNTED, *BESIDE])
    untouched = week.spark.read.format("delta").option("versionAsOf", 0).load(week.target).inputFiles()
    beside = {
        file for file in untouched if "event_date=2024-02-29" in file or "event_date=2024-03-06" in file
    }
    assert len(beside) == 2
    assert week.files("2024-02-29", "2024-03-06") == beside


def test_after_a_canary_there_are_rows_of_one_version_only(week: Views, completed: dict[str, Any]) -> None:
    assert {row[3] for row in of(week.rows(), "2024-03-01")} == {"v2"}


def test_a_live_load_goes_on_beside_the_job(week: Views, failed: Failed) -> None:
    assert of(week.rows(), "2024-03-07") == BESIDE[2:]


def test_what_comes_to_the_source_meanwhile_is_not_read(week: Views, completed: dict[str, Any]) -> None:
    assert completed["source_version"] == 0
    assert latest_version(week.spark, week.source) == 1
    assert "late" not in {row[1] for row in week.rows()}


def test_ledger_and_commits_say_what_was_made_of_what(week: Views, completed: dict[str, Any]) -> None:
    assert json.loads(latest_commit(week.spark, week.target)["userMetadata"])["backfill"] == {
        "job_id": "v2",
        "source": week.source,
        "source_version": 0,
        "pipeline_version": "v2",
        "dates": "2024-03-04",
    }
    ledger = week.table(week.ledger).where("job_id = 'v2' and first_date = '2024-03-04'").orderBy("attempt")
    columns = ["status", "pipeline_version", "source_version", "source_rows", "rows_before", "rows"]
    assert [tuple(row) for row in ledger.select(*columns).collect()] == [
        ("pending", "v2", 0, None, None, None),
        ("failed", "v2", 0, 3, None, None),
        ("done", "v2", 0, 3, 3, 1),
    ]


# --- refused --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def views(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Views:
    """Return visits of three days and the views of four: the first day's visits have expired."""
    views = Views(spark, tmp_path_factory.mktemp("views"))
    views.land({day: ["home", "about"] for day in ("2024-03-02", "2024-03-03", "2024-03-04")})
    days = [f"2024-03-0{day}" for day in range(1, 5)]
    views.load([(day, page, 1, "v1") for day in days for page in ("home", "about")])
    return views


def refused(views: Views, kind: type[JobFailed], sentence: str, *dates: str, **others: Any) -> None:
    """Require that a job is refused, with the target as it was and no job in the ledger."""
    before = latest_version(views.spark, views.target)
    with pytest.raises(kind, match=sentence):
        views.run("refused", *dates, **others)
    assert latest_version(views.spark, views.target) == before


def test_a_plan_shows_chunks_rows_and_refusals_and_writes_nothing(views: Views, tmp_path: Path) -> None:
    ledger = str(tmp_path / "no ledger")
    report = views.run(
        "plan", "2024-03-01", "2024-03-04", action="plan", chunk_days=2, ledger=ledger, newest_first=True
    )
    expired = "its source has 0 rows, the target 2: it may have expired"
    assert report["chunks"] == [
        {
            "first_date": "2024-03-03",
            "last_date": "2024-03-04",
            "source_rows": 4,
            "target_rows": 4,
            "refused": {},
        },
        {
            "first_date": "2024-03-01",
            "last_date": "2024-03-02",
            "source_rows": 2,
            "target_rows": 4,
            "refused": {"2024-03-01": expired},
        },
    ]
    assert not Path(ledger).exists()
    assert latest_version(views.spark, views.target) == 0


def test_an_expired_source_empties_nothing_unless_its_marker_says_that_it_is_complete(
    views: Views, tmp_path: Path
) -> None:
    day = "2024-03-01"
    with pytest.raises(DataRefused, match=f"{day} failed: {day}: its source has 0 rows, the target 2"):
        views.run("expired", day, day)
    assert len(of(views.rows(), day)) == 2
    Marker(views.spark, str(tmp_path / f"date={day}")).write({})
    views.run("expired", day, day, markers=str(tmp_path))
    assert of(views.rows(), day) == []
    assert len(views.rows()) == 6


def test_totals_that_are_no_numbers_refuse_their_dates_and_are_no_baseline(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The first date is the one of a real sensor; `seconds` by date, before and in the source."""
    seconds = {
        "2024-03-01": ([60.0, 40.0], [math.nan, 40.0]),
        "2024-03-02": ([60.0, 40.0], [math.inf, 40.0]),
        "2024-03-03": ([math.nan, 40.0], [70.0, 40.0]),
        "2024-03-04": ([], [math.nan]),
        "2024-03-05": ([60.0, 40.0], [200.0, 40.0]),
    }
    views = Views(spark, tmp_path)
    for table, place in ((views.target, 0), (views.source, 1)):
        rows = [(dt.date.fromisoformat(day), value) for day, both in seconds.items() for value in both[place]]
        views.append(rows, "event_date date, seconds double", table)
    with pytest.raises(DataRefused) as refused:
        views.run("nan", *WEEK, query="select event_date, seconds from {source}", totals=["seconds"])
    for sentence in (
        "2024-03-01: seconds sums up to nan, which is no number",
        "2024-03-02: seconds sums up to inf, which is no number",
        "2024-03-04: seconds sums up to nan, which is no number",
        "2024-03-05: seconds sums up to 240.0 in place of 100.0",
        "1 of 5 chunks are done",
    ):
        assert sentence in str(refused.value)
    kept = [(day, value) for day in ("2024-03-01", "2024-03-02", "2024-03-05") for value in (60.0, 40.0)]
    done = [("2024-03-03", 70.0), ("2024-03-03", 40.0)]
    assert_rows(views.table().selectExpr("cast(event_date as string)", "seconds"), kept + done)


def test_a_date_that_is_not_over_is_refused(views: Views) -> None:
    now = "2024-03-04T23:00:00Z"
    refused(views, NotReady, "2024-03-04 is not over in UTC", "2024-03-02", "2024-03-04", now=now)
    plan = views.run("open", "2024-03-04", "2024-03-04", now=now, allow_open_dates=True, action="plan")
    assert plan["chunks"][0]["source_rows"] == 2


def test_dates_of_an_unfinished_job_are_refused_to_another(views: Views) -> None:
    ledger = Ledger(views.spark, views.ledger, lambda: dt.datetime(2024, 3, 8, tzinfo=dt.UTC))

    def job(job_id: str, version: str = "v2") -> Job:
        params = views.parameters(job_id, "2024-03-02", "2024-03-03", pipeline_version=version)
        return job_of(views.spark, params, 0)

    ledger.register(job("first"), chunks_of("2024-03-02", "2024-03-03", 2))
    days = ("2024-03-03", "2024-03-04")
    refused(views, NotReady, r"'first' has not finished 2024-03-02..2024-03-03", *days, chunk_days=2)
    with pytest.raises(WrongUse, match="registered with other values of pipeline_version, dates"):
        ledger.register(job("first", "v3"), chunks_of(*days, 2))
    ended = views.run("first", "2024-03-02", "2024-03-03", action="abandon")
    assert (ended["status"], ended["percent"]) == ("abandoned", 0)
    with pytest.raises(WrongUse, match="was abandoned; name another"):
        ledger.register(job("first"), chunks_of("2024-03-02", "2024-03-03", 2))
    second = ledger.register(job("second"), chunks_of(*days, 2))
    assert second.progress()["status"] == "running"


@pytest.mark.parametrize(
    ("query", "kind", "sentence"),
    [
        (QUERY.replace("{pipeline_version}", "cast(now() as string)"), WrongUse, "has Now in it"),
        (
            QUERY.replace("{pipeline_version}", "cast(current_date as string)"),
            WrongUse,
            "has CurrentDate in it",
        ),
        (QUERY.replace("{pipeline_version}", "uuid()"), WrongUse, "has Uuid in it"),
        (QUERY.replace("{pipeline_version}", "{version}"), WrongUse, "the query can't be used"),
        (QUERY.replace("page, count", "pages, count"), WrongUse, "the query can't be used"),
        (
            QUERY.replace("as views", "as visits"),
            DataRefused,
            "no column views, visits, which the table lacks",
        ),
        (QUERY.replace("event_date,", "timestamp(event_date) as event_date,", 1), WrongUse, "is a timestamp"),
    ],
)
def test_a_query_that_can_not_be_repeated_or_does_not_fit_is_refused(
    views: Views, query: str, kind: type[JobFailed], sentence: str
) -> None:
    refused(views, kind, sentence, "2024-03-02", "2024-03-03", query=query)


def test_rows_of_other_dates_are_refused(views: Views) -> None:
    query = QUERY.replace("event_date,", "date({last_date}) + 1 as event_date,", 1)
    day = "2024-03-02"
    backfill = Backfill(views.spark, views.parameters("x", day, day, query=query, tolerance=1), 0)
    before = latest_version(views.spark, views.target)
    with pytest.raises(DataRefused, match=r"a row for .* lies outside of the slice that is overwritten"):
        backfill.replace(Chunk(day, day), {})
    assert latest_version(views.spark, views.target) == before


# Compared as texts, "2024-03-02T10" is after "2024-03-02", and "2024-3-2" after every other date here.
EVENTS = "event_time string, page string"
TEXT_DATES = "event_date string, page string"
WHOLE_DATES = [("2024-03-01", "a"), ("2024-03-02", "b"), ("2024-03-03", "c"), ("2024-03-04", "d")]


@dataclass(frozen=True)
class Texts:
    """A source, a target by text dates and a job of two chunks on them."""

    spark: SparkSession
    root: Path

    def table(self, name: str) -> DataFrame:
        return self.spark.read.format("delta").load(str(self.root / name))

    def given(self, name: str, rows: list[tuple[str, str]], columns: str = TEXT_DATES) -> Texts:
        writer = self.spark.createDataFrame(rows, columns).coalesce(1).write.format("delta")
        (writer.partitionBy("event_date") if columns == TEXT_DATES else writer).save(str(self.root / name))
        return self

    def run(self, query: str = "select event_date, page from {source}", **others: Any) -> dict[str, Any]:
        params = Views(self.spark, self.root).parameters("texts", "2024-03-01", "2024-03-04", query=query)
        return run(self.spark, dataclasses.replace(params, **({"chunk_days": 2} | others)))


@pytest.fixture
def texts(spark: SparkSession, tmp_path: Path) -> Texts:
    return Texts(spark, tmp_path)


def test_text_dates_are_computed_as_dates_are(texts: Texts) -> None:
    texts.given("visits", WHOLE_DATES).given("views", [("2024-03-02", "old"), ("2024-03-05", "kept")])
    report = texts.run(min_source_share=0)
    assert [chunk["source_rows"] for chunk in report["chunks"]] == [2, 2]
    assert_rows(texts.table("views"), [*WHOLE_DATES, ("2024-03-05", "kept")])


def test_a_source_date_that_is_the_text_of_a_time_is_refused_and_no_date_is_lost(texts: Texts) -> None:
    texts.given("visits", [(f"{date}T10:00:00", page) for date, page in WHOLE_DATES], EVENTS)
    query = "select cast(to_date(event_time) as string) as event_date, page from {source}"
    with pytest.raises(DataRefused, match=r"event_time of .*visits is '2024-03-0.T10:00:00'"):
        texts.run(query, source_date="event_time")
    assert not (texts.root / "views").exists()
    texts.run(query, source_date="to_date(event_time)")
    assert_rows(texts.table("views"), WHOLE_DATES)


@pytest.mark.parametrize("wrong", ["2024-03-02T10", "2024-3-2", "2024-02-30", "20240302", "2024-03-02 "])
def test_a_text_that_is_no_date_is_refused_in_source_and_target(texts: Texts, wrong: str) -> None:
    texts.given("visits", WHOLE_DATES[:1]).given("views", [("2024-03-01", "old"), (wrong, "kept")])
    with pytest.raises(DataRefused, match=rf"`event_date` of .*views is '{wrong}'"):
        texts.run()
    assert_rows(texts.table("views"), [("2024-03-01", "old"), (wrong, "kept")])
    texts.given("texts", [(wrong, "a"), ("2024-03-01", "b")], EVENTS)
    with pytest.raises(DataRefused, match=rf"event_time of .*texts is '{wrong}'"):
        texts.run(source=str(texts.root / "texts"), source_date="event_time", action="plan")


@pytest.mark.parametrize("margin_days", [0, 1])
@pytest.mark.parametrize("wrong", ["2024-03-02T10", "2024-3-2"])
def test_a_new_row_whose_text_is_no_date_refuses_its_chunk(
    texts: Texts, wrong: str, margin_days: int
) -> None:
    texts.given("visits", WHOLE_DATES)
    query = f"select if(page = 'b', '{wrong}', event_date) as event_date, page from {{source}}"
    with pytest.raises(DataRefused, match=rf"its event_date is {wrong}; nothing was overwritten"):
        texts.run(query, margin_days=margin_days, allow_missing_source=True)
    # With a margin the second chunk reads the row, too.
    assert_rows(texts.table("views"), [] if margin_days else WHOLE_DATES[2:])


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"from_": "2024-03-05"}, "the backfill from 2024-03-05 to 2024-03-04 is empty"),
        ({"chunk_days": 0}, "chunk_days is 0"),
        ({"parallel": 0}, "parallel must be 1 or more, got 0"),
        ({"tolerance": -0.1}, "tolerance must be 0 or more, got -0.1"),
        ({"job_id": ""}, "job_id is empty"),
        ({"query": "select * from visits"}, "doesn't mention {source}"),
        ({"source": "visits", "target": "visits"}, "source and target are the same table"),
        ({"now": "noon"}, "'noon' is not a time"),
    ],
)
def test_wrong_parameters_are_refused(tmp_path: Path, others: dict[str, Any], sentence: str) -> None:
    given = Views(None, tmp_path).arguments("x", "2024-03-01", "2024-03-04")  # type: ignore[arg-type]
    with pytest.raises(WrongUse, match=sentence):
        Parameters(**given | others)


# --- a margin -------------------------------------------------------------------------------------------

SESSIONS = """
    with visits as (
        select *, lag(event_time) over (partition by user_id order by event_time) as before from {source}
    ),

    numbered as (
        select
            *,
            sum(if(event_time - before > interval 1 hour, 1, 0)) over (partition by user_id order by event_time) as n
        from visits
    )

    select to_date(min(event_time)) as event_date, user_id, count(*) as visits from numbered group by user_id, n
"""


def test_a_session_that_crosses_midnight_is_whole_with_a_margin(spark: SparkSession, tmp_path: Path) -> None:
    visits = [("2024-03-01 23:50", "a"), ("2024-03-02 00:10", "a"), ("2024-03-02 12:00", "b")]
    rows = [(dt.datetime.fromisoformat(f"{time}+00:00"), user) for time, user in visits]
    frame = spark.createDataFrame(rows, "event_time timestamp, user_id string")
    frame.write.format("delta").save(str(tmp_path / "visits"))

    def sessions(day: str, margin_days: int) -> list[tuple[str, int]]:
        options = {"query": SESSIONS, "source_date": "to_date(event_time)", "margin_days": margin_days}
        params = Views(spark, tmp_path).parameters("sessions", "2024-03-01", "2024-03-02", **options)
        rows = Backfill(spark, params, 0).rows(Chunk(day, day)).collect()
        assert {str(row.event_date) for row in rows} == {day}
        return sorted((row.user_id, row.visits) for row in rows)

    assert sessions("2024-03-01", margin_days=1) == [("a", 2)]
    assert sessions("2024-03-02", margin_days=1) == [("b", 1)]
    assert sessions("2024-03-01", margin_days=0) == [("a", 1)]
    assert sessions("2024-03-02", margin_days=0) == [("a", 1), ("b", 1)]


# --- from bronze ----------------------------------------------------------------------------------------


def test_a_table_replayed_from_bronze_has_the_same_content(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKEHOUSE_ROOT", str(tmp_path))
    loads = [(1, "a", 1.5), (1, "b", 2.5), (2, "a", 3.5), (2, "a", 3.5)]
    lines = [
        (load, json.dumps({"visit_id": visit, "event_time": "2024-03-01T23:30:00Z", "seconds": seconds}))
        for load, visit, seconds in loads
    ]
    bronze = spark.createDataFrame(lines, "load_id long, payload string")
    bronze.write.format("delta").save(str(tmp_path / "bronze_visits"))
    text = snippet("docs/idempotency.md", f"{THIS}test_a_table_replayed_from_bronze_has_the_same_content")
    command = shlex.split(os.path.expandvars(text.replace("\\\n", " ")))
    assert command[:2] == ["spark-submit", "python_jobs/idempotency/backfill.py"]
    silver = str(tmp_path / "silver_visits")
    parameters, _ = parse_parameters(Parameters, command[2:])
    chunks = []
    for job_id in ("first", "replay"):
        chunks += run(spark, dataclasses.replace(parameters, job_id=job_id))["chunks"]
        rows = spark.read.format("delta").load(silver)
        assert_rows(
            rows.selectExpr("visit_id", "seconds", "cast(event_date as string)"),
            [("a", "3.5", "2024-03-01"), ("b", "2.5", "2024-03-01")],
        )
        # Spoiled by another writer.
        spark.sql(f"update delta.`{silver}` set seconds = '0' where visit_id = 'b'").collect()
    assert chunks[0]["content_hash"] == chunks[1]["content_hash"] != "0"
    assert [(chunk["rows_before"], chunk["rows"], chunk["changed_dates"]) for chunk in chunks] == [
        (0, 2, 1),
        (2, 2, 1),
    ]


def test_a_pinned_version_whose_files_are_gone_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    views = Views(spark, tmp_path)
    views.land({"2024-03-01": ["home"]})
    params = views.parameters("old", "2024-03-01", "2024-03-01")
    Backfill(spark, params, 0)
    for file in Path(views.source).rglob(
        "*.parquet"
    ):  # as VACUUM does when the version has passed the retention
        file.unlink()
    with pytest.raises(JobFailed, match=r"version 0 of .*visits, .* can't be read"):
        assert Backfill(spark, params, 0).source_counts
