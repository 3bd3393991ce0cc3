"""Small Delta tables in which a job keeps what it has to know later: versions of runs, versions with a name."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.delta.commits import write_once
from python_jobs.shared.delta.merge import MergeRules, merge
from python_jobs.shared.delta.tables import read_table, table_exists


def read_registry(spark: SparkSession, registry: str, columns: str, kind: str) -> DataFrame | None:
    """Return the rows of a registry; None if it is absent yet.

    Args:
        registry: Delta table, by path or catalog name.
        columns: what it must have, as in SQL.
        kind: what it is, for the sentence, such as "table of versions".

    Raises:
        WrongUse: the table has other columns.
    """
    if not table_exists(spark, registry):
        return None
    rows = read_table(spark, registry)
    expected = [part.split()[0] for part in columns.split(", ")]
    if rows.columns != expected:
        raise WrongUse(
            f"{registry} is no {kind}: it has {', '.join(rows.columns)}, not {', '.join(expected)}"
        )
    return rows


def register(spark: SparkSession, row: DataFrame, registry: str, key: Sequence[str]) -> None:
    """Add a row to a registry, made if absent, or replace the one of its key."""
    if table_exists(spark, registry):
        merge(spark, row, registry, MergeRules(list(key)))
    else:
        write_once(spark, row, registry)
