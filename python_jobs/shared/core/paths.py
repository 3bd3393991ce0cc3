"""Names of tables and paths of files, as parameters give them."""

from __future__ import annotations

import re
from pathlib import Path

# At least two letters: RFC 3986 also allows one, but a single letter is a Windows drive.
_SCHEME = re.compile(r"(?:[a-z][a-z0-9+.-]+://|(?:file|hdfs|viewfs|webhdfs|dbfs):/)", re.IGNORECASE)


def is_path(table: str) -> bool:
    """Return whether ``table`` is a path or URI; anything without ``/`` or ``:`` is a catalog name."""
    return "/" in table or ":" in table


def is_uri(path: str) -> bool:
    """Return whether a path begins with a scheme: ``name://``, or ``file:/`` and similar.

    A colon alone is no scheme: ``10:30/part.json`` is a local path.
    """
    return _SCHEME.match(path) is not None


def absolute(path: str) -> str:
    """Return a local path as an absolute one (Delta refuses relative paths in SQL); a URI stays unchanged."""
    return path if is_uri(path) else str(Path(path).absolute())
