"""Passthrough Replicator, Kafka: copy a topic into another one, of this or another cluster, record for record.

Problem: another environment needs exactly the records of a topic. A stream through Spark loses their timestamps,
which its Kafka sink can't set, and writes records twice when it retries.

Guarantee: every record arrives in its own partition, in the order of that partition, with its key, value (both may be
NULL), headers and timestamp. The source's offsets are committed to the target's cluster in the transaction of the
records, so a killed program continues after its last committed record. A new program fences off a predecessor that is
still running. Readers with ``isolation.level=read_committed`` see each record once. Other readers may also see records
of aborted transactions; the last header, ``replicated_from``, holds the record's ``topic/partition/offset`` at the
source and so identifies duplicates.

Not copied: offsets, because the target has its own, and records of transactions that were aborted at the source.

The target topic must exist, with at least as many partitions, ``message.timestamp.type=CreateTime``, and no other
writer. The position is stored as the offsets of the group ``passthrough_replicator.<source topic>`` under the target
topic. Kafka deletes this position after ``offsets.retention.minutes`` (7 days) without a commit. After that a start is
refused instead of copying all records again.

Cost: one process, a consumer and a producer. A transaction takes up to ``--commit_seconds``; readers lag by this time.

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
    """Replicate until SIGTERM or SIGINT, or until the end; return the numbers of records and bytes."""
    return run_until_stopped(Replicator(parameters))


if __name__ == "__main__":
    run_program(Parameters, run)
