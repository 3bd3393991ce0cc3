"""Where writers write: topics of Kafka and buckets of S3. The services are found by environment variables."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

from python_jobs.idempotency.proxy_s3 import Parameters, resolve
from python_jobs.shared.kafka.clients import patiently
from services.kafka import Cluster
from tests.support.killer import TableFiles
from tests.torture.stores import Rows, Store

KAFKA = "TORTURE_KAFKA"
"""Variable that holds the brokers' addresses."""
PARTITIONS = 2


def cluster() -> Cluster:
    """Return the brokers of the environment; the killer asks them a hundred times a second."""
    return _cluster(os.environ[KAFKA])


_cluster = functools.cache(Cluster)


# --- Kafka ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TopicStore(Store):
    """A topic for each folder, of the folder's name: the table ``{folder}``."""

    committed: Callable[[Path], frozenset[str]]
    """Return, for a folder, what says that records were sent for good; one more for each commit, or another."""
    at_least_once: bool = False
    """Whether the same record may be there again: how often it is there is no content then."""

    def set_up(self, folder: Path) -> None:
        """Create the topic."""
        cluster().create_topic(folder.name, partitions=PARTITIONS)

    def files(self, folder: Path, table: str) -> TableFiles:
        """Return the ends of the partitions, open transactions included, and what is committed."""
        ends = patiently(lambda: cluster().ends(folder.name, PARTITIONS)).items()
        return TableFiles(
            data=frozenset(f"{partition}/{end}" for partition, end in ends), log=self.committed(folder)
        )

    def rows(self, spark: Any, folder: Path, table: str) -> Rows:
        """Return partition, key, value and headers of each record that readers of committed ones get."""
        rows: Rows = Counter(
            (repr(record.partition()), repr(record.key()), repr(record.value()), repr(record.headers()))
            for record in cluster().records(folder.name)
        )
        return Counter(set(rows)) if self.at_least_once else rows


def batches_committed(folder: Path) -> frozenset[str]:
    """Return the batches of the stream whose checkpoint is in the folder that are done."""
    return frozenset(path.name for path in (folder / "checkpoint" / "commits").glob("[0-9]*"))


def position_of(group: str) -> Callable[[Path], frozenset[str]]:
    """Return a function that returns the position a group has committed with the records of a folder's topic."""

    def committed(folder: Path) -> frozenset[str]:
        asked = ConsumerGroupTopicPartitions(group, _partitions(folder))
        answer = patiently(lambda: cluster().admin.list_consumer_group_offsets([asked])[group].result())
        known = [partition for partition in answer.topic_partitions if partition.offset >= 0]
        return frozenset(f"{partition.partition}/{partition.offset}" for partition in known)

    return committed


def _partitions(folder: Path) -> list[TopicPartition]:
    return [TopicPartition(folder.name, partition) for partition in range(PARTITIONS)]


# --- S3 ---------------------------------------------------------------------------------------------------


def client() -> Any:
    """Return the S3 client of the environment."""
    return _client(os.environ["AWS_ENDPOINT_URL"])


@functools.cache
def _client(endpoint: str) -> Any:
    return boto3.client("s3", endpoint_url=endpoint)


class BucketStore(Store):
    """A bucket with object lock for each folder; tables are datasets of Proxy."""

    def set_up(self, folder: Path) -> None:
        """Create the bucket."""
        client().create_bucket(Bucket=bucket(folder), ObjectLockEnabledForBucket=True)

    def files(self, folder: Path, table: str) -> TableFiles:
        """Return all object versions; committed are those of the manifest that readers take."""
        found: dict[bool, set[str]] = {True: set(), False: set()}
        for page in client().get_paginator("list_object_versions").paginate(Bucket=bucket(folder)):
            for version in page.get("Versions", []):
                key = version["Key"]
                found[key.endswith("/_current.json")].add(f"{key} {version['VersionId']}")
        return TableFiles(data=frozenset(found[False]), log=frozenset(found[True]))

    def rows(self, spark: Any, folder: Path, table: str) -> Rows:
        """Return name and content of the files that readers find."""
        exposed = resolve(client(), Parameters(bucket(folder), table, step="expose"))

        def content(key: str, version: str) -> str:
            found = client().get_object(Bucket=bucket(folder), Key=key, VersionId=version)
            return str(found["Body"].read().decode())

        return Counter((Path(key).name, content(key, version)) for key, version in exposed)


def bucket(folder: Path) -> str:
    """Return the name of a folder's bucket."""
    return "-".join(part for part in folder.name.split("_") if part)
