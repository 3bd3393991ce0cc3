"""Groups within a partition: the Local Aggregator's code in each task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from python_jobs.data_value.partition_groups import AT, KEY, OFFSET, PARTITION, RECORDS, VALUE, groups


def rows(*found: tuple[str, int, int, int, str]) -> Iterator[dict[str, Any]]:
    for key, partition, at, offset, value in found:
        yield {KEY: key, PARTITION: partition, AT: at, OFFSET: offset, VALUE: value}


def test_an_empty_partition_has_no_group() -> None:
    assert list(groups(rows())) == []


def test_records_are_grouped_by_key_in_order_of_time_then_of_offset() -> None:
    found = groups(rows(("a", 0, 2, 0, "2"), ("b", 0, 1, 1, "b"), ("a", 0, 1, 3, "1b"), ("a", 0, 1, 2, "1a")))
    a = [{"at": 1, "offset": 2, "value": "1a"}, {"at": 1, "offset": 3, "value": "1b"}]
    assert list(found) == [
        {KEY: "a", PARTITION: 0, RECORDS: [*a, {"at": 2, "offset": 0, "value": "2"}]},
        {KEY: "b", PARTITION: 0, RECORDS: [{"at": 1, "offset": 1, "value": "b"}]},
    ]


def test_a_key_of_two_partitions_has_two_groups() -> None:
    found = groups(rows(("a", 0, 1, 1, "x"), ("a", 1, 1, 1, "y")))
    assert [(group[PARTITION], len(group[RECORDS])) for group in found] == [(0, 1), (1, 1)]
