"""Groups within one partition: the Local Aggregator's code that runs in each task, without a look at other partitions.

It works on Arrow's columns, never row by row: a Python object for each record would cost more than the shuffle saves.
Times are microseconds since 1970: Python would read timestamps in a time zone.
"""

from __future__ import annotations

import pyarrow as pa  # type: ignore[import-untyped]

KEY, PARTITION, AT, OFFSET, VALUE = "__key", "__partition", "__at", "__offset", "__value"
RECORDS = "__records"


def groups(rows: pa.Table) -> pa.Table:
    """Return each key with the list of its records in order of time, then of offset; the rows may come in any order."""
    order = [(name, "ascending") for name in (KEY, PARTITION, AT, OFFSET)]
    listed = [(name, "list") for name in (AT, OFFSET, VALUE)]
    # Several threads would mix the order of the records.
    found = (
        rows.sort_by(order).group_by([KEY, PARTITION], use_threads=False).aggregate(listed).combine_chunks()
    )
    at, offset, value = (_joined(found[f"{name}_list"]) for name in (AT, OFFSET, VALUE))
    records = pa.StructArray.from_arrays(
        [at.flatten(), offset.flatten(), value.flatten()], ["at", "offset", "value"]
    )
    return pa.table(
        {KEY: found[KEY], PARTITION: found[PARTITION], RECORDS: pa.ListArray.from_arrays(at.offsets, records)}
    )


def with_columns(rows: pa.Table, columns: pa.Schema) -> pa.Table:
    """Return the rows with these columns; one that they don't have is NULL."""
    for column in columns:
        if column.name not in rows.column_names:
            rows = rows.append_column(column, pa.nulls(rows.num_rows, column.type))
    return rows.select(columns.names).cast(columns)


def _joined(lists: pa.ChunkedArray) -> pa.ListArray:
    """Return the lists of all chunks as one array."""
    return pa.concat_arrays(lists.chunks) if lists.num_chunks else pa.array([], lists.type)
