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
    root_cause,
)
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

    Returns its exit code and its report as one line of JSON, None if it failed. Of a known failure, its sentence is
    printed on standard error; any other is raised.
    """

    def run_on_spark(parameters: Parameters) -> Report:
        spark = session()
        try:
            return run(spark, parameters)
        except (PySparkException, Py4JJavaError, OSError) as failure:
            sentence = known_failure(failure)
            if sentence is None:
                raise
            raise JobFailed(sentence) from failure

    return program_outcome(parameters_class, run_on_spark, argv)


# Failures that a user can fix, by a part of Spark's message; all other failures keep their trace.
_KNOWN_FAILURES = {
    "java.nio.file.AccessDeniedException": "permission denied",
    "org.apache.hadoop.security.AccessControlException": "permission denied",
    "Permission denied": "permission denied",
    "Mkdirs failed to create": "permission denied",
    "DELTA_CANNOT_CREATE_LOG_PATH": "permission denied",
    "No space left on device": "no space left on the device",
    "DELTA_FAILED_TO_MERGE_FIELDS": "the target table has another schema",
    "DELTA_SCHEMA_MISMATCH": "the target table has another schema",
    "DELTA_METADATA_MISMATCH": "the target table has another schema",
    "DELTA_PROTOCOL_CHANGED": "another writer committed to the same table; run again",
    "DELTA_METADATA_CHANGED": "another writer committed to the same table; run again",
    "DELTA_CONCURRENT": "another writer committed to the same table; run again",
}


def known_failure(failure: Exception) -> str | None:
    """Return one sentence for a failure that the user can fix, or None for any other failure."""
    text = str(failure)
    for sign, sentence in _KNOWN_FAILURES.items():
        if sign in text:
            detail = next(line for line in text.splitlines() if sign in line).strip()
            return f"{sentence} ({detail[:300]})"
    return None


RECORD_REFUSED = "record refused: "
"""What the message of ``raise_error`` starts with where a query meets a record that may not pass."""


def unreadable_file(failure: Exception) -> str | None:
    """Return which file or record could not be read and why, or None if the failure has another cause."""
    refused = re.search(rf"\] {RECORD_REFUSED}([\s\S]+?) SQLSTATE", str(failure))
    if refused is not None:
        return " ".join(refused[1].split())
    named = re.search(
        r"\[FAILED_READ_FILE\S* .*? reading file (.+?)\.?(?: File does not exist\.[\s\S]*?)? +SQLSTATE",
        str(failure),
    )
    if named and "CSV header does not conform" in str(failure):
        return (
            f"cannot read {named[1]}: its header line isn't that of the other files; all must begin with the same "
            "line, its line end included"
        )
    return f"cannot read {named[1]} ({root_cause(failure)})" if named else None


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
        signs = ("MALFORMED", "CSV", RECORD_REFUSED)
        kind = DataRefused if any(sign in str(failure) for sign in signs) else JobFailed
        raise kind(f"{unreadable}; {consequence}") from failure
