"""Merger: the merge that a configured incremental model runs, its first load, and what it refuses."""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession

from tests.support.dbt_project import DbtProject, raw_tables
from tests.support.killer import TableState, run_and_kill
from tests.support.render import MacroRenderer
from tests.support.rows import assert_rows
from tests.support.session import setting
from tests.support.snippets import snippets
from tests.support.stories import FAILS, PASSES, DbtStories, Stories, Story
from tests.support.waiting import at_once

# pyspark has no class of its own for a failed write or a conflict.
SPARK_ERRORS = (PySparkException, Py4JJavaError)
DAY_1, DAY_2, DAY_3 = dt.date(2026, 1, 1), dt.date(2026, 1, 2), dt.date(2026, 1, 3)


class Merged:
    """A Delta table and the merges into it, rendered from the package's macros and run one by one."""

    def __init__(
        self,
        spark: SparkSession,
        render: MacroRenderer,
        path: str,
        schema: str,
        partition_by: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.spark, self._render, self.schema, self.name = spark, render, schema, f"delta.`{path}`"
        self._partitions = f"partitioned by ({', '.join(partition_by)})" if partition_by else ""
        defaults = {
            "nullable_key": [],
            "on_null_key": "fail",
            "sequence": [],
            "deletes": "none",
            "is_deleted": None,
            "keep_on_null": [],
            "prune_by": [],
            "partitions": partition_by,
        }
        types = dict(spark.createDataFrame([], schema).dtypes)
        self.merger = {"relation": self.name, "types": types} | defaults | options

    def batch(self, rows: Sequence[tuple[Any, ...]]) -> DataFrame:
        """Make ``rows`` the current batch."""
        frame = self.spark.createDataFrame(list(rows), self.schema)
        frame.createOrReplaceTempView("batch")
        return frame

    def load(self, rows: Sequence[tuple[Any, ...]]) -> Merged:
        """Create the table from its first batch."""
        self.batch(rows)
        select = self._render("_merger_first_load", merger=self.merger, batch="batch")
        self.spark.sql(f"create or replace table {self.name} using delta {self._partitions} as {select}")
        return self

    def statement(self, rows: Sequence[tuple[Any, ...]]) -> str:
        """Return the MERGE for ``rows``, with their partition values looked up."""
        self.batch(rows)
        looked_up = self._render("_merger_look_up", merger=self.merger, batch="batch", target=self.name)
        columns = list(self.merger["types"])
        return self._render(
            "_merger_merge",
            merger=self.merger,
            batch="batch",
            target=self.name,
            columns={"inserted": columns, "updated": columns},
            looked_up=looked_up,
            incremental_predicates=[],
        )

    def merge(self, *rows: tuple[Any, ...]) -> Merged:
        """Merge one batch."""
        self.spark.sql(self.statement(rows))
        return self

    def holds(self, *rows: tuple[Any, ...]) -> None:
        """Assert the table's rows."""
        assert_rows(self.spark.table(self.name), rows)

    @property
    def last(self) -> Row:
        """The newest entry of the table's history."""
        return self.spark.sql(f"describe history {self.name} limit 1").collect()[0]


@pytest.fixture
def merged(spark: SparkSession, render: MacroRenderer, table_path: str) -> Callable[..., Merged]:
    """Return a function that makes a :class:`Merged` table with the given options."""

    def make(schema: str, **options: Any) -> Merged:
        return Merged(spark, render, table_path, schema, **options)

    return make


HARD = {"deletes": "hard", "is_deleted": "is_deleted"}
SOFT = {"deletes": "soft", "is_deleted": "is_deleted"}
USERS = "id string, plan string, seq int, is_deleted boolean"
VISITS = "id string, seq int, d date"


class Users:
    """One story's users in a table that several stories share: `story` is a part of its key."""

    def __init__(self, table: Merged, story: str) -> None:
        self._table, self._story, self._arrived = table, story, list[tuple[Any, ...]]()

    def arrive(self, *rows: tuple[Any, ...]) -> None:
        """Put rows into the next batch."""
        self._arrived = [(self._story, *row) for row in rows]

    def taken(self) -> list[tuple[Any, ...]]:
        """Return the rows that arrived since the last call."""
        rows, self._arrived = self._arrived, []
        return rows

    def are(self, *rows: tuple[Any, ...]) -> None:
        """Assert the story's rows."""
        stored = self._table.spark.table(self._table.name).where(f"story = '{self._story}'")
        assert_rows(stored.drop("story"), rows)


class MergeStories(Stories[Users]):
    """Stories whose first step is the first load of one table; each step after it is one MERGE of all their rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options

    def open(self, request: pytest.FixtureRequest) -> None:
        """Name the table."""
        path = request.getfixturevalue("tmp_path_factory").mktemp("merge_stories") / "users"
        spark, render = request.getfixturevalue("spark"), request.getfixturevalue("render")
        schema = f"story string, {USERS}"
        self._table = Merged(spark, render, str(path), schema, key=["story", "id"], **self._options)
        self._take_step = self._table.load

    def given(self, name: str) -> Users:
        """Return the story's users."""
        return Users(self._table, name)

    def take_step(self, stories: Mapping[str, Users]) -> Mapping[str, str]:
        """Load the stories' rows, or merge them."""
        self._take_step([row for users in stories.values() for row in users.taken()])
        self._take_step = lambda rows: self._table.merge(*rows)
        return {}


# Those without a sequence take the last batch for the newest.
in_sequence, in_order_of_batches = MergeStories(sequence=["seq"], **HARD), MergeStories(**HARD)
with_soft_deletes = MergeStories(sequence=["seq"], **SOFT)


# --- by key ----------------------------------------------------------------------------------------------


def test_a_batch_inserts_updates_and_deletes_at_once(merged: Callable[..., Merged], ansi_modes: str) -> None:
    users = merged(USERS, key=["id"], sequence=["seq"], **HARD)
    users.load([("a", "basic", 1, False), ("b", "basic", 1, False), ("kept", "basic", 1, False)])
    users.merge(("a", "premium", 2, False), ("b", "basic", 2, True), ("c", "basic", 2, False))
    users.holds(("a", "premium", 2, False), ("c", "basic", 2, False), ("kept", "basic", 1, False))
    assert users.last.version == 1, "one commit a batch"


@in_order_of_batches.story
def test_deletions_of_unknown_keys_are_not_inserted_and_a_deleted_key_can_return(users: Users) -> Story:
    users.arrive(("galaxy", "basic", 1, True), ("mac", "basic", 1, False))
    yield PASSES
    users.are(("mac", "basic", 1, False))
    users.arrive(("unknown", "basic", 2, True))
    yield PASSES
    users.are(("mac", "basic", 1, False))
    users.arrive(("mac", "basic", 3, True), ("lg", "basic", 3, False))
    yield PASSES
    users.are(("lg", "basic", 3, False))
    users.arrive(("mac", "again", 4, False))
    yield PASSES
    users.are(("lg", "basic", 3, False), ("mac", "again", 4, False))


@in_order_of_batches.story
def test_replaying_increments_is_not_historically_consistent(users: Users) -> Story:
    """The specification's table: a replay starts from today's table, Stateful Merger restores it first."""
    new_a, new_b, updated_a = ("A", "new", 1, False), ("B", "new", 2, False), ("A", "updated", 2, False)
    deleted_b, new_c = ("B", "new", 3, True), ("C", "new", 3, False)
    others = [(name, "new", 4, False) for name in "MNO"]

    users.arrive(new_a)
    yield PASSES
    users.arrive(updated_a, new_b)
    yield PASSES
    users.are(updated_a, new_b)
    users.arrive(deleted_b, new_c)
    yield PASSES
    users.are(updated_a, new_c)
    users.arrive(*others)
    yield PASSES
    users.are(updated_a, new_c, *others)

    users.arrive(updated_a, new_b)
    yield PASSES
    users.are(updated_a, new_b, new_c, *others)  # at that hour there were A-U and B
    users.arrive(deleted_b, new_c)
    yield PASSES
    users.are(updated_a, new_c, *others)
    users.arrive(*others)
    yield PASSES
    users.are(updated_a, new_c, *others)


@in_sequence.story
def test_a_corrected_increment_repairs_wrong_rows_without_a_replay(users: Users) -> Story:
    users.arrive(("a", "basic", 1, False))
    yield PASSES
    users.arrive(("a", "WRONG", 2, False), ("b", "WRONG", 2, False), ("c", "basic", 2, False))
    yield PASSES
    users.arrive(("a", "premium", 3, False), ("b", "basic", 3, False))
    yield PASSES
    users.are(("a", "premium", 3, False), ("b", "basic", 3, False), ("c", "basic", 2, False))


# --- one row a key ---------------------------------------------------------------------------------------


# Of one key the newest change is not the last row; one key is new with its changes, one is deleted at once.
CHANGES = [("a", "2nd", 2, False), ("a", "4th", 4, False), ("a", "3rd", 3, True),
           ("new", "1st", 1, False), ("new", "2nd", 2, False),
           ("gone", "1st", 1, False), ("gone", "2nd", 2, True)]  # fmt: skip


@in_sequence.story
def test_only_the_newest_change_of_a_key_applies(users: Users) -> Story:
    users.arrive(("a", "1st", 1, False))
    yield PASSES
    users.arrive(*CHANGES)
    yield PASSES
    users.are(("a", "4th", 4, False), ("new", "2nd", 2, False))


@in_sequence.story
def test_only_the_newest_change_of_a_key_is_loaded_first(users: Users) -> Story:
    users.arrive(*CHANGES)
    yield PASSES
    users.are(("a", "4th", 4, False), ("new", "2nd", 2, False))


def test_delta_alone_inserts_two_changes_of_a_new_key(merged: Callable[..., Merged]) -> None:
    """Why the batch is reduced first: the same batch through dbt-spark's merge."""
    users = merged(USERS, key=["id"]).load([("a", "1st", 1, False)])
    users.batch([("new", "1st", 1, False), ("new", "2nd", 2, False)])
    users.spark.sql(
        f"merge into {users.name} as t using batch as s on s.id = t.id "
        "when matched then update set * when not matched then insert *"
    )
    users.holds(("a", "1st", 1, False), ("new", "1st", 1, False), ("new", "2nd", 2, False))


@pytest.mark.parametrize("options", [{}, HARD], ids=["no deletes", "hard deletes"])
def test_ties_are_broken_the_same_way_whatever_the_order_of_the_rows(
    merged: Callable[..., Merged], options: dict[str, Any]
) -> None:
    schema = "id string, plan string, seq int, is_deleted boolean, tags map<string, int>, at timestamp"
    at = dt.datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=dt.UTC)
    tied = [
        ("a", None, 1, False, {"x": 1}, at),
        ("a", "basic", 1, False, {"x": 1}, at),
        ("a", "basic", 1, False, {"x": 2}, at),
        ("a", "basic", 1, False, {"x": 2}, at + dt.timedelta(microseconds=1)),
    ]
    users = merged(schema, key=["id"], sequence=["seq"], **options)
    query = users._render("_merger_latest", merger=users.merger, batch="batch")
    orders = list(itertools.permutations(tied))
    users.batch([(f"order {i}", *row[1:]) for i, order in enumerate(orders) for row in order])
    assert_rows(users.spark.sql(query), [(f"order {i}", *tied[3][1:]) for i in range(24)])
    users.batch([*tied, ("a", None, 1, True, None, None)])
    winner = ("a", None, 1, True, None, None) if options else tied[3]
    assert_rows(users.spark.sql(query), [winner])


# --- the order of changes --------------------------------------------------------------------------------


@in_sequence.story
def test_an_older_change_does_not_overwrite_a_newer_one(users: Users) -> Story:
    users.arrive(("a", "new", 5, False), ("b", "new", 5, False), ("c", "new", 5, False))
    yield PASSES
    users.arrive(("a", "old", 4, False), ("b", "old", 4, True), ("c", "same", 5, True))
    yield PASSES
    users.are(("a", "new", 5, False), ("b", "new", 5, False), ("c", "new", 5, False))
    users.arrive(("a", "newest", 6, False))
    yield PASSES
    users.are(("a", "newest", 6, False), ("b", "new", 5, False), ("c", "new", 5, False))


@in_order_of_batches.story
def test_without_a_sequence_the_last_batch_wins(users: Users) -> Story:
    users.arrive(("a", "new", 5, False))
    yield PASSES
    users.arrive(("a", "old", 4, False))
    yield PASSES
    users.are(("a", "old", 4, False))


def test_sequence_columns_are_compared_in_order_and_a_stored_null_is_the_oldest(
    merged: Callable[..., Merged],
) -> None:
    schema = "id string, load_id bigint, hash string"
    lines = merged(schema, key=["id"], sequence=["load_id", "hash"]).load([("a", 2, "m"), ("b", 2, "m")])
    lines.merge(("a", 1, "z"), ("b", 2, "n")).holds(("a", 2, "m"), ("b", 2, "n"))
    lines.spark.sql(f"update {lines.name} set load_id = null where id = 'a'")
    lines.merge(("a", 1, "a")).holds(("a", 1, "a"), ("b", 2, "n"))


def test_a_visit_that_is_delivered_three_times_and_once_more_is_one_row(
    merged: Callable[..., Merged],
) -> None:
    visits = merged("visit_id string, page string", key=["visit_id"]).load([])
    visits.merge(*[("v1", "home")] * 3).merge(("v1", "home"), ("v2", "about"))
    visits.holds(("v1", "home"), ("v2", "about"))


# Both orders, each in one ANSI mode: neither has a cast.
@pytest.mark.parametrize(
    ("sequence", "ansi"), [(["seq"], "true"), ([], "false")], ids=["in order", "last batch"]
)
def test_null_in_a_column_to_keep_leaves_what_is_known(
    merged: Callable[..., Merged], spark: SparkSession, sequence: list[str], ansi: str
) -> None:
    users = merged("id string, email string, plan string, seq int", key=["id"], sequence=sequence)
    users.merger["keep_on_null"] = ["email"]
    with setting(spark, "spark.sql.ansi.enabled", ansi):
        users.load([("a", "a@x", "basic", 1), ("b", None, "basic", 1)])
        users.merge(("a", None, None, 2), ("b", "b@x", "basic", 2), ("c", None, "basic", 2))
        users.holds(("a", "a@x", None, 2), ("b", "b@x", "basic", 2), ("c", None, "basic", 2))
        users.merger["keep_on_null"] = []
        users.merge(("a", None, None, 3)).holds(
            ("a", None, None, 3), ("b", "b@x", "basic", 2), ("c", None, "basic", 2)
        )


def test_what_is_known_is_the_newest_value_that_is_not_null_of_batch_and_table(
    merged: Callable[..., Merged],
) -> None:
    users = merged("id string, email string, seq int", key=["id"], sequence=["seq"], keep_on_null=["email"])
    users.load([("first", "1@x", 1), ("first", None, 2), ("batch", "1@x", 1), ("table", "5@x", 5)])
    users.merge(
        ("batch", "2@x", 2), ("batch", "3@x", 3), ("batch", None, 4), ("new", "1@x", 1), ("new", None, 2),
        ("table", "3@x", 3), ("table", None, 6),
    )  # fmt: skip
    users.holds(("first", "1@x", 2), ("batch", "3@x", 4), ("new", "1@x", 2), ("table", "5@x", 6))


def test_a_rerun_changes_nothing_and_commits_nothing(merged: Callable[..., Merged]) -> None:
    users = merged(USERS, key=["id"], sequence=["seq"], **HARD).load([("a", "basic", 1, False)])
    batch = [("a", "premium", 2, False), ("b", "basic", 2, False), ("c", "basic", 2, True)]
    users.merge(*batch)
    version = users.last.version
    for _ in range(2):
        users.merge(*batch).holds(("a", "premium", 2, False), ("b", "basic", 2, False))
    assert users.last.version == version


@pytest.mark.parametrize("prune_by", [[], ["d"]], ids=["whole table", "pruned"])
def test_stale_rows_do_not_rewrite_the_files_they_match(
    merged: Callable[..., Merged], prune_by: list[str]
) -> None:
    users = merged(VISITS, key=["id", "d"], sequence=["seq"], partition_by=["d"], prune_by=prune_by)
    users.load([("a", 5, DAY_1), ("b", 5, DAY_2)]).merge(("a", 4, DAY_1), ("b", 6, DAY_2))
    users.holds(("a", 5, DAY_1), ("b", 6, DAY_2))
    assert users.last.operationMetrics["numTargetFilesRemoved"] == "1"
    version = users.last.version
    assert users.merge(("b", 6, DAY_2)).last.version == version


def test_a_batch_that_is_newer_than_all_it_may_match_is_not_compared_row_by_row(
    merged: Callable[..., Merged],
) -> None:
    visits = merged(VISITS, key=["id", "d"], sequence=["seq"], partition_by=["d"], prune_by=["d"])
    visits.load([("a", 5, DAY_1), ("b", 9, DAY_2)])
    assert "left anti join" not in visits.statement([("a", 6, DAY_1), ("new", 7, DAY_1)])
    assert "left anti join" in visits.statement([("a", 5, DAY_1)])
    assert "left anti join" in visits.statement([("a", 6, DAY_1), ("b", 8, DAY_2)])
    assert "left anti join" not in visits.statement([("first", 1, DAY_3)])


# --- deletes ---------------------------------------------------------------------------------------------


def inserted_and_deleted(users: Users) -> Story:
    """Let `a` come with sequence 1 and go with sequence 5."""
    users.arrive(("a", "basic", 1, False))
    yield PASSES
    users.arrive(("a", None, 5, True))
    yield PASSES


@with_soft_deletes.story
def test_a_soft_delete_blocks_older_updates_and_a_newer_one_returns(users: Users) -> Story:
    yield from inserted_and_deleted(users)
    users.arrive(("a", "late", 4, False))
    yield PASSES
    users.are(("a", None, 5, True))
    users.arrive(("a", "back", 6, False))
    yield PASSES
    users.are(("a", "back", 6, False))


@in_sequence.story
def test_a_hard_delete_forgets_the_order_so_an_older_update_returns(users: Users) -> Story:
    """The documented limit of `deletes: hard`: nothing is left to compare with."""
    yield from inserted_and_deleted(users)
    users.are()
    users.arrive(("a", "late", 4, False))
    yield PASSES
    users.are(("a", "late", 4, False))


@with_soft_deletes.story
def test_with_soft_deletes_the_order_of_batches_decides_nothing(users: Users) -> Story:
    """The same four changes, one a batch: `first` gets them in their order, `last` the other way round."""
    users.arrive(("first", "1st", 1, False), ("last", "4th", 4, False))
    yield PASSES
    users.arrive(("first", None, 2, True), ("last", "3rd", 3, False))
    yield PASSES
    users.arrive(("first", "3rd", 3, False), ("last", None, 2, True))
    yield PASSES
    users.arrive(("first", "4th", 4, False), ("last", "1st", 1, False))
    yield PASSES
    users.are(("first", "4th", 4, False), ("last", "4th", 4, False))


@in_order_of_batches.story
def test_a_null_flag_means_not_deleted(users: Users) -> Story:
    users.arrive(("a", "basic", 1, None))
    yield PASSES
    users.arrive(("a", "premium", 2, None), ("b", "basic", 2, None))
    yield PASSES
    users.are(("a", "premium", 2, False), ("b", "basic", 2, False))


# --- NULL keys -------------------------------------------------------------------------------------------


def test_a_row_with_null_in_its_key_or_sequence_is_refused(merged: Callable[..., Merged]) -> None:
    users = merged(USERS, key=["id"], sequence=["seq"], **HARD).load([("a", "basic", 1, False)])
    without_key, deletion, without_order = (
        (None, "x", 9, False),
        (None, "x", 9, True),
        ("a", "x", None, False),
    )
    for row, column in [(without_key, "id"), (deletion, "id"), (without_order, "seq")]:
        message = f"row with NULL in {column}; correct the source"
        with pytest.raises(PySparkException, match=message):  # one sentence, not a failed write
            users.merge(("b", "basic", 2, False), row)
        with pytest.raises(PySparkException, match=message):
            users.load([row])
    users.holds(("a", "basic", 1, False))


def test_a_sequence_that_is_no_number_is_refused_and_a_stored_one_is_the_oldest(
    merged: Callable[..., Merged],
) -> None:
    users = merged("id string, plan string, seq double", key=["id"], sequence=["seq"])
    users.load([("a", "basic", 1.0), ("b", "basic", 1.0)])
    for seq in (math.nan, math.inf, None):
        with pytest.raises(PySparkException, match="row with NULL or NaN in seq; correct the source"):
            users.merge(("a", "x", seq))
    users.spark.sql(f"update {users.name} set seq = double('NaN') where id = 'a'")
    users.merge(("a", "pro", 2.0), ("b", "old", 0.5)).holds(("a", "pro", 2.0), ("b", "basic", 1.0))


def test_a_key_part_declared_nullable_is_merged(merged: Callable[..., Merged]) -> None:
    schema = "type string, version string, name string"
    devices = merged(schema, key=["type", "version"], nullable_key=["version"])
    devices.load([("mac", None, "old"), ("mac", "v1", "Mac")])
    devices.merge(("mac", None, "new")).holds(("mac", None, "new"), ("mac", "v1", "Mac"))
    with pytest.raises(SPARK_ERRORS, match="row with NULL in type;"):
        devices.merge((None, "v1", "x"))


# --- partitions ------------------------------------------------------------------------------------------


def lost_partition(table: Merged, partition: str) -> None:
    """Take away the data files of one partition: whoever reads it fails."""
    folder = Path(table.name.removeprefix("delta.`").removesuffix("`")) / partition
    files = list(folder.glob("*.parquet"))
    assert files
    for file in files:
        file.unlink()


def test_a_merge_reads_only_the_partitions_of_the_batch(merged: Callable[..., Merged]) -> None:
    visits = merged(VISITS, key=["id", "d"], sequence=["seq"], partition_by=["d"], prune_by=["d"])
    visits.load([("a", 1, DAY_1), ("b", 1, DAY_2), ("c", 1, DAY_3)])
    lost_partition(visits, "d=2026-01-02")
    visits.merge(("a", 2, DAY_1), ("c", 2, DAY_3))
    assert visits.last.operationMetrics["numTargetFilesRemoved"] == "2"
    visits.merger["prune_by"] = []
    with pytest.raises(SPARK_ERRORS, match="d=2026-01-02"):
        visits.merge(("a", 3, DAY_1))


def test_partition_values_of_every_type_are_written_as_literals(
    merged: Callable[..., Merged], ansi_modes: str
) -> None:
    schema = (
        "id int, seq int, s string, d date, t timestamp, n timestamp_ntz, b boolean, l bigint, m decimal(9,2)"
    )
    at = dt.datetime(2026, 3, 29, 1, 30, 0, 123456)  # noqa: DTZ001, the NTZ column takes no zone
    awkward = ["it's", "back\\slash", "\\'", "null", "", "naïve ✓", "a, b", "%s {{ x }}", None]
    names = ["s", "d", "t", "n", "b", "l", "m"]
    rows = [
        (i, 1, s, DAY_1, at, at, bool(i % 2), -(2**40), decimal.Decimal(1)) for i, s in enumerate(awkward)
    ] + [(99, 1, None, None, None, None, None, None, None)]  # fmt: skip
    key = ["id", *names]
    table = merged(
        schema, key=key, nullable_key=names, sequence=["seq"], prune_by=names, partition_by=names[:1]
    )
    table.load(rows).merge(*[(row[0], 2, *row[2:]) for row in rows])
    assert_rows(table.spark.table(table.name), [(i, 2) for i in [*range(len(awkward)), 99]], ["id", "seq"])


def test_many_partition_values_become_a_range(merged: Callable[..., Merged]) -> None:
    """501 values, 500 of them deletions of unknown keys: no partition is written for those."""
    schema = "id int, p int, is_deleted boolean"
    table = merged(schema, key=["id", "p"], partition_by=["p"], prune_by=["p"], **HARD)
    table.load([(0, 0, False), (1, 1000, False)])
    lost_partition(table, "p=1000")
    few, many = ([(i, i, i > 0) for i in range(number)] for number in (500, 501))
    assert "between" not in table.statement(few)
    assert "p` between 0 and 500)" in table.statement(many)
    table.merge(*many)
    assert_rows(table.spark.table(table.name).where("p = 0"), [(0, 0, False)])


def test_an_empty_batch_reads_and_writes_nothing(merged: Callable[..., Merged]) -> None:
    visits = merged(VISITS, key=["id", "d"], sequence=["seq"], partition_by=["d"], prune_by=["d"])
    visits.load([("a", 1, DAY_1)])
    lost_partition(visits, "d=2026-01-01")
    assert visits.merge().last.version == 0


def test_a_row_that_came_after_the_partitions_were_looked_up_stops_the_merge(
    merged: Callable[..., Merged],
) -> None:
    visits = merged(VISITS, key=["id", "d"], sequence=["seq"], partition_by=["d"], prune_by=["d"])
    visits.load([("a", 1, DAY_1), ("b", 1, DAY_2)])
    statement = visits.statement([("a", 2, DAY_1)])
    visits.batch([("a", 2, DAY_1), ("b", 2, DAY_2)])
    with pytest.raises(SPARK_ERRORS, match="changed while the model was running, run it again"):
        visits.spark.sql(statement)
    visits.holds(("a", 1, DAY_1), ("b", 1, DAY_2))


def test_pruning_by_a_column_that_changes_for_a_key_duplicates_the_key(merged: Callable[..., Merged]) -> None:
    """What `prune_by` asks the user to promise, and what a broken promise costs."""
    visits = merged(VISITS, key=["id"], sequence=["seq"], partition_by=["d"], prune_by=["d"])
    visits.load([("moves", 1, DAY_1)]).merge(("moves", 2, DAY_2))
    visits.holds(("moves", 1, DAY_1), ("moves", 2, DAY_2))
    visits.merger["prune_by"] = []
    visits.load([("moves", 1, DAY_1)]).merge(("moves", 2, DAY_2)).holds(("moves", 2, DAY_2))


def test_a_past_day_is_backfilled_after_newer_ones(merged: Callable[..., Merged]) -> None:
    visits = merged(VISITS, key=["id", "d"], sequence=["seq"], partition_by=["d"], prune_by=["d"])
    visits.load([("a", 1, DAY_1), ("b", 1, DAY_2)]).merge(("c", 1, DAY_3))
    visits.merge(("a", 2, DAY_1), ("late", 1, DAY_1))
    visits.holds(("a", 2, DAY_1), ("late", 1, DAY_1), ("b", 1, DAY_2), ("c", 1, DAY_3))
    assert visits.last.operationMetrics["numTargetFilesRemoved"] == "1"


# --- types -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["3000000000L", "'many'"], ids=["overflow", "text"])
def test_a_value_that_does_not_fit_the_target_fails_and_is_never_nulled(
    merged: Callable[..., Merged], wrong: str
) -> None:
    table = merged("id string, n int", key=["id"]).load([("a", 1)])
    statement = table.statement([("a", 2)])
    table.spark.sql(f"select 'a' as id, {wrong} as n").createOrReplaceTempView("batch")
    # ANSI off, as dbt-spark runs every statement: a plain cast would give NULL here.
    with (
        setting(table.spark, "spark.sql.ansi.enabled", "false"),
        pytest.raises(SPARK_ERRORS, match=r"OVERFLOW|CAST_INVALID_INPUT"),
    ):
        table.spark.sql(statement)
    table.holds(("a", 1))


# --- two at once, and a kill -----------------------------------------------------------------------------


def run_at_once(sessions: Sequence[SparkSession], statements: Sequence[str]) -> list[str]:
    """Run one statement in each session at the same time; return each one's error, or an empty text."""

    def run(session: SparkSession, statement: str) -> str:
        try:
            session.sql(statement)
        except SPARK_ERRORS as error:
            return str(error)
        return ""

    return at_once(*(partial(run, *each) for each in zip(sessions, statements, strict=True)))


def test_of_two_merges_at_once_one_fails_cleanly_and_its_retry_loses_nothing(
    merged: Callable[..., Merged],
) -> None:
    table = merged("id string, seq int, is_deleted boolean", key=["id"], sequence=["seq"], **HARD)
    table.load([("a", 0, False)])
    sessions = [table.spark.newSession() for _ in range(2)]
    conflicts, attempt = 0, 0
    while not conflicts:
        attempt += 1
        assert attempt <= 5, "no conflict in five attempts: the test proves nothing"
        newest = 2 * attempt
        batches = [[("a", newest - 1, False), (f"x{attempt}", 1, False)],
                   [("a", newest, False), (f"y{attempt}", 1, False)]]  # fmt: skip
        for session, batch in zip(sessions, batches, strict=True):
            session.createDataFrame(batch, table.schema).createOrReplaceTempView("batch")
        errors = run_at_once(sessions, [table.statement(batch) for batch in batches])
        assert all("DELTA_CONCURRENT" in error for error in errors if error), errors
        assert not all(errors), "one of the two gets through"
        ids = {row.id for row in table.spark.table(table.name).collect()}
        assert [f"{name}{attempt}" in ids for name in "xy"] == [not error for error in errors]
        for batch, error in zip(batches, errors, strict=True):
            if error:
                table.merge(*batch)
        conflicts += any(errors)
    others = [(f"{name}{i}", 1, False) for name in "xy" for i in range(1, attempt + 1)]
    table.holds(("a", newest, False), *others)


def test_two_merges_at_once_into_different_partitions_do_not_meet(merged: Callable[..., Merged]) -> None:
    table = merged(VISITS, key=["id", "d"], sequence=["seq"], partition_by=["d"], prune_by=["d"])
    table.load([("a", 1, DAY_1), ("b", 1, DAY_2)])
    sessions = [table.spark.newSession() for _ in range(2)]
    batches = [[("a", 2, DAY_1)], [("b", 2, DAY_2)]]
    for session, batch in zip(sessions, batches, strict=True):
        session.createDataFrame(batch, table.schema).createOrReplaceTempView("batch")
    assert run_at_once(sessions, [table.statement(batch) for batch in batches]) == ["", ""]
    table.holds(("a", 2, DAY_1), ("b", 2, DAY_2))


MERGE_IN_A_PROCESS = """
import sys
from pathlib import Path
from tests.support.session import start_session
spark = start_session(Path(sys.argv[1]))
rows = [("a", 2, False), ("b", 2, True), ("c", 2, False)]
spark.createDataFrame(rows, "id string, seq int, is_deleted boolean").createOrReplaceTempView("batch")
spark.sql(sys.argv[2])
"""


@pytest.mark.kill
@pytest.mark.parametrize("state", [TableState.DATA_WITHOUT_LOG, TableState.LOG_WRITTEN], ids=lambda s: s.name)
def test_a_killed_merge_is_applied_whole_or_not_at_all_and_a_rerun_completes_it(
    merged: Callable[..., Merged], tmp_path: Path, table_path: str, state: TableState
) -> None:
    table = merged("id string, seq int, is_deleted boolean", key=["id"], sequence=["seq"], **HARD)
    table.load([("a", 1, False), ("b", 1, False)])
    batch = [("a", 2, False), ("b", 2, True), ("c", 2, False)]
    after = [("a", 2, False), ("c", 2, False)]
    argv = [sys.executable, "-c", MERGE_IN_A_PROCESS, str(tmp_path), table.statement(batch)]
    reached = run_and_kill(argv, table_path, state)
    assert reached is state
    table.spark.sql(f"refresh table {table.name}")
    table.holds(*(after if state is TableState.LOG_WRITTEN else [("a", 1, False), ("b", 1, False)]))
    table.merge(*batch).holds(*after)


# --- dbt: the same by configuration alone ----------------------------------------------------------------

PAGE = "docs/idempotency.md"
THIS = "tests/patterns/idempotency/test_merger.py::"
SOURCES = raw_tables("device_changes", "user_changes", "plain_changes", "readme_changes")
stories = DbtStories()
USERS_MODEL = """
{{ config(
    materialized='incremental', incremental_strategy='merge', unique_key='id', partition_by='country',
    on_schema_change='append_new_columns',
    meta={'lakehouse_patterns': {'merger': {
        'deletes': 'soft', 'is_deleted': 'is_deleted', 'sequence': 'changed_at', 'on_null_key': 'quarantine',
        'prune_by': 'country'
    }}}
) }}
select * from {{ source('raw', 'user_changes') }}
"""


@stories.about("devices")
def test_the_devices_of_the_page(project: DbtProject) -> Story:
    schema = "type string, version string, full_name string, changed_at timestamp, is_deleted boolean"

    def at(day: int) -> dt.datetime:
        return dt.datetime(2026, 1, day, tzinfo=dt.UTC)

    def arrive(rows: list[tuple[Any, ...]]) -> None:
        project.source("device_changes", project.spark.createDataFrame(rows, schema))

    first = [("galaxy", "Android 11", "Galaxy S", at(1), False), ("mac", "Ventura", "Mac", at(1), False),
             ("lg", "G4", "LG", at(1), False), ("htc", "One", "HTC", at(1), True)]  # fmt: skip
    second = [("galaxy", "Android 11", "Galaxy S II", at(2), False), ("mac", "Sonoma", "Mac", at(2), False),
              ("mac", "Tahoe", "Mac", at(2), None)]  # fmt: skip
    expected = [("galaxy", "Android 11", "Galaxy S II"), ("mac", "Ventura", "Mac"), ("lg", "G4", "LG"),
                ("mac", "Sonoma", "Mac"), ("mac", "Tahoe", "Mac")]  # fmt: skip
    columns = ["type", "version", "full_name"]

    arrive(first)
    yield PASSES
    assert_rows(project.table("devices"), [row[:3] for row in first[:3]], columns)

    arrive(second)
    yield PASSES
    assert_rows(project.table("devices"), expected, columns)
    yield PASSES
    assert_rows(project.table("devices"), expected, columns)
    assert len(project.history("devices")) == 2, "the rerun commits nothing"

    arrive([("lg", "G4", "LG", at(3), True)])
    yield PASSES
    assert_rows(project.table("devices"), [r for r in expected if r[0] != "lg"], columns)

    arrive(first + second)
    project.run("run", "--select", "devices", "--full-refresh")
    assert_rows(project.table("devices"), expected, columns)


@stories.about("readme_users")
def test_the_model_of_the_readme(project: DbtProject) -> Story:
    def arrive(*rows: tuple[Any, ...]) -> None:
        schema = "id string, plan string, is_deleted boolean, changed_at int"
        project.source("readme_changes", project.spark.createDataFrame(rows, schema))

    arrive(("a", "free", False, 1), ("b", "free", False, 1))
    yield PASSES
    arrive(("a", "paid", False, 3), ("a", "free", False, 2), ("b", None, True, 2), ("c", None, True, 1))
    yield PASSES
    assert_rows(
        project.table("readme_users"),
        [("a", "paid", False), ("b", None, True), ("c", None, True)],
        ["id", "plan", "is_deleted"],
    )


@stories.about("users")
def test_null_keys_are_quarantined_once_and_columns_are_added(project: DbtProject) -> Story:
    narrow = "id string, country string, plan string, changed_at int, is_deleted boolean"

    def arrive(schema: str, *rows: tuple[Any, ...]) -> None:
        project.source("user_changes", project.spark.createDataFrame(rows, schema))

    null_key = (None, "pl", "x", 1, False)
    arrive(narrow, ("a", "pl", "basic", 1, False), null_key, null_key)
    yield PASSES

    arrive(
        narrow + ", email string",
        ("a", "pl", "basic", 2, True, "x@y"), ("b", "fr", "basic", 1, None, "b@y"),
        ("b", "fr", "basic", None, False, "b@y"),
    )  # fmt: skip
    for _ in range(2):
        yield PASSES
        assert_rows(
            project.table("users"),
            [("a", "pl", "basic", 2, True, "x@y"), ("b", "fr", "basic", 1, False, "b@y")],
        )
        quarantine = project.table("users__quarantine")
        assert_rows(
            quarantine,
            [("NULL_KEY", "NULL in id", 2), ("NULL_KEY", "NULL in changed_at", 1)],
            ["error_class", "error_message", "copies"],
        )
    payloads = [row.payload for row in quarantine.where("copies = 2").collect()]
    assert payloads == ['{"id":null,"country":"pl","plan":"x","changed_at":1,"is_deleted":false}']
    assert "DBT_INTERNAL_DEST.`country` in ('fr', 'pl')" in project.executed("users")

    # The column that the feed no longer delivers stays as it is; a new key has NULL in it.
    arrive(narrow, ("b", "fr", "premium", 3, False), ("c", "fr", "basic", 3, False))
    yield PASSES
    assert_rows(
        project.table("users"),
        [("a", "pl", "basic", 2, True, "x@y"), ("b", "fr", "premium", 3, False, "b@y"),
         ("c", "fr", "basic", 3, False, None)],
    )  # fmt: skip


ROW = "1 as id, 'no' as flag, 1 as seq, 0.5D as ratio"


def model(merger: str = "{}", columns: str = ROW, **config: str) -> str:
    """Return an incremental model over one inline row."""
    settings = {"materialized": "'incremental'", "incremental_strategy": "'merge'", "unique_key": "'id'"}
    arguments = ", ".join(f"{name}={value}" for name, value in (settings | config).items())
    return f"""{{{{ config({arguments}, meta={{'lakehouse_patterns': {{'merger': {merger}}}}}) }}}}
select {columns}"""


REFUSED = {
    "not_merge": (
        model(incremental_strategy="'append'"),
        "needs incremental_strategy='merge', got 'append'",
    ),
    "not_delta": (model(file_format="'iceberg'"), "needs file_format='delta', got 'iceberg'"),
    "no_key": (model(unique_key="none"), "needs unique_key"),
    "unknown_deletes": (
        model("{'deletes': 'all'}"),
        "deletes must be one of none, soft, hard, got 'all'",
    ),
    "unknown_on_null_key": (
        model("{'on_null_key': 'skip'}"),
        "on_null_key must be one of fail, quarantine, got 'skip'",
    ),
    "no_flag": (model("{'deletes': 'hard'}"), "got deletes: hard and is_deleted: None"),
    "flag_alone": (model("{'is_deleted': 'flag'}"), "got deletes: none and is_deleted: flag"),
    "text_flag": (
        model("{'deletes': 'soft', 'is_deleted': 'flag'}"),
        "is_deleted must be a boolean, 'flag' is a string",
    ),
    "unknown_column": (
        model("{'sequence': 'at'}"),
        "the model has no column 'at'; it has: id, flag, seq, ratio",
    ),
    "nullable_no_key": (
        model("{'nullable_key': ['seq']}"),
        "nullable_key may name only columns of unique_key (id), got 'seq'",
    ),
    "nothing_to_quarantine": (
        model("{'on_null_key': 'quarantine', 'nullable_key': 'id'}"),
        "on_null_key: quarantine has nothing to quarantine",
    ),
    "kept_key": (
        model("{'keep_on_null': 'id'}"),
        "keep_on_null is for attributes; 'id' is part of unique_key",
    ),
    "kept_of_removed": (
        model(
            "{'keep_on_null': 'ratio', 'deletes': 'hard', 'is_deleted': 'gone'}",
            columns=f"{ROW}, true as gone",
        ),
        "keep_on_null needs deletes: none or deletes: soft",
    ),
    "ratio_pruned": (
        model("{'prune_by': 'ratio'}", partition_by="'ratio'"),
        "prune_by may not name a column of type double, got 'ratio'",
    ),
    "prune_no_partition": (
        model("{'prune_by': ['seq']}"),
        "prune_by may name only columns of partition_by (), got 'seq'",
    ),
}
# The first load is right; the merge would not be.
REFUSED_LATER = {
    "sequence_not_updated": (
        model("{'sequence': 'seq'}", merge_exclude_columns="['seq']"),
        "must leave 'seq' updated",
    ),
    "column_lost": (
        model(columns="1 as id {% if not is_incremental() %}, 2 as extra {% endif %}"),
        "has columns that the model lacks: extra",
    ),
}


@stories.about(*REFUSED)
def test_wrong_configuration_is_refused_in_one_sentence(project: DbtProject) -> Story:
    errors = yield FAILS
    for name, (_, sentence) in REFUSED.items():
        assert f"{name}: error" in errors
        assert sentence in errors, name


@stories.about(*REFUSED_LATER)
def test_wrong_merge_is_refused_in_one_sentence(project: DbtProject) -> Story:
    yield PASSES
    errors = yield FAILS
    for name, (_, sentence) in REFUSED_LATER.items():
        assert f"{name}: error" in errors
        assert sentence in errors, name


def test_options_without_the_dispatch_that_serves_them_are_refused(
    make_project: Callable[..., DbtProject],
) -> None:
    configuration = """
name: harness
profile: harness
models: {+file_format: delta}
dispatch: [{macro_namespace: dbt, search_order: [harness, dbt]}]
"""
    files = {"dbt_project.yml": configuration, "models/forgotten.sql": model("{'sequence': 'seq'}")}
    error = make_project(files).fails("run")
    assert "forgotten has options under meta.lakehouse_patterns.merger" in error
    assert "dispatch in dbt_project.yml must name lakehouse_patterns before dbt" in error


PLAIN = {
    "plain_list_key": "unique_key=['id', 'country'], merge_update_columns=['plan']",
    "plain_one_key": "unique_key='id', merge_exclude_columns=['plan'], "
    "incremental_predicates=[\"DBT_INTERNAL_DEST.country = 'pl'\"], on_schema_change='append_new_columns'",
}


PLAIN_MODELS = {
    f"models/{name}.sql": f"""
{{{{ config(materialized='incremental', incremental_strategy='merge', {config}, meta={{'owner': 'us'}}) }}}}
select * from {{{{ source('raw', 'plain_changes') }}}}"""
    for name, config in PLAIN.items()
}


@stories.about(*PLAIN)
def test_a_model_without_options_runs_the_sql_of_dbt_spark_alone(project: DbtProject) -> Story:
    def executed(of: DbtProject) -> dict[str, str]:
        return {name: of.executed(name).replace(of.schema, "").replace(str(of.root), "") for name in PLAIN}

    alone = DbtProject(
        project.root.with_name(f"{project.root.name}_alone"),
        project.spark,
        {"models/sources.yml": SOURCES, **PLAIN_MODELS},
        with_package=False,
    )
    for of in (project, alone):
        of.source(
            "plain_changes",
            of.spark.createDataFrame([("a", "pl", "basic")], "id string, country string, plan string"),
        )

    yield PASSES
    alone.run("run")
    assert executed(project) == executed(alone)

    yield PASSES
    alone.run("run")
    assert executed(project) == executed(alone)
    assert all("merge into" in sql for sql in executed(project).values())


@pytest.fixture(scope="module")
def project(make_project: Callable[..., DbtProject]) -> DbtProject:
    """A project with the page's model, one that uses the other options, refused ones and plain ones."""
    devices, *_ = snippets(PAGE, f"{THIS}test_the_devices_of_the_page")
    (readme,) = snippets("README.md", f"{THIS}test_the_model_of_the_readme")
    models = {"devices": devices, "users": USERS_MODEL}
    models["readme_users"] = readme.replace("'user_changes'", "'readme_changes'")
    models |= {name: text for name, (text, _) in (REFUSED | REFUSED_LATER).items()}
    files = {f"models/{name}.sql": text for name, text in models.items()}
    return make_project({"models/sources.yml": SOURCES, **files, **PLAIN_MODELS})
