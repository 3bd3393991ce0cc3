"""Proxy with Spark: versions that are never written again, behind a manifest, Delta's history or a dbt view."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from python_jobs.idempotency import proxy
from python_jobs.idempotency.proxy import Parameters, exposed_files, read_exposed, run
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.files.manifests import ListedFile, Manifest
from python_jobs.shared.files.pointers import PointedDataset
from tests.support.dbt_project import DbtProject
from tests.support.rows import assert_rows
from tests.support.snippets import snippet, snippets
from tests.support.waiting import polled

THIS = "tests/patterns/idempotency/test_proxy.py::"
FIRST, SECOND = "2024-01-01T10:15", "2024-01-01T11:00"
FIFTY, FOUR = "select id from range(50)", "select id from range(50, 54)"


class Dataset:
    def __init__(self, spark: SparkSession, root: Path, file_format: str = "parquet") -> None:
        self.spark, self.target, self.format = spark, str(root / "devices"), file_format

    def run(self, **others: Any) -> dict[str, Any]:
        return run(self.spark, Parameters(self.target, format=self.format, **others))  # type: ignore[arg-type]

    def load(self, started_at: str, query: str, **others: Any) -> dict[str, Any]:
        return self.run(started_at=started_at, query=query, **others)

    def count(self) -> int:
        return read_exposed(self.spark, self.target).count()

    @property
    def folder(self) -> Path:
        return Path(self.target)


@pytest.fixture
def dataset(spark: SparkSession, tmp_path: Path) -> Dataset:
    return Dataset(spark, tmp_path)


# --- files behind a manifest ----------------------------------------------------------------------------


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_readers_find_the_newest_load_and_older_ones_stay(dataset: Dataset) -> None:
    assert dataset.load(FIRST, FIFTY) == {
        "target": dataset.target, "version": "20240101_101500", "exposed_version": "20240101_101500",
    }  # fmt: skip
    assert dataset.count() == 50
    first = bytes_of(dataset.folder / "_versions" / "20240101_101500")
    with polled(dataset.count, held=(PointedDataset, "point_to")) as seen:
        dataset.load(SECOND, FOUR)
    assert set(seen) <= {50, 4}
    assert seen[-1] == 4
    with pytest.raises(JobFailed, match=r"there is a version 20240101_101500 of .* already"):
        dataset.load(FIRST, FOUR)
    assert bytes_of(dataset.folder / "_versions" / "20240101_101500") == first
    # The way back, and forth, copies nothing.
    before = len(list((dataset.folder / "_versions").rglob("*.parquet")))
    assert dataset.run(step="expose", version="20240101_101500")["exposed_version"] == "20240101_101500"
    assert dataset.count() == 50
    assert dataset.run(step="expose")["exposed_version"] == "20240101_110000"
    assert len(list((dataset.folder / "_versions").rglob("*.parquet"))) == before


def test_the_name_of_a_dataset_is_no_pattern(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "run1").mkdir()
    dataset = Dataset(spark, tmp_path / "run[1]")
    dataset.load(FIRST, FOUR)
    assert dataset.count() == 4


def test_a_failed_exposure_is_retried_without_a_reload(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset.load(FIRST, FIFTY)
    with monkeypatch.context() as broken:
        broken.setattr(PointedDataset, "point_to", _fails)
        with pytest.raises(OSError, match="no pointer today"):
            dataset.load(SECOND, FOUR)
    assert dataset.count() == 50
    files = bytes_of(dataset.folder / "_versions")
    assert dataset.run(step="expose")["exposed_version"] == "20240101_110000"
    assert dataset.count() == 4
    assert bytes_of(dataset.folder / "_versions") == files


def _fails(*arguments: Any, **named: Any) -> None:
    raise OSError("no pointer today")


def test_a_load_that_died_is_no_version(dataset: Dataset) -> None:
    dataset.load(FIRST, FIFTY)
    dataset.load(SECOND, FOUR, step="load")
    (dataset.folder / "_versions" / "20240101_110000" / "_SUCCESS").unlink()
    assert dataset.run(step="expose")["exposed_version"] == "20240101_101500"
    with pytest.raises(NotReady, match=r"the load of version 20240101_110000 of .* did not end"):
        dataset.run(step="expose", version="20240101_110000")


def test_the_manifest_decides_which_files_are_read(dataset: Dataset) -> None:
    with pytest.raises(NotReady, match="nothing was exposed yet"):
        dataset.count()
    dataset.load(FIRST, FIFTY)
    folder = dataset.folder / "_versions" / "20240101_101500"
    (listed,) = exposed_files(dataset.spark, dataset.target)
    (folder / "unlisted.parquet").write_bytes(Path(listed.removeprefix("file:")).read_bytes())
    assert dataset.count() == 50
    (folder / Path(listed).name).unlink()
    with pytest.raises(
        JobFailed, match=r"version 20240101_101500 is incomplete: .* lacks 1 of 1 listed files"
    ):
        dataset.count()
    (dataset.folder / "_current").write_text("20230101_000000\n")
    with pytest.raises(WrongUse, match="points to version 20230101_000000, which has no manifest"):
        dataset.count()
    with pytest.raises(
        WrongUse, match=r"there is no version 20230101_000000 of .*; there are 20240101_101500"
    ):
        dataset.run(step="expose", version="20230101_000000")


@pytest.mark.parametrize("file_format", ["parquet", "delta"])
def test_an_empty_load_is_refused_or_published(spark: SparkSession, tmp_path: Path, file_format: str) -> None:
    dataset = Dataset(spark, tmp_path, file_format)
    with pytest.raises(DataRefused, match=r"0 rows for .*, allowed are 1 or more"):
        dataset.load(FIRST, "select id from range(0)")
    assert not dataset.folder.exists()
    assert dataset.load(SECOND, "select id from range(0)", min_rows=0)["exposed_version"] == "20240101_110000"


def test_a_manifest_that_is_none() -> None:
    manifest = Manifest("20240101_101500", (ListedFile("a", 1), ListedFile("b", 2, "v")))
    assert Manifest.from_json(manifest.to_json(), "m") == manifest
    for text in (
        "",
        "[]",
        '{"format_version": 1}',
        '{"format_version": 1, "version": "1", "files": [{"x": 1}]}',
    ):
        with pytest.raises(WrongUse, match="m is no manifest"):
            Manifest.from_json(text, "m")
    with pytest.raises(WrongUse, match="m has format 2, known is 1"):
        Manifest.from_json('{"format_version": 2}', "m")
    manifest.require_complete({"a": 1, "b": 2, "c": 3}, "m")
    with pytest.raises(
        JobFailed, match="m lacks 1 of 2 listed files or has them with another size, such as b"
    ):
        manifest.require_complete({"a": 1, "b": 3}, "m")


# --- Delta's own versions -------------------------------------------------------------------------------


def test_delta_keeps_each_load_and_refuses_to_vacuum_it(spark: SparkSession, tmp_path: Path) -> None:
    devices = Dataset(spark, tmp_path, "delta")
    table = f"delta.`{devices.target}`"
    spark.sql(FOUR).write.format("delta").save(
        devices.target
    )  # there before, with Delta's retention of a week
    first = devices.load(FIRST, FIFTY)["table_version"]
    second = devices.load(SECOND, FOUR)["table_version"]
    counts = {v: spark.sql(f"select * from {table} version as of {v}").count() for v in (first, second)}
    assert counts == {first: 50, second: 4}
    with pytest.raises(JobFailed, match=r"there is a version 20240101_101500 of .* already"):
        devices.load(FIRST, FOUR)
    with pytest.raises(PySparkException, match=r"(?i)retention"):
        spark.sql(f"vacuum {table} retain 0 hours").collect()
    assert spark.sql(f"select * from {table} version as of {first}").count() == 50
    files = len(list(devices.folder.glob("*.parquet")))
    assert devices.run(step="expose", version="20240101_101500")["table_version"] == first
    assert spark.sql(f"select * from {table}").count() == 50
    assert devices.run(step="expose")["exposed_version"] == "20240101_110000"
    assert len(list(devices.folder.glob("*.parquet"))) == files
    with pytest.raises(WrongUse, match="there are 20240101_101500, 20240101_110000"):
        devices.run(step="expose", version="20230101_000000")


# --- a dbt view -----------------------------------------------------------------------------------------

SOURCES = """
version: 2
sources: [{name: raw, schema: '{{ target.schema }}', tables: [{name: devices, identifier: landed}]}]
"""


def test_a_dbt_view_shows_the_newest_of_immutable_tables(
    spark: SparkSession, make_project: Callable[..., DbtProject]
) -> None:
    name = f"{THIS}test_a_dbt_view_shows_the_newest_of_immutable_tables"
    project = make_project(
        {"models/devices.sql": snippet("docs/idempotency.md", name), "models/sources.yml": SOURCES}
    )
    columns = "type string, full_name string, version string"
    rows = [("lg", "G2x", "Android 14"), ("htc", "One", "Android 12")]
    project.source("landed", spark.createDataFrame(rows, columns))
    project.run("run", "--select", "devices")
    statement = project.executed("devices")
    project.source("landed", spark.createDataFrame(rows[:1], columns))
    project.run("run", "--select", "devices")
    assert_rows(project.table("devices"), rows[:1])
    tables = spark.sql(f"show tables in {project.schema} like 'devices_2*'").collect()
    old, new = sorted(row.tableName for row in tables)
    assert_rows(project.table(old), rows)
    # Another run of the same second fails, as does whoever changes a version.
    with pytest.raises(PySparkException, match="ALREADY_EXISTS"):
        spark.sql(statement[statement.index("create table") :])
    with pytest.raises(PySparkException, match="append"):
        spark.sql(f"delete from {project.schema}.{old}")
    version = old.removeprefix("devices_").replace("_", "")
    project.run(
        "run-operation",
        "expose_version",
        "--args",
        f"{{model_name: devices, version: {version}, max_shrink_percent: 100}}",
    )
    assert_rows(project.table("devices"), rows)
    project.run("run-operation", "expose_version", "--args", "{model_name: devices}")
    assert_rows(project.table("devices"), project.table(new))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"immutable": "yes"}, "immutable must be true or false, got yes"),
        (
            {"immutable": True, "keep_versions": 3},
            "immutable versions are never dropped: leave keep_versions out",
        ),
    ],
)
def test_wrong_options_are_refused(render: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Exception, match=sentence):
        render("_full_loader_options", given=options)


# --- as typed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"min_rows": -1}, "min_rows must be 0 or more"),
        ({"retention_days": 0}, "retention_days must be 1 or more"),
        ({"query": None}, "query belongs to the steps that load"),
        ({"step": "expose"}, "query belongs to the steps that load"),
        ({"step": "expose", "query": None, "version": "today"}, "a version is a run's start such as"),
        ({"version": "20240101_101500"}, "version belongs to step expose"),
        ({"format": "delta", "step": "load"}, "with format delta a load is exposed by its commit"),
    ],
)
def test_wrong_parameters_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WrongUse, match=sentence):
        Parameters(**{"target": "t", "query": FIFTY} | wrong)


def test_the_commands_of_the_page(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKEHOUSE_ROOT", str(tmp_path / "lakehouse"))
    rows = spark.createDataFrame([("lg", "G2x", "1")], "type string, full_name string, version string")
    rows.createOrReplaceTempView("staged_devices")
    text, back = snippets("docs/idempotency.md", f"{THIS}test_the_commands_of_the_page")
    command = shlex.split(os.path.expandvars(text.replace("\\\n", " ")))
    assert command[:2] == ["spark-submit", "python_jobs/idempotency/proxy.py"]
    parameters, _ = parse_parameters(Parameters, command[2:])
    proxy.run(spark, parameters)
    assert_rows(read_exposed(spark, parameters.target), [("lg", "G2x", "1")])
    back, _ = parse_parameters(Parameters, shlex.split(os.path.expandvars(back.replace("\\\n", " ")))[2:])
    assert (back.step, back.version) == ("expose", "20240101_101500")
