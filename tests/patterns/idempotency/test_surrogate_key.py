"""Keyed Idempotency: keys that tell apart what differs, and are the same in both forms, sessions and versions."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from dbt_common.exceptions import DbtRuntimeError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.delta.keys import content_hash, session_key, surrogate_key
from tests.support.render import MacroRenderer
from tests.support.session import setting
from tests.support.snippets import snippets

PAGE = "docs/idempotency.md"
HERE = "tests/patterns/idempotency/test_surrogate_key.py"

# Keys are stored in users' tables for ever: this value may not change with a new version.
GOLDEN = "a540b364a1dbdb23ee3e46139359964598da841c042e58fa92b86d17cfb352a8"


def keys(spark: SparkSession, rows: str, column: Column | str) -> list[str]:
    expression = F.expr(column) if isinstance(column, str) else column
    return [row[0] for row in spark.sql(rows).select(expression).collect()]


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def of_json(value: dict[str, Any]) -> str:
    return sha(json.dumps(value, separators=(",", ":"), ensure_ascii=False))


def test_null_is_no_empty_text_and_a_separator_moves_nothing(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    rows = "select * from values ('a|b', 'c'), ('a', 'b|c'), ('', null), (null, ''), (null, null), ('\"', '') t(a, b)"
    found = keys(spark, rows, render("surrogate_key", columns=["a", "b"], nullable=["a", "b"]))
    assert found == [
        of_json({"1": first, "2": second})
        for first, second in [("a|b", "c"), ("a", "b|c"), ("", None), (None, ""), (None, None), ('"', "")]
    ]
    assert len(set(found)) == 6
    by_concatenation = keys(spark, rows, "md5(concat_ws('|', coalesce(a, ''), coalesce(b, '')))")
    assert len(set(by_concatenation)) < 6, "what the macro is there for"


def test_both_forms_give_the_same_values_and_these_for_ever(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    rows = (
        "select 7 as id, bigint(7) as wide, 'Ünï' as name, date'2024-02-29' as day, "
        "timestamp'2024-02-29 23:59:59.000001Z' as at, timestamp_ntz'2024-02-29 23:59:59.5' as local, "
        "decimal(1.50) as price, true as flag, array(1, null) as list, cast(null as string) as nothing"
    )
    expected = {
        ("id",): '{"1":7}',
        ("wide",): '{"1":7}',
        ("name", "day"): '{"1":"Ünï","2":"2024-02-29"}',
        ("at", "local"): '{"1":"2024-02-29 23:59:59.000001Z","2":"2024-02-29 23:59:59.500000"}',
        ("flag", "list"): '{"1":true,"2":[1,null]}',
        ("id", "nothing"): '{"1":7,"2":null}',
    }
    for columns, text in expected.items():
        nullable = [name for name in columns if name == "nothing"]
        by_macro = render("surrogate_key", columns=list(columns), nullable=nullable)
        assert keys(spark, rows, by_macro) == [sha(text)], text
        assert keys(spark, rows, surrogate_key(*columns, nullable=nullable)) == [sha(text)], text
    assert keys(spark, rows, surrogate_key("id")) == [GOLDEN]


def test_the_session_s_time_zone_changes_no_key(spark: SparkSession) -> None:
    rows = "select timestamp'2024-02-29 12:00:00Z' as at"
    with setting(spark, "spark.sql.session.timeZone", "America/New_York"):
        abroad = keys(spark, rows, surrogate_key("at"))
    assert abroad == keys(spark, rows, surrogate_key("at"))


def test_null_in_the_key_ends_the_query_or_gives_no_key(spark: SparkSession, render: MacroRenderer) -> None:
    rows = "select * from values (1, 'a'), (2, null) t(id, name)"
    with pytest.raises(PySparkException, match=r"a row has NULL in its key \(name\)"):
        keys(spark, rows, render("surrogate_key", columns=["id", "name"]))
    with pytest.raises(PySparkException, match=r"a row has NULL in its key \(name\)"):
        keys(spark, rows, surrogate_key("id", "name"))
    found = keys(spark, rows, render("surrogate_key", columns=["id", "name"], on_null_key="null"))
    assert found == [of_json({"1": 1, "2": "a"}), None]
    assert found == keys(spark, rows, surrogate_key("id", "name", on_null_key="null"))


@pytest.mark.parametrize(
    "value",
    ["cast(1 as float)", "1.5d", "map('a', 1)", "array(1.5d)", "named_struct('a', 1.5d, 'b', 1)",
     "named_struct('a', array(map('b', 1)))"],
)  # fmt: skip
def test_types_without_a_stable_text_are_refused(spark: SparkSession, value: str) -> None:
    with pytest.raises(PySparkException, match="a key takes no float, double or map"):
        keys(spark, f"select {value} as amount", surrogate_key("amount"))


def test_a_field_named_like_such_a_type_is_taken(spark: SparkSession) -> None:
    rows = "select named_struct('double_count', 1, 'float', 2, 'map', 3) as double"
    value = {"double_count": 1, "float": 2, "map": 3}
    assert keys(spark, rows, surrogate_key("double")) == [of_json({"1": value})]
    assert keys(spark, rows, content_hash("double")) == [of_json({"double": value})]


def test_bytes_that_are_no_utf8_make_keys_of_their_own(
    spark: SparkSession, render: MacroRenderer, ansi_modes: str
) -> None:
    """JSON has one character for each of them; the keys of all other values stay what they were."""
    texts = ["x'ff'", "x'fe'", "x'ffff'", "x'efbfbd'"]  # the last one is the character by which JSON replaces
    rows = "select * from values " + ", ".join(f"(cast({text} as string), {text})" for text in texts)
    rows = f"select col1 as name, col2 as bytes, struct(col1 as a, col2 as b) as pair from ({rows})"
    by_macro = render("surrogate_key", columns=["name"])
    found = keys(spark, rows, by_macro)
    assert len(set(found)) == 4
    assert found[3] == of_json({"1": "\ufffd"})
    assert found == keys(spark, rows, surrogate_key("name"))
    assert len(set(keys(spark, rows, content_hash("name", "bytes")))) == 4
    base64 = ["/w==", "/g==", "//8=", "77+9"]
    assert keys(spark, rows, surrogate_key("bytes")) == [of_json({"1": text}) for text in base64]
    whole, broken = (
        f"select * from ({rows}) where is_valid_utf8(name) = {is_whole}" for is_whole in ("true", "false")
    )
    assert keys(spark, whole, surrogate_key("pair")) == [of_json({"1": {"a": "\ufffd", "b": "77+9"}})]
    with pytest.raises(PySparkException, match="a key takes no list or struct with a text that is not UTF-8"):
        keys(spark, broken, surrogate_key("pair"))


def test_an_absent_column_is_refused_by_name(spark: SparkSession) -> None:
    with pytest.raises(AnalysisException, match="`visit`"):
        keys(spark, "select 1 as visit_id", surrogate_key("visit"))


def test_wrong_arguments_are_refused_in_both_forms(render: MacroRenderer, spark: SparkSession) -> None:
    for arguments, sentence in [
        ({"columns": []}, r"needs at least one column, got \[\]"),
        ({"columns": ["a", "a"]}, "takes each column once, got a, a"),
        ({"columns": ["a"], "nullable": ["b"]}, "nullable 'b' is no part of the key a"),
        ({"columns": ["a"], "on_null_key": "skip"}, "on_null_key must be one of fail, null, got 'skip'"),
    ]:
        with pytest.raises(DbtRuntimeError, match=sentence):
            render("surrogate_key", **arguments)
        given: dict[str, Any] = dict(arguments)
        with pytest.raises(WrongUse, match=sentence):
            surrogate_key(*given.pop("columns"), **given)
    with pytest.raises(DbtRuntimeError, match=r"first_append_key needs append_time, .*, got None"):
        render("first_append_key", group_by=["user_id"], append_time=None)


def test_a_content_hash_ignores_the_order_of_columns_and_what_is_left_out(
    spark: SparkSession, render: MacroRenderer
) -> None:
    one = "select 1 as a, 2 as b, timestamp'2024-01-01 00:00:00Z' as ingested_at"
    two = "select 2 as b, 1 as a, timestamp'2024-01-02 00:00:00Z' as ingested_at"
    expected = [of_json({"a": 1, "b": 2})]
    assert keys(spark, one, render("content_hash", columns=["a", "b"])) == expected
    assert keys(spark, two, render("content_hash", columns=["b", "a"])) == expected
    assert keys(spark, two, content_hash("b", "a")) == expected
    assert keys(spark, "select 1 as b, 2 as a", content_hash("a", "b")) != expected


APPENDED = """
    select * from values
        (1, timestamp'2024-01-01 10:09:00Z', timestamp'2024-01-01 09:59:00Z', 0, 5, 'second'),
        (1, timestamp'2024-01-01 10:08:00Z', timestamp'2024-01-01 09:58:00Z', 0, 4, 'first'),
        (2, timestamp'2024-01-01 10:08:00Z', timestamp'2024-01-01 09:58:00Z', 1, 4, 'another user')
        as visits(user_id, ingestion_time, visit_time, partition, offset, page)
"""
LATE = "select 1, timestamp'2024-01-01 10:30:00Z', timestamp'2024-01-01 09:55:00Z', 0, 6, 'late'"


def test_a_late_row_changes_the_key_by_event_time_and_not_that_by_append_time(
    spark: SparkSession, render: MacroRenderer
) -> None:
    """Stopped at 10:09 and restarted with a late row of 09:55: the session must keep its key."""
    query = snippets(
        PAGE, f"{HERE}::test_a_late_row_changes_the_key_by_event_time_and_not_that_by_append_time"
    )[0]

    def sessions(rows: str, append_time: str = "ingestion_time") -> dict[int, set[str]]:
        spark.sql(rows).createOrReplaceTempView("visits")
        call = "{{ lakehouse_patterns.first_append_key('user_id', 'ingestion_time') }}"
        assert call in query
        key = render("first_append_key", group_by="user_id", append_time=append_time)
        found: dict[int, set[str]] = {}
        for row in spark.sql(query.replace(call, key)).collect():
            found.setdefault(row.user_id, set()).add(row.session_id)
        return found

    before, after = sessions(APPENDED), sessions(f"{APPENDED} union all {LATE}")
    assert before == after
    assert [len(ids) for ids in before.values()] == [1, 1], "one key a session"
    assert before[1] != before[2], "two users, the same append second"
    by_event_time = sessions(APPENDED, "visit_time"), sessions(f"{APPENDED} union all {LATE}", "visit_time")
    assert by_event_time[0][1] != by_event_time[1][1]


def test_a_stream_that_knows_the_first_append_gives_the_same_key(
    spark: SparkSession, render: MacroRenderer
) -> None:
    by_macro = render(
        "first_append_key", group_by=["user_id"], append_time="ingestion_time", ties=["partition", "offset"]
    )
    first = "select 1 as user_id, timestamp'2024-01-01 10:08:00Z' as appended_at, 0 as partition, 4 as offset"
    by_stream = keys(spark, first, session_key(["user_id"], "appended_at", ["partition", "offset"]))
    assert set(keys(spark, f"{APPENDED} where user_id = 1", by_macro)) == set(by_stream)
    assert by_stream == [of_json({"1": 1, "2": {"1": "2024-01-01 10:08:00.000000Z", "2": 0, "3": 4}})]
