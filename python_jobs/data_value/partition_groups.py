"""Groups within one partition: the Local Aggregator's code that runs in each task, without a look at other partitions.

Times are microseconds since 1970: Python would read timestamps in a time zone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

KEY, PARTITION, AT, OFFSET, VALUE = "__key", "__partition", "__at", "__offset", "__value"
RECORDS = "__records"


def groups(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the records of each key in order of time, then of offset; the rows may come in any order."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        record = {"at": row[AT], "offset": row[OFFSET], "value": row[VALUE]}
        found.setdefault((row[KEY], row[PARTITION]), []).append(record)
    for (key, partition), records in found.items():
        records.sort(key=lambda record: (record["at"], record["offset"]))
        yield {KEY: key, PARTITION: partition, RECORDS: records}
