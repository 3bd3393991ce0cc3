"""A text is one JSON object or none, by the same rule in macros and in jobs."""

from __future__ import annotations

from decimal import Decimal

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


AS_WRITTEN = {
    '{"a": 1.10, "b": {"c": -0.10}}': ("1.10", "-0.10"),
    '{"a": 12345678901234567890123456789.1234567890, "b": {"c": 123456789012345678901234567890}}': (
        "12345678901234567890123456789.1234567890",
        "123456789012345678901234567890",
    ),
    '{"a" :1e2,"b":{"c":1E+2}}': ("1e2", "1E+2"),
    '{"a": "1.10, \\"2.50", "b": {"c": 2.50}}': ('1.10, "2.50', "2.50"),
    '{"a": "\\\\", "x": [1.5, "y", [0.5]], "b": {"c": 1.0}}': ("\\", "1.0"),
    '{"a": true, "b": {"c": 7}}': ("true", "7"),
}
NO_NUMBERS = (
    '{"a": 01.5}', '{"a": 1.}', '{"a": .5}', '{"a": 1.5.5}', '{"a": 1.5x}', '{"a": +1.5}', '{"a": 1.5 2.5}',
    '{"a": "\ufdd0", "b": {"c": 1.5}}', '{"a": "\\uFDd0"}',
)  # fmt: skip


def test_a_number_in_a_string_field_keeps_its_digits_in_macros_and_in_jobs(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    texts = spark.createDataFrame([(text,) for text in (*AS_WRITTEN, *NO_NUMBERS)], "text string")
    macro = F.expr(render("_json_value", text="text", type="struct<a: string, b: struct<c: string>>"))
    both = F.struct(macro.alias("macro"), json_object(F.col("text"), load_schema(SCHEMA)).alias("job"))
    rows = texts.select(both.alias("read")).select("read.macro", "read.job").collect()
    of_macro = [record and (record.a, record.b and record.b.c) for record, _ in rows]
    assert of_macro == [*AS_WRITTEN.values(), *([None] * len(NO_NUMBERS))]
    assert [job is None for _, job in rows] == [wanted is None for wanted in of_macro]


def test_a_type_with_a_double_or_a_decimal_reads_numbers(spark: SparkSession, render: MacroRenderer) -> None:
    wanted = {
        "struct<a: double>": 1.5,
        "array<decimal(20, 2)>": None,
        "struct<`decimal`: string, a: DECIMAL(20,2)>": Decimal("1.50"),
        "struct<double: string, a: string>": "1.50",
    }
    for type_, value in wanted.items():
        sql = render("_json_value", text="'{\"a\": 1.50}'", type=type_)
        found = spark.sql(f"select {sql} as found").first().found
        assert (found and found["a"]) == value, type_


def test_marked_numbers_of_a_nested_text_are_as_they_were_written(
    spark: SparkSession, render: MacroRenderer
) -> None:
    texts = [
        '{"a": [1.10, {"b": 2.50, "c": "x"}]}',
        '{"a": 1.10}',
        '{"a": "1.10"}',
        '{"a": [1, 2]}',
        '{"a": null}',
    ]
    rows = spark.createDataFrame([(text,) for text in texts], "text string")
    marked = render("_json_value", text="text", type="struct<a: string>", fractions="marked")
    read = rows.select(F.expr(marked).alias("read")).select(
        F.expr(render("_as_written", text="read.a")).alias("a")
    )
    assert [row.a for row in read.collect()] == ['[1.10,{"b":2.50,"c":"x"}]', "1.10", "1.10", "[1,2]", None]


def test_a_long_text_with_fractions_is_read(spark: SparkSession, render: MacroRenderer) -> None:
    numbers = ", ".join(["1.50", '"a \\" b"', "7"] * 100_000)
    text = spark.createDataFrame([(f'{{"n": [{numbers}], "a": 0.10}}',)], "text string")
    read = text.select(F.expr(render("_json_value", text="text", type="struct<a: string>")).alias("read"))
    assert read.first().read.a == "0.10"
