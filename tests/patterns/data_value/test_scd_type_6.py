"""SCD Type 6: what held, what held before and what holds today, on each version of an entity."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest
from dbt_common.exceptions import DbtRuntimeError
from pyspark.sql import DataFrame, SparkSession

from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.snippets import snippets

SNIPPETS = "tests/patterns/data_value/test_scd_type_6.py::test_the_model_of_the_page_follows_the_history"
VERSIONS = "id string, plan string, seats int, valid_from timestamp, valid_to timestamp"
PLANS = ["id", "plan_historical", "plan_previous", "plan_current"]


def day(number: int) -> dt.datetime:
    return dt.datetime(2026, 1, number)  # noqa: DTZ001 - as Spark hands timestamps back


HISTORY = [
    ("story", "basic", 1, day(1), day(3)),
    ("story", "premium", 1, day(3), day(5)),
    ("story", "basic", 1, day(5), None),
    ("new", "trial", 1, day(2), None),
    ("no plan", "trial", 1, day(2), day(3)),
    ("no plan", None, 1, day(3), None),
    ("seats", "trial", 1, day(2), day(3)),
    ("seats", "trial", 2, day(3), None),
    ("deleted", "trial", 1, day(2), day(4)),
    ("returned", "trial", 1, day(2), day(4)),
    ("returned", "basic", 1, day(6), None),
    ("deleted only", None, None, None, day(4)),
]


@pytest.fixture
def users(spark: SparkSession, render: MacroRenderer) -> DataFrame:
    """The macro's rows for HISTORY."""
    spark.createDataFrame(HISTORY, VERSIONS).createOrReplaceTempView("user_versions")
    validity = {"effective_from": "valid_from", "effective_to": "valid_to"}
    query = render(
        "scd_type_6", versions="user_versions", unique_key="id", columns=["plan", "seats"], **validity
    )
    return spark.sql(query)


def test_each_version_has_what_held_what_held_before_and_what_holds_today(users: DataFrame) -> None:
    assert_rows(
        users.where("id in ('story', 'new', 'no plan', 'seats')").select(*PLANS),
        [
            ("story", "basic", None, "basic"),
            ("story", "premium", "basic", "basic"),
            ("story", "basic", "premium", "basic"),
            ("new", "trial", None, "trial"),
            ("no plan", "trial", None, None),
            ("no plan", None, "trial", None),
            ("seats", "trial", None, "trial"),
            ("seats", "trial", "trial", "trial"),
        ],
    )


def test_the_versions_themselves_stay_as_they_are(users: DataFrame) -> None:
    assert users.columns == [
        "id", "valid_from", "valid_to",
        "plan_current", "plan_historical", "plan_previous", "seats_current", "seats_historical", "seats_previous",
    ]  # fmt: skip
    assert_rows(users.select("id", "plan_historical", "seats_historical", "valid_from", "valid_to"), HISTORY)
    assert users.where("id = 'story' and valid_to is null").count() == 1


def test_who_downgraded_is_found_without_a_join(users: DataFrame) -> None:
    found = users.where("plan_previous = 'premium' and plan_historical = 'basic'").select("id", "valid_from")
    assert_rows(found, [("story", day(5))])


def test_the_current_value_of_a_key_needs_no_filter(users: DataFrame) -> None:
    assert_rows(
        users.select("id", "plan_current", "seats_current").distinct(),
        [
            ("story", "basic", 1), ("new", "trial", 1), ("no plan", None, 1), ("seats", "trial", 2),
            ("deleted", None, None), ("returned", "basic", 1), ("deleted only", None, None),
        ],
    )  # fmt: skip


def test_nothing_holds_today_of_what_was_deleted_and_a_return_knows_what_held_before(
    users: DataFrame,
) -> None:
    assert_rows(
        users.where("id in ('deleted', 'returned', 'deleted only')").select(*PLANS),
        [
            ("deleted", "trial", None, None),
            ("returned", "trial", None, "basic"),
            ("returned", "basic", "trial", "basic"),
            ("deleted only", None, None, None),
        ],
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"unique_key": []}, "scd_type_6 needs unique_key"),
        ({"columns": []}, "scd_type_6 needs columns"),
        ({"columns": ["id"]}, "'id' is part of the key or of the validity"),
        ({"columns": "effective_to"}, "'effective_to' is part of the key or of the validity"),
    ],
)
def test_wrong_arguments_are_refused(render: MacroRenderer, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DbtRuntimeError, match=sentence):
        render(
            "scd_type_6", **{"versions": "user_versions", "unique_key": "id", "columns": "plan"} | arguments
        )


HISTORY_MODEL = """
{{ config(materialized='scd2', unique_key='id',
          meta={'lakehouse_patterns': {'scd2': {'changed_at': 'changed_at'}}}) }}
select * from {{ source('raw', 'user_changes') }}
"""


def test_the_model_of_the_page_follows_the_history(
    spark: SparkSession, make_project: Callable[..., DbtProject]
) -> None:
    model, downgrades = snippets("docs/data_value.md", SNIPPETS)
    project = make_project(
        {
            "models/sources.yml": raw_tables("user_changes"),
            "models/user_versions.sql": HISTORY_MODEL,
            "models/users_by_plan.sql": model,
            "models/downgrades.sql": downgrades,
        }
    )
    changes = [("u1", "basic", day(1)), ("u1", "premium", day(3)), ("u2", "basic", day(1))]
    schema = "id string, plan string, changed_at timestamp"
    project.source("user_changes", spark.createDataFrame(changes, schema))
    project.run("run")
    assert_rows(project.table("downgrades"), [])
    # The view takes the history's next batch without being built again; a rerun changes nothing.
    project.source("user_changes", spark.createDataFrame([("u1", "basic", day(5))], schema))
    for _ in range(2):
        project.run("run", "--select", "user_versions")
        assert_rows(
            project.table("users_by_plan").select(*PLANS),
            [
                ("u1", "basic", None, "basic"),
                ("u1", "premium", "basic", "basic"),
                ("u1", "basic", "premium", "basic"),
                ("u2", "basic", None, "basic"),
            ],
        )
        assert_rows(project.table("downgrades"), [("u1", day(5))])
