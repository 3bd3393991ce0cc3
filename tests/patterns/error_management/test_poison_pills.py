"""Poison Pill Handling: the search, without Spark, and the Dead-Letter job that uses it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from python_jobs.error_management import dead_letter
from python_jobs.error_management.dead_letter import Parameters
from python_jobs.error_management.poison_pills import Case, CaseFile, Range, isolate
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import DataRefused, WrongUse
from tests.support.rows import assert_rows
from tests.support.snippets import snippet

PAGE = "docs/error_management.md"
HERE = "tests/patterns/error_management/test_poison_pills.py"


class Died(BaseException):
    """Stands for the death of the process: nothing after it runs."""


class Batch:
    """Records by their hashes; some of them fail, or kill the process, when they are processed."""

    def __init__(self, hashes: list[int], pills: set[int], kills: bool = False) -> None:
        self.hashes, self.pills, self.kills = hashes, pills, kills
        self.texts: dict[str, str] = {}
        self.tests: list[Range] = []

    def read_text(self, path: str) -> str | None:
        return self.texts.get(path)

    def write_text(self, path: str, text: str) -> None:
        self.texts[path] = text

    def within(self, part: Range) -> list[int]:
        return [number for number in self.hashes if part[0] <= number <= part[1]]

    def bounds(self, part: Range) -> Range | None:
        found = self.within(part)
        return (min(found), max(found)) if found else None

    def failure(self, part: Range) -> str | None:
        self.tests.append(part)
        if not self.pills & set(self.within(part)):
            return None
        if self.kills:
            raise Died
        return "it failed"

    def search(self, most: int = 3) -> Case:
        """Search as one run of the job does, which may die."""
        cases = CaseFile(self)
        return isolate(cases.begin(5), self.bounds, self.failure, cases.save, most)

    def runs(self) -> tuple[Case, int]:
        """Run until the search ends; return its end and the number of runs that died."""
        deaths = 0
        while True:
            try:
                return self.search(), deaths
            except Died:
                deaths += 1


HASHES = [-(2**63), -(2**62), -5, -4, 0, 1, 7, 2**40, 2**62, 2**63 - 1]


@pytest.mark.parametrize("kills", [False, True], ids=["raises", "kills"])
@pytest.mark.parametrize("position", range(10))
def test_the_pill_is_found_at_each_position_of_a_batch(position: int, kills: bool) -> None:
    batch = Batch(HASHES, {HASHES[position]}, kills)
    case, deaths = batch.runs()
    assert case.pills == (HASHES[position],)
    assert (deaths > 0) == kills
    assert case.reason == ("the process died" if kills else "it failed")


@pytest.mark.parametrize("kills", [False, True], ids=["raises", "kills"])
def test_several_pills_are_found_and_nothing_else(kills: bool) -> None:
    case, _ = Batch(HASHES, {-5, -4, 2**62}, kills).runs()
    assert set(case.pills) == {-5, -4, 2**62}


def test_a_large_batch_needs_few_tests() -> None:
    hashes = [number * 2**53 for number in range(-1000, 1000)]
    batch = Batch(hashes, {hashes[1234]})
    assert batch.search().pills == (hashes[1234],)
    assert len(batch.tests) <= 25, "2000 records, 11 halvings"


@pytest.mark.parametrize("kills", [False, True], ids=["raises", "kills"])
def test_more_pills_than_allowed_are_the_environment_s_fault(kills: bool) -> None:
    batch = Batch(HASHES, set(HASHES), kills)
    with pytest.raises(DataRefused, match=r"alert: more than 3 records of batch 5 .*; no record was parked"):
        batch.runs()
    batch.pills = set()
    assert batch.search().pills == (), "the search begins again, and the environment is well again"


def test_a_batch_that_is_well_by_now_has_no_pill() -> None:
    batch = Batch(HASHES, set())
    assert batch.search().pills == ()
    assert len(batch.tests) == 1


def test_tries_are_counted_for_each_batch_and_again_after_a_search() -> None:
    batch = Batch(HASHES, {7})
    cases = CaseFile(batch)
    assert [cases.begin(5).attempts for _ in range(3)] == [1, 2, 3]
    assert cases.begin(6).attempts == 1
    batch.search()
    after = cases.begin(5)
    assert (after.attempts, after.pills) == (1, (7,))


PILL = 7


class Stream:
    """Ten pages in a bronze table; a function that dies or raises at some of them."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder

    def append(self, first: int, count: int) -> None:
        rows = [(f'{{"page":"{number}"}}', number) for number in range(first, first + count)]
        bronze = self.spark.createDataFrame(rows, "payload string, offset bigint")
        bronze.coalesce(1).write.format("delta").mode("append").save(str(self.folder / "bronze"))

    def run(self, expression: str, **changes: Any) -> dict[str, Any]:
        tables = {"source": "bronze", "target": "main", "dead_letter": "dead", "checkpoint": "checkpoint"}
        paths = {name: str(self.folder / table) for name, table in tables.items()}
        given = {"schema": "page string", "derive": {"page": expression}, "poison_attempts": 2}
        return dead_letter.run(self.spark, Parameters(**(paths | given | changes)))

    def table(self, name: str) -> DataFrame:
        return self.spark.read.format("delta").load(str(self.folder / name))


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> Stream:
    return Stream(spark, tmp_path)


def test_a_record_that_kills_the_worker_is_parked_and_the_stream_goes_on(stream: Stream) -> None:
    def fragile(page: str) -> str:
        if page == str(PILL):
            os._exit(1)
        return page

    stream.spark.udf.register("fragile", fragile, "string")
    stream.append(0, 10)
    for _ in range(2):
        with pytest.raises(Exception, match="Python worker"):
            stream.run("fragile(page)")
    assert (stream.table("main").count(), stream.table("dead").count()) == (0, 0)

    report = stream.run("fragile(page)")
    assert report["batches"] == [
        {
            "batch_id": 0, "read": 10, "valid": 9, "dead": 1, "error_classes": {"POISON_PILL": 1},
            "unreadable": 0, "unreadable_fields": {},
        }
    ]  # fmt: skip
    assert_rows(stream.table("main"), [(n,) for n in range(10) if n != PILL], columns=["offset"])
    parked = [('{"page":"7"}', 7, "POISON_PILL", "parked", 0)]
    columns = ["payload", "offset", "error_class", "status", "batch_id"]
    assert_rows(stream.table("dead"), parked, columns=columns)

    # Dead between its writes and Spark's own commit: the batch comes again, its pill is known and parked once.
    (stream.folder / "checkpoint" / "commits" / "0").unlink()
    (stream.folder / "checkpoint" / "commits" / ".0.crc").unlink(missing_ok=True)
    stream.append(10, 2)
    report = stream.run("fragile(page)")
    assert (report["read"], report["dead"]) == (12, 1)
    assert_rows(stream.table("main"), [(n,) for n in range(12) if n != PILL], columns=["offset"])
    assert_rows(stream.table("dead"), parked, columns=columns)


def test_when_all_records_fail_the_job_stops_and_parks_nothing(stream: Stream) -> None:
    stream.append(0, 10)
    broken = "cast(concat('x', page) as int)"
    with pytest.raises(Exception, match="CAST_INVALID_INPUT"):
        stream.run(broken, poison_attempts=1)
    for _ in range(2):
        with pytest.raises(DataRefused, match=r"alert: more than 1 records of batch 0 .*CAST_INVALID_INPUT"):
            stream.run(broken, poison_attempts=1, max_poison=1)
    assert stream.table("dead").count() == 0
    assert stream.run("cast(concat('1', page) as int)", poison_attempts=1)["valid"] == 10


def test_snippet_of_the_page_is_a_configuration_of_the_job(tmp_path: Path) -> None:
    config = tmp_path / "visits.yml"
    config.write_text(snippet(PAGE, f"{HERE}::test_snippet_of_the_page_is_a_configuration_of_the_job"))
    tables = ["--source=a", "--target=b", "--dead_letter=c", "--checkpoint=d"]
    parameters, _ = parse_parameters(Parameters, ["--config", str(config), *tables])
    assert (parameters.poison_attempts, parameters.max_poison) == (3, 3)


@pytest.mark.parametrize("name", ["poison_attempts", "max_poison"])
def test_wrong_use_gives_one_sentence(name: str) -> None:
    with pytest.raises(WrongUse, match=f"{name} must be 1 or more, got 0"):
        Parameters(source="a", target="b", dead_letter="c", schema="page string", checkpoint="d", **{name: 0})
