"""Readiness of a dataset: its marker file, its ledger, and the newest version that holds data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import NotReady
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.delta.tables import delta_table, read_table, table_exists
from python_jobs.shared.files.readiness_names import MARKER, UPKEEP
from python_jobs.shared.spark.hadoop_files import HadoopFolder

FORMAT_VERSION = 1


class Marker:
    """The marker of one folder (a dataset or a partition) on any Hadoop file system."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        self._folder = HadoopFolder(spark, folder)

    def read(self) -> dict[str, Any] | None:
        """Return the marker's content; None if the folder is not ready."""
        text = self._folder.read_text(MARKER)
        return None if text is None else dict(json.loads(text))

    def remove(self) -> None:
        """Remove the marker, if there is one: the very first step."""
        self._folder.delete(MARKER)

    def write(self, content: dict[str, Any]) -> None:
        """Write the marker, in the place of an earlier one: the very last step."""
        self.write_beside(MARKER, content)

    def write_beside(self, name: str, content: dict[str, Any]) -> None:
        """Write a small file into the folder. It is empty for a moment: readers look at markers by their name."""
        self._folder.write_text(name, json_text(content | {"format_version": FORMAT_VERSION}) + "\n")


@contextmanager
def regenerated(spark: SparkSession, folder: str, **content: Any) -> Iterator[None]:
    """Remove the folder's marker, let the block write its files, and mark it if the block ended well.

    Wrap anything that writes raw files: ``with regenerated(spark, folder): rows.write.…``.
    """
    marker = Marker(spark, folder)
    marker.remove()
    yield
    marker.write(content)


def newest_data_version(spark: SparkSession, table: str, after: int | None = None) -> int | None:
    """Return the table's newest version that changed its rows, above ``after``; None if there is none.

    ``after`` is the last version that a consumer took: it remembers the returned one with its own result, so
    that it works once for each new state of the data.

    Raises:
        NotReady: there is no such table.
    """
    history = delta_table(spark, table).history().where(~F.col("operation").isin(*UPKEEP))
    newest = history.agg(F.max("version")).collect()[0][0]
    return None if newest is None or (after is not None and newest <= after) else int(newest)


def ready_versions(spark: SparkSession, ledger: str, dataset: str) -> dict[str, int]:
    """Return the commit of each table of a dataset that dbt has published (``publish_readiness``).

    Raises:
        NotReady: the dataset was not published, or its tables are being built.
    """
    if table_exists(spark, ledger):
        rows = read_table(spark, ledger).where(F.col("dataset") == dataset).collect()
        if rows:
            return {table.name: int(table.version) for table in rows[0].table_versions}
    raise NotReady(
        f"{dataset} is not ready: {ledger} has no row of it; it is being built, or the last run failed"
    )
