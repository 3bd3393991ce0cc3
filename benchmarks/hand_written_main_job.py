"""The main job as one hand-written PySpark script: what somebody would write who needs these tables once.

It reads everything, rewrites every table and keeps no promise beyond that: no rerun, no increment, no correction, no
audit. The baseline of benchmarks/main_job.py.

    spark-submit benchmarks/hand_written_main_job.py LANDING LAKEHOUSE
"""

from __future__ import annotations

import sys

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

VISIT = (
    "visit_id string, event_time string, user_id string, keep_private boolean, page string, context struct<"
    "referral: string, ad_id: string, user: struct<ip: string, login: string, connected_since: string>, "
    "technical: struct<browser: string, browser_version: string, network_type: string, device_type: string, "
    "device_version: string>>, _corrupt string"
)
USER = (
    "op string, sequence bigint, changed_at string, id string, login string, email string, "
    "registered_datetime string, first_connection_datetime string, last_connection_datetime string, plan string, "
    "is_deleted boolean, updated_at string"
)
DEVICE = "type string, full_name string, version string, is_deleted boolean"


def write(rows: DataFrame, path: str, *partitions: str) -> DataFrame:
    """Write a Delta table and return what a reader of it gets."""
    rows.write.format("delta").mode("overwrite").partitionBy(*partitions).save(path)
    return rows.sparkSession.read.format("delta").load(path)


def bronze(spark: SparkSession, landing: str, lakehouse: str, feed: str, *partitions: str) -> DataFrame:
    """Write the lines of one feed with where they came from."""
    lines = spark.read.option("lineSep", "\n").text(f"{landing}/{feed}")
    hour = F.col("hour") if "hour" in partitions else F.lit(0)
    return write(
        lines.select(
            F.col("value").alias("payload"),
            F.col("_metadata.file_path").alias("file_path"),
            F.col("_metadata.file_modification_time").alias("file_modified_at"),
            F.col("_metadata.file_size").alias("file_size"),
            (F.date_format("date", "yyyyMMdd").cast("bigint") * 100_000 + hour * 1_000).alias("load_id"),
            F.current_timestamp().alias("ingested_at"),
            *partitions,
        ),
        f"{lakehouse}/bronze/bronze_{feed}",
        *partitions,
    )


def visits(spark: SparkSession, landing: str, lakehouse: str) -> DataFrame:
    """Write the silver tables of visits; return the kept ones."""
    lines = bronze(spark, landing, lakehouse, "visits", "date", "hour")
    options = {"columnNameOfCorruptRecord": "_corrupt"}
    parsed = (
        lines.withColumn("visit", F.from_json("payload", VISIT, options))
        .select("visit.*", F.sha2("payload", 256).alias("payload_hash"), *lines.columns)
        .withColumn("event_time", F.try_to_timestamp("event_time"))
        .withColumn("event_date", F.col("event_time").cast("date"))
        # from_json hands an object to a string field as its text; here that is a value of the wrong type.
        .withColumn("page", F.when(~F.col("page").startswith("{"), F.col("page")))
    )
    unparsable = F.col("visit_id").isNull() & F.col("event_time").isNull() & F.col("page").isNull()
    unparsable = unparsable & F.col("context").isNull() & F.col("_corrupt").isNotNull()
    write(parsed.where(unparsable).select(*lines.columns), f"{lakehouse}/silver/silver_visits_dead_letter")
    typed = write(
        parsed.where(~unparsable).drop("_corrupt"), f"{lakehouse}/silver/silver_visits_parsed", "event_date"
    )
    reason = (
        F.when(F.col("visit_id").isNull(), "visit_id_missing")
        .when(F.col("event_time").isNull(), "event_time_missing")
        .when(F.col("user_id").isNull(), "user_id_missing")
        .when(F.col("page").isNull(), "page_missing")
        .when(F.col("context").isNull(), "context_missing")
        .when(F.col("page").startswith("healthcheck"), "monitoring_probe")
    )
    flagged = typed.withColumn("reason", reason)
    write(flagged.where("reason is not null"), f"{lakehouse}/silver/silver_visits_quarantine", "date")
    newest = Window.partitionBy("visit_id", "event_time").orderBy(F.desc("load_id"), F.desc("payload_hash"))
    decorated = F.struct(
        F.col("context.user.connected_since").isNotNull().alias("is_connected"),
        F.concat_ws("-", "page", "context.referral").alias("page_referral_key"),
    )
    kept = (
        flagged.where("reason is null")
        .withColumn("rank", F.row_number().over(newest))
        .where("rank = 1")
        .select(
            "visit_id", "event_time", "event_date", "user_id", "keep_private", "page", "context", "load_id",
            "payload_hash", decorated.alias("decorated"),
        )
    )  # fmt: skip
    counts = flagged.groupBy(F.coalesce("event_date", "date").alias("accounted_date"), "reason").count()
    write(counts, f"{lakehouse}/observability/observability_visits_accounting")
    return write(kept, f"{lakehouse}/silver/silver_visits", "event_date")


def gold(kept: DataFrame, lakehouse: str) -> None:
    """Write the gold tables made of visits."""
    hour = F.date_trunc("hour", "event_time").alias("event_hour")
    distinct = (F.count_distinct("visit_id").alias("visits"), F.count_distinct("user_id").alias("users"))
    events = F.count("*").alias("events")
    views = kept.groupBy("event_date", hour, "page").agg(F.count("*").alias("views"))
    write(views, f"{lakehouse}/gold/gold_page_views_by_hour", "event_date")
    referral = F.coalesce("context.referral", F.lit("direct")).alias("referral")
    by_referral = kept.groupBy("event_date", referral).agg(events, *distinct)
    write(by_referral, f"{lakehouse}/gold/gold_referral_statistics_by_day", "event_date")
    hourly = kept.groupBy("event_date", hour).agg(F.count_distinct("user_id").alias("users"))
    hourly = hourly.groupBy("event_date").agg(F.avg("users").alias("users_per_hour"))
    daily = kept.groupBy("event_date").agg(events, *distinct).join(hourly, "event_date")
    write(daily, f"{lakehouse}/gold/gold_visit_statistics", "event_date")


def reference_tables(spark: SparkSession, landing: str, lakehouse: str) -> None:
    """Write users, their history, the newest extract and the devices."""
    changes = bronze(spark, landing, lakehouse, "user_changes", "date", "hour")
    changes = changes.select(F.from_json("payload", USER).alias("change"), "ingested_at").select(
        "change.*", "ingested_at"
    )
    changes = (
        changes.withColumn("changed_at", F.try_to_timestamp("changed_at"))
        .where("id is not null and op is not null and sequence is not null and changed_at is not null")
        .withColumn("is_deleted", F.expr("op = 'D' or coalesce(is_deleted, false)"))
        .dropDuplicates(["id", "sequence"])
    )
    by_user = Window.partitionBy("id").orderBy("changed_at", "sequence")
    newest = Window.partitionBy("id").orderBy(F.desc("sequence"))
    current = changes.withColumn("rank", F.row_number().over(newest)).where("rank = 1").drop("rank")
    write(current, f"{lakehouse}/silver/silver_users")
    history = (
        changes.withColumn("effective_to", F.lead("changed_at").over(by_user))
        .where("not is_deleted")
        .withColumnRenamed("changed_at", "effective_from")
    )
    write(history, f"{lakehouse}/gold/gold_users_history")
    extract = bronze(spark, landing, lakehouse, "users", "date")
    extract = extract.select(F.from_json("payload", USER).alias("user"), "date").select("user.*", "date")
    write(extract.where("id is not null"), f"{lakehouse}/snapshots/snapshot_users")
    devices = bronze(spark, landing, lakehouse, "devices", "date")
    devices = devices.select(F.from_json("payload", DEVICE).alias("device"), "load_id").select(
        "device.*", "load_id"
    )
    newest = Window.partitionBy("type", "version").orderBy(F.desc("load_id"))
    devices = devices.where("type is not null and version is not null").withColumn(
        "rank", F.row_number().over(newest)
    )
    write(devices.where("rank = 1 and not is_deleted").drop("rank"), f"{lakehouse}/silver/silver_devices")


if __name__ == "__main__":
    session = SparkSession.builder.appName("hand-written main job").getOrCreate()
    gold(visits(session, sys.argv[1], sys.argv[2]), sys.argv[2])
    reference_tables(session, sys.argv[1], sys.argv[2])
