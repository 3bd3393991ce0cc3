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

# The rows of a partitioned table are logged with the identities of its leaf partitions, which don't inherit its own.
# A domain has the values of the type that it is made of.
_COLUMNS = f"""(
    with recursive made_of as (
        select oid as type, oid as base from pg_type where typtype <> 'd'
        union all
        select types.oid, made_of.base
        from pg_type as types
        join made_of on made_of.type = types.typbasetype
        where types.typtype = 'd'
    ),

    arrays as (
        select made_of.type, names.typname as element
        from made_of
        join pg_type as bases on bases.oid = made_of.base and bases.typcategory = 'A'
        join made_of as elements on elements.type = bases.typelem
        join pg_type as names on names.oid = elements.base
    )

    select
        namespaces.nspname || '.' || tables.relname as table_name,
        not exists (
            select
            from pg_partition_tree(tables.oid) as partitions
            join pg_class as leaves on leaves.oid = partitions.relid
            where partitions.isleaf and leaves.relreplident <> 'f'
        ) and (tables.relkind = 'p' or tables.relreplident = 'f') as is_full,
        string_agg(
            columns.attname || ' ' || format_type(columns.atttypid, columns.atttypmod), ', ' order by columns.attnum
        ) filter (where arrays.element not in ({_RECOGNISED})) as unrecognised
    from pg_class as tables
    join pg_namespace as namespaces on namespaces.oid = tables.relnamespace
    join pg_attribute as columns
        on columns.attrelid = tables.oid and columns.attnum > 0 and not columns.attisdropped
    left join arrays on arrays.type = columns.atttypid
    where tables.relkind in ('r', 'p')
    group by tables.oid, tables.relname, tables.relkind, tables.relreplident, namespaces.nspname
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
        if not found[table]["is_full"] and found[table]["unrecognised"]:
            raise WrongUse(
                f"unchanged values of {found[table]['unrecognised']} in {table} come as NULL: run `alter table {table} "
                "replica identity full` in PostgreSQL (of a partitioned table: for each partition), then start again"
            )
