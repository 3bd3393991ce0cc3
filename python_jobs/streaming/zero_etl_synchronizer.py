"""Zero-ETL Synchronizer: raw copies of topics in Delta tables, by a configuration alone.

Problem: a pipeline for each topic, whose only task is to bring records from Kafka into the lakehouse, is code to keep.

A YAML file has one entry for each topic: topic, table and location (:mod:`.synchronized_topics`). Each run copies the
closed segments of all topics, registers the tables in Spark's catalog, merges small files where the entry says so, and
reports the lag. Start it on a schedule. A closed segment is a full run of ``segment_records`` offsets of a partition,
or records that are older than ``segment_age``; the rest is copied when its segment closes. Clients of Kafka don't see
the broker's own segments.

A row is a record: ``value`` and ``key`` byte for byte, ``topic``, ``partition``, ``offset``, ``timestamp``,
``headers``. Nothing transforms it, and the table is append-only. With a ``schema`` the table also has the declared
fields of the JSON value as columns beside it, NULL where the value doesn't have them.

Guarantee: each (topic, partition, offset) of a closed segment is in the table once. Rows and progress are one commit,
so a crash or a second run at the same time neither loses nor repeats a record. A topic that fails doesn't stop the
others; the run ends with an error that names it. A table is registered when its first commit is complete.

Cost: a topic without closed segments costs some requests to Kafka and one look into the table's history. A partition
of a topic is one task and one file in each run.

    spark-submit python_jobs/streaming/zero_etl_synchronizer.py --configuration conf/synchronized_topics.yml \\
        --bootstrap_servers localhost:9092 --root s3a://lakehouse

Source: Data Engineering Design Patterns, chapter 11, Zero-ETL Synchronizer.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, WrongUse, root_cause
from python_jobs.shared.core.intervals import moved, to_micros
from python_jobs.shared.core.partial_failures import require_no_failures
from python_jobs.shared.core.paths import absolute
from python_jobs.shared.delta.commits import (
    Written,
    commit_note,
    commits,
    find_commit,
    latest_version,
    numeric_metrics,
    transaction_versions,
    until_committed,
    write_once,
)
from python_jobs.shared.delta.compaction import compact
from python_jobs.shared.delta.tables import read_table, table_exists, table_location
from python_jobs.shared.kafka.bronze_records import RAW_TYPES, raw_rows
from python_jobs.shared.kafka.settings import consumer_settings, refuse_secrets
from python_jobs.shared.kafka.topics import (
    StreamedTopics,
    first_offsets_since,
    offset_ranges,
    read_offsets,
    require_brokers,
    source_failures,
)
from python_jobs.shared.records.json_records import TYPED, load_schema, with_fields
from python_jobs.shared.records.values import require_readable
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.shared.spark.job import known_failure, run_job
from python_jobs.shared.spark.sql_text import named_column, string_literal, taken_names
from python_jobs.streaming.synchronized_topics import SynchronizedTopic, load_topics

_WRITER = "zero_etl_synchronizer"
_WAY_OUT = "give the entry another table and another location"
_ATTEMPTS = 5
# Raw records are the source of all repairs: nobody changes them by mistake.
_PROPERTIES = {"delta.appendOnly": "true"}


@dataclass(frozen=True)
class Parameters(ProcessingTimeParameters):
    """Copy the closed segments of all configured topics into their tables."""

    configuration: str
    """YAML file with one entry for each topic."""
    bootstrap_servers: str
    """Kafka brokers, host:port,host:port."""
    root: str = "."
    """Folder or URI of the entries' relative locations; default: the working directory."""
    fail_on_data_loss: bool = True
    """Whether a topic fails if records expired before they were copied; false continues with those that are left."""
    consumer: dict[str, str] = field(default_factory=dict)
    """Further settings of Kafka's client, such as security.protocol; secrets as ${env:NAME} only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_secrets(self.consumer)

    @property
    def settings(self) -> dict[str, str]:
        """Settings of Kafka's Java client."""
        return consumer_settings(self.bootstrap_servers, self.consumer)

    def location(self, entry: SynchronizedTopic) -> str:
        """Return the absolute location of an entry's table."""
        is_relative = absolute(entry.location) != entry.location
        return absolute(f"{self.root.rstrip('/')}/{entry.location}" if is_relative else entry.location)


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Synchronize all topics once and return what was copied and the lag.

    Raises:
        WrongUse: the configuration is wrong; nothing was read.
        NotReady: no broker answers.
        JobFailed: a topic failed, after all others were synchronized; it has the class of the topics' failures.
    """
    entries = {entry.topic: entry for entry in load_topics(params.configuration)}
    fields = {topic: declared_fields(entry) for topic, entry in entries.items()}
    require_brokers(spark, params.settings)
    now = params.processing_time()
    synchronized: dict[str, dict[str, Any]] = {}
    failures: dict[str, Exception] = {}
    for topic, entry in entries.items():
        try:
            synchronized[topic] = _synchronize(spark, params, entry, fields[topic], now)
        except Exception as failure:
            known = None if isinstance(failure, JobFailed) else known_failure(failure)
            failures[topic] = known or failure
    lags = ", ".join(f"{topic} with a lag of {report['lag']}" for topic, report in synchronized.items())
    require_no_failures(failures, f"synchronized: {lags or 'no topic'}")
    return {"topics": synchronized, "lag": sum(report["lag"] for report in synchronized.values())}


def declared_fields(entry: SynchronizedTopic) -> StructType:
    """Return the fields that are columns beside the value; none without a schema."""
    if entry.schema is None:
        return StructType()
    declared = load_schema(entry.schema)
    require_readable(declared, nested=True)
    taken = taken_names(declared.fieldNames(), by=RAW_TYPES)
    if taken:
        raise WrongUse(
            f"the schema '{entry.schema}' has fields that are named like columns of the record: {', '.join(taken)}; "
            "leave them out, a query of the raw table can read them from the value"
        )
    return declared


def _synchronize(
    spark: SparkSession, params: Parameters, entry: SynchronizedTopic, fields: StructType, now: dt.datetime
) -> dict[str, Any]:
    """Copy, register and compact one topic."""
    location = params.location(entry)
    source = StreamedTopics(spark, [entry.topic], params.settings, _WAY_OUT)
    with _clear_catalog_failures(entry, "nothing was copied; run again when it answers"):
        is_registered = _is_registered(spark, entry, location)
    copied = until_committed(
        lambda: Copy(spark, params, entry, fields, location, source, now).write(),
        _ATTEMPTS,
        f"other runs copied {entry.topic} to {location} at the same time; run again",
    )
    if not is_registered:
        with _clear_catalog_failures(
            entry, f"the copy at {location} is complete, and the next run registers it"
        ):
            spark.sql(
                f"create table if not exists {entry.table} using delta location {string_literal(location)}"
            )
    compaction = None if entry.compaction is None else compact(spark, location, entry.compaction, now)
    return {
        "table": entry.table,
        "location": location,
        **copied,
        "compaction": compaction,
        "table_version": latest_version(spark, location),
    }


# --- the catalog ----------------------------------------------------------------------------------------


def _is_registered(spark: SparkSession, entry: SynchronizedTopic, location: str) -> bool:
    """Return whether the table's name is in the catalog; another table of this name is refused."""
    if not table_exists(spark, entry.table):
        return False
    found = table_location(spark, entry.table)
    if found != str(HadoopFolder(spark, location).path().toString()):
        raise WrongUse(f"the catalog has a table {entry.table} at {found}, not at {location}; {_WAY_OUT}")
    return True


@contextmanager
def _clear_catalog_failures(entry: SynchronizedTopic, outcome: str) -> Iterator[None]:
    """Raise a failure of the catalog in the block as one sentence that ends with what was done."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as failure:
        raise JobFailed(
            f"the catalog failed at the table {entry.table} ({root_cause(failure)[:300]}); {outcome}"
        ) from failure


# --- the copy -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """How far a table has its topic's records."""

    number: int
    """Number of the last commit with progress; 0: there is no table yet."""
    offsets: Mapping[int, int]
    """First offset of each partition that isn't copied yet."""
    is_noted: bool
    """Whether the offsets are those that the last commit noted for all partitions of the topic."""

    def start(self, partition: int, first: int) -> int:
        """Return the offset that comes next; ``first`` is the first offset that the topic still has.

        A partition that came after the noted ones begins at 0, so that none of its records is missed.
        """
        return self.offsets.get(partition, 0 if self.is_noted else first)


@dataclass(frozen=True)
class Copy:
    """One attempt to copy what is closed of a topic."""

    spark: SparkSession
    params: Parameters
    entry: SynchronizedTopic
    fields: StructType
    location: str
    source: StreamedTopics
    now: dt.datetime

    def write(self) -> dict[str, Any] | None:
        """Copy in one commit; return the numbers for the report, None if another run has taken the commit's number."""
        progress = self._progress()
        added = self._added_columns() if progress.number else []
        ranges = {
            partition: bounds
            for (_, partition), bounds in offset_ranges(
                self.spark, self.entry.topic, self.params.settings
            ).items()
        }
        ends = {partition: end for partition, (_, end) in ranges.items()}
        starts = {
            partition: self._start(progress, partition, *bounds) for partition, bounds in ranges.items()
        }
        stops = self._stops(starts, ends)
        report = {
            "records": 0,
            "added_columns": added,
            "lost_offsets": sum(starts[place] - progress.start(place, ranges[place][0]) for place in ranges),
            "lag": sum(ends.values()) - sum(stops.values()),
            "partitions": {
                str(place): {"synchronized": stops[place], "end": end, "lag": end - stops[place]}
                for place, end in ends.items()
            },
        }
        if progress.is_noted and stops == progress.offsets and not added:
            return report
        written = self._append(progress.number + 1, starts, stops, bool(added))
        commit = find_commit(self.spark, self.location, written)
        if commit is None:
            return None
        return report | {"records": numeric_metrics(commit).get("numOutputRows", 0)}

    def _append(
        self, number: int, starts: Mapping[int, int], stops: Mapping[int, int], add_columns: bool
    ) -> Written:
        """Append the records and note the progress in the same commit."""
        wanted = {
            (self.entry.topic, place): (start, stops[place])
            for place, start in starts.items()
            if start < stops[place]
        }
        records = read_offsets(self.spark, wanted, self.params.settings) if wanted else None
        with source_failures(self.entry.topic):
            return write_once(
                self.spark,
                rows_of(self.spark, records, self.fields),
                self.location,
                transaction=(self._writer, number),
                properties=_PROPERTIES,
                add_columns=add_columns,
                note={
                    "writer": self._writer,
                    "next_offsets": {str(place): end for place, end in stops.items()},
                },
            )

    @property
    def _writer(self) -> str:
        return self.source.writer(_WRITER)

    def _added_columns(self) -> list[str]:
        """Return the declared fields that the table doesn't have yet; a type that has changed is refused."""
        return list(_new_fields(self.fields, read_table(self.spark, self.location).schema, ""))

    # Where the copy begins.

    def _progress(self) -> Progress:
        if not table_exists(self.spark, self.location):
            return Progress(0, {}, is_noted=False)
        # Read the number before the offsets: if the offsets are newer, the write is skipped and tried again.
        numbers = transaction_versions(self.spark, self.location)
        self.source.require_written_by(list(numbers))
        if self._writer not in numbers:
            raise WrongUse(
                f"the table at {self.location} isn't a copy of the topic {self.entry.topic}; {_WAY_OUT}"
            )
        noted = self._noted_offsets()
        offsets = self._copied_offsets() if noted is None else noted
        return Progress(numbers[self._writer], offsets, is_noted=noted is not None)

    def _noted_offsets(self) -> dict[int, int] | None:
        """Return the offsets that the last copy's commit notes; None if the history no longer says what is copied."""
        for commit in commits(self.spark, self.location):
            note = commit_note(commit.userMetadata)
            if commit.operation == "RESTORE":  # the rows of later notes are gone
                return None
            if note.get("writer") == self._writer:
                return {int(partition): offset for partition, offset in note["next_offsets"].items()}
        return None

    def _copied_offsets(self) -> dict[int, int]:
        """Return the offset behind the last row of each partition; the query reads two columns of the table."""
        ends = read_table(self.spark, self.location).groupBy("partition")
        return {row.partition: row.end for row in ends.agg((F.max("offset") + 1).alias("end")).collect()}

    def _start(self, progress: Progress, partition: int, first: int, end: int) -> int:
        """Return the first offset to copy; ``first`` and ``end`` bound what the topic has.

        Raises:
            DataRefused: offsets are gone that were not copied.
        """
        start = progress.start(partition, first)
        if start > end:
            raise DataRefused(
                f"partition {partition} ends at {end}, but its records up to {start} are copied: the broker has lost "
                f"records; {_WAY_OUT}"
            )
        if start < first and self.params.fail_on_data_loss:
            raise DataRefused(
                f"the offsets {start} to {first - 1} of partition {partition} expired before they were copied; "
                "continue without them with --fail_on_data_loss false"
            )
        return max(first, start)

    # Where it ends.

    def _stops(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> dict[int, int]:
        """Return the offset of each partition before which the run copies."""
        old_until = dict.fromkeys(ends, 0)
        if self.entry.age is not None:
            since = to_micros(moved(self.now, -self.entry.age)) // 1_000
            young = first_offsets_since(self.spark, self.entry.topic, self.params.settings, since)
            for (_, place), offset in young.items():
                old_until[place] = ends.get(place, 0) if offset is None else offset
        return {
            place: self.entry.end_of_run(start, ends[place], old_until[place])
            for place, start in starts.items()
        }


def rows_of(spark: SparkSession, records: DataFrame | None, fields: StructType) -> DataFrame:
    """Return the table's rows: the record, then the declared fields of its value; None are no records."""
    rows = raw_rows(spark, records)
    if not fields.fields:
        return rows
    columns = (named_column(name, of=TYPED).alias(name) for name in fields.fieldNames())
    return with_fields(rows, fields, F.col("value").cast("string")).select(*RAW_TYPES, *columns)


def _new_fields(declared: DataType, existing: DataType, path: str) -> Iterator[str]:
    """Yield the paths of the declared fields that a type of the table doesn't have.

    Raises:
        DataRefused: a field is there with another type.
    """
    if isinstance(declared, StructType) and isinstance(existing, StructType):
        known = {field.name.lower(): field.dataType for field in existing.fields}
        for field_ in declared.fields:
            below = f"{path}.{field_.name}".lstrip(".")
            if field_.name.lower() in known:
                yield from _new_fields(field_.dataType, known[field_.name.lower()], below)
            else:
                yield below
    elif isinstance(declared, ArrayType) and isinstance(existing, ArrayType):
        yield from _new_fields(declared.elementType, existing.elementType, f"{path}.element")
    elif isinstance(declared, MapType) and isinstance(existing, MapType):
        yield from _new_fields(declared.valueType, existing.valueType, f"{path}.value")
    elif declared != existing:
        raise DataRefused(
            f"the schema declares {path} as {declared.simpleString()}, but the table has it as "
            f"{existing.simpleString()}: nothing was copied; declare the field as it was, or give the entry another "
            "table and another location"
        )


if __name__ == "__main__":
    run_job(Parameters, run)
