"""The ledger of visits that come by Kafka: an hour of the topic stands for a file, each load of it once."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from case_study.datasets.topic_hours import Parameters, run
from python_jobs.shared.core.failures import NotReady
from tests.support.rows import assert_rows

COLUMNS = "file_path string, load_id bigint, hour int, ingested_at timestamp, file_modified_at timestamp"


def at(hour: int, minute: int = 0) -> dt.datetime:
    return dt.datetime(2024, 3, 1, hour, minute, tzinfo=dt.UTC)


class Bronze:
    """The table that change_data_capture.py fills from the topic, as far as the ledger reads it."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.path = spark, str(folder / "bronze_visits")

    def append(self, *records: tuple[int, dt.datetime, dt.datetime]) -> None:
        """Append records ``(hour of the topic, load's time, record's time)``."""
        rows = [
            (f"visits/2024-03-01/{hour}", 2024030100001 + hour * 1000, hour, loaded, made)
            for hour, loaded, made in records
        ]
        bronze = self.spark.createDataFrame(rows, COLUMNS).selectExpr(
            "*", "date'2024-03-01' as date", "cast(null as bigint) as file_size"
        )
        bronze.coalesce(1).write.format("delta").mode("append").save(self.path)

    def run(self) -> dict[str, Any]:
        return run(self.spark, Parameters(bronze=self.path))


def test_an_hour_of_the_topic_is_one_entry_a_load(spark: SparkSession, tmp_path: Path) -> None:
    bronze = Bronze(spark, tmp_path)
    with pytest.raises(NotReady, match="there is no Delta table"):
        bronze.run()
    bronze.append()
    assert bronze.run()["hours"] == 0, "the ledger is there, empty, for its readers"
    bronze.append((10, at(12), at(10, 1)), (10, at(12), at(10, 30)), (11, at(12), at(11)))
    first = bronze.run()
    assert first["hours"] == 2
    assert bronze.run() == first | {"hours": 0}, "no second commit"
    bronze.append((10, at(13), at(10, 40)))
    assert bronze.run()["hours"] == 1
    assert_rows(
        spark.read.format("delta").load(f"{bronze.path}_files"),
        [
            ("visits/2024-03-01/10", 2024030110001, at(10, 30), at(12)),
            ("visits/2024-03-01/11", 2024030111001, at(11), at(12)),
            ("visits/2024-03-01/10", 2024030110001, at(10, 40), at(13)),
        ],
        ["file_path", "load_id", "file_modified_at", "ingested_at"],
    )
