"""Commands of the pages, whose tables and files lie in a folder of a test."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from python_jobs.shared.core.command_line import parse_parameters

P = TypeVar("P")


def command_words(command: str, folder: Path) -> list[str]:
    """Return the words behind ``spark-submit`` and the job, with ``lakehouse/`` as the folder."""
    words = shlex.split(command.replace("\\\n", " "))[2:]
    return [word.replace("lakehouse/", f"{folder}/") for word in words]


def command_parameters(kind: type[P], command: str, folder: Path, changes: Mapping[str, str]) -> P:
    """Return the parameters of a command on a folder's tables, with further or other values."""
    words = command_words(command, folder)
    for name, value in changes.items():
        words += [f"--{name}", value]
    return parse_parameters(kind, words)[0]
