"""Versions of a key: a row takes the version of its time, and no state is kept that nothing needs."""

from __future__ import annotations

import itertools
import random

import pytest

from python_jobs.data_value.versions import Advance, Answer, Probe, Version, advance, next_change, version_at

A1, A2 = Version(100, (0,), "a1"), Version(105, (1,), "a2")
A1B = Version(103, (2,), "a1b")
EARLY, BETWEEN, EXACT = Probe(99, "early"), Probe(104, "between"), Probe(105, "exact")


def test_a_probe_takes_the_latest_version_that_is_not_after_it() -> None:
    result = advance([A2, A1], [], [EXACT, EARLY, BETWEEN], watermark=98)
    assert result.answers == []
    assert advance(result.versions, result.waiting, [], watermark=105).answers == [
        Answer(EARLY, None),
        Answer(BETWEEN, A1),
        Answer(EXACT, A2),
    ]


def test_a_version_out_of_order_counts_until_the_watermark_has_reached_the_probe() -> None:
    waiting = advance([A1, A2], [], [BETWEEN], watermark=103)
    in_time = advance([*waiting.versions, A1B], waiting.waiting, [], watermark=104)
    assert in_time.answers == [Answer(BETWEEN, A1B)]
    answered = advance(waiting.versions, waiting.waiting, [], watermark=104)
    assert answered.answers == [Answer(BETWEEN, A1)]
    assert advance([*answered.versions, A1B], answered.waiting, [], watermark=104).answers == []


def test_a_late_version_counts_for_later_probes_unless_a_newer_one_is_known() -> None:
    after = advance([A1, A1B], [], [Probe(200, "p")], watermark=150)
    assert after.versions == [A1B], "of those that the watermark has reached the newest alone"
    older = advance([*after.versions, A1], after.waiting, [], watermark=200)
    assert older.answers == [Answer(Probe(200, "p"), A1B)]
    newer = advance([*after.versions, A2], after.waiting, [], watermark=200)
    assert newer.answers == [Answer(Probe(200, "p"), A2)]


def test_a_new_probe_behind_the_watermark_has_no_answer() -> None:
    assert advance([A1], [], [BETWEEN], watermark=104) == Advance([], [A1], [])


def test_a_deletion_is_a_version_without_value_that_hides_older_ones() -> None:
    deletion = Version(103, (1,), None)
    result = advance([A1, deletion], [BETWEEN], [], watermark=104)
    assert result.answers == [Answer(BETWEEN, deletion)]
    assert result.versions == [deletion], "a late version from before the deletion must not hold again"


def test_ties_and_repeats_have_one_result_in_any_order() -> None:
    tied = [
        Version(100, (0,), "b"),
        Version(100, (1,), "a"),
        Version(100, (1,), None),
        Version(100, (1,), "a"),
    ]
    for versions in itertools.permutations(tied):
        assert advance(versions, [], [Probe(100, "p"), Probe(100, "p")], 99).waiting == [Probe(100, "p")]
        assert advance(versions, [Probe(100, "p")], [], 100).answers == [Answer(Probe(100, "p"), tied[1])]


def test_of_versions_of_one_time_and_order_the_greatest_value_counts() -> None:
    versions = [Version(100, (), value) for value in ("B", "", "D", "A", "C")]
    assert advance(versions, [Probe(100, "p")], [], 100).answers == [Answer(Probe(100, "p"), versions[2])]
    assert advance(versions[1::2], [Probe(100, "p")], [], 100).answers == [
        Answer(Probe(100, "p"), versions[3])
    ], "an empty value is less than any other"


@pytest.mark.parametrize(("at", "found"), [(109, A1B), (113, A1B), (114, None)])
def test_a_version_may_be_as_old_as_the_validity(at: int, found: Version | None) -> None:
    assert version_at([A1B], at, validity=10) == found
    assert version_at([A1B], at) == A1B
    assert advance([A1B], [Probe(at, "p")], [], at, validity=10).answers == [Answer(Probe(at, "p"), found)]


def test_a_version_is_kept_until_its_validity_is_over() -> None:
    assert advance([A1B], [], [], watermark=112, validity=10).versions == [A1B]
    assert advance([A1B], [], [], watermark=113, validity=10).versions == []


def test_the_state_changes_next_with_a_probe_a_newer_version_or_the_end_of_validity() -> None:
    assert next_change([], []) is None
    assert next_change([A1], []) is None, "the last version of a key stays"
    assert next_change([A1, A1B, A2], [EXACT]) == 103
    assert next_change([A1], [EXACT, BETWEEN]) == 104
    assert next_change([A1, A1B], [], validity=2) == 102
    assert next_change([A1, A1B], [], validity=50) == 103


def test_a_change_is_never_due_after_it_was_made() -> None:
    for validity in (None, 3, 50):
        result = advance([A1, A1B, A2], [BETWEEN, EXACT], [], watermark=104, validity=validity)
        after = next_change(result.versions, result.waiting, validity)
        assert after is not None
        assert after > 104


@pytest.mark.parametrize("seed", range(20))
def test_any_batches_give_the_answers_of_all_rows_at_once(seed: int) -> None:
    chance = random.Random(seed)
    versions = [Version(chance.randrange(100), (number,), str(number)) for number in range(15)]
    probes = [Probe(chance.randrange(100), f"p{number}") for number in range(15)]
    expected = {
        probe: max((version for version in versions if version.at <= probe.at), default=None)
        for probe in probes
    }
    # Batches by time, each out of order; the watermark is behind all rows to come.
    kept: list[Version] = []
    waiting: list[Probe] = []
    answers: list[Answer] = []
    for start in range(0, 100, 10):
        new_versions = [version for version in versions if start <= version.at < start + 10]
        new_probes = [probe for probe in probes if start <= probe.at < start + 10]
        result = advance([*kept, *new_versions], waiting, new_probes, start - 1)
        kept, waiting = result.versions, result.waiting
        answers += result.answers
    answers += advance(kept, waiting, [], 100).answers
    assert dict(answers) == expected
    assert len(answers) == len(probes)
