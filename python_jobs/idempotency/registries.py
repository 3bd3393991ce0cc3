"""Registries: small Delta tables in which jobs keep facts for later runs, such as the table version of each run."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.delta.commits import write_once
from python_jobs.shared.delta.merge import MergeRules, merge
from python_jobs.shared.delta.tables import read_table, table_exists


def read_registry(spark: SparkSession, registry: str, columns: str, kind: str) -> DataFrame | None:
    """Return the rows of a registry; None if the registry doesn't exist yet.

    Args:
        registry: Delta table, by path or catalog name.
        columns: columns that the table must have, as in SQL.
        kind: kind of the registry for the error sentence, such as "table of versions".

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
    """Add a row to a registry, or replace the row of its key; the registry is created if absent."""
    if table_exists(spark, registry):
        merge(spark, row, registry, MergeRules(list(key)))
    else:
        write_once(spark, row, registry)
