"""Dead-Letter: records that can't be processed go to a dead-letter table with their error, and the stream continues.

The job reads a Delta table as a stream, parses the JSON of its payload column
(:mod:`python_jobs.shared.records.json_records`) and writes two tables:

* ``--target``: typed fields, derived columns, payload, every source column, ``was_dead_lettered`` (false
  here) and ``replay`` (NULL here; the replay job fills both);
* ``--dead_letter``: the payload byte for byte, every source column, the error, the job and its version, the
  time, the number of attempts and a status.

Guarantee: for every batch, records read = valid + dead-lettered; the target's commit contains these numbers
(``accounting``). The two tables are two Delta commits, first the dead letters. Each commit has the batch's
transaction id, so a batch that is retried, after an error or a kill between the two commits, adds no row
twice to either table. A failed dead-letter write fails the batch. The share of bad records is checked before
the batch writes anything, over the newest batches of this run and of earlier runs.

A value that isn't of its field's type (``"soon"`` in an integer field) is NULL in the target and counted by field, in
the report and in ``accounting``; ``--max_unreadable_share`` limits the share of such records, ``--on_unreadable
dead_letter`` dead-letters them.

With ``--poison_attempts`` the job searches a batch that fails again and again for the records that make it fail, by an
exception or by the death of the process (:mod:`.poison_pills`). It dead-letters these records as ``POISON_PILL`` with
status parked, and the stream continues.

Cost: each batch is kept (memory, then disk) between the count and the two writes, so that every record is
evaluated once; ``--max_files_per_trigger`` limits the batch's size. With a new checkpoint all records are read
again.

Submit (available data, then stop)::

    spark-submit python_jobs/error_management/dead_letter.py \
        --source lakehouse/bronze/bronze_visits --target lakehouse/silver/silver_visits_parsed \
        --dead_letter lakehouse/silver/silver_visits_dead_letter \
        --checkpoint lakehouse/checkpoints/visits_parsed \
        --schema "visit_id string, event_time timestamp, page string" \
        --derive.event_date "to_date(event_time)" \
        --partition_by '[event_date]'

Source: Data Engineering Design Patterns, chapter 3, Dead-Letter.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from python_jobs.error_management.poison_pills import Case, CaseFile, Range, isolate
from python_jobs.shared.core.failures import DataRefused, WrongUse, require_at_least, root_cause
from python_jobs.shared.core.numbers import exceeds
from python_jobs.shared.core.retry import Retrier, RetryPolicy
from python_jobs.shared.delta.commits import commit_note, commits, latest_version
from python_jobs.shared.delta.streams import (
    BatchFunction,
    append,
    await_end,
    batch_options,
    create_table,
    empty_source,
    evaluated_once,
    nullable,
)
from python_jobs.shared.files.pointers import PointedDataset
from python_jobs.shared.records.dead_letters import (
    DEAD_LETTER_COLUMNS,
    POISON_PILL,
    REPLAY,
    WAS_DEAD_LETTERED,
    DeadLetterStream,
    ParsingParameters,
    valid_records,
)
from python_jobs.shared.records.json_records import ERROR_CLASS, ERROR_MESSAGE, UNREADABLE
from python_jobs.shared.spark.job import run_job
from python_jobs.shared.spark.sql_text import named_column

_KEPT_ACCOUNTS = 100


@dataclass(frozen=True, kw_only=True)
class Parameters(ParsingParameters, DeadLetterStream):
    """Parse the JSON payloads of a Delta table; records that can't be processed go to a dead-letter table."""

    source: str
    """Delta table (name or path) that only grows, such as a bronze table."""
    target: str
    """Delta table (name or path) for the processed records; created when absent."""
    checkpoint: str
    """Folder of the stream's progress: one for each source and target, kept as long as these tables."""
    max_unreadable_share: float | None = None
    """Stop with exit code 3 when a larger share of the records has such a value; by default never."""
    partition_by: list[str] = field(default_factory=list)
    """Partition columns of the target."""
    max_bad_share: float | None = None
    """Largest allowed share of bad records (0.1 = 10 %); a larger share gives exit code 3. By default no limit."""
    min_records: int = 100
    """Fewest records for these checks; smaller batches are judged with the ones before, of earlier runs as well."""
    sink_attempts: int = 3
    """Attempts of a write that fails for a transient reason."""
    poison_attempts: int | None = None
    """Failed attempts of a batch after which its poison pills are searched for and parked; by default never.
    The attempts are counted in the checkpoint's folder, which must be local or in an object store."""
    max_poison: int = 3
    """Largest number of poison pills in a batch; more count as a fault of the environment: exit code 3, none parked."""
    job_name: str = "dead_letter"
    """Name of the job in the dead letters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({self.source, self.target, self.dead_letter}) < 3:
            raise WrongUse("source, target and dead_letter must be three tables")
        shares = {"max_bad_share": self.max_bad_share, "max_unreadable_share": self.max_unreadable_share}
        for name, share in shares.items():
            if share is not None and not 0 <= share <= 1:
                raise WrongUse(f"{name} is {share}; it is a share between 0 and 1")
        require_at_least(
            1,
            min_records=self.min_records,
            sink_attempts=self.sink_attempts,
            poison_attempts=self.poison_attempts,
            max_poison=self.max_poison,
        )


@dataclass(frozen=True)
class BatchAccount:
    """The number of one batch's records by outcome: read = valid + dead."""

    batch_id: int
    read: int
    dead: int
    error_classes: dict[str, int]
    unreadable: int = 0
    """Valid records with a value that isn't of its field's type."""
    unreadable_fields: dict[str, int] = field(default_factory=dict)
    """Such values by field."""

    def as_dict(self) -> dict[str, Any]:
        """Return the account as the target's commits contain it."""
        return {
            "batch_id": self.batch_id,
            "read": self.read,
            "valid": self.read - self.dead,
            "dead": self.dead,
            "error_classes": self.error_classes,
            "unreadable": self.unreadable,
            "unreadable_fields": self.unreadable_fields,
        }


def bad_share(accounts: Iterable[BatchAccount], min_records: int, what: str = "dead") -> float | None:
    """Return the share of bad records over the newest batches that make ``min_records``, None below that.

    ``accounts`` are in the order of their batches; ``what`` is the count that is judged, dead or unreadable.
    """
    read = bad = 0
    for account in reversed(list(accounts)):
        read += account.read
        bad += getattr(account, what)
        if read >= min_records:
            return bad / read
    return None


def accounting(spark: SparkSession, target: str, newest: int | None = None) -> list[dict[str, Any]]:
    """Return the accounts of all batches that the target's history knows, or of the newest ones, oldest first.

    Commits of other programs count for nothing, however many there are.
    """
    notes = (commit_note(commit.userMetadata) for commit in commits(spark, target))
    return list(islice((note for note in notes if "batch_id" in note), newest))[::-1]


def earlier_accounts(spark: SparkSession, target: str) -> list[BatchAccount]:
    """Return the newest accounts in the target's history, on which the first batches of a run are judged, too."""
    return [
        BatchAccount(
            account["batch_id"],
            account["read"],
            account["dead"],
            account["error_classes"],
            account.get("unreadable", 0),
            account.get("unreadable_fields", {}),
        )
        for account in accounting(spark, target, _KEPT_ACCOUNTS)
        if "dead" in account
    ]


class BatchWriter(BatchFunction):
    """The ``foreachBatch`` function of the job: parse, count, check, write dead letters, write valid rows.

    Args:
        parse: Function from source records to the rows of :func:`parse_records`.
        writer_id: Delta ``txnAppId`` of this checkpoint.
        cases: File of the failed attempts; needed only with ``poison_attempts``.
        earlier: Accounts of earlier runs, which the checks of shares include.
    """

    def __init__(
        self,
        params: Parameters,
        parse: Callable[[DataFrame], DataFrame],
        writer_id: str,
        cases: CaseFile | None = None,
        earlier: Iterable[BatchAccount] = (),
    ) -> None:
        self.params = params
        self.parse = parse
        self.writer_id = writer_id
        self.cases = cases
        # A large batch's write may take any time; its transaction id makes it idempotent.
        self._retrier = Retrier(RetryPolicy(attempts=params.sink_attempts, total_seconds=math.inf))
        # Only what the report and the bad-share check look back on: a continuous job runs for months.
        self.accounts: deque[BatchAccount] = deque(maxlen=_KEPT_ACCOUNTS)
        self._judged: deque[BatchAccount] = deque(earlier, maxlen=_KEPT_ACCOUNTS)
        self.read = self.dead = 0
        self.unreadable_fields: Counter[str] = Counter()

    def write(self, rows: DataFrame, batch_id: int) -> None:
        """Process one batch of source records."""
        case = self._poison(rows, batch_id)
        with evaluated_once(self.parse(_without(rows, case))) as parsed:
            record = [named_column(name) for name in rows.columns]
            judged = parsed.select(*record, UNREADABLE, ERROR_CLASS, ERROR_MESSAGE)
            if case.pills:
                judged = judged.unionByName(_pill_rows(rows, case))
            self._publish(parsed, judged, rows.columns, batch_id)

    def _poison(self, rows: DataFrame, batch_id: int) -> Case:
        """Return the batch's case, with its poison pills if the batch has failed often enough for a search."""
        attempts = self.params.poison_attempts
        if attempts is None or self.cases is None:
            return Case(batch_id)
        case = self.cases.begin(batch_id)
        if case.attempts <= attempts:
            return case
        rest, position = _without(rows, case), _record_hash(rows)

        def bounds(part: Range) -> Range | None:
            row = rest.where(position.between(*part)).agg(F.min(position), F.max(position)).collect()[0]
            return None if row[0] is None else (row[0], row[1])

        def failure(part: Range) -> str | None:
            try:
                self.parse(rest.where(position.between(*part))).write.format("noop").mode("overwrite").save()
            except Exception as error:  # any error stops the batch
                return root_cause(error)[:300]
            return None

        return isolate(case, bounds, failure, self.cases.save, self.params.max_poison)

    def _publish(
        self, parsed: DataFrame, judged: DataFrame, record_columns: list[str], batch_id: int
    ) -> None:
        params = self.params
        account = _count(judged, batch_id)
        self.refuse_bad_batch(account)
        options = batch_options(self.writer_id, batch_id, account.as_dict())
        if account.dead:
            dead = params.dead_letters(judged, record_columns, batch_id, params.processing_time())
            self._retrier.call(lambda _: append(dead, params.dead_letter, options), idempotent=True)
        valid = valid_records(parsed)
        self._retrier.call(lambda _: append(valid, params.target, options), idempotent=True)
        self.accounts.append(account)
        self._judged.append(account)
        self.read += account.read
        self.dead += account.dead
        self.unreadable_fields.update(account.unreadable_fields)

    def refuse_bad_batch(self, account: BatchAccount) -> None:
        """Raise DataRefused if a share of bad records, this batch included, is above its limit.

        A batch without such a record passes, whatever came before it.
        """
        params = self.params
        for what, limit in (("dead", params.max_bad_share), ("unreadable", params.max_unreadable_share)):
            count = getattr(account, what)
            if limit is None or not count:
                continue
            share = bad_share([*self._evidence(what, limit), account], params.min_records, what)
            if share is not None and exceeds(share, limit):
                kind, option, then = _JUDGED[what]
                fields = f" ({_counted(account.unreadable_fields)})" if what == "unreadable" else ""
                raise DataRefused(
                    f"alert: batch {account.batch_id} has {count} {kind} of {account.read}{fields}: "
                    f"{share:.1%} of the latest records, {limit:.1%} allowed; nothing of it was published; "
                    f"fix the cause, or run once with a higher --{option}, {then}"
                )

    def _evidence(self, what: str, limit: float) -> list[BatchAccount]:
        """Return the earlier batches that count: a large batch above the limit was let pass on purpose and doesn't."""
        fewest = self.params.min_records
        return [one for one in self._judged if one.read < fewest or getattr(one, what) <= limit * one.read]


_JUDGED = {
    "dead": ("bad records", "max_bad_share", "which makes the bad records dead letters"),
    "unreadable": (
        "records with an unreadable value",
        "max_unreadable_share",
        "which makes these values NULL",
    ),
}


def _counted(fields: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in fields.items())


def _record_hash(rows: DataFrame) -> Column:
    """Return the expression of a record's 64-bit hash, over all columns of the source."""
    return F.xxhash64(*(named_column(name) for name in rows.columns))


def _without(rows: DataFrame, case: Case) -> DataFrame:
    """Return the records that are not poison pills."""
    return rows.where(~_record_hash(rows).isin(*case.pills)) if case.pills else rows


def _pill_rows(rows: DataFrame, case: Case) -> DataFrame:
    """Return the poison pills with their error."""
    return rows.where(_record_hash(rows).isin(*case.pills)).select(
        "*",
        F.array().cast("array<string>").alias(UNREADABLE),
        F.lit(POISON_PILL).alias(ERROR_CLASS),
        F.lit(f"the record ends the task that processes it: {case.reason}").alias(ERROR_MESSAGE),
    )


def _count(judged: DataFrame, batch_id: int) -> BatchAccount:
    """Count a batch in one pass: records by error class, and in the valid ones unreadable values by field."""
    groups = judged.groupBy(ERROR_CLASS, UNREADABLE).count().collect()
    counts: Counter[str | None] = Counter()
    fields: Counter[str] = Counter()
    unreadable = 0
    for row in groups:
        counts[row[ERROR_CLASS]] += row["count"]
        if row[ERROR_CLASS] is None and row[UNREADABLE]:
            unreadable += row["count"]
            fields.update(dict.fromkeys(row[UNREADABLE], row["count"]))
    errors = {name: count for name, count in sorted(counts.items(), key=str) if name is not None}
    return BatchAccount(
        batch_id, counts.total(), sum(errors.values()), errors, unreadable, dict(sorted(fields.items()))
    )


def start(spark: SparkSession, params: Parameters) -> tuple[StreamingQuery, BatchWriter]:
    """Create or check the tables, claim the checkpoint and start the query.

    Raises:
        NotReady: the source doesn't exist.
        WrongUse: a table has another schema, or the checkpoint belongs to another query.
    """
    empty = empty_source(spark, params.source, (*DEAD_LETTER_COLUMNS, WAS_DEAD_LETTERED, REPLAY))
    parse = params.parser()
    parsed = parse(empty)
    missing = [name for name in params.partition_by if name not in parsed.columns]
    if missing:
        raise WrongUse(f"partition_by names no column of the target: {', '.join(missing)}")
    params.create_dead_letter_table(spark, parsed, empty.columns)
    create_table(spark, params.target, nullable(valid_records(parsed).schema), params.partition_by)

    declared = params.stream("dead_letter", params.source, params.checkpoint, {"target": params.target})
    writer_id = declared.claim(spark)
    cases = None if params.poison_attempts is None else CaseFile(PointedDataset(spark, params.checkpoint))
    writer = BatchWriter(params, parse, writer_id, cases, earlier_accounts(spark, params.target))
    return declared.start(spark, writer), writer


def run(spark: SparkSession, params: Parameters) -> dict[str, Any]:
    """Run the query to its end and report the batches.

    Raises:
        DataRefused: too many bad records.
        JobFailed: a write failed permanently, or Spark ended the query for a reason that a person can fix.
    """
    query, writer = start(spark, params)
    await_end(query, writer, params.source)
    return {
        "read": writer.read,
        "valid": writer.read - writer.dead,
        "dead": writer.dead,
        "bad_share": round(writer.dead / writer.read, 6) if writer.read else 0.0,
        "unreadable_fields": dict(sorted(writer.unreadable_fields.items())),
        "batches": [account.as_dict() for account in writer.accounts],
        "target": {"table": params.target, "version": latest_version(spark, params.target)},
        "dead_letter": {"table": params.dead_letter, "version": latest_version(spark, params.dead_letter)},
    }


if __name__ == "__main__":
    run_job(Parameters, run)
