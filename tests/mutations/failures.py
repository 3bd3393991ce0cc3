"""Writes the errors that tests failed with (`--failures FILE`), and why each counts as notice of a defect.

An error counts only if it is one of these:

- a failed assertion (`AssertionError`, `DID NOT RAISE`, a failed dbt test);
- an error of a class of ours, or one that our code raises with a `raise` statement;
- dbt's error with a sentence of our macros;
- an error of Spark with a condition, or of another store, about a query that our code sent.

Everything else (a name that does not exist, a wrong number of arguments, a trace from the JVM's bridge, SQL that can't
be parsed) says only that the mutated code can't run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

OUR_PACKAGES = {"python_jobs", "case_study", "tools"}
STORES = {"psycopg", "confluent_kafka", "cimpl", "botocore"}
"""Packages of clients whose errors count if our code sent the query; `cimpl` is confluent_kafka's."""
# In a text that an assertion, Spark or dbt passes on: the last line of a program's trace, and Jinja's and Spark's own.
UNPARSABLE = "[PARSE_SYNTAX_ERROR]"
BROKEN_TEXT = re.compile(
    r"^(?:E +)?(?:\w+\.)*(?:NameError|UnboundLocalError|TypeError|ImportError|AttributeError): "
    r"|'[\w.]+' is undefined(?:\.|$)|\[PARSE_SYNTAX_ERROR\]",
    re.MULTILINE,
)
_CONDITION = re.compile(r"\[([A-Z][A-Z0-9_]+(?:\.[A-Z0-9_]+)*)\]")
_FAILED_DBT_TEST = re.compile(r"Got \d+ results?, configured to fail")
_NO_SUCH_QUERY = "42"
"""Class of SQLSTATE: PostgreSQL can't parse the query, or finds no such name."""


@dataclass(frozen=True)
class Frame:
    """One place that an error passed: the file and the statement."""

    file: str
    """The path from the repository's root; an absolute one outside of the repository."""
    statement: str

    @property
    def is_ours(self) -> bool:
        """Whether the statement is production code, or dbt's, which runs our macros."""
        return self.file.split("/")[0] in OUR_PACKAGES or "/site-packages/dbt/" in self.file


@dataclass(frozen=True)
class FailureKind:
    """The error that a test failed with."""

    test: str
    error: str
    """Name of the exception's class."""
    message: str
    counts_as: str
    """Why the error says that the behaviour is wrong; empty if it says only that the code can't run."""

    def reason(self, *, unparsable: bool) -> str:
        """Return why the error counts; ``unparsable`` if SQL that can't be parsed counts, too."""
        is_syntax = unparsable and UNPARSABLE in self.message
        return self.counts_as or ("SQL that can't be parsed" if is_syntax else "")


def counts_as(error: BaseException, frames: Sequence[Frame], *, renders: bool = False) -> str:
    """Return why an error is notice of a defect, or an empty text if it is none.

    Args:
        error: the error that ended the test.
        frames: places that the error passed, the innermost last.
        renders: whether the test itself runs the SQL of our macros.
    """
    text, package = str(error), type(error).__module__.split(".")[0]
    if BROKEN_TEXT.search(text):
        return ""
    if type(error).__name__ == "DbtFailed" or package in {"dbt", "dbt_common"}:
        return _dbt_counts_as(text)
    if isinstance(error, AssertionError):
        return "a failed assertion"
    if isinstance(error, pytest.fail.Exception):
        is_said = text.startswith("DID NOT ") or any("pytest.fail(" in frame.statement for frame in frames)
        return "a failed assertion" if is_said else ""
    if package in OUR_PACKAGES or _is_raised_by_us(error, frames):
        return "an error of ours"
    sent_by_us = renders or any(frame.is_ours for frame in frames)
    condition = getattr(error, "getCondition", lambda: None)()
    if condition is not None and (sent_by_us or type(error).__name__ != "AnalysisException"):
        # An error of execution may come late, when the test collects the rows of a query that our code planned.
        return f"Spark's {condition}"
    if (
        package in STORES
        and sent_by_us
        and not (getattr(error, "sqlstate", None) or "").startswith(_NO_SUCH_QUERY)
    ):
        return f"an error of {package}"
    return ""


def _dbt_counts_as(text: str) -> str:
    if "lakehouse_patterns: " in text:
        return "a sentence of our macros"
    if _FAILED_DBT_TEST.search(text):
        return "a failed dbt test"
    condition = _CONDITION.search(text)
    return f"Spark's {condition[1]}" if condition else ""


def _is_raised_by_us(error: BaseException, frames: Sequence[Frame]) -> bool:
    """Return whether a `raise` statement of the repository names the error's class."""
    if not frames or frames[-1].file.startswith("/"):
        return False
    raised = re.match(r"raise\s+(?:\w+\.)*(\w+)", frames[-1].statement.strip())
    return raised is not None and raised[1] == type(error).__name__


def read_failures(file: Path) -> list[FailureKind]:
    """Return what a run has written; no file is no failure."""
    return [FailureKind(**entry) for entry in json.loads(file.read_text())] if file.is_file() else []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--failures", type=Path, help="write the errors of failed tests to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Collect the errors of this run."""
    if config.getoption("failures"):
        config.pluginmanager.register(_Failures(config.getoption("failures"), config.rootpath))


class _Failures:
    def __init__(self, file: Path, root: Path) -> None:
        self._file, self._root = file, root
        self._found: list[FailureKind] = []

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        error = call.excinfo.value
        frames = [self._frame(entry) for entry in call.excinfo.traceback]
        why = counts_as(error, frames, renders="render" in getattr(node, "fixturenames", []))
        self._found.append(FailureKind(node.nodeid, type(error).__name__, str(error)[:20_000], why))

    def _frame(self, entry: Any) -> Frame:
        path = Path(entry.path)
        file = path.relative_to(self._root) if path.is_relative_to(self._root) else path
        return Frame(file.as_posix(), str(entry.statement))

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps([asdict(failure) for failure in self._found]), encoding="utf-8")
