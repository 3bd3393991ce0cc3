"""The committed mutations, and those of a day.

A mutation (`tests/mutations/<family>.yml`) is `{id, file, find, replace, test}`: the text `find`, which occurs once in
`file`, becomes `replace`. With `unparsable: true` SQL that can't be parsed counts as noticed, for a name or a text that
loses its quotes.
"""

import datetime as dt
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.support.pytest_ids import REPOSITORY, names_a_test


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

    def is_tested_by(self, test: str) -> bool:
        """Return whether a test that ran is the named one, or one of its cases."""
        return test == self.test or test.startswith(f"{self.test}[")

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


def committed_mutations(folder: Path = Path(__file__).parent) -> list[Mutation]:
    """Return the mutations of every family, in file order."""
    return [
        Mutation(**entry)
        for path in sorted(folder.glob("*.yml"))
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")) or []
    ]


def sample(mutations: list[Mutation], size: int, day: dt.date) -> list[Mutation]:
    """Return `size` mutations for `day`, of many files; consecutive days go round, so each has its turn."""
    step = -(-len(mutations) // size)
    spread = [mutation for first in range(step) for mutation in mutations[first::step]]
    start = day.toordinal() * size
    return [spread[(start + i) % len(spread)] for i in range(min(size, len(spread)))]
