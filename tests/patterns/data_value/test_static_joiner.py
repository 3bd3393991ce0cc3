"""Static Joiner in SQL: facts with the row, or with the version, of a reference."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dbt.adapters.spark.relation import SparkRelation
from dbt_common.exceptions import DbtRuntimeError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.session import environment, setting
from tests.support.snippets import snippets

HERE = "tests/patterns/data_value/test_static_joiner.py"
Join = Callable[..., DataFrame]


def at(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text)


VISITS = [
    ("before", "u1", at("2024-05-01T10:00")),
    ("first", "u1", at("2024-06-20T00:00")),
    ("at the change", "u1", at("2024-06-21T00:00")),
    ("open", "u1", at("2024-07-10T00:00")),
    ("unknown", "u9", at("2024-07-10T00:00")),
    ("no user", None, at("2024-07-10T00:00")),
    ("no time", "u1", None),
]
# The figure's user, and one whose versions end at the year 9999, with a gap after a deletion.
USERS = [
    ("u1", "a@", at("2024-06-01"), at("2024-06-21")),
    ("u1", "b@", at("2024-06-21"), at("2024-07-05")),
    ("u1", "c@", at("2024-07-05"), None),
    ("u2", "x@", at("2024-06-01"), at("2024-06-10")),
    ("u2", "y@", at("2024-06-20"), at("9999-12-31")),
    (None, "n@", at("2024-06-01"), None),
    (None, "m@", at("2024-06-01"), None),
    ("u3", "never", at("2024-06-01"), at("2024-06-01")),
    ("u3", "deleted only", None, at("2024-06-05")),
]
CURRENT = "id string, email string, effective_from timestamp"
SCHEMA = f"{CURRENT}, effective_to timestamp"
EMAILS = {
    "before": None,
    "first": "a@",
    "at the change": "b@",
    "open": "c@",
    "unknown": None,
    "no user": None,
    "no time": None,
}
BY_USER = {"facts": "visits", "reference": "users", "keys": {"user_id": "id"}, "columns": ["email"]}
AS_OF = {**BY_USER, "as_of": "event_time"}


@pytest.fixture(scope="module", autouse=True)
def views(spark: SparkSession) -> Iterator[None]:
    """Make the views of visits and of users, as SCD Type 2."""
    spark.createDataFrame(
        VISITS, "visit string, user_id string, event_time timestamp"
    ).createOrReplaceTempView("visits")
    spark.createDataFrame(USERS, SCHEMA).createOrReplaceTempView("users")
    yield
    for name in ("visits", "users", "current_users", "past_users", "other_users", "devices"):
        spark.catalog.dropTempView(name)


@pytest.fixture
def join(spark: SparkSession, render: MacroRenderer) -> Join:
    """Return the rows of the macro for its arguments."""
    return lambda **arguments: spark.sql(render("static_joiner", **arguments))


def other_users(spark: SparkSession, rows: list[Any], schema: str = SCHEMA) -> dict[str, Any]:
    """Make a view of other users and return the arguments of a join with it."""
    spark.createDataFrame(rows, schema).createOrReplaceTempView("other_users")
    return {**AS_OF, "reference": "other_users"}


def emails(rows: DataFrame) -> dict[str, str | None]:
    """Return the mail address of each visit; a visit that is there twice fails."""
    found = rows.select("visit", "email").collect()
    assert len(found) == len({row.visit for row in found})
    return {row.visit: row.email for row in found}


# --- the version at a time ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("ansi_modes")
def test_a_visit_has_the_version_of_its_time_and_each_visit_is_there_once(join: Join) -> None:
    rows = join(**AS_OF)
    assert rows.columns == ["visit", "user_id", "event_time", "email"]
    assert emails(rows) == EMAILS
    assert_rows(rows.drop("email"), VISITS)


def test_an_inner_join_keeps_the_visits_with_a_version(join: Join) -> None:
    assert emails(join(**AS_OF, join_type="inner")) == {"first": "a@", "at the change": "b@", "open": "c@"}


def test_what_between_and_the_newest_version_would_give(spark: SparkSession) -> None:
    """The controls: inclusive ends double a visit and lose the open version; rank 1 is today's version."""
    between = spark.sql(
        "select visit, email from visits join users on user_id = id and event_time between effective_from "
        "and effective_to where id = 'u1'"
    )
    assert_rows(between, [("first", "a@"), ("at the change", "a@"), ("at the change", "b@")])
    newest = spark.sql(
        "select distinct email from visits join (select *, row_number() over (partition by id order by "
        "effective_from desc) as place from users) on user_id = id and place = 1 where user_id = 'u1'"
    )
    assert_rows(newest, [("c@",)])


def test_the_guides_three_dates(spark: SparkSession, join: Join) -> None:
    plans = [("u1", "basic", at("2024-01-01"), at("2024-02-01")), ("u1", "premium", at("2024-02-01"), None)]
    dates = "(select explode(array('2023-12-01', '2024-01-05', '2024-02-05')) as day, 'u1' as user_id)"
    rows = join(**other_users(spark, plans) | {"facts": dates, "as_of": "date(day)"})
    assert_rows(
        rows.select("day", "email"),
        [("2023-12-01", None), ("2024-01-05", "basic"), ("2024-02-05", "premium")],
    )


@pytest.mark.parametrize("ends", [None, at("9999-12-31")])
def test_an_open_version_ends_never_or_in_9999(spark: SparkSession, join: Join, ends: Any) -> None:
    assert emails(join(**other_users(spark, [("u1", "a@", at("2024-06-21"), ends)])))["open"] == "a@"


def test_a_logical_date_gives_the_same_rows_after_further_versions_and_now_does_not(
    spark: SparkSession, join: Join
) -> None:
    then = {"as_of": "date'2024-06-15'"}
    now = {"as_of": "timestamp'2024-08-02'"}  # of a run that reads the clock
    before = [join(**other_users(spark, USERS) | of).collect() for of in (then, now)]
    closed = [("u1", "c@", at("2024-07-05"), at("2024-08-01")) if row[1] == "c@" else row for row in USERS]
    later = other_users(spark, [*closed, ("u1", "d@", at("2024-08-01"), None)])
    after = [join(**later | of).collect() for of in (then, now)]
    assert_rows(before[0], after[0])
    assert {row.email for row in before[0] if row.user_id == "u1"} == {"a@"}
    assert [{row.email for row in rows if row.user_id == "u1"} for rows in (before[1], after[1])] == [
        {"c@"},
        {"d@"},
    ]


def test_a_late_version_corrects_the_visits_in_its_interval_alone(spark: SparkSession, join: Join) -> None:
    late = [row for row in USERS if row[1] != "b@"]
    late += [
        ("u1", "b@", at("2024-06-21"), at("2024-07-01")), ("u1", "late@", at("2024-07-01"), at("2024-07-05")),
    ]  # fmt: skip
    days = "(select explode(sequence(date'2024-06-30', date'2024-07-06')) as day, 'u1' as user_id)"
    found = [
        {str(row.day): row.email for row in join(**arguments | {"facts": days, "as_of": "day"}).collect()}
        for arguments in (AS_OF, other_users(spark, late))
    ]
    assert {day: email for day, email in found[1].items() if email != found[0][day]} == {
        f"2024-07-0{day}": "late@" for day in range(1, 5)
    }


# --- SCD Type 4 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("history_has_the_current_row", [False, True])
def test_current_and_past_rows_give_the_same_as_one_table(
    spark: SparkSession, join: Join, history_has_the_current_row: bool
) -> None:
    current = [row for row in USERS if row[1] in ("c@", "y@", "n@")]
    past = USERS if history_has_the_current_row else [row for row in USERS if row not in current]
    spark.createDataFrame([row[:3] for row in current], CURRENT).createOrReplaceTempView("current_users")
    spark.createDataFrame(past, SCHEMA).createOrReplaceTempView("past_users")
    layout = {"reference": "current_users", "history": "past_users"}
    assert emails(join(**AS_OF | layout)) == EMAILS
    # Without the past all earlier visits lose their user.
    alone = join(
        **AS_OF | {"reference": "(select *, cast(null as timestamp) as effective_to from current_users)"}
    )
    assert {visit for visit, email in emails(alone).items() if email} == {"open"}


def test_a_current_row_whose_predecessor_is_still_open_is_refused(spark: SparkSession, join: Join) -> None:
    spark.createDataFrame([("u1", "b@", at("2024-07-01"))], CURRENT).createOrReplaceTempView("current_users")
    spark.createDataFrame([("u1", "a@", at("2024-06-01"), None)], SCHEMA).createOrReplaceTempView(
        "past_users"
    )
    with pytest.raises(PySparkException, match="several rows that match one fact"):
        join(**AS_OF | {"reference": "current_users", "history": "past_users"}).collect()


# --- a reference that would multiply or lose facts ---------------------------------------------------------


@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        ([("u1", "a@", at("2024-06-01"), at("2024-06-22")), ("u1", "b@", at("2024-06-21"), None)], "overlap"),
        ([("u1", "a@", at("2024-06-01"), None), ("u1", "b@", at("2024-06-21"), None)], "overlap"),
        ([("u1", "a@", at("2024-06-01"), None)] * 2, "overlap"),
        # The long version overlaps with one that doesn't follow it.
        (
            [
                ("u1", "a@", at("2024-06-01"), at("2024-06-10")), ("u1", "b@", at("2024-06-02"), at("2024-06-03")),
                ("u1", "c@", at("2024-06-05"), at("2024-06-06")),
            ],
            "overlap",
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("ansi_modes")
def test_versions_of_one_key_that_overlap_are_refused(
    spark: SparkSession, join: Join, faulty: list[Any], message: str
) -> None:
    for join_type in ("left", "inner"):
        rows = join(**other_users(spark, faulty), join_type=join_type)
        with pytest.raises(
            PySparkException, match=rf'match one fact, of the key \{{.*"u1".*{message}'
        ) as raised:
            rows.collect()
    assert "lakehouse_patterns: the reference of static_joiner" in str(raised.value)


@pytest.mark.usefixtures("ansi_modes")
def test_a_key_that_is_there_twice_is_refused_before_it_multiplies_facts(
    spark: SparkSession, join: Join
) -> None:
    spark.createDataFrame(
        [("phone", "1", "A"), ("phone", "2", "B"), (None, "1", "C"), (None, "1", "D")],
        "type string, version string, name string",
    ).createOrReplaceTempView("devices")
    facts = (
        "(select * from values ('a', 'phone', '1'), ('b', 'phone', '3'), ('c', null, '1') "
        "as (id, type, dev_version))"
    )
    arguments = {
        "facts": facts,
        "reference": "devices",
        "keys": {"type": "type", "dev_version": "version"},
        "columns": {"device": "name"},
    }
    assert_rows(join(**arguments).select("id", "device"), [("a", "A"), ("b", None), ("c", None)])
    by_type = arguments | {"keys": ["type"]}
    with pytest.raises(
        PySparkException, match=r'of the key \{.*"phone"\}: a key needs one row; correct the reference'
    ):
        join(**by_type).collect()
    fan_out = spark.sql(f"select id, name from {facts} as facts left join devices using (type)")
    assert fan_out.count() == 5  # three facts became five


def test_an_empty_reference_is_refused_unless_it_may_be_empty(spark: SparkSession, join: Join) -> None:
    nothing = other_users(spark, [])
    with pytest.raises(PySparkException, match="has fewer rows than min_reference_rows, 1: load it first"):
        join(**nothing).collect()
    assert emails(join(**nothing, min_reference_rows=0)) == dict.fromkeys(EMAILS)
    some = other_users(spark, USERS)
    with pytest.raises(PySparkException, match="fewer rows than min_reference_rows, 10"):
        join(**some, min_reference_rows=10).collect()
    assert emails(join(**some, min_reference_rows=9)) == EMAILS
    # dbt run --empty reads no fact.
    assert join(**nothing | {"facts": "(select * from visits where false)"}).collect() == []


# --- times, types and names --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visit_time", "validity"),
    [
        ("cast(event_time as timestamp_ntz)", "timestamp"),
        ("date_format(event_time, 'yyyy-MM-dd HH:mm')", "date"),
        ("date_format(event_time, 'yyyy-MM-dd\\'T\\'HH:mm:ss\\'Z\\'')", "timestamp_ntz"),
        ("event_time", "date"),
    ],
)
def test_times_of_any_type_are_those_of_utc_in_any_session(
    spark: SparkSession, join: Join, visit_time: str, validity: str
) -> None:
    validities = [f"cast({name} as {validity}) as {name}" for name in ("effective_from", "effective_to")]
    users = spark.table("users").selectExpr("id", "email", *validities).localCheckpoint()
    visits = (
        spark.table("visits").selectExpr("visit", "user_id", f"{visit_time} as event_time").localCheckpoint()
    )
    users.createOrReplaceTempView("other_users")
    visits.createOrReplaceTempView("visits_of_a_type")
    with setting(spark, "spark.sql.session.timeZone", "America/New_York"):
        found = emails(join(**AS_OF | {"facts": "visits_of_a_type", "reference": "other_users"}))
    spark.catalog.dropTempView("visits_of_a_type")
    assert found == EMAILS


@pytest.mark.usefixtures("ansi_modes")
def test_a_text_that_is_no_full_timestamp_finds_no_version(join: Join) -> None:
    texts = "(select explode(array('2024-06-20T00:00', '2024-06-20', '10:00', 'soon', '')) as visit, 'u1' as user_id)"
    found = emails(join(**AS_OF | {"facts": texts, "as_of": "visit"}))
    assert found == {"2024-06-20T00:00": "a@", "2024-06-20": None, "10:00": None, "soon": None, "": None}


def test_a_number_is_no_time(join: Join) -> None:
    with pytest.raises(
        PySparkException, match="as_of of static_joiner must be a timestamp, a date or a text, got int"
    ):
        join(**AS_OF | {"as_of": "20240620"}).collect()


def test_a_reference_gives_columns_of_any_type_under_new_names(spark: SparkSession, join: Join) -> None:
    attributes = {
        "map": "map('a', 1)", "array": "array(1)", "struct": "named_struct('x', 1)", "variant": "parse_json('[1]')",
        "nan": "double('NaN')", "nothing": "cast(null as int)",
    }  # fmt: skip
    rows = ", ".join(f"{value} as `of {name}`" for name, value in attributes.items())
    columns = {f"{name}, too": f"of {name}" for name in attributes}
    found = join(
        facts="(select 'k' as key, 1 as email)", reference=f"(select 'k' as `select`, {rows})",
        keys={"key": "select"}, columns=columns,
    )  # fmt: skip
    assert found.columns == ["key", "email", *columns]
    row = found.drop("variant, too").first()
    assert row is not None
    assert repr(tuple(row)) == repr(("k", 1, {"a": 1}, [1], type(row[4])(x=1), float("nan"), None))
    assert found.selectExpr("to_json(`variant, too`)").collect()[0][0] == "[1]"


def test_a_fact_without_a_match_may_get_a_value_of_its_own(spark: SparkSession, join: Join) -> None:
    facts = "(select explode(array('a', 'b', null)) as key)"
    reference = "(select 'a' as key, cast(null as string) as plan)"
    plans = {"facts": facts, "reference": reference, "keys": "key", "columns": "plan"}
    assert_rows(join(**plans), [("a", None), ("b", None), (None, None)])
    found = join(**plans, unmatched={"plan": "'unknown'"})
    assert_rows(found, [("a", None), ("b", "unknown"), (None, "unknown")])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"join_type": "full"}, "join_type must be one of left, inner, got 'full'"),
        ({"keys": []}, r"static_joiner needs keys, a list of columns or a mapping of names, got \[\]"),
        ({"columns": {}}, "static_joiner needs columns"),
        ({"as_of": None, "history": "past_users"}, "static_joiner has history, .* but no as_of"),
        ({"unmatched": "x"}, "unmatched must map new columns to SQL expressions, got x"),
        ({"unmatched": {"plan": "''"}}, "unmatched has no option 'plan'; allowed: email"),
        ({"unmatched": {"email": "''"}, "join_type": "inner"}, "an inner join keeps no such fact"),
        ({"min_reference_rows": -1}, "min_reference_rows must be a whole number from 0, got '-1'"),
        ({"min_reference_rows": True}, "min_reference_rows must be a whole number"),
        ({"broadcast_max_mb": float("nan")}, "broadcast_max_mb must be a number above 0, got 'nan'"),
        ({"broadcast_max_mb": 0}, "broadcast_max_mb must be a number above 0"),
        (
            {"broadcast_max_mb": 10},
            "needs the reference as ref.. or source.., whose size it reads, got 'users'",
        ),
    ],
)
def test_wrong_arguments_are_refused(render: MacroRenderer, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DbtRuntimeError, match=sentence):
        render("static_joiner", **AS_OF | changes)


# --- the broadcast -----------------------------------------------------------------------------------------


def plan_of(rows: DataFrame) -> str:
    return str(rows._jdf.queryExecution().executedPlan().toString())


def test_a_small_reference_is_broadcast_and_the_facts_are_not_shuffled(
    spark: SparkSession, render: MacroRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    spark.sql("create table default.joined_users using delta as select * from users")
    table = SparkRelation.create(schema="default", identifier="joined_users", type="table")
    arguments = AS_OF | {"reference": table}
    plans, found = {}, {}
    with setting(spark, "spark.sql.autoBroadcastJoinThreshold", "-1"):
        for limit in (None, 1, 0.0001):
            rows = spark.sql(render("static_joiner", **arguments, broadcast_max_mb=limit))
            plans[limit], found[limit] = plan_of(rows), emails(rows)
    spark.sql("drop table default.joined_users")
    assert found == dict.fromkeys(found, EMAILS)
    assert "BroadcastHashJoin" in plans[1]
    facts = plans[1].split("BroadcastExchange")[0]
    assert "hashpartitioning" not in facts
    assert "hashpartitioning" in plans[None].split("joined_users")[0]
    assert "SortMergeJoin" in plans[None]
    assert "Broadcast" not in plans[None]
    assert plans[0.0001].count("SortMergeJoin") == 1
    assert re.search(
        "static_joiner does not broadcast .*joined_users.*, which has .* MB by the estimate of Spark, more than the "
        "0.0001 MB",
        caplog.text,
    )


# --- in a project ------------------------------------------------------------------------------------------


def test_models_of_the_page(spark: SparkSession, make_project: Callable[..., DbtProject]) -> None:
    by_time, by_day, two_tables, check = snippets("docs/data_value.md", f"{HERE}::test_models_of_the_page")
    project = make_project(
        {
            "models/sources.yml": raw_tables("visits", "devices", "users", "current_users", "past_users"),
            "models/user_versions.sql": "select * from {{ source('raw', 'users') }}",
            "models/visits_with_context.sql": by_time,
            "models/visits_with_users_of_the_day.sql": by_day,
            "models/visits_with_past_users.sql": two_tables,
            "models/schema.yml": check,
        }
    )
    visits = [(*visit, "phone", version) for visit, version in zip(VISITS, "1212121", strict=True)]
    schema = "visit string, user_id string, event_time timestamp, dev_type string, dev_version string"
    project.source("visits", spark.createDataFrame(visits, schema))
    project.source("users", spark.createDataFrame(USERS[:5], SCHEMA))
    past = [row for row in USERS[:5] if row[1] not in ("c@", "y@")]
    project.source("past_users", spark.createDataFrame(past, SCHEMA))
    current = [row[:3] for row in USERS[:5] if row not in past]
    project.source("current_users", spark.createDataFrame(current, CURRENT))
    project.source(
        "devices",
        spark.createDataFrame([("phone", "1", "A")], "type string, version string, full_name string"),
    )
    with environment(LOGICAL_DATE="2024-06-15"):
        project.run("build")
    context = project.table("visits_with_context")
    assert emails(context) == EMAILS
    assert {row.visit: row.device for row in context.collect()} == {
        visit[0]: "A" if visit[-1] == "1" else "unknown" for visit in visits
    }
    day = emails(project.table("visits_with_users_of_the_day"))
    assert day == {visit: "a@" if user == "u1" else None for visit, user, _ in VISITS}
    assert emails(project.table("visits_with_past_users")) == EMAILS
