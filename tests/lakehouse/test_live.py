"""The live case study from producers' requests to a partner and a topic, run twice over ten visits."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Message
from pyspark.sql import DataFrame, SparkSession

from case_study.live import deliveries_file, run_live
from case_study.live_report import PUBLISHED
from case_study.partner import deliveries
from case_study.runners import OneSession
from services.kafka import running_broker
from tests.support.rows import assert_rows

pytestmark = [pytest.mark.end_to_end, pytest.mark.kafka]


def visit(visit_id: str, user: str | None, at: str, page: Any, ad: str | None = None) -> str:
    fields = {"visit_id": visit_id, "event_time": at, "page": page, "context": {"ad_id": ad}}
    return json.dumps(fields if user is None else fields | {"user_id": user})


LANDING = {
    "date=2024-03-01/hour=10": [
        visit("v1", "u1", "2024-03-01T10:00:00Z", "index", "a1"),
        visit("v1", "u1", "2024-03-01T10:05:00Z", "home", "a1"),
        visit("v2", "u2", "2024-03-01T10:30:00Z", "index"),
        '{"visit_id": "cut in the mid',
        visit("v3", None, "2024-03-01T10:40:00Z", "index"),
        visit("v1", "u1", "2024-03-01T10:50:00Z", "login", "a1"),
    ],
    # Here the topic takes over from the history.
    "date=2024-03-01/hour=11": [
        visit("v1", "u1", "2024-03-01T11:10:00Z", "index", "a1"),
        visit("v4", "u3", "2024-03-01T11:20:00Z", 404, "a2"),
        visit("v4", "u3", "soon", "home", "a2"),
    ],
    "date=2024-03-02/hour=00": [visit("v5", "u2", "2024-03-02T00:10:00Z", "index")],
}


@dataclass(frozen=True)
class Live:
    spark: SparkSession
    root: Path
    counts: list[dict[str, int]]
    """Records at each place after each run."""
    versions: list[dict[str, int]]
    """Versions of all tables after each run."""
    published: list[Message]
    """Records of the topic of the pages that readers see, after both runs."""

    def table(self, name: str) -> DataFrame:
        return self.spark.read.format("delta").load(str(self.root / name))


def versions(root: Path) -> dict[str, int]:
    logs = root.rglob("_delta_log")
    return {
        str(log.parent.relative_to(root)): max(int(file.stem) for file in log.glob("*[0-9].json"))
        for log in logs
    }


@pytest.fixture(scope="module")
def live(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    for hour, lines in LANDING.items():
        path = folder / "landing" / "visits" / hour / "visits.json"
        path.parent.mkdir(parents=True)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    found = Live(spark, folder / "lakehouse", [], [], [])
    for _ in range(2):
        _, report = run_live(found.root, folder / "landing", OneSession(spark))
        found.counts.append({count["place"]: count["records"] for count in report["counts"]})
        found.versions.append(versions(found.root))
    with running_broker(found.root / ".services" / "kafka") as broker:
        found.published.extend(broker.records(PUBLISHED))
    yield found
    for table in ("live_raw_visits", "live_raw_ads"):
        spark.sql(f"drop table {table}")


def test_each_visit_is_at_each_place_once(live: Live) -> None:
    assert live.counts[0] == {
        "visits sent by HTTP": 10,
        "refused by the gateway": 2,
        "records of the topic visits": 8,
        "visits from the history": 5,
        "visits from the topic": 3,
        "sessions": 5,
        "visits in sessions": 7,
        "visits without a user": 1,
        "records of the topic ads": 5,
        "visits with an ad": 4,
        "late ads and visits": 0,
        "groups by visit": 5,
        "visits counted by their id": 8,
        "records at the partner": 5,
        "page views of these records": 8,
        "changes of pages": 120,
        "changes that readers see": 80,
        "records of the topic published_pages": 80,
    }


def test_a_second_run_adds_nothing(live: Live) -> None:
    assert live.counts[1] == live.counts[0]
    assert live.versions[1] == live.versions[0]
    assert live.versions[0].keys() >= {
        "raw/visits",
        "raw/ads",
        "visits",
        "sessions",
        "visits_with_ads",
        "visits_by_id",
    }


def test_a_session_goes_on_where_the_topic_takes_over_from_the_history(live: Live) -> None:
    sessions = live.table("sessions").selectExpr(
        "user_id",
        "date_format(started_at, 'dd HH:mm')",
        "date_format(ended_at, 'dd HH:mm')",
        "values",
        "is_final",
    )
    expected = [
        ("u1", "01 10:00", "01 10:05", ["index", "home"], False),
        ("u1", "01 10:50", "01 11:10", ["login", "index"], False),
        ("u2", "01 10:30", "01 10:30", ["index"], False),
        ("u2", "02 00:10", "02 00:10", ["index"], False),
        ("u3", "01 11:20", "01 11:20", ["404"], False),
    ]
    assert_rows(sessions, expected)
    origins = live.table("visits").where("user_id = 'u1' and page in ('login', 'index')")
    assert_rows(
        origins.selectExpr("date_format(event_time, 'HH:mm')", "origin"),
        [("10:00", "historical"), ("10:50", "historical"), ("11:10", "real_time")],
    )


def test_a_visit_has_the_ad_that_was_displayed_within_two_minutes(live: Live) -> None:
    """The fifth ad, that of v4, comes five minutes after its visit."""
    joined = live.table("visits_with_ads").selectExpr("visit_id", "page", "ad_id", "right_time - left_time")
    assert sorted((row[0], row[1], row[2], row[3].seconds) for row in joined.collect()) == [
        ("v1", "home", "a1", 20),
        ("v1", "index", "a1", 20),
        ("v1", "index", "a1", 20),
        ("v1", "login", "a1", 20),
    ]


def test_a_visit_s_pages_are_in_one_group_in_order_of_time(live: Live) -> None:
    groups = live.table("visits_by_id").selectExpr("key", "events", "values")
    expected = [
        ("v1", 4, ["index", "home", "login", "index"]),
        ("v2", 1, ["index"]),
        ("v3", 1, ["index"]),
        ("v4", 1, ["404"]),
        ("v5", 1, ["index"]),
    ]
    assert_rows(groups, expected)


def test_a_visit_without_a_user_is_a_dead_letter_with_its_reason(live: Live) -> None:
    dead = live.table("visits_without_session").selectExpr("visit_id", "page", "error_message")
    assert_rows(dead, [("v3", "index", "the record has NULL in user_id")])


def test_changes_of_a_page_that_readers_see_are_in_the_topic_in_their_order(live: Live) -> None:
    published = [json.loads(message.value()) for message in live.published]
    versions = [change["version"] for change in published if change["page"] == "index"]
    assert versions == [2, 3]
    assert {change["status"] for change in published} == {"published"}
    places = {dict(message.headers())["forwarded_from"] for message in live.published}
    assert len(places) == len(published) == 80


def test_the_partner_has_each_page_s_days_in_their_order_although_it_was_busy(live: Live) -> None:
    records = deliveries(str(deliveries_file(live.root)))
    shown = [(record["key"], record["at"][:10], record["data"]) for record in records]
    assert sorted(shown[:4], key=str) == [
        ("404", "2024-03-01", {"views": 1, "visits": 1}),
        ("home", "2024-03-01", {"views": 1, "visits": 1}),
        ("index", "2024-03-01", {"views": 4, "visits": 3}),
        ("login", "2024-03-01", {"views": 1, "visits": 1}),
    ]
    # The fifth record is refused the first time.
    assert shown[4:] == [("index", "2024-03-02", {"views": 1, "visits": 1})]
    with closing(sqlite3.connect(deliveries_file(live.root))) as database:
        assert database.execute("select count(distinct id) from deliveries").fetchone() == (5,)
