"""A source of visits by date and what the Late Data Integrators make of it: one row a date with its count."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

QUERY = "select event_date, count(*) as visits from {source} where event_date = {date} group by event_date"


@dataclass
class VisitsByDate:
    """The two tables in one folder."""

    spark: SparkSession
    folder: Path

    @property
    def source(self) -> str:
        return str(self.folder / "visits")

    @property
    def target(self) -> str:
        return str(self.folder / "statistics")

    def parameters(self, date: str, **others: Any) -> dict[str, Any]:
        return {"source": self.source, "target": self.target, "query": QUERY, "date": date} | others

    def append(self, *dates: str) -> None:
        """Append one visit for each date, in one commit."""
        rows = self.spark.createDataFrame([(date,) for date in dates], "event_date string")
        rows = rows.select(F.expr("uuid()").alias("visit_id"), F.col("event_date").cast("date")).coalesce(1)
        rows.write.format("delta").mode("append").partitionBy("event_date").save(self.source)

    def sql(self, statement: str) -> None:
        """Run a statement on the source, ``{}`` in it."""
        self.spark.sql(statement.format(f"delta.`{self.source}`"))

    def counts(self) -> dict[str, int]:
        """Return the target's count of each date."""
        rows = self.spark.read.format("delta").load(self.target).collect()
        assert len({row.event_date for row in rows}) == len(rows)
        return {str(row.event_date): row.visits for row in rows}
