"""Stories: one step serves all, and each story fails or passes alone."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from tests.support.stories import FAILS, PASSES, DbtStories, Stories, Story
from tests.support.waiting import eventually, polled

STEPS: list[list[str]] = []


class Numbers(Stories[list[int]]):
    """A step refuses a story whose list is empty, and adds one to each number of the others."""

    def open(self, request: pytest.FixtureRequest) -> None:
        STEPS.clear()

    def given(self, name: str) -> list[int]:
        return []

    def take_step(self, stories: Mapping[str, list[int]]) -> Mapping[str, str]:
        STEPS.append(list(stories))
        for numbers in stories.values():
            numbers[:] = [number + 1 for number in numbers]
        return {name: "no number" for name, numbers in stories.items() if not numbers}


numbers = Numbers()


@numbers.story
def test_a_story_of_two_steps(given: list[int]) -> Story:
    given.append(1)
    yield PASSES
    given.append(1)
    yield PASSES
    assert given == [3, 2]


@numbers.story
def test_a_story_of_one_step(given: list[int]) -> Story:
    assert (yield FAILS) == "no number"
    given.append(1)


def test_the_stories_took_their_steps_together() -> None:
    first, second = "test_a_story_of_two_steps", "test_a_story_of_one_step"
    assert [[first, second], [first]] == STEPS


def test_each_story_fails_alone_and_where_it_yielded() -> None:
    stories = Numbers()

    def wrong_expectation(given: list[int]) -> Story:
        yield PASSES

    def wrong_failure(given: list[int]) -> Story:
        given.append(1)
        yield FAILS

    def wrong_assertion(given: list[int]) -> Story:
        given.append(1)
        yield PASSES
        assert given == [1]

    def sound(given: list[int]) -> Story:
        given.append(1)
        yield PASSES

    for story in (wrong_expectation, wrong_failure, wrong_assertion, sound):
        stories.story(story)
    stories._tell({"wrong_expectation", "wrong_failure", "wrong_assertion", "sound"})
    assert stories._problems.keys() == {"wrong_expectation", "wrong_failure", "wrong_assertion"}
    assert str(stories._problems["wrong_expectation"]) == "no number"
    assert "a failure was expected" in str(stories._problems["wrong_failure"])


def test_two_stories_cannot_be_about_one_model() -> None:
    stories = DbtStories()
    stories.about("users")(lambda project: iter(()))
    with pytest.raises(ValueError, match=r"shares \['users'\] with another story"):
        stories.about("users", "visits")(lambda project: iter(()))


def test_a_reader_must_have_read_during_the_write() -> None:
    written = threading.Event()

    def read_slowly() -> int:
        written.wait()
        return 1

    with pytest.raises(AssertionError, match="no read began and ended meanwhile"), polled(read_slowly):
        threading.Timer(0.05, written.set).start()

    reads: list[int] = []
    with polled(lambda: reads.append(1)) as seen:
        before = len(reads)
        eventually(lambda: len(reads) > before + 2)
    assert len(seen) > 2


class Writer:
    written = 0

    def write(self) -> None:
        self.written += 1


def test_a_short_write_waits_for_a_reader() -> None:
    writer = Writer()
    with polled(lambda: writer.written, held=(Writer, "write")) as seen:
        writer.write()
    assert (seen[0], seen[-1]) == (0, 1)
    with pytest.raises(AssertionError, match=r"write'.* was never called"):  # noqa: SIM117
        with polled(lambda: 1, held=(Writer, "write")) as seen:
            eventually(lambda: len(seen) > 2)
