"""Replay and Backfill's plan: which chunks, how far, and what is refused. No Spark."""

from __future__ import annotations

import datetime as dt
import math

import pytest

from python_jobs.idempotency.backfill_plan import (
    NO_ROWS,
    Chunk,
    ChunkStatus,
    Profile,
    chunks_of,
    deviations,
    job_status,
    missing_source,
    open_dates,
    percent_done,
)


@pytest.mark.parametrize(
    ("first", "last", "days", "expected"),
    [
        ("2024-02-28", "2024-03-08", 7, ["2024-02-28..2024-03-05", "2024-03-06..2024-03-08"]),
        ("2024-03-01", "2024-03-03", 1, ["2024-03-01", "2024-03-02", "2024-03-03"]),
        ("2024-03-01", "2024-03-01", 7, ["2024-03-01"]),
        ("2024-12-30", "2025-01-02", 2, ["2024-12-30..2024-12-31", "2025-01-01..2025-01-02"]),
    ],
)
def test_a_range_is_cut_into_chunks_that_hold_each_date_once(
    first: str, last: str, days: int, expected: list[str]
) -> None:
    chunks = chunks_of(first, last, days)
    assert chunks_of(first, last) == chunks_of(first, last, 7)
    assert [str(chunk) for chunk in chunks] == expected
    dates = [date for chunk in chunks for date in chunk.dates]
    assert (dates[0], dates[-1], len(dates)) == (first, last, len(set(dates)))


@pytest.mark.parametrize(
    ("first", "last", "days", "sentence"),
    [
        ("2024-03-02", "2024-03-01", 7, "the backfill from 2024-03-02 to 2024-03-01 is empty"),
        ("2024-03-01", "2024-03-02", 0, "chunk_days is 0"),
        ("2024-02-30", "2024-03-02", 7, "'2024-02-30' is not a date"),
        ("2024-03-01T00", "2024-03-02", 7, "'2024-03-01T00' is not a date"),
    ],
)
def test_a_range_that_makes_no_sense_is_refused(first: str, last: str, days: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        chunks_of(first, last, days)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ("2024-03-03T23:59:59+00:00", ["2024-03-03"]),
        ("2024-03-04T00:00:00+00:00", []),
        # In Tokyo the 4th has begun, in UTC the 3rd is not over.
        ("2024-03-04T08:00:00+09:00", ["2024-03-03"]),
        ("2024-03-02T12:00:00+00:00", ["2024-03-02", "2024-03-03"]),
    ],
)
def test_a_date_is_open_until_it_is_over_in_utc(now: str, expected: list[str]) -> None:
    assert open_dates("2024-03-01", "2024-03-03", dt.datetime.fromisoformat(now)) == expected


@pytest.mark.parametrize(
    ("statuses", "status", "percent"),
    [
        (["done", "done", "pending", "pending", "pending"], "running", 40),
        (["done", "failed", "pending", "done", "done"], "running", 60),
        (["done", "failed", "done", "done", "done"], "completed_with_failures", 80),
        (["done", "done"], "completed", 100),
        (["pending"], "running", 0),
        (["done", "done", "failed"], "completed_with_failures", 66),
        (["done", "abandoned"], "abandoned", 50),
    ],
)
def test_a_job_is_complete_when_all_of_its_chunks_are_done(
    statuses: list[ChunkStatus], status: str, percent: int
) -> None:
    assert (job_status(statuses), percent_done(statuses)) == (status, percent)


@pytest.mark.parametrize(
    ("source_rows", "target_rows", "is_complete", "is_missing"),
    [
        (0, 3, None, True),
        (0, 0, None, False),
        (4, 10, None, True),
        (5, 10, None, False),
        (10, 3, None, False),
        (0, 3, True, False),
        (1, 10, True, False),
        (0, 3, False, True),
        (0, 0, False, True),
        (10, 3, False, True),
    ],
)
def test_an_expired_source_is_told_from_a_date_without_rows(
    source_rows: int, target_rows: int, is_complete: bool | None, is_missing: bool
) -> None:
    assert (missing_source(source_rows, target_rows, is_complete, 0.5) is not None) == is_missing


def test_without_a_least_share_an_empty_source_is_still_missing() -> None:
    assert missing_source(0, 3, None, 0) == "its source has 0 rows, the target 3: it may have expired"
    assert missing_source(1, 300, None, 0) is None
    assert missing_source(10, 3, False, 0) == "its source has no marker, so it is not complete"


OLD = Profile(10, totals={"views": 100.0}, nulls={"page": 1})


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (Profile(8, totals={"views": 120.0}, nulls={"page": 0}), []),
        (Profile(5, totals={"views": 100.0}), ["5 rows in place of 10"]),
        (Profile(13, totals={"views": 100.0}), ["13 rows in place of 10"]),
        (Profile(10, totals={"views": 79.0}), ["views sums up to 79.0 in place of 100.0"]),
        (Profile(10, totals={"views": None}), ["views sums up to None in place of 100.0"]),
        (
            Profile(10, totals={"views": 100.0}, nulls={"page": 4}),
            ["page is NULL in 40% of the rows in place of 10%"],
        ),
        (
            Profile(10, totals={"views": 100.0}, nulls={"user": 3}),
            ["user is NULL in 30% of the rows in place of 0%"],
        ),
        (Profile(10, totals={"views": 100.0}, nulls={"page": 2}), []),
        (NO_ROWS, ["0 rows in place of 10", "views sums up to None in place of 100.0"]),
    ],
)
def test_rows_totals_and_nulls_are_compared_with_the_old_ones(new: Profile, expected: list[str]) -> None:
    assert deviations(OLD, new, 0.2) == expected


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.2)])
def test_a_total_of_nought_is_a_number_like_any_other(before: float, after: float) -> None:
    new, old = (Profile(10, totals={"views": views}) for views in (after, before))
    assert deviations(old, new, 0.5) == [f"views sums up to {after} in place of {before}"]
    assert deviations(old, old, 0.0) == []


def test_a_total_that_can_t_be_compared_hides_no_other() -> None:
    old = Profile(10, totals={"views": math.nan, "seconds": 10.0})
    new = Profile(10, totals={"views": 1.0, "seconds": 1.0})
    assert deviations(old, new, 0.2) == ["seconds sums up to 1.0 in place of 10.0"]


def test_profiles_have_one_content_if_rows_and_hashes_are_equal() -> None:
    assert Profile(2, 7, nulls={"page": 1}).has_content_of(Profile(2, 7))
    assert not Profile(2, 7).has_content_of(Profile(2, 8))
    assert not Profile(2, 7).has_content_of(Profile(3, 7))


@pytest.mark.parametrize("total", [math.nan, math.inf, -math.inf])
def test_a_total_that_is_no_number_is_refused_and_compared_with_nothing(total: float) -> None:
    new, old = (Profile(10, totals={"views": views}) for views in (100.0, total))
    fault = [f"views sums up to {total}, which is no number"]
    assert deviations(new, old, 0.2) == fault
    assert deviations(old, old, 0.2) == fault
    assert deviations(NO_ROWS, old, 0.2) == fault
    assert deviations(old, new, 0.2) == []
    assert deviations(old, Profile(13, totals={"views": 100.0}), 0.2) == ["13 rows in place of 10"]


@pytest.mark.parametrize("bound", [math.nan, math.inf])
def test_a_bound_that_is_no_number_lets_nothing_pass(bound: float) -> None:
    assert deviations(Profile(10), Profile(10), bound) == ["10 rows in place of 10"]
    assert missing_source(10, 10, None, bound) == "its source has 10 rows, the target 10: it may have expired"


def test_a_date_without_old_rows_has_nothing_to_be_compared_with() -> None:
    assert deviations(NO_ROWS, Profile(1000, totals={"views": 5.0}, nulls={"page": 1000}), 0.0) == []


def test_chunks_overlap_when_they_share_a_date() -> None:
    week = Chunk("2024-03-01", "2024-03-07")
    assert week.overlaps(Chunk("2024-03-07", "2024-03-09"))
    assert Chunk("2024-03-07", "2024-03-09").overlaps(week)
    assert not week.overlaps(Chunk("2024-03-08", "2024-03-09"))
    assert not Chunk("2024-03-08", "2024-03-09").overlaps(week)
    assert week.widened(1) == Chunk("2024-02-29", "2024-03-08")
