"""The case study with its sources as services: visits from a topic, users captured from PostgreSQL."""

from __future__ import annotations

import pytest
from pyspark.sql import functions as F

from case_study.main_job import REPORT, main_job
from case_study.sources import change_users, played_sources, produce_visits, user_changes
from services.kafka import running_broker
from services.postgres import running_postgres
from tests.support.lakehouse import Lakehouse
from tests.support.rows import assert_rows

pytestmark = [pytest.mark.end_to_end, pytest.mark.kafka, pytest.mark.postgres]
FEEDS = ["visits", "user_changes"]
USER = ("id", "login", "email", "registered_at", "first_connection_at", "last_connection_at", "plan")


def test_visits_from_kafka_and_users_from_postgresql_end_in_the_same_tables(
    spark, generated, truth, tmp_path, monkeypatch
):
    monkeypatch.setenv("LAKEHOUSE_SOURCE", "kafka")
    lakehouse = Lakehouse(tmp_path / "lakehouse", spark, generated)
    services = tmp_path / "services"
    with played_sources(spark, generated, FEEDS, services) as bootstrap_servers:
        steps = main_job(str(lakehouse.root), generated, FEEDS, bootstrap_servers=bootstrap_servers)
        assert [step.name for step in steps] == [
            "load visits", "load user_changes", "raw copies", "hours of visits", "dead-letter visits", "dbt build",
            REPORT,
        ]  # fmt: skip
        for step in steps[:5]:
            lakehouse.step(step)
        raw = lakehouse.step(steps[2])
        loaded = lakehouse.step(steps[1])
    assert loaded["records"] == 0
    assert (raw["lag"], [topic["records"] for topic in raw["topics"].values()]) == (0, [0, 0])
    for bronze, copy in (("bronze_visits", "raw/visits"), ("bronze_users_records", "raw/users")):
        copied = spark.read.format("delta").load(str(lakehouse.root / copy))
        records = copied.selectExpr("topic", "partition", "offset", "cast(value as string) as payload")
        assert_rows(records, lakehouse.table(bronze).select(*records.columns))
    for table in ("raw_visits", "raw_users"):
        spark.sql(f"drop table {table}")
    tables = (
        "observability_visits_accounting",
        "gold_users_history",
        "silver_users_records_dead_letter",
    )
    lakehouse.dbt("run", "--select", *(f"+{name}" for name in tables), "silver_users")

    counted = (
        lakehouse.table("observability_visits_accounting")
        .groupBy("status")
        .agg(F.sum("lines").alias("lines"))
    )
    assert {row.status: row.lines for row in counted.collect()} == truth["feeds"]["visits"]["precedence"]
    with running_postgres(services / "postgres") as postgres:
        database = postgres.ensure_database("blog")
        with database.connect() as connection:
            users = connection.execute(
                f"select {', '.join(USER)} from users where not is_deactivated"
            ).fetchall()
        assert change_users(database, user_changes(spark, generated)) == 0
    assert len(users) > 20
    assert_rows(lakehouse.table("silver_users").where("not is_deleted").select(*USER), users)
    current = lakehouse.table("gold_users_history").where("is_current")
    assert_rows(current.select(*USER), users)
    assert lakehouse.table("silver_users_records_dead_letter").count() == 0
    with running_broker(services / "kafka") as broker:
        assert produce_visits(spark, broker, generated, services / "sent") == 0
