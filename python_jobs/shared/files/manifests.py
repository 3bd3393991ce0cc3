"""Manifests: which files make up one version of a dataset, for readers of stores that have no views.

A manifest is one small JSON object. It is written once, after the files and in a step of its own, so that a failure of
this step reloads nothing. Readers read only the files that it lists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from python_jobs.shared.core.clock import utc_now
from python_jobs.shared.core.failures import JobFailed, WrongUse
from python_jobs.shared.core.intervals import parse_time
from python_jobs.shared.core.json_text import json_text

FORMAT_VERSION = 1
_VERSION = re.compile(r"\d{8}_\d{6}")


@dataclass(frozen=True)
class ListedFile:
    """One file of a version."""

    path: str
    """Relative to the version's folder."""
    size: int
    """Bytes."""
    object_version: str | None = None
    """Version of the object in a store that keeps versions: a later one of that name is another file."""


@dataclass(frozen=True)
class Manifest:
    """The files of one version."""

    version: str
    files: tuple[ListedFile, ...]

    def to_json(self) -> str:
        """Return the manifest as it is stored."""
        files = [
            {name: value for name, value in asdict(file).items() if value is not None} for file in self.files
        ]
        return json_text(
            {"format_version": FORMAT_VERSION, "version": self.version, "files": files}, indent=1
        )

    @classmethod
    def from_json(cls, text: str, place: str) -> Manifest:
        """Return a stored manifest.

        Raises:
            WrongUse: the text is no manifest, or has another format.
        """
        try:
            content = json.loads(text)
            if content["format_version"] != FORMAT_VERSION:
                raise WrongUse(f"{place} has format {content['format_version']}, known is {FORMAT_VERSION}")
            return cls(content["version"], tuple(ListedFile(**file) for file in content["files"]))
        except (ValueError, TypeError, KeyError) as failure:
            raise WrongUse(f"{place} is no manifest: {type(failure).__name__} {failure}") from None

    def require_complete(self, sizes: Mapping[str, int], place: str) -> None:
        """Require that each listed file exists with its listed size.

        Args:
            sizes: bytes of each existing file by its path; files that the manifest doesn't list are allowed.
            place: place of the files, for the error.

        Raises:
            JobFailed: a file is missing or has another size.
        """
        wrong = [file.path for file in self.files if sizes.get(file.path) != file.size]
        if wrong:
            raise JobFailed(
                f"version {self.version} is incomplete: {place} lacks {len(wrong)} of {len(self.files)} listed "
                f"files or has them with another size, such as {wrong[0]}"
            )


def version_of(started_at: str | None) -> str:
    """Return the name of a run's version: the run's start to the second, by default now.

    >>> version_of("2024-01-01T10:15")
    '20240101_101500'
    """
    return f"{parse_time(started_at) if started_at else utc_now():%Y%m%d_%H%M%S}"


def require_version(text: str | None, step: str) -> None:
    """Refuse a text that :func:`version_of` can't have returned, and a version in a step that names its own."""
    if text is not None and not _VERSION.fullmatch(text):
        raise WrongUse(f"a version is a run's start such as 20240101_101500, got '{text}'")
    if text is not None and step != "expose":
        raise WrongUse(f"version belongs to step expose, got step {step}")


def newest_or(wanted: str | None, there: Sequence[str], target: str) -> str:
    """Return the wanted version, by default the newest.

    Raises:
        WrongUse: the version doesn't exist.
    """
    if not there or wanted not in (None, *there):
        raise WrongUse(
            f"there is no version {wanted or 'to expose'} of {target}; there are {', '.join(sorted(there)) or 'none'}"
        )
    return wanted or max(there)


def taken(version: str, target: str) -> JobFailed:
    """Return the error of a run whose version already exists."""
    return JobFailed(
        f"there is a version {version} of {target} already, by a run of the same second; it stays as it is, run again"
    )
