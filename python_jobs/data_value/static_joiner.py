"""Static Joiner: a stream of a Delta table gets columns of a Delta reference at rest.

Problem: visits arrive in a stream and don't say which device opened the page; that is in a reference that changes from
time to time. The stream must see new devices without a restart, and a visit must not become two.

The job reads ``--source`` as a stream and appends to ``--target`` each row with ``--columns`` of the reference row of
its ``--keys``. Each micro-batch takes the reference's newest version. With ``--as_of`` the reference is SCD Type 2, and
a row takes the version that was valid at its time. The macro ``static_joiner`` renders the join, so its rules apply:
half-open validity, and a key with a NULL part matches nothing.

Guarantee: with ``--join_type left`` each row of the source is once in the target. A micro-batch reads one committed
version of the reference: a reference that is overwritten meanwhile is seen before or after, never in between. A version
with fewer than ``--min_reference_rows`` rows ends the run with exit code 4. A version with several rows for a key, or
with overlapping validities, ends it with exit code 3. The batch is not written then, and the next run repeats it. A
batch is one commit, and a batch that runs again adds nothing. Not guaranteed: a row that came before its reference row
stays without it (wait for the reference with the Readiness Marker).

Cost: one read of the reference for each batch, and one for its check when it has a new version. Spark broadcasts a
small reference; a large one is shuffled with each batch.

    spark-submit python_jobs/data_value/static_joiner.py --source lakehouse/silver/silver_visits_unique \\
        --reference lakehouse/silver/silver_devices --target lakehouse/silver/silver_visits_with_devices \\
        --checkpoint lakehouse/checkpoints/visits_with_devices \\
        --keys '{dev_type: type, dev_version: version}' --columns '{device: full_name}'

Source: Data Engineering Design Patterns, chapter 5, Static Joiner.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import DataRefused, NotReady, WrongUse, require_at_least
from python_jobs.shared.delta.commits import is_committed, latest_version
from python_jobs.shared.delta.streams import (
    BatchFunction,
    TriggerParameters,
    append,
    await_end,
    batch_options,
    create_table,
    empty_source,
    nullable,
)
from python_jobs.shared.delta.table_streams import TableStream
from python_jobs.shared.delta.tables import delta_table, read_version
from python_jobs.shared.spark.expressions import first_line
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.macro_sql import Macros
from python_jobs.shared.spark.queries import require_rows

_FILES = (
    "data_value/static_joiner/join.sql",
    "data_value/static_joiner/versions.sql",
    "data_value/scd_type_2/as_of.sql",
    "shared/arguments.sql",
    "shared/literals.sql",
    "shared/times.sql",
)
_MATCHED = "__matched"


@dataclass(frozen=True, kw_only=True)
class Parameters(TriggerParameters):
    """Append each row of a stream, with columns of a Delta reference, to a Delta table."""

    source: str
    """Delta table (name or path) that only grows."""
    reference: str
    """Delta table (name or path) with one row for each key; with as_of, SCD Type 2."""
    target: str
    """Delta table (name or path) for the joined rows; created when absent."""
    checkpoint: str
    """Folder of the stream's progress: one for each source and target, kept as long as these tables."""
    keys: dict[str, str]
    """Columns of the source, each with the equal column of the reference, of the same type."""
    columns: dict[str, str]
    """New columns, each with its column of the reference."""
    join_type: Literal["left", "inner"] = "left"
    """left (default) keeps rows without a match, with NULL; inner drops them."""
    as_of: str | None = None
    """SQL expression of the time whose version a row takes: a timestamp, a date, or a text with date and time."""
    effective_from: str = "effective_from"
    """Column of the reference with the start of validity; read with as_of alone."""
    effective_to: str = "effective_to"
    """Column of the reference with the end of validity, exclusive, NULL while open; read with as_of alone."""
    min_reference_rows: int = 1
    """Minimum number of rows of the reference; with 0 it may be empty."""
    partition_by: list[str] = field(default_factory=list)
    """Partition columns of the target."""
    max_files_per_trigger: int | None = None
    """Maximum number of source files in one batch; Delta's default is 1000."""
    start_over: bool = False
    """Whether a new checkpoint may append the whole source again to a target that an earlier one has filled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(0, min_reference_rows=self.min_reference_rows)
        require_at_least(1, max_files_per_trigger=self.max_files_per_trigger)
        if len({self.source, self.reference, self.target}) < 3:
            raise WrongUse("source, reference and target must be three tables")


class Join:
    """The macro's join of DataFrames."""

    def __init__(self, spark: SparkSession, params: Parameters) -> None:
        """Check the arguments as the macro does.

        Raises:
            WrongUse: there are no keys or no columns.
        """
        self._params, self._macros = params, Macros(spark, _FILES)
        self._checked(params.reference)

    def joined(self, facts: DataFrame, reference: DataFrame) -> DataFrame:
        """Return the facts with the new columns, and ``__matched``, which is NULL without a match."""
        with _views(facts, reference) as (facts_view, reference_view):
            join = self._checked(reference_view)
            versions = self._macros.call("_static_joiner_versions_sql", join)
            sql = self._macros.call("_static_joiner_sql", join, facts_view, versions)
            return facts.sparkSession.sql(sql)

    def require_one_row_a_key(self, reference: DataFrame) -> None:
        """Refuse a reference in which several rows match one fact.

        Raises:
            DataRefused: a key has several rows or, with as_of, versions that overlap.
        """
        with _views(reference) as (view,):
            sql = self._macros.call("_static_joiner_judged_sql", self._checked(view))
            judged = reference.sparkSession.sql(sql).where("lakehouse_patterns_is_ambiguous")
            keys = [f"lakehouse_patterns_key_{place + 1}" for place in range(len(self._params.keys))]
            found = judged.select(F.to_json(F.struct(*keys))).first()
        if found is not None:
            values = ", ".join(map(str, json.loads(found[0]).values()))
            overlap = ", or its versions overlap" if self._params.as_of is not None else ""
            raise DataRefused(
                f"the reference '{self._params.reference}' has several rows for the key {values}{overlap}: rows of the "
                "source would be multiplied; correct it and run again"
            )

    def _checked(self, reference: str) -> Any:
        params = self._params
        # A column of the key, which is never NULL in a match, tells whether there was one.
        columns = dict(params.columns)
        if columns and params.keys:
            columns[_MATCHED] = next(iter(params.keys.values()))
        return self._macros.call(
            "_static_join", reference, params.keys, columns, params.as_of, None, params.join_type, None,
            params.effective_from, params.effective_to,
        )  # fmt: skip


@contextmanager
def _views(*frames: DataFrame) -> Iterator[tuple[str, ...]]:
    """Give DataFrames a name in SQL until the block ends."""
    names = tuple(f"static_joiner_{uuid.uuid4().hex}" for _ in frames)
    for frame, name in zip(frames, names, strict=True):
        frame.createOrReplaceTempView(name)
    try:
        yield names
    finally:
        for frame, name in zip(frames, names, strict=True):
            frame.sparkSession.catalog.dropTempView(name)


class JoinedWriter(BatchFunction):
    """The ``foreachBatch`` function of the job."""

    def __init__(self, params: Parameters, join: Join, writer_id: str) -> None:
        self.params, self.join, self.writer_id = params, join, writer_id
        self.batches = self.rows = self.unmatched = 0
        self.checked: int | None = None
        """Newest version of the reference that was checked."""

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Append one batch with the reference's newest version; Delta has a batch that ran before."""
        spark, params = rows.sparkSession, self.params
        self.batches += 1
        if is_committed(spark, params.target, self.writer_id, batch_id):
            return
        version = latest_version(spark, params.reference)
        reference = read_version(spark, params.reference, version)
        joined = self.join.joined(rows, reference)
        if version != self.checked:
            require_ready(reference, params)
            self.join.require_one_row_a_key(reference)
            create_table(spark, params.target, nullable(joined.drop(_MATCHED).schema), params.partition_by)
            self.checked = version
        counts = Observation()
        counted = joined.observe(
            counts,
            F.count(F.lit(1)).alias("rows"),
            F.count_if(F.col(_MATCHED).isNull()).alias("unmatched"),
        ).drop(_MATCHED)
        note = {"batch_id": batch_id, "reference_version": version}
        append(counted, params.target, batch_options(self.writer_id, batch_id, note))
        self.rows += counts.get["rows"]
        self.unmatched += counts.get["unmatched"]


def require_ready(reference: DataFrame, params: Parameters) -> None:
    """Refuse a reference that isn't loaded: rows joined with it would all be without a match.

    Raises:
        NotReady: the reference has fewer rows than min_reference_rows.
    """
    try:
        require_rows(reference, params.min_reference_rows, params.reference)
    except DataRefused:
        raise NotReady(
            f"the reference '{params.reference}' has fewer rows than min_reference_rows, {params.min_reference_rows}: "
            "load it, then run again; or allow an empty one with --min_reference_rows 0"
        ) from None


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the query to its end; report the batches, the rows, those without a match, and the tables' versions.

    Raises:
        NotReady: the source or the reference doesn't exist or has too few rows.
        WrongUse: a column is unknown or taken, the target has another schema, or the checkpoint is another query's.
        DataRefused: the reference has several rows for a key.
    """
    join = Join(spark, params)
    empty = empty_source(spark, params.source, [*params.columns, _MATCHED])
    schema = _joined_nothing(spark, join, empty, params).drop(_MATCHED).schema
    create_table(spark, params.target, nullable(schema), params.partition_by)
    stream = TableStream(
        job="static_joiner",
        source=params.source,
        writes={"target": params.target},
        appends_to=[params.target],
        checkpoint=params.checkpoint,
        start_over=params.start_over,
        trigger=params.trigger,
        max_files_per_trigger=params.max_files_per_trigger,
    )
    writer = JoinedWriter(params, join, stream.claim(spark))
    query = stream.start(spark, writer)
    await_end(query, writer, params.source)
    return {
        "batches": writer.batches,
        "rows": writer.rows,
        "unmatched": writer.unmatched,
        "reference": {"table": params.reference, "version": writer.checked},
        "target": {"table": params.target, "version": latest_version(spark, params.target)},
    }


def _joined_nothing(spark: SparkSession, join: Join, empty: DataFrame, params: Parameters) -> DataFrame:
    reference = delta_table(spark, params.reference).toDF().limit(0)
    try:
        return join.joined(empty, reference)
    except (AnalysisException, ParseException) as failure:
        raise WrongUse(f"source and reference can't be joined ({first_line(failure)})") from None


if __name__ == "__main__":
    run_job(Parameters, run)
