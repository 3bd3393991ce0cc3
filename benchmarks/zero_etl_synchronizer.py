"""Zero-ETL Synchronizer: topic to raw table against a query that keeps the same columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import DataFrame

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.kafka.bronze_records import RAW_TYPES
from python_jobs.streaming.zero_etl_synchronizer import Parameters, run
from services.kafka import Broker, Record, running_broker

RECORDS = 2_000_000
PAYLOAD = b'{"visit_id": "%d", "page": "category_1/article_7", "context": {"referral": "search", "ad": null}}'


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """Throughput of the job."""
    with running_broker(bench.folder / "kafka") as broker:
        yield throughput(bench, broker)


def throughput(bench: Workbench, broker: Broker) -> Comparison:
    """The job against Delta's own sink, and the job with two fields as columns."""
    count = bench.rows(RECORDS)
    broker.create_topic("records", partitions=2)
    records = (Record(PAYLOAD % number, key=b"%d" % (number % 1_000)) for number in range(count))
    broker.produce("records", records, {"linger.ms": 50, "batch.num.messages": 50_000})
    folders = iter(range(1_000_000))
    paths: dict[str, Path] = {}

    def query() -> None:
        """Write the record's columns to Delta: no segments, no checks, no catalog."""
        paths["query"] = folder = bench.folder / f"run-{next(folders)}"
        stream = bench.spark.readStream.format("kafka").option("subscribe", "records")
        stream = stream.option("kafka.bootstrap.servers", broker.bootstrap_servers)
        stream = stream.option("startingOffsets", "earliest").option("includeHeaders", True)
        sink = stream.load().select(*RAW_TYPES).writeStream.format("delta")
        sink = sink.option("checkpointLocation", str(folder / "checkpoint"))
        sink.trigger(availableNow=True).start(str(folder / "raw")).awaitTermination()

    def job(name: str, **entry: str) -> None:
        number = next(folders)
        paths[name] = folder = bench.folder / f"run-{number}"
        folder.mkdir()
        topic = {"topic": "records", "table": f"raw_{number}", "location": "raw", **entry}
        (folder / "topics.yml").write_text(json_text({"topics": [topic]}))
        later = "2100-01-01"  # all records are in closed segments
        run(
            bench.spark,
            Parameters(str(folder / "topics.yml"), broker.bootstrap_servers, str(folder), now=later),
        )

    def with_fields() -> None:
        schema = bench.folder / "fields.yml"
        schema.write_text("visit_id: string\npage: string\n")
        job("fields", schema=str(schema))

    def rows(name: str) -> DataFrame:
        return bench.table(paths[name] / "raw").select("value", "key", "partition", "offset")

    return Comparison(
        title="Kafka to a raw table",
        rows=count,
        variants=[
            Variant("a query that keeps the same columns", query, lambda: rows("query")),
            Variant("zero_etl_synchronizer.py", lambda: job("job"), lambda: rows("job")),
            Variant("zero_etl_synchronizer.py, two fields as columns", with_fields, lambda: rows("fields")),
        ],
        aims=[Aim("zero_etl_synchronizer.py", "a query that keeps the same columns", at_most=1.11)],
        repetitions=3,
        note=(
            "The query streams value, key, headers, position and time into Delta's own sink. 90 % of its throughput "
            "is a ratio of 1.11."
        ),
    )
