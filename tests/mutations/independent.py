"""Which mutations can share one copy of the tree: the test of each must not see the others' defects."""

import re
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.committed import Mutation
from tests.support.pytest_ids import REPOSITORY
from tools.affected import graph_of

MOST_TOGETHER = 12
"""Most mutations of a group: each one more would run again alone if one of them ended the process."""
_OVERRIDE = re.compile(r"\{%-? *macro spark__")


def independent(mutations: Sequence[Mutation], repository: Path = REPOSITORY) -> list[list[Mutation]]:
    """Return the mutations in groups: in a group no test depends on another mutation's file."""
    if len(mutations) == 1:
        return [list(mutations)]
    graph = graph_of(repository)
    files = {mutation.file for mutation in mutations}
    dependents = {file: graph.dependents([file]) for file in files}
    overrides = {file for file in files if _is_override(repository / file)}

    def can_see(test: str, other: Mutation) -> bool:
        return test.split("::")[0] in dependents[other.file] or other.file in overrides

    def go_together(one: Mutation, other: Mutation) -> bool:
        return not can_see(one.test, other) and not can_see(other.test, one)

    groups: list[list[Mutation]] = []
    for mutation in mutations:
        for group in groups:
            if len(group) < MOST_TOGETHER and all(go_together(mutation, other) for other in group):
                group.append(mutation)
                break
        else:
            groups.append([mutation])
    return groups


def _is_override(file: Path) -> bool:
    """Return whether the file replaces a macro of dbt's adapter, which any model's test may run without naming it."""
    return file.suffix == ".sql" and _OVERRIDE.search(file.read_text(encoding="utf-8")) is not None
