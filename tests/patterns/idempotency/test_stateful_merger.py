"""Stateful Merger: a run for an old time is merged into the table of that time."""

from __future__ import annotations

import datetime as dt
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from python_jobs.idempotency.stateful_merger import Commit, Parameters, Run, plan, run
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.delta.commits import latest_version, write_once
from python_jobs.shared.delta.merge import MergeRules, merge
from tests.support.other_commits import commit
from tests.support.rows import assert_rows
from tests.support.session import setting
from tests.support.snippets import snippet

THIS = "tests/patterns/idempotency/test_stateful_merger.py::"


# --- the plan: without Spark ----------------------------------------------------------------------------


def october(day: int) -> dt.datetime:
    return dt.datetime(2024, 10, day, tzinfo=dt.UTC)


def planned(
    recorded: dict[int, int], commits: dict[int, str], day: int, previous: int | None = None
) -> tuple[str, int]:
    """Plan from days and versions; a commit is 'merge 7', 'base 7' (of the run of 10-07) or an operation."""
    newest_first = []
    for version, what in sorted(commits.items(), reverse=True):
        step, _, of = what.partition(" ")
        own = step in ("merge", "base")
        newest_first.append(
            Commit(
                version, "MERGE" if own else what, step if own else None, october(int(of)) if own else None
            )
        )
    base = plan(
        {october(d): version for d, version in recorded.items()},
        newest_first,
        october(day),
        None if previous is None else october(previous),
    )
    return (base.action, base.version)


FOUR = {5: 1, 6: 2, 7: 3, 8: 4}
FOUR_COMMITS = {1: "merge 5", 2: "merge 6", 3: "merge 7", 4: "merge 8"}
COMPACTED = {5: 5, 6: 7, 7: 9, 8: 10}
COMPACTED_COMMITS = {5: "merge 5", 6: "OPTIMIZE", 7: "merge 6", 8: "OPTIMIZE", 9: "merge 7", 10: "merge 8"}
# 10-07 replayed: RESTORE to 2 is version 5, its merge 6.
REPLAYED = FOUR | {7: 6}
HOURS, HOURS_COMMITS = {8: 4, 9: 5, 10: 6}, {4: "merge 8", 5: "merge 9", 6: "merge 10"}
REPLAYED_COMMITS = FOUR_COMMITS | {5: "base 7", 6: "merge 7"}


@pytest.mark.parametrize(
    ("recorded", "commits", "day", "expected"),
    [
        (HOURS, HOURS_COMMITS, 11, ("keep", 0)),
        (HOURS, HOURS_COMMITS, 9, ("restore", 4)),
        (FOUR, FOUR_COMMITS, 9, ("keep", 0)),
        (FOUR, FOUR_COMMITS, 8, ("restore", 3)),
        (FOUR, FOUR_COMMITS, 7, ("restore", 2)),
        (FOUR, FOUR_COMMITS, 6, ("restore", 1)),
        (FOUR, FOUR_COMMITS, 5, ("empty", 0)),
        ({}, {0: "base 5"}, 5, ("keep", 0)),
        (REPLAYED, REPLAYED_COMMITS, 8, ("keep", 0)),
        (REPLAYED, REPLAYED_COMMITS, 7, ("restore", 5)),
        (FOUR, {2000: "WRITE"}, 7, ("restore", 2)),
        (FOUR, {2000: "WRITE"}, 9, ("keep", 0)),
    ],
    ids=[
        "three runs: next",
        "three runs: middle",
        "normal",
        "latest",
        "middle",
        "second",
        "first",
        "very first",
        "run after",
        "replayed twice",
        "the log has lost the runs' commits: middle",
        "the log has lost the runs' commits: next",
    ],
)
def test_the_run_mode_follows_from_the_recorded_versions(
    recorded: dict[int, int], commits: dict[int, str], day: int, expected: tuple[str, int]
) -> None:
    assert planned(recorded, commits, day) == expected


@pytest.mark.parametrize(
    ("day", "expected"),
    [(7, ("restore", 8)), (8, ("restore", 9)), (9, ("keep", 0))],
    ids=["keeps the compaction before", "nothing between", "after"],
)
@pytest.mark.parametrize("after", [{}, {11: "OPTIMIZE"}, {11: "VACUUM START", 12: "VACUUM END"}])
def test_compaction_is_kept_and_triggers_no_restore(
    day: int, expected: tuple[str, int], after: dict[int, str]
) -> None:
    assert planned(COMPACTED, COMPACTED_COMMITS | after, day) == expected


@pytest.mark.parametrize(
    ("recorded", "commits", "day", "expected"),
    [
        # merged, not recorded
        (FOUR, FOUR_COMMITS | {5: "merge 9"}, 9, ("restore", 4)),
        ({}, {0: "base 5", 1: "merge 5"}, 5, ("empty", 0)),
        # restored, not merged: the same run goes on, another one takes the table to its own past
        (FOUR, FOUR_COMMITS | {5: "base 7"}, 7, ("keep", 0)),
        (FOUR, FOUR_COMMITS | {5: "base 7"}, 9, ("restore", 4)),
        (FOUR, FOUR_COMMITS | {5: "base 7"}, 6, ("restore", 1)),
        # the run after a replay, merged, not recorded: its recorded version is from before the replay
        (REPLAYED, REPLAYED_COMMITS | {7: "merge 8"}, 8, ("restore", 6)),
    ],
)
def test_a_run_that_died_is_undone(
    recorded: dict[int, int], commits: dict[int, str], day: int, expected: tuple[str, int]
) -> None:
    assert planned(recorded, commits, day) == expected


def test_a_run_whose_predecessor_lags_behind_is_refused() -> None:
    with pytest.raises(NotReady, match=r"a run before 2024-10-08T00:00:00 was replayed .* replay 2024-10-08"):
        planned(REPLAYED, REPLAYED_COMMITS, 9)
    with pytest.raises(
        NotReady, match="the run of 2024-10-09T00:00:00 has recorded no version; run it first"
    ):
        planned(FOUR, FOUR_COMMITS, 10, previous=9)
    with pytest.raises(WrongUse, match="but 2024-10-08T00:00:00 ran in between"):
        planned(FOUR, FOUR_COMMITS, 9, previous=7)
    assert planned(FOUR, FOUR_COMMITS, 9, previous=8) == ("keep", 0)
    assert planned({}, {0: "base 5"}, 5, previous=4) == ("keep", 0)  # the first run


# --- on Delta -------------------------------------------------------------------------------------------


@dataclass
class Table:
    """A target with the increments of its hours."""

    spark: SparkSession
    root: Path
    increments: dict[str, list[tuple[str, str, bool]]] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return str(self.root / "letters")

    @property
    def versions(self) -> str:
        return str(self.root / "letters_versions")

    def parameters(self, hour: str, **others: Any) -> Parameters:
        given: dict[str, Any] = {
            "target": self.target,
            "versions": self.versions,
            "query": "select id, value, is_deleted from increments where hour = {execution_time}",
            "execution_time": f"2024-10-07T{hour}",
            "key": ["id"],
            "is_deleted": "is_deleted",
            "deletes": "hard",
        }
        return Parameters(**given | others)

    def run(self, hour: str, **others: Any) -> dict[str, Any]:
        columns = "hour string, id string, value string, is_deleted boolean"
        rows = [(f"2024-10-07T{at}", *row) for at, increment in self.increments.items() for row in increment]
        self.spark.createDataFrame(rows, columns).createOrReplaceTempView("increments")
        return run(self.spark, self.parameters(hour, **others))

    def rows(self) -> list[tuple[str, str]]:
        return sorted(
            (row.id, row.value) for row in self.spark.read.format("delta").load(self.target).collect()
        )

    def recorded(self) -> dict[int, int]:
        rows = self.spark.read.format("delta").load(self.versions).collect()
        return {row.execution_time.hour: row.delta_table_version for row in rows}


SEVEN, EIGHT = [("A", "1", False)], [("A", "U", False), ("B", "1", False)]
NINE, TEN = [("B", "1", True), ("C", "1", False)], [(letter, "1", False) for letter in "MNO"]
AFTER = {
    "07": [("A", "1")],
    "08": [("A", "U"), ("B", "1")],
    "09": [("A", "U"), ("C", "1")],
}


class Story(Table):
    """What the runs of a day reported and left; see `story`."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        super().__init__(spark, root, {"07": SEVEN, "08": EIGHT, "09": NINE, "10": TEN})
        self.reports: dict[str, dict[str, Any]] = {}
        self.left: dict[str, list[tuple[str, str]]] = {}
        self.refused: dict[str, JobFailed] = {}
        self.recorded_at_last: dict[int, int] = {}

    def step(self, name: str, hour: str, **others: Any) -> None:
        self.reports[name] = self.run(hour, **others)
        self.left[name] = self.rows()

    def version(self, name: str) -> int:
        """Return the version that a run reported."""
        return int(self.reports[name]["table_version"])

    def refuse(self, name: str, hour: str, **others: Any) -> None:
        """Note why a run is refused, which must leave the table's version as it was."""
        before = latest_version(self.spark, self.target)
        with pytest.raises(JobFailed) as refused:
            self.run(hour, **others)
        assert latest_version(self.spark, self.target) == before
        self.refused[name] = refused.value


def overtaken(story: Story, hour: str) -> Callable[..., None]:
    """Return a merge that another run of the hour comes before."""

    def merge_second(spark: SparkSession, rows: DataFrame, target: str, rules: MergeRules) -> None:
        Run(spark, story.parameters(hour))._commit_without_change()
        merge(spark, rows, target, rules)

    return merge_second


@pytest.fixture(scope="module")
def story(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = Story(spark, tmp_path_factory.mktemp("story"))
    for hour in ("07", "08", "09"):
        story.step(hour, hour)
    spark.sql(f"delete from delta.`{story.target}` where id = 'C'").collect()  # version 4, by another writer
    query = story.parameters("08").query
    story.refuse("wider", "08", query=f"select *, 'x' as colour from ({query})")
    story.refuse("narrower", "09", query=query.replace("id, value, is_deleted", "id"))
    story.refuse("merge before restore", "08", step="merge")
    story.refuse("record before merge", "08", step="record")
    # A replay of 08 ends after its restore, and its next try after its merge; then the increment is corrected.
    story.increments["08"] = [*EIGHT, ("X", "1", False)]
    story.step("08, restored", "08", step="restore")
    story.step("08, merged", "08", step="merge")
    story.step("08, merged again", "08", step="merge")
    story.increments["08"] = EIGHT
    story.step("08 replayed", "08")
    story.refuse("10 too early", "10")
    story.step("09 replayed", "09")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("python_jobs.idempotency.stateful_merger.merge", overtaken(story, "10"))
        with pytest.raises(JobFailed) as refused:
            story.run("10")
    story.refused["two at once"] = refused.value
    story.increments["10"] = []
    story.step("10 again, empty", "10")
    story.recorded_at_last = story.recorded()
    with setting(spark, "spark.databricks.delta.retentionDurationCheck.enabled", "false"):
        spark.sql(f"vacuum delta.`{story.target}` retain 0 hours").collect()
    story.refuse("08 vacuumed", "08")
    story.step("07 from scratch", "07")
    return story


def test_each_run_records_the_version_of_its_merge(story: Story) -> None:
    assert [story.version(hour) for hour in ("07", "08", "09")] == [1, 2, 3]
    assert [story.reports[hour]["base"] for hour in ("07", "08", "09")] == ["created", "keep", "keep"]
    for hour in ("07", "08", "09"):
        assert story.left[hour] == AFTER[hour]


def test_a_replay_shows_the_table_of_its_time(story: Story) -> None:
    replayed = story.reports["08 replayed"]
    assert (replayed["base"], replayed["restored_version"], replayed["to_replay"]) == (
        "restore",
        1,
        ["2024-10-07T09:00:00"],
    )
    assert story.left["08 replayed"] == AFTER["08"]
    # RESTORE is a version too: 4 is the DELETE, 5 and 7 are restores, 6 is a merge that was not recorded.
    assert story.version("08 replayed") == 8
    assert story.reports["09 replayed"]["base"] == "keep"
    assert story.left["09 replayed"] == AFTER["09"]
    assert story.version("09 replayed") == 9
    assert {hour: story.recorded_at_last[hour] for hour in (7, 8, 9)} == {7: 1, 8: 8, 9: 9}


def test_a_restore_names_the_commits_of_others_that_it_undoes(story: Story) -> None:
    assert story.reports["08, restored"]["undone"] == ["DELETE (version 4)"]


def test_a_run_before_the_replay_has_come_to_it_is_refused(story: Story) -> None:
    assert isinstance(story.refused["10 too early"], NotReady)
    assert "replay 2024-10-07T09:00:00 first" in str(story.refused["10 too early"])


def test_a_backfill_that_ends_after_its_restore_is_completed_by_the_next_run(story: Story) -> None:
    assert story.left["08, restored"] == AFTER["07"]
    assert story.reports["08, merged"]["merged"] is True
    assert story.left["08, merged"] == [*AFTER["08"], ("X", "1")]


def test_a_run_that_died_before_recording_is_merged_again_into_the_same_table(story: Story) -> None:
    assert "table_version" not in story.reports["08, merged"]
    assert story.reports["08, merged again"]["merged"] is False
    assert story.left["08, merged again"] == story.left["08, merged"]
    assert (
        story.reports["08 replayed"]["restored_version"] == story.reports["08, restored"]["restored_version"]
    )
    assert story.left["08 replayed"] == AFTER["08"], "X is not in the corrected increment"


def test_an_empty_increment_records_a_version_of_its_own(story: Story) -> None:
    empty = story.version("10 again, empty")
    assert empty > story.version("09 replayed")
    assert story.recorded_at_last[10] == empty
    assert story.left["10 again, empty"] == AFTER["09"]


def test_two_runs_at_once_are_noticed_and_both_undone(story: Story) -> None:
    assert "two runs were merged into" in str(story.refused["two at once"])
    assert story.reports["10 again, empty"]["restored_version"] == story.version("09 replayed")
    assert story.left["10 again, empty"] == AFTER["09"], "M, N and O of the run before are undone"


def test_a_vacuumed_version_is_refused_before_any_change(story: Story) -> None:
    assert "version 7 of " in str(story.refused["08 vacuumed"])
    assert "its files were vacuumed; nothing was changed" in str(story.refused["08 vacuumed"])
    # From the first run on everything can be had again.
    assert story.reports["07 from scratch"]["base"] == "empty"
    assert story.left["07 from scratch"] == AFTER["07"]


def test_a_changed_schema_is_refused_before_any_change(story: Story) -> None:
    assert all(isinstance(story.refused[name], DataRefused) for name in ("wider", "narrower"))
    assert "has in addition colour, compared with" in str(story.refused["wider"])
    assert "version as of 1; nothing was changed" in str(story.refused["wider"])
    assert "lacks is_deleted, value" in str(story.refused["narrower"])


def test_steps_out_of_turn_are_refused(story: Story) -> None:
    assert all(
        isinstance(story.refused[f"{name}"], NotReady)
        for name in ("merge before restore", "record before merge")
    )
    assert "has changed since the run before 2024-10-07T08; run step restore" in str(
        story.refused["merge before restore"]
    )
    assert "is not the merge of 2024-10-07T08; run step merge" in str(story.refused["record before merge"])


@pytest.fixture
def letters(spark: SparkSession, tmp_path: Path) -> Table:
    return Table(spark, tmp_path, {"07": SEVEN, "08": EIGHT, "09": NINE})


def test_what_compaction_made_between_two_runs_stays_in_the_table(letters: Table) -> None:
    letters.increments["08"] = [("B", "1", False)]
    for hour in ("07", "08"):
        letters.run(hour)
    table = f"delta.`{letters.target}`"
    letters.spark.sql(f"optimize {table}").collect()
    compacted = latest_version(letters.spark, letters.target)
    files = letters.spark.table(table).inputFiles()
    assert (compacted, len(files)) == (3, 1), "two files were there"
    letters.run("09")
    letters.increments["09"] = []
    report = letters.run("09")
    assert (report["base"], report["restored_version"], report["undone"]) == ("restore", compacted, [])
    assert letters.rows() == [("A", "1"), ("B", "1")]
    assert letters.spark.table(table).inputFiles() == files


def test_a_replay_finds_its_runs_behind_any_number_of_other_commits(letters: Table) -> None:
    for hour in ("07", "08", "09"):
        letters.run(hour)
    commit(letters.target, 130)
    report = letters.run("08")
    assert (report["base"], report["restored_version"]) == ("restore", 1)
    assert len(report["undone"]) == 130
    assert letters.rows() == AFTER["08"]
    commit(letters.target, 130)
    assert letters.run("09")["base"] == "keep"
    assert letters.rows() == AFTER["09"]


def test_the_execution_time_is_a_text_of_the_query_whatever_is_in_it(letters: Table) -> None:
    with pytest.raises(WrongUse, match="'2024-10-07'08' is not a time"):
        letters.run("07", execution_time="2024-10-07'08")


def test_another_table_in_its_place_is_refused_and_an_existing_one_adopted(letters: Table) -> None:
    spark = letters.spark
    write_once(spark, spark.createDataFrame([("A", "0", False)], "id string, value string, is_deleted boolean"),
               letters.target)  # fmt: skip
    with pytest.raises(WrongUse, match=r"has no run that wrote them; make them .* with step adopt"):
        letters.run("07")
    letters.run("07", step="adopt")
    with pytest.raises(WrongUse, match=r"has recorded runs in .* and can't be adopted"):
        letters.run("08", step="adopt")
    with pytest.raises(WrongUse, match="was adopted as the outcome of 2024-10-07T07:00:00, so earlier"):
        letters.run("07")
    letters.run("08")
    assert letters.run("08")["restored_version"] == letters.recorded()[7]
    assert letters.rows() == AFTER["08"]
    spark.sql(f"create or replace table delta.`{letters.target}_2` using delta as select 1 as id").collect()
    with pytest.raises(WrongUse, match="holds the versions of another table than"):
        letters.run("09", target=f"{letters.target}_2")
    with pytest.raises(WrongUse, match="is no table of versions: it has id, not execution_time"):
        letters.run("09", versions=f"{letters.target}_2")


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"key": []}, "key is empty"),
        ({"retention_days": 0}, "retention_days must be 1 or more, got 0"),
        ({"previous_execution_time": "2024-10-07T09"}, "is not before 2024-10-07T08"),
        ({"execution_time": "yesterday"}, "'yesterday' is not a time"),
    ],
)
def test_wrong_parameters_are_refused(tmp_path: Path, others: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WrongUse, match=sentence):
        assert Table(None, tmp_path).parameters("08", **others).at  # type: ignore[arg-type]


def test_the_rules_are_those_of_merger(spark: SparkSession, table_path: str) -> None:
    columns = "id string, at int, gone boolean"
    write_once(spark, spark.createDataFrame([("a", 5, False), ("b", 5, False)], columns), table_path)
    rules = MergeRules(["id"], "gone", "hard", ["at"])
    changes = [("a", 4, False), ("b", 6, True), ("c", 1, True), ("d", 1, False), ("d", 2, None)]
    merge(spark, spark.createDataFrame(changes, columns), table_path, rules)
    assert_rows(spark.read.format("delta").load(table_path), [("a", 5, False), ("d", 2, False)])
    with pytest.raises(DataRefused, match="has a row with NULL in id; the table stays as it is"):
        merge(spark, spark.createDataFrame([(None, 1, False)], columns), table_path, rules)
    with pytest.raises(WrongUse, match="the model has no column 'ids'"):
        merge(spark, spark.createDataFrame(changes, columns), table_path, MergeRules(["ids"]))


def test_the_command_of_the_page(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKEHOUSE_ROOT", str(tmp_path / "lakehouse"))
    columns = "type string, version string, full_name string, load_date string"
    rows = [("galaxy", "13", "Galaxy S", "2024-10-07"), ("galaxy", "14", "Galaxy S", "2024-10-08")]
    spark.createDataFrame(rows, columns).createOrReplaceTempView("bronze_devices")
    text = snippet("docs/idempotency.md", f"{THIS}test_the_command_of_the_page")
    command = shlex.split(os.path.expandvars(text.replace("\\\n", " ")))
    assert command[:2] == ["spark-submit", "python_jobs/idempotency/stateful_merger.py"]
    parameters, _ = parse_parameters(Parameters, command[2:])
    assert run(spark, parameters)["table_version"] == 1
    assert_rows(
        spark.read.format("delta").load(str(tmp_path / "lakehouse/silver/devices")),
        [("galaxy", "13", "Galaxy S")],
    )
