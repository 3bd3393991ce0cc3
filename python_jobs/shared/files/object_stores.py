"""Objects of an S3 store: the keys below a prefix, and one sentence for what the store refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from python_jobs.shared.core.failures import DataRefused, JobFailed
from python_jobs.shared.core.retry import Failure, classify_status

# S3 says 400 and 409 of these, but the same request may succeed later.
_PASSING = {"ConditionalRequestConflict", "OperationAborted", "RequestTimeout"}


def keys_below(client: Any, bucket: str, prefix: str) -> list[str]:
    """Return the keys that begin with a prefix."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [found["Key"] for page in pages for found in page.get("Contents", [])]


@contextmanager
def answers() -> Iterator[None]:
    """Turn the store's errors in the block into one sentence.

    Raises:
        DataRefused: the store refuses a request that it would refuse again.
        JobFailed: the store can't be reached, or may take the same request later.
    """
    try:
        yield
    except ClientError as failure:
        error = failure.response["Error"]
        reason = f"{error.get('Code')}, {error.get('Message')}"
        if _is_final(failure):
            raise DataRefused(f"the store refuses it: {reason}") from None
        raise JobFailed(f"the store can't do it now: {reason}; run again") from None
    except (BotoCoreError, ResponseParserError) as failure:
        raise JobFailed(f"the store can't be reached: {failure}; run again") from None


def _is_final(failure: ClientError) -> bool:
    if failure.response["Error"].get("Code") in _PASSING:
        return False
    status = failure.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status is not None and classify_status(status) is Failure.PERMANENT
