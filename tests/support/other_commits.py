"""Commits of other programs to a Delta table, many of them in little time."""

from __future__ import annotations

import json
import time
from pathlib import Path


def commit(table: str, count: int, operation: str = "WRITE") -> None:
    """Make ``count`` commits that change nothing, as the protocol allows: an entry in the log and no file."""
    log = Path(table) / "_delta_log"
    newest = max(int(entry.stem) for entry in log.glob("*.json") if entry.stem.isdigit())
    for version in range(newest + 1, newest + 1 + count):
        info = {"timestamp": int(time.time() * 1000), "operation": operation, "operationParameters": {}}
        with (log / f"{version:020d}.json").open("x") as entry:
            entry.write(json.dumps({"commitInfo": info}) + "\n")
