"""Local Aggregator's reorganisation: copy a topic into one with another number of partitions, each record by its key.

Problem: the Local Aggregator needs all records of a key in one partition. A partition that is added to a topic breaks
this: from then on a key's records go to another partition.

Guarantee: each record is in the target once, in the partition of its key, with key, value, headers and timestamp. The
source's offsets are committed in the transaction of the records, so a killed program continues after its last committed
record. The records of a key that were in one partition keep their order; the order of records of two partitions is that
of their copying, and their timestamps tell the rest. The header ``replicated_from`` holds ``topic/partition/offset``.

The target must exist, with at least as many partitions as the source has, and no other writer meanwhile. To move: stop
the producers, run this program with ``--until_end true``, start the Local Aggregator on the new topic with a new
checkpoint and a new target, and let the producers write there. ``--partitioner`` must be the producers' one.

Cost: one process, a consumer and a producer; all records pass it once.

    python -m python_jobs.data_value.local_aggregator_kafka --source_topic visits --target_topic visits_16 \\
        --source_bootstrap_servers localhost:9092 --target_bootstrap_servers localhost:9092 --until_end true

Source: Data Engineering Design Patterns, chapter 5, Local Aggregator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from python_jobs.shared.core.command_line import run_program
from python_jobs.shared.kafka import replication
from python_jobs.shared.kafka.replication import Replicator, run_until_stopped

_BY_KEY = -1


@dataclass(frozen=True)
class Parameters(replication.Parameters):
    """Copy a Kafka topic into one with another number of partitions, each record into the partition of its key."""

    partitioner: Literal["murmur2_random", "consistent_random"] = "murmur2_random"
    """Partitioner of the producers: murmur2_random is that of Kafka's Java client, consistent_random librdkafka's."""


class Reorganiser(Replicator):
    """One run of a reorganisation."""

    role = "local_aggregator"

    def producer_settings(self) -> dict[str, Any]:
        """Return the partitioner."""
        parameters = self.parameters
        return {"partitioner": parameters.partitioner} if isinstance(parameters, Parameters) else {}

    def partition(self, partition: int) -> int:
        """Return the number for which the partitioner chooses."""
        return _BY_KEY


def run(parameters: Parameters) -> dict[str, Any]:
    """Copy until SIGTERM or SIGINT, or until the end; return the numbers of records and bytes."""
    return run_until_stopped(Reorganiser(parameters))


if __name__ == "__main__":
    run_program(Parameters, run)
