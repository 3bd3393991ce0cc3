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


def test_a_topic_without_its_table_is_not_ready(spark, access):
    with pytest.raises(
        NotReady, match=r"has no table public\.users, which the topic shop.public.users is named after"
    ):
        require_replica_identities(spark, access, ["shop.public.users"])
