"""Stateful Merger: merges a run's increment into the table as it was before that run, also when the run is an old one.

Problem: replaying increments with Merger starts from today's table. The replay of 08:00 leaves the rows of 10:00 in it,
so that consumers see a table that never was.

A table of versions keeps, for each execution time, the Delta version that its merge made. A run has three steps, each
of which may be retried alone (``--step``):

- ``restore``: brings the table to what it was before this run, if it isn't. The run is the first one: emptied. The
  table has moved on since the previous run: restored to this run's version minus one, or, for a run that recorded
  none, to the version of the previous run. Otherwise nothing; compaction in between doesn't count.
- ``merge``: applies the increment by the rules of Merger, in one commit.
- ``record``: notes the version of that commit.

A backfill is an ordinary run for an old execution time; the report says under ``to_replay`` which later runs must
follow, in order. Until they have, a run after them is refused: it would be merged into a table that lacks them.

Guarantee: a run killed anywhere and run again leaves what an uninterrupted one would have left, and a replay in order
leaves at each execution time the table that the first pass left, given the same increments. Commits carry a note
(``userMetadata``) of the run they belong to, so that no other merge and no compaction is taken for one.
A restore undoes the commits of other programs too; the report lists them under ``undone``.

Cost: a restore writes no data, but lists the files of two versions; it needs those of the old one, so that
``--retention_days`` says how far back a replay can reach. Beyond that it is refused, before any change.

    spark-submit python_jobs/idempotency/stateful_merger.py --target lakehouse/silver/devices \\
        --versions lakehouse/silver/devices_versions --key '["type", "version"]' --execution_time 2024-10-07 \\
        --query "select type, version, full_name from bronze_devices where load_date = {execution_time}"

Source: Data Engineering Design Patterns, chapter 4, Stateful Merger; its listing restores the previous run's version
although it computes this run's minus one, and its numbers leave out that RESTORE is a version, too.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

from python_jobs.idempotency.registries import read_registry, register
from python_jobs.shared.core.failures import DataRefused, JobFailed, NotReady, WrongUse, require_at_least
from python_jobs.shared.core.intervals import from_micros, parse_time
from python_jobs.shared.delta.commits import commit_note, commits, commits_after, noted, write_once
from python_jobs.shared.delta.merge import MergeRules, merge
from python_jobs.shared.delta.tables import (
    delta_table,
    retention_properties,
    table_exists,
    table_id,
    table_size,
)
from python_jobs.shared.files.readiness_names import UPKEEP
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import properties_list, string_literal, table_name

NOTE = "stateful_merger"
FORMAT_VERSION = 1
_VERSIONS = (
    "execution_time timestamp, delta_table_version long, is_adopted boolean, "
    "table_id string, format_version int"
)
# What Delta says of a version that vacuum or the log's clean-up has taken, or that is older than the retention.
_GONE = re.compile(
    r"Not all files from version|Missed files|DELTA_VERSION_NOT_FOUND|Cannot time travel|FILE_NOT_(FOUND|EXIST)"
)


@dataclass(frozen=True)
class Parameters:
    """Merge a run's increment into the table as it was before that run."""

    target: str
    """Delta table, by path or catalog name; made by the first run."""
    versions: str
    """Delta table of its versions, by path or catalog name; one for each target."""
    query: str
    """SQL that returns the increment; {execution_time} stands for that time, quoted."""
    execution_time: str
    """Logical time of the run (2024-10-07 or 2024-10-07T08), never the clock's."""
    key: list[str]
    """Columns that identify a row and never change."""
    previous_execution_time: str | None = None
    """Logical time of the run before; without its version this run waits. Default: the newest recorded one."""
    is_deleted: str | None = None
    """Boolean column that marks a deletion; NULL means no."""
    deletes: Literal["none", "soft", "hard"] = "none"
    """What a deletion does; soft keeps the row, flagged."""
    sequence: list[str] = field(default_factory=list)
    """Columns that order the changes of a key within the increment and against the table."""
    step: Literal["all", "restore", "merge", "record", "adopt"] = "all"
    """adopt: take an existing table, as it is, for the outcome of execution_time."""
    retention_days: int = 30
    """How long a table made by this job keeps log and removed files, so how far back a replay can reach."""

    def __post_init__(self) -> None:
        if not self.key:
            raise WrongUse("key is empty; name the columns that identify a row")
        require_at_least(1, retention_days=self.retention_days)
        at = self.at
        if self.previous is not None and self.previous >= at:
            raise WrongUse(
                f"previous_execution_time {self.previous_execution_time} is not before {self.execution_time}"
            )

    @cached_property
    def at(self) -> dt.datetime:
        """The run's logical time."""
        return parse_time(self.execution_time)

    @cached_property
    def previous(self) -> dt.datetime | None:
        """The logical time of the run before, if it was given."""
        return None if self.previous_execution_time is None else parse_time(self.previous_execution_time)

    @property
    def rules(self) -> MergeRules:
        """How the increment is applied."""
        return MergeRules(self.key, self.is_deleted, self.deletes, self.sequence)

    def note(self, step: str) -> dict[str, Any]:
        """Return what a commit of this run says of itself."""
        return {NOTE: {"step": step, "execution_time": self.at.isoformat()}}


# --- what the run has to start from: without Spark ------------------------------------------------------


@dataclass(frozen=True)
class Commit:
    """A commit of the target."""

    version: int
    operation: str
    step: str | None = None
    """base, merge or adopt if this job made it."""
    at: dt.datetime | None = None
    """Execution time of the run that made it."""


@dataclass(frozen=True)
class Base:
    """How the table becomes what it was before the run."""

    action: Literal["keep", "restore", "empty"]
    version: int = 0
    """Version to restore."""


def plan(
    recorded: Mapping[dt.datetime, int],
    commits: Sequence[Commit],
    at: dt.datetime,
    previous: dt.datetime | None = None,
) -> Base:
    """Return how the table becomes what it was before the run of ``at``.

    Args:
        recorded: version by execution time.
        commits: the table's, newest first, down to the newest that this job made; the log may have lost that one.
        at: the run's execution time.
        previous: that of the run before, if the caller knows it.

    Raises:
        NotReady: the previous run, or an earlier one whose predecessor was replayed, has to run first.
        WrongUse: ``previous`` is not the run before.
    """
    earlier = {time: version for time, version in recorded.items() if time < at}
    _require_order(earlier)
    if earlier and previous is not None and previous != max(earlier):
        if previous not in earlier:
            raise NotReady(f"the run of {previous:%FT%T} has recorded no version; run it first")
        raise WrongUse(
            f"previous_execution_time is {previous:%FT%T}, but {max(earlier):%FT%T} ran in between"
        )
    own = newest_own(commits)
    if own is not None and (own.step, own.at) == ("base", at):
        return Base("keep")  # a try before this one has come so far
    if not earlier:
        return Base("empty")
    before = earlier[max(earlier)]
    newest = max([*recorded.values(), -1 if own is None else own.version])
    if newest <= before:
        return Base("keep")
    replaced = recorded.get(at)
    # Minus one keeps a compaction between the two runs. A version from before the previous run's replay is none of
    # this table's past any more.
    return Base("restore", replaced - 1 if replaced is not None and replaced > before else before)


def newest_own(commits: Sequence[Commit]) -> Commit | None:
    """Return the newest commit that this job made."""
    return next((commit for commit in commits if commit.step is not None), None)


def _require_order(recorded: Mapping[dt.datetime, int]) -> None:
    """Require that each run was merged after those before it."""
    newest = -1
    for time, version in sorted(recorded.items()):
        if version < newest:
            raise NotReady(
                f"a run before {time:%FT%T} was replayed after it (version {newest} is newer than {version}); "
                f"replay {time:%FT%T} first"
            )
        newest = version


# --- tables ---------------------------------------------------------------------------------------------


def read_versions(spark: SparkSession, params: Parameters) -> dict[dt.datetime, int]:
    """Return the recorded version of each execution time; none of an absent table.

    Raises:
        WrongUse: the table holds something else, or the versions of another target; or the target was adopted as the
            outcome of this execution time or a later one.
    """
    table = read_registry(spark, params.versions, _VERSIONS, "table of versions")
    if table is None:
        return {}
    rows = table.withColumn("execution_time", F.unix_micros("execution_time")).collect()
    target_id = table_id(spark, params.target) if table_exists(spark, params.target) else None
    if any(row.table_id != target_id for row in rows):
        raise WrongUse(
            f"{params.versions} holds the versions of another table than {params.target} is now; was it replaced? "
            "Name another table of versions"
        )
    for row in rows:
        if row.is_adopted and params.at <= (adopted := from_micros(row.execution_time)):
            raise WrongUse(
                f"{params.target} was adopted as of {adopted:%FT%T}; runs up to then are in it and can't be replayed"
            )
    return {from_micros(row.execution_time): row.delta_table_version for row in rows}


def history(spark: SparkSession, table: str) -> list[Commit]:
    """Return the newest commits of an existing table, newest first, down to the newest that this job made."""
    found = []
    for row in commits(spark, table):
        found.append(_commit(row))
        if found[-1].step is not None:
            break
    return found


def _commit(row: Row) -> Commit:
    note = commit_note(row.userMetadata).get(NOTE)
    if not note:
        return Commit(row.version, row.operation)
    return Commit(row.version, row.operation, note["step"], parse_time(note["execution_time"]))


# --- the run --------------------------------------------------------------------------------------------


class Run:
    """One run; each step can be the first of its process."""

    def __init__(self, spark: SparkSession, params: Parameters) -> None:
        """Read the table of versions; raises like :func:`read_versions`."""
        self._spark, self._params = spark, params
        self._recorded = read_versions(spark, params)
        self._increment = spark.sql(
            params.query.replace("{execution_time}", string_literal(params.execution_time))
        )
        self._planned_at: int | None = None
        """The target's version when this process found it, or began to make it, what it was before the run."""
        self._merged: Commit | None = None
        """The run's merge, if this process has made it."""

    def restore(self) -> dict[str, Any]:
        """Make the table what it was before this run, in one commit or none.

        Raises:
            JobFailed: the version to restore was vacuumed; nothing was changed.
            DataRefused: the increment doesn't have the columns that the table had then; nothing was changed.
        """
        spark, params = self._spark, self._params
        if not table_exists(spark, params.target):
            properties = retention_properties(params.retention_days)
            rows = self._increment.limit(0)
            write_once(spark, rows, params.target, properties=properties, note=params.note("base"))
            self._planned_at = -1
            return {"base": "created"}
        newest = history(spark, params.target)
        base = self._base(newest)
        table = table_name(params.target)
        place = f"version as of {base.version}" if base.action == "restore" else ""
        restored: dict[str, Any] = {"base": base.action}
        try:
            self._require_columns(f"{table} {place}")
            if base.action != "keep":
                self._commit("base", f"restore table {table} to {place}" if place else f"delete from {table}")
                restored["undone"] = _foreign(commits_after(spark, params.target, base.version))
        except (PySparkException, Py4JJavaError) as failure:
            if not _GONE.search(str(failure)):
                raise
            raise JobFailed(
                f"version {base.version} of {params.target}, from before {params.execution_time}, can't be restored: "
                "it is older than the table's retention, or its files were vacuumed; nothing was changed. Replay from "
                "a later run, or rebuild from the first"
            ) from None
        self._planned_at = newest[0].version
        return restored | ({"restored_version": base.version} if base.action == "restore" else {})

    def merge(self) -> dict[str, Any]:
        """Apply the increment, in one commit, an empty one if it changes nothing.

        A try before this one that has come so far is not repeated.

        Raises:
            NotReady: the table is not what it was before this run.
            JobFailed: another run was merged meanwhile.
        """
        spark, params = self._spark, self._params
        if self._planned_at is None:
            newest = history(spark, params.target)
            own = newest_own(newest)
            if (
                own
                and (own.step, own.at) == ("merge", params.at)
                and own.version != self._recorded.get(params.at)
            ):
                return {"merged": False}
            if self._base(newest).action != "keep":
                raise NotReady(
                    f"{params.target} has moved on since the run before {params.execution_time}; run step restore"
                )
            self._require_columns(table_name(params.target))
            self._planned_at = newest[0].version
        with noted(spark, params.target, params.note("merge")):
            merge(spark, self._increment, params.target, params.rules)
        runs = self._runs_since(self._planned_at)
        if not any((run.step, run.at) == ("merge", params.at) for run in runs):
            self._leave_version()  # there was nothing to change
            runs = self._runs_since(self._planned_at)
        if len(runs) > 1:
            versions = " and ".join(str(run.version) for run in reversed(runs))
            raise JobFailed(
                f"two runs were merged into {params.target} at once (versions {versions}); run again"
            )
        (self._merged,) = runs
        return {"merged": True}

    def record(self, *, is_adopted: bool = False) -> dict[str, Any]:
        """Note the version that this run's merge made.

        Raises:
            NotReady: the table's newest run is another one.
        """
        spark, params = self._spark, self._params
        own = self._merged or newest_own(history(spark, params.target))
        if own is None or (own.step, own.at) != ("merge", params.at):
            raise NotReady(
                f"the newest merge of {params.target} is not that of {params.execution_time}; run step merge"
            )
        values = (params.at, own.version, is_adopted, table_id(spark, params.target), FORMAT_VERSION)
        row = spark.createDataFrame([values], _VERSIONS)
        register(spark, row, params.versions, ["execution_time"])
        later = [
            time for time, version in self._recorded.items() if time > params.at and version < own.version
        ]
        return {"table_version": own.version, "to_replay": [f"{time:%FT%T}" for time in sorted(later)]}

    def adopt(self) -> dict[str, Any]:
        """Take the table, as it is, for the outcome of the execution time; for one that other programs have filled.

        Raises:
            NotReady: there is no such table.
            WrongUse: it has recorded runs.
        """
        spark, params = self._spark, self._params
        delta_table(spark, params.target)
        if self._recorded:
            raise WrongUse(f"{params.target} has recorded runs in {params.versions} and can't be adopted")
        self._leave_version()
        return self.record(is_adopted=True)

    def _base(self, newest: Sequence[Commit]) -> Base:
        params = self._params
        base = plan(self._recorded, newest, params.at, params.previous)
        if base.action == "empty" and table_size(self._spark, params.target)[0] == 0:
            return Base("keep")
        if base.action == "empty" and newest_own(newest) is None and not self._recorded:
            raise WrongUse(
                f"{params.target} holds rows, and {params.versions} knows no run that wrote them; keep them as the "
                "outcome of an earlier time with step adopt, or name another target"
            )
        return base

    def _runs_since(self, version: int) -> list[Commit]:
        """Return what runs have committed since then, newest first, without this run's own way to its base."""
        return [
            commit
            for commit in map(_commit, commits_after(self._spark, self._params.target, version))
            if commit.step is not None and (commit.step, commit.at) != ("base", self._params.at)
        ]

    def _commit(self, step: str, statement: str) -> None:
        with noted(self._spark, self._params.target, self._params.note(step)):
            self._spark.sql(statement).collect()

    def _leave_version(self) -> None:
        """Commit the run without a change: the minus one of a replay needs a version of its own for each run.

        Delta skips a write of no rows.
        """
        mark = {"lakehouse_patterns.stateful_merger.run_without_change": self._params.at.isoformat()}
        properties = properties_list(mark)
        self._commit("merge", f"alter table {table_name(self._params.target)} set tblproperties {properties}")

    def _require_columns(self, table: str) -> None:
        there, coming = set(self._spark.sql(f"select * from {table}").columns), set(self._increment.columns)
        faults = [
            f"{what} {', '.join(sorted(names))}"
            for what, names in (("lacks", there - coming), ("has in addition", coming - there))
            if names
        ]
        if faults:
            raise DataRefused(
                f"the increment of {self._params.execution_time} {' and '.join(faults)}, compared with {table}; "
                "nothing was changed"
            )


def _foreign(undone: Sequence[Row]) -> list[str]:
    """Name the commits of other programs among those that a restore undoes."""
    return [
        f"{commit.operation} (version {commit.version})"
        for commit in map(_commit, undone)
        if commit.step is None and commit.operation not in UPKEEP
    ]


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Do the steps and report them."""
    one = Run(spark, params)
    steps: dict[str, list[Callable[[], dict[str, Any]]]] = {
        "all": [one.restore, one.merge, one.record],
        "restore": [one.restore],
        "merge": [one.merge],
        "record": [one.record],
        "adopt": [one.adopt],
    }
    report: dict[str, Any] = {"target": params.target, "execution_time": f"{params.at:%FT%T}"}
    for step in steps[params.step]:
        report |= step()
    return report


if __name__ == "__main__":
    run_job(Parameters, run)
