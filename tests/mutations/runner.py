"""Applies committed mutations one by one and requires the test that each names to turn red.

A mutation (`tests/mutations/<family>.yml`) is `{id, file, find, replace, test}`: the text `find`, which
occurs once in `file`, becomes `replace`. It is applied to a copy of the tree, never to the tree itself. With
`unparsable: true` SQL that can't be parsed counts as noticed, for a name or a text that loses its quotes.
Before that the named tests run on an unchanged copy and must be green: one that is always red proves nothing.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.mutations.failures import FailureKind, read_failures
from tests.support.pytest_ids import REPOSITORY, names_a_test
from tools.git_files import git_files

WORKERS = 2
PYTEST = ["-o", "addopts=", "-q", "-p", "no:cacheprovider", "-p", "tests.mutations.failures"]
TEST_FAILED = 1  # pytest's exit code; others mean that the test did not run


@dataclass(frozen=True)
class Mutation:
    """One deliberate defect and the test that must notice it."""

    id: str
    file: str
    find: str
    replace: str
    test: str
    unparsable: bool = False
    """Whether SQL that can't be parsed is notice, because the defect is a name or a text without its quotes."""

    def mutated(self, text: str) -> str:
        """Return the file's text with the defect."""
        return text.replace(self.find, self.replace)

    def problem(self, repository: Path = REPOSITORY) -> str | None:
        """Return why the mutation can't be applied as it stands, in one sentence, or None."""
        path = repository / self.file
        if not path.is_file():
            return f"{self.id}: there is no file {self.file}"
        count = path.read_text(encoding="utf-8").count(self.find)
        if count != 1:
            return f"{self.id}: the text to find occurs {count} times in {self.file}, it must occur once"
        if self.find == self.replace:
            return f"{self.id}: it changes nothing"
        if not names_a_test(self.test, repository):
            return f"{self.id}: there is no test {self.test}"
        return None


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


def committed_mutations(folder: Path = Path(__file__).parent) -> list[Mutation]:
    """Return the mutations of every family, in file order."""
    return [
        Mutation(**entry)
        for path in sorted(folder.glob("*.yml"))
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")) or []
    ]


def sample(mutations: list[Mutation], size: int, day: dt.date) -> list[Mutation]:
    """Return `size` mutations for `day`: consecutive days go round, so each has its turn."""
    start = day.toordinal() * size
    return [mutations[(start + i) % len(mutations)] for i in range(min(size, len(mutations)))]


def run(mutations: list[Mutation]) -> bool:
    """Run the named tests on an unchanged copy, then each mutation's; return whether all were noticed."""
    tests = sorted({mutation.test for mutation in mutations}, key=_place)
    code, output, _ = run_tests(tests)
    if code != 0:
        print(f"the tests must be green without a mutation, pytest's exit code is {code}:\n{output}")
        return False
    with ThreadPoolExecutor(WORKERS) as pool:
        results = list(pool.map(_noticed, mutations))
    print(f"{sum(results)} of {len(results)} mutations noticed")
    return all(results)


def _place(test: str) -> tuple[str, int]:
    """Return a test's file and its place there: pytest takes tests in the order given, and some build on others."""
    path, *_, name = test.split("::")
    return path, (REPOSITORY / path).read_text(encoding="utf-8").index(f"def {name.partition('[')[0]}(")


def _noticed(mutation: Mutation) -> bool:
    code, output, failures = run_tests([mutation.test], mutation)
    reasons = sorted(
        {reason for failure in failures if (reason := failure.reason(unparsable=mutation.unparsable))}
    )
    noticed = code == TEST_FAILED and bool(reasons)
    errors = ", ".join(sorted({failure.error for failure in failures}))
    if noticed:
        print(f"noticed   {mutation.id} ({errors}: {', '.join(reasons)})", flush=True)
    elif code == 0:
        print(f"SURVIVED  {mutation.id}: {mutation.test} stayed green", flush=True)
    elif code == TEST_FAILED:
        print(f"BROKEN    {mutation.id}: no error of its test counts ({errors})\n{output}", flush=True)
    else:
        print(f"BROKEN    {mutation.id}: pytest's exit code is {code}\n{output}", flush=True)
    return noticed


def run_tests(tests: list[str], mutation: Mutation | None = None) -> tuple[int, str, list[FailureKind]]:
    """Run pytest on a fresh copy of the tree, mutated if given; return exit code, end of output and the failures."""
    with tempfile.TemporaryDirectory(prefix="mutation_") as folder:
        copy = Path(folder) / "tree"
        for file in _files():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / file, copy / file, follow_symlinks=False)
        if mutation:
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
