"""Distributed Aggregator in SQL: the cube by day and ISO week, and salting."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dbt_common.exceptions import DbtRuntimeError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.session import environment
from tests.support.snippets import snippets

SNIPPETS = (
    "tests/patterns/data_value/test_distributed_aggregator.py::"
    "test_a_late_visit_replaces_its_day_and_its_iso_week_and_nothing_else"
)
COLUMNS = "event_date date, country string, device string, duration double"
DURATION = {"duration": {"value": "duration", "valid_when": "duration >= 0"}}
CUBE: dict[str, Any] = {"day": "event_date", "dimensions": ["country", "device"], "measures": DURATION}
NUMBERS = ["row_count", "duration_avg"]


def day(text: str) -> dt.date:
    return dt.date.fromisoformat(text)


# The week of these two days begins in 2024 and ends in 2025.
DAY_1, DAY_2, WEEK = day("2024-12-31"), day("2025-01-01"), day("2024-12-30")
SUNDAY, MONDAY = day("2025-01-05"), day("2025-01-06")
UNKNOWN, DOUBTFUL = day("2025-02-05"), day("2025-02-12")
VISITS = [
    (DAY_1, "FR", "mobile", 10.0),
    (DAY_1, "FR", "desktop", 20.0),
    (DAY_1, "US", "mobile", 60.0),
    (DAY_2, "FR", "mobile", 90.0),
    (MONDAY, "US", "mobile", 1.0),
    (UNKNOWN, None, "mobile", 5.0),
    (UNKNOWN, "FR", "mobile", 7.0),
    (DOUBTFUL, "FR", "mobile", None),
    (DOUBTFUL, "FR", "mobile", -1.0),
    (DOUBTFUL, "FR", "mobile", float("nan")),
    (DOUBTFUL, "FR", "mobile", float("inf")),
    (DOUBTFUL, "FR", "mobile", 30.0),
    (DOUBTFUL, "FR", "mobile", 0.0),
]


@pytest.fixture
def cubes(spark: SparkSession, render: MacroRenderer) -> Iterator[tuple[DataFrame, DataFrame]]:
    """The cubes of VISITS by day and by week."""
    spark.createDataFrame(VISITS, COLUMNS).createOrReplaceTempView("visits")
    daily = spark.sql(render("cube_daily", relation="visits", **CUBE))
    daily.createOrReplaceTempView("visits_by_day")
    yield daily, spark.sql(render("cube_weekly", daily="visits_by_day", **CUBE))
    for name in ("visits", "visits_by_day"):
        spark.catalog.dropTempView(name)


def test_day_and_week_have_the_numbers_of_all_their_visits(
    cubes: tuple[DataFrame, DataFrame], ansi_modes: str
) -> None:
    daily, weekly = cubes
    assert_rows(
        daily.where("event_date <= '2025-01-01'").select(
            "event_date", "country", "device", "grouping_id", *NUMBERS
        ),
        [
            (DAY_1, "FR", "mobile", 0, 1, 10.0), (DAY_1, "FR", "desktop", 0, 1, 20.0),
            (DAY_1, "US", "mobile", 0, 1, 60.0),
            (DAY_1, "FR", None, 1, 2, 15.0), (DAY_1, "US", None, 1, 1, 60.0),
            (DAY_1, None, "mobile", 2, 2, 35.0), (DAY_1, None, "desktop", 2, 1, 20.0),
            (DAY_1, None, None, 3, 3, 30.0),
            (DAY_2, "FR", "mobile", 0, 1, 90.0), (DAY_2, "FR", None, 1, 1, 90.0),
            (DAY_2, None, "mobile", 2, 1, 90.0), (DAY_2, None, None, 3, 1, 90.0),
        ],
    )  # fmt: skip
    # 45 seconds over 4 visits; the average of the days' averages would be 60.
    assert_rows(
        weekly.where("week_start = '2024-12-30' and grouping_id in (1, 3)").select("country", *NUMBERS),
        [("FR", 3, 40.0), ("US", 1, 60.0), (None, 4, 45.0)],
    )
    averages = daily.where("grouping_id = 3 and event_date <= '2025-01-01'").agg({"duration_avg": "avg"})
    assert_rows(averages, [(60.0,)])


def test_a_week_over_the_turn_of_the_year_is_one_and_ends_on_sunday(
    spark: SparkSession, render: MacroRenderer
) -> None:
    rows = [(date, "FR", "mobile", 1.0) for date in (WEEK, DAY_1, DAY_2, SUNDAY, MONDAY)]
    spark.createDataFrame(rows, COLUMNS).createOrReplaceTempView("visits_of_weeks")
    daily = f"({render('cube_daily', relation='visits_of_weeks', **CUBE)})"
    weekly = spark.sql(render("cube_weekly", daily=daily, **CUBE)).where("grouping_id = 3")
    assert_rows(weekly.select("week_start", "row_count"), [(WEEK, 4), (MONDAY, 1)])


def test_a_subtotal_differs_from_a_visit_without_a_country(cubes: tuple[DataFrame, DataFrame]) -> None:
    for cube, name, date in zip(
        cubes, ("event_date", "week_start"), (UNKNOWN, day("2025-02-03")), strict=True
    ):
        assert_rows(
            cube.where((cube[name] == date) & cube.country.isNull()).select(
                "device", "grouping_id", *NUMBERS
            ),
            [("mobile", 0, 1, 5.0), (None, 1, 1, 5.0), ("mobile", 2, 2, 6.0), (None, 3, 2, 6.0)],
        )


def test_every_level_of_the_cube_counts_all_rows(cubes: tuple[DataFrame, DataFrame]) -> None:
    for cube in cubes:
        by_level = cube.groupBy("grouping_id").sum("row_count", "duration_count", "duration_sum")
        assert_rows(by_level, [(level, 13, 9, 223.0) for level in range(4)])


def test_a_value_that_is_no_duration_is_in_no_measure_and_its_row_is_counted(
    cubes: tuple[DataFrame, DataFrame],
) -> None:
    daily, _ = cubes
    parts = [f"duration_{part}" for part in ("count", "sum", "min", "max", "avg")]
    found = daily.where("event_date = '2025-02-12' and grouping_id = 3").select("row_count", *parts)
    assert_rows(found, [(6, 2, 30.0, 0.0, 30.0, 15.0)])


def test_without_valid_when_a_negative_number_is_a_value(spark: SparkSession, render: MacroRenderer) -> None:
    amounts = "(select date'2025-01-01' as d, 'FR' as country, explode(array(-1, null, 5)) as amount)"
    cube = spark.sql(render("cube_daily", relation=amounts, day="d", dimensions="country",
                            measures={"amount": "amount"}))  # fmt: skip
    assert_rows(
        cube.where("grouping_id = 1").select("row_count", "amount_count", "amount_sum", "amount_avg"),
        [(3, 2, 4, 2.0)],
    )
    without_measures = spark.sql(render("cube_daily", relation=amounts, day="d", dimensions=["country"]))
    assert without_measures.columns == ["d", "country", "grouping_id", "row_count"]
    assert_rows(without_measures.where("grouping_id = 0").select("row_count"), [(3,)])


def test_a_day_and_a_week_without_visits_have_no_row(
    cubes: tuple[DataFrame, DataFrame], spark: SparkSession, render: MacroRenderer
) -> None:
    for macro, relation, where in (
        ("cube_daily", "relation", "event_date = date'2025-03-01'"),
        ("cube_weekly", "daily", "week_start = date'2025-02-24'"),
    ):
        view = "visits" if relation == "relation" else "visits_by_day"
        assert_rows(spark.sql(render(macro, **{relation: view}, **CUBE, where=where)), [])


def test_a_sum_that_its_type_cannot_hold_is_null_at_each_level(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    largest = "(select date'2025-01-01' as d, a.country, a.n from values ('FR', 9223372036854775807L), "
    largest += "('FR', 1L), ('US', 5L) as a(country, n))"
    arguments: dict[str, Any] = {"day": "d", "dimensions": ["country"], "measures": {"n": "n"}}
    daily = render("cube_daily", relation=largest, **arguments)
    for cube in (spark.sql(daily), spark.sql(render("cube_weekly", daily=f"({daily})", **arguments))):
        assert_rows(
            cube.select("country", "row_count", "n_count", "n_sum", "n_avg", "n_max"),
            [
                ("FR", 2, 2, None, None, 9223372036854775807),
                ("US", 1, 1, 5, 5.0, 5),
                (None, 3, 3, None, None, 9223372036854775807),
            ],
        )


@pytest.mark.parametrize(
    ("relation", "sentence"),
    [
        ("(select date'2025-01-01' as d, 'FR' as country, '7' as n)", "the measure 'n' must be a number, got string"),
        ("(select '2025-01-01' as d, 'FR' as country, 7 as n)", "the day 'd' must be a date, got string"),
        ("(select timestamp'2025-01-01' as d, 'FR' as country, 7 as n)", "must be a date, got timestamp"),
        ("(select cast(null as date) as d, 'FR' as country, 7 as n)", "the day 'd' must be a date, a row has NULL"),
    ],
)  # fmt: skip
def test_rows_that_a_cube_cannot_hold_are_refused(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str, relation: str, sentence: str
) -> None:
    query = render("cube_daily", relation=relation, day="d", dimensions="country", measures={"n": "n"})
    with pytest.raises(PySparkException, match=sentence):
        spark.sql(query).collect()


@pytest.mark.parametrize("dimensions", [["country"], ["device", "country"]])
def test_a_week_of_other_dimensions_than_the_days_is_refused(
    cubes: tuple[DataFrame, DataFrame], spark: SparkSession, render: MacroRenderer, dimensions: list[str]
) -> None:
    query = render("cube_weekly", daily="visits_by_day", **{**CUBE, "dimensions": dimensions})
    with pytest.raises(
        PySparkException, match="cube_weekly needs the dimensions of the daily cube in their order"
    ):
        spark.sql(query).collect()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"dimensions": []}, "cube_daily needs 1 to 10 dimensions, got 0"),
        ({"dimensions": [str(number) for number in range(11)]}, "needs 1 to 10 dimensions, got 11"),
        ({"dimensions": ["Event_Date"]}, "cube_daily would give two columns the name 'Event_Date'"),
        ({"dimensions": ["Row_Count"]}, "would give two columns the name 'row_count'"),
        ({"dimensions": ["duration_avg"]}, "would give two columns the name 'duration_avg'"),
        ({"dimensions": [None]}, "cube_daily needs names of columns, got 'None'"),
        ({"measures": ["duration"]}, "measures must map names to SQL expressions"),
        ({"measures": {"duration": 7}}, "the measure 'duration' must be a SQL expression or"),
        ({"measures": {"d": {"value": "d", "type": "distinct"}}}, "the measure 'd' has no option 'type'"),
        (
            {"measures": {"d": {"value": "d", "valid_when": " "}}},
            "the measure 'd' must be a SQL expression or",
        ),
    ],
)
def test_wrong_arguments_are_refused(render: MacroRenderer, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DbtRuntimeError, match=sentence):
        render("cube_daily", relation="visits", **(CUBE | arguments))


def test_rows_are_added_up_before_they_are_exchanged(cubes: tuple[DataFrame, DataFrame]) -> None:
    for cube in cubes:
        plan = cube._jdf.queryExecution().executedPlan().toString()
        assert re.search(r"Exchange hashpartitioning[\s\S]+keys=\[.+\], functions=\[.*partial_count", plan)


# --- salting --------------------------------------------------------------------------------------------

SALTED = "store string, id bigint, amount double"


def salted(render: MacroRenderer, **changes: Any) -> str:
    given = {"relation": "sales", "group_by": "store", "salt_by": "id", "measures": {"amount": "amount"}}
    return str(render("salted_aggregate", **(given | changes)))


@pytest.mark.parametrize("salts", [2, 3])
def test_salted_and_unsalted_results_are_equal(
    spark: SparkSession, render: MacroRenderer, salts: int
) -> None:
    rows: list[tuple[Any, ...]] = [("hot", number, float(number % 13)) for number in range(90)]
    rows += [(f"s{number % 4}", number, float(number)) for number in range(8)]
    rows += [(None, None, 5.0), (None, 1, None)]
    spark.createDataFrame(rows, SALTED).createOrReplaceTempView("sales")
    plain = (
        "select store, count(*), count(amount), sum(amount), min(amount), max(amount), avg(amount) from sales"
    )
    assert_rows(spark.sql(salted(render, salts=salts)), spark.sql(f"{plain} group by store").collect())
    totals = spark.sql(plain.replace("store, ", "")).collect()
    assert_rows(spark.sql(salted(render, salts=salts, group_by=[])), totals)
    assert_rows(
        spark.sql(salted(render, relation="(select * from sales where false)", group_by=[])),
        [(0, 0, None, None, None, None)],
    )


def test_an_average_is_divided_once_and_not_averaged_over_the_salts(
    spark: SparkSession, render: MacroRenderer
) -> None:
    salt = render("_salt", columns=["id"], salts=2)
    by_salt = spark.sql(f"select {salt} as salt, collect_list(id) as ids from range(20) group by 1").collect()
    ids = {row.salt: row.ids for row in by_salt}
    rows = [("hot", ids[0][0], 10.0), ("hot", ids[0][1], 20.0), ("hot", ids[1][0], 60.0)]
    spark.createDataFrame(rows, SALTED).createOrReplaceTempView("sales")
    assert_rows(spark.sql(salted(render, salts=2)).select("amount_avg"), [(30.0,)])
    naive = f"select avg(a) from (select avg(amount) as a from sales group by store, {salt})"
    assert_rows(spark.sql(naive), [(37.5,)])


def test_a_row_has_the_same_salt_at_each_try_and_rows_of_a_key_have_all_salts(
    spark: SparkSession, render: MacroRenderer
) -> None:
    salt = render("_salt", columns=["id"], salts=3)
    rows = spark.range(100).selectExpr("id", f"{salt} as salt")
    first, again = (
        rows.collect(),
        spark.range(100).repartition(3).selectExpr("id", f"{salt} as salt").collect(),
    )
    assert sorted(first) == sorted(again)
    assert {row.salt for row in first} == {0, 1, 2}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"salt_by": []}, "salted_aggregate needs salt_by: columns that differ between the rows of one key"),
        ({"salts": 1}, "salts must be a whole number of at least 2, got 1"),
        ({"salts": 2.5}, "salts must be a whole number of at least 2, got 2.5"),
        ({"salts": True}, "salts must be a whole number of at least 2, got True"),
        ({"group_by": ["amount_sum"]}, "would give two columns the name 'amount_sum'"),
    ],
)
def test_wrong_arguments_of_salting_are_refused(
    render: MacroRenderer, arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DbtRuntimeError, match=sentence):
        salted(render, **arguments)


# --- the models of the page -----------------------------------------------------------------------------


class Models:
    """The two models of the page and what each run leaves."""

    def __init__(self, project: DbtProject) -> None:
        self.project = project

    def land(self, *visits: tuple[dt.date, str, str, float]) -> None:
        """Let the source hold these visits, and one without a day."""
        rows = [*visits, (None, "FR", "mobile", 1.0)]
        frame = self.project.spark.createDataFrame(rows, COLUMNS)
        self.project.source("visits", frame.withColumnRenamed("duration", "duration_seconds"))

    def run(self, date: dt.date) -> None:
        with environment(LOGICAL_DATE=f"{date}"):
            self.project.run("run")

    def totals(self, model: str) -> DataFrame:
        name = "event_date" if model == "visits_by_day" else "week_start"
        return self.project.table(model).where("grouping_id = 3").select(name, *NUMBERS)

    def files(self, model: str, condition: str) -> set[str]:
        rows = self.project.table(model).where(condition).select("_metadata.file_path").distinct().collect()
        return {row.file_path for row in rows}


def test_a_late_visit_replaces_its_day_and_its_iso_week_and_nothing_else(
    make_project: Callable[..., DbtProject],
) -> None:
    by_day, by_week = snippets("docs/data_value.md", SNIPPETS)
    models = Models(
        make_project(
            {
                "models/sources.yml": raw_tables("visits"),
                "models/visits_by_day.sql": by_day,
                "models/visits_by_week.sql": by_week,
            }
        )
    )
    others = "visits_by_day", "event_date > '2025-01-01'"
    other_weeks = "visits_by_week", "week_start > '2025-01-01'"
    first = [(DAY_1, "FR", "mobile", 10.0), (DAY_1, "US", "mobile", 20.0), (MONDAY, "FR", "mobile", 90.0)]
    models.land(*first)
    models.run(DAY_1)
    models.run(MONDAY)
    assert_rows(models.totals("visits_by_day"), [(DAY_1, 2, 15.0), (MONDAY, 1, 90.0)])
    assert_rows(models.totals("visits_by_week"), [(WEEK, 2, 15.0), (MONDAY, 1, 90.0)])
    before = models.files(*others), models.files(*other_weeks)

    # Late visits of both days, and only the first day runs again.
    models.land(*first, (DAY_1, "DE", "mobile", 60.0), (MONDAY, "DE", "mobile", 1.0))
    for _ in range(2):
        models.run(DAY_1)
        assert_rows(models.totals("visits_by_day"), [(DAY_1, 3, 30.0), (MONDAY, 1, 90.0)])
        assert_rows(models.totals("visits_by_week"), [(WEEK, 3, 30.0), (MONDAY, 1, 90.0)])
        assert models.project.table("visits_by_day").count() == 8 + 4
    assert (models.files(*others), models.files(*other_weeks)) == before
    assert all(before)

    rolled_up = models.project.spark.sql(models.project.compiled("visits_by_week"))
    plan = rolled_up._jdf.queryExecution().executedPlan().toString()
    assert re.search(r"PartitionFilters: \[[^\]]*trunc\(event_date", plan), "other weeks' days are read"
