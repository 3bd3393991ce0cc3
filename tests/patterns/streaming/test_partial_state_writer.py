"""Partial State Writer: a session's row grows with its events, becomes final once, and never goes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.failures import NotReady, WrongUse
from python_jobs.shared.core.sessions import Event
from python_jobs.streaming import partial_state_writer as job
from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.rows import assert_rows
from tests.support.session_streams import Rows, SessionStream, at, written_batches
from tests.support.snippets import snippet, snippets

PAGE = "docs/streaming.md"
HERE = "tests/patterns/streaming/test_partial_state_writer.py"


class Stream(SessionStream):
    """A table of events, and the partial and final sessions that the page's command makes of it."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        command = snippet(PAGE, f"{HERE}::test_a_session_is_partial_until_the_watermark_closes_it")
        super().__init__(spark, folder, job, command)


def of(owners: str, batch: Rows) -> list[tuple[str, int, bool]]:
    """Return owner, number of events and ``is_final`` of a batch's rows of these owners."""
    return sorted((row.visit_id, row.events, row.is_final) for row in batch if row.visit_id in owners)


def events(owner: str, clock: str, number: int) -> list[tuple[str, str, str]]:
    return [(owner, at(clock), f"page {place}") for place in range(number)]


@pytest.fixture(scope="module")
def stream(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Stream:
    return Stream(spark, tmp_path_factory.mktemp("stream"))


# The owners are stories of one stream: a and b are the text's, t has 25 events, v has 20 events at once, and m gets an
# event before its first one. A first run ends by a crash, the next one goes on, and a later release corrects a.


@dataclass(frozen=True)
class Ran:
    """What a run did."""

    batches: list[Rows]
    """Rows that it wrote, by batch."""
    rows: DataFrame
    """Rows that it left in the table."""
    report: dict[str, Any] = field(default_factory=dict)
    """Its report; empty if it didn't come to its end."""
    final_sessions: list[int] = field(default_factory=list)
    """Number of final sessions in the table after each batch; empty if nobody counted."""


@pytest.fixture(scope="module")
def crashed(stream: Stream) -> Ran:
    """Run the job on three files; it dies between the write and the commit of the batch without events behind them."""
    stream.append(("a", at("10:00"), "1"), *events("t", "10:00", 10), ("m", at("10:04"), "second"))
    stream.append(
        ("a", at("10:05"), "2"),
        *events("t", "10:02", 10),
        *events("v", "10:02", 20),
        ("m", at("10:01"), "first"),
    )
    nobody: list[tuple[str | None, str | None, str]] = [(None, at("11:00"), "n"), ("n", None, "n")]
    stream.append(("b", at("11:00"), "1"), *events("t", "10:05", 5), *nobody)
    batches = stream.run_until_crash(lambda rows: ("a", 2, True) in of("a", rows), max_files_per_trigger="1")
    return Ran(batches, stream.rows_now("live_sessions"))


@pytest.fixture(scope="module")
def resumed(stream: Stream, crashed: Ran) -> Ran:
    """Run the job again: it repeats that batch, then reads a late event and a new one of a."""
    stream.append(("a", at("10:06"), "late"), ("a", at("11:30"), "new"))
    with written_batches() as batches:
        report = stream.run(now=at("13:00"))
    return Ran(batches, stream.rows_now("live_sessions"), report)


@pytest.fixture(scope="module")
def restated(stream: Stream, resumed: Ran) -> Ran:
    """Run a later release over all events from an empty checkpoint; it writes a session every ten events."""
    counts = []

    def count(rows: Rows) -> bool:
        counts.append(stream.table("live_sessions").where("is_final and events > 0").count())
        return False

    with written_batches(count) as batches:
        report = stream.run(
            release="1",
            origin="reprocessing",
            every_events="10",
            checkpoint=str(stream.folder / "another"),
            start_over="true",
            max_files_per_trigger="1",
        )
    return Ran(batches, stream.rows_now("live_sessions"), report, counts)


def test_a_session_is_partial_until_the_watermark_closes_it(crashed: Ran) -> None:
    assert [of("ab", batch) for batch in crashed.batches] == [
        [("a", 1, False)],
        [("a", 2, False)],
        [("b", 1, False)],
        [("a", 2, True)],  # in the batch without events
    ]
    assert of("ab", crashed.rows.collect()) == [("a", 2, True), ("b", 1, False)]


def test_a_batch_that_is_repeated_after_a_crash_changes_no_row(crashed: Ran, resumed: Ran) -> None:
    assert of("amtv", resumed.batches[0]) == of("amtv", crashed.batches[-1]), "it was written again"
    # written_at included: the second run has another time.
    assert_rows(
        resumed.rows.where("visit_id in ('m', 't', 'v')"), crashed.rows.where("visit_id in ('m', 't', 'v')")
    )


def test_a_late_event_writes_nothing_and_is_counted(resumed: Ran) -> None:
    assert resumed.report["late"] == 1
    assert resumed.rows.where("array_contains(values, 'late')").count() == 0
    assert of("a", resumed.batches[1]) == [("a", 1, False)], "the new session alone"


def test_a_new_event_after_the_close_is_a_new_session_and_the_former_one_stays_final(
    crashed: Ran, resumed: Ran
) -> None:
    of_a = resumed.rows.where("visit_id = 'a'")
    assert_rows(of_a.where("is_final"), crashed.rows.where("visit_id = 'a'"))
    assert_rows(of_a.where("not is_final").selectExpr("events", "values"), [(1, ["new"])])
    assert of_a.select("session_id").distinct().count() == 2


def test_many_events_of_a_batch_are_one_row_and_one_merge(stream: Stream, crashed: Ran) -> None:
    assert of("v", crashed.batches[1]) == [("v", 20, False)]
    history = stream.spark.sql(f"describe history delta.`{stream.folder}/live_sessions`").orderBy("version")
    operations = [row.operation for row in history.collect()]
    assert operations[: 1 + len(crashed.batches)] == ["CREATE TABLE", *["MERGE"] * len(crashed.batches)]


def test_an_idle_stream_keeps_its_last_session_partial(crashed: Ran, resumed: Ran) -> None:
    """The second run's clock is at 13:00; only the event of 11:30 moves the watermark, to 11:25."""
    assert of("b", crashed.rows.collect()) == [("b", 1, False)]
    assert of("b", resumed.rows.collect()) == [("b", 1, True)], "closed by the event of another owner"
    assert resumed.rows.where("not is_final").select("visit_id").collect() == [("a",)]


def test_events_without_owner_or_time_are_dead_letters_without_state(stream: Stream, resumed: Ran) -> None:
    letters = stream.table("visits_without_session").select("page", "error_class").distinct()
    assert_rows(letters, [("n", "NULL_KEY"), ("n", "NULL_TIME")])
    owners = [batch["state_rows"] for batch in resumed.report["batches"]]
    assert owners == [1, 2, 1], "b; a and b; a"


def test_every_ten_updates_and_at_the_end(restated: Ran) -> None:
    assert [of("t", batch) for batch in restated.batches] == [
        [("t", 10, False)],
        [("t", 20, False)],
        [],
        [("t", 25, True)],
        [],
    ]
    assert of("a", [row for batch in restated.batches for row in batch]) == [("a", 3, True)], "less than ten"


@pytest.mark.parametrize(
    ("parameters", "written"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"every_events": "2"}, [2, 4]),
        ({"every": "10 minutes"}, [1, 4]),
    ],
)
def test_when_a_growing_session_is_written(
    stream: Stream, parameters: dict[str, str], written: list[int]
) -> None:
    """Its events come one by one, at 0, 4, 8, 12 and 16 minutes of event time."""
    emits = stream.parameters(**parameters).emits
    session = [Event(minute * 60_000_000, (), None) for minute in (0, 4, 8, 12, 16)]
    assert [size for size in range(1, 6) if emits(session[: size - 1], session[:size])] == written


def test_a_later_release_corrects_a_final_session(resumed: Ran, restated: Ran) -> None:
    columns = ["session_id", "visit_id", "events", "values", "is_final", "release", "origin"]
    before, after = (ran.rows.where("hour(started_at) = 10").select(*columns) for ran in (resumed, restated))
    corrected = {"events": 3, "values": ["1", "2", "late"]}
    expected = [
        {**row.asDict(), **(corrected if row.visit_id == "a" else {})}
        | ({"release": 1, "origin": "reprocessing"} if row.events else {})
        for row in before.collect()
    ]
    assert_rows(after, expected)


def test_readers_of_final_sessions_lose_none_while_a_later_release_begins_again(restated: Ran) -> None:
    """Its partial rows of t and v replace no final row."""
    assert restated.final_sessions == [5] * len(restated.batches)


def test_views_of_the_page(make_project: Callable[..., DbtProject], resumed: Ran) -> None:
    final, current = snippets(PAGE, f"{HERE}::test_views_of_the_page")
    project = make_project(
        {
            "models/sources.yml": raw_tables("live_sessions"),
            "models/complete_sessions.sql": final,
            "models/sessions_for_fraud.sql": current,
        }
    )
    project.source("live_sessions", resumed.rows)
    project.run("build")
    finals = [("a", 2, True), ("b", 1, True), ("m", 2, True), ("t", 25, True), ("v", 20, True)]
    assert of("abmtv", project.table("complete_sessions").collect()) == finals
    assert of("abmtv", project.table("sessions_for_fraud").collect()) == [("a", 1, False), *finals]
    # The control: is_final alone also shows the row of m's former id, which has no events.
    assert ("m", 0, True) in of("m", resumed.rows.where("is_final").collect())


def test_wrong_use_is_refused_in_one_sentence(spark: SparkSession, tmp_path: Path, stream: Stream) -> None:
    with pytest.raises(NotReady, match="there is no Delta table"):
        Stream(spark, tmp_path).run()
    for changes, sentence in [
        ({"every_events": "0"}, "every_events must be 1 or more, got 0"),
        ({"every": "soon"}, "'soon' is no duration"),
        ({"every": "1 hour", "every_events": "2"}, "can't go together, got 2 and '1 hour'; give one of them"),
        ({"key.Is_Final": "page"}, "key can't name columns that the job writes itself: Is_Final"),
    ]:
        with pytest.raises(WrongUse, match=sentence):
            stream.parameters(**changes)
