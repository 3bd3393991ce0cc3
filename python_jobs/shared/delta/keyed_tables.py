"""Delta tables in which a row replaces the row of its key: the way in which a stateful stream writes its results.

A stateful stream writes a result again when it grows, after a crash, and from another checkpoint that starts over. The
number of the batch can't tell an old result from a new one: another checkpoint counts from 0. So a row carries a
version that only grows with its result, and never replaces a row of a higher version. Whatever is written again, in any
order, the newest version stays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from delta.tables import DeltaMergeBuilder, DeltaTable
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.delta.streams import create_table, nullable
from python_jobs.shared.delta.tables import delta_table
from python_jobs.shared.delta.touched_dates import among, dates_of
from python_jobs.shared.spark.sql_text import columns_of, identifier, same_columns


class KeyedSink(ABC):
    """A destination of rows with a key."""

    @abstractmethod
    def write(self, rows: DataFrame, run: int) -> None:
        """Write the rows of run number ``run`` (from 0 on); ``rows`` has each key at most once."""


class DeltaSink(KeyedSink):
    """A Delta table, created if absent; it keeps the newest row of each key."""

    def __init__(
        self,
        spark: SparkSession,
        table: str,
        rows: DataFrame,
        key: Sequence[str],
        date: str | None = None,
        version: Sequence[str] = (),
        final: str | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Create the table with the columns of ``rows``, or check the columns of the existing table.

        Args:
            spark: the session.
            table: name or path.
            rows: rows of a run, of which only the schema is read.
            key: columns that make a row unique.
            date: date column that never changes for a key. The table is partitioned by it, and a run reads only the
                partitions of its own rows.
            version: columns without NULL that order the rows of a key, the most important first: only a row of a
                higher version replaces a row. Without them the row that is written last is the newest one.
            final: boolean column without NULL: where it is true, only a row in which it is true replaces the row,
                whatever the versions are.
            properties: table properties of a table that is created.

        Raises:
            WrongUse: the existing table has other columns or partitions.
        """
        create_table(spark, table, nullable(rows.schema), [date] if date else [], properties)
        self._table: DeltaTable = delta_table(spark, table)
        self._date, self._same_key = date, same_columns(key, null_safe=False)
        self._replaces = _replaces(version, final)
        # Not below the first version column, such as the release.
        self._corrects = f"{_values('s', version[:1])} >= {_values('t', version[:1])}" if version else "true"
        self._columns = columns_of("s", rows.columns)

    def write(self, rows: DataFrame, run: int) -> None:
        """Merge the rows in one commit, or do nothing without rows; with a ``date`` they are read twice."""
        merge = self._merge(rows)
        if merge is not None:
            merge.whenMatchedUpdate(self._replaces, self._columns).whenNotMatchedInsert(
                values=self._columns
            ).execute()

    def correct(self, rows: DataFrame, is_gone: str, within: str = "") -> None:
        """Replace, add and delete rows by key in one commit, or do nothing without rows.

        Other than with :meth:`write`, a row may replace one of more events or a final one, because it was computed
        from all events. Only a row that is higher in the first version column stays as it is.

        Args:
            rows: rows of the table, each key at most once, with one more column.
            is_gone: the name of that boolean column: true deletes the row of this key.
            within: SQL condition of literals for the table's rows ``t`` of these keys, which prunes its files; default
                none.
        """
        merge = self._merge(rows, within)
        if merge is None:
            return
        gone = f"s.{identifier(is_gone)}"
        (
            merge.whenMatchedDelete(f"{gone} and {self._corrects}")
            .whenMatchedUpdate(f"not {gone} and {self._corrects}", self._columns)
            .whenNotMatchedInsert(f"not {gone}", self._columns)
            .execute()
        )

    def _merge(self, rows: DataFrame, within: str = "") -> DeltaMergeBuilder | None:
        condition = f"{within} and {self._same_key}" if within else self._same_key
        if self._date:
            dates = dates_of(rows, self._date)
            if not dates and rows.isEmpty():
                return None
            condition = f"{among(self._date, dates)} and {condition}"
        return self._table.alias("t").merge(rows.alias("s"), condition)


def _replaces(version: Sequence[str], final: str | None) -> str | None:
    """Return the condition with which the row ``s`` replaces the row ``t`` of its key; None if it always does."""
    conditions = [f"{_values('s', version)} > {_values('t', version)}"] if version else []
    if final:
        conditions.append(f"(s.{identifier(final)} or not t.{identifier(final)})")
    return " and ".join(conditions) or None


def _values(relation: str, columns: Sequence[str]) -> str:
    return f"struct({', '.join(f'{relation}.{identifier(column)}' for column in columns)})"
