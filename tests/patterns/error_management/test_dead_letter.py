"""Dead-Letter: the streaming job, its replay, and the SQL form."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from python_jobs.error_management import dead_letter as job
from python_jobs.error_management.dead_letter import Parameters
from python_jobs.error_management.json_records import load_schema, parse_records
from python_jobs.job import DataRefused, JobFailed, NotReady, WrongUse
from tests.support.rows import assert_rows

VISIT_SCHEMA = "visit_id string, event_time string, page string"
VALID = '{"visit_id":"v1","event_time":"2024-01-01T10:00:00+00:00","page":"/a"}'
BAD_TIME = '{"visit_id":"v2","event_time":"nope","page":"/b"}'
NO_TIME = '{"visit_id":"v3","page":"/c"}'
NOT_JSON = "not json"
NOW = "2024-01-01T12:00:00Z"
EPOCH = {"event_time": "unix_seconds(try_to_timestamp(event_time))"}


class Stream:
    """A bronze table, the two targets and the checkpoint of one test."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.appended = 0

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def append(self, *payloads: str | None) -> None:
        """Append one file of payloads to the source; offsets go on from the last one, as in a topic."""
        rows = [(payload, "visits", 0, self.appended + i) for i, payload in enumerate(payloads)]
        self.appended += len(rows)
        source = self.spark.createDataFrame(
            rows, "payload string, topic string, partition int, offset bigint"
        )
        source.coalesce(1).write.format("delta").mode("append").save(self.path("bronze"))

    def parameters(self, **changes: Any) -> Parameters:
        given = {
            "source": self.path("bronze"),
            "target": self.path("main"),
            "dead_letter": self.path("dead"),
            "checkpoint": self.path("checkpoint"),
            "schema": VISIT_SCHEMA,
            "derive": EPOCH,
            "require": ["event_time"],
            "now": NOW,
        }
        return Parameters(**(given | changes))

    def run(self, **changes: Any) -> dict[str, Any]:
        return job.run(self.spark, self.parameters(**changes))

    def table(self, name: str) -> DataFrame:
        return self.spark.read.format("delta").load(self.path(name))

    def version(self, name: str) -> int:
        return len(list((self.folder / name / "_delta_log").glob("*.json"))) - 1


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> Stream:
    return Stream(spark, tmp_path)


def test_bad_records_go_to_the_dead_letter_table_whole_and_with_their_error(stream: Stream) -> None:
    stream.append(VALID, BAD_TIME, NO_TIME, NOT_JSON)
    report = stream.run(job_name="visits", job_version="7")

    assert_rows(stream.table("main"), [("v1", 1704103200, "/a")], columns=["visit_id", "event_time", "page"])
    at = dt.datetime(2024, 1, 1, 12)
    origin = ("visits", "7", at, 1, "pending", "visits", 0)
    assert_rows(
        stream.table("dead"),
        [
            (BAD_TIME, "UNPARSABLE_FIELD", "field 'event_time' can't be read as bigint: nope", *origin, 1),
            (NO_TIME, "MISSING_FIELD", "field 'event_time' is missing or null", *origin, 2),
            (NOT_JSON, "NOT_A_JSON_OBJECT", "the payload is not one JSON object (8 characters)", *origin, 3),
        ],
        columns=[
            "payload", "error_class", "error_message", "job_name", "job_version", "processed_at", "attempts",
            "status", "topic", "partition", "offset",
        ],
    )  # fmt: skip
    assert (report["read"], report["valid"], report["dead"]) == (4, 1, 3)
    assert report["bad_share"] == 0.75
