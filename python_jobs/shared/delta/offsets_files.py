"""Offsets files of a checkpoint: where a batch of a query ends in each source.

Spark writes ``<checkpoint>/offsets/<batch>`` before the batch: a version line, a line of watermark, time and settings,
then one line for each source. This module only reads.

Source: the layout as Spark 4.2 writes it.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from python_jobs.shared.core.failures import DataRefused
from python_jobs.shared.core.intervals import from_micros
from python_jobs.shared.spark.hadoop_files import HadoopFolder

_VERSION = "v1"


@dataclass(frozen=True)
class Offsets:
    """One offsets file: where a batch ends in each source."""

    batch_id: int
    watermark: dt.datetime | None
    """UTC; None before the first event time, or without a watermark."""
    written_at: dt.datetime
    """UTC."""
    settings: Mapping[str, str]
    """Settings that Spark keeps for the query's whole life, independent of the session's values."""
    sources: tuple[Any, ...]
    """The JSON of each source in the query's order; None for a source without data so far."""

    def topics(self) -> dict[str, dict[int, int]]:
        """Return the next offset by topic and partition, of all Kafka sources."""
        return {
            topic: {int(partition): int(offset) for partition, offset in partitions.items()}
            for source in self.sources
            if source_kind(source) == "kafka"
            for topic, partitions in source.items()
        }


def parse_offsets(batch_id: int, text: str) -> Offsets:
    """Return the content of an offsets file's text.

    Raises:
        DataRefused: the text is cut off, or has another layout.
    """
    version, _, rest = text.partition("\n")
    if version != _VERSION:
        raise DataRefused(f"offsets file {batch_id} is of version '{version[:20]}'; {_VERSION} can be read")
    try:
        metadata, *sources = rest.splitlines()
        found = json.loads(metadata)
        watermark = int(found["batchWatermarkMs"])
        return Offsets(
            batch_id,
            _moment(watermark) if watermark > 0 else None,
            _moment(int(found["batchTimestampMs"])),
            found["conf"],
            tuple(None if line == "-" else json.loads(line) for line in sources),
        )
    except (ValueError, KeyError, TypeError):
        raise DataRefused(
            f"offsets file {batch_id} can't be read: it is cut off or no offsets file"
        ) from None


def newest_offsets(folder: HadoopFolder) -> tuple[Offsets | None, Offsets | None]:
    """Return the offsets of a checkpoint's newest batch, and of its newest completed one; None if there is none.

    Raises:
        DataRefused: the newest offsets file can't be read.
    """

    def newest(name: str) -> Offsets | None:
        batches = [int(found) for found in folder.names(name) if found.isdigit()]
        if not batches:
            return None
        return parse_offsets(max(batches), folder.read(f"offsets/{max(batches)}").decode())

    return newest("offsets"), newest("commits")


def source_kind(source: Any) -> str:
    """Return which kind of source wrote a line of an offsets file: kafka, delta, file or other."""
    if isinstance(source, dict) and "reservoirId" in source:
        return "delta"
    if isinstance(source, dict) and "logOffset" in source:
        return "file"
    if isinstance(source, dict) and source and all(isinstance(value, dict) for value in source.values()):
        return "kafka"
    return "other"


def _moment(milliseconds: int) -> dt.datetime:
    return from_micros(milliseconds * 1_000)
