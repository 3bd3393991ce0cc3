"""Ledger of backfills: an append-only Delta table with one row for each event of a chunk.

Before any work, one commit registers all chunks of a job as pending, so that the ledger can count the chunks that are
not done. Then each attempt of a chunk adds a row with its outcome. The state of a chunk is its last row; a chunk that
is done stays done.

Outcomes are plain appends, which never conflict. A registration depends on the registrations of other jobs, so it is an
optimistic write: of two concurrent registrations the later is recomputed
(:mod:`python_jobs.shared.delta.optimistic_writes`).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from python_jobs.idempotency.backfill_plan import Chunk, ChunkStatus, job_status, percent_done
from python_jobs.idempotency.registries import read_registry
from python_jobs.shared.core.failures import NotReady, WrongUse
from python_jobs.shared.delta.commits import write_once
from python_jobs.shared.delta.optimistic_writes import change

FORMAT_VERSION = 1
_APP = "backfill_ledger"
_COLUMNS = (
    "job_id string, target string, target_id string, source string, source_id string, source_version long, "
    "pipeline_version string, query_hash string, first_date string, last_date string, status string, attempt int, "
    "source_rows long, rows_before long, rows long, changed_dates int, content_hash string, table_version long, "
    "error string, recorded_at timestamp, format_version int"
)
# Values that a job must keep when it runs again.
_OF_A_JOB = ("target_id", "source_id", "pipeline_version", "query_hash")


@dataclass(frozen=True)
class Job:
    """Tables, versions and query of a job, fixed when the job is registered."""

    job_id: str
    target: str
    target_id: str
    """Id of the target; a recreated table has another id."""
    source: str
    source_id: str
    source_version: int
    """Version of the source from which all chunks are computed."""
    pipeline_version: str
    query_hash: str
    """SHA-256 of the query."""


@dataclass(frozen=True)
class ChunkState:
    """State of one chunk: its status and the outcome of its last attempt."""

    status: ChunkStatus = "pending"
    attempt: int = 0
    """Number of attempts so far."""
    source_rows: int | None = None
    """Number of source rows for the chunk's dates."""
    rows_before: int | None = None
    """Number of rows that the attempt replaced."""
    rows: int | None = None
    """Number of new rows."""
    changed_dates: int | None = None
    """Number of dates whose content has changed."""
    content_hash: str | None = None
    """Hash of the new rows, equal for equal rows; it leaves out float, double and map columns."""
    table_version: int | None = None
    """Version of the target with the new rows; None if Delta wrote no commit because there was nothing to write."""
    error: str | None = None
    """Cause of a failed attempt."""


@dataclass(frozen=True)
class RegisteredJob:
    """A job with the states of its chunks, in the order of their dates."""

    job: Job
    chunks: Mapping[Chunk, ChunkState]

    @property
    def unfinished(self) -> list[Chunk]:
        """Return the chunks that a rerun of the job would process."""
        return [chunk for chunk, state in self.chunks.items() if state.status in ("pending", "failed")]

    def progress(self) -> dict[str, Any]:
        """Return the job's report: its status, the percentage of done chunks, and the state of each chunk."""
        statuses = [state.status for state in self.chunks.values()]
        return {
            "job_id": self.job.job_id,
            "status": job_status(statuses),
            "percent": percent_done(statuses),
            "target": self.job.target,
            "source_version": self.job.source_version,
            "pipeline_version": self.job.pipeline_version,
            "chunks": [
                {"first_date": chunk.first, "last_date": chunk.last, **asdict(state)}
                for chunk, state in self.chunks.items()
            ],
        }


class Ledger:
    """The ledger in a Delta table, by path or catalog name. The first job creates it; it may serve many targets."""

    def __init__(self, spark: SparkSession, table: str, clock: Callable[[], dt.datetime]) -> None:
        self._spark, self.table, self._clock = spark, table, clock

    def jobs(self) -> dict[str, RegisteredJob]:
        """Return all jobs by their id.

        Raises:
            WrongUse: the table is no ledger of backfills.
        """
        table = read_registry(self._spark, self.table, _COLUMNS, "ledger of backfills")
        jobs: dict[str, Job] = {}
        states: dict[str, dict[Chunk, ChunkState]] = {}
        for row in [] if table is None else table.collect():
            job = Job(*(row[name] for name in Job.__dataclass_fields__))
            jobs[job.job_id] = job
            chunks = states.setdefault(job.job_id, {})
            chunk = Chunk(row.first_date, row.last_date)
            state = ChunkState(*(row[name] for name in ChunkState.__dataclass_fields__))
            chunks[chunk] = max(chunks.get(chunk, state), state, key=_rank)
        return {
            job_id: RegisteredJob(job, dict(sorted(states[job_id].items()))) for job_id, job in jobs.items()
        }

    def job(self, job_id: str) -> RegisteredJob:
        """Return one job.

        Raises:
            NotReady: the ledger has no such job.
        """
        jobs = self.jobs()
        if job_id not in jobs:
            raise NotReady(f"{self.table} has no job '{job_id}'; it has {', '.join(sorted(jobs)) or 'none'}")
        return jobs[job_id]

    def register(self, job: Job, chunks: Iterable[Chunk]) -> RegisteredJob:
        """Register a job with all its chunks as pending; if it is already registered, return it with its states.

        Raises:
            WrongUse: the job is registered with another target, source, query, version or other dates, or was
                abandoned.
            NotReady: an unfinished job covers a date of this job.
        """
        wanted = sorted(chunks)

        def new_rows() -> tuple[DataFrame | None, RegisteredJob]:
            jobs = self.jobs()
            if job.job_id in jobs:
                _require_same(jobs[job.job_id], job, wanted)
                return None, jobs[job.job_id]
            _require_free(jobs.values(), job, wanted)
            registered = RegisteredJob(job, {chunk: ChunkState() for chunk in wanted})
            return self._rows(job, registered.chunks), registered

        return change(self._spark, self.table, _APP, new_rows)

    def record(self, job: Job, outcomes: Mapping[Chunk, ChunkState]) -> None:
        """Append the outcomes of chunks."""
        write_once(self._spark, self._rows(job, outcomes), self.table)

    def abandon(self, job_id: str) -> RegisteredJob:
        """End a job that will not run again, so that other jobs may cover its dates; return the abandoned job.

        Raises:
            NotReady: the ledger has no such job.
        """
        registered = self.job(job_id)
        given_up = {
            chunk: replace(
                registered.chunks[chunk], status="abandoned", attempt=registered.chunks[chunk].attempt + 1
            )
            for chunk in registered.unfinished
        }
        if given_up:
            self.record(registered.job, given_up)
        return self.job(job_id)

    def _rows(self, job: Job, states: Mapping[Chunk, ChunkState]) -> DataFrame:
        rows = [
            {
                **asdict(job),
                "first_date": chunk.first,
                "last_date": chunk.last,
                **asdict(state),
                "recorded_at": self._clock(),
                "format_version": FORMAT_VERSION,
            }
            for chunk, state in states.items()
        ]
        names = [column.split()[0] for column in _COLUMNS.split(", ")]
        # The schema is explicit because Spark can't infer the type of a column that is always NULL.
        return self._spark.createDataFrame(
            [tuple(row[name] for name in names) for row in rows], _COLUMNS
        ).coalesce(1)


def _rank(state: ChunkState) -> tuple[bool, int]:
    return (state.status == "done", state.attempt)


def _require_same(known: RegisteredJob, job: Job, chunks: list[Chunk]) -> None:
    differing = [name for name in _OF_A_JOB if getattr(known.job, name) != getattr(job, name)]
    if list(known.chunks) != chunks:
        differing.append("dates")
    if differing:
        raise WrongUse(
            f"the job '{job.job_id}' was registered with other values of {', '.join(differing)}; name another job"
        )
    if known.progress()["status"] == "abandoned":
        raise WrongUse(f"the job '{job.job_id}' was abandoned; name another job")


def _require_free(jobs: Iterable[RegisteredJob], job: Job, chunks: list[Chunk]) -> None:
    for other in jobs:
        if other.job.target_id != job.target_id:
            continue
        for chunk in other.unfinished:
            if any(chunk.overlaps(mine) for mine in chunks):
                raise NotReady(
                    f"the job '{other.job.job_id}' has not finished {chunk} of {job.target}; wait for it, run it "
                    "again, or end it with --action abandon"
                )
