"""Every committed mutation can be applied; the runner tells a noticed mutation from one that survives."""

import datetime as dt
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutations import runner
from tests.mutations.failures import FailureKind
from tests.mutations.runner import Mutation, committed_mutations, sample
from tests.support.pytest_ids import REPOSITORY

ONE = Mutation("m-1", "code.py", "a < b", "a <= b", "tests/test_code.py::test_less")


FAILED = FailureKind(ONE.test, "AssertionError", "assert 1 == 2")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "code.py").write_text("def less(a, b):\n    return a < b\n")
    (tmp_path / "tests" / "test_code.py").write_text("def test_less(): ...\n")
    return tmp_path


def test_every_committed_mutation_can_be_applied() -> None:
    problems = [mutation.problem() for mutation in committed_mutations()]
    assert [problem for problem in problems if problem] == []


def test_no_mutation_is_noticed_for_an_undefined_name_alone(tmp_path: Path) -> None:
    for mutation in committed_mutations():
        if mutation.file.endswith(".py"):
            mutated = mutation.mutated((REPOSITORY / mutation.file).read_text(encoding="utf-8"))
            (tmp_path / f"{mutation.id}.py").write_text(mutated, encoding="utf-8")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "--output-format=concise"]
    undefined = subprocess.run([*ruff, str(tmp_path)], capture_output=True, text=True, check=False)
    assert undefined.returncode == 0, undefined.stdout


def test_mutation_ids_are_unique() -> None:
    counts = Counter(mutation.id for mutation in committed_mutations())
    assert [id for id, count in counts.items() if count > 1] == []


def test_the_named_tests_run_in_the_order_of_their_file() -> None:
    file = "tests/mutations/test_mutations.py"
    first, second = (
        f"{file}::test_mutation_ids_are_unique",
        f"{file}::test_a_sound_mutation_has_no_problem[any]",
    )
    assert sorted([second, first], key=runner._place) == [first, second]


def test_a_sound_mutation_has_no_problem(repository: Path) -> None:
    assert ONE.problem(repository) is None
    assert ONE.mutated((repository / "code.py").read_text()) == "def less(a, b):\n    return a <= b\n"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"file": "gone.py"}, "m-1: there is no file gone.py"),
        ({"find": "a > b"}, "m-1: the text to find occurs 0 times in code.py, it must occur once"),
        ({"find": "a"}, "m-1: the text to find occurs 2 times in code.py, it must occur once"),
        ({"replace": "a < b"}, "m-1: it changes nothing"),
        ({"test": "tests/test_code.py::test_more"}, "m-1: there is no test tests/test_code.py::test_more"),
        ({"test": "tests/test_code.py"}, "m-1: there is no test tests/test_code.py"),
    ],
)
def test_a_stale_mutation_is_refused(repository: Path, change: dict[str, str], problem: str) -> None:
    assert replace(ONE, **change).problem(repository) == problem


def test_consecutive_samples_go_round() -> None:
    five = [replace(ONE, id=str(number)) for number in range(5)]
    days = [dt.date(2026, 11, 27) + dt.timedelta(days=n) for n in range(5)]
    drawn = Counter(mutation.id for day in days for mutation in sample(five, 2, day))
    assert drawn == {"0": 2, "1": 2, "2": 2, "3": 2, "4": 2}
    assert len(sample(five, 9, days[0])) == 5


@pytest.mark.parametrize(
    ("codes", "passed", "said"),
    [
        ([0, 1], True, "noticed   m-1 (AssertionError)"),
        ([0, 0], False, "SURVIVED  m-1: tests/test_code.py::test_less stayed green"),
        ([0, 2], False, "BROKEN    m-1: pytest's exit code is 2"),
        ([1], False, "the tests must be green without a mutation"),
    ],
)
def test_only_a_red_test_after_a_green_one_counts(
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    codes: list[int],
    passed: bool,
    said: str,
) -> None:
    answers = iter(codes)
    monkeypatch.setattr(runner, "REPOSITORY", repository)
    monkeypatch.setattr(runner, "run_tests", lambda tests, mutation=None: (next(answers), "", [FAILED]))
    assert runner.run([ONE]) is passed
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "message", "notices"),
    [
        ("AssertionError", "assert 'x' == 'TypeError: y'", True),
        ("Failed", "DID NOT RAISE <class 'WrongUse'>", True),
        ("WrongUse", "attempts must be 1 or more, got 0", True),
        ("DbtFailed", "users: error: Compilation Error `period` must be a date, got 'struct'", True),
        ("NameError", "name 'x' is not defined", False),
        ("TypeError", "run() missing 1 required argument", False),
        ("AttributeError", "no attribute", False),
        ("ModuleNotFoundError", "No module named 'x'", False),
        ("Py4JJavaError", "An error occurred while calling o1.x", False),
        ("UndefinedError", "'x' is undefined", False),
        ("DbtFailed", "users: error: Compilation Error in model users\n  'keys' is undefined", False),
        (
            "AssertionError",
            "Traceback (most recent call last):\n  File x\nNameError: name 'x'\nassert 1 == 0",
            False,
        ),
        ("StreamingQueryException", "py4j: Traceback\n  File x\nbuiltins.TypeError: x\n", False),
        ("DbtFailed", "users: error: [PARSE_SYNTAX_ERROR] Syntax error at or near 'x'", False),
    ],
)
def test_code_that_can_not_run_notices_nothing(error: str, message: str, notices: bool) -> None:
    assert FailureKind(ONE.test, error, message).notices is notices


def test_a_mutation_whose_code_can_not_run_is_broken(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([(0, "", []), (1, "the trace", [FailureKind(ONE.test, "NameError", "name 'c'")])])
    monkeypatch.setattr(runner, "REPOSITORY", repository)
    monkeypatch.setattr(runner, "run_tests", lambda tests, mutation=None: next(answers))
    assert runner.run([ONE]) is False
    assert "BROKEN    m-1: only its code fails (NameError)\nthe trace" in capsys.readouterr().out


def test_the_copy_is_mutated_and_the_tree_is_not() -> None:
    """A real run on this repository: a test of the harness that needs no Spark, with and without a defect."""
    mutation = Mutation(
        "runner",
        "tests/support/pytest_ids.py",
        "return bool(names) and",
        "return not",
        "tests/mutations/test_mutations.py::test_a_sound_mutation_has_no_problem",
    )
    before = (runner.REPOSITORY / mutation.file).read_text()
    assert runner.run_tests([mutation.test])[0] == 0
    code, _, failures = runner.run_tests([mutation.test], mutation)
    assert (code, [failure.error for failure in failures]) == (runner.TEST_FAILED, ["AssertionError"])
    assert (runner.REPOSITORY / mutation.file).read_text() == before
