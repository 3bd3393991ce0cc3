"""Static Joiner with an HTTP API: a batch gets a column whose values an API gives for a key.

Problem: visits have an IP address, and only a service knows its place. A request for each visit would take days; a
service that fails must not leave visits without a place that have one; and a rerun must give the same rows.

The job reads the rows of ``--source`` that match ``--where`` and asks the API for their distinct keys, up to
``--buffer`` (100) in one request; it doesn't ask for keys that are in the Delta table ``--cache``. It adds the answers
to the cache. Then it replaces the rows of ``--target`` that match ``--where``, or all rows, with the source's rows and
the new column. The value is a text; of any other JSON value it is the JSON text.

Guarantee: all rows of the source are in the target, once. No key is asked for twice, in this run or a later one, so a
rerun gives the same values although the API may have changed; delete a key from the cache to ask again. A key that the
API leaves out has NULL, which the cache keeps, too. A row whose key is NULL or empty has NULL and is not asked for. A
key that holds a comma or isn't UTF-8 ends the run. A request that fails with a server error, a timeout or a broken
answer gets up to ``--attempts`` tries with growing pauses. Then the job fails with exit code 1: the target stays as it
is, and the cache keeps the answers so far. Cache and target are one commit each, in this order. Not guaranteed: two
runs at once may ask for the same key; the cache has it once.

Cost: one request for each ``--buffer`` new keys, one after the other, from the driver, which holds the new answers in
memory. The source is read twice, the cache twice.

    spark-submit python_jobs/data_value/static_joiner_api.py --source lakehouse/silver/silver_visits \\
        --target lakehouse/silver/silver_visits_with_places --cache lakehouse/silver/silver_ip_places \\
        --key ip --column geo --url http://localhost:8080/geolocation/fetch --keys_parameter ips \\
        --where "event_date = date'2024-03-01'"

Source: Data Engineering Design Patterns, chapter 5, Static Joiner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ByteType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from python_jobs.data_value.bulk_lookups import Api, Lookups
from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import DataRefused, WrongUse
from python_jobs.shared.core.retry import Retrier, RetryPolicy
from python_jobs.shared.delta.commits import latest_version, numeric_metrics
from python_jobs.shared.delta.optimistic_writes import change
from python_jobs.shared.delta.overwrite import overwrite
from python_jobs.shared.delta.streams import create_table
from python_jobs.shared.delta.tables import delta_table, read_table, read_version
from python_jobs.shared.spark.expressions import first_line
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import named_column, taken_names

APP_ID = "lakehouse_patterns.static_joiner_api"
_CACHE_COLUMNS = StructType(
    [
        StructField("lookup_key", StringType()),
        StructField("value", StringType()),
        StructField("looked_up_at", TimestampType()),
    ]
)
_KEY = "__lookup_key"
_KEY_TYPES = (StringType, ByteType, ShortType, IntegerType, LongType)


@dataclass(frozen=True, kw_only=True)
class Parameters(ProcessingTimeParameters):
    """Add a column whose values an HTTP API gives for a key."""

    source: str
    """Delta table (name or path) to read."""
    target: str
    """Delta table (name or path) whose rows are replaced; created when absent."""
    cache: str
    """Delta table (name or path) with the answers of all runs; created when absent."""
    key: str
    """Column of the source with the key, a text or an integer."""
    column: str
    """New column for the API's value."""
    url: str
    """URL of the bulk request, without a query."""
    keys_parameter: str
    """Parameter of the query with the keys, separated by commas."""
    answer_field: str = "mapped"
    """Field of the answer that maps keys to values."""
    where: str | None = None
    """SQL condition of the rows to read and to replace; default: all rows."""
    token_env: str | None = None
    """Environment variable with the API's bearer token; default: no token."""
    buffer: int = 100
    """Maximum number of keys in one request."""
    attempts: int = 5
    """Maximum number of tries of one request."""
    wait_seconds: float = 1
    """Longest pause before the second try, in seconds; it doubles before each further try, up to a minute."""
    timeout_seconds: float = 30
    """Time in seconds that one try waits for the API."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({self.source, self.target, self.cache}) < 3:
            raise WrongUse("source, target and cache must be three tables")
        self.lookups()

    def lookups(self) -> Lookups:
        """Return lookups in the API.

        Raises:
            WrongUse: a bound is out of range, or the URL or the token can't be used.
        """
        api = Api(
            url=self.url,
            keys_parameter=self.keys_parameter,
            answer_field=self.answer_field,
            token_env=self.token_env,
            buffer=self.buffer,
        )
        policy = RetryPolicy(
            attempts=self.attempts, base_seconds=self.wait_seconds, attempt_seconds=self.timeout_seconds
        )
        return Lookups(api, Retrier(policy))


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Replace the target's rows; report the rows, the new keys, those without a value, and the requests.

    Raises:
        NotReady: the source doesn't exist.
        WrongUse: a column is unknown, taken or of another type, or ``where`` can't be used.
        DataRefused: a key can't be part of a request.
        JobFailed: the API failed; the target stays as it is.
    """
    delta_table(spark, params.source)
    rows = _rows(read_version(spark, params.source, latest_version(spark, params.source)), params)
    create_table(spark, params.cache, _CACHE_COLUMNS)
    lookups = params.lookups()
    try:
        lookups.look_up(_new_keys(rows, read_table(spark, params.cache), params))
    finally:  # what was answered before a failure isn't asked for again
        if lookups.answers:
            change(spark, params.cache, APP_ID, lambda: (_new_answers(spark, lookups, params), None))
    commit = overwrite(
        spark, joined(rows, read_table(spark, params.cache), params), params.target, params.where
    )
    return {
        "rows": numeric_metrics(commit).get("numOutputRows", 0) if commit else 0,
        "new_keys": len(lookups.answers),
        "without_value": sum(value is None for value in lookups.answers.values()),
        "requests": lookups.requests,
        "target": {"table": params.target, "version": latest_version(spark, params.target)},
    }


def joined(rows: DataFrame, cache: DataFrame, params: Parameters) -> DataFrame:
    """Return the rows with the cached value of their key as the new column."""
    values = cache.select(F.col("lookup_key").alias(_KEY), F.col("value").alias(params.column))
    return rows.join(values, _key(params) == F.col(_KEY), "left").drop(_KEY)


def _rows(source: DataFrame, params: Parameters) -> DataFrame:
    if params.key not in source.columns:
        raise WrongUse(f"the source has no column '{params.key}'; it has {', '.join(source.columns)}")
    if not isinstance(type_ := source.schema[params.key].dataType, _KEY_TYPES):
        raise WrongUse(f"the key must be a text or an integer, '{params.key}' is a {type_.simpleString()}")
    if clash := taken_names(source.columns, by=[params.column, _KEY]):
        raise WrongUse(f"the source has columns that this job writes itself: {', '.join(clash)}")
    try:
        return source if params.where is None else source.where(params.where)
    except (AnalysisException, ParseException) as failure:
        raise WrongUse(f"where can't be used ({first_line(failure)})") from None


def _key(params: Parameters) -> Column:
    """Return the key as a text; an empty one, for which nobody can ask, is NULL."""
    return F.nullif(named_column(params.key).cast("string"), F.lit(""))


def _new_keys(rows: DataFrame, cache: DataFrame, params: Parameters) -> Iterator[str]:
    keys = rows.select(_key(params).alias("lookup_key")).where("lookup_key is not null").distinct()
    new = keys.join(cache, "lookup_key", "left_anti")
    # On its way to Python each byte that isn't UTF-8 would become the same character: several keys would be one.
    broken = F.when(~F.is_valid_utf8("lookup_key"), F.hex("lookup_key"))
    for row in new.select("lookup_key", broken.alias("bytes")).toLocalIterator():
        if row["bytes"] is not None:
            raise DataRefused(
                f"a key can't be looked up, because it isn't UTF-8 (its bytes are {row['bytes']}); correct the source "
                "or leave the row out"
            )
        yield row["lookup_key"]


def _new_answers(spark: SparkSession, lookups: Lookups, params: Parameters) -> DataFrame:
    """Return the answers that the cache doesn't have from another run that has ended meanwhile."""
    at = params.processing_time()
    answers = [(key, value, at) for key, value in lookups.answers.items()]
    rows = spark.createDataFrame(answers, _CACHE_COLUMNS)
    return rows.join(read_table(spark, params.cache), "lookup_key", "left_anti")


if __name__ == "__main__":
    run_job(Parameters, run)
