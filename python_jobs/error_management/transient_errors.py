"""Which failures of a write recover by themselves, and the retry they get.

A transient error (storage or network for a moment away, a concurrent commit) is retried for the whole
batch: never record by record, which would stall the partition, and never dead-lettered, because the record
isn't at fault. Any other error is permanent and raised at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from tenacity import Retrying, before_sleep_log, retry_if_exception, stop_after_attempt, wait_exponential

Result = TypeVar("Result")

_LOG = logging.getLogger(__name__)

_PERMANENT = (
    "AccessControlException",
    "AccessDeniedException",
    "FileNotFoundException",
    "Permission denied",
    "Mkdirs failed to create",
    "No space left on device",
)
_TRANSIENT = ("DELTA_CONCURRENT", "java.io.IOException", "java.net.", "java.util.concurrent.TimeoutException")


def is_transient(error: BaseException) -> bool:
    """Return whether a retry of the same write may succeed."""
    if isinstance(error, PermissionError | FileNotFoundError):
        return False
    if isinstance(error, OSError | TimeoutError):
        return True
    text = str(error)
    return any(sign in text for sign in _TRANSIENT) and not any(sign in text for sign in _PERMANENT)


def retried(write: Callable[[], Result], attempts: int) -> Result:
    """Return ``write()``, tried up to ``attempts`` times with pauses of 1, 2, 4… seconds between them.

    ``write`` must be idempotent. The last error is raised as it is.
    """
    retrying = Retrying(
        retry=retry_if_exception(is_transient),
        stop=stop_after_attempt(attempts),
        wait=wait_exponential(multiplier=1, max=60),
        before_sleep=before_sleep_log(_LOG, logging.WARNING),
        reraise=True,
    )
    return retrying(write)
