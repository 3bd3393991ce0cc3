"""Windowed Deduplicator: the stream, batch by batch, and the SQL form."""

from __future__ import annotations

import datetime as dt
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dbt.adapters.spark.relation import SparkRelation
from dbt_common.exceptions import DbtRuntimeError
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from python_jobs.error_management import windowed_deduplicator as job
from python_jobs.error_management.windowed_deduplicator import Parameters, UniqueWriter
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import JobFailed, NotReady, WrongUse
from python_jobs.shared.delta.streams import append
from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.failing_write import failing_at
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.snippets import snippet, snippets

PAGE = "docs/error_management.md"
HERE = "tests/patterns/error_management/test_windowed_deduplicator.py"
NOW = "2024-01-01T12:00:00Z"

Visit = tuple[str | None, str | None]


def at(clock: str) -> dt.datetime:
    return dt.datetime.fromisoformat(f"2024-01-01T{clock}+00:00")


class Stream:
    """A source, both tables and the checkpoint of one query."""

    def __init__(self, spark: SparkSession, folder: Path, **settings: Any) -> None:
        self.spark, self.folder, self.settings = spark, folder, settings
        self.appended = 0

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def append(self, *visits: Visit) -> None:
        """Append one file of visits (id, time on 2024-01-01), numbered as they come: the next micro-batch."""
        rows = [
            (visit, f"2024-01-01T{time}" if time and time[2] == ":" else time, self.appended + position)
            for position, (visit, time) in enumerate(visits)
        ]
        self.appended += len(rows)
        source = self.spark.createDataFrame(rows, "visit_id string, event_time string, number int")
        source.coalesce(1).write.format("delta").mode("append").save(self.path("source"))

    def parameters(self, **changes: Any) -> Parameters:
        given = {
            "source": self.path("source"),
            "target": self.path("target"),
            "dead_letter": self.path("dead"),
            "checkpoint": self.path("checkpoint"),
            "key": ["visit_id"],
            "event_time": "event_time",
            "max_files_per_trigger": 1,
            "now": NOW,
        }
        return Parameters(**(given | self.settings | changes))

    def run(self, **changes: Any) -> dict[str, Any]:
        return job.run(self.spark, self.parameters(**changes))

    def numbers(self, table: str = "target") -> list[int]:
        """Return the numbers of the records in a table, a duplicated one as often as it is there."""
        rows = self.spark.read.format("delta").load(self.path(table)).select("number").collect()
        return sorted(row.number for row in rows)


def adds_up(report: dict[str, Any]) -> bool:
    kinds = ("unique", "duplicates", "late", "dead")
    return bool(report["read"] == sum(report[kind] for kind in kinds))


# --- the forms, batch by batch ----------------------------------------------------------------------------


class Runs:
    """What became of a stream's files, read by a run each: Spark ends a run with an empty batch that evicts state."""

    def __init__(self, stream: Stream, files: list[list[Visit]], **changes: Any) -> None:
        self.stream = stream
        self.reports = []
        for visits in files:
            stream.append(*visits)
            self.reports.append(stream.run(**changes))

    def each(self, name: str) -> list[Any]:
        return [report[name] for report in self.reports]

    def state(self, name: str) -> list[Any]:
        return [report["state"][name] for report in self.reports]


@pytest.fixture(scope="module")
def book(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the book's ten minutes, with the event time in the key."""
    stream = Stream(spark, tmp_path_factory.mktemp("book"), form="key_and_time")
    return Runs(
        stream,
        [
            [("v1", "10:00:00"), ("v1", "10:00:00")],
            [("v1", "10:00:00"), ("v1", "10:00:01")],
            [("v2", "10:20:00")],
            [("v1", "10:00:00"), ("v3", "10:10:00")],
        ],
    )


def test_event_time_in_the_key_batch_by_batch(book: Runs) -> None:
    assert_rows(
        book.stream.spark.read.format("delta").load(book.stream.path("target")).where("number < 7"),
        [("v1", "2024-01-01T10:00:00"), ("v1", "2024-01-01T10:00:01"), ("v2", "2024-01-01T10:20:00")],
        columns=["visit_id", "event_time"],
    )
    assert (book.each("unique"), book.each("duplicates")) == ([1, 1, 1, 0], [1, 1, 0, 0])
    assert book.each("late") == [0, 0, 0, 2], "10:00 and 10:10 are not after the watermark 10:10"


def test_the_state_shrinks_to_what_is_after_the_watermark(book: Runs) -> None:
    assert book.state("watermark") == [at("09:50:00"), at("09:50:01"), at("10:10:00"), at("10:10:00")]
    assert book.state("rows") == [1, 2, 1, 1]
    assert book.state("peak_rows")[2] == 3
    assert book.state("bytes")[0] > 0


def test_what_was_read_is_unique_duplicate_late_or_dead(book: Runs, hour: Runs) -> None:
    assert book.each("read") == [2, 2, 1, 2]
    assert hour.each("read") == [2, 2, 1, 1, 2]
    for report in (*book.reports, *hour.reports):
        assert adds_up(report)


def test_a_restart_goes_on_suppressing_and_a_lost_checkpoint_does_not(book: Runs) -> None:
    stream = book.stream
    before = stream.numbers()
    stream.append(("v2", "10:20:00"))
    report = stream.run()
    assert (report["read"], report["duplicates"], stream.numbers()) == (1, 1, before)

    idle = stream.run()
    assert (idle["read"], idle["state"], stream.numbers()) == (0, None, before)

    again = {"checkpoint": stream.path("made_again"), "max_files_per_trigger": None}
    with pytest.raises(WrongUse, match="a run would append the whole source again"):
        stream.run(**again)
    fresh = stream.run(**again, start_over=True)
    assert (fresh["unique"], fresh["late"]) == (4, 0), "v3 as well: nothing is late in a first batch"
    assert len(stream.numbers()) == len(before) + 4


@pytest.fixture(scope="module")
def hour(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return a key remembered within a watermark of one hour; behind each line the numbers of its records."""
    stream = Stream(spark, tmp_path_factory.mktemp("hour"), watermark="1 hour")
    files: list[list[Visit]] = [
        [("k", "10:00:00"), ("k", "10:00:05")],  # 0, 1: twice in one batch
        [("other", "11:30:00"), ("k", "10:45:00")],  # 2, 3: again in the next; then the watermark is 10:30
        [("k", "11:20:00")],  # 4: an hour after k's first event is 11:00, which the watermark hasn't reached
        [("z", "13:00:00")],  # 5: then the watermark is 12:00
        [("k", "12:30:00"), ("new", "11:59:00")],  # 6, 7: k again; a new key, but behind the watermark
    ]
    return Runs(stream, files, now="2024-01-01T23:00:00Z")


def test_within_the_watermark_a_key_is_suppressed_for_at_least_the_delay(hour: Runs) -> None:
    assert hour.stream.numbers() in ([0, 2, 5, 6], [1, 2, 5, 6]), (
        "which of a batch's two is kept is Spark's affair"
    )
    assert hour.each("duplicates") == [1, 1, 1, 0, 0]
    assert hour.each("late") == [0, 0, 0, 0, 1]


def test_within_the_watermark_a_repeat_after_the_window_is_a_miss(hour: Runs) -> None:
    rows = hour.stream.spark.read.format("delta").load(hour.stream.path("target"))
    assert rows.where("visit_id = 'k'").count() == 2
    assert hour.each("unique")[4] == 1


def test_the_state_falls_once_the_horizon_has_passed(hour: Runs) -> None:
    assert hour.state("rows") == [1, 2, 2, 2, 3]
    assert hour.state("peak_rows")[3] == 3


def test_a_backlog_is_judged_by_the_watermark_of_the_batch_before_last(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Between the batches of a backlog no empty one comes, so lateness lags a batch: no record more is dropped."""
    stream = Stream(spark, tmp_path, form="key_and_time")
    stream.append(("v1", "10:00:00"))
    stream.append(("v2", "10:20:00"))
    stream.append(("v3", "10:10:00"))
    report = stream.run()
    assert (report["unique"], report["late"]) == (3, 0)
    assert [batch["watermark"] for batch in report["batches"]] == [None, at("09:50:00"), at("10:10:00")]
    assert report["state"]["rows"] == 1


def test_windows_miss_a_repeat_across_their_edge_and_forget_what_has_passed(
    spark: SparkSession, tmp_path: Path
) -> None:
    stream = Stream(spark, tmp_path, form="key_and_window", window="1 hour", watermark="1 hour")
    stream.append(("k", "10:59:59"), ("k", "11:00:01"))
    stream.append(("k", "10:30:00"), ("y", "13:30:00"))
    report = stream.run(now="2024-01-01T23:00:00Z")
    assert stream.numbers() == [0, 1, 3]
    assert (report["duplicates"], report["state"]["rows"], report["state"]["peak_rows"]) == (1, 1, 3)


def test_what_spark_alone_would_do_is_refused_or_avoided(spark: SparkSession, tmp_path: Path) -> None:
    """Without event time in the key, and with a NULL in it, the state of a plain query is never evicted."""
    stream = Stream(spark, tmp_path)
    stream.append(("v1", "10:00:00"), ("v1", None), ("v2", "12:00:00"))
    visits = spark.readStream.format("delta").load(stream.path("source"))
    dated = visits.withColumn("at", F.expr("try_to_timestamp(event_time)")).withWatermark("at", "10 minutes")

    def final_state(rows: DataFrame, name: str) -> tuple[str, int]:
        query = rows.writeStream.format("noop").option("checkpointLocation", stream.path(name))
        running = query.trigger(availableNow=True).start()
        running.awaitTermination()
        last = running.recentProgress[-1]
        return last.eventTime["watermark"][11:16], last.stateOperators[0].numRowsTotal

    untimed = dated.where("at is not null").dropDuplicates(["visit_id"])
    assert final_state(untimed, "untimed") == ("11:50", 2), "v1 stays"
    assert final_state(dated.dropDuplicates(["visit_id", "at"]), "null_time") == ("11:50", 2), (
        "the NULL stays"
    )

    ranked = dated.withColumn("rank", F.row_number().over(Window.partitionBy("visit_id").orderBy("at")))
    with pytest.raises(AnalysisException, match="NON_TIME_WINDOW_NOT_SUPPORTED_IN_STREAMING"):
        ranked.writeStream.format("noop").option("checkpointLocation", stream.path("ranked")).start()


# --- what the state must not see --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undated(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Stream, dict[str, Any]]:
    """Return a run over records without a usable time or key."""
    stream = Stream(spark, tmp_path_factory.mktemp("undated"))
    stream.append(
        ("v1", "10:00:00Z"),
        ("v1", "11:00:00+01:00"),  # the same instant in another zone
        ("v2", None),
        ("v2", None),
        ("v3", " 10:00:00Z"),  # of no day, not of today
        ("v4", "13:00:00Z"),  # an hour ahead, which is allowed
        ("v5", "13:00:01Z"),
        (None, "10:00:00Z"),
        (None, "10:00:00Z"),
        ("v6", "2999-01-01T00:00:00Z"),
    )
    return stream, stream.run()


def test_records_without_a_usable_time_or_key_are_dead_letters(
    undated: tuple[Stream, dict[str, Any]],
) -> None:
    stream, report = undated
    dead = stream.spark.read.format("delta").load(stream.path("dead"))
    no_time = ("NULL_EVENT_TIME", "the event time is NULL: event_time")
    no_key = ("NULL_KEY", "a part of the key is NULL: visit_id")
    ahead = "FUTURE_EVENT_TIME"
    message = "the event time {} is after 2024-01-01 13:00:00, the latest that max_future allows".format
    rows = [
        *((number, *no_time) for number in (2, 3, 4)),
        (6, ahead, message("2024-01-01 13:00:01")),
        (7, *no_key),
        (8, *no_key),
        (9, ahead, message("2999-01-01 00:00:00")),
    ]
    assert_rows(
        dead,
        [(*row, "windowed_deduplicator", "1", at("12:00:00"), 1, "pending") for row in rows],
        columns=[
            "number", "error_class", "error_message", "job_name", "job_version", "processed_at", "attempts", "status",
        ],
    )  # fmt: skip
    assert dead.select("dead_letter_id").distinct().count() == 7
    assert report["error_classes"] == {"FUTURE_EVENT_TIME": 2, "NULL_EVENT_TIME": 3, "NULL_KEY": 2}
    assert (report["unique"], report["duplicates"], report["dead"]) == (2, 1, 7)
    assert adds_up(report)


def test_a_record_from_the_far_future_makes_no_other_late(undated: tuple[Stream, dict[str, Any]]) -> None:
    stream, _ = undated
    stream.append(("v7", "12:55:00Z"))
    assert stream.run()["late"] == 0


def test_a_nullable_key_is_a_value_like_any_other(undated: tuple[Stream, dict[str, Any]]) -> None:
    stream, _ = undated
    others = {name: stream.path(f"nullable_{name}") for name in ("target", "dead_letter", "checkpoint")}
    stream.run(**others, nullable_key=["visit_id"], max_files_per_trigger=None)
    rows = stream.spark.read.format("delta").load(others["target"]).where("visit_id is null")
    assert rows.count() == 1


# --- rerun, kill, lost state ------------------------------------------------------------------------------


class Dies(UniqueWriter):
    """Writes its batch and dies, as often as told, before Spark notes it."""

    deaths = 0

    def write(self, rows: DataFrame, batch_id: int) -> None:
        super().write(rows, batch_id)
        if Dies.deaths:
            Dies.deaths -= 1
            raise OSError("the machine is gone")


class Appends(Dies):
    """The same with a plain append."""

    def _publish(self, kept: DataFrame, batch_id: int, unique: int, errors: dict[str, int]) -> None:
        append(kept.drop("error_class", "error_message"), self.params.target, {})


@pytest.mark.parametrize(("writer", "numbers"), [(Dies, [0, 1]), (Appends, [0, 0, 1, 1])])
def test_a_batch_that_is_run_again_after_its_write_doubles_nothing(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writer: type[UniqueWriter],
    numbers: list[int],
) -> None:
    stream = Stream(spark, tmp_path)
    stream.append(("v1", "10:00:00"), ("v2", "10:00:01"))
    monkeypatch.setattr(job, "UniqueWriter", writer)
    monkeypatch.setattr(Dies, "deaths", 1)
    with pytest.raises(OSError, match="the machine is gone"):
        stream.run()
    stream.run()
    assert stream.numbers() == numbers


def test_a_batch_that_ends_between_its_two_tables_is_completed_by_the_next_run(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(spark, tmp_path)
    stream.append(("v1", "10:00:00"), ("v2", "10:00:02"), ("v3", None))
    with failing_at(stream.path("target"), job, "append", OSError("the machine is gone")):
        stream.run()
    assert (stream.numbers(), stream.numbers("dead")) == ([], [2])

    report = stream.run()
    assert (stream.numbers(), stream.numbers("dead")) == ([0, 1], [2]), (
        "v1 and v2 are no repeats of themselves"
    )
    assert report["duplicates"] == 0


def test_a_checkpoint_of_another_query_and_a_state_that_is_not_ours_are_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    stream = Stream(spark, tmp_path)
    stream.append(("v1", "10:00:00"))
    stream.run()
    other = {"target": stream.path("other"), "dead_letter": stream.path("other_dead")}
    for changes, message in [
        ({"form": "key_and_time"}, "another form"),
        ({"key": ["visit_id", "number"]}, "another key"),
        ({"event_time": "current_timestamp()"}, "another event_time"),
        (other, "another target and another dead_letter table"),
    ]:
        with pytest.raises(WrongUse, match=f"was made for {message}"):
            stream.run(**changes)

    stream.run(**other, key=["number"], checkpoint=stream.path("foreign"))
    stream.append(("v1", "10:00:01"))
    state = tmp_path / "checkpoint" / "state"
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "foreign" / "state", state)
    for message in ("is that of another query", "is damaged", "is gone"):
        with pytest.raises(
            JobFailed, match=f"the state in the checkpoint '.*' {message}: restore the checkpoint"
        ):
            stream.run()
        if message == "is that of another query":
            shutil.rmtree(state / "0" / "0")
        else:
            shutil.rmtree(state, ignore_errors=True)
    assert stream.numbers() == [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "s"}, "must be three tables"),
        ({"key": []}, "key is empty"),
        ({"nullable_key": ["page"]}, "nullable_key names no part of the key: page"),
        ({"form": "key_and_window"}, "a window belongs to key_and_window"),
        ({"window": "1 hour"}, "form is within_watermark; a window belongs to key_and_window"),
        ({"watermark": "0 seconds"}, "'0 seconds' is no duration"),
        ({"watermark": "soon"}, "'soon' is no duration"),
        ({"max_files_per_trigger": 0}, "max_files_per_trigger must be 1 or more, got 0"),
        ({"now": "today"}, "'today' is not a time"),
    ],
)
def test_wrong_parameters_give_one_sentence(changes: dict[str, Any], message: str) -> None:
    given = {
        "source": "s",
        "target": "t",
        "dead_letter": "d",
        "checkpoint": "c",
        "key": ["id"],
        "event_time": "at",
    }
    with pytest.raises(WrongUse, match=message):
        Parameters(**(given | changes))


def test_wrong_expressions_and_tables_give_one_sentence(spark: SparkSession, tmp_path: Path) -> None:
    stream = Stream(spark, tmp_path)
    with pytest.raises(NotReady, match=r"there is no Delta table '.*source' to read from"):
        stream.run()
    stream.append(("v1", "10:00:00"))
    for changes, message in [
        ({"event_time": "number"}, "event_time 'number' is of type int; it must be a timestamp"),
        ({"key": ["visit"]}, r"key or event_time can't be resolved: \[UNRESOLVED_COLUMN"),
        ({"partition_by": ["day"]}, "partition_by names no column of the source: day"),
    ]:
        with pytest.raises(WrongUse, match=message):
            stream.run(**changes)


# --- the SQL form -----------------------------------------------------------------------------------------


def query(
    spark: SparkSession, render: MacroRenderer, rows: list[Any], schema: str, **arguments: Any
) -> DataFrame:
    """Run the macro over rows, the view ``copies``; ``macro`` names another one than the deduplicator."""
    macro = arguments.pop("macro", "windowed_deduplicator")
    spark.createDataFrame(rows, schema).createOrReplaceTempView("copies")
    return spark.sql(render(macro, relation="copies", **arguments))


def test_sql_keeps_one_of_each_and_null_equals_null(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    devices = [("a", "A", 1), ("a", "A", 1), ("b", "B", 1), (None, "x", 2), (None, "x", 2)]
    schema = "type string, full_name string, version int"
    want = [("a", "A", 1), ("b", "B", 1), (None, "x", 2)]
    assert_rows(query(spark, render, devices, schema), want)
    by_key = {"key": ["type", "full_name"], "order_by": "version", "nullable_key": "type"}
    assert_rows(query(spark, render, devices, schema, **by_key), want)


VISITS = [("v1", "/a", 1), ("v1", "/b", 2), ("v1", "/b", 2), ("v1", "/c", None), ("v2", "/a", None)]
VISIT_COLUMNS = "visit_id string, page string, ingested int"


@pytest.mark.parametrize(
    ("arguments", "pages"),
    [
        ({}, ["/a", "/a", "/b", "/c"]),
        ({"key": "visit_id", "order_by": "ingested"}, ["/a", "/a"]),
        ({"key": "visit_id", "order_by": "ingested", "keep": "last"}, ["/a", "/b"]),
    ],
)
def test_sql_tells_the_same_row_from_the_same_key(
    spark: SparkSession, render: MacroRenderer, arguments: dict[str, Any], pages: list[str]
) -> None:
    kept = query(spark, render, VISITS, VISIT_COLUMNS, **arguments)
    assert kept.columns == ["visit_id", "page", "ingested"]
    assert sorted(row.page for row in kept.collect()) == pages


def test_sql_flags_say_what_a_dropped_row_repeats(spark: SparkSession, render: MacroRenderer) -> None:
    flags = query(
        spark, render, VISITS, VISIT_COLUMNS,
        macro="windowed_deduplicator_flags", key="visit_id", order_by="ingested", content="page",
    )  # fmt: skip
    assert_rows(
        flags,
        [
            ("v1", "/a", 1, None),
            ("v1", "/b", 2, "same_key"),
            ("v1", "/b", 2, "exact"),
            ("v1", "/c", None, "same_key"),
            ("v2", "/a", None, None),
        ],
    )


@pytest.mark.parametrize(("keep", "pages"), [("first", ["/1", "/nan"]), ("last", ["/2", "/nan"])])
def test_sql_keeps_a_row_whose_order_is_no_number_only_for_want_of_others(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str, keep: str, pages: list[str]
) -> None:
    rows = [("v1", 1.0, "/1"), ("v1", 2.0, "/2"), ("v1", math.inf, "/inf"), ("v1", -math.inf, "/-inf"),
            ("v1", math.nan, "/nan"), ("v2", math.nan, "/nan")]  # fmt: skip
    kept = query(
        spark, render, rows, "visit_id string, version double, page string",
        key="visit_id", order_by="version", keep=keep,
    )  # fmt: skip
    assert sorted(row.page for row in kept.collect()) == pages


def test_sql_keeps_the_same_row_in_whatever_order_rows_come(
    spark: SparkSession, render: MacroRenderer
) -> None:
    """Of the two newest the content decides: ten orders of the rows give one survivor."""
    rows = [("v1", "10:00", "/old"), ("v1", "10:05", "/b"), ("v1", "10:05", "/a"), ("v1", "10:05", None)]
    sql = render("windowed_deduplicator", relation="copies", key="visit_id", order_by="version", keep="last")
    survivors = set()
    for turn in range(10):
        turned = rows[turn % 4 :] + rows[: turn % 4]
        ordered = turned if turn < 4 else turned[::-1]
        spark.createDataFrame(
            ordered, "visit_id string, version string, page string"
        ).createOrReplaceTempView("copies")
        survivors.add(tuple(spark.sql(sql).collect()[0]))
    assert survivors == {("v1", "10:05", "/b")}


@pytest.mark.parametrize(
    ("keep", "kept"), [("first", ("v1", "10:00", None, 2.0)), ("last", ("v1", "10:05", "/b", None))]
)
def test_sql_orders_ties_by_the_columns_of_a_table_without_a_struct_of_the_row(
    spark: SparkSession, render: MacroRenderer, keep: str, kept: tuple[Any, ...]
) -> None:
    """A table's columns are known: NULL is the least of them, as it is in the struct that the flags compare."""
    rows = [
        ("v1", "10:00", "/a", 1.0), ("v1", "10:00", None, 2.0), ("v1", "10:00", None, 3.0),
        ("v1", "10:05", "/b", None), ("v1", "10:05", "/a", math.nan), ("v1", "10:05", None, 9.0),
    ]  # fmt: skip
    relation = SparkRelation.create(schema="default", identifier="tied_copies")
    arguments = {"relation": relation, "key": "visit_id", "order_by": "version", "keep": keep}
    frame = spark.createDataFrame(rows, "visit_id string, version string, page string, share double")
    for turned in (frame, frame.orderBy(F.desc("page"), "share")):
        turned.coalesce(1).write.format("delta").mode("overwrite").saveAsTable("default.tied_copies")
        sql = render("windowed_deduplicator", **arguments)
        assert "struct" not in sql
        flags = spark.sql(render("windowed_deduplicator_flags", **arguments))
        assert_rows(spark.sql(sql), [kept])
        assert_rows(flags.where("duplicate_as is null").drop("duplicate_as"), [kept])


def test_sql_takes_a_row_without_a_key_for_no_other_s_repeat(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    visits = [("v1", "/a", 1), (None, "/b", 2), (None, "/c", 3)]
    by_key = {"key": "visit_id", "order_by": "ingested"}
    with pytest.raises(Exception, match=r"a row has NULL in its key \(visit_id\); correct the source"):
        query(spark, render, visits, VISIT_COLUMNS, **by_key).collect()
    kept = query(spark, render, visits, VISIT_COLUMNS, **by_key, on_null_key="quarantine")
    assert_rows(kept, [("v1", "/a", 1)])
    other_queue = query(
        spark, render, visits, VISIT_COLUMNS, macro="windowed_deduplicator_null_keys", key="visit_id"
    )
    assert_rows(other_queue, [(None, "/b", 2), (None, "/c", 3)])


def test_sql_scope_reaches_as_many_days_back_as_it_is_told(
    spark: SparkSession, render: MacroRenderer, tmp_path: Path
) -> None:
    path = str(tmp_path / "past")
    written = spark.sql(
        "select * from values ('old', date'2024-02-27'), ('v1', date'2024-03-01'), ('v2', date'2024-03-02')"
        " as t(visit_id, day)"
    )
    written.write.format("delta").partitionBy("day").save(path)
    shutil.rmtree(tmp_path / "past" / "day=2024-02-27")  # no scope below reaches it, so nothing may read it
    batch = [("v1", "2024-03-02", 1), ("v2", "2024-03-02", 1), ("v3", "2024-03-02", 1)]
    rows = [(visit, dt.date.fromisoformat(day), number) for visit, day, number in batch]

    def kept(**scope: Any) -> list[str]:
        unique = query(
            spark,
            render,
            rows,
            "visit_id string, day date, number int",
            key="visit_id",
            order_by="number",
            **scope,
        )
        return sorted(row.visit_id for row in unique.collect())

    assert kept() == ["v1", "v2", "v3"], "by default the batch alone"
    past = {"relation": f"delta.`{path}`", "date_column": "day", "days": 1}
    assert kept(past=past) == ["v2", "v3"], (
        "a run again meets its own day's rows and doesn't take them for repeats"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order_by": "at"}, "order_by, nullable_key and past belong to a key"),
        ({"key": "id"}, "needs order_by, expressions that say which row comes first, got None"),
        ({"key": "id", "order_by": "1"}, "order_by '1' is a constant"),
        ({"key": "id", "order_by": "at desc"}, "order_by takes expressions without asc or desc"),
        ({"key": "id", "order_by": "at", "keep": "newest"}, "keep must be one of first, last, got 'newest'"),
        (
            {"key": "id", "order_by": "at", "on_null_key": "drop"},
            "on_null_key must be one of fail, quarantine",
        ),
        (
            {"key": "id", "order_by": "at", "nullable_key": "page"},
            "nullable_key 'page' is no part of the key id",
        ),
        ({"key": "id", "order_by": "at", "past": "t"}, "past is {relation, date_column, days}, got t"),
        ({"key": "id", "order_by": "at", "past": {"table": "t"}}, "past has no option 'table'"),
        (
            {"key": "id", "order_by": "at", "past": {"relation": "t", "date_column": "d", "days": 0}},
            "1 or more, got",
        ),
        (
            {
                "key": "id",
                "order_by": "at",
                "keep": "last",
                "past": {"relation": "t", "date_column": "d", "days": 1},
            },
            "past needs keep='first', got 'last'",
        ),
    ],
)
def test_sql_refuses_wrong_arguments(render: MacroRenderer, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DbtRuntimeError, match=message):
        render("windowed_deduplicator", relation="copies", **arguments)


def test_sql_models_of_the_page_and_the_unique_test(
    spark: SparkSession, make_project: Callable[..., DbtProject]
) -> None:
    page = f"{HERE}::test_sql_models_of_the_page_and_the_unique_test"
    models = [text for text in snippets(PAGE, page) if text.startswith("-- models/")]
    tests = [text for text in snippets(PAGE, page) if not text.startswith("-- models/")]
    project = make_project(
        {text.splitlines()[0].removeprefix("-- "): text for text in models}
        | {"models/schema.yml": tests[0], "models/sources.yml": raw_tables("visits")}
    )
    visits = [("v1", "/a", 1), ("v1", "/b", 2), (None, "/c", 3)]
    project.source("visits", spark.createDataFrame(visits, "visit_id string, page string, ingested_at int"))
    project.run("build")
    assert_rows(project.table("visits_unique"), [("v1", "/a", 1)])
    assert_rows(project.table("visits_without_key"), [(None, "/c", 3)])
    assert sorted(project.statuses().values()) == ["pass", "pass", "success", "success"]


def test_job_snippet_of_the_page(spark: SparkSession, tmp_path: Path) -> None:
    """The page's configuration, on payloads that nobody has parsed yet."""
    config = tmp_path / "visits.yml"
    config.write_text(snippet(PAGE, f"{HERE}::test_job_snippet_of_the_page"))
    paths = {name: str(tmp_path / name) for name in ("source", "target", "dead_letter", "checkpoint")}
    payloads = [
        (f'{{"visit_id": "{visit}", "event_time": "2024-01-01T{time}"}}',)
        for visit, time in [("v1", "10:00:00"), ("v1", "10:00:07"), ("v2", "10:00:00")]
    ]
    spark.createDataFrame([*payloads, ("not json",)], "payload string").write.format("delta").save(
        paths["source"]
    )
    flags = [f"--{name}={path}" for name, path in paths.items()]
    parameters, _ = parse_parameters(Parameters, ["--config", str(config), *flags])
    report = job.run(spark, parameters)
    counts = {name: report[name] for name in ("read", "unique", "duplicates", "late", "dead")}
    assert counts == {"read": 4, "unique": 2, "duplicates": 1, "late": 0, "dead": 1}
    assert spark.read.format("delta").load(paths["target"]).columns == ["payload"]
