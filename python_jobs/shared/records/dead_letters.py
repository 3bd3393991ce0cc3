"""Dead-letter records: their columns, their states, and the options of jobs that write them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from python_jobs.shared.core.intervals import from_micros
from python_jobs.shared.delta.streams import (
    StreamParameters,
    create_table,
    nullable,
)
from python_jobs.shared.delta.table_streams import TableStream
from python_jobs.shared.records.json_records import (
    ERROR_CLASS,
    ERROR_MESSAGE,
    UNREADABLE,
    load_schema,
    parse_records,
)
from python_jobs.shared.spark.sql_text import named_column

PENDING, REPLAYED, PARKED, DISCARDED = "pending", "replayed", "parked", "discarded"


POISON_PILL = "POISON_PILL"


WAS_DEAD_LETTERED = "was_dead_lettered"


REPLAY = "replay"


REPLAY_TYPE = (
    "struct<dead_letter_id: string, job_name: string, job_version: string, "
    "replayed_at: timestamp, attempt: int>"
)


DEAD_LETTER_COLUMNS = (
    "dead_letter_id",
    ERROR_CLASS,
    ERROR_MESSAGE,
    "job_name",
    "job_version",
    "batch_id",
    "processed_at",
    "attempts",
    "status",
    "status_changed_at",
    "status_reason",
)


@dataclass(frozen=True, kw_only=True)
class ParsingParameters:
    """Parameters of a job that parses JSON payloads with a declared schema."""

    schema: str
    """Fields of the JSON object: a DDL string, or a .ddl, .yml or .json file."""
    payload_column: str = "payload"
    """String column that holds the JSON line."""
    derive: dict[str, str] = field(default_factory=dict)
    """Derived columns, --derive.NAME "SQL EXPRESSION", in order; one may replace a field of its name."""
    require: list[str] = field(default_factory=list)
    """Fields or derived columns that must not be NULL; a record without them is dead-lettered."""
    rename: dict[str, str] = field(default_factory=dict)
    """Column names of fields, --rename.FIELD COLUMN, such as for a field named like a column of the source."""
    on_unreadable: Literal["count", "dead_letter"] = "count"
    """A value that isn't of its field's type is a NULL that is counted, or makes the record a dead letter."""

    def parser(self) -> Callable[[DataFrame], DataFrame]:
        """Return the function from records to the rows of :func:`.json_records.parse_records`.

        Raises:
            WrongUse: the schema can't be read.
        """
        return partial(
            parse_records,
            schema=load_schema(self.schema),
            payload_column=self.payload_column,
            derive=self.derive,
            require=self.require,
            rename=self.rename,
            unreadable_is_error=self.on_unreadable == "dead_letter",
        )


@dataclass(frozen=True, kw_only=True)
class DeadLetterStream(StreamParameters):
    """How a streaming job with a dead-letter table is run."""

    job_name: str
    """Name of the job in the dead letters."""
    job_version: str = "1"
    """Version of the expressions in the dead letters; raise it with each fix."""
    dead_letter: str
    """Delta table (name or path) for the records that can't be processed; created when absent."""

    def create_dead_letter_table(
        self, spark: SparkSession, judged: DataFrame, columns: Sequence[str]
    ) -> None:
        """Create the dead-letter table for records of these columns, or check the one there.

        Raises:
            WrongUse: it has another schema.
        """
        dead = self.dead_letters(judged, columns, 0, from_micros(0))
        create_table(spark, self.dead_letter, nullable(dead.schema))

    def dead_letters(
        self, judged: DataFrame, columns: Sequence[str], batch_id: int, at: dt.datetime
    ) -> DataFrame:
        """Return the records of a batch that have an error, as few files of the dead-letter table."""
        dead = dead_letters(judged, columns, batch_id, self.job_name, self.job_version, at.isoformat())
        return dead.coalesce(1)  # numbering them spread few rows over many files

    def stream(
        self, job: str, source: str, checkpoint: str, writes: Mapping[str, str], **others: Any
    ) -> TableStream:
        """Return the declaration of the job's query, which appends to the dead-letter table and to ``writes``."""
        declared: dict[str, Any] = {
            "writes": {**writes, "dead_letter table": self.dead_letter},
            "appends_to": [*writes.values(), self.dead_letter],
            "start_over": self.start_over,
            "trigger": self.trigger,
            "max_files_per_trigger": self.max_files_per_trigger,
        }
        return TableStream(job=job, source=source, checkpoint=checkpoint, **(declared | others))


def valid_records(parsed: DataFrame) -> DataFrame:
    """Return the processable records of ``parse_records`` as rows of the target table."""
    return (
        parsed.where(F.col(ERROR_CLASS).isNull())
        .drop(UNREADABLE, ERROR_CLASS, ERROR_MESSAGE)
        .withColumn(WAS_DEAD_LETTERED, F.lit(False))
        .withColumn(REPLAY, F.lit(None).cast(REPLAY_TYPE))
    )


def dead_letters(
    parsed: DataFrame, record_columns: Sequence[str], batch_id: int, job_name: str, job_version: str, now: str
) -> DataFrame:
    """Return the other records of ``parse_records`` as rows of the dead-letter table.

    ``dead_letter_id`` hashes the record and its batch; equal records of one batch are numbered.
    """
    record = [named_column(name) for name in record_columns]
    content = F.sha2(F.to_json(F.struct(F.lit(batch_id).alias("batch_id"), *record)), 256)
    ordinal = F.row_number().over(Window.partitionBy(content).orderBy(content))
    return parsed.where(F.col(ERROR_CLASS).isNotNull()).select(
        F.concat_ws("-", content, ordinal).alias("dead_letter_id"),
        *record,
        ERROR_CLASS,
        ERROR_MESSAGE,
        F.lit(job_name).alias("job_name"),
        F.lit(job_version).alias("job_version"),
        F.lit(batch_id).cast("bigint").alias("batch_id"),
        F.lit(now).cast("timestamp").alias("processed_at"),
        F.lit(1).alias("attempts"),
        # A pill would end its replay as well.
        F.when(F.col(ERROR_CLASS) == POISON_PILL, PARKED).otherwise(PENDING).alias("status"),
        F.lit(None).cast("timestamp").alias("status_changed_at"),
        F.lit(None).cast("string").alias("status_reason"),
    )
