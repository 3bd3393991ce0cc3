"""tests/consumer_project as a user has it: the package is installed by `dbt deps`, and its SQL is recorded."""

import contextlib
import io
from collections import defaultdict
from pathlib import Path

from dbt.cli.main import dbtRunner
from dbt_common.events.base_types import EventMsg
from pyspark.sql import SparkSession

from tests.support.dbt_project import REPOSITORY, DbtProject
from tests.support.session import settings_kept

CONSUMER = REPOSITORY / "tests" / "consumer_project"
FILES = {
    str(path.relative_to(CONSUMER)): path.read_text(encoding="utf-8")
    for path in sorted(CONSUMER.rglob("*"))
    if path.suffix in (".sql", ".yml")
}


def consumer_project(root: Path, spark: SparkSession) -> DbtProject:
    """Return the project with the package installed, in a copy of the repository's layout at `root`."""
    (root / "macros").symlink_to(REPOSITORY / "macros")
    project = DbtProject(root / "tests" / "shop", spark, FILES, with_package=False)
    place = ["--project-dir", str(project.root), "--profiles-dir", str(project.root)]
    with project._environment(), contextlib.redirect_stdout(io.StringIO()):
        assert dbtRunner().invoke(["deps", *place, "--log-path", str(project.root / "logs")]).success
    return project


def statements(project: DbtProject, *arguments: str) -> dict[str, list[str]]:
    """Call dbt; return each node's SQL statements in order, with one name for every project's schema and root.

    Raises `AssertionError` if the call fails.
    """
    sent = defaultdict(list)

    def listen(event: EventMsg) -> None:
        if event.info.name == "SQLQuery":
            sql = event.data.sql.replace(project.schema, "shop").replace(str(project.location), "/lakehouse")
            sent[event.data.node_info.node_name].append(sql)

    manifest = project.manifest()
    with project._environment(), settings_kept(project.spark), contextlib.redirect_stdout(io.StringIO()):
        done = dbtRunner(manifest=manifest, callbacks=[listen]).invoke([*arguments, *project.flags()])
    assert done.success, project._errors(done)
    return dict(sent)
