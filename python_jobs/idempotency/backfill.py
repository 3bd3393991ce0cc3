"""Replay and Backfill: recomputes past dates of a table from its source, in chunks that can be resumed.

Problem: a rule was wrong for three months. The dates must be recomputed with the new rule while today's loads continue.
A crash must not restart all dates, and a source that has lost its old dates must not empty the target.

- The query is a plain SELECT over ``{source}`` without any dates of its own. The job gives it the rows of one chunk of
  dates, and replaces these dates of the target by the query's rows, in one commit (Data Overwrite). If the query
  returns rows of other dates, the chunk is refused.
- All chunks read one version of the source. The ledger records this version and the chunks before any work. A rerun
  under the same ``--job_id`` computes the pending and failed chunks from the same version.
- A chunk that fails doesn't stop the others. The job ends with its failures' exit code, and the ledger has the reason.
- Refused, before anything is overwritten: a date whose source is empty or far smaller than the target (``--markers``
  tells a date without rows from one that is missing); new rows whose number, ``--totals`` or NULLs differ from the old
  ones by more than ``--tolerance``, or whose ``--totals`` are NaN or infinite; dates that aren't over; a query with the
  clock's time or random numbers in it; dates that another job has not finished; a text date in any other form than
  2024-12-31, in source, target or new rows, because texts are compared as texts.
- ``--margin_days`` lets the query read more dates than are written: a session that crosses midnight stays whole.

``--action plan`` prints what a run would do and what it would refuse, and writes nothing; ``status`` prints chunks and
percent from the ledger; ``abandon`` ends a job that will not be run again. All take the same other flags.

Guarantee: each date has the query's rows from the pinned version, or the rows that it had before. The rows are the
same after a second run, after a kill and a rerun, and in any order of chunks; ``content_hash`` in the ledger shows it.
Other dates don't change. Downstream tables don't change either: backfill them next, in the order of their lineage.

Cost: the query and one aggregate over its rows, which are kept on disk from the check to the write; when the run
begins, one aggregate over the rows to be replaced and one count by date of the source; a small commit of the ledger a
chunk. Dates that are texts cost one more scan of their column, in all rows of source and target.

    spark-submit python_jobs/idempotency/backfill.py --job_id 2024-q4-v2 --pipeline_version v2 \\
        --source lakehouse/silver/silver_visits --target lakehouse/gold/page_views --ledger lakehouse/ops/backfills \\
        --query "select event_date, page, count(*) as views, {pipeline_version} as pipeline_version
                 from {source} group by event_date, page" \\
        --from 2024-10-01 --to 2024-12-31

Source: the guide's ``pat-replay-backfill`` (chapters 10.4 and 12.6). Its sketch reads the source as of each day's
start, where the day's own rows are not there yet; logs chunks when they are done, so that it is always at 100 %; and
lets an expired source empty the target.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DateType

from python_jobs.idempotency.backfill_ledger import ChunkState, Job, Ledger, RegisteredJob
from python_jobs.idempotency.backfill_plan import (
    NO_ROWS,
    Chunk,
    Profile,
    chunks_of,
    deviations,
    missing_source,
    open_dates,
)
from python_jobs.shared.core.clock import ProcessingTimeParameters
from python_jobs.shared.core.failures import (
    DataRefused,
    JobFailed,
    NotReady,
    WrongUse,
    require_at_least,
    root_cause,
)
from python_jobs.shared.core.intervals import Interval, moved, parse_time, partition_folder
from python_jobs.shared.core.partial_failures import failure_sentence, require_no_failures
from python_jobs.shared.delta.commits import latest_version, write_once
from python_jobs.shared.delta.keys import content_hash
from python_jobs.shared.delta.overwrite import overwrite, require_same_columns
from python_jobs.shared.delta.streams import evaluated_once
from python_jobs.shared.delta.tables import (
    delta_table,
    partition_columns,
    read_table,
    read_version,
    table_exists,
    table_id,
)
from python_jobs.shared.files.readiness import Marker
from python_jobs.shared.records.values import exact_value
from python_jobs.shared.spark.expressions import first_line
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.jvm import analyzed_plan
from python_jobs.shared.spark.queries import query_text, user_query
from python_jobs.shared.spark.session import settings
from python_jobs.shared.spark.sql_text import identifier, named_column, string_literal

NOTE = "backfill"

# Their texts, and so their hashes, aren't stable.
_UNSTABLE = re.compile(r"(^|[:<])(float|double|map<)")
# Names in a plan of the functions whose value differs in the next run. Functions that depend on the order of rows
# (first, collect_list) are not among them, because sorted rows or a window fix their order.
_NEVER_TWICE = re.compile(
    r"expressions\.(Current(?:Date|Time|Timestamp)|Now|LocalTimestamp|"
    r"Rand|Randn|RandStr|Uniform|Uuid|Shuffle|MonotonicallyIncreasingID|SparkPartitionID)\b"
)


@dataclass(frozen=True, kw_only=True)
class Parameters(ProcessingTimeParameters):
    """Recompute past dates of a table, in chunks that can be resumed."""

    job_id: str
    """Name of the job; run again under it, the job goes on with what is pending or failed."""
    pipeline_version: str
    """Version of the query; it may select it: {pipeline_version}."""
    source: str
    """Delta table to compute from, by path or catalog name; bronze, if it is kept long enough."""
    target: str
    """Delta table to replace dates of, by path or catalog name; made if it is absent."""
    ledger: str
    """Delta table of jobs and chunks, by path or catalog name; made if it is absent. One may serve many targets."""
    query: str
    """SQL of the new rows from {source}, which has a chunk's dates only, as text or .sql file; also {first_date},
    {last_date} and {pipeline_version}."""
    from_: str
    """First date, such as 2024-10-01."""
    to: str
    """Last date, itself included."""
    action: Literal["run", "plan", "status", "abandon"] = "run"
    """plan: print what a run would do; status: how far it is; abandon: end it for good."""
    partition_column: str = "event_date"
    """Column by which the target is partitioned: a date, or a text such as 2024-12-31."""
    source_date: str | None = None
    """SQL of a source row's date, such as to_date(event_time); by default the partition column."""
    chunk_days: int = 7
    """Dates that are computed and replaced together."""
    newest_first: bool = False
    """Whether to begin with the last chunk."""
    parallel: int = 5
    """How many chunks are computed at a time."""
    margin_days: int = 0
    """Dates before and after a chunk that the query reads too, and that are not written."""
    tolerance: float = 0.2
    """How much a date's rows and totals may change, as a share of the old ones."""
    totals: list[str] = field(default_factory=list)
    """Number columns whose sums are compared."""
    markers: str | None = None
    """Folder of Readiness Markers (date=…, or date=…/hour=…): a date with its marker may be empty."""
    min_source_share: float = 0.5
    """Without markers: fewer source rows than this share of the date's target rows are refused."""
    allow_missing_source: bool = False
    """Whether to replace dates whose source is missing, too: they are emptied."""
    allow_open_dates: bool = False
    """Whether to replace dates that aren't over, while nothing else writes them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            _ = self.chunks
        except ValueError as wrong:
            raise WrongUse(str(wrong)) from None
        require_at_least(1, parallel=self.parallel)
        require_at_least(
            0,
            margin_days=self.margin_days,
            tolerance=self.tolerance,
            min_source_share=self.min_source_share,
        )
        for name in ("job_id", "pipeline_version"):
            if not getattr(self, name):
                raise WrongUse(f"{name} is empty; the ledger needs one")
        if "{source}" not in self.text:
            raise WrongUse(
                "the query doesn't mention {source}; it must compute the rows from the pinned version"
            )
        if self.source == self.target:
            raise WrongUse("source and target are the same table: after a chunk its source would be gone")

    @cached_property
    def text(self) -> str:
        """The SQL of the query."""
        return query_text(self.query)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """All chunks of the job, in the order of their dates."""
        return chunks_of(self.from_, self.to, self.chunk_days)


# --- one chunk ------------------------------------------------------------------------------------------


class Backfill:
    """Computes, checks and replaces chunks from one version of the source; chunks may be in several threads."""

    def __init__(self, spark: SparkSession, params: Parameters, source_version: int) -> None:
        """Check the query and both tables; nothing is written.

        Raises:
            NotReady: there is no source table.
            WrongUse: the query can't be used or gives other rows at another time, or the target isn't partitioned by
                the column.
            DataRefused: the query doesn't have the target's columns, or a text of either table is no date.
        """
        self._spark, self._params = spark, params
        self._date = params.source_date or identifier(params.partition_column)
        self._source_version = source_version
        with self._reading_source():
            self._source = read_version(spark, params.source, source_version)
        if self._require_dates(self._source, self._date, params.source) == "string":
            with self._reading_source():
                require_whole_dates(self._source, self._date, params.source)
        sample = self._computed(params.chunks[0])
        column = identifier(params.partition_column)
        self._has_text_dates = self._require_dates(sample, column, "the query") == "string"
        require_repeatable(sample)
        if table_exists(spark, params.target):
            columns = partition_columns(spark, params.target)
            if columns[:1] != [params.partition_column]:
                raise WrongUse(
                    f"{params.target} is not partitioned by {params.partition_column} but by "
                    f"{', '.join(columns) or 'nothing'}: chunks could not be replaced side by side"
                )
            stored = read_table(spark, params.target)
            require_same_columns(sample, stored, params.target)
            if self._has_text_dates:
                require_whole_dates(stored, column, params.target)
        stable = [name for name, kind in sample.dtypes if not _UNSTABLE.search(kind)]
        # A part of the hash as a number, so that the sum of rows in any order is the same.
        content = F.conv(F.substring(content_hash(*stable), 1, 15), 16, 10).cast("decimal(38, 0)")
        self._aggregates = [F.count(F.lit(1)), F.sum(content)]
        self._aggregates += [F.sum(named_column(name)).cast("double") for name in params.totals]
        self._columns = sample.columns
        self._aggregates += [F.count_if(F.isnull(named_column(name))) for name in self._columns]
        try:
            sample.agg(*self._aggregates)
        except AnalysisException as failure:
            raise WrongUse(f"totals must be number columns of the query ({first_line(failure)})") from None

    @contextmanager
    def _reading_source(self) -> Iterator[None]:
        try:
            yield
        except (PySparkException, Py4JJavaError) as failure:
            raise JobFailed(
                f"version {self._source_version} of {self._params.source}, from which the job is computed, can't be "
                f"read ({root_cause(failure)[:300]}); if it is gone, abandon the job and name another"
            ) from None

    def _require_dates(self, rows: DataFrame, expression: str, origin: str) -> str:
        try:
            ((_, kind),) = rows.selectExpr(expression).dtypes
        except (AnalysisException, ParseException) as failure:
            raise WrongUse(f"{origin} has no date {expression} ({first_line(failure)})") from None
        if kind not in ("date", "string"):
            raise WrongUse(
                f"{expression} of {origin} is a {kind}; it must be a date, such as to_date({expression})"
            )
        return kind

    def create_target(self) -> None:
        """Make the target, if it is absent, before several chunks would."""
        params = self._params
        if not table_exists(self._spark, params.target):
            rows = self._computed(params.chunks[0]).limit(0)
            write_once(self._spark, rows, params.target, partition_columns=[params.partition_column])

    def counts(self, rows: DataFrame, date: str, within: Chunk) -> dict[str, int]:
        """Return how many rows there are of each date that has any."""
        text = F.expr(f"cast({date} as string)").alias("date")
        counted = rows.where(between(date, within)).groupBy(text).agg(F.count(F.lit(1)).alias("rows"))
        return {row.date: row.rows for row in counted.collect()}

    @cached_property
    def source_counts(self) -> dict[str, int]:
        """Rows of the source by date, for all dates of the job."""
        chunks = self._params.chunks
        with self._reading_source():
            return self.counts(self._source, self._date, Chunk(chunks[0].first, chunks[-1].last))

    @cached_property
    def old_profiles(self) -> dict[str, Profile]:
        """Return the profile of each of the job's dates in the target when the run begins."""
        chunks = self._params.chunks
        dates = between(identifier(self._params.partition_column), Chunk(chunks[0].first, chunks[-1].last))
        return self._profiles(read_table(self._spark, self._params.target).where(dates))

    def source_rows(self, chunk: Chunk) -> int:
        """Return how many rows the source has for the chunk's dates."""
        return sum(self.source_counts.get(date, 0) for date in chunk.dates)

    def missing(self, chunk: Chunk, target_rows: Mapping[str, int]) -> dict[str, str]:
        """Return by date why its source can't be trusted; such dates are not overwritten."""
        params = self._params
        if params.allow_missing_source:
            return {}
        reasons = {
            date: missing_source(
                self.source_counts.get(date, 0),
                target_rows.get(date, 0),
                self._is_complete(date),
                params.min_source_share,
            )
            for date in chunk.dates
        }
        return {date: reason for date, reason in reasons.items() if reason}

    def _is_complete(self, date: str) -> bool | None:
        markers = self._params.markers
        if markers is None:
            return None
        day = Interval(start := parse_time(date), moved(start, dt.timedelta(days=1)))

        def is_ready(partition: Interval, grain: str) -> bool:
            return (
                Marker(self._spark, f"{markers}/{partition_folder(partition.start, grain)}").read()
                is not None
            )

        return is_ready(day, "day") or all(is_ready(hour, "hour") for hour in day.split("hour"))

    def rows(self, chunk: Chunk) -> DataFrame:
        """Return the new rows of the chunk's dates."""
        rows = self._computed(chunk)
        if not self._params.margin_days:
            return rows
        column = identifier(self._params.partition_column)
        kept = F.expr(between(column, chunk))
        # A text that is no date must refuse the chunk, also where its place in the order is in the margin.
        return rows.where(kept | is_no_date(column) if self._has_text_dates else kept)

    def _computed(self, chunk: Chunk) -> DataFrame:
        """Return what the query makes of the chunk's dates and the margin."""
        params = self._params
        source = self._source.where(between(self._date, chunk.widened(params.margin_days)))
        return user_query(
            self._spark,
            params.text,
            source=source,
            first_date=chunk.first,
            last_date=chunk.last,
            pipeline_version=params.pipeline_version,
        )

    def replace(self, chunk: Chunk, note: Mapping[str, Any]) -> ChunkState:
        """Compute the chunk, compare it with what is there, and replace that in one commit.

        Raises:
            DataRefused: the source is missing, the new rows differ too much, or are of other dates; the chunk's dates
                are as they were.
        """
        spark, params = self._spark, self._params
        old = {date: self.old_profiles.get(date, NO_ROWS) for date in chunk.dates}
        missing = self.missing(chunk, {date: profile.rows for date, profile in old.items()})
        _refuse({date: [reason] for date, reason in missing.items()})
        # The rows are evaluated once, so that the checked rows are the written rows.
        with evaluated_once(self.rows(chunk)) as rows:
            new = self._profiles(rows)
            if strays := sorted(str(date or "NULL") for date in new.keys() - set(chunk.dates)):
                raise DataRefused(
                    f"a row for {params.target} lies outside of the slice that is overwritten ({chunk}): its "
                    f"{params.partition_column} is {', '.join(strays[:5])}; nothing was overwritten"
                )
            # A date that is known to have no source rows isn't compared: its old rows are wrong.
            compared = {date: old[date] for date in chunk.dates if self.source_counts.get(date)}
            _refuse(
                {
                    date: deviations(compared.get(date, NO_ROWS), new.get(date, NO_ROWS), params.tolerance)
                    for date in chunk.dates
                }
            )
            where = between(identifier(params.partition_column), chunk)
            commit = overwrite(spark, rows, params.target, where, note=note)
        return ChunkState(
            status="done",
            source_rows=self.source_rows(chunk),
            rows_before=sum(profile.rows for profile in old.values()),
            rows=sum(profile.rows for profile in new.values()),
            changed_dates=sum(not old[date].has_content_of(new.get(date, NO_ROWS)) for date in chunk.dates),
            content_hash=f"{sum(profile.content for profile in new.values()):x}",
            table_version=None if commit is None else int(commit["version"]),
        )

    def _profiles(self, rows: DataFrame) -> dict[str, Profile]:
        date = named_column(self._params.partition_column).cast("string")
        aggregates = [column.alias(f"_{position}") for position, column in enumerate(self._aggregates)]
        profiles = {}
        for date_text, count, content, *others in rows.groupBy(date).agg(*aggregates).collect():
            totals, nulls = others[: len(self._params.totals)], others[len(self._params.totals) :]
            profiles[date_text] = Profile(
                count,
                int(content),
                dict(zip(self._params.totals, totals, strict=True)),
                dict(zip(self._columns, nulls, strict=True)),
            )
        return profiles


def between(date: str, chunk: Chunk) -> str:
    """Return the condition of the chunk's dates, of a date or a text such as 2024-12-31.

    >>> between("event_date", Chunk("2024-10-01", "2024-10-07"))
    "event_date >= '2024-10-01' and event_date <= '2024-10-07'"
    """
    return f"{date} >= {string_literal(chunk.first)} and {date} <= {string_literal(chunk.last)}"


def is_no_date(text: str) -> Column:
    """Return whether a text is there and isn't written as 2024-12-31: :func:`between` can't tell its date."""
    return F.expr(text).isNotNull() & exact_value(F.expr(text), DateType()).isNull()


def require_whole_dates(rows: DataFrame, text: str, origin: str) -> None:
    """Refuse texts that aren't written as 2024-12-31, in all rows: their place in the order says nothing.

    Raises:
        DataRefused: there is such a text.
    """
    for (found,) in rows.where(is_no_date(text)).select(F.expr(text)).limit(1).collect():
        raise DataRefused(
            f"{text} of {origin} is '{found}'; a text must be a date written as 2024-12-31 to be compared: make it a "
            f"date, such as to_date({text}); nothing was overwritten"
        )


def require_repeatable(rows: DataFrame) -> None:
    """Refuse a query that gives other rows when it runs again.

    Raises:
        WrongUse: it reads the clock, draws random numbers or numbers the rows of partitions.
    """
    found = _NEVER_TWICE.search(str(analyzed_plan(rows).toJSON()))
    if found:
        raise WrongUse(
            f"the query has {found[1]} in it, another value in each run; derive it from the event's time or the "
            "partition's date"
        )


def _refuse(faults: Mapping[str, Sequence[str]]) -> None:
    sentences = [f"{date}: {', '.join(found)}" for date, found in faults.items() if found]
    if sentences:
        raise DataRefused(f"{'; '.join(sentences)}; nothing was overwritten")


# --- the run --------------------------------------------------------------------------------------------


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Do the action and report it.

    Raises:
        NotReady: there is no source table, a date isn't over, or another job has not finished a date.
        DataRefused: other columns; or chunks were refused, the others are done.
        JobFailed: chunks failed, the others are done.
        WrongUse: the query, the tables or the job's other values can't be used.
    """
    ledger = Ledger(spark, params.ledger, params.processing_time)
    if params.action == "status":
        return ledger.job(params.job_id).progress()
    if params.action == "abandon":
        return ledger.abandon(params.job_id).progress()
    still_open = open_dates(params.from_, params.to, params.processing_time())
    if still_open and not params.allow_open_dates:
        raise NotReady(
            f"{', '.join(still_open)} is not over in UTC; end the range before it, or --allow_open_dates"
        )
    delta_table(spark, params.source)
    known = ledger.jobs().get(params.job_id)
    version = latest_version(spark, params.source) if known is None else known.job.source_version
    # Dates are those of UTC, whatever the session's zone.
    with settings(spark, {"spark.sql.session.timeZone": "UTC"}):
        backfill = Backfill(spark, params, version)
        if params.action == "plan":
            return plan(
                spark, params, backfill, version, params.chunks if known is None else known.unfinished
            )
        backfill.create_target()
        registered = ledger.register(job_of(spark, params, version), params.chunks)
        if registered.job.source_version != version:
            raise NotReady(
                f"the job '{params.job_id}' was started by another process at this moment; see its status"
            )
        tried = process(params, backfill, ledger, registered)
    finished = RegisteredJob(
        registered.job, {**registered.chunks, **{chunk: outcome for chunk, (outcome, _) in tried.items()}}
    )
    done = sum(state.status == "done" for state in finished.chunks.values())
    require_no_failures(
        {str(chunk): failure for chunk, (_, failure) in tried.items() if failure is not None},
        f"{done} of {len(finished.chunks)} chunks are done; run the job '{params.job_id}' again for the others",
    )
    return finished.progress() | {"processed": [str(chunk) for chunk in tried]}


def job_of(spark: SparkSession, params: Parameters, source_version: int) -> Job:
    """Return what the ledger keeps of the job; the target is there."""
    return Job(
        job_id=params.job_id,
        target=params.target,
        target_id=table_id(spark, params.target),
        source=params.source,
        source_id=table_id(spark, params.source),
        source_version=source_version,
        pipeline_version=params.pipeline_version,
        query_hash=hashlib.sha256(params.text.encode()).hexdigest(),
    )


def plan(
    spark: SparkSession, params: Parameters, backfill: Backfill, version: int, chunks: Sequence[Chunk]
) -> dict[str, Any]:
    """Report the chunks that a run would do, in its order, with their rows and what is refused of them."""
    counts: dict[str, int] = {}
    if chunks and table_exists(spark, params.target):
        range_ = Chunk(chunks[0].first, chunks[-1].last)
        counts = backfill.counts(
            read_table(spark, params.target), identifier(params.partition_column), range_
        )
    return {
        "job_id": params.job_id,
        "source_version": version,
        "parallel": params.parallel,
        "chunks": [
            {
                "first_date": chunk.first,
                "last_date": chunk.last,
                "source_rows": backfill.source_rows(chunk),
                "target_rows": sum(counts.get(date, 0) for date in chunk.dates),
                "refused": backfill.missing(chunk, counts),
            }
            for chunk in in_order(params, chunks)
        ],
    }


def in_order(params: Parameters, chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks in the order in which they are begun."""
    return sorted(chunks, reverse=params.newest_first)


def process(
    params: Parameters, backfill: Backfill, ledger: Ledger, registered: RegisteredJob
) -> dict[Chunk, tuple[ChunkState, Exception | None]]:
    """Do what is pending or failed, so many chunks at a time; return what became of each, and why it failed."""
    job = registered.job
    lineage = {
        name: value for name, value in asdict(job).items() if name in ("job_id", "source", "source_version")
    } | {"pipeline_version": job.pipeline_version}

    def do(chunk: Chunk) -> tuple[ChunkState, Exception | None]:
        failure: Exception | None = None
        try:
            outcome = backfill.replace(chunk, {NOTE: lineage | {"dates": str(chunk)}})
        except (JobFailed, PySparkException, Py4JJavaError) as failed:
            failure = failed
            outcome = ChunkState(
                status="failed", source_rows=backfill.source_rows(chunk), error=failure_sentence(failed)
            )
        outcome = dataclasses.replace(outcome, attempt=registered.chunks[chunk].attempt + 1)
        ledger.record(job, {chunk: outcome})
        return outcome, failure

    chunks = in_order(params, registered.unfinished)
    if chunks:
        # Once, before several threads would.
        _ = backfill.source_counts, backfill.old_profiles
    with ThreadPoolExecutor(params.parallel) as pool:
        return dict(zip(chunks, pool.map(do, chunks), strict=True))


if __name__ == "__main__":
    run_job(Parameters, run)
