"""Stateful Merger: merge a run's increment into the table as it was before that run, also for the replay of an old run.

Problem: a replay of increments with Merger starts from today's table. After the replay of 08:00 the table still has the
rows of 10:00, so consumers see a state that the table never had.

A table of versions records, for each execution time, the Delta version of its merge. A run has three steps, and each
step can be retried alone (``--step``):

- ``restore``: returns the table to its state before this run. Before the first run it deletes all rows. If runs were
  merged after the previous run, it restores the table to the version before this run's recorded version. If this run
  has no recorded version, it restores the version of the previous run. Otherwise it does nothing; a compaction since
  the previous run does not count as a change.
- ``merge``: applies the increment by the rules of Merger, in one commit.
- ``record``: records the version of that commit.

A backfill is an ordinary run for an old execution time. The report lists the later runs that must be replayed, in order
(``to_replay``). Until then a run after them is refused, because it would be merged into a table without their rows.

Guarantee: a run that is killed at any point and run again has the effect of an uninterrupted run. A replay in order,
with the same increments, gives the same table at each execution time as the first pass. Each commit has a note of its
run (``userMetadata``), so the job never mistakes another program's merge or a compaction for a run.

Not guaranteed: a restore keeps no commits of other programs; the report lists them under ``undone``.

Cost: a restore writes no data, but lists the files of two versions. It needs the files of the old version, so
``--retention_days`` limits how far back a replay can go. An older version is refused before any change.

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
from python_jobs.shared.core.intervals import from_micros, parse_time, previous_run_time
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
# Delta's messages for a version whose files or log entry are deleted, or that is older than the retention.
_GONE = re.compile(
    r"Not all files from version|Missed files|DELTA_VERSION_NOT_FOUND|Cannot time travel|FILE_NOT_(FOUND|EXIST)"
)


@dataclass(frozen=True)
class Parameters:
    """Merge a run's increment into the table as it was before that run."""

    target: str
    """Delta table, by path or catalog name; the first run creates it."""
    versions: str
    """Delta table of the target's versions, by path or catalog name; one for each target."""
    query: str
    """SQL query of the increment; {execution_time} is replaced by the execution time as a quoted text."""
    execution_time: str
    """Logical time of the run (2024-10-07 or 2024-10-07T08), never the clock's."""
    key: list[str]
    """Columns that identify a row and never change."""
    previous_execution_time: str | None = None
    """Logical time of the run before, by default the newest recorded one; until then exit code 4."""
    is_deleted: str | None = None
    """Boolean column that marks a deletion; NULL means false."""
    deletes: Literal["none", "soft", "hard"] = "none"
    """Effect of a deletion; soft keeps the row and flags it, hard deletes the row."""
    sequence: list[str] = field(default_factory=list)
    """Columns that order the changes of a key within the increment and against the table."""
    step: Literal["all", "restore", "merge", "record", "adopt"] = "all"
    """Steps to run. adopt declares an existing table, without a change, to be the outcome of execution_time."""
    retention_days: int = 30
    """Number of days for which a table of this job keeps its log and removed files, and so can be replayed."""

    def __post_init__(self) -> None:
        if not self.key:
            raise WrongUse("key is empty; name the columns that identify a row")
        require_at_least(1, retention_days=self.retention_days)
        _ = self.at, self.previous  # refuses one that is not before

    @cached_property
    def at(self) -> dt.datetime:
        """Return the run's logical time."""
        return parse_time(self.execution_time)

    @cached_property
    def previous(self) -> dt.datetime | None:
        """Return the logical time of the previous run; None if it was not given."""
        return previous_run_time(self.previous_execution_time, self.execution_time)

    @property
    def rules(self) -> MergeRules:
        """Return the rules for applying the increment."""
        return MergeRules(self.key, self.is_deleted, self.deletes, self.sequence)

    def note(self, step: str) -> dict[str, Any]:
        """Return the note that a step of this run stores in its commit."""
        return {NOTE: {"step": step, "execution_time": self.at.isoformat()}}


# --- the state before the run: without Spark ------------------------------------------------------------


@dataclass(frozen=True)
class Commit:
    """A commit of the target."""

    version: int
    operation: str
    step: str | None = None
    """Step of this job that made the commit (base or merge); None for another program's commit."""
    at: dt.datetime | None = None
    """Execution time of the run that made the commit."""


@dataclass(frozen=True)
class Base:
    """Action that returns the table to its state before the run."""

    action: Literal["keep", "restore", "empty"]
    """keep: the table is in this state; restore: restore ``version``; empty: delete all rows."""
    version: int = 0
    """Version to restore."""


def plan(
    recorded: Mapping[dt.datetime, int],
    commits: Sequence[Commit],
    at: dt.datetime,
    previous: dt.datetime | None = None,
) -> Base:
    """Return the action that returns the table to its state before the run of ``at``.

    Args:
        recorded: recorded version of each execution time.
        commits: commits of the table, newest first, down to the newest commit of this job; the log may no longer have
            that commit.
        at: execution time of the run.
        previous: execution time of the previous run; None if the caller doesn't know it.

    Raises:
        NotReady: the previous run must run first, or an earlier run must be replayed first.
        WrongUse: another recorded run lies between ``previous`` and ``at``.
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
        return Base("keep")  # an earlier attempt has restored the table
    if not earlier:
        return Base("empty")
    before = earlier[max(earlier)]
    newest = max([*recorded.values(), -1 if own is None else own.version])
    if newest <= before:
        return Base("keep")
    replaced = recorded.get(at)
    # The version before this run's version also has a compaction between the two runs. But if this run's version is
    # older than the replay of the previous run, it no longer belongs to the table's current history.
    return Base("restore", replaced - 1 if replaced is not None and replaced > before else before)


def newest_own(commits: Sequence[Commit]) -> Commit | None:
    """Return the newest commit that this job made."""
    return next((commit for commit in commits if commit.step is not None), None)


def _require_order(recorded: Mapping[dt.datetime, int]) -> None:
    """Require that each run was merged after all runs with an earlier execution time."""
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
    """Return the recorded version of each execution time; an absent table has none.

    Raises:
        WrongUse: the table has other columns or the versions of another target. Or the target was adopted as the
            outcome of this execution time or of a later one.
    """
    table = read_registry(spark, params.versions, _VERSIONS, "table of versions")
    if table is None:
        return {}
    rows = table.withColumn("execution_time", F.unix_micros("execution_time")).collect()
    target_id = table_id(spark, params.target) if table_exists(spark, params.target) else None
    if any(row.table_id != target_id for row in rows):
        raise WrongUse(
            f"{params.versions} holds the versions of another table than {params.target}, or of a former table of "
            "this name; name another table of versions"
        )
    for row in rows:
        if row.is_adopted and params.at <= (adopted := from_micros(row.execution_time)):
            raise WrongUse(
                f"{params.target} was adopted as the outcome of {adopted:%FT%T}, so earlier runs can't be replayed; "
                "give a later execution_time"
            )
    return {from_micros(row.execution_time): row.delta_table_version for row in rows}


def history(spark: SparkSession, table: str) -> list[Commit]:
    """Return the commits of an existing table, newest first, down to the newest commit of this job."""
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
    """One run; a process may begin with any of its steps."""

    def __init__(self, spark: SparkSession, params: Parameters) -> None:
        """Read the table of versions; raises like :func:`read_versions`."""
        self._spark, self._params = spark, params
        self._recorded = read_versions(spark, params)
        self._increment = spark.sql(
            params.query.replace("{execution_time}", string_literal(params.execution_time))
        )
        self._planned_at: int | None = None
        """Version of the target when this process checked or began to restore the state before the run."""
        self._merged: Commit | None = None
        """Commit of the run's merge; None if this process has not merged."""

    def restore(self) -> dict[str, Any]:
        """Return the table to its state before this run, with one commit or none, and return the report.

        Raises:
            JobFailed: the version to restore was vacuumed; nothing was changed.
            DataRefused: the increment has other columns than the table had in that version; nothing was changed.
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
        """Merge the increment in one commit, which is empty if nothing changes, and return the report.

        If an earlier attempt has merged the increment, the method does nothing.

        Raises:
            NotReady: the table is not in its state before this run.
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
                    f"{params.target} has changed since the run before {params.execution_time}; run step restore"
                )
            self._require_columns(table_name(params.target))
            self._planned_at = newest[0].version
        with noted(spark, params.target, params.note("merge")):
            merge(spark, self._increment, params.target, params.rules)
        runs = self._runs_since(self._planned_at)
        if not any((run.step, run.at) == ("merge", params.at) for run in runs):
            self._commit_without_change()  # the merge had nothing to change
            runs = self._runs_since(self._planned_at)
        if len(runs) > 1:
            versions = " and ".join(str(run.version) for run in reversed(runs))
            raise JobFailed(
                f"two runs were merged into {params.target} at once (versions {versions}); run again"
            )
        (self._merged,) = runs
        return {"merged": True}

    def record(self, *, is_adopted: bool = False) -> dict[str, Any]:
        """Record the version of this run's merge and return the report.

        Raises:
            NotReady: the newest merge of the table belongs to another run.
        """
        spark, params = self._spark, self._params
        own = self._merged or newest_own(history(spark, params.target))
        if own is None or (own.step, own.at) != ("merge", params.at):
            raise NotReady(
                f"the newest merge of {params.target} is not the merge of {params.execution_time}; run step merge"
            )
        values = (params.at, own.version, is_adopted, table_id(spark, params.target), FORMAT_VERSION)
        row = spark.createDataFrame([values], _VERSIONS)
        register(spark, row, params.versions, ["execution_time"])
        later = [
            time for time, version in self._recorded.items() if time > params.at and version < own.version
        ]
        return {"table_version": own.version, "to_replay": [f"{time:%FT%T}" for time in sorted(later)]}

    def adopt(self) -> dict[str, Any]:
        """Declare the table to be the outcome of the execution time, for a table that other programs have filled.

        Raises:
            NotReady: there is no such table.
            WrongUse: the table has recorded runs.
        """
        spark, params = self._spark, self._params
        delta_table(spark, params.target)
        if self._recorded:
            raise WrongUse(f"{params.target} has recorded runs in {params.versions} and can't be adopted")
        self._commit_without_change()
        return self.record(is_adopted=True)

    def _base(self, newest: Sequence[Commit]) -> Base:
        params = self._params
        base = plan(self._recorded, newest, params.at, params.previous)
        if base.action == "empty" and table_size(self._spark, params.target)[0] == 0:
            return Base("keep")
        if base.action == "empty" and newest_own(newest) is None and not self._recorded:
            raise WrongUse(
                f"{params.target} has rows, but {params.versions} has no run that wrote them; make them the outcome of "
                "an earlier execution time with step adopt, or name another target"
            )
        return base

    def _runs_since(self, version: int) -> list[Commit]:
        """Return the commits of runs after a version, newest first, without this run's restore."""
        return [
            commit
            for commit in map(_commit, commits_after(self._spark, self._params.target, version))
            if commit.step is not None and (commit.step, commit.at) != ("base", self._params.at)
        ]

    def _commit(self, step: str, statement: str) -> None:
        with noted(self._spark, self._params.target, self._params.note(step)):
            self._spark.sql(statement).collect()

    def _commit_without_change(self) -> None:
        """Commit the run without a change of rows: a replay needs one version for each run.

        The commit sets a table property, because Delta writes no commit for a write without rows.
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
    """Return the operation and version of each undone commit that another program has made."""
    return [
        f"{commit.operation} (version {commit.version})"
        for commit in map(_commit, undone)
        if commit.step is None and commit.operation not in UPKEEP
    ]


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the steps and return the report."""
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
