"""Filter Interceptor: count the rows that each filter condition rejects, while the rows are written.

The optimizer merges all filters into one, and the plan shows one count. Here the conditions are an ordered
list with names. A rejected row belongs to the first condition that it doesn't meet; NULL counts as not met.
So the counts and the valid rows add up to the rows read.

The counts are observed metrics: they are complete after the first action on the result. A second action, a
retried task or a speculative task adds nothing; accumulators would count twice.

Batch: the first commit replaces ``--target`` by the valid rows, the second replaces the run's rows in
``--statistics`` by its counts. Stream (``--checkpoint``): each micro-batch appends its valid rows, then its
counts under its processing-time window. Both commits have the batch's transaction id, so a restart neither
resets nor duplicates a window's counts. Cost: one pass; ``--max_rise`` adds a counting pass before the write.

Submit::

    spark-submit python_jobs/error_management/filter_interceptor.py --source lakehouse/silver/devices \
        --target lakehouse/silver/devices_valid --statistics lakehouse/silver/devices_filter_statistics \
        --conditions conf/filters/devices.yml

Source: Data Engineering Design Patterns, chapter 3, Filter Interceptor.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pyspark.sql import Column, DataFrame, Observation, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from python_jobs.shared.core.failures import DataRefused, NotReady, WrongUse, given, require_at_least
from python_jobs.shared.core.intervals import from_micros, moved, parse_duration
from python_jobs.shared.core.numbers import exceeds
from python_jobs.shared.core.paths import absolute, is_path
from python_jobs.shared.core.yaml_files import read_yaml
from python_jobs.shared.delta.commits import is_committed
from python_jobs.shared.delta.streams import (
    BatchFunction,
    StreamParameters,
    append,
    await_end,
    batch_options,
    create_table,
)
from python_jobs.shared.delta.table_streams import TableStream
from python_jobs.shared.delta.tables import read_table, table_exists
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.observations import observed_metrics
from python_jobs.shared.spark.sql_text import named_columns, require_free_names, string_literal

REJECTED_BY = "rejected_by"
REJECTED_AS = "rejected_as"
PREDICATE_ERROR = "predicate_error"
FILTERED = "filtered"
DEAD_LETTER = "dead_letter"

_RESULT = "__result_"
_POSITION = "__position"
_PREDICATE_RESULT = "passed boolean, error string"
STATISTICS_SCHEMA = (
    "run_id string, run_at timestamp, window_start timestamp, window_end timestamp, position int, "
    "condition_name string, category string, rejected_rows bigint, input_rows bigint, valid_rows bigint"
)


@dataclass(frozen=True)
class Condition:
    """A named condition that a valid row meets."""

    name: str
    """Name in the statistics."""
    condition: str | Callable[[Row], bool | None]
    """A SQL condition, or a function of the row. If the function raises, the row is a dead letter, not a filtered
    row, with the error in ``predicate_error``."""
    category: str = FILTERED
    """Kind of rejection, such as ``invalid`` or ``filtered``."""


def load_conditions(path: str) -> list[Condition]:
    """Return the conditions of a YAML list of ``{name, condition, category}``, the form that the SQL macro takes too.

    Raises:
        WrongUse: the file is missing or is not such a list.
    """
    entries = read_yaml(path, "file of conditions")
    if not isinstance(entries, list) or not all(
        isinstance(entry, Mapping)
        and {"name", "condition"} <= entry.keys() <= {"name", "condition", "category"}
        for entry in entries
    ):
        raise WrongUse(f"'{path}' must hold a list of name, condition and, if wanted, category")
    return [Condition(**entry) for entry in entries]


def flags(rows: DataFrame, conditions: Sequence[Condition]) -> DataFrame:
    """Return ``rows`` with ``rejected_by``, ``rejected_as`` (NULL for a valid row) and ``predicate_error``.

    Raises:
        WrongUse: there is no condition, a name is used twice, or ``rows`` has a column of one of these names.
    """
    rejector = F.col(_POSITION)
    names = [F.lit(condition.name) for condition in conditions]
    errors = [_error(position, condition) for position, condition in enumerate(conditions)]
    kinds = [
        F.when(error.isNotNull(), DEAD_LETTER).otherwise(condition.category)
        for condition, error in zip(conditions, errors, strict=True)
    ]
    return _judged(rows, conditions).select(
        *named_columns(rows.columns),
        _choice(rejector, names).alias(REJECTED_BY),
        _choice(rejector, kinds).alias(REJECTED_AS),
        _choice(rejector, errors).alias(PREDICATE_ERROR),
    )


def _judged(rows: DataFrame, conditions: Sequence[Condition]) -> DataFrame:
    """Return ``rows`` with the position of the first condition that rejects the row, and the results of functions.

    Everything else of a row is chosen by this one number, so that Spark evaluates each condition once.
    """
    _check(rows, conditions)
    columns = rows.columns
    judged = rows
    passed: list[Column] = []
    for position, condition in enumerate(conditions):
        if isinstance(condition.condition, str):
            passed.append(F.expr(condition.condition))
        else:
            result = F.udf(_guarded(condition.condition), _PREDICATE_RESULT)
            judged = judged.withColumn(f"{_RESULT}{position}", result(F.struct(*named_columns(columns))))
            passed.append(F.col(f"{_RESULT}{position}.passed"))
    rejected = [~F.coalesce(column, F.lit(False)) for column in passed]
    first = F.when(rejected[0], 0)
    for position, reject in enumerate(rejected[1:], 1):
        first = first.when(reject, position)
    return judged.withColumn(_POSITION, first)


def _error(position: int, condition: Condition) -> Column:
    """Return the error that the condition's function raised; NULL for a SQL condition."""
    if isinstance(condition.condition, str):
        return F.lit(None).cast("string")
    return F.col(f"{_RESULT}{position}.error")


def _choice(position: Column, values: Sequence[Column]) -> Column:
    """Return the value at ``position``, else NULL."""
    choice = F.when(position == 0, values[0])
    for number, value in enumerate(values[1:], 1):
        choice = choice.when(position == number, value)
    return choice


def _check(rows: DataFrame, conditions: Sequence[Condition]) -> None:
    names = [condition.name for condition in conditions]
    if not names:
        raise WrongUse("there is no condition to count")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise WrongUse(f"conditions have the same name: {', '.join(twice)}")
    results = (f"{_RESULT}{position}" for position in range(len(conditions)))
    require_free_names(rows.columns, (REJECTED_BY, REJECTED_AS, PREDICATE_ERROR, _POSITION, *results))


def _guarded(predicate: Callable[[Row], bool | None]) -> Callable[[Row], tuple[bool | None, str | None]]:
    def guarded(row: Row) -> tuple[bool | None, str | None]:
        try:
            return predicate(row), None
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"

    return guarded


def raised_rows(flagged: DataFrame) -> DataFrame:
    """Return the dead letters: the rows on which a predicate raised, with the predicate's name and its error."""
    return flagged.where(F.col(REJECTED_AS) == DEAD_LETTER).drop(REJECTED_AS)


@dataclass(frozen=True)
class Counts:
    """The number of rows by outcome; ``rejected`` has each condition in its order, also with 0 rows."""

    input_rows: int
    rejected: dict[str, int]
    raised: int = 0
    """Rows on which a predicate raised: dead letters, which no condition's count includes."""

    @property
    def valid_rows(self) -> int:
        """Return the number of rows that meet every condition."""
        return self.input_rows - self.raised - sum(self.rejected.values())

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of the input that each condition rejected; 0 for an empty input."""
        return {
            name: rows / self.input_rows if self.input_rows else 0.0 for name, rows in self.rejected.items()
        }


def _metrics(conditions: Sequence[Condition]) -> list[Column]:
    """Return the counts of judged rows."""
    counts: list[Column] = []
    raised: Column = F.lit(False)
    for position, condition in enumerate(conditions):
        rejects = F.col(_POSITION) == position
        if callable(condition.condition):
            has_raised = rejects & _error(position, condition).isNotNull()
            raised, rejects = raised | has_raised, rejects & ~has_raised
        counts.append(F.count_if(rejects).alias(f"rejected_{position}"))
    return [F.count(F.lit(1)).alias("input_rows"), F.count_if(raised).alias("raised"), *counts]


def _counts(metrics: Mapping[str, Any], conditions: Sequence[Condition]) -> Counts:
    rejected = {
        condition.name: int(metrics[f"rejected_{position}"]) for position, condition in enumerate(conditions)
    }
    return Counts(int(metrics["input_rows"]), rejected, int(metrics["raised"]))


class Interceptor:
    """Filters rows and counts rejections in the same pass.

    >>> interceptor = Interceptor(conditions)                     # doctest: +SKIP
    >>> interceptor.filter(devices).write.format("delta").save(path)  # doctest: +SKIP
    >>> interceptor.counts().rejected                             # doctest: +SKIP
    {'null_type': 2, 'short_type': 1}
    """

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self.conditions = list(conditions)
        self._observation: Observation | None = None

    def filter(self, rows: DataFrame) -> DataFrame:
        """Return the valid rows; the first action over all of them gives the counts."""
        self._observation = Observation()
        observed = _judged(rows, self.conditions).observe(self._observation, *_metrics(self.conditions))
        return observed.where(F.col(_POSITION).isNull()).select(*named_columns(rows.columns))

    def counts(self, timeout_seconds: float = 30) -> Counts:
        """Return the counts of the first action, which Spark delivers shortly after the action.

        Raises:
            WrongUse: no action ran over the rows, now or within ``timeout_seconds``.
        """
        observation = self._observation
        metrics = {} if observation is None else observed_metrics(observation, timeout_seconds)
        if not metrics:
            raise WrongUse("no action ran over the filtered rows: write them before asking for the counts")
        return _counts(metrics, self.conditions)


def count(rows: DataFrame, conditions: Sequence[Condition]) -> Counts:
    """Return the counts from a separate pass, for a decision before anything is written."""
    metrics = _judged(rows, conditions).agg(*_metrics(conditions)).collect()[0]
    return _counts(metrics.asDict(), conditions)


def all_failures(rows: DataFrame, conditions: Sequence[Condition]) -> dict[str, int]:
    """Return for each condition the number of rows that fail it, also if they fail an earlier condition.

    Keep this report separate from the counts: its sum may exceed the number of rows.
    """
    if any(callable(condition.condition) for condition in conditions):
        raise WrongUse("the report of all failures takes SQL conditions only")
    metrics = rows.agg(
        *(
            F.count_if(~F.coalesce(F.expr(str(condition.condition)), F.lit(False))).alias(condition.name)
            for condition in conditions
        )
    ).collect()[0]
    return {name: int(value) for name, value in metrics.asDict().items()}


def largest_rise(shares: Mapping[str, float], baseline: Mapping[str, float]) -> tuple[str, float]:
    """Return the condition whose share rose most against the baseline, and the rise of the total rejected share."""
    rises = {name: share - baseline.get(name, 0.0) for name, share in shares.items()}
    name = max(rises, key=lambda condition: rises[condition])
    return name, sum(shares.values()) - sum(baseline.values())


def statistics_rows(
    spark: SparkSession,
    counts: Counts,
    conditions: Sequence[Condition],
    run_id: str,
    run_at: dt.datetime,
    window: tuple[dt.datetime, dt.datetime] | None = None,
) -> DataFrame:
    """Return one row for each condition, in the columns of the statistics table; only a stream has a ``window``."""
    start, end = window or (None, None)
    rows = [
        (run_id, run_at, start, end, position, condition.name, condition.category,
         counts.rejected[condition.name], counts.input_rows, counts.valid_rows)
        for position, condition in enumerate(conditions, 1)
    ]  # fmt: skip
    return spark.createDataFrame(rows, STATISTICS_SCHEMA)


def window_totals(statistics: DataFrame) -> DataFrame:
    """Return the counts of a stream by window and condition, from the rows of its micro-batches."""
    return statistics.groupBy("window_start", "window_end", "condition_name").agg(
        F.sum("rejected_rows").alias("rejected_rows"),
        F.sum("input_rows").alias("input_rows"),
        F.sum("valid_rows").alias("valid_rows"),
    )


@dataclass(frozen=True)
class Parameters(StreamParameters):
    """Filter a Delta table by named conditions and count the rows that each condition rejects."""

    source: str
    """Delta table (name or path) to filter."""
    target: str
    """Delta table (name or path) for the valid rows; a batch replaces it, a stream appends to it."""
    statistics: str
    """Delta table (name or path) for the counts of each run or micro-batch; created when absent."""
    conditions: str
    """YAML file: an ordered list of name, condition (SQL) and, if wanted, category."""
    run_id: str | None = None
    """Identifier of a batch run; a rerun with it replaces the run's counts. By default the current time."""
    max_rise: float | None = None
    """Largest allowed rise of the rejected share over the mean of earlier runs; a larger rise gives exit code 3."""
    baseline_runs: int = 10
    """Number of earlier runs in this mean."""
    checkpoint: str | None = None
    """Folder of a stream's progress; with it the job runs as a stream over a source that only grows."""
    window: str = "10 minutes"
    """Length of the processing-time windows of a stream's counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({self.source, self.target, self.statistics}) < 3:
            raise WrongUse("source, target and statistics must be three tables")
        if self.max_rise is not None and not 0 <= self.max_rise <= 1:
            raise WrongUse(f"max_rise is {self.max_rise}; it is a share between 0 and 1")
        require_at_least(1, baseline_runs=self.baseline_runs)
        if self.checkpoint is not None and (self.max_rise is not None or self.run_id is not None):
            raise WrongUse("max_rise and run_id belong to a batch, checkpoint to a stream")
        if self.checkpoint is None and (self.trigger or self.max_files_per_trigger or self.start_over):
            raise WrongUse(
                "trigger, max_files_per_trigger and start_over belong to a stream: give it a checkpoint"
            )
        if self.run_id is not None and not re.fullmatch(r"[\w:.+-]+", self.run_id):
            raise WrongUse(f"run_id is '{self.run_id}'; use letters, digits and : . + - _")
        parse_duration(self.window)


def window_of(moment: dt.datetime, length: dt.timedelta) -> tuple[dt.datetime, dt.datetime]:
    """Return the half-open window that contains ``moment``; windows begin at multiples of ``length`` since 1970."""
    epoch = from_micros(0)
    start = moved(epoch, (moment - epoch) // length * length)
    return start, moved(start, length)


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the batch, or the stream to its end, and report the counts.

    Raises:
        NotReady: the source doesn't exist.
        DataRefused: the rejected share rose too much; nothing was written.
    """
    conditions = load_conditions(params.conditions)
    if not table_exists(spark, params.source):
        raise NotReady(f"there is no Delta table '{params.source}' to read from")
    create_table(spark, params.statistics, cast(StructType, StructType.fromDDL(STATISTICS_SCHEMA)))
    if params.checkpoint is None:
        return _run_batch(spark, params, conditions)
    query, writer = start(spark, params, conditions)
    await_end(query, writer, params.source)
    return _report(params, writer.total(), {"batches": writer.batches})


def _run_batch(spark: SparkSession, params: Parameters, conditions: Sequence[Condition]) -> dict[str, Any]:
    now = params.processing_time()
    run_id = params.run_id or now.isoformat()
    rows = read_table(spark, params.source)
    if params.max_rise is not None:
        history = read_table(spark, params.statistics).where(F.col("run_id") != run_id)
        refuse_rise(count(rows, conditions), history, params.max_rise, params.baseline_runs)
    interceptor = Interceptor(conditions)
    _replace(interceptor.filter(rows), params.target)
    counts = interceptor.counts()
    statistics = statistics_rows(spark, counts, conditions, run_id, now)
    _replace(statistics, params.statistics, f"run_id = {string_literal(run_id)}")
    return _report(params, counts, {"run_id": run_id})


def _replace(rows: DataFrame, table: str, where: str | None = None) -> None:
    writer = rows.write.format("delta").mode("overwrite")
    if where is not None:
        writer = writer.option("replaceWhere", where)
    if is_path(table):
        writer.save(absolute(table))
    else:
        writer.saveAsTable(table)


def refuse_rise(counts: Counts, statistics: DataFrame, max_rise: float, baseline_runs: int) -> None:
    """Compare the rejected share with the mean of the newest earlier runs that had input.

    Raises:
        DataRefused: the share rose by more than ``max_rise``; the message names the condition that rose most.
    """
    history = statistics.where("input_rows > 0")
    runs = history.select("run_at", "run_id").distinct().orderBy(F.desc("run_at"), F.desc("run_id"))
    baseline = {
        row["condition_name"]: row["share"]
        for row in history.join(runs.limit(baseline_runs), ["run_at", "run_id"], "left_semi")
        .groupBy("condition_name")
        .agg(F.avg(F.try_divide(_counted("rejected_rows"), _counted("input_rows"))).alias("share"))
        .collect()
        if row["share"] is not None
    }
    name, rise = largest_rise(counts.shares, baseline)
    if baseline and exceeds(rise, max_rise):
        raise DataRefused(
            f"alert: the rejected share rose by {rise:.1%} to {sum(counts.shares.values()):.1%}, "
            f"most of all by the condition '{name}' "
            f"(from {baseline.get(name, 0.0):.1%} to {counts.shares[name]:.1%}); nothing was written"
        )


def _counted(column: str) -> Column:
    """Return a number of rows; NULL, which a mean skips, for NaN and infinity in a table of somebody else's."""
    return F.expr(f"try_cast({column} as bigint)")


def _report(params: Parameters, counts: Counts, more: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "read": counts.input_rows,
        "valid": counts.valid_rows,
        "rejected": counts.rejected,
        "target": params.target,
        "statistics": params.statistics,
        **more,
    }


class FilteredBatchWriter(BatchFunction):
    """The ``foreachBatch`` function of the stream: append valid rows, then their counts under the window."""

    def __init__(self, params: Parameters, conditions: Sequence[Condition], writer_id: str) -> None:
        self.params = params
        self.conditions = conditions
        self.writer_id = writer_id
        self.length = parse_duration(params.window)
        self.batches = 0
        self.input_rows = 0
        self.rejected = dict.fromkeys((condition.name for condition in conditions), 0)

    def total(self) -> Counts:
        """Return the counts over the micro-batches of this run."""
        return Counts(self.input_rows, self.rejected)

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Process one micro-batch."""
        spark, params = rows.sparkSession, self.params
        now = params.processing_time()
        options = batch_options(self.writer_id, batch_id)
        if is_committed(spark, params.target, self.writer_id, batch_id):
            # A run died after writing these rows and before writing their counts: Delta would skip the write, and
            # the job would wait for an observation that never runs.
            counts = count(rows, self.conditions)
        else:
            interceptor = Interceptor(self.conditions)
            append(interceptor.filter(rows), params.target, options)
            counts = interceptor.counts()
        run_id = f"{self.writer_id}-{batch_id}"
        window = window_of(now, self.length)
        append(
            statistics_rows(spark, counts, self.conditions, run_id, now, window), params.statistics, options
        )
        self.batches += 1
        self.input_rows += counts.input_rows
        for name, rejected in counts.rejected.items():
            self.rejected[name] += rejected


def start(
    spark: SparkSession, params: Parameters, conditions: Sequence[Condition]
) -> tuple[StreamingQuery, FilteredBatchWriter]:
    """Create or check the tables, claim the checkpoint and start the stream."""
    create_table(spark, params.target, read_table(spark, params.source).schema)
    declared = TableStream(
        job="filter_interceptor",
        source=params.source,
        writes={"target": params.target, "statistics table": params.statistics},
        appends_to=[params.target, params.statistics],
        checkpoint=given(params.checkpoint, "checkpoint"),
        start_over=params.start_over,
        trigger=params.trigger,
        max_files_per_trigger=params.max_files_per_trigger,
    )
    writer = FilteredBatchWriter(params, conditions, declared.claim(spark))
    query = declared.start(spark, writer)
    return query, writer


if __name__ == "__main__":
    run_job(Parameters, run)
