"""The main job on a real cluster: standalone master, two workers, and dbt through a Thrift Server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from case_study.main_job import FEEDS, generator_step, main_job
from services.cluster import running_cluster
from tests.support.dbt_project import REPOSITORY
from tests.support.lakehouse import Lakehouse
from tests.support.session import environment, small_configuration

pytestmark = [pytest.mark.cluster, pytest.mark.end_to_end]

# They pass through every kind of materialization.
FEEDS_WITHOUT_LISTS = ("visits", "user_changes")
MODELS = (
    "silver_visits", "silver_users",
    "gold_page_views_by_hour", "gold_referral_statistics_by_day", "gold_visit_statistics", "gold_users_history",
)  # fmt: skip
TABLES = ("bronze_visits", "silver_visits_parsed", "silver_visits_dead_letter", *MODELS)


def test_the_cluster_gives_the_tables_of_the_embedded_run(spark, tmp_path):
    landing = tmp_path / "landing"
    local = Lakehouse(tmp_path / "local", spark, landing)
    local.step(generator_step(landing, 400))
    for feed in set(FEEDS) - set(FEEDS_WITHOUT_LISTS):
        shutil.rmtree(landing / feed)
    steps = main_job(str(local.root), landing, FEEDS_WITHOUT_LISTS)
    for step in steps[: [step.name for step in steps].index("dbt build")]:
        local.step(step)
    local.dbt("run", "--select", *(f"+{model}" for model in MODELS))

    root = tmp_path / "on_cluster"
    variables = {"SPARK_CONF_DIR": str(small_configuration(tmp_path / "conf")), "LAKEHOUSE_ROOT": str(root)}
    variables["SPARK_DAEMON_JAVA_OPTS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    variables["DBT_PROFILES_DIR"] = str(REPOSITORY / "profiles")
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with environment(**variables), running_cluster(tmp_path / "cluster") as cluster:
        command = ["--input", str(landing), "--target", "cluster", "--master", cluster.master]
        done = subprocess.run(
            [sys.executable, "-m", "case_study.demo", *command],
            cwd=REPOSITORY, env=os.environ | cluster.environment(), text=True, capture_output=True, timeout=900,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    on_cluster = Lakehouse(root, spark, landing)
    assert on_cluster.hashes(TABLES) == local.hashes(TABLES)
