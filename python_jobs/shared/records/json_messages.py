"""Rows as JSON messages whose values are exactly those of the rows."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from python_jobs.shared.records.event_times import not_utf8
from python_jobs.shared.spark.job import RECORD_REFUSED
from python_jobs.shared.spark.sql_text import named_columns
from python_jobs.shared.spark.times import EXACT_JSON


def json_message(rows: DataFrame, names: Sequence[str]) -> Column:
    """Return columns as the JSON text of one object; a text that isn't UTF-8 ends the query.

    JSON would have one character for all its bytes, so that values that differ were equal.
    """
    condition, _, message = not_utf8(rows, {name: name for name in names})
    way_out = (
        ", which a JSON text can't hold: leave such rows out (is_valid_utf8), or give the column as binary"
    )
    refusal = F.concat(F.lit(RECORD_REFUSED), message, F.lit(way_out))
    whole = F.to_json(F.struct(*named_columns(names)), EXACT_JSON)
    return F.when(condition, F.raise_error(refusal)).otherwise(whole)
