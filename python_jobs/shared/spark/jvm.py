"""Access to the JVM behind PySpark: the only module that uses PySpark's private attributes.

Spark Connect doesn't have these attributes, so jobs need a classic session.
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
    """Refuse environment variables with which PySpark would start a session of Spark Connect.

    Raises:
        WrongUse: SPARK_REMOTE is set, or SPARK_API_MODE is ``connect``.
    """
    if os.environ.get("SPARK_REMOTE") or os.environ.get("SPARK_API_MODE", "").lower() == "connect":
        raise WrongUse(_NOT_CLASSIC)


def require_classic(spark: Any) -> None:
    """Refuse a session of Spark Connect.

    Raises:
        WrongUse: the session is one of Spark Connect.
    """
    if not isinstance(spark, SparkSession):
        raise WrongUse(_NOT_CLASSIC)


def jvm(spark: SparkSession) -> Any:
    """Return the root of the JVM's packages, such as ``jvm(spark).java.util.HashMap``."""
    require_classic(spark)
    return spark._jvm


def hadoop_configuration(spark: SparkSession) -> Any:
    """Return the Hadoop configuration of the session."""
    require_classic(spark)
    return spark._jsc.hadoopConfiguration()


def java_array(spark: SparkSession, kind: Any, *items: Any) -> Any:
    """Return a Java array with ``items``; ``kind`` is the Java class of its elements."""
    gateway: Any = spark.sparkContext._gateway
    array = gateway.new_array(kind, len(items))
    for position, item in enumerate(items):
        array[position] = item
    return array


def analyzed_plan(rows: DataFrame) -> Any:
    """Return the analyzed logical plan of a DataFrame: its names are resolved, and it is not optimized."""
    return _query_execution(rows).analyzed()


def executed_plan(rows: DataFrame) -> Any:
    """Return the physical plan of a DataFrame."""
    return _query_execution(rows).executedPlan()


def _query_execution(rows: DataFrame) -> Any:
    frame: Any = rows
    return frame._jdf.queryExecution()


def data_frame(spark: SparkSession, dataset: Any) -> DataFrame:
    """Return a Scala Dataset as a DataFrame."""
    return DataFrame(dataset, spark)


def delta_log(table: DeltaTable) -> Any:
    """Return Delta's ``DeltaLog`` object of a table."""
    return table._jdt.deltaLog()


def newest_snapshot(table: DeltaTable) -> Any:
    """Return Delta's snapshot of the table's newest version; no Spark job reads the history."""
    log = delta_log(table)
    defaults = [getattr(log, f"update$default${position}")() for position in (1, 2, 3)]
    return log.update(*defaults)


def tombstone_retention_milliseconds(spark: SparkSession, snapshot: Any) -> int:
    """Return how many milliseconds a vacuum keeps the files that a commit has removed."""
    log = jvm(spark).org.apache.spark.sql.delta.DeltaLog
    return int(log.tombstoneRetentionMillis(snapshot.metadata()))
