"""JSON lines that are built from fragments, with or without faults.

Spark's to_json can't write a wrong type, or a null in one line and an absent field in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from case_study.datasets.drawing import happens, roll
from case_study.datasets.parameters import Parameters

ABSENT = "cast(null as string)"
NULL = "'null'"


def json_object(**fragments: Column) -> Column:
    """Return a JSON object of the fragments in their order; no fragment may be NULL."""
    # One flat concat, because nested calls would copy the text at each level.
    opening = ["{", *[", "] * (len(fragments) - 1)]
    members = (
        (F.lit(f'{before}"{name}": '), fragment)
        for before, (name, fragment) in zip(opening, fragments.items(), strict=True)
    )
    return F.concat(*(part for member in members for part in member), F.lit("}"))


def json_object_of_some(**fragments: Column) -> Column:
    """Return a JSON object of the fragments that are not NULL."""
    members = (F.concat(F.lit(f'"{name}": '), fragment) for name, fragment in fragments.items())
    return F.concat(F.lit("{"), F.concat_ws(", ", *members), F.lit("}"))


def or_null(fragment: Column) -> Column:
    """Return the fragment, or JSON's null if it is NULL."""
    return F.coalesce(fragment, F.lit("null"))


def json_text(text: Column) -> Column:
    """Return a JSON string of a text that needs no escapes."""
    return F.concat(F.lit('"'), text, F.lit('"'))


def json_any_text(text: Column) -> Column:
    """Return a JSON string of a text with quotes, backslashes, tabs or line ends."""
    for character, escape in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t")):
        text = F.replace(text, F.lit(character), F.lit(escape))
    return json_text(text)


def json_time(milliseconds: Column) -> Column:
    """Return an ISO 8601 time in the session's zone (UTC) from epoch milliseconds."""
    return json_text(F.date_format(F.timestamp_millis(milliseconds), "yyyy-MM-dd'T'HH:mm:ss.SSSxxx"))


# SQL expressions over `json`, the line without fault. No reader accepts their results as JSON, because a strict prefix
# of a JSON object is never JSON.
DAMAGES = (
    "'{........'",
    "'ERROR 502 upstream closed the connection'",
    "left(json, cast(length(json) / 2 as int))",
    "left(json, length(json) - 1)",
)


def with_payload(
    lines: DataFrame, params: Parameters, json_line: Column, unparsable: Column, *key: str
) -> DataFrame:
    """Add ``payload``: the line's JSON, which is damaged if ``unparsable`` is true."""
    kind = roll(params, "damage", len(DAMAGES), *key)
    damaged = reduce(
        lambda other, number: F.when(kind == number, F.expr(DAMAGES[number])).otherwise(other),
        range(1, len(DAMAGES)),
        F.expr(DAMAGES[0]),
    )
    return lines.withColumn("json", json_line).withColumn(
        "payload", F.when(unparsable, damaged).otherwise(F.col("json"))
    )


def with_extra_lines(
    rows: DataFrame, params: Parameters, feed: str, imperfections: Sequence[str], *key: str
) -> DataFrame:
    """Add ``line``: 'row' for each row, and a further line with the name of each imperfection of the row.

    In the feeds of users and devices the faults are in additional lines, so that no row is lost.
    """
    extra = [F.when(happens(params, feed, name, *key), F.lit(name)) for name in imperfections]
    return rows.withColumn("line", F.explode(F.array_compact(F.array(F.lit("row"), *extra))))


def key_field(value: Column) -> Column:
    """Return the fragment of a key field; it is null in a line without key."""
    return or_null(json_text(F.when(F.col("line") != "null_key", value)))
