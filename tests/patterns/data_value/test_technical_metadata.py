"""The keys and values of a load's metadata."""

from __future__ import annotations

from typing import Any

import pytest

from python_jobs.data_value.technical_metadata import METADATA_KEYS, require_metadata
from python_jobs.shared.core.failures import WrongUse


@pytest.mark.parametrize("version", ["v", "1234567890abcde"])
def test_a_version_of_1_to_15_characters_and_the_permitted_keys_are_taken(version: str) -> None:
    require_metadata(version, dict.fromkeys(METADATA_KEYS, "x"))


@pytest.mark.parametrize("version", [None, "", "  ", "1234567890abcdef"])
def test_a_version_that_is_missing_or_too_long_is_refused(version: Any) -> None:
    with pytest.raises(WrongUse) as refusal:
        require_metadata(version, {})
    assert str(refusal.value) == f"job_version must be a text of 1 to 15 characters, got {version!r}"


def test_a_business_attribute_and_an_empty_value_are_refused() -> None:
    with pytest.raises(WrongUse) as refusal:
        require_metadata("v1", {"run_id": "7", "invoice_amount": "12"})
    assert str(refusal.value) == (
        "metadata has no key 'invoice_amount'; allowed: commit_id, environment, job_name, run_id, triggered_by. "
        "A business attribute belongs in the record or in an envelope around it (Wrapper)"
    )
    with pytest.raises(WrongUse) as refusal:
        require_metadata("v1", {"run_id": ""})
    assert str(refusal.value) == "metadata.run_id must be a text that isn't empty, got ''"
