"""Records that a stream can't take: a text that is no UTF-8, and an order that is no integer."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from python_jobs.data_value import (
    bin_pack_orderer,
    dynamic_joiner,
    incremental_sessionizer,
    stateful_sessionizer,
)
from python_jobs.data_value.bulk_sinks import Output
from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.records.event_times import not_utf8, order_of
from tests.support.rows import assert_rows

ANY_BYTES = "struct<string_hash: binary, name: string>"
WHOLE = "named_struct('string_hash', x'ff', 'name', 'n')"
BROKEN = "named_struct('string_hash', x'ff', 'name', cast(x'ff' as string))"


def test_only_texts_must_be_utf8_and_those_within_a_value_too(spark: SparkSession) -> None:
    """Headers of Kafka and hashes hold any bytes, beside texts and below names such as `string_hash`."""
    types = {
        "name": "string",
        "list": f"array<{ANY_BYTES}>",
        "map": "map<string, array<string>>",
        "bytes": "binary",
        "a.b": ANY_BYTES,
    }
    whole = dict(
        zip(types, ["'n'", f"array({WHOLE})", "map('k', array('v', null))", "x'ff'", WHOLE], strict=True)
    )
    broken = {
        "name": "cast(x'ff' as string)",
        "list": f"array({WHOLE}, {BROKEN})",
        "map": "map('k', array('v', cast(x'c3' as string)))",
        "a.b": BROKEN,
    }
    rows = [whole, dict.fromkeys(types, "null"), *(whole | {name: value} for name, value in broken.items())]
    selected = " union all ".join(
        f"select {number} as number, "
        + ", ".join(f"cast({value} as {types[name]}) as `{name}`" for name, value in row.items())
        for number, row in enumerate(rows)
    )
    records = spark.sql(selected)
    condition, _, message = not_utf8(records, {name: f"the {name}" for name in types})
    found = records.select("number", F.when(condition, message))
    sentence = "the record has bytes that aren't UTF-8 in the {}"
    assert_rows(
        found, [(0, None), (1, None), *((n, sentence.format(name)) for n, name in enumerate(broken, 2))]
    )


INTEGERS = ["tinyint", "smallint", "int", "bigint", "decimal(18,0)"]
OTHERS = ["string", "timestamp", "double", "decimal(10,2)", "decimal(20,0)", "boolean"]


def test_events_of_one_time_are_ordered_by_integers_alone(spark: SparkSession) -> None:
    """A cast would end a query at the text 'a', and make one event of two that are half a second apart."""
    rows = spark.sql(
        "select " + ", ".join(f"cast(null as {type_}) as `{type_}`" for type_ in INTEGERS + OTHERS)
    )
    assert [type_ for _, type_ in rows.select(order_of(rows, INTEGERS)).dtypes] == ["bigint"] * 5
    for type_ in OTHERS:
        with pytest.raises(WrongUse, match=r"ties must be integer columns, '.*' is a .*: give a column with"):
            order_of(rows, ["int", type_])


def test_each_job_with_ties_refuses_others_than_integers(spark: SparkSession) -> None:
    rows = spark.sql("select 'v' as id, timestamp'2024-03-01 10:00:00' as at, 'a' as seen")
    sessions = stateful_sessionizer.Parameters(
        source="s", key={"id": "id"}, event_time="at", ties=["Seen"], value="id", target="t", dead_letter="d",
        checkpoint="c",
    )  # fmt: skip
    orderer = bin_pack_orderer.Parameters(
        source="s", key="id", event_time="at", ties=["seen"], fields={"id": "id"}, dead_letter="d",
        outputs=[Output("a", "http", "http://localhost/bulk")], checkpoint="c",
    )  # fmt: skip
    joiner = dynamic_joiner.Parameters(
        left="l", right="r", target="t", late="a", dead_letter="d", checkpoint="c", variant="as_of",
        left_key={"id": "id"}, right_key={"id": "id"}, left_time="at", right_time="at", left_columns={"id": "id"},
        right_columns={"other": "id"}, left_id=["id"], right_ties=["seen"],
    )  # fmt: skip
    for attempt in (
        lambda: sessions.judged(rows),
        lambda: orderer.deliverable(orderer.judged(rows)),
        lambda: dynamic_joiner.joined(rows, rows, joiner),
    ):
        with pytest.raises(WrongUse, match=r"ties must be integer columns, '[sS]een' is a string"):
            attempt()


@pytest.mark.parametrize("type_", ["double", "float", "struct<a: double>", "array<float>"])
def test_a_key_without_a_stable_text_is_refused_before_the_query(spark: SparkSession, type_: str) -> None:
    rows = spark.sql(
        f"select cast(null as {type_}) as amount, timestamp'2024-03-01 10:00:00' as at, struct(1 as double) as double"
    )
    sessions = {
        name: stateful_sessionizer.Parameters(
            source="s",
            key={"id": name},
            event_time="at",
            value="at",
            target="t",
            dead_letter="d",
            checkpoint="c",
        )
        for name in ("amount", "double")
    }
    joiners = {
        name: dynamic_joiner.Parameters(
            left="l", right="r", target="t", late="a", dead_letter="d", checkpoint="c", left_key={"id": "at"},
            right_key={"id": "at"}, left_time="at", right_time="at", left_columns={"id": name},
            right_columns={"other": "at"}, left_id=["id"], right_id=["other"], max_after="1 minute",
        )
        for name in ("amount", "double")
    }  # fmt: skip
    sessions["double"].judged(rows)
    dynamic_joiner.joined(rows, rows, joiners["double"])
    for attempt in (
        lambda: sessions["amount"].judged(rows),
        lambda: dynamic_joiner.joined(rows, rows, joiners["amount"]),
    ):
        with pytest.raises(WrongUse, match=r"'id' is a .*: a key takes no float, double or map"):
            attempt()


def test_the_job_of_sessions_by_run_refuses_them_before_it_reads(spark: SparkSession, tmp_path: Path) -> None:
    source = str(tmp_path / "source")
    spark.sql("select 'v' as id, timestamp'2024-03-01 10:00:00' as at, 'a' as seen").write.format(
        "delta"
    ).save(source)
    params = incremental_sessionizer.Parameters(
        source=source, partition="true", key={"id": "id"}, event_time="at", value="id", ties=["seen"],
        run="2024-03-01T10", first_run="2024-03-01T10", pending="p", target="t", dead_letter="d",
    )  # fmt: skip
    with pytest.raises(WrongUse, match="ties must be integer columns, 'seen' is a string"):
        incremental_sessionizer.Run(spark, params).judged()
