"""A text is one JSON object or none, by the same rule in macros and in jobs."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.records.json_records import json_object, load_schema
from tests.support.render import MacroRenderer

SCHEMA = "a string, b struct<c: string>"
ONE = {
    '{"a": "1"}': ("1", None),
    ' {"a": "1", "b": {"c": "2"}} \r': ("1", "2"),
    "{}": (None, None),
    '{"a": null, "b": 7, "d": [[1], {}]}': (None, None),
    '{"a": "} x"}': ("} x", None),
}
NONE = (
    '{"a": "1"} {"a": "2"}', '{"a": "1"}{"a": "2"}', '{"a": "1"},{"a": "2"}', '{"a": "1"},"b": 2', '{"a": "1"} more',
    '{"a": "1"}]', '{"a": "1"}}', '{"a": "1"}],[1,2', '{"a": "1"}] more', '{"a": "1"} # more', '[{"a": "1"}]', '"a"',
    "1", "null", "", " ", '{"a": "1"', "{'a': '1'}", '{"a": NaN}', '\ufeff{"a": "1"}', "text",
)  # fmt: skip


def test_macros_and_jobs_take_the_same_texts_for_one_object(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    texts = spark.createDataFrame([(text,) for text in (*ONE, *NONE)], "text string")
    latin = spark.sql("select cast(unhex(hex('{\"a\": \"caf') || 'E9' || hex('\"}')) as string) as text")
    macro = F.expr(render("_json_value", text="text", type="struct<a: string, b: struct<c: string>>"))
    both = F.struct(macro.alias("macro"), json_object(F.col("text"), load_schema(SCHEMA)).alias("job"))
    rows = texts.union(latin).select(both.alias("read")).select("read.*").collect()
    found = [[record and (record.a, record.b and record.b.c) for record in row] for row in rows]
    assert found == [[wanted, wanted] for wanted in (*ONE.values(), *([None] * (len(NONE) + 1)))]
