"""SCD Type 1: the page's model, a merge that keeps each entity's latest state alone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import pytest
from pyspark.sql import Row, SparkSession

from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.rows import assert_rows
from tests.support.snippets import snippet

SNIPPET = (
    "tests/patterns/data_value/test_scd_type_1.py::test_a_new_value_overwrites_and_the_surrogate_key_stays"
)
CHANGES = "user_id string, email string, phone string, address string, updated_at timestamp"


def day(number: int) -> dt.datetime:
    return dt.datetime(2026, 1, number)  # noqa: DTZ001 - as Spark hands timestamps back


FIRST = [
    ("moves", "old@x", None, "old street", day(2)),
    ("blank", "known@x", "1", "street", day(2)),
    ("twice", "1st@x", None, None, day(1)),
    ("twice", "2nd@x", None, None, day(2)),
]
SECOND = [
    ("moves", "new@x", None, "new street", day(4)),
    ("blank", " ", None, None, day(4)),
    ("twice", "stale@x", "2", "stale", day(1)),
    ("unknown", "first@x", None, None, day(3)),
    ("unknown", "last@x", None, None, day(4)),
]


class Lifetime:
    """The table's rows and its number of commits after the first batch, the second, and the second again."""

    def __init__(self, spark: SparkSession, project: DbtProject) -> None:
        self.rows: list[list[Row]] = []
        self.commits: list[int] = []
        for batch in (FIRST, SECOND, SECOND):
            project.source("user_changes", spark.createDataFrame(batch, CHANGES))
            project.run("run")
            self.rows.append(project.table("users").collect())
            self.commits.append(len(project.history("users")))

    def one_row(self, user_id: str, *, after: int) -> Row:
        """Return the one row of a user after that many batches."""
        (row,) = (row for row in self.rows[after - 1] if row.user_id == user_id)
        return row


@pytest.fixture(scope="module")
def lifetime(spark: SparkSession, make_project: Callable[..., DbtProject]) -> Lifetime:
    model = snippet("docs/data_value.md", SNIPPET)
    return Lifetime(
        spark, make_project({"models/sources.yml": raw_tables("user_changes"), "models/users.sql": model})
    )


def test_a_new_value_overwrites_and_the_surrogate_key_stays(lifetime: Lifetime) -> None:
    before, after = lifetime.one_row("moves", after=1), lifetime.one_row("moves", after=2)
    assert (before.email, before.address) == ("old@x", "old street")
    assert (after.email, after.address, after.updated_at) == ("new@x", "new street", day(4))
    assert after.user_key == before.user_key
    assert len({row.user_key for row in lifetime.rows[1]}) == 4


def test_each_entity_is_one_row_with_its_newest_state(lifetime: Lifetime) -> None:
    assert_rows(
        [(row.user_id, row.email, row.phone, row.address, row.updated_at) for row in lifetime.rows[1]],
        [
            ("moves", "new@x", None, "new street", day(4)),
            ("blank", "known@x", "1", None, day(4)),
            ("twice", "2nd@x", None, None, day(2)),
            ("unknown", "last@x", None, None, day(4)),
        ],
    )


def test_the_same_batch_again_commits_nothing(lifetime: Lifetime) -> None:
    assert_rows(lifetime.rows[2], lifetime.rows[1])
    assert lifetime.commits == [1, 2, 2]


def test_a_stale_update_is_ignored(lifetime: Lifetime) -> None:
    assert lifetime.one_row("twice", after=2) == lifetime.one_row("twice", after=1)


def test_of_two_updates_in_a_batch_the_newest_counts(lifetime: Lifetime) -> None:
    assert lifetime.one_row("twice", after=1).email == "2nd@x"
    assert lifetime.one_row("unknown", after=2).email == "last@x"


def test_a_blank_value_erases_only_where_that_is_meant(lifetime: Lifetime) -> None:
    blank = lifetime.one_row("blank", after=2)
    assert (blank.email, blank.phone) == ("known@x", "1"), "under keep_on_null"
    assert blank.address is None, "not under it"


def test_an_unknown_entity_is_inserted_once(lifetime: Lifetime) -> None:
    assert "unknown" not in [row.user_id for row in lifetime.rows[0]]
    assert lifetime.one_row("unknown", after=2) == lifetime.one_row("unknown", after=3)
