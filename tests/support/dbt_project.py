"""Throw-away dbt projects that install the package and run in-process on the test session.

A project's files are written once a module and its manifest is kept, so a second run parses nothing:
tests change data (sources), never files, and never pass ``--vars`` (a change re-parses everything).
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from dbt.cli.main import dbtRunner, dbtRunnerResult
from dbt.parser.manifest import ManifestLoader
from pyspark.sql import DataFrame, SparkSession

from tests.support.session import environment, settings_kept

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "lakehouse_patterns"

PROFILES = """
harness:
  target: test
  outputs:
    test:
      type: spark
      method: session
      host: localhost
      schema: {schema}
      threads: 1
"""


class DbtFailed(AssertionError):
    """A dbt call failed that should have passed; the message holds each failed node with its error."""


def raw_tables(*names: str) -> str:
    """Return the YAML of a dbt source ``raw``, whose tables are in the project's own database."""
    tables = [{"name": name} for name in names]
    return yaml.safe_dump({"sources": [{"name": "raw", "schema": "{{ target.schema }}", "tables": tables}]})


class DbtProject:
    """One dbt project named ``harness`` in its own folder, with its tables in one database."""

    def __init__(
        self,
        root: Path,
        spark: SparkSession,
        files: Mapping[str, str],
        *,
        with_package: bool = True,
        settings: Mapping[str, Any] | None = None,
        package_alone: DbtProject | None = None,
    ) -> None:
        """Write the project; ``files`` maps paths (``models/x.sql``) to their text.

        ``with_package=False`` leaves out our package and its dispatch, to show dbt-spark's own behaviour.
        ``settings`` are added to dbt_project.yml. ``package_alone`` is a parsed project that holds only the package:
        dbt goes on from what it parsed there.
        """
        self.root, self.spark = root, spark
        self.schema = f"harness_{root.name}".replace("-", "_").lower()
        self.location = root / "lakehouse"
        self._manifest: Any = None
        self._last: dbtRunnerResult | None = None
        spark.sql(f"create database if not exists {self.schema} location '{root}/database'")
        self._write(
            "dbt_project.yml", yaml.safe_dump(self._configuration(with_package) | dict(settings or {}))
        )
        self._write("profiles.yml", PROFILES.format(schema=self.schema))
        for name, text in files.items():
            self._write(name, text)
        # dbt reads the hooks of dbt_project.yml only when it parses everything.
        self._package_alone = package_alone if with_package and not settings else None
        if with_package:
            package = root / "dbt_packages" / PACKAGE
            package.parent.mkdir(exist_ok=True)
            if not package.exists():  # another process has been here
                package.symlink_to(REPOSITORY / "macros")

    def _configuration(self, with_package: bool) -> dict[str, Any]:
        configuration: dict[str, Any] = {
            "name": "harness",
            "version": "1.0",
            "profile": "harness",
            "flags": {"send_anonymous_usage_stats": False},
            "models": {"+file_format": "delta", "+location_root": str(self.location)},
            "snapshots": {"+file_format": "delta", "+location_root": str(self.location)},
        }
        if with_package:
            configuration["dispatch"] = [
                {"macro_namespace": "dbt", "search_order": ["harness", PACKAGE, "dbt"]},
            ]
        return configuration

    def _write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def source(self, name: str, rows: DataFrame) -> None:
        """Create or replace the Delta table ``name`` in the project's database from ``rows``."""
        rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true").saveAsTable(
            f"{self.schema}.{name}"
        )

    def table(self, name: str) -> DataFrame:
        """Return the current rows of a table or view in the project's database."""
        self.spark.catalog.refreshTable(f"{self.schema}.{name}")
        return self.spark.table(f"{self.schema}.{name}")

    def history(self, name: str) -> list[dict[str, Any]]:
        """Return the Delta history of a table, newest first."""
        return [
            r.asDict(recursive=True)
            for r in self.spark.sql(f"describe history {self.schema}.{name}").collect()
        ]

    def compiled(self, name: str) -> str:
        """Return the SQL that the last run compiled for node ``name``."""
        return next((self.root / "target" / "compiled").rglob(f"{name}.sql")).read_text(encoding="utf-8")

    def executed(self, name: str) -> str:
        """Return the SQL that the last run executed for node ``name``, materialization included."""
        return next((self.root / "target" / "run").rglob(f"{name}.sql")).read_text(encoding="utf-8")

    def run(self, *arguments: str) -> dbtRunnerResult:
        """Call dbt (``"build", "--select", "x"``); require success of every node.

        Raises:
            DbtFailed: the call or a node failed; the message holds every error.
        """
        result = self._invoke(arguments)
        if not result.success:
            raise DbtFailed(self._errors(result))
        return result

    def fails(self, *arguments: str) -> str:
        """Call dbt, require that it fails, and return the text of all its errors."""
        result = self._invoke(arguments)
        if result.success:
            raise AssertionError(f"dbt {' '.join(arguments)} passed, a failure was expected")
        return self._errors(result)

    def outcomes(self, *arguments: str) -> dict[str, str]:
        """Call dbt and return the error of each node of the call, an empty text of a node that passed.

        Raises:
            DbtFailed: the call failed before its first node.
        """
        result = self._invoke(arguments)
        if result.exception:
            raise DbtFailed(str(result.exception))
        passed = {"success", "pass"}
        return {
            r.node.name: "" if r.status in passed else f"{r.node.name}: {r.status}: {r.message}"
            for r in result.result.results
            if r.node.resource_type != "operation"
        }

    def statuses(self) -> dict[str, str]:
        """Return the status (success, pass, …) of each node of the last call, hooks left out."""
        assert self._last is not None
        return {r.node.name: str(r.status) for r in self._last.result if r.node.resource_type != "operation"}

    def manifest(self) -> Any:
        """Return the parsed manifest."""
        if self._manifest is None:
            with self._environment(), self._goes_on(), contextlib.redirect_stdout(io.StringIO()):
                parsed = dbtRunner().invoke(["parse", *self.flags()])
            if not parsed.success:
                raise DbtFailed(str(parsed.exception))
            self._manifest = parsed.result
        return self._manifest

    @contextlib.contextmanager
    def _goes_on(self) -> Iterator[None]:
        """Let dbt's first call go on from what it parsed in `package_alone`.

        dbt itself would parse all macros again, because the schema and the text of dbt_project.yml are others; macros
        depend on neither.
        """
        parsed = Path("target") / "partial_parse.msgpack"
        if self._package_alone is None or (self.root / parsed).exists():
            yield
            return
        (self.root / parsed).parent.mkdir(exist_ok=True)
        shutil.copy(self._package_alone.root / parsed, self.root / parsed)
        with patch.object(ManifestLoader, "is_partial_parsable", lambda *_: (True, None)):
            yield

    def _invoke(self, arguments: tuple[str, ...]) -> dbtRunnerResult:
        manifest = self.manifest()
        self._output = io.StringIO()
        with self._environment(), settings_kept(self.spark), contextlib.redirect_stdout(self._output):
            self._last = dbtRunner(manifest=manifest).invoke([*arguments, *self.flags()])
        return self._last

    def flags(self) -> list[str]:
        """Return the options with which dbt finds this project."""
        return [
            "--project-dir", str(self.root), "--profiles-dir", str(self.root),
            "--log-path", str(self.root / "logs"), "--target-path", str(self.root / "target"),
        ]  # fmt: skip

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        here = Path.cwd()
        with environment(LAKEHOUSE_ROOT=str(self.location), DBT_SEND_ANONYMOUS_USAGE_STATS="false"):
            try:
                yield
            finally:
                os.chdir(here)

    def _errors(self, result: dbtRunnerResult) -> str:
        lines = [str(result.exception)] if result.exception else []
        for node in getattr(result.result, "results", None) or []:
            if str(node.status) in {"error", "fail", "runtime error"}:
                # A run-operation's result has only its id; its error is in the log.
                name = node.node.name if hasattr(node, "node") else node.unique_id
                lines.append(f"{name}: {node.status}: {node.message or self._output.getvalue()[-3000:]}")
        return "\n".join(lines)
