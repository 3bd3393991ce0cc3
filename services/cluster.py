"""A real Spark cluster on this machine: standalone master, workers, and a Thrift Server in front of them.

    python -m services.cluster --lakehouse FOLDER      # runs until interrupted; prints what dbt and spark-submit need

Each cluster uses free loopback ports and its own folders, so two clusters never conflict.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyspark
from jsonargparse import auto_cli

from services.processes import HOST, Process, free_port, listens, running


@dataclass(frozen=True)
class Cluster:
    """The addresses of a running cluster."""

    master: str
    """URL for ``spark-submit --master``."""
    thrift_port: int
    """Port of the Thrift Server on the loopback address."""

    def environment(self) -> dict[str, str]:
        """Return the variables that the dbt target ``cluster`` reads."""
        return {"SPARK_THRIFT_HOST": HOST, "SPARK_THRIFT_PORT": str(self.thrift_port)}


@contextlib.contextmanager
def running_cluster(folder: Path, *, workers: int = 2, memory: str = "1g") -> Iterator[Cluster]:
    """Start a master, ``workers`` workers of one core each and a Thrift Server; stop them all at the end.

    Args:
        folder: folder for logs, work folders and the Thrift Server's metastore.
        workers: number of workers.
        memory: memory of a worker and of an executor.

    Raises:
        ServiceFailed: a part did not come up; the message names its log.
    """
    thrift_port = free_port()
    with running_workers(folder, workers=workers, memory=memory) as master:
        server = Process(
            "thrift-server",
            thrift_server_command(master, thrift_port, folder, memory),
            folder,
            lambda log: listens(thrift_port),
            environment=_environment(folder),
        )
        with running(server):
            yield Cluster(master, thrift_port)


@contextlib.contextmanager
def running_workers(folder: Path, *, workers: int = 2, memory: str = "1g") -> Iterator[str]:
    """Start a master and ``workers`` workers of one core each, yield the master's URL; stop them at the end.

    Args:
        folder: folder for logs and the workers' folders (``work-1``, …).
        workers: number of workers.
        memory: memory of a worker.

    Raises:
        ServiceFailed: a part did not come up; the message names its log.
    """
    _verbose_configuration(folder / "conf")
    port = free_port()
    master = f"spark://{HOST}:{port}"
    with contextlib.ExitStack() as stack:

        def start(name: str, arguments: list[str], ready: str) -> None:
            command = [str(Path(pyspark.__path__[0]) / "bin" / "spark-class"), *arguments]
            process = Process(
                name, command, folder, lambda log: ready in log, environment=_environment(folder)
            )
            stack.enter_context(running(process))

        deploy = "org.apache.spark.deploy"
        start(
            "master",
            [f"{deploy}.master.Master", "--host", HOST, "--port", str(port), "--webui-port", "0"],
            "New state: ALIVE",
        )
        for number in range(1, workers + 1):
            start(
                f"worker-{number}",
                [f"{deploy}.worker.Worker", "--host", HOST, "--cores", "1", "--memory", memory,
                 "--webui-port", "0", "--work-dir", str(folder / f"work-{number}"), master],
                "Successfully registered with master",
            )  # fmt: skip
        yield master


def _environment(folder: Path) -> dict[str, str]:
    return {"SPARK_CONF_DIR": str(folder / "conf"), "SPARK_LOCAL_IP": HOST}


def thrift_server_command(master: str, port: int, folder: Path, memory: str) -> list[str]:
    """Return the command of a Thrift Server on ``master``; the server takes one core and leaves the others to jobs."""
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


def _verbose_configuration(folder: Path) -> None:
    """The project's settings, with the deploy daemons' own messages shown: readiness is read from their logs."""
    source = Path(os.environ["SPARK_CONF_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spark-defaults.conf").write_text((source / "spark-defaults.conf").read_text(encoding="utf-8"))
    log4j = (source / "log4j2.properties").read_text(encoding="utf-8")
    daemons = "\nlogger.deploy.name = org.apache.spark.deploy\nlogger.deploy.level = info\n"
    (folder / "log4j2.properties").write_text(log4j + daemons)


def main(folder: str, workers: int = 2) -> None:
    """Run a cluster until interrupted and print how to use it.

    Args:
        folder: folder for its logs, work folders and metastore.
        workers: number of workers with one core each.
    """
    with running_cluster(Path(folder).absolute(), workers=workers) as cluster:
        for name, value in cluster.environment().items():
            print(f"export {name}={value}")
        print(f"python -m case_study.demo --target cluster --master {cluster.master}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    sys.exit(auto_cli(main, as_positional=False))
