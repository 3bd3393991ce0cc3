"""A line of the users' and devices' feeds is one JSON object, or a dead letter with its reason."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from case_study.main_job import main_job
from tests.support.lakehouse import Lakehouse
from tests.support.rows import assert_rows

# A feed's object with a key, the key's field, and the model of its lines.
FEEDS = {
    "devices": (
        '{"type": "tv", "version": "%s", "full_name": "TV", "more": [1, {"a": 2}]}', "version", "silver_devices",
    ),
    "users": ('{"id": "%s", "login": "ann", "plan": "free"}', "id", "silver_users_extract"),
    "user_changes": (
        '{"id": "%s", "op": "I", "sequence": 1, "changed_at": "2024-03-01T10:00:00Z", "plan": "free"}',
        "id",
        "silver_user_changes",
    ),
}  # fmt: skip
# Lines around an object `%s`.
REFUSED = ("%s %s", "%s%s", "%s,%s", "%s trailing", "%s]", '%s,"plan":"gold"', "[%s]", "no json", "")
NOT_ONE = "json_object is NULL although an input is present (payload)"


def refused_lines(feed: str) -> list[tuple[str, str]]:
    """Return the feed's lines that are refused, each with its reason."""
    made, key, _ = FEEDS[feed]
    not_one = [(line.replace("%s", made % f"bad{number}"), NOT_ONE) for number, line in enumerate(REFUSED)]
    without_key = made.replace('"%s"', "null")
    return [*not_one, (without_key, f"{key} is NULL although an input is present (payload)")]


def test_a_line_with_anything_but_one_object_is_a_dead_letter(spark: SparkSession, tmp_path: Path) -> None:
    landing = tmp_path / "landing"
    lakehouse = Lakehouse(tmp_path / "lakehouse", spark, landing)
    for feed, (made, _, _) in FEEDS.items():
        folder = landing / feed / "date=2024-03-01" / "hour=10"
        folder.mkdir(parents=True)
        lines = [made % "good", *(line for line, _ in refused_lines(feed)), f"  {made % 'good too'}\r"]
        (folder / "lines.json").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for step in main_job(str(lakehouse.root), landing, list(FEEDS)):
        if step.name.startswith("load "):
            lakehouse.step(step)
    models = [model for _, _, model in FEEDS.values()]
    for _ in range(2):  # the second run finds nothing new
        lakehouse.dbt(
            "run", "--select", "+silver_users", *(f"+{model} {model}_dead_letter" for model in models)
        )
        for feed, (_, _, model) in FEEDS.items():
            dead = lakehouse.table(f"{model}_dead_letter").select("payload", "error_message")
            assert_rows(dead, refused_lines(feed))
    assert_rows(lakehouse.table("silver_devices").select("version"), [("good",), ("good too",)])
    assert_rows(
        lakehouse.table("silver_users").select("id", "plan"), [("good", "free"), ("good too", "free")]
    )
    extract = spark.table("lakehouse.silver_users_extract").select("id", "login", "plan")
    assert_rows(extract, [("good", "ann", "free"), ("good too", "ann", "free")])
