"""Checks that every public macro, argument, model, column, job parameter, function and class has a description.

Names in YAML must match the code in order and spelling, so that a renamed argument can't keep its old text.
A generic test is documented under dbt's name for it (`test_<name>`), and so is a materialization
(`materialization_<name>_<adapter>`).

A model's description ends with its grain, and a test of uniqueness has exactly the grain's columns. A column that holds
personal data has the tag `pii`; without it a replica would copy the data.

    python -m tools.check_documented
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tools.findings import PYTHON_FOLDERS, ROOT, report
from tools.jinja_files import Block, blocks

# "One row per id and effective_from." or, for lines that may be there twice, "One row per valid line; no key."
GRAIN = re.compile(r"One row per (?P<columns>[^.;]+(?:\.\w[^.;]*)*?)(?P<no_key>; no key)?\.$")
PERSONAL = {"login", "email", "payload", "record", "changes", "context"}
NOT_PERSONAL = {"bronze_devices"}
GIVEN_BY_DBT = ("model", "column_name")  # arguments of every generic test: dbt fills them in


def main() -> int:
    """Check the repository and return the exit code."""
    return report(
        [
            *undocumented_macros(ROOT / "macros"),
            *undocumented_models(ROOT),
            *unproved_grains(ROOT),
            *untagged_columns(ROOT),
            *(line for folder in PYTHON_FOLDERS for line in undocumented_python(ROOT / folder)),
        ]
    )


def undocumented_macros(macros: Path) -> Iterator[str]:
    """Yield a line for each public macro, test, materialization and argument that no YAML describes."""
    documented = {entry["name"]: entry for entry in _entries(macros, "macros")}
    declared = {block.name: block for block in blocks(macros)}
    for block in declared.values():
        if block.public:
            yield from _undocumented_block(block, documented.get(block.name))
    for name in documented.keys() - declared.keys():
        yield f"{macros}: the YAML describes the macro '{name}', which no file declares"


def _undocumented_block(block: Block, entry: Mapping[str, Any] | None) -> Iterator[str]:
    where = f"{block.path}:{block.line}"
    if not _described(entry):
        yield f"{where}: {block.kind} '{block.name}' has no description in a _<family>__macros.yml"
    if entry is None:
        return
    described = [argument["name"] for argument in entry.get("arguments", [])]
    expected = [name for name in block.arguments if block.kind != "test" or name not in GIVEN_BY_DBT]
    if block.kind == "test":
        described = [name for name in described if name not in GIVEN_BY_DBT]
    if block.kind != "materialization" and described != expected:
        yield f"{where}: '{block.name}' takes {expected}, its YAML describes {described}"
    for argument in entry.get("arguments", []):
        if not _described(argument):
            yield f"{where}: argument '{argument['name']}' of '{block.name}' has no description"


def undocumented_models(project: Path) -> Iterator[str]:
    """Yield a line for each model, snapshot, source table or listed column without a description.

    The case study's tests prove that the list has all columns, because they have the tables.
    """
    described = relations(project)
    files = [path for folder in ("models", "snapshots") for path in (project / folder).rglob("*.sql")]
    for name in sorted({path.stem for path in files} | described.keys()):
        yield from _undocumented_relation(f"'{name}'", described.get(name))


def relations(project: Path) -> dict[str, dict[str, Any]]:
    """Return the YAML entry of each model, snapshot and source table of a project by its name."""
    return {entry["name"]: entry for entry in [*_models(project), *sources(project)]}


def sources(project: Path) -> list[dict[str, Any]]:
    """Return the YAML entry of each source table of a project."""
    return [table for source in _entries(project / "models", "sources") for table in source["tables"]]


def _models(project: Path) -> list[dict[str, Any]]:
    """Return the YAML entry of each model and snapshot of a project."""
    folders = [(folder, kind) for folder in ("models", "snapshots") for kind in ("models", "snapshots")]
    return [entry for folder, kind in folders for entry in _entries(project / folder, kind)]


def _undocumented_relation(what: str, entry: Mapping[str, Any] | None) -> Iterator[str]:
    if not _described(entry):
        yield f"{what} has no description"
    columns = (entry or {}).get("columns", [])
    if not columns:
        yield f"{what} describes no column"
    for column in columns:
        if not _described(column):
            yield f"{what}: column '{column['name']}' has no description"


def unproved_grains(project: Path) -> Iterator[str]:
    """Yield a line for each model or snapshot whose description states no grain, or a grain that no test proves."""
    for entry in _models(project):
        name, grain = entry["name"], GRAIN.search(" ".join(str(entry.get("description")).split()))
        if grain is None:
            yield f"'{name}': its description must end with 'One row per <columns>.' or '…; no key.'"
        elif not grain["no_key"]:
            columns = re.split(r", | and ", grain["columns"])
            tests = [test for test in entry.get("data_tests", []) if isinstance(test, dict)]
            proved = [test["one_row_per"]["arguments"]["columns"] for test in tests if "one_row_per" in test]
            if proved != [columns]:
                yield f"'{name}': its grain is {columns}, its test one_row_per has {proved}"


def untagged_columns(project: Path) -> Iterator[str]:
    """Yield a line for each column without the tag `pii` whose name suggests personal data."""
    for name, entry in relations(project).items():
        for column in entry.get("columns", []) if name not in NOT_PERSONAL else []:
            if column["name"] in PERSONAL and "pii" not in column.get("config", {}).get("tags", []):
                yield f"'{name}': column '{column['name']}' holds personal data: config: {{tags: [pii]}}"


def undocumented_python(folder: Path) -> Iterator[str]:
    """Yield a line for each public module, class, function or job parameter without a docstring."""
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if tree.body and not ast.get_docstring(tree):
            yield f"{path}:1: the module has no docstring"
        for node in _public(tree):
            if not ast.get_docstring(node):
                yield f"{path}:{node.lineno}: '{node.name}' has no docstring"
            if isinstance(node, ast.ClassDef) and node.name.endswith("Parameters"):
                yield from _undocumented_fields(path, node)


def _public(
    parent: ast.Module | ast.ClassDef,
) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in parent.body:
        if isinstance(
            node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from _public(node)


def _undocumented_fields(path: Path, parameters: ast.ClassDef) -> Iterator[str]:
    """The command line's help is the string under each field."""
    for field, below in zip(parameters.body, [*parameters.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        text = below.value if isinstance(below, ast.Expr) else None
        if not (isinstance(text, ast.Constant) and isinstance(text.value, str)):
            yield f"{path}:{field.lineno}: parameter '{field.target.id}' has no docstring under it"


def _entries(folder: Path, key: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.rglob("*.yml")):
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except yaml.YAMLError as error:
            raise SystemExit(f"{path} is not YAML: {error}") from None
        yield from content.get(key) or []


def _described(entry: Mapping[str, Any] | None) -> bool:
    return bool(entry and str(entry.get("description") or "").strip())


if __name__ == "__main__":
    sys.exit(main())
