"""Texts that aren't UTF-8, which Spark holds and Python doesn't: tests write them as a character of their own."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType

BROKEN = "\ue0ff"
"""Stands for the byte FF, which UTF-8 never has."""


def with_broken_texts(rows: DataFrame) -> DataFrame:
    """Return the rows with the byte FF in place of each ``BROKEN`` in their texts."""
    broken = F.expr("cast(x'FF' as string)")
    texts = [field.name for field in rows.schema if isinstance(field.dataType, StringType)]
    return rows.withColumns({name: F.replace(name, F.lit(BROKEN), broken) for name in texts})
