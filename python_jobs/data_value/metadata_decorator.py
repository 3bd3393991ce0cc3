"""Metadata Decorator for topics: records of a Delta table, with the job's version as headers and not in the value.

Problem: maintainers need to know which version of a job produced a record, and in which batch. Consumers don't, and
the value must not change for it.

Each record of the topic has the headers ``job_version``, ``batch_version`` (the number of the micro-batch), and those
of ``--metadata.KEY`` and ``--origin``. All values are UTF-8 bytes. The value is the payload column, byte for byte; a
NULL payload is a record without a value. If the source has a column ``headers``, as a bronze table of Kafka records
does, these headers stay in front of the job's; an earlier header of the same name is replaced.

Guarantee: each row of the table is delivered at least once. A crash between the delivery and the checkpoint's commit
delivers a batch again, with the same headers. Another job version with the same checkpoint goes on with the next rows.

Cost: one pass without a shuffle; about 100 bytes of headers for each record.

    spark-submit python_jobs/data_value/metadata_decorator.py --source lakehouse/silver/silver_visits \\
        --topic visits-decorated --bootstrap_servers localhost:9092 --checkpoint checkpoints/decorator \\
        --job_version v2.5.1 --metadata.environment production

Source: Data Engineering Design Patterns, chapter 5, Metadata Decorator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.data_value.technical_metadata import require_metadata
from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.origins import ORIGIN, Origin
from python_jobs.shared.delta.streams import BatchFunction, TriggerParameters, await_end
from python_jobs.shared.delta.table_streams import TableStream
from python_jobs.shared.delta.tables import read_table
from python_jobs.shared.kafka.settings import refuse_secrets
from python_jobs.shared.kafka.topics import describe_topics, producer_settings, publish
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import named_column

HEADERS = "headers"
HEADERS_TYPE = "array<struct<key:string,value:binary>>"
"""Type of the column ``headers`` that Spark's Kafka sink takes; it takes no other."""


@dataclass(frozen=True)
class Parameters(TriggerParameters):
    """Publish the new rows of a Delta table as records whose headers say which job made them."""

    source: str
    """Delta table of records, by path or catalog name."""
    topic: str
    """Existing topic."""
    bootstrap_servers: str
    """Kafka brokers, host:port,host:port."""
    checkpoint: str
    """Folder of the stream's progress: with another one, all rows are delivered again."""
    job_version: str
    """Version of the job's code, up to 15 characters, for the headers."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Further headers, --metadata.KEY VALUE: commit_id, environment, job_name, run_id, triggered_by."""
    origin: Origin | None = None
    """Origin of the records, for the header of this name; by default a record keeps the one that it has."""
    payload_column: str = "payload"
    """Column with the value (string or binary)."""
    key_column: str | None = None
    """Column with the records' key (string or binary); by default the records have no key."""
    producer: dict[str, str] = field(default_factory=dict)
    """Further settings of Kafka's producer (Java's names); a secret as ${env:NAME}."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_metadata(self.job_version, self.metadata)
        refuse_secrets(self.producer)

    def headers(self, batch_version: int) -> dict[str, str]:
        """Return the headers of a batch's records."""
        origin = {} if self.origin is None else {ORIGIN: str(self.origin)}
        return {
            "job_version": self.job_version,
            "batch_version": str(batch_version),
            **origin,
            **self.metadata,
        }


def decorate(
    records: DataFrame, payload_column: str, key_column: str | None, headers: Mapping[str, str]
) -> DataFrame:
    """Return records as rows for Spark's Kafka sink: ``key``, ``value`` and ``headers``.

    Args:
        records: rows with the payload column; a column ``headers`` holds the headers that a record has already.
        payload_column: name of the column with the value.
        key_column: name of the column with the key, or None.
        headers: values of the headers by name.
    """
    own = F.array(
        *(
            F.struct(F.lit(name).alias("key"), F.lit(value).cast("binary").alias("value"))
            for name, value in headers.items()
        )
    )
    given = _headers_column(records)
    if given is not None:
        earlier = F.filter(
            named_column(given), lambda header: ~F.coalesce(header["key"].isin(*headers), F.lit(True))
        )
        own = F.concat(F.coalesce(earlier, F.array().cast(HEADERS_TYPE)), own)
    return records.select(
        _bytes(key_column).alias("key"), _bytes(payload_column).alias("value"), own.alias(HEADERS)
    )


def _headers_column(records: DataFrame) -> str | None:
    """Return the name of the column with the earlier headers, as the table writes it; None if there is none."""
    return next((name for name in records.columns if name.lower() == HEADERS), None)


def _bytes(column: str | None) -> Column:
    return (F.lit(None) if column is None else named_column(column)).cast("binary")


class _Publisher(BatchFunction):
    """The ``foreachBatch`` function of the job: it delivers the records of each batch."""

    def __init__(self, params: Parameters) -> None:
        self._params = params
        self.batches = 0

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Deliver one batch; a batch that is run again is delivered again, with the same headers."""
        params = self._params
        records = decorate(rows, params.payload_column, params.key_column, params.headers(batch_id))
        settings = producer_settings(params.bootstrap_servers, params.producer)
        publish(records.withColumn("topic", F.lit(params.topic)), settings, f"the topic {params.topic}")
        self.batches += 1


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Publish the new rows of the source and return the number of batches.

    Raises:
        JobFailed: the broker refused the records.
        NotReady: the source or the topic doesn't exist, or no broker answers.
        WrongUse: a column is missing or has another type, or the checkpoint belongs to another query.
    """
    check_columns(read_table(spark, params.source), params)
    describe_topics(spark, [params.topic], producer_settings(params.bootstrap_servers, params.producer))
    stream = TableStream(
        job="metadata_decorator",
        source=params.source,
        writes={},
        appends_to=[],
        meaning={"topic": params.topic, "brokers": params.bootstrap_servers},
        checkpoint=params.checkpoint,
        trigger=params.trigger,
    )
    stream.claim(spark)
    publisher = _Publisher(params)
    await_end(stream.start(spark, publisher), publisher, params.source)
    return {"batches": publisher.batches}


def check_columns(records: DataFrame, params: Parameters) -> None:
    """Refuse a source whose payload, key or headers have another type than Kafka takes.

    Raises:
        WrongUse: a column is missing or has another type.
    """
    types = dict(records.dtypes)
    for name in (params.payload_column, params.key_column):
        if name is not None and types.get(name) not in ("string", "binary"):
            raise WrongUse(
                f"the source needs a column '{name}' of texts or bytes; it has "
                + ", ".join(f"{column} {type_}" for column, type_ in types.items())
            )
    given = _headers_column(records)
    if given is not None and types[given] != HEADERS_TYPE:
        raise WrongUse(
            f"the source's column {given} must be {HEADERS_TYPE}, got {types[given]}; rename the column"
        )


if __name__ == "__main__":
    run_job(Parameters, run)
