"""Late partitions: both Late Data Integrators find the changed dates of a table, compute a date and replace it.

The user gives a query for one date. The job reads the source at a fixed version and replaces the date's partition of
the target in one commit; if the query returns no row, the partition is cleared. The commit also contains the version
that was read, as Delta's transaction number of the date (``late_data/2024-12-18``), so data and last processed version
can't differ.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.dates import parse_date
from python_jobs.shared.core.failures import DataRefused, JobFailed, WrongUse
from python_jobs.shared.core.partial_failures import require_no_failures
from python_jobs.shared.delta.commits import latest_version, transaction_versions
from python_jobs.shared.delta.overwrite import OutsideSlice, overwrite
from python_jobs.shared.delta.tables import (
    committed_files,
    partition_columns,
    partition_values,
    read_table,
    read_version,
    table_exists,
)
from python_jobs.shared.files.readiness import Marker
from python_jobs.shared.records.partition_values import partition_condition
from python_jobs.shared.spark.queries import query_text, user_query
from python_jobs.shared.spark.sql_text import named_column

_APP = "late_data/"


@dataclass(frozen=True, kw_only=True)
class DateQuery:
    """The query and tables by which one date of the target is computed."""

    source: str
    """Delta table whose late data is integrated, by path or catalog name."""
    target: str
    """Delta table that is written, by path or catalog name; the first run creates it if absent."""
    query: str
    """SQL that returns the rows of {date} from {source}, as text or .sql file; it may read {target} as well."""
    partition_column: str = "event_date"
    """Column by which both tables are partitioned: a date, or a text such as 2024-12-31."""

    def __post_init__(self) -> None:
        for part in ("{source}", "{date}"):
            if part not in self.text:
                raise WrongUse(
                    f"the query doesn't mention {part}; it must return one date's rows of the source"
                )

    @cached_property
    def text(self) -> str:
        """The SQL of the query."""
        return query_text(self.query)


@dataclass(frozen=True)
class Rewritten:
    """One partition that was replaced."""

    partition: str
    """Date."""
    source_version: int
    """Version of the source that was read."""
    target_version: int
    """Version of the target that holds the result."""
    rows: int
    """Rows of the partition."""


class DateProcessor:
    """Computes dates of the target from one version of the source."""

    def __init__(self, spark: SparkSession, query: DateQuery) -> None:
        """Fix the source's version and check both tables.

        Raises:
            NotReady: there is no source table.
            WrongUse: a table isn't partitioned by the column.
        """
        self._spark, self._query = spark, query
        self.source_version = latest_version(spark, query.source)
        for table in (query.source, query.target):
            if table == query.source or table_exists(spark, table):
                columns = partition_columns(spark, table)
                if query.partition_column not in columns:
                    raise WrongUse(
                        f"{table} is not partitioned by {query.partition_column} but by "
                        f"{', '.join(columns) or 'nothing'}: late data can be found only by date partitions"
                    )

    def changes(self, after: int | None) -> dict[str, int]:
        """Return the dates whose data changed after that version, as :func:`changed_partitions` does."""
        return changed_partitions(
            self._spark, self._query.source, self._query.partition_column, after, self.source_version
        )

    def read_versions(self) -> dict[str, int]:
        """Return the source version from which each date of the target was computed, by the target's log."""
        if not table_exists(self._spark, self._query.target):
            return {}
        versions = transaction_versions(self._spark, self._query.target)
        return {app.removeprefix(_APP): version for app, version in versions.items() if app.startswith(_APP)}

    def process(self, date: str, run_id: str) -> Rewritten:
        """Replace the date's partition, in one commit, by the rows that the query returns for the date.

        Raises:
            WrongUse: the query can't be analyzed.
            DataRefused: the query returned rows of another date.
            JobFailed: another run has replaced the date from a newer version.
        """
        query, spark = self._query, self._spark
        rows = self._rows(date)
        known = self.read_versions().get(date)
        if known is not None and known > self.source_version:
            raise JobFailed(f"{date} was computed from version {known} of the source already; plan again")
        # The same version again, such as with a fixed query, is written too, although its number is used already.
        is_new = known is None or known < self.source_version
        transaction = (f"{_APP}{date}", self.source_version) if is_new else None
        try:
            written = overwrite(
                spark,
                rows,
                query.target,
                partition_condition(rows, {query.partition_column: date}),
                partitioned_by=[query.partition_column],
                transaction=transaction,
                note={"late_data": {"date": date, "run_id": run_id, "source_version": self.source_version}},
            )
        except OutsideSlice:
            raise DataRefused(
                f"the query returned rows of other dates than {date}; it must filter by {{date}}"
            ) from None
        if written is None and not is_new:
            # Delta writes no commit for a partition that had no rows and gets none.
            return Rewritten(date, self.source_version, latest_version(spark, query.target), 0)
        if written is None:
            raise JobFailed(f"another run computed {date} meanwhile; plan again")
        metrics = written["operationMetrics"]
        return Rewritten(
            date, self.source_version, int(written["version"]), int(metrics.get("numOutputRows", 0))
        )

    def _rows(self, date: str) -> DataFrame:
        query, spark = self._query, self._spark
        source = read_version(spark, query.source, self.source_version)
        values: dict[str, Any] = {"source": source, "date": date, "source_version": self.source_version}
        if "{target}" in query.text:
            values["target"] = read_table(spark, query.target)
        return user_query(spark, query.text, **values)


def changed_partitions(
    spark: SparkSession, table: str, column: str, after: int | None, until: int
) -> dict[str, int]:
    """Return each date whose data changed after version ``after`` up to ``until``, with its last changing version.

    Compaction and other maintenance (``dataChange=false``) are no changes. If ``after`` is None, or the log doesn't
    reach back to it any more, the changes are unknown: all dates of the table count as changed as of ``until``. Rows
    whose date is NULL belong to no date.

    Raises:
        DataRefused: a partition's value is not a date.
    """
    if after is not None and after >= until:
        return {}
    files = None if after is None else _changed_files(spark, table, column, after, until)
    if files is None:
        rows = read_version(spark, table, until)
        files = rows.select(named_column(column).cast("string").alias("date"), F.lit(until).alias("version"))
    found = files.where("date is not null").groupBy("date").agg(F.max("version").alias("version")).collect()
    for row in found:
        try:
            parse_date(row.date)
        except ValueError as wrong:
            raise DataRefused(f"a partition of {table} is not a date: {wrong}") from None
    return {row.date: int(row.version) for row in found}


def _changed_files(spark: SparkSession, table: str, column: str, after: int, until: int) -> DataFrame | None:
    """Return date and version of the files that commits added or removed; None if a commit's log entry is missing."""
    try:
        actions = committed_files(spark, table, after, until)
    except AnalysisException as failure:
        if failure.getCondition() != "PATH_NOT_FOUND":
            raise
        return None
    position = partition_columns(spark, table).index(column)

    def dates(kind: str) -> DataFrame:
        date = partition_values(spark, table, f"{kind}.partitionValues")[position]
        return actions.where(f"{kind}.dataChange").select(date.cast("string").alias("date"), "version")

    return dates("add").unionByName(dates("remove"))


class Trace:
    """The outcome of a run for each date."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.rewritten: list[Rewritten] = []
        self.failed: dict[str, Exception] = {}

    def process(self, processor: DateProcessor, date: str, run_id: str) -> None:
        """Process a date; a failure is recorded, and the caller decides whether other dates follow."""
        self.started.append(date)
        try:
            self.rewritten.append(processor.process(date, run_id))
        except (JobFailed, PySparkException, Py4JJavaError) as failure:
            self.failed[date] = failure

    def report(self) -> dict[str, Any]:
        """Return the dates in the order in which they were started, with their outcome."""
        return {"started": self.started, "partitions": [asdict(done) for done in self.rewritten]}

    def require_success(self) -> None:
        """Raise an error if a date failed; it has the failures' type if all have the same type."""
        require_no_failures(self.failed, f"{len(self.rewritten)} of {len(self.started)} dates were replaced")


def write_manifest(
    spark: SparkSession, folder: str, *, run_id: str, date: str, target: str, trace: Trace
) -> str:
    """Write the manifest of the partitions that a run replaced and return its name; consumers decide what to replay.

    A run that is retried under the same name replaces its manifest.
    """
    name = f"{date}_{run_id}.json".replace("/", "_").replace(":", "_")
    partitions = trace.report()["partitions"]
    content = {"run_id": run_id, "date": date, "target": target, "partitions": partitions}
    Marker(spark, folder).write_beside(name, content)
    return name
