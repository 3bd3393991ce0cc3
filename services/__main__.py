"""Run a Kafka broker, PostgreSQL, Debezium and an S3 API until interrupted.

    python -m services [--folder FOLDER]

It prints ``export`` lines with which other programs find the services. Passwords are in files that only you can read;
the lines name these files. Broker and database keep their data in the folder; the S3 API keeps nothing.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from typing import NoReturn

from jsonargparse import auto_cli

from services.debezium import Connector
from services.kafka import running_broker
from services.object_store import running_object_store
from services.postgres import running_postgres
from services.processes import ServiceFailed, running

DATABASE = "blog"
TOPIC_PREFIX = "blog"


def main(folder: str = ".services") -> int:
    """Start everything, print how to reach it, wait for an interrupt, stop everything.

    Args:
        folder: folder for data, logs and password files.

    Returns:
        The exit code.
    """
    signal.signal(signal.SIGTERM, _interrupted)
    root = Path(folder).absolute()
    try:
        with (
            running_broker(root / "kafka") as broker,
            running_postgres(root / "postgres") as postgres,
            running_object_store(root / "object_store") as store,
        ):
            database = postgres.ensure_database(DATABASE)
            connector = Connector(root / "debezium", broker, database, topic_prefix=TOPIC_PREFIX)
            with running(connector):
                variables = {
                    **broker.environment(),
                    **database.environment(root / "pgpass"),
                    "CONNECT_URL": connector.url,
                    **store.environment(root / "aws_credentials"),
                }
                for name, value in variables.items():
                    print(f"export {name}={value}")
                print(
                    f"# every change of a table of database {DATABASE} goes to the topic "
                    f"{TOPIC_PREFIX}.<schema>.<table>; interrupt to stop",
                    flush=True,
                )
                signal.pause()
    except ServiceFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


def _interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(auto_cli(main, as_positional=False))
