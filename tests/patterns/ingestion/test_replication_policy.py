"""The replication policy: its datasets, the sentence of each wrong document, and what is never copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from python_jobs.ingestion.replication_policy import Dataset, load_policy, refuse_sensitive
from python_jobs.shared.core.failures import DataRefused, WrongUse


def write(folder: Path, document: str) -> str:
    file = folder / "policy.yml"
    file.write_text(document, encoding="utf-8")
    return str(file)


def test_a_policy_lists_datasets_with_their_targets_and_tags(tmp_path: Path) -> None:
    policy = write(
        tmp_path,
        "datasets: [{name: a, source: /a, targets: [/b, /c], tags: [reference]}, {name: d, source: /d, targets: [/e]}]",
    )
    assert load_policy(policy) == [
        Dataset("a", "/a", ("/b", "/c"), ("reference",)), Dataset("d", "/d", ("/e",), ()),
    ]  # fmt: skip


@pytest.mark.parametrize("document", ["datasets: []", "datasets: {}", "datasets: a", "[]", "other: 1", ""])
def test_a_document_without_a_list_of_datasets_is_refused(tmp_path: Path, document: str) -> None:
    policy = write(tmp_path, document)
    with pytest.raises(WrongUse) as refused:
        load_policy(policy)
    assert str(refused.value) == f"the replication policy '{policy}' must hold a list 'datasets'"


def test_a_file_that_is_absent_or_no_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=r"^the replication policy '/absent' doesn't exist$"):
        load_policy("/absent")
    with pytest.raises(WrongUse, match=r"^the replication policy '.*policy.yml' is no YAML$"):
        load_policy(write(tmp_path, "["))


@pytest.mark.parametrize(
    "dataset",
    [
        "a",
        "[name, source, targets]",
        "{source: /a, targets: [/b]}",
        "{name: a, targets: [/b]}",
        "{name: a, source: /a}",
        "{name: a, source: /a, targets: [/b], pii: true}",
        "{name: '', source: /a, targets: [/b]}",
        "{name: 1, source: /a, targets: [/b]}",
        "{name: a, source: '', targets: [/b]}",
        "{name: a, source: 1, targets: [/b]}",
        "{name: a, source: /a, targets: /b}",
        "{name: a, source: /a, targets: [1]}",
        "{name: a, source: /a, targets: [/b, 1]}",
        "{name: a, source: /a, targets: []}",
        "{name: a, source: /a, targets: [/b], tags: pii}",
        "{name: a, source: /a, targets: [/b], tags: [1]}",
    ],
)
def test_a_dataset_of_another_form_is_refused(tmp_path: Path, dataset: str) -> None:
    policy = write(tmp_path, f"datasets: [{dataset}]")
    with pytest.raises(WrongUse) as refused:
        load_policy(policy)
    sentence, _, got = str(refused.value).partition("; got ")
    assert sentence == (
        f"each dataset of the replication policy '{policy}' needs name, source, a list of targets and, if wanted, "
        "a list of tags"
    )
    assert got


def test_a_name_is_unique(tmp_path: Path) -> None:
    entries = ", ".join(f"{{name: {name}, source: /a, targets: [/b]}}" for name in "babcc")
    policy = write(tmp_path, f"datasets: [{entries}]")
    with pytest.raises(WrongUse) as refused:
        load_policy(policy)
    assert str(refused.value) == f"the replication policy '{policy}' names these datasets twice: b, c"


@pytest.mark.parametrize("tag", ["pii", "PII", "Pii"])
def test_personal_data_is_never_copied(tag: str) -> None:
    with pytest.raises(DataRefused) as refused:
        refuse_sensitive(Dataset("users", "/a", ("/b",), ("reference", tag)))
    assert str(refused.value) == (
        "dataset users is tagged pii: replicate it with the Transformation Replicator "
        "(python_jobs/ingestion/transformation_replicator.py), which removes what must not leave"
    )
    refuse_sensitive(Dataset("devices", "/a", ("/b",), ("reference", "no-pii")))
