"""Checkpoint files: read a Structured Streaming checkpoint, its lag, and whether a query may continue with it.

    <checkpoint>/metadata                  id of the query
    <checkpoint>/offsets/<batch>           before the batch: a version line, a line of watermark, time and settings,
                                           then one line per source
    <checkpoint>/commits/<batch>           after the batch

The state is read by Spark's sources ``state-metadata`` and ``statestore``. There is none for the other files.

This module only reads. Offsets are never edited in place: a new checkpoint rewinds a query (``checkpoint_rewind``).

Sources: Data Engineering Design Patterns, chapter 3, Checkpointer; Spark's Structured Streaming guide, "Recovery
Semantics after Changes in a Streaming Query"; the layout as Spark 4.2 writes it.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DataType, StructType

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.paths import is_uri
from python_jobs.shared.delta.offsets_files import Offsets, newest_offsets, source_kind
from python_jobs.shared.spark.hadoop_files import HadoopFolder
from python_jobs.shared.spark.jvm import analyzed_plan

SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
STATE_PROVIDER = "spark.sql.streaming.stateStore.providerClass"

_EPHEMERAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")
# Stateful operators by their node in the logical plan, as the checkpoint names them.
_OPERATORS = {
    "Aggregate": "stateStoreSave",
    "Deduplicate": "dedupe",
    "DeduplicateWithinWatermark": "dedupeWithinWatermark",
    "Join": "symmetricHashJoin",
    "GlobalLimit": "globalLimit",
}
# Those whose keys a plan tells, too.
_KEYED = ("stateStoreSave", "dedupe", "dedupeWithinWatermark")


def require_durable(checkpoint: str) -> None:
    """Refuse a checkpoint that a restart of the machine or container deletes.

    Raises:
        WrongUse: the checkpoint is in a temporary folder.
    """
    path = urlsplit(checkpoint).path if is_uri(checkpoint) else str(Path(checkpoint).resolve())
    for folder in (*_EPHEMERAL, str(Path(tempfile.gettempdir()).resolve())):
        if path == folder or path.startswith(f"{folder}/"):
            raise WrongUse(
                f"the checkpoint '{checkpoint}' lies in the temporary folder {folder}, and progress must outlive the "
                "machine: choose a folder next to the tables"
            )


# --- the lag ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartitionLag:
    """The lag of one partition of a topic, in offsets."""

    topic: str
    partition: int
    position: int | None
    """Next offset to read; None for a partition that the query hasn't seen yet."""
    end: int
    lag: int
    expired: int
    """Number of offsets from the position on that the topic no longer has."""


def lags(
    topics: Mapping[str, Mapping[int, int]], ranges: Mapping[tuple[str, int], tuple[int, int]]
) -> list[PartitionLag]:
    """Return the lag of each partition, in order.

    Args:
        topics: Next offset by topic and partition (:meth:`.Offsets.topics`).
        ranges: First offset and end of each topic's partition at the broker.
    """
    found = []
    for (topic, partition), (first, end) in sorted(ranges.items()):
        position = topics.get(topic, {}).get(partition)
        begin = first if position is None else position
        found.append(PartitionLag(topic, partition, position, end, end - begin, max(0, first - begin)))
    return found


# --- the checkpoint ---------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class StateOperator:
    """A stateful operator of a query: its kind and the types of its key."""

    kind: str
    key_types: tuple[str, ...] | None = None
    """Types of the key; None if they are unknown."""


@dataclass(frozen=True)
class Checkpoint:
    """A query's progress."""

    offsets: Offsets | None
    """Offsets of the newest batch; None before the first batch."""
    done: Offsets | None
    """Offsets of the newest completed batch; if ``offsets`` belongs to a later batch, that batch is rerun."""
    operators: tuple[StateOperator, ...]


def read_checkpoint(spark: SparkSession, checkpoint: str) -> Checkpoint:
    """Return the progress under ``checkpoint``, on any file system.

    Raises:
        DataRefused: the newest offsets file can't be read.
    """
    folder = HadoopFolder(spark, checkpoint)
    begun, completed = newest_offsets(folder)
    # While the first batch has no commit mark, the query writes its state again.
    has_state = completed is not None and any(name.isdigit() for name in folder.names("state"))
    operators = tuple(_operators(spark, str(folder.root))) if has_state else ()
    return Checkpoint(begun, completed, operators)


def _operators(spark: SparkSession, checkpoint: str) -> Iterator[StateOperator]:
    """Yield the stateful operators, from Spark's own sources of a checkpoint's state."""
    metadata = spark.read.format("state-metadata").load(checkpoint)
    operators = metadata.select("operatorId", "operatorName").distinct().orderBy("operatorId").collect()
    for number, kind in operators:
        keys = None
        if kind in _KEYED:
            state = spark.read.format("statestore").option("operatorId", number).load(checkpoint)
            keys = _field_types(state.schema["key"].dataType)
        yield StateOperator(kind, keys)


def _field_types(key: DataType) -> tuple[str, ...] | None:
    if not isinstance(key, StructType):
        return None
    return tuple(field.dataType.simpleString() for field in key)


# --- before an upgrade ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The parts of a query on which a checkpoint depends."""

    sources: tuple[str, ...]
    """Kind of each source, in the query's order."""
    topics: frozenset[str]
    """Kafka topics to which the query subscribes."""
    operators: tuple[StateOperator, ...]
    settings: Mapping[str, str]
    """The session's values of the settings that a checkpoint keeps."""


@dataclass(frozen=True)
class Change:
    """A difference between a checkpoint and the query that should continue with it."""

    what: str
    held: str
    planned: str
    allowed: bool
    """True: Spark keeps the checkpoint's value, and the new value has no effect."""


def plan_of(query: DataFrame) -> Plan:
    """Return the plan of a streaming DataFrame, before it is started."""
    root: Any = analyzed_plan(query)
    sources, topics, operators = [], set[str](), []
    for node in _nodes(root):
        name = node.getClass().getSimpleName()
        if name in ("StreamingRelation", "StreamingRelationV2"):
            kind = str(node.sourceName()).lower()
            sources.append(_planned_source(kind))
            if kind == "kafka":
                topics.update(str(node.extraOptions().getOrDefault("subscribe", "")).split(","))
        elif operator := _planned_operator(node, name):
            operators.append(operator)
    conf = query.sparkSession.conf
    kept = {name: str(conf.get(name)) for name in (SHUFFLE_PARTITIONS, STATE_PROVIDER)}
    return Plan(tuple(sources), frozenset(topics - {""}), tuple(operators), kept)


def _planned_source(name: str) -> str:
    """Return the kind of a source by the name that Spark gives it: kafka, delta, file or other."""
    if name.startswith("filesource["):
        return "file"
    return name if name in ("kafka", "delta") else "other"


def _planned_operator(node: Any, name: str) -> StateOperator | None:
    if not node.isStreaming() or name not in _OPERATORS:
        return None
    if name == "Join":
        both = all(child.isStreaming() for child in _items(node.children()))
        return StateOperator(_OPERATORS[name]) if both else None
    if name == "GlobalLimit":
        return StateOperator(_OPERATORS[name])
    keys = node.groupingExpressions() if name == "Aggregate" else node.keys()
    return StateOperator(_OPERATORS[name], tuple(key.dataType().catalogString() for key in _items(keys)))


def changes(checkpoint: Checkpoint, plan: Plan) -> list[Change]:
    """Return the relevant differences; projections, filters, rates, triggers and delays may change freely.

    State schemas are compared by the types of the keys; Spark checks the types of the values when the query starts.
    """
    if checkpoint.offsets is None:
        return []
    found = []

    def compare(what: str, held: object, planned: object, allowed: bool = False) -> None:
        if held != planned:
            found.append(Change(what, _text(held), _text(planned), allowed))

    sources = checkpoint.offsets.sources
    if None not in sources:
        compare("sources", [source_kind(source) for source in sources], list(plan.sources))
        compare("Kafka topics", sorted(checkpoint.offsets.topics()), sorted(plan.topics))
    else:
        compare("number of sources", len(sources), len(plan.sources))
    if checkpoint.done is not None:  # state is written by then
        held, planned = list(checkpoint.operators), list(plan.operators)
        compare("stateful operators", _kinds(held), _kinds(planned))
        if _kinds(held) == _kinds(planned):
            compare("keys of the state", _keys(held, held, planned), _keys(planned, held, planned))
        for name, value in plan.settings.items():
            if held and name in checkpoint.offsets.settings:
                compare(name, checkpoint.offsets.settings[name], value, allowed=True)
    return found


def refuse_changes(checkpoint: str, found: Sequence[Change]) -> None:
    """Refuse a query that can't continue with a checkpoint.

    Raises:
        WrongUse: a change isn't allowed.
    """
    refused = [
        f"{change.what} were {change.held} and are {change.planned}" for change in found if not change.allowed
    ]
    if refused:
        raise WrongUse(
            f"the checkpoint '{checkpoint}' can't go on with this query: {'; '.join(refused)}: give it a new checkpoint"
        )


def _kinds(operators: Sequence[StateOperator]) -> list[str]:
    return sorted(operator.kind for operator in operators)


def _keys(of: Sequence[StateOperator], *sides: Sequence[StateOperator]) -> list[str]:
    """Return the key types of one side, for the operator kinds whose types both sides know."""
    untold = {operator.kind for side in sides for operator in side if operator.key_types is None}
    return sorted(
        f"({', '.join(o.key_types)})" for o in of if o.kind not in untold and o.key_types is not None
    )


def _text(value: object) -> str:
    if isinstance(value, list):
        return (
            ", ".join(f"{n} x {name}" if n > 1 else str(name) for name, n in Counter(value).items()) or "none"
        )
    return str(value)


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in _items(node.children()):
        yield from _nodes(child)


def _items(sequence: Any) -> list[Any]:
    return [sequence.apply(position) for position in range(sequence.length())]
