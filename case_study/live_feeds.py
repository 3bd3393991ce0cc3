"""What producers send to the live case study by HTTP: visits, the ads displayed in them, and changes of pages.

The visits are the lines of the landing folder as they are, with their faults. Ads and changes of pages follow from the
visits and the pages by a rule, so that the same folder gives the same records. A record has the same id each time it is
sent: a run that was interrupted goes on with the records that the topic doesn't have.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import requests
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from case_study.datasets.visits import PAGES
from python_jobs.ingestion.incremental_loader import LandingFile
from python_jobs.shared.core.intervals import full_timestamp
from python_jobs.shared.core.json_text import json_text
from python_jobs.shared.files.file_sets import read_lines, url_path
from python_jobs.streaming.gateway_records import EVENT_ID
from services.kafka import Cluster
from services.processes import ServiceFailed

VISITS, ADS, PAGE_CHANGES = "visits", "ads", "page_changes"
UNKNOWN = "unknown"
"""Key of a visit whose id can be no key of the gateway: without an id it refuses the visit."""
STATUSES = ("draft", "published", "published")
"""Status of each version of a page, from version 1."""
_AD_AFTER = dt.timedelta(seconds=20)
_LATE_AD_AFTER = dt.timedelta(minutes=5)
_LATE_AD_EACH = 5
_LANES = 4
_TIMEOUT_SECONDS = 60
_REFUSED = {400, 413}


@dataclass(frozen=True)
class Post:
    """One record that a producer sends."""

    topic: str
    key: str
    record: bytes
    """The record's JSON text, or a line that is none."""
    id: str
    """Idempotency key of the request."""

    @property
    def event_id(self) -> str:
        """The header ``event_id`` of the record in the topic."""
        return f"{self.id}-0"


def visit_posts(spark: SparkSession, files: Sequence[LandingFile]) -> list[Post]:
    """Return one post for each line of the files, in their order; its key is the visit."""
    if not files:
        return []
    names = {file.url_path: file.file_path for file in files}
    lines = read_lines(spark, files).select(
        F.col("value").cast("binary").alias("line"), url_path().alias("url_path")
    )
    numbers: Counter[str] = Counter()
    posts: list[Post] = []
    for row in lines.toLocalIterator():
        name = names[row.url_path]
        numbers[name] += 1
        line = bytes(row.line)
        posts.append(Post(VISITS, _key(_object(line)), line, _identity(VISITS, name, str(numbers[name]))))
    return posts


def ad_posts(visits: Iterable[Post]) -> Iterator[Post]:
    """Yield the ad of each visit that names one: 20 seconds after the visit, every fifth ad 5 minutes after."""
    number = 0
    for post in visits:
        visit = _object(post.record)
        context = visit.get("context")
        ad_id = context.get("ad_id") if isinstance(context, dict) else None
        at = full_timestamp(str(visit.get("event_time")))
        key, page = _key(visit), visit.get("page")
        if at is None or key == UNKNOWN or not isinstance(ad_id, str) or not isinstance(page, str | int):
            continue  # not a visit that the gateway accepts, or one without an ad
        number += 1
        after = _LATE_AD_AFTER if number % _LATE_AD_EACH == 0 else _AD_AFTER
        ad = {"ad_id": ad_id, "visit_id": key, "page": str(page), "displayed_at": (at + after).isoformat()}
        yield Post(ADS, key, json_text(ad).encode(), _identity(ADS, post.id))


def page_change_posts() -> Iterator[Post]:
    """Yield the changes of all pages, version by version: a draft, and two versions that readers see."""
    for version, status in enumerate(STATUSES, start=1):
        for page in PAGES:
            change = {"page": page, "version": version, "status": status}
            yield Post(
                PAGE_CHANGES, page, json_text(change).encode(), _identity(PAGE_CHANGES, page, str(version))
            )


def event_ids(broker: Cluster, topic: str) -> set[str]:
    """Return the ids of the records that a topic has."""
    headers: Iterator[dict[str, Any]] = (dict(found.headers() or ()) for found in broker.records(topic))
    return {header[EVENT_ID].decode() for header in headers}


def send(gateway: str, posts: Iterable[Post], known: Collection[str]) -> int:
    """Send the records whose ids aren't known; return the number of those that the gateway refused.

    Records of one key are sent one after the other.

    Args:
        gateway: the gateway's URL.
        posts: the records.
        known: ids of records that the topics have.

    Raises:
        ServiceFailed: the gateway didn't deliver a record.
    """
    lanes: list[list[Post]] = [[] for _ in range(_LANES)]
    for post in posts:
        if post.event_id not in known:
            lanes[zlib.crc32(post.key.encode()) % _LANES].append(post)
    with ThreadPoolExecutor(_LANES) as pool:
        return sum(pool.map(lambda lane: _send(gateway, lane), lanes))


def _send(gateway: str, posts: Sequence[Post]) -> int:
    refused = 0
    with requests.Session() as session:
        for post in posts:
            answer = session.post(
                f"{gateway}/ingestion/ingest/{post.topic}/{quote(post.key, safe='')}",
                data=b"[" + post.record + b"]",
                headers={"Content-Type": "application/json", "Idempotency-Key": post.id},
                timeout=_TIMEOUT_SECONDS,
            )
            if answer.status_code in _REFUSED:
                refused += 1
            elif answer.status_code != 202 or answer.json()["stored"]:
                raise ServiceFailed(
                    f"the gateway at {gateway} didn't deliver a record of {post.topic}, it answered "
                    f"{answer.status_code}: {answer.text[:200]}"
                )
    return refused


def _object(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line; an empty one for another line."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _key(visit: dict[str, Any]) -> str:
    """Return the visit's id as the record's key."""
    visit_id = visit.get("visit_id")
    is_id = isinstance(visit_id, str | int) and not isinstance(visit_id, bool)
    key = str(visit_id) if is_id else ""
    return UNKNOWN if key == "" or "/" in key else key


def _identity(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
