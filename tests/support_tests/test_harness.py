"""The harness keeps its own promises."""

import pytest
from dbt_common.exceptions import DbtRuntimeError

from tests.support.dbt_project import raw_tables
from tests.support.local_files import CLASS
from tests.support.rows import assert_rows
from tests.support.session import restore_settings, settings_kept, settings_of


def test_a_duplicated_row_is_a_difference(spark):
    actual = spark.createDataFrame([(1, "a"), (1, "a")], "id int, name string")
    with pytest.raises(AssertionError, match="unexpected 1 x"):
        assert_rows(actual, [(1, "a")])
    assert_rows(actual, [(1, "a"), (1, "a")])


def test_a_project_builds_on_the_session_and_leaves_its_settings(spark, make_project):
    project = make_project(
        {
            "models/doubled.sql": "select id, id * 2 as twice from {{ source('raw', 'numbers') }}",
            "models/schema.yml": raw_tables("numbers"),
        }
    )
    project.source("numbers", spark.createDataFrame([(1,), (2,)], "id int"))
    before = settings_of(spark)
    project.run("run")
    assert_rows(project.table("doubled"), [(1, 2), (2, 4)])
    assert settings_of(spark).equals(before)
    assert spark.conf.get("spark.sql.ansi.enabled") == "true"
    project.source("numbers", spark.createDataFrame([(5,)], "id int"))
    project.run("run")
    assert_rows(project.table("doubled"), [(5, 10)])


def test_changed_added_and_removed_settings_are_restored_and_named(spark):
    with settings_kept(spark):
        spark.conf.set("harness.changed", "before")
        spark.conf.set("harness.removed", "before")
        before = settings_of(spark)
        spark.conf.set("harness.changed", "after")
        spark.conf.set("harness.added", "after")
        spark.conf.unset("harness.removed")
        changed = {f"harness.{name}" for name in ("changed", "added", "removed")}
        assert restore_settings(spark, before) == changed
        assert settings_of(spark).equals(before)
        assert restore_settings(spark, before) == set()
    assert spark.conf.get("harness.changed", None) is None


def test_local_files_get_their_permissions_in_java(spark, tmp_path):
    spark.range(1).coalesce(1).write.parquet(f"{tmp_path}/rows")
    path = spark._jvm.org.apache.hadoop.fs.Path(f"file:{tmp_path}/rows")
    system = path.getFileSystem(spark._jsc.hadoopConfiguration())
    assert system.getClass().getName() == CLASS
    (file,) = (tmp_path / "rows").glob("*.parquet")
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o644, 0o755)


def test_a_failed_node_is_named(make_project):
    project = make_project({"models/broken.sql": "select nothing from nowhere"})
    assert "broken" in project.fails("run")
    with pytest.raises(AssertionError, match="a failure was expected"):
        project.fails("parse")


def test_render_returns_values_and_raises_refusals(render):
    assert render("as_list", value="x") == ["x"]
    with pytest.raises(DbtRuntimeError, match="layout must be one of 1, 2, got '3'"):
        render("require_one_of", name="layout", value=3, allowed=[1, 2])
