"""Circuit Breaker: calls to a dependency; the clock is the test's, so nothing waits."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from python_jobs.error_management.circuit_breaker import (
    Answer,
    BreakerPolicy,
    CircuitBreaker,
    CircuitOpen,
    Outcome,
    State,
)
from python_jobs.shared.core.failures import JobFailed, NotReady, WrongUse
from python_jobs.shared.core.retry import Retrier, RetryBudgetExhausted, RetryPolicy
from tests.support.http_server import QuietHandler, serving
from tests.support.snippets import snippet
from tests.support.waiting import at_once

PAGE = "docs/error_management.md"
HERE = "tests/patterns/error_management/test_circuit_breaker.py"
START = 1_700_000_000.0


class Dependency:
    """Counts its calls and does what the test says; ``breaker()`` is as a new process would make it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = START
        self.calls = 0

    def breaker(self, name: str = "articles", **policy: Any) -> CircuitBreaker:
        return CircuitBreaker(name, self.folder, BreakerPolicy(**policy), clock=lambda: self.now)

    def good(self) -> str:
        self.calls += 1
        return "good"

    def bad(self) -> str:
        self.calls += 1
        raise TimeoutError("no answer")

    def fail(self, times: int, breaker: CircuitBreaker | None = None) -> None:
        for _ in range(times):
            with pytest.raises(TimeoutError):
                (breaker or self.breaker()).call(self.bad)


@pytest.fixture
def dependency(tmp_path: Path) -> Dependency:
    return Dependency(tmp_path / "circuits")


def test_after_five_failures_the_dependency_is_left_alone(dependency: Dependency) -> None:
    dependency.fail(5)
    with pytest.raises(CircuitOpen) as rejected:
        dependency.breaker().call(dependency.good)
    assert str(rejected.value) == (
        "the circuit 'articles' is open until 2023-11-14T22:14:20+00:00 (TimeoutError); nothing was called"
    )
    assert isinstance(rejected.value, NotReady), "exit code 4"
    assert dependency.calls == 5


def test_a_success_between_failures_keeps_it_closed(dependency: Dependency) -> None:
    dependency.fail(4)
    dependency.breaker().call(dependency.good)
    dependency.fail(4)
    assert dependency.breaker().status().state is State.CLOSED
    dependency.fail(1)
    assert dependency.breaker().status().state is State.OPEN


def test_failures_mixed_with_successes_open_it_by_their_rate(dependency: Dependency) -> None:
    calls = 0
    while dependency.breaker().status().state is State.CLOSED:
        if calls % 3 == 2:
            dependency.breaker().call(dependency.good)
        else:
            dependency.fail(1)
        calls += 1
    assert calls == 20, "two of three fail; the rate counts from minimum_calls on"


def test_failures_older_than_the_window_are_forgotten(dependency: Dependency) -> None:
    for _ in range(10):
        dependency.fail(1)
        dependency.now += 150.1
    assert dependency.breaker().status().state is State.CLOSED
    assert len(dependency.breaker().status().outcomes) == 4
    dependency.now -= 150.1
    dependency.fail(1)
    assert dependency.breaker().status().state is State.OPEN


@pytest.mark.parametrize(("later", "state"), [(600, State.OPEN), (600.001, State.CLOSED)])
def test_an_outcome_as_old_as_the_window_still_counts(
    dependency: Dependency, later: float, state: State
) -> None:
    dependency.fail(4)
    dependency.now += later
    dependency.fail(1)
    assert dependency.breaker().status().state is state


@pytest.mark.parametrize(("good", "state"), [(10, State.OPEN), (11, State.CLOSED)])
def test_a_share_of_failures_that_equals_the_rate_opens_it(
    dependency: Dependency, good: int, state: State
) -> None:
    breaker = dependency.breaker(failures_in_a_row=100, minimum_calls=20)
    for _ in range(good):
        breaker.call(dependency.good)
    dependency.fail(10, breaker)
    assert breaker.status().state is state


def test_five_answers_that_no_list_knows_open_it(dependency: Dependency) -> None:
    """522 is a proxy's: its origin did not answer."""

    def unavailable() -> None:
        answer = requests.Response()
        answer.status_code = 522
        answer.raise_for_status()

    for _ in range(5):
        with pytest.raises(requests.HTTPError):
            dependency.breaker().call(unavailable)
    with pytest.raises(CircuitOpen):
        dependency.breaker().call(dependency.good)


def test_one_probe_passes_after_the_pause_and_a_second_caller_is_rejected(dependency: Dependency) -> None:
    dependency.fail(5)
    dependency.now += 59.9
    with pytest.raises(CircuitOpen):
        dependency.breaker().call(dependency.good)
    dependency.now += 0.1

    def probe() -> str:
        with pytest.raises(CircuitOpen, match="is half open until"):
            dependency.breaker().call(dependency.good)
        return dependency.good()

    assert dependency.breaker().call(probe) == "good"
    assert dependency.calls == 6


def test_of_many_threads_exactly_one_probes(dependency: Dependency) -> None:
    dependency.fail(5)
    dependency.now += 60

    def is_admitted() -> bool:
        try:
            dependency.breaker().admit()
        except CircuitOpen:
            return False
        return True

    assert sorted(at_once(*[is_admitted] * 8)) == [False] * 7 + [True]


def test_a_failed_probe_opens_it_for_as_long_again_and_a_good_one_closes_it(dependency: Dependency) -> None:
    dependency.fail(5)
    dependency.now += 60
    dependency.fail(1)
    dependency.now += 59.9
    with pytest.raises(CircuitOpen):
        dependency.breaker().call(dependency.good)
    dependency.now += 0.1
    dependency.breaker().call(dependency.good)
    circuit = dependency.breaker().status()
    assert (circuit.state, circuit.outcomes, circuit.retry_at) == (State.CLOSED, (), None)
    dependency.fail(4)
    assert dependency.breaker().status().state is State.CLOSED


def test_a_probe_whose_process_died_is_given_up(dependency: Dependency) -> None:
    dependency.fail(5)
    dependency.now += 60
    dead = dependency.breaker().admit()
    dependency.now += 59.9
    with pytest.raises(CircuitOpen):
        dependency.breaker().admit()
    dependency.now += 0.1
    alive = dependency.breaker().admit()
    assert alive != dead
    dependency.breaker().record(dead, ok=True)
    assert dependency.breaker().status().state is State.HALF_OPEN, "a late answer decides nothing"
    dependency.breaker().record(alive, ok=True)
    assert dependency.breaker().status().state is State.CLOSED


def test_calls_that_began_before_it_opened_change_nothing(dependency: Dependency) -> None:
    early = dependency.breaker().admit()
    dependency.fail(5)
    before = dependency.breaker().status()
    dependency.breaker().record(early, ok=True)
    assert dependency.breaker().status() == before


def test_errors_of_the_caller_never_open_it_and_do_not_decide_a_probe(dependency: Dependency) -> None:
    def invalid() -> None:
        raise ValueError("no such field")

    for _ in range(10):
        with pytest.raises(ValueError, match="no such field"):
            dependency.breaker().call(invalid)
    assert dependency.breaker().status().state is State.CLOSED

    dependency.fail(5)
    dependency.now += 60
    with pytest.raises(ValueError, match="no such field"):
        dependency.breaker().call(invalid)
    assert dependency.breaker().status().state is State.OPEN
    dependency.breaker().call(dependency.good)
    assert dependency.breaker().status().state is State.CLOSED, "the next caller may probe at once"


def test_an_interrupted_probe_leaves_the_next_one_its_turn(dependency: Dependency) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    dependency.fail(5)
    dependency.now += 60
    with pytest.raises(KeyboardInterrupt):
        dependency.breaker().call(interrupted)
    assert dependency.breaker().call(dependency.good) == "good"


def test_retries_that_were_used_up_count_as_one_failure(dependency: Dependency) -> None:
    retrier = Retrier(RetryPolicy(base_seconds=0, attempts=3, total_seconds=1e-9))
    with pytest.raises(RetryBudgetExhausted):
        dependency.breaker().call(lambda: retrier.call(lambda _: dependency.bad(), idempotent=True))
    assert [outcome.ok for outcome in dependency.breaker().status().outcomes] == [False]


def test_state_and_transitions_are_metrics_and_each_opening_alerts_once(
    dependency: Dependency, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        dependency.fail(5)
        for _ in range(3):
            with pytest.raises(CircuitOpen):
                dependency.breaker().call(dependency.good)
        dependency.now += 60
        dependency.fail(1)  # the same outage
    circuit = dependency.breaker().status()
    assert (circuit.state, circuit.openings, circuit.transitions) == (State.OPEN, 1, 3)
    assert caplog.messages == ["alert: the circuit 'articles' has opened: TimeoutError"]

    dependency.now += 60
    dependency.breaker().call(dependency.good)
    dependency.fail(5)
    circuit = dependency.breaker().status()
    assert (circuit.openings, circuit.transitions) == (2, 6)
    assert len(caplog.messages) == 2


def test_each_transition_has_its_time(dependency: Dependency) -> None:
    seen = []

    def look() -> None:
        circuit = dependency.breaker().status()
        seen.append((circuit.state, circuit.changed_at, circuit.retry_at))

    dependency.fail(5)
    look()
    dependency.now += 60
    permit = dependency.breaker().admit()
    look()
    dependency.breaker().record(permit, ok=False)
    look()
    dependency.now += 1
    dependency.breaker().reset()
    look()
    assert seen == [
        (State.OPEN, START, START + 60),
        (State.HALF_OPEN, START + 60, START + 120),
        (State.OPEN, START + 60, START + 120),
        (State.CLOSED, START + 61, None),
    ]
    assert dependency.breaker().status().outcomes == ()


def test_of_a_subject_the_latest_outcome_counts(dependency: Dependency) -> None:
    breaker = dependency.breaker()
    for subject, ok in (("a", False), ("b", False), ("a", True), (None, False)):
        breaker.record(breaker.admit(), ok=ok, subject=subject)
    assert breaker.status().outcomes == (
        Outcome(START, ok=False, subject="b"),
        Outcome(START, ok=True, subject="a"),
        Outcome(START, ok=False, subject=None),
    )


def test_each_name_has_a_circuit_of_its_own(dependency: Dependency) -> None:
    dependency.fail(5, dependency.breaker("articles-eu"))
    with pytest.raises(CircuitOpen):
        dependency.breaker("articles-eu").call(dependency.good)
    assert dependency.breaker("articles-us").call(dependency.good) == "good"


def test_reset_closes_it_by_hand(dependency: Dependency) -> None:
    dependency.fail(5)
    dependency.breaker().reset()
    assert dependency.breaker().call(dependency.good) == "good"
    dependency.fail(4)
    dependency.breaker().reset()
    dependency.fail(4)
    assert dependency.breaker().status().state is State.CLOSED, "the window is forgotten too"


def test_a_clock_that_is_set_back_makes_nobody_wait_longer(dependency: Dependency) -> None:
    dependency.fail(5)
    dependency.now -= 86400
    with pytest.raises(CircuitOpen):
        dependency.breaker().call(dependency.good)
    dependency.now += 60
    assert dependency.breaker().call(dependency.good) == "good"


def test_the_file_names_its_format_and_circuit_and_a_call_that_changes_nothing_leaves_it(
    tmp_path: Path,
) -> None:
    dependency = Dependency(tmp_path / "above" / "circuits")
    dependency.breaker("Visits-eu").call(dependency.good)
    file = dependency.folder / "Visits-eu.json"
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert (stored["format_version"], stored["name"], stored["state"]) == (1, "Visits-eu", "closed")
    written = file.stat().st_ino
    dependency.breaker("Visits-eu").admit()
    assert file.stat().st_ino == written, "a new file has another number"
    assert dependency.breaker("users").admit().probe is None
    assert (dependency.folder / "users.json").exists()


def test_a_rejected_call_names_the_latest_failure(dependency: Dependency) -> None:
    breaker = dependency.breaker(failures_in_a_row=1, open_seconds=60)
    breaker.call(lambda: 500, lambda status: status >= 500)
    assert breaker.status().reason == "a result that counts as failure"
    dependency.now += 60
    permit = breaker.admit()
    breaker.record(permit, False, "a failed probe")
    assert breaker.status().reason == "a failed probe"
    dependency.now += 60
    breaker.record(breaker.admit(), False)
    after = breaker.status()
    assert (after.reason, after.changed_at, after.retry_at) == ("a failed probe", START + 120, START + 180)
    dependency.now += 60
    breaker.record(breaker.admit(), True)
    assert (breaker.status().state, breaker.status().changed_at) == (State.CLOSED, START + 180)
    breaker.record(breaker.admit(), False)
    assert breaker.status().reason == ""


def test_the_longest_pause_is_a_hundred_years() -> None:
    assert BreakerPolicy(open_seconds=3_153_600_000).open_seconds == 3_153_600_000
    for policy, sentence in [
        (
            {"open_seconds": 3_153_600_001},
            "open_seconds must be 3153600000 (100 years) or less, got 3.1536e+09",
        ),
        ({"failure_rate": 1.5}, "failure_rate is 1.5; it is a share above 0 and up to 1"),
    ]:
        with pytest.raises(WrongUse) as refused:
            BreakerPolicy(**policy)  # type: ignore[arg-type]
        assert str(refused.value) == sentence


def test_the_file_is_replaced_whole_and_a_damaged_one_is_refused(dependency: Dependency) -> None:
    dependency.fail(1)
    path = dependency.folder / "articles.json"
    stored = json.loads(path.read_text())
    assert stored["state"] == "closed"
    assert stored["outcomes"] == [{"at": "2023-11-14T22:13:20+00:00", "ok": False, "subject": None}]
    assert dependency.breaker().status().outcomes == (Outcome(START, ok=False),)
    assert {p.name for p in dependency.folder.iterdir()} <= {"articles.json", ".articles.lock"}

    path.write_text(path.read_text()[:40])
    with pytest.raises(
        JobFailed, match=r"articles.json can't be read \(JSONDecodeError\); repair or remove it"
    ):
        dependency.breaker().call(dependency.good)
    assert dependency.calls == 1


@pytest.mark.parametrize("name", ["", "../articles", ".articles", "a b"])
def test_names_that_are_no_file_names_are_refused(dependency: Dependency, name: str) -> None:
    with pytest.raises(WrongUse, match="is no name of a circuit"):
        dependency.breaker(name)


@pytest.mark.parametrize(
    "policy",
    [
        {"failures_in_a_row": 0},
        {"minimum_calls": 0},
        {"failure_rate": 0},
        {"failure_rate": 1.1},
        {"open_seconds": 0},
        {"window_seconds": 0},
        {"window_seconds": math.nan},
        {"open_seconds": math.nan},
        {"failure_rate": math.nan},
        {"minimum_calls": math.nan},
    ],
)
def test_wrong_policies_are_refused(policy: dict[str, Any]) -> None:
    BreakerPolicy(failures_in_a_row=1, minimum_calls=1, failure_rate=1)
    with pytest.raises(WrongUse):
        BreakerPolicy(**policy)


class ArticleService:
    """A local HTTP server that answers with the status it is told to."""

    status = 200
    calls = 0
    url = ""


@pytest.fixture(scope="module")
def service() -> Iterator[ArticleService]:
    told = ArticleService()

    class Handler(QuietHandler):
        def get(self) -> None:
            told.calls += 1
            self.answer(told.status, b'{"title": "Delta"}')

    with serving(Handler) as url:
        told.url = f"{url}/articles/7"
        yield told


def test_answers_of_500_open_it_and_the_last_good_value_is_marked_stale(
    dependency: Dependency, service: ArticleService
) -> None:
    scope: dict[str, Any] = {"folder": dependency.folder, "url": service.url, "session": requests.Session()}
    exec(snippet(PAGE, f"{HERE}::test_answers_of_500_open_it_and_the_last_good_value_is_marked_stale"), scope)
    breaker: CircuitBreaker = scope["breaker"]
    breaker._clock = lambda: dependency.now
    read: Callable[[], Answer[requests.Response]] = scope["read_article"]

    service.status, service.calls = 500, 0
    with pytest.raises(JobFailed, match="'articles' gave no good value, and there is no earlier one"):
        read()
    service.status = 200
    assert (read().stale, read().value.json()) == (False, {"title": "Delta"})
    dependency.now += 5
    service.status = 500
    answers = [read() for _ in range(5)]
    assert {(answer.stale, answer.read_at, answer.value.status_code) for answer in answers} == {
        (True, START, 200)
    }
    assert breaker.status().state is State.OPEN

    service.status, service.calls = 200, 0
    assert read().stale
    assert service.calls == 0, "open: the service is left alone"
    dependency.now += 60
    assert not read().stale


def test_the_last_good_value_hides_no_error_of_the_caller(dependency: Dependency) -> None:
    breaker = dependency.breaker()
    breaker.call_or_last_good(dependency.good)

    def invalid() -> str:
        raise ValueError("no such field")

    with pytest.raises(ValueError, match="no such field"):
        breaker.call_or_last_good(invalid)
    assert breaker.call_or_last_good(dependency.bad) == Answer("good", stale=True, read_at=START)
