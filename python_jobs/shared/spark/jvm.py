"""Everything that reaches through PySpark into the JVM: the only module that uses its private attributes.

Spark Connect has none of them, so jobs need a classic session.
"""

from __future__ import annotations

import os
from typing import Any

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.failures import WrongUse

_NOT_CLASSIC = (
    "jobs need a classic Spark session, got one of Spark Connect: submit them with spark-submit --master, and unset "
    "SPARK_REMOTE and spark.api.mode"
)


def refuse_connect_settings() -> None:
    """Refuse an environment in which PySpark would start a session of Spark Connect.

    Raises:
        WrongUse: it would.
    """
    if os.environ.get("SPARK_REMOTE") or os.environ.get("SPARK_API_MODE", "").lower() == "connect":
        raise WrongUse(_NOT_CLASSIC)


def require_classic(spark: Any) -> None:
    """Refuse a session of Spark Connect.

    Raises:
        WrongUse: it is one.
    """
    if not isinstance(spark, SparkSession):
        raise WrongUse(_NOT_CLASSIC)


def jvm(spark: SparkSession) -> Any:
    """Return the root of the JVM's packages, such as ``jvm(spark).java.util.HashMap``."""
    require_classic(spark)
    return spark._jvm


def hadoop_configuration(spark: SparkSession) -> Any:
    """Return Hadoop's settings of the session."""
    require_classic(spark)
    return spark._jsc.hadoopConfiguration()


def java_array(spark: SparkSession, kind: Any, *items: Any) -> Any:
    """Return a Java array of ``items`` of a class."""
    gateway: Any = spark.sparkContext._gateway
    array = gateway.new_array(kind, len(items))
    for position, item in enumerate(items):
        array[position] = item
    return array


def analyzed_plan(rows: DataFrame) -> Any:
    """Return the logical plan of rows, with names resolved and nothing optimised."""
    return _query_execution(rows).analyzed()


def executed_plan(rows: DataFrame) -> Any:
    """Return the physical plan of rows."""
    return _query_execution(rows).executedPlan()


def _query_execution(rows: DataFrame) -> Any:
    frame: Any = rows
    return frame._jdf.queryExecution()


def data_frame(spark: SparkSession, dataset: Any) -> DataFrame:
    """Return the rows of a Scala Dataset."""
    return DataFrame(dataset, spark)


def delta_log(table: DeltaTable) -> Any:
    """Return Delta's log of a table."""
    return table._jdt.deltaLog()


def newest_snapshot(table: DeltaTable) -> Any:
    """Return Delta's snapshot of the table's newest version, without a Spark job over its history."""
    log = delta_log(table)
    defaults = [getattr(log, f"update$default${position}")() for position in (1, 2, 3)]
    return log.update(*defaults)


def tombstone_retention_milliseconds(spark: SparkSession, snapshot: Any) -> int:
    """Return how long a table's vacuum keeps the files that a commit removed."""
    log = jvm(spark).org.apache.spark.sql.delta.DeltaLog
    return int(log.tombstoneRetentionMillis(snapshot.metadata()))
