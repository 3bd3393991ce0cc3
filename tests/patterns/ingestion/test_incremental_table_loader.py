"""Incremental Loader for tables: the rows of a window of ingestion time, once."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.ingestion import incremental_table_loader
from python_jobs.ingestion.incremental_table_loader import Parameters, in_window, run
from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.intervals import Interval
from tests.support.rows import assert_rows

SCHEMA = "visit_id string, page string, event_time timestamp, ingestion_time timestamp, is_deleted boolean"
Visit = tuple[str, str, dt.datetime | None, dt.datetime | None, bool]


def at(hour: int, minute: int = 0, day: int = 1) -> dt.datetime:
    return dt.datetime(2024, 3, day, hour, minute, tzinfo=dt.UTC)


def visit(
    visit_id: str, ingested: dt.datetime | None, event: dt.datetime | None = None, **other: Any
) -> Visit:
    return visit_id, other.get("page", "home"), event or ingested, ingested, other.get("is_deleted", False)


def hours(start: int, end: int) -> dict[str, str]:
    return {"from_": f"2024-03-01T{start:02d}", "to": f"2024-03-01T{end:02d}"}


@dataclass
class Legacy:
    """A source table with an ingestion time, and a target that is loaded from it."""

    spark: SparkSession
    source: str
    target: str

    def add(self, *visits: Visit) -> None:
        """Append the visits, in one file."""
        rows = self.spark.createDataFrame(list(visits), SCHEMA).coalesce(1)
        rows.write.format("delta").mode("append").save(self.source)

    def load(self, **parameters: Any) -> dict[str, Any]:
        given = {"source": self.source, "target": self.target, "delta_column": "ingestion_time"}
        return run(self.spark, Parameters(**{**given, **parameters}))

    def append(self, **parameters: Any) -> dict[str, Any]:
        return self.load(key=["visit_id"], **parameters)

    def rows(self, table: str = "") -> DataFrame:
        return self.spark.read.format("delta").load(self.target + table)

    def ids(self) -> list[str]:
        return sorted(row[0] for row in self.rows().select("visit_id").collect())


@pytest.fixture
def legacy(spark: SparkSession, tmp_path: Path) -> Legacy:
    return Legacy(spark, str(tmp_path / "legacy" / "visits"), str(tmp_path / "bronze" / "legacy_visits"))


def counts(report: dict[str, Any]) -> tuple[int, ...]:
    return tuple(report[f"rows_{name}"] for name in ("read", "loaded", "already_loaded", "rejected"))


@pytest.mark.parametrize("mode", ["append", "replace_window"])
def test_a_row_on_the_boundary_is_in_one_window_and_a_rerun_adds_nothing(legacy: Legacy, mode: str) -> None:
    legacy.add(visit("v1", at(10)), visit("v2", at(10, 30)), visit("v3", at(11)))
    again = {"append": (2, 0, 2, 0), "replace_window": (2, 2, 0, 0)}[mode]
    assert counts(legacy.append(mode=mode, **hours(10, 11))) == (2, 2, 0, 0)
    for _ in range(2):
        assert counts(legacy.append(mode=mode, **hours(10, 11))) == again
    assert legacy.ids() == ["v1", "v2"]
    assert counts(legacy.append(mode=mode, **hours(11, 12))) == (1, 1, 0, 0)
    assert legacy.ids() == ["v1", "v2", "v3"]


def test_append_without_the_look_at_the_target_would_load_twice(
    legacy: Legacy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incremental_table_loader, "not_in", lambda rows, *_: rows)
    legacy.add(visit("v1", at(10)))
    legacy.append(**hours(10, 11))
    legacy.append(**hours(10, 11))
    assert legacy.ids() == ["v1", "v1"]


def test_a_late_event_is_loaded_by_its_ingestion_time(legacy: Legacy) -> None:
    legacy.add(visit("late", ingested=at(10, 5), event=at(8, 50)), visit("early", at(9), event=at(10, 1)))
    legacy.append(**hours(10, 11))
    assert legacy.ids() == ["late"]
    legacy.target += "_by_event_time"
    legacy.append(delta_column="event_time", **hours(10, 11))
    assert legacy.ids() == ["early"]


def test_values_are_kept_as_they_are(legacy: Legacy) -> None:
    odd = "\r\n \x00 é e\u0301 🦆 \\\" {'a': 1} "
    legacy.add(visit("v1", at(10, 0) + dt.timedelta(microseconds=1), page=odd))
    legacy.append(**hours(10, 11))
    hexed = (
        legacy.rows().select(F.hex(F.col("page").cast("binary")), F.unix_micros("ingestion_time")).collect()
    )
    assert [tuple(row) for row in hexed] == [(odd.encode().hex().upper(), 1_709_287_200_000_001)]


# --- rejects ---------------------------------------------------------------------------------------------


def test_rejects_that_differ_in_a_microsecond_are_two(spark: SparkSession) -> None:
    """Rejects that are there are left out by their text: with less digits the second one would be lost."""
    rows = spark.sql(
        "select cast(null as timestamp) as at, timestamp_micros(1709287200000000 + micros) as seen "
        "from values (1), (2) as t(micros)"
    )
    assert_rows(
        incremental_table_loader.undated(rows, "at", None).select("source_row"),
        [(f'{{"at":null,"seen":"2024-03-01T10:00:00.00000{digit}Z"}}',) for digit in (1, 2)],
    )


def test_rows_without_an_ingestion_time_are_counted_and_kept_aside(legacy: Legacy) -> None:
    legacy.add(
        visit("v1", at(10)), visit("n1", None), visit("n1", None), visit("n2", None), visit("v2", at(11))
    )
    assert counts(legacy.append(**hours(10, 11))) == (4, 1, 0, 3)
    assert counts(legacy.append(**hours(11, 12))) == (4, 1, 0, 3)
    legacy.add(visit("n2", None))
    report = legacy.append(**hours(11, 12))
    assert counts(report) == (5, 0, 1, 4)
    assert report["rejects_version"] == 1
    rejects = legacy.rows("_rejects")
    row = '{"visit_id":"%s","page":"home","event_time":null,"ingestion_time":null,"is_deleted":false}'
    assert_rows(
        rejects.select("source_row", "reason"),
        [(row % name, "ingestion_time is null") for name in ("n1", "n1", "n2", "n2")],
    )
    assert legacy.ids() == ["v1", "v2"]


def test_the_delta_value_may_be_text_inside_a_raw_column(legacy: Legacy) -> None:
    values = [
        '{"ingestion_time": "2024-03-01T10:30:00Z", "page": "é"}',
        '{"ingestion_time": "2024-03-01T11:30:00+01:00"}',
        '{"ingestion_time": "soon"}',
        '{"page": "home"}',
        "{........",
    ]
    rows = legacy.spark.createDataFrame([(value,) for value in values], "value string")
    rows.write.format("delta").save(legacy.source)
    expression = "get_json_object(value, '$.ingestion_time')"
    computed = {"delta_column": "ingested_at", "delta_expression": expression, "key": ["value"]}
    for expected in ((5, 2, 0, 3), (5, 0, 2, 3)):
        assert counts(legacy.load(**computed, **hours(10, 11))) == expected
    assert_rows(legacy.rows(), [(values[0], at(10, 30)), (values[1], at(10, 30))])
    assert_rows(
        legacy.rows("_rejects").select("source_row", "reason"),
        [
            (json.dumps({"value": values[2]}, separators=(",", ":")), f"{expression} is not a timestamp"),
            (json.dumps({"value": values[3]}, separators=(",", ":")), f"{expression} is null"),
            (json.dumps({"value": values[4]}, separators=(",", ":")), f"{expression} is null"),
        ],
    )


def test_a_text_or_a_number_is_not_completed_to_a_time(legacy: Legacy) -> None:
    texts = ["2024-03-01 10:15", "2024-03-01 10:15:00.000001+00:00", "10:15", "2024", "2024-03-01", "2024-03"]
    rows = legacy.spark.createDataFrame(
        [(text, 1_709_288_100_000) for text in texts], "value string, ms bigint"
    )
    rows.write.format("delta").save(legacy.source)
    computed = {"delta_column": "ingested_at", "key": ["value"]}
    assert counts(legacy.load(**computed, delta_expression="value", **hours(10, 11))) == (6, 2, 0, 4)
    micro = at(10, 15) + dt.timedelta(microseconds=1)
    loaded = [(texts[0], 1_709_288_100_000, at(10, 15)), (texts[1], 1_709_288_100_000, micro)]
    assert_rows(legacy.rows(), loaded)
    assert_rows(legacy.rows("_rejects").select("reason"), [("value is not a timestamp",)] * 4)
    for expression, type_ in (("ms", "bigint"), ("date'2024-03-01'", "date"), ("ms / 1000", "double")):
        with pytest.raises(WrongUse, match=f"gives {type_}; it must give a timestamp"):
            legacy.load(**computed, delta_expression=expression, **hours(10, 11))
    report = legacy.load(**computed, delta_expression="timestamp_millis(ms)", **hours(10, 11))
    assert counts(report)[0] == 6


# --- changes in the source -------------------------------------------------------------------------------


def test_what_becomes_of_deletes_and_changes_in_the_source(legacy: Legacy) -> None:
    legacy.add(visit("v1", at(10)), visit("v2", at(10, 10)), visit("v3", at(10, 20)))
    legacy.append(**hours(10, 11))

    legacy.spark.sql(f"delete from delta.`{legacy.source}` where visit_id = 'v2'")
    legacy.append(**hours(10, 11))
    legacy.append(**hours(11, 12))
    assert legacy.ids() == [
        "v1",
        "v2",
        "v3",
    ]  # a limitation: a deleted row has no ingestion time to find it by

    legacy.spark.sql(
        f"update delta.`{legacy.source}` set is_deleted = true, ingestion_time = timestamp'2024-03-01 12:05:00Z' "
        "where visit_id = 'v1'"
    )
    legacy.add(visit("v3", at(12, 10), page="about"))
    legacy.append(**hours(12, 13))
    newest = (
        legacy.rows()
        .groupBy("visit_id")
        .agg(F.max_by("page", "ingestion_time"), F.max_by("is_deleted", "ingestion_time"))
    )
    assert_rows(newest, [("v1", "home", True), ("v2", "home", False), ("v3", "about", False)])
    assert legacy.ids() == ["v1", "v1", "v2", "v3", "v3"]


# --- backfill --------------------------------------------------------------------------------------------


def _two_months(legacy: Legacy) -> None:
    """Three hours, and a file of two months later that can't be read."""
    for hour in (10, 11, 12):
        legacy.add(visit(f"a{hour}", at(hour)), visit(f"b{hour}", at(hour, 59)))
    before = set(Path(legacy.source).glob("*.parquet"))
    legacy.add(visit("later", dt.datetime(2024, 5, 1, tzinfo=dt.UTC)))
    (later,) = set(Path(legacy.source).glob("*.parquet")) - before
    later.write_bytes(b"no Parquet")
    Path(later.parent, f".{later.name}.crc").unlink(missing_ok=True)


def test_a_backfill_reads_the_files_of_its_window_only(legacy: Legacy) -> None:
    _two_months(legacy)
    assert counts(legacy.append(**hours(10, 13))) == (6, 6, 0, 0)
    source = legacy.spark.read.format("delta").load(legacy.source)
    window = Interval.parse("2024-03-01T11", "2024-03-01T12")
    assert len(in_window(source, "ingestion_time", window).inputFiles()) == 1
    with pytest.raises(Exception, match="FAILED_READ_FILE"):
        legacy.append(from_="2024-03-01T10", to="2024-06-01")


@pytest.mark.parametrize("mode", ["append", "replace_window"])
def test_windows_in_parallel_give_what_they_give_one_after_the_other(legacy: Legacy, mode: str) -> None:
    _two_months(legacy)
    windows = [hours(hour, hour + 1) for hour in (12, 10, 11)]
    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(lambda window: legacy.append(mode=mode, **window), windows))
    assert [report["rows_loaded"] for report in reports] == [2, 2, 2]
    assert legacy.ids() == ["a10", "a11", "a12", "b10", "b11", "b12"]


@pytest.mark.parametrize("loaded_before", [True, False], ids=["table", "no-table-yet"])
def test_a_window_that_another_run_loads_meanwhile_is_loaded_once(
    legacy: Legacy, monkeypatch: pytest.MonkeyPatch, loaded_before: bool
) -> None:
    if loaded_before:
        legacy.add(visit("v0", at(9)))
        legacy.append(**hours(9, 10))
    legacy.add(visit("v1", at(10)))
    _overtake(monkeypatch, lambda: legacy.append(**hours(10, 11)))
    assert legacy.append(**hours(10, 11))["rows_loaded"] == 0
    assert legacy.ids() == (["v0", "v1"] if loaded_before else ["v1"])


def _overtake(monkeypatch: pytest.MonkeyPatch, other_run: Callable[[], dict[str, Any]]) -> None:
    """Let another run load one row between the next run's look at the tables and its write."""
    write_once = incremental_table_loader.write_once

    def overtaken(*arguments: Any, **options: Any) -> str:
        monkeypatch.setattr(incremental_table_loader, "write_once", write_once)
        assert other_run()["rows_loaded"] == 1
        return write_once(*arguments, **options)

    monkeypatch.setattr(incremental_table_loader, "write_once", overtaken)


# --- stateful --------------------------------------------------------------------------------------------


def stateful(legacy: Legacy, now: dt.datetime, **parameters: Any) -> dict[str, Any]:
    return legacy.load(bootstrap_from="2024-03-01T09", now=now.isoformat(), **parameters)


def test_a_stateful_run_goes_on_where_the_last_one_ended(legacy: Legacy) -> None:
    legacy.add(visit("too old", at(8)), visit("v1", at(9)), visit("v2", at(10)), visit("v3", at(11)))
    first = stateful(legacy, at(10))
    assert (first["from"], first["to"]) == (at(9).isoformat(), at(10).isoformat())
    assert legacy.ids() == ["v1"]
    second = stateful(legacy, at(11))
    assert (second["from"], second["to"]) == (at(10).isoformat(), at(11).isoformat())
    assert legacy.ids() == ["v1", "v2"]
    assert stateful(legacy, at(10))["rows_read"] == 0  # the state never moves back
    assert stateful(legacy, at(12))["from"] == at(11).isoformat()
    assert legacy.ids() == ["v1", "v2", "v3"]


def test_an_empty_window_moves_the_state_too(legacy: Legacy) -> None:
    legacy.add(visit("v1", at(11)))
    assert stateful(legacy, at(10))["rows_loaded"] == 0
    assert stateful(legacy, at(11))["from"] == at(10).isoformat()


def test_the_state_is_committed_with_the_data(legacy: Legacy, monkeypatch: pytest.MonkeyPatch) -> None:
    legacy.add(visit("v1", at(9)))
    monkeypatch.setattr(incremental_table_loader, "find_commit", _crash)
    with pytest.raises(RuntimeError, match="the process ends"):
        stateful(legacy, at(10))
    monkeypatch.undo()
    log = Path(legacy.target, "_delta_log", f"{0:020}.json").read_text(encoding="utf-8").splitlines()
    actions = {name: action for line in log for name, action in json.loads(line).items()}
    assert {"add", "txn"} <= actions.keys()
    assert actions["txn"]["version"] == at(10).timestamp() * 1_000_000

    assert stateful(legacy, at(10))["rows_read"] == 0
    assert legacy.ids() == ["v1"]


def _crash(*_: Any) -> None:
    """Ends the run after its commit, before anything else could have been saved."""
    raise RuntimeError("the process ends")


def test_a_crash_before_the_commit_loses_nothing(legacy: Legacy, monkeypatch: pytest.MonkeyPatch) -> None:
    legacy.add(visit("v1", at(9)), visit("n1", None))
    write_once = incremental_table_loader.write_once

    def rejects_only(spark: SparkSession, rows: DataFrame, table: str, **options: Any) -> str:
        return write_once(spark, rows, table, **options) if table == f"{legacy.target}_rejects" else _crash()  # type: ignore[return-value]

    monkeypatch.setattr(incremental_table_loader, "write_once", rejects_only)
    with pytest.raises(RuntimeError, match="the process ends"):
        stateful(legacy, at(10))
    monkeypatch.undo()
    assert counts(stateful(legacy, at(10))) == (2, 1, 0, 1)
    assert legacy.rows("_rejects").count() == 1


def test_two_stateful_runs_at_once_load_each_row_once(
    legacy: Legacy, monkeypatch: pytest.MonkeyPatch
) -> None:
    legacy.add(visit("v1", at(9)))
    _overtake(monkeypatch, lambda: stateful(legacy, at(10)))
    assert stateful(legacy, at(10))["rows_read"] == 0
    assert legacy.ids() == ["v1"]


@pytest.mark.parametrize(("overlap", "expected"), [(0, ["v1", "v2"]), (60, ["late", "v1", "v2"])])
def test_an_overlap_finds_rows_committed_late(legacy: Legacy, overlap: int, expected: Sequence[str]) -> None:
    legacy.add(visit("v1", at(9, 50)))
    stateful(legacy, at(10), key=["visit_id"], overlap_minutes=overlap)
    legacy.add(
        visit("late", at(9, 30)), visit("v2", at(10, 30))
    )  # a long transaction: older time, later commit
    stateful(legacy, at(11), key=["visit_id"], overlap_minutes=overlap)
    assert legacy.ids() == expected


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"from_": "2024-03-01T11", "to": "2024-03-01T10"}, "from must be before to"),
        ({"from_": "2024-03-01T11"}, "needs both from and to"),
        ({"to": "2024-03-01T11"}, "either from and to .one window. or bootstrap_from"),
        (
            {**hours(10, 11), "bootstrap_from": "2024-03-01"},
            "either from and to .one window. or bootstrap_from",
        ),
        ({**hours(10, 11), "key": None}, "append needs key"),
        ({**hours(10, 11), "overlap_minutes": 5}, "belongs to stateful runs"),
        ({"bootstrap_from": "2024-03-01", "overlap_minutes": -1}, "must be 0 or more"),
        ({"bootstrap_from": "2024-03-01", "overlap_minutes": 5, "key": None}, "append needs key"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_read(
    parameters: dict[str, Any], sentence: str
) -> None:
    given = {
        "source": "raw.visits",
        "target": "bronze/visits",
        "delta_column": "ingestion_time",
        "key": ["visit_id"],
    }
    with pytest.raises(WrongUse, match=sentence):
        Parameters(**{**given, **parameters})


def test_a_delta_column_that_is_none_and_a_target_of_another_schema(legacy: Legacy) -> None:
    legacy.add(visit("v1", at(10)))
    for column, sentence in (("ingested", "no column ingested; it has visit_id"), ("page", "page is string")):
        with pytest.raises(WrongUse, match=sentence):
            legacy.append(delta_column=column, **hours(10, 11))
    with pytest.raises(WrongUse, match="has a column page; give the computed"):
        legacy.append(delta_column="page", delta_expression="page", **hours(10, 11))
    legacy.spark.range(1).write.format("delta").save(legacy.target)
    with pytest.raises(
        WrongUse, match="another schema: event_time is absent, the source's is timestamp; id is bigint"
    ):
        legacy.append(**hours(10, 11))
