"""Dynamic Joiner: rows of two streams find each other within bounds, once, and what comes late is kept."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from python_jobs.data_value import dynamic_joiner as job
from python_jobs.data_value.dynamic_joiner import Parameters
from python_jobs.shared.core.failures import NotReady, WrongUse
from python_jobs.shared.delta.commits import write_once
from python_jobs.shared.delta.keyed_tables import DeltaSink
from tests.support.broken_texts import BROKEN, with_broken_texts
from tests.support.page_commands import command_parameters
from tests.support.rows import assert_rows
from tests.support.snippets import snippet

PAGE = "docs/data_value.md"
HERE = "tests/patterns/data_value/test_dynamic_joiner.py"

VISITS = "visit_id string, page string, event_time string"
ADS = "ad_id string, visit_page string, display_time string"
USER = "struct<user_id: string>"
VISIT_CHANGES = f"change_id string, op string, before {USER}, after {USER}, changed_at string"
USER_CHANGES = "op string, user_id string, plan string, since timestamp, changed_at string, position bigint"


class Streams:
    """Two tables, and the rows that a command of the page makes of them."""

    def __init__(self, spark: SparkSession, folder: Path, test: str, **schemas: str) -> None:
        self.spark, self.folder, self.test, self._schemas = spark, folder, test, schemas

    def append(self, table: str, *rows: tuple[Any, ...]) -> None:
        """Append rows as one file: one micro-batch."""
        frame = with_broken_texts(self.spark.createDataFrame(list(rows), self._schemas[table]))
        write_once(self.spark, frame.coalesce(1), str(self.folder / table))

    def parameters(self, **changes: str) -> Parameters:
        text = snippet(PAGE, f"{HERE}::{self.test}")
        given = {"now": "2024-01-01T12:00:00Z", "max_files_per_trigger": "1"} | changes
        return command_parameters(Parameters, text, self.folder, given)

    def run(self, **changes: str) -> dict[str, Any]:
        return job.run(self.spark, self.parameters(**changes))

    def table(self, name: str) -> DataFrame:
        return self.spark.read.format("delta").load(str(self.folder / name))


def at(clock: str) -> str:
    return f"2024-01-01T{clock}Z"


def dies_after(patch: pytest.MonkeyPatch, condition: str) -> None:
    """Let the query die between the write of a batch whose rows match ``condition`` and the batch's commit."""
    written = DeltaSink.write

    def dies(sink: DeltaSink, rows: DataFrame, run: int) -> None:
        written(sink, rows, run)
        if not rows.where(condition).isEmpty():
            raise ConnectionResetError

    patch.setattr(DeltaSink, "write", dies)


# --- interval: each stage continues the query of the one before --------------------------------------------


@pytest.fixture(scope="module")
def ads(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Streams:
    test = "test_rows_within_the_bounds_are_joined_and_the_others_wait"
    return Streams(spark, tmp_path_factory.mktemp("interval"), test, visits=VISITS, ads=ADS)


@pytest.fixture(scope="module")
def first(ads: Streams) -> dict[str, Any]:
    """Join the text's example in three batches; the records without key, id or time, or of tomorrow, are no part of it.

    The second batch has a visit alone, the third one an ad alone: what comes from the other side is of no use.
    """
    ads.append(
        "visits", ("v1", "home", at("10:00:00")), ("v2", "about", at("10:00:00")), ("v3", "x", at("10:00:00"))
    )
    ads.append(
        "ads",
        ("a1", "home", at("10:01:30")),
        ("a2", "about", at("10:02:01")),
        ("a3", "x", at("10:02:00")),
    )
    ads.append("visits", ("v4", "later", at("10:20:00")))
    ads.append("ads", ("n3", None, at("11:00:00")), ("n4", "home", at("13:00:01")))
    ads.append(
        "visits", ("n1", None, at("11:00:00")), ("n2", "home", "10:00"), (None, "home", at("11:00:00"))
    )
    ads.append("ads", ("a4", "nowhere", at("10:21:00")))
    return ads.run()


def after(ads: Streams, writes: int) -> DataFrame:
    """Return the pairs after the first ``writes`` batches that had some."""
    return (
        ads.spark.read.format("delta")
        .option("versionAsOf", writes)
        .load(str(ads.folder / "visits_with_ads"))["visit_id", "ad_id"]
    )


def test_rows_within_the_bounds_are_joined_and_the_others_wait(ads: Streams, first: dict[str, Any]) -> None:
    """a3 is exactly two minutes after v3; a2 is one second more after v2."""
    assert_rows(after(ads, 1), [("v1", "a1"), ("v3", "a3")])


def test_an_idle_side_stops_the_watermark(ads: Streams, first: dict[str, Any]) -> None:
    """The visit at 10:20 comes in the second batch; the watermark stays at that of the ads until the third one."""
    found = [(batch["watermark"], batch["state_rows"]) for batch in first["batches"][:3]]
    second, third = (dt.datetime(2024, 1, 1, 9, *clock, tzinfo=dt.UTC) for clock in ((50, 0), (52, 1)))
    assert found == [(None, 6), (second, 7), (third, 8)]


def test_a_row_without_a_match_is_written_once_the_watermark_has_passed_its_bound(
    ads: Streams, first: dict[str, Any]
) -> None:
    assert_rows(after(ads, 2), [("v1", "a1"), ("v3", "a3"), ("v2", None)])
    last = first["batches"][-1]
    assert last["watermark"] == dt.datetime(2024, 1, 1, 10, 10, tzinfo=dt.UTC)
    assert last["state_rows"] == 2, "v4 and a4"
    assert first["rows"] == 3


def test_records_that_cannot_be_joined_are_dead_letters_and_not_in_the_state(
    ads: Streams, first: dict[str, Any]
) -> None:
    dead = (
        ads.table("visits_with_ads_dead").select("side", "record", "error_class", "error_message").collect()
    )
    found = {
        (json.loads(row.record).get("visit_id" if row.side == "left" else "ad_id"), row.error_class)
        for row in dead
    }
    assert found == {
        ("n1", "NULL_KEY"), ("n2", "NULL_TIME"), (None, "NULL_KEY"), ("n3", "NULL_KEY"), ("n4", "FUTURE_EVENT_TIME"),
    }  # fmt: skip
    assert "the record has NULL in visit_id" in {row.error_message for row in dead}
    assert first["dead"] == {"left": 3, "right": 2}
    assert first["batches"][-1]["state_rows"] == 2


@pytest.fixture(scope="module")
def late(ads: Streams, first: dict[str, Any]) -> dict[str, Any]:
    """Start again and move both sides to 10:30, then bring late rows; die once between a batch's write and commit."""
    ads.append("visits", ("v5", "two", at("10:30:00")), ("v5", "two", at("10:30:00")))
    ads.append(
        "ads",
        ("a5", "two", at("10:30:00")),
        ("a6", "two", at("10:31:00")),
        ("a7", "early", at("10:31:00")),
        ("a8", "later", at("10:21:30")),
    )
    ads.append("visits", ("l1", "home", at("10:05:00")), ("v6", "early", at("10:30:00")))
    ads.append("ads", ("l2", "home", at("10:06:00")))
    with pytest.MonkeyPatch.context() as patch:
        dies_after(patch, "visit_id = 'v6'")
        with pytest.raises(ConnectionResetError):
            ads.run()
    assert ads.table("visits_with_ads_late").count() == 2, "the crash came after the writes"
    report = ads.run()
    return report | {"pairs": ads.table("visits_with_ads").select("visit_id", "ad_id").collect()}


def test_a_restart_between_both_sides_gives_one_row(late: dict[str, Any]) -> None:
    """The visit came before the restart, and its ad after it."""
    assert late["pairs"].count(("v4", "a8")) == 1


def test_a_restart_goes_on_with_the_watermark(late: dict[str, Any]) -> None:
    assert late["batches"][0]["watermark"] == dt.datetime(2024, 1, 1, 10, 20, tzinfo=dt.UTC)


def test_rows_behind_the_watermark_are_kept_once_as_late(ads: Streams, late: dict[str, Any]) -> None:
    found = ads.table("visits_with_ads_late").selectExpr(
        "side", "get_json_object(record, '$.page')", "get_json_object(record, '$.ad_id')",
        "date_format(event_time, 'HH:mm')", "date_format(watermark, 'HH:mm')",
    )  # fmt: skip
    assert_rows(found, [("left", "home", None, "10:05", "10:10"), ("right", None, "l2", "10:06", "10:10")])
    assert late["dropped"] == 2, "Spark drops exactly these"
    assert late["late"] == {"left": 1, "right": 1}


def test_each_pair_is_there_once_whichever_side_came_first_and_whatever_broke_off(
    late: dict[str, Any],
) -> None:
    assert_rows(
        late["pairs"],
        [
            ("v1", "a1"),
            ("v3", "a3"),
            ("v2", None),
            ("v4", "a8"),
            ("v5", "a5"),  # two ads in range are two rows, and a visit that came twice is one
            ("v5", "a6"),
            ("v6", "a7"),  # the ad came in an earlier batch
        ],
    )


def test_a_new_checkpoint_is_refused_where_a_row_would_stay_beside_its_match(
    ads: Streams, late: dict[str, Any]
) -> None:
    with pytest.raises(WrongUse, match=r"is new, but the target '.*visits_with_ads' has rows"):
        ads.run(checkpoint=str(ads.folder / "another"), start_over="true")


def test_the_faster_side_moves_the_watermark_where_that_is_asked_for(ads: Streams) -> None:
    """The ads are at 10:30; the last visit is behind their watermark, but far from that of the visits."""
    slow = Streams(ads.spark, ads.folder / "max", ads.test, visits=VISITS, ads=ADS)
    slow.append("visits", ("v", "home", at("10:00:00")))
    slow.append("ads", ("a", "home", at("10:01:00")), ("b", "nowhere", at("10:30:00")))
    slow.append("visits", ("w", "x", at("10:00:30")))
    slow.append("ads", ("c", "nowhere", at("10:31:00")))
    slow.append("visits", ("late", "home", at("10:10:00")))
    slow.append("ads", ("d", "nowhere", at("10:32:00")))
    report = slow.run(watermark_policy="max", join_type="inner")
    assert_rows(slow.table("visits_with_ads").select("visit_id", "ad_id"), [("v", "a")])
    assert (report["late"], report["dropped"]) == ({"left": 1, "right": 0}, 1)
    with pytest.raises(WrongUse, match="was made for another rules"):
        slow.run(join_type="inner")


def test_minutes_apart_decide_within_the_given_range(ads: Streams) -> None:
    visits = ads.spark.createDataFrame(
        [("v", "near", at("10:03:00")), ("w", "far", at("10:06:00")), ("x", "after", at("09:57:00"))], VISITS
    )
    shown = [(page, page, at("10:00:00")) for page in ("near", "far", "after")]
    parameters = ads.parameters(max_before="5 minutes", max_after="1 minute")
    # A join needs no stream: the same query on DataFrames.
    found = job.joined(visits, ads.spark.createDataFrame(shown, ADS), parameters).where("__side is null")
    assert_rows(found.select("visit_id", "ad_id"), [("v", "near"), ("w", None), ("x", None)])


def test_spark_itself_refuses_an_outer_join_without_watermark_or_bounds(
    ads: Streams, first: dict[str, Any]
) -> None:
    left, right = (
        ads.spark.readStream.format("delta").load(str(ads.folder / name)) for name in ("visits", "ads")
    )
    joined = left.join(right, left["page"] == right["visit_page"], "left")
    with pytest.raises(AnalysisException, match="without a watermark"):
        joined.writeStream.format("noop").option("checkpointLocation", str(ads.folder / "none")).start()
    rows = job.joined(left, right, ads.parameters()).where("__side is null")
    with pytest.raises(AnalysisException, match=r"[Uu]pdate output mode"):
        rows.writeStream.format("noop").outputMode("update").option(
            "checkpointLocation", str(ads.folder / "none")
        ).start()


# --- as of -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plans(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Streams:
    return Streams(
        spark, tmp_path_factory.mktemp("as_of"), "test_a_row_takes_the_latest_version_at_its_time",
        visit_changes=VISIT_CHANGES, user_changes=USER_CHANGES,
    )  # fmt: skip


SINCE = dt.datetime(2020, 1, 1, 1, 2, 3, 456789, dt.UTC)


def change(op: str | None, id_: str, user: str | None, clock: str) -> tuple[Any, ...]:
    """Return a change of a visit; a deletion has its user before it only."""
    row = None if user is None else (user,)
    return (id_, op, row if op == "d" else None, None if op == "d" else row, at(clock))


def plan(position: int, user: str | None, name: str, clock: str, op: str | None = "u") -> tuple[Any, ...]:
    return (op, user, name, SINCE, at(clock), position)


def found_plans(plans: Streams) -> DataFrame:
    return plans.table("visits_with_plans").select("change_id", "op", "plan")


@pytest.fixture(scope="module")
def waiting(plans: Streams) -> dict[str, Any]:
    """Bring the text's example for two users; the second one's middle version comes a batch later."""
    plans.append(
        "visit_changes",
        *(change(op, f"{user}{clock[3:5]}", user, clock) for user in ("p", "q")
          for op, clock in (("c", "10:04:00"), ("d", "10:05:00"), ("u", "09:59:00"))),
        change("c", "stranger", "unknown", "10:04:00"), change("c", "nobody", None, "10:04:00"),
        change(None, "tombstone", None, "10:04:00"), change("c", "r08", "r", "10:08:00"),
        change("c", "t04", "t", "10:04:00"), change("c", f"broken {BROKEN}", "t", "10:04:00"),
    )  # fmt: skip
    plans.append(
        "user_changes",
        *(plan(number, user, name, clock) for user in ("p", "q")
          for number, (name, clock) in enumerate([("a1", "10:00:00"), ("a0", "10:00:00"), ("a2", "10:05:00")])),
        plan(9, None, "tombstone", "10:05:00", op=None), plan(10, "r", "a3", "10:00:00", op="c"),
        plan(20, BROKEN, "x", "10:00:00"), plan(21, "t", f"b{BROKEN}", "10:00:00"),
    )  # fmt: skip
    plans.append("visit_changes", change("c", "p06", "p", "10:06:00"))
    plans.append("user_changes", plan(11, "q", "a1b", "10:03:00"), plan(12, "r", "a3", "10:07:00", op="d"))
    return plans.run() | {"rows_written": found_plans(plans).collect()}


def test_a_row_waits_until_the_watermark_has_reached_its_time(waiting: dict[str, Any]) -> None:
    """The watermark is at 10:01, five minutes behind the slower side."""
    assert_rows(waiting["rows_written"], [("p59", "u", None), ("q59", "u", None)])
    assert waiting["dead"] == {"left": 2, "right": 1}, "without a user; tombstones are no part of it"


def test_a_key_or_id_that_is_no_utf_8_is_a_dead_letter(plans: Streams, waiting: dict[str, Any]) -> None:
    dead = plans.table("visits_with_plans_dead").where("error_class = 'NOT_UTF8'")
    message = "the record has bytes that aren't UTF-8 in "
    assert_rows(
        dead.select("side", "error_message"),
        [("left", f"{message}change_id"), ("right", f"{message}user_id")],
    )


@pytest.fixture(scope="module")
def answered(plans: Streams, waiting: dict[str, Any]) -> dict[str, Any]:
    """Start again and move both sides to 10:30; then a late version and a late visit; then to 10:50."""
    plans.append("visit_changes", change("c", "s30", "s", "10:30:00"))
    plans.append("user_changes", plan(13, "s", "b1", "10:30:00"))
    plans.append("visit_changes", change("c", "late", "p", "10:10:00"), change("c", "p40", "p", "10:40:00"))
    plans.append("user_changes", plan(14, "p", "b2", "10:20:00"), plan(15, "s", "b3", "10:50:00"))
    plans.append("visit_changes", change("c", "s50", "s", "10:50:00"))
    return plans.run()


EXPECTED = [
    ("p59", "u", None),
    ("q59", "u", None),
    ("p04", "c", "a0"),  # of two versions of one time the later one by its position
    ("q04", "c", "a1b"),  # which came after a2, and after the visit
    ("p05", "d", "a2"),  # a version counts from its time on; a deletion has its user
    ("q05", "d", "a2"),
    ("p06", "c", "a2"),
    ("r08", "c", None),  # the user was deleted at 10:07
    ("stranger", "c", None),
    ("s30", "c", "b1"),
    ("p40", "c", "b2"),  # the late version: nothing newer is known
    ("t04", "c", "b\ufffd"),  # as Python shows the byte FF
]


def test_a_row_takes_the_latest_version_at_its_time(plans: Streams, answered: dict[str, Any]) -> None:
    assert_rows(found_plans(plans), EXPECTED)


def test_late_rows_of_the_as_of_join_are_kept_once(plans: Streams, answered: dict[str, Any]) -> None:
    found = plans.table("visits_with_plans_late").selectExpr(
        "side", "date_format(event_time, 'HH:mm')", "date_format(watermark, 'HH:mm')"
    )
    assert_rows(found, [("left", "10:10", "10:25"), ("right", "10:20", "10:25")])
    assert answered["dropped"] == 0, "the state sorts them out itself"


def test_values_pass_through_the_state_unchanged(plans: Streams, answered: dict[str, Any]) -> None:
    found = plans.table("visits_with_plans").where("change_id = 'p04'")
    assert_rows(
        found.selectExpr(
            "plan_since = timestamp'2020-01-01T01:02:03.456789Z'", "user_id", "left_date", "version"
        ),
        [(True, "p", dt.date(2024, 1, 1), [1_704_103_200_000_000, 1])],
    )
    of_t = plans.table("visits_with_plans").where("user_id = 't'")
    assert_rows(of_t.selectExpr("hex(plan)"), [("62FF",)])
    times = found.selectExpr("date_format(left_time, 'HH:mm:ss')", "date_format(right_time, 'HH:mm:ss')")
    assert_rows(times, [("10:04:00", "10:00:00")])


def test_old_versions_leave_the_state(plans: Streams, answered: dict[str, Any]) -> None:
    """The watermark is at 10:45: of each user the newest version before it stays, and those after it."""
    state = plans.spark.read.format("statestore").option("stateVarName", "versions")
    found = state.load(str(plans.folder / "checkpoints" / "visits_with_plans")).select("list_element.at")
    at_clock = "date_format(timestamp_micros(at), 'HH:mm')"
    assert_rows(
        found.selectExpr(at_clock), [("10:20",), ("10:05",), ("10:07",), ("10:30",), ("10:50",), ("10:00",)]
    )


def test_all_rows_at_once_from_a_new_checkpoint_change_no_answer(
    plans: Streams, answered: dict[str, Any]
) -> None:
    before = found_plans(plans).collect()
    plans.run(checkpoint=str(plans.folder / "another"), start_over="true", max_files_per_trigger="100")
    # In one batch nothing is late.
    assert_rows(found_plans(plans), [*before, ("late", "c", "a2")])


# --- wrong use ---------------------------------------------------------------------------------------------


def test_wrong_use_is_refused_in_one_sentence(
    spark: SparkSession, tmp_path: Path, ads: Streams, first: dict[str, Any]
) -> None:
    test = "test_rows_within_the_bounds_are_joined_and_the_others_wait"
    with pytest.raises(NotReady, match="there is no Delta table"):
        Streams(spark, tmp_path, test).run()
    for changes, sentence in [
        ({"max_after": "soon"}, "'soon' is no duration"),
        ({"right": str(ads.folder / "visits")}, "must be five tables"),
        ({"right_key.more": "ad_id"}, "must name the same parts, one or more, got page and page, more"),
        (
            {"right_key.page": "length(visit_page)"},
            "the key's part page must have one type",
        ),
        ({"left_time": "nothing"}, "an expression over left can't be resolved"),
        (
            {"left_columns": "{visit_id: visit_id, Version: page}"},
            "left_columns and right_columns can't name columns that the job writes itself: Version",
        ),
        ({"right_columns": "{ad_id: ad_id, Page: visit_page}"}, "must have different names"),
        (
            {"right_id": "[ad]"},
            "right_id must name columns of right_columns, one or more, got ad; there are ad_id",
        ),
        ({"validity": "1 hour"}, "the variant interval doesn't take validity"),
        ({"variant": "as_of"}, "the variant as_of doesn't take max_after, right_id"),
        ({"max_after": "3 minutes"}, "was made for another rules"),
    ]:
        with pytest.raises(WrongUse, match=sentence):
            ads.run(**changes)
