"""Audit-Write-Audit-Publish against an unaudited dbt table of the same rows.

Whole dbt calls are timed, as a user waits for them; dbt itself takes about a second of each.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness import Aim, Comparison, Variant, Workbench
from tests.support.dbt_project import DbtProject

ROWS = 5_000_000
AGGREGATED_ROWS = 20_000_000
PLAIN = "{{ config(materialized='table') }}\n"
AUDITED = "{{ config(materialized='awap', meta={'lakehouse_patterns': {'awap': {'audits': [%s]}}}) }}\n"
ROW_AUDITS = """
    {'name': 'rows', 'type': 'row_count', 'min': 1},
    {'name': 'page_known', 'type': 'null_share', 'column': 'page', 'max': 0.05},
    {'name': 'user_known', 'type': 'null_share', 'column': 'user_id', 'max': 0.05},
    {'name': 'visitors', 'type': 'measure', 'expression': 'approx_count_distinct(user_id)', 'min': 1},
    {'name': 'duration', 'type': 'record', 'valid_when': 'duration >= 0'}
"""
# The same, but invalid rows would go to the rejects: there are none, and then one in 600.
DISPATCHING = ROW_AUDITS.replace(
    "'duration >= 0'", "'duration >= 0', 'outcome': 'dispatch', 'max_invalid_share': 0.25"
)
REJECTING = DISPATCHING.replace("duration >= 0", "duration > 0")
AGGREGATE_AUDITS = """
    {'name': 'rows', 'type': 'row_count', 'min': 1},
    {'name': 'visitors', 'type': 'change', 'expression': 'sum(visitors)', 'min': -0.5},
    {'name': 'plausible', 'type': 'record', 'valid_when': 'visits >= visitors'}
"""
PASS_THROUGH = "select * from {{ source('raw', 'visits') }}"
AGGREGATE = """select
    day,
    page,
    count(*) as visits,
    count(distinct user_id) as visitors,
    avg(duration) as duration
from {{ source('raw', 'visits_to_count') }}
group by day, page"""
SOURCES = """version: 2
sources:
  - {name: raw, schema: "{{ target.schema }}", tables: [{name: visits}, {name: visits_to_count}]}
"""
MODELS = {
    "aggregate_plain": PLAIN + AGGREGATE,
    "aggregate_audited": AUDITED % AGGREGATE_AUDITS + AGGREGATE,
    "rows_plain": PLAIN + PASS_THROUGH,
    "rows_audited": AUDITED % ROW_AUDITS + PASS_THROUGH,
    "rows_dispatched": AUDITED % DISPATCHING + PASS_THROUGH,
    "rows_rejected": AUDITED % REJECTING + PASS_THROUGH,
}


def comparisons(bench: Workbench) -> Iterator[Comparison]:
    """An aggregate of visits, then visits passed through."""
    spark, rows, aggregated = bench.spark, bench.rows(ROWS), bench.rows(AGGREGATED_ROWS)
    files = {f"models/{name}.sql": sql for name, sql in MODELS.items()} | {"models/sources.yml": SOURCES}
    root = bench.folder / "awap"
    root.mkdir()
    project = DbtProject(root, spark, files)
    attributes = [
        "date '2026-01-01' + cast(id % 10 as int) as day",
        "pmod(xxhash64(id), 200003) as user_id",
        "concat('category_', id % 20, '/article_', id % 1009) as page",
        "pmod(xxhash64(id, 1), 600) as duration",
    ]
    identity = [
        "md5(cast(id as string)) as visit_id",
        "timestamp_seconds(1767225600 + id % 864000) as event_time",
    ]
    project.source("visits", spark.range(rows).selectExpr(*identity, *attributes))
    project.source("visits_to_count", spark.range(aggregated).selectExpr(*attributes))

    def variant(name: str, model: str) -> Variant:
        return Variant(name, lambda: project.run("run", "--select", model), lambda: project.table(model))

    yield Comparison(
        "An aggregate",
        aggregated,
        [variant("dbt table", "aggregate_plain"), variant("awap, 3 audits", "aggregate_audited")],
        [Aim("awap, 3 audits", "dbt table", at_most=1.3)],
        repetitions=3,
        note="The result has about 20,000 rows; what is audited is small beside what is computed.",
    )
    yield Comparison(
        "Rows passed through",
        rows,
        [
            variant("dbt table", "rows_plain"),
            variant("awap, 5 audits", "rows_audited"),
            variant("awap, 5 audits, one dispatching", "rows_dispatched"),
            Variant(
                "awap, 5 audits, 1 of 600 rows rejected",
                lambda: project.run("run", "--select", "rows_rejected"),
                result=None,
            ),
        ],
        [
            Aim("awap, 5 audits", "dbt table", at_most=2.5),
            Aim("awap, 5 audits, one dispatching", "dbt table", at_most=2.5),
        ],
        repetitions=3,
        note=(
            "The worst case: nothing is computed, so that every row is written twice and read twice. Where rows "
            "are rejected, each row is judged once more for the rejects and once more for publishing."
        ),
    )
