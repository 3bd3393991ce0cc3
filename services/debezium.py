"""Kafka Connect in one process with Debezium's PostgreSQL connector: each table's row changes become a topic's records.

    with running(Connector(folder, broker, database, tables=["public.users"], topic_prefix="shop")) as connector:
        ...                                  # changes of public.users are in the topic shop.public.users

The connector first sends every existing row (op r), then the changes from the same log position, without gaps or
duplicates. Its replication slot and its offsets file hold its position, so it continues there after a stop or a crash.
"""

from __future__ import annotations

import base64
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import requests

from services.jars import ROOT, java
from services.kafka import Broker
from services.postgres import Database
from services.processes import HOST, READY_SECONDS, Process, ServiceFailed, free_port, write_private

ANSWER_SECONDS = 5

# This class logs "Starting streaming" when the snapshot is complete.
_COORDINATOR = "io.debezium.pipeline.ChangeEventSourceCoordinator"


class Connector:
    """One worker with one connector; after a stop or a kill it continues at its position."""

    def __init__(
        self,
        folder: Path,
        broker: Broker,
        database: Database,
        tables: Sequence[str] = (),
        topic_prefix: str = "changes",
        config: Mapping[str, str] | None = None,
    ) -> None:
        """Write the settings; :meth:`start` runs the worker.

        Args:
            folder: folder for offsets, settings and log.
            broker: broker for the topics ``<topic_prefix>.<schema>.<table>``, which are created as needed.
            database: database whose changes are captured; its server needs ``wal_level = logical``.
            tables: tables to capture, as ``schema.table``; by default all.
            topic_prefix: prefix of the topics and name of the connector, its replication slot and publication.
            config: further settings of Debezium; they override the defaults here.
        """
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", topic_prefix):
            raise ServiceFailed(f"topic_prefix is '{topic_prefix}'; letters, digits and _ are allowed")
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self._broker, self._database = broker, database
        self.name = topic_prefix
        self.topic_prefix = topic_prefix
        self.slot_name = f"debezium_{topic_prefix}".lower()
        self.url = f"http://{HOST}:{port}"
        write_private(folder / "secrets.properties", f"password={database.password}\n")
        worker, connector = folder / "worker.properties", folder / "connector.properties"
        worker.write_text(_properties(_worker_settings(folder, broker, port)), encoding="utf-8")
        settings = self._settings(folder, database, tables) | dict(config or {})
        connector.write_text(_properties(settings), encoding="utf-8")
        main = "org.apache.kafka.connect.cli.ConnectStandalone"
        self.process = Process(
            "connect",
            [*java("connect", logged=_COORDINATOR), main, str(worker), str(connector)],
            folder,
            self._is_ready,
            ports=(port,),
        )

    def start(self) -> None:
        """Start the worker and wait until the snapshot is complete and changes are streamed.

        Raises:
            ServiceFailed: the worker did not start; the sentence gives the reason.
        """
        self.process.start()

    def stop(self) -> None:
        """Shut the worker down; the replication slot stays, and PostgreSQL keeps all later changes."""
        self.process.stop()

    def kill(self) -> None:
        """End the worker as a crash would."""
        self.process.kill()

    def topic(self, table: str) -> str:
        """Return the topic of a table that is given as ``schema.table``."""
        return f"{self.topic_prefix}.{table}"

    def catch_up(self) -> None:
        """Wait until every change committed before this call is in its topic.

        Raises:
            ServiceFailed: a change is not there within READY_SECONDS.
        """
        marker = str(uuid.uuid4())
        with self._database.connect() as connection:
            # A message in PostgreSQL's own log: it is streamed after all changes that were committed before it.
            connection.execute("select pg_logical_emit_message(true, 'catch_up', %s)", [marker])
        topic = f"{self.topic_prefix}.message"
        sought = base64.b64encode(marker.encode())
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if topic in self._broker.topics() and any(
                sought in (record.value() or b"") for record in self._broker.records(topic)
            ):
                return
            time.sleep(0.1)
        raise ServiceFailed(f"connector '{self.name}' did not catch up: {self.failure() or 'it still runs'}")

    def status(self) -> dict[str, Any]:
        """Return the worker's own report on the connector and its task (``state``, ``trace``).

        Raises:
            ServiceFailed: the worker does not answer.
        """
        try:
            answer = requests.get(f"{self.url}/connectors/{self.name}/status", timeout=ANSWER_SECONDS)
            answer.raise_for_status()
        except requests.RequestException as failure:
            raise ServiceFailed(f"the worker of connector '{self.name}' does not answer") from failure
        return dict(answer.json())

    def failure(self) -> str | None:
        """Return why the connector's task ended, in one sentence, or None while it runs."""
        status = self.status()
        for part in (status["connector"], *status["tasks"]):
            if part["state"] == "FAILED":
                return _cause(part.get("trace", "no reason given"))
        return None

    def _is_ready(self, log: str) -> bool:
        # A refused connection or setting ends the worker before its connector exists.
        if refused := re.search(r"(?:PSQL|Connect|Config)Exception: (?:FATAL: )?(.+)", log):
            raise ServiceFailed(f"connector '{self.name}' can't start: {refused[1].strip()}")
        try:
            status = self.status()
            failure = self.failure()
        except ServiceFailed:
            return False
        if failure is not None:
            raise ServiceFailed(f"connector '{self.name}' can't start: {failure}")
        return "Starting streaming" in log and any(task["state"] == "RUNNING" for task in status["tasks"])

    def _settings(self, folder: Path, database: Database, tables: Sequence[str]) -> dict[str, str]:
        settings = {
            "name": self.name,
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "plugin.name": "pgoutput",
            "database.hostname": database.host,
            "database.port": str(database.port),
            "database.user": database.user,
            "database.password": f"${{file:{folder}/secrets.properties:password}}",
            "database.dbname": database.database,
            "topic.prefix": self.topic_prefix,
            "slot.name": self.slot_name,
            "publication.name": self.slot_name,
            "publication.autocreate.mode": "filtered" if tables else "all_tables",
            "snapshot.mode": "initial",
            "provide.transaction.metadata": "true",
            "skipped.operations": "none",  # the default leaves truncates out
            # Numbers and intervals as text: JSON without a schema doesn't define the meaning of the bytes.
            "decimal.handling.mode": "string",
            "interval.handling.mode": "string",
            "poll.interval.ms": "100",
            "retriable.restart.connector.wait.ms": "1000",
            "topic.creation.default.partitions": "1",
            "topic.creation.default.replication.factor": "1",
        }
        if tables:
            settings["table.include.list"] = ",".join(re.escape(table) for table in tables)
        return settings


def _worker_settings(folder: Path, broker: Broker, port: int) -> dict[str, str]:
    converter = "org.apache.kafka.connect.json.JsonConverter"
    return {
        "bootstrap.servers": broker.bootstrap_servers,
        "listeners": f"http://{HOST}:{port}",
        "plugin.path": str(ROOT / "connectors"),
        "plugin.discovery": "service_load",
        "offset.storage.file.filename": str(folder / "offsets"),
        "offset.flush.interval.ms": "1000",
        "key.converter": converter,
        "key.converter.schemas.enable": "false",
        "value.converter": converter,
        "value.converter.schemas.enable": "false",
        # Only Connect reads the password, which appears neither in its REST API nor in its log.
        "config.providers": "file",
        "config.providers.file.class": "org.apache.kafka.common.config.provider.FileConfigProvider",
    }


def _properties(settings: Mapping[str, str]) -> str:
    """Return settings in Java's format, which doubles each backslash."""
    return "".join("{}={}\n".format(name, value.replace("\\", "\\\\")) for name, value in settings.items())


def _cause(trace: str) -> str:
    """Return the message of the innermost exception of a Java stack trace."""
    messages = [line for line in trace.splitlines() if not line.startswith(("\tat ", "\t..."))]
    return messages[-1].removeprefix("Caused by: ").partition(": ")[2] or messages[-1]
