"""Small files of a folder, on whatever file system it is."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from python_jobs.shared.spark import hadoop_files
from python_jobs.shared.spark.hadoop_files import Entry, HadoopFolder


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


@pytest.fixture(params=["local", "viewfs", "object store"])
def tree(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> HadoopFolder:
    """A folder as each kind of file system lists it; a ViewFS stands for all that only Hadoop can read."""
    for name in ("b.json", "x=1/ü [1].json", "x=1/_tmp/c.json", "x=1/y/d", "empty/_e"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
        os.utime(path, ns=(0, 1_709_290_800_123_999_999))
    if request.param == "local":
        return HadoopFolder(spark, str(tmp_path / "tree"))
    if request.param == "object store":
        monkeypatch.setattr(hadoop_files, "OBJECT_STORES", {"viewfs"})
    mount = f"m{uuid.uuid4().hex}"  # Hadoop keeps the file system of a name that it has seen
    spark._jsc.hadoopConfiguration().set(f"fs.viewfs.mounttable.{mount}.link./data", f"file://{tmp_path}")
    return HadoopFolder(spark, f"viewfs://{mount}/data/tree")


def test_a_listing_has_names_sizes_and_times(tree: HadoopFolder) -> None:
    entries = {entry.name: entry for entry in tree.entries()}
    assert entries["b.json"] == Entry("b.json", False, 6, 1_709_290_800_123)
    assert {name: entry.is_folder for name, entry in entries.items()} == {
        "b.json": False, "x=1": True, "empty": True
    }  # fmt: skip
    assert tree.entry("b.json") == entries["b.json"]
    assert tree.entry("x=1/y/d") == Entry("d", False, 7, 1_709_290_800_123)
    assert (tree.entries("absent"), tree.entry("absent")) == ([], None)
    assert tree.at(tree.path("x=1/y")).entries() == [Entry("d", False, 7, 1_709_290_800_123)]


def test_all_files_below_a_folder_but_skipped_ones(tree: HadoopFolder) -> None:
    def paths(relative: str, skipped: str) -> list[str]:
        found = tree.files(relative, lambda name: name.startswith(skipped))
        return sorted(path for path, _ in found)

    assert paths("", "_") == ["b.json", "x=1/y/d", "x=1/ü [1].json"]
    assert paths("x=1", "_") == ["x=1/y/d", "x=1/ü [1].json"]
    assert paths("x=1", "y") == ["x=1/_tmp/c.json", "x=1/ü [1].json"]
    assert paths("absent", "_") == []
    sizes = {path: (entry.name, entry.size) for path, entry in tree.files("", lambda _: False)}
    assert sizes["x=1/ü [1].json"] == ("ü [1].json", len("x=1/ü [1].json".encode()))
