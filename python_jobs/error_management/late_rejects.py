"""Late rejects: keep the rows that come for dates before the lookback of a Late Data Integrator.

A run processes only the dates of its lookback, so a row that comes for an older date is in the source and in no result.
A reject table keeps such a row unchanged, with the run that left it out and the version of the source in which it was
found.

A row is new if it is in its date's partition now and wasn't when the date was last processed or last rejected from,
whichever is later: the two versions of the partition are compared as multisets. Compaction, and rows that an update or
a merge has only moved to another file, give no new row; a changed row is new.

Guarantee: a row is rejected once. The commit contains the version of the source up to which rows were rejected, as
Delta's transaction number of the target; the first run only records this number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import reduce

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.error_management.late_partitions import DateQuery, changed_partitions
from python_jobs.shared.core.failures import JobFailed
from python_jobs.shared.delta.commits import find_commit, transaction_version, write_once
from python_jobs.shared.delta.streams import create_table, empty_source, evaluated_once, nullable
from python_jobs.shared.delta.tables import read_version, table_id
from python_jobs.shared.spark.sql_text import named_column

REJECT_COLUMNS = ("rejected_by_run", "rejected_for_date", "rejected_at_version")


def reject_rows(
    spark: SparkSession,
    query: DateQuery,
    rejects: str,
    *,
    horizon: str,
    source_version: int,
    read_versions: Mapping[str, int],
    run_id: str,
    date: str,
) -> dict[str, int]:
    """Append the rows that came for dates before ``horizon`` to the table ``rejects``; return their number by date.

    Args:
        horizon: First date of the lookback.
        source_version: Version of the source that the run has processed.
        read_versions: Source version from which each date of the target was computed.
        run_id: Name of the run.
        date: Date of the run.

    Raises:
        WrongUse: the source has a column of :data:`REJECT_COLUMNS`, or ``rejects`` is another table.
        JobFailed: the source's last compared version was vacuumed or its log has expired, or another run rejected
            the same rows at the same time.
    """
    empty = empty_source(spark, query.source, REJECT_COLUMNS)

    def rejected(rows: DataFrame) -> DataFrame:
        values = (run_id, date, source_version)
        return rows.select(
            "*",
            *(F.lit(value).alias(name) for name, value in zip(REJECT_COLUMNS, values, strict=True)),
        )

    create_table(spark, rejects, nullable(rejected(empty).schema))
    # The source's id is part of it: another table under the source's name counts its versions from 0 again.
    app_id = f"late_data_rejects/{table_id(spark, query.target)}/{table_id(spark, query.source)}"
    last = transaction_version(spark, rejects, app_id)
    if last is not None and last >= source_version:
        return {}
    rows = empty if last is None else _new_rows(spark, query, horizon, last, source_version, read_versions)
    try:
        with evaluated_once(rejected(rows)) as found:
            counts = found.groupBy(F.col(query.partition_column).cast("string")).count().collect()
            written = write_once(spark, found, rejects, transaction=(app_id, source_version))
    except (PySparkException, Py4JJavaError) as failure:
        if not any(sign in str(failure) for sign in _GONE):
            raise
        raise JobFailed(
            f"the new rows of {query.source} since version {last} can't be found, because this version was vacuumed or "
            "its log has expired: start again with another table as rejects"
        ) from None
    if counts and find_commit(spark, rejects, written) is None:
        raise JobFailed(
            f"another run appended to {rejects} what is new in {query.source} at the same time; run again"
        )
    return {row[0]: row[1] for row in counts}


_GONE = ("FILE_NOT_EXIST", "FileNotFoundException", "VersionNotFoundException", "DELTA_VERSION_NOT_FOUND")


def _new_rows(
    spark: SparkSession,
    query: DateQuery,
    horizon: str,
    after: int,
    until: int,
    read_versions: Mapping[str, int],
) -> DataFrame:
    """Return the rows of dates before ``horizon`` that are newer than ``after`` and than their date's last read."""
    column = query.partition_column
    dates_since = defaultdict(list)
    for date in changed_partitions(spark, query.source, column, after, until):
        if date < horizon:
            dates_since[max(after, read_versions.get(date, after))].append(date)
    now = read_version(spark, query.source, until)
    # Rows written before a column was added have NULL in the column, in both versions.
    added = [
        now.where(named_column(column).isin(dates)).exceptAll(
            now.limit(0)
            .unionByName(read_version(spark, query.source, since), allowMissingColumns=True)
            .where(named_column(column).isin(dates))
        )
        for since, dates in sorted(dates_since.items())
    ]
    return reduce(DataFrame.unionAll, added, now.limit(0))
