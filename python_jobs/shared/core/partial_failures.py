"""Failures of single parts of a run (dates, chunks) that don't stop the others, and are raised at its end."""

from __future__ import annotations

from collections.abc import Mapping

from python_jobs.shared.core.failures import JobFailed, root_cause


def failure_sentence(failure: Exception) -> str:
    """Return one sentence of why a part failed, whoever raised it."""
    return str(failure) if isinstance(failure, JobFailed) else root_cause(failure)[:300]


def require_no_failures(failures: Mapping[str, Exception], outcome: str) -> None:
    """Raise what failed, if anything.

    Args:
        failures: by the name of the part.
        outcome: what was done all the same, the end of the sentence.

    Raises:
        JobFailed: of the failures' own kind if they agree.
    """
    if not failures:
        return
    reasons = "; ".join(f"{part} failed: {failure_sentence(failure)}" for part, failure in failures.items())
    kinds = {type(failure) for failure in failures.values()}
    kind = kinds.pop() if len(kinds) == 1 else JobFailed
    raise (kind if issubclass(kind, JobFailed) else JobFailed)(f"{reasons}; {outcome}")
