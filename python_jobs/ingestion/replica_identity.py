"""Replica identities of captured tables: which unchanged values Debezium can't tell from NULL.

PostgreSQL leaves a large value out of its log when an update doesn't change it. Debezium then sends a placeholder,
which the macros recognise, except in arrays of types that have no room for one (timestamps, booleans, floats,
numerics): there it sends NULL. REPLICA IDENTITY FULL puts the old row into the log, from which the value is taken.
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
    """Refuse tables whose unchanged values could be taken for NULL.

    Args:
        spark: the session.
        access: the database that Debezium captures.
        topics: Debezium's, ``<prefix>.<schema>.<table>``.

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
