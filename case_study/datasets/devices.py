"""Devices: daily increments with one line for each device and day in no order, and each day's full list."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from case_study.datasets.drawing import pick, roll
from case_study.datasets.json_lines import (
    json_any_text,
    json_object,
    json_text,
    key_field,
    with_extra_lines,
    with_payload,
)
from case_study.datasets.parameters import Parameters

DEVICE_TYPES = {
    "galaxy": 'Galaxy S "3" mini',
    "iphone": "APPLE iPhone 12 Pro Max (Graphite, 128 GB)",
    "ipad": "iPad Air",
    "mac": "MacBook Pro – 16″",
    "lenovo": 'ThinkPad X1 Carbon Gen 10 (14" Intel)',
    "pixel": "Pixel 8 Größe XL",
}
DEVICE_VERSIONS = ("v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8")
DEVICE_COUNT = len(DEVICE_TYPES) * len(DEVICE_VERSIONS)


def of_device(number: Column, values: Sequence[str]) -> Column:
    """Return the value of the device with this number; ``values`` has one value for each type."""
    return pick(values, F.floor(number / len(DEVICE_VERSIONS)))


def device_version(number: Column) -> Column:
    """Return the version of the device with this number."""
    return pick(DEVICE_VERSIONS, F.pmod(number, F.lit(len(DEVICE_VERSIONS))))


def device_changes(spark: SparkSession, params: Parameters) -> DataFrame:
    """Return the daily increments, one row for each (day, device) that is reported.

    The increments have first reports, new names, deletions, returns after a deletion, and deletions of devices that
    were never reported.
    """
    days = spark.range(params.days).select(F.col("id").cast("int").alias("day"))
    devices = spark.range(0, DEVICE_COUNT, 1, 1).withColumnRenamed("id", "device")
    first_day = F.when(
        F.pmod("device", F.lit(6)) == 5, 1 + roll(params, "first day", max(1, params.days - 1), "device")
    ).otherwise(0)
    is_first = F.col("day") == first_day
    is_reported = is_first | ((F.col("day") > first_day) & (roll(params, "report", 4, "device", "day") == 0))
    never_was = is_first & (F.pmod("device", F.lit(16)) == 7)
    is_removed = ~is_first & (roll(params, "removal", 3, "device", "day") == 0)
    name = of_device(F.col("device"), tuple(DEVICE_TYPES.values()))
    return (
        devices.crossJoin(F.broadcast(days))
        .where(is_reported)
        .select(
            "day",
            "device",
            of_device(F.col("device"), tuple(DEVICE_TYPES)).alias("type"),
            F.when(is_first, name).otherwise(F.concat(name, F.lit(" rev. "), "day")).alias("full_name"),
            device_version(F.col("device")).alias("version"),
            (never_was | is_removed).alias("is_deleted"),
        )
    )


def devices_by_day(changes: DataFrame, params: Parameters) -> DataFrame:
    """Return the devices that exist at the end of each day, one row for each (day, device)."""
    days = changes.sparkSession.range(params.days).select(F.col("id").cast("int").alias("end_of_day"))
    latest = F.max_by(F.struct("type", "full_name", "version", "is_deleted"), "day").alias("latest")
    return (
        changes.join(F.broadcast(days), F.col("day") <= F.col("end_of_day"))
        .groupBy(F.col("end_of_day").alias("day"), "device")
        .agg(latest)
        .select("day", "device", "latest.*")
        .where("not is_deleted")
    )


def device_list_lines(devices: DataFrame) -> DataFrame:
    """Return the lines of the daily full lists. They have no faults, because one fault would refuse the whole list."""
    return devices.select(
        json_object(
            type=json_text(F.col("type")),
            full_name=json_any_text(F.col("full_name")),
            version=json_text(F.col("version")),
        ).alias("payload"),
        F.lit("row").alias("line"),
        "device",
        F.lit(0).alias("file"),
        F.col("day").alias("partition"),
    )


def device_lines(changes: DataFrame, params: Parameters) -> DataFrame:
    """Return the lines of the daily increments."""
    lines = with_extra_lines(changes, params, "devices", ("unparsable", "null_key"), "device", "day")
    json_line = json_object(
        type=json_text(F.col("type")),
        full_name=json_any_text(F.col("full_name")),
        version=key_field(F.col("version")),
        is_deleted=F.col("is_deleted").cast("string"),
    )
    return with_payload(lines, params, json_line, F.col("line") == "unparsable", "device", "day").withColumns(
        {"file": F.lit(0), "partition": F.col("day")}
    )
