"""The replication policy: which datasets an environment pushes to which others, as one reviewed YAML document.

    datasets:
      - name: devices
        source: s3a://production/devices
        targets: [s3a://staging/devices, s3a://development/devices]
        tags: [reference]

The owner of the source runs it: it holds read rights there and write rights on the targets, which need no way
back. A dataset tagged ``pii`` may stand in the document, so that its owner is on record, and is never copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from python_jobs.shared.core.failures import DataRefused, WrongUse
from python_jobs.shared.core.yaml_files import read_yaml

SENSITIVE_TAG = "pii"
"""The tag, in any case, of what must not leave its environment as it is."""


@dataclass(frozen=True)
class Dataset:
    """One dataset of the policy."""

    name: str
    """What ``--dataset`` and the report call it."""
    source: str
    """Folder of files, path or URI."""
    targets: tuple[str, ...]
    """Folders that become equal to the source."""
    tags: tuple[str, ...] = ()
    """Classification of the content."""


def load_policy(path: str) -> list[Dataset]:
    """Read a policy.

    Raises:
        WrongUse: the file is missing or says something else than the module's example.
    """
    document = read_yaml(path, "replication policy")
    entries = document.get("datasets") if isinstance(document, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise WrongUse(f"the replication policy '{path}' must hold a list 'datasets'")
    datasets = [_dataset(path, entry) for entry in entries]
    names = [dataset.name for dataset in datasets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise WrongUse(f"the replication policy '{path}' names these datasets twice: {', '.join(twice)}")
    return datasets


def refuse_sensitive(dataset: Dataset) -> None:
    """Stop a dataset that must not be copied as it is.

    Raises:
        DataRefused: it is tagged as personal data.
    """
    if SENSITIVE_TAG in (tag.casefold() for tag in dataset.tags):
        raise DataRefused(
            f"dataset {dataset.name} is tagged {SENSITIVE_TAG}: replicate it with the Transformation Replicator "
            "(python_jobs/ingestion/transformation_replicator.py), which removes what must not leave"
        )


def _dataset(path: str, entry: Any) -> Dataset:
    needed, allowed = {"name", "source", "targets"}, {"name", "source", "targets", "tags"}
    if (
        not isinstance(entry, Mapping)
        or not needed <= entry.keys() <= allowed
        or not all(isinstance(entry[key], str) and entry[key] for key in ("name", "source"))
        or not _is_list_of_texts(entry["targets"])
        or not entry["targets"]
        or not _is_list_of_texts(entry.get("tags", []))
    ):
        raise WrongUse(
            f"each dataset of the replication policy '{path}' needs name, source, a list of targets and, "
            f"if wanted, a list of tags; got {entry!r}"
        )
    return Dataset(entry["name"], entry["source"], tuple(entry["targets"]), tuple(entry.get("tags", [])))


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
