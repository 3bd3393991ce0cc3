"""Files that readers see whole or not at all, and that a loss of power doesn't take."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, lines: Iterable[str]) -> None:
    """Write the lines of a new file in UTF-8; it gets its name when it is complete and on the disk.

    Until then its name begins with a dot, which Spark and our own readers skip.

    Raises:
        OSError: the file can't be written; nothing is left of it.
    """
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        with unfinished.open("x", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too, is on the disk
    finally:
        os.close(folder)
