"""Dead-Letter replay: dead letters are parsed again after a fix, and those that pass are added to the main table.

Run the job after a fix of the schema or an expression, with the current parameters of :mod:`.dead_letter`. A record
that passes is inserted into the target with ``was_dead_lettered = true`` and its ``replay`` metadata. A record that
fails again stays in the dead-letter table with its attempts raised, and is parked at ``--max_attempts``. ``--where``
selects some dead letters, such as one error class; ``--include_parked true`` adds the parked ones.
:mod:`.dead_letter_queue` monitors the queue and discards dead letters.

Replayed rows are written to partitions that consumers may have read already, and after rows with a later event time.
So nothing is written without ``--publish_partitions``: the first run reports how many records would pass and which
partitions they would touch. After the second run the consumers of these partitions must run again. You may also not
run this job: then nobody needs a backfill, and the records stay out of the main table.

Guarantee: first the target, then the dead-letter table, each in one commit. The target accepts each
``dead_letter_id`` once, so a run that is repeated, or killed between the two commits, adds no row twice.

Submit::

    spark-submit python_jobs/error_management/dead_letter_replay.py \
        --target lakehouse/silver/silver_visits_parsed \
        --dead_letter lakehouse/silver/silver_visits_dead_letter \
        --schema "visit_id string, event_time string, page string" --publish_partitions true

Source: Data Engineering Design Patterns, chapter 3, Dead-Letter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import WrongUse, require_at_least
from python_jobs.shared.delta.commits import latest_version
from python_jobs.shared.delta.streams import evaluated_once
from python_jobs.shared.delta.tables import delta_table
from python_jobs.shared.records.dead_letters import (
    DEAD_LETTER_COLUMNS,
    PARKED,
    PENDING,
    REPLAY,
    REPLAY_TYPE,
    REPLAYED,
    WAS_DEAD_LETTERED,
    ParsingParameters,
)
from python_jobs.shared.records.json_records import ERROR_CLASS, ERROR_MESSAGE, UNREADABLE
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import columns_of, named_column, named_columns, timestamp_literal

_LETTER = "__letter"


@dataclass(frozen=True, kw_only=True)
class Parameters(ParsingParameters, ProcessingTimeParameters):
    """Parse dead letters again after a fix; those that pass are added to the main table."""

    target: str
    """Delta table (name or path) that the dead_letter job writes."""
    dead_letter: str
    """Delta table (name or path) of its dead letters."""
    publish_partitions: bool = False
    """Write into the touched partitions, whose consumers must then run again; by default only report them."""
    where: str | None = None
    """SQL condition on the dead letters to replay (error_class = 'MISSING_FIELD'); by default all."""
    include_parked: bool = False
    """Also replay parked dead letters; by default only pending ones."""
    max_attempts: int = 3
    """Attempts, the first one included, after which a record is parked."""
    job_name: str = "dead_letter_replay"
    """Name of the job in the replay metadata."""
    job_version: str = "1"
    """Version of schema and expressions in the replay metadata."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target == self.dead_letter:
            raise WrongUse("target and dead_letter must be two tables")
        require_at_least(1, max_attempts=self.max_attempts)


def replay_rows(parsed: DataFrame, job_name: str, job_version: str, now: str) -> DataFrame:
    """Return the dead letters that pass as rows of the target; ``parsed`` has each dead letter as ``__letter``."""
    replay = F.struct(
        F.col(f"{_LETTER}.dead_letter_id").alias("dead_letter_id"),
        F.lit(job_name).alias("job_name"),
        F.lit(job_version).alias("job_version"),
        F.lit(now).cast("timestamp").alias("replayed_at"),
        (F.col(f"{_LETTER}.attempts") + 1).alias("attempt"),
    )
    return (
        parsed.where(F.col(ERROR_CLASS).isNull())
        .withColumn(WAS_DEAD_LETTERED, F.lit(True))
        .withColumn(REPLAY, replay.cast(REPLAY_TYPE))
        .drop(_LETTER, UNREADABLE, ERROR_CLASS, ERROR_MESSAGE)
    )


def letter_updates(parsed: DataFrame, max_attempts: int) -> DataFrame:
    """Return each dead letter's state after the attempt: id, error (NULL if it passed), attempts, status."""
    attempts = F.col(f"{_LETTER}.attempts") + 1
    status = (
        F.when(F.col(ERROR_CLASS).isNull(), REPLAYED)
        .when(attempts >= max_attempts, PARKED)
        .otherwise(PENDING)
    )
    return parsed.select(
        f"{_LETTER}.dead_letter_id",
        ERROR_CLASS,
        ERROR_MESSAGE,
        attempts.alias("attempts"),
        status.alias("status"),
    )


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Replay the pending dead letters and report the records that passed or failed, and the touched partitions.

    Raises:
        NotReady: a table doesn't exist.
        WrongUse: the schema's columns differ from the target's.
    """
    letters = delta_table(spark, params.dead_letter)
    target = delta_table(spark, params.target)
    at = params.processing_time()
    now = at.isoformat()

    statuses = [PENDING, PARKED] if params.include_parked else [PENDING]
    pending = letters.toDF().where(F.col("status").isin(statuses)).where(params.where or "true")
    record_columns = [name for name in pending.columns if name not in DEAD_LETTER_COLUMNS]
    parse = params.parser()
    judged = parse(
        pending.select(*named_columns(record_columns), F.struct("dead_letter_id", "attempts").alias(_LETTER))
    )
    with evaluated_once(judged) as parsed:
        rows = replay_rows(parsed, params.job_name, params.job_version, now)
        _check_columns(rows, target.toDF(), params.target)
        updates = letter_updates(parsed, params.max_attempts)
        counts = {row["status"]: row["count"] for row in updates.groupBy("status").count().collect()}
        partitions = _partitions(rows, target.detail().collect()[0]["partitionColumns"])
        if params.publish_partitions and counts:
            target.alias("t").merge(
                rows.alias("s"),
                # The first part lets Delta skip files without replayed rows, by their statistics.
                f"t.{REPLAY}.dead_letter_id is not null "
                f"and t.{REPLAY}.dead_letter_id = s.{REPLAY}.dead_letter_id",
            ).whenNotMatchedInsert(values=columns_of("s", rows.columns)).execute()
            letters.alias("t").merge(
                updates.alias("s"), "t.dead_letter_id = s.dead_letter_id"
            ).whenMatchedUpdate(
                set={
                    ERROR_CLASS: f"coalesce(s.{ERROR_CLASS}, t.{ERROR_CLASS})",
                    ERROR_MESSAGE: f"coalesce(s.{ERROR_MESSAGE}, t.{ERROR_MESSAGE})",
                    "attempts": "s.attempts",
                    "status": "s.status",
                    "status_changed_at": timestamp_literal(at),
                }
            ).execute()
    return {
        "read": sum(counts.values()),
        "replayed": counts.get(REPLAYED, 0),
        "failed": counts.get(PENDING, 0),
        "parked": counts.get(PARKED, 0),
        "published": params.publish_partitions,
        "touched_partitions": partitions,
        "target": {"table": params.target, "version": latest_version(spark, params.target)},
        "dead_letter": {"table": params.dead_letter, "version": latest_version(spark, params.dead_letter)},
    }


def _check_columns(rows: DataFrame, target: DataFrame, name: str) -> None:
    has = {(column.name, column.dataType.simpleString()) for column in target.schema}
    gives = {(column.name, column.dataType.simpleString()) for column in rows.schema}
    if has != gives:
        different = ", ".join(sorted({column for column, _ in has ^ gives}))
        raise WrongUse(f"the schema and the target '{name}' differ in the columns {different}")


def _partitions(rows: DataFrame, columns: list[str]) -> list[dict[str, str | None]]:
    """Return the target partitions that ``rows`` fall in; none for a table without partitions."""
    if not columns:
        return []
    values = rows.select(*(named_column(name).cast("string") for name in columns)).distinct()
    return [row.asDict() for row in values.orderBy(*named_columns(columns)).collect()]


if __name__ == "__main__":
    run_job(Parameters, run)
