"""The wheel that jobs ship as on a cluster: one top-level package, with the SQL that it shares with the macros."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.pytest_ids import REPOSITORY

_BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy2(REPOSITORY / name, folder / name)
    for name in ("python_jobs", "macros", "services", "case_study"):
        shutil.copytree(REPOSITORY / name, folder / name, symlinks=True)
    subprocess.run([sys.executable, "-c", _BUILD, "dist"], cwd=folder, check=True, capture_output=True)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_a_users_environment_gets_one_package_of_ours(wheel: Path) -> None:
    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"python_jobs"}


def test_the_macros_that_jobs_share_are_read_from_the_wheel_itself(wheel: Path, tmp_path: Path) -> None:
    """As on a cluster, where ``--py-files`` puts the archive on the path."""
    read = "from python_jobs.shared.spark.macro_sql import _MACROS; print((_MACROS / 'idempotency').name, _MACROS)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(wheel)!r}); {read}"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split()[0] == "idempotency"
    assert str(wheel) in done.stdout
