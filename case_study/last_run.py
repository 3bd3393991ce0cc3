"""The state after the last complete run of the main job, so that a run builds only models with changed inputs.

dbt itself decides which rows a model reads from its sources. But dbt can't see that no source has changed, and would
query each of them again. The versions of all Delta tables show this without Spark.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from case_study.main_job import BUILD, REPORT, SOURCES, Step
from python_jobs.shared.core.json_text import json_text

LAYERS = ("bronze", "silver", "gold", "observability", "staging", "snapshots")
PROJECT = (
    "dbt_project.yml",
    "profiles",
    "models",
    "macros",
    "case_study/macros",
    "snapshots",
    "tests/dbt",
    "python_jobs",
    "conf",
    "requirements.txt",
)

READ = {".sql", ".yml", ".yaml", ".csv", ".md", ".py", ".conf", ".properties", ".txt"}
"""Suffixes of the project's own files there; Python's compiled files have other suffixes."""


@dataclass(frozen=True)
class LastRun:
    """A complete run: what it found and what it left."""

    project: str = ""
    """Digest of the programs and settings that made the tables."""
    versions: dict[str, int] = field(default_factory=dict)
    """Version of each table by its path below the lakehouse: of sources when a step first read them, of others at the
    end."""
    report: dict[str, Any] = field(default_factory=dict)
    """The report that the run printed."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each step."""


class News:
    """Compares a lakehouse with the last complete run on it."""

    def __init__(self, lakehouse: Path, project: Path, target: str) -> None:
        """Read what the last run left; a file that can't be read is no last run.

        Args:
            lakehouse: root of the tables, a local folder.
            project: root of the dbt project.
            target: dbt target.
        """
        self._lakehouse = lakehouse
        self._file = lakehouse / ".last_run.json"
        self._digest = project_digest(project, target)
        self._read: dict[str, int] = {}
        self.last = LastRun()
        with contextlib.suppress(OSError, ValueError, TypeError):
            self.last = LastRun(**json.loads(self._file.read_text(encoding="utf-8")))

    def needed(self, step: Step) -> Step | None:
        """Return the step, narrowed to what has news; None if there is none for it."""
        if not (step.tables or step.name in (BUILD, REPORT)):
            return step
        versions = table_versions(self._lakehouse)
        changed = self._changed(versions)
        is_same_project = self._digest == self.last.project
        if step.name == REPORT:
            return None if is_same_project and self.last.report and not changed else step
        # The first look counts: a commit that comes after a step has read the table is news to the next run.
        read = step.tables or filter(is_source, versions)
        self._read = {table: versions[table] for table in read if table in versions} | self._read
        if step.tables:
            return None if is_same_project and not {*changed}.intersection(step.tables) else step
        return self._narrowed(step, changed) if is_same_project else step

    def _narrowed(self, build: Step, changed: list[str]) -> Step | None:
        if not changed:
            return None
        if not all(map(is_source, changed)):
            return build
        # Gold is published as a whole (Readiness Marker), so all its tables belong to each build.
        selected = [f"source:*.{table.rsplit('/', 1)[-1]}+" for table in changed]
        return replace(build, command=(*build.command, "--select", *selected, "tag:gold"))

    def _changed(self, versions: dict[str, int]) -> list[str]:
        tables = sorted({*versions, *self.last.versions})
        return [table for table in tables if versions.get(table) != self.last.versions.get(table)]

    def save(self, report: dict[str, Any], seconds: dict[str, float]) -> None:
        """Record a complete run."""
        versions = table_versions(self._lakehouse) | self._read
        run = LastRun(self._digest, versions, report or self.last.report, seconds)
        new = self._file.with_suffix(".new")
        new.write_text(json_text(dataclasses.asdict(run)), encoding="utf-8")
        new.replace(self._file)


def is_source(table: str) -> bool:
    """Return whether a job writes the table; dbt writes the others."""
    return table.startswith("bronze/") or table in SOURCES


def table_versions(lakehouse: Path) -> dict[str, int]:
    """Return the version of each Delta table by its path below the lakehouse; -1 for a log that can't be read."""
    return dict(_versions(lakehouse))


def _versions(lakehouse: Path) -> Iterator[tuple[str, int]]:
    for layer in LAYERS:
        for log in sorted(lakehouse.glob(f"{layer}/*/_delta_log")):
            table = log.parent
            try:
                version = DeltaTable(table).version()
            except DeltaError:
                version = -1
            yield table.relative_to(lakehouse).as_posix(), version


def project_digest(project: Path, target: str) -> str:
    """Return a digest of the programs and settings: files, dbt's target, and the variable that chooses the sources."""
    digest = hashlib.sha256(json_text([target, os.environ.get("LAKEHOUSE_SOURCE", "files")]).encode())
    for name in PROJECT:
        path = project / name
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in READ)
        for file in files:
            digest.update(f"{file.relative_to(project)}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
