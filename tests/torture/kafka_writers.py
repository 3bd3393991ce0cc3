"""Writers that read from Kafka or write to it."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from python_jobs.error_management import checkpointer, kafka_consumer
from python_jobs.idempotency import transactional_writer_kafka
from python_jobs.idempotency.transactional_writer_kafka import Reducer
from python_jobs.ingestion import change_data_capture
from python_jobs.shared.kafka import replication
from python_jobs.shared.kafka.replication import Replicator, run_until_stopped
from python_jobs.streaming import hybrid_source, zero_etl_synchronizer
from services.kafka import Record, running_broker
from tests.support.session import environment
from tests.torture.inputs import changed_users, noon
from tests.torture.job_writers import publish_changes
from tests.torture.service_stores import KAFKA, PARTITIONS, TopicStore, batches_committed, position_of
from tests.torture.writer import DAYS, NOW, Writer, below, nothing

TOPIC, LONG_TOPIC = "visits", "many_visits"
MANY = 10_000
BOUNDARY = 8


@contextlib.contextmanager
def week_in_kafka(folder: Path) -> Iterator[None]:
    """Run a broker with a topic of four visits a day.

    A second topic has so many that transactions follow each other for a while.
    """
    with running_broker(folder / "kafka") as broker, environment(**{KAFKA: broker.bootstrap_servers}):
        for topic in (TOPIC, LONG_TOPIC):
            broker.create_topic(topic, partitions=PARTITIONS)
        broker.produce(TOPIC, [_visit(day, visit) for day in DAYS for visit in range(4)])
        broker.produce(LONG_TOPIC, [_visit(DAYS[0], visit) for visit in range(MANY)])
        yield


def _visit(day: dt.date, number: int) -> Record:
    moment = noon(day) + dt.timedelta(minutes=number)
    value = {"visit_id": number, "user_id": number // 2, "event_time": f"{moment:%FT%TZ}"}
    milliseconds = int(moment.timestamp() * 1000)
    return Record(json.dumps(value).encode(), partition=number % PARTITIONS, timestamp=milliseconds)


# --- from a topic to a table ------------------------------------------------------------------------------


def from_kafka(folder: Path, **tables: str) -> dict[str, Any]:
    """Return a consumer's parameters: its broker and tables."""
    return below(folder, **tables) | {"bootstrap_servers": os.environ[KAFKA]}


def records_to_bronze(spark: SparkSession, folder: Path) -> None:
    """Change Data Capture, four records a batch."""
    parameters = change_data_capture.Parameters(
        **from_kafka(folder, target="bronze", checkpoint="checkpoint"),
        topics=[TOPIC],
        max_records_per_trigger=4,
        now=NOW,
    )
    change_data_capture.run(spark, parameters)


def half_of_the_topic(spark: SparkSession, folder: Path) -> None:
    """Write the first offsets of each partition into the history, two of each in a file."""
    for end in range(2, BOUNDARY + 1, 2):
        bounds = [
            json.dumps({TOPIC: dict.fromkeys(map(str, range(PARTITIONS)), at)}) for at in (end - 2, end)
        ]
        records = (
            spark.read.format("kafka")
            .option("kafka.bootstrap.servers", os.environ[KAFKA])
            .option("subscribe", TOPIC)
            .option("startingOffsets", bounds[0])
            .option("endingOffsets", bounds[1])
            .load()
        )
        rows = records.selectExpr("topic", "partition", "offset", "cast(value as string) as payload")
        rows.coalesce(1).write.format("delta").mode("append").save(str(folder / "history"))


def history_and_topic(spark: SparkSession, folder: Path) -> None:
    """Hybrid Source, a file or four records a batch."""
    columns = {"visit_id": "get_json_object(payload, '$.visit_id')"}
    parameters = hybrid_source.Parameters(
        **from_kafka(folder, history="history", target="all_visits", checkpoint="checkpoint"),
        topic=TOPIC,
        boundary=dict.fromkeys(map(str, range(PARTITIONS)), BOUNDARY),
        history_columns=columns,
        live_columns=columns,
        max_files_per_trigger=1,
        max_records_per_trigger=4,
        now=NOW,
    )
    hybrid_source.run(spark, parameters)


def configured_topic(_: SparkSession, folder: Path) -> None:
    """Write the configuration of a topic that is copied in segments of two records."""
    entry = {
        "topic": TOPIC,
        "table": "raw_visits",
        "location": "raw",
        "segment_records": 2,
        "records_per_run": 2,
    }
    (folder / "topics.yml").write_text(json.dumps({"topics": [entry]}))


def raw_copies(spark: SparkSession, folder: Path) -> None:
    """Zero-ETL Synchronizer, one segment of each partition a commit."""
    spark.sql("drop table if exists raw_visits")  # the session may know it from another folder
    parameters = zero_etl_synchronizer.Parameters(
        **from_kafka(folder, configuration="topics.yml"), root=str(folder), now=NOW
    )
    while zero_etl_synchronizer.run(spark, parameters)["lag"]:
        pass


def users_by_window(spark: SparkSession, folder: Path) -> None:
    """Checkpointer, eight records a batch: each batch with state costs seconds."""
    parameters = checkpointer.Parameters(
        **from_kafka(folder, target="counts", checkpoint="checkpoint"),
        topic=TOPIC,
        key="get_json_object(payload, '$.user_id')",
        event_time="try_to_timestamp(get_json_object(payload, '$.event_time'))",
        max_records_per_trigger=8,
        ephemeral=True,
    )
    checkpointer.run(spark, parameters)


def records_with_their_position(spark: SparkSession, folder: Path) -> None:
    """Checkpointer's plain consumer, four records a commit, the position within it."""
    parameters = kafka_consumer.Parameters(
        **from_kafka(folder, target="bronze"),
        topic=TOPIC,
        group=folder.name,
        commit_every=4,
        until_end=True,
        now=NOW,
    )
    kafka_consumer.run(spark, parameters)


# --- to a topic -------------------------------------------------------------------------------------------


def changes_as_messages(spark: SparkSession, folder: Path) -> None:
    """Change Data Capture of a Delta table into a topic, a commit a batch."""
    publish_changes(spark, folder, topic=folder.name, bootstrap_servers=os.environ[KAFKA])


def copied_records(_: None, folder: Path) -> None:
    """Passthrough Replicator of a topic."""
    run_until_stopped(Replicator(replication.Parameters(**_both_topics(folder))))


def reduced_records(_: None, folder: Path) -> None:
    """Transactional Writer into a topic."""
    fields = {"visit": "visit_id", "at": "event_time"}
    parameters = transactional_writer_kafka.Parameters(**_both_topics(folder), fields=fields)
    run_until_stopped(Reducer(parameters))


def _both_topics(folder: Path) -> dict[str, Any]:
    return {
        "source_topic": LONG_TOPIC,
        "source_bootstrap_servers": os.environ[KAFKA],
        "target_topic": folder.name,
        "target_bootstrap_servers": os.environ[KAFKA],
        "until_end": True,
        "commit_seconds": 0.001,
    }


# --- all of them ------------------------------------------------------------------------------------------


def kafka_writers() -> Iterator[Writer]:
    """Yield the streams and programs; of two on one checkpoint or group at once nothing is promised."""
    for name, prepare, run, table in (
        ("change_data_capture", nothing, records_to_bronze, "bronze"),
        ("checkpointer", nothing, users_by_window, "counts"),
        ("hybrid_source", half_of_the_topic, history_and_topic, "all_visits"),
    ):
        yield Writer(name, prepare, run, (table,), resumes=True, pairs=False, service=week_in_kafka)
    yield Writer(
        "kafka_consumer",
        nothing,
        records_with_their_position,
        ("bronze",),
        resumes=True,
        pairs=False,
        service=week_in_kafka,
    )
    yield Writer(
        "zero_etl_synchronizer", configured_topic, raw_copies, ("raw",), resumes=True, service=week_in_kafka
    )
    yield Writer(
        "change_data_feed (Kafka)",
        changed_users,
        changes_as_messages,
        ("{folder}",),
        resumes=True,
        pairs=False,
        store=TopicStore(batches_committed, at_least_once=True),
        service=week_in_kafka,
    )
    for program, copy, role in (
        ("passthrough_replicator_kafka", copied_records, Replicator.role),
        ("transactional_writer_kafka", reduced_records, Reducer.role),
    ):
        yield Writer(
            program,
            nothing,
            copy,
            ("{folder}",),
            resumes=True,
            needs_spark=False,
            store=TopicStore(position_of(f"{role}.{LONG_TOPIC}")),
            service=week_in_kafka,
        )
