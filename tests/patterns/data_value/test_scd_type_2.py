"""SCD Type 2: the `scd2` materialization for change feeds, guarded snapshots, and the invariants' test."""

from __future__ import annotations

import datetime as dt
import random
import sys
import threading
from collections.abc import Callable, Iterable
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
from tests.support.snippets import snippets

SNIPPETS = "tests/patterns/data_value/test_scd_type_2.py::test_snippet_of_the_page"
SOURCES = """
sources:
  - name: raw
    schema: "{{ target.schema }}"
    tables: [{name: user_changes}, {name: visits}, {name: users}, {name: growing}, {name: bad_changes}]
"""


def day(number: int) -> dt.datetime:
    return dt.datetime(2026, 1, number)  # noqa: DTZ001 - as Spark hands timestamps back


# ----------------------------------------------------------------------------
# The history as a function of the changes, against plain Python
# ----------------------------------------------------------------------------

HISTORY = {
    "key": {"user_id": "string", "tenant": "int"},
    "tracked": {"plan": "string", "seats": "int"},
    "untracked": {"load_id": "bigint"},
    "absent": [],
    "changed_at": "changed_at",
    "changed_at_type": "timestamp",
    "sequence": "sequence",
    "sequence_type": "bigint",
    "is_deleted": "is_deleted",
    "incomplete": {
        "relation": "user_versions",
        "types": {"user_id": "string", "tenant": "int", "changed_at": "timestamp"},
        "key": ["user_id", "tenant"],
        "nullable_key": [],
        "sequence": ["changed_at"],
        "on_null_key": "fail",
    },
}
FEED = (
    "user_id string, tenant int, plan string, seats int, load_id bigint, "
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
            _, _, plan, seats, load_id, _, _, is_deleted = max(
                (change for change in own if change[5] == today), key=_precedence
            )
            alive = history[-1] if history and history[-1]["end"] is None else None
            if is_deleted and alive:
                alive |= {"end": today, "deleted": True}
            elif is_deleted and not history:
                history.append(
                    {"state": (None, None), "load_id": None, "start": None, "end": today, "deleted": True}
                )
            elif not is_deleted and alive and alive["state"] == (plan, seats):
                alive["load_id"] = load_id
            elif not is_deleted:
                if alive:
                    alive["end"] = today
                history.append(
                    {
                        "state": (plan, seats),
                        "load_id": load_id,
                        "start": today,
                        "end": None,
                        "deleted": False,
                    }
                )
        rows += [
            (*key, *v["state"], v["load_id"], v["start"], v["end"], v["end"] is None, v["deleted"])
            for v in history
        ]
    return rows


def _precedence(change: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sequence, then deletions, then attributes; NULL comes first."""
    _, _, plan, seats, load_id, _, sequence, is_deleted = change
    attributes = (None, None) if is_deleted else (plan, seats)
    return tuple((v is not None, v) for v in (sequence, is_deleted, *attributes, load_id))


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


@pytest.mark.parametrize("seed", [1, 2])
def test_any_split_and_order_of_the_changes_gives_one_history(
    spark: SparkSession, render: MacroRenderer, tmp_path: Path, seed: int
) -> None:
    feed = random_feed(seed, keys=80, changes_a_key=6)
    create(spark, render, str(tmp_path / "whole"), feed)
    assert_rows(read(spark, str(tmp_path / "whole")).drop("changes"), expected_versions(feed))

    random.Random(seed).shuffle(feed)
    batches = [[], feed[:200], feed[150:300], feed[300:], feed[100:250]]  # overlapping, and one again
    create(spark, render, str(tmp_path / "split"), batches[0])
    for batch in batches[1:]:
        merge(spark, render, str(tmp_path / "split"), batch)
    assert_rows(read(spark, str(tmp_path / "split")), read(spark, str(tmp_path / "whole")))


def test_what_the_table_knows_already_commits_nothing(
    spark: SparkSession, render: MacroRenderer, tmp_path: Path
) -> None:
    feed, path = random_feed(3, keys=20, changes_a_key=4), str(tmp_path / "t")
    create(spark, render, path, feed)
    merge(spark, render, path, feed[10:60])
    merge(spark, render, path, [])
    assert version(spark, path) == 0
    merge(spark, render, path, [("new", 1, "basic", 1, 9, day(1), 1, False)])
    assert version(spark, path) == 1


def test_both_ansi_modes_give_the_same_rows(
    spark: SparkSession, render: MacroRenderer, tmp_path: Path, ansi_modes: str
) -> None:
    feed, path = random_feed(4, keys=20, changes_a_key=5), str(tmp_path / "t")
    create(spark, render, path, feed[:50])
    merge(spark, render, path, feed[50:])
    assert_rows(read(spark, path).drop("changes"), expected_versions(feed))


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

    def run(batch: list[tuple[Any, ...]], start: threading.Barrier, refused: list[Any]) -> None:
        session = spark.newSession()
        session.createDataFrame(batch, FEED).createOrReplaceTempView("one_of_two")
        start.wait()
        try:
            session.sql(statement)
        except (PySparkException, Py4JJavaError) as error:
            refused.append((batch, str(error)))

    for attempt in range(5):
        key, refused = (f"u{attempt}", 1), []
        batches = [[(*key, "basic", 1, 1, day(1), 1, False)], [(*key, "trial", 1, 1, day(5), 1, False)]]
        start = threading.Barrier(2)
        threads = [threading.Thread(target=run, args=(batch, start, refused)) for batch in batches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all("DELTA_CONCURRENT" in error for _, error in refused)
        for batch, _ in refused:
            merge(spark, render, path, batch)
        feed += batches[0] + batches[1]
        assert_rows(read(spark, path).drop("changes"), expected_versions(feed))
        if refused:
            return
    pytest.fail("no conflict in five attempts: the test proves nothing")


NULL_KEY = ("u1", None, "basic", 1, 1, day(1), 1, False)
NO_TIME = ("u1", 1, "basic", 1, 1, None, 1, False)


@pytest.mark.parametrize(("change", "columns"), [(NULL_KEY, "tenant"), (NO_TIME, "changed_at")])
def test_a_change_without_key_or_time_is_refused(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str, change: tuple[Any, ...], columns: str
) -> None:
    spark.createDataFrame([change], FEED).createOrReplaceTempView("bad_change")
    sentence = (
        f"the batch of user_versions has a change with NULL in {columns}; correct the source, or set such"
    )
    with pytest.raises(Exception, match=sentence):
        spark.sql(render("_scd2_rows", history=HISTORY, batch="bad_change")).collect()


def test_a_refused_batch_writes_nothing(spark: SparkSession, render: MacroRenderer, tmp_path: Path) -> None:
    good, path = ("u2", 1, "basic", 1, 1, day(1), 1, False), str(tmp_path / "t")
    create(spark, render, path, [])
    with pytest.raises(Exception, match="the batch of user_versions has a change with NULL in tenant"):
        merge(spark, render, path, [good, NULL_KEY])
    assert version(spark, path) == 0
    merge(spark, render, path, [good])
    assert read(spark, path).count() == 1


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


class Lifetime:
    """The page's project after two batches, a rerun and a full refresh."""

    def __init__(self, spark: SparkSession, make_project: Callable[..., DbtProject]) -> None:
        model, test, as_of, snapshot = snippets("docs/data_value.md", SNIPPETS)
        self.project = make_project(
            {
                "models/user_versions.sql": model,
                "models/user_versions.yml": test,
                "models/visits_with_plan.sql": as_of,
                "models/sources.yml": SOURCES,
                "snapshots/user_snapshots.yml": snapshot,
            }
        )
        self.project.source("visits", spark.createDataFrame(
            [(1, "change", day(4)), (2, "change", day(5)), (3, "unknown", day(5)), (4, "returned", day(7))],
            "visit_id int, user_id string, event_time timestamp",
        ))  # fmt: skip
        self.project.source("users", spark.createDataFrame(
            [("u1", "basic", day(1)), ("u2", "basic", day(1))], "id string, plan string, updated_at timestamp"
        ))  # fmt: skip
        self.project.source("user_changes", spark.createDataFrame(story_rows(1), USER_CHANGES))
        self.project.run("build")
        self.first = self.project.table("user_versions").collect()
        self.project.source("user_changes", spark.createDataFrame(story_rows(2), USER_CHANGES))  # only these
        self.project.source("users", spark.createDataFrame(
            [("u1", "premium", day(3))], "id string, plan string, updated_at timestamp"
        ))  # fmt: skip
        self.project.run("build")
        self.second = self.project.table("user_versions").collect()
        self.commits = len(self.project.history("user_versions"))
        self.operation = self.project.history("user_versions")[0]["operation"]
        self.visits = self.project.table("visits_with_plan").collect()
        self.snapshots = self.project.table("user_snapshots").select(
            "id", "plan", "dbt_valid_from", "dbt_valid_to"
        )
        self.project.run("run", "--select", "user_versions")
        self.commits_after_rerun = len(self.project.history("user_versions"))
        self.project.source(
            "user_changes", spark.createDataFrame(story_rows(1) + story_rows(2), USER_CHANGES)
        )
        self.project.run("run", "--select", "user_versions", "--full-refresh")
        self.refreshed = self.project.table("user_versions").collect()


@pytest.fixture(scope="module")
def lifetime(spark: SparkSession, make_project: Callable[..., DbtProject]) -> Lifetime:
    return Lifetime(spark, make_project)


@pytest.mark.parametrize("name", STORIES)
def test_story(lifetime: Lifetime, name: str) -> None:
    got = [
        (row.plan, row.effective_from, row.effective_to, row.is_current, row.closed_by_delete)
        for row in lifetime.second
        if row.id == name
    ]
    expected = [
        (plan, start and day(start), end and day(end), *flags)
        for plan, start, end, *flags in STORIES[name][2]
    ]
    assert_rows(got, expected)


def test_snippet_of_the_page(lifetime: Lifetime) -> None:
    assert_rows(lifetime.visits, [(1, "basic"), (2, "premium"), (3, None), (4, None)])
    stored = [row[:3] for row in lifetime.snapshots.collect()]
    assert_rows(stored, [("u1", "basic", day(1)), ("u1", "premium", day(3)), ("u2", "basic", day(1))])


def test_the_table_has_the_columns_of_the_entity_and_of_its_validity(lifetime: Lifetime) -> None:
    assert list(lifetime.first[0].asDict()) == [
        "id", "login", "plan", "load_id",
        "effective_from", "effective_to", "is_current", "closed_by_delete", "changes",
    ]  # fmt: skip


def test_untracked_columns_follow_the_last_change_of_the_version(lifetime: Lifetime) -> None:
    assert [row.load_id for row in lifetime.second if row.id == "unchanged"] == [2]
    assert sorted(row.load_id for row in lifetime.second if row.id == "change") == [1, 2]


def test_a_batch_is_one_merge_and_a_rerun_none(lifetime: Lifetime) -> None:
    assert (lifetime.commits, lifetime.operation) == (2, "MERGE")
    assert lifetime.commits_after_rerun == 2


def test_incremental_runs_equal_a_full_refresh(lifetime: Lifetime) -> None:
    assert_rows(lifetime.refreshed, lifetime.second)


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
    "mistyped": (
        {"options": "'changed_at': 'at', 'seqence': 'n'"},
        "meta.lakehouse_patterns.scd2 has no option 'seqence'; allowed: changed_at, sequence, is_deleted,",
    ),
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
        {"select": "*, true as is_current"},
        "the model's column 'is_current' has a name that materialized='scd2' gives to a column of its own",
    ),
    "nothing_to_track": (
        {"select": "id, at"},
        "materialized='scd2' has no column to track: the model selects only id, at",
    ),
    "null_key_policy": (
        {"options": "'changed_at': 'at', 'on_null_key': 'ignore'"},
        "on_null_key must be one of fail, quarantine, got 'ignore'",
    ),
    "null_time": (
        {},
        "null_time has a change with NULL in at; correct the source, or set such",
    ),
    "foreign_table": (
        {},
        "foreign_table has no column 'effective_from' as an scd2 table of this model has",
    ),
}


def test_a_wrong_configuration_or_table_is_refused_in_one_sentence(
    spark: SparkSession, make_project: Callable[..., DbtProject]
) -> None:
    project = make_project(
        {
            "models/sources.yml": SOURCES,
            "models/accepted.sql": scd2_model(
                "bad_changes", options="'changed_at': 'at', 'sequence': 'n', 'on_null_key': 'quarantine'"
            ),
        }
        | {f"models/{name}.sql": scd2_model("bad_changes", **what) for name, (what, _) in REFUSED.items()}
    )
    rows = spark.createDataFrame([("u1", "basic", day(1), 1)], "id string, plan string, at timestamp, n int")
    null_time = spark.createDataFrame([("u1", "basic", None, 1), ("u2", "basic", day(1), 1)], rows.schema)
    project.source("bad_changes", rows.union(null_time))
    project.source("foreign_table", rows)
    errors = project.fails("run")
    for _, sentence in REFUSED.values():
        assert sentence in errors
    assert [n for n, s in project.statuses().items() if s == "success"] == ["accepted"], errors
    assert_rows(project.table("accepted").select("id", "effective_from"), [("u1", day(1)), ("u2", day(1))])
    assert_rows(
        project.table("accepted__quarantine").select("error_class", "error_message", "copies"),
        [("NULL_KEY", "NULL in at", 1)],
    )
    assert_rows(project.table("foreign_table"), rows)
    for name in REFUSED.keys() - {"foreign_table"}:
        assert not spark.catalog.tableExists(f"{project.schema}.{name}")


def test_the_model_s_columns_may_change(spark: SparkSession, make_project: Callable[..., DbtProject]) -> None:
    names = ["appending", "ignoring", "failing"]
    modes = ["append_new_columns", "ignore", "fail"]
    project = make_project(
        {"models/sources.yml": SOURCES}
        | {
            f"models/{name}.sql": scd2_model("growing", config=f"on_schema_change='{mode}'")
            for name, mode in zip(names, modes, strict=True)
        }
        | {
            "models/untracking.sql": scd2_model(
                "growing",
                options="'changed_at': 'at', 'tracked_columns': ['plan']",
                select="*, 1 as load_id",
                config="on_schema_change='append_new_columns'",
            )
        }
    )

    def feed(schema: str, *rows: tuple[Any, ...]) -> None:
        project.source("growing", spark.createDataFrame(rows, schema))

    feed("id string, plan string, at timestamp", ("u1", "basic", day(1)), ("u1", "premium", day(5)))
    project.run("run")

    feed("id string, plan string, seats int, at timestamp", ("u1", "premium", 3, day(7)))
    errors = project.fails("run")
    assert "on_schema_change is fail and the columns differ: new in the model ['seats']" in errors
    assert project.statuses() == {
        "appending": "success", "failing": "error", "ignoring": "success", "untracking": "success",
    }  # fmt: skip
    columns = ["plan", "seats", "effective_from", "effective_to"]
    appended = [
        ("basic", None, day(1), day(5)),
        ("premium", None, day(5), day(7)),
        ("premium", 3, day(7), None),
    ]
    assert_rows(project.table("appending").select(columns), appended)
    assert_rows(
        project.table("untracking").select(columns),
        [("basic", None, day(1), day(5)), ("premium", 3, day(5), None)],
    )
    assert_rows(
        project.table("ignoring").select("plan", "effective_from"), [("basic", day(1)), ("premium", day(5))]
    )

    feed("id string, seats int, at timestamp", ("u1", 3, day(9)))
    errors = project.fails("run", "--exclude", "untracking")
    assert "the model no longer selects plan, which" in errors
    assert_rows(
        project.table("appending").select(columns),
        [*appended[:2], ("premium", 3, day(7), day(9)), (None, 3, day(9), None)],
    )

    feed("id string, plan int, at timestamp", ("u1", 3, day(9)))
    errors = project.fails("run", "--select", "ignoring")
    assert "column 'plan' is a string in" in errors
    assert "the model gives a int; change the model, or rebuild the table" in errors


# ----------------------------------------------------------------------------
# Snapshots
# ----------------------------------------------------------------------------


def snapshot(name: str, **config: Any) -> dict[str, Any]:
    return {
        "name": name,
        "relation": "source('raw', 'users')",
        "config": {"unique_key": "id", "hard_deletes": "invalidate", "updated_at": "updated_at"} | config,
    }


def test_snapshots_close_deleted_keys_and_refuse_what_goes_wrong_silently(
    spark: SparkSession, make_project: Callable[..., DbtProject]
) -> None:
    timestamp, check = "lakehouse_patterns.timestamp", "lakehouse_patterns.check"
    project = make_project(
        {
            "models/sources.yml": SOURCES,
            "snapshots/snapshots.yml": yaml.safe_dump(
                {
                    "snapshots": [
                        snapshot("by_time", strategy=timestamp),
                        snapshot("by_value", strategy=check, check_cols=["plan"]),
                        snapshot("by_time_and_value", strategy=timestamp, check_cols=["plan"]),
                        snapshot("keeps_deleted", strategy=timestamp, hard_deletes="ignore"),
                        snapshot("adds_deleted", strategy=check, check_cols="all", hard_deletes="new_record"),
                        snapshot("by_clock", strategy=check, check_cols="all", updated_at=None),
                        snapshot("by_nothing", strategy=check),
                    ]
                }
            ),
        }
    )

    def extract(*rows: tuple[Any, ...]) -> None:
        project.source("users", spark.createDataFrame(rows, "id string, plan string, updated_at timestamp"))

    extract(("u1", "basic", day(1)), ("u2", None, day(1)), ("u3", "trial", day(1)))
    errors = project.fails("snapshot")
    assert "hard_deletes must be 'invalidate', got 'ignore': a key that is gone from the extract" in errors
    assert (
        "hard_deletes must be 'invalidate', got 'new_record': dbt-spark writes its delete records" in errors
    )
    assert "a snapshot needs updated_at, the source's time of the change" in errors
    assert "strategy lakehouse_patterns.check needs check_cols" in errors
    names = ["by_time", "by_time_and_value", "by_value"]
    assert sorted(n for n, status in project.statuses().items() if status == "success") == names

    guarded = ("--select", *names)
    extract((None, "basic", day(2)), ("u1", "premium", day(3)))
    errors = project.fails("snapshot", *guarded)
    assert errors.count("a row of the snapshot has NULL in its unique_key or updated_at") == 3
    extract(("u1", "premium", None))
    assert "a row of the snapshot has NULL in its unique_key or updated_at" in project.fails(
        "snapshot", *guarded
    )

    extract(("u1", "premium", day(3)), ("u2", "basic", day(4)))
    project.run("snapshot", *guarded)
    for name in names:
        versions = project.table(name)
        assert_rows(
            versions.where("id <> 'u3'").select("id", "plan", "dbt_valid_from", "dbt_valid_to"),
            [
                ("u1", "basic", day(1), day(3)),
                ("u1", "premium", day(3), None),
                ("u2", None, day(1), day(4)),
                ("u2", "basic", day(4), None),
            ],
        )
        assert versions.where("id = 'u3' and dbt_valid_to is not null").count() == 1

    # A later extract: u1 as before, u2 changed, each with a newer time.
    extract(("u1", "premium", day(6)), ("u2", "trial", day(6)))
    project.run("snapshot", "--select", "by_time", "by_time_and_value")
    newer = {
        name: [
            (row.id, row.plan)
            for row in project.table(name).where("dbt_valid_from = '2026-01-06'").orderBy("id").collect()
        ]
        for name in ("by_time", "by_time_and_value")
    }
    assert newer == {"by_time": [("u1", "premium"), ("u2", "trial")], "by_time_and_value": [("u2", "trial")]}


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
