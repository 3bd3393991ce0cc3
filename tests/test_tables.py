"""What the log of a Delta table says, whoever wrote it."""

from __future__ import annotations

import pytest

from python_jobs.shared.delta.commits import commit_note


@pytest.mark.parametrize(
    ("user_metadata", "note"),
    [
        ('{"full_loader": {"version": "20240301"}}', {"full_loader": {"version": "20240301"}}),
        (None, {}),
        ("", {}),
        ("restored by hand", {}),
        ('["a", "list"]', {}),
        ("42", {}),
    ],
)
def test_another_programs_text_is_no_note(user_metadata, note):
    assert commit_note(user_metadata) == note
