"""A second opinion on the generated files: plain Python, line by line, without Spark or the generator."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
USER_FIELDS = (
    "login",
    "email",
    "registered_datetime",
    "first_connection_datetime",
    "last_connection_datetime",
    "plan",
    "updated_at",
)


def lines_of(landing: Path, feed: str) -> Iterator[tuple[str, str]]:
    """Yield (folder, line) of a feed; only LF ends a line, whatever characters a text holds."""
    for path in sorted((landing / feed).rglob("*.json")):
        folder = path.parent.relative_to(landing / feed).as_posix()
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                yield folder, line.removesuffix("\n")


def parsed(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def as_text(value: Any) -> str | None:
    """A JSON number in place of a text is taken as text; objects, lists and flags are not."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def as_time(text: str | None) -> dt.datetime | None:
    if text is None or not re.match(r"\d{4}-\d\d-\d\dT", text):
        return None
    return dt.datetime.fromisoformat(text)


def broken_rule(visit: Record) -> str | None:
    for field in ("visit_id", "event_time", "user_id", "page"):
        if as_text(visit.get(field)) is None:
            return f"{field}_missing"
    if not isinstance(visit.get("context"), dict):
        return "context_missing"
    return None if as_time(as_text(visit["event_time"])) else "event_time_unparsable"


def read_visits(landing: Path) -> tuple[dict[str, Any], list[Record]]:
    """Return the counts of the visits feed, as truth.json has them, and the records that are kept."""
    partitions, precedence, rules = Counter[str](), Counter[str](), Counter[str]()
    delays = Counter[str]()
    usable: dict[tuple[str, dt.datetime], list[tuple[str, str, Record]]] = defaultdict(list)
    for folder, line in lines_of(landing, "visits"):
        partitions[folder] += 1
        visit = parsed(line)
        if visit is None:
            precedence["unparsable"] += 1
        elif rule := broken_rule(visit):
            precedence["invalid"] += 1
            rules[rule] += 1
        elif as_text(visit["page"]).startswith("healthcheck"):
            precedence["filtered"] += 1
        else:
            key = as_text(visit["visit_id"]), as_time(visit["event_time"])
            delays[delay_bucket(folder, key[1])] += 1
            usable[key].append((folder, hashlib.sha256(line.encode()).hexdigest(), visit))
    kept = []
    for deliveries in usable.values():
        payloads = {payload for _, payload, _ in deliveries}
        precedence["exact_duplicate"] += len(deliveries) - len(payloads)
        precedence["superseded"] += len(payloads) - 1
        precedence["kept"] += 1
        kept.append(max(deliveries, key=lambda delivery: delivery[:2])[2])
    counts = {
        "lines": partitions.total(),
        "partitions": dict(partitions),
        "precedence": dict(precedence),
        "invalid_by_first_rule": dict(rules),
        "valid_by_delay": dict(delays),
    }
    return counts, kept


def delay_bucket(folder: str, time: dt.datetime) -> str:
    """How many folders after its own hour a line landed, by the names of truth.json."""
    landed = dt.datetime.strptime(f"{folder}+0000", "date=%Y-%m-%d/hour=%H%z")
    hours = (landed - time).total_seconds() / 3600  # negative in its own folder
    for name, bound in (("0 hours", 0), ("1 hour", 1), ("3 hours", 3), ("12 hours", 12)):
        if hours <= bound:
            return name
    return "more"


def gold_of(kept: list[Record]) -> dict[str, Any]:
    """Return the gold tables of the visits, as truth.json has them."""
    pages: dict[str, Counter[str]] = defaultdict(Counter)
    referrals: dict[str, dict[str, tuple[set, set]]] = defaultdict(
        lambda: defaultdict(lambda: (set(), set()))
    )
    days: dict[str, tuple[list, set, set]] = defaultdict(lambda: ([], set(), set()))
    for visit in kept:
        time = as_time(visit["event_time"])
        visit_id, user_id, day = as_text(visit["visit_id"]), visit["user_id"], f"{time:%Y-%m-%d}"
        pages[f"{time:%Y-%m-%dT%H}"][as_text(visit["page"])] += 1
        for known, value in zip(
            referrals[day][visit["context"]["referral"] or "direct"], (visit_id, user_id), strict=True
        ):
            known.add(value)
        events, visits, users = days[day]
        events.append(visit)
        visits.add(visit_id)
        users.add(user_id)
    return {
        "page_views_by_hour": {hour: dict(counts) for hour, counts in pages.items()},
        "page_views_total_by_hour": {hour: counts.total() for hour, counts in pages.items()},
        "referral_statistics_by_day": {
            day: {
                name: {"visits": len(visits), "users": len(users)} for name, (visits, users) in found.items()
            }
            for day, found in referrals.items()
        },
        "visit_statistics_by_day": {
            day: {"events": len(events), "visits": len(visits), "users": len(users)}
            for day, (events, visits, users) in days.items()
        },
    }


def hash_of(rows: list[tuple[str | None, ...]]) -> int:
    """Return the sum of the first 32 bits of each row's MD5."""
    texts = ("|".join(value or "" for value in row) for row in rows)
    return sum(int(hashlib.md5(text.encode()).hexdigest()[:8], 16) for text in texts)


def read_changes(landing: Path) -> list[tuple[str, Record]]:
    """Return (folder, change) of each change that can be read and names a user, once a sequence."""
    changes = {}
    for folder, line in lines_of(landing, "user_changes"):
        change = parsed(line)
        if change and change["id"] is not None:
            changes.setdefault((change["id"], change["sequence"]), (folder, change))
    return [changes[key] for key in sorted(changes)]


def users_at(changes: list[tuple[str, Record]], end: dt.datetime) -> dict[str, Record]:
    """Return the users that exist just before ``end``, replaying the changes in their order."""
    users: dict[str, Record] = {}
    for _, change in changes:
        if as_time(change["changed_at"]) >= end:
            continue
        if change["op"] == "D" or change["is_deleted"]:
            users.pop(change["id"], None)
        else:
            users[change["id"]] = {field: change[field] for field in USER_FIELDS}
    return users


def gold_of_users(users: dict[str, Record]) -> dict[str, Any]:
    """Return the figures of the users at one moment, as truth.json has them."""
    rows = [(user_id, user["login"], user["email"], user["plan"]) for user_id, user in users.items()]
    return {
        "users": len(users),
        "by_plan": dict(Counter(user["plan"] for user in users.values())),
        "hash": hash_of(rows),
    }


def read_devices(landing: Path) -> dict[tuple[str, str], str]:
    """Return the full names of the devices after the last increment, by type and version."""
    devices: dict[tuple[str, str], str] = {}
    for _, line in lines_of(landing, "devices"):
        device = parsed(line)
        if device is None or device["version"] is None:
            continue
        key = device["type"], device["version"]
        if device["is_deleted"]:
            devices.pop(key, None)
        else:
            devices[key] = device["full_name"]
    return devices
