"""Failures of a job, each with its exit code: 1 failed, 2 wrong use, 3 data refused, 4 not ready."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from python_jobs.shared.core.numbers import is_number

Value = TypeVar("Value")


class JobFailed(Exception):
    """The work could not be done; the message is one sentence for the user."""

    exit_code = 1


class WrongUse(JobFailed):
    """The parameters make no sense; nothing was read or written."""

    exit_code = 2


class DataRefused(JobFailed):
    """The data broke a rule of the user; none of the data was published."""

    exit_code = 3


class NotReady(JobFailed):
    """The input is missing or not complete yet; try again later."""

    exit_code = 4


def given(value: Value | None, name: str) -> Value:
    """Return the value of a parameter that may be left out.

    Raises:
        WrongUse: it was left out.
    """
    if value is None:
        raise WrongUse(f"{name} is missing: what is asked for needs it")
    return value


def present(value: Value | None, what: str) -> Value:
    """Return what another system gave.

    Raises:
        JobFailed: it gave nothing.
    """
    if value is None:
        raise JobFailed(f"{what} is missing, so nothing can be done with the rest")
    return value


def require_at_least(least: int, **numbers: float | None) -> None:
    """Refuse parameters that are below the least value or no finite number, and name the first; None is no value.

    Raises:
        WrongUse: a parameter is below the least value, NaN or infinite.
    """
    for name, value in numbers.items():
        if value is not None and not (is_number(value) and value >= least):
            raise WrongUse(f"{name} must be {_finite(f'{least} or more', value)}, got {value:g}")


def require_above_zero(**numbers: float) -> None:
    """Refuse parameters that are 0, negative or no finite number, and name the first.

    Raises:
        WrongUse: a parameter is not above 0, NaN or infinite.
    """
    for name, value in numbers.items():
        if not (is_number(value) and value > 0):
            raise WrongUse(f"{name} must be {_finite('above 0', value)}, got {value:g}")


def _finite(allowed: str, value: float) -> str:
    return f"{allowed} and finite" if math.isinf(value) else allowed


def java_exception(failure: Exception) -> Any:
    """Return the Java exception behind an error of Py4J or PySpark, None behind an error of Python's."""
    return getattr(failure, "java_exception", None) or getattr(failure, "_origin", None)


def root_cause(failure: Exception) -> str:
    """Return the first line of the innermost Java exception."""
    java = java_exception(failure)
    if java is None:
        return str(failure).splitlines()[0]
    while java.getCause() is not None:
        java = java.getCause()
    return str(java.toString()).splitlines()[0]
