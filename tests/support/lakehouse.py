"""The case study's main job, run in this process on the test session: the same commands, without six JVM starts."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from dbt.cli.main import dbtRunner
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from case_study.main_job import FEEDS, Step, main_job
from case_study.runners import job_of
from python_jobs.shared.core.command_line import parse_parameters
from tests.support.dbt_project import REPOSITORY, DbtFailed
from tests.support.rows import CLOCK_COLUMNS
from tests.support.session import environment, settings_kept


class Lakehouse:
    """One lakehouse root with its landing folder.

    All roots share the session's catalog and its names. So the tables of one root are removed from the catalog before
    dbt runs on another root; the project's hook adopts the tables of the new root from their paths.
    """

    _in_catalog: ClassVar[Path | None] = None

    def __init__(self, root: Path, spark: SparkSession, landing: Path) -> None:
        self.root, self.spark, self.landing = root, spark, landing
        self._manifest: Any = None

    def run(self, window: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Run the main job over the landing folder (or the ``{"from", "to"}`` hours of it); return its report."""
        feeds = [feed for feed in FEEDS if (self.landing / feed).is_dir()]
        report: dict[str, Any] = {}
        for step in main_job(str(self.root), self.landing, feeds, window=window):
            report = self.step(step) or report
        return report

    def step(self, step: Step) -> dict[str, Any] | None:
        """Run one step of :func:`case_study.main_job.main_job`; return the report of a job, None for dbt."""
        program, *words = step.command
        if program == "dbt":
            self.dbt(*words)
            return None
        module, arguments = job_of(words)
        with contextlib.chdir(REPOSITORY), settings_kept(self.spark):
            parameters, _ = parse_parameters(module.Parameters, arguments)
            return dict(module.run(self.spark, parameters))

    def dbt(self, *arguments: str) -> None:
        """Run one dbt command on the repository's own project.

        Raises:
            DbtFailed: the call or a node failed; the message holds each node's error.
        """
        flags = ["--project-dir", str(REPOSITORY), "--profiles-dir", str(REPOSITORY / "profiles")]
        flags += ["--log-path", str(self.root / "logs"), "--target-path", str(self.root / "target")]
        if Lakehouse._in_catalog != self.root:
            for database in ("lakehouse", "lakehouse__staging"):
                self.spark.sql(f"drop database if exists {database} cascade")
            Lakehouse._in_catalog = self.root
        with (
            environment(LAKEHOUSE_ROOT=str(self.root), DBT_SEND_ANONYMOUS_USAGE_STATS="false"),
            settings_kept(self.spark),
            contextlib.redirect_stdout(io.StringIO()) as output,
        ):
            if self._manifest is None:
                self._manifest = dbtRunner().invoke(["parse", *flags]).result
            result = dbtRunner(manifest=self._manifest).invoke([*arguments, *flags])
        if not result.success:
            raise DbtFailed(f"{result.exception or ''}\n{output.getvalue()[-6000:]}")

    def table(self, name: str) -> DataFrame:
        """Return the current rows of the table ``name``, found by the layer in its name."""
        return self.spark.read.format("delta").load(str(self.path(name)))

    def path(self, name: str) -> Path:
        """Return the folder of the table ``name``."""
        return self.root / name.split("_")[0].replace("snapshot", "snapshots") / name

    def versions(self) -> dict[str, int]:
        """Return the version of every table, from the names of its log files."""
        logs = self.root.glob("*/*/_delta_log")
        return {log.parent.name: max(int(f.stem) for f in log.glob("*[0-9].json")) for log in logs}

    def data_files(self, name: str) -> set[str]:
        """Return the data files of the current version of ``name``."""
        return {str(Path(f).relative_to(self.path(name))) for f in map(_local, self.table(name).inputFiles())}

    def hashes(self, names: Sequence[str] | None = None) -> dict[str, str]:
        """Return a hash of the rows of every table (or of ``names``), independent of their order and load times."""
        names = names or sorted(log.parent.name for log in self.root.glob("*/*/_delta_log"))
        return {name: rows_hash(self.table(name)) for name in names}


def rows_hash(rows: DataFrame) -> str:
    """Return a hash of the multiset of rows without the columns that hold load times."""
    columns = sorted(set(rows.columns) - CLOCK_COLUMNS)
    as_text = F.to_json(F.struct(*columns), {"ignoreNullFields": "false"})
    counted = rows.select(F.sha2(as_text, 256).alias("row")).groupBy("row").count().orderBy("row").collect()
    return hashlib.sha256(json.dumps([tuple(row) for row in counted]).encode()).hexdigest()


def _local(uri: str) -> str:
    return uri.removeprefix("file://").removeprefix("file:")
