"""Texts as times in jobs: the rule of macros/shared/times.sql, rendered from there."""

from __future__ import annotations

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.spark.macro_sql import Macros


def full_timestamp(text: str) -> Column:
    """Return the timestamp that a text (a SQL expression) names with date and time; NULL for any other text.

    A text without offset is one of UTC, whatever the session's zone.
    """
    return F.expr(str(Macros(SparkSession.active(), ["shared/times.sql"]).call("_full_timestamp", text)))
