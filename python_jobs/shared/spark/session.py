"""The Spark session of a job: settings come from conf/spark-defaults.conf and spark-submit, never from code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pyspark.sql import SparkSession


def spark_session(app_name: str) -> SparkSession:
    """Return the session that spark-submit started, or start one from SPARK_CONF_DIR.

    Raises:
        RuntimeError: Delta Lake is not configured, which would only show at the first write otherwise.
    """
    spark = SparkSession.builder.appName(app_name).getOrCreate()
    if "DeltaSparkSessionExtension" not in (spark.conf.get("spark.sql.extensions", "") or ""):
        raise RuntimeError(
            "Spark started without Delta Lake: run `source .venv/bin/activate` first, "
            "or pass the settings of conf/spark-defaults.conf to spark-submit."
        )
    return spark


@contextmanager
def settings(spark: SparkSession, values: Mapping[str, str]) -> Iterator[None]:
    """Set session settings for the block and put back what was there before."""
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
