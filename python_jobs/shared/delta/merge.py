"""Merger for jobs: applies an increment to a Delta table by key, deletions included, in one MERGE.

The rules are those of the dbt form, whose macros render the statement: of several changes of a key the newest applies,
a deletion of an unknown key is not inserted, a row with NULL in its key is refused, an older change doesn't win.

Source: Data Engineering Design Patterns, chapter 4, Merger.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.failures import DataRefused
from python_jobs.shared.delta.tables import partition_columns, read_table
from python_jobs.shared.spark.macro_sql import Macros
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
_REFUSED = re.compile(r"lakehouse_patterns: ([^;\n]+)")


@dataclass(frozen=True)
class MergeRules:
    """How an increment is applied; the names mean what they mean for the dbt form."""

    key: list[str]
    """Columns that identify a row and never change."""
    is_deleted: str | None = None
    """Boolean column that marks a deletion; NULL means no."""
    deletes: str = "none"
    """What a deletion does: none, soft (the row stays, flagged) or hard."""
    sequence: list[str] = field(default_factory=list)
    """Columns that order the changes of a key; without them the last batch wins."""

    @property
    def options(self) -> dict[str, Any]:
        """The options as a model has them under ``meta.lakehouse_patterns.merger``."""
        return {"deletes": self.deletes, "is_deleted": self.is_deleted, "sequence": self.sequence}


def merge(spark: SparkSession, rows: DataFrame, target: str, rules: MergeRules) -> None:
    """Apply ``rows`` to an existing Delta table, by path or catalog name; Delta commits nothing if nothing changes.

    Raises:
        WrongUse: the rules don't fit the columns of rows and target.
        DataRefused: a row has NULL in its key or its sequence; the table is as it was.
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
        refused = _REFUSED.search(str(failure))
        if refused is None:
            raise
        raise DataRefused(f"{refused[1]}; the table stays as it is") from None
    finally:
        spark.catalog.dropTempView(view)
