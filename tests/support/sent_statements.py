"""Runs a dbt project without a database and prints the SQL that its nodes send, as JSON.

python tests/support/sent_statements.py PROJECT [COMMAND …]

Every statement succeeds and returns no rows. The relations of the first command's nodes exist in the later commands,
as Delta tables with the columns of COLUMNS. The script runs wherever dbt-core and the profile's adapter are installed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import agate
from dbt.adapters.contracts.connection import AdapterResponse, ConnectionState
from dbt.cli.main import dbtRunner

COLUMNS = {"id": "int", "name": "string", "at": "timestamp"}
SNAPSHOT_COLUMNS = COLUMNS | {
    "dbt_scd_id": "string",
    "dbt_updated_at": "timestamp",
    "dbt_valid_from": "timestamp",
    "dbt_valid_to": "timestamp",
}


class Recorder:
    """Takes the place of an adapter's database."""

    def __init__(self, adapter_type: str) -> None:
        self.sent: dict[str, list[str]] = defaultdict(list)
        self.existing: set[str] = set()
        plugin = importlib.import_module(f"dbt.adapters.{adapter_type}").Plugin
        self._replace_connections(plugin.adapter.ConnectionManager)
        self._replace_answers(plugin.adapter)
        if adapter_type == "databricks":
            self._replace_databricks(plugin.adapter)

    def _replace_connections(self, manager: Any) -> None:
        def opened(_: Any, connection: Any) -> Any:
            connection.state, connection.handle = ConnectionState.OPEN, object()
            return connection

        def execute(connections: Any, sql: str, *_: Any, **__: Any) -> tuple[AdapterResponse, agate.Table]:
            self.sent[connections.get_thread_connection().name].append(sql)
            return AdapterResponse("OK"), agate.Table([])

        def add_query(connections: Any, sql: str, *_: Any, **__: Any) -> tuple[Any, None]:
            execute(connections, sql)
            return connections.get_thread_connection(), None

        manager.open = classmethod(opened)
        manager.close = classmethod(lambda _, connection: connection)
        manager.execute, manager.add_query = execute, add_query
        manager.cleanup_all = manager.release = lambda _: None
        manager.cancel_open = lambda _: []

    def _replace_answers(self, adapter: Any) -> None:
        def columns(one: Any, relation: Any) -> list[Any]:
            types = SNAPSHOT_COLUMNS if relation.identifier == "history" else COLUMNS
            return [one.Column(name, dtype) for name, dtype in types.items()]

        def relations(one: Any, schema: Any, **_: Any) -> list[Any]:
            return [
                one.Relation.create(
                    database=schema.database,
                    schema=schema.schema,
                    identifier=name,
                    type=one.Relation.get_relation_type.Table,
                    is_delta=True,
                    **({"metadata": {"Provider": "delta"}} if one.type() == "databricks" else {}),
                )
                for name in sorted(self.existing)
            ]

        adapter.get_columns_in_relation = columns
        adapter.get_column_schema_from_query = lambda one, _: columns(one, one.Relation.create(identifier=""))
        adapter.list_relations_without_caching = relations
        adapter.check_schema_exists = lambda *_: True
        adapter.list_schemas = lambda *_: ["shop"]

    def _replace_databricks(self, adapter: Any) -> None:
        from dbt.adapters.databricks.relation_configs.incremental import IncrementalTableConfig

        adapter.ConnectionManager.compare_dbr_version = lambda *_: 0
        adapter.ConnectionManager.is_cluster = lambda _: True
        adapter.get_relation_config = lambda *_: None
        adapter.get_persist_doc_columns = lambda _one, _existing, columns: columns
        IncrementalTableConfig.get_changeset = lambda *_: None


def main(folder: str, *commands: str) -> None:
    """Run the commands one after the other and print what was sent and every error."""
    project = Path(folder)
    profile = (project / "profiles.yml").read_text(encoding="utf-8")
    recorder = Recorder(profile.split("type: ")[1].split(",")[0])
    place = ["--project-dir", folder, "--profiles-dir", folder]
    place += ["--log-path", str(project / "logs"), "--target-path", str(project / "target")]
    printed: dict[str, Any] = {"statements": {}, "errors": []}
    for command in commands:
        with contextlib.redirect_stdout(io.StringIO()):
            done = dbtRunner().invoke([*command.split(), *place])
        if done.exception:
            printed["errors"].append(str(done.exception))
        nodes = [one for one in getattr(done.result, "results", []) if one.node.resource_type != "operation"]
        results = getattr(done.result, "results", [])
        printed["errors"] += [one.message for one in results if one.status not in ("success", "skipped")]
        printed["statements"][command] = dict(recorder.sent)
        recorder.sent = defaultdict(list)
        recorder.existing |= {one.node.name for one in nodes}
    sys.stdout.write(json.dumps(printed))


if __name__ == "__main__":
    main(*sys.argv[1:])
