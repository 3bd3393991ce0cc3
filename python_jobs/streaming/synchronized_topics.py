"""Configuration of the Zero-ETL Synchronizer: one entry for each topic, and the segments that an entry closes.

    topics:
      - topic: visits
        table: bronze.raw_visits
        location: bronze/raw_visits
        schema: schemas/visits.yml
        segment_records: 100000
        segment_age: 10 minutes
        compaction: {min_small_files: 20, target_file_mb: 128}

An entry says where a topic's records go, never what becomes of them: a key that isn't listed here is refused.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.intervals import parse_duration
from python_jobs.shared.core.paths import is_path
from python_jobs.shared.core.yaml_files import read_yaml
from python_jobs.shared.delta.compaction import CompactionPolicy

_TEXTS = ("topic", "table", "location", "schema", "segment_age")
_COUNTS = ("segment_records", "records_per_run")


@dataclass(frozen=True, kw_only=True)
class SynchronizedTopic:
    """One entry of the configuration."""

    topic: str
    """Topic to copy; it must exist."""
    table: str
    """Name of the table in Spark's catalog."""
    location: str
    """Path or URI of the Delta table; a relative path is below the job's ``--root``."""
    schema: str | None = None
    """File of fields of the JSON value that are columns beside it (.ddl, .yml or .json); default: none."""
    segment_records: int = 100_000
    """Number of offsets in a segment of a partition: a segment is closed when all of its offsets are there."""
    segment_age: str | None = "10 minutes"
    """Age at which records are in a closed segment whatever their number; None: only full segments are closed."""
    records_per_run: int | None = None
    """Maximum number of offsets of a partition in one run, whole segments; default: all that are closed."""
    compaction: CompactionPolicy | None = None
    """When the table's small files are merged after a copy; default: never, the Compactor's own job does it."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            count = getattr(self, name)
            if count is not None and count < 1:
                raise WrongUse(f"{name} must be 1 or more, got {count}")
        if self.records_per_run is not None and self.records_per_run < self.segment_records:
            raise WrongUse(
                f"records_per_run is {self.records_per_run} and segment_records {self.segment_records}; a run copies "
                "whole segments, so the first must not be below the second"
            )
        if is_path(self.table):
            raise WrongUse(f"table must be a name in the catalog, got the path '{self.table}'")
        if self.segment_age is not None:
            parse_duration(self.segment_age)

    @property
    def age(self) -> dt.timedelta | None:
        """Age at which records are in a closed segment; None: no age closes a segment."""
        return None if self.segment_age is None else parse_duration(self.segment_age)

    def end_of_run(self, start: int, end: int, old_until: int) -> int:
        """Return the offset before which a run copies a partition: at most the end of its last closed segment.

        A segment is ``segment_records`` offsets that begin at a multiple of this number, so every run finds the same
        segments.

        Args:
            start: first offset that isn't copied yet.
            end: offset after the partition's last record.
            old_until: offset before which all records have reached ``segment_age``; 0 if no age closes a segment.
        """
        closed = max(start, self._last_boundary(end), min(old_until, end))
        if self.records_per_run is None or closed - start <= self.records_per_run:
            return closed
        return self._last_boundary(start + self.records_per_run)

    def _last_boundary(self, offset: int) -> int:
        return offset - offset % self.segment_records


def load_topics(path: str) -> list[SynchronizedTopic]:
    """Read the configuration.

    Raises:
        WrongUse: the file is missing, or an entry is wrong; the message names the entry.
    """
    document = read_yaml(path, "configuration")
    if not isinstance(document, Mapping) or not isinstance(document.get("topics"), list):
        raise WrongUse(f"the configuration '{path}' must hold a list 'topics'")
    _refuse_unknown(document, ["topics"], f"the configuration '{path}'")
    topics = [_entry(entry, path) for entry in document["topics"]]
    if not topics:
        raise WrongUse(f"the configuration '{path}' names no topic")
    for name, values in {
        "topic": [entry.topic for entry in topics],
        "table": [entry.table.lower() for entry in topics],
        "location": [entry.location.rstrip("/") for entry in topics],
    }.items():
        twice = [value for value, count in Counter(values).items() if count > 1]
        if twice:
            raise WrongUse(f"two entries of the configuration '{path}' have the {name} {twice[0]}")
    return topics


def _entry(entry: Any, path: str) -> SynchronizedTopic:
    if not isinstance(entry, Mapping):
        raise WrongUse(f"each entry of the configuration '{path}' must be a map with a topic, got {entry!r}")
    where = f"the entry of topic {entry.get('topic')} in '{path}'"
    _refuse_unknown(entry, [field.name for field in fields(SynchronizedTopic)], where)
    for name in ("topic", "table", "location"):
        if not entry.get(name):
            raise WrongUse(f"{where} has no {name}")
    for name in _TEXTS:
        if not isinstance(entry.get(name), str | None):
            raise WrongUse(f"{where}: {name} must be a text, got {entry[name]!r}")
    for name in _COUNTS:
        count = entry.get(name, 1)
        if not _is_number(count, int) and (count is not None or name == "segment_records"):
            raise WrongUse(f"{where}: {name} must be a whole number, got {count!r}")
    try:
        return SynchronizedTopic(**{**entry, "compaction": _compaction(entry.get("compaction"))})
    except WrongUse as failure:
        raise WrongUse(f"{where}: {failure}") from None


def _compaction(given: Any) -> CompactionPolicy | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise WrongUse(f"compaction must be a map, got {given!r}")
    _refuse_unknown(given, [field.name for field in fields(CompactionPolicy)], "compaction")
    for name, value in given.items():
        if not _is_number(value, int | float):
            raise WrongUse(f"compaction: {name} must be a number, got {value!r}")
    return CompactionPolicy(**given)


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _refuse_unknown(given: Mapping[Any, Any], allowed: Iterable[str], where: str) -> None:
    """Refuse keys that nobody reads, above all those that ask for a transformation."""
    unknown = sorted(str(key) for key in given if key not in list(allowed))
    if unknown:
        raise WrongUse(
            f"{where} has the unknown key {unknown[0]}; allowed are {', '.join(sorted(allowed))}; this job copies "
            "records unchanged: to filter or change them, write another table from the raw one, or use the "
            "Transformation Replicator"
        )
