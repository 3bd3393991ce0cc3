"""The catalog is complete: what it names exists, and every specified behaviour has a test or a reason."""

import re
from collections import Counter

import pytest

from tests.mutations.runner import committed_mutations
from tests.support.pytest_ids import REPOSITORY, names_a_test
from tests.support.snippets import MARKER, claimed
from tools.catalog import FAMILIES, Behaviour, Pattern, patterns

SPECIFICATIONS = REPOSITORY.parent / "shared" / "patterns"  # only where the project itself is developed
PAGE_PARTS = ("Problem", "When to use", "Use it on your own tables", "Guarantees", "Costs", "See also")
PATTERNS = patterns()
BEHAVIOURS = [(p, b) for p in PATTERNS for b in p.behaviours]


def test_the_foundation_is_in_the_catalog() -> None:
    assert {p.id for p in PATTERNS} >= {
        "incremental_loader",
        "dead_letter",
        "filter_interceptor",
        "wrapper",
        "merger",
        "scd_type2",
        "audit_write_audit_publish",
    }


def test_every_catalog_file_is_a_family() -> None:
    assert {p.stem for p in (REPOSITORY / "catalog").glob("*.yml")} <= set(FAMILIES)


def test_ids_are_unique() -> None:
    counts = Counter([p.id for p in PATTERNS] + [f"{p.id}/{b.id}" for p, b in BEHAVIOURS])
    assert [id for id, count in counts.items() if count > 1] == []


def test_files_and_forms_exist() -> None:
    named = {p.id: [*p.files, *(path for form in p.forms for path in form.values())] for p in PATTERNS}
    absent = [(id, path) for id, paths in named.items() for path in paths if not (REPOSITORY / path).exists()]
    assert absent == []
    assert [p.id for p in PATTERNS if not p.forms] == []


def test_the_page_has_a_section_with_all_its_parts_and_a_snippet() -> None:
    assert [problem for pattern in PATTERNS for problem in problems_of_section(pattern)] == []


def problems_of_section(pattern: Pattern) -> list[str]:
    """Return what the pattern's section on its page lacks."""
    page, anchor = pattern.page.split("#")
    sections = sections_of((REPOSITORY / page).read_text(encoding="utf-8"))
    if anchor not in sections:
        return [f"{pattern.page}: no such section"]
    absent = [part for part in PAGE_PARTS if not re.search(rf"(^###\s|\*\*){part}", sections[anchor], re.M)]
    absent += [] if MARKER.search(sections[anchor]) else ["a snippet that a test runs"]
    return [f"{pattern.page} has no {part}" for part in absent]


def test_every_bullet_of_the_specification_has_a_behaviour() -> None:
    claimed_bullets = {p.id: {b.bullet for b in p.behaviours} for p in PATTERNS}
    assert claimed_bullets == {p.id: set(range(1, p.bullets + 1)) for p in PATTERNS}


@pytest.mark.skipif(not SPECIFICATIONS.is_dir(), reason="the specifications are not part of the repository")
def test_the_number_of_bullets_is_the_specification_s() -> None:
    specified = {}
    for pattern in PATTERNS:
        file, section = pattern.spec.split("#")
        specified[pattern.id] = count_bullets((SPECIFICATIONS / file).read_text(encoding="utf-8"), section)
    assert {p.id: p.bullets for p in PATTERNS} == specified


def test_a_behaviour_has_a_test_that_exists_or_a_reason() -> None:
    assert [f"{p.id}/{b.id}" for p, b in BEHAVIOURS if not b.sentence.strip() or not is_proved(b)] == []


def is_proved(behaviour: Behaviour) -> bool:
    """Return whether the test that the behaviour names exists, or a reason says why there is none."""
    if behaviour.test is None:
        return bool((behaviour.reason or "").strip())
    return names_a_test(behaviour.test)


def test_at_least_two_mutations_threaten_each_pattern() -> None:
    mutated = [mutation.file for mutation in committed_mutations()]
    assert [p.id for p in PATTERNS if sum(file in p.files for file in mutated) < 2] == []


def test_each_documented_snippet_is_run_by_a_test() -> None:
    pages = [*sorted((REPOSITORY / "docs").glob("*.md")), REPOSITORY / "README.md"]
    assert [test for page in pages for test in claimed(page) if not names_a_test(test)] == []


def sections_of(page: str) -> dict[str, str]:
    """Return the text below each `##` heading of a page by the heading's anchor."""
    _, *parts = re.split(r"^## +", page, flags=re.MULTILINE)
    return {anchor_of(part.splitlines()[0]): part for part in parts}


def test_bullets_are_counted_in_their_section_only() -> None:
    text = """# File
## One  (Chapter 1)
**Testable behaviours.**
- a
## Two words  (Chapter 1)
**Mechanics.**
- no
**Testable behaviours** (of two).
- a
  - of a
- b

**Natural home.** x
- no
## One line
**Testable behaviours.** a; b → c; d.
"""
    assert count_bullets(text, "two-words") == 2
    assert count_bullets(text, "one-line") == 3


def anchor_of(heading: str) -> str:
    """Return the anchor that GitHub and MkDocs give to a heading of plain words."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower()))


def count_bullets(specification: str, section: str) -> int:
    """Return how many bullets stand under "Testable behaviours" in a section of a specification file.

    Where they are one line, its parts between semicolons are the bullets.
    """
    (text,) = [
        s for a, s in sections_of(specification).items() if a == section or a.startswith(f"{section}-")
    ]
    _, behaviours = re.split(r"\*\*Testable behaviours\.?\*\*", text)
    listed = behaviours.split("\n**")[0]
    return len(re.findall(r"^- ", listed, flags=re.MULTILINE)) or len(listed.split(";"))
