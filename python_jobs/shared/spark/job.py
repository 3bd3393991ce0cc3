"""The contract of every job: command line, report and exit code.

A job module has a frozen dataclass of parameters and one function ``run(spark, parameters)``. Its last lines are::

    if __name__ == "__main__":
        run_job(Parameters, run)

``run_job`` makes a command line from the dataclass, with ``--config FILE.yml`` and ``--report PATH``. It starts Spark
in UTC, calls ``run`` and prints the returned report as one JSON object, the last line of standard output. Exit codes:
0 done, 1 failed, 2 wrong use, 3 data refused, 4 not ready.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from python_jobs.shared.core.command_line import (
    Parameters,
    Report,
    end,
    program_outcome,
)
from python_jobs.shared.core.failures import (
    DataRefused,
    JobFailed,
    WrongUse,
    root_cause,
)
from python_jobs.shared.spark.queries import failure_of_users_sql
from python_jobs.shared.spark.session import spark_session


def run_job(
    parameters_class: type[Parameters],
    run: Callable[[SparkSession, Parameters], Report],
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Run one job as a process: parse the command line, start Spark, run, print the report, exit with its code.

    A known failure prints one sentence on standard error. Any other failure is a fault of this package and keeps its
    stack trace, because we need the trace to find the fault.
    """

    end(*job_outcome(lambda: spark_session(Path(sys.argv[0]).stem), parameters_class, run, argv))


def job_outcome(
    session: Callable[[], SparkSession],
    parameters_class: type[Parameters],
    run: Callable[[SparkSession, Parameters], Report],
    argv: Sequence[str] | None = None,
) -> tuple[int, str | None]:
    """Run one job in the session that ``session`` gives, after its command line is read.

    Returns its exit code and its report as one line of JSON, None if it failed. The sentence of a known failure is
    printed on standard error; any other failure is raised.
    """

    def run_on_spark(parameters: Parameters) -> Report:
        spark = session()
        try:
            return run(spark, parameters)
        except (PySparkException, Py4JJavaError, OSError) as failure:
            known = None if isinstance(failure, JobFailed) else known_failure(failure, parameters)
            if known is None:
                raise
            raise known from failure

    return program_outcome(parameters_class, run_on_spark, argv)


_DENIED = (JobFailed, "permission denied")
_OTHER_SCHEMA = (JobFailed, "the target table has another schema")
_CONFLICT = (JobFailed, "another writer committed to the same table; run again")
_NO_COLUMNS = (WrongUse, "there is no column that a Delta table can hold")
_UNREAD_PARQUET = (DataRefused, "the Parquet files hold what Spark doesn't read as one table")
# Failures that a user can fix, by a part of Spark's message; all other failures keep their trace.
_KNOWN_FAILURES: dict[str, tuple[type[JobFailed], str]] = {
    "java.nio.file.AccessDeniedException": _DENIED,
    "org.apache.hadoop.security.AccessControlException": _DENIED,
    "Permission denied": _DENIED,
    "Mkdirs failed to create": _DENIED,
    "DELTA_CANNOT_CREATE_LOG_PATH": _DENIED,
    "No space left on device": (JobFailed, "no space left on the device"),
    "DELTA_FAILED_TO_MERGE_FIELDS": _OTHER_SCHEMA,
    "DELTA_SCHEMA_MISMATCH": _OTHER_SCHEMA,
    "DELTA_METADATA_MISMATCH": _OTHER_SCHEMA,
    "DELTA_PROTOCOL_CHANGED": _CONFLICT,
    "DELTA_METADATA_CHANGED": _CONFLICT,
    "DELTA_CONCURRENT": _CONFLICT,
    "DELTA_INVALID_CHARACTER": (WrongUse, "a Delta table takes no column of this name; name it otherwise"),
    "DELTA_DUPLICATE_COLUMNS_FOUND": (WrongUse, "two columns of a table must differ in more than case"),
    "COLUMN_ALREADY_EXISTS": (DataRefused, "two columns must differ in more than case"),
    "DELTA_EMPTY_DATA": _NO_COLUMNS,
    "DELTA_CANNOT_WRITE_EMPTY_SCHEMA": _NO_COLUMNS,
    "UNSUPPORTED_DATA_TYPE_FOR_DATASOURCE": (WrongUse, "the target can't hold a column of this type"),
    "SCHEMA_NOT_FOUND": (WrongUse, "the schema of a table's name doesn't exist; create it"),
    "MISSING_GROUP_BY": (WrongUse, "an expression over one row can't aggregate"),
    "CANNOT_MERGE_SCHEMAS": _UNREAD_PARQUET,
    "PARQUET_TYPE": _UNREAD_PARQUET,
    "UNSUPPORTED_TIME_TYPE": _UNREAD_PARQUET,
}


def known_failure(failure: Exception, parameters: object = None) -> JobFailed | None:
    """Return a failure that the user can fix as one sentence with its exit code; None for any other failure.

    ``parameters`` hold the SQL of the user (:func:`python_jobs.shared.spark.queries.failure_of_users_sql`).
    """
    if (unreadable := unreadable_file(failure)) is not None:
        return _kind_of_unreadable(failure)(unreadable)
    if (wrong := failure_of_users_sql(failure, parameters)) is not None:
        return wrong
    text = str(failure)
    for sign, (kind, sentence) in _KNOWN_FAILURES.items():
        if sign in text:
            line_start = text.rfind("\n", 0, text.index(sign)) + 1
            message = re.split(r"\n\s*at ", text[line_start:])[0]  # without Java's trace
            return kind(f"{sentence} ({' '.join(message.split())[:300]})")
    return None


RECORD_REFUSED = "record refused: "
"""Start of the message of ``raise_error`` when a query meets a refused record."""


def unreadable_file(failure: Exception) -> str | None:
    """Return which file or record could not be read and why, or None if the failure has another cause."""
    refused = re.search(rf"\] {RECORD_REFUSED}([\s\S]+?) SQLSTATE", str(failure))
    if refused is not None:
        return " ".join(refused[1].split())
    named = re.search(
        r"\[FAILED_READ_FILE\S* .*? reading file (.+?)\.?"
        r"(?: (?:File does not exist|Could not read footer)\.[\s\S]*?)? +SQLSTATE",
        str(failure),
    )
    return f"cannot read {named[1]} ({root_cause(failure)})" if named else None


def _kind_of_unreadable(failure: Exception) -> type[JobFailed]:
    is_refused = any(sign in str(failure) for sign in ("MALFORMED", RECORD_REFUSED))
    return DataRefused if is_refused else JobFailed


@contextmanager
def unreadable_files_refused(consequence: str) -> Iterator[None]:
    """Raise an unreadable file in the block as one sentence: the file, the cause and ``consequence`` for the run.

    Any other failure keeps its trace.

    Raises:
        DataRefused: a record of the file doesn't fit the schema.
        JobFailed: the file can't be read for another reason.
    """
    try:
        yield
    except (PySparkException, Py4JJavaError) as failure:
        unreadable = unreadable_file(failure)
        if unreadable is None:
            raise
        raise _kind_of_unreadable(failure)(f"{unreadable}; {consequence}") from failure
