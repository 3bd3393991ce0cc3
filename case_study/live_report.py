"""Report of the live case study: the number of records at each place, and whether each follows from the one before.

    spark-submit case_study/live_report.py --root $LAKEHOUSE_ROOT/live --bootstrap_servers localhost:9092 \\
        --deliveries $LAKEHOUSE_ROOT/live/partner/deliveries.sqlite --sent 2000 --refused 41

Exit code 3 means that a record is lost, doubled or out of order.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Message
from pyspark.sql import SparkSession

from case_study.live_feeds import ADS, PAGE_CHANGES, VISITS
from case_study.partner import deliveries
from python_jobs.shared.core.failures import DataRefused
from python_jobs.shared.delta.tables import read_table
from python_jobs.shared.spark.job import run_job
from services.kafka import Cluster

PUBLISHED = "published_pages"


@dataclass(frozen=True)
class Parameters:
    """Print the number of records at each place of the live case study."""

    root: str
    """Folder of its tables."""
    bootstrap_servers: str
    """Kafka brokers, host:port,host:port."""
    deliveries: str
    """SQLite file of what the partner has."""
    sent: int
    """Number of visits that the producers have sent."""
    refused: int
    """Number of them that the gateway refused."""


def run(spark: SparkSession, parameters: Parameters) -> dict[str, Any]:
    """Return the report: ``counts``, a list of places with their numbers of records.

    Raises:
        DataRefused: a number doesn't follow from the one before, or records of a key are out of order.
    """
    counts = table_counts(spark, parameters.root)
    broker = Cluster(parameters.bootstrap_servers)
    changes = [json.loads(message.value() or b"null") for message in broker.records(PAGE_CHANGES)]
    published = forwarded(broker.records(PUBLISHED))
    partner = deliveries(parameters.deliveries)
    counts |= {
        "visits sent by HTTP": parameters.sent,
        "refused by the gateway": parameters.refused,
        "records of the topic visits": len(broker.records(VISITS)),
        "records of the topic ads": len(broker.records(ADS)),
        "records at the partner": len(partner),
        "page views of these records": sum(record["data"]["views"] for record in partner),
        "changes of pages": len(changes),
        "changes that readers see": sum(change["status"] == "published" for change in changes),
        "records of the topic published_pages": len(published),
    }
    require_reconciled(counts)
    require_order("published_pages", ((change["page"], change["version"]) for change in published))
    return {"counts": [{"place": place, "records": counts[place]} for place in PLACES]}


def forwarded(records: Iterable[Message]) -> list[dict[str, Any]]:
    """Return the forwarded values, each place of the source once: delivery is at least once."""
    first: dict[Any, dict[str, Any]] = {}
    for record in records:
        first.setdefault(
            dict(record.headers() or ())["forwarded_from"], json.loads(record.value() or b"null")
        )
    return list(first.values())


def table_counts(spark: SparkSession, root: str) -> dict[str, int]:
    """Return the numbers of records in the tables, by the places' names."""

    def number(table: str, measure: str = "count(*)") -> int:
        [row] = read_table(spark, f"{root}/{table}").selectExpr(f"coalesce({measure}, 0) as n").collect()
        return int(row["n"])

    return {
        "visits from the history": number("visits", "count_if(origin = 'historical')"),
        "visits from the topic": number("visits", "count_if(origin = 'real_time')"),
        "sessions": number("sessions", "count_if(events > 0)"),
        "visits in sessions": number("sessions", "sum(events)"),
        "visits without a user": number("visits_without_session"),
        "visits with an ad": number("visits_with_ads"),
        "late ads and visits": number("visits_with_ads_late"),
        "visits counted by their id": number("visits_by_id", "sum(events)"),
        "groups by visit": number("visits_by_id"),
    }


PLACES = (
    "visits sent by HTTP",
    "refused by the gateway",
    "records of the topic visits",
    "visits from the history",
    "visits from the topic",
    "sessions",
    "visits in sessions",
    "visits without a user",
    "records of the topic ads",
    "visits with an ad",
    "late ads and visits",
    "groups by visit",
    "visits counted by their id",
    "records at the partner",
    "page views of these records",
    "changes of pages",
    "changes that readers see",
    "records of the topic published_pages",
)
_EQUAL: Sequence[tuple[Sequence[str], Sequence[str]]] = (
    (("visits sent by HTTP",), ("refused by the gateway", "records of the topic visits")),
    (("records of the topic visits",), ("visits from the history", "visits from the topic")),
    (("records of the topic visits",), ("visits in sessions", "visits without a user")),
    (("records of the topic visits",), ("visits counted by their id",)),
    (("records of the topic visits",), ("page views of these records",)),
    (("changes that readers see",), ("records of the topic published_pages",)),
)
"""Places whose sums are equal if no record is lost or doubled."""


def require_reconciled(counts: Mapping[str, int]) -> None:
    """Refuse numbers of which one doesn't follow from the one before.

    Raises:
        DataRefused: the sentence names the first two sums that differ.
    """
    for left, right in _EQUAL:
        if sum(counts[place] for place in left) != sum(counts[place] for place in right):
            sums = (" + ".join(f"{counts[place]} {place}" for place in side) for side in (left, right))
            raise DataRefused(" is not ".join(sums))


def require_order(what: str, records: Iterable[tuple[str, Any]]) -> None:
    """Refuse records of a key that don't rise; ``records`` are keys and positions as they arrived.

    Raises:
        DataRefused: a record comes behind a later one of its key, or twice.
    """
    by_key: dict[str, list[Any]] = defaultdict(list)
    for key, position in records:
        by_key[key].append(position)
    for key, positions in by_key.items():
        if positions != sorted({*positions}):
            raise DataRefused(f"{what}: the records of '{key}' came in the order {positions}")


if __name__ == "__main__":
    run_job(Parameters, run)
