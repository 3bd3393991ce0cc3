"""Merger for jobs: apply an increment, with its deletions, to a Delta table by key in one MERGE.

The macros of the dbt form render the statement, so the rules are the same. The newest of several changes of a key
applies. A deletion of an unknown key inserts nothing. A row with NULL in its key is refused. A change that is older
than the stored row is ignored.

Source: Data Engineering Design Patterns, chapter 4, Merger.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.failures import DataRefused
from python_jobs.shared.delta.tables import partition_columns, read_table
from python_jobs.shared.spark.macro_sql import Macros, refusal_of_macro
from python_jobs.shared.spark.sql_text import table_name

_FILES = (
    "idempotency/merger/options.sql",
    "idempotency/merger/pruning.sql",
    "idempotency/merger/batch.sql",
    "idempotency/merger/merge.sql",
    "shared/arguments.sql",
    "shared/columns.sql",
    "shared/incomplete_rows.sql",
    "shared/literals.sql",
    "shared/numbers.sql",
    "shared/pattern_options.sql",
    "shared/schema_changes.sql",
)


@dataclass(frozen=True)
class MergeRules:
    """Rules for applying an increment; the names have the same meaning as in the dbt form."""

    key: list[str]
    """Columns that identify a row and never change."""
    is_deleted: str | None = None
    """Boolean column that marks a deletion; NULL means false."""
    deletes: str = "none"
    """Effect of a deletion: none, soft (the row stays and is flagged) or hard (the row is deleted)."""
    sequence: list[str] = field(default_factory=list)
    """Columns that order the changes of a key; without them the last batch wins."""

    @property
    def options(self) -> dict[str, Any]:
        """Return the options in the form that a model has under ``meta.lakehouse_patterns.merger``."""
        return {"deletes": self.deletes, "is_deleted": self.is_deleted, "sequence": self.sequence}


def merge(spark: SparkSession, rows: DataFrame, target: str, rules: MergeRules) -> None:
    """Apply ``rows`` to an existing Delta table, by path or catalog name; without a change Delta writes no commit.

    Raises:
        WrongUse: the rules don't fit the columns of the rows and of the target.
        DataRefused: a row has NULL in its key or its sequence columns; the table stays unchanged.
    """
    table, view = table_name(target), f"merger_{uuid.uuid4().hex}"
    configuration = {"unique_key": rules.key, "partition_by": partition_columns(spark, target)}
    macros = Macros(spark, _FILES, configuration)
    merger = macros.call("_merger", rules.options, table, dict(rows.dtypes))
    columns = macros.call("_merger_written_columns", merger, table, dict(read_table(spark, target).dtypes))
    rows.createOrReplaceTempView(view)
    try:
        looked_up: Mapping[str, Any] = macros.call("_merger_look_up", merger, view, table)
        spark.sql(macros.call("_merger_merge", merger, view, table, columns, looked_up, [])).collect()
    except (PySparkException, Py4JJavaError) as failure:
        refused = refusal_of_macro(failure)
        if refused is None:
            raise
        raise DataRefused(f"{refused}; the table stays as it is") from None
    finally:
        spark.catalog.dropTempView(view)
