"""Proxy in an S3 store: the files of each load are locked, and one manifest names the files that readers use.

    python -m python_jobs.idempotency.proxy_s3 --source out/devices --bucket archive \\
        --dataset devices --retain_days 3650

The AWS environment holds the access (AWS_ENDPOINT_URL, AWS_SHARED_CREDENTIALS_FILE …); no command line contains it.

- ``load`` copies a folder's files to ``<dataset>/_versions/<yyyymmdd_hhmmss>/``, named after the run's start, under S3
  Object Lock in compliance mode: nobody, not even root, can delete them for ``--retain_days`` days. A later object
  under the same key is another object version and hides nothing, because the manifest names object versions. The
  version's manifest, ``<dataset>/_manifests/<version>.json``, is written last and is locked, too. Files are streamed,
  and files above 64 MiB are sent in parts. A key is written only if it doesn't exist.
- ``expose`` copies a version's manifest to ``<dataset>/_current.json``, one object that is replaced as a whole. It
  takes the newest version, or ``--version`` to go back. It can be retried alone.

Guarantee: a load that died has no manifest and is no version. Readers (:func:`resolve`) see the previous version or the
new one, and get an error if a listed object is missing.

Cost: the store keeps every load until its lock ends, even if the load is no longer needed.

Source: Data Engineering Design Patterns, chapter 4, Proxy.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import boto3
from botocore.exceptions import BotoCoreError, ClientError
from s3transfer.utils import ReadFileChunk

from python_jobs.shared.core.clock import utc_now
from python_jobs.shared.core.command_line import run_program
from python_jobs.shared.core.failures import (
    JobFailed,
    NotReady,
    WrongUse,
    given,
    require_at_least,
)
from python_jobs.shared.core.intervals import duration, moved, parse_time
from python_jobs.shared.files.manifests import (
    ListedFile,
    Manifest,
    newest_or,
    require_version,
    taken,
    version_of,
)
from python_jobs.shared.files.object_stores import answers, keys_below

PART_BYTES = 64 << 20
"""Size of a part in bytes; a file of one part is sent in one request."""
_MOST_PARTS = 10_000  # S3's limit
_ALREADY_EXISTS = ("PreconditionFailed", "ConditionalRequestConflict")


@dataclass(frozen=True)
class Parameters:
    """Copy a folder's files to an S3 store under a lock, and expose them to readers."""

    bucket: str
    """Bucket that was created with Object Lock."""
    dataset: str
    """Prefix of the dataset's keys, without a slash at its end."""
    source: str | None = None
    """Local folder with the whole dataset; not for step expose."""
    retain_days: int = 3650
    """Number of days for which the objects can't be deleted."""
    step: Literal["load_and_expose", "load", "expose"] = "load_and_expose"
    """Steps to run. load copies the files and their manifest; expose makes a loaded version the current one."""
    version: str | None = None
    """Version to expose (20240101_101500); by default the newest."""
    started_at: str | None = None
    """Start of the run (ISO 8601), which names the version and begins its retention; by default the clock's time."""

    def __post_init__(self) -> None:
        require_at_least(1, retain_days=self.retain_days)
        if not self.dataset.strip("/") or self.dataset != self.dataset.strip("/"):
            raise WrongUse(f"dataset is a prefix such as archive/devices, got '{self.dataset}'")
        if (self.source is None) != (self.step == "expose"):
            raise WrongUse(f"source belongs to the steps that load; got step {self.step}")
        require_version(self.version, self.step)

    def folder(self, version: str) -> str:
        """Return the prefix of a version's files."""
        return f"{self.dataset}/_versions/{version}/"

    def manifest(self, version: str) -> str:
        """Return the key of a version's manifest."""
        return f"{self.dataset}/_manifests/{version}.json"

    @property
    def current(self) -> str:
        """The key of the manifest that readers use."""
        return f"{self.dataset}/_current.json"


def load(client: Any, params: Parameters, started_at: dt.datetime) -> Manifest:
    """Copy the files and then their manifest, each under a lock, and return the manifest.

    Raises:
        NotReady: the folder holds no file.
        JobFailed: the version exists and stays as it is, or a file changed while it was sent.
    """
    root = Path(given(params.source, "source"))
    files = sorted(
        path for path in root.rglob("*") if path.is_file() and not path.name.startswith((".", "_"))
    )
    if not files:
        raise NotReady(f"{params.source} holds no file; nothing was loaded")
    version = version_of(started_at.isoformat())
    lock = {
        "ObjectLockMode": "COMPLIANCE",
        "ObjectLockRetainUntilDate": moved(started_at, duration("days", params.retain_days)),
    }
    if keys_below(client, params.bucket, params.folder(version)) or keys_below(
        client, params.bucket, params.manifest(version)
    ):
        raise taken(version, params.dataset)
    try:
        listed = [
            _send(client, params, file, file.relative_to(root).as_posix(), version, lock) for file in files
        ]
        manifest = Manifest(version, tuple(listed))
        client.put_object(
            Bucket=params.bucket,
            Key=params.manifest(version),
            Body=manifest.to_json().encode(),
            ChecksumAlgorithm="SHA256",
            IfNoneMatch="*",
            **lock,
        )
    except ClientError as failure:
        if failure.response["Error"]["Code"] in _ALREADY_EXISTS:
            raise taken(version, params.dataset) from None
        raise
    return manifest


def _send(
    client: Any, params: Parameters, file: Path, path: str, version: str, lock: Mapping[str, Any]
) -> ListedFile:
    """Send a file without holding it in memory, and return its object version."""
    before = file.stat()
    size = before.st_size
    place = {"Bucket": params.bucket, "Key": params.folder(version) + path}
    if size <= PART_BYTES:
        with file.open("rb") as body:
            object_version = client.put_object(
                **place, Body=body, ChecksumAlgorithm="SHA256", IfNoneMatch="*", **lock
            )["VersionId"]
    else:
        object_version = _send_in_parts(client, file, size, place, lock)
    after = file.stat()
    if (after.st_size, after.st_mtime_ns) != (size, before.st_mtime_ns):
        raise JobFailed(f"{file} changed while it was sent; nothing was exposed, load again")
    return ListedFile(path, size, object_version)


def _send_in_parts(
    client: Any, file: Path, size: int, place: Mapping[str, str], lock: Mapping[str, Any]
) -> str:
    """Send a file in parts and return its object version; only the last, conditional request creates the object."""
    part_bytes = max(PART_BYTES, -(-size // _MOST_PARTS))
    upload = {
        **place,
        "UploadId": client.create_multipart_upload(**place, ChecksumAlgorithm="SHA256", **lock)["UploadId"],
    }
    try:
        parts = []
        for number, start in enumerate(range(0, size, part_bytes), start=1):
            with ReadFileChunk.from_filename(str(file), start, part_bytes) as body:
                sent = client.upload_part(**upload, PartNumber=number, Body=body, ChecksumAlgorithm="SHA256")
            parts.append(
                {"PartNumber": number} | {k: sent[k] for k in ("ETag", "ChecksumSHA256") if k in sent}
            )
        done = client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, IfNoneMatch="*")
    except BaseException:
        with contextlib.suppress(ClientError, BotoCoreError):
            client.abort_multipart_upload(**upload)
        raise
    version = str(done["VersionId"])
    # Some stores forget the lock of an upload in parts; in other stores, setting it again changes nothing.
    retention = {"Mode": lock["ObjectLockMode"], "RetainUntilDate": lock["ObjectLockRetainUntilDate"]}
    client.put_object_retention(**place, VersionId=version, Retention=retention)
    return version


def expose(client: Any, params: Parameters) -> str:
    """Make a version, by default the newest, the one that readers see, and return it.

    Raises:
        WrongUse: there is no such version.
        JobFailed: one of the version's objects is missing.
    """
    prefix = f"{params.dataset}/_manifests/"
    versions = [
        key.removeprefix(prefix).removesuffix(".json") for key in keys_below(client, params.bucket, prefix)
    ]
    version = newest_or(params.version, versions, params.dataset)
    text = _read(client, params, params.manifest(version))
    _require_complete(client, params, Manifest.from_json(text, params.manifest(version)))
    client.put_object(Bucket=params.bucket, Key=params.current, Body=text.encode())
    return version


def resolve(client: Any, params: Parameters) -> list[tuple[str, str]]:
    """Return the key and the object version of each file of the exposed version.

    Raises:
        NotReady: no version was exposed yet.
        JobFailed: a listed object is missing.
    """
    try:
        text = _read(client, params, params.current)
    except client.exceptions.NoSuchKey:
        raise NotReady(f"{params.dataset} has no {params.current}: nothing was exposed yet") from None
    manifest = Manifest.from_json(text, params.current)
    _require_complete(client, params, manifest)
    return [
        (params.folder(manifest.version) + file.path, file.object_version or "null")
        for file in manifest.files
    ]


def _require_complete(client: Any, params: Parameters, manifest: Manifest) -> None:
    """Check that the listed object versions exist, even if their keys have newer ones."""
    folder, listed = params.folder(manifest.version), {file.path: file for file in manifest.files}
    sizes = {}
    for page in client.get_paginator("list_object_versions").paginate(Bucket=params.bucket, Prefix=folder):
        for found in page.get("Versions", []):
            path = found["Key"].removeprefix(folder)
            if path in listed and found["VersionId"] == listed[path].object_version:
                sizes[path] = found["Size"]
    manifest.require_complete(sizes, folder)


def _read(client: Any, params: Parameters, key: str) -> str:
    return str(client.get_object(Bucket=params.bucket, Key=key)["Body"].read().decode())


def run(params: Parameters, connect: Callable[[], Any] = lambda: boto3.client("s3")) -> dict[str, Any]:
    """Load, expose, or both, and return the report.

    Raises:
        DataRefused: the store denies a request.
        JobFailed: the store can't be reached.
    """
    report: dict[str, Any] = {"bucket": params.bucket, "dataset": params.dataset}
    client = connect()
    with answers():
        if params.step != "expose":
            started_at = parse_time(params.started_at) if params.started_at else utc_now()
            manifest = load(client, params, started_at)
            report |= {"version": manifest.version, "files": len(manifest.files)}
        if params.step != "load":
            report |= {"exposed_version": expose(client, params)}
    return report


if __name__ == "__main__":
    run_program(Parameters, run)
