"""On another adapter than dbt-spark the package changes nothing and refuses its options.

dbt runs without a database and its statements are compared. The stand-in is a real adapter of dbt with dbt-spark as its
parent, as dbt-databricks is, and with macros of its own. `make databricks` installs dbt-databricks and runs the same
comparison with it; until then that test is skipped, and no behaviour of the catalog rests on it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.dbt_project import REPOSITORY

DATABRICKS = REPOSITORY / ".venv-databricks" / "bin" / "python"
STANDIN = {
    "dbt/adapters/standin/__init__.py": """
from dataclasses import dataclass, field

from dbt.adapters.base import AdapterPlugin
from dbt.adapters.base.relation import BaseRelation, Policy
from dbt.adapters.spark import SparkAdapter, SparkConnectionManager, SparkCredentials, SparkRelation
from dbt.include import standin

class Connections(SparkConnectionManager):
    TYPE = "standin"

@dataclass
class Credentials(SparkCredentials):
    @property
    def type(self):
        return "standin"

    def __post_init__(self):
        \"\"\"Keep the catalog.\"\"\"

    def _connection_keys(self):
        return ("host", "database", "schema")

@dataclass
class AllParts(Policy):
    database: bool = True

@dataclass(frozen=True, eq=False, repr=False)
class Relation(SparkRelation):
    include_policy: Policy = field(default_factory=AllParts)

    def __post_init__(self):
        \"\"\"Keep the catalog.\"\"\"

    def render(self):
        return BaseRelation.render(self)

class StandinAdapter(SparkAdapter):
    ConnectionManager = Connections
    Relation = Relation

Plugin = AdapterPlugin(StandinAdapter, Credentials, standin.PACKAGE_PATH, dependencies=["spark"])
""",
    "dbt/adapters/standin/__version__.py": "version = '1.0.0'\n",
    "dbt/include/standin/__init__.py": "import os\n\nPACKAGE_PATH = os.path.dirname(__file__)\n",
    "dbt/include/standin/dbt_project.yml": "{name: dbt_standin, config-version: 2, macro-paths: [macros]}",
    "dbt/include/standin/macros/own.sql": """
{% macro standin__create_table_as(temporary, relation, compiled_code, language='sql') %}
    standin create_table_as {{ relation }} {{ partition_cols('by') }}
    {{ location_clause() }} {{ tblproperties_clause() }} as {{ compiled_code }}
{% endmacro %}
{% macro standin__partition_cols(label, required=false) %}standin partition_cols {{ label }}{% endmacro %}
{% macro standin__location_clause() %}standin location_clause {{ config.get('location_root') }}{% endmacro %}
{% macro standin__tblproperties_clause() %}standin tblproperties_clause {{ config.get('tblproperties') }}{% endmacro %}
{% macro standin__get_merge_sql(target, source, unique_key, dest_columns, incremental_predicates) %}
    standin get_merge_sql {{ target }} {{ source }} {{ unique_key }} {{ incremental_predicates }}
{% endmacro %}
{% macro standin__snapshot_staging_table(strategy, source_sql, target_relation) %}
    standin snapshot_staging_table {{ target_relation }} {{ source_sql }}
{% endmacro %}
{% macro standin__build_snapshot_table(strategy, sql) %}
    standin build_snapshot_table {{ sql }}
{% endmacro %}
{% macro standin__create_columns(relation, columns) %}
    {% do run_query('standin create_columns ' ~ relation) %}
{% endmacro %}
{% macro standin__snapshot_merge_sql(target, source, insert_cols) %}
    standin snapshot_merge_sql {{ target }} {{ source }} {{ insert_cols }}
{% endmacro %}
{% macro standin__generate_database_name(custom_database_name=none, node=none) %}
    {{ return(custom_database_name or target.database) }}
{% endmacro %}
{% macro standin__process_schema_changes(on_schema_change, source_relation, target_relation) %}
    {% do run_query('standin process_schema_changes ' ~ on_schema_change ~ ' ' ~ source_relation ~ target_relation) %}
    {{ return({}) }}
{% endmacro %}
{% macro standin__persist_constraints(relation, model) %}
    {% do run_query('standin persist_constraints ' ~ relation) %}
{% endmacro %}
{% macro standin__persist_docs(relation, model, for_relation, for_columns) %}
    {% do run_query('standin persist_docs ' ~ relation) %}
{% endmacro %}
""",
}
PROFILES = {
    "standin": "{type: standin, method: session, host: nowhere, database: lake, schema: shop, threads: 1}",
    "databricks": "{type: databricks, host: nowhere.invalid, http_path: /sql/1.0/warehouses/none, token: none, "
    "catalog: main, schema: shop, threads: 1}",
}
MERGE = "materialized='incremental', incremental_strategy='merge', file_format='delta'"
MODELS = {
    "whole": "materialized='table', file_format='delta', liquid_clustered_by='id', tblproperties={'a': 'b'}",
    "merged": f"{MERGE}, unique_key='id', merge_exclude_columns=['name'], liquid_clustered_by=['id', 'name'], "
    "persist_docs={'relation': true, 'columns': true}",
    "merged_by_two": f"{MERGE}, unique_key=['id', 'name'], on_schema_change='append_new_columns'",
    "evolved": f"{MERGE}, unique_key='id', merge_with_schema_evolution=true, skip_not_matched_step=true",
    "appended": "materialized='incremental', incremental_strategy='append', file_format='delta'",
    "overwritten": "materialized='incremental', incremental_strategy='insert_overwrite', partition_by='id', "
    "file_format='delta'",
    "contracted": "materialized='table', file_format='delta', contract={'enforced': true}",
    "shown": "materialized='view'",
}
ROW = "select 1 as id, 'a' as name, timestamp'2026-01-01 00:00:00' as at"
DESCRIBED = """
models:
  - {name: merged, description: it is a table, columns: [{name: id, description: the id}]}
  - name: contracted
    constraints: [{type: check, name: positive, expression: id > 0}]
    columns:
      - {name: id, data_type: int, constraints: [{type: not_null}]}
      - {name: name, data_type: string}
      - {name: at, data_type: timestamp}
"""
HISTORY = (
    "{% snapshot history %}{{ config(unique_key='id', strategy='timestamp', updated_at='at', file_format='delta') }}\n"
    f"{ROW}\n{{% endsnapshot %}}"
)
COMMANDS = ("build", "build --exclude shown", "build --full-refresh --exclude shown")


def sent(
    root: Path,
    adapter: str,
    python: Path,
    *,
    with_package: bool,
    models: dict[str, str] = MODELS,
    others: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return the statements and the errors of a project on `adapter`; `others` are files in place of DESCRIBED."""
    dispatch = "\ndispatch: [{macro_namespace: dbt, search_order: [shop, lakehouse_patterns, dbt]}]\n"
    files = {
        "dbt_project.yml": "name: shop\nversion: '1.0'\nconfig-version: 2\nprofile: shop\n"
        + f"flags: {{send_anonymous_usage_stats: false}}{dispatch if with_package else ''}",
        "profiles.yml": f"shop: {{target: own, outputs: {{own: {PROFILES[adapter]}}}}}",
    } | (others or {"models/described.yml": DESCRIBED, "snapshots/history.sql": HISTORY})
    files |= {f"models/{name}.sql": f"{{{{ config({config}) }}}}\n{ROW}" for name, config in models.items()}
    project = root / adapter / ("with" if with_package else "without")
    for path, text in [*((project / path, text) for path, text in files.items()), *standin_files(root)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if with_package:
        (project / "dbt_packages").mkdir()
        (project / "dbt_packages" / "lakehouse_patterns").symlink_to(REPOSITORY / "macros")
    done = subprocess.run(
        [python, "-P", REPOSITORY / "tests" / "support" / "sent_statements.py", project, *COMMANDS],
        env=os.environ | {"PYTHONPATH": str(root / "standin") if adapter == "standin" else ""},
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def standin_files(root: Path) -> list[tuple[Path, str]]:
    """Return the stand-in's files, to be found as dbt finds an installed adapter."""
    return [(root / "standin" / name, text) for name, text in STANDIN.items()]


def require_the_same(ours: dict[str, Any], alone: dict[str, Any]) -> None:
    """Require the same statements of the same nodes, up to the names and times that dbt takes again for each run."""

    def settled(found: dict[str, Any]) -> Any:
        text = re.sub(r"\w*(__dbt_tmp|dbt_tmp_)\w*|202\d-\d\d-\d\d[ T][\d:.+]+", "@", json.dumps(found))
        return {
            command: {
                node: lines for node, lines in nodes.items() if node.split(".")[0] in ("model", "snapshot")
            }
            for command, nodes in json.loads(text)["statements"].items()
        }

    assert alone["errors"] == ours["errors"] == []
    for command in COMMANDS:
        nodes = settled(alone)[command]
        assert len(nodes) >= len(MODELS)
        for node, lines in nodes.items():
            assert settled(ours)[command][node] == lines, node


def overrides() -> set[str]:
    """Return the macros of dbt-spark that the package overrides."""
    texts = (path.read_text(encoding="utf-8") for path in (REPOSITORY / "macros").rglob("*.sql"))
    return {name for text in texts for name in re.findall(r"{%-? macro spark__(\w+)\(", text)}


def test_a_model_without_options_gets_the_macros_of_its_own_adapter(tmp_path: Path) -> None:
    ours = sent(tmp_path, "standin", Path(sys.executable), with_package=True)
    require_the_same(ours, sent(tmp_path, "standin", Path(sys.executable), with_package=False))

    assert {name for name in overrides() if f"standin {name} " not in json.dumps(ours)} == set()


def test_a_relation_keeps_its_catalog(tmp_path: Path) -> None:
    catalogs = {"lake": ["id", "name", "at"], "other": ["id"]}
    columns = {name: ", ".join(f"{{name: {column}}}" for column in given) for name, given in catalogs.items()}
    sources = [
        f"  - {{name: {name}, database: {name}, schema: raw, tables: [{{name: orders, columns: [{columns[name]}]}}]}}"
        for name in catalogs
    ]
    replica = "{{ lakehouse_patterns.transformation_replicator(source('lake', 'orders')) }}"
    files = {
        "models/sources.yml": "\n".join(["sources:", *sources]),
        "models/replica.sql": f"select {replica} from {{{{ source('lake', 'orders') }}}}",
        "models/ledger.sql": "select * from {{ lakehouse_patterns._readiness_table() }}",
        "models/aside.sql": "select * from {{ lakehouse_patterns.relation_beside(this, '__quarantine') }}",
    }
    found = sent(tmp_path, "standin", Path(sys.executable), with_package=True, models={}, others=files)
    assert found["errors"] == []
    shown = {node.split(".")[-1]: " ".join(lines) for node, lines in found["statements"]["build"].items()}
    assert "`id` as `id`,\n    `name` as `name`,\n    `at` as `at` from lake.raw.orders" in shown["replica"]
    assert "from lake.shop.observability_readiness" in shown["ledger"]
    assert "from lake.shop.aside__quarantine" in shown["aside"]


def test_options_on_another_adapter_are_refused_in_one_sentence(tmp_path: Path) -> None:
    meta = "meta={'lakehouse_patterns': {'merger': {'sequence': 'at'}}}"
    models = {"asked": f"{MERGE}, unique_key='id', {meta}"}
    errors = sent(tmp_path, "standin", Path(sys.executable), with_package=True, models=models)["errors"]

    sentence = (
        "lakehouse_patterns: meta.lakehouse_patterns.merger of asked needs the adapter spark, got 'standin', on which "
        "the pattern was never tested: remove it, or run the model with dbt-spark"
    )
    assert len(errors) == len(COMMANDS)
    assert all(sentence in error for error in errors)


@pytest.mark.skipif(not DATABRICKS.exists(), reason="dbt-databricks is not installed: run `make databricks`")
def test_a_model_without_options_renders_what_dbt_databricks_alone_gives(tmp_path: Path) -> None:
    ours = sent(tmp_path, "databricks", DATABRICKS, with_package=True)
    require_the_same(ours, sent(tmp_path, "databricks", DATABRICKS, with_package=False))

    text = json.dumps(ours)
    assert "CLUSTER BY (id, name)" in text
    assert "DBT_INTERNAL_SOURCE.id <=> DBT_INTERNAL_DEST.id" in text
