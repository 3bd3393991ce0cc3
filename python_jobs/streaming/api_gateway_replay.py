"""API Gateway, replay: deliver the records that the gateway wrote into its fallback folder to their topics.

A stream reads the folder's files, each once: its progress is the checkpoint, whether or not files are deleted. A
record goes to the topic of its folder, as it was sent, with its key and the headers of the live record; only the origin
is ``replay``. In each batch the records of a key are sent by one task, ordered by the topic's time field
(``--time_fields.TOPIC FIELD``), then by their acceptance.

Lines that are no record of the gateway, and records that no topic takes for their size, are appended to the dead-letter
table. A topic that doesn't exist ends the run; the next run continues with the same files.

Guarantee: each record of the folder is delivered at least once; a crash between the delivery and the checkpoint's
commit delivers a batch again, with the same ``event_id`` headers, by which consumers drop repeated records. Two
instances of the gateway may write while the job runs. Cost: reads each file once and sorts each batch; the folder's
listing grows with its files, so remove files that are older than the last run by some days::

    spark-submit python_jobs/streaming/api_gateway_replay.py --fallback /data/gateway/fallback \\
        --bootstrap_servers localhost:9092 --checkpoint /data/gateway/replay \\
        --dead_letter lakehouse/bronze/bronze_gateway_dead_letters --job_name api_gateway_replay \\
        --time_fields.visits event_time

Source: Data Engineering Design Patterns, chapter 11, API Gateway.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import NotReady, require_at_least
from python_jobs.shared.core.origins import ORIGIN
from python_jobs.shared.core.paths import absolute
from python_jobs.shared.delta.checkpoints import claim
from python_jobs.shared.delta.streams import (
    BatchFunction,
    append,
    await_end,
    batch_options,
    evaluated_once,
    start_query,
)
from python_jobs.shared.delta.tables import table_id
from python_jobs.shared.files.file_sets import NO_FILE_SKIPPED
from python_jobs.shared.kafka.settings import refuse_secrets
from python_jobs.shared.kafka.topics import describe_topics, producer_settings, publish
from python_jobs.shared.records.dead_letters import DeadLetterStream
from python_jobs.shared.records.event_times import first_error
from python_jobs.shared.records.json_records import (
    ERROR_CLASS,
    MISSING_FIELD,
    NOT_A_JSON_OBJECT,
    json_variant,
)
from python_jobs.shared.spark.hadoop_files import HadoopFolder, literal_path
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.times import full_timestamp
from python_jobs.streaming.gateway_records import EVENT_ID, REFERRAL
from python_jobs.streaming.gateway_stores import FILE_ENDING, TOPIC_FOLDER

TOO_LARGE = "TOO_LARGE"
RECORD_COLUMNS = ("file", "topic", "line")
"""Columns of a dead letter that say what it is."""
# A time in seconds or in nanoseconds, with the digits of a nanosecond.
_NUMBER = "decimal(38,9)"
_FIELDS = ("key", "value", REFERRAL, EVENT_ID)


@dataclass(frozen=True, kw_only=True)
class Parameters(DeadLetterStream):
    """Deliver the records of a gateway's fallback folder to their topics."""

    fallback: str
    """Folder of the gateway's undelivered records."""
    bootstrap_servers: str
    """Kafka brokers, host:port,host:port."""
    checkpoint: str
    """Folder of the job's progress: with another one, all files are delivered again."""
    time_fields: dict[str, str] = field(default_factory=dict)
    """Field of a topic's records that orders them, --time_fields.TOPIC FIELD: a timestamp text or a number; in a nested
    object with dots. Records without it, and topics without one, are in the order of their acceptance."""
    max_record_bytes: int = 1_000_000
    """Maximum size of a record in bytes, below the topics' max.message.bytes; a larger one is a dead letter."""
    producer: dict[str, str] = field(default_factory=dict)
    """Further settings of Kafka's producer (Java's names); a secret as ${env:NAME}."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_secrets(self.producer)
        require_at_least(1, max_record_bytes=self.max_record_bytes)

    def kafka_settings(self) -> dict[str, str]:
        """Return the settings of the Java clients."""
        return producer_settings(self.bootstrap_servers, self.producer)


def judged(lines: DataFrame, max_record_bytes: int) -> DataFrame:
    """Return the lines of fallback files with their fields, and with the error of those that can't be delivered.

    Args:
        lines: columns ``line`` and ``file``, the file's path.
        max_record_bytes: largest value, in bytes, that a topic takes.
    """
    rows = lines.withColumn("topic", F.regexp_extract("file", rf"/{TOPIC_FOLDER}([a-zA-Z0-9._-]+)/[^/]+$", 1))
    rows = rows.withColumn("__object", json_variant(F.col("line")))
    fields = [_text_field(name).alias(name) for name in _FIELDS]
    order = [_field("ordinal", "int").alias("ordinal"), _text_field("accepted_at").alias("accepted_at")]
    is_object = F.schema_of_variant("__object").startswith("OBJECT")
    rows = rows.select(
        *RECORD_COLUMNS, *fields, *order, F.coalesce(is_object, F.lit(False)).alias("__is_object")
    )
    missing = F.concat_ws(", ", *(F.when(F.col(name).isNull(), name) for name in _FIELDS))
    errors = first_error(
        [
            (~F.col("__is_object"), NOT_A_JSON_OBJECT, F.lit("the line is no JSON object")),
            (missing != "", MISSING_FIELD, F.concat(F.lit("the line has no text "), missing)),
            (F.col("topic") == "", MISSING_FIELD, F.lit("the file is in no folder of a topic")),
            (
                F.octet_length("value") > max_record_bytes,
                TOO_LARGE,
                F.concat(F.lit("the record has "), F.octet_length("value"), F.lit(" bytes")),
            ),
        ]
    )
    return rows.select("*", *errors)


def _field(name: str, type_: str) -> Column:
    return F.try_variant_get("__object", f"$.{name}", type_)


def _text_field(name: str) -> Column:
    return F.when(F.schema_of_variant(_field(name, "variant")) == "STRING", _field(name, "string"))


def messages(records: DataFrame, time_fields: dict[str, str]) -> DataFrame:
    """Return records as rows for Spark's Kafka sink, a key's records in one partition and in their order."""
    when = F.lit(None).cast("variant")
    for topic, name in time_fields.items():
        path = "$" + "".join(f"['{part}']" for part in name.split("."))
        found = F.try_variant_get(F.try_parse_json("value"), path, "variant")
        when = F.when(F.col("topic") == topic, found).otherwise(when)
    rows = records.withColumn("__given", when)
    # A variant keeps a number's digits; a double would make two times of nanoseconds equal.
    rows = rows.withColumn("__number", F.try_variant_get("__given", "$", _NUMBER))
    rows = rows.withColumn("__text", F.try_variant_get("__given", "$", "string"))
    micros = F.unix_micros(full_timestamp("__text")).cast(_NUMBER)
    rows = rows.withColumn("__time", F.coalesce(micros, "__number"))
    in_order = rows.repartition("topic", "key").sortWithinPartitions(
        "topic", "key", F.col("__time").asc_nulls_last(), "accepted_at", "ordinal"
    )
    headers = [
        F.struct(F.lit(name).alias("key"), value.cast("binary").alias("value"))
        for name, value in {
            ORIGIN: F.lit("replay"),
            REFERRAL: F.col(REFERRAL),
            EVENT_ID: F.col(EVENT_ID),
        }.items()
    ]
    return in_order.select("topic", "key", "value", F.array(*headers).alias("headers"))


class Replayer(BatchFunction):
    """The ``foreachBatch`` function of the job: it delivers the records of each batch and counts them."""

    def __init__(self, params: Parameters, writer_id: str) -> None:
        self._params, self._writer_id = params, writer_id
        self.records: Counter[str] = Counter()
        self.dead_letters = 0

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Append the batch's dead letters, and deliver its records."""
        params = self._params
        with evaluated_once(judged(rows, params.max_record_bytes)) as lines:
            is_dead = F.col(ERROR_CLASS).isNotNull()
            by_topic = lines.groupBy(F.when(~is_dead, F.col("topic"))).count().collect()
            counts: dict[str | None, int] = dict(by_topic)
            dead = counts.pop(None, 0)
            if dead:
                letters = params.dead_letters(lines, RECORD_COLUMNS, batch_id, params.processing_time())
                append(letters, params.dead_letter, batch_options(self._writer_id, batch_id))
            topics = sorted(topic for topic in counts if topic is not None)
            if topics:
                settings = params.kafka_settings()
                describe_topics(rows.sparkSession, topics, settings)
                records = messages(lines.where(~is_dead), params.time_fields)
                publish(records, settings, "the topics of the fallback")
        self.records.update({topic: counts[topic] for topic in topics})
        self.dead_letters += dead


def lines_of(spark: SparkSession, params: Parameters) -> DataFrame:
    """Return the stream of the fallback's lines, each with its file.

    Raises:
        NotReady: there is no such folder.
    """
    if not HadoopFolder(spark, params.fallback).exists():
        raise NotReady(f"there is no folder '{params.fallback}' to read undelivered records from")
    reader = spark.readStream.format("text").schema("value string").options(**NO_FILE_SKIPPED)
    reader = reader.options(recursiveFileLookup="true", pathGlobFilter=f"*{FILE_ENDING}", lineSep="\n")
    if params.max_files_per_trigger is not None:
        reader = reader.option("maxFilesPerTrigger", params.max_files_per_trigger)
    lines = reader.load(literal_path(absolute(params.fallback)))
    return lines.select(F.col("value").alias("line"), F.col("_metadata.file_path").alias("file"))


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Deliver what the folder holds and return the numbers of records by topic and of dead letters.

    Raises:
        JobFailed: the broker refused the records.
        NotReady: the folder or a topic doesn't exist, or no broker answers.
        WrongUse: the checkpoint belongs to another query.
    """
    lines = lines_of(spark, params)
    empty = spark.createDataFrame([], "line string, file string")
    params.create_dead_letter_table(spark, judged(empty, params.max_record_bytes), RECORD_COLUMNS)
    contract = {
        "job": "api_gateway_replay",
        "fallback": absolute(params.fallback),
        "dead_letter table": table_id(spark, params.dead_letter),
    }
    writer_id = claim(spark, params.checkpoint, contract, [params.dead_letter], params.start_over)
    replayer = Replayer(params, writer_id)
    query = start_query(lines, replayer, params.checkpoint, params.trigger)
    await_end(query, replayer, params.fallback)
    return {"records": dict(replayer.records), "dead_letters": replayer.dead_letters}


if __name__ == "__main__":
    run_job(Parameters, run)
