"""The adopting hook: a metastore that knows nothing never makes dbt replace a table."""

from __future__ import annotations

from tests.support.rows import assert_rows

FILES = {
    "models/kept.sql": (
        "{{ config(materialized='incremental', incremental_strategy='append') }}\n"
        "select * from {{ source('raw', 'numbers') }}"
    ),
    "models/seen.sql": "{{ config(materialized='view') }} select * from {{ source('raw', 'by_path') }}",
    "models/schema.yml": """
sources:
  - name: raw
    schema: "{{ target.schema }}"
    tables:
      - {name: numbers}
      - {name: by_path, external: {location: "{{ env_var('LAKEHOUSE_ROOT') }}/by_path"}}
""",
    "macros/start.sql": "{% macro start() %}{{ lakehouse_patterns.adopt_tables() }}{% endmacro %}",
}


def test_tables_and_sources_are_adopted_from_their_paths(spark, make_project):
    project = make_project(FILES, settings={"on-run-start": ["{{ start() }}"]})
    spark.range(3).write.format("delta").save(f"{project.location}/by_path")
    project.source("numbers", spark.range(2))
    project.run("run")
    spark.sql(f"drop table {project.schema}.kept")
    spark.sql(f"drop table {project.schema}.by_path")
    project.run("run")
    assert_rows(project.table("kept"), [(0,), (1,), (0,), (1,)])
    assert [entry["version"] for entry in project.history("kept")] == [1, 0]
    assert_rows(project.table("seen"), [(0,), (1,), (2,)])


def test_the_characters_of_a_folder_are_no_pattern(spark, render, tmp_path):
    root = tmp_path / "lake [1] {a,b} what*?, 100%"
    tables = [str(root / "silver" / name) for name in ("here", "here_too", "absent")]
    for other in ("lake 1 a what*?, 100%", "lake [1] a what", "lake [1] {a,b} whatever?, 100%"):
        spark.range(1).write.format("delta").save(str(tmp_path / other / "silver" / "absent"))
    for table in tables[:2]:
        spark.range(1).write.format("delta").save(table)
    sql = render("delta_logs_sql", root="/", paths=[table.lstrip("/") for table in tables])
    found = {row.location.removeprefix("file:") for row in spark.sql(sql).collect()}
    assert found == set(tables[:2])


def test_without_the_hook_the_history_is_lost(spark, make_project):
    project = make_project(FILES)
    spark.range(3).write.format("delta").save(f"{project.location}/by_path")
    spark.sql(f"create table {project.schema}.by_path using delta location '{project.location}/by_path'")
    project.source("numbers", spark.range(2))
    project.run("run")
    spark.sql(f"drop table {project.schema}.kept")
    project.run("run")
    assert_rows(project.table("kept"), [(0,), (1,)])
