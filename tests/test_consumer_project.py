"""A foreign dbt project installs the package: it gets our macros and nothing else of ours.

Its twin is the same project without the package: models that use none of our options must send the same SQL.
"""

import contextlib
import io
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from dbt.cli.main import dbtRunner
from pyspark.sql import SparkSession

from tests.support.dbt_project import REPOSITORY, DbtProject
from tests.support.session import settings_kept

CONSUMER = REPOSITORY / "tests" / "consumer_project"
FILES = {
    str(path.relative_to(CONSUMER)): path.read_text(encoding="utf-8")
    for path in sorted(CONSUMER.rglob("*"))
    if path.suffix in (".sql", ".yml") and not {"dbt_packages", "target"} & set(path.parts)
}


@pytest.fixture(scope="module")
def consumer(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DbtProject:
    """The project of tests/consumer_project as it stands, the package installed by `dbt deps`."""
    root = tmp_path_factory.mktemp("consumer")
    (root / "macros").symlink_to(REPOSITORY / "macros")
    project = DbtProject(root / "tests" / "shop", spark, FILES, with_package=False)
    deps = ["deps", "--project-dir", str(project.root), "--profiles-dir", str(project.root)]
    with project._environment():
        assert dbtRunner().invoke([*deps, "--log-path", str(project.root / "logs")]).success
    return project


@pytest.fixture(scope="module")
def twin(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DbtProject:
    """The same project as if the package did not exist: plain models only."""
    files = {
        name: text for name, text in FILES.items() if "/patterns/" not in name and name != "packages.yml"
    }
    files["dbt_project.yml"] = re.sub(r"dispatch:\n(  .*\n)+", "", files["dbt_project.yml"])
    assert "lakehouse_patterns" not in files["dbt_project.yml"].split("models:")[0]
    return DbtProject(tmp_path_factory.mktemp("twin") / "shop_alone", spark, files, with_package=False)


def dbt(project: DbtProject, *arguments: str, listener: Callable[..., None] | None = None) -> list[str]:
    """Call dbt as its command line would be called; return what it printed, line by line."""
    manifest, printed = project.manifest(), io.StringIO()
    with project._environment(), settings_kept(project.spark), contextlib.redirect_stdout(printed):
        done = dbtRunner(manifest=manifest, callbacks=[listener] if listener else []).invoke(
            [*arguments, *project._flags()]
        )
    assert done.success, done.exception or project._errors(done)
    return printed.getvalue().splitlines()


def statements(project: DbtProject, *arguments: str) -> dict[str, list[str]]:
    """Return every SQL statement that dbt sends for each node, without what names this project's place."""
    sent = defaultdict(list)

    def listen(event: object) -> None:
        if event.info.name == "SQLQuery":
            sql = event.data.sql.replace(project.schema, "<schema>").replace(str(project.location), "<root>")
            sent[event.data.node_info.node_name].append(sql)

    dbt(project, *arguments, listener=listen)
    return dict(sent)


def test_deps_needs_no_network_and_installs_macros_only(consumer: DbtProject) -> None:
    package = Path(consumer.root) / "dbt_packages" / "lakehouse_patterns"
    assert (package / "dbt_project.yml").read_text() == (
        REPOSITORY / "macros" / "dbt_project.yml"
    ).read_text()
    listed = dbt(consumer, "--quiet", "ls")
    assert listed
    assert [node for node in listed if not node.startswith(("shop.", "exposure:shop."))] == []


def test_models_without_our_options_are_what_dbt_spark_alone_makes(
    consumer: DbtProject, twin: DbtProject
) -> None:
    stateful = {"plain_append", "plain_merge", "plain_merge_some_columns", "plain_overwrite", "plain_check"}
    created = ("build", "--select", "path:models/plain", "path:snapshots")
    updated = ("run", "--select", *stateful), ("snapshot", "--select", *stateful)
    for command in (created, *updated):
        ours, alone = statements(consumer, *command), statements(twin, *command)
        assert ours.keys() == alone.keys()
        assert stateful & ours.keys()
        for node in alone:
            assert ours[node] == alone[node], node
