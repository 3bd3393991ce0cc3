"""One small generated input and one main job over it, for all tests of the case study."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from case_study.main_job import generator_step
from tests.support.lakehouse import Lakehouse

VISITS = 2_000


@pytest.fixture(scope="session")
def generated(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a landing folder with every imperfection; never write to it, copy it."""
    landing = tmp_path_factory.mktemp("landing")
    Lakehouse(tmp_path_factory.mktemp("unused"), spark, landing).step(generator_step(landing, VISITS))
    return landing


@pytest.fixture(scope="session")
def truth(generated: Path) -> dict[str, Any]:
    """Return the generator's right answers."""
    return json.loads((generated / "truth.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def lakehouse(spark: SparkSession, generated: Path, tmp_path_factory: pytest.TempPathFactory) -> Lakehouse:
    """Return a lakehouse with a landing folder of its own, not loaded yet."""
    landing = tmp_path_factory.mktemp("input") / "landing"
    shutil.copytree(generated, landing)
    return Lakehouse(tmp_path_factory.mktemp("lakehouse"), spark, landing)
