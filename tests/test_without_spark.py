"""The rooms that need no Spark are imported where there is none, and their modules are mutated."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

from tests.support.pytest_ids import REPOSITORY
from tests.support.without_spark import programs_without_spark
from tools.mutants import LISTED

# A module that is None in sys.modules can't be imported, as if it weren't installed.
_IMPORT = """
import importlib, sys
sys.modules |= dict.fromkeys(("pyspark", "py4j", "delta"))
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_core_and_the_programs_of_other_stores_are_imported_without_pyspark() -> None:
    core = [
        f"python_jobs.shared.core.{path.stem}"
        for path in (REPOSITORY / "python_jobs/shared/core").glob("[!_]*.py")
    ]
    programs = list(programs_without_spark())
    assert "python_jobs.shared.core.failures" in core
    assert "python_jobs.idempotency.proxy_s3" in programs
    subprocess.run([sys.executable, "-c", _IMPORT, *core, *programs], cwd=REPOSITORY, check=True)


def test_a_job_on_spark_is_not_imported_without_pyspark() -> None:
    job = [sys.executable, "-c", _IMPORT, "python_jobs.idempotency.proxy"]
    done = subprocess.run(job, cwd=REPOSITORY, check=False, capture_output=True, text=True)
    assert "No module named 'pyspark" in done.stderr


_IMPORTABLE = """
import contextlib, importlib, sys
sys.modules |= dict.fromkeys(("pyspark", "py4j", "delta"))
for name in sys.argv[1:]:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
        print(name)
"""


def test_each_module_without_pyspark_is_mutated_or_says_why_not() -> None:
    modules = [_module(path) for path in (REPOSITORY / "python_jobs").rglob("[!_]*.py")]
    command = [sys.executable, "-c", _IMPORTABLE, *sorted(modules)]
    importable = set(subprocess.check_output(command, cwd=REPOSITORY, text=True).split())
    mutmut = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mutmut"]
    mutated = {
        _module(path) for pattern in mutmut["only_mutate"] for path in REPOSITORY.glob(pattern)
        if path.name != "__init__.py"
    }  # fmt: skip
    reasons = yaml.safe_load((REPOSITORY / LISTED).read_text(encoding="utf-8"))["not_mutated"]
    assert "python_jobs.shared.core.retry" in mutated & importable
    assert mutated <= importable
    assert mutated & reasons.keys() == set(), "mutated, and excepted too"
    assert importable - mutated - reasons.keys() == set(), f"neither in [tool.mutmut] nor in {LISTED}"
    assert reasons.keys() - importable == set(), "excepted, and not importable without pyspark"
    assert all(reasons.values())


def _module(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
