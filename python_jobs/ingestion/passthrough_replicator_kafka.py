"""Passthrough Replicator, Kafka: copy a topic into another one, of this or another cluster, record for record.

Problem: another environment needs exactly the records of a topic. A stream through Spark loses their timestamps,
which its Kafka sink can't set, and writes records twice when it retries.

Guarantee: every record arrives in the partition it came from, in the order of that partition, with its key, value
(both may be NULL), headers and timestamp. The source's offsets are committed to the target's cluster in the
transaction that holds the records, so that a program that was killed goes on where its records end; one that is
still alive when its successor starts is fenced off. Readers with ``isolation.level=read_committed`` see each record
once. Others may also see records of a transaction that was given up: the header ``replicated_from``, the last
one, holds ``topic/partition/offset`` at the source and tells them apart.

Not copied: offsets, which are the target's own, and records of transactions that the source gave up.

The target topic must be there, with at least as many partitions, ``message.timestamp.type=CreateTime``, and no
other writer. The position is kept as the offsets of the group ``passthrough_replicator.<source topic>`` under the
target topic; Kafka forgets it after ``offsets.retention.minutes`` (7 days) of standstill, after which a start is
refused instead of copying all again.

Cost: one process, a consumer and a producer. A transaction takes up to ``--commit_seconds``, which is how far
behind readers are.

    python -m python_jobs.ingestion.passthrough_replicator_kafka --source_topic events \\
        --source_bootstrap_servers kafka.production:9092 \\
        --target_topic events --target_bootstrap_servers kafka.staging:9092

Source: Data Engineering Design Patterns, chapter 2, Passthrough Replicator.
"""

from __future__ import annotations

from typing import Any

from python_jobs.shared.core.command_line import run_program
from python_jobs.shared.kafka.replication import Parameters, Replicator, run_until_stopped


def run(parameters: Parameters) -> dict[str, Any]:
    """Replicate until SIGTERM or SIGINT, or until the end."""
    return run_until_stopped(Replicator(parameters))


if __name__ == "__main__":
    run_program(Parameters, run)
