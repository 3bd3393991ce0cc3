"""Topics that are deleted and recreated."""

from __future__ import annotations

from collections.abc import Sequence

from services.kafka import Broker, Record
from tests.support.waiting import eventually


def recreate(broker: Broker, topic: str, records: Sequence[Record], partitions: int = 1) -> None:
    """Delete the topic, create another one under its name and write the records into it."""
    broker.admin.delete_topics([topic])[topic].result()
    eventually(lambda: topic not in broker.topics())
    broker.create_topic(topic, partitions)
    broker.produce(topic, records)
