"""Overwrites of a slice of a Delta table in one commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.failures import DataRefused, WrongUse
from python_jobs.shared.delta.commits import find_commit, write_once
from python_jobs.shared.delta.tables import partition_columns, read_table, table_exists
from python_jobs.shared.spark.expressions import first_line


class OutsideSlice(DataRefused):
    """A row lies outside of the slice that is overwritten."""


def overwrite(
    spark: SparkSession,
    rows: DataFrame,
    table: str,
    where: str | None,
    *,
    partitioned_by: Sequence[str] = (),
    transaction: tuple[str, int] | None = None,
    note: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Replace the rows that match ``where``, or the whole table with its schema, in one commit; return the commit.

    Args:
        partitioned_by: partition columns of a table that is created; an existing table keeps its partition columns.
        transaction, note: values of the commit, as in :func:`python_jobs.shared.delta.commits.write_once`.

    Returns:
        The entry of the table's history. None if ``transaction`` is already committed, or if the slice had no rows and
        gets none: then Delta writes no commit.

    Raises:
        DataRefused: the rows have other columns than the table; the table stays unchanged.
        OutsideSlice: a row doesn't match the condition; the table stays unchanged.
        WrongUse: the condition can't be used.
    """
    if table_exists(spark, table):
        partitioned_by = partition_columns(spark, table)
        if where is not None:
            require_same_columns(rows, read_table(spark, table), table)
    elif where is not None:
        # Delta checks that the rows match only if it replaces rows of an existing table.
        write_once(spark, rows.limit(0), table, partition_columns=partitioned_by)
    try:
        commit = write_once(
            spark,
            rows,
            table,
            transaction=transaction,
            partition_columns=partitioned_by,
            replace_where=where,
            replace_all=where is None,
            note=note,
        )
    except (PySparkException, Py4JJavaError) as failure:
        if "DELTA_REPLACE_WHERE_MISMATCH" in str(failure):
            raise OutsideSlice(
                f"a row for {table} lies outside of the slice that is overwritten ({where}); the table stays as it is"
            ) from None
        if where is not None and isinstance(failure, AnalysisException | ParseException):
            raise WrongUse(f"where can't be used on {table} ({first_line(failure)})") from None
        raise
    return find_commit(spark, table, commit)


def require_same_columns(rows: DataFrame, stored: DataFrame, table: str) -> None:
    """Refuse rows with another schema: Delta would fill a missing column with NULL, in the middle of a backfill.

    Raises:
        DataRefused: a column is absent, new or of another type.
    """
    got, want = dict(rows.dtypes), dict(stored.dtypes)
    faults = [f"no column {name}" for name in want if name not in got]
    faults += [f"{name}, which the table lacks" for name in got if name not in want]
    faults += [
        f"{name} as {got[name]} in place of {want[name]}"
        for name in want
        if name in got and got[name] != want[name]
    ]
    if faults:
        raise DataRefused(
            f"the rows for {table} have {', '.join(faults)}; select the table's columns, or alter the table first"
        )
