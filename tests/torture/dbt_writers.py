"""Writers that are models and snapshots: dbt runs once for each day."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from tests.support.session import environment
from tests.torture.inputs import USERS, changes, extract
from tests.torture.writer import DAYS, Run, Writer, in_order, nothing, orchestrated

if TYPE_CHECKING:
    from tests.support.dbt_project import DbtProject

MODELS = {
    "merged_users": """
        {{ config(materialized='incremental', incremental_strategy='merge', unique_key='id',
            meta={'lakehouse_patterns': {'merger': {
                'sequence': ['sequence'], 'deletes': 'soft', 'is_deleted': 'is_deleted'}}}) }}
        select * from changes
    """,
    "users_history": """
        {{ config(materialized='scd2', unique_key='id', meta={'lakehouse_patterns': {'scd2': {
            'changed_at': 'changed_at', 'sequence': 'sequence', 'is_deleted': 'is_deleted'}}}) }}
        select * from changes
    """,
    "audited_users": """
        {{ config(materialized='awap', meta={'lakehouse_patterns': {'awap': {'audits': [
            {'name': 'has a name', 'type': 'record', 'valid_when': 'name is not null', 'outcome': 'dispatch',
             'max_invalid_share': 0.5}]}}}) }}
        select * from changes
    """,
    "appended_changes": """
        {{ config(materialized='incremental', incremental_strategy='append') }}
        select * from changes
        where {{ lakehouse_patterns.incremental_window('changed_at', bootstrap_from='2024-03-01T00') }}
    """,
    "deletions": """
        {{ config(materialized='incremental', incremental_strategy='append',
            post_hook='{{ lakehouse_patterns.incremental_watermark() }}') }}
        select * from changes
        where is_deleted and {{ lakehouse_patterns.incremental_window('changed_at', source='changes') }}
    """,
    "overwritten_days": """
        {{ config(materialized='data_overwrite', partition_by='day', meta={'lakehouse_patterns': {'data_overwrite': {
            'where': "day = date'{logical_date}'"}}}) }}
        select * from (select id, name, to_date(changed_at) as day from changes)
        where {{ lakehouse_patterns.overwritten() }}
    """,
    "unit_changes": """
        {{ config(materialized='unit_tables', meta={'lakehouse_patterns': {'fast_metadata_cleaner': {
            'unit': 'month'}}}) }}
        select * from changes
    """,
    "versioned_users": """
        {{ config(materialized='versioned_table', meta={'lakehouse_patterns': {'full_loader': {
            'key': ['id'], 'keep_versions': 7}}}) }}
        select * from extract
    """,
    "wrapped_users": """
        {{ config(materialized='table') }}
        {{ lakehouse_patterns.wrapper('extract', {'initial': 'left(name, 1)'}) }}
    """,
}
# Started again from the first day, they commit nothing for the days that are done: a window takes no row of them, a
# MERGE changes none.
RESUMING = ("merged_users", "users_history", "appended_changes", "deletions")
# A snapshot is made of tables only, not of the session's views.
SNAPSHOT = """
{% snapshot users_snapshot %}
    {{ config(unique_key='id', strategy='lakehouse_patterns.timestamp', updated_at='changed_at',
        hard_deletes='invalidate') }}
    select * from delta.`{{ env_var('LAKEHOUSE_ROOT') }}/../extract`
{% endsnapshot %}
"""


def each_day_built(file: str, text: str, *, again: bool) -> Run:
    """Return a run of dbt for each day: again from the first, or of those that aren't done yet."""

    def run(spark: SparkSession, folder: Path) -> None:
        # dbt takes seconds to import, and each process of another writer would wait for it.
        from tests.support.dbt_project import DbtProject

        project = DbtProject(folder / f"project_{folder.name}", spark, {file: text})
        _adopt(project)
        command = file.split("/")[0].removesuffix("s").replace("model", "run")

        def build(_: SparkSession, __: Path, day: dt.date) -> None:
            spark.createDataFrame(changes(day), USERS).coalesce(1).createOrReplaceTempView("changes")
            users = spark.createDataFrame(extract(day), USERS).coalesce(1)
            users.createOrReplaceTempView("extract")
            if command == "snapshot":
                users.write.format("delta").mode("overwrite").save(str(project.root / "extract"))
            with environment(LOGICAL_DATE=f"{day}"):
                project.run(command)

        (in_order if again else orchestrated)(build)(spark, folder)

    return run


def _adopt(project: DbtProject) -> None:
    """Make a new process's catalog know the tables, as the adopting hook and a metastore do for a user."""
    known = {row.tableName for row in project.spark.sql(f"show tables in {project.schema}").collect()}
    for place in (project.location, project.root / "database"):
        # A folder without a first entry is what a killed creation leaves: no metastore has heard of it.
        for entry in place.glob("*/_delta_log/00000000000000000000.json"):
            table = entry.parents[1]
            if table.name not in known:
                project.spark.sql(
                    f"create table {project.schema}.{table.name} using delta location '{table}'"
                )


def _writer(
    kind: str, name: str, text: str, *tables: str, again: bool = True, resumes: bool = False
) -> Writer:
    # Two runs of one project at once share its folder: nobody promises that.
    return Writer(
        f"dbt {name}",
        nothing,
        each_day_built(f"{kind}/{name}.sql", text, again=again),
        tuple(f"project_{{folder}}/{table}" for table in tables),
        resumes=resumes,
        pairs=False,
    )


def dbt_writers() -> Iterator[Writer]:
    """Yield one writer for each kind of materialization."""
    managed = {
        "unit_changes": ["unit_changes_2024_03"],
        "versioned_users": [f"versioned_users_{day:%Y%m%d}" for day in DAYS],
    }
    for name, text in MODELS.items():
        folders = [f"database/{table}" for table in managed.get(name, ())] or [f"lakehouse/{name}"]
        yield _writer("models", name, text, *folders, resumes=name in RESUMING)
    # Yesterday's extract after today's would look as if users were deleted.
    yield _writer(
        "snapshots", "users_snapshot", SNAPSHOT, "lakehouse/users_snapshot", again=False, resumes=True
    )
