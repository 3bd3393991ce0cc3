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
class Behaviour:
    """One sentence about a behaviour and the test that proves it, or the reason why no test does."""

    id: str
    bullet: int
    """Number of the behaviour's bullet in the specification, from 1; a bullet may be split."""
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
    spec: str
    """`file#section` of the specification."""
    bullets: int
    """Number of bullets that this section lists under "Testable behaviours"."""
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
    """Return one entry as it stands in the file."""
    behaviours = [Behaviour(**behaviour) for behaviour in entry["behaviours"]]
    return Pattern(family=family, **{**entry, "behaviours": behaviours})
