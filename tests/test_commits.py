"""What a table's log says of a write, however many commits others make meanwhile; and files that one of many makes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.delta.checkpoints import claim
from python_jobs.shared.delta.commits import commits, commits_after, find_commit, noted, write_once
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from tests.support.other_commits import commit

MANY = 130  # more than the first two portions that are read of a history


def test_a_write_is_found_behind_many_commits_and_a_skipped_one_is_not(
    spark: SparkSession, table_path: str
) -> None:
    rows = spark.createDataFrame([("v1",)], "visit_id string")
    first = write_once(spark, rows, table_path, transaction=("writer", 7), note={"run": 1})
    commit(table_path, MANY)
    found = find_commit(spark, table_path, first)
    assert found is not None
    assert found["version"] == 0
    skipped = write_once(spark, rows, table_path, transaction=("writer", 7))
    commit(table_path, MANY)
    assert find_commit(spark, table_path, skipped) is None

    with noted(spark, table_path, {"run": 2}) as update:
        spark.sql(f"update delta.`{table_path}` set visit_id = 'v2'").collect()
    commit(table_path, MANY)
    found = find_commit(spark, table_path, update)
    assert found is not None
    assert (found["version"], found["operation"]) == (2 * MANY + 1, "UPDATE")

    newest = 3 * MANY + 1
    assert [row.version for row in commits(spark, table_path)] == list(range(newest, -1, -1))
    assert [row.version for row in commits_after(spark, table_path, newest - 2)] == [newest, newest - 1]
    assert commits_after(spark, table_path, newest) == []


def test_of_two_first_runs_one_claims_the_checkpoint(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, create = str(tmp_path / "checkpoint"), HadoopFolder.create_text
    claimed = []

    def overtaken(folder: HadoopFolder, relative: str, text: str) -> bool:
        """Between this run's look at the checkpoint and its claim, another run claims it."""
        monkeypatch.setattr(HadoopFolder, "create_text", create)
        claimed.append(claim(spark, checkpoint, {"job": "visits"}))
        return create(folder, relative, text)

    monkeypatch.setattr(HadoopFolder, "create_text", overtaken)
    with pytest.raises(
        WrongUse, match=r"'.*checkpoint' was claimed by another run at this moment; run again"
    ):
        claim(spark, checkpoint, {"job": "visits"})
    assert claimed == [claim(spark, checkpoint, {"job": "visits"})]


def test_of_many_that_create_a_file_at_once_one_does(spark: SparkSession, tmp_path: Path) -> None:
    folder = HadoopFolder(spark, str(tmp_path))

    def create(name: str) -> Callable[[str], bool]:
        return lambda text: folder.create_text(name, text)

    with ThreadPoolExecutor(8) as pool:
        for name in ("a.json", "b.json"):
            texts = [f"{number}" * 1000 for number in range(8)]
            created = list(pool.map(create(name), texts))
            assert created.count(True) == 1
            assert folder.read_text(name) == texts[created.index(True)]
    assert folder.names() == ["a.json", "b.json"]
