"""MkDocs hook for links to files of the repository (`../macros/x.sql`), which are right on disk but not in the site.

Such a link becomes the file's name as text. A link to a missing file still fails `mkdocs build --strict`.
"""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"  # MkDocs loads a hook by its path, not from a package
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>\.\./[^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page's text with its links out of `docs/` as plain text."""
    return LINK.sub(lambda link: link["text"] if (DOCS / link["path"]).exists() else link[0], markdown)
