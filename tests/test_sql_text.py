"""Names and values in the SQL that jobs put together, whatever quotes are in them."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.ingestion.compactor import Parameters
from python_jobs.ingestion.compactor import run as compact
from python_jobs.ingestion.incremental_table_loader import in_window
from python_jobs.shared.core.intervals import Interval
from python_jobs.shared.delta.commits import write_once
from python_jobs.shared.delta.compaction import partition_predicate
from python_jobs.shared.delta.keyed_tables import DeltaSink
from python_jobs.shared.delta.overwrite import overwrite
from python_jobs.shared.delta.tables import read_table, read_version, table_location
from python_jobs.shared.records.json_records import load_schema, parse_records
from python_jobs.shared.records.partition_values import partition_condition
from python_jobs.shared.spark.sql_text import (
    identifier,
    named_column,
    properties_list,
    string_literal,
    table_name,
    timestamp_literal,
)
from tests.support.rows import assert_rows

PROPERTIES = {"o": "it's"}
ODD_NAMES = ["a`b", "it's", "Order Id", "select", "a.b", '"quoted"', "back\\slash"]


@pytest.mark.parametrize("text", [*ODD_NAMES, "", "' or true or '", "\\", "\\'", "line\nbreak", "ü 🦆"])
def test_a_text_is_itself_as_a_literal(spark: SparkSession, text: str) -> None:
    assert spark.sql(f"select {string_literal(text)}").collect()[0][0] == text


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_column_is_found_by_its_whole_name(spark: SparkSession, name: str) -> None:
    ddl = f"{identifier(name)} int, s struct<{identifier(name)}: int>"
    rows = spark.createDataFrame([(1, (2,))], ddl)
    assert_rows(rows.select(named_column(name), named_column(name, of="s").alias("inner")), [(1, 2)])
    assert_rows(rows.where(f"{identifier(name)} = 1").selectExpr(f"s.{identifier(name)}"), [(2,)])


def test_a_time_is_the_same_in_any_zone(spark: SparkSession) -> None:
    moment = dt.datetime(2024, 3, 1, 12, 30, 0, 123456, tzinfo=dt.timezone(dt.timedelta(hours=2)))
    micros = spark.sql(f"select unix_micros({timestamp_literal(moment)})").collect()[0][0]
    assert micros == 1709289000123456


def test_a_table_whose_path_and_columns_hold_quotes_goes_through_every_writer(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Partitions, keys, values, conditions and the path itself have backticks and quotes in them."""
    table = str(tmp_path / "it's a `table`")
    columns = "`k``ey` string, `d'ay` string, `n` int"

    def rows(*values: tuple[str, str, int]) -> DataFrame:
        return spark.createDataFrame(list(values), columns)

    write_once(spark, rows(("a`", "1'", 1), ("b", "2", 2)), table, partition_columns=["d'ay"])
    assert table_location(spark, table).endswith("it's a `table`")
    assert_rows(read_version(spark, table, 0), [("a`", "1'", 1), ("b", "2", 2)])
    changed = rows(("c", "1'", 3))
    overwrite(spark, changed, table, partition_condition(changed, {"d'ay": "1'"}))
    assert_rows(read_table(spark, table), [("c", "1'", 3), ("b", "2", 2)])
    write_once(spark, rows(("d", "1'", 4)), table, partition_columns=["d'ay"])
    assert_rows(read_table(spark, table), [("c", "1'", 3), ("d", "1'", 4), ("b", "2", 2)])
    spark.sql(f"alter table {table_name(table)} set tblproperties {properties_list(PROPERTIES)}")
    assert spark.sql(f"show tblproperties {table_name(table)} ('o')").collect()[0].value == "it's"

    chosen = read_table(spark, table).select("d'ay").distinct().collect()
    predicate = partition_predicate(chosen, {"d'ay": "string"})
    assert read_table(spark, table).where(predicate).count() == 3
    report = compact(spark, Parameters(table=table, min_small_files=2, vacuum=False))
    assert report["partitions_compacted"] == 1
    assert_rows(read_table(spark, table), [("c", "1'", 3), ("d", "1'", 4), ("b", "2", 2)])


def test_a_keyed_sink_takes_keys_with_hyphens_and_quotes(spark: SparkSession, tmp_path: Path) -> None:
    """Delta's `updateAll` and `insertAll` refuse a name with a backtick, and its table builder such a path."""
    table = str(tmp_path / "it's a table")
    columns = "`Or-der` string, `d'ay` string, `n` int"
    sink = DeltaSink(spark, table, spark.createDataFrame([], columns), ["Or-der", "d'ay"])
    sink.write(spark.createDataFrame([("c", "1'", 4), ("d", "1'", 5)], columns), 0)
    sink.write(spark.createDataFrame([("d", "1'", 6)], columns), 1)
    assert_rows(read_table(spark, table), [("c", "1'", 4), ("d", "1'", 6)])


def test_a_window_and_a_record_whose_columns_hold_backticks(spark: SparkSession) -> None:
    rows = spark.sql("select timestamp'2024-03-01 10:00:00+00:00' as `a``t`")
    assert in_window(rows, "a`t", Interval.parse("2024-03-01T10", "2024-03-01T11")).count() == 1
    assert in_window(rows, "a`t", Interval.parse("2024-03-01T11", "2024-03-01T12")).count() == 0
    records = spark.createDataFrame([('{"id": "v1"}', "x")], "`pay``load` string, `fi``le` string")
    parsed = parse_records(records, load_schema("id string"), "pay`load")
    assert_rows(parsed.select("id", named_column("fi`le"), F.col("error_class")), [("v1", "x", None)])
