"""Streaming Reprocessor: rewind a streaming query behind a bad release, while its source still has the data.

Problem: yesterday's release published wrong results. Today's is correct, but the query's checkpoint is behind the wrong
ones, and Spark has no argument to start from an earlier point. A new checkpoint would lose the state.

Actions, in the order of a repair. Those that write only report what they would do, until ``--publish true``:

* ``record``: write down that a release ends with the checkpoint's newest batch, before the next release starts.
* ``list`` (default): the checkpoint's batches, with their times and offsets, and whether each can be restored.
* ``restore``: bring the checkpoint back to a batch: into a new folder (``--to``), or in place, with a copy of the whole
  in ``--backup``. Start the corrected release with the restored checkpoint.
* ``start``: the offsets of a time, for a stateless query with a new checkpoint.
* ``repair``: when the corrected release is as far as the bad one was, delete the rows of the bad one that it hasn't
  replaced.

Guarantee: a restore is complete or hasn't happened; one that is interrupted leaves the checkpoint and the back-up as
they were, or continues. All operators, partitions and stores are restored, of both state store providers. A restored
checkpoint is a new lineage: neither Delta's sink nor our jobs skip its batches because of their numbers. Refused are: a
query that is seen to run, a batch that isn't there (any more) or isn't completed, and a start of which the topic has
deleted records.

Not guaranteed: that the query of another process is seen to run while it is idle. A sink that only appends gets the
rows again.

Cost: the driver lists the checkpoint's files, and copies those that are needed one after the other.

Submit::

    spark-submit python_jobs/streaming/streaming_reprocessor.py --action restore \\
        --checkpoint lakehouse/checkpoints/live_sessions --name v1 --to lakehouse/checkpoints/live_sessions_v3

Source: Data Engineering Design Patterns, chapter 11, Streaming Reprocessor.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from confluent_kafka import Consumer, KafkaException, TopicPartition
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import DataRefused, NotReady, WrongUse, given, require_at_least
from python_jobs.shared.core.intervals import parse_time
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.delta.checkpoints import has_progress, restored
from python_jobs.shared.delta.offsets_files import Offsets, source_kind
from python_jobs.shared.delta.tables import delta_table, read_table, table_exists
from python_jobs.shared.kafka.clients import (
    client_settings,
    offset_range,
    offsets_at,
    partition_count,
    topic_setting,
)
from python_jobs.shared.kafka.settings import refuse_secrets
from python_jobs.shared.spark.expressions import resolved
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.shared.spark.job import run_job
from python_jobs.streaming.checkpoint_restore import (
    is_restored,
    require_stopped,
    restore_in_place,
    restore_into,
)
from python_jobs.streaming.checkpoint_versions import RELEASES, CheckpointVersions

_NAME = re.compile(r"\w[\w.-]*")
_BATCH_REPROCESSOR = "compute from the lakehouse's copy of the topic instead (Batch Reprocessor)"


@dataclass(frozen=True, kw_only=True)
class Parameters(ProcessingTimeParameters):
    """Rewind a streaming query behind a bad release."""

    action: Literal["list", "record", "restore", "start", "repair"] = "list"
    """What to do; see the module's documentation."""
    publish: bool = False
    """Whether restore and repair write; by default they report what they would do."""
    checkpoint: str
    """Folder of the query's checkpoint; with start that of the new query, with repair that of the corrected one."""
    batch: int | None = None
    """Last batch to keep (restore), or the release's last batch (record; default: the newest completed one)."""
    name: str | None = None
    """Name of the release to record, or of the recorded release to restore; in place of a batch."""
    to: str | None = None
    """New folder of the restored checkpoint."""
    backup: str | None = None
    """In place of ``to``: clean the checkpoint itself, with a copy of the whole in this new folder."""
    quiet_seconds: int = 60
    """Refuse to restore a checkpoint that has a file younger than this; 0 if you know that the query is stopped."""
    bootstrap_servers: str | None = None
    """Kafka brokers, host:port,host:port, of a query that reads topics."""
    settings: dict[str, str] = field(default_factory=dict)
    """Further settings of Kafka's client (librdkafka's names); a secret as ${env:NAME}."""
    topic: str | None = None
    """Topic for which start finds the offsets."""
    since: str | None = None
    """Time of the first record to read (start), ISO 8601, UTC by default."""
    target: str | None = None
    """Delta table (name or path) to repair."""
    bad_rows: str | None = None
    """SQL condition of the rows that the bad release wrote, such as "release = 2"; also for one tenant alone."""
    corrected_rows: str | None = None
    """SQL condition of the rows that the corrected release wrote, such as "release = 3"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(0, batch=self.batch, quiet_seconds=self.quiet_seconds)
        refuse_secrets(self.settings)
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise WrongUse(f"name must be letters, digits, '_', '-' and '.', got '{self.name}'")
        needed = {
            "record": ["name"],
            "start": ["topic", "since", "bootstrap_servers"],
            "repair": ["target", "bad_rows", "corrected_rows"],
        }
        for name in needed.get(self.action, []):
            given(getattr(self, name), name)
        if self.since is not None:
            parse_time(self.since)
        if self.action == "restore":
            if (self.batch is None) == (self.name is None):
                raise WrongUse("restore takes either batch or name")
            if (self.to is None) == (self.backup is None):
                raise WrongUse(
                    "restore takes either to, a new folder, or backup, which cleans the checkpoint in place"
                )

    @property
    def client(self) -> dict[str, Any]:
        """Settings of Kafka's client."""
        return client_settings(given(self.bootstrap_servers, "bootstrap_servers"), self.settings)


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Do the action and return the report.

    Raises:
        WrongUse: a batch isn't in the checkpoint, or a folder exists.
        NotReady: there is no checkpoint, or its query runs; the corrected release isn't as far as the bad one was.
        DataRefused: the topic has deleted records from the start on.
        JobFailed: files of the batch are gone.
    """
    actions = {
        "list": list_batches,
        "record": record,
        "restore": restore,
        "start": find_start,
        "repair": repair,
    }
    return {"action": params.action} | actions[params.action](spark, params)


def list_batches(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Return the batches of a checkpoint, with what each can be restored to."""
    versions = CheckpointVersions(spark, params.checkpoint)
    names: dict[int, list[str]] = {}
    for name, batch in sorted(versions.releases().items()):
        names.setdefault(batch, []).append(name)
    batches = []
    for batch in versions.completed:
        problem = versions.lacks(batch)
        told = {} if batch not in versions.begun else _told(versions.offsets(batch))
        batches.append(
            {
                "batch_id": batch,
                "releases": names.get(batch, []),
                "can_be_restored": problem is None,
                "problem": problem,
                **told,
            }
        )
    return {"checkpoint": params.checkpoint, "batches": batches}


def _told(offsets: Offsets) -> dict[str, Any]:
    return {
        "written_at": offsets.written_at,
        "watermark": offsets.watermark,
        "sources": list(offsets.sources),
    }


def record(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Record the last batch of a release in the checkpoint; the same record again changes nothing.

    Raises:
        WrongUse: another batch has this name, or the batch isn't a completed one.
    """
    versions = CheckpointVersions(spark, params.checkpoint)
    name, recorded = str(params.name), versions.releases()
    if not versions.completed:
        raise NotReady(f"the query of '{params.checkpoint}' hasn't completed a batch yet")
    batch = versions.completed[-1] if params.batch is None else params.batch
    versions.needed(batch)
    if recorded.get(name, batch) != batch:
        raise WrongUse(
            f"'{name}' is recorded as batch {recorded[name]} of '{params.checkpoint}', not {batch}"
        )
    content = {"recorded_at": params.processing_time().isoformat()}
    versions.folder.create_text(f"{RELEASES}/{name}/{batch}", json_text(content))
    return {"checkpoint": params.checkpoint, "name": name, "batch_id": batch}


def restore(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Restore a checkpoint to a batch, or list the files that it would copy or delete."""
    versions = CheckpointVersions(spark, params.checkpoint)
    batch = _batch(versions, params)
    in_place = params.to is None
    folder = HadoopFolder(spark, given(params.to or params.backup, "to"))
    report: dict[str, Any] = {
        "checkpoint": params.checkpoint,
        "batch_id": batch,
        "to": params.to or params.checkpoint,
        "backup": params.backup,
        "published": params.publish,
    }
    new, source = (versions.folder, folder) if in_place else (folder, versions.folder)
    if is_restored(new, str(source.root), batch):
        return report | {"published": False, "was_restored": True}
    needed = versions.needed(batch)
    now = params.processing_time()
    require_stopped(spark, versions, now, params.quiet_seconds)
    _require_retained(versions.offsets(batch), params)
    if params.publish and in_place:
        restore_in_place(spark, versions, batch, str(folder.root), now.isoformat())
    elif params.publish:
        restore_into(spark, versions, batch, needed, str(folder.root), now.isoformat())
    files = {"deletes": versions.newer(batch)} if in_place else {"copies": needed}
    return report | {"was_restored": False, **_told(versions.offsets(batch)), **files}


def _batch(versions: CheckpointVersions, params: Parameters) -> int:
    if params.name is None:
        return given(params.batch, "batch")
    recorded = versions.releases()
    if params.name not in recorded:
        known = ", ".join(sorted(recorded)) or "none"
        raise WrongUse(f"no release '{params.name}' is recorded in '{params.checkpoint}', which has {known}")
    return recorded[params.name]


# --- topics -----------------------------------------------------------------------------------------------


def _require_retained(offsets: Offsets, params: Parameters) -> None:
    """Refuse a position in a topic whose next records are gone: the query would start with a gap, or not at all."""
    for topic, positions in offsets.topics().items():
        if params.bootstrap_servers is None:
            raise WrongUse(
                f"the query reads the topic {topic}: give bootstrap_servers, so that its retention is checked"
            )
        with _consumer(params, topic) as consumer:
            for partition, offset in sorted(positions.items()):
                first, end = offset_range(consumer, TopicPartition(topic, partition))
                if not first <= offset <= end:
                    raise DataRefused(
                        f"the batch ends at offset {offset} of {topic}/{partition}, which has the offsets {first} to "
                        f"{end}: {_BATCH_REPROCESSOR}"
                    )


def find_start(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Return the offset of the first record of each partition that isn't before a time, else its end.

    Raises:
        WrongUse: the checkpoint has progress, so that Spark would ignore the offsets.
        DataRefused: the topic may have deleted records from the time on.
    """
    if has_progress(spark, params.checkpoint):
        raise WrongUse(
            f"'{params.checkpoint}' has progress, with which Spark ignores starting offsets: give the new query a "
            "folder of its own"
        )
    topic, since = str(params.topic), parse_time(str(params.since))
    partitions = range(partition_count(params.client, topic))
    with _consumer(params, topic) as consumer:
        found = offsets_at(consumer, topic, partitions, since)
        ranges = {number: offset_range(consumer, TopicPartition(topic, number)) for number in partitions}
    deleted_before = _deleted_before(params.client, topic, params.processing_time())
    for partition, offset in found.items():
        first, _ = ranges[partition]
        # Deleted records are older than the first one that is left, but they may be younger than the start.
        if offset == first > 0 and since < deleted_before:
            raise DataRefused(
                f"{topic}/{partition} has no records before offset {first} any more, and deleted ones may be from "
                f"{params.since} or later: {_BATCH_REPROCESSOR}"
            )
    return {
        "checkpoint": params.checkpoint,
        "offsets": found,
        "records": {partition: ranges[partition][1] - offset for partition, offset in found.items()},
        "starting_offsets": json_text({topic: {str(number): offset for number, offset in found.items()}}),
    }


def _deleted_before(client: Mapping[str, Any], topic: str, now: dt.datetime) -> dt.datetime:
    """Return the time before which records may be deleted; ``now`` unless it is their age alone that deletes them."""
    milliseconds = int(topic_setting(client, topic, "retention.ms"))
    by_size = int(topic_setting(client, topic, "retention.bytes")) >= 0
    if by_size or milliseconds < 0:
        return now
    return now - dt.timedelta(milliseconds=milliseconds)


@contextmanager
def _consumer(params: Parameters, topic: str) -> Iterator[Consumer]:
    partition_count(params.client, topic)  # one sentence if there is no broker or no topic
    settings = params.client | {"group.id": "streaming_reprocessor", "enable.auto.commit": False}
    with closing(Consumer(settings)) as consumer:
        try:
            yield consumer
        except KafkaException as failure:
            raise NotReady(f"the broker doesn't tell offsets of {topic}: {failure.args[0].str()}") from None


# --- repair -----------------------------------------------------------------------------------------------


def repair(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Delete the rows of the bad release that the corrected one hasn't replaced, in one commit.

    Raises:
        NotReady: the corrected release isn't as far as the bad one was, or has written no row.
        WrongUse: the checkpoint isn't a restored one, or a condition can't be resolved.
    """
    target = str(params.target)
    if not table_exists(spark, target):
        raise NotReady(f"there is no Delta table '{target}' to repair")
    _require_caught_up(spark, params.checkpoint)
    with resolved("a condition"):
        corrected = F.coalesce(F.expr(str(params.corrected_rows)), F.lit(False))
        is_left = F.expr(str(params.bad_rows)) & ~corrected
        counted = read_table(spark, target).select(F.count_if(is_left), F.count_if(corrected))
    left, written = counted.collect()[0]
    if written == 0:
        raise NotReady(
            f"'{target}' has no row with {params.corrected_rows}: run the corrected release first, so that its rows "
            "can be told from the bad ones"
        )
    table = delta_table(spark, target)
    if params.publish and left:
        table.delete(is_left)
    version = table.history(1).select("version").collect()[0][0]
    return {"target": target, "published": params.publish, "rows": left, "version": version}


def _require_caught_up(spark: SparkSession, checkpoint: str) -> None:
    versions = CheckpointVersions(spark, checkpoint)
    before = restored(versions.folder)
    if before is None:
        raise WrongUse(
            f"'{checkpoint}' isn't a restored checkpoint: repair needs that of the corrected release"
        )
    position = versions.offsets(versions.completed[-1]).sources
    for goal in before.reached:
        for number, (has, needs) in enumerate(zip(position, goal, strict=True)):
            if not is_reached(has, needs):
                raise NotReady(
                    f"the corrected query of '{checkpoint}' is at {json_text(has)} in source {number}, the bad release "
                    f"was at {json_text(needs)}: wait until it has caught up"
                )


def is_reached(position: Any, goal: Any) -> bool:
    """Return whether a position in a source is at least another one; False if their order isn't known."""
    if goal is None or position == goal:
        return True
    match source_kind(position), source_kind(goal):
        case "kafka", "kafka":
            return all(
                position.get(topic, {}).get(partition, -1) >= offset
                for topic, partitions in goal.items()
                for partition, offset in partitions.items()
            )
        case "delta", "delta":
            return position["reservoirId"] == goal["reservoirId"] and _version(position) >= _version(goal)
    return False


def _version(position: Mapping[str, Any]) -> tuple[int, int]:
    return position["reservoirVersion"], position["index"]


if __name__ == "__main__":
    run_job(Parameters, run)
