"""Changes of a small Delta table that depend on its rows, by several processes at once.

Delta lets two appends pass side by side, so that both could be made from the same rows. Here each change takes the next
number of the table's (``txnVersion``): of two changes from the same rows the later is made again from the other's
outcome.
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
    """Write what ``make`` makes of the table's current rows, and return its other result.

    Args:
        table: Delta table, by path or catalog name; made if absent.
        app_id: who counts the changes, the same for all of them.
        make: reads the table and returns the rows to write, None for no change. It is called again if another process
            has changed the table meanwhile.
        replace_all: write in place of the rows that are there, not after them.
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
    # The number before the rows: rows that are newer than the number only make this change fail.
    known = transaction_version(spark, table, app_id) if table_exists(spark, table) else None
    rows, result = make()
    if rows is not None:
        number = 1 if known is None else known + 1
        commit = write_once(spark, rows, table, transaction=(app_id, number), replace_all=replace_all)
        if find_commit(spark, table, commit) is None:
            raise _Overtaken(f"{table} was changed by {_TRIES} other runs in a row; run again")
    return result


class _Overtaken(Exception):
    """Another change has taken the number."""
