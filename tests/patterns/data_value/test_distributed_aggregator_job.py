"""Distributed Aggregator as a job: JSON files joined with a PostgreSQL table, aggregated to the cube of a day."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from python_jobs.data_value import distributed_aggregator
from python_jobs.data_value.distributed_aggregator import Parameters, cube, joined, run
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse
from python_jobs.shared.delta.commits import latest_version
from python_jobs.shared.files.sources import source_files
from python_jobs.shared.postgres.snapshots import one_snapshot
from services.postgres import Database
from services.processes import free_port
from tests.support.failing_write import failing_at
from tests.support.rows import assert_rows
from tests.support.session import setting
from tests.support.snippets import snippet

THIS = "tests/patterns/data_value/test_distributed_aggregator_job.py::"
DAY_1, DAY_2 = "2024-01-01", "2024-01-02"
# Of day 1 a visit has no country, one a device that the table lacks, and one no usable duration.
VISITS: dict[str, list[tuple[str, str | None, float]]] = {
    DAY_1: [("a", "FR", 10.0), ("a", "FR", 20.0), ("b", "FR", 30.0), ("a", None, 60.0), ("b", "FR", -1.0),
            ("unknown", "FR", 1000.0)],
    DAY_2: [("b", "US", 90.0)],
}  # fmt: skip
CUBE_1 = [
    ("FR", "phone", 0, 2, 15.0), ("FR", "tablet", 0, 2, 30.0), (None, "phone", 0, 1, 60.0),
    ("FR", None, 1, 4, 20.0), (None, None, 1, 1, 60.0),
    (None, "phone", 2, 3, 30.0), (None, "tablet", 2, 2, 30.0),
    (None, None, 3, 5, 30.0),
]  # fmt: skip
NUMBERS = ["country", "kind", "grouping_id", "row_count", "duration_avg"]
ACCESS: dict[str, Any] = {
    "jdbc_url": "jdbc:postgresql://h:5432/d",
    "user": "reader",
    "password_env": "SHOP_PASSWORD",
}


@dataclass
class Visits:
    """Files of visits, a PostgreSQL table of devices and the cube of both."""

    spark: SparkSession
    folder: Path
    database: Database

    @property
    def target(self) -> str:
        return str(self.folder / "lakehouse" / "gold" / "visits_by_day")

    def land(self, date: str, visits: list[tuple[str, str | None, float]]) -> None:
        folder = self.folder / "landing" / "visits" / f"date={date}"
        folder.mkdir(parents=True, exist_ok=True)
        names = ("device", "country", "duration")
        lines = [json.dumps({"event_date": date, **dict(zip(names, visit, strict=True))}) for visit in visits]
        (folder / "visits.json").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def arguments(self, date: str) -> Parameters:
        """Return the parameters of the page's command for a date."""
        text = snippet("docs/data_value.md", f"{THIS}test_the_command_of_the_page_writes_the_cube_of_its_day")
        command = shlex.split(os.path.expandvars(text.replace("\\\n", " ")))
        assert command[:2] == ["spark-submit", "python_jobs/data_value/distributed_aggregator.py"]
        here = [word.replace(DAY_1, date) for word in command[2:]]
        url = here.index("jdbc:postgresql://localhost:5432/shop")
        here[url : url + 3] = [self.database.jdbc_url, "--user", self.database.user]
        return parse_parameters(Parameters, here)[0]

    def run(self, of: str, **changes: Any) -> dict[str, Any]:
        given = {**vars(self.arguments(of)), **changes}
        given.pop("text", None)  # computed
        return run(self.spark, Parameters(**given))

    def rows(self, date: str) -> DataFrame:
        table = self.spark.read.format("delta").load(self.target)
        return table.where(f"event_date = '{date}'").select(*NUMBERS)


@pytest.fixture
def visits(
    spark: SparkSession, tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> Visits:
    """Two days of visits, and the table."""
    monkeypatch.chdir(tmp_path)
    secrets = tmp_path / "secrets" / "reader"
    secrets.parent.mkdir()
    secrets.write_text(database.password, encoding="utf-8")
    database.execute(
        "create table devices (name text, kind text)",
        "insert into devices values ('a', 'phone'), ('b', 'tablet'), (null, 'x'), (null, 'y')",
    )
    visits = Visits(spark, tmp_path, database)
    for date, rows in VISITS.items():
        visits.land(date, rows)
    return visits


@pytest.mark.postgres
def test_the_command_of_the_page_writes_the_cube_of_its_day(visits: Visits) -> None:
    report = visits.run(DAY_1)
    assert (report["files"], report["rows"], report["cells"], report["table_version"]) == (1, 5, 8, 1)
    visits.run(DAY_2)
    assert_rows(visits.rows(DAY_1), CUBE_1)
    assert_rows(visits.rows(DAY_2).where("grouping_id = 3"), [(None, None, 3, 1, 90.0)])

    # A late visit: only the day of the run is replaced, and twice is once.
    visits.land(DAY_1, [*VISITS[DAY_1], ("b", "FR", 60.0)])
    visits.land(DAY_2, [])
    for _ in range(2):
        visits.run(DAY_1)
        assert_rows(visits.rows(DAY_1).where("grouping_id = 3"), [(None, None, 3, 6, 36.0)])
        assert_rows(visits.rows(DAY_2).where("grouping_id = 3"), [(None, None, 3, 1, 90.0)])
        assert visits.rows(DAY_1).count() == 8


@pytest.mark.postgres
def test_what_cannot_be_read_or_held_leaves_the_cube_as_it_is(
    visits: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    visits.run(DAY_1)
    version = latest_version(visits.spark, visits.target)
    query = visits.arguments(DAY_1).query

    unreachable = f"jdbc:postgresql://127.0.0.1:{free_port()}/shop"
    with pytest.raises(
        JobFailed, match=r"can't connect to postgresql://127.0.0.1:.* Connection to .* refused"
    ):
        visits.run(DAY_1, jdbc_url=unreachable)
    # The server goes away between the connection and the read.
    with pytest.raises(JobFailed, match=r"PostgreSQL at .* ended the read: .*gone"):
        visits.run(
            DAY_1, table="(select name, kind, name::int / 0 as n from devices where 'gone'::int = 1) as d"
        )
    monkeypatch.setenv("SHOP_PASSWORD", "wrong")
    with pytest.raises(JobFailed, match="password authentication failed"):
        visits.run(DAY_1, password_env="SHOP_PASSWORD", password_file=None)

    for changes, refusal, sentence in (
        ({"query": query + " where false"}, DataRefused, "the query has no row for 2024-01-01; pass allow_empty if"),
        ({"table": "(select * from devices where false) as devices"}, DataRefused, "the query has no row"),
        ({"date": DAY_2}, DataRefused, "a row for .* lies outside of the slice that is overwritten"),
        (
            {"query": query.replace("event_date", "nullif(event_date, event_date) as event_date")},
            DataRefused,
            "the day 'event_date' must be a date, a row has NULL; the cube stays as it is",
        ),
        ({"dimensions": ["country"]}, DataRefused, "the rows for .* have no column kind"),
        ({"schema": "event_date date, device string, country int, duration double"}, DataRefused,
         "cannot read .*visits.json: a value isn't of its type.*country; nothing was loaded"),
        ({"dimensions": ["country", "kind", "plan"]}, WrongUse, "the query has no column plan; it has event_date"),
        ({"day": "country"}, WrongUse, "country must be a date, got '`country`' of type string"),
        ({"measures": {"duration": "country"}}, WrongUse, "measures.duration must be a number, got 'country' of"),
        ({"measures": {"duration": "duration +"}}, WrongUse, "measures.duration can't be used"),
        ({"valid_when": {"duration": "duration"}}, WrongUse, "valid_when.duration must be a condition, got"),
        ({"query": "select * from {devices}"}, WrongUse, "in braces it may have {files} and {table}"),
        ({"table_key": ["id"]}, WrongUse, "devices has no column id; it has name, kind"),
        ({"source": "landing/none"}, NotReady, "landing/none holds no file"),
    ):  # fmt: skip
        with pytest.raises(refusal, match=sentence):
            visits.run(DAY_1, **changes)

    visits.land("blank", [])
    blank = visits.folder / "landing" / "visits" / "date=blank"
    (blank / "visits.json").write_text("\n\n", encoding="utf-8")
    outer = (
        f"select date'{DAY_1}' as event_date, country, kind, duration from {{table}} d "
        "left join {files} v on d.name = v.device"
    )
    with pytest.raises(DataRefused, match=r"the 1 files of .*blank hold no record; pass allow_empty if"):
        visits.run(DAY_1, source=str(blank), query=outer)

    visits.database.execute("insert into devices values ('a', 'watch')")
    with pytest.raises(DataRefused, match=re.escape('devices has the key {"name":"a"} more than once')):
        visits.run(DAY_1)
    assert latest_version(visits.spark, visits.target) == version
    assert_rows(visits.rows(DAY_1), CUBE_1)

    with failing_at(visits.arguments(DAY_1).target, distributed_aggregator, "overwrite", KeyboardInterrupt()):
        visits.run(DAY_1, table_key=None)
    assert_rows(visits.rows(DAY_1), CUBE_1)
    visits.run(DAY_1, query=query + " where false", table_key=None, allow_empty=True)
    assert_rows(visits.rows(DAY_1), [])


def plan(rows: DataFrame) -> str:
    return str(rows._jdf.queryExecution().executedPlan().toString())


@pytest.mark.postgres
def test_both_sides_are_exchanged_below_their_join_and_filtered_before(visits: Visits) -> None:
    given = visits.arguments(DAY_1)
    params = replace(
        given, query=given.query + " where duration >= 0", source=str(visits.folder / given.source)
    )
    with (
        setting(visits.spark, "spark.sql.autoBroadcastJoinThreshold", "-1"),
        one_snapshot(visits.spark, params.access) as database,
    ):
        rows = joined(visits.spark, params, source_files(visits.spark, params), database)
        join, whole = plan(rows), plan(cube(rows, params))
    assert len(re.findall(r"Exchange hashpartitioning", join)) == 2
    assert re.search(
        r"SortMergeJoin[\s\S]+Exchange hashpartitioning[\s\S]+Filter .*duration[\s\S]+Scan text", join
    )
    assert "duration" not in join[: join.index("Exchange hashpartitioning")].partition("SortMergeJoin")[2]
    assert re.search(r"Exchange hashpartitioning[\s\S]+functions=\[.*partial_count", whole)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"date": "2024-1-1"}, "date: '2024-1-1' is not a date; use 2024-12-31"),
        ({"valid_when": {"price": "price > 0"}}, "valid_when names price; measures are duration"),
        ({"jdbc_url": "jdbc:postgresql://h/d?password=x"}, "the URL must not hold user or password"),
        ({"password_env": None}, "pass either password_env or password_file"),
        ({"query": "none.sql"}, "can't read the query's file none.sql"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(changes: dict[str, Any], sentence: str) -> None:
    given: dict[str, Any] = {
        "source": "landing", "schema": "d date", "table": "devices", "query": "select 1", "day": "d",
        "date": DAY_1, "dimensions": ["a"], "measures": {"duration": "duration"}, "target": "cube",
    }  # fmt: skip
    with pytest.raises(WrongUse, match=sentence):
        Parameters(**(given | ACCESS | changes))


def test_more_than_ten_dimensions_are_refused(spark: SparkSession) -> None:
    names = [f"c{number}" for number in range(11)]
    rows = spark.sql(f"select current_date() as d, {', '.join(f'1 as {name}' for name in names)}")
    params = Parameters(
        source="s", schema="d date", table="t", query="q", day="d", date=DAY_1, dimensions=names, target="c", **ACCESS
    )  # fmt: skip
    with pytest.raises(WrongUse, match="cube_daily needs 1 to 10 dimensions, got 11"):
        cube(rows, params)
