"""Stories: tests with their own rows or models that take their expensive steps together.

A story is a generator. It prepares its input, yields for the step, and asserts the result of the step::

    stories = DbtStories()

    @stories.about("users")
    def test_a_deleted_user_is_removed(project: DbtProject) -> Story:
        project.source("users_input", ...)
        yield PASSES
        project.source("users_input", ...)
        message = yield FAILS
        assert "..." in message

The first story that pytest runs also runs all other selected stories of its kind: one call serves the first step of
every story, the next call serves every second step, and so on. Each story then fails or passes alone.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from typing import Generic, TypeVar

import pytest

from tests.support.dbt_project import DbtProject


class Expected(enum.Enum):
    """The result that a story expects of its next step."""

    PASSES = enum.auto()
    FAILS = enum.auto()


PASSES, FAILS = Expected.PASSES, Expected.FAILS
Story = Generator[Expected, str, None]
Given = TypeVar("Given")


class Stories(ABC, Generic[Given]):
    """Stories of one test module that take their steps together."""

    def __init__(self) -> None:
        self._stories: dict[str, Callable[[Given], Story]] = {}
        self._problems: dict[str, BaseException] = {}
        self._told = False

    def story(self, story: Callable[[Given], Story]) -> Callable[[pytest.FixtureRequest], None]:
        """Return the test of a story: a decorator."""
        name = story.__name__
        self._stories[name] = story

        def test(request: pytest.FixtureRequest) -> None:
            if not self._told:
                self._told = True
                self.open(request)
                self._tell({item.name for item in request.session.items if item.path == request.path})
            if name in self._problems:
                raise self._problems[name]

        test.__name__, test.__qualname__, test.__module__ = name, name, story.__module__
        test.__doc__ = story.__doc__
        return test

    @abstractmethod
    def open(self, request: pytest.FixtureRequest) -> None:
        """Request the fixtures that the stories share."""

    @abstractmethod
    def given(self, name: str) -> Given:
        """Return the arguments of the story ``name``."""

    @abstractmethod
    def take_step(self, stories: Mapping[str, Given]) -> Mapping[str, str]:
        """Run the next step of these stories at once; return the error of each story that has one."""

    def _tell(self, selected: set[str]) -> None:
        """Run all steps of the selected stories and record each story's problem."""
        given = {name: self.given(name) for name in self._stories if name in selected}
        told = {name: self._stories[name](given[name]) for name in given}
        waiting = {name: self._resume(name, lambda story=story: next(story)) for name, story in told.items()}
        while waiting := {name: expected for name, expected in waiting.items() if expected}:
            try:
                errors = self.take_step({name: given[name] for name in waiting})
            except Exception as error:  # no story can go on
                self._problems |= dict.fromkeys(waiting, error)
                return
            waiting = {
                name: self._resume(name, _reply(told[name], expected, errors.get(name, "")))
                for name, expected in waiting.items()
            }

    def _resume(self, name: str, go_on: Callable[[], Expected]) -> Expected | None:
        """Continue one story; return the result that it expects of its next step, or None at its end."""
        try:
            return go_on()
        except StopIteration:
            pass
        except Exception as problem:
            self._problems[name] = problem
        return None


def _reply(story: Story, expected: Expected, error: str) -> Callable[[], Expected]:
    """Return how to continue the story: with the error that it expects, or with a failure where it yielded."""
    if expected is PASSES and error:
        return lambda: story.throw(AssertionError(error))
    if expected is FAILS and not error:
        return lambda: story.throw(AssertionError("the step passed, a failure was expected"))
    return lambda: story.send(error)


class DbtStories(Stories[DbtProject]):
    """Stories about models of the module's fixture ``project``; a step is one ``dbt run``, or another command."""

    def __init__(self, command: str = "run") -> None:
        super().__init__()
        self._command = command
        self._nodes: dict[str, tuple[str, ...]] = {}

    def about(
        self, *nodes: str
    ) -> Callable[[Callable[[DbtProject], Story]], Callable[[pytest.FixtureRequest], None]]:
        """Return a decorator that makes the test of a story about ``nodes``, which no other story builds."""

        def decorate(story: Callable[[DbtProject], Story]) -> Callable[[pytest.FixtureRequest], None]:
            taken = {node for others in self._nodes.values() for node in others} & set(nodes)
            if taken:
                raise ValueError(f"{story.__name__} shares {sorted(taken)} with another story")
            self._nodes[story.__name__] = nodes
            return self.story(story)

        return decorate

    def open(self, request: pytest.FixtureRequest) -> None:
        """Request the fixture ``project``."""
        self._project: DbtProject = request.getfixturevalue("project")

    def given(self, name: str) -> DbtProject:
        """Return the project."""
        return self._project

    def take_step(self, stories: Mapping[str, DbtProject]) -> Mapping[str, str]:
        """Call dbt for the nodes of these stories."""
        nodes = [node for name in stories for node in self._nodes[name]]
        errors = self._project.outcomes(self._command, "--select", *nodes)
        others = [error for node, error in errors.items() if error and node not in nodes]
        if others:  # a data test, say, that comes with a model
            raise AssertionError("\n".join(others))
        return {
            name: "\n".join(error for node in self._nodes[name] if (error := errors.get(node, "not run")))
            for name in stories
        }
