"""Batch Reprocessor of records: the rows of a range of offsets again, each partition by its own bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from delta.tables import DeltaTable
from pyspark.sql import SparkSession

from python_jobs.shared.core.failures import NotReady, WrongUse
from python_jobs.shared.delta.commits import latest_version
from python_jobs.streaming import batch_reprocessor_records as job
from python_jobs.streaming.corrections import ACTION, REPLACED, UNCHANGED, compared
from tests.support.page_commands import command_parameters
from tests.support.rows import assert_rows
from tests.support.snippets import snippet

PAGE = "docs/streaming.md"
HERE = "tests/patterns/streaming/test_batch_reprocessor_records.py"
RAW = "topic string, partition int, offset bigint, payload string"


@dataclass
class Topic:
    """The raw table of a topic of two partitions, and the table that a faulty release has made of it."""

    spark: SparkSession
    folder: Path

    def path(self, table: str) -> str:
        """Return the path of a table."""
        return str(self.folder / table)

    def run(self, **changes: str) -> dict[str, Any]:
        """Run the page's command with ``changes`` and return its report."""
        command = snippet(PAGE, f"{HERE}::test_each_partition_has_bounds_of_its_own")
        given = {"now": "2024-03-21T10:00:00Z"} | changes
        return job.run(self.spark, command_parameters(job.Parameters, command, self.folder, given))

    def rows(self) -> list[tuple[Any, ...]]:
        """Return partition, offset, page and origin of the topic's rows."""
        rows = self.spark.read.format("delta").load(self.path("all_visits")).where("topic = 'visits'")
        return sorted(tuple(row) for row in rows.select("partition", "offset", "page", "origin").collect())


@pytest.fixture(scope="module")
def topic(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Topic:
    topic = Topic(spark, tmp_path_factory.mktemp("topic"))
    records = [
        (name, partition, offset, f"{partition}-{offset}")
        for name in ("visits", "others")
        for partition in (0, 1)
        for offset in range(6)
    ]
    # One record came twice, as after a crash of an at-least-once copy.
    frame = spark.createDataFrame([*records, records[7]], RAW).coalesce(1)
    frame.write.format("delta").save(topic.path("history"))
    for name in ("visits", "others"):
        whole = {
            f"{end}.{partition}": str(6 * (end == "end")) for end in ("begin", "end") for partition in (0, 1)
        }
        changes = {"topic": name, "columns.page": "'wrong'", "origin": "historical"}
        topic.run(**whole, **changes)
    DeltaTable.forPath(spark, topic.path("history")).delete("partition = 0 and offset = 3")
    return topic


@pytest.fixture(scope="module")
def report(topic: Topic) -> dict[str, Any]:
    """Run the page's command: offsets 2 to 4 of partition 0, and 1 of partition 1."""
    return topic.run()


def test_each_partition_has_bounds_of_its_own(topic: Topic, report: dict[str, Any]) -> None:
    """A range from 1 to 5 over all partitions would take ten records in place of four."""
    corrected = {(0, 2), (0, 4), (1, 1)}
    expected = [
        (partition, offset, f"{partition}-{offset}", "reprocessing")
        if (partition, offset) in corrected
        else (partition, offset, "wrong", "historical")
        for partition in (0, 1)
        for offset in range(6)
        if (partition, offset) != (0, 3)
    ]
    assert_rows(topic.rows(), expected)
    assert report["replaced"] == 3


def test_an_erased_record_is_deleted_and_another_topic_stays(topic: Topic, report: dict[str, Any]) -> None:
    assert report["removed"] == 1
    rows = topic.spark.read.format("delta").load(topic.path("all_visits")).where("topic = 'others'")
    assert rows.where("page = 'wrong'").count() == 12


def test_a_rerun_commits_nothing(topic: Topic, report: dict[str, Any]) -> None:
    before = latest_version(topic.spark, topic.path("all_visits")), topic.rows()
    again = topic.run(now="2024-03-22T10:00:00Z")
    assert {name: again[name] for name in ("added", "replaced", "removed", "unchanged")} == {
        "added": 0, "replaced": 0, "removed": 0, "unchanged": 3,
    }  # fmt: skip
    assert (latest_version(topic.spark, topic.path("all_visits")), topic.rows()) == before


def test_wrong_use_is_refused_in_one_sentence(topic: Topic) -> None:
    for changes, sentence in [
        (
            {"begin.2": "0"},
            "begin and end must name the same partitions by their numbers, got 0, 1, 2 and 0, 1",
        ),
        ({"begin.0": "5"}, "begin.0 must be before end.0, got 5 and 5"),
        ({"begin.1": "-1"}, "begin.1 must be 0 or more, got -1"),
        ({"columns.Origin": "payload"}, "columns can't name columns that the job writes itself: Origin"),
        ({"target": topic.path("history")}, "source and target must be two tables"),
        ({"columns.page": "no_column"}, "an expression can't be resolved"),
    ]:
        with pytest.raises(WrongUse, match=sentence):
            topic.run(**changes)
    with pytest.raises(NotReady, match="there is no Delta table"):
        topic.run(source=topic.path("nothing"))


def test_rows_with_maps_and_variants_are_compared_by_their_content(spark: SparkSession) -> None:
    """Spark compares neither."""
    rows = {
        name: spark.sql(
            f"select * from values (1, 'a', '1.10'), (2, '{name}', '2'), (3, 'c', '{number}') as t(id, tag, number)"
        ).selectExpr(
            "id",
            "map('tag', tag) as tags",
            "array(named_struct('list', map(id, array(tag)))) as nested",
            "parse_json(number) as number",
        )
        for name, number in (("old", "3.0"), ("new", "3.5"))
    }
    changes = compared(rows["new"], rows["old"], ["id"], "written_at")
    assert_rows(changes.select("__id.id", ACTION), [(1, UNCHANGED), (2, REPLACED), (3, REPLACED)])
