"""Appends two rows to the Delta table at argv[1]: the process that the killer's own test ends."""

import sys

from pyspark.sql import SparkSession

spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
    .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
    .config("spark.databricks.delta.snapshotPartitions", 1)
    .getOrCreate()
)
spark.range(2).coalesce(1).write.format("delta").mode("append").save(sys.argv[1])
