"""Fast Metadata Cleaner on Delta: days into the tables of their weeks, cleaned whole, behind one view."""

from __future__ import annotations

import datetime as dt
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from dbt.adapters.contracts.relation import RelationType
from dbt.adapters.spark.relation import SparkRelation
from dbt_common.exceptions import DbtRuntimeError
from pyspark.sql import DataFrame, SparkSession

from tests.support.dbt_project import DbtProject
from tests.support.other_commits import commit
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.session import environment
from tests.support.snippets import snippet

PAGE = "docs/idempotency.md"
THIS = "tests/patterns/idempotency/test_fast_metadata_cleaner.py::"
SOURCES = """
sources: [{name: raw, schema: '{{ target.schema }}', tables: [{name: visits, identifier: landed}]}]
"""
MONDAY, TUESDAY, WEDNESDAY, THURSDAY = "2023-11-06", "2023-11-07", "2023-11-08", "2023-11-09"
_NUMBERS = itertools.count(1)


class Units:
    """One view and its unit tables, worked on by the macros that the materialization and the operations call."""

    def __init__(
        self, spark: SparkSession, render: MacroRenderer, schema: str = "", clean: str = "truncate"
    ) -> None:
        self.spark, self._render = spark, render
        self.schema = schema or f"units_{next(_NUMBERS)}"
        spark.sql(f"create database if not exists {self.schema}")
        self.view = SparkRelation.create(schema=self.schema, identifier="visits", type=RelationType.View)
        self.options = {"unit": "week", "clean": clean}

    def load(
        self, date: str, rows: DataFrame | Sequence[tuple[Any, ...]], schema: str = "id int, page string"
    ) -> None:
        """Load a day as the materialization does."""
        frame = rows if isinstance(rows, DataFrame) else self.spark.createDataFrame(list(rows), schema)
        frame.createOrReplaceTempView("units_batch")
        batch = SparkRelation.create(identifier="units_batch")
        target = self._render("_units_prepare", view=self.view, options=self.options, date=date, batch=batch)
        note = f"load {next(_NUMBERS)}"
        self.spark.sql(self._render("_units_load_sql", target=target, date=date, batch=batch, note=note))
        self.call("_units_require_commit", target=target, note=note)

    def tables(self) -> dict[str, Any]:
        """Return what the macros know of each table."""
        return dict(self._render("_units_tables", view=self.view))

    def call(self, macro: str, **arguments: Any) -> None:
        """Call one of the macros behind the operations."""
        self._render(macro, **arguments)

    def made(self, unit: str, columns: str) -> None:
        """Make the table of a unit, as `_units_create` takes its columns, without a load."""
        self.call("_units_create", view=self.view, unit=unit, columns=columns)

    def expose(self) -> None:
        """Make the view of the tables that there are."""
        self.call("_units_expose", view=self.view, tables=self.tables())

    def freeze(self, units: list[str], into: str) -> None:
        found = {"view": self.view, "options": self.options, "tables": self.tables()}
        self.call("_units_freeze", found=found, units=units, into=into)

    def drop(self, *units: str) -> None:
        self.call("_units_drop", view=self.view, tables=self.tables(), units=list(units))

    def rows(self, name: str = "visits") -> DataFrame:
        return self.spark.sql(f"select * from {self.schema}.{name}")

    def commits(self, unit: str) -> list[list[dict[str, Any]]]:
        """Return the actions of each commit of a unit's table."""
        location = self.spark.sql(f"describe detail {self.schema}.visits_{unit}").collect()[0].location
        log = Path(location.removeprefix("file:"), "_delta_log")
        return [[json.loads(line) for line in entry.read_text(encoding="utf-8").splitlines()]
                for entry in sorted(log.glob("*.json"))]  # fmt: skip


@pytest.fixture
def units(spark: SparkSession, render: MacroRenderer) -> Units:
    return Units(spark, render)


# --- a model --------------------------------------------------------------------------------------------


def visits_of(spark: SparkSession, day: str, page: str = "index") -> DataFrame:
    """Return the 50 visits of a day."""
    return spark.range(50).selectExpr(
        f"concat('{day}-', id) as visit_id", f"timestamp'{day} 10:00:00' as event_time", f"'{page}' as page"
    )


class Week(Units):
    """Four days loaded in order, all again with one corrected, and one alone; see `week`."""

    def __init__(self, spark: SparkSession, render: MacroRenderer, project: DbtProject) -> None:
        super().__init__(spark, render, project.schema)
        self.project = project
        self.counts: list[int] = []
        self.errors: dict[str, str] = {}

    def run(self, day: str, name: str = "", page: str = "index") -> None:
        """Run the model for a day, with dbt."""
        self.project.source("landed", visits_of(self.spark, day, page))
        with environment(LOGICAL_DATE=day):
            if name:
                self.errors[name] = self.project.fails("run")
            else:
                self.project.run("run")
        self.counts.append(self.rows().count())

    def again(self, day: str, page: str = "index") -> None:
        self.load(day, visits_of(self.spark, day, page))
        self.counts.append(self.rows().count())


@pytest.fixture(scope="module")
def week(spark: SparkSession, render: MacroRenderer, make_project: Callable[..., DbtProject]) -> Week:
    model = snippet(PAGE, f"{THIS}test_four_days_are_200_rows_however_often_the_week_is_loaded")
    project = make_project({"models/visits.sql": model, "models/sources.yml": SOURCES})
    week = Week(spark, render, project)
    week.run(MONDAY)
    week.again(TUESDAY)
    week.again(WEDNESDAY)
    week.again(THURSDAY)
    week.run(WEDNESDAY, "wednesday alone")
    week.again(MONDAY)
    week.again(TUESDAY)
    week.again(WEDNESDAY, page="corrected")
    week.again(THURSDAY)
    return week


def test_four_days_are_200_rows_however_often_the_week_is_loaded(week: Week) -> None:
    assert week.counts == [50, 100, 150, 200, 200, 50, 100, 150, 200]
    assert week.rows("visits_2023_45").count() == 200
    assert week.rows().groupBy("visit_id", "event_time").count().where("count > 1").count() == 0


def test_a_day_alone_is_refused_and_doubles_nothing(week: Week) -> None:
    message = "visits_2023_45 holds 2023-11-08 already, and loading it again would double its rows"
    assert message in week.errors["wednesday alone"]


def test_a_corrected_day_changes_no_other_day(week: Week) -> None:
    pages = (
        week.rows()
        .selectExpr("cast(to_date(event_time) as string) as day", "page")
        .groupBy("day", "page")
        .count()
    )
    expected = [
        (MONDAY, "index", 50),
        (TUESDAY, "index", 50),
        (WEDNESDAY, "corrected", 50),
        (THURSDAY, "index", 50),
    ]
    assert_rows(pages, expected)


def test_only_the_first_day_cleans_and_never_recreates_the_table(week: Week) -> None:
    history = week.spark.sql(f"describe history {week.schema}.visits_2023_45").orderBy("version").collect()
    created, *others = [row.operation for row in history]
    assert created == "CREATE TABLE AS SELECT"
    assert others == ["WRITE"] * 4 + ["DELETE"] + ["WRITE"] * 4


def test_cleaning_reads_and_writes_no_data_file(week: Week) -> None:
    (clean,) = (
        actions for actions in week.commits("2023_45") if actions[0]["commitInfo"]["operation"] == "DELETE"
    )
    assert [next(iter(action)) for action in clean[1:]] == ["remove"] * 4
    metrics = clean[0]["commitInfo"]["operationMetrics"]
    assert (metrics["numRemovedFiles"], metrics["numAddedFiles"], metrics["numCopiedRows"]) == ("4", "0", "0")


def test_the_first_of_january_starts_a_unit_and_a_day_without_rows_may_be_loaded_again(units: Units) -> None:
    units.load("2024-12-31", [])
    units.load("2024-12-31", [(1, "old")])
    units.load("2025-01-01", [(2, "new")])
    assert list(units.tables()) == ["2024_53", "2025_00"]
    assert_rows(units.rows("visits_2024_53").drop("unit_day"), [(1, "old")])
    assert_rows(units.rows(), [(1, "old"), (2, "new")])


# --- what is refused ------------------------------------------------------------------------------------


def test_bad_input_is_refused_in_one_sentence(units: Units) -> None:
    units.load(MONDAY, [(1, "index")])
    found = {"view": units.view, "options": units.options, "tables": units.tables()}
    with pytest.raises(DbtRuntimeError, match=r"has no unit '2023_46'; it has: 2023_45"):
        units.call("_units_require_known", units=found, names=["2023_46"])
    with pytest.raises(DbtRuntimeError, match="YAML reads 2023_45 as the number 202345"):
        units.call("_units_require_known", units=found, names=[2023_45])
    with pytest.raises(DbtRuntimeError, match="the day 2999-01-07 is in the future"):
        units.load("2999-01-07", [(1, "index")])
    with pytest.raises(
        DbtRuntimeError, match=r"unit 2023_46 of .* is not there: load it from its first day on"
    ):
        units.load("2023-11-14", [(1, "index")])
    with pytest.raises(DbtRuntimeError, match="have no column id, page as int in place of string"):
        units.load(TUESDAY, [(1,)], "page int")
    with pytest.raises(DbtRuntimeError, match="must be a day such as 2024-01-01"):
        units.load("2023-11-6", [(1, "index")])
    for options, message in (({"unit": "hour"}, "unit must be one of"), ({"clean": "delete"}, "clean must be one of"),
                             ({"units": "week"}, "has no option 'units'")):  # fmt: skip
        with pytest.raises(DbtRuntimeError, match=message):
            units.call("_units_options", given=options)
    assert_rows(units.rows(), [(1, "index")])


def test_a_table_of_another_hand_is_neither_cleaned_nor_shown(units: Units) -> None:
    units.spark.sql(
        f"create table {units.schema}.visits_2023_45 using delta as select 9 as id, 'mine' as page"
    )
    with pytest.raises(DbtRuntimeError, match="visits_2023_45 is there and was not made by unit_tables"):
        units.load(MONDAY, [(1, "index")])
    assert_rows(units.rows("visits_2023_45"), [(9, "mine")])
    units.load("2023-11-13", [(1, "index")])
    assert_rows(units.rows(), [(1, "index")])


def test_of_two_runs_of_one_day_the_second_finds_out(units: Units) -> None:
    """Both have looked before either commits: Delta skips the second by its number, silently."""
    units.made("2023_45", "(id int, page string, unit_day date)")
    units.spark.sql("select 1 as id, 'index' as page").createOrReplaceTempView("units_batch")
    target = {"relation": f"{units.schema}.visits_2023_45", "version": 9}
    for note in ("first", "second"):
        units.spark.sql(
            units._render("_units_load_sql", target=target, date=TUESDAY, batch="units_batch", note=note)
        )
    assert units.rows("visits_2023_45").count() == 1
    location = units.spark.sql(f"describe detail {units.schema}.visits_2023_45").collect()[0].location
    commit(location.removeprefix("file:"), 130)
    units.call("_units_require_commit", target=target, note="first")
    with pytest.raises(DbtRuntimeError, match=r"another run loaded .* meanwhile"):
        units.call("_units_require_commit", target=target, note="second")


# --- columns --------------------------------------------------------------------------------------------


def test_an_optional_column_is_added_to_all_units_and_a_required_one_filled_by_a_replay(units: Units) -> None:
    units.options = {"unit": "week", "clean": "drop"}
    units.made("2023_45", "as select 1 as id, 'index' as page, date'2023-11-06' as unit_day")
    units.made("2023_46", "as select 'help' as page, 2 as id, date'2023-11-13' as unit_day")
    units.expose()
    assert_rows(units.rows(), [(1, "index"), (2, "help")])
    wider = "id int, page string, referral string"
    with pytest.raises(DbtRuntimeError, match="have referral, which the table lacks"):
        units.load("2023-11-14", [(3, "index", "search")], wider)
    for unit in units.tables().values():
        units.spark.sql(f"alter table {unit['relation']} add columns (referral string)")
    units.expose()
    units.load("2023-11-14", [(3, "index", "search")], wider)
    assert_rows(units.rows(), [(1, "index", None), (2, "help", None), (3, "index", "search")])
    # Required: its unit is loaded again from its first day, and the column has a value in each row of it.
    units.load("2023-11-13", [(2, "help", "direct", "es")], f"{wider}, country string")
    assert_rows(units.rows(), [(1, "index", None, None), (2, "help", "direct", "es")])


def test_truncate_keeps_the_columns_and_works_when_the_data_files_are_gone(units: Units) -> None:
    units.load(MONDAY, [(1, "index")])
    with pytest.raises(DbtRuntimeError, match="have country, which the table lacks"):
        units.load(MONDAY, [(1, "index", "es")], "id int, page string, country string")
    assert_rows(units.rows(), [(1, "index")])
    for file in units.rows("visits_2023_45").inputFiles():
        Path(file.removeprefix("file:").replace("//", "/")).unlink()
    units.load(MONDAY, [(2, "index")])
    assert_rows(units.rows(), [(2, "index")])


def test_columns_of_two_types_are_refused(units: Units) -> None:
    tables = [SparkRelation.create(schema=units.schema, identifier=name) for name in ("one", "two")]
    for table, type_ in zip(tables, ("int", "string"), strict=True):
        units.spark.sql(f"create table {table} (id {type_}) using delta")
    with pytest.raises(DbtRuntimeError, match=r"two has id as string, .*one as int"):
        units.call("_units_by_name", relations=tables)


# --- dropping and freezing ------------------------------------------------------------------------------


def test_readers_get_the_other_units_while_one_is_dropped_and_nothing_when_all_are(units: Units) -> None:
    for id, unit in ((1, "2023_45"), (2, "2023_46")):
        units.made(unit, f"as select {id} as id, 'index' as page, date'2023-11-06' as unit_day")
    units.drop("2023_45")  # what clean: drop does before it recreates the table
    assert_rows(units.rows(), [(2, "index")])
    units.drop("2023_46")
    assert_rows(units.rows(), [])
    assert units.rows().dtypes == [("id", "int"), ("page", "string")]
    units.load(TUESDAY, [(3, "index")])
    assert_rows(units.rows(), [(3, "index")])


def test_frozen_units_are_one_table_and_are_shown_once(units: Units) -> None:
    weeks = ["2023_40", "2023_41", "2023_42", "2023_43"]
    for number, week in enumerate([*weeks, "2023_44"]):
        units.made(week, f"as select {number} as id, 'index' as page, date'2023-10-02' as unit_day")
    units.expose()
    shown = [(number, "index") for number in range(5)]
    assert_rows(units.rows(), shown)
    # Ended after the frozen table was made: the view still shows the weeks, and a new view shows each row once.
    relations = [units.tables()[week]["relation"] for week in weeks]
    rows = units._render("_units_union_sql", union=units._render("_units_by_name", relations=relations))
    units.call("_units_create", view=units.view, unit="frozen_2023_10", columns=f"as {rows}", units=weeks)
    assert_rows(units.rows(), shown)
    units.expose()
    assert_rows(units.rows(), shown)
    units.freeze(weeks, "2023_10")
    assert list(units.tables()) == ["2023_44", "frozen_2023_10"]
    assert_rows(units.rows(), shown)
    assert_rows(units.rows("visits_frozen_2023_10").select("id"), [(0,), (1,), (2,), (3,)])
    with pytest.raises(
        DbtRuntimeError, match=r"2023_41 is frozen in .*visits_frozen_2023_10: its rows do not change"
    ):
        units.load("2023-10-09", [(9, "late")])
    with pytest.raises(DbtRuntimeError, match="2023_43 is frozen in"):
        units.freeze(["2023_43", "2023_44"], "overlapping")
    with pytest.raises(
        DbtRuntimeError, match="holds 2023_40, 2023_41, 2023_42, 2023_43 already, got 2023_44"
    ):
        units.freeze(["2023_44"], "2023_10")
    with pytest.raises(DbtRuntimeError, match="frozen_2023_10 is frozen"):
        units.call("_units_require_not_frozen", tables=units.tables(), unit="frozen_2023_10")
    assert_rows(units.rows(), shown)


def test_a_unit_that_is_not_over_is_not_frozen(units: Units) -> None:
    units.load(dt.datetime.now(dt.UTC).date().isoformat(), [(1, "index")])
    (unit,) = units.tables()
    with pytest.raises(DbtRuntimeError, match=f"{unit} is not over yet"):
        units.freeze([unit], "now")
    with pytest.raises(DbtRuntimeError, match="needs a list of units and a name"):
        units.freeze([], "nothing")


def test_the_operations_of_the_page(week: Week) -> None:
    """Last in this file: they end the week."""
    project, commands = week.project, snippet(PAGE, f"{THIS}test_the_operations_of_the_page")
    shown = week.rows().collect()
    for command in commands.strip().splitlines():
        dbt, operation, *arguments = command.replace("'", "").split(" ", 3)
        assert (dbt, operation) == ("dbt", "run-operation")
        macro, arguments_text = arguments[0].strip(), arguments[1].removeprefix("--args ")
        project.run(operation, macro, "--args", arguments_text)
    assert list(week.tables()) == ["frozen_2023_11"]
    assert_rows(week.rows().drop("referral"), shown)
    assert "has no unit '2023_45'" in project.fails(
        "run-operation", "clean_unit", "--args", '{model_name: visits, unit: "2023_45"}'
    )
