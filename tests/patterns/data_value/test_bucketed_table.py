"""Bucketed tables: groups and joins by the key of the buckets need no shuffle, and the number of buckets is agreed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from python_jobs.data_value import bucketed_table as job
from python_jobs.data_value.bucketed_table import Parameters, bucketing
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import NotReady, WrongUse
from python_jobs.shared.spark.session import settings
from tests.support.rows import assert_rows
from tests.support.snippets import snippet

PAGE = "docs/data_value.md"
HERE = "tests/patterns/data_value/test_bucketed_table.py"
SCHEMA = "buckets_of_tests"


def parameters(**changes: str) -> Parameters:
    text = snippet(PAGE, f"{HERE}::test_groups_by_the_key_need_no_exchange").replace(
        "lakehouse.", f"{SCHEMA}."
    )
    words = shlex.split(text.replace("\\\n", " "))[2:]
    for name, value in changes.items():
        words += [f"--{name}", value]
    return parse_parameters(Parameters, words)[0]


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Bucket visits and users by 4, and the users by 8 as well."""
    spark.sql(f"create schema {SCHEMA} location '{tmp_path_factory.mktemp('buckets')}'")
    visits = [(f"v{number}" if number else None, f"p{number % 3}") for number in range(12)]
    users = [(f"v{number}", number) for number in range(8)]
    for name, rows, columns in (
        ("visits", visits, "visit_id string, page string"),
        ("users", users, "visit_id string, user_id int"),
    ):
        spark.createDataFrame(rows, columns).repartition(3).write.format("delta").saveAsTable(
            f"{SCHEMA}.{name}"
        )
    job.run(spark, parameters())
    for view, buckets in (("fast_users", "4"), ("wide_users", "8")):
        job.run(spark, parameters(source=f"{SCHEMA}.users", view=f"{SCHEMA}.{view}", buckets=buckets))
    yield spark
    spark.sql(f"drop schema {SCHEMA} cascade")


def exchanges(rows: DataFrame) -> int:
    return plan(rows).count("Exchange hashpartitioning")


def plan(rows: DataFrame) -> str:
    return str(rows._jdf.queryExecution().executedPlan().toString())


def test_groups_by_the_key_need_no_exchange(tables: SparkSession) -> None:
    fast, slow = tables.table(f"{SCHEMA}.fast_visits"), tables.table(f"{SCHEMA}.visits")
    for columns, needed in ((["visit_id"], 0), (["visit_id", "page"], 0), (["page"], 1)):
        found = fast.groupBy(*columns).count()
        assert exchanges(found) == needed, columns
        assert exchanges(slow.groupBy(*columns).count()) == 1
        assert_rows(found, slow.groupBy(*columns).count().collect())


@pytest.mark.parametrize(
    ("users", "condition", "needed"),
    [
        ("fast_users", "v.visit_id = u.visit_id", 0),
        ("wide_users", "v.visit_id = u.visit_id", 1),
        ("fast_users", "cast(substring(v.visit_id, 2) as int) = cast(substring(u.visit_id, 2) as int)", 2),
    ],
)
def test_a_join_needs_an_exchange_for_other_buckets_and_two_for_a_cast(
    tables: SparkSession, users: str, condition: str, needed: int
) -> None:
    def joined(visits: str, users: str) -> DataFrame:
        return tables.sql(
            f"select v.visit_id, v.page, u.user_id from {SCHEMA}.{visits} v join {SCHEMA}.{users} u on {condition}"
        )

    with settings(tables, {"spark.sql.autoBroadcastJoinThreshold": "-1"}):  # a small table isn't broadcast
        found = joined("fast_visits", users)
        assert "SortMergeJoin" in plan(found)
        assert exchanges(found) == needed
    assert_rows(found, joined("visits", "users").collect())
    assert found.count() == 7


def test_each_bucket_is_one_file(tables: SparkSession) -> None:
    copy = tables.table(f"{SCHEMA}.fast_visits_copy_1")
    assert len(copy.inputFiles()) <= 4
    # Without the repartition each of three tasks writes a file for each of its buckets.
    rows = tables.table(f"{SCHEMA}.visits").repartition(3)
    rows.write.format("parquet").bucketBy(4, "visit_id").sortBy("visit_id").saveAsTable(
        f"{SCHEMA}.many_files"
    )
    assert len(tables.table(f"{SCHEMA}.many_files").inputFiles()) > 4


def test_a_filter_on_the_key_reads_one_bucket(tables: SparkSession) -> None:
    with settings(tables, {"spark.sql.sources.bucketing.autoBucketedScan.enabled": "false"}):
        found = tables.table(f"{SCHEMA}.fast_visits").where("visit_id = 'v1'")
        assert "SelectedBucketsCount: 1 out of 4" in plan(found)
    assert_rows(found, [("v1", "p1")])


def test_another_number_of_buckets_needs_a_reorganisation(tables: SparkSession) -> None:
    view, source = f"{SCHEMA}.moved_users", f"{SCHEMA}.users"
    job.run(tables, parameters(source=source, view=view))
    with pytest.raises(WrongUse, match="has 4 buckets by visit_id, and 8 by visit_id are asked for"):
        job.run(tables, parameters(source=source, view=view, buckets="8"))
    for buckets in ("8", "8", "8"):
        report = job.run(tables, parameters(source=source, view=view, buckets=buckets, reorganise="true"))
    assert report["copy"] == f"{view}_copy_4"
    assert bucketing(tables, report["copy"]) == (8, ["visit_id"])
    assert_rows(tables.table(view), tables.table(source).collect())
    assert job.copies_of(tables, view) == [3, 4], "the former copy stays for its readers"


def test_relations_of_another_owner_stay_and_are_no_copies(tables: SparkSession) -> None:
    def made(name: str) -> None:
        tables.sql(f"create table {SCHEMA}.{name} using parquet as select 'mine' as owner")

    def owner(name: str) -> str:
        return str(tables.table(f"{SCHEMA}.{name}").collect()[0].owner)

    view = f"{SCHEMA}.guests"
    given = parameters(source=f"{SCHEMA}.users", view=view)
    made("guests_copy_7")
    tables.sql("select 1 as id").createOrReplaceTempView("guests_copy_99")
    assert job.run(tables, given)["copy"] == f"{view}_copy_8"
    made("guests_copy_2")
    for number in (9, 10):
        assert job.run(tables, given)["copy"] == f"{view}_copy_{number}"
    assert job.copies_of(tables, view) == [9, 10]
    assert (owner("guests_copy_7"), owner("guests_copy_2")) == ("mine", "mine")

    made("own_table")
    tables.sql(f"create view {SCHEMA}.own_view as select * from {SCHEMA}.own_table")
    for name in ("own_table", "own_view"):
        with pytest.raises(WrongUse, match=f"{name} exists and was not created by this job: rename or drop"):
            job.run(tables, parameters(source=f"{SCHEMA}.users", view=f"{SCHEMA}.{name}"))
        assert owner(name) == "mine"
        assert job.copies_of(tables, f"{SCHEMA}.{name}") == []


def test_files_that_a_killed_run_left_do_not_stop_the_next(tables: SparkSession) -> None:
    view = f"{SCHEMA}.restarted"
    location = tables.sql(f"describe schema {SCHEMA}").where("info_name = 'Location'").collect()[0].info_value
    left = Path(location.removeprefix("file:")) / "restarted_copy_1" / "_temporary"
    left.mkdir(parents=True)
    (left / "part-0").write_bytes(b"PAR1")
    job.run(tables, parameters(source=f"{SCHEMA}.users", view=view))
    assert_rows(tables.table(view), tables.table(f"{SCHEMA}.users").collect())


def test_wrong_use_is_refused_in_one_sentence(tables: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="there is no Delta table"):
        job.run(tables, parameters(source=str(tmp_path / "none")))
    for changes, sentence in [
        ({"buckets": "0"}, "buckets must be 1 or more, got 0"),
        ({"view": "visits"}, "view must be a name with its schema"),
        ({"key": "[]"}, "key is empty"),
        ({"key": "[nothing]"}, "key names no column of the source: nothing; it has visit_id, page"),
    ]:
        with pytest.raises(WrongUse, match=sentence):
            job.run(tables, parameters(**changes))
