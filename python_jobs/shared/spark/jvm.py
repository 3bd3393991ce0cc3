"""Access to the JVM behind PySpark: the only module that uses PySpark's private attributes.

Spark Connect doesn't have these attributes, so jobs need a classic session.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from delta.tables import DeltaTable
from pyspark.errors import PySparkException
from pyspark.errors.exceptions.captured import convert_exception
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.failures import WrongUse, java_exception

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


def engine_errors(failure: Exception) -> Iterator[PySparkException]:
    """Yield an error that Spark raised, then its causes, each as PySpark's class; nothing for an error of Python's."""
    java = java_exception(failure)
    while java is not None:
        yield convert_exception(java)
        java = java.getCause()


def java_array(spark: SparkSession, kind: Any, *items: Any) -> Any:
    """Return a Java array with ``items``; ``kind`` is the Java class of its elements."""
    gateway: Any = spark.sparkContext._gateway
    array = gateway.new_array(kind, len(items))
    for position, item in enumerate(items):
        array[position] = item
    return array


@dataclass(frozen=True)
class Getter:
    """A method without arguments of a Java class."""

    of: str
    """Name of the class."""
    name: str
    """Name of the method."""
    returns: str
    """Class that the method returns, or ``boolean`` or ``long``."""


def text_reader(spark: SparkSession, first: Getter, *others: Getter) -> Callable[[Any], list[str]]:
    """Return a function that calls the getters, each on the result of the one before, on each object of a Java list.

    The function returns the results as texts in a few calls to the JVM, however long the list is.
    """
    java = jvm(spark).java
    handles, texts = java.lang.invoke.MethodHandles, java.lang.Class.forName("java.lang.String")

    def class_of(name: str) -> Any:
        primitives = {"boolean": java.lang.Boolean, "long": java.lang.Long}
        return primitives[name].TYPE if name in primitives else java.lang.Class.forName(name)

    def handle(getter: Getter) -> Any:
        kind = java.lang.invoke.MethodType.methodType(class_of(getter.returns))
        return handles.publicLookup().findVirtual(class_of(getter.of), getter.name, kind)

    read = handle(first)
    for getter in others:
        read = handles.filterReturnValue(read, handle(getter))
    returns = (others or [first])[-1].returns
    if returns != "java.lang.String":
        kind = java.lang.invoke.MethodType.methodType(texts, class_of(returns))
        read = handles.filterReturnValue(read, handles.publicLookup().findStatic(texts, "valueOf", kind))
    operator = java.lang.Class.forName("java.util.function.UnaryOperator")
    read = java.lang.invoke.MethodHandleProxies.asInterfaceInstance(operator, read)

    def texts_of(objects: Any) -> list[str]:
        # py4j would send the objects one by one; one text with all of them is one message.
        found = java.util.ArrayList(objects)
        found.replaceAll(read)
        return java.lang.String.join("\0", found).split("\0") if found.size() else []

    return texts_of


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
