"""Renders a macro of the package in dbt's own context without running a node, in milliseconds a call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dbt.adapters.factory import FACTORY, get_adapter_by_type
from dbt.context.providers import generate_runtime_macro_context
from pyspark.sql import SparkSession

from tests.support.dbt_project import PACKAGE, DbtProject
from tests.support.session import settings_kept


class MacroRenderer:
    """Renders macros in a project that holds the package and one model."""

    def __init__(self, root: Path, spark: SparkSession, package_alone: DbtProject | None = None) -> None:
        """Make the project at ``root``; for ``package_alone`` see :class:`DbtProject`."""
        files = {"models/one.sql": "select 1 as one"}
        self._project = DbtProject(root, spark, files, package_alone=package_alone)
        # One real call registers the adapter in this process.
        self._project.run("compile")
        self._adapter = get_adapter_by_type("spark")

    def __call__(self, macro: str, *, package: str = PACKAGE, **arguments: Any) -> Any:
        """Return the result of ``macro`` for ``arguments``: its SQL, or the value that it returns.

        Raises:
            dbt_common.exceptions.DbtRuntimeError: the macro refused its arguments.
        """
        adapter = self._adapter
        # The process has one adapter, that of the last call of dbt; its variables would be rendered here.
        FACTORY.adapters["spark"] = adapter
        adapter.set_macro_context_generator(generate_runtime_macro_context)
        adapter.set_macro_resolver(self._project.manifest())
        with adapter.connection_named("render"), settings_kept(self._project.spark):
            result = adapter.execute_macro(macro, project=package, kwargs=arguments)
        return str(result).strip() if isinstance(result, str) else result
