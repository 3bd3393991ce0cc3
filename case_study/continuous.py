"""Keep silver within seconds of Kafka: topics are streamed into bronze, and dbt runs after each commit to bronze.

    LAKEHOUSE_SOURCE=kafka python -m case_study.continuous --job conf/jobs/users_records.yml \\
        --bootstrap_servers $KAFKA_BOOTSTRAP_SERVERS --target $LAKEHOUSE_ROOT/bronze/bronze_users_records \\
        --checkpoint $LAKEHOUSE_ROOT/checkpoints/bronze_users_records --select silver_users_records_flagged+ \\
        --exclude '[silver_users_records_dead_letter]'

The runner has one process and one Spark session, so that a change waits for no start. The bronze stream is the job
python_jobs/ingestion/change_data_capture.py; ``--job`` has its parameters. The models are those of the project in the
working directory, with the profile's target. If the runner is interrupted or killed, a new start continues where it
ended: the stream and the models repair themselves. The runner locks the lakehouse against the demo and a second runner.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dbt.cli.main import dbtRunner
from jsonargparse import auto_cli
from pyspark.sql import SparkSession

from case_study.demo import DemoFailed, lakehouse_root, only_run
from python_jobs.ingestion.change_data_capture import Parameters, start
from python_jobs.shared.core.command_line import parse_parameters
from python_jobs.shared.core.failures import JobFailed, WrongUse
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.core.signals import end_requested
from python_jobs.shared.delta.commits import latest_version
from python_jobs.shared.delta.streams import await_end
from python_jobs.shared.kafka.topics import SOURCE_FAILURES
from python_jobs.shared.spark.session import spark_session

DEFAULT_TRIGGER = "1 second"
_POLL_SECONDS = 0.2


class Models:
    """The dbt models of one selection, which are parsed once and run in this process's Spark session."""

    def __init__(self, select: str, exclude: Sequence[str] = (), flags: Sequence[str] = ()) -> None:
        """Parse the project.

        Args:
            select: dbt's node selection.
            exclude: nodes of the selection that are not run.
            flags: further flags of every dbt call, such as ``--project-dir``.
        """
        self._select, self._exclude, self._flags = select, set(exclude), flags
        parsed = dbtRunner().invoke(["--quiet", "parse", *flags])
        if not parsed.success:
            raise WrongUse(f"dbt can't parse the project: {parsed.exception}")
        self._manifest: Any = parsed.result

    def run(self) -> None:
        """Run the models once; views are created at the first run only, because they are always current.

        Raises:
            JobFailed: a model failed; the tables keep their last good version.
        """
        excluded = ["--exclude", *sorted(self._exclude)] if self._exclude else []
        done = dbtRunner(manifest=self._manifest).invoke(
            ["--quiet", "run", "--select", self._select, *excluded, *self._flags]
        )
        if not done.success:
            raise JobFailed(
                f"dbt run --select {self._select} failed; the tables keep their last good version"
            )
        self._exclude.add("config.materialized:view")


def follow(spark: SparkSession, params: Parameters, models: Models) -> None:
    """Run the stream and, after each of its commits, the models, until SIGTERM or SIGINT; a running build ends first.

    The stream waits for the models. If both ran at once, they would share the cores, every batch and every model would
    take longer, and a batch would still have to wait for the models of the batch before.

    Raises:
        JobFailed: the stream or a model failed.
    """
    appended, built, ended = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def wait_for_models() -> None:
        appended.release()
        while not (built.acquire(timeout=_POLL_SECONDS) or ended.is_set()):
            pass

    continuous = dataclasses.replace(params, trigger=params.trigger or DEFAULT_TRIGGER)
    query, appender = start(spark, continuous, wait_for_models)

    def build() -> None:
        version, begun = latest_version(spark, params.target), time.monotonic()
        models.run()
        seconds = round(time.monotonic() - begun, 2)
        print(json_text({"bronze_version": version, "seconds": seconds}), flush=True)

    try:
        with end_requested() as stopped:
            build()  # for commits of an earlier run that died before its models
            while query.isActive and not stopped.is_set():
                if appended.acquire(timeout=_POLL_SECONDS):
                    build()
                    built.release()
    finally:
        ended.set()
        has_ended = not query.isActive
        query.stop()
    # A batch that is interrupted by the stop fails; the next start repeats it.
    if has_ended:
        await_end(query, appender, params.source, SOURCE_FAILURES)


def main(
    job: str,
    select: str,
    exclude: list[str] | None = None,
    bootstrap_servers: str | None = None,
    target: str | None = None,
    checkpoint: str | None = None,
) -> int:
    """Follow Kafka topics into silver until an interrupt.

    Args:
        job: YAML file with the parameters of python_jobs/ingestion/change_data_capture.py.
        select: dbt models to run after each commit to bronze.
        exclude: models of the selection that another schedule runs.
        bootstrap_servers: Kafka brokers, if the file doesn't name them.
        target: bronze table, if the file doesn't name it.
        checkpoint: folder of the stream's progress, if the file doesn't name it.

    Returns:
        The exit code.
    """
    given = {"bootstrap_servers": bootstrap_servers, "target": target, "checkpoint": checkpoint}
    arguments = [word for name, value in given.items() if value for word in (f"--{name}", value)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        params, _ = parse_parameters(Parameters, ["--config", job, *arguments])
        with only_run(Path(lakehouse_root())):
            follow(spark_session("continuous"), params, Models(select, exclude or ()))
    except KeyboardInterrupt:
        return 0
    except (JobFailed, DemoFailed) as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(auto_cli(main, as_positional=False))
