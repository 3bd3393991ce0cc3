"""A real Spark cluster on this machine: standalone master, workers, and a Thrift Server in front of them.

    python -m services.cluster --lakehouse FOLDER      # runs until interrupted; prints what dbt and spark-submit need

Free loopback ports, own folders, stopped by the handles that started it: two of them never meet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyspark
from jsonargparse import auto_cli

HOST = "127.0.0.1"
READY_SECONDS = 90


@dataclass(frozen=True)
class Cluster:
    """Where a running cluster is reached."""

    master: str
    """URL for ``spark-submit --master``."""
    thrift_port: int
    """Port of the Thrift Server on the loopback address."""

    def environment(self) -> dict[str, str]:
        """Return the variables that the dbt target ``cluster`` reads."""
        return {"SPARK_THRIFT_HOST": HOST, "SPARK_THRIFT_PORT": str(self.thrift_port)}


def free_port() -> int:
    """Return a loopback port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_cluster(folder: Path, *, workers: int = 2, memory: str = "1g") -> Iterator[Cluster]:
    """Start a master, ``workers`` workers of one core each and a Thrift Server; stop them all at the end.

    Args:
        folder: where logs, work folders and the Thrift Server's metastore go.
        workers: number of workers.
        memory: memory of a worker and of an executor.

    Raises:
        TimeoutError: a part was not ready in time; the message names its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    master_port, thrift_port = free_port(), free_port()
    master = f"spark://{HOST}:{master_port}"
    with contextlib.ExitStack() as stack:

        def start(name: str, command: list[str], ready: Callable[[str], bool]) -> None:
            stack.enter_context(_process(name, command, folder, ready))

        spark_class = str(Path(pyspark.__path__[0]) / "bin" / "spark-class")
        deploy = "org.apache.spark.deploy"
        start(
            "master",
            [spark_class, f"{deploy}.master.Master", "--host", HOST, "--port", str(master_port),
             "--webui-port", "0"],
            lambda log: "New state: ALIVE" in log,
        )  # fmt: skip
        for number in range(1, workers + 1):
            start(
                f"worker-{number}",
                [spark_class, f"{deploy}.worker.Worker", "--host", HOST, "--cores", "1", "--memory", memory,
                 "--webui-port", "0", "--work-dir", str(folder / f"work-{number}"), master],
                lambda log: "Successfully registered with master" in log,
            )  # fmt: skip
        start(
            "thrift-server",
            thrift_server_command(master, thrift_port, folder, memory),
            lambda log: _listens(thrift_port),
        )
        yield Cluster(master, thrift_port)


def thrift_server_command(master: str, port: int, folder: Path, memory: str) -> list[str]:
    """Return the command of a Thrift Server on ``master``; it takes one core and leaves the rest to jobs."""
    settings = {
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": f"file:{folder}/warehouse",
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={folder}/metastore_db;create=true",
        "spark.hadoop.hive.server2.thrift.port": str(port),
        "spark.hadoop.hive.server2.thrift.bind.host": HOST,
        "spark.executor.memory": memory,
        "spark.cores.max": "1",
    }
    command = ["spark-submit", "--master", master, "--name", "thrift-server"]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    return [*command, "--class", "org.apache.spark.sql.hive.thriftserver.HiveThriftServer2", "spark-internal"]


@contextlib.contextmanager
def _process(name: str, command: list[str], folder: Path, ready: Callable[[str], bool]) -> Iterator[None]:
    """Run ``command`` in its own process group until the block ends; enter the block when ``ready``."""
    log_path = folder / f"{name}.log"
    configuration = folder / "conf"
    _verbose_configuration(configuration)
    environment = os.environ | {"SPARK_CONF_DIR": str(configuration), "SPARK_LOCAL_IP": HOST}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment, cwd=folder
        )
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not ready(log_path.read_text(encoding="utf-8", errors="replace")):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise TimeoutError(f"{name} did not come up; see {log_path}")
                time.sleep(0.1)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _verbose_configuration(folder: Path) -> None:
    """The project's settings, with the deploy daemons' own messages shown: readiness is read from their logs."""
    source = Path(os.environ["SPARK_CONF_DIR"])
    folder.mkdir(exist_ok=True)
    (folder / "spark-defaults.conf").write_text((source / "spark-defaults.conf").read_text(encoding="utf-8"))
    log4j = (source / "log4j2.properties").read_text(encoding="utf-8")
    daemons = "\nlogger.deploy.name = org.apache.spark.deploy\nlogger.deploy.level = info\n"
    (folder / "log4j2.properties").write_text(log4j + daemons)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


def main(folder: str, workers: int = 2) -> None:
    """Run a cluster until interrupted and print how to use it.

    Args:
        folder: where its logs, work folders and metastore go.
        workers: number of workers with one core each.
    """
    with running_cluster(Path(folder).absolute(), workers=workers) as cluster:
        for name, value in cluster.environment().items():
            print(f"export {name}={value}")
        print(f"python -m services.demo --target cluster --master {cluster.master}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    sys.exit(auto_cli(main, as_positional=False))
