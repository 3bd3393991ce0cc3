"""Transactional Writer, Kafka: reduce the JSON records of a topic to some fields, in transactions with their position.

    python -m python_jobs.idempotency.transactional_writer_kafka --source_topic visits \\
        --source_bootstrap_servers localhost:9092 \\
        --target_topic reduced_visits --target_bootstrap_servers localhost:9092 \\
        --fields '{visit_id: visit_id, at: event_time}'

Guarantee: the records of a transaction and the position after them are committed together. Consumers with
``isolation.level=read_committed`` see each record once and no record of an aborted transaction; other consumers also
see aborted records. A new program has the same ``transactional.id`` and fences off a predecessor that is still running.

A record that is no JSON object, or lacks a field, ends the program (exit code 3) with its topic, partition and offset.
The transaction is aborted, so nothing of it is published. The record is read again at each start: correct the producer,
or remove such records before this program (Dead-Letter). A tombstone (value NULL) is copied.

A transaction stays open for ``--commit_seconds``, and the broker aborts it 60 seconds later, so an open transaction
never stays open for long. The program uses the clients and the loop of
:mod:`python_jobs.ingestion.passthrough_replicator_kafka` and has the same limits.

Spark has no transactional Kafka sink: each task's producer sends on its own, so a retried task sends its records again.

Source: Data Engineering Design Patterns, chapter 4, Transactional Writer; the guide's ``pat-exactly-once`` (route 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from confluent_kafka import Message

from python_jobs.shared.core import exact_json
from python_jobs.shared.core.command_line import run_program
from python_jobs.shared.core.failures import DataRefused, WrongUse
from python_jobs.shared.kafka import replication
from python_jobs.shared.kafka.replication import Replicator, run_until_stopped


@dataclass(frozen=True)
class Parameters(replication.Parameters):
    """Reduce the JSON records of a Kafka topic to some fields, exactly once."""

    fields: dict[str, str] = field(default_factory=dict)
    """Fields of the new record, in order, each with the name of its field in the source record."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.fields:
            raise WrongUse("fields names no field; it takes one or more, {new name: name in the source}")


class Reducer(Replicator):
    """One run of the program."""

    role = "transactional_producer"

    def __init__(self, parameters: Parameters) -> None:
        self._fields = parameters.fields
        super().__init__(parameters)

    def value(self, message: Message) -> bytes | None:
        """Return the record's value with the chosen fields only.

        Raises:
            DataRefused: the value is no JSON object with these fields.
        """
        payload = message.value()
        if payload is None:
            return None
        try:
            record = exact_json.parse(payload)
            values = exact_json.by_name(record) if isinstance(record, exact_json.Object) else {}
            reduced = exact_json.Object((name, values[source]) for name, source in self._fields.items())
        except (ValueError, KeyError, RecursionError) as failure:
            raise DataRefused(
                f"{message.topic()}/{message.partition()} offset {message.offset()} is no JSON object with "
                f"{', '.join(self._fields.values())} ({type(failure).__name__}): nothing of its transaction was "
                "published"
            ) from None
        return exact_json.write(reduced, (",", ":")).encode()


if __name__ == "__main__":
    run_program(Parameters, lambda parameters: run_until_stopped(Reducer(parameters)))
