"""SCD Type 2: the `scd2` materialization for change feeds, guarded snapshots, and the invariants' test."""

from __future__ import annotations

import datetime as dt
import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from dbt_common.exceptions import DbtRuntimeError
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tests.support.dbt_project import REPOSITORY, DbtProject
from tests.support.killer import TableState, run_and_kill
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.session import setting
from tests.support.snippets import snippets
from tests.support.stories import FAILS, PASSES, DbtStories, Story
from tests.support.waiting import at_once

PAGE_TEST = (
    "tests/patterns/data_value/test_scd_type_2.py::test_the_model_of_the_page_keeps_the_history_of_each_story"
)
stories = DbtStories("build")  # models and snapshots


def day(number: int) -> dt.datetime:
    return dt.datetime(2026, 1, number)  # noqa: DTZ001 - as Spark hands timestamps back


# ----------------------------------------------------------------------------
# The history as a function of the changes, against plain Python
# ----------------------------------------------------------------------------

# `position` and `starts_at` are names that helper columns of the SQL could have.
HISTORY = {
    "key": {"user_id": "string", "tenant": "int"},
    "tracked": {"plan": "string", "position": "int"},
    "untracked": {"starts_at": "bigint"},
    "absent": [],
    "changed_at": "changed_at",
    "changed_at_type": "timestamp",
    "sequence": "sequence",
    "sequence_type": "bigint",
    "is_deleted": "is_deleted",
    "incomplete": {
        "relation": "user_versions",
        "types": dict.fromkeys(
            ["user_id", "tenant", "plan", "position", "starts_at", "changed_at", "sequence", "is_deleted"],
            "any",
        ),
        "partitions": [],
        "key": ["user_id", "tenant"],
        "nullable_key": [],
        "sequence": ["changed_at"],
        "is_deleted": "is_deleted",
        "on_null_key": "fail",
    },
}
FEED = (
    "user_id string, tenant int, plan string, position int, starts_at bigint, "
    "changed_at timestamp, sequence bigint, is_deleted boolean"
)


def random_feed(seed: int, keys: int, changes_a_key: int) -> list[tuple[Any, ...]]:
    """Changes on few times and few values: ties, repetitions, reverts and deletes are the rule."""
    pick = random.Random(seed)
    return [
        (
            f"u{key}",
            key % 2,
            pick.choice(["basic", "premium", None]),
            pick.choice([1, None]),
            pick.randrange(5),
            day(1 + pick.randrange(changes_a_key)),
            pick.choice([1, 2, None]),
            pick.random() < 0.3,
        )
        for key in range(keys)
        for _ in range(changes_a_key)
    ]


def expected_versions(feed: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The history of each key, walked day by day in plain Python."""
    rows: list[tuple[Any, ...]] = []
    for key in {change[:2] for change in feed}:
        own = [change for change in feed if change[:2] == key]
        history: list[dict[str, Any]] = []
        for today in sorted({change[5] for change in own}):
            _, _, plan, position, starts_at, _, _, is_deleted = max(
                (change for change in own if change[5] == today), key=_precedence
            )
            alive = history[-1] if history and history[-1]["end"] is None else None
            if is_deleted and alive:
                alive |= {"end": today, "deleted": True}
            elif is_deleted and not history:
                history.append(
                    {"state": (None, None), "starts_at": None, "start": None, "end": today, "deleted": True}
                )
            elif not is_deleted and alive and alive["state"] == (plan, position):
                alive["starts_at"] = starts_at
            elif not is_deleted:
                if alive:
                    alive["end"] = today
                history.append(
                    {
                        "state": (plan, position),
                        "starts_at": starts_at,
                        "start": today,
                        "end": None,
                        "deleted": False,
                    }
                )
        rows += [
            (*key, *v["state"], v["starts_at"], v["start"], v["end"], v["end"] is None, v["deleted"])
            for v in history
        ]
    return rows


def _precedence(change: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sequence, then deletions, then attributes; NULL comes first."""
    _, _, plan, position, starts_at, _, sequence, is_deleted = change
    attributes = (None, None) if is_deleted else (plan, position)
    return tuple((v is not None, v) for v in (sequence, is_deleted, *attributes, starts_at))


def merge(spark: SparkSession, render: MacroRenderer, path: str, batch: list[tuple[Any, ...]]) -> None:
    spark.createDataFrame(batch, FEED).createOrReplaceTempView("batch_of_changes")
    spark.sql(render("_scd2_merge", history=HISTORY, batch="batch_of_changes", target=f"delta.`{path}`"))


def create(spark: SparkSession, render: MacroRenderer, path: str, feed: list[tuple[Any, ...]]) -> None:
    spark.createDataFrame(feed, FEED).createOrReplaceTempView("whole_feed")
    spark.sql(render("_scd2_rows", history=HISTORY, batch="whole_feed")).write.format("delta").save(path)


def read(spark: SparkSession, path: str) -> DataFrame:
    return spark.read.format("delta").load(path)


def version(spark: SparkSession, path: str) -> int:
    return spark.sql(f"describe history delta.`{path}` limit 1").collect()[0].version


def test_any_split_and_order_of_the_changes_gives_one_history(
    spark: SparkSession, render: MacroRenderer, tmp_path: Path
) -> None:
    """With the whole feed in Spark's own ANSI mode, and its batches in dbt-spark's."""
    feed = random_feed(1, keys=160, changes_a_key=6)
    create(spark, render, str(tmp_path / "whole"), feed)
    assert_rows(read(spark, str(tmp_path / "whole")).drop("changes"), expected_versions(feed))

    random.Random(1).shuffle(feed)
    with setting(spark, "spark.sql.ansi.enabled", "false"):
        create(spark, render, str(tmp_path / "split"), feed[:400])
        for batch in (feed[300:600], feed[600:], feed[200:500]):  # overlapping, and changes that are known
            merge(spark, render, str(tmp_path / "split"), batch)
    assert_rows(read(spark, str(tmp_path / "split")), read(spark, str(tmp_path / "whole")))


def test_a_batch_that_is_known_empty_or_refused_commits_nothing(
    spark: SparkSession, render: MacroRenderer, tmp_path: Path
) -> None:
    feed, path = random_feed(3, keys=20, changes_a_key=4), str(tmp_path / "t")
    good = ("new", 1, "basic", 1, 9, day(1), 1, False)
    create(spark, render, path, feed)
    merge(spark, render, path, feed[10:60])
    merge(spark, render, path, [])
    with pytest.raises(Exception, match="the batch of user_versions has a change with NULL in tenant"):
        merge(spark, render, path, [good, NULL_KEY])
    assert version(spark, path) == 0
    merge(spark, render, path, [good])
    assert version(spark, path) == 1
    assert read(spark, path).where("user_id = 'new'").count() == 1


@pytest.mark.kill
def test_a_killed_merge_leaves_the_old_table_and_its_rerun_the_new_one(
    spark: SparkSession, render: MacroRenderer, tmp_path: Path
) -> None:
    feed, path, batch = random_feed(5, keys=40, changes_a_key=5), str(tmp_path / "t"), str(tmp_path / "batch")
    create(spark, render, path, feed[:100])
    before = [tuple(row) for row in read(spark, path).collect()]
    spark.createDataFrame(feed[100:], FEED).write.parquet(batch)
    statement = tmp_path / "merge.sql"
    statement.write_text(
        render("_scd2_merge", history=HISTORY, batch=f"parquet.`{batch}`", target=f"delta.`{path}`")
    )
    state = run_and_kill(
        [
            sys.executable,
            "-m",
            "tests.patterns.data_value.run_sql",
            str(statement),
            str(tmp_path / "session"),
        ],
        path,
        TableState.DATA_WITHOUT_LOG,
        env={"PYTHONPATH": str(REPOSITORY)},
    )
    assert state is TableState.DATA_WITHOUT_LOG
    assert_rows(read(spark, path), before)
    spark.sql(statement.read_text())
    assert_rows(read(spark, path).drop("changes"), expected_versions(feed))


def test_two_batches_at_once_never_break_a_history(
    spark: SparkSession, render: MacroRenderer, tmp_path: Path
) -> None:
    """Both add the first change of a key: without Delta's conflict both would leave an open version."""
    path, feed = str(tmp_path / "t"), []
    create(spark, render, path, [])
    statement = render("_scd2_merge", history=HISTORY, batch="one_of_two", target=f"delta.`{path}`")

    def session_with(batch: list[tuple[Any, ...]]) -> SparkSession:
        session = spark.newSession()
        session.createDataFrame(batch, FEED).createOrReplaceTempView("one_of_two")
        return session

    def error_of(session: SparkSession) -> str:
        try:
            session.sql(statement)
        except (PySparkException, Py4JJavaError) as error:
            return str(error)
        return ""

    for attempt in range(5):
        key = (f"u{attempt}", 1)
        batches = [[(*key, "basic", 1, 1, day(1), 1, False)], [(*key, "trial", 1, 1, day(5), 1, False)]]
        errors = at_once(*(partial(error_of, session_with(batch)) for batch in batches))
        refused = [batch for batch, error in zip(batches, errors, strict=True) if error]
        assert all("DELTA_CONCURRENT" in error for error in errors if error)
        for batch in refused:
            merge(spark, render, path, batch)
        feed += batches[0] + batches[1]
        assert_rows(read(spark, path).drop("changes"), expected_versions(feed))
        if refused:
            return
    pytest.fail("no conflict in five attempts: the test proves nothing")


NULL_KEY = ("u1", None, "basic", 1, 1, day(1), 1, False)
NO_TIME = ("u1", 1, "basic", 1, 1, None, 1, False)


def test_a_change_without_key_or_time_is_refused(spark: SparkSession, render: MacroRenderer) -> None:
    for change, column in ((NULL_KEY, "tenant"), (NO_TIME, "changed_at")):
        spark.createDataFrame([change], FEED).createOrReplaceTempView("bad_change")
        sentence = f"the batch of user_versions has a change with NULL in {column}; correct the source, or quarantine"
        with pytest.raises(Exception, match=sentence):
            spark.sql(render("_scd2_rows", history=HISTORY, batch="bad_change")).collect()


# ----------------------------------------------------------------------------
# The materialization, with the page's own model
# ----------------------------------------------------------------------------

USER_CHANGES = (
    "id string, op string, login string, plan string, load_id int, changed_at timestamp, sequence int"
)
Change = tuple[str, int, str | None, int]  # op, day, plan, sequence
Version = tuple[
    str | None, int | None, int | None, bool, bool
]  # plan, from, to, is_current, closed_by_delete


def put(on: int, plan: str | None, sequence: int = 0) -> Change:
    return ("update", on, plan, sequence)


def delete(on: int) -> Change:
    return ("delete", on, None, 0)


# What happens to one user in two batches, and the versions that it leaves.
STORIES: dict[str, tuple[list[Change], list[Change], list[Version]]] = {
    "new user": ([], [put(1, "basic")], [("basic", 1, None, True, False)]),
    "change": (
        [put(1, "basic")],
        [put(5, "premium")],
        [("basic", 1, 5, False, False), ("premium", 5, None, True, False)],
    ),
    "unchanged": ([put(1, "basic")], [put(5, "basic")], [("basic", 1, None, True, False)]),
    "same change twice": (
        [put(1, "basic"), put(5, "premium")],
        [put(5, "premium")],
        [("basic", 1, 5, False, False), ("premium", 5, None, True, False)],
    ),
    "null to value": (
        [put(1, None)],
        [put(5, "basic")],
        [(None, 1, 5, False, False), ("basic", 5, None, True, False)],
    ),
    "value to null": (
        [put(1, "basic")],
        [put(5, None)],
        [("basic", 1, 5, False, False), (None, 5, None, True, False)],
    ),
    "two in a batch": (
        [put(1, "basic")],
        [put(5, "trial"), put(3, "premium")],
        [("basic", 1, 3, False, False), ("premium", 3, 5, False, False), ("trial", 5, None, True, False)],
    ),
    "reverted": (
        [put(1, "basic"), put(3, "premium")],
        [put(5, "basic")],
        [("basic", 1, 3, False, False), ("premium", 3, 5, False, False), ("basic", 5, None, True, False)],
    ),
    "late in the middle": (
        [put(1, "basic"), put(9, "trial")],
        [put(5, "premium")],
        [("basic", 1, 5, False, False), ("premium", 5, 9, False, False), ("trial", 9, None, True, False)],
    ),
    "late before all": (
        [put(5, "premium")],
        [put(1, "basic")],
        [("basic", 1, 5, False, False), ("premium", 5, None, True, False)],
    ),
    "late between equal ones": (
        [put(1, "basic"), put(5, "basic")],
        [put(3, "premium")],
        [("basic", 1, 3, False, False), ("premium", 3, 5, False, False), ("basic", 5, None, True, False)],
    ),
    "late start of a version": (
        [put(1, "basic"), put(5, "premium")],
        [put(3, "premium")],
        [("basic", 1, 3, False, False), ("premium", 3, None, True, False)],
    ),
    "deleted": ([put(1, "basic")], [delete(5)], [("basic", 1, 5, False, True)]),
    "returned": (
        [put(1, "basic"), delete(5)],
        [put(9, "basic")],
        [("basic", 1, 5, False, True), ("basic", 9, None, True, False)],
    ),
    "deleted before it was created": ([delete(5)], [put(1, "basic")], [("basic", 1, 5, False, True)]),
    "deleted only": ([], [delete(5)], [(None, None, 5, False, True)]),
    "late between deletions": (
        [put(1, "basic"), delete(3), delete(7)],
        [put(5, "trial")],
        [("basic", 1, 3, False, True), ("trial", 5, 7, False, True)],
    ),
    "equal times": (
        [put(1, "basic")],
        [put(5, "trial", 2), put(5, "premium", 1)],
        [("basic", 1, 5, False, False), ("trial", 5, None, True, False)],
    ),
    "equal times, stale one later": (
        [put(1, "basic"), put(5, "trial", 2)],
        [put(5, "premium", 1)],
        [("basic", 1, 5, False, False), ("trial", 5, None, True, False)],
    ),
}


def story_rows(load_id: int) -> list[tuple[Any, ...]]:
    return [
        (name, op, "login", plan, load_id, day(on), sequence)
        for name, (*batches, _) in STORIES.items()
        for op, on, plan, sequence in batches[load_id - 1]
    ]


@stories.about("user_versions", "visits_with_plan", "user_snapshots")
def test_the_model_of_the_page_keeps_the_history_of_each_story(project: DbtProject) -> Story:
    def arrive(changes: list[tuple[Any, ...]]) -> None:
        project.source("user_changes", project.spark.createDataFrame(changes, USER_CHANGES))

    def extract(*users: tuple[Any, ...]) -> None:
        schema = "id string, plan string, updated_at timestamp"
        project.source("users", project.spark.createDataFrame(users, schema))

    project.source("visits", project.spark.createDataFrame(
        [(1, "change", day(4)), (2, "change", day(5)), (3, "unknown", day(5)), (4, "returned", day(7))],
        "visit_id int, user_id string, event_time timestamp",
    ))  # fmt: skip
    arrive(story_rows(1))
    extract(("u1", "basic", day(1)), ("u2", "basic", day(1)))
    yield PASSES
    versions = project.table("user_versions")
    assert versions.columns == [
        "id", "login", "plan", "load_id",
        "effective_from", "effective_to", "is_current", "closed_by_delete", "changes",
    ]  # fmt: skip

    arrive(story_rows(2))  # only these
    extract(("u1", "premium", day(3)))
    yield PASSES
    versions = project.table("user_versions")
    after_two_batches = versions.collect()
    assert_rows(
        versions.select("id", "plan", "effective_from", "effective_to", "is_current", "closed_by_delete"),
        [
            (name, plan, start and day(start), end and day(end), *flags)
            for name, (*_, expected) in STORIES.items()
            for plan, start, end, *flags in expected
        ],
    )
    assert_rows(  # an untracked column follows the last change of the version
        versions.where("id in ('unchanged', 'change')").select("id", "load_id"),
        [("unchanged", 2), ("change", 1), ("change", 2)],
    )
    assert_rows(project.table("visits_with_plan"), [(1, "basic"), (2, "premium"), (3, None), (4, None)])
    assert_rows(
        project.table("user_snapshots").select("id", "plan", "dbt_valid_from"),
        [("u1", "basic", day(1)), ("u1", "premium", day(3)), ("u2", "basic", day(1))],
    )
    operations = [commit["operation"] for commit in project.history("user_versions")]
    assert (len(operations), operations[0]) == (2, "MERGE"), "a batch is one commit"

    yield PASSES
    assert len(project.history("user_versions")) == 2, "a rerun commits nothing"

    arrive(story_rows(1) + story_rows(2))
    project.run("run", "--select", "user_versions", "--full-refresh")
    assert_rows(project.table("user_versions"), after_two_batches)


# ----------------------------------------------------------------------------
# Configurations and schemas
# ----------------------------------------------------------------------------


def scd2_model(
    source: str, *, select: str = "*", options: str = "'changed_at': 'at'", config: str = ""
) -> str:
    return (
        "{{ config(materialized='scd2', unique_key='id', "
        f"meta={{'lakehouse_patterns': {{'scd2': {{{options}}}}}}}{', ' + config if config else ''}) }}}}\n"
        f"select {select} from {{{{ source('raw', '{source}') }}}}"
    )


# What the model has in place of a sound configuration, and the sentence that refuses it.
REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "not_delta": (
        {"config": "file_format='parquet'"},
        "materialized='scd2' needs file_format='delta', got 'parquet'",
    ),
    "no_time": ({"options": ""}, "meta.lakehouse_patterns.scd2 needs changed_at"),
    "no_column": (
        {"options": "'changed_at': 'at', 'sequence': 'lsn'"},
        "the model has no column 'lsn'; it has: id, plan, at, n",
    ),
    "text_time": (
        {"options": "'changed_at': 'plan'"},
        "changed_at must be a timestamp or a date, 'plan' is a string",
    ),
    "text_flag": (
        {"options": "'changed_at': 'at', 'is_deleted': 'plan'"},
        "is_deleted must be a boolean, 'plan' is a string",
    ),
    "own_name": (
        {"select": "*, true as Is_Current"},
        "the column 'Is_Current' has the name of a column that materialized='scd2' adds: rename it in the query",
    ),
    "nothing_to_track": (
        {"select": "id, at"},
        "materialized='scd2' has no column to track: the model selects only id, at",
    ),
    "null_key_policy": (
        {"options": "'changed_at': 'at', 'on_null_key': 'ignore'"},
        "on_null_key must be one of fail, quarantine, got 'ignore'",
    ),
    "two_sequences": (
        {"options": "'changed_at': 'at', 'sequence': ['n', 'id']"},
        "sequence of meta.lakehouse_patterns.scd2 must be the name of one column, got ['n', 'id']",
    ),
    "map_column": (
        {"select": "*, map('a', 1) as features"},
        "materialized='scd2' can't compare 'features', which is a map<string,int>: select it as text",
    ),
    "by_time": (
        {"config": "partition_by='At'"},
        "partition_by of materialized='scd2' must name columns of its table, got 'at', which the table lacks: "
        "changed_at is effective_from there",
    ),
    "untyped_column": (
        {
            "select": "*, null as note",
            "options": "'changed_at': 'at', 'tracked_columns': ['plan']",
        },
        "materialized='scd2' can't keep 'note', a NULL without a type: cast it in the model",
    ),
    "untyped_sequence": (
        {"select": "*, null as lsn", "options": "'changed_at': 'at', 'sequence': 'lsn'"},
        "materialized='scd2' can't keep 'lsn', a NULL without a type",
    ),
    "filling_table": (
        {"select": "id, plan, at", "config": "on_schema_change='append_new_columns'"},
        "the model lacks src, which REPLACED.filling_table may fill itself (delta.feature.allowColumnDefaults)",
    ),
    "null_time": (
        {},
        "null_time has a change with NULL in at; correct the source, or quarantine",
    ),
    "foreign_table": (
        {},
        "foreign_table has no column 'effective_from' as an scd2 table of this model has",
    ),
}


@stories.about(*REFUSED)
def test_a_wrong_configuration_or_table_is_refused_in_one_sentence(project: DbtProject) -> Story:
    rows = changes_without_time(project)
    project.source("foreign_table", rows)
    project.spark.sql(
        f"create table {project.schema}.filling_table (id string, plan string, src string default 'web', "
        "effective_from timestamp, effective_to timestamp, is_current boolean, closed_by_delete boolean, "
        "changes array<struct<changed_at: timestamp, is_deleted: boolean>>) using delta "
        "tblproperties ('delta.feature.allowColumnDefaults' = 'supported')"
    )
    errors = yield FAILS
    for name, (_, sentence) in REFUSED.items():
        assert f"{name}: error" in errors
        assert sentence.replace("REPLACED", project.schema) in errors, name
    assert_rows(project.table("foreign_table"), rows)
    for name in REFUSED.keys() - {"foreign_table", "filling_table"}:
        assert not project.spark.catalog.tableExists(f"{project.schema}.{name}")


@stories.about("accepted")
def test_a_change_without_time_is_quarantined_where_that_is_asked_for(project: DbtProject) -> Story:
    changes_without_time(project)
    yield PASSES
    assert_rows(project.table("accepted").select("id", "effective_from"), [("u1", day(1)), ("u2", day(1))])
    assert_rows(
        project.table("accepted__quarantine").select("error_class", "error_message", "copies"),
        [("NULL_KEY", "NULL in at", 1)],
    )


def changes_without_time(project: DbtProject) -> DataFrame:
    """Fill the source of the models above: one of three changes has no time."""
    rows = [("u1", "basic", day(1), 1), ("u1", "basic", None, 1), ("u2", "basic", day(1), 1)]
    changes = project.spark.createDataFrame(rows, "id string, plan string, at timestamp, n int")
    project.source("bad_changes", changes)
    return changes


def feed(project: DbtProject, model: str, schema: str, *rows: tuple[Any, ...]) -> None:
    """Replace the changes of one of the models below."""
    project.source(f"{model}_changes", project.spark.createDataFrame(rows, schema))


NARROW = "id string, plan string, at timestamp"
TWO_PLANS = [("u1", "basic", day(1)), ("u1", "premium", day(5))]


@stories.about("appending")
def test_a_new_column_is_appended_and_one_that_is_gone_is_null(project: DbtProject) -> Story:
    feed(project, "appending", NARROW, *TWO_PLANS)
    yield PASSES
    feed(project, "appending", "id string, seats int, at timestamp", ("u1", 3, day(7)))
    yield PASSES
    assert_rows(
        project.table("appending"),
        [("basic", None, day(1), day(5)), ("premium", None, day(5), day(7)), (None, 3, day(7), None)],
        ["plan", "seats", "effective_from", "effective_to"],
    )


@stories.about("untracking")
def test_a_new_column_that_is_not_tracked_opens_no_version(project: DbtProject) -> Story:
    """And neither does one that is gone: of the last change of the version it is NULL."""
    with_old = [(*change, number) for number, change in enumerate(TWO_PLANS)]
    feed(project, "untracking", f"{NARROW}, old int", *with_old)
    yield PASSES
    feed(project, "untracking", f"{NARROW}, seats int", ("u1", "premium", day(7), 3))
    yield PASSES
    assert_rows(
        project.table("untracking"),
        [("basic", 0, None, day(1), day(5)), ("premium", None, 3, day(5), None)],
        ["plan", "old", "seats", "effective_from", "effective_to"],
    )


@stories.about("ignoring")
def test_a_new_column_is_ignored_and_one_that_is_gone_refused(project: DbtProject) -> Story:
    feed(project, "ignoring", NARROW, *TWO_PLANS)
    yield PASSES
    feed(project, "ignoring", f"{NARROW}, seats int", ("u1", "premium", day(7), 3))
    yield PASSES
    versions = [("basic", day(1)), ("premium", day(5))]
    assert_rows(project.table("ignoring"), versions, ["plan", "effective_from"])
    feed(project, "ignoring", "id string, seats int, at timestamp", ("u1", 3, day(9)))
    assert "have no column plan; select the table's columns" in (yield FAILS)


@stories.about("failing")
def test_another_column_or_another_type_is_refused(project: DbtProject) -> Story:
    feed(project, "failing", NARROW, *TWO_PLANS)
    yield PASSES
    feed(project, "failing", "id string, plan int, seats int, at timestamp", ("u1", 3, 3, day(7)))
    errors = yield FAILS
    assert "have plan as int in place of string, seats, which the table lacks" in errors
    versions = [("basic", day(1)), ("premium", day(5))]
    assert_rows(project.table("failing"), versions, ["plan", "effective_from"])


SCHEMA_CHANGES = {
    "appending": scd2_model("appending_changes", config="on_schema_change='append_new_columns'"),
    "ignoring": scd2_model("ignoring_changes", config="on_schema_change='ignore'"),
    "failing": scd2_model("failing_changes", config="on_schema_change='fail'"),
    "untracking": scd2_model(
        "untracking_changes",
        options="'changed_at': 'at', 'tracked_columns': ['plan']",
        select="*, 1 as load_id",
        config="on_schema_change='append_new_columns'",
    ),
}


@pytest.fixture(scope="module")
def project(make_project: Callable[..., DbtProject]) -> DbtProject:
    """Return a project with the page's models and all those above."""
    model, test, as_of, snapshots = snippets("docs/data_value.md", PAGE_TEST)
    tables = ["user_changes", "visits", "users", "bad_changes"]
    tables += [f"{name}_changes" for name in SCHEMA_CHANGES]
    source = {"name": "raw", "schema": "{{ target.schema }}", "tables": [{"name": name} for name in tables]}
    accepted = "'changed_at': 'at', 'sequence': 'n', 'on_null_key': 'quarantine'"
    models = SCHEMA_CHANGES | {
        "user_versions": model,
        "visits_with_plan": as_of,
        "accepted": scd2_model("bad_changes", options=accepted),
        **{name: scd2_model("bad_changes", **what) for name, (what, _) in REFUSED.items()},
    }
    return make_project(
        {f"models/{name}.sql": text for name, text in models.items()}
        | {
            "models/user_versions.yml": test,
            "models/sources.yml": yaml.safe_dump({"sources": [source]}),
            "snapshots/user_snapshots.yml": snapshots,
        }
    )


# ----------------------------------------------------------------------------
# The invariants' test and reading as of an instant
# ----------------------------------------------------------------------------

VERSIONS = (
    "id string, effective_from timestamp, effective_to timestamp, "
    "is_current boolean, closed_by_delete boolean"
)
SOUND: list[tuple[Any, ...]] = [
    ("chained", day(1), day(5), False, False),
    ("chained", day(5), None, True, False),
    ("returned", day(1), day(3), False, True),
    ("returned", day(5), None, True, False),
    ("deleted", day(1), day(5), False, True),
    ("unknown start", None, day(5), False, True),
]
BROKEN: list[tuple[str, list[tuple[Any, ...]], set[str]]] = [
    ("a gap", [(day(1), day(3), False, False), (day(5), None, True, False)], {"gap"}),
    ("an overlap", [(day(1), day(6), False, False), (day(5), None, True, False)], {"overlap"}),
    (
        "the old row was never closed",
        [(day(1), None, True, False), (day(5), None, True, False)],
        {"open before the last version", "several current versions"},
    ),
    (
        "an open row in the middle",
        [(day(1), None, False, False), (day(5), day(7), False, True)],
        {"open before the last version", "current and open differ"},
    ),
    ("killed between close and insert", [(day(1), day(5), False, False)], {"no current version"}),
    (
        "one start twice",
        [(day(1), day(5), False, False), (day(1), day(5), False, False), (day(5), None, True, False)],
        {"start not unique", "overlap"},
    ),
    (
        "no length",
        [(day(1), day(1), False, False), (day(1), None, True, False)],
        {"start not before end", "start not unique"},
    ),
    ("start after end", [(day(5), day(1), False, True)], {"start not before end"}),
    ("no start", [(None, None, True, False)], {"unknown start"}),
    ("flag off", [(day(1), None, False, False)], {"current and open differ", "no current version"}),
]


def broken_rules(
    spark: SparkSession, render: MacroRenderer, rows: list[tuple[Any, ...]], **arguments: Any
) -> list[tuple[str, str]]:
    spark.createDataFrame(rows, VERSIONS).createOrReplaceTempView("versions_to_judge")
    sql = render("test_scd_type_2_invariants", model="versions_to_judge", unique_key="id", **arguments)
    return [(row.id, row.broken_rule) for row in spark.sql(sql).collect()]


def test_invariants_hold_for_sound_versions(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    assert broken_rules(spark, render, SOUND, is_current="is_current") == []
    assert broken_rules(spark, render, SOUND) == []


def test_invariants_name_each_broken_rule(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    rows = [(name, *version) for name, versions, _ in BROKEN for version in versions]
    got = broken_rules(spark, render, rows, is_current="is_current")
    assert {name: {rule for key, rule in got if key == name} for name, _, _ in BROKEN} == {
        name: rules for name, _, rules in BROKEN
    }
    null_key = broken_rules(spark, render, [(None, day(1), None, True, False)])
    assert null_key == [(None, "null key")]


def test_invariants_allow_a_gap_only_where_told(spark: SparkSession, render: MacroRenderer) -> None:
    returned = [row for row in SOUND if row[0] == "returned"]
    assert broken_rules(spark, render, returned, gap_allowed_when="false") == [("returned", "gap")]
    gap = [("x", *version) for version in BROKEN[0][1]]
    assert broken_rules(spark, render, gap) == [("x", "gap")]
    assert broken_rules(spark, render, gap, gap_allowed_when="true") == []


def test_invariants_need_a_key(render: MacroRenderer) -> None:
    with pytest.raises(DbtRuntimeError, match="scd_type_2_invariants needs unique_key"):
        render("test_scd_type_2_invariants", model="versions", unique_key=[])


def test_as_of_is_half_open(spark: SparkSession, render: MacroRenderer, ansi_modes: str) -> None:
    spark.createDataFrame(SOUND, VERSIONS).createOrReplaceTempView("sound_versions")

    def valid(instant: dt.datetime) -> list[tuple[str, dt.datetime]]:
        predicate = render("as_of", timestamp=f"timestamp '{instant}'", versions="v")
        rows = spark.sql(
            f"select v.id, v.effective_from from sound_versions as v where {predicate}"
        ).collect()
        return sorted(tuple(row) for row in rows)

    before = dt.timedelta(microseconds=1)
    assert valid(day(1) - before) == []
    assert valid(day(5) - before) == [("chained", day(1)), ("deleted", day(1))]
    assert valid(day(5)) == [("chained", day(5)), ("returned", day(5))]
