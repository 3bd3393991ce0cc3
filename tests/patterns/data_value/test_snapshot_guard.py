"""Snapshots with our strategies: what dbt's own do wrong on Spark is repaired or refused."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.support.dbt_project import DbtProject
from tests.support.rows import assert_rows
from tests.support.stories import FAILS, PASSES, DbtStories, Story

stories = DbtStories("snapshot")
TIMESTAMP, CHECK = "lakehouse_patterns.timestamp", "lakehouse_patterns.check"
# Each reads an extract of its own.
SNAPSHOTS: dict[str, dict[str, Any]] = {
    "by_time": {"strategy": TIMESTAMP, "updated_at": "`Updated_At`"},
    "by_value": {"strategy": CHECK, "check_cols": ["plan"], "unique_key": ["id", "tenant"]},
    "by_time_and_value": {"strategy": TIMESTAMP, "check_cols": ["plan"]},
    "binary_key": {"strategy": TIMESTAMP},
    "text_key": {"strategy": TIMESTAMP},
    "list_key": {"strategy": CHECK, "check_cols": ["plan"], "unique_key": ["id", "tenant"]},
    "evolving": {"strategy": TIMESTAMP, "check_cols": "all"},
    "refusing": {"strategy": TIMESTAMP},
    "twice": {"strategy": CHECK, "check_cols": ["plan"]},
    "keeps_deleted": {"strategy": TIMESTAMP, "hard_deletes": "ignore"},
    "adds_deleted": {"strategy": CHECK, "check_cols": "all", "hard_deletes": "new_record"},
    "by_clock": {"strategy": CHECK, "check_cols": "all", "updated_at": None},
    "by_nothing": {"strategy": CHECK},
    "by_absent_value": {"strategy": CHECK, "check_cols": ["plans"]},
    "odd_time": {
        "strategy": TIMESTAMP,
        "unique_key": "order id",
        "updated_at": "From",
        "check_cols": ["SELECT"],
    },
    "odd_value": {
        "strategy": CHECK,
        "unique_key": ["Order Id", "STORED"],
        "updated_at": "from",
        "check_cols": ["Select"],
    },
    "odd_all": {
        "strategy": CHECK,
        "unique_key": "concat(`Order Id`, stored)",
        "updated_at": "`from`",
        "check_cols": "all",
    },
}
# What the first run refuses: config, what its query has in place of PLAIN, and the sentence.
PLAIN = "'u1' as id, 't' as tenant, 'basic' as plan, timestamp'2026-01-01' as updated_at"
UNUSABLE: dict[str, tuple[dict[str, Any], str, str]] = {
    "own_name": (
        {},
        f"{PLAIN}, 1 as DBT_Valid_From",
        "column 'DBT_Valid_From' has the name of a column that dbt's snapshot adds: rename it in the query",
    ),
    "own_key": (
        {"unique_key": ["id", "tenant"]},
        f"{PLAIN}, 1 as DBT_UNIQUE_KEY_2",
        "column 'DBT_UNIQUE_KEY_2' has the name of a column that dbt's snapshot adds",
    ),
    "own_type": (
        {},
        f"{PLAIN}, 1 as dbt_change_type",
        "column 'dbt_change_type' has the name of a column that dbt's snapshot adds",
    ),
    "renamed": (
        {"snapshot_meta_column_names": {"dbt_valid_from": "since"}},
        f"{PLAIN}, 1 as Since",
        "column 'Since' has the name of a column that dbt's snapshot adds",
    ),
    "number_time": (
        {"updated_at": "plan"},
        PLAIN.replace("'basic'", "1767225600L"),
        "updated_at of a snapshot must be a timestamp or a date, 'plan' is a bigint",
    ),
    "computed_time": (
        {"updated_at": "to_timestamp(updated_at)"},
        PLAIN,
        "updated_at of a snapshot must be a column that its query selects or computes, got "
        "'to_timestamp(updated_at)'; the query has: id, tenant, plan, updated_at",
    ),
    "lost_key": (
        {"unique_key": ["id", "idd"]},
        PLAIN,
        "unique_key of a snapshot must name columns of its query, got 'idd'; the query has: id, tenant",
    ),
    "map_key": (
        {"unique_key": "plan"},
        PLAIN.replace("'basic'", "map('of', 1)"),
        "unique_key may not be 'plan' of type map<string,int>, which Spark neither compares nor sorts",
    ),
    "map_among_all": (
        {"strategy": CHECK, "check_cols": "all"},
        PLAIN.replace("'basic'", "map('of', 1)"),
        "check_cols of a snapshot may not be 'plan' of type map<string,int>",
    ),
    "variant_by_name": (
        {"check_cols": ["id", "PLAN"]},
        PLAIN.replace("'basic'", "parse_json('1')"),
        "check_cols of a snapshot may not be 'plan' of type variant",
    ),
}
# Spaces, reserved words, and `stored`, which is an alias of the guard's own.
ODD_EXTRACT = "`Order Id` string, stored string, `select` string, `from` timestamp"
MAPPED = {"delta.columnMapping.mode": "name"}  # Delta needs it for names with spaces
EXTRACT = "id string, tenant string, plan string, updated_at timestamp"


def day(number: int) -> dt.datetime:
    return dt.datetime(2026, 1, number)  # noqa: DTZ001 - as Spark hands timestamps back


def extract(project: DbtProject, name: str, *rows: tuple[str | None, str | None, dt.datetime | None]) -> None:
    """Replace the extract of a snapshot by rows of a key, a plan and a time; the key is `id` or `id/tenant`."""
    values = [
        (*f"{key}/".split("/")[:2], plan, time) if key else (None, "", plan, time) for key, plan, time in rows
    ]
    project.source(f"{name}_extract", project.spark.createDataFrame(values, EXTRACT))


def versions(project: DbtProject, name: str) -> list[tuple[Any, ...]]:
    """Return key, plan and validity of all versions; a run's time is None, and "open" is the end of an open version.

    No version may end before it begins, and none may begin before the one before it ends.
    """
    rows = sorted(project.table(name).collect(), key=lambda row: (row.id, row.tenant, row.dbt_valid_from))
    for row, following in itertools.zip_longest(rows, rows[1:]):
        assert row.dbt_valid_to is None or row.dbt_valid_from < row.dbt_valid_to, row
        if following and row[:2] == following[:2]:
            assert row.dbt_valid_to is not None, row
            assert row.dbt_valid_to <= following.dbt_valid_from, (row, following)
    return [(row.id, row.plan, _shown(row.dbt_valid_from), _shown(row.dbt_valid_to)) for row in rows]


def _shown(time: dt.datetime | None) -> dt.datetime | str | None:
    if time is None:
        return "open"
    return time if time < day(28) else None


@stories.about("by_time")
def test_a_deleted_row_that_returns_has_a_version_from_the_run_on(project: DbtProject) -> Story:
    """With the time that it had, as u1, or with a newer one before its deletion was seen, as u2."""
    first = [("u1", "basic", day(1)), ("u2", "basic", day(1)), ("u3", "basic", day(1))]
    extract(project, "by_time", *first)
    yield PASSES
    extract(project, "by_time", ("u3", "trial", day(3)))
    yield PASSES
    extract(project, "by_time", ("u1", "basic", day(1)), ("u2", "premium", day(2)), ("u3", "trial", day(3)))
    yield PASSES
    returned = [
        ("u1", "basic", day(1), None), ("u1", "basic", None, "open"),
        ("u2", "basic", day(1), None), ("u2", "premium", None, "open"),
        ("u3", "basic", day(1), day(3)), ("u3", "trial", day(3), "open"),
    ]  # fmt: skip
    assert_rows(versions(project, "by_time"), returned)

    project.run("snapshot", "--empty", "--select", "by_time")
    assert_rows(versions(project, "by_time"), returned)
    later = '{"start": "2026-02-01", "end": "2026-02-02"}'
    assert "--sample reads a part of each input, which a snapshot would publish" in project.fails(
        "build", "--sample", later, "--select", "by_time"
    )
    assert_rows(versions(project, "by_time"), returned)

    # A change after the return has a time before it.
    extract(project, "by_time", ("u1", "trial", day(2)), ("u2", "premium", day(2)), ("u3", "trial", day(3)))
    yield PASSES
    assert_rows(
        versions(project, "by_time"),
        [*returned[:1], ("u1", "basic", None, None), ("u1", "trial", None, "open"), *returned[2:]],
    )


@stories.about("by_value")
def test_keys_of_two_columns_and_values_that_change_under_an_old_time(project: DbtProject) -> Story:
    """Joined by a bar, as dbt joins them, the first two keys would be one."""
    rest = [("a/b|c", "basic", day(1)), ("u3/1", "basic", day(1))]
    extract(project, "by_value", ("a|b/c", "basic", day(1)), *rest)
    yield PASSES
    extract(project, "by_value", ("a|b/c", "premium", day(1)), *rest[:1])
    yield PASSES
    extract(project, "by_value", ("a|b/c", "premium", day(1)), *rest[:1])
    yield PASSES
    assert_rows(
        versions(project, "by_value"),
        [
            ("a|b", "basic", day(1), None), ("a|b", "premium", None, "open"),
            ("a", "basic", day(1), "open"), ("u3", "basic", day(1), None),
        ],
    )  # fmt: skip
    assert project.table("by_value").columns == [
        "id", "tenant", "plan", "updated_at", "dbt_scd_id", "dbt_updated_at", "dbt_valid_from", "dbt_valid_to",
    ]  # fmt: skip


@stories.about("by_time_and_value")
def test_with_check_cols_a_newer_time_alone_opens_no_version(project: DbtProject) -> Story:
    extract(project, "by_time_and_value", ("u1", "basic", day(1)), ("u2", None, day(1)))
    yield PASSES
    extract(project, "by_time_and_value", ("u1", "basic", day(6)), ("u2", "trial", day(6)))
    yield PASSES
    assert_rows(
        versions(project, "by_time_and_value"),
        [("u1", "basic", day(1), "open"), ("u2", None, day(1), day(6)), ("u2", "trial", day(6), "open")],
    )


@stories.about("binary_key", "text_key", "list_key")
def test_keys_whose_texts_are_equal_are_two_keys(project: DbtProject) -> Story:
    """X'FF' and X'FE' are no UTF-8, also as texts; ['a, b'] and ['a', 'b'] are written alike. One of each two changes.

    The times of the lists have no time zone.
    """
    keys = {
        "binary_key": ("X'FF'", "X'FE'"),
        "text_key": ("cast(X'FF' as string)", "cast(X'FE' as string)"),
        "list_key": ("array('a, b')", "array('a', 'b')"),
    }
    for plan, number in (("basic", 1), ("trial", 3)):
        for name, (first, second) in keys.items():
            time = "timestamp_ntz" if name == "list_key" else "timestamp"
            rows = (
                f"({first}, 't', '{plan}', {time}'2026-01-0{number}'), "
                f"({second}, 't', 'basic', {time}'2026-01-01')"
            )
            project.source(
                f"{name}_extract",
                project.spark.sql(f"select * from values {rows} as (id, tenant, plan, updated_at)"),
            )
        yield PASSES
    for name, (first, second) in keys.items():
        assert_rows(
            [
                (_shown(row.dbt_valid_from), _shown(row.dbt_valid_to), row.plan, row.is_first, row.is_second)
                for row in project.table(name)
                .selectExpr("*", f"id = {first} as is_first", f"id = {second} as is_second")
                .collect()
            ],
            [
                (day(1), day(3), "basic", True, False), (day(3), "open", "trial", True, False),
                (day(1), "open", "basic", False, True),
            ],
        )  # fmt: skip


@stories.about("refusing")
def test_rows_without_key_or_time_and_keys_that_come_twice_are_refused(project: DbtProject) -> Story:
    extract(project, "refusing", ("u1", "basic", day(1)))
    yield PASSES
    incomplete = "a row of the snapshot has NULL in its unique_key or updated_at"
    extract(project, "refusing", (None, "basic", day(2)), ("u1", "basic", day(1)))
    assert incomplete in (yield FAILS)
    extract(project, "refusing", ("u1", "premium", None))
    assert incomplete in (yield FAILS)
    extract(project, "refusing", ("u1", "premium", day(2)), ("u1", "trial", day(3)))
    assert "the query of the snapshot gives a key more than once: u1; keep one row of each key" in (
        yield FAILS
    )
    assert_rows(versions(project, "refusing"), [("u1", "basic", day(1), "open")])


@stories.about("twice")
def test_a_key_that_comes_twice_is_refused_by_the_first_run_too(project: DbtProject) -> Story:
    extract(project, "twice", ("u1", "basic", day(1)), ("u1", "basic", day(1)))
    refused = "the query of the snapshot gives a key more than once: u1; keep one row of each key"
    first_lines = "\n".join((yield FAILS).splitlines()[:3])
    assert refused in first_lines, "no trace stands before the sentence"
    assert not project.spark.catalog.tableExists(f"{project.schema}.twice")


@stories.about("odd_time", "odd_value", "odd_all")
def test_names_are_quoted_and_found_in_any_case(project: DbtProject) -> Story:
    """As a column's name, in a list of names, and in an expression, which the user quotes."""
    names = ("odd_time", "odd_value", "odd_all")
    for rows in (
        [("u1", "", "basic", day(1)), ("u2", "", "basic", day(1)), ("u3", "", "basic", day(1))],
        [("u1", "", "trial", day(3)), ("u2", "", "basic", day(1))],
    ):
        for name in names:
            table = f"{project.schema}.{name}_extract"
            project.spark.sql(
                f"create table if not exists {table} ({ODD_EXTRACT}) using delta "
                "tblproperties ('delta.columnMapping.mode' = 'name')"
            )
            project.spark.createDataFrame(rows, EXTRACT).write.insertInto(table, overwrite=True)
        yield PASSES
    for name in names:
        stored = project.table(name)
        assert stored.columns[:4] == ["Order Id", "stored", "select", "from"]
        assert_rows(
            [
                (row["Order Id"], row["select"], _shown(row["dbt_valid_from"]), _shown(row["dbt_valid_to"]))
                for row in stored.collect()
            ],
            [
                ("u1", "basic", day(1), day(3)), ("u1", "trial", day(3), "open"),
                ("u2", "basic", day(1), "open"), ("u3", "basic", day(1), None),
            ],
        )  # fmt: skip


@stories.about("evolving")
def test_columns_come_and_go(project: DbtProject) -> Story:
    """A column that is lost gets no value in new versions: the table has a default here. A struct comes as a whole."""
    table = f"{project.schema}.evolving"
    wide = ", ".join(f"{number} as field_{number}" for number in range(30))

    def given(query: str) -> None:
        project.source("evolving_extract", project.spark.sql(query))

    given(f"select {PLAIN}, 7 as old, 'a' as src")
    yield PASSES
    for change in (
        "set tblproperties ('delta.feature.allowColumnDefaults' = 'supported')",
        "alter column src set default 'web'",
    ):
        project.spark.sql(f"alter table {table} {change}")
    given(f"select {PLAIN.replace('-01-01', '-01-03')}, struct({wide}) as wide")
    yield PASSES
    yield PASSES
    assert_rows(
        project.table("evolving").selectExpr(
            "id", "old", "src", "wide.field_29", "dbt_valid_from", "dbt_valid_to"
        ),
        [("u1", 7, "a", None, day(1), day(3)), ("u1", None, "web", 29, day(3), None)],
    )


@stories.about(*UNUSABLE)
def test_what_a_later_run_can_not_take_is_refused_by_the_first(project: DbtProject) -> Story:
    for name, (_, columns, _) in UNUSABLE.items():
        project.spark.sql(f"create view {project.schema}.{name}_extract as select {columns}")
    errors = yield FAILS
    for name, (_, _, sentence) in UNUSABLE.items():
        assert f"{name}: error" in errors
        assert sentence in errors
        assert not project.spark.catalog.tableExists(f"{project.schema}.{name}")


@stories.about("keeps_deleted", "adds_deleted", "by_clock", "by_nothing", "by_absent_value")
def test_settings_that_go_wrong_silently_are_refused(project: DbtProject) -> Story:
    for name in ("keeps_deleted", "adds_deleted", "by_clock", "by_nothing", "by_absent_value"):
        extract(project, name, ("u1", "basic", day(1)))
    errors = yield FAILS
    for sentence in (
        "keeps_deleted: error",
        "hard_deletes must be 'invalidate', got 'ignore': a key that is gone from the extract",
        "adds_deleted: error",
        "hard_deletes must be 'invalidate', got 'new_record': dbt-spark writes its delete records",
        "by_clock: error",
        "a snapshot needs updated_at, the source's time of the change",
        "by_nothing: error",
        "strategy lakehouse_patterns.check needs check_cols",
        "check_cols of a snapshot must be 'all' or columns of its query, got 'plans'; the query has: id, tenant",
    ):
        assert sentence in errors


@pytest.fixture(scope="module")
def project(make_project: Callable[..., DbtProject]) -> DbtProject:
    """Return a project with all these snapshots."""
    configs = SNAPSHOTS | {name: {"strategy": TIMESTAMP} | config for name, (config, *_) in UNUSABLE.items()}
    tables = [{"name": f"{name}_extract", "config": {"event_time": "updated_at"}} for name in configs]
    base = {"unique_key": "id", "hard_deletes": "invalidate", "updated_at": "updated_at"}
    snapshots = [
        {
            "name": name,
            "relation": f"source('raw', '{name}_extract')",
            "config": base | config | ({"tblproperties": MAPPED} if name.startswith("odd") else {}),
        }
        for name, config in configs.items()
    ]
    sources = [{"name": "raw", "schema": "{{ target.schema }}", "tables": tables}]
    return make_project(
        {
            "models/sources.yml": yaml.safe_dump({"sources": sources}),
            "snapshots/snapshots.yml": yaml.safe_dump({"snapshots": snapshots}),
        }
    )
