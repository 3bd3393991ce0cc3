"""A text is a timestamp or none, by the same rule in macros and in jobs."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import TimestampType

from python_jobs.shared.core import intervals
from python_jobs.shared.records.values import exact_value
from python_jobs.shared.spark.times import full_timestamp
from tests.support.session import setting

TEN = 1_709_287_200_000_000  # 2024-03-01 10:00 in UTC, in microseconds
TEXTS = {
    # The offset, which may be absent.
    "2024-03-01T10:00:00Z": TEN, "2024-03-01 10:00:00": TEN, "2024-03-01T10:00": TEN, "2024-03-01T10:00Z": TEN,
    "2024-03-01T11:00:00+01:00": TEN, "2024-03-01T11:00+0100": TEN, "2024-03-01 09:00:00-01": TEN,
    "2024-03-01 10:00:00 Z": TEN, "2024-03-01 15:30:00 +05:30": TEN, "2024-03-02T04:00:00+18:00": TEN,
    "2024-03-01T10:00:00+19:00": None, "2024-03-01T11:00:00+1": None, "2024-03-01T10:00:00z": None,
    "2024-03-01 05:00:00 America/New_York": None, "2024-03-01 10:00:00 UTC": None,
    # Parts of a time.
    "2024-03-01": None, "2024-03": None, "10:00:00": None, "T10:00": None, "2024-03-01T10": None,
    "20240301T100000Z": None, "1709287200": None, "2024-3-1 10:00:00": None, "2024-03-01 9:00:00": None,
    "2024-061T10:00:00": None, "now": None,
    # Digits of the second.
    "2024-03-01T10:00:00.5Z": TEN + 500_000, "2024-03-01T10:00:00.123456": TEN + 123_456,
    "2024-03-01T10:00:00.123456000Z": TEN + 123_456, "2024-03-01T10:00:00.1234567Z": None,
    "2024-03-01T10:00:00.Z": None, "2024-03-01T10:00:00,5Z": None,
    # The calendar and the clock.
    "2024-02-29T00:00:00Z": TEN - 122_400_000_000, "2023-02-29T00:00:00Z": None, "2024-13-01T00:00:00Z": None,
    "2024-02-29T24:00:00Z": None, "2024-02-29T23:59:60Z": None, "2016-12-31T23:59:60Z": None,
    "0001-01-01T00:00:00Z": -62_135_596_800_000_000, "9999-12-31T23:59:59.999999Z": 253_402_300_799_999_999,
    "0000-01-01T00:00:00Z": None, "10000-01-01T00:00:00Z": None, "+10000-01-01T00:00:00Z": None,
    "-0044-03-15T12:00:00Z": None,
    # The years in UTC.
    "0001-01-01T00:00+05": None, "0001-01-01T04:59:59.999999+05": None, "0001-01-01T05:00+05": -62_135_596_800_000_000,
    "0001-01-01T00:00:00+00:00": -62_135_596_800_000_000, "0001-01-01T00:00-05": -62_135_578_800_000_000,
    "9999-12-31T23:59:59-05": None, "9999-12-31T19:00:00-05": None, "9999-12-31T18:59:59-05": 253_402_300_799_000_000,
    # An hour that New York doesn't have, and one that it has twice.
    "2024-03-10 02:30:00": 1_710_037_800_000_000, "2024-11-03 01:30:00": 1_730_597_400_000_000,
    # Blanks.
    " 2024-03-01T10:00:00Z": None, "2024-03-01T10:00:00Z ": None, "2024-03-01T10:00:00\n": None,
    "2024-03-01T10:00:00Z\n": None, "2024-03-01  10:00:00": None, "2024-03-01\t10:00:00": None, " ": None, "": None,
    "soon": None, None: None,
}  # fmt: skip


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kolkata"])
def test_macros_and_jobs_take_the_same_texts_for_timestamps(
    spark: SparkSession, ansi_modes: str, zone: str
) -> None:
    rows = spark.createDataFrame([(text,) for text in TEXTS], "text string")
    job = exact_value(F.col("text"), TimestampType())
    with setting(spark, "spark.sql.session.timeZone", zone):
        found = rows.select("text", F.unix_micros(full_timestamp("text")), F.unix_micros(job)).collect()
    assert [tuple(row) for row in found] == [(text, wanted, wanted) for text, wanted in TEXTS.items()]


def test_programs_without_spark_take_the_same_texts_for_timestamps() -> None:
    found = {text: intervals.full_timestamp(text) for text in TEXTS if text is not None}
    micros = {text: None if moment is None else intervals.to_micros(moment) for text, moment in found.items()}
    assert micros == {text: wanted for text, wanted in TEXTS.items() if text is not None}
