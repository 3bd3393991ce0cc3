"""Failures of a job, and the checks of its parameters."""

from __future__ import annotations

import math

import pytest

from python_jobs.shared.core.failures import (
    DataRefused,
    JobFailed,
    NotReady,
    WrongUse,
    given,
    present,
    require_above_zero,
    require_at_least,
    root_cause,
)
from python_jobs.shared.core.partial_failures import failure_sentence, require_no_failures


def test_each_kind_has_its_exit_code() -> None:
    kinds = (JobFailed, WrongUse, DataRefused, NotReady)
    assert [kind.exit_code for kind in kinds] == [1, 2, 3, 4]
    assert all(issubclass(kind, JobFailed) for kind in kinds)


def test_what_is_missing_is_named() -> None:
    assert given(0, "rows") == 0
    assert present("", "the offset") == ""
    with pytest.raises(WrongUse, match=r"^rows is missing: what is asked for needs it$"):
        given(None, "rows")
    with pytest.raises(JobFailed, match=r"^the offset is missing, so nothing can be done with the rest$"):
        present(None, "the offset")


def test_a_bound_says_what_is_allowed() -> None:
    require_at_least(0, rows=0, share=None)
    require_above_zero(seconds=0.1)
    for refuse, sentence in [
        (lambda: require_at_least(1, rows=0), "rows must be 1 or more, got 0"),
        (lambda: require_at_least(1, rows=math.nan), "rows must be 1 or more, got nan"),
        (lambda: require_at_least(1, rows=math.inf), "rows must be 1 or more and finite, got inf"),
        (lambda: require_at_least(1, rows=None, files=2, bytes=0), "bytes must be 1 or more, got 0"),
        (lambda: require_above_zero(seconds=0), "seconds must be above 0, got 0"),
        (lambda: require_above_zero(seconds=math.nan), "seconds must be above 0, got nan"),
        (lambda: require_above_zero(seconds=math.inf), "seconds must be above 0 and finite, got inf"),
    ]:
        with pytest.raises(WrongUse, match=f"^{sentence}$"):
            refuse()


class Java(Exception):
    """A Java exception, as Py4J gives it."""

    def __init__(self, text: str, cause: Java | None = None) -> None:
        self._text, self._cause = text, cause

    def getCause(self) -> Java | None:  # noqa: N802
        return self._cause

    def toString(self) -> str:  # noqa: N802
        return self._text


class OfPy4J(Exception):
    """What Py4J raises."""

    def __init__(self, name: str, java: Java) -> None:
        super().__init__("An error occurred while calling o12.save\nat java")
        setattr(self, name, java)


@pytest.mark.parametrize("name", ["java_exception", "_origin"])
def test_the_innermost_java_exception_is_the_cause(name: str) -> None:
    innermost = Java("java.io.IOException: no space left\n\tat java.base")
    assert (
        root_cause(OfPy4J(name, Java("outer", Java("inner", innermost))))
        == "java.io.IOException: no space left"
    )
    assert root_cause(OfPy4J(name, innermost)) == "java.io.IOException: no space left"


def test_another_exception_is_its_own_cause() -> None:
    assert root_cause(ValueError("the first line\nthe second")) == "the first line"


# --- several parts ------------------------------------------------------------------------------------------


def test_a_sentence_of_ours_is_whole_and_another_one_is_cut() -> None:
    assert failure_sentence(NotReady("a" * 400)) == "a" * 400
    assert failure_sentence(ValueError("a" * 400 + "\nb")) == "a" * 300


def test_no_failure_is_no_error() -> None:
    require_no_failures({}, "the others are written")


def test_failed_parts_are_raised_as_one_failure_of_their_kind() -> None:
    refused = {"2024-03-01": DataRefused("a row is wrong"), "2024-03-02": DataRefused("no rows")}
    with pytest.raises(DataRefused) as raised:
        require_no_failures(refused, "the others are written")
    assert str(raised.value) == (
        "2024-03-01 failed: a row is wrong; 2024-03-02 failed: no rows; the others are written"
    )


@pytest.mark.parametrize("other", [NotReady("no file"), ValueError("no number\nat line 1")])
def test_failed_parts_of_several_kinds_are_one_that_failed(other: Exception) -> None:
    with pytest.raises(JobFailed, match=r"^a failed: a row; b failed: no \w+; nothing else$") as raised:
        require_no_failures({"a": DataRefused("a row"), "b": other}, "nothing else")
    assert type(raised.value) is JobFailed


def test_a_fault_of_another_kind_alone_has_failed() -> None:
    with pytest.raises(JobFailed, match=r"^a failed: no number; nothing else$") as raised:
        require_no_failures({"a": ValueError("no number")}, "nothing else")
    assert type(raised.value) is JobFailed
