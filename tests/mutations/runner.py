"""Applies committed mutations and requires the test that each names to turn red.

A mutation (tests/mutations/committed.py) is applied to a copy of the tree, never to the tree itself. Before that the
named tests run on an unchanged copy and must be green: one that is always red proves nothing. Mutations whose tests
can't see each other's files share a copy and a process, because most of a test's time is the start of Spark
(tests/mutations/independent.py); one that isn't noticed there runs again alone.
tests/mutations/failures.py lists the errors that count as noticed, such as a failed assertion, and the runner prints
which one it was. A mutation whose test fails in another way is `BROKEN`: its code can't run.

    python -m tests.mutations.runner                             all
    python -m tests.mutations.runner --sample 3 [--seed DATE]    a few, other ones each day
    python -m tests.mutations.runner --only ID ...               those whose ids start with one of these
"""

import argparse
import datetime as dt
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutations.committed import Mutation, committed_mutations, sample
from tests.mutations.failures import FailureKind, read_failures
from tests.mutations.independent import independent
from tests.support.pytest_ids import REPOSITORY
from tools.git_files import git_files

WORKERS = 2
PYTEST = ["-o", "addopts=", "-q", "-p", "no:cacheprovider", "-p", "tests.mutations.failures"]
TEST_FAILED = 1  # pytest's exit code; others mean that the test did not run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen mutations, print a line each, return 1 unless every one was noticed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, help="run this many instead of all")
    parser.add_argument(
        "--seed", type=dt.date.fromisoformat, default=None, help="the sample's day, default today"
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="run the mutations whose id starts with one of these"
    )
    options = parser.parse_args(argv)
    chosen = [m for m in committed_mutations() if m.id.startswith(tuple(options.only))]
    if options.sample:
        chosen = sample(chosen, options.sample, options.seed or dt.datetime.now(dt.UTC).date())
    problems = [problem for mutation in chosen if (problem := mutation.problem())]
    if problems or not chosen:
        print(*(problems or ["no mutation to run"]), sep="\n")
        return 1
    return 0 if run(chosen) else 1


def run(mutations: list[Mutation]) -> bool:
    """Run the named tests on an unchanged copy, then the mutations'; return whether all were noticed."""
    code, output, _ = run_tests(_tests_of(mutations))
    if code != 0:
        print(f"the tests must be green without a mutation, pytest's exit code is {code}:\n{output}")
        return False
    with ThreadPoolExecutor(WORKERS) as pool:
        results = [found for group in pool.map(_noticed, independent(mutations)) for found in group]
    print(f"{sum(results)} of {len(results)} mutations noticed")
    return all(results)


def _tests_of(mutations: Iterable[Mutation]) -> list[str]:
    return sorted({mutation.test for mutation in mutations}, key=_place)


def _place(test: str) -> tuple[str, int]:
    """Return a test's file and its place there: pytest takes tests in the order given, and some build on others."""
    path, *_, name = test.split("::")
    return path, (REPOSITORY / path).read_text(encoding="utf-8").index(f"def {name.partition('[')[0]}(")


def _noticed(mutations: Sequence[Mutation]) -> list[bool]:
    """Run mutations together, and alone what wasn't noticed; return for each whether it was."""
    if len(mutations) == 1:
        return [_noticed_alone(mutations[0])]
    code, _, failures = run_tests(_tests_of(mutations), mutations)
    results = []
    for mutation in mutations:
        of_test = [failure for failure in failures if mutation.is_tested_by(failure.test)]
        is_noticed = code == TEST_FAILED and bool(_reasons(mutation, of_test))
        if is_noticed:
            _print_noticed(mutation, of_test)
        results.append(is_noticed or _noticed_alone(mutation))
    return results


def _noticed_alone(mutation: Mutation) -> bool:
    code, output, failures = run_tests([mutation.test], [mutation])
    noticed = code == TEST_FAILED and bool(_reasons(mutation, failures))
    if noticed:
        _print_noticed(mutation, failures)
    elif code == 0:
        print(f"SURVIVED  {mutation.id}: {mutation.test} stayed green", flush=True)
    elif code == TEST_FAILED:
        print(
            f"BROKEN    {mutation.id}: no error of its test counts ({_errors(failures)})\n{output}",
            flush=True,
        )
    else:
        print(f"BROKEN    {mutation.id}: pytest's exit code is {code}\n{output}", flush=True)
    return noticed


def _print_noticed(mutation: Mutation, failures: Sequence[FailureKind]) -> None:
    why = f"{_errors(failures)}: {', '.join(_reasons(mutation, failures))}"
    print(f"noticed   {mutation.id} ({why})", flush=True)


def _errors(failures: Sequence[FailureKind]) -> str:
    return ", ".join(sorted({failure.error for failure in failures}))


def _reasons(mutation: Mutation, failures: Sequence[FailureKind]) -> list[str]:
    reasons = {failure.reason(unparsable=mutation.unparsable) for failure in failures}
    return sorted(reasons - {""})


def run_tests(tests: Sequence[str], mutations: Sequence[Mutation] = ()) -> tuple[int, str, list[FailureKind]]:
    """Run pytest on a fresh copy of the tree with the mutations; return exit code, end of output and the failures."""
    with tempfile.TemporaryDirectory(prefix="mutation_") as folder:
        copy = Path(folder) / "tree"
        for file in _files():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / file, copy / file, follow_symlinks=False)
        for mutation in mutations:
            path = copy / mutation.file
            path.write_text(mutation.mutated(path.read_text(encoding="utf-8")), encoding="utf-8")
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                *PYTEST,
                "--failures",
                str(Path(folder) / "failures.json"),
                *tests,
            ],
            cwd=copy,
            # The project is installed editable from the tree itself: the copy must come first, everywhere.
            env={
                **os.environ,
                "PYTHONPATH": str(copy),
                "SPARK_CONF_DIR": str(copy / "conf"),
                "DBT_PROFILES_DIR": str(copy / "profiles"),
                "LAKEHOUSE_ROOT": str(Path(folder) / "lakehouse"),
            },
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        failures = read_failures(Path(folder) / "failures.json")
    return done.returncode, done.stdout[-3000:], failures


def _files() -> Iterator[str]:
    """Yield the files that git has or would add and that the working tree has."""
    for name in git_files(REPOSITORY):
        path = REPOSITORY / name
        if path.is_file() or path.is_symlink():  # python_jobs/macros is a link to a folder
            yield name


if __name__ == "__main__":
    sys.exit(main())
