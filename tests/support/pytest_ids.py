"""Checks whether a test that a catalog, a page or a mutation names exists, without importing its file."""

import ast
import functools
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def names_a_test(test_id: str, repository: Path = REPOSITORY) -> bool:
    """Return whether pytest would run `tests/…/test_x.py::test_name` (or `::TestClass::test_name`, `[…]`)."""
    file, *names = test_id.split("[")[0].split("::")
    return bool(names) and tuple(names) in collected_names(repository / file)


@functools.cache
def collected_names(file: Path) -> frozenset[tuple[str, ...]]:
    """Return a file's tests as `(test_name,)` or `(TestClass, test_name)`; none if pytest skips the file."""
    if not file.is_file() or not file.name.startswith("test_"):
        return frozenset()
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            names.add((node.name,))
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            methods = [m.name for m in node.body if isinstance(m, ast.FunctionDef)]
            names |= {(node.name, method) for method in methods if method.startswith("test_")}
    return frozenset(names)
