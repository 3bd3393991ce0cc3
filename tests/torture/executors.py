"""Takes an executor away from a writer that runs on a standalone cluster of two workers.

The writer's process is not touched: Spark has to run the lost tasks on the other executor, and the table must have
their rows once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession

from services.cluster import running_workers
from tests.support.dbt_project import REPOSITORY
from tests.support.killer import POLL_SECONDS, TableState, kill_group
from tests.support.session import environment, small_configuration
from tests.torture.torture import Calm, Outcome, RunFailedError, command
from tests.torture.writer import Writer

RUN_SECONDS = 600
EXECUTOR = b"CoarseGrainedExecutorBackend"


@contextlib.contextmanager
def running_executors(folder: Path) -> Iterator[str]:
    """Start a master and two workers and yield the master's URL."""
    # The memory of a worker is that of its executor; Python's workers are this process's.
    variables = {
        "SPARK_CONF_DIR": str(small_configuration(folder / "conf")),
        "PYSPARK_PYTHON": sys.executable,
    }
    with environment(**variables), running_workers(folder / "cluster") as master:
        yield master


def lose_executors(
    writer: Writer,
    spark: SparkSession,
    folder: Path,
    master: str,
    cluster: Path,
    outcome: Outcome,
    losses: int,
) -> None:
    """Run the writer on the cluster and kill an executor at the first data file after each of ``losses`` commits.

    Raises:
        RunFailedError: the writer didn't end by itself, or was over before an executor could be killed.
    """
    calm = Calm(writer, spark, folder)
    table = next(table for table, commits in calm.commits.items() if commits)
    with calm.copy("executors") as place, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command(writer, place, master),
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        lost, deadline = 0, time.monotonic() + RUN_SECONDS
        before = writer.store.files(place, table)
        try:
            while process.poll() is None and time.monotonic() < deadline:
                now = writer.store.files(place, table)
                if lost < losses and now.state_since(before) is not TableState.NO_NEW_FILE:
                    lost += _kill_an_executor(cluster)
                    before = now
                time.sleep(POLL_SECONDS)
        finally:
            kill_group(process)
        if process.returncode or not lost:
            output.seek(0)
            tail = output.read().decode(errors="replace")[-3000:]
            raise RunFailedError(
                f"{writer.name} ended with exit code {process.returncode} after the loss of {lost} executors:\n{tail}"
            )
        outcome.executors += lost
        outcome.compare(calm.expected, calm.contents(place))


def _kill_an_executor(cluster: Path) -> bool:
    """Kill one of the executors whose folder is below that of the cluster; return whether there was one."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                EXECUTOR in (process / "cmdline").read_bytes()
                and cluster in (process / "cwd").readlink().parents
            ):
                os.kill(int(process.name), signal.SIGKILL)
                return True
    return False
