"""Tiers, order, deadline and record of the suite, on throw-away suites of a few tests."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import pytest

from tests.support.family_times import family_of, totals
from tools import durations

pytest_plugins = ["pytester"]

MARKED = """
import pytest
def test_quick(): print("ran quick")
@pytest.mark.kill
def test_kill(): print("ran kill")
@pytest.mark.cluster
class TestCluster:
    def test_of_a_class(): ...
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> Any:
    """Return a function that runs pytest with the plugin and returns the closing numbers and the output."""
    pytester.makeini(
        "[pytest]\nmarkers =\n  kill: a\n  cluster: a\n  end_to_end: a\n  torture: a\naddopts = -p tests.support.suite"
    )

    def run(*arguments: str) -> tuple[dict[str, int], str]:
        # A process of its own: it registers plugins, and workers need their path.
        done = pytester.runpytest_subprocess(*arguments, "-p", "no:cacheprovider")
        has_run = done.ret != pytest.ExitCode.USAGE_ERROR
        return done.parseoutcomes() if has_run else {}, done.stdout.str() + done.stderr.str()

    return run


def modules(pytester: pytest.Pytester, *names: str, body: str = "def test_one(): ...") -> None:
    for name in names:
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)


def test_a_tier_leaves_out_the_other_and_a_named_test_always_runs(
    pytester: pytest.Pytester, suite: Any
) -> None:
    modules(pytester, "tests/test_marked.py", body=MARKED)
    modules(pytester, "tests/torture/test_a.py", "tests/lakehouse/test_b.py")
    collected = {
        tier: {line for line in suite("--collect-only", "-q", *tier.split())[1].splitlines() if "::" in line}
        for tier in ("--tier test", "--tier rest", "")
    }
    quick = {"tests/test_marked.py::test_quick"}
    rest = {
        "tests/test_marked.py::test_kill",
        "tests/test_marked.py::TestCluster::test_of_a_class",
        "tests/torture/test_a.py::test_one",
        "tests/lakehouse/test_b.py::test_one",
    }
    assert collected == {"--tier test": quick, "--tier rest": rest, "": quick | rest}
    assert suite("tests/test_marked.py::test_kill")[0] == {"passed": 1}


def test_the_list_of_tests_ends_with_their_number(pytester: pytest.Pytester, suite: Any) -> None:
    """Also with the two workers that the project's own options start."""
    modules(pytester, "tests/test_a.py", "tests/test_b.py")
    for workers in ("0", "2"):
        last = suite("--collect-only", "-q", "-n", workers)[1].strip().splitlines()[-1]
        assert last.startswith("2 tests collected in "), workers


def test_the_longest_start_first_and_unknown_ones_before_them(pytester: pytest.Pytester, suite: Any) -> None:
    modules(pytester, *(f"tests/test_{name}.py" for name in "abcd"))
    record = {f"tests/test_{name}.py": {"test": [seconds, "2026-11-29"]} for name, seconds in
              {"a": 1, "b": 30, "d": 2}.items()}  # fmt: skip
    (pytester.path / "tests/durations.json").write_text(json.dumps(record))
    _, output = suite("--collect-only", "-q")
    assert [line[11] for line in output.splitlines() if "::" in line] == ["c", "b", "d", "a"]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_after_the_deadline_nothing_starts_and_the_run_says_what(
    pytester: pytest.Pytester, suite: Any, workers: str
) -> None:
    """Two units of one module, apart in the plan; what is not in the plan stays out."""
    modules(pytester, "test_marked.py", body=MARKED.replace("TestCluster", "NotCollected"))
    modules(pytester, "test_last.py", "test_left_out.py")
    deadline = time.time() + 600
    units = [
        ["test_marked.py", "test", ""],
        ["test_last.py", "test", "2026-11-20"],
        ["test_marked.py", "rest", ""],
    ]
    plan, record = pytester.path / "plan.json", pytester.path / "record.json"
    plan.write_text(json.dumps({"deadline": deadline, "units": units}))
    assert suite("-n", workers, "--plan", str(plan), "--record", str(record))[0] == (
        {"passed": 3, "deselected": 1} if workers == "0" else {"passed": 3}
    )
    assert durations.read(record).keys() == {(module, tier) for module, tier, _ in units}

    plan.write_text(json.dumps({"deadline": 0, "units": units[:2]}))
    record.unlink()
    outcomes, output = suite("-n", workers, "--plan", str(plan), "--record", str(record))
    assert "passed" not in outcomes
    assert "unknown     test_marked.py (test)\n2026-11-20  test_last.py (test)\n" in output
    assert durations.read(record) == {}


def test_a_record_takes_whole_modules(pytester: pytest.Pytester, suite: Any) -> None:
    modules(pytester, "test_a.py")
    _, output = suite("test_a.py::test_one", "--record", "record.json")
    assert "--record takes whole modules, got a single test: leave out its name after '::'." in output


def test_a_skipped_test_says_why_and_is_no_proof_of_the_catalog(
    pytester: pytest.Pytester, suite: Any
) -> None:
    proof = "tests/patterns/data_value/test_scd_type_1.py"
    body = "import pytest\ndef test_a_stale_update_is_ignored(): pytest.skip('no broker here')\n"
    modules(pytester, proof, body=body)
    outcomes, output = suite("-r", "s")
    assert outcomes == {"skipped": 1}
    assert "no broker here" in output
    assert "skipped, although the catalog names them as proof" in output
    assert f"\n{proof}::test_a_stale_update_is_ignored\n" in output
    modules(pytester, proof, body=body.replace("stale", "other"))
    assert "although the catalog" not in suite()[1]


def test_a_record_keeps_the_newest_entry_and_drops_modules_that_are_gone(tmp_path: Any) -> None:
    (tmp_path / "a.py").touch()
    old = {("a.py", "test"): (12.34, "2026-11-01"), ("a.py", "rest"): (1.0, "2026-11-05")}
    new = {("a.py", "test"): (123.4, "2026-11-02"), ("gone.py", "test"): (1.0, "2026-11-02")}
    durations.write(tmp_path / "record.json", durations.merged(new, old), tmp_path)
    assert (tmp_path / "record.json").read_text() == (
        '{\n"a.py": {"rest": [1.0, "2026-11-05"], "test": [120.0, "2026-11-02"]}\n}\n'
    )
    assert durations.read(tmp_path / "none.json") == {}


def test_times_are_added_by_family_phase_and_module() -> None:
    merger, scd = "tests/patterns/idempotency/test_merger.py", "tests/patterns/idempotency/test_scd.py"
    spent = Counter(
        {
            (merger, "setup"): 2.0,
            (merger, "call"): 3.0,
            (scd, "call"): 4.0,
            ("tests/test_job.py", "call"): 1.0,
        }
    )
    families, phases, by_module = totals(spent)
    assert families == {"patterns/idempotency": 9.0, "test_job.py": 1.0}
    assert phases == {"setup": 2.0, "call": 8.0}
    assert by_module == {merger: 5.0, scd: 4.0, "tests/test_job.py": 1.0}
    assert family_of("tests/torture/test_torture.py") == "torture"
