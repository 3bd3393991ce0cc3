"""Wrapper for streams and files: one JSON envelope with the unmodified record and its processing context.

Problem: consumers need the version of the job that produced a record. For debugging, maintainers need the original
record, byte for byte, whatever the provider sent.

Guarantee: one row for each record. Its column ``value`` is ``{"raw_data": "…", "processing_context": {"job_version": …,
"batch_version": …}}``. ``raw_data`` decodes to exactly the input, also with malformed JSON, unknown fields and
whitespace. Bytes that are no UTF-8 can't be a JSON string; their envelope has ``raw_data_base64`` instead, so no record
is lost. Another job version changes only ``processing_context``.

A Delta source is read as a stream: each micro-batch is one commit, and a repeated batch adds nothing. Files are one
batch with the given ``batch_version``. A rerun with the same version adds nothing, whatever other versions came before.

Cost: one pass without a shuffle. An envelope adds about 80 bytes and the escapes of the record's quotes.

    spark-submit python_jobs/data_value/wrapper.py --source lakehouse/bronze/bronze_visits \\
        --target lakehouse/silver/silver_visit_envelopes --checkpoint checkpoints/wrapper --job_version v2.5.1

Source: Data Engineering Design Patterns, chapter 5, Wrapper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import NotReady, WrongUse, given
from python_jobs.shared.delta.commits import find_commit, latest_version, write_once
from python_jobs.shared.delta.streams import (
    BatchFunction,
    TriggerParameters,
    append,
    await_end,
    batch_options,
    create_table,
    nullable,
)
from python_jobs.shared.delta.table_streams import TableStream
from python_jobs.shared.delta.tables import read_table
from python_jobs.shared.files.file_sets import list_files, read_lines
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import named_column, taken_names

APP_ID = "lakehouse_patterns.wrapper"


@dataclass(frozen=True)
class Parameters(TriggerParameters):
    """Wrap each record in a JSON envelope with the unmodified record and the context of its processing."""

    source: str
    """Delta table of records, by path or catalog name; with source_format files, a file or folder, with sub-folders."""
    target: str
    """Delta table of envelopes, by path or catalog name; created if absent."""
    job_version: str
    """Version of the job for the envelopes."""
    source_format: Literal["delta", "files"] = "delta"
    """Form of the source. delta reads new rows of the table as a stream; files reads each line of text files, once."""
    payload_column: str = "payload"
    """Column of a Delta source that has the record (string or binary); other columns pass through."""
    checkpoint: str | None = None
    """Folder of the stream's progress; needed for a Delta source."""
    start_over: bool = False
    """Whether a new checkpoint may append the whole source again to tables that an earlier checkpoint has filled."""
    batch_version: int | None = None
    """Version of the batch, needed for files; a stream numbers its micro-batches itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source_format == "delta" and (self.checkpoint is None or self.batch_version is not None):
            raise WrongUse(
                "a Delta source needs checkpoint and takes no batch_version: the stream numbers batches"
            )
        if self.source_format == "files" and (self.batch_version is None or self.checkpoint is not None):
            raise WrongUse("files need batch_version and take no checkpoint: all files are one batch")
        if self.source_format == "files" and self.trigger is not None:
            raise WrongUse("trigger is for a Delta source, got it with source_format files")


def wrap(records: DataFrame, payload_column: str, job_version: str, batch_version: int) -> DataFrame:
    """Return the records with their envelope (``value``) instead of the payload column.

    Args:
        records: rows with a string or binary payload column, and columns that pass through.
        payload_column: name of the payload column.
        job_version: version of the job for the envelopes.
        batch_version: version of the batch for the envelopes.

    Returns:
        ``value`` (string, JSON), then the other columns; one row for each record. A NULL payload gives an envelope
        without raw data.
    """
    payload = named_column(payload_column)
    text = payload.cast("string")
    envelope = F.struct(
        F.when(F.is_valid_utf8(text), text).alias("raw_data"),
        F.when(~F.is_valid_utf8(text), F.base64(payload.cast("binary"))).alias("raw_data_base64"),
        F.struct(
            F.lit(job_version).alias("job_version"),
            F.lit(batch_version).cast("bigint").alias("batch_version"),
        ).alias("processing_context"),
    )
    others = [named_column(name) for name in records.columns if name != payload_column]
    return records.select(F.to_json(envelope).alias("value"), *others)


class _EnvelopeWriter(BatchFunction):
    """The ``foreachBatch`` function of the job: it appends the envelopes of each batch."""

    def __init__(self, parameters: Parameters, writer_id: str) -> None:
        self._parameters, self._writer_id = parameters, writer_id
        self.batches = 0

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Append one batch; Delta skips a batch that the target already has from this checkpoint."""
        params = self._parameters
        envelopes = wrap(rows, params.payload_column, params.job_version, batch_id)
        append(envelopes, params.target, batch_options(self._writer_id, batch_id))
        self.batches += 1


def run(spark: SparkSession, parameters: Parameters) -> dict[str, Any]:
    """Wrap the new records of the source and return the report: the number of batches and the target's version.

    Raises:
        NotReady: the source doesn't exist.
        WrongUse: the source has no payload column or already a column ``value``, or the target has another schema.
    """
    if parameters.source_format == "files":
        return _run_files(spark, parameters)
    records = read_table(spark, parameters.source)
    check_columns(records, parameters.payload_column)
    schema = wrap(records, parameters.payload_column, parameters.job_version, 0).schema
    create_table(spark, parameters.target, nullable(schema))
    stream = TableStream(
        job="wrapper",
        source=parameters.source,
        writes={"target": parameters.target},
        appends_to=[parameters.target],
        checkpoint=given(parameters.checkpoint, "checkpoint"),
        start_over=parameters.start_over,
        trigger=parameters.trigger,
    )
    writer = _EnvelopeWriter(parameters, stream.claim(spark))
    query = stream.start(spark, writer)
    await_end(query, writer, parameters.source)
    return {"batches": writer.batches, "version": latest_version(spark, parameters.target)}


def _run_files(spark: SparkSession, parameters: Parameters) -> dict[str, Any]:
    batch_version = given(parameters.batch_version, "batch_version")
    files = list_files(HadoopFolder(spark, parameters.source))
    if not files:
        raise NotReady(f"there is no file at {parameters.source}")
    lines = read_lines(spark, files).select("value")
    envelopes = wrap(lines, "value", parameters.job_version, batch_version)
    # Each batch has another txnAppId: with a common one, Delta would silently skip each version below the newest.
    transaction = (f"{APP_ID}/{batch_version}", 0)
    written = write_once(spark, envelopes, parameters.target, transaction=transaction)
    commit = find_commit(spark, parameters.target, written)
    return {"batches": int(commit is not None), "version": latest_version(spark, parameters.target)}


def check_columns(records: DataFrame, payload_column: str) -> None:
    """Refuse a source without the payload column, or with another column of the envelope's name.

    Raises:
        WrongUse: it is so.
    """
    if payload_column not in records.columns:
        raise WrongUse(f"the source has no column '{payload_column}'; it has {', '.join(records.columns)}")
    others = (name for name in records.columns if name != payload_column)
    if taken := taken_names(others, by=["value"]):
        raise WrongUse(
            f"the source has a column '{taken[0]}', which is the name of the envelope; rename the column"
        )


if __name__ == "__main__":
    run_job(Parameters, run)
