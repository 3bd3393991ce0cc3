"""Stateful Sessionizer: sessions are written when the watermark closes them, once, whatever breaks off."""

from __future__ import annotations

import datetime as dt
import shlex
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from python_jobs.data_value import stateful_sessionizer as job
from python_jobs.data_value.stateful_sessionizer import Parameters
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import NotReady, WrongUse
from python_jobs.shared.core.sessions import Event, sessions_of
from python_jobs.shared.delta.commits import write_once
from python_jobs.shared.delta.keyed_tables import DeltaSink
from tests.support.rows import assert_rows
from tests.support.snippets import snippet

PAGE = "docs/data_value.md"
HERE = "tests/patterns/data_value/test_stateful_sessionizer.py"

EVENTS = "visit string, at string, page string, position bigint"


class Stream:
    """A table of events, and the sessions that the page's command makes of it."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder, self.position = spark, folder, 0

    def append(self, *events: tuple[str | None, str | None, str]) -> None:
        """Append events as one file: one micro-batch."""
        rows = [(*event, self.position + number) for number, event in enumerate(events)]
        self.position += len(rows)
        write_once(
            self.spark, self.spark.createDataFrame(rows, EVENTS).coalesce(1), str(self.folder / "events")
        )

    def parameters(self, **changes: str) -> Parameters:
        text = snippet(PAGE, f"{HERE}::test_a_session_is_written_when_the_watermark_closes_it")
        words = shlex.split(text.replace("\\\n", " ").replace("lakehouse/", f"{self.folder}/"))[2:]
        for name, value in ({"now": "2024-01-01T12:00:00Z"} | changes).items():
            words += [f"--{name}", value]
        return parse_parameters(Parameters, words)[0]

    def run(self, **changes: str) -> dict[str, Any]:
        return job.run(self.spark, self.parameters(**changes))

    def sessions(self, target: str = "live_sessions") -> DataFrame:
        table = self.spark.read.format("delta").load(str(self.folder / target))
        return table.selectExpr(
            "visit_id",
            "date_format(started_at, 'HH:mm')",
            "date_format(ended_at, 'HH:mm')",
            "duration_ms",
            "array_join(values, '')",
            "is_final",
        )

    def table(self, name: str) -> DataFrame:
        return self.spark.read.format("delta").load(str(self.folder / name))


def at(clock: str) -> str:
    return f"2024-01-01T{clock}:00Z"


@pytest.fixture(scope="module")
def stream(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Stream:
    return Stream(spark, tmp_path_factory.mktemp("stream"))


# The stages of one story: each continues the query of the one before.


@pytest.fixture(scope="module")
def first(stream: Stream) -> dict[str, Any]:
    """Run the job on the text's example, out of order: the watermark ends at 10:14."""
    stream.append(("A", at("10:00"), "p"), ("A", at("10:08"), "r"))
    stream.append(("A", at("10:01"), "q"), ("B", at("10:15"), "b"))
    return stream.run(max_files_per_trigger="1")


def test_a_session_stays_open_until_the_gap_has_passed_in_event_time(
    stream: Stream, first: dict[str, Any]
) -> None:
    """The text's sample counts the gap from the watermark and closes A at 10:14."""
    assert_rows(stream.sessions(), [])
    assert first["sessions_written"] == 0
    assert first["open_owners"] > 0


@pytest.fixture(scope="module")
def closed(stream: Stream, first: dict[str, Any]) -> dict[str, Any]:
    """Start the query again; two events at 10:30 close what the first run left, and one comes too late."""
    stream.append(("B", at("10:30"), "c"), ("C", at("10:30"), "x"))
    stream.append(("L", at("09:50"), "late"), (None, at("10:31"), "n"), ("D", "10:30", "n"))
    return stream.run(max_files_per_trigger="1")


def test_a_session_is_written_when_the_watermark_closes_it(stream: Stream, closed: dict[str, Any]) -> None:
    assert_rows(
        stream.sessions(),
        [
            ("A", "10:00", "10:08", 480_000, "pqr", True),  # the pages before the restart included, in order
            ("B", "10:15", "10:15", 0, "b", True),  # not one session with 10:30
        ],
    )


def test_an_event_behind_the_watermark_is_dropped_and_counted(stream: Stream, closed: dict[str, Any]) -> None:
    assert closed["late"] == 1
    assert stream.table("live_sessions").where("array_contains(values, 'late')").count() == 0


def test_events_without_owner_or_full_time_are_dead_letters(stream: Stream, closed: dict[str, Any]) -> None:
    assert closed["dead"] == 2
    assert_rows(
        stream.table("visits_without_session").select("position", "error_class", "error_message"),
        [
            (7, "NULL_KEY", "the record has NULL in visit_id"),
            (8, "NULL_TIME", "the record has NULL in event_time"),  # no time of today
        ],
    )


@pytest.fixture(scope="module")
def expired(stream: Stream, closed: dict[str, Any]) -> dict[str, Any]:
    """End the query between the write of a batch and its commit; then run it again."""
    stream.append(("Z", at("11:59"), "z"), ("Y", "2024-01-01T12:30:00+00:30", "y"))
    stream.append(("Z", at("12:30"), "z"))
    with pytest.MonkeyPatch.context() as patch:
        written = DeltaSink.write

        def dies(sink: DeltaSink, rows: DataFrame, run: int) -> None:
            written(sink, rows, run)
            if not rows.isEmpty():
                raise ConnectionResetError

        patch.setattr(DeltaSink, "write", dies)
        with pytest.raises(ConnectionResetError):
            stream.run()
    assert stream.table("live_sessions").count() == 6, "the crash came after the write"
    return stream.run()


EXPECTED = [
    ("A", "10:00", "10:08", 480_000, "pqr", True),
    ("B", "10:15", "10:15", 0, "b", True),
    ("B", "10:30", "10:30", 0, "c", True),
    ("C", "10:30", "10:30", 0, "x", True),
    ("Y", "12:00", "12:00", 0, "y", True),
    ("Z", "11:59", "11:59", 0, "z", True),
]


def test_a_batch_that_is_repeated_after_a_crash_writes_no_session_twice(
    stream: Stream, expired: dict[str, Any]
) -> None:
    assert_rows(stream.sessions(), EXPECTED)


def test_the_same_events_give_the_same_ids_after_a_lost_checkpoint(
    stream: Stream, expired: dict[str, Any]
) -> None:
    before = stream.table("live_sessions").collect()
    assert len({row.session_id for row in before}) == 6
    stream.run(checkpoint=str(stream.folder / "another"), start_over="true", now=at("13:00"))
    # 09:50 isn't late for a query that reads all files in one batch.
    late = ("L", "09:50", "09:50", 0, "late", True)
    assert_rows(stream.sessions(), [*EXPECTED, late])
    after = stream.table("live_sessions").where("not array_contains(values, 'late')")
    assert_rows(after, before)


def test_the_state_of_closed_sessions_is_removed(first: dict[str, Any], expired: dict[str, Any]) -> None:
    assert (first["open_owners"], expired["open_owners"]) == (2, 1), (
        "A and B; in the end Z, who has the newest event"
    )


def test_the_stream_gives_the_sessions_of_all_events_at_once(stream: Stream, expired: dict[str, Any]) -> None:
    events: dict[str, list[Event]] = {}
    for visit, clock, page, position in stream.table("events").where("page not in ('n', 'late')").collect():
        micros = int(dt.datetime.fromisoformat(clock).timestamp() * 1_000_000)
        events.setdefault(visit, []).append(Event(micros, (position,), page))
    newest = dt.datetime(2024, 1, 1, 12, 20, tzinfo=dt.UTC).timestamp() * 1_000_000
    expected = [
        (visit, session[0].at, session[-1].at, [event.value for event in session])
        for visit, of_visit in events.items()
        for session in sessions_of(of_visit, 600_000_000)
        if session[-1].at < newest
    ]
    found = (
        stream.table("live_sessions")
        .where("not array_contains(values, 'late')")
        .selectExpr("visit_id", "unix_micros(started_at)", "unix_micros(ended_at)", "values")
    )
    assert_rows(found, expected)


def test_the_session_window_gives_the_same_sessions(stream: Stream, expired: dict[str, Any]) -> None:
    own = {name: str(stream.folder / f"window_{name}") for name in ("target", "checkpoint", "dead_letter")}
    report = stream.run(variant="session_window", **own)
    assert report["dead"] == 2
    late = ("L", "09:50", "09:50", 0, "late", True)  # in one batch nothing is late
    assert_rows(stream.sessions("window_target"), [*EXPECTED, late])
    ids = stream.table("window_target").where("not array_contains(values, 'late')").select("session_id")
    before = stream.table("live_sessions").where("not array_contains(values, 'late')").select("session_id")
    assert_rows(ids, before.collect())


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
    cases = {  # stored and offered: release, version, is_final
        "newer": ((0, 1, False), (0, 2, False)),
        "late": ((0, 2, False), (0, 1, False)),
        "final": ((0, 2, False), (0, 2, True)),
        "partial after final": ((0, 2, True), (0, 2, False)),
        "later release": ((0, 2, True), (1, 1, False)),
        "earlier release": ((1, 1, False), (0, 2, True)),
    }
    columns = "session_id string, day date, release int, version bigint, is_final boolean"

    def rows(place: int) -> DataFrame:
        day = dt.date(2024, 1, 1)
        return spark.createDataFrame([(name, day, *case[place]) for name, case in cases.items()], columns)

    table = str(tmp_path / "sessions")
    sink = DeltaSink(spark, table, rows(0), ["session_id"], "day", ["release", "version", "is_final"])
    sink.write(rows(0), 0)
    sink.write(rows(1), 1)
    found = spark.read.format("delta").load(table).select("session_id", "release", "version", "is_final")
    replaced = {"newer", "final", "later release"}
    assert_rows(found, [(name, *case[name in replaced]) for name, case in cases.items()])


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


def test_another_gap_needs_another_checkpoint(stream: Stream, expired: dict[str, Any]) -> None:
    for changes in ({"gap": "20 minutes"}, {"variant": "session_window"}):
        with pytest.raises(WrongUse, match="was made for another rules; give this query another checkpoint"):
            stream.run(**changes)
