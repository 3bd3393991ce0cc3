"""The Spark session of a job: settings come from conf/spark-defaults.conf and spark-submit, never from code."""

from __future__ import annotations

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
