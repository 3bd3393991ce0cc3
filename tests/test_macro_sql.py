"""The macros that jobs call need nothing of dbt that a job doesn't give them."""

import re
from collections.abc import Iterable
from pathlib import Path

import jinja2.meta
import pytest
from jinja2 import nodes

from python_jobs.data_value import distributed_aggregator
from python_jobs.shared.delta import keys, merge
from python_jobs.shared.spark.macro_sql import Macros
from tools.findings import ROOT

# A job's rules name no table for rows without a key.
ONLY_IN_DBT = {"relation_beside"}
NAMES_OF_DBT = {
    "adapter", "api", "builtins", "config", "context", "dbt", "dbt_version", "env_var", "exceptions",
    "execute", "flags", "fromjson", "graph", "invocation_id", "load_result", "log", "model", "modules",
    "project_name", "ref", "return", "run_query", "run_started_at", "schema", "source", "statement",
    "store_result", "target", "this", "thread_id", "tojson", "var",
}  # fmt: skip


@pytest.mark.parametrize(
    "job_module", [keys, merge, distributed_aggregator], ids=["keys", "merge", "distributed_aggregator"]
)
def test_macros_of_jobs_use_what_jobs_give_them(job_module: object) -> None:
    given = Macros(None, job_module._FILES)  # type: ignore[attr-defined,arg-type]
    environment = next(iter(given._macros.values()))._environment
    macros = _macros(environment, job_module._FILES)  # type: ignore[attr-defined]
    source = Path(str(job_module.__file__)).read_text(encoding="utf-8")  # type: ignore[attr-defined]
    waiting, reached = set(re.findall(r'(?:call|_rendered)\(\s*"(\w+)"', source)), set()
    assert waiting
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting |= _called(macros[name]) - ONLY_IN_DBT - reached

    missing = {unknown for name in reached for unknown in _undeclared(environment, macros[name])}
    assert missing & NAMES_OF_DBT == set()


def _macros(environment: jinja2.Environment, files: Iterable[str]) -> dict[str, nodes.Macro]:
    templates = [environment.parse((ROOT / "macros" / file).read_text(encoding="utf-8")) for file in files]
    return {macro.name: macro for template in templates for macro in template.find_all(nodes.Macro)}


def _called(macro: nodes.Macro) -> set[str]:
    found = macro.find_all(nodes.Getattr)
    return {
        call.attr
        for call in found
        if isinstance(call.node, nodes.Name) and call.node.name == "lakehouse_patterns"
    }


def _undeclared(environment: jinja2.Environment, macro: nodes.Macro) -> set[str]:
    template = nodes.Template([macro])
    template.environment = environment
    return jinja2.meta.find_undeclared_variables(template)
