"""Local Aggregator on tables: a bucketed copy of a Delta table, whose groups and joins by its key need no shuffle.

Problem: the same tables are joined or grouped by one key every day, and each query shuffles them again.

The job writes the rows of ``--source`` into a Parquet table with ``--buckets`` buckets by ``--key``, sorted by it, one
file a bucket. ``--view`` is a view of the newest copy. Spark then groups by the key, or by the key and more columns,
without an Exchange, and joins two such tables with equal ``--buckets`` without one. Delta tables can't be bucketed.

What must hold: the tables have one number of buckets and one type of the key. So the job refuses to replace a copy of
another number or key; ``--reorganise true`` allows it: all rows are written again, by the new number.

The copies and the view have a table property that names the view. Only relations with it are counted, replaced or
dropped; a view or a table of another owner in the view's place is refused, and one that is named like a copy stays.

Guarantee: readers see the former copy or the new one: a run writes a table of its own and then moves the view. A run
that dies leaves the view as it is. Another run starts again, and a second run without changes gives the same rows. The
copy before the newest one is kept for readers that are still on it; older ones are dropped. Rows with NULL in the key
are in the copy, too: NULL is one group. Not guaranteed: rows that come after the run. Not for two runs at once.

Cost: a shuffle and a sort of the whole table for each run. It pays off when several queries use the copy.

    spark-submit python_jobs/data_value/bucketed_table.py --source silver.visits --view fast.visits \\
        --key '[visit_id]' --buckets 200

Source: Data Engineering Design Patterns, chapter 5, Local Aggregator; the guide's ``pat-join-bucketed``.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from python_jobs.shared.core.failures import WrongUse, require_at_least
from python_jobs.shared.core.paths import is_path
from python_jobs.shared.delta.streams import empty_source
from python_jobs.shared.delta.tables import read_table
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.owned_relations import is_own, quoted_relation, replace_view, require_own
from python_jobs.shared.spark.sql_text import identifier, named_columns, properties_list

_COPY = re.compile(r"_copy_(\d+)")
_OWNER = "lakehouse_patterns.bucketed_table.view"


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Write a bucketed copy of a Delta table, and move its view to the copy."""

    source: str
    """Delta table (name or path)."""
    view: str
    """Name of the view, schema.name; the copies are tables schema.name_copy_1 and so on beside it."""
    key: list[str]
    """Columns of the buckets and of the order within a bucket."""
    buckets: int
    """Agreed number of buckets: the same for all tables that are joined."""
    reorganise: bool = False
    """Whether a copy of another number of buckets or another key may be replaced."""

    def __post_init__(self) -> None:
        require_at_least(1, buckets=self.buckets)
        if is_path(self.view) or self.view.count(".") != 1:
            raise WrongUse(f"view must be a name with its schema, schema.name, got '{self.view}'")
        if not self.key:
            raise WrongUse("key is empty; it takes one column or more")


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Write the copy and move the view; report the copy and its buckets.

    Raises:
        NotReady: there is no source.
        WrongUse: the key names no column, the view is another owner's, or the copy there has another number of buckets
            or another key.
    """
    columns = empty_source(spark, params.source, ()).columns
    unknown = [name for name in params.key if name not in columns]
    if unknown:
        raise WrongUse(
            f"key names no column of the source: {', '.join(unknown)}; it has {', '.join(columns)}"
        )
    require_own(spark, params.view, _OWNER, params.view)
    copies, others = copies_of(spark, params.view), _numbers(spark, params.view)
    if copies:
        _require_agreed(spark, params, name_of(params.view, copies[-1]))
    number = max(others, default=0) + 1
    # Spark writes no table where a killed run left files; such files have no table that says whose they are.
    while not _is_written(read_table(spark, params.source), name_of(params.view, number), params):
        number += 1
    table = name_of(params.view, number)
    replace_view(spark, params.view, _OWNER, params.view, f"select * from {quoted_relation(table)}")
    for former in copies[:-1]:
        spark.sql(f"drop table {quoted_relation(name_of(params.view, former))}")
    return {"view": params.view, "copy": table, "buckets": params.buckets}


def copies_of(spark: SparkSession, view: str) -> list[int]:
    """Return the numbers of the copies, the newest last; one that a run left without moving the view is among them."""
    return [number for number in _numbers(spark, view) if is_own(spark, name_of(view, number), _OWNER, view)]


def name_of(view: str, number: int) -> str:
    """Return the name of a copy."""
    return f"{view}_copy_{number}"


def bucketing(spark: SparkSession, table: str) -> tuple[int, list[str]]:
    """Return the number of buckets and the key of a bucketed table."""
    described = spark.sql(f"describe extended {quoted_relation(table)}").collect()
    details = {row["col_name"]: row["data_type"] for row in described}
    names = re.findall(r"`((?:[^`]|``)+)`", details["Bucket Columns"])
    return int(details["Num Buckets"]), [name.replace("``", "`") for name in names]


def _is_written(rows: DataFrame, table: str, params: Parameters) -> bool:
    """Write a copy; return False if its place has files, and write nothing then."""
    # Each task would write a file for each of its buckets; so each bucket is one task.
    rows = rows.repartition(params.buckets, *named_columns(params.key))
    key, own = ", ".join(map(identifier, params.key)), properties_list({_OWNER: params.view})
    given = f"bucketed_{uuid.uuid4().hex}"
    rows.createOrReplaceTempView(given)
    try:
        # One statement: a copy without its property would stay for good.
        rows.sparkSession.sql(
            f"create table {quoted_relation(table)} using parquet clustered by ({key}) sorted by ({key}) into "
            f"{params.buckets} buckets tblproperties {own} as select * from {given}"
        )
    except PySparkException as failure:
        if failure.getCondition() != "LOCATION_ALREADY_EXISTS":
            raise
        return False
    finally:
        rows.sparkSession.catalog.dropTempView(given)
    return True


def _numbers(spark: SparkSession, view: str) -> list[int]:
    """Return the numbers of all relations that are named like a copy, in ascending order."""
    schema, name = view.split(".")
    tables = spark.sql(f"show tables in {identifier(schema)}").where("not isTemporary").collect()
    found = (
        _COPY.fullmatch(row["tableName"].removeprefix(name.lower()))
        for row in tables
        if row["tableName"].startswith(name.lower())
    )
    return sorted(int(match[1]) for match in found if match)


def _require_agreed(spark: SparkSession, params: Parameters, copy: str) -> None:
    buckets, key = bucketing(spark, copy)
    if not params.reorganise and (buckets, key) != (params.buckets, params.key):
        raise WrongUse(
            f"the copy '{copy}' has {buckets} buckets by {', '.join(key)}, and {params.buckets} by "
            f"{', '.join(params.key)} are asked for: joins with other tables of {buckets} buckets would shuffle; write "
            "all rows by the new number with --reorganise true"
        )


if __name__ == "__main__":
    run_job(Parameters, run)
