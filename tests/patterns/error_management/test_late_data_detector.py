"""Late Data Detector: the watermark's rules, the splitting job, Spark's own windows, and the SQL report."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dbt_common.exceptions import DbtRuntimeError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.error_management import late_data_detector as job
from python_jobs.error_management import windowed_counter
from python_jobs.error_management.late_data_detector import Parameters
from python_jobs.error_management.watermarks import Partition, Policy, State, advance, is_late
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from tests.support.dbt_project import DbtProject
from tests.support.other_commits import commit
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.session import setting
from tests.support.snippets import snippet, snippets

PAGE = "docs/error_management.md"
HERE = "tests/patterns/error_management/test_late_data_detector.py"
NOW = "2024-01-01T12:00:00Z"
HALF_AN_HOUR = Policy(dt.timedelta(minutes=30))


def at(clock: str) -> dt.datetime:
    """Return a time of 2024-01-01 in UTC."""
    return dt.datetime.fromisoformat(f"2024-01-01T{clock}+00:00")


def judge(state: State, *clocks: str, policy: Policy = HALF_AN_HOUR) -> tuple[State, list[str]]:
    """Judge a batch of one partition; return the state after it and what is late."""
    times = {clock: at(clock) for clock in clocks}
    late = [c for c, time in times.items() if state.watermark is not None and is_late(time, state.watermark)]
    latest = {(None, None): max(times.values())} if times else {}
    return advance(state, latest, policy, at("12:00")), late


def slow_and_fast(policy: Policy) -> State:
    """Return the state after a batch of two partitions, 40 minutes apart."""
    return advance(State(), {("s", "0"): at("10:40"), ("s", "1"): at("10:00")}, policy, at("12:00"))


class TestWatermark:
    def test_the_walk_through_of_the_text(self) -> None:
        first, late = judge(State(), "10:00", "10:05", "10:06")
        assert (first.watermark, late) == (at("09:36"), [])
        second, late = judge(first, "09:20", "09:31", "10:07")
        assert (second.watermark, late) == (at("09:37"), ["09:20", "09:31"])

    def test_it_never_goes_back_and_an_empty_batch_changes_nothing(self) -> None:
        first, _ = judge(State(), "10:06")
        earlier, late = judge(first, "09:50")
        assert (earlier.watermark, late) == (at("09:36"), [])
        assert earlier.partitions == first.partitions
        assert judge(earlier) == (earlier, [])
        another_partition = advance(earlier, {("s", "1"): at("08:00")}, HALF_AN_HOUR, at("12:00"))
        assert another_partition.watermark == at("09:36")
        assert judge(State()) == (State(), [])

    def test_a_batch_is_judged_by_the_watermark_before_it(self) -> None:
        first, _ = judge(State(), "10:06")
        assert judge(first, "10:07", "09:36:30")[1] == []
        assert judge(judge(first, "10:07")[0], "09:36:30")[1] == ["09:36:30"]

    def test_an_event_on_the_watermark_is_on_time(self) -> None:
        first, _ = judge(State(), "10:06")
        assert judge(first, "09:36")[1] == []
        assert judge(first, "09:35:59.999999")[1] == ["09:35:59.999999"]

    @pytest.mark.parametrize(
        ("within", "watermark", "late"), [("min", "09:50", False), ("max", "10:30", True)]
    )
    def test_the_slowest_or_the_fastest_partition_decides(
        self, within: Any, watermark: str, late: bool
    ) -> None:
        state = slow_and_fast(Policy(dt.timedelta(minutes=10), within))
        assert state.watermark == at(watermark)
        assert is_late(at("10:15"), state.watermark) is late

    @pytest.mark.parametrize(
        ("within", "across", "reached"), [("min", "max", "10:20"), ("max", "min", "10:10")]
    )
    def test_several_sources_are_combined(self, within: Any, across: Any, reached: str) -> None:
        latest = {
            ("A", "0"): at("10:40"), ("A", "1"): at("10:20"), ("B", "0"): at("10:10"), ("B", "1"): at("09:50"),
        }  # fmt: skip
        state = advance(State(), latest, Policy(dt.timedelta(0), within, across), at("12:00"))
        assert state.watermark == at(reached)

    def test_an_idle_partition_is_waited_for_unless_a_time_is_set(self) -> None:
        fast = {("s", "0"): at("11:30")}
        for idle_after, watermark in ((None, "09:30"), (dt.timedelta(minutes=5), "11:00")):
            policy = Policy(dt.timedelta(minutes=30), idle_after=idle_after)
            state = advance(slow_and_fast(policy), fast, policy, at("12:05:01"))
            assert state.watermark == at(watermark)
        at_the_limit = advance(slow_and_fast(policy), fast, policy, at("12:05"))
        assert at_the_limit.watermark == at("09:30")
        everybody_idle = advance(state, {}, policy, at("23:00"))
        assert everybody_idle.watermark == at("11:00")

    def test_when_the_processing_clock_goes_back_nothing_is_idle(self) -> None:
        policy = Policy(dt.timedelta(minutes=30), idle_after=dt.timedelta(minutes=5))
        state = advance(slow_and_fast(policy), {("s", "0"): at("11:30")}, policy, at("08:00"))
        assert state.watermark == at("09:30")


def _as_text(clock: str | None) -> str | None:
    """Return a clock as the text of a time of 2024-01-01; anything else stays as it is."""
    return f"{at(clock):%Y-%m-%dT%H:%M:%S.%f}Z" if clock and clock[2:3] == ":" else clock


class Stream:
    """A source table, the three tables that the job writes and the checkpoint of one test."""

    SCHEMA = "visit_id int, event_time string, topic string, partition int"

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def append(self, *events: tuple[Any, ...]) -> None:
        """Append one file of events ``(visit_id, clock or text or None[, topic, partition])``."""
        rows = [(event[0], _as_text(event[1]), *event[2:]) for event in events]
        rows = [row + ("visits", 0)[len(row) - 2 :] for row in rows]
        self.spark.createDataFrame(rows, self.SCHEMA).coalesce(1).write.format("delta").mode("append").save(
            self.path("source")
        )

    def given(self, **changes: Any) -> dict[str, Any]:
        tables = ("source", "target", "dead_letter", "watermarks", "checkpoint")
        given = {name: self.path(name) for name in tables} | {"allowed_lateness": "30 minutes", "now": NOW}
        return given | {"partition_column": "partition", "source_column": "topic"} | changes

    def run(self, **changes: Any) -> dict[str, Any]:
        return job.run(self.spark, Parameters(**self.given(**changes)))

    def table(self, name: str) -> DataFrame:
        """Return a table, or those rows of the target that are on_time or late."""
        if name in ("on_time", "late"):
            return job.outcome(self.table("target"), late=name == "late")
        return self.spark.read.format("delta").load(self.path(name))

    def versions(self) -> dict[str, int]:
        logs = {path.parent.name: path for path in self.folder.glob("*/_delta_log")}
        return {name: len(list(log.glob("*.json"))) - 1 for name, log in logs.items() if name != "source"}


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> Stream:
    return Stream(spark, tmp_path)


class TestSplit:
    """One run of a few batches that many assertions share."""

    @pytest.fixture(scope="class")
    @staticmethod
    def ran(
        spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
    ) -> tuple[Stream, dict[str, Any], list[int]]:
        """Return the stream, its report, and the numbers of records that a pass of its own has counted."""
        stream = Stream(spark, tmp_path_factory.mktemp("split"))
        stream.append((1, "10:00"), (2, "10:05"), (3, "10:06"))
        stream.append(
            (4, "09:20"), (5, "09:31"), (6, "10:07"), (7, "09:36"), (8, "2024-01-01T11:36:00+02:00")
        )
        stream.append((9, None), (10, "nope"), (11, "10h15"), (12, "2031-01-01T00:00:00Z"))
        stream.append(
            (13, "09:37"), (14, "09:36:59.999999"), (17, "08:00"), (18, "07:00"),
            (19, "0001-01-01T00:00:00Z", "visits", 1),
        )  # fmt: skip
        passes: list[int] = []

        def counted(*given: Any) -> job.Counts:
            counts = original(*given)
            passes.append(counts.read)
            return counts

        with pytest.MonkeyPatch.context() as patched:
            original = job.counted
            patched.setattr(job, "counted", counted)
            return stream, stream.run(max_files_per_trigger=1), passes

    def test_on_time_and_late_are_disjoint_and_together_all_that_can_be_judged(self, ran: Any) -> None:
        stream, report, _ = ran
        assert_rows(stream.table("late"), [(4,), (5,), (14,), (17,), (18,), (19,)], ["visit_id"])
        assert_rows(stream.table("on_time"), [(1,), (2,), (3,), (6,), (7,), (8,), (13,)], ["visit_id"])
        assert_rows(stream.table("dead_letter"), [(9,), (10,), (11,), (12,)], ["visit_id"])
        assert (report["read"], report["on_time"], report["late"], report["dead"]) == (17, 7, 6, 4)
        assert report["late_share"] == 0.352941

    def test_a_late_row_says_by_which_watermark_and_how_late_it_came(self, ran: Any) -> None:
        stream = ran[0]
        columns = [
            "visit_id",
            "event_time",
            "event_at",
            "is_late",
            "watermark",
            "processed_at",
            "delay_seconds",
        ]
        assert_rows(
            stream.table("late").where("visit_id = 4"),
            [(4, "2024-01-01T09:20:00.000000Z", at("09:20"), True, at("09:36"), at("12:00"), 9600.0)],
            columns,
        )
        assert_rows(
            stream.table("on_time").where("visit_id in (1, 6)"),
            [(1, False, None), (6, False, at("09:36"))],
            ["visit_id", "is_late", "watermark"],
        )

    def test_the_page_s_query_of_late_rows(self, ran: Any) -> None:
        stream = ran[0]
        query = snippet(PAGE, f"{HERE}::TestSplit::test_the_page_s_query_of_late_rows")
        late = stream.spark.sql(query.replace("lakehouse/silver/visits_by_lateness", stream.path("target")))
        delays = [(4, 9600.0), (5, 8940.0), (14, 8580.000001), (17, 14400.0), (18, 18000.0)]
        assert_rows(late.where("visit_id < 19"), delays, ["visit_id", "delay_seconds"])

    def test_an_event_on_the_watermark_is_on_time_in_any_zone(self, ran: Any) -> None:
        stream = ran[0]
        assert_rows(
            stream.table("on_time").where("visit_id in (7, 8)"),
            [(7, at("09:36")), (8, at("09:36"))],
            ["visit_id", "event_at"],
        )

    def test_without_a_usable_event_time_a_record_is_a_dead_letter_with_its_reason(self, ran: Any) -> None:
        stream = ran[0]
        assert_rows(
            stream.table("dead_letter"),
            [
                (9, "MISSING_EVENT_TIME", "the record has no event time"),
                (10, "UNPARSABLE_EVENT_TIME", "the event time can't be read: nope"),
                (11, "UNPARSABLE_EVENT_TIME", "the event time can't be read: 10h15"),
                (
                    12,
                    "FUTURE_EVENT_TIME",
                    "the event time 2031-01-01 00:00:00 is after 2024-01-01 13:00:00, "
                    "the latest that max_future allows",
                ),
            ],
            ["visit_id", "error_class", "error_message"],
        )

    def test_the_watermark_of_each_batch_is_kept_and_no_future_or_late_time_moves_it(self, ran: Any) -> None:
        stream, report, _ = ran
        assert_rows(
            stream.table("watermarks"),
            [
                (0, None, at("09:36"), 3, 3, 0, 0),
                (1, at("09:36"), at("09:37"), 5, 3, 2, 0),
                (2, at("09:37"), at("09:37"), 4, 0, 0, 4),
                (3, at("09:37"), at("09:37"), 5, 1, 4, 0),
            ],
            ["batch_id", "input_watermark", "watermark", "read", "on_time", "late", "dead"],
        )
        assert [batch["watermark"][11:16] for batch in report["batches"]] == ["09:36", *["09:37"] * 3]

    def test_only_a_batch_with_a_new_partition_is_read_twice(self, ran: Any) -> None:
        assert ran[2] == [3, 5], "the first batch, and that of partition 1"

    def test_reading_late_rows_opens_only_their_files(self, ran: Any) -> None:
        stream = ran[0]
        late, target = (set(stream.table(name).inputFiles()) for name in ("late", "target"))
        assert late == {file for file in target if "/is_late=true/" in file}
        assert len(target) > len(late) > 0

    def test_a_text_without_date_or_time_of_day_is_no_event_time(self, spark: SparkSession) -> None:
        texts = ["10:15", "2024-01-01", " 2024-01-01 10:15:00", "2024-01-01T11:15:00+01:00"]
        rows = spark.createDataFrame([(text,) for text in texts], "event_time string")
        with setting(spark, "spark.sql.session.timeZone", "Asia/Kolkata"):
            judged = job.judged(rows, "event_time", None, at("12:00"), dt.timedelta(hours=1))
            assert_rows(
                judged,
                [(None, "UNPARSABLE_EVENT_TIME")] * 2 + [(at("10:15"), None)] * 2,
                ["event_at", "error_class"],
            )

    def test_a_restart_goes_on_with_the_watermark_and_an_idle_run_adds_nothing(self, ran: Any) -> None:
        stream = ran[0]
        before = stream.versions()
        assert stream.run()["read"] == 0
        assert stream.versions() == before
        stream.append((15, "09:00"), (16, "09:40"))
        report = stream.run()
        assert report["batches"][0]["input_watermark"] == "2024-01-01T09:37:00+00:00"
        assert (report["late"], report["on_time"]) == (1, 1)


def test_the_fastest_partition_of_the_source_decides_if_asked_to(stream: Stream) -> None:
    stream.append((1, "10:40", "visits", 0), (2, "10:00", "visits", 1))
    stream.append((3, "10:15", "visits", 1), (4, "10:31", "visits", 1))
    stream.run(within="max", allowed_lateness="10 minutes", max_files_per_trigger=1)
    assert_rows(stream.table("late"), [(3, at("10:30"))], ["visit_id", "watermark"])
    partitions = stream.table("watermarks").where("batch_id = 1").selectExpr("inline(partitions)")
    assert_rows(
        partitions,
        [("visits", "0", at("10:40"), at("12:00")), ("visits", "1", at("10:31"), at("12:00"))],
    )


class TestCrash:
    """Batches that a run begins and another run, by another clock, ends."""

    @pytest.fixture(scope="class")
    @staticmethod
    def crashed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Stream:
        """Return a stream whose runs have failed: each at another step of another batch."""
        stream = Stream(spark, tmp_path_factory.mktemp("crash"))
        stream.append((1, "10:00"), (2, None))
        # By the clock of the run after the failed one, the event of 12:59 would be one of the future.
        stream.append((3, "11:00"), (4, "09:00"), (5, "12:59"), (6, None))
        stream.append((7, "12:30"), (8, "12:28"), (9, "nope"))
        stream.append((10, "13:00"), (11, "12:00"), (12, None))
        for batch_id, (step, now) in enumerate(
            [("target", "10:30"), ("dead_letter", "12:00"), ("watermarks", "11:40"), ("end", "12:15")]
        ):
            with pytest.MonkeyPatch.context() as patched:
                failing_at(patched, stream, step, batch_id)
                with pytest.raises(OSError, match=f"batch {batch_id} ends at {step}"):
                    stream.run(max_files_per_trigger=1, now=f"2024-01-01T{now}:00Z")
            commit(stream.path("target"), 60)  # more than the first portion that is read of a history
        stream.run(now="2024-01-01T11:00:00Z")
        return stream

    def test_each_record_is_in_one_table_once(self, crashed: Stream) -> None:
        assert_rows(crashed.table("on_time"), [(1,), (3,), (5,), (7,), (10,)], ["visit_id"])
        assert_rows(crashed.table("late"), [(4,), (8,), (11,)], ["visit_id"])
        assert_rows(crashed.table("dead_letter"), [(2,), (6,), (9,), (12,)], ["visit_id"])

    def test_a_committed_batch_keeps_its_watermark_and_its_clock(self, crashed: Stream) -> None:
        columns = ["batch_id", "processed_at", "input_watermark", "watermark", "read", "late", "dead"]
        expected = [
            (1, at("12:00"), at("09:30"), at("12:29"), 4, 1, 1),
            (2, at("11:40"), at("12:29"), at("12:29"), 3, 1, 1),
            (3, at("12:15"), at("12:29"), at("12:30"), 3, 1, 1),
        ]
        assert_rows(crashed.table("watermarks").where("batch_id > 0"), expected, columns)
        times = crashed.table("target").where("visit_id > 2").select("processed_at", "watermark")
        assert_rows(times.distinct(), [(row[1], row[2]) for row in expected])

    def test_a_batch_without_a_commit_is_decided_anew(self, crashed: Stream) -> None:
        first = crashed.table("watermarks").where("batch_id = 0")
        assert_rows(first, [(at("12:00"), 2, 0, 1)], ["processed_at", "read", "late", "dead"])

    def test_partitions_are_seen_when_their_batch_was_committed(self, crashed: Stream) -> None:
        progress = crashed.table("watermarks").where("batch_id = 2").selectExpr("inline(partitions)")
        assert_rows(progress, [("visits", "0", at("12:59"), at("11:40"))])


def failing_at(patched: pytest.MonkeyPatch, stream: Stream, step: str, batch_id: int) -> None:
    """Let a batch fail before its write to a table, or at the end, before Spark notes that it is done."""
    append, write = job.append, job.Splitter.write
    failure = OSError(f"batch {batch_id} ends at {step}")

    def appending(rows: DataFrame, table: str, options: dict[str, str]) -> None:
        if (table, options["txnVersion"]) == (stream.path(step), str(batch_id)):
            raise failure
        append(rows, table, options)

    def writing(self: job.Splitter, rows: DataFrame, number: int) -> None:
        write(self, rows, number)
        if (step, number) == ("end", batch_id):
            raise failure

    patched.setattr(job, "append", appending)
    patched.setattr(job.Splitter, "write", writing)


def test_a_batch_whose_commit_is_gone_from_the_log_is_refused(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.append((1, "10:00"))
    with monkeypatch.context() as patched:
        failing_at(patched, stream, "watermarks", 0)
        with pytest.raises(OSError, match="ends at watermarks"):
            stream.run()
    table = f"delta.`{stream.path('target')}`"
    stream.spark.sql(f"alter table {table} set tblproperties ('delta.checkpointInterval' = '1')")
    stream.spark.sql(f"alter table {table} set tblproperties ('delta.appendOnly' = 'false')")
    for entry in sorted(Path(stream.path("target"), "_delta_log").glob("*.json"))[:2]:
        entry.unlink()  # as Delta does with the entries before a checkpoint after 30 days
    with pytest.raises(JobFailed, match=r"batch 0 is in the table .* no longer has its commit"):
        stream.run()


def test_the_views_of_the_target_have_the_delay_and_replace_no_view_of_another_owner(
    spark: SparkSession, stream: Stream
) -> None:
    stream.append((1, "10:00"))
    stream.append((2, "11:00"), (3, "09:00"))
    spark.sql("create database if not exists lateness")
    views = {"on_time": "lateness.visits_on_time", "late": "lateness.visits_late"}
    try:
        report = stream.run(max_files_per_trigger=1, **views)
        assert report["views"] == views
        columns = ["visit_id", "is_late", "watermark", "delay_seconds"]
        assert_rows(spark.table(views["late"]), [(3, True, at("09:30"), 10800.0)], columns)
        assert_rows(
            spark.table(views["on_time"]),
            [(1, False, None, 7200.0), (2, False, at("09:30"), 3600.0)],
            columns,
        )
        stream.append((4, "09:01"))
        stream.run(**views)
        assert_rows(spark.table(views["late"]), [(3,), (4,)], ["visit_id"])
        spark.sql("create view lateness.theirs as select 1 as visit_id")
        with pytest.raises(WrongUse, match=r"lateness.theirs exists and was not created by this job"):
            stream.run(late="lateness.theirs")
        with pytest.raises(WrongUse, match="visits_on_time exists and was not created by this job"):
            stream.run(**views, target=stream.path("another"), checkpoint=stream.path("anew"))
    finally:
        spark.sql("drop database lateness cascade")


TALLIED = [
    (1, "10:00", "visits", 0), (2, "10:09", "visits", 0), (3, "08:00", "visits", 1), (4, "09:00", None, 1),
    (5, "11:00", "visits", None), (6, None, "visits", 1), (7, "2031-01-01T00:00:00Z", "visits", 0),
]  # fmt: skip
PARTITIONS: list[Partition] = [("visits", "0"), ("visits", "1"), (None, "1"), ("visits", None)]


@pytest.mark.parametrize("partition_type", ["int", "string"])
def test_the_counts_of_the_write_are_those_of_a_pass(spark: SparkSession, partition_type: str) -> None:
    rows = [(event[0], _as_text(event[1]), *event[2:]) for event in TALLIED]
    source = spark.createDataFrame(rows, Stream.SCHEMA).withColumn(
        "partition", F.col("partition").cast(partition_type)
    )
    judged = job.judged(source, "event_time", at("09:00"), at("12:00"), dt.timedelta(hours=1))
    key = [F.col("topic").alias("source_name"), F.col("partition").cast("string").alias("partition_name")]

    def tallied(known: list[Partition], rows: DataFrame = judged) -> job.Counts | None:
        tally = job.Tally(("topic", "partition"), known)
        written = tally.usable(rows, source.columns)
        assert written.columns == [*source.columns, *job.JUDGEMENT_COLUMNS]
        written.write.format("noop").mode("overwrite").save()
        return tally.counts()

    latest = dict(zip(PARTITIONS, map(at, ("10:09", "08:00", "09:00", "11:00")), strict=True))
    assert tallied(PARTITIONS) == job.counted(judged, key) == job.Counts(7, 1, 2, latest)
    assert tallied([*PARTITIONS, ("clicks", "0")]) == job.Counts(7, 1, 2, latest)
    assert tallied(PARTITIONS[1:]) is None, "rows of another partition"
    assert tallied(PARTITIONS[:1], judged.where("visit_id >= 6")) == job.Counts(2, 0, 2, {})
    assert tallied(PARTITIONS[:1], judged.where("visit_id > 7")) == job.Counts(0, 0, 0, {})


def test_job_snippet_of_the_page(stream: Stream) -> None:
    config = stream.folder / "visits.yml"
    config.write_text(snippet(PAGE, f"{HERE}::test_job_snippet_of_the_page"))
    tables = {name: value for name, value in stream.given().items() if "/" in value}
    options = [text for name, value in tables.items() for text in (f"--{name}", value)]
    parameters, _ = parse_parameters(Parameters, ["--config", str(config), *options, "--now", NOW])
    rows = [('{"event_time":"2024-01-01T10:00:00+00:00"}', "visits", 0), ('{"page":"/a"}', "visits", 1)]
    stream.spark.createDataFrame(rows, "payload string, topic string, partition int").write.format(
        "delta"
    ).save(stream.path("source"))
    report = job.run(stream.spark, parameters)
    assert (report["on_time"], report["dead"]) == (1, 1)


def test_wrong_use_gives_one_sentence(stream: Stream) -> None:
    with pytest.raises(NotReady, match="there is no Delta table"):
        stream.run()
    stream.append((1, "10:00"))
    for changes, sentence in (
        ({"target": stream.path("dead_letter")}, "must be four tables"),
        ({"late": stream.path("late")}, "late must be the name of a view in the catalog, got the path"),
        ({"late": "visits", "on_time": "visits"}, "must be two views, got 'visits' for both"),
        ({"allowed_lateness": "soon"}, "'soon' is no duration"),
        ({"max_files_per_trigger": 0}, "max_files_per_trigger must be 1 or more, got 0"),
        ({"partition_column": "shard"}, "partition_column names no column of the source: shard"),
        ({"event_time": "visit_id"}, "event_time 'visit_id' is of type int; it must be a timestamp"),
    ):
        with pytest.raises(WrongUse, match=sentence):
            stream.run(**changes)
    stream.run()
    with pytest.raises(WrongUse, match="was made for another target"):
        stream.run(target=stream.path("elsewhere"))


class Windows:
    """A source of one event a file, hence a micro-batch, and the windows that come of it."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder

    def append(self, *clocks: str | None) -> None:
        rows = [(None if clock is None else at(clock),) for clock in clocks]
        source = self.spark.createDataFrame(rows, "event_time timestamp").coalesce(1)
        source.write.format("delta").mode("append").save(str(self.folder / "source"))

    def run(self, **changes: Any) -> dict[str, Any]:
        given = {name: str(self.folder / name) for name in ("source", "target", "checkpoint")}
        return windowed_counter.run(
            self.spark, windowed_counter.Parameters(**(given | {"max_files_per_trigger": 1} | changes))
        )

    def counts(self) -> dict[str, int]:
        rows = self.spark.read.format("delta").load(str(self.folder / "target")).collect()
        counts = {f"{row['window_start']:%H:%M}": row["events"] for row in rows}
        assert len(counts) == len(rows)
        return counts


class TestSparkWindows:
    @pytest.fixture(scope="class")
    @staticmethod
    def ran(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Windows, dict[str, Any]]:
        """Run the table of the text, one event a batch, with two events that its footnote is about."""
        windows = Windows(spark, tmp_path_factory.mktemp("windows"))
        for clock in ("03:15", "03:00", "01:50", "02:12", "02:05", "03:11", "04:31"):
            windows.append(clock)
        return windows, windows.run(delay="1 hour")

    def test_the_table_of_the_text(self, ran: Any) -> None:
        windows, report = ran
        watermarks = [batch["watermark"] and f"{batch['watermark']:%H:%M}" for batch in report["batches"]]
        # What a batch runs with is what the ones before it made; the last batch has no event and closes windows.
        assert watermarks == [None, *["02:15"] * 6, "03:31"]
        assert windows.counts() == {"02:10": 1, "03:00": 1, "03:10": 2}
        assert report["open_windows"] == 1

    def test_a_window_takes_events_until_the_watermark_reaches_its_end(self, ran: Any) -> None:
        windows, report = ran
        # 01:50 and 02:05 are dropped; 02:12 is behind the watermark of 02:15 too, but its window ends at 02:20.
        assert [batch["late_rows"] for batch in report["batches"]] == [0, 0, 1, 0, 1, 0, 0, 0]
        assert windows.counts()["02:10"] == 1

    def test_a_run_again_without_new_events_changes_no_count(self, ran: Any) -> None:
        windows, _ = ran
        before = windows.counts()
        assert windows.run(delay="1 hour")["read"] == 0
        assert windows.counts() == before

    def test_the_dropped_rows_match_an_independent_count(self, ran: Any) -> None:
        _, report = ran
        watermark, dropped, ten_minutes = None, 0, dt.timedelta(minutes=10)
        for clock in ("03:15", "03:00", "01:50", "02:12", "02:05", "03:11", "04:31"):
            start = at(clock) - (at(clock) - at("00:00")) % ten_minutes
            dropped += watermark is not None and start + ten_minutes <= watermark
            candidate = at(clock) - dt.timedelta(hours=1)
            watermark = candidate if watermark is None else max(watermark, candidate)
        assert report["dropped"] == dropped == 2
        assert report["read"] == 7


def test_a_batch_of_windows_that_is_run_again_after_its_write_is_there_once_and_the_query_goes_on(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch dies once, between its commit to the table and its end: Delta skips the second write."""
    windows = Windows(spark, tmp_path)
    for clock in ("01:50", "03:15", "04:31"):
        windows.append(clock)
    write, died = windowed_counter.ClosedWindowWriter.write, set()

    def dying(self: Any, rows: DataFrame, batch_id: int) -> None:
        write(self, rows, batch_id)
        if batch_id not in died:
            died.add(batch_id)
            raise OSError("the process ends before the batch is marked as done")

    monkeypatch.setattr(windowed_counter.ClosedWindowWriter, "write", dying)
    for _ in range(4):
        with pytest.raises(OSError, match="the process ends"):
            windows.run(delay="1 hour")
    windows.run(delay="1 hour")
    assert died == {0, 1, 2, 3}
    assert windows.counts() == {"01:50": 1, "03:10": 1}


def test_the_guide_s_cases_and_what_the_count_of_dropped_rows_means(
    spark: SparkSession, tmp_path: Path
) -> None:
    windows = Windows(spark, tmp_path)
    for clock in ("10:14:59", "10:00:00", "10:15:00"):
        windows.append(clock)
    first = windows.run(delay="10 minutes", window="5 minutes")
    # 14 minutes 59 late and still counted; written once an event of exactly 10:15:00 has come.
    assert (first["dropped"], windows.counts()) == (0, {"10:00": 1})

    windows.append("10:04:59", "10:04:58", "09:00", None)
    with pytest.raises(DataRefused, match="alert: 2 rows came after their window was closed, 1 allowed"):
        windows.run(delay="10 minutes", window="5 minutes", max_dropped=1)
    assert windows.counts() == {"10:00": 1}, "a restart keeps the watermark"


def test_without_a_stateful_operator_spark_s_watermark_drops_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    windows = Windows(spark, tmp_path)
    windows.append("10:00")
    windows.append("08:00")
    stream = spark.readStream.format("delta").option("maxFilesPerTrigger", 1).load(str(tmp_path / "source"))
    query = (
        stream.withWatermark("event_time", "10 minutes")
        .writeStream.format("delta")
        .option("checkpointLocation", str(tmp_path / "passed_checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "passed"))
    )
    query.awaitTermination()
    passed = spark.read.format("delta").load(str(tmp_path / "passed"))
    assert_rows(passed, [(at("10:00"),), (at("08:00"),)])


@pytest.mark.parametrize(("policy", "watermark", "dropped"), [("min", "09:50", 0), ("max", "10:30", 1)])
def test_two_sources_have_one_watermark_by_spark_s_policy(
    spark: SparkSession, tmp_path: Path, policy: str, watermark: str, dropped: int
) -> None:
    """With the sources at 10:40 and 10:00, a row of 10:15 from the slow one is late under the policy max only."""
    fast, slow = Windows(spark, tmp_path / "fast"), Windows(spark, tmp_path / "slow")
    fast.append("10:40")
    for clock in ("10:00", "10:00", "10:15"):
        slow.append(clock)  # a batch drops rows by the watermark that the batch before it ran with

    def stream(windows: Windows) -> DataFrame:
        rows = spark.readStream.format("delta").option("maxFilesPerTrigger", 1)
        return rows.load(str(windows.folder / "source")).withWatermark("event_time", "10 minutes")

    counted = stream(fast).unionByName(stream(slow)).groupBy(F.window("event_time", "5 minutes")).count()
    with setting(spark, "spark.sql.streaming.multipleWatermarkPolicy", policy):
        query = (
            counted.writeStream.format("noop")
            .outputMode("update")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    third = json.loads(query.recentProgress[2].json)
    assert third["eventTime"]["watermark"] == f"2024-01-01T{watermark}:00.000Z"
    assert third["stateOperators"][0]["numRowsDroppedByWatermark"] == dropped


def test_the_counter_s_wrong_use_gives_one_sentence(spark: SparkSession, tmp_path: Path) -> None:
    windows = Windows(spark, tmp_path)
    windows.append("10:00")
    for changes, sentence in (
        ({"event_time": "at"}, "'at' is no timestamp column of the source; it has event_time"),
        ({"group_by": ["page"]}, "group_by can't take page"),
        ({"window": "wide"}, "'wide' is no duration"),
        ({"max_dropped": -1}, "max_dropped must be 0 or more, got -1"),
    ):
        with pytest.raises(WrongUse, match=sentence):
            windows.run(**changes)


DELAYS = [
    ("/a", "10:00", "10:00"),  # no delay
    ("/a", "10:00", "10:05"),  # on the bound of 5 minutes
    ("/a", "10:00", "10:05:01"),
    ("/b", "10:00", "09:59"),  # a clock that is fast
    ("/b", "10:00", "11:00:01"),
    ("/b", None, "10:00"),
]


@pytest.fixture
def arrivals(spark: SparkSession) -> str:
    rows = [(page, event and at(event), at(arrived)) for page, event, arrived in DELAYS]
    arrived = spark.createDataFrame(rows, "page string, event_time timestamp, ingested_at timestamp")
    arrived.createOrReplaceTempView("arrivals")
    return "arrivals"


TIMES = {"event_time": "event_time", "arrived_at": "ingested_at"}


def test_report_counts_the_rows_of_each_bucket_of_delay(
    spark: SparkSession, render: MacroRenderer, arrivals: str, ansi_modes: str
) -> None:
    given = {"relation": arrivals, **TIMES, "buckets": ["0 minutes", "5 minutes", "1 hour"]}
    columns = ["delay_up_to", "row_count", "max_delay_seconds"]
    assert_rows(
        spark.sql(render("lateness_report", **given)),
        [
            ("0 minutes", 2, 0.0), ("5 minutes", 1, 300.0), ("1 hour", 1, 301.0), ("more", 1, 3601.0),
            ("unknown", 1, None),
        ],
        columns,
    )  # fmt: skip
    by_page = spark.sql(render("lateness_report", **given, by="page")).where("bucket in (1, 3, 4)")
    assert_rows(
        by_page,
        [
            ("/a", 1, "5 minutes", 1), ("/a", 3, "more", 0), ("/a", 4, "unknown", 0),
            ("/b", 1, "5 minutes", 0), ("/b", 3, "more", 1), ("/b", 4, "unknown", 1),
        ],
        ["page", "bucket", "delay_up_to", "row_count"],
    )  # fmt: skip


def test_recommended_delay_is_the_percentile_of_the_delays_with_a_margin(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    seconds = [0.0] * 90 + [300.0] * 10 + [None]
    rows = [(at("10:00"), None if s is None else at("10:00") + dt.timedelta(seconds=s)) for s in seconds]
    spark.createDataFrame(rows, "event_time timestamp, ingested_at timestamp").createOrReplaceTempView(
        "measured"
    )

    def recommended(relation: str = "measured", **more: float) -> list[tuple[Any, ...]]:
        sql = render("recommended_watermark_delay", relation=relation, **TIMES, **more)
        return [tuple(row) for row in spark.sql(sql).collect()]

    assert recommended() == [(100, 300.0, 600)]
    assert recommended(percentile=0.5, factor=3) == [(100, 0.0, 0)]
    assert recommended("(select * from measured where false)") == [(0, None, None)]


def test_the_macros_refuse_wrong_arguments(render: MacroRenderer) -> None:
    given = {"relation": "arrivals", **TIMES}
    for macro, arguments, sentence in (
        ("lateness_report", {"buckets": "1 hour"}, "buckets must be a list of delays"),
        (
            "lateness_report",
            {"buckets": ["1 hour", "5 minutes"]},
            "buckets must be in ascending order, got 1 hour, 5 minutes",
        ),
        ("lateness_report", {"buckets": ["soon"]}, "a bucket must be a number of minutes, hours or days"),
        (
            "recommended_watermark_delay",
            {"percentile": 99},
            "percentile must be a number between 0 and 1, got 99",
        ),
        ("recommended_watermark_delay", {"factor": 0.5}, "factor must be a number of at least 1, got 0.5"),
    ):
        with pytest.raises(DbtRuntimeError, match=sentence):
            render(macro, **given, **arguments)


def test_sql_snippets_of_the_page(
    spark: SparkSession, make_project: Callable[..., DbtProject], arrivals: str
) -> None:
    report, delay = snippets(PAGE, f"{HERE}::test_sql_snippets_of_the_page")
    sources = {"sources": [{"name": "raw", "schema": "{{ target.schema }}", "tables": [{"name": "visits"}]}]}
    project = make_project(
        {
            "models/visits_lateness.sql": report,
            "models/visits_watermark_delay.sql": delay,
            "models/sources.yml": yaml.safe_dump(sources),
        }
    )
    project.source("visits", spark.table(arrivals))
    project.run("build")
    assert_rows(
        project.table("visits_lateness").where("row_count > 0"),
        [
            ("/a", "0 minutes", 1), ("/a", "15 minutes", 2), ("/b", "0 minutes", 1), ("/b", "1 day", 1),
            ("/b", "unknown", 1),
        ],
        ["page", "delay_up_to", "row_count"],
    )  # fmt: skip
    assert project.table("visits_watermark_delay").collect()[0]["measured_rows"] == 5
