"""The contract every job keeps: command line, report, exit code.

A job module holds a frozen dataclass of parameters and one ``run(spark, parameters)``; its last lines are::

    if __name__ == "__main__":
        run_job(Parameters, run)

``run_job`` turns the dataclass into the command line (``--config FILE.yml`` and ``--report PATH`` included),
starts Spark, calls ``run`` and prints what it returns as one JSON object, the last line of standard output.
Exit codes: 0 done, 1 failed, 2 wrong use, 3 data refused, 4 not ready.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from python_jobs.session import spark_session

Parameters = TypeVar("Parameters")
Report = Mapping[str, Any]

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class JobFailed(Exception):
    """The work could not be done; the message is one sentence for a person."""

    exit_code = 1


class WrongUse(JobFailed):
    """The parameters make no sense; nothing was read or written."""

    exit_code = 2


class DataRefused(JobFailed):
    """The data broke a rule the user set; nothing of it was published."""

    exit_code = 3


class NotReady(JobFailed):
    """The input is not there or not complete yet; try again later."""

    exit_code = 4


def parse_parameters(
    parameters_class: type[Parameters], argv: Sequence[str] | None
) -> tuple[Parameters, str | None]:
    """Read the command line into ``parameters_class``; return it with the path of ``--report``, if given."""
    parser = ArgumentParser(prog=Path(sys.argv[0]).name, description=parameters_class.__doc__)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with the parameters below.")
    parser.add_argument("--report", type=str | None, help="Also write the JSON report to this file.")
    parser.add_class_arguments(parameters_class, as_group=False)
    _name_keyword_options(parser)
    namespace = parser.parse_args(argv)
    report_path = namespace.pop("report")
    namespace.pop("config")
    return _construct(parser, parameters_class, namespace), report_path


def _name_keyword_options(parser: ArgumentParser) -> None:
    """Show a field such as ``from_``, whose plain name is a Python keyword, as ``--from``."""
    for action in parser._actions:
        if action.dest.endswith("_"):
            plain = action.dest.removesuffix("_")
            action.option_strings, action.metavar = [f"--{plain}"], plain.upper()
            parser._option_string_actions[f"--{plain}"] = parser._option_string_actions.pop(
                f"--{action.dest}"
            )


def _construct(
    parser: ArgumentParser, parameters_class: type[Parameters], namespace: Namespace
) -> Parameters:
    instantiated = parser.instantiate_classes(namespace)
    return parameters_class(**instantiated.as_dict())


def require_at_least(least: int, **numbers: float | None) -> None:
    """Refuse parameters below a least value, by name; None is no value.

    Raises:
        WrongUse: one is below it.
    """
    for name, value in numbers.items():
        if value is not None and value < least:
            raise WrongUse(f"{name} must be {least} or more, got {value:g}")


def run_job(
    parameters_class: type[Parameters],
    run: Callable[[SparkSession, Parameters], Report],
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Run one job as a process: parse, start Spark, run, report, exit with the contract's code.

    A known failure prints one sentence on standard error. Anything else keeps its stack trace: it is a
    fault of ours and the trace is what we need.
    """

    def run_on_spark(parameters: Parameters) -> Report:
        spark = spark_session(Path(sys.argv[0]).stem)
        try:
            return run(spark, parameters)
        except (PySparkException, Py4JJavaError) as failure:
            sentence = known_failure(failure)
            if sentence is None:
                raise
            raise JobFailed(sentence) from failure

    run_program(parameters_class, run_on_spark, argv)


def run_program(
    parameters_class: type[Parameters],
    run: Callable[[Parameters], Report],
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Run what needs no Spark under the same contract: command line, report, exit code."""
    try:
        parameters, report_path = parse_parameters(parameters_class, argv)
        report = run(parameters)
    except JobFailed as failure:
        print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)
    line = json.dumps(report, default=str, ensure_ascii=False)
    if report_path:
        Path(report_path).write_text(line + "\n", encoding="utf-8")
    print(line)
    sys.exit(0)


# What a user can mend, by what Spark says of it; everything else is shown whole.
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
    """Return one sentence for a failure that the user can mend, or None for any other."""
    text = str(failure)
    for sign, sentence in _KNOWN_FAILURES.items():
        if sign in text:
            detail = next(line for line in text.splitlines() if sign in line).strip()
            return f"{sentence} ({detail[:300]})"
    return None


def unreadable_file(failure: Exception) -> str | None:
    """Return which file could not be read and why, or None if that is not what failed."""
    named = re.search(r"\[FAILED_READ_FILE\S* .*? reading file (.+?)\.? +SQLSTATE", str(failure))
    return f"cannot read {named[1]} ({root_cause(failure)})" if named else None


@contextmanager
def unreadable_files_refused(consequence: str) -> Iterator[None]:
    """Say which file can't be read, and what became of the run; any other failure keeps its trace.

    Raises:
        DataRefused: a record doesn't fit the schema.
        JobFailed: the file itself can't be read.
    """
    try:
        yield
    except (PySparkException, Py4JJavaError) as failure:
        unreadable = unreadable_file(failure)
        if unreadable is None:
            raise
        kind = DataRefused if "MALFORMED" in str(failure) or "CSV" in str(failure) else JobFailed
        raise kind(f"{unreadable}; {consequence}") from failure


def root_cause(failure: Exception) -> str:
    """Return the first line of the innermost Java exception."""
    java = getattr(failure, "java_exception", None) or getattr(failure, "_origin", None)
    if java is None:
        return str(failure).splitlines()[0]
    while java.getCause() is not None:
        java = java.getCause()
    return str(java.toString()).splitlines()[0]
