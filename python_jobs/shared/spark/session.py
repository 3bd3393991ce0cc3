"""The Spark session of a job: settings come from conf/spark-defaults.conf and spark-submit; only UTC is set here."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.spark.jvm import refuse_connect_settings, require_classic

# These loggers print each exception as JSON, even if the caller handles it; Python shows an unhandled one anyway.
_LOGGERS_OF_EXCEPTIONS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")


def spark_session(app_name: str) -> SparkSession:
    """Return the session that spark-submit started, or start one from SPARK_CONF_DIR.

    Raises:
        WrongUse: the session is one of Spark Connect, or Delta Lake is not configured. Without this check a missing
            Delta Lake would fail only at the first write.
    """
    refuse_connect_settings()
    for name in _LOGGERS_OF_EXCEPTIONS:
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    spark = SparkSession.builder.appName(app_name).getOrCreate()
    require_classic(spark)
    if "DeltaSparkSessionExtension" not in (spark.conf.get("spark.sql.extensions", "") or ""):
        raise WrongUse(
            "Spark started without Delta Lake: run `source .venv/bin/activate` first, "
            "or pass the settings of conf/spark-defaults.conf to spark-submit"
        )
    use_utc(spark)
    return spark


def use_utc(spark: SparkSession) -> None:
    """Make UTC the zone of the session, of this process and of Spark's Python workers.

    Spark reads a text without offset, and the date of a timestamp, in the session's zone. A timestamp that is
    collected, or that a Python function gets, is a time without offset in Python's own zone. The zones are set, not
    compared, because spark-submit hands no setting on to all these places. The JVM's own zone decides nothing then:
    PostgreSQL's times without offset are read as timestamp_ntz.
    """
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    os.environ["TZ"] = "UTC"
    time.tzset()
    spark.sparkContext.environment["TZ"] = "UTC"


@contextmanager
def settings(spark: SparkSession, values: Mapping[str, str]) -> Iterator[None]:
    """Set session settings for the block and restore the former values at its end."""
    before = {name: spark.conf.get(name, None) for name in values}
    try:
        for name, value in values.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)
