"""The history of users from daily extracts that have no `updated_at`: a version begins on the day of a change alone."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from case_study.main_job import main_job
from tests.support.lakehouse import Lakehouse
from tests.support.rows import assert_rows

DAYS = {
    "2024-03-01": {"ann": "free", "bob": "free", "eve": "free"},
    "2024-03-02": {"ann": "free", "bob": "free", "eve": "free"},
    "2024-03-03": {"ann": "gold", "bob": "free"},
    "2024-03-04": {"ann": "gold", "bob": "free"},
}


def test_an_extract_without_updated_at_makes_a_version_only_on_change(
    spark: SparkSession, tmp_path: Path
) -> None:
    landing = tmp_path / "landing"
    lakehouse = Lakehouse(tmp_path / "lakehouse", spark, landing)
    for day, users in DAYS.items():
        folder = landing / "users" / f"date={day}" / "hour=00"
        folder.mkdir(parents=True)
        lines = [f'{{"id": "{name}", "login": "{name}", "plan": "{plan}"}}\n' for name, plan in users.items()]
        (folder / "users.json").write_text("".join(lines), encoding="utf-8")
        for step in main_job(str(lakehouse.root), landing, ["users"]):
            if step.name.startswith("load "):
                lakehouse.step(step)
        lakehouse.dbt("build", "--select", "+snapshot_users")
    versions = lakehouse.table("snapshot_users").selectExpr(
        "id", "plan", "string(date(dbt_valid_from))", "string(date(dbt_valid_to))"
    )
    assert_rows(
        versions.where("id <> 'eve'"),
        [
            ("ann", "free", "2024-03-01", "2024-03-03"),
            ("ann", "gold", "2024-03-03", None),
            ("bob", "free", "2024-03-01", None),
        ],
    )
    assert versions.where("id = 'eve' and plan = 'free'").count() == versions.where("id = 'eve'").count() == 1
    assert lakehouse.table("snapshot_users").where("id = 'eve' and dbt_valid_to is null").count() == 0
