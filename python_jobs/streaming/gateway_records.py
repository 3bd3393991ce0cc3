"""Records of the API Gateway: the texts in a request's array, the checks of a topic, and the messages for the broker.

A record's text is cut out of the request as it was sent: no digit, blank or escape of it changes on its way.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import jsonschema_rs

from python_jobs.shared.core import json_values
from python_jobs.shared.core.failures import WrongUse, require_at_least
from python_jobs.shared.core.intervals import full_timestamp
from python_jobs.shared.core.json_schemas import schema_validator
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.core.origins import ORIGIN, Origin

REFERRAL, EVENT_ID = "referral", "event_id"
"""Names of the headers beside the origin."""
NOW = "now"
MAX_REASONS = 20
"""Maximum number of reasons that a rejected record gets."""
MAX_REASON_LENGTH = 300

_BLANKS = re.compile(r"[ \t\n\r]*")
_KINDS = {dict: "an object", list: "an array", str: "a text", bool: "a boolean", type(None): "null"}


@dataclass(frozen=True, slots=True)
class Message:
    """One accepted record, as the broker gets it."""

    topic: str
    key: str
    value: str
    """The record's JSON text as it was sent."""
    referral: str
    """The request's Referer header; empty if it has none."""
    request_id: str
    """Id of the request: the producer's Idempotency-Key, or a random one."""
    ordinal: int
    """Place of the record in the request, from 0."""
    accepted_at: str
    """Time of acceptance, ISO 8601 in UTC."""

    @property
    def event_id(self) -> str:
        """The record's identity: it stays the same when the record is sent again."""
        return f"{self.request_id}-{self.ordinal}"

    def headers(self, origin: Origin = "api") -> list[tuple[str, str | bytes | None]]:
        """Return the Kafka headers."""
        named = {ORIGIN: origin, REFERRAL: self.referral, EVENT_ID: self.event_id}
        return [(name, value.encode()) for name, value in named.items()]


# --- the records of a request -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """One element of a request's array."""

    text: str
    """The element's JSON text as it was sent."""
    value: Any
    """The element's content; numbers with a fraction or an exponent are decimals, which keep their digits."""
    repeated: list[str]
    """Names that an object of the element has twice."""


class UnreadableBody(ValueError):
    """A request's body is no JSON array; the message is one sentence."""


def read_records(body: bytes) -> list[Record]:
    """Return the elements of a JSON array in UTF-8.

    Raises:
        UnreadableBody: the body is something else.
    """
    try:
        text = body.decode("utf-8-sig")
        return _elements(text)
    except UnreadableBody:
        raise
    except RecursionError:
        raise UnreadableBody("the body is nested too deep") from None
    except ValueError as failure:
        raise UnreadableBody(f"the body is no JSON in UTF-8: {failure}") from None


def _elements(text: str) -> list[Record]:
    repeated: list[str] = []
    reader = json_values.decoder(repeated)
    place = _after_blanks(text, 0)
    if text[place : place + 1] != "[":
        kind = _kind(reader.decode(text))
        raise UnreadableBody(f"the body must be a JSON array of records, got {kind}")
    found: list[Record] = []
    place = _after_blanks(text, place + 1)
    if text[place : place + 1] == "]":
        return _ended(text, place + 1, found)
    while True:
        repeated.clear()
        value, end = reader.raw_decode(text, place)
        found.append(Record(text[place:end], value, list(repeated)))
        place = _after_blanks(text, end)
        if text[place : place + 1] == "]":
            return _ended(text, place + 1, found)
        if text[place : place + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, place)
        place = _after_blanks(text, place + 1)


def _ended(text: str, place: int, found: list[Record]) -> list[Record]:
    end = _after_blanks(text, place)
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return found


def _after_blanks(text: str, place: int) -> int:
    match = _BLANKS.match(text, place)
    return place if match is None else match.end()


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "a number")


# --- the checks of a topic --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A field that isn't after the clock's time or after another field; it holds if one of both is absent or null."""

    field: str
    """Name of the field; in a nested object with dots, such as context.started_at."""
    not_after: str
    """``now``, or the name of another field: both are full timestamps, or both are numbers."""
    tolerance_seconds: float = 0
    """Seconds by which a time may be after ``now``, because producers' clocks differ."""

    def __post_init__(self) -> None:
        require_at_least(0, **{f"tolerance_seconds of the rule for {self.field}": self.tolerance_seconds})
        if self.tolerance_seconds and self.not_after != NOW:
            raise WrongUse(
                f"tolerance_seconds of the rule for {self.field} needs not_after: {NOW}, got {self.not_after}"
            )

    def reason(self, record: Mapping[str, Any], now: dt.datetime) -> str | None:
        """Return why a record breaks the rule; None if it holds."""
        value = _field(record, self.field)
        bound = now if self.not_after == NOW else _field(record, self.not_after)
        if value is None or bound is None:
            return None
        if _is_number(value) and _is_number(bound):
            return f"{self.field}: {value} is after {self.not_after}, {bound}" if value > bound else None
        at, limit = _moment(value), _moment(bound)
        if at is None or limit is None:
            name, side = (self.field, value) if at is None else (self.not_after, bound)
            return f"{name}: {json_text(side, default=str)} is no timestamp with date, hour and minute"
        is_late = (at - limit).total_seconds() > self.tolerance_seconds
        return f"{self.field}: {value} is after {self.not_after}, {limit.isoformat()}" if is_late else None


def _field(record: Mapping[str, Any], name: str) -> Any:
    value: Any = record
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _moment(value: Any) -> dt.datetime | None:
    if isinstance(value, dt.datetime):
        return value
    return full_timestamp(value) if isinstance(value, str) else None


@dataclass(frozen=True)
class Topic:
    """A topic that producers may write to, and the checks that each of its records passes."""

    name: str
    """Name of the Kafka topic, which must exist."""
    schema: str
    """File with the JSON Schema of a record (JSON or YAML, no references to other files); ``format: date-time`` is a
    timestamp with date, hour and minute, in UTC unless it names an offset."""
    rules: list[Rule] = field(default_factory=list)
    """Rules that no schema can express."""

    def __post_init__(self) -> None:
        if not is_topic_name(self.name):
            raise WrongUse(f"'{self.name}' can't be the name of a topic: letters, digits, '.', '_' and '-'")

    def checker(self) -> Callable[[Record, dt.datetime], list[str]]:
        """Return the function from a record and the clock's time to the reasons for its rejection.

        Raises:
            WrongUse: the file is no JSON Schema.
        """
        validator = schema_validator(self.schema)
        return functools.partial(_reasons, validator, self.rules)


def is_topic_name(name: str) -> bool:
    """Return whether Kafka allows the name; such a name is no path."""
    return re.fullmatch(r"[a-zA-Z0-9._-]{1,249}", name) is not None and name not in {".", ".."}


def _reasons(
    validator: jsonschema_rs.Validator, rules: Sequence[Rule], record: Record, now: dt.datetime
) -> list[str]:
    if record.repeated:
        return [f"the name {json_text(name)} is there twice" for name in record.repeated]
    if not isinstance(record.value, dict):
        return [f"a record must be a JSON object, got {_kind(record.value)}"]
    reasons: list[str] = []
    try:
        if not validator.is_valid(record.value):
            for error in validator.iter_errors(record.value):
                path = ".".join(map(str, error.instance_path))
                reasons.append(f"{path}: {error.message}" if path else error.message)
    except ValueError as failure:  # of its limit of levels
        return [f"the record can't be checked: {failure}"]
    broken = (rule.reason(record.value, now) for rule in rules)
    reasons += [reason for reason in broken if reason is not None]
    return [reason[:MAX_REASON_LENGTH] for reason in reasons[:MAX_REASONS]]
