"""SCD Type 2: a batch of changes against a dbt snapshot of the full extract, and against mack's upsert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mack
from delta import DeltaTable
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from tests.support.dbt_project import DbtProject
from tests.support.render import MacroRenderer

KEYS = 1_000_000
CHANGED_ONE_IN = 100
ATTRIBUTES = ["login", "email", "plan", "country"]

MODEL = """
{{ config(materialized='scd2', unique_key='id', meta={'lakehouse_patterns': {'scd2': {
    'changed_at': 'updated_at', 'sequence': 'sequence', 'tracked_columns': ['login', 'email', 'plan', 'country']
}}}) }}
select * from {{ source('raw', 'user_changes') }}
{% if lakehouse_patterns.is_incremental() %}
where load_id > (select coalesce(max(load_id), 0) from {{ this }})
{% endif %}
"""
SNAPSHOT = """
snapshots:
  - name: user_snapshots
    relation: source('raw', 'users')
    config: {unique_key: id, strategy: timestamp, updated_at: updated_at, hard_deletes: invalidate}
"""
SOURCES = """
sources: [{name: raw, schema: "{{ target.schema }}", tables: [{name: users}, {name: user_changes}]}]
"""


def users(ids: DataFrame, load_id: int) -> DataFrame:
    """The state of users at a load: everything but the plan depends on the id alone."""
    return ids.select(
        F.col("id"),
        F.concat(F.lit("user_"), F.col("id")).alias("login"),
        F.concat(F.md5(F.col("id").cast("string")), F.lit("@example.org")).alias("email"),
        F.element_at(F.array(*map(F.lit, ["basic", "premium", "trial"])), F.lit(load_id)).alias("plan"),
        F.concat(F.lit("country_"), F.col("id") % 200).alias("country"),
        F.to_timestamp(F.lit(f"2026-01-0{load_id} 00:00:00")).alias("updated_at"),
    )


class Users:
    """A million users, and a second load in which one in a hundred has changed."""

    def __init__(self, bench: Workbench) -> None:
        keys = bench.spark.range(bench.rows(KEYS))
        self.count = bench.rows(KEYS)
        self.before = users(keys, 1)
        self.changes = users(keys.where(F.col("id") % CHANGED_ONE_IN == 0), 2)
        self.after = users(keys.where(F.col("id") % CHANGED_ONE_IN != 0), 1).union(self.changes)


def against_dbt_snapshot(bench: Workbench, data: Users) -> Comparison:
    """Both run by dbt in this process, in turn."""
    (root := bench.folder / "project").mkdir()
    project = DbtProject(
        root,
        bench.spark,
        {
            "models/user_versions.sql": MODEL,
            "models/sources.yml": SOURCES,
            "snapshots/user_snapshots.yml": SNAPSHOT,
        },
    )

    def feed(rows: DataFrame, load_id: int) -> DataFrame:
        return rows.withColumns(
            {"sequence": F.lit(load_id).cast("bigint"), "load_id": F.lit(load_id).cast("bigint")}
        )

    project.source("users", data.before)
    project.source("user_changes", feed(data.before, 1))
    project.run("build")
    project.source("users", data.after)
    feed(data.changes, 2).write.format("delta").mode("append").saveAsTable(f"{project.schema}.user_changes")

    def restore(table: str) -> None:
        bench.spark.sql(f"restore table {project.schema}.{table} to version as of 0")

    def versions(table: str, start: str, end: str) -> DataFrame:
        return project.table(table).select(
            "id", *ATTRIBUTES, F.col(start).alias("start"), F.col(end).alias("end")
        )

    return Comparison(
        title=f"1 % of {data.count:,} keys changed: the feed's changes or a snapshot of the full extract",
        rows=data.count,
        variants=[
            Variant(
                name="scd2",
                prepare=lambda: restore("user_versions"),
                run=lambda: project.run("run", "--select", "user_versions"),
                result=lambda: versions("user_versions", "effective_from", "effective_to"),
            ),
            Variant(
                name="dbt snapshot",
                prepare=lambda: restore("user_snapshots"),
                run=lambda: project.run("snapshot"),
                result=lambda: versions("user_snapshots", "dbt_valid_from", "dbt_valid_to"),
            ),
        ],
        aims=[Aim(variant="scd2", baseline="dbt snapshot", at_most=0.5)],
        repetitions=3,
        note=(
            "Not the same input: scd2 reads the new changes of a feed, the snapshot compares the full extract with "
            "its table and also finds deletions. Both times include dbt's own work for one node."
        ),
    )


def against_mack(bench: Workbench, data: Users) -> Comparison:
    """The statements alone, on the same changes; mack assumes that they come in order and once."""
    render = MacroRenderer(bench.folder / "render", bench.spark)
    history: dict[str, Any] = {
        "key": {"id": "bigint"},
        "tracked": dict.fromkeys(ATTRIBUTES, "string"),
        "untracked": {},
        "absent": [],
        "changed_at": "updated_at",
        "changed_at_type": "timestamp",
        "sequence": None,
        "is_deleted": None,
        "incomplete": {
            "relation": "user_versions",
            "types": {"id": "bigint", "updated_at": "timestamp"} | dict.fromkeys(ATTRIBUTES, "string"),
            "partitions": [],
            "key": ["id"],
            "nullable_key": [],
            "sequence": ["updated_at"],
            "is_deleted": None,
            "on_null_key": "fail",
        },
    }
    ours, theirs = str(bench.folder / "ours"), str(bench.folder / "theirs")
    changes = str(bench.folder / "changes")
    data.changes.write.format("delta").save(changes)
    data.before.createOrReplaceTempView("users_before")
    bench.spark.sql(render("_scd2_rows", history=history, batch="users_before")).write.format("delta").save(
        ours
    )
    data.before.selectExpr(
        "id",
        *ATTRIBUTES,
        "true as is_current",
        "updated_at as effective_time",
        "cast(null as timestamp) as end_time",
    ).write.format("delta").save(theirs)
    merge = render("_scd2_merge", history=history, batch=f"delta.`{changes}`", target=f"delta.`{ours}`")

    def upsert() -> None:
        mack.type_2_scd_upsert(
            DeltaTable.forPath(bench.spark, theirs),
            bench.table(changes).withColumnRenamed("updated_at", "effective_time"),
            "id",
            ATTRIBUTES,
        )

    def restore(path: str) -> None:
        bench.spark.sql(f"restore table delta.`{path}` to version as of 0")

    def versions(path: str, start: str, end: str) -> DataFrame:
        rows = bench.table(path)
        return rows.select(
            "id", *ATTRIBUTES, F.col(start).alias("start"), F.col(end).alias("end"), "is_current"
        )

    return Comparison(
        title=f"1 % of {data.count:,} keys changed: the same changes merged by scd2 and by mack",
        rows=data.count,
        variants=[
            Variant(
                name="scd2",
                prepare=lambda: restore(ours),
                run=lambda: bench.spark.sql(merge),
                result=lambda: versions(ours, "effective_from", "effective_to"),
            ),
            Variant(
                name="mack",
                prepare=lambda: restore(theirs),
                run=upsert,
                result=lambda: versions(theirs, "effective_time", "end_time"),
            ),
        ],
        repetitions=3,
        note=(
            "One change a key and in order, without NULL, because mack (0.5.0) is only right then: it fails on two "
            "changes of a key, ignores changes to and from NULL and puts a late change at the end."
        ),
    )


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """Yield the comparisons; the second starts from tables of its own."""
    data = Users(bench)
    yield against_dbt_snapshot(bench, data)
    yield against_mack(bench, data)
