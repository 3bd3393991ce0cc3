"""The catalog is complete: what it names exists, and every specified behaviour has a test or a reason."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from tests.mutations.committed import committed_mutations
from tests.support.pytest_ids import REPOSITORY, names_a_test
from tests.support.snippets import MARKER, claimed
from tools.catalog import FAMILIES, Behaviour, Pattern, patterns

SPECIFICATIONS = REPOSITORY.parent / "shared" / "patterns"  # only where the project itself is developed
PAGE_PARTS = ("Problem", "When to use", "Use it on your own tables", "Guarantees", "Costs", "See also")
PATTERNS = patterns()
SECTIONS = [section for p in PATTERNS for section in p.sections.values()]
SHORT = ("AWAP", "CDC", "Late Data Integrator")
"""Other names that the guide's sections give to patterns of the book."""
TO_COME = (
    "pat-api-pull", "pat-cdc-change-tables", "pat-multi-region-ingest",  # more sources
    "pat-delta-lake-maintenance", "pat-iceberg-maintenance", "pat-hudi-maintenance",  # storage
    "pat-search-index-sync", "pat-api-facade-lakehouse", "pat-near-realtime-bi-aggregates",  # serving
    "pat-retention-policy",  # governance
    "pat-completeness-check",  # observability
)  # fmt: skip
"""Sections of the guide about a pattern that stands, whose own families are still to come."""
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


def test_every_bullet_of_every_section_has_a_behaviour() -> None:
    specified = {(s.spec, number) for s in SECTIONS for number in range(1, s.bullets + 1)}
    assert {bullet for _, b in BEHAVIOURS for bullet in b.bullets} == specified
    assert [f"{p.id}/{b.id}" for p, b in BEHAVIOURS if not b.bullets] == []


def test_each_claim_of_a_bullet_has_a_behaviour_of_that_bullet() -> None:
    assert [problem for pattern in PATTERNS for problem in problems_of_claims(pattern)] == []


def problems_of_claims(pattern: Pattern) -> list[str]:
    """Return the claims without a behaviour, and those whose behaviour is absent or names another bullet."""
    bullets = {behaviour.id: behaviour.bullets for behaviour in pattern.behaviours}
    return [
        f"{pattern.id}, {section.spec}, bullet {number}: '{claim}' needs a behaviour of this bullet, got {ids}"
        for section in pattern.sections.values()
        for number, claims in section.claims.items()
        for claim, ids in claims.items()
        if not ids or any((section.spec, number) not in bullets.get(id, ()) for id in ids)
    ]


def test_a_claim_without_a_behaviour_of_its_bullet_is_a_problem() -> None:
    pattern = next(p for p in PATTERNS if p.id == "merger")
    assert problems_of_claims(pattern) == []
    book = pattern.sections["book"]
    for ids in ([], ["absent"], ["known_deletion"]):  # the last one is of bullet 2
        changed = replace(book, claims={1: {"reruns": ids}})
        assert len(problems_of_claims(replace(pattern, sections={"book": changed}))) == 1


@pytest.mark.skipif(not SPECIFICATIONS.is_dir(), reason="the specifications are not part of the repository")
def test_a_bullet_of_several_parts_lists_its_claims() -> None:
    listed = {(s.spec, number) for s in SECTIONS for number in s.claims}
    specified = {s.spec: bullets_of(section_of(s.spec)[1]) for s in SECTIONS}
    several = {
        f"{spec}, bullet {number}: {' '.join(bullet.split())}"
        for spec, bullets in specified.items()
        for number, bullet in enumerate(bullets, 1)
        if len(parts_of(bullet)) > 1 and (spec, number) not in listed
    }
    assert several == set()


def test_a_pattern_has_the_sections_of_its_names() -> None:
    without = [p.id for p in PATTERNS if p.names.get("book") and "book" not in p.sections]
    without += [p.id for p in PATTERNS if p.names.get("guide") and p.names["guide"] not in p.sections]
    assert without == []


@pytest.mark.skipif(not SPECIFICATIONS.is_dir(), reason="the specifications are not part of the repository")
def test_the_number_of_bullets_is_the_specification_s() -> None:
    specified = {section.spec: len(bullets_of(section_of(section.spec)[1])) for section in SECTIONS}
    assert {section.spec: section.bullets for section in SECTIONS} == specified


@pytest.mark.skipif(not SPECIFICATIONS.is_dir(), reason="the specifications are not part of the repository")
def test_each_section_of_the_guide_about_a_pattern_belongs_to_it() -> None:
    """A section is about a pattern if it has its name in the guide as heading or its name in the book as overlap."""
    guide = [p.names["guide"] for p in PATTERNS if p.names.get("guide")]
    book = [p.names["book"] for p in PATTERNS if p.names.get("book")]
    about = {
        f"{file.name}#{anchor}"
        for file in sorted(SPECIFICATIONS.glob("2*.md"))
        for anchor, text in sections_of(file.read_text(encoding="utf-8")).items()
        if "pat-" in anchor and "**Testable behaviours" in text
        if any(name in anchor for name in guide) or any(name in overlaps_of(text) for name in [*book, *SHORT])
    }
    named = {section.spec.split("#")[0] + "#" + section_of(section.spec)[0] for section in SECTIONS}
    later = {section for section in about if any(name in section for name in TO_COME)}
    assert about - named - later == set()
    assert [name for name in TO_COME if not any(name in section for section in about - named)] == []


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


def test_bullets_are_those_of_their_section_only() -> None:
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
    sections = sections_of(text)
    assert len(bullets_of(sections["two-words-chapter-1"])) == 2
    assert len(bullets_of(sections["one-line"])) == 3


def anchor_of(heading: str) -> str:
    """Return the anchor that GitHub and MkDocs give to a heading of plain words."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower()))


def section_of(spec: str) -> tuple[str, str]:
    """Return the anchor and the text of the one section of the specification that `file#anchor` names."""
    file, start = spec.split("#")
    sections = sections_of((SPECIFICATIONS / file).read_text(encoding="utf-8"))
    (found,) = [(a, text) for a, text in sections.items() if a == start or a.startswith(f"{start}-")]
    return found


def bullets_of(section: str) -> list[str]:
    """Return the bullets under "Testable behaviours"; where they are one line, its parts between semicolons."""
    _, behaviours = re.split(r"\*\*Testable behaviours\.?\*\*", section)
    listed = behaviours.split("\n**")[0]
    return re.split(r"^- ", listed, flags=re.MULTILINE)[1:] or re.sub("`[^`]*`", "code", listed).split(";")


def parts_of(bullet: str) -> list[str]:
    """Return a bullet's parts: what stands between semicolons, and its sentences."""
    return [part for part in re.split(r";\s|(?<=[a-z)`])\.\s+(?=[A-Z`])", bullet) if part.strip()]


def overlaps_of(section: str) -> str:
    """Return what a section of the guide says about the book's patterns."""
    return " ".join(re.findall(r"^\*(?:Overlaps|Book:)[^.]*", section, flags=re.MULTILINE))
