"""Objects of an S3 store: the keys below a prefix, and one sentence for what the store refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from python_jobs.shared.core.failures import DataRefused, JobFailed


def keys_below(client: Any, bucket: str, prefix: str) -> list[str]:
    """Return the keys that begin with a prefix."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [found["Key"] for page in pages for found in page.get("Contents", [])]


@contextmanager
def answers() -> Iterator[None]:
    """Turn the store's errors in the block into one sentence.

    Raises:
        DataRefused: the store denies a request.
        JobFailed: the store can't be reached.
    """
    try:
        yield
    except ClientError as failure:
        error = failure.response["Error"]
        raise DataRefused(f"the store refuses it: {error['Code']}, {error['Message']}") from None
    except BotoCoreError as failure:
        raise JobFailed(f"the store can't be reached: {failure}; run again") from None
