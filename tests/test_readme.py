"""The README's command works word for word; its dbt model runs in test_merger.py."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace

import pytest
import yaml
from dbt.cli.main import dbtRunner

from python_jobs.ingestion import incremental_loader
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.spark import session
from python_jobs.shared.spark.job import run_job
from tests.support.dbt_project import REPOSITORY
from tests.support.rows import assert_rows
from tests.support.snippets import snippet
from tools import setup


def test_the_profile_is_one_for_another_project(tmp_path, monkeypatch):
    profile = snippet("README.md", "tests/test_readme.py::test_the_profile_is_one_for_another_project")
    (tmp_path / "dbt_project.yml").write_text(
        "name: my_project\nversion: '1.0'\nconfig-version: 2\nprofile: my_project\n", encoding="utf-8"
    )
    (tmp_path / "models").mkdir()
    (tmp_path / "profiles.yml").write_text(profile, encoding="utf-8")
    monkeypatch.delenv("DBT_PROFILES_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    assert dbtRunner().invoke(["--quiet", "parse", "--log-path", "logs"]).success
    given = yaml.safe_load(profile)["my_project"]["outputs"]["local"]
    ours = yaml.safe_load((REPOSITORY / "profiles.yml").read_text(encoding="utf-8"))
    ours = ours["lakehouse_patterns"]["outputs"]["local"]
    assert given["server_side_parameters"].keys() == ours["server_side_parameters"].keys()
    assert {k: given[k] for k in ("type", "method", "host")} == {
        k: ours[k] for k in ("type", "method", "host")
    }


def test_the_activate_script_leaves_other_projects_their_profiles(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text("PATH=.\n", encoding="utf-8")
    monkeypatch.setattr(setup, "VENV", tmp_path)
    assert setup.write_activation().startswith("written")
    assert setup.write_activation() == "there"
    written = (tmp_path / "bin" / "activate").read_text(encoding="utf-8")
    assert "export LAKEHOUSE_ROOT=" in written
    assert "DBT_PROFILES_DIR" not in written


def test_without_activation_dbt_says_what_to_do(monkeypatch, tmp_path):
    for name in ("DBT_PROFILES_DIR", "LAKEHOUSE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(REPOSITORY)
    refused = dbtRunner().invoke(
        ["--quiet", "parse", "--log-path", str(tmp_path), "--target-path", str(tmp_path)]
    )
    assert not refused.success
    assert "LAKEHOUSE_ROOT (run `source .venv/bin/activate` first)" in str(refused.exception)


def test_without_activation_a_job_says_what_to_do(monkeypatch, capsys):
    """Without the activate script Spark starts from its own settings: it knows no Delta Lake."""
    unset = SimpleNamespace(conf=SimpleNamespace(get=lambda name, default=None: default))
    builder = SimpleNamespace(appName=lambda _: SimpleNamespace(getOrCreate=lambda: unset))
    monkeypatch.setattr(session, "SparkSession", SimpleNamespace(builder=builder))
    monkeypatch.setattr(session, "require_classic", lambda _: None)
    with pytest.raises(SystemExit) as end:
        run_job(incremental_loader.Parameters, incremental_loader.run, ["--source", "/a", "--target", "/b"])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "WrongUse: Spark started without Delta Lake: run `source .venv/bin/activate` first, or pass the settings of "
        "conf/spark-defaults.conf to spark-submit\n"
    )


def test_the_spark_submit_snippet_loads_a_folder(spark, tmp_path, monkeypatch):
    command = snippet("README.md", "tests/test_readme.py::test_the_spark_submit_snippet_loads_a_folder")
    program, job, *arguments = shlex.split(command.replace("\\\n", " "))
    assert (program, job) == ("spark-submit", "python_jobs/ingestion/incremental_loader.py")
    folder = tmp_path / "landing/visits/date=2024-03-01/hour=10"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text('{"visit_id": "v1"}\nnot json\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    parameters, _ = parse_parameters(incremental_loader.Parameters, arguments)
    report = incremental_loader.run(spark, parameters)
    json.dumps(report, default=str)
    loaded = spark.read.format("delta").load(str(tmp_path / "lakehouse/bronze/bronze_visits"))
    assert_rows(loaded.select("payload"), [('{"visit_id": "v1"}',), ("not json",)])
