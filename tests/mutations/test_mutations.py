"""Every committed mutation can be applied; the runner tells a noticed mutation from one that survives."""

import datetime as dt
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from python_jobs.shared.core.failures import WrongUse
from tests.mutations import runner
from tests.mutations.committed import Mutation, committed_mutations, sample
from tests.mutations.failures import FailureKind, Frame, counts_as
from tests.mutations.independent import independent
from tests.support.pytest_ids import REPOSITORY

ONE = Mutation("m-1", "code.py", "a < b", "a <= b", "tests/test_code.py::test_less")
OTHER = Mutation("m-2", "other.py", "b > a", "b >= a", "tests/test_other.py::test_more")

FAILED = FailureKind(ONE.test, "AssertionError", "assert 1 == 2", "a failed assertion")


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


def test_a_sample_has_mutations_of_many_files() -> None:
    ten = [replace(ONE, id=str(number)) for number in range(10)]
    (drawn,) = {
        frozenset(int(m.id) // 5 for m in sample(ten, 2, dt.date(2026, 11, day))) for day in range(1, 6)
    }
    assert drawn == {0, 1}, "one of the first half and one of the second"


def test_consecutive_samples_go_round() -> None:
    five = [replace(ONE, id=str(number)) for number in range(5)]
    days = [dt.date(2026, 11, 27) + dt.timedelta(days=n) for n in range(5)]
    drawn = Counter(mutation.id for day in days for mutation in sample(five, 2, day))
    assert drawn == {"0": 2, "1": 2, "2": 2, "3": 2, "4": 2}
    assert len(sample(five, 9, days[0])) == 5


@pytest.mark.parametrize(
    ("codes", "passed", "said"),
    [
        ([0, 1], True, "noticed   m-1 (AssertionError: a failed assertion)"),
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
    monkeypatch.setattr(runner, "run_tests", lambda tests, mutations=(): (next(answers), "", [FAILED]))
    assert runner.run([ONE]) is passed
    assert said in capsys.readouterr().out


def together(
    monkeypatch: pytest.MonkeyPatch, answers: dict[tuple[Mutation, ...], tuple[int, str, list[FailureKind]]]
) -> bool:
    """Run two mutations as one group; `answers` are the results of the processes by their mutations."""
    monkeypatch.setattr(runner, "independent", lambda mutations: [mutations])
    monkeypatch.setattr(runner, "_tests_of", lambda mutations: [mutation.test for mutation in mutations])
    monkeypatch.setattr(runner, "run_tests", lambda tests, mutations=(): answers.pop(tuple(mutations)))
    is_noticed = runner.run([ONE, OTHER])
    assert answers == {}, "each process was started"
    return is_noticed


def test_mutations_that_go_together_are_noticed_in_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = [FAILED, replace(FAILED, test=f"{OTHER.test}[one case]", error="WrongUse")]
    assert together(monkeypatch, {(): (0, "", []), (ONE, OTHER): (1, "", failures)})
    assert "noticed   m-1 (AssertionError: a failed assertion)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "failures", "alone", "said"),
    [
        (1, [FAILED], [OTHER], "SURVIVED  m-2: tests/test_other.py::test_more stayed green"),
        (1, [FAILED, replace(FAILED, test=f"{OTHER.test}_and_more")], [OTHER], "SURVIVED  m-2"),
        (1, [FAILED, replace(FAILED, test=OTHER.test, counts_as="")], [OTHER], "SURVIVED  m-2"),
        (2, [FAILED], [ONE, OTHER], "SURVIVED  m-1"),
    ],
)
def test_what_is_not_noticed_among_others_runs_alone(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    failures: list[FailureKind],
    alone: list[Mutation],
    said: str,
) -> None:
    first = {(): (0, "", []), (ONE, OTHER): (code, "", failures)}
    assert not together(monkeypatch, {**first, **{(mutation,): (0, "", []) for mutation in alone}})
    assert said in capsys.readouterr().out


@pytest.fixture
def three_tests(tmp_path: Path) -> Path:
    """A tree in which `both` sees two files, and each other test sees one."""
    for name, text in {
        "python_jobs/ingestion/loader.py": "A = 1",
        "python_jobs/ingestion/proxy.py": "B = 1",
        "macros/overrides.sql": "{% macro spark__persist_docs(relation) %}{% endmacro %}",
        "tests/test_loader.py": "from python_jobs.ingestion import loader",
        "tests/test_proxy.py": "from python_jobs.ingestion import proxy",
        "tests/test_both.py": "from python_jobs.ingestion import loader, proxy",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_group_has_no_test_that_sees_another_mutation(three_tests: Path) -> None:
    loader, proxy, both = (
        replace(ONE, id=name, file=f"python_jobs/ingestion/{file}.py", test=f"tests/test_{name}.py::test_a")
        for name, file in (("loader", "loader"), ("proxy", "proxy"), ("both", "loader"))
    )
    override = replace(loader, id="override", file="macros/overrides.sql", test="tests/test_docs.py::test_a")
    groups = independent([loader, both, proxy, override], three_tests)
    assert groups == [[loader, proxy], [both], [override]]
    assert independent([override], three_tests) == [[override]]
    many = [replace(loader, id=str(n)) for n in range(2)]
    assert independent(many, three_tests) == [[many[0]], [many[1]]], "one file has one defect"


OURS = Frame("python_jobs/shared/delta/merge.py", "merge.execute()")
A_TEST = Frame("tests/test_code.py", "job.run(spark)")
PYSPARK = Frame("/venv/lib/site-packages/pyspark/errors/exceptions/captured.py", "raise converted from None")
DBT_TEST = "users: fail: Got 3 results, configured to fail if != 0"


class DbtFailed(AssertionError):
    """Stands for the class of tests/support/dbt_project.py, which imports Spark."""


def error_of(name: str, module: str, text: str, **attributes: object) -> BaseException:
    """Return an error of a class of this name and module."""
    return type(name, (Exception,), {"__module__": module, **attributes})(text)


def of_spark(name: str, condition: str | None, text: str = "") -> BaseException:
    """Return an error of Spark with its condition."""
    return error_of(
        name,
        "pyspark.errors.exceptions.captured",
        text or f"[{condition}] x",
        getCondition=lambda _: condition,
    )


@pytest.mark.parametrize(
    ("error", "frames", "reason"),
    [
        (AssertionError("assert 'x' == 'TypeError: y'"), [], "a failed assertion"),
        (pytest.fail.Exception("DID NOT RAISE <class 'WrongUse'>"), [], "a failed assertion"),
        (pytest.fail.Exception("x"), [Frame("tests/a.py", "pytest.fail('x')")], "a failed assertion"),
        (WrongUse("attempts must be 1 or more, got 0"), [PYSPARK], "an error of ours"),
        (ValueError("x"), [Frame("python_jobs/a.py", "raise ValueError(")], "an error of ours"),
        (ConnectionError("x"), [OURS, Frame("tests/a.py", "raise ConnectionError")], "an error of ours"),
        (DbtFailed("a: error: Compilation Error\n  lakehouse_patterns: got []"), [], "a sentence of our macros"),
        (DbtFailed(DBT_TEST), [], "a failed dbt test"),
        (DbtFailed("a: error: Runtime Error\n  [CAST_INVALID_INPUT] x"), [], "Spark's CAST_INVALID_INPUT"),
        (error_of("DbtRuntimeError", "dbt_common.x", "lakehouse_patterns: got []"), [], "a sentence of our macros"),
        (of_spark("AnalysisException", "NO_TABLE"), [A_TEST, OURS, PYSPARK], "Spark's NO_TABLE"),
        (of_spark("NumberFormatException", "CAST_INVALID_INPUT"), [A_TEST, PYSPARK], "Spark's CAST_INVALID_INPUT"),
        (error_of("UniqueViolation", "psycopg.errors", "twice", sqlstate="23505"), [OURS], "an error of psycopg"),
    ],
)  # fmt: skip
def test_an_error_that_counts_says_why(error: BaseException, frames: list[Frame], reason: str) -> None:
    assert counts_as(error, frames) == reason


@pytest.mark.parametrize(
    ("error", "frames"),
    [
        (pytest.fail.Exception("Timeout (>300.0s)"), []),
        (NameError("name 'x' is not defined"), [Frame("python_jobs/a.py", "raise Absent(x)")]),
        (TypeError("run() missing 1 required argument"), [OURS]),
        (KeyError("x"), [OURS]),
        (ValueError("not enough values to unpack"), [OURS]),
        (OSError("x"), [Frame("/venv/lib/x.py", "raise OSError(")]),
        (error_of("Py4JJavaError", "py4j.protocol", "An error occurred while calling o1.x"), [OURS]),
        (error_of("UndefinedError", "jinja2.exceptions", "'x' is undefined"), []),
        (
            DbtFailed(
                "users: error: Compilation Error in model users\n  'keys' is undefined. This can happen"
            ),
            [],
        ),
        (
            DbtFailed("a: error: Compilation Error\n  macro 'dbt_macro__x' takes no keyword argument 'nope'"),
            [],
        ),
        (DbtFailed("users: error: [PARSE_SYNTAX_ERROR] Syntax error at or near 'x'"), []),
        (AssertionError("Traceback:\n  File x\nNameError: name 'x'\nassert 1 == 0"), []),
        (of_spark("StreamingQueryException", "STREAM_FAILED", "py4j:\nbuiltins.TypeError: x\n"), [OURS]),
        (of_spark("ParseException", "PARSE_SYNTAX_ERROR"), [OURS]),
        (of_spark("AnalysisException", None, "no condition"), [OURS]),
        (of_spark("AnalysisException", "TABLE_OR_VIEW_NOT_FOUND"), [A_TEST, PYSPARK]),
        (error_of("UndefinedColumn", "psycopg.errors", "no x", sqlstate="42703"), [OURS]),
        (error_of("UniqueViolation", "psycopg.errors", "twice", sqlstate="23505"), [A_TEST]),
    ],
)
def test_no_other_error_counts(error: BaseException, frames: list[Frame]) -> None:
    assert counts_as(error, frames) == ""


def test_sql_that_can_not_be_parsed_counts_where_the_mutation_says_so() -> None:
    failure = FailureKind(ONE.test, "DbtFailed", "users: error: [PARSE_SYNTAX_ERROR] at 'Id'", "")
    assert failure.reason(unparsable=False) == ""
    assert failure.reason(unparsable=True) == "SQL that can't be parsed"
    assert replace(failure, message="'x' is undefined").reason(unparsable=True) == ""
    assert FAILED.reason(unparsable=True) == "a failed assertion"


def test_the_sql_of_a_macro_may_fail_in_the_test_that_runs_it() -> None:
    error = of_spark("AnalysisException", "UNRESOLVED_COLUMN")
    assert counts_as(error, [A_TEST, PYSPARK], renders=True) == "Spark's UNRESOLVED_COLUMN"


def test_a_mutation_whose_code_can_not_run_is_broken(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([(0, "", []), (1, "the trace", [FailureKind(ONE.test, "NameError", "name 'c'", "")])])
    monkeypatch.setattr(runner, "REPOSITORY", repository)
    monkeypatch.setattr(runner, "run_tests", lambda tests, mutations=(): next(answers))
    assert runner.run([ONE]) is False
    assert "BROKEN    m-1: no error of its test counts (NameError)\nthe trace" in capsys.readouterr().out


def test_the_copy_is_mutated_and_the_tree_is_not() -> None:
    """A real run on this repository: a test of the harness that needs no Spark, with and without a defect."""
    mutation = Mutation(
        "runner",
        "tests/support/pytest_ids.py",
        "return bool(names) and",
        "return not",
        "tests/mutations/test_mutations.py::test_a_sound_mutation_has_no_problem",
    )
    before = (REPOSITORY / mutation.file).read_text()
    assert runner.run_tests([mutation.test])[0] == 0
    code, _, failures = runner.run_tests([mutation.test], [mutation])
    assert code == runner.TEST_FAILED
    assert [(failure.error, failure.counts_as) for failure in failures] == [
        ("AssertionError", "a failed assertion")
    ]
    assert (REPOSITORY / mutation.file).read_text() == before
