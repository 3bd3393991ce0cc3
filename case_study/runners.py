"""How a step of the main job runs: in the one Spark session of this process, or as a process of its own.

Both take the command that a person would type, so that the printed command is what runs. A start of Spark costs more
than most steps on small data; an orchestrator runs each command by itself.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

from dbt.cli.main import dbtRunner
from pyspark.sql import SparkSession

from case_study.main_job import Step
from python_jobs.shared.core.command_line import program_outcome
from python_jobs.shared.core.failures import JobFailed
from python_jobs.shared.spark.job import job_outcome
from python_jobs.shared.spark.session import spark_session, use_utc

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Outcome:
    """How a step ended."""

    exit_code: int
    report: str | None = None
    """The report of a job, one line of JSON; None for dbt and for a job that failed."""


class Runner(Protocol):
    """Runs one step from the root of the repository."""

    def __call__(self, step: Step) -> Outcome:
        """Run the step; what goes wrong is printed on standard error."""


def as_process(step: Step) -> Outcome:
    """Run the step as a process of its own."""
    is_job = step.command[0] != "dbt"
    done = subprocess.run(
        step.command, cwd=ROOT, text=True, check=False, stdout=subprocess.PIPE if is_job else None
    )
    lines = done.stdout.splitlines() if is_job else []
    return Outcome(done.returncode, lines[-1] if lines else None)


class OneSession:
    """Runs jobs and dbt in one Spark session.

    Each job gets a new session of the same Spark: what dbt or another job sets (ANSI mode, overwrite mode) has no
    effect on it.
    """

    def __init__(self, spark: SparkSession) -> None:
        """Use a session that dbt uses too."""
        self._spark = spark

    @classmethod
    def opened_by_dbt(cls, target: str, master: str | None = None) -> OneSession:
        """Start Spark with the settings of dbt's profile, because the catalog is chosen when Spark starts.

        Args:
            target: target of the profile.
            master: Spark master of the jobs.

        Raises:
            JobFailed: dbt can't connect.
        """
        if master:
            os.environ["PYSPARK_SUBMIT_ARGS"] = f"--master {master} pyspark-shell"
        with contextlib.chdir(ROOT):
            opened = dbtRunner().invoke(["--quiet", "debug", "--connection", "--target", target])
        if not opened.success:
            raise JobFailed(f"dbt can't connect: run `dbt debug --target {target}` to see why")
        return cls(spark_session("main job"))

    @property
    def spark(self) -> SparkSession:
        """A new session: its settings are those of conf/spark-defaults.conf, its zone is UTC."""
        spark = self._spark.newSession()
        use_utc(spark)
        return spark

    def __call__(self, step: Step) -> Outcome:
        """Run the step; what goes wrong is printed on standard error."""
        program, *words = step.command
        with contextlib.chdir(ROOT):
            return _run_dbt(words) if program == "dbt" else self._run_job(program, words)

    def _run_job(self, program: str, words: Sequence[str]) -> Outcome:
        job, arguments = job_of(words)
        try:
            if program != "spark-submit":
                return Outcome(*program_outcome(job.Parameters, job.run, arguments))
            return Outcome(*job_outcome(lambda: self.spark, job.Parameters, job.run, arguments))
        except SystemExit as ended:
            return Outcome(int(ended.code or 0))  # wrong parameters, which the parser has printed
        except Exception:
            # As for a process: Python prints the trace and ends with 1.
            traceback.print_exc()
            return Outcome(1)


def job_of(words: Sequence[str]) -> tuple[ModuleType, Sequence[str]]:
    """Return the module that the words of spark-submit, or of python -m, name, and its arguments."""
    if words[0] == "-m":
        return importlib.import_module(words[1]), words[2:]
    at = next(place for place, word in enumerate(words) if word.endswith(".py"))
    return importlib.import_module(words[at].removesuffix(".py").replace("/", ".")), words[at + 1 :]


def _run_dbt(words: Sequence[str]) -> Outcome:
    done = dbtRunner().invoke(list(words))
    if done.success:
        return Outcome(0)
    return Outcome(1 if done.exception is None else 2)
