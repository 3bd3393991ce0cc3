"""Failures of single parts of a run (dates, chunks): they don't stop other parts and are raised at the run's end."""

from __future__ import annotations

from collections.abc import Mapping

from python_jobs.shared.core.failures import JobFailed, root_cause


def failure_sentence(failure: Exception) -> str:
    """Return in one sentence why a part failed, for any exception."""
    return str(failure) if isinstance(failure, JobFailed) else root_cause(failure)[:300]


def require_no_failures(failures: Mapping[str, Exception], outcome: str) -> None:
    """Raise one error for all failed parts, if there are any.

    Args:
        failures: the exception of each failed part, by the part's name.
        outcome: the end of the sentence: which work was done despite the failures.

    Raises:
        JobFailed: a part failed. If all failures have one class of JobFailed, the error has this class.
    """
    if not failures:
        return
    reasons = "; ".join(f"{part} failed: {failure_sentence(failure)}" for part, failure in failures.items())
    kinds = {type(failure) for failure in failures.values()}
    kind = kinds.pop() if len(kinds) == 1 else JobFailed
    raise (kind if issubclass(kind, JobFailed) else JobFailed)(f"{reasons}; {outcome}")
