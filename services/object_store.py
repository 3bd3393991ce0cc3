"""An S3 API on this machine (moto's server, in memory), on a free loopback port.

with running_object_store(folder) as store:
    store.create_bucket("landing")
    store.client.put_object(Bucket="landing", Key="a.json", Body=b"{}")
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from services.processes import HOST, Process, free_port, listens, running, write_private

REGION = "us-east-1"
# moto accepts any credentials; boto3 requires some.
ACCESS_KEY, SECRET_KEY = "local", "local"


@dataclass(frozen=True)
class ObjectStore:
    """A running store; its data is lost when it ends."""

    endpoint: str
    """URL of the S3 API; buckets are part of the path."""
    process: Process

    @cached_property
    def client(self) -> Any:
        """boto3's S3 client for this store."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 2}),
        )

    def create_bucket(self, name: str) -> str:
        """Create a bucket and return its name."""
        self.client.create_bucket(Bucket=name)
        return name

    def environment(self, credentials_file: Path) -> dict[str, str]:
        """Return the environment variables with which boto3 and the AWS command line find this store.

        Args:
            credentials_file: file to write the credentials to; only its owner can read it.
        """
        keys = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        write_private(credentials_file, f"[default]\n{keys}")
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": REGION,
            "AWS_SHARED_CREDENTIALS_FILE": str(credentials_file),
        }


@contextlib.contextmanager
def running_object_store(folder: Path, port: int | None = None) -> Iterator[ObjectStore]:
    """Run an S3 API until the block ends.

    Args:
        folder: folder for the log.
        port: loopback port; by default a free one.

    Raises:
        ServiceFailed: the server did not start.
    """
    port = port or free_port()
    process = Process(
        "object-store",
        [sys.executable, "-m", "moto.server", "--host", HOST, "--port", str(port)],
        folder.absolute(),
        lambda log: listens(port),
        ports=(port,),
    )
    with running(process):
        yield ObjectStore(f"http://{HOST}:{port}", process)
