"""The main job as a user starts it: in one session, and each step as a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.dbt_project import REPOSITORY
from tests.support.lakehouse import Lakehouse
from tests.support.session import small_configuration

# What Spark and Delta warn of, and a user can do nothing about.
NEEDLESS = (
    "WindowExec",
    "Change in the table id",
    "CreateNamespaceExec",
    "FunctionResolution",
    "FileStreamSink",
)


def test_one_session_and_separate_processes_give_the_same_tables_and_a_rerun_builds_only_news(
    spark, generated, tmp_path
):
    variables = {
        "SPARK_CONF_DIR": str(small_configuration(tmp_path / "conf")),
        "DBT_PROFILES_DIR": str(REPOSITORY / "profiles"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    landing = tmp_path / "landing"
    shutil.copytree(generated, landing)

    def demo(name: str, *options: str, threads: int = 4) -> tuple[Lakehouse, str]:
        root = tmp_path / name
        own = {"LAKEHOUSE_ROOT": str(root), "LAKEHOUSE_THREADS": str(threads)}
        done = subprocess.run(
            [sys.executable, "-m", "case_study.demo", "--input", str(landing), *options],
            cwd=REPOSITORY, env=os.environ | variables | own,
            text=True, capture_output=True, timeout=1500, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        warnings = [line for line in done.stderr.splitlines() if " WARN " in line]
        assert [line for line in warnings if any(name in line for name in NEEDLESS)] == []
        return Lakehouse(root, spark, landing), done.stdout

    together, printed = demo("together")
    separate, printed_separately = demo("separate", "--separate", "true", threads=1)
    assert together.hashes() == separate.hashes()
    assert [line for line in printed.splitlines() if line.startswith("$ ")] == [
        line.replace("/separate", "/together")
        for line in printed_separately.splitlines()
        if line.startswith("$ ")
    ]

    versions = together.versions()
    _, printed = demo("together")
    assert together.versions() == versions
    assert "dbt build: no table has changed since the last complete run" in printed
    assert "dead-letter visits: no table has changed since the last complete run" in printed
    assert "report: no table has changed since the last complete run" in printed
    assert f"kept {together.table('silver_visits').count()}" in " ".join(printed.split())

    line = {"visit_id": "late", "event_time": "2024-03-02T10:00:00Z", "user_id": "u", "page": "new-page",
            "keep_private": False, "context": {"referral": "r"}}  # fmt: skip
    hour = landing / "visits" / "date=2024-03-03" / "hour=23"
    (hour / "late.json").write_text(json.dumps(line) + "\n", encoding="utf-8")
    _, printed = demo("together")
    news = ("bronze_visits", "bronze_visits_files", "silver_visits_parsed")
    selected = " ".join(f"'source:*.{table}+'" for table in news)
    assert f"dbt build --target local --select {selected} tag:gold" in printed
    views = together.table("gold_page_views_by_hour").where("page = 'new-page'")
    assert [row.views for row in views.collect()] == [1]
    versions, rows = together.versions(), together.hashes()
    together.dbt("build")
    changed = {name for name, version in together.versions().items() if version != versions[name]}
    assert changed == {"observability_readiness", "staging_users"}, (
        "the whole project has nothing left to build"
    )
    assert together.hashes() == rows

    # Models read tables when they are compiled: the SQL must keep the layout that `make lint` finds without tables.
    linted = subprocess.run(
        [sys.executable, "-m", "sqlfluff", "lint", "models", "snapshots", "tests/dbt"],
        cwd=REPOSITORY, env=os.environ | variables | {"LAKEHOUSE_ROOT": str(together.root)},
        text=True, capture_output=True, timeout=900, check=False,
    )  # fmt: skip
    assert linted.returncode == 0, (linted.stdout + linted.stderr)[-4000:]
