"""Code blocks of the pages that tests run, so that the documented code works.

A snippet is the fenced block that follows a line `<!-- snippet: tests/…/test_x.py::test_name -->`.
"""

import re
from pathlib import Path

from tests.support.pytest_ids import REPOSITORY

SNIPPET = re.compile(
    r"^<!-- snippet: (?P<test>\S+) -->\n+(?P<fence>`{3,})(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
MARKER = re.compile(r"<!-- snippet: (\S+) -->")


def snippets(page: str, test_id: str) -> list[str]:
    """Return the code of each snippet of `page` (a path from the repository's root) that `test_id` claims.

    Raises `LookupError` if there is none: a renamed test or a removed block must not go unnoticed.
    """
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    found = [match["code"] for match in SNIPPET.finditer(text) if match["test"] == test_id]
    if not found:
        raise LookupError(f"{page} has no fenced block after <!-- snippet: {test_id} -->")
    return found


def snippet(page: str, test_id: str) -> str:
    """Return the code of the only snippet of `page` that `test_id` claims."""
    (code,) = snippets(page, test_id)
    return code


def claimed(page: Path) -> list[str]:
    """Return the tests that the markers of a page name, in order."""
    return MARKER.findall(page.read_text(encoding="utf-8"))
