"""Fixtures of the whole suite; see tests/support for what stands behind them."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from services.kafka import Broker, running_broker
from services.object_store import ObjectStore, running_object_store
from services.postgres import Database, Postgres, running_postgres
from tests.support import class_archive
from tests.support.dbt_project import REPOSITORY, DbtProject
from tests.support.killer import kill_group
from tests.support.render import MacroRenderer
from tests.support.session import (
    SET_BY_THE_ENGINE,
    environment,
    restore_settings,
    setting,
    settings_of,
    small_configuration,
    start_session,
)

os.environ["TZ"] = "UTC"
time.tzset()
os.environ.setdefault("SPARK_CONF_DIR", str(REPOSITORY / "conf"))
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

_NUMBERS = itertools.count(1)
_FIRST_SETTINGS: list[Any] = []
"""The settings with which the process's session began, once it has one."""


def pytest_configure(config: pytest.Config) -> None:
    """Make the archive of classes beside the first tests of several workers; a JVM that is earlier does without it."""
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.getoption("numprocesses", None) or class_archive.archive_file().exists():
        return
    making = subprocess.Popen(
        [sys.executable, "-m", class_archive.__name__],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    config.add_cleanup(lambda: None if making.poll() is not None else kill_group(making))


@pytest.fixture(scope="session", autouse=True)
def small_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the Spark processes that tests start, and kill, start as fast as they can."""
    with environment(SPARK_CONF_DIR=str(small_configuration(tmp_path_factory.mktemp("small") / "conf"))):
        yield


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Return the process's session: in-memory catalog, UTC, ANSI on, one core."""
    session = start_session(tmp_path_factory.mktemp("session"))
    _FIRST_SETTINGS.append(settings_of(session))
    yield session
    _FIRST_SETTINGS.clear()
    session.stop()


@pytest.fixture(autouse=True)
def same_settings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let each test begin with the session's first settings; a warning names the test that left others."""
    yield
    for first in _FIRST_SETTINGS:
        if changed := restore_settings(request.getfixturevalue("spark"), first) - SET_BY_THE_ENGINE:
            message = f"{request.node.nodeid} left other settings of Spark: {', '.join(sorted(changed))}"
            warnings.warn(message, stacklevel=1)


@pytest.fixture(scope="session")
def package_alone(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DbtProject:
    """Return a parsed project that holds only the package: to parse its macros takes 4 seconds."""
    project = DbtProject(tmp_path_factory.mktemp("dbt"), spark, {})
    project.manifest()
    return project


@pytest.fixture(scope="module")
def make_project(
    spark: SparkSession, package_alone: DbtProject, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., DbtProject]:
    """Return a function from a project's files to a ready :class:`DbtProject`."""

    def make(files: Mapping[str, str], **options: Any) -> DbtProject:
        root = tmp_path_factory.mktemp("dbt")
        return DbtProject(root, spark, files, package_alone=package_alone, **options)

    return make


@pytest.fixture(scope="session")
def render(
    spark: SparkSession, package_alone: DbtProject, tmp_path_factory: pytest.TempPathFactory
) -> MacroRenderer:
    """Return a function that renders a macro of the package: ``render("wrapper", layout=1, …)``."""
    return MacroRenderer(tmp_path_factory.mktemp("render"), spark, package_alone)


@pytest.fixture(params=["true", "false"], ids=["ansi", "no-ansi"])
def ansi_modes(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[str]:
    """Run the test in both ANSI modes: dbt-spark turns ANSI off, Spark 4 jobs run with it on."""
    with setting(spark, "spark.sql.ansi.enabled", request.param):
        yield request.param


@pytest.fixture
def table_path(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """Return an absolute path for one Delta table of this test."""
    return str(tmp_path / re.sub(r"\W+", "_", request.node.name)[:60])


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Return the process's Kafka broker; a test that stops or kills it starts it again."""
    with running_broker(tmp_path_factory.mktemp("kafka")) as running:
        yield running


@pytest.fixture
def topic(broker: Broker) -> str:
    """Return an empty topic of one partition for this test."""
    return broker.create_topic(f"topic_{next(_NUMBERS)}")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """Return the process's PostgreSQL server; a test that stops or kills it starts it again."""
    # Not under pytest's folder: the next pytest closes that one to the server's system user.
    with (
        tempfile.TemporaryDirectory(prefix="postgres-") as folder,
        running_postgres(Path(folder) / "server") as running,
    ):
        yield running


@pytest.fixture
def database(postgres: Postgres) -> Database:
    """Return an empty database for this test."""
    return postgres.create_database(f"database_{next(_NUMBERS)}")


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """Return the process's S3 API; tests use buckets of their own."""
    with running_object_store(tmp_path_factory.mktemp("s3")) as running:
        yield running
