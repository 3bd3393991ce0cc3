"""Compactor: merge a dataset's many small files into few by a policy, and remove the files that become unused.

Problem: a stream that syncs every few minutes leaves thousands of small files. Readers then spend more time on listing
and opening files than on reading them.

Guarantee: the rows are the same before, during and after a run.

- Delta tables (``--format delta``): one OPTIMIZE commit, marked as no change of data, so that streams replay nothing.
  Readers and appends continue. If another writer rewrites the same files, the compaction fails and the writer
  succeeds. A run that is killed leaves the table as it was.
- Raw Parquet and JSON lines: only datasets that readers find through a pointer
  (:mod:`python_jobs.shared.files.pointers`). The new files are staged next to the old ones, then the pointer moves. A
  dataset without a pointer is refused, and a dataset that changed during the run keeps its files.

Each table has its own policy. A partition is compacted if it holds at least ``min_small_files`` files below
``small_file_mb``, they are at least the share ``min_small_ratio`` of its files, ``where`` allows it, and its newest
file is ``min_age_minutes`` old. ``mode daily`` is a scheduled run over all partitions, which also vacuums. ``mode
inline`` belongs to the ingestion job, after its write (:func:`after_write`): it compacts the partitions of the commit
with the job's ``user_metadata``.

After a vacuum, time travel to older versions fails, and so do streams that are further behind. A retention below the
table's own (``delta.deletedFileRetentionDuration``, 7 days) needs ``--allow_unsafe_retention true``.

Cost: one query over the log decides, and if no partition qualifies, nothing is read. Otherwise the chosen partitions
are read and written once (a raw dataset: all of it), and a vacuum lists the table's folders.

    spark-submit python_jobs/ingestion/compactor.py --table lakehouse/bronze/bronze_visits \\
        --where "date < date'2024-03-02'"

Source: Data Engineering Design Patterns, chapter 2, Compactor.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import JobFailed, WrongUse, present, require_at_least
from python_jobs.shared.core.intervals import duration, moved, parse_time, to_micros
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.delta.commits import commits, find_commits, latest_version, noted
from python_jobs.shared.delta.compaction import CompactionPolicy, optimize, without_zone, worth_compacting
from python_jobs.shared.delta.tables import (
    active_files,
    committed_files,
    deleted_file_retention,
    partition_columns,
    partition_values,
    read_table,
    table_size,
)
from python_jobs.shared.files.file_sets import NO_FILE_SKIPPED, SourceFile, require_openable, require_whole
from python_jobs.shared.files.pointers import PointedDataset, RawFile, current_folder
from python_jobs.shared.spark.hadoop_files import HadoopFolder, literal_path
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.jvm import executed_plan
from python_jobs.shared.spark.session import settings
from python_jobs.shared.spark.sql_text import named_columns, table_name

SAFE_RETENTION = dt.timedelta(days=7)
"""Delta's default, which also holds for raw datasets: they have no property to say otherwise."""

_MB = 1024 * 1024
_STAGED = "compacted-"
_RECORD = "_compacted_from.json"


@dataclass(frozen=True)
class Parameters(CompactionPolicy, ProcessingTimeParameters):
    """Merge small files where the policy finds it worth it; in daily mode also remove unused files."""

    table: str
    """Delta table, by path or catalog name; for parquet and json the folder of a dataset with a pointer."""
    format: Literal["delta", "parquet", "json"] = "delta"
    """Kind of the dataset; json means JSON lines, which stay byte for byte."""
    mode: Literal["daily", "inline"] = "daily"
    """daily: all partitions, then vacuum; inline: the partitions that the ingestion job has written."""
    user_metadata: str | None = None
    """Delta's ``userMetadata`` of the ingestion job's write, for mode inline: the newest commit that has it."""
    where: str | None = None
    """SQL over the partition columns: only these partitions, such as the closed ones (date < date'2024-03-02')."""
    vacuum: bool = True
    """Whether daily mode removes the files that no version within the retention needs."""
    retention_hours: float | None = None
    """Hours for which vacuum keeps removed files; by default the table's own retention (168). A Delta table allows only
    0 here, because its vacuum follows delta.deletedFileRetentionDuration."""
    allow_unsafe_retention: bool = False
    """Whether a shorter retention is allowed, because no reader, stream, restore or open write needs older files."""
    measure_reads: bool = False
    """Whether to read the dataset before and after, for the report's seconds."""

    def __post_init__(self) -> None:
        ProcessingTimeParameters.__post_init__(self)
        CompactionPolicy.__post_init__(self)
        require_at_least(0, retention_hours=self.retention_hours)
        if self.format == "delta" and self.mode == "inline" and not self.user_metadata:
            raise WrongUse(
                "mode inline needs user_metadata, by which it finds the ingestion job's commit: write with "
                "option('userMetadata', …) and pass the same text"
            )
        if self.format == "delta" and self.retention_hours:
            raise WrongUse(
                f"retention_hours is {self.retention_hours:g}; Delta ignores every number but 0: set the table's "
                "delta.deletedFileRetentionDuration"
            )
        if self.format != "delta" and (self.mode == "inline" or self.where is not None):
            raise WrongUse(
                f"a {self.format} dataset is compacted whole: where and mode inline need a Delta table"
            )


@dataclass(frozen=True)
class State:
    """The numbers of a dataset in the report, before or after the run."""

    files: int
    bytes: int
    listing_ms: float | None = None
    """Time to list a scan's files, before any is opened, the better of two; None if nothing was done."""
    read_seconds: float | None = None
    """Time to read all rows, if it was asked for."""


# --- the policy -----------------------------------------------------------------------------------------


def raw_worth_compacting(files: Sequence[RawFile], policy: Parameters, now: dt.datetime) -> bool:
    """Return whether any folder of a raw dataset is worth it; the same rule, for the dataset as a whole."""
    by_folder = defaultdict(list)
    for file in files:
        by_folder[_folder(file.path)].append(file)
    old_enough = to_micros(moved(now, -duration("minutes", policy.min_age_minutes))) / 1000
    if policy.min_age_minutes and any(file.modified_at > old_enough for file in files):
        return False
    return any(
        (small := sum(file.size < policy.small_bytes for file in group)) >= policy.min_small_files
        and small >= len(group) * policy.min_small_ratio
        for group in by_folder.values()
    )


# --- the runs -------------------------------------------------------------------------------------------


def run(spark: SparkSession, parameters: Parameters) -> dict[str, Any]:
    """Compact once, and in daily mode vacuum."""
    now = parameters.processing_time()
    safe = deleted_file_retention(spark, parameters.table) if parameters.format == "delta" else SAFE_RETENTION
    retention = _retention(parameters, safe)
    compact, clean = (_compact_delta, _vacuum) if parameters.format == "delta" else (_compact_raw, _clean_raw)
    report = compact(spark, parameters, now)
    if parameters.mode == "daily" and parameters.vacuum:
        report["vacuum"] = clean(spark, parameters, retention, now)
    if parameters.format == "delta":
        report["table_version"] = latest_version(spark, parameters.table)
    return {"table": parameters.table, "format": parameters.format, "mode": parameters.mode} | report


def after_write(spark: SparkSession, parameters: Parameters) -> dict[str, Any] | None:
    """Compact what an ingestion job has just written, if the table's policy is ``inline``; else do nothing."""
    return run(spark, parameters) if parameters.mode == "inline" else None


def _retention(parameters: Parameters, safe: dt.timedelta) -> dt.timedelta:
    """Return how long unused files are kept; refuse a dangerous time before anything is done."""
    if parameters.retention_hours is None:
        return safe
    retention = duration("hours", parameters.retention_hours)
    if retention < safe and not parameters.allow_unsafe_retention:
        raise WrongUse(
            f"retention_hours is {parameters.retention_hours:g}, below the safe {safe / dt.timedelta(hours=1):g} "
            f"of {parameters.table}: slow readers, streams and open writes would lose files; if there are none, "
            "pass allow_unsafe_retention"
        )
    return retention


def _report(before: State | None, after: State, **more: Any) -> dict[str, Any]:
    """Return files, bytes and times before and after; without ``before`` nothing was done."""
    return {
        "compacted": before is not None,
        **{f"{name}_before": value for name, value in asdict(before or after).items()},
        **{f"{name}_after": value for name, value in asdict(after).items()},
        **more,
    }


def _state(
    files: int, size: int, listing: Callable[[], Callable[[], object]], rows: DataFrame | None
) -> State:
    times = []
    for _ in range(2):  # the first also loads classes
        list_files = listing()
        start = time.perf_counter()
        list_files()
        times.append(time.perf_counter() - start)
    read = None
    if rows is not None:
        start = time.perf_counter()
        rows.write.format("noop").mode("overwrite").save()
        read = round(time.perf_counter() - start, 3)
    return State(files, size, round(min(times) * 1000, 2), read)


# --- Delta ----------------------------------------------------------------------------------------------


def _compact_delta(spark: SparkSession, parameters: Parameters, now: dt.datetime) -> dict[str, Any]:
    table = parameters.table
    chosen = _chosen_partitions(spark, parameters, now)
    if not chosen:
        untouched = State(*table_size(spark, table))
        return _report(None, untouched, partitions_compacted=0)
    before = _delta_state(spark, parameters)
    metrics = optimize(spark, table, parameters, chosen)
    return _report(
        before,
        _delta_state(spark, parameters),
        files_removed=metrics.numFilesRemoved,
        files_added=metrics.numFilesAdded,
        partitions_compacted=len(chosen),
    )


def _chosen_partitions(spark: SparkSession, parameters: Parameters, now: dt.datetime) -> list[Row]:
    """Return the partitions that the policy picks; one row without columns for a table that has none."""
    columns = partition_columns(spark, parameters.table)
    files = active_files(spark, parameters.table)
    if parameters.where is not None:
        try:
            files = files.select("__size", "__modified_at", *named_columns(columns)).where(parameters.where)
        except AnalysisException as failure:
            raise WrongUse(
                f"where '{parameters.where}' can't be used ({failure.getCondition()}); it is SQL over the "
                f"partition columns of {parameters.table}: {', '.join(columns) or 'none'}"
            ) from None
    chosen = without_zone(worth_compacting(files, columns, parameters, now)).collect()
    if parameters.mode == "inline":
        written = _partitions_written(spark, parameters)
        chosen = [row for row in chosen if tuple(row[name] for name in columns) in written]
    return chosen


def _partitions_written(spark: SparkSession, parameters: Parameters) -> set[tuple[Any, ...]]:
    """Return the partitions that the ingestion job's commit added data to, whoever has committed since."""
    table = parameters.table
    version = next(
        (row.version for row in commits(spark, table) if row.userMetadata == parameters.user_metadata), None
    )
    if version is None:
        raise WrongUse(
            f"no commit of {table} has the user_metadata '{parameters.user_metadata}'; write with "
            "option('userMetadata', …) and pass the same text"
        )
    added = committed_files(spark, table, version - 1, version).where("add.dataChange")
    marker = F.lit(True).alias("added")
    values = added.select(*partition_values(spark, table, "add.partitionValues"), marker).distinct()
    return {tuple(row)[:-1] for row in without_zone(values).collect()}


def _delta_state(spark: SparkSession, parameters: Parameters) -> State:
    table = parameters.table

    def listing() -> Callable[[], object]:
        # The scan's own step: the files of the log, cut and packed into tasks. Nothing runs.
        plan = executed_plan(read_table(spark, table))
        return cast(Callable[[], object], plan.collectLeaves().head().inputRDD)

    return _state(
        *table_size(spark, table),
        listing,
        read_table(spark, table) if parameters.measure_reads else None,
    )


def _vacuum(
    spark: SparkSession, parameters: Parameters, retention: dt.timedelta, now: dt.datetime
) -> dict[str, Any]:
    """Remove unused files, if there are any; the numbers are those that the vacuum itself wrote to the log."""
    hours = retention / dt.timedelta(hours=1)
    statement = f"vacuum {table_name(parameters.table)}"
    if parameters.retention_hours is not None:
        statement += f" retain {parameters.retention_hours:g} hours"
    is_checked = str(not parameters.allow_unsafe_retention).lower()
    how = {
        "spark.databricks.delta.retentionDurationCheck.enabled": is_checked,
        "spark.databricks.delta.vacuum.logging.enabled": "true",
    }
    with settings(spark, how), noted(spark, parameters.table) as vacuum:
        # A vacuum commits twice, also when it removes nothing.
        if spark.sql(f"{statement} dry run").isEmpty():
            return {"retention_hours": hours, "files_deleted": 0, "bytes_deleted": 0}
        spark.sql(statement)
    metrics: dict[str, str] = {}
    for commit in find_commits(spark, parameters.table, vacuum):  # its start and its end
        metrics |= commit["operationMetrics"]
    return {
        "retention_hours": hours,
        "files_deleted": int(metrics["numDeletedFiles"]),
        "bytes_deleted": int(metrics["sizeOfDataToDelete"]),
    }


# --- raw files ------------------------------------------------------------------------------------------


def _compact_raw(spark: SparkSession, parameters: Parameters, now: dt.datetime) -> dict[str, Any]:
    """Stage a compacted version and move the pointer, unless the dataset changed meanwhile."""
    current_folder(spark, parameters.table)  # raises without a pointer
    dataset = PointedDataset(spark, parameters.table)
    version = present(dataset.current(), f"the pointer of {parameters.table}")
    files = dataset.files(version)
    if not raw_worth_compacting(files, parameters, now):
        return _report(None, State(len(files), sum(file.size for file in files)), version=version)

    before = _raw_state(spark, parameters, dataset, version)
    staged = f"{_STAGED}{now:%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:8]}"
    changed = JobFailed(
        f"files of {parameters.table} changed while they were compacted; it stays as it is: "
        "compact what its producer has finished"
    )
    try:
        _rewrite(spark, parameters, dataset, version, files, staged)
        record = {"version": version, "at": now.isoformat(), "files": [asdict(file) for file in files]}
        dataset.write_text(f"_versions/{staged}/{_RECORD}", json_text(record))
        if dataset.files(version) != files:
            raise changed
        dataset.point_to(staged, replaces=version)
    except Exception:
        dataset.delete(f"_versions/{staged}")
        raise
    if dataset.files(version) != files:  # written between the look and the swap: nothing of it must get lost
        dataset.point_to(version, replaces=staged)
        raise changed
    return _report(before, _raw_state(spark, parameters, dataset, staged), version=staged)


def _rewrite(
    spark: SparkSession,
    parameters: Parameters,
    dataset: PointedDataset,
    version: str,
    files: Sequence[RawFile],
    staged: str,
) -> None:
    """Write each folder's rows as few files into the same folder of the staged version."""
    by_folder = defaultdict(list)
    source = HadoopFolder(spark, dataset.folder(version))
    for file in files:
        require_openable(source, f"{dataset.folder(version)}/{file.path}")
        by_folder[_folder(file.path)].append(file)
    for folder, group in by_folder.items():
        paths = [literal_path(f"{dataset.folder(version)}/{file.path}") for file in group]
        count = max(1, math.ceil(sum(file.size for file in group) / parameters.target_bytes))
        target = f"{dataset.folder(staged)}/{folder}"
        if parameters.format == "parquet":
            # Without mergeSchema one file's columns would decide, and those of the others be lost.
            spark.read.options(**NO_FILE_SKIPPED, mergeSchema="true").parquet(*paths).coalesce(
                count
            ).write.parquet(target)
        else:
            whole = (
                SourceFile(file.path, f"{dataset.folder(version)}/{file.path}", file.size, file.modified_at)
                for file in group
            )
            require_whole(spark, whole)
            packed = all(file.path.endswith(".gz") for file in group)
            lines = spark.read.options(**NO_FILE_SKIPPED, lineSep="\n").text(paths).coalesce(count)
            lines.write.option("compression", "gzip" if packed else "none").text(target)


def _raw_state(spark: SparkSession, parameters: Parameters, dataset: PointedDataset, version: str) -> State:
    files = dataset.files(version)
    rows = None
    if parameters.measure_reads:
        reader = spark.read.options(**NO_FILE_SKIPPED, mergeSchema="true").format(parameters.format)
        rows = reader.load(literal_path(dataset.folder(version)))
    size = sum(file.size for file in files)
    folder = literal_path(dataset.folder(version))
    return _state(len(files), size, lambda: lambda: spark.read.text(folder), rows)


def _clean_raw(
    spark: SparkSession, parameters: Parameters, retention: dt.timedelta, now: dt.datetime
) -> dict[str, Any]:
    """Delete what compactions replaced long enough ago, file by file; what they have not read stays."""
    dataset = PointedDataset(spark, parameters.table)
    current = dataset.current()
    deleted, deleted_bytes, left = 0, 0, 0
    for version in dataset.versions():
        text = dataset.read_text(f"_versions/{version}/{_RECORD}")
        if text is None:
            started = _staged_at(version)
            if started is not None and started <= moved(now, -retention) and version != current:
                dataset.delete(f"_versions/{version}")  # of a run that was killed
            continue
        record = json.loads(text)
        replaced = record["version"]
        if replaced == current or parse_time(record["at"]) > moved(now, -retention):
            continue
        read = {RawFile(**file) for file in record["files"]}
        for file in dataset.files(replaced):
            if file in read:
                dataset.delete(f"_versions/{replaced}/{file.path}")
                deleted, deleted_bytes = deleted + 1, deleted_bytes + file.size
            else:
                left += 1
        if not dataset.files(replaced):
            dataset.delete(f"_versions/{replaced}")
    return {
        "retention_hours": retention / dt.timedelta(hours=1),
        "files_deleted": deleted,
        "bytes_deleted": deleted_bytes,
        "files_unknown": left,
    }


def _staged_at(version: str) -> dt.datetime | None:
    match = re.fullmatch(rf"{_STAGED}(\d{{8}}T\d{{6}})Z-\w+", version)
    return None if match is None else parse_time(match[1])


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


if __name__ == "__main__":
    run_job(Parameters, run)
