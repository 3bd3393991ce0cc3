"""Stateful Sessionizer: sessions are written when the watermark closes them, once, whatever breaks off."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from python_jobs.data_value import stateful_sessionizer as job
from python_jobs.shared.core.failures import NotReady, WrongUse
from python_jobs.shared.core.sessions import Event, sessions_of
from python_jobs.shared.delta.keyed_tables import DeltaSink
from python_jobs.shared.records.session_rows import VERSION
from tests.support.broken_texts import BROKEN
from tests.support.rows import assert_rows
from tests.support.session_streams import EVENTS, SessionStream, at
from tests.support.snippets import snippet

PAGE = "docs/data_value.md"
HERE = "tests/patterns/data_value/test_stateful_sessionizer.py"


class Stream(SessionStream):
    """A table of events, and the sessions that the page's command makes of it."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        command = snippet(PAGE, f"{HERE}::test_a_session_is_written_when_the_watermark_closes_it")
        super().__init__(spark, folder, job, command)

    def sessions(self) -> DataFrame:
        return self.table("live_sessions").selectExpr(
            "visit_id",
            "date_format(started_at, 'HH:mm')",
            "date_format(ended_at, 'HH:mm')",
            "duration_ms",
            "array_join(values, '')",
            "is_final",
        )


@pytest.fixture(scope="module")
def stream(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Stream:
    return Stream(spark, tmp_path_factory.mktemp("stream"))


# The owners are stories of one stream: a first run that a crash ends, the run that goes on, and a replay.


@pytest.fixture(scope="module")
def crashed(stream: Stream) -> list[tuple[Any, ...]]:
    """Run the job until it dies between the write and the commit of its third batch; return the rows that it left.

    A is the text's example, out of order. The third batch has the watermark 10:14, which closes K's session at 10:13.
    """
    stream.append(("A", at("10:00"), "p"), ("A", at("10:08"), "r"), ("K", at("10:03"), "k"))
    stream.append(("A", at("10:01"), "q"), ("B", at("10:15"), "b"))
    stream.append(
        ("B", at("10:30"), "c"),
        ("C", at("10:30"), "x"),
        ("L", at("09:50"), "late"),
        (None, at("10:31"), "n"),
        ("D", "10:30", "n"),
        (BROKEN, at("10:31"), "n"),
        ("A", at("10:31"), BROKEN),
    )
    stream.run_until_crash(bool, max_files_per_trigger="1")
    return stream.table("live_sessions").collect()


@pytest.fixture(scope="module")
def resumed(stream: Stream, crashed: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Run the job again: it repeats the third batch, then reads events of noon. The watermark ends at 12:29."""
    stream.append(("Z", at("11:59"), "z"), ("Y", "2024-01-01T12:30:00+00:30", "y"), ("Z", at("12:30"), "z"))
    return stream.run(now=at("13:00"))


def test_a_session_stays_open_until_the_gap_has_passed_in_event_time(
    stream: Stream, crashed: list[Any], resumed: dict[str, Any]
) -> None:
    """The text's sample counts the gap from the watermark and closes A at 10:14."""
    repeated = resumed["batches"][0]
    assert repeated["watermark"] == dt.datetime(2024, 1, 1, 10, 14, tzinfo=dt.UTC)
    assert [row.visit_id for row in crashed] == ["K"], (
        "10:03 and the gap are before 10:14, 10:08 and the gap aren't"
    )


EXPECTED = [
    ("A", "10:00", "10:08", 480_000, "pqr", True),  # the pages before the restart included, in order
    ("B", "10:15", "10:15", 0, "b", True),  # not one session with 10:30
    ("B", "10:30", "10:30", 0, "c", True),
    ("C", "10:30", "10:30", 0, "x", True),
    ("K", "10:03", "10:03", 0, "k", True),
    ("Y", "12:00", "12:00", 0, "y", True),
    ("Z", "11:59", "11:59", 0, "z", True),
]


def test_a_session_is_written_when_the_watermark_closes_it(stream: Stream, resumed: dict[str, Any]) -> None:
    assert_rows(stream.sessions(), EXPECTED)


def test_a_batch_that_is_repeated_after_a_crash_writes_no_session_twice(
    stream: Stream, crashed: list[Any], resumed: dict[str, Any]
) -> None:
    assert resumed["sessions_written"] == len(EXPECTED), "K's session was written again"
    assert_rows(stream.table("live_sessions").where("visit_id = 'K'"), crashed)


def test_an_event_behind_the_watermark_is_dropped_and_counted(
    stream: Stream, resumed: dict[str, Any]
) -> None:
    assert resumed["late"] == 1
    assert stream.table("live_sessions").where("array_contains(values, 'late')").count() == 0


def test_events_without_owner_or_full_time_or_with_other_bytes_than_utf_8_are_dead_letters(
    stream: Stream, resumed: dict[str, Any]
) -> None:
    assert resumed["dead"] == 4
    assert_rows(
        stream.table("visits_without_session").select("position", "error_class", "error_message"),
        [
            (8, "NULL_KEY", "the record has NULL in visit_id"),
            (9, "NULL_TIME", "the record has NULL in event_time"),  # no time of today
            (10, "NOT_UTF8", "the record has bytes that aren't UTF-8 in visit_id"),
            (11, "NOT_UTF8", "the record has bytes that aren't UTF-8 in value"),
        ],
    )


def test_the_state_of_closed_sessions_is_removed(resumed: dict[str, Any]) -> None:
    owners = [batch["state_rows"] for batch in resumed["batches"]]
    assert owners == [3, 4, 1], "A, B and C without K; B, C, Y and Z; in the end Z, who has the newest event"


def test_the_stream_gives_the_sessions_of_all_events_at_once(stream: Stream, resumed: dict[str, Any]) -> None:
    events: dict[str, list[Event]] = {}
    for visit, clock, page, position in (
        stream.table("events").where("page not in ('n', 'late') and is_valid_utf8(page)").collect()
    ):
        micros = int(dt.datetime.fromisoformat(clock).timestamp() * 1_000_000)
        events.setdefault(visit, []).append(Event(micros, (position,), page))
    newest = dt.datetime(2024, 1, 1, 12, 20, tzinfo=dt.UTC).timestamp() * 1_000_000
    expected = [
        (visit, session[0].at, session[-1].at, [event.value for event in session])
        for visit, of_visit in events.items()
        for session in sessions_of(of_visit, 600_000_000)
        if session[-1].at < newest
    ]
    found = stream.table("live_sessions").selectExpr(
        "visit_id", "unix_micros(started_at)", "unix_micros(ended_at)", "values"
    )
    assert_rows(found, expected)


@pytest.fixture(scope="module")
def before_the_replay(stream: Stream, resumed: dict[str, Any]) -> DataFrame:
    """Return the rows of the table before another run changes it."""
    return stream.rows_now("live_sessions")


@pytest.fixture(scope="module")
def replayed(stream: Stream, before_the_replay: DataFrame) -> dict[str, Any]:
    """Run a later release of the other variant from an empty checkpoint: it replaces the row of each id that it has."""
    return stream.run(
        variant="session_window",
        release="1",
        checkpoint=str(stream.folder / "another"),
        start_over="true",
        now=at("14:00"),
    )


def test_the_session_window_gives_the_same_sessions(stream: Stream, replayed: dict[str, Any]) -> None:
    assert (replayed["dead"], replayed["sessions_written"]) == (4, len(EXPECTED) + 1)
    # 09:50 isn't late for a query that reads all files in one batch.
    late = ("L", "09:50", "09:50", 0, "late", True)
    assert_rows(stream.sessions(), [*EXPECTED, late])
    assert stream.table("live_sessions").where("release = 1").count() == len(EXPECTED) + 1


def test_the_same_events_give_the_same_ids_after_a_lost_checkpoint(
    stream: Stream, before_the_replay: DataFrame, replayed: dict[str, Any]
) -> None:
    after = stream.table("live_sessions").where("visit_id <> 'L'")
    assert_rows(after.drop("release", "written_at"), before_the_replay.drop("release", "written_at"))


def test_exactly_the_gap_joins_in_both_variants(spark: SparkSession, tmp_path: Path) -> None:
    clocks = ["10:00:00", "10:20:00", "10:39:59", "11:00:00"]
    # The first event comes twice, as after a producer's retry.
    rows = [("W", f"2024-01-01T{clock}Z", clock[3:], 0) for clock in (clocks[0], *clocks)]
    params = Stream(spark, tmp_path).parameters(gap="20 minutes", variant="session_window")
    # A window needs no stream: the same query on a DataFrame.
    found = job.sessions(spark.createDataFrame(rows, EVENTS), params)
    assert_rows(found.select("events", "values"), [(3, ["00:00", "20:00", "39:59"]), (1, ["00:00"])])


def test_a_newer_row_of_a_session_is_never_replaced_by_an_older_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    cases = {  # stored and offered: release, is_final, version
        "newer": ((0, False, 1), (0, False, 2)),
        "late": ((0, False, 2), (0, False, 1)),
        "final": ((0, False, 2), (0, True, 2)),
        "final of fewer events": ((0, False, 3), (0, True, 2)),
        "partial after final": ((0, True, 2), (0, False, 2)),
        "larger partial after final": ((0, True, 2), (0, False, 3)),
        "repeated": ((0, True, 2), (0, True, 2)),
        "later release": ((0, True, 2), (1, True, 1)),
        "partial of a later release": ((0, False, 2), (1, False, 1)),
        "partial of a later release after final": ((0, True, 2), (1, False, 3)),
        "earlier release": ((1, False, 1), (0, True, 2)),
    }
    columns = "session_id string, day date, release int, is_final boolean, version bigint, run int"

    def rows(place: int) -> DataFrame:
        day = dt.date(2024, 1, 1)
        return spark.createDataFrame(
            [(name, day, *case[place], place) for name, case in cases.items()], columns
        )

    table = str(tmp_path / "sessions")
    rows(0).write.format("delta").partitionBy("day").save(table)
    DeltaSink(spark, table, rows(0), ["session_id"], "day", VERSION, "is_final").write(rows(1), 1)
    found = (
        spark.read.format("delta").load(table).select("session_id", "release", "is_final", "version", "run")
    )
    replaced = {"newer", "final", "final of fewer events", "later release", "partial of a later release"}
    places = {name: int(name in replaced) for name in cases}
    assert_rows(found, [(name, *cases[name][place], place) for name, place in places.items()])


def test_wrong_use_is_refused_in_one_sentence(spark: SparkSession, tmp_path: Path, stream: Stream) -> None:
    with pytest.raises(NotReady, match="there is no Delta table"):
        Stream(spark, tmp_path).run()
    for changes, sentence in [
        ({"gap": "soon"}, "'soon' is no duration"),
        ({"release": "-1"}, "release must be 0 or more, got -1"),
        ({"key.Is_Final": "page"}, "key can't name columns that the job writes itself: Is_Final"),
        ({"event_time": "position"}, "event_time 'position' is of type bigint; it must be a timestamp"),
        ({"target": str(stream.folder / "events")}, "must be three tables"),
    ]:
        with pytest.raises(WrongUse, match=sentence):
            stream.run(**changes)


def test_another_gap_needs_another_checkpoint(stream: Stream, resumed: dict[str, Any]) -> None:
    for changes in ({"gap": "20 minutes"}, {"variant": "session_window"}):
        with pytest.raises(WrongUse, match="was made for another rules; give this query another checkpoint"):
            stream.run(**changes)
