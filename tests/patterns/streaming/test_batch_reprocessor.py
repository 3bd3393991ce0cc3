"""Batch Reprocessor: sessions of a range are whole, equal to the stream's, and replace only what they should."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from pyspark.sql import DataFrame, SparkSession

from python_jobs.data_value import stateful_sessionizer
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import JobFailed, NotReady, WrongUse
from python_jobs.shared.core.intervals import Interval, to_micros
from python_jobs.shared.core.sessions import CLOSED, OPEN, Event, sessions_of
from python_jobs.shared.delta.commits import latest_version
from python_jobs.shared.delta.keyed_tables import DeltaSink
from python_jobs.shared.records.session_rows import CHANGES, VERSION, WRITTEN_AT
from python_jobs.shared.spark.job import unreadable_files_refused
from python_jobs.shared.spark.times import stamped
from python_jobs.streaming import batch_reprocessor as job
from tests.support.page_commands import command_words
from tests.support.rows import assert_rows
from tests.support.snippets import snippet

PAGE = "docs/streaming.md"
HERE = "tests/patterns/streaming/test_batch_reprocessor.py"
RAW = "user string, at string, page string, position bigint, visit_date date, visit_hour int"

# The days of the raw table: of the text's example, of sessions longer than a partition, and of windows.
EXAMPLE, LONG, WINDOWS = (dt.date(2024, 3, day) for day in (1, 5, 9))
# These partitions have files, but not while the job runs.
UNREAD = {EXAMPLE: (7, 12), LONG: (6, 14), WINDOWS: (9, 11)}

VISITS = {
    "A": "08:55 09:04 09:30 09:38 09:47 09:55 10:02 10:30 10:55 11:03 11:12 11:25",
    "B": "09:50 10:20",
    "C": "09:20",
    "D": "08:50 08:59 09:08 09:17 09:26 09:35 09:44 09:53 10:02",
    "E": "09:50 10:00",
    "H": "10:05 10:10",  # asked for erasure, and is in the raw table still
}
# Sessions of more than an hour between two events; nobody has an event at 9.
LONG_VISITS = {
    "T": "08:58 10:05",  # 67 minutes over the hour without events
    "M": "08:20 10:20",  # the faulty release made one session of both
    "P": "08:20 11:50",  # and of these, with no event in the range
    "Q": "08:20 11:05 12:20",  # and of these, of which 11:05 is near no end
    "L": "10:50 11:50 12:50",  # open at 13:30
    "U": "10:40 11:30 12:20",  # closed at 13:30 exactly
    "V": "10:40 11:30 12:20 13:30",  # open, by the event of that very time
    "S": "10:10 10:15",  # of a later release
}
LONG_GAP = 70 * 60_000_000


def micros(day: dt.date, clock: str) -> int:
    """Return the time of a clock in microseconds."""
    return to_micros(dt.datetime.combine(day, dt.time.fromisoformat(clock), dt.UTC))


def random_visits() -> dict[str, list[str]]:
    """Return the clocks of owners whose sessions have any form."""
    chosen = random.Random(11)
    minutes = [*range(8 * 60 + 15, 9 * 60), *range(10 * 60, 13 * 60)]
    return {
        f"r{owner}": [
            f"{minute // 60:02}:{minute % 60:02}:{chosen.randrange(60):02}"
            for minute in sorted(chosen.choices(minutes, k=chosen.randint(1, 8)))
        ]
        for owner in range(40)
    }


class Lake:
    """The raw table, and the tables that jobs make of it."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.random_visits = random_visits()
        events = [
            *((EXAMPLE, user, clock) for user, clocks in VISITS.items() for clock in clocks.split()),
            *((LONG, user, clock) for user, clocks in LONG_VISITS.items() for clock in clocks.split()),
            *((LONG, user, clock) for user, clocks in self.random_visits.items() for clock in clocks),
            *((WINDOWS, "W", f"10:{minute}") for minute in ("00", "10", "19", "20", "30", "40", "50", "59")),
            *((WINDOWS, "X", f"10:{minute}") for minute in ("19", "20")),
            *((day, "unread", f"{hour:02}:30") for day, hours in UNREAD.items() for hour in hours),
            (dt.date(2024, 3, 20), "end", "10:00"),
        ]
        rows: list[tuple[Any, ...]] = [
            (user, f"{day}T{clock}Z", f"{user} {clock}", position, day, int(clock[:2]))
            for position, (day, user, clock) in enumerate(events)
        ]
        # A producer's retry, and records without owner and without a whole time.
        rows += [
            rows[6],
            (None, f"{EXAMPLE}T10:40Z", "n", 900, EXAMPLE, 10),
            ("N", "10:41", "n", 901, EXAMPLE, 10),
        ]
        frame = spark.createDataFrame(rows, RAW).coalesce(1)
        frame.write.format("delta").partitionBy("visit_date", "visit_hour").save(self.path("raw_visits"))
        spark.createDataFrame([("H",)], "user_id string").write.format("delta").save(self.path("erased"))
        self._words = command_words(snippet(PAGE, f"{HERE}::test_the_sessions_of_the_text"), folder)

    def path(self, table: str) -> str:
        """Return the path of a table."""
        return str(self.folder / table)

    def parameters(self, **changes: str) -> job.Parameters:
        """Return the parameters of the page's command with ``changes``."""
        words = [*self._words, "--now", "2024-03-21T10:00:00Z"]
        for name, value in changes.items():
            words += [f"--{name.rstrip('_')}", value]
        return parse_parameters(job.Parameters, words)[0]

    def run(self, **changes: str) -> dict[str, Any]:
        """Run the page's command with ``changes`` and return its report."""
        with self.without_unread(), unreadable_files_refused("no session can reach into its partition"):
            return job.run(self.spark, self.parameters(**changes))

    @contextmanager
    def without_unread(self) -> Iterator[None]:
        """Take away the files of the partitions that no job may read."""
        folders = [f"visit_date={day}/visit_hour={hour}" for day, hours in UNREAD.items() for hour in hours]
        files = [
            file for folder in folders for file in (self.folder / "raw_visits" / folder).glob("*.parquet")
        ]
        assert len(files) == len(folders)
        for file in files:
            file.rename(file.with_suffix(".away"))
        try:
            yield
        finally:
            for file in files:
                file.with_suffix(".away").rename(file)

    def table(self, name: str) -> DataFrame:
        """Return a table."""
        return self.spark.read.format("delta").load(self.path(name))

    def rows_now(self, name: str) -> DataFrame:
        """Return a table's rows as they are now, whatever later runs change."""
        table = self.table(name)
        return self.spark.createDataFrame(table.collect(), table.schema)

    def write_live(
        self, target: str, day: dt.date, *sessions: tuple[str, str, str, int, str], release: int = 0
    ) -> None:
        """Write sessions as a live job has: owner, first and last clock, number of events and status."""
        live = self.parameters(origin="real_time", release=str(release))
        changed = [
            (
                user,
                [micros(day, first)],
                micros(day, first),
                micros(day, last),
                events,
                ["live"],
                status,
                events,
            )
            for user, first, last, events, status in sessions
        ]
        frame = self.spark.createDataFrame(changed, f"user_id string, {CHANGES}")
        rows = stamped(live.rows(frame), WRITTEN_AT, "2024-03-02")
        sink = DeltaSink(
            self.spark, self.path(target), rows, ["session_id"], "started_date", VERSION, "is_final"
        )
        sink.write(rows, 0)

    def folders(self, rows: DataFrame) -> set[str]:
        """Return the partitions whose files a query reads."""
        files = (unquote(file) for file in rows.inputFiles())
        return {file.split("raw_visits/")[1].rsplit("/", 1)[0] for file in files if "raw_visits/" in file}


def sessions(rows: DataFrame, *further: str) -> DataFrame:
    """Return owner, first and last clock, number of events and further columns of sessions."""
    clocks = ("date_format(started_at, 'HH:mm')", "date_format(ended_at, 'HH:mm')")
    return rows.selectExpr("user_id", *clocks, "events", *further)


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    return Lake(spark, tmp_path_factory.mktemp("lake"))


@pytest.fixture(scope="module")
def streamed(lake: Lake) -> DataFrame:
    """Return the sessions that the Stateful Sessionizer makes of the whole raw table."""
    params = lake.parameters()
    live = stateful_sessionizer.Parameters(
        source=params.source,
        key=params.key,
        event_time=params.event_time,
        ties=params.ties,
        value=params.value,
        gap=params.gap,
        target=lake.path("streamed"),
        dead_letter=lake.path("dead"),
        checkpoint=lake.path("checkpoint"),
    )
    stateful_sessionizer.run(lake.spark, live)
    return lake.table("streamed")


# --- The text's example ------------------------------------------------------------------------------------

# What the live job has written, and what of it stays.
KEPT = [
    ("A", "08:55", "09:04", 2, CLOSED),  # the same owner's, away from the range
    ("A", "11:25", "11:25", 1, OPEN),
    ("C", "09:20", "09:20", 1, CLOSED),  # another owner's
]
FAULTY = [
    ("A", "10:58", "11:12", 2, CLOSED),  # a part of one
    ("B", "10:20", "10:20", 1, CLOSED),  # right, but of the faulty release
    ("G", "10:10", "10:20", 2, CLOSED),  # erased: the raw table has no record
    ("H", "10:05", "10:10", 2, CLOSED),
]
OF_THE_TEXT = [
    ("A", "09:30", "10:02", 5),
    ("A", "10:30", "10:30", 1),
    ("A", "10:55", "11:12", 3),
    ("B", "10:20", "10:20", 1),
    ("D", "08:50", "10:02", 9),
    ("E", "10:00", "10:00", 1),
]


@pytest.fixture(scope="module")
def report(lake: Lake) -> dict[str, Any]:
    """Run the page's command over the live job's table."""
    lake.write_live("live_sessions", EXAMPLE, *KEPT, *FAULTY)
    # Two sessions in one, of this very release: a row of more events, which a stream would keep.
    lake.write_live("live_sessions", EXAMPLE, ("A", "10:30", "10:55", 2, CLOSED), release=1)
    return lake.run()


@pytest.fixture(scope="module")
def corrected(lake: Lake, report: dict[str, Any]) -> DataFrame:
    """Return the table after the first run."""
    return lake.rows_now("live_sessions")


def test_the_sessions_of_the_text(corrected: DataFrame) -> None:
    """Ten minutes apart splits in the text; here exactly the gap joins, and the command has 599 seconds."""
    assert_rows(sessions(corrected.where("origin = 'reprocessing'")), OF_THE_TEXT)


def test_only_partitions_into_which_a_session_can_reach_are_read(lake: Lake, report: dict[str, Any]) -> None:
    """The text's loop reads on until a partition gives nothing; the files of these are gone here."""
    assert report["steps"] == [
        {
            "past": "2024-03-01T09:00:00+00:00",
            "past_records": 10,
            "future": "2024-03-01T11:00:00+00:00",
            "future_records": 2,
        },
        {"past": "2024-03-01T08:00:00+00:00", "past_records": 2, "future": None, "future_records": 0},
    ]
    raw = job.RawTable(lake.spark, lake.parameters())
    hour = Interval.parse("2024-03-01T09", "2024-03-01T10")
    assert lake.folders(raw.complete(hour)) == {"visit_date=2024-03-01/visit_hour=9"}
    with lake.without_unread(), pytest.raises(Exception, match="FAILED_READ_FILE"):
        raw.complete(Interval.parse("2024-03-01T07", "2024-03-01T08")).collect()


def test_sessions_that_the_records_do_not_give_are_removed_and_others_stay(
    corrected: DataFrame, report: dict[str, Any]
) -> None:
    kept = [(*session[:4], session[4] == CLOSED) for session in KEPT]
    assert_rows(sessions(corrected.where("origin = 'real_time'"), "is_final"), kept)
    counts = {name: report[name] for name in ("added", "replaced", "removed", "unchanged", "left_to_live")}
    assert counts == {"added": 4, "replaced": 2, "removed": 3, "unchanged": 0, "left_to_live": 0}


def test_an_erased_owner_is_not_resurrected(corrected: DataFrame) -> None:
    """G's records are gone from the raw table, H's are still there."""
    assert corrected.where("user_id in ('G', 'H')").count() == 0


def test_rows_carry_their_origin(streamed: DataFrame, corrected: DataFrame) -> None:
    assert_rows(corrected.select("origin", "release").distinct(), [("reprocessing", 1), ("real_time", 0)])
    assert_rows(streamed.select("origin").distinct(), [("real_time",)])


def test_a_batch_gives_the_sessions_of_the_stream(streamed: DataFrame, corrected: DataFrame) -> None:
    """Whole rows but for origin and release: ids, values, versions and dates included."""
    by_batch = corrected.where("origin = 'reprocessing'").drop("origin", "release", "written_at")
    by_stream = streamed.where(f"started_date = date'{EXAMPLE}'").drop("origin", "release", "written_at")
    ids = [row.session_id for row in by_batch.select("session_id").collect()]
    assert_rows(by_batch, by_stream.where(by_stream.session_id.isin(ids)))
    assert len(ids) == len(OF_THE_TEXT)


def test_unusable_records_are_counted(report: dict[str, Any]) -> None:
    assert report["dead"] == 2, "without owner, and without a whole time"


def test_a_rerun_leaves_the_same_rows_and_commits_nothing(lake: Lake, corrected: DataFrame) -> None:
    before = latest_version(lake.spark, lake.path("live_sessions"))
    again = lake.run(now="2024-03-22T10:00:00Z")
    assert (again["unchanged"], again["added"] + again["replaced"] + again["removed"]) == (6, 0)
    assert latest_version(lake.spark, lake.path("live_sessions")) == before
    assert_rows(lake.table("live_sessions"), corrected)


def test_an_approximate_session_is_what_the_range_has_of_it(lake: Lake) -> None:
    report = lake.run(mode="approximate", target=lake.path("approximate"))
    assert (report["is_approximate"], report["steps"]) == (True, [])
    expected = [
        ("A", "10:02", "10:02", 1, True),
        ("A", "10:30", "10:30", 1, False),  # nothing unread can join it
        ("A", "10:55", "10:55", 1, True),
        ("B", "10:20", "10:20", 1, False),
        ("D", "10:02", "10:02", 1, True),
        ("E", "10:00", "10:00", 1, True),
    ]
    assert_rows(sessions(lake.table("approximate"), "is_approximate"), expected)


def test_an_approximate_session_goes_as_far_as_the_neighbours(lake: Lake, corrected: DataFrame) -> None:
    params = lake.parameters(mode="approximate", neighbours="1")
    raw = job.RawTable(lake.spark, params)
    found = params.walk.reconstruct(raw.complete, params.range, params.occupied(corrected))
    whole = [(*session, False) for session in OF_THE_TEXT if session[0] != "D"]
    rows = params.of_sessions(found.records, found.read)
    assert_rows(sessions(rows, "is_approximate"), [*whole, ("D", "09:08", "10:02", 7, True)])


def test_approximate_sessions_never_meet_whole_ones(lake: Lake, corrected: DataFrame) -> None:
    with pytest.raises(
        WrongUse, match="has another schema: it has nothing, but this job writes is_approximate"
    ):
        lake.run(mode="approximate")


def test_a_range_without_records_changes_nothing(lake: Lake) -> None:
    report = lake.run(from_="2024-03-15T10", to="2024-03-15T12", target=lake.path("empty"))
    assert (report["steps"], report["added"], report["removed"], report["dead"]) == ([], 0, 0, 0)
    assert latest_version(lake.spark, lake.path("empty")) == 0, "it was created"


def test_a_walk_that_does_not_come_to_its_end_fails_and_writes_nothing(lake: Lake) -> None:
    target = lake.path("unfinished")
    with pytest.raises(
        JobFailed, match=r"of 1 owners may go on before 2024-03-01T09:00:00 or after .* max_steps 1"
    ):
        lake.run(max_steps="1", target=target)
    assert lake.table("unfinished").count() == 0


def test_a_row_that_reaches_beyond_what_was_read_is_not_removed(lake: Lake) -> None:
    """Its other events would be in no session."""
    lake.write_live("beyond", EXAMPLE, ("A", "10:40", "10:57", 2, CLOSED))
    before = lake.rows_now("beyond")
    with pytest.raises(
        JobFailed, match=r"read \(1\), .* range from 2024-03-01 10:40:00 to 2024-03-01 10:57:00 UTC"
    ):
        lake.run(from_=f"{EXAMPLE}T11", to=f"{EXAMPLE}T12", target=lake.path("beyond"))
    assert_rows(lake.table("beyond"), before)


# --- Sessions longer than a partition ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_report(lake: Lake) -> dict[str, Any]:
    """Run over sessions with gaps of more than a partition, beside a live job with the watermark 13:30."""
    lake.write_live(
        "long_sessions",
        LONG,
        ("M", "08:20", "10:20", 2, CLOSED),
        ("P", "08:20", "11:50", 2, CLOSED),
        ("Q", "08:20", "12:20", 3, CLOSED),
        ("L", "10:50", "11:50", 2, OPEN),
        ("V", "10:40", "13:30", 4, OPEN),
    )
    lake.write_live("long_sessions", LONG, ("S", "10:10", "10:10", 1, CLOSED), release=5)
    return lake.run(
        from_=f"{LONG}T10",
        to=f"{LONG}T11",
        until=f"{LONG}T13:30",
        gap="70 minutes",
        target=lake.path("long_sessions"),
    )


def test_a_partition_without_records_does_not_end_the_walk(lake: Lake, long_report: dict[str, Any]) -> None:
    """The text's loop ends at the first empty partition."""
    past = [(step["past"], step["past_records"] > 0) for step in long_report["steps"]]
    assert past == [
        ("2024-03-05T09:00:00+00:00", False),
        ("2024-03-05T08:00:00+00:00", True),
        ("2024-03-05T07:00:00+00:00", False),  # 08:15 is 75 minutes from 07:00, so 06:00 is not read
    ]
    of_t = sessions(lake.table("long_sessions").where("user_id = 'T'"))
    assert_rows(of_t, [("T", "08:58", "10:05", 2)])


def test_a_row_that_was_too_long_leaves_no_hole(lake: Lake, long_report: dict[str, Any]) -> None:
    """All events of a removed row are in sessions again, also those away from the range."""
    found = sessions(lake.table("long_sessions").where("user_id in ('M', 'P', 'Q')"), "origin")
    clocks = {user: LONG_VISITS[user].split() for user in "MPQ"}
    expected = [(user, clock) for user, of_user in clocks.items() for clock in of_user]
    assert_rows(found, [(user, clock, clock, 1, "reprocessing") for user, clock in expected])


def test_a_session_belongs_to_the_live_job_or_to_the_batch(lake: Lake, long_report: dict[str, Any]) -> None:
    """The live job's watermark is 13:30: it has closed U's session, and has those of L and V in its state."""
    found = sessions(lake.table("long_sessions").where("user_id in ('L', 'U', 'V')"), "is_final", "origin")
    expected = [
        ("L", "10:50", "11:50", 2, False, "real_time"),
        ("U", "10:40", "12:20", 3, True, "reprocessing"),
        ("V", "10:40", "13:30", 4, False, "real_time"),
    ]
    assert_rows(found, expected)
    assert long_report["left_to_live"] >= 2


def test_a_row_of_a_later_release_stays(lake: Lake, long_report: dict[str, Any]) -> None:
    found = sessions(lake.table("long_sessions").where("user_id = 'S'"), "release")
    assert_rows(found, [("S", "10:10", "10:10", 1, 5)])
    assert long_report["replaced"] == 3, "M's, P's and Q's rows"


def test_random_sessions_are_those_of_all_events(lake: Lake, long_report: dict[str, Any]) -> None:
    """By another route: the rule over each owner's whole list of events."""
    start, end, until = (micros(LONG, clock) for clock in ("10:00", "11:00", "13:30"))
    expected = []
    for user, clocks in lake.random_visits.items():
        events = [Event(micros(LONG, clock), (number,), clock) for number, clock in enumerate(clocks)]
        for session in sessions_of(events, LONG_GAP):
            touches = any(start <= event.at < end for event in session)
            if touches and session[-1].at + LONG_GAP <= until:
                pages = [f"{user} {event.value}" for event in session]
                expected.append((user, session[0].at, session[-1].at, pages))
    assert len(expected) > 10, "sessions to compare"
    columns = ("user_id", "unix_micros(started_at)", "unix_micros(ended_at)", "values")
    found = lake.table("long_sessions").where("user_id like 'r%'").selectExpr(*columns)
    assert_rows(found, expected)


# --- Windows -----------------------------------------------------------------------------------------------


def test_windows_are_whole_and_need_no_neighbours(lake: Lake) -> None:
    """The files of both neighbours are gone, and Y is erased."""
    start = dt.datetime.combine(WINDOWS, dt.time(10), dt.UTC)
    written = [
        (start, start + dt.timedelta(minutes=10), user, 9, 0, "real_time", WINDOWS, start) for user in "WY"
    ]
    written.append((start - dt.timedelta(minutes=10), start, "Y", 9, 0, "real_time", WINDOWS, start))
    columns = (
        "window_start timestamp, window_end timestamp, user_id string, events int, release int, origin string, "
        "window_date date, written_at timestamp"
    )
    frame = lake.spark.createDataFrame(written, columns)
    frame.write.format("delta").partitionBy("window_date").save(lake.path("windows"))
    hour = {"from_": f"{WINDOWS}T10", "to": f"{WINDOWS}T11", "until": f"{WINDOWS}T11"}
    report = lake.run(mode="windows", window="10 minutes", target=lake.path("windows"), **hour)
    clock = "date_format(window_start, 'HH:mm')"
    events = {"10:00": 1, "10:10": 2, "10:20": 1, "10:30": 1, "10:40": 1, "10:50": 2}
    expected = [(clock, "W", count, "reprocessing") for clock, count in events.items()]
    expected += [(clock, "X", 1, "reprocessing") for clock in ("10:10", "10:20")]
    expected.append(("09:50", "Y", 9, "real_time"))  # not in the range
    assert_rows(lake.table("windows").selectExpr(clock, "user_id", "events", "origin"), expected)
    assert (report["added"], report["replaced"], report["removed"]) == (7, 1, 1)


# --- Parameters --------------------------------------------------------------------------------------------


def test_wrong_use_is_refused_in_one_sentence(lake: Lake) -> None:
    for changes, sentence in [
        (
            {"from_": "2024-03-01T10:30"},
            "from and to must be starts of a period of '1 hour', got 2024-03-01T10:30",
        ),
        ({"until": "2024-03-01T10:59"}, "to 2024-03-01T11 is later than until 2024-03-01T10:59"),
        ({"to": "2024-03-01T10"}, "is empty: from must be before to"),
        ({"mode": "windows", "window": "7 minutes"}, "must be starts of a window of '7 minutes'"),
        ({"max_steps": "0"}, "max_steps must be 1 or more, got 0"),
        ({"neighbours": "-1"}, "neighbours must be 0 or more, got -1"),
        ({"key.Window_Start": "page"}, "key can't name columns that the job writes itself: Window_Start"),
        ({"target": lake.path("raw_visits")}, "source and target must be two tables"),
        ({"partition": "no_column = {hour}"}, "partition can't be used .*no_column"),
        ({"value": "no_column"}, "an expression can't be resolved"),
        ({"key.other": "page"}, "has no column other of the key"),
    ]:
        with pytest.raises(WrongUse, match=sentence):
            lake.run(**changes)
    with pytest.raises(NotReady, match="there is no Delta table"):
        lake.run(source=lake.path("nothing"))
