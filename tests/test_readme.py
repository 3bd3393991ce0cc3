"""What the README shows works word for word."""

from __future__ import annotations

import json
import shlex

from python_jobs.ingestion import incremental_loader
from python_jobs.shared.core.command_line import parse_parameters
from tests.support.rows import assert_rows
from tests.support.snippets import snippet

SOURCES = """
sources: [{name: raw, schema: "{{ target.schema }}", tables: [{name: user_changes}]}]
"""


def test_the_dbt_snippet_merges_a_change_feed(spark, make_project):
    model = snippet("README.md", "tests/test_readme.py::test_the_dbt_snippet_merges_a_change_feed")
    project = make_project({"models/users.sql": model, "models/sources.yml": SOURCES})
    columns = "id string, plan string, is_deleted boolean, changed_at int"
    project.source(
        "user_changes", spark.createDataFrame([("a", "free", False, 1), ("b", "free", False, 1)], columns)
    )
    project.run("run")
    changes = [("a", "paid", False, 3), ("a", "free", False, 2), ("b", None, True, 2), ("c", None, True, 1)]
    project.source("user_changes", spark.createDataFrame(changes, columns))
    project.run("run")
    assert_rows(
        project.table("users").select("id", "plan", "is_deleted"),
        [("a", "paid", False), ("b", None, True), ("c", None, True)],
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
