"""Metadata Decorator in an S3 store: the data files of a load get tags with the job's version and its batch.

    python -m python_jobs.data_value.metadata_decorator_s3 --bucket lake --prefix visits/date=2024-03-01 \\
        --job_version v2.5.1 --batch_version 17

The AWS environment holds the access (AWS_ENDPOINT_URL, AWS_SHARED_CREDENTIALS_FILE …); no command line contains it.

A load is the objects below one prefix; keys with a part that begins with ``_`` or ``.`` (``_SUCCESS``, ``_delta_log``)
are no data. Each data file gets the tags ``job_version``, ``batch_version`` and those of ``--metadata.KEY``. Tags with
other keys stay. Tags are no part of an object: its bytes, its ETag and its time of change stay the same.

Guarantee: all objects are read before the first tag is written, so that a load with an object that can't take the tags
is refused as a whole. A run that died is completed by the next one, which writes only tags that differ. Run it after
the load and before the next one: an object that is replaced loses its tags.

Cost: one request for each object to read its tags, one more to write them if they differ.

Source: Data Engineering Design Patterns, chapter 5, Metadata Decorator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import boto3

from python_jobs.data_value.technical_metadata import require_metadata
from python_jobs.shared.core.command_line import run_program
from python_jobs.shared.core.failures import DataRefused, NotReady, WrongUse, require_at_least
from python_jobs.shared.files.object_stores import answers, keys_below

# S3's limits.
MOST_TAGS = 10
MOST_VALUE_CHARACTERS = 256
_VALUE = re.compile(r"[\w\s+\-=.:/@]*")


@dataclass(frozen=True)
class Parameters:
    """Tag the data files of a load with the version of the job and its batch."""

    bucket: str
    """Bucket of the load."""
    prefix: str
    """Prefix of the load's keys, without a slash at its end."""
    job_version: str
    """Version of the job's code, up to 15 characters."""
    batch_version: int
    """Version of the batch, from 0."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Further tags, --metadata.KEY VALUE: commit_id, environment, job_name, run_id, triggered_by."""

    def __post_init__(self) -> None:
        require_metadata(self.job_version, self.metadata)
        require_at_least(0, batch_version=self.batch_version)
        if not self.prefix.strip("/") or self.prefix != self.prefix.strip("/"):
            raise WrongUse(f"prefix is that of a load, such as visits/date=2024-03-01, got '{self.prefix}'")
        for key, value in self.tags().items():
            if len(value) > MOST_VALUE_CHARACTERS or not _VALUE.fullmatch(value):
                raise WrongUse(
                    f"the tag {key} must have at most {MOST_VALUE_CHARACTERS} letters, digits, spaces and + - = . _ : "
                    f"/ @, got {value!r}"
                )

    def tags(self) -> dict[str, str]:
        """Return the tags of the load's files."""
        return {
            "job_version": self.job_version,
            "batch_version": str(self.batch_version),
            **self.metadata,
        }


def run(params: Parameters, connect: Callable[[], Any] = lambda: boto3.client("s3")) -> dict[str, Any]:
    """Tag the load's files and return the numbers of files and of those whose tags changed.

    Raises:
        NotReady: the load has no data file.
        DataRefused: an object would have more than 10 tags, or the store denies a request.
        JobFailed: the store can't be reached.
    """
    client = connect()
    with answers():
        files = data_files(client, params)
        changed = {key: tags for key in files if (tags := _new_tags(client, params, key)) is not None}
        for key, tags in changed.items():
            tag_set = [{"Key": name, "Value": value} for name, value in tags.items()]
            client.put_object_tagging(Bucket=params.bucket, Key=key, Tagging={"TagSet": tag_set})
    return {"bucket": params.bucket, "prefix": params.prefix, "files": len(files), "tagged": len(changed)}


def data_files(client: Any, params: Parameters) -> list[str]:
    """Return the keys of the load's data files.

    Raises:
        NotReady: there is none.
    """
    folder = f"{params.prefix}/"
    found = [
        key
        for key in keys_below(client, params.bucket, folder)
        if not key.endswith("/") and not re.search(r"(^|/)[._]", key.removeprefix(folder))
    ]
    if not found:
        raise NotReady(f"{params.bucket} has no data file below {folder}; nothing was tagged")
    return found


def _new_tags(client: Any, params: Parameters, key: str) -> Mapping[str, str] | None:
    """Return all tags that an object is to have; None if it has them."""
    stored = client.get_object_tagging(Bucket=params.bucket, Key=key)["TagSet"]
    present = {tag["Key"]: tag["Value"] for tag in stored}
    wanted = present | params.tags()
    if len(wanted) > MOST_TAGS:
        raise DataRefused(
            f"{key} would have {len(wanted)} tags, and S3 allows {MOST_TAGS}; no file was tagged: remove tags of it, "
            "or pass less metadata"
        )
    return None if wanted == present else wanted


if __name__ == "__main__":
    run_program(Parameters, run)
