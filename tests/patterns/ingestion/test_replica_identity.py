"""Change Data Capture: a table whose unchanged values would come as NULL is refused before a record is read."""

from __future__ import annotations

import pytest

from python_jobs.ingestion.replica_identity import require_replica_identities
from python_jobs.shared.core.failures import NotReady, WrongUse
from python_jobs.shared.postgres.snapshots import PostgresAccess

pytestmark = pytest.mark.postgres


@pytest.fixture
def access(database, monkeypatch):
    monkeypatch.setenv("REPLICA_IDENTITY_PASSWORD", database.password)
    return PostgresAccess(database.jdbc_url, database.user, password_env="REPLICA_IDENTITY_PASSWORD")


def test_arrays_whose_placeholder_is_null_need_a_full_replica_identity(spark, database, access):
    database.execute(
        "create table plain (id int primary key, note text, tags int[], days date[], members uuid[], words varchar[])",
        "create table stamped (id int primary key, stamps timestamptz[], note text, amounts numeric(5,2)[])",
    )
    require_replica_identities(spark, access, ["shop.public.plain"])
    refused = (
        r"unchanged values of stamps timestamp with time zone\[\], amounts numeric\(5,2\)\[\] in public\.stamped "
        "come as NULL: run `alter table public.stamped replica identity full`"
    )
    with pytest.raises(WrongUse, match=refused):
        require_replica_identities(spark, access, ["shop.public.plain", "shop.public.stamped"])
    database.execute("alter table stamped replica identity full")
    require_replica_identities(spark, access, ["shop.public.plain", "shop.public.stamped"])


def test_partitions_and_domains_are_looked_into(spark, database, access):
    """PostgreSQL logs a partition's rows by the partition's own identity; a domain's array is an array."""
    database.execute(
        "create domain stamp as timestamptz",
        "create domain stamps as stamp[]",
        "create domain few_stamps as stamps",
        "create table visited (id int primary key, seen few_stamps)",
        "create table daily (id int, day date, seen timestamptz[], primary key (id, day)) partition by range (day)",
        "create table daily_2026 partition of daily for values from ('2026-01-01') to ('2027-01-01') "
        "partition by range (day)",
        "create table daily_2026_01 partition of daily_2026 for values from ('2026-01-01') to ('2026-02-01')",
        "alter table daily replica identity full",
        "alter table daily_2026 replica identity full",
    )
    for table, column in (("visited", "seen few_stamps"), ("daily", r"seen timestamp with time zone\[\]")):
        with pytest.raises(WrongUse, match=f"unchanged values of {column} in public.{table} come as NULL"):
            require_replica_identities(spark, access, [f"shop.public.{table}"])
    database.execute(
        "alter table visited replica identity full", "alter table daily_2026_01 replica identity full"
    )
    require_replica_identities(spark, access, ["shop.public.visited", "shop.public.daily"])


def test_a_topic_without_its_table_is_not_ready(spark, access):
    with pytest.raises(
        NotReady, match=r"has no table public\.users, which the topic shop.public.users is named after"
    ):
        require_replica_identities(spark, access, ["shop.public.users"])
