"""Reads `catalog/<family>.yml`: each pattern's names and files, and its behaviours with the tests that prove them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tools.findings import ROOT

FAMILIES = (
    "ingestion", "error_management", "idempotency", "data_value", "data_flow", "security", "storage",
    "quality", "observability", "streaming", "serving", "governance", "cost",
)  # fmt: skip


@dataclass(frozen=True)
class Section:
    """A section of the specification that a pattern implements."""

    spec: str
    """`file#anchor`, or enough of the anchor to tell the section from the others."""
    bullets: int
    """Number of bullets that the section lists under "Testable behaviours"."""
    claims: dict[int, dict[str, list[str]]] = field(default_factory=dict)
    """Claims of a bullet that makes several, by a short name, each with the ids of the behaviours that prove it."""


@dataclass(frozen=True)
class Behaviour:
    """One sentence about a behaviour and the test that proves it, or the reason why no test does."""

    id: str
    bullets: tuple[tuple[str, int], ...]
    """The specified bullets that it proves, each as its section's `spec` and its number from 1."""
    sentence: str
    test: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Pattern:
    """One entry of the catalog; the fields are those of the file."""

    family: str
    id: str
    name: str
    names: dict[str, str | None]
    """Names in the book and the guide; None if a source doesn't have the pattern."""
    sections: dict[str, Section]
    """Sections of the specification by a short name: the pattern's own first, then those of the guide."""
    forms: list[dict[str, str]]
    """Forms of the pattern, each with its kind (macro, materialization, job, test, …) and its path."""
    files: list[str]
    page: str
    """`docs/<family>.md#anchor`."""
    behaviours: list[Behaviour] = field(default_factory=list)


def patterns(folder: Path = ROOT / "catalog") -> list[Pattern]:
    """Return the patterns of every family, in the families' order; an unknown or missing field raises."""
    return [
        pattern_of(family, entry)
        for family in FAMILIES
        if (folder / f"{family}.yml").is_file()
        for entry in yaml.safe_load((folder / f"{family}.yml").read_text(encoding="utf-8"))
    ]


def pattern_of(family: str, entry: dict[str, Any]) -> Pattern:
    """Return one entry as it stands in the file, with each behaviour's bullets in full."""
    sections = {name: section_of(section) for name, section in entry["sections"].items()}
    behaviours = [behaviour_of(behaviour, sections) for behaviour in entry["behaviours"]]
    return Pattern(family=family, **{**entry, "sections": sections, "behaviours": behaviours})


def section_of(entry: dict[str, Any]) -> Section:
    """Return a section; the file may name one behaviour of a claim without a list."""
    claims = {
        bullet: {claim: [ids] if isinstance(ids, str) else ids for claim, ids in named.items()}
        for bullet, named in entry.get("claims", {}).items()
    }
    return Section(**{**entry, "claims": claims})


def behaviour_of(entry: dict[str, Any], sections: dict[str, Section]) -> Behaviour:
    """Return a behaviour with its bullets in full.

    The file's `bullet` is a bullet or a list of bullets: `3` is number 3 of the entry's first section, `pat-dlq 3`
    number 3 of the section that the entry calls `pat-dlq`. A name that the entry doesn't have raises.
    """
    fields = {name: value for name, value in entry.items() if name != "bullet"}
    written = entry["bullet"] if isinstance(entry["bullet"], list) else [entry["bullet"]]
    named = [str(bullet).rpartition(" ") for bullet in written]
    bullets = tuple((sections[name or next(iter(sections))].spec, int(number)) for name, _, number in named)
    return Behaviour(bullets=bullets, **fields)
