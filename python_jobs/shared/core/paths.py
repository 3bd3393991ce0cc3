"""Names of tables and paths of files, as parameters give them."""

from __future__ import annotations

from pathlib import Path


def is_path(table: str) -> bool:
    """Return whether ``table`` is a path or URI; anything without ``/`` or ``:`` is a catalog name."""
    return "/" in table or ":" in table


def absolute(path: str) -> str:
    """Return a local path made absolute (Delta refuses relative ones in SQL); a URI stays as it is."""
    return path if ":" in path.split("/", 1)[0] else str(Path(path).absolute())
