"""Time Travel: a table as it was, by number, time and name."""

from __future__ import annotations

import datetime as dt
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from python_jobs.idempotency.time_travel import Parameters, named_versions, run
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.delta.tables import deleted_file_retention, read_version
from tests.support.dbt_project import DbtProject
from tests.support.rows import assert_rows
from tests.support.snippets import snippet

THIS = "tests/patterns/idempotency/test_time_travel.py::"
HOUR = dt.timedelta(hours=1)
# Commit times of the versions 0, 1 and 2: by the real clock, against which Delta holds a table's retention.
FIRST = dt.datetime.now(dt.UTC).replace(minute=0, second=0, microsecond=0) - dt.timedelta(days=10)
MOMENTS = (FIRST, FIRST + HOUR, FIRST + 2 * HOUR)


def text(moment: dt.datetime) -> str:
    return f"{moment:%F %T}"


class Orders:
    """Ten orders, one changed, one deleted."""

    def __init__(self, spark: SparkSession, root: Path, retention: str = "interval 30 days") -> None:
        self.spark, self.table, self.registry = spark, str(root / "orders"), str(root / "versions")
        self.name = f"delta.`{self.table}`"
        rows = spark.range(10).select("id", F.lit(1).alias("amount")).coalesce(1)
        options = {"delta.enableChangeDataFeed": "true", "delta.deletedFileRetentionDuration": retention}
        rows.write.format("delta").options(**options).save(self.table)
        spark.sql(f"update {self.name} set amount = 2 where id = 0")
        spark.sql(f"delete from {self.name} where id = 9")
        for version, moment in enumerate(MOMENTS):
            seconds = moment.timestamp()
            os.utime(f"{self.table}/_delta_log/{version:020}.json", (seconds, seconds))

    def run(self, action: str, name: str | None = None, **others: Any) -> dict[str, Any]:
        return run(self.spark, Parameters(self.table, self.registry, action, name, **others))  # type: ignore[arg-type]

    def give(self, name: str, version: int | None, **others: Any) -> dict[str, Any]:
        return self.run(
            "name", name, **{"version": version, "keep_until": text(FIRST + 365 * 24 * HOUR)} | others
        )

    def at(self, version: int) -> DataFrame:
        return read_version(self.spark, self.table, version)

    def vacuum(self) -> None:
        self.spark.sql(f"vacuum {self.name}").collect()


@pytest.fixture(scope="module")
def orders(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Orders:
    return Orders(spark, tmp_path_factory.mktemp("orders"))


@pytest.fixture
def own(spark: SparkSession, tmp_path: Path) -> Orders:
    """Orders whose removed files the next VACUUM takes."""
    return Orders(spark, tmp_path, "interval 0 hours")


def test_each_version_can_be_read_and_a_report_of_it_stays_the_same(orders: Orders) -> None:
    assert [orders.at(version).count() for version in (0, 1, 2)] == [10, 10, 9]
    assert [orders.at(version).agg(F.sum("amount")).first()[0] for version in (1, 2, 1)] == [11, 10, 11]  # type: ignore[index]


def test_the_change_feed_between_two_versions(orders: Orders) -> None:
    feed = orders.spark.read.format("delta").options(
        readChangeFeed="true", startingVersion=1, endingVersion=2
    )
    assert_rows(
        feed.load(orders.table).select("_change_type", "id", "amount"),
        [("update_preimage", 0, 1), ("update_postimage", 0, 2), ("delete", 9, 1)],
    )


def test_a_time_between_two_commits_means_the_earlier_one(orders: Orders, render: Any) -> None:
    assert orders.give("between", None, timestamp=text(FIRST + 1.5 * HOUR))["version"] == 1
    assert orders.give("exactly", None, timestamp=text(FIRST + 2 * HOUR))["version"] == 2
    with pytest.raises(WrongUse, match=r"has no version of .*; its log goes from 0 \("):
        orders.give("before", None, timestamp=text(FIRST - HOUR))
    sql = render("time_travel", relation=orders.name, timestamp=text(FIRST + 1.5 * HOUR))
    assert orders.spark.sql(f"select sum(amount) from {sql}").first()[0] == 11  # type: ignore[index]
    before = render("time_travel", relation=orders.name, timestamp=text(FIRST - HOUR))
    with pytest.raises(PySparkException, match=r"(?i)before the earliest version"):
        orders.spark.sql(f"select * from {before}").collect()


def test_a_name_means_one_version_for_good(orders: Orders) -> None:
    orders.give("audit", 0)
    assert orders.give("audit", 0, keep_until=text(FIRST + 730 * 24 * HOUR))["named"]["audit"] == 0
    assert deleted_file_retention(orders.spark, orders.table).days == 730
    named = named_versions(orders.spark, Parameters(orders.table, orders.registry, "list"))
    (audit,) = [version for version in named if version.name == "audit"]
    assert audit.retention_days == 730, "the later date is registered, too: a restore protects by it"
    with pytest.raises(WrongUse, match=r"name audit means version 0 of .*; choose another name"):
        orders.give("audit", 1)
    with pytest.raises(WrongUse, match="has no version 7; its log goes from 0"):
        orders.give("later", 7)
    with pytest.raises(WrongUse, match="has no version named nothing; its named versions are: audit"):
        orders.run("restore", "nothing")
    assert "audit" in orders.run("list")["named"]
    assert "audit" not in orders.run("forget", "audit")["named"]


def test_a_named_version_survives_vacuum_and_another_does_not(own: Orders) -> None:
    own.vacuum()
    with pytest.raises(PySparkException, match="DELTA_UNSUPPORTED_TIME_TRAVEL_BEYOND"):
        own.at(0).collect()
    with pytest.raises(WrongUse, match=r"version 0 of .* can't be read any more"):
        own.give("too-late", 0)
    assert deleted_file_retention(own.spark, own.table).total_seconds() == 0
    own.give("audit", 2)
    own.spark.sql(f"delete from {own.name}")
    own.vacuum()
    assert own.at(2).count() == 9
    own.spark.sql(f"vacuum {own.name} retain 24 hours").collect()  # Delta heeds the table's retention alone
    with pytest.raises(PySparkException, match=r"(?i)retention"):
        own.spark.sql(f"vacuum {own.name} retain 0 hours").collect()
    assert own.at(2).count() == 9


def test_restoring_is_a_new_commit_and_keeps_the_protection(own: Orders) -> None:
    own.give("audit", 0)
    own.spark.sql(f"restore table {own.name} to version as of 1").collect()  # by another program
    assert deleted_file_retention(own.spark, own.table).days == 0
    assert own.run("protect")["retention_days"] == 365
    assert own.run("restore", "audit") == {
        "table": own.table, "version": 0, "retention_days": 365, "named": {"audit": 0},
    }  # fmt: skip
    assert_rows(own.spark.read.format("delta").load(own.table), own.at(0))
    assert own.spark.sql(f"describe history {own.name}").count() > 4
    assert deleted_file_retention(own.spark, own.table).days == 365


def test_a_dbt_model_reads_a_named_version(
    spark: SparkSession, make_project: Callable[..., DbtProject]
) -> None:
    sources = """
version: 2
sources: [{name: ops, schema: '{{ target.schema }}', tables: [{name: orders}, {name: versions}]}]
"""
    model = snippet("docs/idempotency.md", f"{THIS}test_a_dbt_model_reads_a_named_version")
    project = make_project({"models/report.sql": model, "models/sources.yml": sources})
    project.source("orders", spark.range(3).toDF("id"))
    table, registry = (f"{project.schema}.{name}" for name in ("orders", "versions"))
    run(spark, Parameters(table, registry, "name", "audit-2026", version=0, keep_until="2036-12-31"))
    project.source("orders", spark.range(5).toDF("id"))
    project.run("run", "--select", "report")
    assert_rows(project.table("report"), [(3,)])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "time_travel needs one of version, timestamp and name, got 0"),
        ({"version": 1, "name": "a", "registry": "r"}, "got 2"),
        ({"name": "a"}, "time_travel needs name and registry together"),
        ({"version": "1"}, "version must be a number from 0 on, got '1'"),
        ({"timestamp": "now' or '1"}, "timestamp must be a time such as"),
        ({"name": "a'b", "registry": "r"}, "name may hold letters, digits"),
    ],
)
def test_wrong_arguments_of_the_macro_are_refused(
    render: Any, arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(Exception, match=sentence):
        render("time_travel", relation="orders", **arguments)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"action": "list"}, "name belongs to the actions name, restore and forget; got action list"),
        ({"name": None}, "name belongs to the actions"),
        ({"name": "a/b"}, "'a/b' is no name of a version"),
        ({"version": None}, "needs either version or timestamp"),
        ({"timestamp": "2026-11-01"}, "needs either version or timestamp"),
        ({"keep_until": None}, "needs keep_until"),
        ({"keep_until": "soon"}, "'soon' is not a time"),
    ],
)
def test_wrong_parameters_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    given = {"action": "name", "name": "a", "version": 1, "keep_until": "2030-01-01"}
    with pytest.raises(WrongUse, match=sentence):
        Parameters("t", "r", **given | wrong)  # type: ignore[arg-type]


def test_a_registry_that_is_none_is_refused(orders: Orders) -> None:
    with pytest.raises(WrongUse, match="is no registry of versions: it has id, amount, not name, table_id"):
        run(orders.spark, Parameters(orders.table, orders.table, "list"))


def test_the_command_of_the_page(own: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKEHOUSE_ROOT", str(Path(own.table).parent))
    text = snippet("docs/idempotency.md", f"{THIS}test_the_command_of_the_page")
    command = shlex.split(os.path.expandvars(text.replace("\\\n", " ")))
    assert command[:2] == ["spark-submit", "python_jobs/idempotency/time_travel.py"]
    parameters, _ = parse_parameters(Parameters, command[2:])
    assert run(own.spark, parameters)["named"] == {"audit-2026": 1}
