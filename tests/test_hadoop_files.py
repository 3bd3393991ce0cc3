"""Small files of a folder, on whatever file system it is."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from python_jobs.shared.spark.hadoop_files import HadoopFolder


def test_files_are_written_replaced_listed_and_deleted(spark: SparkSession, tmp_path: Path) -> None:
    folder = HadoopFolder(spark, str(tmp_path / "dataset"))
    assert not folder.exists()
    assert folder.read_text("state/owner.json") is None
    assert (folder.names(), folder.names("state"), folder.statuses("state")) == ([], [], [])
    folder.delete("state")

    folder.write_text("state/owner.json", "first")
    folder.write_text("state/owner.json", "größer")
    assert folder.read_text("state/owner.json") == "größer"
    assert folder.read("state/owner.json") == "größer".encode()
    assert (folder.names(), folder.names("state")) == (["state"], ["owner.json"])
    folder.delete()
    assert not folder.exists()


def test_a_name_with_a_colon_is_no_uri(spark: SparkSession, tmp_path: Path) -> None:
    folder = HadoopFolder(spark, str(tmp_path), raw=True)  # Hadoop's checksum files can't have such a name
    folder.write_text("12:00.json", "noon")
    assert (tmp_path / "12:00.json").read_text(encoding="utf-8") == "noon"
    assert folder.read_text("12:00.json") == "noon"


def test_raw_files_have_no_checksums_beside_them(spark: SparkSession, tmp_path: Path) -> None:
    HadoopFolder(spark, str(tmp_path / "raw"), raw=True).write_text("a", "1")
    HadoopFolder(spark, str(tmp_path / "checked")).write_text("a", "1")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [".a.crc", "a", "a"]
