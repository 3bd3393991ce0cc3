"""Groups within a partition: the Local Aggregator's code in each task."""

from __future__ import annotations

import pyarrow as pa  # type: ignore[import-untyped]

from python_jobs.data_value.partition_groups import (
    AT,
    KEY,
    OFFSET,
    PARTITION,
    RECORDS,
    VALUE,
    groups,
    with_columns,
)


def rows(*found: tuple[str, int, int, int, str | None]) -> pa.Table:
    types = {KEY: pa.string(), PARTITION: pa.int32(), AT: pa.int64(), OFFSET: pa.int64(), VALUE: pa.string()}
    columns = zip(*found, strict=True) if found else [[]] * len(types)
    return pa.table(
        {name: pa.array(column, type_) for (name, type_), column in zip(types.items(), columns, strict=True)}
    )


def test_an_empty_partition_has_no_group() -> None:
    assert groups(rows()).to_pylist() == []


def test_records_are_grouped_by_key_in_order_of_time_then_of_offset() -> None:
    found = groups(rows(("a", 0, 2, 0, "2"), ("b", 0, 1, 1, "b"), ("a", 0, 1, 3, None), ("a", 0, 1, 2, "1a")))
    a = [{"at": 1, "offset": 2, "value": "1a"}, {"at": 1, "offset": 3, "value": None}]
    assert found.to_pylist() == [
        {KEY: "a", PARTITION: 0, RECORDS: [*a, {"at": 2, "offset": 0, "value": "2"}]},
        {KEY: "b", PARTITION: 0, RECORDS: [{"at": 1, "offset": 1, "value": "b"}]},
    ]


def test_records_of_several_batches_are_one_group() -> None:
    batches = pa.concat_tables([rows(("a", 0, 2, 2, "y"), ("b", 0, 1, 3, "z")), rows(("a", 0, 1, 1, "x"))])
    found = groups(batches).to_pylist()
    assert [[record["value"] for record in group[RECORDS]] for group in found] == [["x", "y"], ["z"]]


def test_a_key_of_two_partitions_has_two_groups() -> None:
    found = groups(rows(("a", 0, 1, 1, "x"), ("a", 1, 1, 1, "y"))).to_pylist()
    assert [(group[PARTITION], len(group[RECORDS])) for group in found] == [(0, 1), (1, 1)]


def test_rows_get_the_columns_of_the_result_in_its_order() -> None:
    columns = pa.schema({"payload": pa.string(), AT: pa.int64(), KEY: pa.string()})
    found = with_columns(rows(("a", 0, 1, 1, "x")), columns)
    assert found.schema == columns
    assert found.to_pylist() == [{"payload": None, AT: 1, KEY: "a"}]
