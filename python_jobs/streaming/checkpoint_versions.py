"""Versions of a Structured Streaming checkpoint: which files a query needs to continue behind a batch.

    metadata                                  id of the query
    offsets/<batch>, commits/<batch>          before and after each batch
    sources/<source>/<number>[.compact]       files that a file source has listed, by its own numbers
    state/<operator>/_metadata/metadata       stores of the operator; or _metadata/v2/<batch>
    state/<operator>/_stateSchema/<store>/<batch>_<id>
    state/<operator>/<partition>[/<store>]/<version>[_<id>].<kind>
    state/<operator>/<partition>[/<store>]/SSTs/<name>.sst

A batch writes the version of the state with the next number: batch 4 writes version 5. A version is a whole one
(``zip`` of RocksDB, ``snapshot``) or the changes since the version before (``changelog`` of RocksDB, ``delta``), so a
query needs the newest whole one and all changes since. A ``zip`` names the SST files that belong to it. With Spark's
checkpoint format 2 a version's name also has an id; the batch's commit says which ids are committed.

Spark keeps the files of the last 100 batches (``spark.sql.streaming.minBatchesToRetain``), and the state that these
batches need.

Sources: Data Engineering Design Patterns, chapter 11, Streaming Reprocessor; the layout as Spark 4.2 writes it.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pyspark.sql import SparkSession

from python_jobs.shared.core.failures import JobFailed, NotReady, WrongUse
from python_jobs.shared.delta.checkpoints import BEING_RESTORED, OWNER, RESTORED
from python_jobs.shared.delta.offsets_files import Offsets, parse_offsets, source_kind
from python_jobs.shared.spark.hadoop_files import Entry, HadoopFolder

QUERY = "metadata"
"""File with the id of the query."""
RELEASES = "releases"
"""Folder of the recorded releases: <name>/<batch>."""
# Files that say whose checkpoint it is: a restored one has its own.
_IDENTITY = {QUERY, OWNER, RESTORED, BEING_RESTORED}

_VERSION = re.compile(r"(?P<version>\d+)(_(?P<id>[^.]+))?\.(?P<kind>zip|snapshot|changelog|delta)")
_LISTED = re.compile(r"(?P<number>\d+)(\.compact)?")
_WHOLE = {"zip", "snapshot"}
_WAY_OUT = (
    "restore a copy of the checkpoint that is old enough, or compute from the lakehouse (Batch Reprocessor)"
)


@dataclass(frozen=True)
class _Version:
    """A file of a state store."""

    path: str
    number: int
    unique_id: str | None
    is_whole: bool


class CheckpointVersions:
    """A checkpoint's batches, with the files that belong to each.

    Raises:
        NotReady: there is no checkpoint.
    """

    def __init__(self, spark: SparkSession, checkpoint: str) -> None:
        self.folder = HadoopFolder(spark, checkpoint)
        self.checkpoint = checkpoint
        # Hidden files are checksums, which Hadoop copies and deletes with their files, and what a crash has left.
        self.files: dict[str, Entry] = dict(self.folder.files("", lambda name: name.startswith(".")))
        if QUERY not in self.files:
            raise NotReady(f"there is no checkpoint of a query in '{checkpoint}'")
        self.begun, self.completed = (
            _numbers(path.removeprefix(f"{log}/") for path in self.files if path.startswith(f"{log}/"))
            for log in ("offsets", "commits")
        )
        self._stores: dict[str, list[_Version]] = defaultdict(list)
        for path in self.files:
            folder, _, name = path.rpartition("/")
            if path.startswith("state/") and (found := _VERSION.fullmatch(name)):
                version = _Version(path, int(found["version"]), found["id"], found["kind"] in _WHOLE)
                self._stores[folder].append(version)
        self.offsets = cache(self._offsets)
        self._committed_ids = cache(self._read_committed_ids)
        self._store_partitions = cache(self._read_store_partitions)

    def has_changed(self) -> bool:
        """Return whether the query has begun or completed a batch since this list was made."""
        now = [_numbers(self.folder.names(log)) for log in ("offsets", "commits")]
        return now != [self.begun, self.completed]

    def _offsets(self, batch: int) -> Offsets:
        return parse_offsets(batch, self.folder.read(f"offsets/{batch}").decode())

    def _read_committed_ids(self, batch: int) -> dict[str, list[list[str]]]:
        """Return the ids of the state that a batch has committed, by operator and partition."""
        text = self.folder.read_text(f"commits/{batch}") if f"commits/{batch}" in self.files else None
        found = json.loads(text.splitlines()[1]) if text else {}
        return found.get("stateUniqueIds") or {}

    def releases(self) -> dict[str, int]:
        """Return the last batch of each recorded release."""
        parts = [path.split("/") for path in self.files if path.startswith(f"{RELEASES}/")]
        return {name: int(batch) for _, name, batch in parts}

    def lacks(self, batch: int) -> str | None:
        """Return why a query can't continue behind the batch; None if it can. Files inside of zips aren't checked."""
        try:
            self._needed(batch, reads_zips=False)
        except JobFailed as failure:
            return str(failure)
        return None

    def needed(self, batch: int) -> list[str]:
        """Return the files that a query needs to continue behind the batch.

        Raises:
            WrongUse: the batch isn't a completed one.
            JobFailed: Spark has deleted some of its files.
        """
        return self._needed(batch, reads_zips=True)

    def _needed(self, batch: int, *, reads_zips: bool) -> list[str]:
        self._require_completed(batch)
        files = [
            path
            for path in self.files
            if path not in _IDENTITY and not _is_state(path) and not self._is_newer(path, batch)
        ]
        self._require_listed_files(batch, files)
        for store in self._stores_of(batch):
            chain = self._chain(store, batch)
            files += [version.path for version in chain]
            if reads_zips:
                for path in [version.path for version in chain if version.path.endswith(".zip")]:
                    files += self._immutable_files(store, path)
        return sorted(files)

    def newer(self, batch: int) -> list[str]:
        """Return the files of later batches, in the order in which they can be deleted: newest batches first."""
        self._require_completed(batch)
        files = [path for path in self.files if self._is_newer(path, batch)]
        logs = [path for path in files if path.startswith(("commits/", "offsets/"))]
        # Without its commit a batch is repeated, so at each moment the checkpoint is that of a query that crashed.
        logs.sort(key=lambda path: (-int(path.rpartition("/")[2]), path))
        return logs + sorted(set(files) - set(logs))

    def _require_completed(self, batch: int) -> None:
        if not self.completed:
            raise NotReady(f"the query of '{self.checkpoint}' hasn't completed a batch yet")
        first, last = self.completed[0], self.completed[-1]
        if batch > last:
            raise WrongUse(
                f"batch {batch} is newer than the last completed batch of '{self.checkpoint}', {last}"
            )
        # Spark reads the offsets of the batch before as well.
        missing = [number for number in (batch, batch - 1) if number >= 0 and number not in self.begun]
        if missing or batch not in self.completed:
            raise WrongUse(
                f"batch {batch} isn't in '{self.checkpoint}' any more, which has the batches {first} to {last}: "
                f"{_WAY_OUT}"
            )

    def _is_newer(self, path: str, batch: int) -> bool:
        """Return whether a file belongs to a later batch."""
        match path.split("/"):
            case ["offsets" | "commits" | "releases", *_, number] if number.isdecimal():
                return int(number) > batch
            case ["state", _, "_metadata", "v2", number] if number.isdecimal():
                return int(number) > batch
            case ["state", _, "_stateSchema", _, name] if (number := name.partition("_")[0]).isdecimal():
                return int(number) > batch
            case ["state", _, _, *_, name] if found := _VERSION.fullmatch(name):
                return int(found["version"]) > batch + 1
            case ["sources", source, name] if found := _LISTED.fullmatch(name):
                return self._is_file_source(int(source)) and int(found["number"]) > self._listed(
                    int(source), batch
                )
        return False

    def _is_file_source(self, source: int) -> bool:
        # A source without data has no position; in a later batch it may have one.
        positions = (self.offsets(batch).sources[source] for batch in reversed(self.begun))
        return source_kind(next(filter(None, positions), None)) == "file"

    def _listed(self, source: int, batch: int) -> int:
        """Return the number of the last list of files that the batch has read: it isn't the batch's number."""
        position = self.offsets(batch).sources[source]
        return -1 if position is None else int(position["logOffset"])

    def _require_listed_files(self, batch: int, files: Sequence[str]) -> None:
        lists: dict[int, dict[int, bool]] = defaultdict(dict)
        for path in files:
            parts = path.split("/")
            if parts[0] == "sources" and (found := _LISTED.fullmatch(parts[-1])):
                lists[int(parts[1])][int(found["number"])] = path.endswith(".compact")
        for source, numbers in lists.items():
            if self._is_file_source(source):
                last = self._listed(source, batch)
                start = max((number for number, is_compact in numbers.items() if is_compact), default=0)
                if missing := [number for number in range(start, last + 1) if number not in numbers]:
                    raise JobFailed(
                        f"batch {batch} of '{self.checkpoint}' can't be restored, because sources/{source} has no "
                        f"{missing[0]} any more: {_WAY_OUT}"
                    )

    def _stores_of(self, batch: int) -> list[str]:
        """Return the folder of each operator's stores in each partition, as Spark's metadata names them."""
        operators = self._operators(batch)
        named = [
            f"state/{operator}/{partition}" + ("" if store == "default" else f"/{store}")
            for operator, metadata in operators.items()
            for store, partitions in metadata
            for partition in range(partitions)
        ]
        # Spark before 3.5 wrote no metadata.
        return named + [store for store in self._stores if store.split("/")[1] not in operators]

    def _operators(self, batch: int) -> dict[str, list[tuple[str, int]]]:
        found: dict[str, tuple[int, str]] = {}
        for path in self.files:
            match path.split("/"):
                case ["state", operator, "_metadata", "metadata"]:
                    found[operator] = (-1, path)
                case ["state", operator, "_metadata", "v2", number] if number.isdecimal():
                    if int(number) <= batch:
                        found[operator] = max(found.get(operator, (-1, "")), (int(number), path))
        return {operator: self._store_partitions(path) for operator, (_, path) in found.items()}

    def _read_store_partitions(self, path: str) -> list[tuple[str, int]]:
        _, _, text = self.folder.read(path).decode().partition("\n")
        return [(store["storeName"], store["numPartitions"]) for store in json.loads(text)["stateStoreInfo"]]

    def _chain(self, store: str, batch: int) -> list[_Version]:
        """Return the newest whole version of a store and the changes since, up to the version that the batch wrote."""
        last = batch + 1
        versions = [version for version in self._stores.get(store, []) if self._is_committed(store, version)]
        start = max(
            (version.number for version in versions if version.is_whole and version.number <= last), default=0
        )
        chain = [version for version in versions if start <= version.number <= last]
        changes = {version.number for version in chain if not version.is_whole}
        if missing := set(range(start + 1, last + 1)) - changes:
            raise JobFailed(
                f"batch {batch} of '{self.checkpoint}' can't be restored, because {store} has no version "
                f"{min(missing)}: {_WAY_OUT}"
            )
        return chain

    def _is_committed(self, store: str, version: _Version) -> bool:
        operator, partition = store.split("/")[1:3]
        ids = self._committed_ids(version.number - 1).get(operator)
        # Spark has deleted the commits of old batches, whose versions the state may still need.
        return version.unique_id is None or ids is None or version.unique_id in ids[int(partition)]

    def _immutable_files(self, store: str, path: str) -> Iterator[str]:
        with zipfile.ZipFile(io.BytesIO(self.folder.read(path))) as archive:
            _, _, text = archive.read("metadata").decode().partition("\n")
        metadata: dict[str, Any] = json.loads(text)
        named = [("SSTs", file["dfsSstFileName"]) for file in metadata.get("sstFiles") or []]
        named += [("logs", file["dfsLogFileName"]) for file in metadata.get("logFiles") or []]
        for folder, name in named:
            if f"{store}/{folder}/{name}" not in self.files:
                raise JobFailed(
                    f"'{self.checkpoint}' can't be restored to this batch, because {path} names {folder}/{name}, which "
                    f"is gone: {_WAY_OUT}"
                )
            yield f"{store}/{folder}/{name}"


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(name) for name in names if name.isdecimal())


def _is_state(path: str) -> bool:
    """Return whether a file holds state, so that only the needed versions of it are copied."""
    folder, _, name = path.rpartition("/")
    is_immutable = folder.endswith(("/SSTs", "/logs"))
    return path.startswith("state/") and (is_immutable or _VERSION.fullmatch(name) is not None)
