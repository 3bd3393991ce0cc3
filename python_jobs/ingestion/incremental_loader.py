"""Incremental Loader, files: append only the files that landed since the last run.

Problem: a landing folder grows by files. Each run must load only the new files, with every line unchanged. A retry, a
backfill or a concurrent run must not load a file twice.

Guarantee: a run is one commit on the bronze table, which only grows. A file is identified by its path relative to the
source, its size and its modification time. An unchanged file is skipped. A changed file is appended under a higher
``load_id``, so the rows with a file's highest ``load_id`` are its present content. ``load_id`` is the ordinal of the
landing partition (yyyymmddhh) * 1000 + the load's number within the partition (from the thousandth load on, ordinal *
1,000,000 + number). It doesn't depend on the order in which hours are loaded. If two runs are concurrent, they compete
for the commit's transaction number: the run that loses lists the files again and loads the remaining ones.

With ``--min_files``, ``--min_bytes`` and ``--max_wait`` small files wait until they are enough for a load: schedule the
job every minute, and a run that finds too few files exits with code 4. With ``--unreadable_files set_aside`` a corrupt
file doesn't stop the others: ``<target>_unreadable`` lists the file and the cause, and the repaired file is loaded
later. The report names files that disappeared before they were read.

The companion table ``<target>_files`` is the ledger of all files, also of empty ones. It is written after the bronze
table, in its own commit under the same number. If a run finds the ledger incomplete, it first completes it from bronze.

Cost: one listing of the window's folders, one query in Spark that compares the listing with the ledger, and one pass
over the new files. The driver holds the listing, and gets only the new files' rows of the ledger.

    spark-submit python_jobs/ingestion/incremental_loader.py --source landing/visits \\
        --target lakehouse/bronze/bronze_visits --from 2024-03-01T10 --to 2024-03-01T11

Source: Data Engineering Design Patterns, chapter 2, Incremental Loader.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import pyarrow as pa  # type: ignore[import-untyped]
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.ingestion.file_batches import (
    BatchParameters,
    UnreadFiles,
    files_set_aside,
    identity,
    set_aside,
    unread_files,
)
from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse, given
from python_jobs.shared.core.intervals import Interval, moved, parse_time, partition_folder, to_micros
from python_jobs.shared.core.paths import absolute, is_path
from python_jobs.shared.delta.commits import (
    CONFLICTS,
    find_commit,
    latest_version,
    transaction_version,
    until_committed,
    write_once,
)
from python_jobs.shared.delta.tables import read_table, table_exists, table_id
from python_jobs.shared.files.file_sets import SourceFile, is_hidden, list_files, read_lines, url_path
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.shared.spark.job import run_job, unreadable_files_refused
from python_jobs.shared.spark.sql_text import date_literal

APP_ID = "lakehouse_patterns.incremental_loader"
FORMAT_VERSION = 1
FIRST_LOADS = 1000
LOADS_PER_PARTITION = 1_000_000

_COMMIT_ATTEMPTS = 5
_GRAINS = {"hour": dt.timedelta(hours=1), "day": dt.timedelta(days=1)}
_PARTITION_TYPES = {"date": "date", "hour": "int"}
_PARTITION = re.compile(r"date=([0-9]{4}-[0-9]{2}-[0-9]{2})(?:/hour=([0-9]{1,2}))?(/.*)?")
_BRONZE_TYPES = {
    "payload": "string",
    "file_path": "string",
    "file_modified_at": "timestamp",
    "file_size": "bigint",
    "load_id": "bigint",
    "ingested_at": "timestamp",
}


@dataclass(frozen=True)
class Parameters(ProcessingTimeParameters, BatchParameters):
    """Append the new and changed files of a landing folder to a bronze table, one row a line."""

    source: str
    """Landing folder; its files lie in date=YYYY-MM-DD/hour=HH, in date=YYYY-MM-DD, or in neither."""
    target: str
    """Bronze table, by path or catalog name; made if absent. The ledger is <target>_files."""
    from_: str | None = None
    """Start of the window of landing partitions, inclusive (2024-03-01T10); without a window: everything."""
    to: str | None = None
    """End of the window, exclusive."""
    execution_time: str | None = None
    """Time of the run, instead of from and to: load the last partition that ended by then (11:00 loads hour=10)."""
    grain: Literal["hour", "day"] = "hour"
    """Grain of a landing partition: date=…/hour=… (hour, default) or date=… (day)."""
    require_next_partition: bool = False
    """Load only when the partition after the window exists, which proves that the window is complete."""
    mode: Literal["append", "replace_window"] = "append"
    """replace_window rewrites the window's partitions instead: for tables that nobody reads as a stream."""
    unreadable_files: Literal["refuse", "set_aside"] = "refuse"
    """set_aside loads the other files of a batch; a file that can't be read is listed in <target>_unreadable."""

    def __post_init__(self) -> None:
        super().__post_init__()
        BatchParameters.__post_init__(self)
        parts = self.min_files or self.min_bytes or self.max_wait or self.unreadable_files == "set_aside"
        if parts and self.mode == "replace_window":
            raise WrongUse(
                "mode replace_window takes its window whole: min_files, min_bytes, max_wait and unreadable_files "
                "set_aside need mode append"
            )
        source, target = (absolute(path).rstrip("/") + "/" for path in (self.source, self.target))
        if is_path(self.target) and (target.startswith(source) or source.startswith(target)):
            raise WrongUse(f"source {self.source} and target {self.target} must not lie in one another")
        window = self.window
        if window is None and self.mode == "replace_window":
            raise WrongUse("mode replace_window needs a window: pass from and to, or execution_time")
        if window is None and self.require_next_partition:
            raise WrongUse("require_next_partition needs a window: pass from and to, or execution_time")

    @property
    def window(self) -> Interval | None:
        """Return the window of landing partitions, None for all."""
        if self.execution_time is not None:
            if self.from_ is not None or self.to is not None:
                raise WrongUse("pass either execution_time or from and to, not both")
            end = self._floor(parse_time(self.execution_time))
            return Interval(moved(end, -_GRAINS[self.grain]), end)
        if self.from_ is None and self.to is None:
            return None
        if self.from_ is None or self.to is None:
            raise WrongUse("a window needs both from and to")
        window = Interval.parse(self.from_, self.to)
        for bound in (window.start, window.end):
            if bound != self._floor(bound):
                raise WrongUse(f"{bound:%FT%T} is inside a partition: a window takes each {self.grain} whole")
        return window

    @property
    def ledger(self) -> str:
        """Return the path of the companion table that lists the loaded files."""
        return self.target.rstrip("/") + "_files"

    @property
    def unreadable(self) -> str:
        """Return the path of the companion table that lists the unreadable files."""
        return self.target.rstrip("/") + "_unreadable"

    def _floor(self, moment: dt.datetime) -> dt.datetime:
        hour = moment.replace(minute=0, second=0, microsecond=0)
        return hour.replace(hour=0) if self.grain == "day" else hour


@dataclass(frozen=True)
class LandingFile(SourceFile):
    """A file of the landing folder, with the partition that it lies in."""

    @property
    def partition(self) -> Mapping[str, Any]:
        """Values of the date= and hour= folders it lies in."""
        partition = _partition_of(_folder_of(self))
        if partition is None:
            raise DataRefused(
                f"{self.path} lies in a folder that is no date=YYYY-MM-DD/hour=HH of the source; move it or prefix it "
                "with '_'"
            )
        return partition

    @property
    def ordinal(self) -> int:
        """The partition as the number yyyymmddhh; 0 outside any."""
        return _ordinal(self.partition.get("date"), self.partition.get("hour"))


@lru_cache(maxsize=10_000)  # a landing folder has many files for each of its folders
def _partition_of(folder: str) -> Mapping[str, Any] | None:
    """Return the values of the date= and hour= folders in a path; None if a window wouldn't find them there.

    A load of everything and a load of a window must find the same partitions: ``date=20240301`` is none of either.
    """
    parts = folder.split("/")
    if not any(part.startswith("date=") for part in parts):
        return {}
    found = _PARTITION.fullmatch(folder)
    if found is None:
        return None
    date, hour, below = found.groups()
    if any(part.startswith(("date=", "hour=")) for part in (below or "").split("/")):
        return None
    try:
        partition: dict[str, Any] = {"date": dt.date.fromisoformat(date)}
        return partition if hour is None else partition | {"hour": dt.time(int(hour)).hour}
    except ValueError:
        return None


@dataclass(frozen=True)
class Loaded:
    """What the tables hold already."""

    run: int = 0
    """Number of the last commit by this job on the bronze table."""
    ledger: DataFrame | None = None
    """Complete ledger; None if there is no table yet."""


# --- from DataFrames to DataFrames ----------------------------------------------------------------------


def bronze_rows(lines: DataFrame, files: DataFrame, partition_columns: Sequence[str]) -> DataFrame:
    """Return the bronze rows: each line with what is known of its file.

    ``lines`` has ``payload`` and ``url_path``, ``files`` is what :func:`files_frame` returns. A line whose
    file isn't among them fails the query: it must not get lost.
    """
    joined = lines.join(F.broadcast(files), "url_path", "left")
    unlisted = F.raise_error(F.concat(F.lit("line of an unlisted file: "), "url_path")).cast("bigint")
    return joined.withColumn("load_id", F.coalesce("load_id", unlisted)).select(
        *_BRONZE_TYPES, *partition_columns
    )


def ledger_rows(files: DataFrame) -> DataFrame:
    """Return one ledger row a file from anything with the file columns and, perhaps, date and hour."""
    partition = [
        (F.col(name) if name in files.columns else F.lit(None)).cast(type_).alias(name)
        for name, type_ in _PARTITION_TYPES.items()
    ]
    return files.select(
        "file_path",
        "load_id",
        "file_size",
        "file_modified_at",
        *partition,
        "ingested_at",
        F.lit(FORMAT_VERSION).alias("format_version"),
    )


# --- the landing folder ---------------------------------------------------------------------------------


class Landing:
    """A folder of any Hadoop file system (local, HDFS, S3)."""

    def __init__(self, spark: SparkSession, source: str) -> None:
        self.folder = HadoopFolder(spark, source)
        self._hours: dict[str, dict[str, int]] = {}
        if not self.has_folder(""):
            raise WrongUse(f"there is no source folder {source}")

    def has_folder(self, relative: str) -> bool:
        """Return whether a path relative to the root is a folder."""
        entry = self.folder.entry(relative)
        return entry is not None and entry.is_folder

    def files(self, folders: Sequence[str]) -> list[LandingFile]:
        """List the files under the folders, in order; see :mod:`python_jobs.shared.files.file_sets`."""
        found = list_files(self.folder, folders)
        return [LandingFile(file.file_path, file.path, file.size, file.modified_at) for file in found]

    def partition_folders(self, start: dt.datetime, grain: str) -> list[str]:
        """Return the folders of the landing partition that starts then; ``hour=9`` and ``hour=09`` are equal.

        Raises:
            DataRefused: a file of the day lies in none of its hours.
        """
        day = f"date={start:%Y-%m-%d}"
        if grain == "day":
            return [day] if self.has_folder(day) else []
        if day not in self._hours:
            self._hours[day] = self._hours_of(day)
        return [f"{day}/{name}" for name, hour in self._hours[day].items() if hour == start.hour]

    def _hours_of(self, day: str) -> dict[str, int]:
        hours = {}
        entries = [entry for entry in self.folder.entries(day) if not is_hidden(entry.name)]
        for entry in sorted(entries, key=lambda entry: entry.name):
            path = f"{day}/{entry.name}"
            partition = _partition_of(path) if entry.is_folder else None
            if partition is not None and "hour" in partition:
                hours[entry.name] = partition["hour"]
            elif not entry.is_folder or self.files([path]):
                raise DataRefused(
                    f"{path} lies in no hour of its day (hour=HH), so no window of hours would load it; move it or "
                    "prefix it with '_'"
                )
        return hours


def window_folders(landing: Landing, parameters: Parameters) -> list[str]:
    """Return the folders of the window, which must all be there; the root if there is no window.

    Raises:
        NotReady: a partition of the window, or the required next one, is absent.
    """
    window, grain = parameters.window, parameters.grain
    if window is None:
        return [""]
    folders: list[str] = []
    for part in window.split(grain):
        found = landing.partition_folders(part.start, grain)
        if not found:
            absent = partition_folder(part.start, grain)
            raise NotReady(f"partition {absent} of {parameters.source} has not arrived; nothing was loaded")
        folders += found
    following = partition_folder(window.end, grain)
    if parameters.require_next_partition and not landing.partition_folders(window.end, grain):
        raise NotReady(
            f"{folders[-1]} of {parameters.source} may still grow: {following} has not arrived; none loaded"
        )
    return folders


def partition_columns_of(files: Sequence[LandingFile]) -> list[str]:
    """Return the folder columns that all files share.

    Raises:
        DataRefused: some files lie in other kinds of folders than the rest.
    """
    layouts = {tuple(file.partition): file.path for file in files}
    if len(layouts) > 1:
        ways = " and ".join(f"{path} by {list(columns)}" for columns, path in sorted(layouts.items()))
        raise DataRefused(f"the source mixes layouts, {ways}: move the strays or prefix them with '_'")
    return list(next(iter(layouts), ()))


# --- the tables -----------------------------------------------------------------------------------------


def loaded(spark: SparkSession, parameters: Parameters) -> Loaded:
    """Return what the tables hold, from a complete ledger."""
    if not table_exists(spark, parameters.target):
        return Loaded()
    # The number first: whoever commits after this line makes our own commit fail, so that what is read next
    # can only be too new, never too old.
    run = transaction_version(spark, parameters.target, APP_ID) or 0
    _complete_ledger(spark, parameters, run)
    return Loaded(run, read_table(spark, parameters.ledger))


def newest_by_file(ledger: DataFrame) -> DataFrame:
    """Return each file of the ledger as it was last loaded: ``file_path``, ``loaded_size``, ``loaded_modified_at``."""
    return ledger.groupBy("file_path").agg(
        F.max_by("file_size", "load_id").alias("loaded_size"),
        F.max_by(F.unix_millis("file_modified_at"), "load_id").alias("loaded_modified_at"),
    )


def new_and_changed(
    spark: SparkSession, files: Sequence[LandingFile], ledger: DataFrame | None
) -> tuple[list[LandingFile], list[LandingFile]]:
    """Return the files that the ledger lacks, and those that it has with another size or modification time.

    Spark compares, and the driver gets no row of a file that is already loaded.
    """
    if ledger is None or not files:
        return list(files), []
    size_and_time = (F.col("size") == F.col("loaded_size")) & (
        F.col("modified_at") == F.col("loaded_modified_at")
    )
    found = (
        listing_frame(spark, files)
        .join(newest_by_file(ledger), "file_path", "left")
        .where(F.col("loaded_size").isNull() | ~size_and_time)
        .select("position", F.col("loaded_size").isNull().alias("is_new"))
        .orderBy("position")
        .collect()
    )
    new, changed = (
        [files[row.position] for row in found if row.is_new is is_new] for is_new in (True, False)
    )
    return new, changed


def listing_frame(spark: SparkSession, files: Sequence[LandingFile]) -> DataFrame:
    """Return one row a file: its place in the list, its path, size and modification time."""
    columns = {
        "position": range(len(files)),
        "file_path": [file.file_path for file in files],
        "size": [file.size for file in files],
        "modified_at": [file.modified_at for file in files],
    }
    types = {"file_path": pa.string()}
    arrays = {name: pa.array(values, types.get(name, pa.int64())) for name, values in columns.items()}
    return spark.createDataFrame(pa.table(arrays))


def numbers_of(
    spark: SparkSession, files: Sequence[LandingFile], ledger: DataFrame | None
) -> tuple[dict[int, int], int]:
    """Return the highest load_id of each partition of the files, and the ledger's newest ``ingested_at``."""
    if ledger is None:
        return {}, 0
    ordinals = spark.createDataFrame(
        [(ordinal,) for ordinal in {file.ordinal for file in files}], "ordinal long"
    )
    day = F.year("date") * 1_000_000 + F.month("date") * 10_000 + F.dayofmonth("date") * 100
    ordinal = F.coalesce(day.cast("long") + F.coalesce("hour", F.lit(0)), F.lit(0))
    rows = (
        ledger.withColumn("of_partition", ordinal)
        .join(F.broadcast(ordinals), F.col("of_partition") == F.col("ordinal"), "left")
        .groupBy("ordinal")
        .agg(F.max("load_id").alias("load_id"), F.unix_micros(F.max("ingested_at")).alias("ingested_at"))
        .collect()
    )
    load_ids = {row.ordinal: row.load_id for row in rows if row.ordinal is not None}
    return load_ids, max((row.ingested_at for row in rows), default=0)


def has_files_that_are_gone(
    spark: SparkSession, files: Sequence[LandingFile], ledger: DataFrame | None, window: Interval
) -> bool:
    """Return whether the ledger has a file of the window that is not among the files."""
    if ledger is None:
        return False
    first, end = (_ordinal(bound.date(), bound.hour) for bound in (window.start, window.end))
    of_window = F.lit(False)
    for loads in (FIRST_LOADS, LOADS_PER_PARTITION):
        of_window |= F.col("load_id").between(first * loads, end * loads - 1)
    loaded_files = ledger.where(of_window)
    return not loaded_files.join(listing_frame(spark, files), "file_path", "left_anti").isEmpty()


def _complete_ledger(spark: SparkSession, parameters: Parameters, run: int) -> None:
    """Append the ledger rows that a killed run left out; a lost ledger is rebuilt from the whole table."""
    since = None
    if table_exists(spark, parameters.ledger):
        if (transaction_version(spark, parameters.ledger, _ledger_app_id(spark, parameters)) or 0) >= run:
            return
        # As a number: a collected timestamp is one of Python's zone, and means two instants when clocks go back.
        newest = F.unix_micros(F.max("ingested_at"))
        since = read_table(spark, parameters.ledger).agg(newest).collect()[0][0]
    bronze = read_table(spark, parameters.target)
    if (
        since is not None
    ):  # ingested_at rises with every run, so that file statistics leave the old files unread
        bronze = bronze.where(F.col("ingested_at") > F.timestamp_micros(F.lit(since)))
    rows = ledger_rows(bronze.drop("payload").distinct())
    write_once(spark, rows, parameters.ledger, transaction=(_ledger_app_id(spark, parameters), run))


def _ledger_app_id(spark: SparkSession, parameters: Parameters) -> str:
    """Return whose runs the ledger knows: those of another table under the target's name begin with 1 again."""
    return f"{APP_ID}/{table_id(spark, parameters.target)}"


def files_frame(spark: SparkSession, load_ids: Mapping[LandingFile, int], ingested_at: int) -> DataFrame:
    """Return one row a file: ``url_path``, the bronze file columns, ``date`` and ``hour``."""
    rows = [
        (
            file.url_path,
            file.file_path,
            file.modified_at,
            file.size,
            load_id,
            file.partition.get("date"),
            file.partition.get("hour"),
        )
        for file, load_id in load_ids.items()
    ]
    schema = (
        "url_path string, file_path string, modified_at bigint, file_size bigint, load_id bigint, "
        "date date, hour int"
    )
    return (
        spark.createDataFrame(rows, schema)
        .withColumn("file_modified_at", F.timestamp_millis("modified_at"))
        .withColumn("ingested_at", F.timestamp_micros(F.lit(ingested_at)))
        .drop("modified_at")
    )


def partition_columns(spark: SparkSession, parameters: Parameters, files: Sequence[LandingFile]) -> list[str]:
    """Return how the target is partitioned: as the files lie; without any, as it is or as the window says.

    Raises:
        WrongUse: the target exists and is no bronze table of this layout.
    """
    needs, has = partition_columns_of(files), {}
    if table_exists(spark, parameters.target):
        has = dict(read_table(spark, parameters.target).dtypes)
    if not files:
        by_grain = ["date", "hour"] if parameters.grain == "hour" else ["date"]
        needs = [name for name in _PARTITION_TYPES if name in has] if has else by_grain
    types = _BRONZE_TYPES | {name: _PARTITION_TYPES[name] for name in needs}
    if has and has != types:
        raise WrongUse(
            f"target {parameters.target} is a table of another schema: it has {_ddl(has)}; "
            f"a load needs {_ddl(types)}"
        )
    return needs


# --- the run --------------------------------------------------------------------------------------------


def assign_load_ids(files: Sequence[LandingFile], before: Mapping[int, int]) -> dict[LandingFile, int]:
    """Return the load_id of each file: one above the partition's highest.

    The first 999 loads of a partition are numbered from its ordinal * 1000, the later ones from its ordinal *
    1,000,000. A file whose partition has had 999,999 loads gets none: one more would take the next partition's numbers.
    """
    load_ids = {}
    for file in files:
        base = file.ordinal * FIRST_LOADS
        load_id = before.get(file.ordinal, base) + 1
        if file.ordinal and base + FIRST_LOADS <= load_id < file.ordinal * LOADS_PER_PARTITION:
            load_id = file.ordinal * LOADS_PER_PARTITION + FIRST_LOADS
        if not file.ordinal or load_id < (file.ordinal + 1) * LOADS_PER_PARTITION:
            load_ids[file] = load_id
    return load_ids


def run(spark: SparkSession, parameters: Parameters) -> dict[str, Any]:
    """Load once; when another run commits first, look again and load what is left."""
    now = parameters.processing_time()
    other_runs = f"other runs kept committing to {parameters.target}; nothing was written, run again"
    with unreadable_files_refused("nothing was written"), _append_only_refused(parameters):
        return until_committed(
            lambda: _load_what_can_be_read(spark, parameters, now), _COMMIT_ATTEMPTS, other_runs
        )


def _load_what_can_be_read(
    spark: SparkSession, parameters: Parameters, now: dt.datetime
) -> dict[str, Any] | None:
    """Return the report of a load; a batch that ends at files that can't be read is loaded again without them."""
    left_out: dict[SourceFile, str | None] = {}
    while True:
        try:
            report = _load(spark, parameters, now, left_out)
        except UnreadFiles as unread:
            left_out |= unread.files
            corrupt = {file: cause for file, cause in unread.files.items() if cause is not None}
            if corrupt:
                set_aside(spark, parameters.unreadable, corrupt, now)
            continue
        gone = [file.file_path for file, cause in left_out.items() if cause is None]
        return None if report is None else report | {"files_gone": gone}


def _load(
    spark: SparkSession, parameters: Parameters, now: dt.datetime, left_out: Collection[SourceFile]
) -> dict[str, Any] | None:
    """Return the report, or None if another run took our number.

    Raises:
        NotReady: the files are not enough for a load.
        UnreadFiles: the batch has unreadable files, which the caller sets aside.
    """
    landing = Landing(spark, parameters.source)
    listed = landing.files(window_folders(landing, parameters))
    setting_aside = parameters.unreadable_files == "set_aside"
    unreadable = files_set_aside(spark, parameters.unreadable) if setting_aside else set()
    files = [file for file in listed if file not in left_out and identity(file) not in unreadable]
    columns = partition_columns(spark, parameters, files)
    before = loaded(spark, parameters)

    new, changed = new_and_changed(spark, files, before.ledger)
    batch = new + changed
    waits = parameters.waits_for(batch, now)
    if waits is not None and not left_out:  # the files that were left out were enough, too
        raise NotReady(f"{parameters.source}: {waits}; nothing was loaded")
    window = parameters.window if parameters.mode == "replace_window" else None
    is_gone = window is not None and has_files_that_are_gone(spark, files, before.ledger, window)
    if window is not None and (batch or is_gone):
        batch = files
    highest, newest_ingested_at = numbers_of(spark, batch, before.ledger) if batch or is_gone else ({}, 0)
    load_ids = assign_load_ids(batch, highest)
    full = {_folder_of(file) for file in batch if file not in load_ids}
    batch = list(load_ids)
    too_often = JobFailed(
        f"{', '.join(sorted(full))} of {parameters.source} had {LOADS_PER_PARTITION - 1} loads, the most of a "
        "partition, and was left out; all else was loaded"
    )
    exists = table_exists(spark, parameters.target)
    report = {
        "source": parameters.source,
        "target": parameters.target,
        "files_listed": len(listed),
        "files_new": len(new),
        "files_changed": len(changed),
        "files_skipped": len(listed) - len(batch),
        "files_unreadable": sum(identity(file) in unreadable for file in listed),
        "lines_written": 0,
        "table_version": latest_version(spark, parameters.target) if exists else None,
    }
    if full and (window is not None or not batch):
        raise too_often
    if not batch and not is_gone and (exists or parameters.window is None):
        return report

    # Rises with every run even if the clock doesn't: readers ask for what is newer than what they have.
    ingested_at = max(to_micros(now), newest_ingested_at + 1)
    file_rows = files_frame(spark, load_ids, ingested_at)
    condition = None if window is None else _replace_condition(parameters, columns)
    transaction = (APP_ID, before.run + 1)
    with _unread_files_named(landing, batch if setting_aside else ()):
        user_metadata = write_once(
            spark,
            bronze_rows(
                read_lines(spark, batch).select(
                    F.col("value").alias("payload"), url_path().alias("url_path")
                ),
                file_rows,
                columns,
            ),
            parameters.target,
            transaction=transaction,
            partition_columns=columns,
            properties={
                "delta.appendOnly": str(window is None).lower(),
                # No statistics over payload: they cost, and can't hold bytes that are no text.
                "delta.dataSkippingStatsColumns": "file_path,load_id,ingested_at",
            },
            replace_where=condition,
        )
    data_commit = find_commit(spark, parameters.target, user_metadata)
    if data_commit is None:
        return None
    with suppress(*CONFLICTS):  # a run after ours has completed the ledger already
        write_once(
            spark,
            ledger_rows(file_rows),
            parameters.ledger,
            transaction=(_ledger_app_id(spark, parameters), before.run + 1),
            replace_where=condition,
        )
    if full:
        raise too_often
    return report | {
        "lines_written": int(data_commit["operationMetrics"].get("numOutputRows", 0)),
        "table_version": data_commit["version"],
        "ledger_version": latest_version(spark, parameters.ledger),
    }


@contextmanager
def _unread_files_named(landing: Landing, batch: Sequence[LandingFile]) -> Iterator[None]:
    """Raise UnreadFiles instead of the block's failure if files of the batch caused the failure."""
    try:
        yield
    except CONFLICTS:
        raise
    except (PySparkException, Py4JJavaError) as failure:
        unread = unread_files(landing.folder, batch, failure)
        if not unread:
            raise
        raise UnreadFiles(unread) from failure


def _folder_of(file: LandingFile) -> str:
    return file.file_path.rpartition("/")[0]


def _ordinal(date: dt.date | None, hour: int | None) -> int:
    """Return a landing partition as the number yyyymmddhh, with hh = 00 for a day and 0 for none."""
    return 0 if date is None else int(f"{date:%Y%m%d}{hour or 0:02d}")


def _replace_condition(parameters: Parameters, columns: Sequence[str]) -> str:
    """Return the SQL predicate of the window's partitions."""
    window, grain = given(parameters.window, "a window"), parameters.grain
    if not columns:
        raise WrongUse(f"mode replace_window needs date= folders; {parameters.source} has none")
    return " or ".join(
        f"(date = {date_literal(part.start)}"
        + (f" and hour = {part.start.hour})" if grain == "hour" else ")")
        for part in window.split(grain)
    )


def _ddl(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {type_}" for name, type_ in columns.items())


@contextmanager
def _append_only_refused(parameters: Parameters) -> Iterator[None]:
    try:
        yield
    except (PySparkException, Py4JJavaError) as failure:
        if "DELTA_CANNOT_MODIFY_APPEND_ONLY" in str(failure):
            raise WrongUse(
                f"target {parameters.target} only appends (delta.appendOnly), as streams that read it need; "
                "mode replace_window is for tables that it made itself"
            ) from failure
        raise


if __name__ == "__main__":
    run_job(Parameters, run)
