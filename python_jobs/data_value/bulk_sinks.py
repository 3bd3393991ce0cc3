"""Bulk APIs that may take only a part of a request's records: Amazon Kinesis, and an HTTP API.

Both say of each record whether they have it. A client that ignores this loses the refused records silently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import boto3
import requests
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ResponseStreamingError,
)

from python_jobs.data_value.ordered_delivery import Refusal, Sink, Undelivered
from python_jobs.shared.core.failures import WrongUse
from python_jobs.shared.core.json_values import read_value
from python_jobs.shared.core.retry import Failure, classify, classify_status
from python_jobs.shared.core.urls import require_http_url

KINESIS_RECORDS, KINESIS_BYTES = 500, 5_000_000
"""What one PutRecords takes; partition keys count."""
_KINESIS_PASSING = {
    "InternalFailure",
    "KMSThrottlingException",
    "LimitExceededException",
    "ProvisionedThroughputExceededException",
    "ServiceUnavailable",
    "ThrottlingException",
}
# What the next request would be told again. A code that is in neither set may be a new one that passes.
_KINESIS_FINAL = {
    "AccessDenied",
    "AccessDeniedException",
    "IncompleteSignature",
    "InvalidArgumentException",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "KMSAccessDeniedException",
    "KMSDisabledException",
    "KMSInvalidStateException",
    "KMSNotFoundException",
    "KMSOptInRequired",
    "MissingAuthenticationToken",
    "NotAuthorized",
    "OptInRequired",
    "ResourceNotFoundException",
    "SerializationException",
    "UnknownOperationException",
    "UnrecognizedClientException",
    "ValidationException",
}
# The caller's own settings or request, noticed before anything is sent.
_OWN_ERRORS = (NoCredentialsError, NoRegionError, ParamValidationError, PartialCredentialsError)
HTTP_RECORDS = 500


class Sent(NamedTuple):
    """A record as a bulk API gets it."""

    key: str
    body: str
    """JSON text of the record."""


@dataclass(frozen=True)
class Output:
    """A destination with its own sequence of bins."""

    name: str
    """Name of the output, of letters, digits, '_' and '-'; records name their output by it."""
    kind: Literal["kinesis", "http"]
    """``kinesis``: a stream of Amazon Kinesis; ``http``: a bulk API."""
    target: str
    """Name of the stream, or URL that takes POST requests."""
    token_env: str | None = None
    """Environment variable with the bearer token of an HTTP API; default: no token."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", self.name):
            raise WrongUse(f"an output's name must be of letters, digits, '_' and '-', got '{self.name}'")
        if self.kind == "http":
            require_http_url(f"the target of output {self.name}", self.target)
        if self.token_env is not None and not os.environ.get(self.token_env):
            raise WrongUse(f"environment variable {self.token_env}, which token_env names, is not set")

    def sink(self, seconds: float) -> Sink[Sent]:
        """Return a client of this output; ``seconds`` is the time that one request waits."""
        return KinesisSink(self.target, seconds) if self.kind == "kinesis" else HttpSink(self)


class KinesisSink(Sink[Sent]):
    """A stream of Amazon Kinesis; address, region and credentials are those of boto3's environment."""

    records_at_once = KINESIS_RECORDS
    bytes_at_once = KINESIS_BYTES

    def __init__(self, stream: str, seconds: float) -> None:
        self._stream = stream
        # One try: the caller's tries send only what was refused.
        config = Config(retries={"total_max_attempts": 1}, connect_timeout=seconds, read_timeout=seconds)
        try:
            self._client: Any = boto3.client("kinesis", config=config)
        except (BotoCoreError, ValueError) as failure:  # no region, or an address that is none
            raise WrongUse(
                f"boto3 can't use Kinesis ({failure}); see AWS_DEFAULT_REGION and AWS_ENDPOINT_URL"
            ) from None

    def size(self, record: Sent) -> int:
        """Return the number of bytes that count for the limit of a request."""
        return len(record.body.encode()) + len(record.key.encode())

    def send(self, records: Sequence[Sent], seconds: float) -> Mapping[int, Refusal]:
        """Send one PutRecords and return the refused records by their ErrorCode.

        Raises:
            ResponseStreamingError: the answer broke off.
            Undelivered: the answer doesn't tell which records the stream has.
        """
        answer = self._client.put_records(
            StreamName=self._stream,
            Records=[{"Data": record.body.encode(), "PartitionKey": record.key} for record in records],
        )
        # boto3 hands on a body that broke off as an answer without its fields.
        found = answer.get("Records")
        if not isinstance(found, list) or not all(isinstance(record, dict) for record in found):
            raise ResponseStreamingError(error="the answer has no list of records")
        _require_one_each(len(records), len(found), self._stream)
        return {
            place: Refusal(str(code), _classify_code(code))
            for place, record in enumerate(found)
            if (code := record.get("ErrorCode")) is not None
        }

    def failure(self, error: BaseException) -> Failure:
        """Return the class of an error of boto3."""
        if isinstance(error, ClientError):
            known = _classify_code(error.response["Error"].get("Code"))
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            # Kinesis says 400 of almost everything, throttling included: its code tells more.
            return known if known is not Failure.AMBIGUOUS or status == 400 else classify_status(status)
        if isinstance(error, EndpointConnectionError | ConnectTimeoutError):
            return Failure.TRANSIENT
        if isinstance(error, _OWN_ERRORS):
            return Failure.PERMANENT
        return Failure.AMBIGUOUS if isinstance(error, BotoCoreError) else classify(error)


def _classify_code(code: Any) -> Failure:
    if code in _KINESIS_PASSING:
        return Failure.TRANSIENT
    return Failure.PERMANENT if code in _KINESIS_FINAL else Failure.AMBIGUOUS


class HttpSink(Sink[Sent]):
    """A bulk API: ``POST`` of a JSON array, answered by ``{"items": [{"status": 201}, …]}``, one item for each record.

    A status of 200 to 299 says that the API has the record, any other that it doesn't; ``error`` may hold the reason.
    """

    records_at_once = HTTP_RECORDS

    def __init__(self, output: Output) -> None:
        self._url = output.target
        self._session = requests.Session()
        self._session.headers["Content-Type"] = "application/json"
        if output.token_env is not None:
            self._session.headers["Authorization"] = f"Bearer {os.environ[output.token_env]}"

    def send(self, records: Sequence[Sent], seconds: float) -> Mapping[int, Refusal]:
        """Send one POST and return the refused records by their status.

        Raises:
            Undelivered: the answer doesn't tell which records the API has.
        """
        response = self._session.post(
            self._url,
            data=f"[{','.join(record.body for record in records)}]".encode(),
            timeout=seconds,
            allow_redirects=False,
        )
        if not 200 <= response.status_code < 300:
            raise requests.HTTPError(f"status {response.status_code}", response=response)
        answer = read_value(response.content)
        items = answer.get("items") if isinstance(answer, dict) else None
        if not isinstance(items, list) or not all(
            isinstance(item, dict) and isinstance(item.get("status"), int) for item in items
        ):
            raise Undelivered(
                f'the answer of {self._url} has no list "items" with a "status" for each record: nobody knows which '
                "records are there"
            )
        _require_one_each(len(records), len(items), self._url)
        return {
            place: Refusal(str(item.get("error", status))[:200], classify_status(status))
            for place, item in enumerate(items)
            if not 200 <= (status := item["status"]) < 300
        }


def _require_one_each(sent: int, answered: int, target: str) -> None:
    if answered != sent:
        raise Undelivered(
            f"{target} answered for {answered} of {sent} records: nobody knows which records are there"
        )
