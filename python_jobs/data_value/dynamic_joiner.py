"""Dynamic Joiner: two streams are joined by key and event time.

Problem: an ad is shown for a visit, or a user's profile changes. Both come as events, some late, and either side may be
first. A table at rest would be stale, and a join of two streams without bounds keeps all rows for ever.

The job reads two Delta tables as streams. ``--left`` is the side whose rows are completed, ``--right`` completes them:

* ``--variant interval`` (default): a right row belongs to each left row of its key whose time is at most
  ``--max_before`` later or ``--max_after`` earlier. A left row with several right rows gives several rows.
* ``--variant as_of``: right rows are versions of a key. A left row takes the latest version that isn't after its time;
  after a deletion (``--right_deleted``) or when the version is older than ``--validity`` it takes none.

The watermark of a side is its latest event time minus ``--left_watermark`` or ``--right_watermark``; the query's is the
smaller one. A row of the interval join is written when both sides are there, a left row without one when the watermark
has passed its bound. A row of the as-of join is written when the watermark has reached its time: until then versions
may come in any order.

Guarantee: each row is in the target once, whatever breaks off: a row's key is the hash of ``--left_id`` (and
``--right_id``). Rows behind the watermark are in the table ``--late``, each once. Rows without key, id or time, with a
time more than ``--max_future`` ahead, or whose id (with ``as_of`` also the key) isn't UTF-8, are dead letters; they
never move the watermark nor stay in the state. If one side is idle, the watermark stands still: no row without a match
is written, and the state grows. Send heartbeats. With ``--watermark_policy max`` the faster side decides, and what the
slower one sends behind it is late.

Cost: the interval join keeps the rows of both sides within the bounds and the watermark, in RocksDB. The as-of join
keeps the left rows until the watermark reaches them, and one version of each key for ever, or for ``--validity``; it
makes one Python call for each key of a batch. Each side is read twice, because late and dead rows pass the join.

Submit (available data, then stop; with ``--trigger "10 seconds"`` without end)::

    spark-submit python_jobs/data_value/dynamic_joiner.py --left lakehouse/bronze/visits --right lakehouse/bronze/ads \\
        --left_key.page page --right_key.page visit_page --left_time event_time --right_time display_time \\
        --left_columns '{visit_id: visit_id, page: page}' --left_id '[visit_id]' \\
        --right_columns '{ad_id: ad_id}' --right_id '[ad_id]' --max_after "2 minutes" \\
        --left_watermark "10 minutes" --right_watermark "10 minutes" --target lakehouse/silver/visits_with_ads \\
        --late lakehouse/silver/visits_with_ads_late --dead_letter lakehouse/silver/visits_with_ads_dead \\
        --checkpoint lakehouse/checkpoints/visits_with_ads

Source: Data Engineering Design Patterns, chapter 5, Dynamic Joiner; the guide's ``pat-change-data-joins`` and
``pat-watermarking``.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import ArrayType, BinaryType, LongType, MapType, StringType, StructField, StructType

from python_jobs.data_value.as_of_state import ANSWERS, IS_PROBE, MICROS, ORDER, VALUE, AsOfState
from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.intervals import duration_micros, parse_duration
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.delta.checkpoints import batch_watermark, has_progress
from python_jobs.shared.delta.commits import latest_version
from python_jobs.shared.delta.keyed_tables import DeltaSink, KeyedSink
from python_jobs.shared.delta.keys import require_stable, surrogate_key
from python_jobs.shared.delta.progress import run_counted
from python_jobs.shared.delta.state_stores import STATE_STORE, loading_state
from python_jobs.shared.delta.streams import (
    BatchFunction,
    append,
    batch_options,
    create_table,
    empty_source,
    evaluated_once,
    nullable,
    read_stream,
)
from python_jobs.shared.delta.tables import read_table, table_exists, table_id
from python_jobs.shared.records.dead_letters import DeadLetterStream
from python_jobs.shared.records.event_times import (
    absence,
    ahead,
    first_error,
    latest_time,
    not_utf8,
    order_of,
)
from python_jobs.shared.records.json_records import ERROR_CLASS, ERROR_MESSAGE
from python_jobs.shared.spark.expressions import resolved
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.session import settings
from python_jobs.shared.spark.sql_text import identifier, named_column, named_columns, refuse_own_names
from python_jobs.shared.spark.times import stamped, with_timestamp

JOIN_ID, LEFT_TIME, RIGHT_TIME, LEFT_DATE, VERSION, WRITTEN_AT = OWN_COLUMNS = (
    "join_id",
    "left_time",
    "right_time",
    "left_date",
    "version",
    "written_at",
)
LATE_TYPE = (
    "side string, record string, event_time timestamp, watermark timestamp, batch_id bigint, "
    "processed_at timestamp"
)
# Columns of a side and of a batch; the others have names that the user chose.
_TIME, _VALUES, _RECORD, _SIDE = "__time", "__values", "__record", "__side"
# JSON drops microseconds by default.
_EXACT = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


@dataclass(frozen=True)
class Side:
    """One of the two inputs, as the parameters describe it."""

    name: Literal["left", "right"]
    table: str
    key: dict[str, str]
    time: str
    columns: dict[str, str]
    id: list[str]
    ties: list[str]
    where: str | None
    watermark: str


@dataclass(frozen=True, kw_only=True)
class Parameters(DeadLetterStream):
    """Join the rows of two Delta tables by key and event time, as both grow."""

    left: str
    """Append-only Delta table (name or path) whose rows are completed."""
    right: str
    """Append-only Delta table (name or path) that completes them."""
    variant: Literal["interval", "as_of"] = "interval"
    """interval (default): all right rows within the bounds; as_of: the latest version at the left row's time."""
    join_type: Literal["left", "inner"] = "left"
    """left (default) keeps left rows without a match, with NULL; inner drops them."""
    left_key: dict[str, str]
    """Parts of the join key by name, each with its SQL expression over left."""
    right_key: dict[str, str]
    """The same parts, each with its SQL expression over right, of the same type."""
    left_time: str
    """SQL expression of a left row's time: a timestamp, or a text that names date and time."""
    right_time: str
    """SQL expression of a right row's time."""
    left_columns: dict[str, str]
    """Columns of the target from left, each with its SQL expression."""
    right_columns: dict[str, str]
    """Columns of the target from right, each with its SQL expression."""
    left_id: list[str]
    """Columns of left_columns that identify a left row."""
    right_id: list[str] = field(default_factory=list)
    """Columns of right_columns that identify a right row; the interval join needs them."""
    right_ties: list[str] = field(default_factory=list)
    """Integer columns of right that order versions of one time, such as partition and offset; for as_of."""
    left_where: str | None = None
    """SQL condition of the left rows that take part; by default all."""
    right_where: str | None = None
    """SQL condition of the right rows that take part, such as "value is not null" for a topic with tombstones."""
    right_deleted: str | None = None
    """SQL condition of right rows that delete their key, such as "op = 'd'"; for as_of."""
    max_before: str | None = None
    """Largest time by which a right row may be before the left row; by default 0. For interval."""
    max_after: str | None = None
    """Largest time by which a right row may be after the left row; by default 0. For interval."""
    validity: str | None = None
    """Largest age of a version that a left row takes; by default no limit. For as_of."""
    left_watermark: str = "10 minutes"
    """Delay of left's watermark behind its latest event time."""
    right_watermark: str = "10 minutes"
    """Delay of right's watermark behind its latest event time."""
    watermark_policy: Literal["min", "max"] = "min"
    """Side that moves the query's watermark: the slower (min, default) or the faster one (max)."""
    max_future: str = "1 hour"
    """Time by which an event time may be ahead of the processing time; a later one makes a dead letter."""
    target: str
    """Delta table (name or path) of the joined rows; created when absent."""
    late: str
    """Delta table (name or path) of the rows behind the watermark; created when absent."""
    checkpoint: str
    """Folder of the stream's progress and state: one for each set of tables, kept as long as these tables."""
    job_name: str = "dynamic_joiner"
    """Name of the job in the dead letters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({self.left, self.right, self.target, self.late, self.dead_letter}) < 5:
            raise WrongUse("left, right, target, late and dead_letter must be five tables")
        if not self.left_key or self.left_key.keys() != self.right_key.keys():
            raise WrongUse(
                "left_key and right_key must name the same parts, one or more, "
                f"got {', '.join(self.left_key) or 'none'} "
                f"and {', '.join(self.right_key) or 'none'}"
            )
        self._check_columns()
        self._check_variant()
        for duration in (
            self.max_before, self.max_after, self.validity, self.left_watermark, self.right_watermark, self.max_future
        ):  # fmt: skip
            if duration is not None:
                parse_duration(duration)

    def _check_columns(self) -> None:
        names = [*self.left_columns, *self.right_columns]
        own = (*OWN_COLUMNS, ERROR_CLASS, ERROR_MESSAGE)
        refuse_own_names("left_columns and right_columns", names, own)
        if len({name.lower() for name in names}) < len(names):
            raise WrongUse(
                f"left_columns and right_columns must have different names, got {', '.join(names)}"
            )
        for side in ("left", "right"):
            columns, ids = getattr(self, f"{side}_columns"), getattr(self, f"{side}_id")
            unknown = [name for name in ids if name not in columns]
            needed = side == "left" or self.variant == "interval"
            if unknown or not columns or (needed and not ids):
                raise WrongUse(
                    f"{side}_id must name columns of {side}_columns, one or more, got {', '.join(ids) or 'none'}; "
                    f"there are {', '.join(columns) or 'none'}"
                )

    def _check_variant(self) -> None:
        if self.variant == "interval" and self.max_before is None and self.max_after is None:
            raise WrongUse("the interval join needs max_before, max_after or both")
        others = {
            "interval": ("validity", "right_deleted", "right_ties"),
            "as_of": ("max_before", "max_after", "right_id"),
        }[self.variant]
        given = [name for name in others if getattr(self, name)]
        if given:
            raise WrongUse(f"the variant {self.variant} doesn't take {', '.join(given)}")

    @property
    def sides(self) -> tuple[Side, Side]:
        """Return the two inputs, the left one first."""
        left = Side(
            "left", self.left, self.left_key, self.left_time, self.left_columns, self.left_id, [],
            self.left_where, self.left_watermark,
        )  # fmt: skip
        right = Side(
            "right", self.right, self.right_key, self.right_time, self.right_columns, self.right_id, self.right_ties,
            self.right_where, self.right_watermark,
        )  # fmt: skip
        return left, right

    def rules(self) -> str:
        """Return what the state and the rows depend on."""
        names = (
            "variant", "join_type", "left_key", "right_key", "left_time", "right_time", "left_columns", "right_columns",
            "left_id", "right_id", "right_ties", "left_where", "right_where", "right_deleted", "max_before",
            "max_after", "validity", "watermark_policy",
        )  # fmt: skip
        return json_text({name: getattr(self, name) for name in names}, sort_keys=True)


# --- a side ------------------------------------------------------------------------------------------------


def judged(records: DataFrame, side: Side, params: Parameters) -> DataFrame:
    """Return a side's records with their keys, time, columns and error; the error is NULL for a usable record.

    Raises:
        WrongUse: an expression can't be resolved or has another type.
    """
    with resolved(f"an expression over {side.name}"):
        chosen = records if side.where is None else records.where(F.expr(side.where))
        keys = {f"__key_{place}": name for place, name in enumerate(side.key)}
        ids = {f"__id_{place}": name for place, name in enumerate(side.id)}
        rows = with_timestamp(chosen, _TIME, side.time, f"{side.name}_time").select(
            *(F.expr(side.key[name]).alias(column) for column, name in keys.items()),
            *(F.expr(side.columns[name]).alias(column) for column, name in ids.items()),
            _TIME,
            F.array(*order_of(chosen, side.ties, f"{side.name}_ties")).cast("array<bigint>").alias(ORDER),
            _is_deleted(side, params).alias("__deleted"),
            F.struct(*(F.expr(value).alias(name) for name, value in side.columns.items())).alias(_VALUES),
            F.struct(*(named_column(name) for name in records.columns)).alias(_RECORD),
        )
    require_stable(rows, ids, f"the {side.name}_id")
    errors = absence(keys | ids, {_TIME: f"{side.name}_time"})
    errors.append(ahead(_TIME, latest_time(params.max_future, params.now)))
    # The hash of the ids is made of JSON, which replaces other bytes; the keys of as_of pass through Python.
    errors.append(not_utf8(rows, ids if params.variant == "interval" else keys | ids))
    return rows.select("*", *first_error(errors))


def _is_deleted(side: Side, params: Parameters) -> Column:
    condition = params.right_deleted if side.name == "right" else None
    return F.lit(False) if condition is None else F.coalesce(F.expr(condition), F.lit(False))


def usable(rows: DataFrame, side: Side) -> DataFrame:
    """Return the judged records that are joined, with the side's watermark."""
    return rows.where(F.col(ERROR_CLASS).isNull()).withWatermark(_TIME, side.watermark)


def passed_by(rows: DataFrame, side: Side) -> DataFrame:
    """Return all judged records as the batch function takes them, which picks the dead and the late ones."""
    return rows.select(
        F.lit(side.name).alias(_SIDE),
        F.unix_micros(_TIME).alias(MICROS),
        F.col(_RECORD).alias(f"__{side.name}_record"),
        ERROR_CLASS,
        ERROR_MESSAGE,
    )


# --- the join ----------------------------------------------------------------------------------------------


def joined(left: DataFrame, right: DataFrame, params: Parameters) -> DataFrame:
    """Return the rows of the target, but for the time of writing, and all records of both sides beside them.

    Raises:
        WrongUse: an expression can't be resolved, or the keys' types differ.
    """
    sides = params.sides
    frames = [judged(records, side, params) for records, side in zip((left, right), sides, strict=True)]
    _require_same_keys(frames, params)
    join = interval_join if params.variant == "interval" else as_of_join
    left_rows, right_rows = (usable(frame, side) for frame, side in zip(frames, sides, strict=True))
    rows = join(left_rows, right_rows, params)
    for frame, side in zip(frames, sides, strict=True):
        rows = rows.unionByName(passed_by(frame, side), allowMissingColumns=True)
    return rows


def interval_join(left: DataFrame, right: DataFrame, params: Parameters) -> DataFrame:
    """Return the pairs of rows with one key whose times are within the bounds."""
    conditions = [f"l.__key_{place} = r.__key_{place}" for place in range(len(params.left_key))]
    bounds = {"-": params.max_before, "+": params.max_after}
    earliest, latest = (
        "l.__time" if bound is None else f"l.__time {sign} interval {bound}" for sign, bound in bounds.items()
    )
    conditions += [f"r.__time >= {earliest}", f"r.__time <= {latest}"]
    pairs = left.alias("l").join(right.alias("r"), F.expr(" and ".join(conditions)), params.join_type)
    is_matched = F.col("r.__time").isNotNull()
    version = F.array(F.unix_micros("r.__time"))
    return _rows(
        pairs.select(
            F.col("l.__time").alias("__at"),
            F.col("l.__values").alias("__left"),
            F.col("r.__values").alias("__right"),
            F.when(is_matched, version)
            .otherwise(F.expr("cast(array() as array<bigint>)"))
            .alias("__version"),
        ),
        params,
    )


def as_of_join(left: DataFrame, right: DataFrame, params: Parameters) -> DataFrame:
    """Return each left row with the version of its time."""
    keys = [f"__key_{place}" for place in range(len(params.left_key))]

    def values(rows: DataFrame) -> Column:
        return F.to_json(F.col(_VALUES).cast(_of_bytes(_columns_of(rows))), _EXACT)

    def side(rows: DataFrame, is_probe: bool) -> DataFrame:
        # Without the watermark's column, with which Spark would drop late rows: a late version counts for later rows.
        return rows.select(
            *keys,
            F.lit(is_probe).alias(IS_PROBE),
            F.unix_micros(_TIME).alias(MICROS),
            ORDER,
            F.when(~F.col("__deleted"), values(rows)).alias(VALUE),
        )

    validity = None if params.validity is None else duration_micros(parse_duration(params.validity))
    answers = (
        side(left, is_probe=True)
        .unionByName(side(right, is_probe=False))
        .groupBy(*keys)
        .transformWithState(AsOfState(validity), ANSWERS, "append", "eventTime")
    )
    types = [_columns_of(frame) for frame in (left, right)]
    pairs = answers.select(
        F.timestamp_micros("__left_micros").alias("__at"),
        *(
            F.from_json(f"__{name}_value", _of_bytes(type_), _EXACT | {"mode": "FAILFAST"})
            .cast(type_)
            .alias(f"__{name}")
            for name, type_ in zip(("left", "right"), types, strict=True)
        ),
        "__version",
    )
    return _rows(pairs if params.join_type == "left" else pairs.where("__right is not null"), params)


def _rows(pairs: DataFrame, params: Parameters) -> DataFrame:
    """Return pairs (``__left``, ``__right``, ``__at``, ``__version``) as rows of the target."""
    left_id = [f"__left.{identifier(name)}" for name in params.left_id]
    right_id = [f"__right.{identifier(name)}" for name in params.right_id]
    right_time = F.when(F.col("__right").isNotNull(), F.timestamp_micros(F.expr("get(__version, 0)")))
    return pairs.select(
        surrogate_key(*left_id, *right_id, nullable=right_id).alias(JOIN_ID),
        *(F.col(f"__left.{identifier(name)}").alias(name) for name in params.left_columns),
        *(F.col(f"__right.{identifier(name)}").alias(name) for name in params.right_columns),
        F.col("__at").alias(LEFT_TIME),
        right_time.alias(RIGHT_TIME),
        F.to_date("__at").alias(LEFT_DATE),
        F.col("__version").alias(VERSION),
    )


def _of_bytes(type_: Any) -> Any:
    """Return a type with bytes, which JSON holds in base64, for each text: a text of Spark may hold any bytes."""
    if isinstance(type_, StructType):
        return StructType([StructField(field.name, _of_bytes(field.dataType)) for field in type_.fields])
    if isinstance(type_, ArrayType):
        return ArrayType(_of_bytes(type_.elementType))
    if isinstance(type_, MapType):  # JSON's names are texts
        return MapType(type_.keyType, _of_bytes(type_.valueType))
    return BinaryType() if isinstance(type_, StringType) else type_


def _columns_of(rows: DataFrame) -> StructType:
    return nullable(rows.select(f"{_VALUES}.*").schema)


def _require_same_keys(frames: Sequence[DataFrame], params: Parameters) -> None:
    for place, name in enumerate(params.left_key):
        types = [frame.schema[f"__key_{place}"].dataType.simpleString() for frame in frames]
        if types[0] != types[1]:
            raise WrongUse(
                f"the key's part {name} must have one type, got {types[0]} in left and {types[1]} in right"
            )


# --- the query ---------------------------------------------------------------------------------------------


class JoinWriter(BatchFunction):
    """The ``foreachBatch`` function: it writes the dead letters and the late rows first, then the joined rows."""

    def __init__(self, params: Parameters, sink: KeyedSink, writer_id: str) -> None:
        self._params, self._sink, self._writer_id = params, sink, writer_id
        self.rows = 0
        self.late = {"left": 0, "right": 0}
        self.dead = {"left": 0, "right": 0}

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Write one batch; a repeated batch leaves the same rows."""
        params, now = self._params, self._params.processing_time()
        watermark = self._watermark(rows.sparkSession, batch_id)
        is_dead, is_late = F.col(ERROR_CLASS).isNotNull(), F.col(MICROS) <= watermark
        options = batch_options(self._writer_id, batch_id)
        with evaluated_once(rows.where(F.col(_SIDE).isNull() | is_dead | is_late)) as kept:
            # The count reads all rows, with which the state changes: Spark ends a query whose batch changed none.
            counts = kept.groupBy(_SIDE, is_dead.alias("is_dead")).count().collect()
            passed = {(side, dead): count for side, dead, count in counts if side is not None}
            if any(dead for _, dead in passed):
                records = self._records(kept.where(is_dead))
                dead_letters = params.dead_letters(records, ["side", "record"], batch_id, now)
                append(dead_letters, params.dead_letter, options)
            if not all(dead for _, dead in passed):
                late = self._late(kept.where(F.col(_SIDE).isNotNull() & ~is_dead), watermark, batch_id, now)
                append(late, params.late, options)
            columns = named_columns(
                [JOIN_ID, *params.left_columns, *params.right_columns, *OWN_COLUMNS[1:-1]]
            )
            joined = newest(kept.where(F.col(_SIDE).isNull()).select(*columns))
            self._sink.write(stamped(joined, WRITTEN_AT, now.isoformat()), batch_id)
        self.rows += sum(count for side, _, count in counts if side is None)
        for (side, dead), count in passed.items():
            (self.dead if dead else self.late)[side] += count

    def _watermark(self, spark: SparkSession, batch_id: int) -> int:
        """Return the watermark behind which rows of the batch are late, in microseconds."""
        # Spark's join drops rows behind the batch before; the as-of state knows its own batch's watermark.
        decides = batch_id - 1 if self._params.variant == "interval" else batch_id
        return batch_watermark(spark, self._params.checkpoint, decides)

    def _records(self, rows: DataFrame) -> DataFrame:
        return rows.select(
            F.col(_SIDE).alias("side"),
            F.coalesce(*(F.to_json(f"__{side.name}_record", _EXACT) for side in self._params.sides)).alias(
                "record"
            ),
            F.timestamp_micros(MICROS).alias("event_time"),
            ERROR_CLASS,
            ERROR_MESSAGE,
        )

    def _late(self, rows: DataFrame, watermark: int, batch_id: int, now: dt.datetime) -> DataFrame:
        return self._records(rows).select(
            "side",
            "record",
            "event_time",
            F.timestamp_micros(F.lit(watermark)).alias("watermark"),
            F.lit(batch_id).cast("bigint").alias("batch_id"),
            F.lit(now.isoformat()).cast("timestamp").alias("processed_at"),
        )


def newest(rows: DataFrame) -> DataFrame:
    """Return one row of each key: an input row that came twice gives equal rows."""
    row = F.struct(*named_columns(rows.columns))
    chosen = F.max_by(row, F.struct(VERSION, F.to_json(row))).alias("__row")
    return rows.groupBy(JOIN_ID).agg(chosen).select("__row.*")


def start(spark: SparkSession, params: Parameters) -> tuple[StreamingQuery, JoinWriter]:
    """Check the tables, claim the checkpoint and start the query.

    Raises:
        NotReady: a source doesn't exist.
        WrongUse: an expression can't be resolved, a table has another schema, the checkpoint belongs to another query,
            or a left interval join would start over on a target with rows.
    """
    empty = [empty_source(spark, side.table, ()) for side in params.sides]
    sides = params.sides
    frames = [judged(records, side, params) for records, side in zip(empty, sides, strict=True)]
    _require_same_keys(frames, params)
    nothing = spark.createDataFrame(
        [], "side string, record string, error_class string, error_message string"
    )
    params.create_dead_letter_table(spark, nothing, ["side", "record"])
    create_table(spark, params.late, spark.createDataFrame([], LATE_TYPE).schema)
    _require_new_target(spark, params)
    written = stamped(_rows(_no_pairs(spark, frames), params), WRITTEN_AT, "1970-01-01")
    sink = DeltaSink(spark, params.target, written, [JOIN_ID], LEFT_DATE, [VERSION])
    declared = params.stream(
        "dynamic_joiner",
        params.left,
        params.checkpoint,
        {"target": params.target, "late table": params.late},
        # A joined row that is written again replaces its row.
        appends_to=[params.dead_letter, params.late],
        meaning={
            "right source": table_id(spark, params.right),
            "rules": params.rules(),
            "state": "texts as bytes",
        },
        transform=lambda left: joined(
            left, read_stream(spark, params.right, params.max_files_per_trigger), params
        ),
    )
    writer = JoinWriter(params, sink, declared.claim(spark))
    policy = {"spark.sql.streaming.multipleWatermarkPolicy": params.watermark_policy}
    with settings(spark, STATE_STORE | policy):
        query = declared.start(spark, writer)
    return query, writer


def _require_new_target(spark: SparkSession, params: Parameters) -> None:
    """Refuse a target with rows of another checkpoint, in which rows without a match would stay beside their match."""
    if params.variant != "interval" or params.join_type != "left" or has_progress(spark, params.checkpoint):
        return
    if table_exists(spark, params.target) and not read_table(spark, params.target).isEmpty():
        raise WrongUse(
            f"the checkpoint '{params.checkpoint}' is new, but the target '{params.target}' has rows: a left row "
            "without a match there could get one now and would be there twice; give another target"
        )


def _no_pairs(spark: SparkSession, frames: Sequence[DataFrame]) -> DataFrame:
    types = StructType().add("__at", "timestamp").add("__version", ArrayType(LongType()))
    for name, frame in zip(("__left", "__right"), frames, strict=True):
        types = types.add(name, _columns_of(frame))
    return spark.createDataFrame([], types)


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the query to its end and return the report.

    Raises:
        JobFailed: Spark ended the query for a reason that the user can fix.
    """
    sources = f"{params.left}' or '{params.right}"
    with loading_state(params.checkpoint):
        writer, totals = run_counted(spark, lambda: start(spark, params), sources)
    return {
        "rows": writer.rows,
        "late": writer.late,
        "dead": writer.dead,
        "dropped": totals.late_rows,
        "state_rows": totals.batches[-1].state_rows if totals.batches else 0,
        "batches": [batch.as_dict() for batch in totals.batches],
        "target": {"table": params.target, "version": latest_version(spark, params.target)},
    }


if __name__ == "__main__":
    run_job(Parameters, run)
