"""What the log of a Delta table says, whoever wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from python_jobs.shared.delta.commits import commit_note
from python_jobs.shared.delta.tables import committed_files


@pytest.mark.parametrize(
    ("user_metadata", "note"),
    [
        ('{"full_loader": {"version": "20240301"}}', {"full_loader": {"version": "20240301"}}),
        (None, {}),
        ("", {}),
        ("restored by hand", {}),
        ('["a", "list"]', {}),
        ("42", {}),
    ],
)
def test_another_programs_text_is_no_note(user_metadata, note):
    assert commit_note(user_metadata) == note


def test_the_commits_of_a_table_whose_path_looks_like_a_pattern(spark: SparkSession, tmp_path: Path) -> None:
    for name in ("run1", "run[1]"):
        spark.range(2).coalesce(1).write.format("delta").save(str(tmp_path / name))
    spark.range(1).coalesce(1).write.format("delta").mode("append").save(str(tmp_path / "run[1]"))
    added = committed_files(spark, str(tmp_path / "run[1]"), 0, 1).where("add is not null")
    assert [row.version for row in added.collect()] == [1]
