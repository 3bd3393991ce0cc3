"""The main job as a user starts it: in one session, and each step as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.dbt_project import REPOSITORY
from tests.support.lakehouse import Lakehouse
from tests.support.session import small_configuration


def test_one_session_and_separate_processes_give_the_same_tables(spark, generated, tmp_path):
    variables = {
        "SPARK_CONF_DIR": str(small_configuration(tmp_path / "conf")),
        "DBT_PROFILES_DIR": str(REPOSITORY / "profiles"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def demo(name: str, *options: str) -> tuple[Lakehouse, str]:
        root = tmp_path / name
        done = subprocess.run(
            [sys.executable, "-m", "case_study.demo", "--input", str(generated), *options],
            cwd=REPOSITORY, env=os.environ | variables | {"LAKEHOUSE_ROOT": str(root)},
            text=True, capture_output=True, timeout=1500, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return Lakehouse(root, spark, generated), done.stdout

    together, printed = demo("together")
    separate, printed_separately = demo("separate", "--separate", "true")
    assert together.hashes() == separate.hashes()
    assert [line for line in printed.splitlines() if line.startswith("$ ")] == [
        line.replace("/separate", "/together")
        for line in printed_separately.splitlines()
        if line.startswith("$ ")
    ]

    versions = together.versions()
    demo("together")
    changed = {name for name, version in together.versions().items() if version != versions[name]}
    assert changed == {"observability_readiness", "staging_users"}
