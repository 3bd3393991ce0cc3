"""Incremental Sessionizer in SQL: the rule of sessions, a run's rows, and the models of the page."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dbt_common.exceptions import DbtRuntimeError
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from python_jobs.data_value import stateful_sessionizer
from python_jobs.shared.core.intervals import from_micros, to_micros
from python_jobs.shared.core.sessions import Event, closes_at, is_same_session, sessions_of
from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.session import environment, setting
from tests.support.snippets import snippets

PAGE = "docs/data_value.md"
MODELS = (
    "tests/patterns/data_value/test_incremental_sessionizer.py::"
    "test_the_models_of_the_page_give_the_sessions_of_each_hour"
)
MINUTE = 60_000_000
HOUR = 60 * MINUTE
PENDING = (
    "status string, session_id string, user_id string, started_at timestamp, ended_at timestamp, events int, "
    "values array<string>, expiration_run timestamp, run_start timestamp"
)
LAST_HOUR = 3
PUBLISHED: tuple[Any, ...] = ("published", *[None] * 7)


def at(clock: str) -> dt.datetime:
    return dt.datetime.fromisoformat(f"2024-03-01T{clock}:00+00:00")


def a_run(events: str, pending: str, **changes: Any) -> dict[str, Any]:
    """Return the arguments of ``incremental_sessions``."""
    return {
        "events": events,
        "pending": pending,
        "owner": "user_id",
        "event_time": "event_time",
        "value": "page",
        "gap": "2 hours",
        "partition": "true",
        "first_run": "2024-03-01T09",
        "run": "2024-03-01T10",
    } | changes


# --- the rule -------------------------------------------------------------------------------------------


def test_sql_and_python_have_one_rule(spark: SparkSession, render: MacroRenderer, ansi_modes: str) -> None:
    gap = dt.timedelta(minutes=20)
    earlier = to_micros(at("09:00"))
    steps = [0, 1, 20 * MINUTE - 1, 20 * MINUTE, 20 * MINUTE + 1, 60 * MINUTE]
    rows = spark.createDataFrame(
        [(step, earlier, earlier + step) for step in steps], "step bigint, a bigint, b bigint"
    )
    starts = render("_starts_session", time="timestamp_micros(b)", previous="timestamp_micros(a)", gap=gap)
    assert_rows(
        rows.selectExpr("step", starts),
        [(step, not is_same_session(earlier, earlier + step, 20 * MINUTE)) for step in steps],
    )
    first = render("_starts_session", time="timestamp_micros(b)", previous="cast(null as timestamp)", gap=gap)
    assert_rows(rows.selectExpr(first).distinct(), [(True,)])


OWNERS = 120
# Events at and just beside multiples of half an hour, so that gaps are met exactly.
EVENTS_OF_AN_OWNER = st.lists(
    st.builds(
        lambda half, beside, tie, page: Event(max(half * HOUR // 2 + beside, 0), (tie,), page),
        st.integers(0, 2 * LAST_HOUR + 1),
        st.sampled_from([0, 0, 1, -1]),
        st.integers(0, 1),
        st.sampled_from(["a", "b", None]),
    ),
    max_size=7,
)


@pytest.fixture(scope="module")
def owners() -> list[list[Event]]:
    """Return the events of random owners: an example is an owner, so that all of them cost one query an hour."""
    found: list[list[Event]] = []

    @settings(max_examples=OWNERS, deadline=None, database=None, phases=[Phase.generate])
    @given(EVENTS_OF_AN_OWNER)
    def draw(events: list[Event]) -> None:
        found.append(events)

    draw()
    return found


def test_the_runs_of_all_hours_give_the_sessions_of_all_data_at_once(
    spark: SparkSession, render: MacroRenderer, owners: list[list[Event]]
) -> None:
    """The other route is the function of the stream, over the events of all hours."""
    micros = 90 * MINUTE
    events = [(f"u{owner}", *event) for owner, found in enumerate(owners) for event in found]
    expected: list[tuple[Any, ...]] = [
        (
            f"u{owner}", session[0].at, session[-1].at, len(session), tuple(event.value for event in session),
            _completed_by(closes_at(session, micros)),
        )
        for owner, found in enumerate(owners)
        for session in sessions_of(found, micros)
    ]  # fmt: skip
    assert {row[-1] for row in expected} >= {1, 2, None}, "sessions end in several hours, and some stay open"
    assert_rows(_hour_by_hour(spark, render, events, "90 minutes"), expected)


def _completed_by(closes: int) -> int | None:
    """Return the hour at whose end no later event can join; None if that is after the last hour."""
    hours = (hour for hour in range(LAST_HOUR + 1) if closes < (hour + 1) * HOUR)
    return next(hours, None)


def _hour_by_hour(
    spark: SparkSession, render: MacroRenderer, events: list[tuple[Any, ...]], gap: str
) -> list[tuple[Any, ...]]:
    """Return the completed sessions of each hour, and those open after the last one."""
    frame = spark.createDataFrame(events, "user_id string, at bigint, event_order array<int>, page string")
    rows: list[Any] = []
    found = []
    with setting(spark, "spark.sql.shuffle.partitions", "1"):
        frame.selectExpr(
            "user_id", "timestamp_micros(at) as event_time", "event_order[0] as tie", "page"
        ).coalesce(1).createOrReplaceTempView("random_visits")
        for hour in range(LAST_HOUR + 1):
            start = from_micros(hour * HOUR)
            marker = (*PUBLISHED, from_micros((hour - 1) * HOUR))
            spark.createDataFrame([*rows, marker], PENDING).createOrReplaceTempView("random_pending")
            query = render(
                "incremental_sessions",
                **a_run(
                    "random_visits", "random_pending", gap=gap, ties="tie", first_run="1970-01-01T00",
                    run=start.isoformat(), partition="event_time >= {start} and event_time < {end}",
                ),
            )  # fmt: skip
            rows = [tuple(row) for row in spark.sql(query).collect() if row.status != "computed"]
            found += [(row, hour) for row in rows if row[0] == "completed"]
    found += [(row, None) for row in rows if row[0] == "open"]
    return [
        (user, _micros(start), _micros(end), events, tuple(values), hour)
        for (_, _, user, start, end, events, values, _, _), hour in found
    ]


def _micros(moment: dt.datetime) -> int:
    return to_micros(moment.replace(tzinfo=dt.UTC))


# --- a run ----------------------------------------------------------------------------------------------

VISITS = "user_id string, event_time string, page string, offset bigint"
# Of one minute, the offset says which visit comes first; w's is there twice. The last four have no session.
HOUR_10 = [
    ("u", "2024-03-01T10:40:00Z", "d", 1),
    ("u", "2024-03-01T11:10:00+01:00", "c", 9),
    ("u", "2024-03-01 10:10", "b", 8),
    ("w", "2024-03-01T10:00:00Z", "x", 2),
    ("w", "2024-03-01T10:00:00Z", "x", 2),
    (None, "2024-03-01T10:00:00Z", "no user", 3),
    (None, "10:00", "no user and no date", 4),
    ("w", None, "no time", 5),
    ("w", "2024-03-01T09:59:59.999999Z", "before", 6),
    ("w", "2024-03-01T11:00:00Z", "after", 7),
]


@pytest.fixture
def visits(spark: SparkSession) -> Iterator[str]:
    spark.createDataFrame(HOUR_10, VISITS).createOrReplaceTempView("visits_of_10")
    yield "visits_of_10"
    spark.catalog.dropTempView("visits_of_10")


def pending(spark: SparkSession, *rows: tuple[Any, ...]) -> str:
    spark.createDataFrame(list(rows), PENDING).createOrReplaceTempView("pending_rows")
    return "pending_rows"


def left_open(user: str, start: str, end: str, pages: str, run: str = "09:00") -> tuple[Any, ...]:
    return ("open", "id", user, at(start), at(end), len(pages), list(pages), at("11:00"), at(run))


def test_a_session_goes_on_opens_or_ends_and_unusable_visits_are_rejected(
    spark: SparkSession, render: MacroRenderer, visits: str, ansi_modes: str
) -> None:
    rows = pending(
        spark,
        (*PUBLISHED, at("09:00")),
        left_open("u", "09:05", "09:50", "ab"),
        left_open("v", "09:01", "09:30", "x"),
        # What another run left open is not read, nor what the run has completed.
        left_open("y", "08:00", "08:30", "x", run="08:00"),
        ("completed", *left_open("z", "06:00", "06:30", "x")[1:]),
    )
    with setting(spark, "spark.sql.session.timeZone", "Asia/Tokyo"):
        given_ = a_run(visits, rows, ties="offset")
        found = spark.sql(render("incremental_sessions", **given_))
        clock = "date_format(to_utc_timestamp({0}, current_timezone()), 'HH:mm') as {0}"
        assert_rows(
            found.selectExpr(
                "status", "user_id", clock.format("started_at"), clock.format("ended_at"), "events",
                "array_join(values, '')", clock.format("expiration_run"), clock.format("run_start"),
            ),
            [
                ("open", "u", "09:05", "10:40", 5, "abbcd", "12:00", "10:00"),
                ("open", "v", "09:01", "09:30", 1, "x", "11:00", "10:00"),
                ("open", "w", "10:00", "10:00", 1, "x", "12:00", "10:00"),
                ("computed", None, None, None, None, None, None, "10:00"),
            ],
        )  # fmt: skip
        del given_["pending"], given_["gap"]
        rejected = spark.sql(render("rejected_session_events", **given_))
    outside = (
        "event_time is not in the interval of the run, from 2024-03-01T10:00:00Z to 2024-03-01T11:00:00Z"
    )
    assert rejected.columns == [
        "user_id",
        "event_time",
        "page",
        "offset",
        "error_class",
        "error_message",
        "run_start",
    ]
    assert_rows(
        rejected.select("offset", "error_class", "error_message"),
        [
            (3, "NULL_KEY", "the record has NULL in user_id"),
            (4, "NULL_KEY", "the record has NULL in user_id, event_time"),
            (5, "NULL_TIME", "the record has NULL in event_time"),
            (6, "OTHER_RUN", outside),
            (7, "OTHER_RUN", outside),
        ],
    )


def test_ties_that_are_no_integers_end_the_query(
    spark: SparkSession, render: MacroRenderer, visits: str, ansi_modes: str
) -> None:
    """A cast would make one event of those that differ in a text."""
    rows = pending(spark, (*PUBLISHED, at("09:00")))
    with pytest.raises(PySparkException, match="ties must be integer columns, 'page' is none"):
        spark.sql(render("incremental_sessions", **a_run(visits, rows, ties=["offset", "page"]))).collect()


def test_batch_and_stream_give_a_session_the_same_id(
    spark: SparkSession, render: MacroRenderer, visits: str
) -> None:
    rows = pending(spark, (*PUBLISHED, at("09:00")), left_open("u", "09:05", "09:50", "ab"))
    found = spark.sql(render("incremental_sessions", **a_run(visits, rows)))
    stream = stateful_sessionizer.Parameters(
        source="/s", key={"user_id": "user_id"}, event_time="at", value="page", target="/t", checkpoint="/c",
        dead_letter="/d",
    )  # fmt: skip
    start = to_micros(at("09:05"))
    changed = spark.createDataFrame(
        [("u", [start], start, start, 1, ["a"], "closed", 1)],
        stream.changes_schema(spark.table(visits)),
    )
    assert_rows(
        found.where("user_id = 'u'").select("session_id"), stream.rows(changed).select("session_id").collect()
    )


def test_a_session_that_should_have_ended_before_ends_now(
    spark: SparkSession, render: MacroRenderer, visits: str
) -> None:
    """A run after skipped ones, as when --first_run begins again: its expiration is before the run, not equal to it."""
    rows = pending(spark, (*PUBLISHED, at("09:00")), left_open("v", "03:00", "03:30", "x"))
    found = spark.sql(render("incremental_sessions", **a_run(visits, rows)))
    assert_rows(
        found.where("user_id = 'v'").select("status", "expiration_run"),
        [("completed", at("05:00"))],
    )


@pytest.mark.parametrize(
    "markers", [[], [("computed", *[None] * 7, at("09:00"))], [(*PUBLISHED, at("08:00"))]]
)
def test_a_run_whose_predecessor_is_not_published_is_refused(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str, markers: list[tuple[Any, ...]]
) -> None:
    """Also without any event and any open session."""
    none = "(select * from visits_of_nobody where false)"
    spark.createDataFrame([], VISITS).createOrReplaceTempView("visits_of_nobody")
    query = render("incremental_sessions", **a_run(none, pending(spark, *markers)))
    with pytest.raises(
        PySparkException, match="2024-03-01T10:00:00Z needs the run before it, of 2024-03-01T09:00:00Z"
    ):
        spark.sql(query).collect()
    first = render("incremental_sessions", **a_run(none, pending(spark, *markers), run="2024-03-01T09"))
    assert_rows(spark.sql(first).select("status"), [("computed",)])


@pytest.mark.parametrize("runs", [[], ["10:00", "11:00"]])
def test_sessions_of_a_run_that_is_not_the_newest_one_are_refused(
    spark: SparkSession, render: MacroRenderer, runs: list[str]
) -> None:
    """Their write would remove the sessions of the later runs, and nothing would say that these have to run again."""
    rows = pending(spark, *(("computed", *[None] * 7, at(run)) for run in runs), (*PUBLISHED, at("09:00")))
    query = render(
        "completed_sessions", pending=rows, owner="user_id", first_run="2024-03-01T09", run="2024-03-01T10"
    )
    with pytest.raises(PySparkException, match="the run of 2024-03-01T10:00:00Z is not the newest one in"):
        spark.sql(query).collect()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"owner": []}, "owner must name a column or more"),
        ({"owner": ["Events"]}, "owner can't have the column 'Events', which the sessions have themselves"),
        ({"gap": "2h"}, "gap must be a number of minutes, hours or days such as '2 hours', got '2h'"),
        ({"gap": "0 hours"}, "gap must be longer than 0, got '0 hours'"),
        ({"period": "0 minutes"}, "period must be longer than 0, got '0 minutes'"),
        ({"run": "2024-03-01T10:30"}, "run must be the start of an interval of '1 hour'"),
        ({"first_run": "2024-03-01T08:01"}, "first_run must be the start of an interval of '1 hour'"),
        ({"run": "2024-03-01T08"}, "run '2024-03-01 08:00:00' is before first_run, '2024-03-01 09:00:00'"),
        ({"run": "10 o'clock"}, "run must be a time such as 2024-03-01"),
        ({"partition": ""}, "partition must be a SQL expression over the events, got ''"),
        ({"value": None}, "value must be a SQL expression over the events, got 'None'"),
    ],
)
def test_wrong_arguments_are_refused(render: MacroRenderer, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DbtRuntimeError, match=sentence):
        render("incremental_sessions", **a_run("visits", "pending", **arguments))


# --- the models of the page -----------------------------------------------------------------------------


class Models:
    """The models of the page, run for an hour."""

    def __init__(self, project: DbtProject) -> None:
        self.project = project

    def run(self, hour: int, *arguments: str) -> None:
        with environment(LOGICAL_TIME=f"2024-03-01T{hour:02}"):
            self.project.run("run", *arguments)

    def fails(self, hour: int, *arguments: str) -> str:
        with environment(LOGICAL_TIME=f"2024-03-01T{hour:02}"):
            return self.project.fails("run", *arguments)

    def rows(self, model: str) -> DataFrame:
        return self.project.table(model)


def test_the_models_of_the_page_give_the_sessions_of_each_hour(
    spark: SparkSession, make_project: Callable[..., DbtProject]
) -> None:
    pending_sessions, sessions, so_far, rejected = snippets(PAGE, MODELS)
    models = Models(
        make_project(
            {
                "models/sources.yml": raw_tables("visits"),
                "models/pending_sessions.sql": pending_sessions,
                "models/sessions.sql": sessions,
                "models/sessions_so_far.sql": so_far,
                "models/visits_without_session.sql": rejected,
            }
        )
    )
    visits = [
        ("u1", "2024-03-01T09:10:00Z", "a", 9), ("u2", "2024-03-01T09:50:00Z", "x", 9),
        ("u1", "2024-03-01T09:40:00Z", "b", 9), (None, "2024-03-01T09:40:00Z", "n", 9),
        ("u3", "2024-03-01T10:50:00Z", "p", 10), ("u2", "2024-03-01T10:20:00Z", "y", 10),
    ]  # fmt: skip
    frame = spark.createDataFrame(visits, "user_id string, event_time string, page string, visit_hour int")
    models.project.source("visits", frame.selectExpr("*", "date'2024-03-01' as visit_date"))

    refused = models.fails(10, "--full-refresh", "--select", "pending_sessions")
    assert "needs the run before it, of 2024-03-01T09:00:00Z, published in" in refused
    models.run(9)
    # The gap is half an hour: u1's last visit is at 9:40.
    shown = "user_id", "array_join(values, '')", "is_completed", "hour(run_start)"
    assert_rows(
        models.rows("sessions_so_far").selectExpr(*shown), [("u1", "ab", False, 9), ("u2", "x", False, 9)]
    )
    assert_rows(models.rows("visits_without_session").select("page", "error_class"), [("n", "NULL_KEY")])

    models.run(10, "--select", "pending_sessions")
    assert_rows(
        models.rows("sessions_so_far").selectExpr(*shown), [("u1", "ab", False, 9), ("u2", "x", False, 9)]
    )
    models.run(10, "--select", "sessions")
    assert_rows(
        models.rows("sessions_so_far").selectExpr(*shown),
        [("u1", "ab", True, 10), ("u2", "xy", True, 10), ("u3", "p", False, 10)],
    )
