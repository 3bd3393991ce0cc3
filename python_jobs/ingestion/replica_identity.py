"""Replica identities of captured tables: find tables whose unchanged values Debezium sends as NULL.

If an update doesn't change a large value, PostgreSQL leaves the value out of its log. Debezium then sends a
placeholder, which the macros recognise. Arrays of some types (timestamps, booleans, floats, numerics) can't hold a
placeholder, so Debezium sends NULL. With REPLICA IDENTITY FULL the log has the old row, and Debezium takes the value
from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import SparkSession

from python_jobs.shared.core.failures import NotReady, WrongUse
from python_jobs.shared.postgres.snapshots import PostgresAccess, one_snapshot

# Element types of arrays whose placeholder Debezium 3.6 writes as text, as its bytes, or as a UUID.
_RECOGNISED = "'text', 'varchar', 'bpchar', 'int2', 'int4', 'int8', 'date', 'uuid'"

_COLUMNS = f"""(
    select
        namespaces.nspname || '.' || tables.relname as table_name,
        tables.relreplident::text as identity,
        string_agg(
            columns.attname || ' ' || format_type(columns.atttypid, columns.atttypmod), ', ' order by columns.attnum
        ) filter (where types.typcategory = 'A' and elements.typname not in ({_RECOGNISED})) as unrecognised
    from pg_class as tables
    join pg_namespace as namespaces on namespaces.oid = tables.relnamespace
    join pg_attribute as columns
        on columns.attrelid = tables.oid and columns.attnum > 0 and not columns.attisdropped
    join pg_type as types on types.oid = columns.atttypid
    left join pg_type as elements on elements.oid = types.typelem
    where tables.relkind in ('r', 'p')
    group by 1, 2
) as captured"""


def require_replica_identities(spark: SparkSession, access: PostgresAccess, topics: Sequence[str]) -> None:
    """Refuse tables whose unchanged values can't be told from NULL.

    Args:
        spark: session of the job.
        access: access to the database that Debezium captures.
        topics: names of Debezium's topics, ``<prefix>.<schema>.<table>``.

    Raises:
        NotReady: the database has no such table.
        WrongUse: a table without REPLICA IDENTITY FULL has arrays whose unchanged values come as NULL.
    """
    with one_snapshot(spark, access) as snapshot:
        found = {row["table_name"]: row for row in snapshot.read(_COLUMNS).collect()}
    for topic in topics:
        table = ".".join(topic.split(".")[-2:])
        if table not in found:
            raise NotReady(f"{access.place} has no table {table}, which the topic {topic} is named after")
        if found[table]["identity"] != "f" and found[table]["unrecognised"]:
            raise WrongUse(
                f"unchanged values of {found[table]['unrecognised']} in {table} come as NULL: run `alter table {table} "
                "replica identity full` in PostgreSQL, then start again"
            )
