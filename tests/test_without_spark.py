"""The rooms that need no Spark are imported where there is none."""

from __future__ import annotations

import subprocess
import sys

from tests.support.pytest_ids import REPOSITORY
from tests.support.without_spark import programs_without_spark

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
