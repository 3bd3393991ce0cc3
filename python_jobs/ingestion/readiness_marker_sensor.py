"""Wait until a dataset is ready, without Spark: a command with a time limit, and a callable for an orchestrator.

    python -m python_jobs.ingestion.readiness_marker_sensor \\
        --marker shared/visits/date=2024-03-01/hour=10 --timeout_seconds 3600
    python -m python_jobs.ingestion.readiness_marker_sensor --dataset gold \\
        --table $LAKEHOUSE_ROOT/observability/observability_readiness --after_run 3f0c…

Exit code 0 means ready, 4 not ready in time. The report names what is ready. Only the report is written.

In Airflow, use a sensor that releases its slot between two checks:

    PythonSensor(
        task_id="wait_for_visits",
        python_callable=is_ready,
        op_kwargs={"marker": "/shared/visits/date={{ ds }}/hour=10"},
        mode="reschedule", poke_interval=60, timeout=3600,
    )

Conditions, one for each call:

- ``marker``: the folder holds ``_READY`` (``python_jobs/ingestion/readiness_marker.py``).
- ``next_partition``: a partition exists that is later than the given folder, ``…/date=2024-03-01/hour=10``. Any later
  hour closes a skipped one. A producer without data must create empty partitions, or consumers of its last partition
  wait for ever.
- ``table``: the Delta table has a commit with data above ``after_version``. OPTIMIZE and similar commits don't count.
- ``dataset`` in ``table``: dbt has published the dataset (``macros/ingestion/readiness_marker.sql``), in another run
  than ``after_run``.
- ``changes``: the dataset has notices of recreated closed partitions that are not in ``handled``.

Source: Data Engineering Design Patterns, chapter 2, Readiness Marker.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields
from typing import Any

import tenacity
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from pyarrow import fs  # type: ignore[import-untyped]

from python_jobs.shared.core.numbers import is_number
from python_jobs.shared.core.paths import is_uri
from python_jobs.shared.files.readiness_names import CHANGES, MARKER, UPKEEP


class WrongCondition(ValueError):
    """The arguments name no condition, or more than one."""


@dataclass(frozen=True)
class Condition:
    """The condition for which a consumer waits; exactly one of four kinds."""

    marker: str | None = None
    """Folder (path or URI) that must hold a marker."""
    next_partition: str | None = None
    """Partition folder; it is ready when a later partition exists."""
    table: str | None = None
    """Delta table (path or URI) that must have new data; with dataset, the ledger of published datasets."""
    after_version: int | None = None
    """Version of the table that was read last; by default any data is new."""
    dataset: str | None = None
    """Name of a dataset that dbt publishes."""
    after_run: str | None = None
    """run_id of the dataset that was read last; by default any run is new."""
    changes: str | None = None
    """Dataset folder whose closed partitions may be recreated."""
    handled: tuple[str, ...] = ()
    """Names of the notices that are already handled."""

    def __post_init__(self) -> None:
        named = [name for name in ("marker", "next_partition", "table", "changes") if getattr(self, name)]
        if len(named) != 1:
            raise WrongCondition(
                f"pass one of marker, next_partition, table and changes, got {' and '.join(named) or 'none'}"
            )
        if (self.dataset is not None or self.after_version is not None) and self.table is None:
            raise WrongCondition("dataset and after_version belong to table")


def look(condition: Condition) -> dict[str, Any] | None:
    """Check once; return a description of the ready data for its consumer, or None if it is not ready."""
    if condition.marker is not None:
        system, path = _open(condition.marker)
        return {"marker": condition.marker} if _is_file(system, f"{path}/{MARKER}") else None
    if condition.next_partition is not None:
        return _later_partition(condition.next_partition)
    if condition.changes is not None:
        return _new_notices(condition.changes, condition.handled)
    if condition.table is None:
        raise WrongCondition("pass one of marker, next_partition, table and changes, got none")
    try:
        table = DeltaTable(condition.table)
    except TableNotFoundError:
        return None
    if condition.dataset is not None:
        return _published(table, condition.dataset, condition.after_run)
    return _new_commit(table, condition.after_version)


def is_ready(**condition: Any) -> bool:
    """Check once and return whether the data is ready, for a PythonSensor; arguments are the fields of Condition."""
    return look(Condition(**condition)) is not None


def wait(condition: Condition, timeout_seconds: float, poll_seconds: float = 30) -> dict[str, Any] | None:
    """Check in the caller's thread until the data is ready or ``timeout_seconds`` are over; return as :func:`look`."""
    if not (
        is_number(timeout_seconds) and timeout_seconds >= 0 and is_number(poll_seconds) and poll_seconds > 0
    ):
        raise WrongCondition(
            f"timeout_seconds must be 0 or more and poll_seconds above 0, both finite, got {timeout_seconds} and "
            f"{poll_seconds}"
        )
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda found: found is None),
        wait=tenacity.wait_fixed(poll_seconds),
        stop=tenacity.stop_before_delay(timeout_seconds),
        retry_error_callback=lambda state: None,
    )
    return retrying(look, condition)


def _open(path: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a path or URI (s3://bucket/key?endpoint_override=…) and the path in it."""
    path = re.sub(r"^file:/(?!/)", "/", path, flags=re.IGNORECASE)
    if is_uri(path):
        system, inner = fs.FileSystem.from_uri(path)
        return system, inner.rstrip("/")
    return fs.LocalFileSystem(), path.rstrip("/")


def _is_file(system: fs.FileSystem, path: str) -> bool:
    return bool(system.get_file_info(path).type == fs.FileType.File)


def _later_partition(folder: str) -> dict[str, Any] | None:
    """Return the next partition: ``date=…`` sorts by its text, ``hour=…`` by its number, so 9 comes before 10."""
    system, path = _open(folder)
    depth = 2 if path.rsplit("/", 1)[1].startswith("hour=") else 1
    root, own = path.rsplit("/", depth)[0], "/".join(path.split("/")[-depth:])
    if system.get_file_info(path).type != fs.FileType.Directory:
        return None
    levels = [[root]]
    for _ in range(depth):
        levels.append(
            [
                info.path
                for parent in levels[-1]
                for info in system.get_file_info(fs.FileSelector(parent))
                if info.type == fs.FileType.Directory
                and "=" in info.base_name
                # Earlier days are closed already: don't list their hours.
                and _order(info.path.removeprefix(f"{root}/"))[:1] >= _order(own)[:1]
            ]
        )
    names = (path.removeprefix(f"{root}/") for path in levels[-1])
    later = min((name for name in names if _order(name) > _order(own)), key=_order, default=None)
    return None if later is None else {"next_partition": later}


def _order(partition: str) -> tuple[tuple[str, int, str], ...]:
    """Return what a partition sorts by: numbers as numbers, and before texts."""
    parts = (part.partition("=") for part in partition.split("/"))
    return tuple(
        (name, int(value), "") if value.isdecimal() else (name, sys.maxsize, value)
        for name, _, value in parts
    )


def _new_notices(dataset: str, handled: tuple[str, ...]) -> dict[str, Any] | None:
    system, path = _open(dataset)
    selector = fs.FileSelector(f"{path}/{CHANGES}", allow_not_found=True)
    names = {info.base_name for info in system.get_file_info(selector) if info.base_name.endswith(".json")}
    new = sorted(names - set(handled))
    return {"notices": new} if new else None


def _new_commit(table: DeltaTable, after_version: int | None) -> dict[str, Any] | None:
    """Return the newest commit with data; the log may have lost old commits, never the newest."""
    limit = None if after_version is None else max(table.version() - after_version, 1)
    for commit in table.history(limit):
        if after_version is not None and commit["version"] <= after_version:
            return None
        if commit["operation"] not in UPKEEP:
            return {"version": commit["version"]}
    return None


def _published(table: DeltaTable, dataset: str, after_run: str | None) -> dict[str, Any] | None:
    rows = table.to_pyarrow_table(filters=[("dataset", "=", dataset)]).to_pylist()
    if not rows or rows[0]["run_id"] == after_run:
        return None
    versions = {entry["name"]: entry["version"] for entry in rows[0]["table_versions"]}
    return {"run_id": rows[0]["run_id"], "table_versions": versions}


@dataclass(frozen=True)
class Parameters(Condition):
    """Wait until a dataset is ready."""

    timeout_seconds: float = 0
    """Maximum wait in seconds; 0 checks once."""
    poll_seconds: float = 30
    """Time between two checks, in seconds."""


def main(argv: list[str] | None = None) -> None:
    """Run the module as a command."""
    # Imported here, so that an orchestrator's environment needs none of these modules.
    from python_jobs.shared.core.command_line import run_program
    from python_jobs.shared.core.failures import NotReady

    def run(parameters: Parameters) -> dict[str, Any]:
        condition = Condition(**{f.name: getattr(parameters, f.name) for f in fields(Condition)})
        found = wait(condition, parameters.timeout_seconds, parameters.poll_seconds)
        if found is None:
            what = next(filter(None, (condition.marker, condition.next_partition, condition.dataset,
                                      condition.table, condition.changes)))  # fmt: skip
            raise NotReady(f"{what} is not ready after {parameters.timeout_seconds:g} s")
        return {"ready": True, **found}

    try:
        run_program(Parameters, run, argv)
    except WrongCondition as wrong:
        print(f"WrongUse: {wrong}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
