"""Metadata of a load: the keys that it may have, and what their values must be.

Metadata describes how data was made and is no part of the data. Consumers don't look for a business attribute there, so
the list of keys is closed. ``macros/data_value/metadata_decorator.sql`` has the same rules.

Source: Data Engineering Design Patterns, chapter 5, Metadata Decorator.
"""

from __future__ import annotations

from collections.abc import Mapping

from python_jobs.shared.core.failures import WrongUse

METADATA_KEYS = ("commit_id", "environment", "job_name", "run_id", "triggered_by")
"""Keys that a job's caller may add to the version and the batch."""
MOST_VERSION_CHARACTERS = 15


def require_metadata(job_version: str, metadata: Mapping[str, str]) -> None:
    """Refuse a version that is missing or too long, and keys that aren't metadata.

    Args:
        job_version: version of the job's code.
        metadata: further values by key.

    Raises:
        WrongUse: the version isn't 1 to 15 characters, a key isn't permitted, or a value is empty.
    """
    if not job_version or job_version.isspace() or len(job_version) > MOST_VERSION_CHARACTERS:
        raise WrongUse(
            f"job_version must be a text of 1 to {MOST_VERSION_CHARACTERS} characters, got {job_version!r}"
        )
    for key, value in metadata.items():
        if key not in METADATA_KEYS:
            raise WrongUse(
                f"metadata has no key '{key}'; allowed: {', '.join(METADATA_KEYS)}. A business attribute belongs in "
                "the record or in an envelope around it (Wrapper)"
            )
        if not value:
            raise WrongUse(f"metadata.{key} must be a text that isn't empty, got {value!r}")
