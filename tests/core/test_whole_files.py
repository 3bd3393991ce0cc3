"""Files that readers see whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from python_jobs.shared.core.whole_files import write_whole


def test_a_file_has_its_lines_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.jsonl", ["ü", "b"])
    assert (tmp_path / "a.jsonl").read_bytes() == "ü\nb\n".encode()
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_file_has_its_name_only_when_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append([file.name for file in tmp_path.iterdir()]))
    write_whole(tmp_path / "a.jsonl", ["a"])
    assert seen == [[".a.jsonl.tmp"], ["a.jsonl"]]  # the file's content, then the folder's names


def test_nothing_is_left_of_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_whole(tmp_path / "a.jsonl", ["a"])
    assert list(tmp_path.iterdir()) == []
