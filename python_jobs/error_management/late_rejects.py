"""What comes too late even for a Late Data Integrator: rows for dates before its lookback, kept for good.

A run processes the dates of its lookback and no other, so that a row that came for an older date is in the source and
in no result. With a reject table such a row is also there: the row as it is, the run that left it out, and the version
of the source that it was found in.

A row is new if it is in its date's partition now and wasn't when that date was processed last, or rejected from last,
whichever is later: the two versions of the partition are compared, as multisets. Compaction and rows that an update or
a merge has only moved to another file are no new rows; a row that was changed is one.

Guarantee: a row is rejected once. The commit holds the version of the source up to which rows were rejected, as Delta's
transaction number of the target; the first run only notes that number.
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
from python_jobs.shared.delta.commits import transaction_version, write_once
from python_jobs.shared.delta.streams import create_table, empty_source, evaluated_once, nullable
from python_jobs.shared.delta.tables import read_version, table_id

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
    """Append the rows that came for dates before ``horizon`` to the table ``rejects``; return how many by date.

    Args:
        horizon: first date of the lookback.
        source_version: version of the source that the run has processed.
        read_versions: version that each date of the target was computed from.
        run_id: name of the run.
        date: date of the run.

    Raises:
        WrongUse: the source has a column of :data:`REJECT_COLUMNS`, or ``rejects`` is another table.
        JobFailed: the source's last version that was compared is gone.
    """
    empty = empty_source(spark, query.source, REJECT_COLUMNS)

    def rejected(rows: DataFrame) -> DataFrame:
        values = (run_id, date, source_version)
        return rows.select(
            "*",
            *(F.lit(value).alias(name) for name, value in zip(REJECT_COLUMNS, values, strict=True)),
        )

    create_table(spark, rejects, nullable(rejected(empty).schema))
    app_id = f"late_data_rejects/{table_id(spark, query.target)}"
    last = transaction_version(spark, rejects, app_id)
    if last is not None and last >= source_version:
        return {}
    rows = empty if last is None else _new_rows(spark, query, horizon, last, source_version, read_versions)
    try:
        with evaluated_once(rejected(rows)) as found:
            counts = found.groupBy(F.col(query.partition_column).cast("string")).count().collect()
            write_once(spark, found, rejects, transaction=(app_id, source_version))
    except (PySparkException, Py4JJavaError) as failure:
        if not any(sign in str(failure) for sign in _GONE):
            raise
        raise JobFailed(
            f"which rows of {query.source} are new since version {last} can't be told any more, as that version was "
            "vacuumed or its log has expired: begin anew with another table as rejects"
        ) from None
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
    """Return the rows of dates before ``horizon`` that came after ``after``, or after their date was read later on."""
    column = query.partition_column
    dates_since = defaultdict(list)
    for date in changed_partitions(spark, query.source, column, after, until):
        if date < horizon:
            dates_since[max(after, read_versions.get(date, after))].append(date)
    now = read_version(spark, query.source, until)
    # Rows of before a column was added have NULL in it, in both versions.
    added = [
        now.where(F.col(column).isin(dates)).exceptAll(
            now.limit(0)
            .unionByName(read_version(spark, query.source, since), allowMissingColumns=True)
            .where(F.col(column).isin(dates))
        )
        for since, dates in sorted(dates_since.items())
    ]
    return reduce(DataFrame.unionAll, added, now.limit(0))
