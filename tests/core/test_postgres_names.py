"""Names of PostgreSQL's tables and columns in SQL, without a server."""

from __future__ import annotations

import psycopg
import pytest

from python_jobs.shared.core.failures import JobFailed, WrongUse
from python_jobs.shared.postgres.clients import listed, reaching_postgres, require_table_name, table_name


@pytest.mark.parametrize("name", ["devices", "public.devices", "_a1.b2"])
def test_a_name_or_schema_and_name_are_taken(name: str) -> None:
    require_table_name(name)


@pytest.mark.parametrize("name", ["", "a.b.c", "a b", "a;drop", ".a", "a.", '"a"', "a\n"])
def test_another_text_is_refused(name: str) -> None:
    with pytest.raises(WrongUse) as refused:
        require_table_name(name)
    assert str(refused.value) == f"target must be a name or schema.name, got '{name}'"


def test_each_part_of_a_name_is_quoted() -> None:
    assert table_name("Public.Devices").as_string(None) == '"Public"."Devices"'
    assert listed(["a", 'b"c']).as_string(None) == '"a", "b""c"'
    assert listed(["a", "b"], "stored").as_string(None) == '"stored"."a", "stored"."b"'


@pytest.mark.parametrize("kind", [psycopg.OperationalError, psycopg.InterfaceError])
def test_a_server_that_is_away_is_one_sentence(kind: type[psycopg.Error]) -> None:
    with (
        pytest.raises(JobFailed, match=r"^PostgreSQL: the connection is closed; run again$"),
        reaching_postgres(),
    ):
        raise kind("the connection is closed\nsecond line")
    with pytest.raises(psycopg.DataError), reaching_postgres():
        raise psycopg.DataError("22001")
