"""Optimistic writes: several processes change a small Delta table at once, and each change depends on the table's rows.

Delta accepts two concurrent appends, even if both were computed from the same rows. Here each change takes the table's
next number (``txnVersion``). If two changes take the same number, the later one is recomputed from the table's new
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tenacity
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.delta.commits import CONFLICTS, find_commit, transaction_version, write_once
from python_jobs.shared.delta.tables import table_exists

Result = TypeVar("Result")

_TRIES = 20


def change(
    spark: SparkSession,
    table: str,
    app_id: str,
    make: Callable[[], tuple[DataFrame | None, Result]],
    *,
    replace_all: bool = False,
) -> Result:
    """Write the rows that ``make`` computes from the table's current rows, and return its other result.

    Args:
        table: Delta table, by path or catalog name; created if absent.
        app_id: name under which Delta counts the changes (``txnAppId``), the same for all changes of the table.
        make: function that reads the table and returns the rows to write (None for no change) and a result. It is
            called again if another process has changed the table meanwhile.
        replace_all: whether the rows replace the table's rows; default: they are appended.
    """
    again = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type((*CONFLICTS, _Overtaken)),
        stop=tenacity.stop_after_attempt(_TRIES),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=2),
        reraise=True,
    )
    return again(_change, spark, table, app_id, make, replace_all)


def _change(
    spark: SparkSession,
    table: str,
    app_id: str,
    make: Callable[[], tuple[DataFrame | None, Result]],
    replace_all: bool,
) -> Result:
    # Read the number before the rows: if the rows are newer than the number, the write only fails and is retried.
    known = transaction_version(spark, table, app_id) if table_exists(spark, table) else None
    rows, result = make()
    if rows is not None:
        number = 1 if known is None else known + 1
        commit = write_once(spark, rows, table, transaction=(app_id, number), replace_all=replace_all)
        if find_commit(spark, table, commit) is None:
            raise _Overtaken(f"{table} was changed by {_TRIES} other runs in a row; run again")
    return result


class _Overtaken(Exception):
    """Another process has taken the number."""
