"""Writes which errors the tests failed with (`--failures FILE`), and judges whether such an error notices a defect.

A failed assertion and an error that our code raises on purpose notice a defect. A name that does not exist, a wrong
number of arguments or a trace from the JVM's bridge say only that the mutated code can't run.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

BROKEN_CODE = {
    "NameError", "UnboundLocalError", "TypeError", "ImportError", "ModuleNotFoundError", "AttributeError",
    "SyntaxError", "IndentationError", "KeyError", "IndexError", "RecursionError", "UndefinedError",
    "TemplateSyntaxError", "Py4JError", "Py4JJavaError", "Py4JNetworkError", "ParseException",
}  # fmt: skip
# In a text that an assertion, Spark or dbt passes on: the last line of a program's trace, and Jinja's and Spark's own.
BROKEN_TEXT = re.compile(
    r"^(?:E +)?(?:\w+\.)*(?:NameError|UnboundLocalError|TypeError|ImportError|AttributeError): "
    r"|'[\w.]+' is undefined$|\[PARSE_SYNTAX_ERROR\]",
    re.MULTILINE,
)


@dataclass(frozen=True)
class FailureKind:
    """The error that a test failed with."""

    test: str
    error: str
    """Name of the exception's class."""
    message: str

    @property
    def notices(self) -> bool:
        """Whether the error says that the behaviour is wrong, and not that the code can't run."""
        return self.error not in BROKEN_CODE and not BROKEN_TEXT.search(self.message)


def read_failures(file: Path) -> list[FailureKind]:
    """Return what a run has written; no file is no failure."""
    return [FailureKind(**entry) for entry in json.loads(file.read_text())] if file.is_file() else []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--failures", type=Path, help="write the errors of failed tests to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Collect the errors of this run."""
    if config.getoption("failures"):
        config.pluginmanager.register(_Failures(config.getoption("failures")))


class _Failures:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: list[FailureKind] = []

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        error = call.excinfo.value
        self._found.append(FailureKind(node.nodeid, type(error).__name__, str(error)[:20_000]))

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps([asdict(failure) for failure in self._found]), encoding="utf-8")
