"""Proxy: each full load is written once, as a new version, and readers find the newest version through one pointer.

Problem: a job that overwrites its dataset destroys the former version. All versions must be kept, but readers need one
address for the newest version.

``--format`` chooses between two forms:

- ``parquet``, ``json``, ``csv``, ``orc``: files in ``<target>/_versions/<yyyymmdd_hhmmss>``. The name comes from the
  run's start, not from its logical date, so that a rerun writes a new version. Step ``expose`` lists the files in
  ``_manifests/<version>.json`` and then sets the pointer ``_current`` to this version. Readers call
  :func:`read_exposed`. A retry of step ``expose`` loads nothing again.
- ``delta``: the job overwrites the table, and Delta keeps the versions. ``--retention_days`` becomes the table's
  retention. VACUUM obeys it: VACUUM refuses ``retain 0 hours`` and ignores any other number of hours. The report has
  the table's version, for ``version as of``.

``--step expose --version 20240101_101500`` goes back to a version: it changes the pointer or restores the table, and
copies no row.

Guarantee: a version is never written again. If two runs start in the same second, the second fails. A load that died is
no version.

Not guaranteed: protection of the files against other programs. The store must protect them: by permissions, or on S3 by
a lock (``python_jobs/idempotency/proxy_s3.py``).

Cost: the files of every load stay. This job never deletes a version.

    spark-submit python_jobs/idempotency/proxy.py --target lakehouse/devices --format parquet \\
        --query "select type, full_name, version from staged_devices"

Source: Data Engineering Design Patterns, chapter 4, Proxy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.failures import NotReady, WrongUse, given, present, require_at_least
from python_jobs.shared.delta.commits import commit_note, commits, find_commit, write_once
from python_jobs.shared.delta.tables import deleted_file_retention, retention_properties, table_exists
from python_jobs.shared.files.file_sets import NO_FILE_SKIPPED
from python_jobs.shared.files.manifests import (
    ListedFile,
    Manifest,
    newest_or,
    require_version,
    taken,
    version_of,
)
from python_jobs.shared.files.pointers import PointedDataset
from python_jobs.shared.spark.hadoop_files import literal_path
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.queries import require_rows, user_query
from python_jobs.shared.spark.sql_text import properties_list, table_name

NOTE = "proxy"


@dataclass(frozen=True)
class Parameters:
    """Write a full load as a new version, and make it the version that readers find."""

    target: str
    """Folder of the dataset; with format delta a table, by path or catalog name."""
    query: str | None = None
    """SQL query of the whole dataset; not for step expose."""
    format: Literal["parquet", "json", "csv", "orc", "delta"] = "parquet"
    """Format of the files."""
    step: Literal["load_and_expose", "load", "expose"] = "load_and_expose"
    """Steps to run. load writes the files only; expose makes a loaded version the one that readers find."""
    version: str | None = None
    """Version to expose (20240101_101500); by default the newest complete version."""
    started_at: str | None = None
    """Start of the run (ISO 8601), which names the version; by default the clock's time."""
    min_rows: int = 1
    """Minimum number of rows; a smaller load is refused, and 0 allows an empty one."""
    retention_days: int = 3650
    """Number of days for which versions are kept, with format delta."""

    def __post_init__(self) -> None:
        require_at_least(0, min_rows=self.min_rows)
        require_at_least(1, retention_days=self.retention_days)
        if (self.query is None) != (self.step == "expose"):
            raise WrongUse(f"query belongs to the steps that load; got step {self.step}")
        require_version(self.version, self.step)
        if self.format == "delta" and self.step == "load":
            raise WrongUse("with format delta a load is exposed by its commit; use step load_and_expose")


def rows_to_load(spark: SparkSession, params: Parameters) -> DataFrame:
    """Return the rows of the dataset.

    Raises:
        DataRefused: there are too few rows.
        WrongUse: the query can't be analyzed.
    """
    rows = user_query(spark, given(params.query, "query"))
    require_rows(rows, params.min_rows, params.target)
    return rows


# --- files behind a manifest ----------------------------------------------------------------------------


def load_files(spark: SparkSession, params: Parameters, version: str) -> None:
    """Write the version's files.

    Raises:
        JobFailed: the version exists; it stays unchanged.
    """
    folder = PointedDataset(spark, params.target).folder(version)
    try:
        rows_to_load(spark, params).write.mode("error").format(params.format).save(folder)
    except AnalysisException as failure:
        if failure.getCondition() != "PATH_ALREADY_EXISTS":
            raise
        raise taken(version, params.target) from None


def expose_files(spark: SparkSession, params: Parameters, version: str | None) -> str:
    """List the files of a version, set the pointer to it and return it; the default is the newest version.

    Raises:
        WrongUse: there is no such version.
        NotReady: the load of the version did not end.
        JobFailed: a listed file is missing.
    """
    dataset = PointedDataset(spark, params.target)
    versions = dataset.versions()
    complete = [name for name in versions if dataset.read_text(f"_versions/{name}/_SUCCESS") is not None]
    if version is not None and version in versions and version not in complete:
        raise NotReady(
            f"the load of version {version} of {params.target} did not end; load again, as a new version"
        )
    version = newest_or(version, complete, params.target)
    if dataset.read_text(_manifest(version)) is None:
        files = tuple(ListedFile(file.path, file.size) for file in dataset.files(version))
        dataset.write_text(_manifest(version), Manifest(version, files).to_json())
    _listed(dataset, version)
    if (current := dataset.current()) != version:
        dataset.point_to(version, replaces=current)
    return version


def exposed_files(spark: SparkSession, target: str) -> list[str]:
    """Return the paths of the files of the exposed version.

    Raises:
        NotReady: nothing was exposed yet.
        WrongUse: the pointer names a version without a manifest.
        JobFailed: a listed file is missing.
    """
    dataset = PointedDataset(spark, target)
    version = dataset.current()
    if version is None:
        raise NotReady(f"{target} has no pointer (_current): nothing was exposed yet")
    return [f"{dataset.folder(version)}/{file.path}" for file in _listed(dataset, version).files]


def read_exposed(spark: SparkSession, target: str, file_format: str = "parquet") -> DataFrame:
    """Return the rows of the files that the manifest lists; raises like :func:`exposed_files`."""
    paths = [literal_path(path) for path in exposed_files(spark, target)]
    return spark.read.options(**NO_FILE_SKIPPED).format(file_format).load(paths)


def _listed(dataset: PointedDataset, version: str) -> Manifest:
    text = dataset.read_text(_manifest(version))
    if text is None:
        raise WrongUse(
            f"{dataset.dataset} points to version {version}, which has no manifest ({_manifest(version)})"
        )
    manifest = Manifest.from_json(text, f"{dataset.dataset}/{_manifest(version)}")
    manifest.require_complete(
        {file.path: file.size for file in dataset.files(version)}, dataset.folder(version)
    )
    return manifest


def _manifest(version: str) -> str:
    return f"_manifests/{version}.json"


# --- Delta's own versions -------------------------------------------------------------------------------


def load_delta(spark: SparkSession, params: Parameters, version: str) -> int:
    """Overwrite the table and return its Delta version.

    Raises:
        JobFailed: the version exists; it stays unchanged.
    """
    properties = retention_properties(params.retention_days)
    if table_exists(spark, params.target):
        if version in _delta_versions(spark, params):
            raise taken(version, params.target)
        if deleted_file_retention(spark, params.target).days < params.retention_days:
            spark.sql(
                f"alter table {table_name(params.target)} set tblproperties {properties_list(properties)}"
            )
    rows = rows_to_load(spark, params)
    note = write_once(
        spark, rows, params.target, properties=properties, replace_all=True, note={NOTE: version}
    )
    commit = find_commit(spark, params.target, note)
    return int(present(commit, f"the commit of the rows written to {params.target}")["version"])


def restore_delta(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Restore the table to the version of a load, in one commit that copies no row, and return the report."""
    versions = _delta_versions(spark, params)
    version = newest_or(params.version, list(versions), params.target)
    spark.sql(f"restore table {table_name(params.target)} to version as of {versions[version]}").collect()
    return {"exposed_version": version, "table_version": versions[version]}


def _delta_versions(spark: SparkSession, params: Parameters) -> dict[str, int]:
    """Return the Delta version of each load, by the load's version."""
    found = {}
    for row in commits(spark, params.target):
        if NOTE in (note := commit_note(row.userMetadata)):
            found[note[NOTE]] = row.version
    return found


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Load, expose, or both, and return the report."""
    report: dict[str, Any] = {"target": params.target}
    if params.step == "expose":
        if params.format == "delta":
            return report | restore_delta(spark, params)
        return report | {"exposed_version": expose_files(spark, params, params.version)}
    version = version_of(params.started_at)
    report |= {"version": version}
    if params.format == "delta":
        return report | {"table_version": load_delta(spark, params, version), "exposed_version": version}
    load_files(spark, params, version)
    if params.step == "load_and_expose":
        report |= {"exposed_version": expose_files(spark, params, version)}
    return report


if __name__ == "__main__":
    run_job(Parameters, run)
