"""Filter Interceptor: SQL and PySpark forms, side by side on the specification's devices."""

from __future__ import annotations

import datetime as dt
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.error_management import filter_interceptor as job
from python_jobs.error_management.filter_interceptor import Condition, Interceptor, Parameters
from python_jobs.shared.core.failures import DataRefused, NotReady, WrongUse
from python_jobs.shared.spark.job import run_job
from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.failing_write import failing_at
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.snippets import snippet, snippets

DEVICE = "type string, full_name string, version int"
DEVICES = [
    (None, "x", 1),
    ("m", "x", 1),
    ("mac", None, 1),
    ("mac", "x", None),
    ("mac", "x", 1),
    ("mac", "x", 2),
    (None, None, None),
]
PAGE = "docs/error_management.md"
HERE = "tests/patterns/error_management/test_filter_interceptor.py"
VALID_DEVICES = [("mac", "x", 1), ("mac", "x", 2)]
CONDITIONS = [
    {"name": "null_type", "condition": "type is not null", "category": "invalid"},
    {"name": "short_type", "condition": "length(type) > 2"},
    {"name": "null_full_name", "condition": "full_name is not null", "category": "invalid"},
    {"name": "null_version", "condition": "version is not null", "category": "invalid"},
]
REJECTED = {"null_type": 2, "short_type": 1, "null_full_name": 1, "null_version": 1}
CATEGORY = {c["name"]: c.get("category", "filtered") for c in CONDITIONS}


def conditions_of(entries: list[dict[str, str]]) -> list[Condition]:
    return [Condition(**entry) for entry in entries]


class SqlForm:
    """The macros, rendered and run."""

    def __init__(self, spark: SparkSession, render: MacroRenderer) -> None:
        self.spark, self.render = spark, render

    def flags(self, rows: DataFrame, conditions: list[dict[str, str]]) -> DataFrame:
        rows.createOrReplaceTempView("rows_to_filter")
        sql = self.render("filter_interceptor_flags", relation="rows_to_filter", conditions=conditions)
        return self.spark.sql(sql)

    def run(self, rows: DataFrame, conditions: list[dict[str, str]]) -> tuple[DataFrame, dict[str, int], int]:
        """Return the valid rows, the rejections by condition and the number of rows read."""
        self.flags(rows, conditions).createOrReplaceTempView("flagged_rows")
        statistics = self.spark.sql(
            self.render(
                "filter_interceptor_statistics",
                flagged="flagged_rows",
                conditions=conditions,
                run_id="run",
                run_at="2024-01-01 00:00:00",
            )
        ).collect()
        assert [row.position for row in statistics] == list(range(1, len(conditions) + 1))
        assert {row.condition_name: row.category for row in statistics} == {
            c["name"]: c.get("category", "filtered") for c in conditions
        }
        assert len({(row.run_id, row.run_at, row.input_rows, row.valid_rows) for row in statistics}) == 1
        rejected = {row.condition_name: row.rejected_rows for row in statistics}
        assert statistics[0].valid_rows + sum(rejected.values()) == statistics[0].input_rows
        valid = self.spark.sql(self.render("filter_interceptor_valid_rows", flagged="flagged_rows"))
        return valid, rejected, statistics[0].input_rows

    def all_failures(self, rows: DataFrame, conditions: list[dict[str, str]]) -> dict[str, int]:
        rows.createOrReplaceTempView("rows_to_filter")
        sql = self.render("filter_interceptor_all_failures", relation="rows_to_filter", conditions=conditions)
        return {row.condition_name: row.failed_rows for row in self.spark.sql(sql).collect()}


class PySparkForm:
    """The interceptor, with the valid rows written to a real table."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder

    def flags(self, rows: DataFrame, conditions: list[dict[str, str]]) -> DataFrame:
        return job.flags(rows, conditions_of(conditions)).drop("predicate_error")

    def run(self, rows: DataFrame, conditions: list[dict[str, str]]) -> tuple[DataFrame, dict[str, int], int]:
        interceptor = Interceptor(conditions_of(conditions))
        path = str(self.folder / "valid")
        interceptor.filter(rows).write.format("delta").mode("overwrite").save(path)
        counts = interceptor.counts()
        assert counts.valid_rows + sum(counts.rejected.values()) == counts.input_rows
        return self.spark.read.format("delta").load(path), counts.rejected, counts.input_rows

    def all_failures(self, rows: DataFrame, conditions: list[dict[str, str]]) -> dict[str, int]:
        return job.all_failures(rows, conditions_of(conditions))


@pytest.fixture(params=["sql", "pyspark"])
def form(
    request: pytest.FixtureRequest, spark: SparkSession, render: MacroRenderer, tmp_path: Path
) -> SqlForm | PySparkForm:
    return SqlForm(spark, render) if request.param == "sql" else PySparkForm(spark, tmp_path)


@pytest.fixture
def devices(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(DEVICES, DEVICE)


def test_both_forms_count_the_devices_of_the_specification(
    form: SqlForm | PySparkForm, devices: DataFrame, ansi_modes: str
) -> None:
    valid, rejected, read = form.run(devices, CONDITIONS)
    assert_rows(valid, VALID_DEVICES)
    assert valid.columns == ["type", "full_name", "version"]
    assert (rejected, read) == (REJECTED, 7)


def test_a_row_counts_once_under_the_first_condition_it_fails(
    form: SqlForm | PySparkForm, devices: DataFrame
) -> None:
    all_null = form.flags(devices, CONDITIONS).where("type is null and full_name is null and version is null")
    assert_rows(all_null.select("rejected_by", "rejected_as"), [("null_type", "invalid")])
    reversed_order = form.run(devices, CONDITIONS[::-1])[1]
    assert reversed_order == {"null_version": 2, "null_full_name": 1, "short_type": 2, "null_type": 0}


def test_all_failures_is_a_report_of_its_own(form: SqlForm | PySparkForm, devices: DataFrame) -> None:
    failures = form.all_failures(devices, CONDITIONS)
    assert failures == {"null_type": 2, "short_type": 3, "null_full_name": 2, "null_version": 2}
    assert sum(failures.values()) > 7


def test_a_condition_that_is_null_rejects_and_is_counted(
    form: SqlForm | PySparkForm, devices: DataFrame, ansi_modes: str
) -> None:
    without_null_check = CONDITIONS[1:]
    valid, rejected, _ = form.run(devices, without_null_check)
    assert_rows(valid, VALID_DEVICES)
    assert rejected == {"short_type": 3, "null_full_name": 1, "null_version": 1}


def test_conditions_without_a_hit_and_empty_inputs_are_reported_as_zero(
    form: SqlForm | PySparkForm, devices: DataFrame
) -> None:
    never = [*CONDITIONS, {"name": "negative_version", "condition": "version >= 0"}]
    assert form.run(devices, never)[1] == REJECTED | {"negative_version": 0}
    valid, rejected, read = form.run(devices.limit(0), CONDITIONS)
    assert (valid.count(), rejected, read) == (0, dict.fromkeys(REJECTED, 0), 0)
    assert valid.dtypes == [("type", "string"), ("full_name", "string"), ("version", "int")]


def test_bots_and_unreadable_values_are_counted_under_their_own_names(
    form: SqlForm | PySparkForm, spark: SparkSession, ansi_modes: str
) -> None:
    visits = spark.createDataFrame(
        [("user_42", "2025-01-01 00:00:00", "chrome"), ("guest", "2025-01-01 00:00:00", "chrome"),
         ("user_1", "2025-13-01 00:00:00", "chrome"), ("user_2", "2025-01-01 00:00:00", "bot")],
        "user string, at string, browser string",
    )  # fmt: skip
    typed = visits.select(
        F.expr("try_cast(nullif(regexp_extract(user, '^user_([0-9]+)$', 1), '') as bigint)").alias("user_id"),
        F.expr("try_to_timestamp(at)").alias("at"),
        "browser",
    )
    conditions = [
        {"name": "unreadable_user", "condition": "user_id is not null", "category": "invalid"},
        {"name": "unreadable_time", "condition": "at is not null", "category": "invalid"},
        {"name": "bot", "condition": "browser <> 'bot'"},
    ]
    first = form.run(typed, conditions)
    assert_rows(first[0].select("user_id", "browser"), [(42, "chrome")])
    assert (first[1], first[2]) == ({"unreadable_user": 1, "unreadable_time": 1, "bot": 1}, 4)
    rows = first[0].collect()
    again = form.run(typed, conditions)
    assert_rows(again[0], [tuple(row) for row in rows])
    assert again[1] == first[1]


def test_filter_on_the_partition_column_is_pushed_down(
    form: SqlForm | PySparkForm, spark: SparkSession, devices: DataFrame, table_path: str
) -> None:
    devices.withColumn("day", F.lit("2024-01-01")).write.format("delta").partitionBy("day").save(table_path)
    stored = spark.read.format("delta").load(table_path).where("day = '2024-01-01'")
    valid = form.run(stored, CONDITIONS)[0] if isinstance(form, SqlForm) else Interceptor(
        conditions_of(CONDITIONS)
    ).filter(stored)  # fmt: skip
    plan = valid._jdf.queryExecution().executedPlan().toString()
    assert "PartitionFilters: [isnotnull(day" in plan


def test_a_second_action_doubles_no_count(devices: DataFrame, tmp_path: Path) -> None:
    interceptor = Interceptor(conditions_of(CONDITIONS))
    valid = interceptor.filter(devices)
    valid.write.format("delta").save(str(tmp_path / "first"))
    assert interceptor.counts().rejected == REJECTED
    valid.write.format("delta").save(str(tmp_path / "second"))
    assert len(valid.collect()) == 2
    assert interceptor.counts().rejected == REJECTED


def test_counts_before_an_action_are_refused_and_not_zero(devices: DataFrame) -> None:
    interceptor = Interceptor(conditions_of(CONDITIONS))
    with pytest.raises(WrongUse, match="write them before asking"):
        interceptor.counts()
    interceptor.filter(devices)
    with pytest.raises(WrongUse, match="write them before asking"):
        interceptor.counts(timeout_seconds=0.2)


def test_python_snippet_of_the_page(devices: DataFrame, table_path: str) -> None:
    names: dict[str, Any] = {"devices": devices, "path": table_path}
    exec(snippet(PAGE, f"{HERE}::test_python_snippet_of_the_page"), names)
    assert names["rejected"] == REJECTED
    assert_rows(devices.sparkSession.read.format("delta").load(table_path), VALID_DEVICES)


def test_a_predicate_that_raises_makes_a_dead_letter_and_no_filtered_row(devices: DataFrame) -> None:
    conditions = [
        Condition("null_type", lambda row: row.type is not None),
        Condition("long_name", lambda row: len(row.full_name) >= 1),
        Condition("null_version", "version is not null"),
    ]
    flagged = job.flags(devices, conditions)
    message = "TypeError: object of type 'NoneType' has no len()"
    assert_rows(job.raised_rows(flagged), [("mac", None, 1, "long_name", message)])
    counts = job.count(devices, conditions)
    assert counts.rejected == {"null_type": 2, "long_name": 0, "null_version": 1}
    assert (counts.input_rows, counts.valid_rows, counts.raised) == (7, 3, 1)


@pytest.mark.parametrize(
    ("conditions", "sentence"),
    [
        ([], "conditions must be a list|there is no condition"),
        ([CONDITIONS[0], CONDITIONS[0]], "have the (same )?name"),
    ],
)
def test_both_forms_refuse_wrong_conditions(
    form: SqlForm | PySparkForm, devices: DataFrame, conditions: list[dict[str, str]], sentence: str
) -> None:
    with pytest.raises(Exception, match=sentence):
        form.flags(devices, conditions)


def test_macros_refuse_wrong_arguments(render: MacroRenderer) -> None:
    for condition, sentence in [
        ({"name": "a"}, "needs a name and a condition"),
        ({"name": "a", "condition": "b", "categry": "c"}, "has no option 'categry'"),
        ({"name": "it's", "condition": "b"}, "hold no quotes"),
        ("a", "a condition is {name, condition}"),
    ]:
        with pytest.raises(Exception, match=sentence):
            render("filter_interceptor_flags", relation="t", conditions=[condition])
    with pytest.raises(Exception, match="max_rise must be a share between 0 and 1, got 90"):
        render("rejected_share_rises", statistics="t", max_rise=90, baseline_runs=1)
    with pytest.raises(Exception, match="baseline_runs must be at least 1, got 0"):
        render("rejected_share_rises", statistics="t", max_rise=0.1, baseline_runs=0)


def history(*runs: tuple[int, int, int]) -> list[tuple[Any, ...]]:
    """Return statistics of daily runs: rows read, rejected as null_type, rejected as short_type."""
    return [
        (f"run {day}", dt.datetime(2024, 1, day, tzinfo=dt.UTC), position, name, "filtered", count, read,
         read - null_type - short_type)
        for day, (read, null_type, short_type) in enumerate(runs, 1)
        for position, (name, count) in enumerate([("null_type", null_type), ("short_type", short_type)], 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("runs", "max_rise", "alarm"),
    [
        ([(100, 10, 5), (100, 10, 5), (100, 20, 70)], 0.2, "short_type"),
        ([(100, 10, 5), (100, 10, 5), (100, 60, 30)], 0.2, "null_type"),
        ([(100, 10, 5), (100, 10, 5), (100, 20, 70)], 0.8, None),
        ([(100, 10, 5), (100, 15, 10)], 0.2, None),
        ([(100, 90, 0)], 0.2, None),
        ([(100, 10, 5), (0, 0, 0), (100, 10, 75)], 0.2, "short_type"),
        ([(100, 10, 5), (100, 10, 75), (0, 0, 0)], 0.2, "short_type"),
    ],
)
def test_alarm_names_the_condition_with_the_largest_rise(
    spark: SparkSession,
    render: MacroRenderer,
    ansi_modes: str,
    runs: list[tuple[int, int, int]],
    max_rise: float,
    alarm: str | None,
) -> None:
    schema = (
        "run_id string, run_at timestamp, position int, condition_name string, category string, "
        "rejected_rows bigint, input_rows bigint, valid_rows bigint"
    )
    spark.createDataFrame(history(*runs), schema).createOrReplaceTempView("filter_statistics")
    sql = render("rejected_share_rises", statistics="filter_statistics", max_rise=max_rise, baseline_runs=10)
    rows = spark.sql(sql).collect()
    assert [row.condition_name for row in rows] == ([] if alarm is None else [alarm])
    if alarm:
        assert (round(rows[0].baseline_rejected_share, 6), round(rows[0].rejected_share, 6)) in {
            (0.15, 0.9),
            (0.15, 0.85),
        }


def test_counts_that_are_no_numbers_raise_the_alarm_and_are_no_baseline(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    """Of each story the runs in their order: rows read, rejected as null_type."""
    sql = render("rejected_share_rises", statistics="odd_statistics", max_rise=0.2, baseline_runs=2)
    for runs, is_alarm in [
        ([(100.0, 10.0), (100.0, math.nan)], True),
        ([(100.0, 10.0), (math.inf, 10.0)], True),
        ([(math.nan, 10.0)], True),
        ([(100.0, 10.0), (100.0, math.nan), (math.inf, 0.0), (100.0, 20.0)], False),
        ([(100.0, 10.0), (100.0, math.nan), (100.0, 40.0)], True),
        ([(100.0, math.inf), (100.0, 90.0)], False),
    ]:
        rows = [(str(day), dt.datetime(2024, 1, day, tzinfo=dt.UTC), 1, "null_type", rejected, read)
                for day, (read, rejected) in enumerate(runs, 1)]  # fmt: skip
        schema = (
            "run_id string, run_at timestamp, position int, condition_name string, "
            "rejected_rows double, input_rows double"
        )
        spark.createDataFrame(rows, schema).createOrReplaceTempView("odd_statistics")
        assert [row.condition_name for row in spark.sql(sql).collect()] == ["null_type"] * is_alarm, runs


def test_models_keep_the_history_that_the_generic_test_compares_with(
    spark: SparkSession, make_project: Callable[..., DbtProject]
) -> None:
    macro, flagged, valid, statistics, properties = snippets(
        PAGE, f"{HERE}::test_models_keep_the_history_that_the_generic_test_compares_with"
    )
    project = make_project(
        {
            "macros/device_conditions.sql": macro,
            "models/devices_flagged.sql": flagged,
            "models/devices_valid.sql": valid,
            "models/devices_filter_statistics.sql": statistics,
            "models/properties.yml": properties,
            "models/sources.yml": raw_tables("devices"),
        }
    )
    project.source("devices", spark.createDataFrame([*VALID_DEVICES * 4, ("m", "x", 1)], DEVICE))
    project.run("build")
    project.source("devices", spark.createDataFrame([*[("mac", None, 1)] * 8, *VALID_DEVICES], DEVICE))
    assert project.fails("build").startswith("rejections_steady: fail")
    assert_rows(project.table("devices_valid"), VALID_DEVICES)
    runs = project.table("devices_filter_statistics").where("rejected_rows > 0").orderBy("run_at").collect()
    assert [(row.condition_name, row.rejected_rows, row.input_rows) for row in runs] == [
        ("short_type", 1, 9),
        ("null_full_name", 8, 10),
    ]
    assert len({row.run_id for row in runs}) == 2


class Tables:
    """Source, target, statistics and checkpoint of one test of the job."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        (folder / "conditions.yml").write_text(yaml.safe_dump(CONDITIONS, sort_keys=False))

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def append(self, rows: list[tuple[Any, ...]]) -> None:
        source = self.spark.createDataFrame(rows, DEVICE).coalesce(1)
        source.write.format("delta").mode("append").save(self.path("source"))

    def run(self, **changes: Any) -> dict[str, Any]:
        given = {name: self.path(name) for name in ("source", "target", "statistics")}
        given["conditions"] = self.path("conditions.yml")
        return job.run(self.spark, Parameters(**(given | changes)))

    def table(self, name: str) -> DataFrame:
        return self.spark.read.format("delta").load(self.path(name))

    def counted(self) -> dict[tuple[str, str], int]:
        """Return the rejections by window start and condition, without the zeros."""
        totals = job.window_totals(self.table("statistics")).where("rejected_rows > 0").collect()
        return {(f"{row.window_start:%H:%M}", row.condition_name): row.rejected_rows for row in totals}


@pytest.fixture
def tables(spark: SparkSession, tmp_path: Path) -> Tables:
    return Tables(spark, tmp_path)


def test_batch_job_replaces_its_run_and_refuses_a_rise(
    tables: Tables, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotReady, match="there is no Delta table"):
        tables.run()
    tables.append(VALID_DEVICES * 4 + [("m", "x", 1)])
    for _ in range(2):
        report = tables.run(run_id="monday", now="2024-01-01", max_rise=0.2)
        assert (report["read"], report["valid"], report["rejected"]["short_type"]) == (9, 8, 1)
    assert tables.table("statistics").count() == 4

    tables.append([("mac", None, 1)] * 36)
    arguments = [
        *("--source", tables.path("source"), "--target", tables.path("target")),
        *("--statistics", tables.path("statistics"), "--conditions", tables.path("conditions.yml")),
        *("--run_id", "tuesday", "--now", "2024-01-02", "--max_rise"),
    ]
    with pytest.raises(SystemExit) as stopped:
        run_job(Parameters, job.run, [*arguments, "0.2"])
    assert stopped.value.code == DataRefused.exit_code
    assert (
        "the rejected share rose by 71.1% to 82.2%, most of all by the condition 'null_full_name' "
        "(from 0.0% to 80.0%); nothing was written"
    ) in capsys.readouterr().err
    assert (tables.table("target").count(), tables.table("statistics").count()) == (8, 4)

    with pytest.raises(SystemExit) as stopped:
        run_job(Parameters, job.run, [*arguments, "0.8"])
    assert stopped.value.code == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rejected"] == {
        "null_type": 0, "short_type": 1, "null_full_name": 36, "null_version": 0,
    }  # fmt: skip


def test_stream_counts_by_window_exactly_through_restarts(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = {"checkpoint": tables.path("checkpoint")}
    tables.append(DEVICES)
    tables.run(**stream, now="2024-01-01T10:01:00")
    tables.append([("m", "x", 1), ("mac", "x", 3)])
    tables.run(**stream, now="2024-01-01T10:09:59")
    first = {("10:00", name): count for name, count in REJECTED.items()} | {("10:00", "short_type"): 2}
    assert tables.counted() == first
    assert tables.run(**stream, now="2024-01-01T10:09:59")["batches"] == 0

    # Dies after its rows and before its counts: the next run counts the batch, once, in its own window.
    tables.append([("m", "y", 1), ("mac", "y", 1)])
    with failing_at(tables.path("statistics"), job, "append", PermissionError("read-only")):
        tables.run(**stream, now="2024-01-01T10:10:00")
    assert tables.run(**stream, now="2024-01-01T10:20:00")["rejected"]["short_type"] == 1
    assert tables.counted() == first | {("10:20", "short_type"): 1}

    # Dies after both and before Spark's own commit: the batch comes again and changes nothing.
    (tables.folder / "checkpoint" / "commits" / "2").unlink()
    (tables.folder / "checkpoint" / "commits" / ".2.crc").unlink(missing_ok=True)
    tables.run(**stream, now="2024-01-01T10:30:00")
    assert tables.counted() == first | {("10:20", "short_type"): 1}
    assert tables.table("target").count() == 4

    shutil.rmtree(tables.path("target"))
    with pytest.raises(WrongUse, match="was made for another target"):
        tables.run(**stream)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"window": "10"}, "'10' is no duration"),
        ({"max_rise": 20.0}, "it is a share between 0 and 1"),
        ({"baseline_runs": 0}, "baseline_runs must be 1 or more, got 0"),
        ({"checkpoint": "c", "max_rise": 0.1}, "belong to a batch"),
        ({"trigger": "10 seconds"}, "give it a checkpoint"),
        ({"max_files_per_trigger": 5}, "give it a checkpoint"),
        ({"checkpoint": "c", "max_files_per_trigger": 0}, "max_files_per_trigger must be 1 or more, got 0"),
        ({"run_id": "it's"}, "run_id is 'it's'"),
        ({"conditions": "nowhere.yml"}, "the file of conditions 'nowhere.yml' doesn't exist"),
        ({"target": "a/source", "source": "a/source"}, "must be three tables"),
    ],
)
def test_wrong_use_of_the_job_gives_one_sentence(
    tables: Tables, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(WrongUse, match=sentence):
        tables.run(**changes)


def test_conditions_file_holds_what_the_macro_takes(tables: Tables) -> None:
    assert job.load_conditions(tables.path("conditions.yml")) == conditions_of(CONDITIONS)
    (tables.folder / "conditions.yml").write_text("name: a\ncondition: b\n")
    with pytest.raises(WrongUse, match="must hold a list of name, condition"):
        job.load_conditions(tables.path("conditions.yml"))
