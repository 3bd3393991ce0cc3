"""Which test modules a change affects: from imports, macro calls, the catalog's files, pages' snippets and mutations.

    python -m tools.affected [--base REVISION]    prints the modules, or `all: <reason>`

A file depends on what it imports, on the files and modules that its strings name (a job that is started, a page whose
snippet is run), and in SQL on the files of the macros that it calls. The catalog adds: a pattern's tests depend on its
`files`. The harness and files that nothing here knows affect everything.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.mutations.committed import committed_mutations
from tests.support.snippets import claimed
from tools.catalog import patterns
from tools.findings import PYTHON_FOLDERS, ROOT
from tools.jinja_files import blocks, without_comments

HOURS = 4  # commits of this time count as one change if the state before is unknown
ALWAYS = ("tests/test_catalog.py", "tests/mutations/test_mutations.py", "tests/test_second_run.py")
"""Tests that check the completeness of the repository's lists."""
HARNESS = ("tests/support/*", "tests/conftest.py", "conf/*", "profiles/*", "pyproject.toml", "dbt_project.yml",
           "macros/dbt_project.yml", "requirements.txt", "tools/setup.py")  # fmt: skip
KNOWN = ("*.md", "*.py", "*.sql", "catalog/*.yml", "tests/mutations/*.yml", "tests/rendered/*.yml",
         "tests/durations.json", "LICENSE", "Makefile", ".ci/*", "mkdocs.yml", "requirements-*.txt",
         "requirements.in", ".gitignore", ".pre-commit-config.yaml", ".sqlfluff", ".sqlfluffignore",
         ".yamllint")  # fmt: skip
"""Files that may have no dependent test; any other file must be in the graph."""
# The test modules of a folder depend on all of these.
DATA = {
    "tests/lakehouse": ("models", "snapshots", "tests/dbt"),
    "tests/support/consumer_project.py": ("tests/consumer_project",),
    "tests/tools": ("tests/rendered",),
}


@dataclass
class Graph:
    """The files that each file depends on, from the repository's root."""

    needs: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def dependents(self, files: Iterable[str]) -> set[str]:
        """Return the given files and all files that depend on them, directly or not."""
        needed_by = defaultdict(set)
        for file, needed in self.needs.items():
            for other in needed:
                needed_by[other].add(file)
        found, waiting = set(), list(files)
        while waiting:
            file = waiting.pop()
            if file not in found:
                found.add(file)
                waiting += needed_by[file]
        return found


def main() -> int:
    """Print the affected test modules."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", help="the revision before the change; by default the last landing's")
    base = parser.parse_args().base or base_of_change()
    modules, reason = affected(changed_files(base)) if base else (None, "the state before is unknown")
    print(*(modules if modules is not None else [f"all: {reason}"]), sep="\n")
    return 0


def affected(changed: Iterable[str], root: Path = ROOT) -> tuple[list[str] | None, str]:
    """Return the test modules that a change of these files affects, or None and the reason if it may affect all."""
    changed = list(changed)
    graph = graph_of(root)
    known = set(graph.needs) | {file for needed in graph.needs.values() for file in needed}
    for file in changed:
        path = PurePosixPath(file)
        if any(path.match(pattern) for pattern in HARNESS):
            return None, f"{file} is part of the harness"
        if file not in known and not any(path.match(pattern) for pattern in KNOWN):
            return None, f"it is unknown what depends on {file}"
    modules = {file for file in graph.dependents(changed) if is_test_module(file)}
    modules |= set(ALWAYS if changed else ())
    return sorted(module for module in modules if (root / module).is_file()), ""


def is_test_module(file: str) -> bool:
    """Return whether pytest collects the file."""
    path = PurePosixPath(file)
    return path.parts[0] == "tests" and path.match("test_*.py")


def graph_of(root: Path = ROOT) -> Graph:
    """Return the dependencies of every file of the repository."""
    graph = Graph()
    python = [
        path
        for folder in (*PYTHON_FOLDERS, "benchmarks", "tools", "tests")
        for path in sorted((root / folder).rglob("*.py"))
        if not path.parent.is_symlink()
    ]
    modules = {_module_name(path, root): path.relative_to(root).as_posix() for path in python}
    macros = _macro_files(root)
    fixtures = _fixtures(root / "tests" / "conftest.py", modules)
    for path in python:
        file = path.relative_to(root).as_posix()
        graph.needs[file] |= _needs_of_python(path, modules, root) - {"tests/conftest.py"}
        if file.startswith("tests/"):
            graph.needs[file] |= _mentioned(path.read_text(encoding="utf-8"), macros)
            graph.needs[file] |= set().union(
                *(needed for name, needed in fixtures.items() if name in _words(path))
            )
        graph.needs[file].discard(file)
    for path in (
        p for folder in ("macros", "models", "snapshots", "tests") for p in (root / folder).rglob("*.sql")
    ):
        text = without_comments(path.read_text(encoding="utf-8"))
        graph.needs[path.relative_to(root).as_posix()] |= _mentioned(text, macros)
    for owner, folders in DATA.items():
        tests = [file for file in graph.needs if file == owner or file.startswith(f"{owner}/test_")]
        data = {p.relative_to(root).as_posix() for f in folders for p in (root / f).rglob("*") if p.is_file()}
        for file in tests:
            graph.needs[file] |= data
    _add_what_lists_say(graph, root)
    return graph


def _add_what_lists_say(graph: Graph, root: Path) -> None:
    """Add the catalog's files, the pages' snippets and the mutations."""
    for pattern in patterns(root / "catalog"):
        tests = {b.test.split("::")[0] for b in pattern.behaviours if b.test}
        tests |= {file for file in pattern.files if is_test_module(file)}
        for test in tests:
            graph.needs[test] |= set(pattern.files) - tests
    for page in [*root.glob("README.md"), *(root / "docs").glob("*.md")]:
        for test in claimed(page):
            graph.needs[test.split("::")[0]].add(page.relative_to(root).as_posix())
    for mutation in committed_mutations(root / "tests" / "mutations"):
        graph.needs[mutation.test.split("::")[0]].add(mutation.file)


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _needs_of_python(path: Path, modules: dict[str, str], root: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = _module_name(path.parent / "__init__.py", root)
    names = set(_imported(tree, package))
    needs: set[str] = set()
    for text in _strings(tree):
        if (root / "macros" / text).suffix == ".sql" and (root / "macros" / text).is_file():
            needs.add(f"macros/{text}")
        if not path.is_relative_to(root / "python_jobs"):  # there, strings are texts for people
            names |= set(re.findall(r"\b\w+(?:\.\w+)+", text))
            needs |= {name for name in re.findall(r"[\w./-]*\w\.\w+", text) if _is_file(root, name)}
    for name in names:
        parts = name.split(".")
        needs |= {modules[m] for n in range(1, len(parts) + 1) if (m := ".".join(parts[:n])) in modules}
    return needs


def _is_file(root: Path, name: str) -> bool:
    return not name.startswith((".", "/")) and (root / name).is_file()


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _strings(tree: ast.Module) -> Iterator[str]:
    """Yield the texts that the code uses: no docstrings."""
    described = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
            yield node.value


def _fixtures(conftest: Path, modules: dict[str, str]) -> dict[str, set[str]]:
    """Return the files that each fixture of the suite needs, because not every test needs every service."""
    if not conftest.is_file():
        return {}
    tree = ast.parse(conftest.read_text(encoding="utf-8"))
    imported = {
        alias.name: modules[node.module]
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module in modules
        for alias in node.names
    }
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    needs: dict[str, set[str]] = {}
    for function in functions:  # a fixture stands below those that it takes
        used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        needs[function.name] = {imported[name] for name in used if name in imported}
        needs[function.name].update(*(needs.get(argument.arg, set()) for argument in function.args.args))
    return needs


def _macro_files(root: Path) -> dict[str, str]:
    """Return the file of each macro, generic test and materialization, by the name that callers write."""
    files = {}
    for block in blocks(root / "macros"):
        name = block.name
        if block.kind == "materialization":
            name = name.removeprefix("materialization_").rpartition("_")[0]
        files[name.removeprefix("test_")] = block.path.relative_to(root).as_posix()
    return files


def _words(path: Path) -> set[str]:
    return set(re.findall(r"\w+", path.read_text(encoding="utf-8")))


def _mentioned(text: str, macros: dict[str, str]) -> set[str]:
    return {macros[word] for word in set(re.findall(r"\w+", text)) if word in macros}


def base_of_change(root: Path = ROOT) -> str | None:
    """Return the revision before the last landing, or None if git doesn't know it.

    On a branch this is the commit at which it left `origin/main`. A fresh clone of `main` doesn't show where the
    landing began, so the commits of the last hours count as one landing.
    """
    head = git(root, "rev-parse", "HEAD")
    branched = git(root, "merge-base", "HEAD", "origin/main")
    if branched and branched != head:
        return branched
    at = git(root, "log", "-1", "--format=%ct", "HEAD")
    earlier = ["rev-list", "-1", f"--before={int(at or 0) - HOURS * 3600}", "HEAD"]
    return git(root, *earlier) or None


def changed_files(base: str, root: Path = ROOT) -> list[str]:
    """Return the files that differ from a revision, those of the working tree included."""
    listed = git(root, "diff", "--name-only", "--no-renames", base, "--")
    listed += "\n" + git(root, "ls-files", "--others", "--exclude-standard")
    return sorted({line for line in listed.splitlines() if line})


def git(root: Path, *arguments: str) -> str:
    """Return git's output, or an empty text if git fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
