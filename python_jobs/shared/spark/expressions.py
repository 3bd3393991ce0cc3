"""SQL expressions that a user gives to a job: what Spark says of one that it can't resolve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.errors import AnalysisException, ParseException

from python_jobs.shared.core.failures import WrongUse


@contextmanager
def resolved(what: str = "an expression") -> Iterator[None]:
    """Raise an expression in the block that Spark can't resolve, or can't read as SQL, as one sentence.

    Raises:
        WrongUse: there is one; ``what`` begins the sentence.
    """
    try:
        yield
    except (AnalysisException, ParseException) as failure:
        raise WrongUse(f"{what} can't be resolved: {first_line(failure)}") from None


def first_line(failure: Exception) -> str:
    """Return the first line of Spark's message, up to 300 characters."""
    return str(failure).strip().splitlines()[0][:300]
