"""Lookups in an HTTP API: many keys in one request, no key twice, and no answer that is silently missing.

One request asks for up to ``buffer`` keys: ``GET <url>?<keys_parameter>=a,b,c``. The answer is a JSON object whose
field ``answer_field`` maps keys to values. A key that the API leaves out has the value None. A request that fails is
retried within the bounds of a :class:`~python_jobs.shared.core.retry.RetryPolicy`, and then raised.

Source: Data Engineering Design Patterns, chapter 5, Static Joiner.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import requests

from python_jobs.shared.core import exact_json
from python_jobs.shared.core.failures import DataRefused, JobFailed, WrongUse, require_at_least
from python_jobs.shared.core.retry import Retrier, RetryBudgetExhausted
from python_jobs.shared.core.urls import require_http_url

SEPARATOR = ","


@dataclass(frozen=True, kw_only=True)
class Api:
    """An API that answers bulk requests."""

    url: str
    """URL of the bulk request, without a query."""
    keys_parameter: str
    """Parameter of the query with the keys, separated by commas."""
    answer_field: str
    """Field of the answer that maps keys to values."""
    token_env: str | None = None
    """Environment variable with the bearer token; default: no token."""
    buffer: int = 100
    """Maximum number of keys in one request."""

    def __post_init__(self) -> None:
        require_at_least(1, buffer=self.buffer)
        require_http_url("url", self.url)
        if self.token_env is not None and not os.environ.get(self.token_env):
            raise WrongUse(f"environment variable {self.token_env}, which token_env names, is not set")


class Lookups:
    """The answers for keys, each of which is asked for once.

    Args:
        api: the API.
        retrier: bounds and pauses of a request's tries.
    """

    def __init__(self, api: Api, retrier: Retrier) -> None:
        self._api, self._retrier = api, retrier
        self._session = requests.Session()
        if api.token_env is not None:
            self._session.headers["Authorization"] = f"Bearer {os.environ[api.token_env]}"
        self.answers: dict[str, str | None] = {}
        """Value of each key that was asked for: a text as it is, another JSON value as JSON, None without a value."""
        self.requests = 0
        """Number of bulk requests that were answered; further tries of one request don't count."""

    def look_up(self, keys: Iterable[str]) -> None:
        """Add the answers of all keys that aren't known yet; the answers before a failure are kept.

        Raises:
            DataRefused: a key holds a comma, so the API would take it for two.
            JobFailed: a request failed, or its answer has another form.
        """
        new = (key for key in dict.fromkeys(keys) if key not in self.answers)
        while some := tuple(islice(new, self._api.buffer)):
            self._request(some)

    def _request(self, keys: tuple[str, ...]) -> None:
        for key in keys:
            if SEPARATOR in key or not key:
                raise DataRefused(
                    f"the key '{key}' can't be looked up: it is empty or holds a comma, which separates the keys of a "
                    "request; correct the source or leave the row out"
                )
        try:
            found = self._retrier.call(lambda timeout: self._ask(keys, timeout), idempotent=True)
        except (requests.RequestException, RetryBudgetExhausted, ValueError, RecursionError) as failure:
            # Only its class and status: the text of a failure may hold the request.
            cause = failure.__cause__ if isinstance(failure, RetryBudgetExhausted) else failure
            response = getattr(cause, "response", None)
            reason = type(cause).__name__ if response is None else f"status {response.status_code}"
            raise JobFailed(
                f"the API at {self._api.url} gave no answer for {len(keys)} keys ({reason}); nothing is written in "
                "place of their values, run again when the API answers"
            ) from None
        self.requests += 1
        for key in keys:
            self.answers[key] = found.get(key)

    def _ask(self, keys: tuple[str, ...], timeout: float) -> dict[str, str | None]:
        response = self._session.get(
            self._api.url,
            params={self._api.keys_parameter: SEPARATOR.join(keys)},
            timeout=timeout,
            allow_redirects=False,
        )
        if response.status_code != requests.codes.ok:
            raise requests.HTTPError("the API refused", response=response)
        answer = exact_json.parse(response.content)
        fields = exact_json.by_name(answer) if isinstance(answer, exact_json.Object) else {}
        mapped = fields.get(self._api.answer_field)
        if not isinstance(mapped, exact_json.Object):
            raise JobFailed(
                f"the answer of the API at {self._api.url} has no object '{self._api.answer_field}', which maps keys "
                "to values; see answer_field"
            )
        return {key: _text(value) for key, value in exact_json.by_name(mapped).items()}


def _text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and not isinstance(value, exact_json.Number) and exact_json.is_utf8(value):
        return value
    return exact_json.write(value)
