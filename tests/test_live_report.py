"""What the live case study's report refuses, and what its partner takes; no service runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from case_study.live_feeds import Post, ad_posts, page_change_posts
from case_study.live_report import require_order, require_reconciled
from case_study.partner import BUSY, TAKEN, Partner, create_app, deliveries
from python_jobs.shared.core.failures import DataRefused

COUNTS = {
    "visits sent by HTTP": 10,
    "refused by the gateway": 2,
    "records of the topic visits": 8,
    "visits from the history": 5,
    "visits from the topic": 3,
    "visits in sessions": 7,
    "visits without a user": 1,
    "visits counted by their id": 8,
    "page views of these records": 8,
    "changes that readers see": 80,
    "records of the topic published_pages": 80,
}


def test_numbers_that_follow_from_each_other_are_taken() -> None:
    require_reconciled(COUNTS)


@pytest.mark.parametrize("place", COUNTS)
def test_a_record_too_many_at_any_place_is_refused(place: str) -> None:
    with pytest.raises(
        DataRefused, match=rf"{COUNTS[place] + 1} {place}.* is not |is not .*{COUNTS[place] + 1} {place}"
    ):
        require_reconciled(COUNTS | {place: COUNTS[place] + 1})


def test_the_order_of_each_key_alone_counts() -> None:
    require_order("a topic", [("b", 1), ("a", 1), ("a", 2), ("b", 3)])


@pytest.mark.parametrize("positions", [[2, 1], [1, 1]], ids=["behind a later one", "twice"])
def test_a_record_out_of_order_is_refused(positions: list[int]) -> None:
    with pytest.raises(DataRefused, match=rf"a topic: the records of 'a' came in the order \{positions}"):
        require_order("a topic", [("b", 7), *(("a", position) for position in positions)])


def test_a_busy_partner_takes_each_record_once(tmp_path: Path) -> None:
    file = str(tmp_path / "deliveries.sqlite")
    records = [{"id": f"r{number}", "data": number} for number in range(6)]
    partner = Partner(file)
    assert partner.take(records) == [TAKEN, TAKEN, TAKEN, TAKEN, BUSY, TAKEN]
    assert partner.take([records[4], records[0]]) == [TAKEN, TAKEN]
    partner.close()
    assert [record["id"] for record in deliveries(file)] == ["r0", "r1", "r2", "r3", "r5", "r4"]


def test_the_partner_answers_with_one_status_for_each_record(tmp_path: Path) -> None:
    partner = Partner(str(tmp_path / "deliveries.sqlite"))
    client = create_app(partner).test_client()
    answer = client.post("/page_views", json=[{"id": f"r{number}"} for number in range(5)])
    assert answer.json == {"items": [{"status": status} for status in (201, 201, 201, 201, 429)]}
    partner.close()


def test_only_a_visit_that_can_be_joined_has_an_ad() -> None:
    def post(record: bytes) -> Post:
        return Post("visits", "v1", record, "id")

    with_ad = b'{"visit_id": 7, "event_time": "2024-03-01T10:00:00Z", "page": 404, "context": {"ad_id": "a"}}'
    without = [
        with_ad.replace(b'"a"', b"null"),
        with_ad.replace(b'{"ad_id": "a"}', b"null"),
        with_ad.replace(b"2024-03-01T10:00:00Z", b"soon"),
        with_ad.replace(b"7", b"null", 1),
        with_ad.replace(b"404", b"null"),
        with_ad[:-1],
        b"[]",
    ]
    [ad] = ad_posts(map(post, [*without, with_ad]))
    assert (ad.topic, ad.key) == ("ads", "7")
    assert ad.record == (
        b'{"ad_id": "a", "visit_id": "7", "page": "404", "displayed_at": "2024-03-01T10:00:20+00:00"}'
    )


def test_each_record_has_an_id_of_its_own() -> None:
    posts = list(page_change_posts())
    assert len({post.id for post in posts}) == len(posts) == 120
