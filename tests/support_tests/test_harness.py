"""The harness keeps its own promises."""

import pytest
from dbt_common.exceptions import DbtRuntimeError

from tests.support.rows import assert_rows


def test_a_duplicated_row_is_a_difference(spark):
    actual = spark.createDataFrame([(1, "a"), (1, "a")], "id int, name string")
    with pytest.raises(AssertionError, match="unexpected 1 x"):
        assert_rows(actual, [(1, "a")])
    assert_rows(actual, [(1, "a"), (1, "a")])


def test_a_project_builds_on_the_session_and_leaves_its_settings(spark, make_project):
    project = make_project(
        {
            "models/doubled.sql": "select id, id * 2 as twice from {{ source('raw', 'numbers') }}",
            "models/schema.yml": 'sources: [{name: raw, schema: "{{ target.schema }}", tables: [{name: numbers}]}]',
        }
    )
    project.source("numbers", spark.createDataFrame([(1,), (2,)], "id int"))
    before = dict(spark.conf.getAll)
    project.run("run")
    assert_rows(project.table("doubled"), [(1, 2), (2, 4)])
    assert dict(spark.conf.getAll) == before
    assert spark.conf.get("spark.sql.ansi.enabled") == "true"
    project.source("numbers", spark.createDataFrame([(5,)], "id int"))
    project.run("run")
    assert_rows(project.table("doubled"), [(5, 10)])


def test_a_failed_node_is_named(make_project):
    project = make_project({"models/broken.sql": "select nothing from nowhere"})
    assert "broken" in project.fails("run")
    with pytest.raises(AssertionError, match="a failure was expected"):
        project.fails("parse")


def test_render_returns_values_and_raises_refusals(render):
    assert render("as_list", value="x") == ["x"]
    with pytest.raises(DbtRuntimeError, match="layout must be one of 1, 2, got '3'"):
        render("require_one_of", name="layout", value=3, allowed=[1, 2])
