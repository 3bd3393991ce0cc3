"""The replication policy: one reviewed YAML document with the datasets that an environment pushes to others.

    datasets:
      - name: devices
        source: s3a://production/devices
        targets: [s3a://staging/devices, s3a://development/devices]
        tags: [reference]

The owner of the source runs the replication with read rights on the source and write rights on the targets. The targets
need no access to the source. The document may list a dataset with the tag ``pii``, but it is never copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from python_jobs.shared.core.failures import DataRefused, WrongUse
from python_jobs.shared.core.yaml_files import read_yaml

SENSITIVE_TAG = "pii"
"""Tag (in any case) of data that must not leave its environment unchanged."""


@dataclass(frozen=True)
class Dataset:
    """One dataset of the policy."""

    name: str
    """Name of the dataset in ``--dataset`` and in the report."""
    source: str
    """Folder of files, as path or URI."""
    targets: tuple[str, ...]
    """Folders that become equal to the source."""
    tags: tuple[str, ...] = ()
    """Tags that classify the content."""


def load_policy(path: str) -> list[Dataset]:
    """Return the datasets of a policy file.

    Raises:
        WrongUse: the file is missing or doesn't have the form of the module's example.
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
    """Refuse a dataset that must not be copied unchanged.

    Raises:
        DataRefused: the dataset is tagged as personal data.
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
