"""Batch Reprocessor of records: rows that are made of one record each, again for a range of offsets.

Problem: a release computed a wrong column from 1,200 records of each partition, and the topic no longer has them.

A row needs no other record, so a range of positions is enough. The job computes the rows of the offsets from
``--begin.PARTITION`` up to, without, ``--end.PARTITION`` from the raw table, by the expressions of the corrected
release, and replaces them in the table that Hybrid Source has made. Offsets repeat across partitions: each partition
has bounds of its own, and a partition without bounds is left alone.

Guarantee: the target's rows of these positions are those of the raw table, whatever runs before or meanwhile beyond
them; a record that the raw table no longer has, because it was erased, is deleted from the target as well. It is one
commit, and none if nothing differs. Rows carry the origin ``reprocessing``.

Submit::

    spark-submit python_jobs/streaming/batch_reprocessor_records.py --source lakehouse/bronze/visits_records \\
        --topic visits --begin.0 1200 --end.0 2400 --begin.1 1187 --end.1 2391 \\
        --columns.visit_id "get_json_object(payload, '$.visit_id')" --target lakehouse/silver/all_visits

Source: Data Engineering Design Patterns, chapter 11, Batch Reprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import WrongUse, require_at_least
from python_jobs.shared.core.origins import Origin
from python_jobs.shared.delta.keyed_tables import DeltaSink
from python_jobs.shared.delta.streams import empty_source, evaluated_once
from python_jobs.shared.delta.tables import read_table
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import refuse_own_names, string_literal
from python_jobs.streaming.corrections import (
    ACTION,
    ADDED,
    REMOVED,
    REPLACED,
    UNCHANGED,
    compared,
    write_corrections,
)
from python_jobs.streaming.positioned_rows import (
    INGESTED_AT,
    OWN_COLUMNS,
    POSITION,
    ingested,
    lies_before,
    positioned_rows,
    require_positions,
)


@dataclass(frozen=True, kw_only=True)
class Parameters(ProcessingTimeParameters):
    """Compute the rows of a range of a topic's offsets again, from a Delta table of its records."""

    source: str
    """Append-only Delta table (name or path) of the topic's records, with columns topic, partition and offset."""
    topic: str
    """Topic of the records."""
    begin: dict[str, int]
    """First offset of each partition, --begin.PARTITION OFFSET."""
    end: dict[str, int]
    """Offset of each partition before which its range ends, --end.PARTITION OFFSET."""
    columns: dict[str, str]
    """Columns of the target, each with its SQL expression over the source."""
    target: str
    """Delta table (name or path) of Hybrid Source; created when absent."""
    origin: Origin = "reprocessing"
    """Origin that the rows carry."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == self.target:
            raise WrongUse(f"source and target must be two tables, got '{self.source}' for both")
        if set(self.begin) != set(self.end) or not all(name.isdecimal() for name in self.begin):
            raise WrongUse(
                "begin and end must name the same partitions by their numbers, got "
                f"{', '.join(self.begin)} and {', '.join(self.end)}"
            )
        for name, begin in self.begin.items():
            require_at_least(0, **{f"begin.{name}": begin})
            if begin >= self.end[name]:
                raise WrongUse(f"begin.{name} must be before end.{name}, got {begin} and {self.end[name]}")
        refuse_own_names("columns", self.columns, OWN_COLUMNS)

    def is_asked(self) -> Column:
        """Return the condition for records and rows of the range."""
        return lies_before(self.topic, self.end) & ~lies_before(self.topic, self.begin)

    @property
    def within(self) -> str:
        """The condition for rows ``t`` of the target from the lowest to the highest offset, which prunes its files."""
        return (
            f"t.topic = {string_literal(self.topic)} and t.offset >= {min(self.begin.values())} "
            f"and t.offset < {max(self.end.values())}"
        )


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Compute the range again and return the number of rows by what was done to them.

    Raises:
        NotReady: the source doesn't exist.
        WrongUse: the source has no positions, an expression can't be resolved, or the target has another schema.
    """
    require_positions(empty_source(spark, params.source, ()).columns, f"the source '{params.source}'")
    records = read_table(spark, params.source).where(params.is_asked())
    rows = positioned_rows(records, params.columns, params.origin)
    # A record that came twice is one row.
    rows = ingested(rows.dropDuplicates(list(POSITION)), params.processing_time().isoformat())
    sink = DeltaSink(spark, params.target, rows, POSITION)
    stored = read_table(spark, params.target).where(params.is_asked())
    with evaluated_once(compared(rows, stored, POSITION, INGESTED_AT)) as changes:
        counts = {row[0]: row[1] for row in changes.groupBy(ACTION).agg(F.count(F.lit(1))).collect()}
        if set(counts) - {UNCHANGED}:
            write_corrections(sink, changes, params.within)
    found = {name: counts.get(name, 0) for name in (ADDED, REPLACED, REMOVED, UNCHANGED)}
    return {**found, "target": params.target}


if __name__ == "__main__":
    run_job(Parameters, run)
