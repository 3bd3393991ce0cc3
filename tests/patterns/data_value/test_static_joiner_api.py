"""Static Joiner with an HTTP API: visits get the place of their IP from a real server."""

from __future__ import annotations

import datetime as dt
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from python_jobs.data_value import static_joiner_api as job
from python_jobs.data_value.static_joiner_api import Parameters
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.delta.commits import latest_version
from tests.support.geo_api import GeoApi, running_geo_api
from tests.support.rows import assert_rows
from tests.support.snippets import snippet

HERE = "tests/patterns/data_value/test_static_joiner_api.py"
SCHEMA = "visit int, ip string, day int"


@pytest.fixture(scope="module")
def server() -> Iterator[GeoApi]:
    with running_geo_api() as running:
        yield running


class Batch:
    """A source, a cache and a target."""

    def __init__(self, spark: SparkSession, folder: Path, server: GeoApi) -> None:
        self.spark, self.folder, self.server = spark, folder, server

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def append(self, rows: list[Any], schema: str = SCHEMA, table: str = "source") -> None:
        self.spark.createDataFrame(rows, schema).write.format("delta").mode("append").save(self.path(table))

    def parameters(self, **changes: Any) -> Parameters:
        given = {name: self.path(name) for name in ("source", "cache", "target")}
        api = {
            "key": "ip",
            "column": "geo",
            "url": self.server.url,
            "keys_parameter": "ips",
            "wait_seconds": 0,
        }
        return Parameters(**(given | api | {"now": "2024-03-01T00:00:00Z"} | changes))

    def run(self, **changes: Any) -> dict[str, Any]:
        return job.run(self.spark, self.parameters(**changes))

    def rows(self, table: str = "target") -> list[Any]:
        return self.spark.read.format("delta").load(self.path(table)).collect()

    def versions(self) -> tuple[int, int]:
        cache, target = (latest_version(self.spark, self.path(name)) for name in ("cache", "target"))
        return cache, target


def test_rows_get_the_apis_value_and_no_key_is_asked_for_twice(
    spark: SparkSession, tmp_path: Path, server: GeoApi
) -> None:
    batch = Batch(spark, tmp_path, server)
    ips = [f"192.0.2.{number}" for number in range(40)]
    places = {ip: f"place {ip}" for ip in ips[1:]}  # the API leaves the first one out
    server.reset(places)
    with pytest.raises(NotReady, match=r"there is no Delta table '.*source'"):
        batch.run()
    visits = [(row, ips[row % 40], 1) for row in range(250)] + [(250, None, 1), (251, "", 1)]
    batch.append(visits)
    first = batch.run(buffer=30)
    expected = [(visit, ip, day, places.get(ip or "")) for visit, ip, day in visits]
    assert_rows(batch.rows(), expected)
    assert server.asked_once == sorted(ips)
    assert [len(some) for some in server.asked] == [30, 10]
    assert {name: first[name] for name in ("rows", "new_keys", "without_value", "requests")} == {
        "rows": 252, "new_keys": 40, "without_value": 1, "requests": 2,
    }  # fmt: skip
    cached = {(row.lookup_key, row.value) for row in batch.rows("cache")}
    assert cached == {(ip, places.get(ip)) for ip in ips}
    assert batch.rows("cache")[0].looked_up_at == dt.datetime(2024, 3, 1)  # noqa: DTZ001 - as Spark hands it back

    # Again, and with an API that says something else by now: no request, the same rows.
    server.reset(dict.fromkeys(ips, "moved"))
    assert batch.run()["requests"] == 0
    assert server.asked == []
    assert_rows(batch.rows(), expected)

    # A slice replaces itself alone, and asks for its new keys.
    batch.append([(300, "192.0.2.1", 2), (301, "2001:db8::1", 2)])
    server.reset({"2001:db8::1": {"city": "Köln", "lat": 1.10}})
    for _ in range(2):
        batch.run(where="day = 2")
    assert server.asked == [["2001:db8::1"]]
    second = [
        (300, "192.0.2.1", 2, "place 192.0.2.1"),
        (301, "2001:db8::1", 2, '{"city": "Köln", "lat": 1.1}'),
    ]
    assert_rows(batch.rows(), [*expected, *second])

    # The API fails in the second request: the target stays, the first answer is kept and not asked for again.
    versions = batch.versions()
    batch.append([(400, "a", 3), (401, "b", 3)])
    server.reset({"a": "A", "b": "B"})
    server.failures = [b'{"mapped": {"a": "A", "b": "B"}}', *[500] * 4]
    with pytest.raises(JobFailed, match=r"gave no answer for 1 keys \(status 500\)"):
        batch.run(where="day = 3", buffer=1, attempts=4)
    assert len(server.asked) == 5
    assert batch.versions() == (versions[0] + 1, versions[1])
    known = server.asked[0]
    server.reset({"a": "A", "b": "B"})
    batch.run(where="day = 3")
    assert server.asked == [[ip for ip in ("a", "b") if ip not in known]]
    assert_rows([row for row in batch.rows() if row.day == 3], [(400, "a", 3, "A"), (401, "b", 3, "B")])


def test_wrong_use_and_keys_that_cannot_be_asked_for_are_refused(
    spark: SparkSession, tmp_path: Path, server: GeoApi
) -> None:
    batch = Batch(spark, tmp_path, server)
    server.reset({})
    batch.append([(1, "a,b", 1)])
    for changes, sentence in (
        ({"key": "IPS"}, "the source has no column 'IPS'; it has visit, ip, day"),
        ({"column": "DAY"}, "the source has columns that this job writes itself: day"),
        ({"where": "hour = 1"}, "where can't be used .*UNRESOLVED_COLUMN"),
        ({"attempts": 0}, "attempts must be 1 or more, got 0"),
        ({"buffer": 0}, "buffer must be 1 or more, got 0"),
        ({"cache": batch.path("target")}, "source, target and cache must be three tables"),
    ):
        with pytest.raises(WrongUse, match=sentence):
            batch.run(**changes)
    with pytest.raises(DataRefused, match="the key 'a,b' can't be looked up"):
        batch.run()
    broken = spark.sql(
        "select 1 as visit, cast(x'FE' as string) as ip, 2 as day union all select 2, cast(x'FF' as string), 2"
    )
    broken.write.format("delta").mode("append").save(batch.path("source"))
    with pytest.raises(
        DataRefused, match=r"a key can't be looked up, because it isn't UTF-8 \(its bytes are F[EF]\)"
    ):
        batch.run(where="day = 2")
    batch.append([(1, 0.5)], "visit int, ip double", "other")
    with pytest.raises(WrongUse, match="the key must be a text or an integer, 'ip' is a double"):
        batch.run(source=batch.path("other"))
    assert server.asked == []


def test_command_of_the_page() -> None:
    command = snippet("docs/data_value.md", f"{HERE}::test_command_of_the_page").replace("\\\n", "")
    parameters, _ = parse_parameters(Parameters, shlex.split(command.split("static_joiner_api.py ")[1]))
    assert (parameters.key, parameters.column, parameters.buffer) == ("ip", "geo", 100)
